//! The benchmark on the software driver: every stage of a GPU is measured, the link by its modelled rate. No speed of anything is
//! measured.

#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use swcuda::{Config, Double};
use vramp::device::CudaDevice;
use vramp::testing::watched;
use vramp_bench::{BenchStage, Effort, Options};

/// Bytes per second of the modelled link.
const LINK: f64 = 30e6;

/// A file of one tensor that holds zeros.
fn file(folder: &std::path::Path, bytes: usize) -> std::path::PathBuf {
    let header = format!(r#"{{"w":{{"dtype":"BF16","shape":[{}],"data_offsets":[0,{bytes}]}}}}"#, bytes / 2);
    let path = folder.join("model.safetensors");
    let data = vec![0; bytes];
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
    path
}

#[test]
fn the_link_keeps_its_modelled_rate_and_the_gpus_own_stages_are_measured() {
    watched(|| {
        let model = Config { check_sources: false, h2d_bytes_per_s: Some(LINK), ..Config::default() };
        let _double = Double::acquire(model);
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), 4 << 20);
        let open_device = Box::new(|| Ok(Arc::new(CudaDevice::open(0)?) as _));
        let effort = Effort { sample_seconds: 0.01, survey_rounds: 1, rounds: 1, ..Effort::QUICK };
        let mut options = Options::new(open_device, effort);
        options.transfer.staging = Some(vramp::report::Staging { count: 2, bytes: 512 << 10 });
        let report = vramp_bench::run(&path, &options, &|_| {}).unwrap();
        for state in &report.states {
            let upload = state.ceilings.iter().find(|ceiling| ceiling.stage == BenchStage::Upload).unwrap();
            // A busy machine makes copies slower than the model, and nothing makes them faster.
            assert!(upload.samples.iter().all(|sample| sample.rate() <= LINK * 1.001), "{upload:#?}");
            assert!(state.seconds().unwrap().min >= upload.bytes as f64 / (LINK * 1.001), "{state:#?}");
        }
        for stage in [BenchStage::Context, BenchStage::Pinning, BenchStage::Download, BenchStage::Kernels] {
            let found = report.stages.iter().find(|found| found.stage == stage).unwrap();
            assert!(found.best.is_some() && found.skipped.is_none(), "{stage:?}");
        }
    });
}
