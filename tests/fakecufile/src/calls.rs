//! NVIDIA's functions, as `cufile.h` declares them, and those by which tests plan and count (`fakecufile_...`).

use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::driver;
use crate::state::{self, Plan, ReadFault, WORDS};

const GOOD: Status = Status { code: 0, cuda: 0 };
const INVALID_VALUE: c_uint = 5022;
const NOT_REGISTERED: c_uint = 5027;
const INVALID_POINTER: c_uint = 5012;
const ASYNC_NOT_SUPPORTED: c_uint = 5038;
const NO_CONTEXT: c_uint = 5047;
const PCI_P2PDMA: c_uint = 1 << 11;

/// `CUfileError_t`
#[repr(C)]
pub struct Status {
    code: c_uint,
    cuda: c_uint,
}

/// `CUfileDescr_t`
#[repr(C)]
pub struct Description {
    kind: c_uint,
    _padding: c_uint,
    fd: c_int,
    _rest_of_union: c_uint,
    operations: *const c_void,
}

/// `CUfileDrvProps_t`
#[repr(C)]
pub struct Properties {
    major_version: c_uint,
    minor_version: c_uint,
    poll_threshold: usize,
    max_direct_io_kb: usize,
    status_flags: c_uint,
    control_flags: c_uint,
    features: c_uint,
    device_cache_kb: c_uint,
    per_buffer_cache_kb: c_uint,
    pinned_memory_kb: c_uint,
    batch_size: c_uint,
    batch_timeout_ms: c_uint,
}

