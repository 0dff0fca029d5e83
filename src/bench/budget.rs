//! How much of a checkpoint a benchmark can load in a limited time: the storage is asked for its rate before anything is chosen.
//!
//! What is loaded passes the storage many times, so that on a slow one a part is loaded, and the report says so. It chooses no
//! tensors and stops nothing that has begun.

use std::sync::Arc;

use super::cache::Stretch;
use super::reads::{self, Portion, ReadWay, Tape};
use super::{Effort, Options};
use crate::checkpoint::{Checkpoint, Shard};
use crate::device::NullDevice;
use crate::error::Result;
use crate::load::open_same;
use crate::source::{Engine, Fallbacks, Route};

/// The reads that ask a storage for its rate: enough at once for a fast one, little enough for a slow one.
const PROBE: ReadWay = ReadWay { route: Route::Direct, engine: Engine::Auto, block_bytes: 1 << 20, at_once: 4 };

/// Settings of the storage in a survey, and of all stages together: with every setting, and with few.
const STORAGE_SETTINGS: [f64; 2] = [26.0, 8.0];
const ALL_SETTINGS: [f64; 2] = [80.0, 24.0];

/// The bytes that may be loaded if the time is limited, and the rate of the storage that says so.
pub(super) fn most_bytes(checkpoint: &Checkpoint, options: &Options) -> Result<Option<(u64, f64)>> {
    let Some(seconds) = options.effort.most_seconds else { return Ok(None) };
    let largest = checkpoint.shards().iter().filter(|shard| shard.made.is_none()).max_by_key(|shard| shard.bytes);
    let Some(rate) = largest.map(|shard| rate(shard, options)).transpose()?.flatten() else { return Ok(None) };
    Ok(Some((fitting(rate, seconds, &options.effort), rate)))
}

/// Bytes per second that this file gives; `None` where it lies in memory or has nothing to give.
fn rate(shard: &Shard, options: &Options) -> Result<Option<f64>> {
    let fallbacks = Fallbacks::default();
    let file = open_same(&*options.storage, shard, &fallbacks)?;
    if file.file_system().memory || shard.identity.len == 0 {
        return Ok(None);
    }
    let range = 0..shard.identity.len;
    options.cache.drop_files(&[Stretch { path: shard.path.clone(), range: range.clone() }])?;
    let mut tape = Tape::new(vec![(Arc::clone(&file), range)])?;
    let portion = Portion::Seconds(options.effort.sample_seconds);
    let cancel = &options.transfer.cancel;
    let (sample, _) = reads::to_staging(&mut tape, &PROBE, portion, &NullDevice::new(), cancel, &fallbacks)?;
    Ok(Some(sample.rate()).filter(|rate| *rate > 0.0))
}

/// The bytes that can be loaded at `rate` so that all of a benchmark takes `seconds`, about; not none.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a part of a number of bytes
fn fitting(rate: f64, seconds: f64, effort: &Effort) -> u64 {
    let left = (seconds - sampling_seconds(effort)).max(seconds / 10.0);
    (rate * left / passes(effort)).max(1.0) as u64
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_benchmark_stays_below_half_a_minute_at_any_rate() {
        let effort = Effort::QUICK;
        for rate in [1e4, 1e6, 5e7, 1e9, 1e11] {
            let bytes = fitting(rate, effort.most_seconds.unwrap(), &effort).min(effort.most_bytes);
            let seconds = sampling_seconds(&effort) + passes(&effort) * bytes as f64 / rate;
            assert!(seconds < 28.0 && bytes > 0, "{bytes} bytes at {rate}: {seconds} s");
        }
        let fast = fitting(2e9, effort.most_seconds.unwrap(), &effort);
        assert!(fast > effort.most_bytes, "a fast disk is not limited: {fast}");
        assert!(fitting(1e6, 25.0, &Effort { rounds: 30, ..effort }) < fitting(1e6, 25.0, &effort));
    }
}
