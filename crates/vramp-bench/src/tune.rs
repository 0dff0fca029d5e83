//! The search for better options, within a time that is given: a first look at each value of each knob, then the promising ones
//! against the best so far, at last the result against the defaults.
//!
//! The first look goes around the knobs, one pair of loads of a part for each value, so that every knob is reached before any is
//! reached twice. What is kept must be better by more than the noise in interleaved pairs; what the last comparison does not
//! confirm is thrown away. It changes nothing but the options of loads, and knows no clock but that of its [`Track`].

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::cache::TOLERANCE;
use super::data::{CacheState, Spread};
use super::knobs::{self, Knob, Value};
use super::testbed::TestBed;
use super::workload::Workload;
use super::{Options, survey};
use vramp::checkpoint::Checkpoint;
use vramp::error::Result;
use vramp::load::Profile;

/// Pairs of loads for a value that is promising.
const PAIRS: u32 = 3;

/// Pairs of loads for the result.
const LAST_PAIRS: u32 = 5;

/// Promising values that there should be time for.
const PROMISING: u32 = 3;

/// The share of the time that the first looks take, and what comes after them.
const LOOKING: f64 = 0.45;
const COMPARING: f64 = 0.45;

/// The share of what is loaded that shows how long loads take.
const CALIBRATION: f64 = 1.0 / 32.0;

/// A value is better if loads take at most this share of the time, over all states together.
const BETTER: f64 = 0.97;

/// And in none of them more than this share.
const NOT_WORSE: f64 = 1.02;

/// Bytes of a load that says anything, at least, where there are as many.
const LEAST_BYTES: f64 = 64e6;

/// What a search found.
#[derive(Debug, Clone, Serialize)]
pub struct Tuning {
    /// What to tell loads. It says nothing where the defaults are as good.
    pub profile: Profile,
    /// Seconds of a cold load with the defaults, and with the profile, in the last comparison; none where nothing was found.
    pub cold_seconds: Option<[Spread; 2]>,
    /// The same of a warm load.
    pub warm_seconds: Option<[Spread; 2]>,
    /// Time with the profile divided by time with the defaults: the mean over the states of the medians of pairs.
    pub ratio: f64,
    /// What was tried, in the order of time.
    pub trials: Vec<TuneTrial>,
    /// The values that there was no time for, as [`TuneTrial::what`].
    pub not_reached: Vec<String>,
    /// How long the search took.
    pub seconds: f64,
}

/// One value of one knob.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TuneTrial {
    /// The knob and its value: `direct_depth = 4`.
    pub what: String,
    /// Time with it divided by time with the defaults, at a first look: one pair of loads in each state.
    pub ratio: f64,
    /// Time with it divided by time with the best before, in several pairs; none where the first look had ruled it out, or there
    /// was no time.
    pub confirmed: Option<f64>,
    /// Whether it was better.
    pub kept: bool,
}

/// What loads, and whose clock counts.
pub(super) trait Track {
    /// Seconds of a load of this share of what there is, set-up included: more buffers and threads take time too.
    fn load(&mut self, profile: &Profile, state: CacheState, share: f64) -> Result<f64>;

    /// Seconds since the search began.
    fn seconds(&self) -> f64;
}

/// Searches for options that load this checkpoint faster, for about as long as `budget`; at least one value is tried.
///
/// # Errors
/// As [`run`](super::run).
pub fn tune(path: &Path, options: &Options, budget: Duration, progress: &dyn Fn(&str)) -> Result<Tuning> {
    tune_on(&Arc::new(Checkpoint::open_with(path, &options.open)?), options, budget, progress)
}

/// The same for a checkpoint that is open.
pub(super) fn tune_on(
    checkpoint: &Arc<Checkpoint>,
    options: &Options,
    budget: Duration,
    progress: &dyn Fn(&str),
) -> Result<Tuning> {
    let began = Instant::now();
    let (device, _) = survey::open_device(options)?;
    let subject = Workload::of(checkpoint, &*device, options)?;
    let (bed, plan) = TestBed::new(&subject, device, options, None)?;
    let states = states(&bed)?;
    let knobs = knobs::of(&bed, states.contains(&CacheState::Cold), &plan);
    let usual = Profile::of(&bed.transfer(), &device_name(&bed), &subject.file_system);
    #[allow(clippy::cast_precision_loss)] // a share
    let least = LEAST_BYTES / subject.bytes.max(1) as f64;
    let track = &mut Loads { bed: &bed, began };
    Search { track, states, least: least.min(1.0), budget: budget.as_secs_f64(), progress }.run(&usual, &knobs)
}

