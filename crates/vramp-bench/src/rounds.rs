//! The rounds: in each, the stages that decide and the loads themselves take turns, cold and warm, with the page cache in a
//! state that is looked at before and after.

use std::sync::{Arc, Mutex, PoisonError};

use super::budget::Clock;
use super::cache::TOLERANCE;
use super::data::{
    BenchStage, CacheState, Ceiling, Load, Proof, Sample, Setting, Spread, State, TimelineEvent, median_load,
};
use super::predict::{judge, predict};
use super::survey::{Survey, Way, staged_bytes, staged_pieces};
use super::testbed::TestBed;
use vramp::error::{Error, Result};
use vramp::load::{Observer, Prepared, TraceEvent, TracePlace, place};
use vramp::plan::LoadPlan;
use vramp::storage::Route;

/// Rounds that differ by more than this factor tell of other work on the machine.
const UNQUIET: f64 = 1.5;

/// A load that takes less is mostly set-up, and says little about bandwidth.
const BRIEF_SECONDS: f64 = 0.05;

/// One state in the making.
struct Course {
    state: CacheState,
    lanes: Vec<Lane>,
    how: String,
    before: Vec<f64>,
    after: Vec<f64>,
    opening: Vec<f64>,
    loads: Vec<Load>,
    /// What happened in each load.
    events: Vec<Vec<TraceEvent>>,
}

/// A stage that such a load passes.
struct Lane {
    stage: BenchStage,
    way: Way,
    setting: Setting,
    /// What a load does unless it is told otherwise, where that is something else; and how it was set.
    own: Option<Way>,
    own_setting: Option<Setting>,
    bytes: u64,
    samples: Vec<Sample>,
    own_samples: Vec<Sample>,
}

/// Keeps what it is told.
#[derive(Default)]
struct Recorder {
    events: Mutex<Vec<TraceEvent>>,
}

impl Observer for Recorder {
    fn planned(&self, _plan: &LoadPlan) {}

    fn advanced(&self, _done: u64) {}

    fn event(&self, event: &TraceEvent) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(*event);
    }
}

/// Loads in both states, as often as the effort says, after one load of each that warms up and does not count.
pub(super) fn run(
    survey: &mut Survey<'_>,
    clock: &Clock,
    warnings: &mut Vec<String>,
    progress: &dyn Fn(&str),
) -> Result<Vec<State>> {
    let mut states = vec![CacheState::Cold, CacheState::Warm];
    if survey.bed.subject.in_memory {
        states.remove(0);
        let name = &survey.bed.subject.file_system;
        warnings.push(format!("the files lie in memory ({name}): nothing can be cold there, so no cold load was made"));
    }
    progress("warming up");
    let mut courses: Vec<Course> =
        states.into_iter().map(|state| Course::begin(survey, state)).collect::<Result<_>>()?;
    let rounds = survey.bed.options.effort.rounds;
    let made = clock.rounds(rounds, 1.0, |round| {
        progress(&format!("loading, round {round} of {rounds}"));
        courses.iter_mut().try_for_each(|course| course.round(round, survey))
    })?;
    if made < rounds {
        warnings.push(format!("{made} of {rounds} rounds were made: the time was up"));
    }
    let states: Vec<State> = courses.into_iter().map(|course| course.end(warnings)).collect::<Result<_>>()?;
    let is_brief = |state: &State| state.verdict.seconds < BRIEF_SECONDS;
    warnings.extend(states.iter().filter(|state| !is_brief(state)).filter_map(unquiet));
    if states.iter().any(is_brief) {
        warnings.push(
            "loads of less than 50 ms are mostly set-up; a larger checkpoint says more about bandwidth".to_owned(),
        );
    }
    Ok(states)
}

