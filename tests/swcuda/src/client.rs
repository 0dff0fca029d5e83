//! What tests hold: the double, loaded into this process and used by one test at a time.
//!
//! The double is the cdylib, found beside the test and opened by its path; from then on whoever opens `libcuda.so` gets
//! it, by its soname. The copy of the driver that is linked into the test with this file is never used.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::config::Config;
use crate::control::{Sink, question};
use crate::faults::Fault;
use crate::stats::{Live, Stats};

const FILE: &str = "libswcuda.so";

/// The entry points of control, from the library that was opened. It stays open until the process ends: cudarc opens
/// and closes it to see whether it is there, and its state must survive that.
#[derive(Debug, Clone, Copy)]
struct Library {
    reset: unsafe extern "C" fn(*const u8, usize) -> i32,
    inject: unsafe extern "C" fn(*const u8, usize) -> i32,
    clear_faults: unsafe extern "C" fn(),
    settle: unsafe extern "C" fn() -> i32,
    host_time: unsafe extern "C" fn(u64) -> u64,
    query: unsafe extern "C" fn(u32, Sink, *mut c_void),
    read: unsafe extern "C" fn(u64, *mut u8, usize) -> i32,
    dma_write: unsafe extern "C" fn(u64, *const u8, usize) -> i32,
}

/// The host's side of the modelled clock ([`Config::modelled_clock`]), for other things that a test models beside the driver.
#[derive(Debug, Clone, Copy)]
pub struct HostClock(Library);

impl HostClock {
    /// The time since [`Double::acquire`]. It passes where the host waits, and only there.
    pub fn now(self) -> Duration {
        self.advance_to(Duration::ZERO)
    }

    /// The host waits until `time`, which takes no time on the wall; the time then, which may be later already.
    pub fn advance_to(self, time: Duration) -> Duration {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: a call of numbers.
        Duration::from_nanos(unsafe { (self.0.host_time)(nanoseconds) })
    }
}

/// Exclusive use of the double in this process.
///
/// Make it before the objects of the test that use CUDA, so that it is dropped after them: dropping it asserts that no
/// report is left and that nothing is alive.
#[derive(Debug)]
pub struct Double {
    library: Library,
    leaks_allowed: AtomicBool,
    _turn: MutexGuard<'static, ()>,
}

impl Double {
    /// Waits for the double, opens it if nobody has, and resets it to `config`.
    ///
    /// # Panics
    /// When there is no library beside the test.
    pub fn acquire(config: Config) -> Double {
        static TURN: Mutex<()> = Mutex::new(());
        // A test that failed poisons the lock, and the reset cleans up after it.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let library = loaded();
        let text = config.to_text();
        // SAFETY: the text lives until the call returns.
        let refused = unsafe { (library.reset)(text.as_ptr(), text.len()) };
        assert_eq!(refused, 0, "the double did not understand its configuration:\n{text}");
        Double { library, leaks_allowed: AtomicBool::new(false), _turn: turn }
    }

    /// Lets objects stay alive when this is dropped: the test breaks the GPU so that its memory must not be freed.
    pub fn allow_leaks(&self) {
        self.leaks_allowed.store(true, Ordering::Relaxed);
    }

    /// The file of the double: beside the running test or in the folder above, or where `SWCUDA_LIBRARY` says (a test under a
    /// sanitizer cannot open a library that was built for one).
    ///
    /// # Panics
    /// When it is in neither.
    pub fn library() -> PathBuf {
        if let Some(chosen) = std::env::var_os("SWCUDA_LIBRARY") {
            return PathBuf::from(chosen);
        }
        let program = std::env::current_exe().expect("a test knows its own path");
        let folders = program.ancestors().skip(1).take(2);
        let found = folders.map(|folder| folder.join(FILE)).find(|file| file.is_file());
        found.unwrap_or_else(|| {
            panic!(
                "{FILE} is not beside {}: build it with `cargo build -p swcuda` (with the profile and target of the \
                 test), or depend on the crate `swcuda`",
                program.display()
            )
        })
    }

