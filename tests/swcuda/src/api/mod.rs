//! The entry points of the driver, by subject. All are made by one macro, which proves at compile time that each has the
//! parameters of cudarc's binding of the same name, and which leads each through `entry`.

mod copy;
mod device;
mod event;
mod memory;
mod misc;
mod module;
mod stream;

use std::ffi::c_void;

use cudarc::driver::sys::CUresult;

use crate::state::Answer;

/// Exports entry points: `NEED fn NAME(PARAMETERS) |state, device| BODY`. The body has the lock and answers an `Answer`.
macro_rules! exports {
    ($($(#[$meta:meta])* $need:ident fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$state:pat_param, $device:pat_param| $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// As the driver's manual asks of the pointers.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> cudarc::driver::sys::CUresult {
                const _: unsafe fn($($type),*) -> cudarc::driver::sys::CUresult = cudarc::driver::sys::$name;
                crate::entry::run(stringify!($name), crate::entry::Need::$need, |$state, $device| $body)
            }
        )*

        /// The names and addresses of the entry points of this file.
        pub(super) fn table() -> Vec<(&'static str, *mut std::ffi::c_void)> {
            vec![$((stringify!($name), $name as *const () as *mut std::ffi::c_void)),*]
        }
    };
}
use exports;

/// All entry points, for `cuGetProcAddress`.
fn table() -> Vec<(&'static str, *mut c_void)> {
    let tables = [
        copy::table(),
        device::table(),
        event::table(),
        memory::table(),
        misc::table(),
        module::table(),
        stream::table(),
    ];
    tables.into_iter().flatten().collect()
}

/// Writes a result where the program wants it.
///
/// # Safety
/// `target` is null or may be written.
unsafe fn put<T>(target: *mut T, value: T) -> Answer {
    if target.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { target.write(value) };
    Ok(())
}

/// The same for a result that the program may leave out.
///
/// # Safety
/// As for [`put`].
unsafe fn offer<T>(target: *mut T, value: T) {
    if !target.is_null() {
        // SAFETY: the caller's promise.
        unsafe { target.write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_there_once() {
        let mut names: Vec<&str> = table().into_iter().map(|(name, _)| name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(all >= 60, "{all}");
    }
}
