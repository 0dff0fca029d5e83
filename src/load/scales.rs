//! The scales of quantised weights: small tables that are read whole, before the weights. It converts nothing else.

use std::sync::Arc;

use super::open_same;
use crate::checkpoint::Shard;
use crate::convert::decode_f32;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::extent::{ShardIndex, Strided};
use crate::os;
use crate::plan::{LoadPlan, ScaleTable};
use crate::source::{Fallbacks, OpenFile, Route, Source, Storage};

/// Reads the tables of a plan, in its order.
pub(super) fn read(
    storage: &dyn Storage,
    shards: &[Shard],
    plan: &LoadPlan,
    fallbacks: &Fallbacks,
) -> Result<Vec<Arc<[f32]>>> {
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
            self.open = Some((index, open_same(self.storage, shard, self.fallbacks)?));
        }
        let (_, file) = self.open.as_ref().ok_or(Error::Poisoned { what: "a shard that was just opened" })?;
        Ok(file.source(Route::Buffered))
    }

    /// The shard must still be what it was.
    fn close(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), |(_, file)| file.check_unchanged())
    }
}

fn read_table(files: &mut Shards<'_>, table: &ScaleTable) -> Result<Arc<[f32]>> {
    let mut bytes = buffer(table)?;
    for run in &table.runs {
        let source = files.source(run.shard)?;
        for index in 0..run.count {
            let Strided { offset, run: len, at, .. } = run.nth(index);
            let place = word(at).zip(word(at.saturating_add(len))).and_then(|(start, end)| bytes.get_mut(start..end));
            source.read_at(offset, place.ok_or(Error::Poisoned { what: "scales that leave their table" })?)?;
        }
    }
    if let Some(scale) = beyond_f32(&bytes, &table.dtype) {
        let path =
            table.runs.first().and_then(|run| files.shards.get(run.shard as usize)).map(|shard| shard.path.clone());
        let what = format!("holds the scale {scale:e}, and scales are multiplied as F32, which reaches to 3.4e38");
        return Err(Error::Unsupported { path: path.unwrap_or_default(), tensor: Some(table.name.to_string()), what });
    }
    let values = decode_f32(&bytes, &table.dtype);
    values.map(Into::into).ok_or(Error::Poisoned { what: "scales of a type that the selection refused" })
}

/// A finite scale that would become infinite: only F64 has such.
fn beyond_f32(bytes: &[u8], dtype: &Dtype) -> Option<f64> {
    let words = if *dtype == Dtype::F64 { bytes } else { &[] };
    let (words, _) = words.as_chunks::<8>();
    #[allow(clippy::cast_possible_truncation)] // the question is whether it is
    let lost = |scale: &f64| scale.is_finite() && (*scale as f32).is_infinite();
    words.iter().map(|word| f64::from_le_bytes(*word)).find(lost)
}

/// Room for a table as stored, once it is clear that there is room to decode it as well.
fn buffer(table: &ScaleTable) -> Result<Vec<u8>> {
    let stored = table.runs.iter().map(|run| run.run.saturating_mul(run.count)).fold(0, u64::saturating_add);
    let elements = stored.saturating_mul(8) / table.dtype.bits().unwrap_or(8).max(1);
    let needed = elements.saturating_mul(size_of::<f32>() as u64).saturating_add(stored);
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
    use crate::testing::{MemoryFile, MemoryStorage};

    fn table(runs: &[Strided]) -> ScaleTable {
        ScaleTable { name: "s".into(), scales: Vec::new(), dtype: Dtype::F8_E8M0, runs: runs.to_vec() }
    }

    #[test]
    fn a_table_that_is_cut_by_columns_is_put_together_again() {
        let storage = MemoryStorage::new();
        let file = MemoryFile::new("s", vec![127, 128, 131, 132, 129, 130, 133, 134]);
        let shard = Shard { path: "s".into(), bytes: 8, identity: file.identity(), made: None };
        storage.insert(std::sync::Arc::new(file));
        let half = |offset, at| Strided { shard: 0, offset, run: 2, stride: 2, count: 2, at, at_stride: 4 };
        let mut files = Shards { storage: &storage, shards: &[shard], fallbacks: &Fallbacks::default(), open: None };
        let values = read_table(&mut files, &table(&[half(0, 0), half(4, 2)])).unwrap();
        assert_eq!(*values, [0, 1, 2, 3, 4, 5, 6, 7].map(|power| f32::powi(2.0, power)));
    }

    #[test]
    fn a_scale_beyond_f32_is_refused_instead_of_becoming_infinite() {
        let bytes = |scales: &[f64]| scales.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(beyond_f32(&bytes(&[1.0, f64::INFINITY, f64::NAN, -1e300]), &Dtype::F64), Some(-1e300));
        assert_eq!(beyond_f32(&bytes(&[1.0, 3.4e38, f64::NEG_INFINITY]), &Dtype::F64), None);
        assert_eq!(beyond_f32(&bytes(&[1e300]), &Dtype::F32), None);
    }

    #[test]
    fn a_table_larger_than_memory_is_an_error() {
        let len = 1 << 50;
        let run = Strided { shard: 0, offset: 0, run: len, stride: len, count: 1, at: 0, at_stride: len };
        assert!(matches!(buffer(&table(&[run])), Err(Error::OutOfMemory { needed, .. }) if needed == len * 5));
    }
}
