//! How much of a checkpoint a benchmark can load in a limited time: storage and memory are asked for their rates before anything is
//! chosen, and rounds end when the time is up.
//!
//! What is loaded passes the storage and fresh memory many times, so that of slow ones a part is loaded, and the report says so. It
//! chooses no tensors and stops no round that has begun.

use std::sync::Arc;
use std::time::Instant;

use super::cache::Stretch;
use super::reads::{self, Portion, ReadWay, Tape};
use super::{Effort, Options, memory};
use vramp::checkpoint::{Checkpoint, Shard};
use vramp::device::{Device, NullDevice};
use vramp::error::Result;
use vramp::storage::{Engine, Fallbacks, Route};

/// The reads that ask a storage for its rate: enough at once for a fast one, little enough for a slow one.
const PROBE: ReadWay = ReadWay { route: Route::Direct, engine: Engine::Auto, block_bytes: 1 << 20, at_once: 4 };

/// Settings of the storage in a survey, and of all stages together: with every setting, and with few.
const STORAGE_SETTINGS: [f64; 2] = [26.0, 8.0];
const ALL_SETTINGS: [f64; 2] = [80.0, 24.0];

/// The part of the time after which no further round of the survey begins.
pub(super) const SURVEYING: f64 = 0.4;

/// Memory that a sample of a memory stage takes, at most: with every setting, and with few.
const MEMORY_BYTES: [u64; 2] = [1 << 30, 256 << 20];

/// The same for an effort.
pub(super) fn memory_bytes(effort: &Effort) -> u64 {
    MEMORY_BYTES[usize::from(!effort.every_setting)]
}

/// When a benchmark began, and how long it may take.
pub(super) struct Clock {
    pub(super) began: Instant,
    pub(super) most_seconds: Option<f64>,
}

impl Clock {
    /// Makes up to `most` rounds, numbered from 1: the first in any case, a further one if it can be over in time, that is, within this
    /// share of it. Returns how many were made.
    pub(super) fn rounds(&self, most: usize, share: f64, mut round: impl FnMut(usize) -> Result<()>) -> Result<usize> {
        let mut before = self.began.elapsed().as_secs_f64();
        for number in 1..=most {
            round(number)?;
            let now = self.began.elapsed().as_secs_f64();
            if number == most || !is_in_time(now, now - before, self.most_seconds.map(|seconds| seconds * share)) {
                return Ok(number);
            }
            before = now;
        }
        Ok(most)
    }
}

fn is_in_time(now: f64, takes: f64, most: Option<f64>) -> bool {
    most.is_none_or(|most| now + takes <= most)
}

/// Bytes of memory that are asked for its rate.
const MEMORY_PROBE: u64 = 128 << 20;

/// Bytes per second of what is passed again and again; `None` of what costs nothing.
#[derive(Debug, Clone, Copy)]
struct Rates {
    storage: Option<f64>,
    fresh_memory: Option<f64>,
}

/// The bytes that may be loaded if the time is limited, and why no more.
pub(super) fn most_bytes(
    checkpoint: &Checkpoint,
    device: &dyn Device,
    options: &Options,
) -> Result<Option<(u64, String)>> {
    let Some(seconds) = options.effort.most_seconds else { return Ok(None) };
    let largest = checkpoint.shards().iter().filter(|shard| shard.derived.is_none()).max_by_key(|shard| shard.bytes);
    let storage = largest.map(|shard| rate(shard, checkpoint, options)).transpose()?.flatten();
    let limits = device.limits();
    let fresh_memory = if limits.host_visible && limits.keeps { Some(fresh_memory_rate()?) } else { None };
    let rates = Rates { storage, fresh_memory };
    Ok(rates
        .slower(&options.effort)
        .map(|why| (fitting(rates, seconds, &options.effort), format!("more would take too long, since {why}"))))
}

/// A host that takes memory back at once is slow each time, and not the first time only.
fn fresh_memory_rate() -> Result<f64> {
    memory::touch(MEMORY_PROBE)?;
    Ok(memory::first_touch(MEMORY_PROBE, 1)?.rate().max(1.0))
}

/// Bytes per second that this file gives; `None` where it lies in memory or has nothing to give.
fn rate(shard: &Shard, checkpoint: &Checkpoint, options: &Options) -> Result<Option<f64>> {
    let fallbacks = Fallbacks::default();
    let file = shard.open(&**checkpoint.storage(), &fallbacks)?;
    if file.file_system().memory || shard.version.is_empty() {
        return Ok(None);
    }
    let range = 0..shard.version.len();
    options.cache.drop_files(&[Stretch { path: shard.path.clone(), range: range.clone() }])?;
    let mut tape = Tape::new(vec![(Arc::clone(&file), range)])?;
    let portion = Portion::Seconds(options.effort.sample_seconds);
    let cancel = &options.transfer.cancel;
    let (sample, _) = reads::to_staging(&mut tape, &PROBE, portion, &NullDevice::new(), cancel, &fallbacks)?;
    Ok(Some(sample.rate()).filter(|rate| *rate > 0.0))
}

impl Rates {
    /// Seconds that `passes` over a byte take.
    fn seconds(rate: Option<f64>, passes: f64) -> f64 {
        rate.map_or(0.0, |rate| passes / rate)
    }

    /// What takes more of the time.
    fn slower(self, effort: &Effort) -> Option<String> {
        let storage = Rates::seconds(self.storage, passes(effort));
        let memory = Rates::seconds(self.fresh_memory, memory_passes(effort));
        match self {
            Rates { fresh_memory: Some(rate), .. } if memory > storage => {
                Some(format!("this machine gives fresh memory at {}", said(rate)))
            }
            Rates { storage, .. } => storage.map(|rate| format!("the storage gives {}", said(rate))),
        }
    }
}

