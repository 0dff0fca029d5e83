//! Mapped reads: bytes copied out of a read-only mapping of the page cache.
//!
//! Safe code never gets a slice of the mapping, because another process may change the bytes at any time; only a file that
//! the kernel has sealed is lent out. A file that shrinks under its mapping makes the processor fault: a handler for
//! `SIGBUS`, present only while a mapping is, puts a page of zeros there, marks the mapping as failed for ever and lets the
//! copy end, which then reports an error. Faults that are not ours go to whoever had the signal before.
//!
//! This file keeps the only process-wide state of the crate, because signal dispositions are process-wide. Neighbours:
//! `file` makes a source of it.
#![allow(unsafe_code)] // a mapping of memory that others may change, and a signal handler

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use super::version::Version;
use crate::error::{Error, Result};
use crate::os;

/// Copied, and let go of, at once: bounds what a mapping adds to the resident memory of the process.
const WINDOW_BYTES: usize = 4 << 20;

/// A whole file, mapped read-only.
#[derive(Debug)]
pub struct MappedFile {
    // Dropped first: the range must not be guarded any more when its addresses become free.
    guard: Option<Guard>,
    map: Option<MmapRaw>,
    file: Arc<File>,
    path: PathBuf,
    version: Version,
    sealed: bool,
}

impl MappedFile {
    /// Maps the whole of `file`, which was `version` when it was opened. The path is for messages only.
    ///
    /// # Errors
    /// When the kernel refuses, the file is no longer that long, or the signal handler cannot be put in place.
    pub fn new(file: Arc<File>, path: &Path, version: Version) -> Result<MappedFile> {
        let failed = |error| Error::io("map", path, error);
        let sealed = os::is_sealed(file.as_fd());
        let len = version.len();
        let mut mapped = MappedFile { guard: None, map: None, file, path: path.to_owned(), version, sealed };
        if len > 0 {
            let len = usize::try_from(len).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
            let map = MmapOptions::new().len(len).map_raw_read_only(&*mapped.file).map_err(failed)?;
            mapped.guard = Some(Guard::new(map.as_ptr() as usize, len).map_err(failed)?);
            mapped.map = Some(map);
        }
        mapped.check()?;
        Ok(mapped)
    }

    /// Number of bytes: the length of the file when it was opened.
    pub fn len(&self) -> u64 {
        self.version.len()
    }

