//! NVIDIA's cuFile (GPUDirect Storage) as a table of functions, found at run time, behind guards against what it is known to do.
//!
//! - Its start never ends, at full load, where the system has no list of kernel modules: it is not started there.
//! - Its start happens on a thread of its own with a time limit. If it passes, that thread is given up and cuFile is not
//!   asked again in this process.
//! - Whatever it refuses is a reason in words, for the list of fallbacks; nothing here panics, and no code is taken for an enum.
//!
//! It is asked once in a process and stays open until that ends. Only the functions that are called are looked up. The types are
//! laid out as in NVIDIA's public header `cufile.h`. Buffers are never registered: that is for small ones that are used again and
//! again, and takes address space that a GPU may have little of; cuFile passes the bytes through buffers of its own on the GPU.
#![allow(unsafe_code)] // calls into NVIDIA's library

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crossbeam_channel::bounded;
use libloading::Library;

use super::gpu::Gpu;
use super::memory::target;
use crate::device::Region;
use crate::error::{Error, Result};

/// The names of the library: the one that NVIDIA ships, and the one that a developer's link gives.
const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// The kernel's list of modules, which cuFile looks for its own in.
const MODULES: &str = "/proc/modules";

/// What the kernel module nvidia-fs says of itself, where it is loaded.
const NVIDIA_FS: &str = "/proc/driver/nvidia-fs/stats";

/// cuFile starts in well under a second; one that takes longer than this does not come back.
const START_LIMIT: Duration = Duration::from_secs(5);

/// What cuFile's functions return.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    code: c_uint,
    /// The driver's own code, where the code says that it is the driver's.
    cuda: c_uint,
}

/// The description of a file for cuFile (`CUfileDescr_t`).
#[repr(C)]
struct Description {
    kind: c_uint,
    handle: DescribedHandle,
    operations: *const c_void,
}

#[repr(C)]
union DescribedHandle {
    fd: c_int,
    /// Gives the union its size.
    pointer: *mut c_void,
}

/// What cuFile says of itself (`CUfileDrvProps_t`), with room for what later versions may add.
#[repr(C)]
struct Properties {
    major_version: c_uint,
    minor_version: c_uint,
    poll_threshold: usize,
    max_direct_io: usize,
    status_flags: c_uint,
    control_flags: c_uint,
    rest: [c_uint; 6],
    unknown: [u64; 64],
}

const _: () = {
    assert!(size_of::<Status>() == 8);
    assert!(size_of::<Description>() == 24 && std::mem::offset_of!(Description, handle) == 8);
    assert!(std::mem::offset_of!(Properties, status_flags) == 24 && std::mem::offset_of!(Properties, unknown) == 56);
};

/// A file by its descriptor.
const OPAQUE_FD: c_uint = 1;

/// The bit of the status flags that says that cuFile needs no nvidia-fs: the kernel itself lets disks write to GPUs.
const PCI_P2PDMA: c_uint = 1 << 11;

/// Another user of this process has started cuFile before: as good as having done so.
const ALREADY_OPEN: c_uint = 5026;

const DRIVER_ERROR: c_uint = 5011;

/// The functions of cuFile that vramp calls.
#[derive(Clone, Copy)]
struct Functions {
    driver_open: unsafe extern "C" fn() -> Status,
    driver_properties: unsafe extern "C" fn(*mut Properties) -> Status,
    handle_register: unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status,
    handle_deregister: unsafe extern "C" fn(*mut c_void),
    read: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize,
}

/// cuFile, started.
pub(super) struct Cufile {
    functions: Functions,
    /// Why it reads by way of the host itself, if it does.
    detour: Option<&'static str>,
}

/// A file that cuFile knows.
pub(super) struct KnownFile {
    cufile: &'static Cufile,
    /// cuFile's handle.
    raw: usize,
    /// After the handle: cuFile reads by this descriptor.
    _file: OwnedFd,
}

/// A read that failed.
#[derive(Debug)]
pub(super) enum ReadRefusal {
    /// The operating system's error.
    System(io::Error),
    /// cuFile's own.
    Cufile(String),
}

/// What is known of cuFile in this process.
struct Knowledge {
    found: Option<Result<&'static Cufile, String>>,
    /// Where the list of modules is, and the limit of the start: as above, but for tests.
    modules: Option<PathBuf>,
    limit: Duration,
}

static KNOWLEDGE: Mutex<Knowledge> = Mutex::new(Knowledge { found: None, modules: None, limit: START_LIMIT });

