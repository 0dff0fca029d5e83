//! Which parts of a file are in the page cache: plain data, and how the kernel is asked for it.
//!
//! [`Residency`] decides the route of each transfer: what is cached is copied from the cache, the rest is read past it.
//! The answer is one moment's and may be stale at once; a stale answer costs time, never right bytes. Nothing here reads
//! more of a file than a few sample bytes.

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use super::paths::reopen;
use crate::fallback::Fallbacks;
use crate::os::{self, Advice, Cached};

/// How finely a partly cached file is looked at, in bytes: one big read.
const GRANULE_BYTES: u64 = 4 << 20;

/// Places that are looked at in a file whose cache the kernel does not tell us about.
const SAMPLES: u64 = 64;

/// Below this many bytes a file is counted exactly: that takes well under a millisecond.
const SMALL_FILE_BYTES: u64 = 64 << 20;

/// Pages of each granule that a glance looks at.
const GLANCES: u64 = 4;

/// Which parts of a file are in the page cache, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residency {
    len: u64,
    parts: Parts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Parts {
    None,
    All,
    Granules { bytes: u64, resident: Vec<u64> },
}

impl Residency {
    /// No byte of a file of `len` bytes is cached.
    pub fn none(len: u64) -> Residency {
        Residency { len, parts: Parts::None }
    }

    /// Every byte of a file of `len` bytes is cached.
    pub fn all(len: u64) -> Residency {
        Residency { len, parts: Parts::All }
    }

    /// A file of `len` bytes looked at in granules of `granule_bytes` bytes (the last one may be shorter): how many bytes
    /// of each are cached. Missing granules count as not cached, and no granule holds more than its length.
    pub fn from_granules(len: u64, granule_bytes: u64, resident: Vec<u64>) -> Residency {
        let bytes = granule_bytes.max(1);
        Residency { len, parts: Parts::Granules { bytes, resident } }
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the file that are cached.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_in(0..self.len)
    }

    /// Bytes of `range` that are cached. Within a partly cached granule they count as spread evenly.
    pub fn resident_in(&self, range: Range<u64>) -> u64 {
        let range = range.start.min(self.len)..range.end.min(self.len);
        if range.is_empty() {
            return 0;
        }
        match &self.parts {
            Parts::None => 0,
            Parts::All => range.end - range.start,
            Parts::Granules { bytes, resident } => {
                let touched = range.start / bytes..=(range.end - 1) / bytes;
                touched.map(|index| self.resident_in_granule(index, *bytes, resident, &range)).sum()
            }
        }
    }

    /// The cached part of `range`, from 0.0 to 1.0; 1.0 for an empty range.
    pub fn share(&self, range: Range<u64>) -> f64 {
        let len = range.end.min(self.len).saturating_sub(range.start.min(self.len));
        if len == 0 { 1.0 } else { self.resident_in(range) as f64 / len as f64 }
    }

    fn resident_in_granule(&self, index: u64, bytes: u64, resident: &[u64], range: &Range<u64>) -> u64 {
        let granule = index * bytes..index.saturating_add(1).saturating_mul(bytes).min(self.len);
        let granule_len = granule.end - granule.start;
        let overlap = range.end.min(granule.end) - range.start.max(granule.start);
        let cached = usize::try_from(index).ok().and_then(|index| resident.get(index)).copied().unwrap_or(0);
        let scaled = u128::from(cached.min(granule_len)) * u128::from(overlap) / u128::from(granule_len);
        u64::try_from(scaled).unwrap_or(overlap)
    }
}

/// Asks the kernel which parts of `file` are cached: by `cachestat`, else by `mincore`, else by samples. A kernel that
/// answers nothing means "none", noted once.
pub(super) fn ask(file: &File, len: u64, fallbacks: &Fallbacks) -> Residency {
    let answer = match os::cached_pages(file.as_fd(), 0, 0) {
        Ok(Cached::Pages(pages)) => by_cachestat(file, len, pages),
        Ok(Cached::Unsupported(error)) => {
            fallbacks.note("cachestat", format!("{error}; asked by mincore or by samples instead"));
            if os::may_see_cache(file) { by_mincore(file, len) } else { by_samples(file, len) }
        }
        Ok(Cached::NotPermitted(error)) => {
            // mincore has the same rule, and answers "all" to whom it does not want to tell.
            fallbacks
                .note("cachestat", format!("{error} (the file belongs to another user); looked at samples instead"));
            by_samples(file, len)
        }
        Err(error) => Err(error),
    };
    answer.unwrap_or_else(|error| {
        fallbacks.note("page cache residency", format!("{error}; files count as not cached"));
        Residency::none(len)
    })
}

