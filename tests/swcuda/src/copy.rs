//! Copies and fills, from the call to the queue: checked, entered into the log, guarded against a source that changes.
//!
//! A copy whose host side is not pinned is done before the call returns, as the driver does it, and counted. Nothing is
//! copied here.

use cudarc::driver::sys::CUresult;

use crate::clock::{Mode, StreamId};
use crate::execute;
use crate::footprint::Footprint;
use crate::pinned::Host;
use crate::report::Kind;
use crate::state::{Answer, Guard, State};
use crate::stream;
use crate::work::{Copy, Direction, Fill, Work};

/// What the target of a copy to the host holds until the copy is done: an early reader sees that he is early.
const POISON: u8 = 0xDB;

/// One row.
pub(crate) fn flat(direction: Direction, target: u64, source: u64, bytes: usize) -> Copy {
    let width = bytes as u64;
    Copy {
        direction,
        source,
        source_pitch: width,
        target,
        target_pitch: width,
        width,
        rows: 1,
        snapshot: None,
        flip: false,
    }
}

/// Queues a copy, and waits for it if `wait` is set or its host side is not pinned.
pub(crate) fn submit(mut state: Guard, id: StreamId, call: &str, mut copy: Copy, wait: bool) -> Answer {
    if copy.width == 0 || copy.rows == 0 {
        return Ok(());
    }
    if !copy.fits() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let label = format!("{call}({} bytes)", copy.bytes());
    state.check_device_sides(&copy, id, &label)?;
    let pinned = state.check_host_side(&copy, id, &label)?;
    let wait = wait || !pinned;
    if copy.direction == Direction::HostToDevice {
        copy.flip = state.faults.upload();
    }
    if pinned && !wait {
        state.guard(&mut copy);
    }
    let touches = vec![(copy.source_footprint(), Mode::Read), (copy.target_footprint(), Mode::Write)];
    let seq = state.enqueue(id, &label, touches, Vec::new(), Work::Copy(Box::new(copy)));
    finish(state, id, seq, wait)
}

/// Queues a fill.
pub(crate) fn fill(mut state: Guard, id: StreamId, call: &str, fill: Fill, wait: bool) -> Answer {
    if fill.bytes == 0 {
        return Ok(());
    }
    let label = format!("{call}({} bytes)", fill.bytes);
    let end = fill.target.checked_add(fill.bytes).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let device = state.check_range(&(fill.target..end), &label)?;
    state.same_device(device, id, &label)?;
    let touches = vec![(Footprint::flat(fill.target, fill.bytes), Mode::Write)];
    let seq = state.enqueue(id, &label, touches, Vec::new(), Work::Fill(fill));
    finish(state, id, seq, wait)
}

fn finish(mut state: Guard, id: StreamId, seq: u64, wait: bool) -> Answer {
    let Some((device, clock)) = state.streams.get(&id).map(|stream| (stream.device, stream.clock.clone())) else {
        return Ok(());
    };
    if !wait {
        return Ok(());
    }
    state = stream::wait_for(state, id, seq, &clock);
    state.health(device)
}

impl State {
    fn check_device_sides(&mut self, copy: &Copy, id: StreamId, label: &str) -> Answer {
        let source = (copy.direction != Direction::HostToDevice).then(|| copy.source_footprint());
        let target = (copy.direction != Direction::DeviceToHost).then(|| copy.target_footprint());
        for footprint in source.into_iter().chain(target) {
            let device = self.check_range(&footprint.bounds(), label)?;
            self.same_device(device, id, label)?;
        }
        Ok(())
    }

    /// Whether the host side is pinned, or there is none.
    fn check_host_side(&mut self, copy: &Copy, id: StreamId, label: &str) -> Answer<bool> {
        let footprint = match copy.direction {
            Direction::HostToDevice => copy.source_footprint(),
            Direction::DeviceToHost => copy.target_footprint(),
            Direction::WithinDevice => return Ok(true),
        };
        let bounds = footprint.bounds();
        let at = format!("{label}: host memory [{:#x}, {:#x})", bounds.start, bounds.end);
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        if bounds.start == 0 || self.space.alias().contains(bounds.start) {
            return self.refuse(Kind::WildPointer, &format!("{at} is no host memory"), invalid);
        }
        let device = self.streams.get(&id).map_or(0, |stream| stream.device);
        match self.host_range(&bounds, device) {
            Host::Pinned => Ok(true),
            Host::Torn => self.refuse(Kind::OutOfBounds, &format!("{at} leaves its pinned range"), invalid),
            Host::Freed => self.refuse(Kind::UseAfterFree, &format!("{at} was freed by cuMemFreeHost"), invalid),
            Host::Pageable => {
                self.stats.pageable_copies += 1;
                self.stats.pageable_bytes += copy.bytes();
                if self.config.pageable_is_error {
                    self.report(Kind::Pageable, &format!("{at} is not pinned, so that the copy blocks"));
                }
                Ok(false)
            }
        }
    }

    /// Remembers what a pinned source holds, or poisons a pinned target: unless something ordered before the copy may
    /// still be at work there, which is allowed.
    fn guard(&mut self, copy: &mut Copy) {
        match copy.direction {
            Direction::HostToDevice => {
                let footprint = copy.source_footprint();
                let changing = self.log.writer_in_flight(&footprint, &self.host) || self.host_functions > 0;
                if self.config.check_sources && !changing {
                    let spare = self.spares.pop().unwrap_or_default();
                    copy.snapshot = Some(execute::gather(self.space.alias(), &footprint, spare));
                }
            }
            Direction::DeviceToHost => {
                let footprint = copy.target_footprint();
                if self.log.in_flight(&footprint, &self.host).next().is_none() {
                    execute::fill_host(&footprint, POISON);
                }
            }
            Direction::WithinDevice => {}
        }
    }
}
