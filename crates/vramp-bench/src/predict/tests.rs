//! The judgement over figures that are given: which stage limits a load, and what explains the time beyond it. Nothing is measured.

use std::sync::Arc;

use super::super::data::{Sample, Setting};
use super::*;
use vramp::checkpoint::Selection;
use vramp::device::NullDevice;
use vramp::load::{Loader, TransferOptions};
use vramp::report::Stages;
use vramp::testing::Synthetic;

const BYTES: u64 = 4_000_000;

/// What opening and planning take.
const BEFORE: f64 = 0.01;

fn ceiling(stage: BenchStage, bytes_per_second: f64) -> Ceiling {
    let seconds = BYTES as f64 / bytes_per_second;
    Ceiling {
        stage,
        setting: Setting { way: String::new(), block_bytes: 0, at_once: 1 },
        bytes: BYTES,
        samples: vec![Sample { bytes: BYTES, seconds }],
        bytes_per_second,
        seconds,
        own_bytes_per_second: bytes_per_second,
        own_samples: Vec::new(),
        own_setting: None,
    }
}

/// A load with these times, which are as long as the load.
fn load(seconds: f64, set: impl FnOnce(&mut Stages)) -> Load {
    let synthetic = Synthetic::new(1, 1, 10_000, |_, file| file);
    let mut loader = Loader::new(Arc::new(NullDevice::new()), TransferOptions::default());
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
    let mut report = loader.load(&prepared).unwrap().report;
    (report.bytes, report.seconds, report.stages) = (BYTES, seconds, Stages::default());
    report.stages.open.seconds = BEFORE;
    set(&mut report.stages);
    Load { seconds, setup_seconds: 0.0, report }
}

fn bound_by(ceilings: &[Ceiling]) -> BenchStage {
    predict(ceilings, BEFORE).unwrap().bound_by
}

/// The cause that is named for one load, with its seconds.
fn cause(ceilings: &[Ceiling], load: Load) -> Option<(Cause, f64)> {
    let prediction = predict(ceilings, BEFORE).unwrap();
    let reason = judge(&prediction, ceilings, &[load]).unwrap().reason;
    reason.map(|reason| (reason.cause, (reason.seconds * 1e6).round() / 1e6))
}

#[test]
fn the_slowest_stage_is_the_limit() {
    let stages = [BenchStage::Storage, BenchStage::FirstTouch, BenchStage::Upload, BenchStage::PageCache];
    for slow in stages {
        let rates = |stage| if stage == slow { 40e6 } else { 4e9 };
        let ceilings = stages.map(|stage| ceiling(stage, rates(stage)));
        let found = predict(&ceilings, BEFORE).unwrap();
        assert_eq!((found.bound_by, found.bytes_per_second), (slow, 40e6));
        assert!((found.seconds - 0.11).abs() < 1e-12, "{found:?}");
        let verdict = judge(&found, &ceilings, &[load(0.22, |_| {})]).unwrap();
        assert!((verdict.reached - 0.5).abs() < 1e-12, "{verdict:?}");
        assert!((verdict.next_is_faster_by.unwrap() - 10.0).abs() < 1e-9, "{verdict:?}");
    }
    assert!(predict(&[], BEFORE).is_none());
}

#[test]
fn opening_that_takes_longer_than_any_stage_is_the_limit() {
    let ceilings = [ceiling(BenchStage::Storage, 1e9), ceiling(BenchStage::Upload, 2e9)];
    let found = predict(&ceilings, BEFORE).unwrap();
    assert_eq!(found.bound_by, BenchStage::Opening);
    assert!((judge(&found, &ceilings, &[load(1.0, |_| {})]).unwrap().next_is_faster_by.unwrap() - 3.5).abs() < 1e-9);
}

#[test]
fn kernels_are_the_limit_only_where_they_are_slower_than_the_link() {
    let with = |kernels| bound_by(&[ceiling(BenchStage::Upload, 40e6), ceiling(BenchStage::Kernels, kernels)]);
    assert_eq!((with(10e6), with(39e6), with(40e6)), (BenchStage::Kernels, BenchStage::Upload, BenchStage::Upload));
}

#[test]
fn reads_and_uploads_that_take_turns_are_named() {
    let ceilings = [ceiling(BenchStage::Storage, 40e6), ceiling(BenchStage::Upload, 40e6)];
    let taking_turns = |stages: &mut Stages| {
        stages.stage.bytes = BYTES;
        (stages.reading.seconds, stages.uploading.seconds) = (0.1, 0.1);
    };
    assert_eq!(cause(&ceilings, load(0.21, taking_turns)), Some((Cause::Staging, 0.1)));
    // What was read to its place has waited for no buffer.
    assert_eq!(cause(&ceilings, load(0.21, |stages| stages.reading.seconds = 0.1)), None);
}

#[test]
fn reads_of_another_setting_than_the_fastest_are_named() {
    let storage = Ceiling { own_bytes_per_second: 20e6, ..ceiling(BenchStage::Storage, 40e6) };
    let reading = |stages: &mut Stages| stages.reading.seconds = 0.2;
    assert_eq!(cause(&[storage], load(0.21, reading)), Some((Cause::ReadSetting, 0.1)));
}

#[test]
fn a_stage_that_is_slower_in_the_load_than_alone_is_named() {
    let found = cause(&[ceiling(BenchStage::Storage, 40e6)], load(0.21, |stages| stages.reading.seconds = 0.2));
    assert_eq!(found, Some((Cause::SlowerTogether(BenchStage::Storage), 0.1)));
    let ceilings = [ceiling(BenchStage::Storage, 4e9), ceiling(BenchStage::Upload, 40e6)];
    let uploading = |stages: &mut Stages| (stages.wait_upload.seconds, stages.uploading.seconds) = (0.2, 0.2);
    assert_eq!(cause(&ceilings, load(0.21, uploading)), Some((Cause::SlowerTogether(BenchStage::Upload), 0.1)));
}

#[test]
fn time_before_and_beside_the_transfers_is_named() {
    let ceilings = [ceiling(BenchStage::Storage, 40e6)];
    assert_eq!(cause(&ceilings, load(0.21, |it| it.open.seconds += 0.1)), Some((Cause::Opening, 0.1)));
    assert_eq!(cause(&ceilings, load(0.21, |it| it.allocate.seconds = 0.08)), Some((Cause::Allocating, 0.08)));
    assert_eq!(cause(&ceilings, load(0.21, |it| it.bookkeeping.seconds = 0.3)), Some((Cause::Bookkeeping, 0.1)));
}

#[test]
fn nothing_is_named_that_explains_little_or_where_one_load_reached_the_prediction() {
    let ceilings = [ceiling(BenchStage::Storage, 40e6)];
    let late = |seconds| load(seconds, |it| it.open.seconds += 0.1);
    assert_eq!(cause(&ceilings, load(0.21, |it| it.open.seconds += 0.04)), None, "less than half of it");
    let prediction = predict(&ceilings, BEFORE).unwrap();
    let judged = judge(&prediction, &ceilings, &[late(0.21), late(0.11), late(0.21)]).unwrap();
    assert_eq!((judged.reason, judged.seconds), (None, 0.21));
}