/// The same from a glance: exact where little is cached, else a few pages of each granule speak for all of it.
///
/// Counting every cached page of a large file takes the kernel up to a tenth of the time that loading it takes; for routes
/// a glance is enough.
pub(super) fn glance(file: &File, len: u64, fallbacks: &Fallbacks) -> Residency {
    let is_cached = |offset: u64| matches!(os::cached_pages(file.as_fd(), offset, 1), Ok(Cached::Pages(1..)));
    let anywhere = (0..SAMPLES).any(|index| is_cached(len / SAMPLES * index));
    if len < SMALL_FILE_BYTES || !anywhere {
        return ask(file, len, fallbacks);
    }
    let look = |start: u64| {
        let granule = GRANULE_BYTES.min(len - start);
        let spots = (0..GLANCES).filter(|spot| is_cached(start + granule / GLANCES * spot + granule / (2 * GLANCES)));
        granule * spots.count() as u64 / GLANCES
    };
    let resident: Vec<u64> = granule_starts(len).map(look).collect();
    match resident.iter().sum::<u64>() {
        total if total >= len => Residency::all(len),
        _ => Residency::from_granules(len, GRANULE_BYTES, resident),
    }
}

fn by_cachestat(file: &File, len: u64, pages: u64) -> io::Result<Residency> {
    let page = os::page_bytes() as u64;
    if pages == 0 {
        return Ok(Residency::none(len));
    }
    if pages >= len.div_ceil(page) {
        return Ok(Residency::all(len));
    }
    let count = |start: u64| match os::cached_pages(file.as_fd(), start, GRANULE_BYTES)? {
        Cached::Pages(pages) => Ok(pages * page),
        Cached::Unsupported(error) | Cached::NotPermitted(error) => Err(error),
    };
    let resident = granule_starts(len).map(count).collect::<io::Result<_>>()?;
    Ok(Residency::from_granules(len, GRANULE_BYTES, resident))
}

fn by_mincore(file: &File, len: u64) -> io::Result<Residency> {
    let page = os::page_bytes() as u64;
    let count = |start: u64| {
        let bytes = usize::try_from(GRANULE_BYTES.min(len - start)).unwrap_or(usize::MAX);
        let pages = os::resident_pages(file, start, bytes)?;
        Ok(pages.into_iter().filter(|&cached| cached).count() as u64 * page)
    };
    let resident = granule_starts(len).map(count).collect::<io::Result<_>>()?;
    Ok(Residency::from_granules(len, GRANULE_BYTES, resident))
}

fn by_samples(file: &File, len: u64) -> io::Result<Residency> {
    // A handle of its own, so that "do not read ahead" holds for the samples and not for the load.
    let file = reopen(file, 0)?;
    os::advise(file.as_fd(), 0, 0, Advice::Random)?;
    let granule = len.div_ceil(SAMPLES).max(1).next_multiple_of(GRANULE_BYTES);
    let sample = |index: u64| {
        let (start, end) = (index * granule, ((index + 1) * granule).min(len));
        // Looking at a page may bring it in: always the same places would look cached from the second time on.
        let cached = os::is_cached_at(file.as_fd(), start + random() % (end - start));
        if cached == Some(true) { end - start } else { 0 }
    };
    Ok(Residency::from_granules(len, granule, (0..len.div_ceil(granule)).map(sample).collect()))
}

