//! What of a benchmark later loads may be compared with: the rates of stages, with the place and the time they hold for. It measures
//! nothing.

use super::data::{BenchReport, BenchStage, CacheState, Sample, Spread, State};
use vramp::load::{LimitPlace, LimitRates, MeasuredLimit, TransferOptions};
use vramp::plan::RouteChoice;

/// A state whose loads move fewer bytes in less time shows set-up and no bandwidth.
const LEAST_BYTES: u64 = 16 << 20;
const LEAST_SECONDS: f64 = 0.05;

/// The limits of a finished benchmark; `None` where it measured too little, or other reads than those of a usual load.
pub(super) fn of(report: &BenchReport, transfer: &TransferOptions, place: LimitPlace) -> Option<MeasuredLimit> {
    let usual = matches!(transfer.route, RouteChoice::Auto | RouteChoice::Direct) && transfer.convert.is_none();
    let trusted = || report.states.iter().filter(|state| is_trusted(state));
    if !usual || trusted().next().is_none() {
        return None;
    }
    let is_trusted = |wanted| trusted().any(|state| state.state == wanted);
    // What the machine can do is the higher one: the other met a slower moment of it.
    let rate = |stage| in_rounds(trusted(), stage).into_iter().chain(alone(report, stage)).max_by(f64::total_cmp);
    let cold = |stage| is_trusted(CacheState::Cold).then(|| rate(stage)).flatten();
    let warm = |stage| is_trusted(CacheState::Warm).then(|| rate(stage)).flatten();
    let rates = LimitRates {
        storage: cold(BenchStage::Storage),
        first_touch: rate(BenchStage::FirstTouch),
        page_cache: warm(BenchStage::PageCache),
        page_cache_to_fresh: warm(BenchStage::PageCacheToFresh),
        upload: rate(BenchStage::Upload),
    };
    let by = format!("vramp bench {}", report.vramp);
    Some(MeasuredLimit { place, unix_seconds: report.unix_seconds, by, rates })
}

/// Whether the loads of a state were in it, and long enough to show a bandwidth.
fn is_trusted(state: &State) -> bool {
    let bytes = state.ceilings.iter().map(|ceiling| ceiling.bytes).max().unwrap_or(0);
    state.proof.proven && (bytes >= LEAST_BYTES || state.verdict.seconds >= LEAST_SECONDS)
}

/// The rate beside the loads: of several states the higher one.
fn in_rounds<'a>(states: impl Iterator<Item = &'a State>, stage: BenchStage) -> Option<f64> {
    let ceilings = states.flat_map(|state| &state.ceilings).filter(|ceiling| ceiling.stage == stage);
    ceilings.map(|ceiling| ceiling.bytes_per_second).filter(|rate| *rate > 0.0).max_by(f64::total_cmp)
}

/// The rate in the survey.
fn alone(report: &BenchReport, stage: BenchStage) -> Option<f64> {
    let best = report.stages.iter().find(|found| found.stage == stage)?.best()?;
    Some(Spread::of(best.samples.iter().map(Sample::rate))?.median).filter(|rate| *rate > 0.0)
}