/// Has cuFile asked anew by whoever comes next, with `modules` for the kernel's list and `limit` for its start. A test double
/// is no NVIDIA library: it starts where there is no such list, and hangs when it is told to.
#[cfg(any(test, feature = "testing"))]
pub fn forget_cufile(modules: &Path, limit: Duration) {
    let fresh = Knowledge { found: None, modules: Some(modules.to_owned()), limit };
    *KNOWLEDGE.lock().unwrap_or_else(PoisonError::into_inner) = fresh;
}

impl Cufile {
    /// Whether it is cheap to see that no disk of this machine writes to a GPU by itself.
    pub(super) fn is_out_of_question() -> bool {
        !Path::new(NVIDIA_FS).exists()
    }

    /// cuFile, started the first time; whatever came of that holds for the process.
    pub(super) fn start() -> Result<&'static Cufile, String> {
        let mut knowledge = KNOWLEDGE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = &knowledge.found {
            return found.clone();
        }
        let modules = knowledge.modules.as_deref().unwrap_or(Path::new(MODULES));
        // Never given back: the table is used until the process ends.
        let found = Cufile::find(modules, knowledge.limit).map(|cufile| &*Box::leak(Box::new(cufile)));
        knowledge.found = Some(found.clone());
        found
    }

    fn find(modules: &Path, limit: Duration) -> Result<Cufile, String> {
        if !modules.exists() {
            let path = modules.display();
            return Err(format!(
                "this system has no {path} (a sandbox?), and NVIDIA's cuFile never comes back from its start then"
            ));
        }
        let functions = Functions::find()?;
        start_driver(functions.driver_open, limit)?;
        let detour = functions.detour()?;
        Ok(Cufile { functions, detour })
    }

    /// Why it reads by way of the host itself, if it does.
    pub(super) fn detour(&self) -> Option<&'static str> {
        self.detour
    }

    /// Makes a file known to cuFile. A CUDA context must be current.
    pub(super) fn register(&'static self, file: BorrowedFd<'_>) -> Result<KnownFile, String> {
        let file = file.try_clone_to_owned().map_err(|error| format!("cannot duplicate the descriptor: {error}"))?;
        let mut raw = std::ptr::null_mut();
        let handle = DescribedHandle { fd: file.as_raw_fd() };
        let mut description = Description { kind: OPAQUE_FD, handle, operations: std::ptr::null() };
        // SAFETY: writes one handle and reads the description, which says by its kind that the union holds a descriptor; that is
        // open for as long as the handle lives.
        let status = unsafe { (self.functions.handle_register)(&raw mut raw, &raw mut description) };
        status.check("cuFileHandleRegister")?;
        Ok(KnownFile { cufile: self, raw: raw as usize, _file: file })
    }
}

impl Functions {
    fn find() -> Result<Functions, String> {
        let library = open_library()?;
        let functions = Functions {
            // SAFETY: the function of this name has this type in NVIDIA's header.
            driver_open: unsafe { look_up(&library, "cuFileDriverOpen") }?,
            // SAFETY: as above.
            driver_properties: unsafe { look_up(&library, "cuFileDriverGetProperties") }?,
            // SAFETY: as above.
            handle_register: unsafe { look_up(&library, "cuFileHandleRegister") }?,
            // SAFETY: as above.
            handle_deregister: unsafe { look_up(&library, "cuFileHandleDeregister") }?,
            // SAFETY: as above; `off_t` has 64 bits on every platform that cuFile is made for.
            read: unsafe { look_up(&library, "cuFileRead") }?,
        };
        // It stays open, so that the functions stay: threads of its own, and one that never came back, may be running in it.
        std::mem::forget(library);
        Ok(functions)
    }

    /// Asks cuFile, started, how it reads.
    fn detour(&self) -> Result<Option<&'static str>, String> {
        let mut properties = Properties {
            major_version: 0,
            minor_version: 0,
            poll_threshold: 0,
            max_direct_io: 0,
            status_flags: 0,
            control_flags: 0,
            rest: [0; 6],
            unknown: [0; 64],
        };
        // SAFETY: writes the properties, which have room for more than it knows of.
        let status = unsafe { (self.driver_properties)(&raw mut properties) };
        status.check("cuFileDriverGetProperties")?;
        let has_module = properties.major_version > 0 && Path::new(NVIDIA_FS).exists();
        let is_native = has_module || properties.status_flags & PCI_P2PDMA != 0;
        Ok((!is_native).then_some(
            "cuFile is in its compatibility mode (no nvidia-fs module is loaded): it reads by way of the host itself",
        ))
    }
}