/// What makes the comparison of a state doubtful: the same thing took very different times.
fn unquiet(state: &State) -> Option<String> {
    let is_wide = |spread: &Spread| spread.max > spread.min * UNQUIET;
    let loads = state.seconds().filter(is_wide);
    let rates = state.ceilings.iter().filter(|ceiling| ceiling.stage == state.prediction.bound_by);
    let rates = rates.filter_map(|one| Spread::of(one.samples.iter().map(Sample::rate))).find(is_wide);
    let spread = loads.or(rates)?;
    let (name, times) = (if state.state == CacheState::Cold { "cold" } else { "warm" }, spread.max / spread.min);
    Some(format!(
        "this machine was not quiet: the slowest {name} round took {times:.1} times as long as the fastest; repeat it"
    ))
}

impl Course {
    fn begin(survey: &mut Survey<'_>, state: CacheState) -> Result<Course> {
        let nothing = Vec::new;
        let (how, lanes) = (String::new(), Vec::new());
        let mut course = Course {
            state,
            lanes,
            how,
            before: nothing(),
            after: nothing(),
            opening: nothing(),
            loads: Vec::new(),
            events: Vec::new(),
        };
        survey.bed.reach(state)?;
        let prepared = course.load(&survey.bed)?;
        course.lanes = lanes_of(survey, state, &prepared.plan);
        // The warm-up does not count.
        course.before.clear();
        course.after.clear();
        course.loads.clear();
        course.events.clear();
        Ok(course)
    }

    /// One load and one sample of each stage. What comes right after a change of state finds the machine still busy with that
    /// (pages given back or just filled), so load and stages take turns at coming first.
    fn round(&mut self, number: usize, survey: &mut Survey<'_>) -> Result<()> {
        let load_first = number.is_multiple_of(2);
        if load_first {
            self.opened_and_loaded(survey)?;
        }
        self.sample_lanes(survey)?;
        if load_first { Ok(()) } else { self.opened_and_loaded(survey) }
    }

    fn sample_lanes(&mut self, survey: &mut Survey<'_>) -> Result<()> {
        for lane in &mut self.lanes {
            lane.samples.push(lane.sample(survey, &lane.way)?.0);
            if let Some(own) = lane.own {
                let (sample, setting) = lane.sample(survey, &own)?;
                lane.own_samples.push(sample);
                lane.own_setting = Some(setting);
            }
        }
        Ok(())
    }

    fn opened_and_loaded(&mut self, survey: &Survey<'_>) -> Result<()> {
        survey.bed.reach(self.state)?;
        self.opening.push(survey.bed.opening()?);
        self.how = survey.bed.reach(self.state)?;
        self.load(&survey.bed).map(drop)
    }

    /// One load, observed.
    fn load(&mut self, bed: &TestBed<'_>) -> Result<Prepared> {
        bed.touch()?;
        let recorder = Arc::new(Recorder::default());
        self.before.push(bed.resident()?);
        let (prepared, loaded) = bed.load(bed.transfer().observer(Arc::clone(&recorder) as Arc<dyn Observer>))?;
        self.after.push(bed.resident()?);
        let report = loaded.report;
        self.loads.push(Load { seconds: report.seconds, setup_seconds: report.setup_seconds, report });
        self.events.push(std::mem::take(&mut *recorder.events.lock().unwrap_or_else(PoisonError::into_inner)));
        Ok(prepared)
    }

    fn is_as_wanted(&self, share: f64) -> bool {
        match self.state {
            CacheState::Cold => share <= TOLERANCE,
            CacheState::Warm => share >= 1.0 - TOLERANCE,
        }
    }

    fn end(self, warnings: &mut Vec<String>) -> Result<State> {
        let proven = self.before.iter().all(|share| self.is_as_wanted(*share));
        if !proven {
            warnings.push(self.unproven());
        }
        let timeline = self.timeline();
        let opening_seconds = self.opening;
        let before_seconds = Spread::of(opening_seconds.iter().copied()).map_or(0.0, |spread| spread.median);
        let ceilings: Vec<Ceiling> = self.lanes.into_iter().filter_map(Lane::ceiling).collect();
        let missing = || Error::Request { what: "no stage of this load could be measured".to_owned(), hint: None };
        let prediction = predict(&ceilings, before_seconds).ok_or_else(missing)?;
        let verdict = judge(&prediction, &ceilings, &self.loads).ok_or_else(missing)?;
        let proof = Proof { proven, how: self.how, before: self.before, after: self.after };
        let (state, loads) = (self.state, self.loads);
        Ok(State { state, proof, ceilings, prediction, opening_seconds, loads, verdict, timeline })
    }