    /// Whether the file had no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes from `offset` on into `target`.
    ///
    /// # Errors
    /// [`Error::Changed`] when the file shrank or was written to; [`Error::Io`] for a range that leaves the file and for
    /// storage that cannot be read.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        let start = self.demand_inside(offset, target.len())?;
        for (index, window) in target.chunks_mut(WINDOW_BYTES).enumerate() {
            let at = start + index * WINDOW_BYTES;
            if let Err(source) = self.read_in(at, window.len()) {
                // What changed says more than "bad address".
                self.check()?;
                let range = Some(at as u64..(at + window.len()) as u64);
                return Err(Error::Io { op: "read", path: self.path.clone(), range, source });
            }
            self.copy_window(at, window);
            if self.has_failed() {
                break;
            }
        }
        self.check()
    }

    /// The bytes of the file, without a copy.
    ///
    /// # Safety
    /// While the slice lives, no process changes, truncates or overwrites the file.
    /// (If it is truncated all the same, this process reads zeros and [`MappedFile::check`] says so; the slice's contents
    /// have then changed under a shared reference, which is undefined behaviour. A thread that blocks `SIGBUS` ends the
    /// process there.)
    pub unsafe fn bytes(&self) -> &[u8] {
        let Some(map) = &self.map else { return &[] };
        // SAFETY: the mapping is `map.len()` readable bytes and lives as long as `self`; the caller promises that they
        // do not change meanwhile.
        unsafe { std::slice::from_raw_parts(map.as_ptr(), map.len()) }
    }

    /// The bytes of the file, without a copy, if the kernel guarantees that they cannot change: a `memfd` sealed
    /// against writing and shrinking. `None` for every other file.
    pub fn sealed_bytes(&self) -> Option<&[u8]> {
        if !self.sealed || self.check().is_err() {
            return None;
        }
        // SAFETY: seals cannot be taken off. Sealed against writing and shrinking when it was opened, and as long as its
        // mapping (checked after the mapping was made), the file keeps these bytes for ever.
        Some(unsafe { self.bytes() })
    }

    /// Demands that everything copied or looked at so far was really the file's. Stores of another process through a shared mapping
    /// change the bytes without a sign that could be checked here.
    ///
    /// # Errors
    /// [`Error::Changed`] when the file shrank or was written to since it was opened, [`Error::Io`] when its storage failed.
    pub fn check(&self) -> Result<()> {
        // The last page of a file that shrank reads as zeros beyond the end without a fault, hence the look at the size.
        let now = self.file.metadata().map_err(|error| Error::io("inspect", &self.path, error))?;
        if let Some(what) = self.version.difference(&Version::of_file(&now)) {
            return Err(Error::Changed { path: self.path.clone(), what: format!("{what}, while it was mapped") });
        }
        if self.has_failed() {
            let cause = "a page of it could not be read: the storage failed, or the file was shorter for a moment";
            return Err(Error::io("read", &self.path, io::Error::other(cause)));
        }
        Ok(())
    }

    fn has_failed(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::has_failed)
    }

    fn demand_inside(&self, offset: u64, len: usize) -> Result<usize> {
        let end = offset.checked_add(len as u64);
        if let (Some(true), Ok(start)) = (end.map(|end| end <= self.version.len()), usize::try_from(offset)) {
            return Ok(start);
        }
        let message = format!("the file has {} bytes", self.version.len());
        let range = Some(offset..offset.saturating_add(len as u64));
        let source = io::Error::new(io::ErrorKind::UnexpectedEof, message);
        Err(Error::Io { op: "read", path: self.path.clone(), range, source })
    }

    /// Copies one window whose range lies inside the file.
    fn copy_window(&self, start: usize, target: &mut [u8]) {
        let Some(map) = &self.map else { return };
        // SAFETY: `demand_inside` checked that start + target.len() does not pass the end of the mapping.
        let from = unsafe { map.as_ptr().add(start) };
        // A fault whose signal this thread blocks, as threads of servers do, would end the process.
        let was_blocked = mask(libc::SIG_UNBLOCK).unwrap_or(false);
        // SAFETY: both ranges are whole and do not overlap (`target` is borrowed mutably, the mapping is nobody's slice).
        // Bytes that another process writes meanwhile are copied in some state or other; a page that has gone makes the
        // guard put zeros there.
        unsafe { std::ptr::copy_nonoverlapping(from, target.as_mut_ptr(), target.len()) };
        if was_blocked {
            let _ = mask(libc::SIG_BLOCK);
        }
        self.let_go(start, target.len());
    }

    /// Has the kernel read the pages of a range that lies inside the file, so that a disk that fails, or a file that has
    /// shrunk, is mostly an answer here and not a fault in the copy.
    fn read_in(&self, start: usize, len: usize) -> io::Result<()> {
        match self.advise(start, len, Advice::LinuxPopulateRead) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EHWPOISON | libc::EIO)) => {
                Err(error)
            }
            // Before Linux 5.14, interrupted, or short of memory: the copy itself touches the pages.
            _ => Ok(()),
        }
    }

    /// Takes the copied pages out of this process's page table, so that they stop counting as its memory. Best effort.
    fn let_go(&self, start: usize, len: usize) {
        let _ = self.advise(start, len, Advice::LinuxDontNeed);
    }

    /// `madvise` of the whole pages around a range that lies inside the file.
    fn advise(&self, start: usize, len: usize, advice: Advice) -> io::Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        let page = os::page_bytes();
        let from = start / page * page;
        // SAFETY: a page boundary at or before `start`, which lies inside the mapping, and mappings begin at one.
        let address = unsafe { map.as_mut_ptr().add(from) };
        // SAFETY: the pages belong to this mapping, and neither advice used here changes their contents: dropped pages come
        // back from the file (or as the guard's zeros) at the next touch.
        Ok(unsafe { mm::madvise(address.cast(), start - from + len, advice) }?)
    }
}