/// Opens the library by the first of its names that there is.
fn open_library() -> Result<Library, String> {
    let mut why = String::new();
    for name in NAMES {
        // SAFETY: opening the system's cuFile runs its initialisers, as in every program that uses it.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) if why.is_empty() => why = error.to_string(),
            Err(_) => {}
        }
    }
    Err(format!("NVIDIA's cuFile is not installed ({why}); it comes with the CUDA toolkit and with GPUDirect Storage"))
}

/// A function of the library.
///
/// # Safety
/// The function of that name has the type `F`, a pointer to a function.
unsafe fn look_up<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| format!("the cuFile library lacks {name}: it is too old, or is something else"))
}

/// Starts cuFile on a thread of its own, which is given up if it takes too long.
fn start_driver(open: unsafe extern "C" fn() -> Status, limit: Duration) -> Result<(), String> {
    let (say, outcome) = bounded(1);
    let start = move || {
        // SAFETY: takes nothing; the library stays open. It may be called where another user has called it before.
        let status = unsafe { open() };
        let _ = say.send(status); // nobody may be waiting any more
    };
    let started = thread::Builder::new().name("vramp-cufile".to_owned()).spawn(start);
    started.map_err(|error| format!("cuFile could not be started on a thread of its own: {error}"))?;
    match outcome.recv_timeout(limit) {
        Ok(Status { code: ALREADY_OPEN, .. }) => Ok(()),
        Ok(status) => status.check("cuFileDriverOpen"),
        Err(_) => {
            Err(format!("cuFileDriverOpen did not come back within {limit:?}; cuFile is not used in this process"))
        }
    }
}

impl KnownFile {
    /// Reads up to `len` bytes from `offset` of the file to the byte `at` of the region; 0 at the end of the file. A CUDA
    /// context must be current.
    ///
    /// # Errors
    /// When the region is not memory of the GPU `gpu` (whose context is the current one) or too short, or whatever cuFile says.
    pub(super) fn read(
        &self,
        gpu: &Gpu,
        offset: u64,
        len: u64,
        region: &mut Region,
        at: u64,
    ) -> Result<u64, ReadRefusal> {
        let misfit = || ReadRefusal::Cufile("bytes that do not fit their region".to_owned());
        let address = target(gpu, region).filter(|_| at.checked_add(len).is_some_and(|end| end <= region.len()));
        let address = usize::try_from(address.ok_or_else(misfit)?).map_err(|_| misfit())? as *mut c_void;
        let (Ok(bytes), Ok(offset), Ok(at)) = (usize::try_from(len), i64::try_from(offset), i64::try_from(at)) else {
            return Err(misfit());
        };
        let raw = self.raw as *mut c_void;
        // SAFETY: the handle is registered until `self` goes; the bytes written lie in the region, which the caller has the
        // exclusive right to write, and whose memory it keeps alive.
        let count = unsafe { (self.cufile.functions.read)(raw, address, bytes, offset, at) };
        match u64::try_from(count) {
            Ok(count) if count <= len => Ok(count),
            Ok(count) => Err(ReadRefusal::Cufile(format!("cuFileRead says that it read {count} of {len} bytes"))),
            Err(_) if count == -1 => Err(ReadRefusal::System(io::Error::last_os_error())),
            Err(_) => {
                let code = c_uint::try_from(count.unsigned_abs()).unwrap_or(c_uint::MAX);
                Err(ReadRefusal::Cufile(format!("cuFileRead says {}", Status { code, cuda: 0 })))
            }
        }
    }
}

impl Drop for KnownFile {
    fn drop(&mut self) {
        // SAFETY: registered by `register`, deregistered once; reads borrow `self`, so none is running.
        unsafe { (self.cufile.functions.handle_deregister)(self.raw as *mut c_void) };
    }
}

impl Status {
    fn check(self, call: &str) -> Result<(), String> {
        if self.code == 0 { Ok(()) } else { Err(format!("{call} says {self}")) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, words) = meaning(self.code);
        write!(f, "{} ({name}): {words}", self.code)?;
        if self.code == DRIVER_ERROR && self.cuda != 0 { write!(f, " (code {})", self.cuda) } else { Ok(()) }
    }
}

