//! A report of a benchmark for the unit tests of its faces: cold bound by storage, warm by memory, names that would do harm.
//!
//! Only built for tests; its numbers are invented and stand for no machine.

use vramp::fallback::Fallback;
use vramp::load::Profile;
use vramp::report::{MainStage, Report, Stage, StageTime};
use vramp_bench::{
    BenchReport, BenchStage, CacheState, Ceiling, Load, Machine, Prediction, Proof, Sample, Setting, Spread,
    StageBench, State, Subject, TimelineEvent, Trial, TuneTrial, Tuning, Verdict,
};

const BYTES: u64 = 512 << 20;
const READ: u64 = 8 << 20;

/// The report.
pub(crate) fn report() -> BenchReport {
    let mut cold = state(CacheState::Cold, &[(BenchStage::Storage, 2e9), (BenchStage::PageCacheToFresh, 8e9)]);
    cold.proof.before = vec![0.0; 5];
    BenchReport {
        vramp: "0.1.0".to_owned(),
        unix_seconds: 1_796_012_940,
        seconds: 24.1,
        machine: Machine {
            processor: "Some Processor".to_owned(),
            cores: 2,
            memory_bytes: Some(16 << 30),
            kernel: "6.18.44".to_owned(),
            file_system: "ext4".to_owned(),
            device: "cpu".to_owned(),
            product: String::new(),
        },
        subject: Subject {
            path: "models/<script>alert(1)</script>&\x1b[31m".into(),
            bytes: BYTES,
            tensors: 246,
            shards: 3,
            loaded_bytes: BYTES,
            loaded_tensors: 246,
            part: None,
            runs: 1,
            unlike: 0.0,
        },
        stages: stages(),
        states: vec![cold, state(CacheState::Warm, &[(BenchStage::PageCacheToFresh, 8e9)])],
        limits: None,
        warnings: vec!["2 cores are shared with \"others\"".to_owned()],
        fallbacks: vec![Fallback { what: "io_uring".to_owned(), why: "refused: <EPERM>".to_owned() }],
    }
}

/// A search that found larger reads better.
pub(crate) fn tuning() -> Tuning {
    let trial = |what: &str, ratio, confirmed: Option<f64>| TuneTrial {
        what: what.to_owned(),
        ratio,
        confirmed,
        kept: confirmed.is_some(),
    };
    let around = |median: f64| Spread { min: median - 0.01, median, max: median + 0.01 };
    Tuning {
        profile: Profile { read_bytes: Some(READ), ..Profile::new("cpu", "ext4") },
        cold_seconds: Some([around(0.2), around(0.18)]),
        warm_seconds: None,
        ratio: 0.9,
        trials: vec![trial("direct_depth = 2", 1.12, None), trial("read_bytes = 8388608", 0.88, Some(0.9))],
        not_reached: vec!["lanes = 4".to_owned()],
        seconds: 30.0,
    }
}

fn setting(way: &str, block_bytes: u64, at_once: usize) -> Setting {
    Setting { way: way.to_owned(), block_bytes, at_once }
}

/// Three samples around a rate.
fn samples(rate: f64) -> Vec<Sample> {
    [0.98, 1.0, 1.03].map(|factor| Sample { bytes: BYTES, seconds: BYTES as f64 / rate / factor }).to_vec()
}

fn stages() -> Vec<StageBench> {
    let mut storage = Vec::new();
    for (way, factor) in [("O_DIRECT, io_uring", 1.0), ("O_DIRECT, threads", 0.95)] {
        for at_once in [1, 4, 16] {
            for shift in [17, 19, 21, 23, 24] {
                let rate = 2e9 * factor * (1.0 - 1.0 / (1 + (at_once << (shift - 17)) / 2) as f64 * 0.9);
                storage.push(Trial { setting: setting(way, 1 << shift, at_once), samples: samples(rate) });
            }
        }
    }
    let touch = (0..3).map(|at| Trial {
        setting: setting("threads, huge pages", 0, 1 << at),
        samples: samples(4e9 * f64::from(1 << at)),
    });
    let measured = |stage, trials: Vec<Trial>, best| StageBench { stage, trials, best: Some(best), skipped: None };
    vec![
        measured(BenchStage::Storage, storage, 13),
        measured(BenchStage::FirstTouch, touch.collect(), 2),
        StageBench {
            stage: BenchStage::Upload,
            trials: Vec::new(),
            best: None,
            skipped: Some("the device's memory is the host's".to_owned()),
        },
        measured(
            BenchStage::Context,
            vec![Trial { setting: setting("cuCtxCreate", 0, 1), samples: vec![Sample { bytes: 0, seconds: 0.12 }] }],
            0,
        ),
    ]
}

