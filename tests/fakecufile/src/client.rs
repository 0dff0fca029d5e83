//! What tests hold: the double, loaded into this process and used by one test at a time.
//!
//! The double is the cdylib, found beside the test and opened by its path; from then on whoever opens `libcufile.so.0` gets it,
//! by its soname. The copy that is linked into the test with this file is never used.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::state::{Counters, Plan, WORDS};

const FILE: &str = "libfakecufile.so";

#[derive(Clone, Copy)]
struct Library {
    reset: unsafe extern "C" fn(*const u64),
    release: unsafe extern "C" fn(),
    counters: unsafe extern "C" fn(*mut u64),
}

/// Exclusive use of the double in this process.
pub struct Fake {
    library: Library,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    /// Waits for the double, opens it if nobody has, and has it do what is planned. Take the software driver first.
    ///
    /// # Panics
    /// When there is no library beside the test.
    pub fn acquire(plan: Plan) -> Fake {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = Fake { library: loaded(), _turn: turn };
        fake.plan(plan);
        fake
    }

    /// Makes `libcufile.so.0` in `into`, a link to the double: for the `LD_LIBRARY_PATH` of a child.
    ///
    /// # Panics
    /// When the link cannot be made.
    pub fn link_folder(into: &Path) {
        std::os::unix::fs::symlink(library(), into.join("libcufile.so.0")).expect("a link in a folder of our own");
    }

    /// Begins anew with another plan.
    pub fn plan(&self, plan: Plan) {
        let words = plan.to_words();
        // SAFETY: the words are a plan's.
        unsafe { (self.library.reset)(words.as_ptr()) };
    }

    /// Lets those go on that hang.
    pub fn release(&self) {
        // SAFETY: a call without arguments.
        unsafe { (self.library.release)() };
    }

    /// What was asked of it since the last plan.
    pub fn counters(&self) -> Counters {
        let mut words = [0; WORDS];
        // SAFETY: there is room for the words.
        unsafe { (self.library.counters)(words.as_mut_ptr()) };
        Counters::from_words(words)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.release();
        let known = self.counters().known;
        assert!(std::thread::panicking() || known == 0, "{known} files are still registered with cuFile");
    }
}

fn library() -> PathBuf {
    if let Some(chosen) = std::env::var_os("FAKECUFILE_LIBRARY") {
        return PathBuf::from(chosen);
    }
    let program = std::env::current_exe().expect("a test knows its own path");
    let folders = program.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join(FILE)).find(|file| file.is_file());
    found.unwrap_or_else(|| {
        panic!("{FILE} is not beside {}: build it with `cargo build -p fakecufile`", program.display())
    })
}

fn loaded() -> Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let path = library();
        let name = CString::new(path.as_os_str().as_bytes()).expect("a path has no NUL");
        // SAFETY: the library's initialisers are Rust's own.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "{} cannot be opened", path.display());
        Library {
            // SAFETY: the functions of `calls` have these types; both sides are built from it.
            reset: unsafe { symbol(handle, c"fakecufile_reset") },
            // SAFETY: as above.
            release: unsafe { symbol(handle, c"fakecufile_release") },
            // SAFETY: as above.
            counters: unsafe { symbol(handle, c"fakecufile_counters") },
        }
    })
}

/// # Safety
/// `F` is the type of the function of that name.
unsafe fn symbol<F: Copy>(handle: *mut c_void, name: &CStr) -> F {
    // SAFETY: the handle is open and the name ends in NUL.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "{FILE} has no {name:?}; it is of another version");
    assert_eq!(size_of::<F>(), size_of_val(&address));
    // SAFETY: the caller's promise.
    unsafe { std::mem::transmute_copy(&address) }
}