/// The name of a code, and what is usually missing.
fn meaning(code: c_uint) -> (&'static str, &'static str) {
    match code {
        5001 => (
            "CU_FILE_DRIVER_NOT_INITIALIZED",
            "the nvidia-fs module is not loaded, and cufile.json forbids the compatibility mode",
        ),
        5004 => ("CU_FILE_DRIVER_VERSION_MISMATCH", "the nvidia-fs module and the library are of different versions"),
        5005 => ("CU_FILE_DRIVER_VERSION_READ_ERROR", "the nvidia-fs module does not say its version"),
        5007 => ("CU_FILE_PLATFORM_NOT_SUPPORTED", "this platform has no GPUDirect Storage"),
        5008 => ("CU_FILE_IO_NOT_SUPPORTED", "this file's file system or disk has no GPUDirect Storage"),
        5009 => ("CU_FILE_DEVICE_NOT_SUPPORTED", "this GPU has no GPUDirect Storage"),
        5010 => ("CU_FILE_NVFS_DRIVER_ERROR", "the nvidia-fs module refuses"),
        DRIVER_ERROR => ("CU_FILE_CUDA_DRIVER_ERROR", "the CUDA driver refuses"),
        5012 => ("CU_FILE_CUDA_POINTER_INVALID", "the address is not memory of a GPU"),
        5015 => ("CU_FILE_CUDA_CONTEXT_MISMATCH", "the memory is of another context"),
        5016 => ("CU_FILE_INVALID_MAPPING_SIZE", "the GPU has too little address space (BAR1) for it"),
        5018 => ("CU_FILE_INVALID_FILE_TYPE", "it is no file of a kind that cuFile reads"),
        5019 => ("CU_FILE_INVALID_FILE_OPEN_FLAG", "the file is not open in a way that cuFile reads"),
        5020 => ("CU_FILE_DIO_NOT_SET", "the file is not open for direct reads, which its file system does not offer"),
        5022 => ("CU_FILE_INVALID_VALUE", "an argument is out of range"),
        5025 => ("CU_FILE_PERMISSION_DENIED", "the driver or the file may not be used"),
        5028 => ("CU_FILE_HANDLE_ALREADY_REGISTERED", "the file is known already"),
        5030 => (
            "CU_FILE_INTERNAL_ERROR",
            "something that cuFile needs is missing: often udev's data on the disk (/run/udev in a container)",
        ),
        5033 => ("CU_FILE_NVFS_SETUP_ERROR", "cuFile cannot be set up: often there is no CUDA driver it can use"),
        5034 => ("CU_FILE_IO_DISABLED", "cufile.json rules it out for this file"),
        5036 => ("CU_FILE_GPU_MEMORY_PINNING_FAILED", "the GPU has no more address space (BAR1) to be written to"),
        5043 => ("CU_FILE_NOMEM_ERROR", "there is not enough memory"),
        5044 => ("CU_FILE_IO_ERROR", "the storage device does not give the bytes"),
        5048 => ("CU_FILE_NVFS_INTERNAL_DRIVER_ERROR", "the nvidia-fs module failed"),
        _ => ("a code that vramp does not know", "see cufile.h"),
    }
}

impl ReadRefusal {
    /// Whether asking again is all that is needed.
    pub(super) fn is_interruption(&self) -> bool {
        matches!(self, ReadRefusal::System(error) if error.kind() == io::ErrorKind::Interrupted)
    }

    /// As an error of reading these bytes of a file.
    pub(super) fn error(self, device: String, path: &Path, range: std::ops::Range<u64>) -> Error {
        match self {
            ReadRefusal::System(source) => Error::Io { op: "read", path: path.to_owned(), range: Some(range), source },
            ReadRefusal::Cufile(why) => {
                let message = format!("{}, bytes {}..{}: {why}", path.display(), range.start, range.end);
                Error::Device { device, op: "read a file", message }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_without_a_list_of_modules_is_left_alone() {
        let why = Cufile::find(Path::new("/no/such/list"), START_LIMIT).map(drop).unwrap_err();
        assert!(why.contains("/no/such/list") && why.contains("never comes back"), "{why}");
    }

    unsafe extern "C" fn refuses() -> Status {
        Status { code: DRIVER_ERROR, cuda: 100 }
    }

    unsafe extern "C" fn is_open_already() -> Status {
        Status { code: ALREADY_OPEN, cuda: 0 }
    }

    /// A driver that is not done before the test is.
    static UNDER_TEST: Mutex<()> = Mutex::new(());

    unsafe extern "C" fn hangs() -> Status {
        drop(UNDER_TEST.lock());
        Status { code: 0, cuda: 0 }
    }

    #[test]
    fn a_start_that_is_refused_or_does_not_come_back_is_a_reason() {
        let refused = start_driver(refuses, START_LIMIT).unwrap_err();
        assert!(refused.contains("5011") && refused.contains("(code 100)"), "{refused}");
        assert_eq!(start_driver(is_open_already, START_LIMIT), Ok(()));
        let under_test = UNDER_TEST.lock();
        let hung = start_driver(hangs, Duration::ZERO).unwrap_err();
        assert!(hung.contains("did not come back within 0ns"), "{hung}");
        drop(under_test);
    }
}
