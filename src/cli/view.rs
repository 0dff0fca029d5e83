//! `vramp load --route view`: tensors that borrow a read-only mapping. Nothing is read before somebody touches it.
//!
//! The program itself touches the bytes only for digests, and then by copying them out of the mapping, never by lending a
//! slice of it. The library's own way to views is the seam that [`open`] stands in front of.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selected, Shard, TensorInfo};
use vramp::digest::{Digest, Hasher};
use vramp::load::Prepared;
use vramp::os;
use vramp::plan::Placement;
use vramp::report::{Bound, Report, Routes, Stage, StageTime, Stages, Staging};
use vramp::source::{Fallbacks, LocalStorage, MappedFile, Storage};

/// Bytes that are copied out of the mapping at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A tensor as it lies in its file.
#[derive(Debug, Clone)]
pub(crate) struct ViewedTensor {
    map: Option<Arc<MappedFile>>,
    offset: u64,
    bytes: u64,
}

/// The views of all selected tensors, in the order of the plan.
pub(crate) struct Viewed {
    pub(crate) tensors: Vec<ViewedTensor>,
    pub(crate) report: Report,
}

impl ViewedTensor {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn sha256(&self) -> Result<Digest, Error> {
        let mut hasher = Hasher::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let (mut offset, end) = (self.offset, self.offset.saturating_add(self.bytes));
        while let (Some(map), true) = (&self.map, offset < end) {
            let len = usize::try_from(end - offset).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
            map.copy_to(offset, &mut chunk[..len])?;
            hasher.update(&chunk[..len]);
            offset += len as u64;
        }
        Ok(hasher.finish())
    }
}

/// Maps the files of the selected tensors.
pub(crate) fn open(checkpoint: &Checkpoint, selected: &[Selected], prepared: &Prepared) -> Result<Viewed, Error> {
    let started = Instant::now();
    let cpu_before = os::cpu_seconds();
    let fallbacks = Fallbacks::default();
    let mut maps = BTreeMap::new();
    let mut tensors = Vec::with_capacity(selected.len());
    for (chosen, placement) in selected.iter().zip(&prepared.plan.placements) {
        let info = checkpoint.tensors().get(chosen.tensor).ok_or(Error::Poisoned { what: "the order of the plan" })?;
        tensors.push(viewed(checkpoint.shards(), info, chosen, placement, &mut maps, &fallbacks)?);
    }
    let map_seconds = started.elapsed().as_secs_f64();
    let cpu = os::cpu_seconds();
    let mut report = report(prepared, map_seconds);
    report.cpu_seconds = (cpu.user + cpu.system) - (cpu_before.user + cpu_before.system);
    report.fallbacks = fallbacks.list();
    Ok(Viewed { tensors, report })
}

fn viewed(
    shards: &[Shard],
    info: &TensorInfo,
    chosen: &Selected,
    placement: &Placement,
    maps: &mut BTreeMap<u32, Arc<MappedFile>>,
    fallbacks: &Fallbacks,
) -> Result<ViewedTensor, Error> {
    let runs = info.runs(chosen.slice.as_ref());
    let (shard, offset) = match runs.as_slice() {
        _ if placement.bytes == 0 => return Ok(ViewedTensor { map: None, offset: 0, bytes: 0 }),
        [run] if run.count == 1 => (run.shard, run.offset),
        _ => return Err(scattered(&placement.name)),
    };
    let map = match maps.get(&shard) {
        Some(map) => Arc::clone(map),
        None => map_shard(shards, shard, fallbacks)?,
    };
    maps.insert(shard, Arc::clone(&map));
    Ok(ViewedTensor { map: Some(map), offset, bytes: placement.bytes })
}

fn scattered(name: &str) -> Error {
    Error::Request {
        what: format!("tensor {name:?} does not lie in one piece as selected, so it cannot be viewed"),
        hint: Some("use --route mapped, which copies, or select whole tensors and leading dimensions".to_owned()),
    }
}

/// Maps a shard, which must be the file whose header was read.
fn map_shard(shards: &[Shard], index: u32, fallbacks: &Fallbacks) -> Result<Arc<MappedFile>, Error> {
    let shard = shards.get(index as usize).ok_or(Error::Poisoned { what: "a shard that is not there" })?;
    let file = LocalStorage.open(&shard.path, fallbacks)?;
    if let Some(what) = shard.identity.difference(&file.identity()) {
        return Err(Error::Changed { path: shard.path.clone(), what });
    }
    file.map()
}

/// No byte moved: there is no bandwidth to be limited by.
fn report(prepared: &Prepared, map_seconds: f64) -> Report {
    let bytes = prepared.plan.tensor_bytes();
    let stages = Stages {
        open: StageTime { seconds: prepared.open_seconds, bytes: 0 },
        plan: StageTime { seconds: prepared.plan_seconds, bytes: 0 },
        allocate: StageTime { seconds: map_seconds, bytes: 0 },
        ..Stages::default()
    };
    let seconds = prepared.open_seconds + prepared.plan_seconds + map_seconds;
    Report {
        bytes,
        tensors: prepared.plan.placements.len(),
        seconds,
        gb_per_s: super::text::as_f64(bytes) / seconds.max(f64::MIN_POSITIVE) / 1e9,
        estimate: Bound { bandwidth: 0.0, bound_by: Stage::SetUp, seconds: 0.0 },
        efficiency: 1.0,
        stages,
        routes: Routes { view: bytes, ..Routes::default() },
        cache: prepared.cache,
        staging: Staging::default(),
        peak_host_bytes: os::peak_resident_bytes().unwrap_or(0),
        cpu_seconds: 0.0,
        setup_seconds: 0.0,
        fallbacks: Vec::new(),
        file_system: prepared.file_system.clone(),
        kernel: os::kernel_release().unwrap_or_default(),
        device: "cpu".to_owned(),
        engine: "none".to_owned(),
    }
}