/// A number that nobody needs to repeat: the standard library seeds each of its hashers differently.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn granule_starts(len: u64) -> impl Iterator<Item = u64> {
    (0..len.div_ceil(GRANULE_BYTES)).map(|index| index * GRANULE_BYTES)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::testing::{Feature, required_if};

    #[test]
    fn none_and_all_are_what_they_say() {
        let (none, all) = (Residency::none(100), Residency::all(100));
        assert_eq!((none.len(), none.resident_bytes(), none.share(0..100)), (100, 0, 0.0));
        assert_eq!((all.resident_bytes(), all.resident_in(90..200), all.share(5..6)), (100, 10, 1.0));
        assert_eq!(all.resident_in(200..300), 0);
        assert_eq!(none.share(7..7), 1.0, "nothing is missing from nothing");
        assert_eq!(Residency::all(0).resident_bytes(), 0);
    }

    #[test]
    fn granules_count_by_their_part() {
        let parts = Residency::from_granules(25, 10, vec![10, 5, 5]);
        assert_eq!(parts.resident_bytes(), 20);
        assert_eq!(parts.resident_in(0..10), 10);
        assert_eq!(parts.resident_in(10..14), 2);
        assert_eq!(parts.resident_in(20..25), 5);
        assert_eq!(parts.resident_in(5..15), 7);
        let sum: u64 = (0..25).map(|at| parts.resident_in(at..at + 1)).sum();
        assert!(sum <= 20, "{sum}");
    }

    #[test]
    fn granules_that_lie_are_cut_to_the_file() {
        let parts = Residency::from_granules(15, 10, vec![u64::MAX, 4096, 7]);
        assert_eq!(parts.resident_bytes(), 15);
        assert_eq!(Residency::from_granules(30, 10, vec![10]).resident_bytes(), 10);
        assert_eq!(Residency::from_granules(3, 0, vec![1, 0, 1]).resident_bytes(), 2);
        assert_eq!(Residency::from_granules(u64::MAX, u64::MAX - 1, vec![1]).resident_in(0..u64::MAX), 1);
    }

    #[test]
    fn the_kernel_tells_what_was_read() {
        const LEN: u64 = 12 << 20;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; usize::try_from(LEN).unwrap()]).unwrap();
        file.sync_all().unwrap();
        let notes = Fallbacks::default();
        let warm = ask(&file, LEN, &notes);
        os::advise(file.as_fd(), 0, 0, Advice::DontNeed).unwrap();
        let cold = ask(&file, LEN, &notes);
        let counted = notes.list().is_empty() && cold.resident_bytes() == 0;
        if !required_if(Feature::PageCache, counted, "no cachestat, or the temporary folder lies in memory") {
            return;
        }
        assert_eq!(warm.resident_bytes(), LEN);
        assert_eq!(cold, Residency::none(LEN));
        os::advise(file.as_fd(), 0, 0, Advice::Random).unwrap();
        file.read_exact_at(&mut vec![0; 1 << 20], 5 << 20).unwrap();
        let part = ask(&file, LEN, &notes);
        assert!(part.resident_in(4 << 20..8 << 20) >= 1 << 20, "{part:?}");
        assert_eq!(part.resident_in(8 << 20..LEN), 0, "{part:?}");
        let same = by_mincore(&file, LEN).unwrap();
        assert_eq!(same.resident_bytes(), part.resident_bytes());
    }

    #[test]
    fn a_glance_agrees_with_counting() {
        const LEN: u64 = 80 << 20;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; usize::try_from(LEN).unwrap()]).unwrap();
        file.sync_all().unwrap();
        let notes = Fallbacks::default();
        let agree = |what: &str| {
            let (counted, glanced) = (ask(&file, LEN, &notes), glance(&file, LEN, &notes));
            let apart = (0..LEN >> 22).filter(|index| {
                let granule = index << 22..(index + 1) << 22;
                (counted.share(granule.clone()) - glanced.share(granule)).abs() > 0.5
            });
            assert!(apart.count() <= 1, "{what}: {counted:?} {glanced:?}");
            counted.resident_bytes()
        };
        agree("just written");
        os::advise(file.as_fd(), 0, 0, Advice::DontNeed).unwrap();
        let dropped = agree("dropped") == 0;
        if required_if(Feature::PageCache, dropped, "the temporary folder lies in memory") {
            file.read_exact_at(&mut vec![0; 40 << 20], 8 << 20).unwrap();
            agree("half read");
        }
    }

    /// Samples once brought in the pages that they looked at, so that a second look found the whole file cached.
    #[test]
    fn looking_twice_does_not_make_a_file_look_cached() {
        const LEN: u64 = 32 << 20;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; usize::try_from(LEN).unwrap()]).unwrap();
        file.sync_all().unwrap();
        os::advise(file.as_fd(), 0, 0, Advice::DontNeed).unwrap();
        let dropped = matches!(os::cached_pages(file.as_fd(), 0, 0), Ok(Cached::Pages(0)));
        if !required_if(Feature::PageCache, dropped, "no cachestat, or the temporary folder lies in memory") {
            return;
        }
        for _ in 0..3 {
            by_samples(&file, LEN).unwrap();
        }
        assert!(by_samples(&file, LEN).unwrap().resident_bytes() < LEN / 2);
    }

    #[test]
    fn samples_agree_on_a_file_that_is_cached() {
        const LEN: u64 = 9 << 20;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; usize::try_from(LEN).unwrap()]).unwrap();
        let sampled = by_samples(&file, LEN).unwrap();
        assert!(sampled.resident_bytes() == LEN || os::is_cached_at(file.as_fd(), 0).is_none(), "{sampled:?}");
        assert_eq!(by_samples(&tempfile::tempfile().unwrap(), 0).unwrap().resident_bytes(), 0);
    }
}