/// The states that can be had: files that stay in the page cache are never cold.
fn states(bed: &TestBed<'_>) -> Result<Vec<CacheState>> {
    bed.reach(CacheState::Cold)?;
    let cold = !bed.subject.in_memory && bed.resident()? <= TOLERANCE;
    Ok(if cold { vec![CacheState::Cold, CacheState::Warm] } else { vec![CacheState::Warm] })
}

fn device_name(bed: &TestBed<'_>) -> String {
    bed.device.product().unwrap_or_else(|| bed.device.name())
}

/// Loads of a checkpoint on this machine.
struct Loads<'a> {
    bed: &'a TestBed<'a>,
    began: Instant,
}

impl Track for Loads<'_> {
    fn load(&mut self, profile: &Profile, state: CacheState, share: f64) -> Result<f64> {
        let subject = self.bed.subject.first(share);
        let bed = self.bed.with(&subject)?;
        bed.reach(state)?;
        bed.touch()?;
        let (_, loaded) = bed.load(profile.apply(bed.transfer()))?;
        Ok(loaded.report.seconds + loaded.report.setup_seconds)
    }

    fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

pub(super) struct Search<'a> {
    pub(super) track: &'a mut dyn Track,
    pub(super) states: Vec<CacheState>,
    /// The least share of what there is that is worth loading.
    pub(super) least: f64,
    /// Seconds.
    pub(super) budget: f64,
    pub(super) progress: &'a dyn Fn(&str),
}

