//! SHA-256 of every loaded tensor, on all cores. Nothing of this counts as loading.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use vramp::Error;
use vramp::digest::Digest;

use super::interrupt::Interrupt;
use super::output::Failure;

/// The digests of `items` by name, each made by `digest_of`; largest first, so that the threads end together.
pub(crate) fn of<'a, T: Sync>(
    mut items: Vec<(&'a str, T)>,
    bytes_of: impl Fn(&T) -> u64,
    digest_of: impl Fn(&T) -> Result<Digest, Error> + Sync,
    interrupt: &Interrupt,
) -> Result<BTreeMap<&'a str, Digest>, Failure> {
    items.sort_by_key(|(_, item)| std::cmp::Reverse(bytes_of(item)));
    let next = AtomicUsize::new(0);
    let done: Mutex<Result<BTreeMap<&'a str, Digest>, Failure>> = Mutex::new(Ok(BTreeMap::new()));
    let work = || {
        while let Some((name, item)) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let digest = interrupt.check().and_then(|()| Ok(digest_of(item)?));
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *done, digest) {
                (Ok(digests), Ok(digest)) => _ = digests.insert(name, digest),
                (Ok(_), Err(failure)) => *done = Err(failure),
                (Err(_), _) => return,
            }
        }
    };
    let threads = thread::available_parallelism().map_or(2, NonZero::get).min(items.len().max(1));
    thread::scope(|scope| {
        for _ in 1..threads {
            // Where no further thread is to be had, those that are there do all the work.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}
