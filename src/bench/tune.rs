//! The search for better options: one knob after the other, each value against the best so far in interleaved pairs of whole
//! loads, cold and warm, within a time that is given.
//!
//! A value is kept only if it is better by more than the noise; at the end the result is compared with the defaults once
//! more, and thrown away if it is not better. It changes nothing but the options of loads.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::bed::Bed;
use super::cache::TOLERANCE;
use super::data::{CacheState, Spread};
use super::subject::Loadable;
use super::{Options, survey};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::load::{MOST_AT_ONCE, Profile, TransferOptions};
use crate::plan::LoadPlan;
use crate::report::Staging;
use crate::source::Engine;

const MIB: usize = 1 << 20;

/// Pairs of loads for each value.
const PAIRS: u32 = 3;

/// Pairs of loads for the result.
const LAST_PAIRS: u32 = 5;

/// A value is better if loads take at most this share of the time, over all states together.
const BETTER: f64 = 0.97;

/// And in none of them more than this share.
const NOT_WORSE: f64 = 1.02;

/// What a search found.
#[derive(Debug, Clone, Serialize)]
pub struct Tuning {
    /// What to tell loads. It says nothing where the defaults are as good.
    pub profile: Profile,
    /// Seconds of a cold load with the defaults, and with the profile, in the last comparison.
    pub cold_seconds: Option<[Spread; 2]>,
    /// The same of a warm load.
    pub warm_seconds: Option<[Spread; 2]>,
    /// Time with the profile divided by time with the defaults: the mean over the states of the medians of pairs.
    pub ratio: f64,
    /// What was tried.
    pub trials: Vec<TuneTrial>,
    /// Whether everything was tried in the time that was given.
    pub complete: bool,
    /// How long the search took.
    pub seconds: f64,
}

/// One value of one knob.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TuneTrial {
    /// The knob and its value: `direct_depth = 4`.
    pub what: String,
    /// Time with it divided by time with the best before.
    pub ratio: f64,
    /// Whether it was better.
    pub kept: bool,
}

/// Something that can be set, and how.
struct Change {
    what: String,
    profile: Profile,
}

/// Searches for options that load this checkpoint faster, for about as long as `budget`; at least one value is tried.
///
/// # Errors
/// As [`run`](super::run).
pub fn tune(path: &Path, options: &Options, budget: Duration, progress: &dyn Fn(&str)) -> Result<Tuning> {
    tune_on(&Checkpoint::open_with(path, &options.open)?, options, budget, progress)
}

/// The same for a checkpoint that is open.
pub(super) fn tune_on(
    checkpoint: &Checkpoint,
    options: &Options,
    budget: Duration,
    progress: &dyn Fn(&str),
) -> Result<Tuning> {
    let began = Instant::now();
    let (device, _) = survey::open_device(options)?;
    let subject = Loadable::of(checkpoint, &*device, options)?;
    let (bed, plan) = Bed::new(&subject, device, options, None)?;
    let mut search = Search { bed: &bed, states: states(&bed)?, until: began, progress };
    let usual = Profile::of(&bed.transfer(), &device_name(&bed), &subject.file_system);
    search.until = began + budget.saturating_sub(search.warm_up(&usual)? * LAST_PAIRS);
    let (profile, trials, complete) = search.run(&usual, &plan)?;
    let mut tuning = search.compare(&usual, profile)?;
    tuning.trials = trials;
    tuning.complete = complete;
    tuning.seconds = began.elapsed().as_secs_f64();
    Ok(tuning)
}

/// The states that can be had: files that stay in the page cache are never cold.
fn states(bed: &Bed<'_>) -> Result<Vec<CacheState>> {
    bed.reach(CacheState::Cold)?;
    let cold = !bed.subject.in_memory && bed.resident()? <= TOLERANCE;
    Ok(if cold { vec![CacheState::Cold, CacheState::Warm] } else { vec![CacheState::Warm] })
}

fn device_name(bed: &Bed<'_>) -> String {
    bed.device.product().unwrap_or_else(|| bed.device.name())
}

struct Search<'a> {
    bed: &'a Bed<'a>,
    states: Vec<CacheState>,
    until: Instant,
    progress: &'a dyn Fn(&str),
}

