//! The scales of quantised weights: small tables that are read whole, before the weights. It converts nothing else.

use std::sync::Arc;

use super::open_same;
use crate::checkpoint::Shard;
use crate::convert::decode_f32;
use crate::error::{Error, Result};
use crate::extent::Strided;
use crate::plan::{LoadPlan, ScaleTable};
use crate::source::{Fallbacks, Route, Storage};

/// Reads the tables of a plan, in its order.
pub(super) fn read(
    storage: &dyn Storage,
    shards: &[Shard],
    plan: &LoadPlan,
    fallbacks: &Fallbacks,
) -> Result<Vec<Arc<[f32]>>> {
    plan.scales.iter().map(|table| read_table(storage, shards, table, fallbacks)).collect()
}

fn read_table(
    storage: &dyn Storage,
    shards: &[Shard],
    table: &ScaleTable,
    fallbacks: &Fallbacks,
) -> Result<Arc<[f32]>> {
    let mut bytes = Vec::new();
    for run in &table.runs {
        let shard = shards.get(run.shard as usize).ok_or(Error::Poisoned { what: "a plan of another checkpoint" })?;
        let file = open_same(storage, shard, fallbacks)?;
        let source = file.source(Route::Buffered);
        for index in 0..run.count {
            let Strided { offset, run: len, .. } = run.nth(index);
            let start = bytes.len();
            let len = usize::try_from(len).map_err(|_| Error::Poisoned { what: "a table above the word size" })?;
            bytes.resize(start + len, 0);
            source.read_at(offset, &mut bytes[start..])?;
        }
        file.check_unchanged()?;
    }
    let values = decode_f32(&bytes, &table.dtype);
    values.map(Into::into).ok_or(Error::Poisoned { what: "scales of a type that the selection refused" })
}
