//! Failures made to order: the nth call, the nth operation, a flipped bit, a limit on pinned memory.
//!
//! Counting starts when a fault is injected. This file says when a fault is due; it never makes anything fail itself.

use std::fmt;

use cudarc::driver::sys::CUresult;

use crate::error;

/// A failure to come. `nth` counts from 1 and from the injection on; `code` is the driver's number (2, 700, ...).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The `nth` call of one entry point fails. A call that releases something releases it all the same.
    Call {
        /// Name of the entry point, with or without its `_v2`.
        name: String,
        /// Which call.
        nth: u64,
        /// What it answers.
        code: u32,
    },
    /// The `nth` driver call fails, whatever its name.
    Any {
        /// Which call.
        nth: u64,
        /// What it answers.
        code: u32,
    },
    /// The `nth` queued copy, fill or kernel does not happen, and its device answers `code` from then on.
    Async {
        /// Which operation.
        nth: u64,
        /// The sticky error.
        code: u32,
    },
    /// One bit of what the `nth` copy from host to device wrote is flipped.
    Flip {
        /// Which copy.
        nth: u64,
    },
    /// `cuMemHostRegister` answers 2 when more than this would be pinned.
    PinLimit {
        /// The limit.
        bytes: u64,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Call { name, nth, code } => write!(f, "{name}:{nth}={code}"),
            Fault::Any { nth, code } => write!(f, "any:{nth}={code}"),
            Fault::Async { nth, code } => write!(f, "async:{nth}={code}"),
            Fault::Flip { nth } => write!(f, "flip:{nth}"),
            Fault::PinLimit { bytes } => write!(f, "pin_limit:{bytes}"),
        }
    }
}

impl Fault {
    /// Reads one fault as [`Fault`]'s `Display` writes it.
    pub(crate) fn parse(text: &str) -> Result<Fault, String> {
        let bad = || format!("fault {text:?}: NAME:N=CODE, any:N=CODE, async:N=CODE, flip:N or pin_limit:BYTES");
        let (left, code) = match text.trim().split_once('=') {
            Some((left, code)) => (left, Some(code)),
            None => (text.trim(), None),
        };
        let (name, nth) = left.split_once(':').ok_or_else(bad)?;
        let nth: u64 = nth.parse().map_err(|_| bad())?;
        let code = || code.and_then(|code| code.parse::<u32>().ok()).ok_or_else(bad);
        let fault = match name {
            "flip" => Fault::Flip { nth },
            "pin_limit" => Fault::PinLimit { bytes: nth },
            "any" => Fault::Any { nth, code: code()? },
            "async" => Fault::Async { nth, code: code()? },
            _ => Fault::Call { name: name.to_owned(), nth, code: code()? },
        };
        fault.check().map(|()| fault)
    }

    /// A code that cudarc does not know must not reach it.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (Fault::Call { code, .. } | Fault::Any { code, .. } | Fault::Async { code, .. }) = self else {
            return Ok(());
        };
        error::from_number(*code).map(|_| ()).ok_or_else(|| format!("{code} is no error code of the driver"))
    }
}

/// The faults that are still to come.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    waiting: Vec<Fault>,
}

impl Faults {
    pub(crate) fn inject(&mut self, fault: Fault) {
        self.waiting.push(fault);
    }

    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Counts a call; what it must answer instead of doing its work.
    pub(crate) fn call(&mut self, called: &str) -> Option<CUresult> {
        self.due(|fault| match fault {
            Fault::Call { name, nth, code } if same_entry(name, called) => Some((nth, *code)),
            Fault::Any { nth, code } => Some((nth, *code)),
            _ => None,
        })
    }

    /// Counts a queued operation.
    pub(crate) fn operation(&mut self) -> Option<CUresult> {
        self.due(|fault| match fault {
            Fault::Async { nth, code } => Some((nth, *code)),
            _ => None,
        })
    }

    /// Counts a copy to the device; whether to flip a bit of it.
    pub(crate) fn upload(&mut self) -> bool {
        let due = self.due(|fault| match fault {
            Fault::Flip { nth } => Some((nth, 0)),
            _ => None,
        });
        due.is_some()
    }

    /// The lowest limit on pinned memory.
    pub(crate) fn pin_limit(&self) -> Option<u64> {
        let limits = self.waiting.iter().filter_map(|fault| match fault {
            Fault::PinLimit { bytes } => Some(*bytes),
            _ => None,
        });
        limits.min()
    }

    /// Counts one event down in every fault that `pick` selects, and takes out the first that becomes due.
    fn due(&mut self, pick: impl Fn(&mut Fault) -> Option<(&mut u64, u32)>) -> Option<CUresult> {
        let mut due = None;
        self.waiting.retain_mut(|fault| {
            let Some((nth, code)) = pick(fault) else { return true };
            *nth = nth.saturating_sub(1);
            let now = *nth == 0;
            if now && due.is_none() {
                due = error::from_number(code);
            }
            !now
        });
        due
    }
}

fn same_entry(named: &str, called: &str) -> bool {
    named == called || called.strip_suffix("_v2") == Some(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let faults = ["cuMemAlloc_v2:3=2", "any:7=999", "async:1=700", "flip:2", "pin_limit:4096"];
        for text in faults {
            assert_eq!(Fault::parse(text).unwrap().to_string(), text);
        }
        for text in ["flip", "cuInit:x=1", "any:1", "any:1=123456"] {
            assert!(Fault::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn each_is_due_once_at_its_count() {
        let mut faults = Faults::default();
        faults.inject(Fault::Call { name: "cuMemAlloc".to_owned(), nth: 2, code: 2 });
        faults.inject(Fault::Any { nth: 4, code: 999 });
        let answers: Vec<_> =
            ["cuMemAlloc_v2", "cuInit", "cuMemAlloc_v2", "cuInit", "cuInit"].map(|name| faults.call(name)).into();
        let expected = [None, None, Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY), Some(CUresult::CUDA_ERROR_UNKNOWN), None];
        assert_eq!(answers, expected);
        faults.inject(Fault::Flip { nth: 1 });
        assert!(faults.upload());
        assert!(!faults.upload());
    }
}
