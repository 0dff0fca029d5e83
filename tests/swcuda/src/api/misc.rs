//! Names of errors, and entry points by their names.

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::driver::sys::{CUdriverProcAddressQueryResult, CUdriverProcAddressQueryResult_enum, CUresult, cuuint64_t};

use super::{exports, offer, put};
use crate::error;

exports! {
    /// A sentence about a code.
    Nothing fn cuGetErrorString(code: CUresult, text: *mut *const c_char) |_state, _| {
        unsafe { put(text, error::sentence(code).as_ptr()) }
    }

    /// A code's name.
    Nothing fn cuGetErrorName(code: CUresult, text: *mut *const c_char) |_state, _| {
        unsafe { put(text, error::name(code).as_ptr()) }
    }

    /// An entry point by its name without a version suffix.
    Nothing fn cuGetProcAddress_v2(
        symbol: *const c_char, address: *mut *mut c_void, _version: c_int, _flags: cuuint64_t,
        status: *mut CUdriverProcAddressQueryResult,
    ) |_state, _| {
        if symbol.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        use CUdriverProcAddressQueryResult_enum as Status;
        let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
        let found = find(&name);
        let said = if found.is_some() {
            Status::CU_GET_PROC_ADDRESS_SUCCESS
        } else {
            Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        };
        unsafe { offer(status, said) };
        unsafe { put(address, found.unwrap_or(std::ptr::null_mut())) }?;
        found.map(|_| ()).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)
    }
}

/// The newest version of an entry point.
fn find(name: &str) -> Option<*mut c_void> {
    let entries = super::table();
    let newest = entries.iter().find(|(entry, _)| entry.strip_suffix("_v2") == Some(name));
    newest.or_else(|| entries.iter().find(|(entry, _)| *entry == name)).map(|(_, address)| *address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_with_and_without_a_version() {
        assert_eq!(find("cuMemAlloc"), find("cuMemAlloc_v2"));
        assert!(find("cuInit").is_some());
        assert!(find("cuNothing").is_none());
    }
}
