//! Streams, and functions of the program that streams call.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUevent, CUhostFn, CUresult, CUstream};

use super::{exports, put};
use crate::stream;
use crate::work::{HostCall, Work};

/// The priority before which no other goes.
pub(super) const GREATEST_PRIORITY: c_int = -5;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

exports! {
    /// A stream of the current context.
    Context fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) |mut state, device| {
        let id = state.new_stream(device, flags & NON_BLOCKING == 0, 0)?;
        unsafe { put(stream, stream::pointer(id)) }
    }

    /// The same; the priority is kept and has no effect.
    Context fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) |mut state, device| {
        let id = state.new_stream(device, flags & NON_BLOCKING == 0, priority.clamp(GREATEST_PRIORITY, 0))?;
        unsafe { put(stream, stream::pointer(id)) }
    }

    /// The priority that the stream was made with.
    Context fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int) |mut state, device| {
        let id = state.stream(stream, device, "cuStreamGetPriority")?;
        unsafe { put(priority, state.streams.get(&id).map_or(0, |stream| stream.priority)) }
    }

    /// Returns at once; what is in the stream still runs.
    Release fn cuStreamDestroy_v2(stream: CUstream) |mut state, device| {
        if stream as usize <= 2 {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        // A stream of a device with a sticky error can still be given back.
        let id = match state.stream(stream, device, "cuStreamDestroy") {
            Ok(id) => id,
            Err(code) => match state.find_stream(stream) {
                Some(id) => id,
                None => return Err(code),
            },
        };
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.destroyed = true;
        }
        crate::state::notify();
        Ok(())
    }

    /// Waits for what is in the stream now.
    Context fn cuStreamSynchronize(stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuStreamSynchronize")?;
        let of = state.streams.get(&id).map_or(device, |stream| stream.device);
        stream::wait_stream(state, id).health(of)
    }

    /// Whether the stream is empty.
    Context fn cuStreamQuery(stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuStreamQuery")?;
        state.query_stream(id)
    }

    /// What comes later in the stream waits for the event.
    Context fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) |mut state, device| {
        let id = state.stream(stream, device, "cuStreamWaitEvent")?;
        let event = state.event(event, "cuStreamWaitEvent")?;
        state.wait_event(id, event);
        Ok(())
    }

    /// Has the stream call a function of the program.
    Context fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, argument: *mut c_void) |mut state, device| {
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let id = state.stream(stream, device, "cuLaunchHostFunc")?;
        state.host_functions += 1;
        let work = Work::Host(HostCall { function, argument: argument as usize });
        state.enqueue(id, "cuLaunchHostFunc", Vec::new(), Vec::new(), work);
        Ok(())
    }
}