fn says(code: c_uint) -> Status {
    Status { code, cuda: 0 }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    let mut state = state::lock();
    state.counters.opens += 1;
    if state.plan.open_hangs {
        state = state::hang(state);
    }
    says(state.plan.open_code)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose() -> Status {
    GOOD
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> Status {
    GOOD
}

/// # Safety
/// `properties` has room for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(properties: *mut Properties) -> Status {
    let compat = state::lock().plan.compat;
    let said = Properties {
        major_version: 0,
        minor_version: 0,
        poll_threshold: 4,
        max_direct_io_kb: 16 << 10,
        status_flags: if compat { 0 } else { PCI_P2PDMA },
        control_flags: 2,
        features: 0,
        device_cache_kb: 128 << 10,
        per_buffer_cache_kb: 1 << 10,
        pinned_memory_kb: 32 << 20,
        batch_size: 128,
        batch_timeout_ms: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { properties.write(said) };
    GOOD
}

/// # Safety
/// `handle` has room for one, `description` is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut usize, description: *mut Description) -> Status {
    let mut state = state::lock();
    // SAFETY: the caller's promise.
    let description = unsafe { &*description };
    if state.plan.register_code != 0 {
        return says(state.plan.register_code);
    }
    if description.kind != 1 || !description.operations.is_null() {
        return says(INVALID_VALUE);
    }
    if !driver::has_context() {
        return says(NO_CONTEXT);
    }
    // Once more and without O_DIRECT: tests may have reads of any length.
    let Ok(file) = File::open(format!("/proc/self/fd/{}", description.fd)) else { return says(INVALID_VALUE) };
    let number = state.next;
    state.next += 1;
    state.files.insert(number, Arc::new(file));
    state.counters.registered += 1;
    // SAFETY: the caller's promise.
    unsafe { handle.write(number) };
    GOOD
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: usize) {
    state::lock().files.remove(&handle);
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(_address: *const c_void, _bytes: usize, _flags: c_int) -> Status {
    state::lock().counters.buffers += 1;
    GOOD
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(_address: *const c_void) -> Status {
    GOOD
}

/// # Safety
/// As for the genuine one. Only memory of the software driver is written, which checks the range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(handle: usize, base: u64, bytes: usize, offset: i64, base_offset: i64) -> isize {
    let (file, plan, number) = {
        let mut state = state::lock();
        let number = state.counters.reads;
        state.counters.reads += 1;
        state.running += 1;
        state.counters.most_at_once = state.counters.most_at_once.max(state.running);
        (state.files.get(&handle).cloned(), state.plan, number)
    };
    let read = read(file, plan, number, (base, bytes, offset, base_offset));
    let mut state = state::lock();
    state.running -= 1;
    match read {
        Ok(count) => {
            state.counters.bytes += count as u64;
            count as isize
        }
        Err(Refusal::Code(code)) => -(code as isize),
        Err(Refusal::Lie(count)) => count as isize,
        Err(Refusal::Errno(code)) => {
            drop(state);
            // SAFETY: the place of this thread's errno.
            let errno = unsafe { libc::__errno_location() };
            // SAFETY: as above.
            unsafe { errno.write(code) };
            -1
        }
    }
}

enum Refusal {
    Code(c_uint),
    Errno(i32),
    Lie(usize),
}

fn read(
    file: Option<Arc<File>>,
    plan: Plan,
    number: u64,
    (base, bytes, offset, base_offset): (u64, usize, i64, i64),
) -> Result<usize, Refusal> {
    let file = file.ok_or(Refusal::Code(NOT_REGISTERED))?;
    if !driver::has_context() {
        return Err(Refusal::Code(NO_CONTEXT));
    }
    match plan.read_fault {
        Some((from, ReadFault::Interrupted)) if number == from => return Err(Refusal::Errno(libc::EINTR)),
        Some((from, fault)) if number >= from => match fault {
            ReadFault::Code(code) => return Err(Refusal::Code(code)),
            ReadFault::Errno(code) => return Err(Refusal::Errno(code)),
            ReadFault::End => return Ok(0),
            ReadFault::TooMuch => return Err(Refusal::Lie(bytes + 1)),
            ReadFault::Interrupted => {}
        },
        _ => {}
    }
    let wanted = if plan.most_bytes > 0 { bytes.min(plan.most_bytes as usize) } else { bytes };
    let mut buffer = vec![0; wanted];
    let count =
        file.read_at(&mut buffer, offset as u64).map_err(|error| Refusal::Errno(error.raw_os_error().unwrap_or(5)))?;
    if !driver::write(base.wrapping_add_signed(base_offset), &buffer[..count]) {
        return Err(Refusal::Code(INVALID_POINTER));
    }
    Ok(count)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileReadAsync(
    _handle: usize,
    _base: u64,
    _bytes: *mut usize,
    _offset: *mut i64,
    _base_offset: *mut i64,
    _read: *mut isize,
    _stream: *mut c_void,
) -> Status {
    says(ASYNC_NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileStreamRegister(_stream: *mut c_void, _flags: c_uint) -> Status {
    says(ASYNC_NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileStreamDeregister(_stream: *mut c_void) -> Status {
    says(ASYNC_NOT_SUPPORTED)
}

/// # Safety
/// `version` has room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's promise.
    unsafe { version.write(1150) };
    GOOD
}

/// Begins anew with a plan.
///
/// # Safety
/// `words` are those of a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecufile_reset(words: *const u64) {
    // SAFETY: the caller's promise.
    let words = unsafe { words.cast::<[u64; WORDS]>().read() };
    let mut state = state::lock();
    state.plan = Plan::from_words(words);
    state.counters = state::Counters::default();
    state.released = false;
    state.files.clear();
}

/// Lets those go on that hang.
#[unsafe(no_mangle)]
pub extern "C" fn fakecufile_release() {
    state::release();
}

/// What was counted.
///
/// # Safety
/// `words` has room for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecufile_counters(words: *mut u64) {
    let state = state::lock();
    let counters = state::Counters { known: state.files.len() as u64, ..state.counters };
    // SAFETY: the caller's promise.
    unsafe { words.cast::<[u64; WORDS]>().write(counters.to_words()) };
}