// ---------------------------------------------------------------------------------------------------- the guard

/// Mappings that can be guarded at once.
const SLOTS: usize = 4096;

/// One guarded range. A writer (under `INSTALLED`'s lock) makes `version` odd, changes the range and makes it even again;
/// the handler, which may not lock, skips a slot that is odd or whose version moved while it looked. It never skips the
/// slot of the fault itself: a mapping that is being copied is borrowed, so its slot is not being changed.
struct Slot {
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    failed: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
/// No slot at or above this index was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The address of a mapping that the handler may give up, so that the process has room for another; 0 while there is none.
static SPARE: AtomicUsize = AtomicUsize::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(4096);
/// Whom a foreign fault belongs to, for the handler.
static PREVIOUS_HANDLER: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static PREVIOUS_FLAGS: AtomicI32 = AtomicI32::new(0);
static INSTALLED: Mutex<Installed> = Mutex::new(Installed { guards: 0, previous: None });

struct Installed {
    /// Guarded ranges.
    guards: usize,
    /// The disposition that our handler stands on top of, while it may be part of the chain.
    previous: Option<libc::sigaction>,
}

/// The right to a slot of the table, and a share in the handler.
#[derive(Debug)]
struct Guard {
    slot: usize,
}

impl Guard {
    fn new(start: usize, len: usize) -> io::Result<Guard> {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        let free = TABLE.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0);
        let slot = free.ok_or_else(|| io::Error::other(format!("more than {SLOTS} files mapped at once")))?;
        if installed.guards == 0 {
            installed.install()?;
        }
        installed.guards += 1;
        keep_spare();
        USED.fetch_max(slot + 1, Ordering::SeqCst);
        TABLE[slot].set(start, start + len.next_multiple_of(os::page_bytes()));
        Ok(Guard { slot })
    }