impl Search<'_> {
    pub(super) fn run(mut self, usual: &Profile, knobs: &[Knob]) -> Result<Tuning> {
        let values = around(knobs);
        let pair = self.pair_seconds(usual)?;
        let share = |seconds: f64, pairs: f64, least: f64| (seconds / (pairs * pair)).clamp(least, 1.0);
        #[allow(clippy::cast_precision_loss)] // some dozens
        let small = share(self.budget * LOOKING, values.len() as f64, self.least);
        let large = share(self.budget * COMPARING, f64::from(PROMISING * PAIRS + LAST_PAIRS), small);
        let mut trials = self.look(usual, &values, small)?;
        let not_reached = values.iter().skip(trials.len()).map(|(_, value)| value.what.clone()).collect();
        let last = self.budget - f64::from(LAST_PAIRS) * pair * large;
        let best = self.confirm(usual, &values, &mut trials, large, last - f64::from(PAIRS) * pair * large)?;
        let mut tuning = self.compare(usual, best, large)?;
        // What the last comparison does not confirm was not kept after all.
        let is_found = tuning.profile != *usual;
        trials.iter_mut().for_each(|trial| trial.kept &= is_found);
        (tuning.trials, tuning.not_reached, tuning.seconds) = (trials, not_reached, self.track.seconds());
        Ok(tuning)
    }

    /// Seconds of a pair of loads of everything in all states, and of what comes between them, as a load of a part tells.
    fn pair_seconds(&mut self, usual: &Profile) -> Result<f64> {
        let share = CALIBRATION.max(self.least);
        self.loads(usual, share)?; // the first of all does not count
        let began = self.track.seconds();
        self.loads(usual, share)?;
        Ok((2.0 * (self.track.seconds() - began) / share).max(f64::MIN_POSITIVE))
    }

    fn loads(&mut self, profile: &Profile, share: f64) -> Result<()> {
        let Search { track, states, .. } = self;
        states.iter().try_for_each(|state| track.load(profile, *state, share).map(drop))
    }

    /// A first look at the values, in this order, until its time is up.
    fn look(&mut self, usual: &Profile, values: &[(usize, &Value)], share: f64) -> Result<Vec<TuneTrial>> {
        let mut trials = Vec::new();
        for (_, value) in values {
            if !trials.is_empty() && self.track.seconds() >= self.budget * (1.0 - COMPARING) {
                break;
            }
            (self.progress)(&format!("trying {}", value.what));
            let ratio = self.ratios(usual, &value.on(usual), share, 1)?.mean();
            trials.push(TuneTrial { what: value.what.clone(), ratio, confirmed: None, kept: false });
        }
        Ok(trials)
    }

    /// Adds to the defaults what is better, the most promising first and one value a knob, as long as one can begin before `until`.
    fn confirm(
        &mut self,
        usual: &Profile,
        values: &[(usize, &Value)],
        trials: &mut [TuneTrial],
        share: f64,
        until: f64,
    ) -> Result<Profile> {
        let (mut best, mut kept) = (usual.clone(), Vec::new());
        let mut promising: Vec<_> = trials.iter_mut().zip(values).filter(|(trial, _)| trial.ratio < 1.0).collect();
        promising.sort_by(|(one, _), (other, _)| one.ratio.total_cmp(&other.ratio));
        for (at, (trial, (knob, value))) in promising.into_iter().enumerate() {
            if at > 0 && self.track.seconds() >= until {
                break;
            }
            if kept.contains(knob) {
                continue;
            }
            (self.progress)(&format!("comparing {}", value.what));
            let ratios = self.ratios(&best, &value.on(&best), share, PAIRS)?;
            (trial.confirmed, trial.kept) = (Some(ratios.mean()), ratios.are_better());
            if trial.kept {
                best = value.on(&best);
                kept.push(*knob);
            }
        }
        Ok(best)
    }

    /// Compares the result with the defaults; what is not better is not handed out.
    fn compare(&mut self, usual: &Profile, profile: Profile, share: f64) -> Result<Tuning> {
        let (mut cold_seconds, mut warm_seconds, mut ratios) = (None, None, Ratios(Vec::new()));
        let states = if profile == *usual { Vec::new() } else { self.states.clone() };
        for state in states {
            (self.progress)("comparing with the defaults");
            let pairs = self.pairs(usual, &profile, state, share, LAST_PAIRS)?;
            ratios.0.push(ratios_of(&pairs));
            let of = |which: usize| Spread::of(pairs.iter().map(|pair| pair[which]));
            let both = of(0).zip(of(1)).map(|(usual, tuned)| [usual, tuned]);
            match state {
                CacheState::Cold => cold_seconds = both,
                CacheState::Warm => warm_seconds = both,
            }
        }
        let better = !ratios.0.is_empty() && ratios.are_better();
        let ratio = if ratios.0.is_empty() { 1.0 } else { ratios.mean() };
        let profile = if better { profile } else { usual.clone() };
        let (trials, not_reached) = (Vec::new(), Vec::new());
        Ok(Tuning { profile, cold_seconds, warm_seconds, ratio, trials, not_reached, seconds: 0.0 })
    }

    /// Time with `other` divided by time with `best`, for each state.
    fn ratios(&mut self, best: &Profile, other: &Profile, share: f64, count: u32) -> Result<Ratios> {
        let states = self.states.clone();
        let ratios = |state| Ok(ratios_of(&self.pairs(best, other, state, share, count)?));
        states.into_iter().map(ratios).collect::<Result<_>>().map(Ratios)
    }

    /// Seconds of pairs of loads, one right after the other, of which each profile comes first in turn.
    fn pairs(
        &mut self,
        one: &Profile,
        other: &Profile,
        state: CacheState,
        share: f64,
        count: u32,
    ) -> Result<Vec<[f64; 2]>> {
        let mut load = |profile: &Profile| self.track.load(profile, state, share);
        let pair = |number: u32| -> Result<[f64; 2]> {
            if number.is_multiple_of(2) {
                return Ok([load(one)?, load(other)?]);
            }
            let second = load(other)?;
            Ok([load(one)?, second])
        };
        (0..count).map(pair).collect()
    }
}

