//! The model of a copy engine: one copy at a time, at a given rate, in virtual time that the clock on the wall follows.
//!
//! A copy's end is computed from when it could have begun, not from when its thread woke up, so that the delays of a
//! loaded machine do not add up. This file moves no bytes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::stats::EngineStats;

/// Set while a reset waits for the threads: nobody needs their copies to take their time any more.
pub(crate) static HURRY: AtomicBool = AtomicBool::new(false);

/// One direction of one device, or both where a device has one engine.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    free_at: Option<Instant>,
}

impl Engine {
    /// Reserves the engine for a copy that takes `length` and is ready at `ready`; when it begins and ends.
    pub(crate) fn book(&mut self, ready: Instant, length: Duration) -> (Instant, Instant) {
        let start = self.free_at.map_or(ready, |free| free.max(ready));
        let end = start + length;
        self.free_at = Some(end);
        (start, end)
    }
}

impl EngineStats {
    /// Counts a copy of `bytes` from `start` to `end`, both since the reset.
    pub(crate) fn count(&mut self, bytes: u64, start: Duration, end: Duration) {
        let (mut start, end) = (start.as_secs_f64(), end.as_secs_f64());
        self.copies += 1;
        self.bytes += bytes;
        if let Some(last) = self.last_end {
            // Without a model two copies may overlap; the engine is busy once.
            if start > last {
                self.gaps += 1;
                self.gap_seconds += start - last;
            }
            start = start.max(last);
        }
        self.first_start.get_or_insert(start);
        self.busy_seconds += (end - start).max(0.0);
        self.last_end = Some(self.last_end.map_or(end, |last| last.max(end)));
    }
}

/// How long the model says that a copy takes; `None` without a model.
pub(crate) fn length(rate: Option<f64>, latency: Duration, bytes: u64) -> Option<Duration> {
    let transfer = rate.map(|rate| Duration::from_secs_f64(bytes as f64 / rate));
    match transfer {
        Some(transfer) => Some(transfer + latency),
        None => (!latency.is_zero()).then_some(latency),
    }
}

/// Waits until `end`: sleeps, then spins for the last part that sleeping cannot hit.
pub(crate) fn sleep_until(end: Instant) {
    const SPIN: Duration = Duration::from_micros(60);
    const LONGEST: Duration = Duration::from_millis(5);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || HURRY.load(Ordering::Relaxed) {
            return;
        }
        match left > SPIN {
            true => std::thread::sleep((left - SPIN).min(LONGEST)),
            false => std::hint::spin_loop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_queue_up_behind_each_other() {
        let mut engine = Engine::default();
        let begin = Instant::now();
        let ms = Duration::from_millis;
        assert_eq!(engine.book(begin, ms(10)), (begin, begin + ms(10)));
        assert_eq!(engine.book(begin + ms(2), ms(5)), (begin + ms(10), begin + ms(15)));
        assert_eq!(engine.book(begin + ms(20), ms(1)).0, begin + ms(20));
    }

    #[test]
    fn gaps_and_busy_time_add_up_to_the_span() {
        let mut stats = EngineStats::default();
        let ms = Duration::from_millis;
        stats.count(10, ms(5), ms(15));
        stats.count(10, ms(15), ms(25));
        stats.count(10, ms(35), ms(40));
        assert_eq!((stats.copies, stats.bytes, stats.gaps), (3, 30, 1));
        assert!((stats.busy_seconds - 0.025).abs() < 1e-9);
        assert!((stats.gap_seconds - 0.010).abs() < 1e-9);
        assert_eq!((stats.first_start, stats.last_end), (Some(0.005), Some(0.040)));
    }

    #[test]
    fn the_model_is_optional() {
        assert_eq!(length(None, Duration::ZERO, 100), None);
        assert_eq!(length(Some(1e6), Duration::from_micros(5), 1000), Some(Duration::from_micros(1005)));
    }
}
