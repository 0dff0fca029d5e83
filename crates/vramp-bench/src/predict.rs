//! T = S / B from stages that were measured alone, and what the difference to a load says. Pure functions over data.
//!
//! A load is a pipeline: its stages work side by side, so the slowest decides, and what comes before the first byte is added.

use super::data::{BenchStage, Cause, Ceiling, Load, Prediction, Reason, Spread, Verdict, median_load};
use vramp::report::Report;

/// A load that takes longer than this many times T must be explained.
const TOLERATED: f64 = 1.05;

/// A cause is named only if it explains this share of the time beyond T.
const MOST: f64 = 0.5;

/// A rate below this share of another is worth naming.
const NEARLY: f64 = 0.95;

/// How long a load must take that passes these stages; `None` without stages.
pub fn predict(ceilings: &[Ceiling], before_seconds: f64) -> Option<Prediction> {
    let slowest = slowest(ceilings)?;
    Some(Prediction {
        before_seconds,
        bound_by: if before_seconds > slowest.seconds { BenchStage::Opening } else { slowest.stage },
        bytes_per_second: slowest.bytes_per_second,
        seconds: before_seconds + slowest.seconds,
    })
}

/// The slowest stage. Uploads that convert can be no faster than plain ones: they are the limit only where they are
/// slower than those.
fn slowest(ceilings: &[Ceiling]) -> Option<&Ceiling> {
    let of = |stage| ceilings.iter().find(|ceiling| ceiling.stage == stage);
    let slowest = ceilings.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds))?;
    match of(BenchStage::Upload) {
        Some(plain) if slowest.stage == BenchStage::Kernels && plain.seconds > slowest.seconds * NEARLY => Some(plain),
        _ => Some(slowest),
    }
}

/// Compares loads with their prediction; `None` without loads.
pub fn judge(prediction: &Prediction, ceilings: &[Ceiling], loads: &[Load]) -> Option<Verdict> {
    let spread = Spread::of(loads.iter().map(|load| load.seconds))?;
    let seconds = spread.median;
    let median = loads.get(median_load(loads)?)?;
    // Where one of the loads reached T, the others met a slow moment of the machine, which says nothing about the loads.
    let too_long = spread.min > prediction.seconds * TOLERATED;
    let beyond = seconds - prediction.seconds;
    Some(Verdict {
        seconds,
        reached: prediction.seconds / seconds.max(f64::MIN_POSITIVE),
        bound_by: prediction.bound_by,
        next_is_faster_by: next_is_faster_by(prediction, ceilings),
        reason: too_long
            .then(|| reason(prediction, ceilings, &median.report))
            .flatten()
            .filter(|reason| reason.seconds >= beyond * MOST)
            .map(|reason| Reason { seconds: reason.seconds.min(beyond), ..reason }),
    })
}

fn next_is_faster_by(prediction: &Prediction, ceilings: &[Ceiling]) -> Option<f64> {
    let before = prediction.before_seconds;
    let others = ceilings.iter().filter(|ceiling| ceiling.stage != prediction.bound_by);
    let next = others.map(|ceiling| ceiling.seconds).max_by(f64::total_cmp)?;
    let without = if prediction.bound_by == BenchStage::Opening { next } else { before + next };
    (without > 0.0).then(|| prediction.seconds / without)
}

/// What explains most of the time beyond the prediction.
fn reason(prediction: &Prediction, ceilings: &[Ceiling], report: &Report) -> Option<Reason> {
    let stages = &report.stages;
    let opening = stages.open.seconds + stages.plan.seconds - prediction.before_seconds;
    let causes = [
        (Cause::Opening, opening),
        (Cause::Allocating, stages.allocate.seconds),
        (Cause::Bookkeeping, stages.bookkeeping.seconds),
        (Cause::Staging, idle_seconds(report)),
        (Cause::ReadSetting, read_setting_seconds(ceilings)),
    ];
    let together = ceilings.iter().filter_map(|ceiling| slower_together(prediction, ceiling, report));
    let causes = causes.into_iter().map(|(cause, seconds)| Reason { cause, seconds }).chain(together);
    causes.filter(|reason| reason.seconds > 0.0).max_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Seconds of a staged load in which neither reads nor uploads were going at their busiest: they waited for each other.
fn idle_seconds(report: &Report) -> f64 {
    let stages = &report.stages;
    if stages.stage.bytes < report.bytes / 2 {
        return 0.0;
    }
    let before = stages.open.seconds + stages.plan.seconds + stages.allocate.seconds;
    let running = report.seconds - before;
    running - stages.reading.seconds.max(stages.uploading.seconds)
}

/// What the load loses because it reads otherwise than the fastest way found.
#[allow(clippy::cast_precision_loss)] // a time has no use for the 54th bit
fn read_setting_seconds(ceilings: &[Ceiling]) -> f64 {
    let lost = |ceiling: &Ceiling| {
        let own = Some(ceiling.own_bytes_per_second).filter(|own| *own < ceiling.bytes_per_second * NEARLY)?;
        Some(ceiling.bytes as f64 / own.max(f64::MIN_POSITIVE) - ceiling.seconds)
    };
    ceilings.iter().filter(|ceiling| is_reading(ceiling.stage)).filter_map(lost).fold(0.0, f64::max)
}

fn is_reading(stage: BenchStage) -> bool {
    matches!(stage, BenchStage::Storage | BenchStage::PageCache | BenchStage::PageCacheToFresh)
}

/// A stage that was at work for longer in the load than the slowest takes alone.
fn slower_together(prediction: &Prediction, ceiling: &Ceiling, report: &Report) -> Option<Reason> {
    let stages = &report.stages;
    let at_work = match ceiling.stage {
        stage if is_reading(stage) => stages.reading.seconds,
        BenchStage::Upload if stages.wait_upload.seconds > stages.wait_read.seconds => stages.uploading.seconds,
        BenchStage::Kernels => stages.kernels.seconds.min(stages.uploading.seconds),
        _ => return None,
    };
    let alone = prediction.seconds - prediction.before_seconds;
    let lost = if is_reading(ceiling.stage) { read_setting_seconds(std::slice::from_ref(ceiling)) } else { 0.0 };
    Some(Reason { cause: Cause::SlowerTogether(ceiling.stage), seconds: at_work - alone - lost })
}

#[cfg(test)]
mod tests;