impl Search<'_> {
    /// Tries every value of every knob once; returns the best profile, the trials, and whether time sufficed.
    fn run(&self, usual: &Profile, plan: &LoadPlan) -> Result<(Profile, Vec<TuneTrial>, bool)> {
        let (mut best, mut trials) = (usual.clone(), Vec::new());
        let knobs = self.knobs(plan);
        for knob in knobs {
            for Change { what, profile } in knob(&best) {
                if Instant::now() >= self.until && !trials.is_empty() {
                    return Ok((best, trials, false));
                }
                (self.progress)(&format!("trying {what}"));
                let ratios = self.ratios(&best, &profile)?;
                let (ratio, kept) = (ratios.mean(), ratios.are_better());
                trials.push(TuneTrial { what, ratio, kept });
                best = if kept { profile } else { best };
            }
        }
        Ok((best, trials, true))
    }

    /// One pair of loads in each state, which do not count; how long that takes.
    fn warm_up(&self, usual: &Profile) -> Result<Duration> {
        let began = Instant::now();
        self.states.iter().try_for_each(|state| self.pair(usual, usual, *state).map(drop))?;
        Ok(began.elapsed())
    }

    /// Time with `other` divided by time with `best`, for each state.
    fn ratios(&self, best: &Profile, other: &Profile) -> Result<Ratios> {
        let ratios = |state: &CacheState| Ok(ratios_of(&self.pairs(best, other, *state, PAIRS)?));
        self.states.iter().map(ratios).collect::<Result<_>>().map(Ratios)
    }

    /// Pairs of loads, of which each profile comes first in turn.
    fn pairs(&self, one: &Profile, other: &Profile, state: CacheState, count: u32) -> Result<Vec<[f64; 2]>> {
        let pair = |number: u32| match number.is_multiple_of(2) {
            true => self.pair(one, other, state),
            false => self.pair(other, one, state).map(|[other, one]| [one, other]),
        };
        (0..count).map(pair).collect()
    }

    /// Seconds of a load with one profile and of a load with another, one right after the other.
    fn pair(&self, first: &Profile, second: &Profile, state: CacheState) -> Result<[f64; 2]> {
        Ok([self.load(first, state)?, self.load(second, state)?])
    }

    fn load(&self, profile: &Profile, state: CacheState) -> Result<f64> {
        self.bed.reach(state)?;
        self.bed.touch()?;
        let (_, loaded) = self.bed.load(profile.apply(self.bed.transfer()))?;
        // With the set-up: more buffers and threads take time too.
        Ok(loaded.report.seconds + loaded.report.setup_seconds)
    }

    /// Compares the result with the defaults; what is not better is not handed out.
    fn compare(&self, usual: &Profile, profile: Profile) -> Result<Tuning> {
        let unchanged = profile == *usual;
        let (mut cold_seconds, mut warm_seconds, mut ratios) = (None, None, Ratios(Vec::new()));
        for state in &self.states {
            (self.progress)("comparing with the defaults");
            let pairs = self.pairs(usual, &profile, *state, LAST_PAIRS)?;
            ratios.0.push(ratios_of(&pairs));
            let of = |which: usize| Spread::of(pairs.iter().map(|pair| pair[which]));
            let both = of(0).zip(of(1)).map(|(usual, tuned)| [usual, tuned]);
            match state {
                CacheState::Cold => cold_seconds = both,
                CacheState::Warm => warm_seconds = both,
            }
        }
        let (ratio, better) = (ratios.mean(), !unchanged && ratios.are_better());
        let profile = if better { profile } else { usual.clone() };
        Ok(Tuning { profile, cold_seconds, warm_seconds, ratio, trials: Vec::new(), complete: true, seconds: 0.0 })
    }

    // ---- the knobs

    fn knobs(&self, plan: &LoadPlan) -> Vec<Knob> {
        let usual = self.bed.transfer();
        let mut knobs: Vec<Knob> = Vec::new();
        if self.states.contains(&CacheState::Cold) {
            knobs.push(direct_depths(&usual));
        }
        knobs.push(read_sizes());
        knobs.push(page_cache_threads(&usual));
        if survey::staged_bytes(plan) > plan.read_bytes() / 100 {
            knobs.push(staging_shapes(
                usual.staging.map_or(self.bed.device.limits().staging, |it| (it.count, it.bytes)),
            ));
            knobs.push(lanes());
        }
        if self.states.contains(&CacheState::Cold) {
            knobs.push(populate_threads(&usual));
            knobs.push(engines());
        }
        knobs
    }
}

/// Time with one profile divided by time with another: for each state, of each pair of loads.
struct Ratios(Vec<Vec<f64>>);

impl Ratios {
    fn mean(&self) -> f64 {
        self.0.iter().map(|pairs| median(pairs)).sum::<f64>() / self.0.len().max(1) as f64
    }

    /// Better in all, worse in no state, and not by chance: in one state, every pair but one of many says so.
    fn are_better(&self) -> bool {
        let agree = |pairs: &Vec<f64>| {
            let better = pairs.iter().filter(|ratio| **ratio < BETTER).count();
            better > 0 && better + pairs.len() / 5 >= pairs.len()
        };
        self.mean() < BETTER && self.0.iter().all(|pairs| median(pairs) <= NOT_WORSE) && self.0.iter().any(agree)
    }
}