    fn unproven(&self) -> String {
        let shares = Spread::of(self.before.iter().copied());
        let (least, most) = shares.map_or((0.0, 0.0), |shares| (shares.min * 100.0, shares.max * 100.0));
        let how = &self.how;
        match self.state {
            CacheState::Cold => {
                format!("the cold loads were not cold: {most:.1} % of the files stayed in the page cache ({how})")
            }
            CacheState::Warm => {
                format!("the warm loads were not warm: only {least:.1} % of the files were in the page cache")
            }
        }
    }

    /// What happened in the median load.
    fn timeline(&self) -> Vec<TimelineEvent> {
        let at = median_load(&self.loads);
        let mut events = at.and_then(|at| self.events.get(at)).cloned().unwrap_or_default();
        let places = place(&mut events);
        let shown = |(event, place): (&TraceEvent, TracePlace)| TimelineEvent {
            lane: place.to_string(),
            name: event.name.to_owned(),
            start: event.start.as_secs_f64(),
            seconds: event.duration.as_secs_f64(),
            bytes: event.bytes,
        };
        events.iter().zip(places).map(shown).collect()
    }
}

/// The stages that a load in this state passes side by side, each at its best setting.
fn lanes_of(survey: &Survey<'_>, state: CacheState, plan: &LoadPlan) -> Vec<Lane> {
    let limits = survey.bed.device.limits();
    let staged = staged_bytes(plan);
    let in_place = plan.read_bytes() - staged;
    let converted = staged_pieces(plan).filter(|one| one.piece.cast.is_some()).map(|one| one.piece.taken()).sum();
    // A warm file is read past the page cache where that was asked for.
    let cold = state == CacheState::Cold || plan.route_bytes(Route::Direct) > plan.read_bytes() / 2;
    let mut wanted = vec![(BenchStage::Storage, if cold { plan.read_bytes() } else { 0 })];
    wanted.push((BenchStage::FirstTouch, if cold && limits.keeps { in_place } else { 0 }));
    wanted.push((BenchStage::PageCacheToFresh, if cold { 0 } else { in_place }));
    wanted.push((BenchStage::PageCache, if cold { 0 } else { staged }));
    wanted.push((BenchStage::Upload, if limits.keeps { staged } else { 0 }));
    wanted.push((BenchStage::Kernels, converted));
    let least = plan.read_bytes() / 100; // what fewer bytes pass cannot be the limit
    let wanted = wanted.into_iter().filter(|(_, bytes)| *bytes > least);
    wanted.filter_map(|(stage, bytes)| Lane::of(survey, stage, bytes)).collect()
}

impl Lane {
    fn of(survey: &Survey<'_>, stage: BenchStage, bytes: u64) -> Option<Lane> {
        let (way, setting, own) = survey.best(stage)?;
        let (samples, own_samples) = (Vec::new(), Vec::new());
        Some(Lane { stage, way, setting, own, own_setting: None, bytes, samples, own_samples })
    }

    fn sample(&self, survey: &mut Survey<'_>, way: &Way) -> Result<(Sample, Setting)> {
        survey.bed.check()?;
        survey.set_cache(self.stage)?;
        survey.sample(way, Some(self.bytes))
    }

    #[allow(clippy::cast_precision_loss)] // a time has no use for the 54th bit
    fn ceiling(self) -> Option<Ceiling> {
        let rates = Spread::of(self.samples.iter().map(Sample::rate))?;
        let own = Spread::of(self.own_samples.iter().map(Sample::rate)).unwrap_or(rates);
        Some(Ceiling {
            stage: self.stage,
            setting: self.setting,
            bytes: self.bytes,
            samples: self.samples,
            bytes_per_second: rates.median,
            seconds: self.bytes as f64 / rates.median.max(f64::MIN_POSITIVE),
            own_bytes_per_second: own.median,
            own_samples: self.own_samples,
            own_setting: self.own_setting,
        })
    }
}