    fn has_failed(&self) -> bool {
        // Pairs with the handler's fence: whoever has read a byte of the page of zeros sees the mark.
        fence(Ordering::SeqCst);
        TABLE[self.slot].failed.load(Ordering::SeqCst)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        TABLE[self.slot].set(0, 0);
        installed.guards -= 1;
        if installed.guards == 0 {
            installed.uninstall();
        }
    }
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    fn set(&self, start: usize, end: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.failed.store(false, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The guarded range, if the address lies in it.
    fn range_around(&self, address: usize) -> Option<Range<usize>> {
        let version = self.version.load(Ordering::SeqCst);
        let range = self.start.load(Ordering::SeqCst)..self.end.load(Ordering::SeqCst);
        let stable = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (stable && range.contains(&address)).then_some(range)
    }
}

impl Installed {
    /// Puts the handler in front of whatever there is.
    fn install(&mut self) -> io::Result<()> {
        PAGE.store(os::page_bytes(), Ordering::SeqCst);
        let current = disposition(None)?;
        if is_ours(&current) {
            return Ok(());
        }
        if self.previous.is_some() {
            // Someone put a handler on top of ours while we had one, and may call ours: going on top again would make the
            // two call each other for ever.
            return Err(io::Error::other("another part of the program has replaced the SIGBUS handler"));
        }
        PREVIOUS_HANDLER.store(current.sa_sigaction, Ordering::SeqCst);
        PREVIOUS_FLAGS.store(current.sa_flags, Ordering::SeqCst);
        let mut ours = current;
        ours.sa_sigaction = handler_address();
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        disposition(Some(&ours))?;
        self.previous = Some(current);
        Ok(())
    }

    /// Puts the previous disposition back, unless someone else stands on top of ours by now.
    fn uninstall(&mut self) {
        let (Some(previous), Ok(current)) = (self.previous, disposition(None)) else { return };
        if is_ours(&current) && disposition(Some(&previous)).is_ok() {
            self.previous = None;
        }
    }
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == handler_address()
}

/// Taken in one place, so that there is one address to compare.
#[inline(never)]
fn handler_address() -> usize {
    on_fault as *const () as usize
}

/// Reads, and with `new` replaces, what the process does on SIGBUS.
fn disposition(new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `new` is null or a whole sigaction whose handler is valid for ever (ours, or one that was installed before);
    // `old` is a whole sigaction.
    let failed = unsafe { libc::sigaction(libc::SIGBUS, new, old.as_mut_ptr()) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: filled by the call that succeeded.
    Ok(unsafe { old.assume_init() })
}

/// Blocks SIGBUS on this thread, or lets it through (`SIG_BLOCK`, `SIG_UNBLOCK`); returns whether it was blocked before.
fn mask(how: libc::c_int) -> io::Result<bool> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `set` is a whole signal set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call above has made `set` an empty set.
    unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGBUS) };
    let mut old = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `set` is filled, and `old` is a whole signal set.
    let code = unsafe { libc::pthread_sigmask(how, set.as_ptr(), old.as_mut_ptr()) };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    // SAFETY: filled by the call that succeeded.
    Ok(unsafe { libc::sigismember(old.as_ptr(), libc::SIGBUS) } == 1)
}

/// The handler. Async-signal-safe: atomics and system calls only; `errno` is as it was afterwards.
extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the location of this thread's errno, always valid.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: see above.
    let saved = unsafe { *errno };
    if !is_handled(info) {
        pass_on(signal, info, context);
    }
    // SAFETY: see above.
    unsafe { *errno = saved };
}

