//! The scales of quantised weights: small tables that are read whole, before the weights. It converts nothing else.

use std::sync::Arc;

use crate::checkpoint::Shard;
use crate::convert::Table;
use crate::error::{Error, Result};
use crate::extent::{ShardIndex, Strided};
use crate::os;
use crate::plan::{GlobalScale, LoadPlan, ScaleTable};
use crate::storage::{Fallbacks, OpenFile, Route, Source, Storage};

/// Reads the tables of a plan, in its order.
pub(super) fn read(
    storage: &dyn Storage,
    shards: &[Shard],
    plan: &LoadPlan,
    fallbacks: &Fallbacks,
) -> Result<Vec<Table>> {
    let mut files = Shards { storage, shards, fallbacks, open: None };
    let tables = plan.scales.iter().map(|table| read_table(&mut files, table)).collect::<Result<_>>()?;
    files.close()?;
    Ok(tables)
}

/// The shard that the tables before came from stays open: neighbours in the plan are mostly neighbours in a file.
struct Shards<'a> {
    storage: &'a dyn Storage,
    shards: &'a [Shard],
    fallbacks: &'a Fallbacks,
    open: Option<(ShardIndex, Arc<dyn OpenFile>)>,
}

impl Shards<'_> {
    fn source(&mut self, index: ShardIndex) -> Result<Arc<dyn Source>> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != index) {
            self.close()?;
            let shard =
                self.shards.get(index as usize).ok_or(Error::Poisoned { what: "a plan of another checkpoint" })?;
            self.open = Some((index, shard.open(self.storage, self.fallbacks)?));
        }
        let (_, file) = self.open.as_ref().ok_or(Error::Poisoned { what: "a shard that was just opened" })?;
        Ok(file.source(Route::Buffered))
    }

    /// The shard must still be what it was.
    fn close(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), |(_, file)| file.check_unchanged())
    }
}

fn read_table(files: &mut Shards<'_>, table: &ScaleTable) -> Result<Table> {
    let mut bytes = buffer(table)?;
    fill(files, &table.runs, &mut bytes)?;
    let decoded = match &table.global {
        Some(global) => {
            let factor = read_global(files, global)?;
            Some(Table::two_level(bytes.into(), factor, global.divides))
        }
        None => Table::decode(&bytes, table.dtype),
    };
    decoded.ok_or(Error::Poisoned { what: "scales of a type that the selection refused" })
}

/// The upper level of scales on two levels.
fn read_global(files: &mut Shards<'_>, global: &GlobalScale) -> Result<f64> {
    let mut bytes = [0; 4];
    fill(files, &global.runs, &mut bytes)?;
    let factor = f32::from_le_bytes(bytes);
    if factor.is_finite() && !(global.divides && factor == 0.0) {
        return Ok(f64::from(factor));
    }
    let path = global.runs.first().and_then(|run| files.shards.get(run.shard as usize)).map(|shard| shard.path.clone());
    let what = format!("it holds {factor}, which weights cannot be scaled by");
    Err(Error::Unsupported { path: path.unwrap_or_default(), tensor: Some(global.name.to_string()), what })
}

/// Reads `runs` to their places in `bytes`.
fn fill(files: &mut Shards<'_>, runs: &[Strided], bytes: &mut [u8]) -> Result<()> {
    for run in runs {
        let source = files.source(run.shard)?;
        for index in 0..run.count {
            let Strided { offset, run: len, at, .. } = run.nth(index);
            let place = word(at).zip(word(at.saturating_add(len))).and_then(|(start, end)| bytes.get_mut(start..end));
            source.read_at(offset, place.ok_or(Error::Poisoned { what: "scales that leave their table" })?)?;
        }
    }
    Ok(())
}

/// Room for a table as stored, once it is clear that there is room to decode it as well.
fn buffer(table: &ScaleTable) -> Result<Vec<u8>> {
    let stored = table.runs.iter().map(|run| run.run.saturating_mul(run.count)).fold(0, u64::saturating_add);
    // One of F32 or F64 takes as much again, one of F16 or BF16 twice, and codes are copied once.
    let needed = stored.saturating_mul(3);
    let free = os::available_memory_bytes();
    let out_of_memory = || os::out_of_memory("cpu", needed);
    let mut bytes = Vec::new();
    let len = word(stored).filter(|_| free.is_none_or(|free| needed <= free)).ok_or_else(out_of_memory)?;
    bytes.try_reserve_exact(len).map_err(|_| out_of_memory())?;
    bytes.resize(len, 0);
    Ok(bytes)
}

fn word(bytes: u64) -> Option<usize> {
    usize::try_from(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::Meaning;
    use crate::dtype::Dtype;
    use crate::testing::{MemoryFile, MemoryStorage};

    fn table(runs: &[Strided]) -> ScaleTable {
        ScaleTable { name: "s".into(), scales: Vec::new(), dtype: Dtype::F8_E8M0, runs: runs.to_vec(), global: None }
    }

    #[test]
    fn a_table_that_is_cut_by_columns_is_put_together_again() {
        let storage = MemoryStorage::new();
        let file = MemoryFile::new("s", vec![127, 128, 131, 132, 129, 130, 133, 134]);
        let shard = Shard { path: "s".into(), bytes: 8, version: file.version(), derived: None };
        storage.insert(std::sync::Arc::new(file));
        let half = |offset, at| Strided { shard: 0, offset, run: 2, stride: 2, count: 2, at, at_stride: 4 };
        let mut files = Shards { storage: &storage, shards: &[shard], fallbacks: &Fallbacks::default(), open: None };
        let values = read_table(&mut files, &table(&[half(0, 0), half(4, 2)])).unwrap();
        let codes = [127, 128, 129, 130, 131, 132, 133, 134].into();
        assert_eq!(values, Table::Coded { codes, meaning: Meaning::Exponents });
    }

    #[test]
    fn double_precision_is_kept() {
        let bytes: Vec<u8> = [0.1f64, 1e300].into_iter().flat_map(f64::to_le_bytes).collect();
        assert_eq!(Table::decode(&bytes, Dtype::F64), Some(Table::Wide([0.1, 1e300].into())));
    }

    #[test]
    fn a_global_scale_that_makes_no_numbers_is_refused() {
        for (value, divides, is_right) in [
            (2.0f32, true, true),
            (-0.5, false, true),
            (0.0, false, true),
            (0.0, true, false),
            (f32::NAN, false, false),
            (f32::INFINITY, true, false),
        ] {
            let storage = MemoryStorage::new();
            let file = MemoryFile::new("s", value.to_le_bytes().to_vec());
            let shard = Shard { path: "s".into(), bytes: 4, version: file.version(), derived: None };
            storage.insert(std::sync::Arc::new(file));
            let run = Strided { shard: 0, offset: 0, run: 4, stride: 4, count: 1, at: 0, at_stride: 4 };
            let mut files =
                Shards { storage: &storage, shards: &[shard], fallbacks: &Fallbacks::default(), open: None };
            let found = read_global(&mut files, &GlobalScale { name: "g".into(), divides, runs: vec![run] });
            assert_eq!(found.ok(), is_right.then_some(f64::from(value)), "{value}, {divides}");
        }
    }

    #[test]
    fn a_table_larger_than_memory_is_an_error() {
        let len = 1 << 50;
        let run = Strided { shard: 0, offset: 0, run: len, stride: len, count: 1, at: 0, at_stride: len };
        assert!(matches!(buffer(&table(&[run])), Err(Error::OutOfMemory { needed, .. }) if needed == len * 3));
    }
}
