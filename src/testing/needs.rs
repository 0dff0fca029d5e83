//! What a test needs of the machine that it runs on. A test without it says so in one line, and fails where the environment
//! variable `VRAMP_REQUIRE` names the feature (`VRAMP_REQUIRE=direct,uring`). It never changes anything.

use std::fmt::Display;
use std::io::Write;

/// Something that not every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// `direct`: reads past the page cache from the folder for temporary files.
    Direct,
    /// `uring`: io_uring.
    Uring,
    /// `tmpfs`: a file system in memory at `/dev/shm`.
    Tmpfs,
    /// `page-cache`: a page cache that drops clean pages of a file on request and can be counted.
    PageCache,
    /// `seccomp`: system calls can be made to fail.
    Seccomp,
    /// `double`: the software driver; not with `REQUIRE_CUDA=1`.
    Double,
}

impl Feature {
    const ALL: [Feature; 6] =
        [Feature::Direct, Feature::Uring, Feature::Tmpfs, Feature::PageCache, Feature::Seccomp, Feature::Double];

    fn name(self) -> &'static str {
        match self {
            Feature::Direct => "direct",
            Feature::Uring => "uring",
            Feature::Tmpfs => "tmpfs",
            Feature::PageCache => "page-cache",
            Feature::Seccomp => "seccomp",
            Feature::Double => "double",
        }
    }
}

/// What was found of a feature, or `None` and a line on stderr, where the test harness does not capture it.
///
/// # Panics
/// When the feature is missing and `VRAMP_REQUIRE` names it, or when that names no feature.
#[track_caller]
pub fn required<T>(feature: Feature, found: Result<T, impl Display>) -> Option<T> {
    let wanted = std::env::var("VRAMP_REQUIRE").unwrap_or_default();
    match judge(feature, found, &wanted) {
        Ok(found) => Some(found),
        Err(Missing::Skip(line)) => {
            let test = std::thread::current().name().unwrap_or("a test").to_owned();
            let _ = writeln!(std::io::stderr(), "skipped: {test}: {line}");
            None
        }
        Err(Missing::Fail(text)) => panic!("{text}"),
    }
}

/// The same for a condition; `why` says what follows from its being false.
#[track_caller]
pub fn required_if(feature: Feature, holds: bool, why: &str) -> bool {
    required(feature, if holds { Ok(()) } else { Err(why) }).is_some()
}

/// Has the kernel answer these system calls of the calling thread, and of threads that it starts, with the error `code`; whether
/// it can. For ever: call it on a thread of its own.
#[cfg(test)]
#[track_caller]
pub(crate) fn refused(calls: &[libc::c_long], code: libc::c_int) -> bool {
    required_if(Feature::Seccomp, crate::os::refuse(calls, code), "the kernel takes no filter")
}

#[derive(Debug, PartialEq, Eq)]
enum Missing {
    Skip(String),
    Fail(String),
}

fn judge<T>(feature: Feature, found: Result<T, impl Display>, wanted: &str) -> Result<T, Missing> {
    let wanted: Vec<&str> = wanted.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if let Some(unknown) = wanted.iter().find(|name| Feature::ALL.iter().all(|it| it.name() != **name)) {
        let known = Feature::ALL.map(Feature::name).join(", ");
        return Err(Missing::Fail(format!("VRAMP_REQUIRE names {unknown}, which is none of {known}")));
    }
    found.map_err(|why| {
        let line = format!("no {} on this machine: {why}", feature.name());
        if wanted.contains(&feature.name()) {
            Missing::Fail(format!("{line}; VRAMP_REQUIRE demands it"))
        } else {
            Missing::Skip(line)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_skipped_unless_it_is_demanded() {
        let missing = |wanted| judge::<()>(Feature::Uring, Err("ENOSYS"), wanted).unwrap_err();
        assert_eq!(missing("direct"), Missing::Skip("no uring on this machine: ENOSYS".to_owned()));
        assert!(matches!(missing("direct, uring"), Missing::Fail(text) if text.contains("ENOSYS")));
        assert_eq!(judge(Feature::Uring, Ok::<_, &str>(3), "uring"), Ok(3));
    }

    #[test]
    fn a_name_that_is_no_feature_is_an_error() {
        let outcome = judge(Feature::Direct, Ok::<_, &str>(()), "direct,io_uring");
        assert!(matches!(outcome, Err(Missing::Fail(text)) if text.contains("io_uring")));
    }
}
