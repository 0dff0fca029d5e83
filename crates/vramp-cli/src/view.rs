//! `vramp load --route view`: tensors that borrow a read-only mapping. Nothing is read before somebody touches it.
//!
//! The program touches the bytes only for digests, and then by copies, never by a slice of the mapping.

use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selected};
use vramp::load::Prepared;
use vramp::report::StageTime;
use vramp::view::Mapped;

/// Maps the files of the selected tensors; the report counts opening and planning too.
pub(crate) fn open(checkpoint: &Checkpoint, selected: &[Selected], prepared: &Prepared) -> Result<Mapped, Error> {
    let mut mapped = checkpoint.map(selected)?;
    let report = &mut mapped.report;
    report.stages.open = StageTime { seconds: prepared.open_seconds, bytes: 0 };
    report.stages.plan = StageTime { seconds: prepared.plan_seconds, bytes: 0 };
    report.seconds += prepared.open_seconds + prepared.plan_seconds;
    Ok(mapped)
}