/// If the fault lies in a guarded mapping: marks the mapping, then puts a page of zeros where the fault was.
fn is_handled(info: *mut libc::siginfo_t) -> bool {
    // SAFETY: with SA_SIGINFO the kernel passes a whole siginfo that lives as long as the handler runs.
    let info = unsafe { &*info };
    // A positive code is a fault of this thread; others were sent by kill() and carry no address.
    if info.si_code <= 0 {
        return false;
    }
    // SAFETY: a fault's siginfo carries the address.
    let address = unsafe { info.si_addr() } as usize;
    let used = USED.load(Ordering::SeqCst).min(SLOTS);
    let found = TABLE[..used].iter().find_map(|slot| slot.range_around(address).map(|range| (slot, range)));
    let Some((slot, range)) = found else { return false };
    // Marked before the zeros can be seen: see `Guard::has_failed`.
    slot.failed.store(true, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    let page = PAGE.load(Ordering::SeqCst);
    let start = address & !(page - 1);
    // Each page of zeros may cost the process up to two mappings more, and the kernel limits them. All of a mapping that
    // has failed can be zeros, which costs none; but a process that is one above the limit gets no mapping at all before
    // it has given one up.
    lay_zeros(start..start + page)
        || lay_zeros(range.clone())
        || (0..TRIES).any(|_| give_way() && lay_zeros(range.clone()))
}

/// Attempts to lay zeros while other threads, which have the spare mapping, are doing the same: each of them makes room.
const TRIES: usize = 10_000;

/// Gives the spare mapping up, or lets those go first who have it. Async-signal-safe.
fn give_way() -> bool {
    match SPARE.swap(0, Ordering::SeqCst) {
        0 => {
            rustix::thread::sched_yield();
            true
        }
        // SAFETY: the page was mapped by `keep_spare`, nobody uses it, and the swap gave it to this thread alone.
        spare => unsafe { mm::munmap(spare as *mut c_void, 1) }.is_ok(),
    }
}

/// Makes the spare mapping, unless there is one: a shared page, which the kernel never joins with its neighbours.
fn keep_spare() {
    if SPARE.load(Ordering::SeqCst) != 0 {
        return;
    }
    let anywhere = std::ptr::null_mut();
    // SAFETY: a mapping at an address of the kernel's choice touches no existing memory.
    let spare = unsafe { mm::mmap_anonymous(anywhere, 1, ProtFlags::empty(), MapFlags::SHARED) };
    if let Ok(spare) = spare
        && SPARE.compare_exchange(0, spare as usize, Ordering::SeqCst, Ordering::SeqCst).is_err()
    {
        // SAFETY: mapped above, and somebody else's is kept.
        let _ = unsafe { mm::munmap(spare, 1) };
    }
}

/// Puts zeros in the place of whole pages of one guarded mapping. Async-signal-safe.
fn lay_zeros(range: Range<usize>) -> bool {
    let (start, flags) = (range.start as *mut c_void, MapFlags::FIXED | MapFlags::PRIVATE);
    // SAFETY: the pages lie inside a mapping of a MappedFile that is alive (the faulting thread borrows it), which nobody
    // holds slices of, except under the contract of `bytes`.
    unsafe { mm::mmap_anonymous(start, range.len(), ProtFlags::READ, flags) }.is_ok()
}

/// Gives a signal that is not ours to whoever had it before.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = PREVIOUS_HANDLER.load(Ordering::SeqCst);
    // SAFETY: as in `is_handled`.
    let sent = unsafe { (*info).si_code } <= 0;
    match handler {
        libc::SIG_IGN if sent => {}
        // The kernel does not let a fault be ignored.
        libc::SIG_DFL | libc::SIG_IGN => die_by(signal, sent),
        _ if PREVIOUS_FLAGS.load(Ordering::SeqCst) & libc::SA_SIGINFO != 0 => {
            // SAFETY: the disposition said that this address is a handler of this type.
            let handler = unsafe { std::mem::transmute::<usize, Informed>(handler) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: the disposition said that this address is a handler of this type.
            let handler = unsafe { std::mem::transmute::<usize, Plain>(handler) };
            handler(signal);
        }
    }
}

type Informed = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
type Plain = extern "C" fn(libc::c_int);

/// Restores the default disposition: a fault happens again when the handler returns, a sent signal is sent again.
fn die_by(signal: libc::c_int, sent: bool) {
    // SAFETY: async-signal-safe; the default disposition is always valid.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    if sent {
        // SAFETY: async-signal-safe; delivered when the handler returns.
        unsafe { libc::raise(signal) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::process::{Command, ExitStatus};
    use std::sync::atomic::AtomicU32;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::testing::{Random, watched};

    const CHILD: &str = "VRAMP_TEST_CHILD";

    fn map(path: &Path) -> MappedFile {
        let file = File::open(path).unwrap();
        let version = Version::of_file(&file.metadata().unwrap());
        MappedFile::new(Arc::new(file), path, version).unwrap()
    }

    fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    #[test]
    fn a_truncation_under_a_live_mapping_is_an_error_and_never_a_signal() {
        watched(|| {
            let mut random = Random::new(1);
            let bytes = random.bytes(300_000);
            for round in 0..300 {
                let (_folder, path) = write(&bytes);
                let mapped = map(&path);
                let cut = random.below(bytes.len()) as u64;
                let cutter = std::thread::spawn(move || {
                    OpenOptions::new().write(true).open(path).unwrap().set_len(cut).unwrap();
                });
                let mut target = vec![0xa5; bytes.len()];
                for _ in 0..3 {
                    match mapped.copy_to(0, &mut target) {
                        Ok(()) => assert!(target == bytes, "round {round}: wrong bytes and no error"),
                        Err(error) => assert!(matches!(error, Error::Changed { .. }), "{error}"),
                    }
                }
                cutter.join().unwrap();
                assert!(matches!(mapped.copy_to(0, &mut target), Err(Error::Changed { .. })));
                assert!(mapped.copy_to(0, &mut []).is_err(), "a file that changed stays changed");
                // Without the look ahead, so that the copy itself meets the hole.
                mapped.copy_window(0, &mut target);
                let page = os::page_bytes() as u64;
                assert!(mapped.has_failed() || cut.next_multiple_of(page) >= bytes.len() as u64);
            }
        });
    }

    #[test]
    fn a_failure_belongs_to_its_own_mapping() {
        let bytes = Random::new(2).bytes(100_000);
        let ((_f1, cut), (_f2, whole)) = (write(&bytes), write(&bytes));
        let (failing, good) = (map(&cut), map(&whole));
        OpenOptions::new().write(true).open(&cut).unwrap().set_len(0).unwrap();
        let mut target = vec![0; bytes.len()];
        let error = failing.copy_to(0, &mut target).unwrap_err().to_string();
        failing.copy_window(0, &mut target);
        assert!(error.contains("100000") && error.contains("0 now"), "{error}");
        assert!(failing.has_failed() && !good.has_failed());
        good.copy_to(0, &mut target).unwrap();
        assert_eq!(target, bytes);
        drop(failing);
        let again = map(&whole);
        assert!(!again.has_failed(), "a slot is clean when it is used again");
    }

    /// The size is right again when the copy looks at it; only the mark of the fault tells.
    #[test]
    fn a_file_that_was_short_for_a_moment_is_an_error() {
        let bytes = Random::new(3).bytes(50_000);
        let (_folder, path) = write(&bytes);
        let mapped = map(&path);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_len(0).unwrap();
        let mut byte = [0xa5];
        mapped.copy_window(40_000, &mut byte);
        assert_eq!(byte, [0], "the guard's zeros");
        file.set_len(50_000).unwrap();
        file.set_modified(modified).unwrap();
        assert!(matches!(mapped.copy_to(0, &mut byte), Err(Error::Io { .. })));
    }

    #[test]
    fn a_mapping_does_not_stay_resident() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        File::create(&path).unwrap().set_len(256 << 20).unwrap();
        let mapped = map(&path);
        let before = os::resident_file_bytes().unwrap();
        let mut target = vec![1; 8 << 20];
        let mut most = 0;
        for start in (0..256u64 << 20).step_by(8 << 20) {
            mapped.copy_to(start, &mut target).unwrap();
            most = most.max(os::resident_file_bytes().unwrap());
        }
        assert!(target.iter().all(|&byte| byte == 0));
        // Other tests run in this process too; the whole file would be 256 MiB.
        assert!(most.saturating_sub(before) < 64 << 20, "{} MiB grew", (most - before) >> 20);
    }

    #[test]
    fn only_sealed_files_are_lent() {
        let (_folder, path) = write(b"ordinary");
        let ordinary = map(&path);
        assert_eq!(ordinary.sealed_bytes(), None);
        // SAFETY: nobody else has the file of this test.
        assert_eq!(unsafe { ordinary.bytes() }, b"ordinary");

        let mut file = File::from(memfd_create(c"vramp", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap());
        io::Write::write_all(&mut file, b"sealed").unwrap();
        fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK).unwrap();
        let version = Version::of_file(&file.metadata().unwrap());
        let mapped = MappedFile::new(Arc::new(file), Path::new("memfd"), version).unwrap();
        assert_eq!(mapped.sealed_bytes(), Some(&b"sealed"[..]));
    }

    #[test]
    fn an_empty_file_and_ranges_outside_are_no_trouble() {
        let (_folder, path) = write(b"");
        let mapped = map(&path);
        assert!(mapped.is_empty());
        mapped.copy_to(0, &mut []).unwrap();
        assert!(mapped.copy_to(0, &mut [0]).is_err());
        assert!(mapped.copy_to(u64::MAX, &mut [0]).is_err());
    }

    // ------------------------------------------------ in child processes, which have the signal to themselves

    /// Runs one test of this file alone in a process of its own.
    fn in_child(test: &str, case: &str) -> ExitStatus {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &format!("storage::mmap::tests::{test}"), "--test-threads=1"]).env(CHILD, case);
        child.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        child.status().unwrap()
    }

    static CALLS: AtomicU32 = AtomicU32::new(0);
    static FOREIGN: AtomicUsize = AtomicUsize::new(0);

    /// A handler of another part of the program, which mends the faults of its own mapping.
    extern "C" fn informed(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        CALLS.fetch_add(1, Ordering::SeqCst);
        mend();
    }

    extern "C" fn plain(_: libc::c_int) {
        CALLS.fetch_add(1, Ordering::SeqCst);
        mend();
    }

    fn mend() {
        let page = FOREIGN.load(Ordering::SeqCst) as *mut libc::c_void;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the page is the foreign mapping of `fault_elsewhere`, which nobody holds slices of.
        unsafe { libc::mmap(page, 4096, libc::PROT_READ, flags, -1, 0) };
    }

    /// Touches a mapping of an emptied file that is not a MappedFile.
    fn fault_elsewhere() {
        let (_folder, path) = write(&[1; 4096]);
        let raw = MmapOptions::new().len(4096).map_raw_read_only(&File::open(&path).unwrap()).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        FOREIGN.store(raw.as_ptr() as usize, Ordering::SeqCst);
        // SAFETY: one readable byte of the mapping, or a fault, which is the point.
        let _byte = unsafe { raw.as_ptr().read_volatile() };
    }

    fn fault_in(mapped: &MappedFile, path: &Path) {
        OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
        let mut target = vec![0; 4096];
        // Not `copy_to`, whose look ahead would find out without a fault.
        mapped.copy_window(0, &mut target);
        assert!(mapped.has_failed() && mapped.copy_to(0, &mut target).is_err());
    }

    fn set(handler: usize, flags: i32) {
        let mut action = disposition(None).unwrap();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        disposition(Some(&action)).unwrap();
    }

    #[test]
    fn child_passes_foreign_faults_on() {
        let Ok(case) = std::env::var(CHILD) else { return };
        let (handler, flags) = match case.as_str() {
            "informed" => (informed as *const () as usize, libc::SA_SIGINFO),
            "plain" => (plain as *const () as usize, 0),
            "ignored" => (libc::SIG_IGN, 0),
            _ => (libc::SIG_DFL, 0),
        };
        set(handler, flags);
        let before = disposition(None).unwrap();
        let (_folder, path) = write(&[1; 4096]);
        let mapped = map(&path);
        assert!(is_ours(&disposition(None).unwrap()));
        fault_in(&mapped, &path);
        assert_eq!(CALLS.load(Ordering::SeqCst), 0, "our own fault is nobody else's business");
        if case == "ignored" || case == "sent" {
            // SAFETY: takes a number; "ignored" goes on, "sent" dies.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        if case != "ignored" {
            fault_elsewhere();
        }
        assert_eq!(CALLS.load(Ordering::SeqCst), u32::from(case != "ignored"));
        drop(mapped);
        let after = disposition(None).unwrap();
        assert_eq!((after.sa_sigaction, after.sa_flags), (before.sa_sigaction, before.sa_flags), "restored");
        // A second life of the guard works like the first.
        let (_folder, path) = write(&[1; 4096]);
        fault_in(&map(&path), &path);
    }

    #[test]
    fn foreign_faults_go_to_whoever_had_the_signal() {
        use std::os::unix::process::ExitStatusExt;
        watched(|| {
            for case in ["informed", "plain", "ignored"] {
                let status = in_child("child_passes_foreign_faults_on", case);
                assert!(status.success(), "{case}: {status}");
            }
            for case in ["default", "sent"] {
                let status = in_child("child_passes_foreign_faults_on", case);
                assert_eq!(status.signal(), Some(libc::SIGBUS), "{case}: it dies as it would without us");
            }
        });
    }

    /// A server that takes its signals on one thread blocks them on all others.
    #[test]
    fn child_copies_on_a_thread_that_blocks_the_signal() {
        if std::env::var(CHILD).is_err() {
            return;
        }
        let (_folder, path) = write(&[1; 4096]);
        let mapped = map(&path);
        mask(libc::SIG_BLOCK).unwrap();
        fault_in(&mapped, &path);
        assert!(mask(libc::SIG_BLOCK).unwrap(), "it is blocked again");
        mask(libc::SIG_UNBLOCK).unwrap();
        mapped.copy_window(0, &mut [0]);
        assert!(!mask(libc::SIG_BLOCK).unwrap(), "what was not blocked is not blocked afterwards");
    }

    #[test]
    fn a_copy_survives_on_a_thread_that_blocks_the_signal() {
        let status = watched(|| in_child("child_copies_on_a_thread_that_blocks_the_signal", "yes"));
        assert!(status.success(), "{status}");
    }

    /// Each page of zeros between two pages of the file is a mapping more, and the kernel allows 65,530 of them by default.
    #[test]
    fn child_touches_every_second_page_of_a_large_file_that_was_emptied() {
        if std::env::var(CHILD).is_err() {
            return;
        }
        let page = os::page_bytes();
        let len = 160_000 * page;
        // The limit is met by one mapping or by two at a time: an odd number of mappings and an even one meet it differently.
        let extra = if std::env::var(CHILD).as_deref() == Ok("one more") { 1 } else { 0 };
        let _extra: Vec<_> = (0..extra).map(|_| memmap2::MmapOptions::new().len(page).map_anon().unwrap()).collect();
        let (_folder, path) = write(b"");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(len as u64).unwrap();
        let mapped = map(&path);
        file.set_len(0).unwrap();
        let start = mapped.map.as_ref().unwrap().as_ptr();
        for at in (0..len).step_by(2 * page) {
            // SAFETY: one readable byte of the mapping, or a fault, which is the point.
            assert_eq!(unsafe { start.wrapping_add(at).read_volatile() }, 0);
        }
        assert!(mapped.check().is_err());
    }

    #[test]
    fn any_number_of_pages_may_be_gone() {
        let test = "child_touches_every_second_page_of_a_large_file_that_was_emptied";
        for case in ["as it is", "one more"] {
            let status = watched(move || in_child(test, case));
            assert!(status.success(), "{case}: {status}");
        }
    }

    #[test]
    fn child_meets_a_handler_on_top() {
        if std::env::var(CHILD).is_err() {
            return;
        }
        let (_folder, path) = write(&[1; 4096]);
        let before = disposition(None).unwrap();
        let mapped = map(&path);
        let ours = disposition(None).unwrap();
        set(plain as *const () as usize, 0);
        drop(mapped);
        assert_eq!(disposition(None).unwrap().sa_sigaction, plain as *const () as usize, "not ours to take away");
        let file = File::open(&path).unwrap();
        let version = Version::of_file(&file.metadata().unwrap());
        assert!(MappedFile::new(Arc::new(file), &path, version).is_err(), "no loop of two handlers");
        disposition(Some(&ours)).unwrap();
        drop(map(&path));
        assert_eq!(disposition(None).unwrap().sa_sigaction, before.sa_sigaction);
    }

    #[test]
    fn a_handler_that_someone_put_on_top_is_left_alone() {
        assert!(watched(|| in_child("child_meets_a_handler_on_top", "yes")).success());
    }
}
