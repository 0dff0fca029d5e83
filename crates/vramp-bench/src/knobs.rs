//! What a search for better options may turn: each knob and the values worth a try. It loads nothing and judges nothing.

use serde::Serialize;

use super::survey;
use super::testbed::TestBed;
use vramp::load::{MOST_AT_ONCE, Profile, TransferOptions};
use vramp::plan::LoadPlan;
use vramp::report::Staging;
use vramp::storage::Engine;

const MIB: usize = 1 << 20;

/// Something that can be set, and to what.
pub(super) struct Knob {
    pub(super) values: Vec<Value>,
}

/// One value of a knob.
pub(super) struct Value {
    /// The knob and its value: `direct_depth = 4`.
    pub(super) what: String,
    set: Box<dyn Fn(&mut Profile)>,
}

impl Value {
    /// `profile` with this value.
    pub(super) fn on(&self, profile: &Profile) -> Profile {
        let mut changed = profile.clone();
        (self.set)(&mut changed);
        changed
    }
}

/// The knobs that mean something for loads by this plan.
pub(super) fn of(bed: &TestBed<'_>, cold: bool, plan: &LoadPlan) -> Vec<Knob> {
    let usual = bed.transfer();
    let staged = survey::staged_bytes(plan) > plan.read_bytes() / 100;
    let staging = usual.staging.map_or(bed.device.limits().staging, |it| (it.count, it.bytes));
    choose(&usual, cold, staged.then_some(staging))
}

fn choose(usual: &TransferOptions, cold: bool, staging: Option<(usize, usize)>) -> Vec<Knob> {
    let queue = usual.queue;
    let mut knobs = Vec::new();
    if cold {
        knobs.push(knob("direct_depth", around(queue.direct_depth), |profile, it| profile.direct_depth = Some(it)));
        knobs.push(knob("engine", vec![Engine::Threads], |profile, it| profile.engine = Some(it)));
    }
    let sizes = [8, 2, 16].map(|mib| (mib * MIB) as u64).into();
    knobs.push(knob("read_bytes", sizes, |profile, it| profile.read_bytes = Some(it)));
    let threads = around(queue.page_cache_threads);
    knobs.push(knob("page_cache_threads", threads, |profile, it| profile.page_cache_threads = Some(it)));
    if cold {
        let threads = around(queue.populate_threads);
        knobs.push(knob("populate_threads", threads, |profile, it| profile.populate_threads = Some(it)));
    }
    if let Some(staging) = staging {
        knobs.push(knob("staging", shapes(staging), |profile, it| profile.staging = Some(it)));
        knobs.push(knob("lanes", vec![2, 1, 4], |profile, it| profile.lanes = Some(it)));
    }
    let usual = Profile::of(usual, "", "");
    knobs.iter_mut().for_each(|knob| knob.values.retain(|value| value.on(&usual) != usual));
    knobs.retain(|knob| !knob.values.is_empty());
    knobs
}

/// A knob with these values, set by `set`.
fn knob<T: Copy + Serialize + 'static>(
    name: &str,
    values: Vec<T>,
    set: impl Fn(&mut Profile, T) + Copy + 'static,
) -> Knob {
    let value = |value: T| {
        let text = serde_json::to_string(&value).unwrap_or_default(); // as in the file
        let what = format!("{name} = {}", text.trim_matches('"'));
        Value { what, set: Box::new(move |profile| set(profile, value)) }
    };
    Knob { values: values.into_iter().map(value).collect() }
}

/// Numbers around the usual one, without it; the nearer first.
fn around(usual: usize) -> Vec<usize> {
    let mut values = Vec::new();
    for value in [usual * 2, (usual / 2).max(1), usual * 4, (usual / 4).max(1)] {
        if value != usual && value <= MOST_AT_ONCE && !values.contains(&value) {
            values.push(value);
        }
    }
    values
}

/// Shapes of staging around the usual one.
fn shapes((count, bytes): (usize, usize)) -> Vec<Staging> {
    let shapes = [(count, bytes * 2), (count, bytes / 2), (count * 2, bytes), (count / 2, bytes)];
    let shapes = shapes.into_iter().filter(|(count, bytes)| *count > 0 && *bytes >= 4096);
    shapes.map(|(count, bytes)| Staging { count, bytes }).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// All knobs of a load that is staged and may be cold, with two threads each and reads of a depth of eight.
    pub(crate) fn every_knob() -> Vec<Knob> {
        let mut usual = TransferOptions::default();
        (usual.queue.direct_depth, usual.queue.page_cache_threads, usual.queue.populate_threads) = (8, 2, 2);
        choose(&usual, true, Some((8, 4 * MIB)))
    }

    #[test]
    fn a_value_changes_one_thing_and_what_is_usual_is_no_value() {
        let base = Profile { lanes: Some(4), ..Profile::new("cpu", "ext4") };
        let knobs = every_knob();
        let whats = |at: usize| knobs[at].values.iter().map(|value| value.what.clone()).collect::<Vec<_>>();
        assert_eq!(knobs.len(), 7);
        assert_eq!(whats(0), ["direct_depth = 16", "direct_depth = 4", "direct_depth = 32", "direct_depth = 2"]);
        assert_eq!(whats(1), ["engine = threads"]);
        assert_eq!(whats(6), ["lanes = 2", "lanes = 1", "lanes = 4"]);
        let deeper = knobs[0].values[0].on(&base);
        assert_eq!(deeper, Profile { direct_depth: Some(16), ..base.clone() });
        let usual = TransferOptions::default().lanes(2);
        let lanes = choose(&usual, false, Some((8, MIB))).pop().unwrap();
        assert_eq!(
            lanes.values.iter().map(|value| value.what.as_str()).collect::<Vec<_>>(),
            ["lanes = 1", "lanes = 4"]
        );
        assert_eq!((around(1), around(8), around(MOST_AT_ONCE)), (vec![2, 4], vec![16, 4, 32, 2], vec![512, 256]));
    }
}