    /// Makes `libcuda.so` and `libcuda.so.1` in `into`, links to the double: for the `LD_LIBRARY_PATH` of a child.
    ///
    /// # Panics
    /// When the links cannot be made.
    pub fn link_folder(into: &Path) {
        let library = Double::library();
        for name in ["libcuda.so", "libcuda.so.1"] {
            let link = into.join(name);
            match std::os::unix::fs::symlink(&library, &link) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    panic!("{}: {error}", link.display())
                }
                _ => {}
            }
        }
    }

    /// Takes all reports: what the program did wrong, a line each that begins with the kind.
    pub fn reports(&self) -> Vec<String> {
        self.query(question::REPORTS)
    }

    /// Orders a failure; it counts from now on.
    ///
    /// # Panics
    /// When its code is none of the driver's.
    pub fn inject(&self, fault: Fault) {
        let text = fault.to_string();
        // SAFETY: the text lives until the call returns.
        let refused = unsafe { (self.library.inject)(text.as_ptr(), text.len()) };
        assert_eq!(refused, 0, "no such fault: {text}");
    }

    /// Takes back all failures that have not come.
    pub fn clear_faults(&self) {
        // SAFETY: a call without arguments.
        unsafe { (self.library.clear_faults)() };
    }

    /// Lets everything that is queued run; whether it all came to an end within 10 seconds.
    pub fn settle(&self) -> bool {
        // SAFETY: a call without arguments.
        unsafe { (self.library.settle)() == 0 }
    }

    /// The modelled clock.
    pub fn clock(&self) -> HostClock {
        HostClock(self.library)
    }

    /// What was counted since [`Double::acquire`].
    pub fn stats(&self) -> Stats {
        Stats::from_text(&self.query(question::STATS).join("\n"))
    }

    /// What is alive.
    pub fn live(&self) -> Live {
        Live::from_text(&self.query(question::LIVE).join("\n"))
    }

    /// A line for each object that is alive, contexts apart.
    pub fn leaks(&self) -> Vec<String> {
        self.query(question::LEAKS)
    }

    /// The driver calls since [`Double::acquire`], by name.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        let lines = self.query(question::CALLS);
        let pairs = lines.iter().filter_map(|line| line.split_once(' '));
        pairs.filter_map(|(name, count)| Some((name.to_owned(), count.parse().ok()?))).collect()
    }

    /// How many those are.
    pub fn call_count(&self) -> u64 {
        self.calls().values().sum()
    }

    /// Bytes of device memory, outside of all checks. It does not wait for what is queued.
    ///
    /// # Panics
    /// When they are not all in one allocation.
    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the vector has room for the bytes.
        let refused = unsafe { (self.library.read)(address, bytes.as_mut_ptr(), len) };
        assert_eq!(refused, 0, "no {len} bytes of device memory at {address:#x}");
        bytes
    }

    /// Writes device memory as a third party, as `swcuda_dma_write`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn dma_write(&self, address: u64, bytes: &[u8]) -> Result<(), i32> {
        // SAFETY: the slice has its bytes.
        match unsafe { (self.library.dma_write)(address, bytes.as_ptr(), bytes.len()) } {
            0 => Ok(()),
            code => Err(code),
        }
    }

    fn query(&self, what: u32) -> Vec<String> {
        unsafe extern "C" fn take(user: *mut c_void, bytes: *const u8, length: usize) {
            // SAFETY: `query` passes a vector of strings, and the double bytes that live until this returns.
            let (lines, bytes) =
                unsafe { (&mut *user.cast::<Vec<String>>(), std::slice::from_raw_parts(bytes, length)) };
            lines.push(String::from_utf8_lossy(bytes).into_owned());
        }
        let mut lines: Vec<String> = Vec::new();
        // SAFETY: the vector outlives the call, which calls `take` with it.
        unsafe { (self.library.query)(what, take, (&raw mut lines).cast()) };
        lines
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        self.clear_faults();
        if std::thread::panicking() {
            return;
        }
        let settled = self.settle();
        let (reports, live, leaks) = (self.reports(), self.live(), self.leaks());
        assert!(reports.is_empty(), "the double found mistakes:\n  {}", reports.join("\n  "));
        assert!(settled, "work in a stream did not come to an end");
        if self.leaks_allowed.load(Ordering::Relaxed) {
            return;
        }
        assert_eq!(live, Live::default(), "something is still alive:\n  {}", leaks.join("\n  "));
    }
}

/// Opens the library once.
fn loaded() -> Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        // SAFETY: only asks whether a library of that soname is loaded.
        let before = unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        assert!(before.is_null(), "a CUDA driver was opened before the double; cudarc would go on using it");
        let path = Double::library();
        let name = CString::new(path.as_os_str().as_bytes()).expect("a path has no NUL");
        // SAFETY: the library's initialisers are Rust's own. Global, so that its soname answers for `libcuda.so`.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "{}: {}", path.display(), loader_error());
        // SAFETY: the functions of `control` have these types; both sides are built from it.
        unsafe {
            Library {
                reset: symbol(handle, c"swcuda_reset"),
                inject: symbol(handle, c"swcuda_inject"),
                clear_faults: symbol(handle, c"swcuda_clear_faults"),
                settle: symbol(handle, c"swcuda_settle"),
                host_time: symbol(handle, c"swcuda_host_time"),
                query: symbol(handle, c"swcuda_query"),
                read: symbol(handle, c"swcuda_read"),
                dma_write: symbol(handle, c"swcuda_dma_write"),
            }
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

fn loader_error() -> String {
    // SAFETY: dlerror gives null or text of its own.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
