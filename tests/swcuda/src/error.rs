//! The driver's error codes: from numbers, to names and to sentences.
//!
//! The list is cudarc's enum, so that no code can be injected which its callers do not know: a foreign discriminant in a
//! Rust enum is undefined behaviour. This file never decides when an error is due.

use std::ffi::CStr;

use cudarc::driver::sys::CUresult;

macro_rules! codes {
    ($($name:ident,)*) => {
        /// The code of a number, if cudarc knows it.
        pub(crate) fn from_number(number: u32) -> Option<CUresult> {
            $(if CUresult::$name as u32 == number {
                return Some(CUresult::$name);
            })*
            None
        }

        /// The code's own name, as `cuGetErrorName` gives it.
        pub(crate) fn name(code: CUresult) -> &'static CStr {
            const fn terminated(text: &'static str) -> &'static CStr {
                match CStr::from_bytes_with_nul(text.as_bytes()) {
                    Ok(text) => text,
                    Err(_) => c"",
                }
            }
            match code {
                $(CUresult::$name => const { terminated(concat!(stringify!($name), "\0")) },)*
            }
        }
    };
}

codes! {
    CUDA_SUCCESS,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_DEINITIALIZED,
    CUDA_ERROR_PROFILER_DISABLED,
    CUDA_ERROR_PROFILER_NOT_INITIALIZED,
    CUDA_ERROR_PROFILER_ALREADY_STARTED,
    CUDA_ERROR_PROFILER_ALREADY_STOPPED,
    CUDA_ERROR_STUB_LIBRARY,
    CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUDA_ERROR_NO_DEVICE,
    CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_DEVICE_NOT_LICENSED,
    CUDA_ERROR_INVALID_IMAGE,
    CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT,
    CUDA_ERROR_MAP_FAILED,
    CUDA_ERROR_UNMAP_FAILED,
    CUDA_ERROR_ARRAY_IS_MAPPED,
    CUDA_ERROR_ALREADY_MAPPED,
    CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUDA_ERROR_ALREADY_ACQUIRED,
    CUDA_ERROR_NOT_MAPPED,
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY,
    CUDA_ERROR_NOT_MAPPED_AS_POINTER,
    CUDA_ERROR_ECC_UNCORRECTABLE,
    CUDA_ERROR_UNSUPPORTED_LIMIT,
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    CUDA_ERROR_INVALID_PTX,
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT,
    CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUDA_ERROR_JIT_COMPILATION_DISABLED,
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC,
    CUDA_ERROR_CONTAINED,
    CUDA_ERROR_INVALID_SOURCE,
    CUDA_ERROR_FILE_NOT_FOUND,
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
    CUDA_ERROR_OPERATING_SYSTEM,
    CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_ILLEGAL_STATE,
    CUDA_ERROR_LOSSY_QUERY,
    CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_NOT_READY,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_ASSERT,
    CUDA_ERROR_TOO_MANY_PEERS,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUDA_ERROR_MISALIGNED_ADDRESS,
    CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUDA_ERROR_INVALID_PC,
    CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
    CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUDA_ERROR_NOT_PERMITTED,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_SYSTEM_NOT_READY,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
    CUDA_ERROR_MPS_CONNECTION_FAILED,
    CUDA_ERROR_MPS_RPC_FAILURE,
    CUDA_ERROR_MPS_SERVER_NOT_READY,
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
    CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUDA_ERROR_CDP_NOT_SUPPORTED,
    CUDA_ERROR_CDP_VERSION_MISMATCH,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUDA_ERROR_CAPTURED_EVENT,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUDA_ERROR_TIMEOUT,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
    CUDA_ERROR_EXTERNAL_DEVICE,
    CUDA_ERROR_INVALID_CLUSTER_SIZE,
    CUDA_ERROR_FUNCTION_NOT_LOADED,
    CUDA_ERROR_INVALID_RESOURCE_TYPE,
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
    CUDA_ERROR_KEY_ROTATION,
    CUDA_ERROR_UNKNOWN,
}

/// A sentence for the codes that a program is likely to meet, as `cuGetErrorString` gives it.
pub(crate) fn sentence(code: CUresult) -> &'static CStr {
    match code {
        CUresult::CUDA_SUCCESS => c"no error",
        CUresult::CUDA_ERROR_INVALID_VALUE => c"invalid argument",
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => c"out of memory",
        CUresult::CUDA_ERROR_NOT_INITIALIZED => c"initialization error",
        CUresult::CUDA_ERROR_NO_DEVICE => c"no CUDA-capable device is detected",
        CUresult::CUDA_ERROR_INVALID_DEVICE => c"invalid device ordinal",
        CUresult::CUDA_ERROR_INVALID_CONTEXT => c"invalid device context",
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => c"uncorrectable ECC error encountered",
        CUresult::CUDA_ERROR_INVALID_PTX => c"a PTX JIT compilation failed",
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => c"the provided PTX was compiled with an unsupported toolchain.",
        CUresult::CUDA_ERROR_INVALID_HANDLE => c"invalid resource handle",
        CUresult::CUDA_ERROR_NOT_READY => c"device not ready",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        CUresult::CUDA_ERROR_LAUNCH_FAILED => c"unspecified launch failure",
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => {
            c"part or all of the requested memory range is already mapped"
        }
        CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED => c"pointer does not correspond to a registered memory region",
        other => name(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_agree() {
        assert_eq!(from_number(700), Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        assert_eq!(from_number(0), Some(CUresult::CUDA_SUCCESS));
        assert_eq!(from_number(123_456), None);
        assert_eq!(name(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE), c"CUDA_ERROR_ECC_UNCORRECTABLE");
        assert_eq!(sentence(CUresult::CUDA_ERROR_OUT_OF_MEMORY), c"out of memory");
    }
}