/// The values of all knobs with the number of theirs: the first of each, then the second of each, ….
fn around(knobs: &[Knob]) -> Vec<(usize, &Value)> {
    let most = knobs.iter().map(|knob| knob.values.len()).max().unwrap_or(0);
    let turn = |turn| knobs.iter().enumerate().filter_map(move |(at, knob)| Some((at, knob.values.get(turn)?)));
    (0..most).flat_map(turn).collect()
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

#[cfg(test)]
mod tests {
    use super::super::knobs::tests::every_knob;
    use super::*;
    use vramp::storage::Engine;

    /// Loads that take what a formula says, by a clock of their own.
    struct Formula<F> {
        whole_seconds: f64,
        factor: F,
        now: f64,
    }

    impl<F: Fn(&Profile, CacheState) -> f64> Track for Formula<F> {
        fn load(&mut self, profile: &Profile, state: CacheState, share: f64) -> Result<f64> {
            let seconds = self.whole_seconds * share * (self.factor)(profile, state);
            self.now += seconds * 1.5; // the state has to be reached as well
            Ok(seconds)
        }

        fn seconds(&self) -> f64 {
            self.now
        }
    }

    fn search(budget: f64, whole_seconds: f64, factor: impl Fn(&Profile, CacheState) -> f64) -> Tuning {
        let track = &mut Formula { whole_seconds, factor, now: 0.0 };
        let states = vec![CacheState::Cold, CacheState::Warm];
        let search = Search { track, states, least: 0.01, budget, progress: &|_| {} };
        search.run(&Profile::new("cpu", "ext4"), &every_knob()).unwrap()
    }

    fn knobs_of(trials: &[TuneTrial]) -> std::collections::BTreeSet<&str> {
        trials.iter().filter_map(|trial| trial.what.split(" = ").next()).collect()
    }

    #[test]
    fn every_value_of_every_knob_is_looked_at_within_the_time_and_the_best_is_found() {
        // Threads and depth are what is better, each in one state, and more of them together.
        let factor = |profile: &Profile, state| match state {
            CacheState::Cold if profile.engine == Some(Engine::Threads) => 0.8,
            CacheState::Warm if profile.page_cache_threads == Some(8) => 0.7,
            _ => 1.0,
        };
        for (budget, whole) in [(60.0, 0.3), (60.0, 3.0), (120.0, 20.0), (600.0, 1.0)] {
            let tuning = search(budget, whole, factor);
            assert!(tuning.not_reached.is_empty() && tuning.seconds <= budget * 1.05, "{tuning:#?}");
            assert_eq!(tuning.trials.len(), every_knob().iter().map(|knob| knob.values.len()).sum::<usize>());
            let found = (tuning.profile.engine, tuning.profile.page_cache_threads, tuning.profile.direct_depth);
            assert_eq!(found, (Some(Engine::Threads), Some(8), None), "{budget} s: {tuning:#?}");
            assert!((tuning.ratio - 0.75).abs() < 1e-9, "{}", tuning.ratio);
        }
    }

    #[test]
    fn every_knob_is_reached_before_any_is_reached_twice() {
        let names = every_knob().len();
        // Loads that are far too long for the time: the least share of them is loaded.
        for budget in [0.0, 5.0, 20.0, 40.0, 60.0] {
            let tuning = search(budget, 40.0, |_, _| 1.0);
            let (tried, all) = (tuning.trials.len(), every_knob().iter().map(|knob| knob.values.len()).sum::<usize>());
            assert_eq!(knobs_of(&tuning.trials).len(), tried.min(names), "{tuning:#?}");
            assert_eq!(tried + tuning.not_reached.len(), all);
            assert!(tried >= 1 && tuning.profile == Profile::new("cpu", "ext4"));
        }
        assert_eq!(search(0.0, 40.0, |_, _| 1.0).trials.len(), 1);
    }

    #[test]
    fn what_the_last_comparison_does_not_confirm_was_not_kept() {
        // Better in all loads but those of the last comparison: their number is that of the whole search, less theirs.
        let (calls, until) = (std::cell::Cell::new(0), std::cell::Cell::new(u32::MAX));
        let found = || {
            calls.set(0);
            search(60.0, 1.0, |profile, _| {
                calls.set(calls.get() + 1);
                if profile.engine == Some(Engine::Threads) && calls.get() <= until.get() { 0.8 } else { 1.0 }
            })
        };
        assert_eq!(found().profile.engine, Some(Engine::Threads));
        until.set(calls.get() - 2 * 2 * LAST_PAIRS);
        let tuning = found();
        assert_eq!(tuning.profile, Profile::new("cpu", "ext4"));
        assert!(tuning.trials.iter().any(|trial| trial.confirmed.is_some_and(|ratio| ratio < BETTER)), "{tuning:#?}");
        assert!(tuning.trials.iter().all(|trial| !trial.kept), "{tuning:#?}");
    }

    #[test]
    fn what_the_first_look_mistakes_is_not_kept() {
        // Each second load is slower, whatever is loaded.
        let calls = std::cell::Cell::new(0u32);
        let tuning = search(60.0, 1.0, |_, _| {
            calls.set(calls.get() + 1);
            if calls.get().is_multiple_of(2) { 0.8 } else { 1.0 }
        });
        assert!(tuning.trials.iter().all(|trial| !trial.kept) && tuning.profile == Profile::new("cpu", "ext4"));
        assert!(tuning.trials.iter().any(|trial| trial.ratio < BETTER), "{tuning:#?}");
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