/// A rate in words.
fn said(rate: f64) -> String {
    if rate < 1e9 { format!("{:.1} MB/s", rate / 1e6) } else { format!("{:.2} GB/s", rate / 1e9) }
}

/// The bytes that can be loaded so that all of a benchmark takes `seconds`, about; not none.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // a part of a number of bytes
fn fitting(rates: Rates, seconds: f64, effort: &Effort) -> u64 {
    let left = (seconds - sampling_seconds(effort)).max(seconds / 10.0);
    let in_survey = Rates::seconds(rates.fresh_memory, survey_memory_passes(effort));
    let each =
        Rates::seconds(rates.storage, passes(effort)) + Rates::seconds(rates.fresh_memory, memory_passes(effort));
    let most_in_survey = memory_bytes(effort) as f64;
    let little = left / (each + in_survey).max(f64::MIN_POSITIVE);
    let bytes = if little <= most_in_survey {
        little
    } else {
        (left - in_survey * most_in_survey) / each.max(f64::MIN_POSITIVE)
    };
    bytes.max(1.0) as u64
}

/// Seconds that sampling takes whatever is loaded.
#[allow(clippy::cast_precision_loss)] // a few rounds
fn sampling_seconds(effort: &Effort) -> f64 {
    effort.sample_seconds * effort.survey_rounds as f64 * ALL_SETTINGS[usize::from(!effort.every_setting)]
}

/// How often the bytes that are loaded pass the storage, at most. In the survey: the page cache is filled once a round, and what is
/// in flight when a sample's time is up is at most all of it. In the rounds: a load, the stage beside it at two settings, and the
/// filling of the page cache; one more load and filling to warm up.
#[allow(clippy::cast_precision_loss)] // a few rounds
fn passes(effort: &Effort) -> f64 {
    let in_survey = 1.0 + STORAGE_SETTINGS[usize::from(!effort.every_setting)];
    effort.survey_rounds as f64 * in_survey + effort.rounds as f64 * 4.0 + 2.0
}

/// How often as many bytes of fresh memory are taken in the rounds: for two states a load and the touch before it, and the stages
/// beside them, which touch as well; to warm up, the loads alone.
#[allow(clippy::cast_precision_loss)] // a few rounds
fn memory_passes(effort: &Effort) -> f64 {
    effort.rounds as f64 * 10.0 + 4.0
}

/// And in the survey, of the bytes that are loaded or of the most that are taken there: reads to fresh memory, first touches, copies.
#[allow(clippy::cast_precision_loss)] // a few rounds
fn survey_memory_passes(effort: &Effort) -> f64 {
    effort.survey_rounds as f64 * 18.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::cast_precision_loss)]
    fn a_quick_benchmark_stays_below_half_a_minute_at_any_rate() {
        let effort = Effort::QUICK;
        let fit = |rates| fitting(rates, effort.most_seconds.unwrap(), &effort).min(effort.most_bytes);
        for storage in [1e4, 1e6, 5e7, 1e9, 1e11] {
            for fresh_memory in [1e6, 1e8, 1e9, 1e11] {
                let rates = Rates { storage: Some(storage), fresh_memory: Some(fresh_memory) };
                let bytes = fit(rates);
                let surveyed = bytes.min(memory_bytes(&effort)) as f64;
                let memory = memory_passes(&effort) * bytes as f64 + survey_memory_passes(&effort) * surveyed;
                let seconds =
                    sampling_seconds(&effort) + passes(&effort) * bytes as f64 / storage + memory / fresh_memory;
                assert!(seconds < 28.0 && bytes > 0, "{bytes} bytes at {rates:?}: {seconds} s");
            }
        }
        let fast = Rates { storage: Some(3e9), fresh_memory: Some(8e9) };
        assert_eq!(fit(fast), effort.most_bytes, "a fast machine is not limited");
        let without = fit(Rates { fresh_memory: None, ..fast });
        assert!(without >= fit(fast) && fit(Rates { storage: None, fresh_memory: None }) == effort.most_bytes);
        let slow = Rates { storage: Some(1e6), ..fast };
        let more_rounds = fitting(slow, 25.0, &Effort { rounds: 30, ..effort });
        assert!(more_rounds < fitting(slow, 25.0, &effort));
    }

    #[test]
    fn rounds_end_when_another_would_not_be_over_in_time() {
        assert!(is_in_time(10.0, 9.0, Some(20.0)) && !is_in_time(10.0, 11.0, Some(20.0)) && is_in_time(1e9, 1e9, None));
        let made = |most_seconds| {
            let clock = Clock { began: Instant::now(), most_seconds };
            let mut numbers = Vec::new();
            let made = clock.rounds(3, 0.5, |number| {
                numbers.push(number);
                Ok(())
            });
            assert_eq!(numbers, (1..=made.unwrap()).collect::<Vec<_>>());
            numbers.len()
        };
        assert_eq!((made(None), made(Some(1e6)), made(Some(0.0))), (3, 3, 1));
    }

    #[test]
    fn what_takes_more_of_the_time_is_named() {
        let why = |storage, fresh_memory| Rates { storage, fresh_memory }.slower(&Effort::QUICK);
        assert_eq!(why(Some(1e6), Some(8e9)).unwrap(), "the storage gives 1.0 MB/s");
        assert_eq!(why(Some(2e9), Some(5e8)).unwrap(), "this machine gives fresh memory at 500.0 MB/s");
        assert_eq!(why(None, None), None);
    }
}
