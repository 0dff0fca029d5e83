//! The files of a load: opened late, closed early, and demanded to be what they were. It reads nothing of them.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Shard};
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::os;
use crate::plan::LoadPlan;
use crate::storage::{Fallbacks, GpuDirect, OpenFile, Route, Source, Storage};

/// The shards that are open now: each from its first transfer to its last, and not too many at once.
pub(super) struct Files<'a> {
    storage: &'a dyn Storage,
    shards: &'a [Shard],
    fallbacks: &'a Fallbacks,
    open: BTreeMap<ShardIndex, Open>,
    /// How the device reads files itself, for transfers that say so.
    gpu_direct: Arc<GpuDirect>,
    remaining: Vec<usize>,
    most_open: usize,
}

/// An open shard, and its source by the device once there is one.
struct Open {
    file: Arc<dyn OpenFile>,
    gpu_direct: OnceCell<Arc<dyn Source>>,
}

impl<'a> Files<'a> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        plan: &LoadPlan,
        gpu_direct: Arc<GpuDirect>,
        fallbacks: &'a Fallbacks,
    ) -> Files<'a> {
        let (storage, shards) = (&**checkpoint.storage(), checkpoint.shards());
        let mut remaining = vec![0; shards.len()];
        for transfer in &plan.transfers {
            if let Some(count) = remaining.get_mut(transfer.shard as usize) {
                *count += 1;
            }
        }
        // A shard takes up to three descriptors; the rest of the process needs some too.
        let most_open = usize::try_from(os::open_files_limit().unwrap_or(256) / 4).unwrap_or(usize::MAX).clamp(1, 64);
        Files { storage, shards, fallbacks, open: BTreeMap::new(), gpu_direct, remaining, most_open }
    }

    /// The shard by a route, opened if it is not; `None` if opening one more would be too many (`force`: never too many).
    pub(super) fn source(&mut self, index: ShardIndex, route: Route, force: bool) -> Result<Option<Arc<dyn Source>>> {
        if let Some(open) = self.open.get(&index) {
            return Ok(Some(self.source_of(open, route)));
        }
        if self.open.len() >= self.most_open && !force {
            return Ok(None);
        }
        let shard = self.shards.get(index as usize).ok_or(Error::Poisoned { what: "a plan of another checkpoint" })?;
        let open = Open { file: shard.open(self.storage, self.fallbacks)?, gpu_direct: OnceCell::new() };
        let source = self.source_of(&open, route);
        self.open.insert(index, open);
        Ok(Some(source))
    }

    fn source_of(&self, open: &Open, route: Route) -> Arc<dyn Source> {
        match route {
            Route::GpuDirect => Arc::clone(open.gpu_direct.get_or_init(|| self.gpu_direct.source(&*open.file))),
            _ => open.file.source(route),
        }
    }

    /// One transfer of the shard is over. After the last one the file must still be what it was, and is closed.
    pub(super) fn transfer_done(&mut self, index: ShardIndex) -> Result<()> {
        let Some(remaining) = self.remaining.get_mut(index as usize) else { return Ok(()) };
        *remaining = remaining.saturating_sub(1);
        if *remaining > 0 {
            return Ok(());
        }
        self.open.remove(&index).map_or(Ok(()), |open| open.file.check_unchanged())
    }
}
