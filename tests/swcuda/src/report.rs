//! What the double found wrong. One line each; the first word says what kind it is.
//!
//! A report never changes what a call answers: the place that finds the mistake decides both.

/// The kinds of report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Race,
    SourceChanged,
    UninitialisedRead,
    FreeInFlight,
    DoubleFree,
    BadFree,
    UseAfterFree,
    OutOfBounds,
    WildPointer,
    WrongContext,
    BadHandle,
    Leak,
    Pageable,
    Kernel,
    Ptx,
    Callback,
    Unsupported,
    Config,
    Internal,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Race => "RACE",
            Kind::SourceChanged => "SOURCE_CHANGED",
            Kind::UninitialisedRead => "UNINITIALISED_READ",
            Kind::FreeInFlight => "FREE_IN_FLIGHT",
            Kind::DoubleFree => "DOUBLE_FREE",
            Kind::BadFree => "BAD_FREE",
            Kind::UseAfterFree => "USE_AFTER_FREE",
            Kind::OutOfBounds => "OUT_OF_BOUNDS",
            Kind::WildPointer => "WILD_POINTER",
            Kind::WrongContext => "WRONG_CONTEXT",
            Kind::BadHandle => "BAD_HANDLE",
            Kind::Leak => "LEAK",
            Kind::Pageable => "PAGEABLE",
            Kind::Kernel => "KERNEL",
            Kind::Ptx => "PTX",
            Kind::Callback => "CALLBACK",
            Kind::Unsupported => "UNSUPPORTED",
            Kind::Config => "CONFIG",
            Kind::Internal => "INTERNAL",
        }
    }

    /// The line of a report.
    pub(crate) fn line(self, text: &str) -> String {
        format!("{}: {}", self.name(), text.replace('\n', " | "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line() {
        assert_eq!(Kind::Race.line("a\nb"), "RACE: a | b");
    }
}
