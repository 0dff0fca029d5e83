//! What every entry point begins with: the count, the faults, the current context, the sticky error.
//!
//! Entry points come through [`run`], all of them, so that a fault can hit any.

use cudarc::driver::sys::CUresult;

use crate::execute;
use crate::report::Kind;
use crate::state::{self, Answer, Guard, State};

/// What an entry point needs before it may do anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Nothing, not even `cuInit`.
    Nothing,
    /// `cuInit`.
    Driver,
    /// A current context without a sticky error.
    Context,
    /// A current context. It gives something back and does so even when it must answer an error.
    Release,
    /// `cuInit`. It gives something back, likewise.
    DriverRelease,
}

/// Runs the body of an entry point; `body` gets the lock and the device of the current context (0 where none is needed).
pub(crate) fn run(name: &'static str, need: Need, body: impl FnOnce(Guard, usize) -> Answer) -> CUresult {
    let mut state = state::lock();
    let admitted = state.admit(name, need);
    match admitted {
        Err(code) => code,
        Ok(Admitted { device, verdict }) => {
            let answer = body(state, device).err();
            verdict.or(answer).unwrap_or(CUresult::CUDA_SUCCESS)
        }
    }
}

struct Admitted {
    device: usize,
    /// What to answer after the work, whatever it came to.
    verdict: Option<CUresult>,
}

impl State {
    fn admit(&mut self, name: &'static str, need: Need) -> Answer<Admitted> {
        *self.calls.entry(name).or_insert(0) += 1;
        let fault = self.faults.call(name);
        let releases = matches!(need, Need::Release | Need::DriverRelease);
        if let Some(code) = fault.filter(|_| !releases) {
            return Err(code);
        }
        if need == Need::Nothing {
            return Ok(Admitted { device: 0, verdict: None });
        }
        if execute::in_callback() {
            let text = format!("{name} called from a function of cuLaunchHostFunc");
            return self.refuse(Kind::Callback, &text, CUresult::CUDA_ERROR_NOT_PERMITTED);
        }
        if !self.initialised {
            return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        if matches!(need, Need::Driver | Need::DriverRelease) {
            return Ok(Admitted { device: 0, verdict: fault });
        }
        let device = self.current_context(name)?;
        match self.health(device) {
            Err(sticky) if !releases => Err(sticky),
            health => Ok(Admitted { device, verdict: fault.or(health.err()) }),
        }
    }

    /// The device of the current context, which must be alive.
    fn current_context(&mut self, name: &str) -> Answer<usize> {
        let Some(device) = self.current() else {
            let text = format!("{name} called on a thread without a current context");
            return self.refuse(Kind::WrongContext, &text, CUresult::CUDA_ERROR_INVALID_CONTEXT);
        };
        if self.devices.get(device).is_none_or(|device| device.references == 0) {
            let text = format!("{name} called while the current context, of device {device}, is destroyed");
            return self.refuse(Kind::WrongContext, &text, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::faults::Fault;

    fn admitted(state: &mut State, need: Need) -> Result<Option<CUresult>, CUresult> {
        state.admit("cuTest", need).map(|admitted| admitted.verdict)
    }

    #[test]
    fn each_need_is_asked_for_in_its_order() {
        let mut state = State::for_tests(Config::default());
        state.epoch = 79;
        state.initialised = false;
        assert_eq!(admitted(&mut state, Need::Nothing), Ok(None));
        assert_eq!(admitted(&mut state, Need::Driver), Err(CUresult::CUDA_ERROR_NOT_INITIALIZED));
        state.initialised = true;
        assert_eq!(admitted(&mut state, Need::Driver), Ok(None));
        assert_eq!(admitted(&mut state, Need::Context), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
        state.set_current(Some(0));
        assert_eq!(admitted(&mut state, Need::Context), Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
        state.devices[0].references = 1;
        assert_eq!(admitted(&mut state, Need::Context), Ok(None));
        assert_eq!(state.reports.len(), 2);
        assert_eq!(state.calls["cuTest"], 6);
    }

    #[test]
    fn what_gives_back_is_admitted_with_its_error() {
        let mut state = State::for_tests(Config::default());
        state.epoch = 80;
        state.set_current(Some(0));
        state.devices[0].references = 1;
        let unknown = CUresult::CUDA_ERROR_UNKNOWN;
        for need in [Need::Release, Need::DriverRelease] {
            state.faults.inject(Fault::Any { nth: 1, code: 999 });
            assert_eq!(admitted(&mut state, need), Ok(Some(unknown)));
        }
        state.faults.inject(Fault::Any { nth: 1, code: 999 });
        assert_eq!(admitted(&mut state, Need::Context), Err(unknown));
        state.devices[0].sticky = Some(CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(admitted(&mut state, Need::Context), Err(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert_eq!(admitted(&mut state, Need::Release), Ok(Some(CUresult::CUDA_ERROR_LAUNCH_FAILED)));
        assert_eq!(admitted(&mut state, Need::Driver), Ok(None), "no context, no sticky error");
    }
}
