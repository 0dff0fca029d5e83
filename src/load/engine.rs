//! What a loader keeps between loads: the staging pool, the read queue and the stream of the device. It makes none of them.

use crate::device::Stream;
use crate::memory::staging::StagingPool;
use crate::storage::ReadQueue;

/// What a loader keeps warm.
pub(super) struct Engine {
    pub(super) pool: Option<StagingPool>,
    pub(super) queue: Box<dyn ReadQueue>,
    pub(super) stream: Option<Box<dyn Stream>>,
}
