//! The software driver of this process, found as the genuine library finds the genuine driver: by what is already loaded.

use std::ffi::{CStr, c_void};

/// Puts bytes into device memory; whether that was such.
pub(crate) fn write(address: u64, bytes: &[u8]) -> bool {
    let Some(symbol) = find(c"swcuda_dma_write") else { return false };
    // SAFETY: the software driver's function of this name has this type.
    let write: unsafe extern "C" fn(u64, *const u8, usize) -> i32 = unsafe { std::mem::transmute(symbol) };
    // SAFETY: the slice has its bytes.
    (unsafe { write(address, bytes.as_ptr(), bytes.len()) }) == 0
}

/// Whether a context is current on the calling thread: cuFile reads for that one.
pub(crate) fn has_context() -> bool {
    let Some(symbol) = find(c"cuCtxGetCurrent") else { return false };
    // SAFETY: the driver's function of this name has this type.
    let current: unsafe extern "C" fn(*mut *mut c_void) -> u32 = unsafe { std::mem::transmute(symbol) };
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one pointer.
    let code = unsafe { current(&raw mut context) };
    code == 0 && !context.is_null()
}

fn find(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a lookup among what is loaded for all.
    let mut found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if found.is_null() {
        // SAFETY: looks at what is loaded already and loads nothing; not closed, so that it stays.
        let driver = unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        if !driver.is_null() {
            // SAFETY: the handle is open.
            found = unsafe { libc::dlsym(driver, name.as_ptr()) };
        }
    }
    (!found.is_null()).then_some(found)
}