fn ratios_of(pairs: &[[f64; 2]]) -> Vec<f64> {
    pairs.iter().map(|[first, second]| second / first.max(f64::MIN_POSITIVE)).collect()
}

fn median(ratios: &[f64]) -> f64 {
    Spread::of(ratios.iter().copied()).map_or(1.0, |spread| spread.median)
}

/// From the best profile so far to those that differ from it in one knob.
type Knob = Box<dyn Fn(&Profile) -> Vec<Change>>;

/// A knob with these values, set by `set`.
fn knob<T: Copy + Serialize + 'static>(
    name: &'static str,
    values: Vec<T>,
    set: impl Fn(&mut Profile, T) + 'static,
) -> Knob {
    Box::new(move |best| {
        let change = |value: &T| {
            let mut profile = best.clone();
            set(&mut profile, *value);
            let value = serde_json::to_string(value).unwrap_or_default(); // as in the file
            Change { what: format!("{name} = {}", value.trim_matches('"')), profile }
        };
        values.iter().map(change).filter(|change| change.profile != *best).collect()
    })
}

/// Numbers around the usual one, without it.
fn around(usual: usize) -> Vec<usize> {
    let mut values = vec![(usual / 4).max(1), (usual / 2).max(1), usual * 2, usual * 4];
    values.dedup();
    values.retain(|value| *value != usual && *value <= MOST_AT_ONCE);
    values
}

fn direct_depths(usual: &TransferOptions) -> Knob {
    knob("direct_depth", around(usual.queue.direct_depth), |profile, depth| profile.direct_depth = Some(depth))
}

fn read_sizes() -> Knob {
    let sizes = [2, 8, 16].map(|mib| (mib * MIB) as u64).into();
    knob("read_bytes", sizes, |profile, bytes| profile.read_bytes = Some(bytes))
}

fn page_cache_threads(usual: &TransferOptions) -> Knob {
    let counts = around(usual.queue.page_cache_threads);
    knob("page_cache_threads", counts, |profile, count| profile.page_cache_threads = Some(count))
}

fn populate_threads(usual: &TransferOptions) -> Knob {
    let counts = around(usual.queue.populate_threads);
    knob("populate_threads", counts, |profile, count| profile.populate_threads = Some(count))
}

fn staging_shapes((count, bytes): (usize, usize)) -> Knob {
    let shapes = [(count, bytes / 2), (count, bytes * 2), (count / 2, bytes), (count * 2, bytes)];
    let shapes = shapes.into_iter().filter(|(count, bytes)| *count > 0 && *bytes >= 4096);
    let shapes = shapes.map(|(count, bytes)| Staging { count, bytes }).collect();
    knob("staging", shapes, |profile, staging| profile.staging = Some(staging))
}

fn lanes() -> Knob {
    knob("lanes", vec![1, 2, 4], |profile, lanes| profile.lanes = Some(lanes))
}

fn engines() -> Knob {
    knob("engine", vec![Engine::Threads], |profile, engine| profile.engine = Some(engine))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_knob_changes_one_thing_and_skips_what_is_set() {
        let best = Profile { lanes: Some(2), ..Profile::new("cpu", "ext4") };
        let changes = lanes()(&best);
        let whats: Vec<_> = changes.iter().map(|change| change.what.as_str()).collect();
        assert_eq!(whats, ["lanes = 1", "lanes = 4"]);
        assert!(changes.iter().all(|change| Profile { lanes: Some(2), ..change.profile.clone() } == best));
        assert_eq!((around(1), around(8)), (vec![2, 4], vec![2, 4, 16, 32]));
    }

    #[test]
    fn a_gain_in_one_state_does_not_pay_for_a_loss_in_the_other() {
        let of = |pairs: &[&[f64]]| Ratios(pairs.iter().map(|pairs| pairs.to_vec()).collect()).are_better();
        assert!(of(&[&[0.9, 0.8, 0.9], &[1.0, 1.1, 0.9]]) && of(&[&[0.9, 0.8, 0.9, 1.2, 0.7]]));
        assert!(!of(&[&[0.7, 0.7, 0.7], &[1.1, 1.1, 1.1]]) && !of(&[&[0.99, 0.99]]));
        assert!(!of(&[&[0.9, 1.2, 0.8]]), "one of three pairs says otherwise");
        assert_eq!(median(&ratios_of(&[[2.0, 1.0], [1.0, 9.0], [4.0, 3.0]])), 0.75);
    }
}
