//! Events.

use std::ffi::c_uint;

use cudarc::driver::sys::{CUevent, CUstream};

use super::{exports, put};
use crate::event::{self, Event};
use crate::handle::{Handles, Sort};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

exports! {
    /// An event of the current context.
    Context fn cuEventCreate(event: *mut CUevent, flags: c_uint) |mut state, device| {
        let number = state.handles.fresh();
        unsafe { put(event, Handles::pointer(Sort::Event, number)) }?;
        state.events.insert(number, Event::new(device, flags & DISABLE_TIMING == 0));
        Ok(())
    }

    /// Who waits for it already still does.
    Release fn cuEventDestroy_v2(event: CUevent) |mut state, _| {
        let number = state.event(event, "cuEventDestroy")?;
        state.events.remove(&number);
        Ok(())
    }

    /// Takes the present end of the stream.
    Context fn cuEventRecord(event: CUevent, stream: CUstream) |mut state, device| {
        let number = state.event(event, "cuEventRecord")?;
        let id = state.stream(stream, device, "cuEventRecord")?;
        state.record(number, id)
    }

    /// Waits for what was recorded.
    Context fn cuEventSynchronize(event: CUevent) |mut state, _| {
        let number = state.event(event, "cuEventSynchronize")?;
        event::synchronise(state, number)
    }

    /// Whether what was recorded is over.
    Context fn cuEventQuery(event: CUevent) |mut state, _| {
        let number = state.event(event, "cuEventQuery")?;
        event::query(state, number)
    }

    /// Milliseconds between two events. Not a GPU's.
    Context fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) |mut state, _| {
        let start = state.event(start, "cuEventElapsedTime")?;
        let end = state.event(end, "cuEventElapsedTime")?;
        let elapsed = state.elapsed(start, end)?;
        unsafe { put(milliseconds, elapsed) }
    }
}
