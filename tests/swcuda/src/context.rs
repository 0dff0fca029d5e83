//! Which primary context is current on a thread.
//!
//! A thread's stack belongs to one life of the double: after a reset it is empty. No other context than the devices'
//! primary ones exists here.

use std::cell::RefCell;

use cudarc::driver::sys::{CUcontext, CUresult};

use crate::handle::{Handles, Sort};
use crate::state::{Answer, State};

/// Most devices; the handle of a context carries the life that it is of beside its device.
const DEVICES: u64 = 256;

thread_local! {
    static STACK: RefCell<(u64, Vec<Option<usize>>)> = const { RefCell::new((0, Vec::new())) };
}

fn with_stack<T>(epoch: u64, body: impl FnOnce(&mut Vec<Option<usize>>) -> T) -> T {
    STACK.with_borrow_mut(|(life, stack)| {
        if *life != epoch {
            *life = epoch;
            stack.clear();
        }
        body(stack)
    })
}

impl State {
    /// The device whose context is current on this thread.
    pub(crate) fn current(&self) -> Option<usize> {
        with_stack(self.epoch, |stack| stack.last().copied().flatten())
    }

    /// `cuCtxSetCurrent`: replaces the top of the stack.
    pub(crate) fn set_current(&self, device: Option<usize>) {
        with_stack(self.epoch, |stack| {
            stack.pop();
            stack.push(device);
        });
    }

    /// `cuCtxPushCurrent`.
    pub(crate) fn push_current(&self, device: usize) {
        with_stack(self.epoch, |stack| stack.push(Some(device)));
    }

    /// `cuCtxPopCurrent`.
    pub(crate) fn pop_current(&self) -> Option<usize> {
        with_stack(self.epoch, |stack| stack.pop().flatten())
    }

    /// The handle of a device's primary context.
    pub(crate) fn context(&self, device: usize) -> CUcontext {
        Handles::pointer(Sort::Context, self.epoch * DEVICES + device as u64)
    }

    /// The device of a context's handle; `None` is the null handle.
    pub(crate) fn context_device(&self, context: CUcontext) -> Answer<Option<usize>> {
        if context.is_null() {
            return Ok(None);
        }
        let device = (0..self.devices.len()).find(|&device| self.context(device) == context);
        device.map(Some).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn contexts_stack_up_on_a_thread() {
        let mut state = State::for_tests(Config { devices: 2, ..Config::default() });
        // A life that no other test's thread is in.
        state.epoch = 77;
        assert_eq!(state.current(), None);
        state.set_current(Some(0));
        state.push_current(1);
        assert_eq!(state.current(), Some(1));
        assert_eq!(state.pop_current(), Some(1));
        assert_eq!(state.current(), Some(0));
        state.set_current(None);
        assert_eq!(state.current(), None);
        state.push_current(1);
        state.epoch = 78;
        assert_eq!(state.current(), None, "another life");
    }

    #[test]
    fn a_context_is_of_one_device_and_one_life() {
        let mut state = State::for_tests(Config { devices: 2, ..Config::default() });
        let context = state.context(1);
        assert_eq!(state.context_device(context), Ok(Some(1)));
        assert_eq!(state.context_device(std::ptr::null_mut()), Ok(None));
        state.epoch += 1;
        assert_eq!(state.context_device(context), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    }
}