fn state(state: CacheState, limits: &[(BenchStage, f64)]) -> State {
    let rate = limits[0].1;
    let ceiling = |&(stage, rate): &(BenchStage, f64)| Ceiling {
        stage,
        setting: setting("O_DIRECT, io_uring", READ, 16),
        bytes: BYTES,
        samples: samples(rate),
        bytes_per_second: rate,
        seconds: BYTES as f64 / rate,
        own_bytes_per_second: rate / 2.0,
        own_samples: samples(rate / 2.0),
        own_setting: Some(setting("O_DIRECT, threads", READ, 2)),
    };
    let seconds = 0.002 + BYTES as f64 / rate;
    let loads: Vec<Load> = [1.02, 1.05, 1.012, 1.09, 1.02].map(|factor| load(seconds * factor, rate / factor)).to_vec();
    let median = seconds * 1.02;
    State {
        state,
        proof: Proof {
            proven: true,
            how: "each page asked by mincore".to_owned(),
            before: vec![1.0; 5],
            after: vec![1.0; 5],
        },
        ceilings: limits.iter().map(ceiling).collect(),
        prediction: Prediction { before_seconds: 0.002, bound_by: limits[0].0, bytes_per_second: rate, seconds },
        opening_seconds: vec![0.002; loads.len()],
        loads,
        verdict: Verdict {
            seconds: median,
            reached: seconds / median,
            bound_by: limits[0].0,
            next_is_faster_by: limits.get(1).map(|next| next.1 / rate),
            reason: None,
        },
        timeline: timeline(median),
    }
}

fn load(seconds: f64, rate: f64) -> Load {
    let read = StageTime { seconds: BYTES as f64 / rate, bytes: BYTES };
    let mut report = Report::default();
    (report.bytes, report.tensors, report.names) = (BYTES, 246, 246);
    (report.seconds, report.gb_per_s) = (seconds, BYTES as f64 / seconds / 1e9);
    report.main_stage = MainStage { stage: Stage::Reading, seconds, bytes_per_second: Some(rate) };
    report.stages.read = read;
    report.routes.direct = BYTES;
    report.cache.file_bytes = BYTES;
    (report.cpu_seconds, report.setup_seconds) = (0.3, 0.003);
    (report.file_system, report.kernel) = ("ext4".to_owned(), "6.18.44".to_owned());
    (report.device, report.engine) = ("cpu".to_owned(), "io_uring".to_owned());
    Load { seconds, setup_seconds: 0.003, report }
}

/// 64 reads on four lanes, and the loop between them.
fn timeline(seconds: f64) -> Vec<TimelineEvent> {
    let event = |lane: &str, name: &str, start: f64, seconds: f64, bytes: u64| TimelineEvent {
        lane: lane.to_owned(),
        name: name.to_owned(),
        start,
        seconds,
        bytes,
    };
    let mut events = vec![event("loop", "open", 0.0, 0.001, 0), event("loop", "plan", 0.001, 0.001, 0)];
    let step = (seconds - 0.002) / 16.0;
    for at in 0..64 {
        let (row, lane) = (at / 4, at % 4);
        let start = 0.002 + step * f64::from(row);
        events.push(event(&format!("reader {lane}, direct"), "read", start, step * 0.97, READ));
        events.push(event("loop", "wait_read", start, step * 0.9, 0));
    }
    events
}
