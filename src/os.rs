//! Thin safe wrappers over the Linux system calls that the standard library lacks, and over the few files of `/proc` that
//! say what the process used.
//!
//! Each function asks the kernel one question and gives its answer back; none decides anything, keeps state or retries.
//! `source` decides what to do with the answers.
#![allow(unsafe_code)] // system calls on borrowed descriptors and on memory that the calling function owns

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{
    self, AtFlags, FallocateFlags, FlockOperation, OFlags, RenameFlags, SealFlags, StatxFlags, renameat_with,
};
use rustix::io::{Errno, ReadWriteFlags};
#[cfg(feature = "cuda")]
use rustix::mm;

pub use memory::{MemoryLeft, MemoryLimit, available_memory_bytes, is_memory_limited, memory_left, share_one_arena};
pub(crate) use memory::{no_memory, out_of_memory};
pub use signals::{BlockedSignals, is_ignored, report_aborts};

mod memory;
mod signals;

/// `cachestat` has one number on every architecture; not every libc names it yet.
const SYS_CACHESTAT: libc::c_long = 451;

/// What the kernel says about `O_DIRECT` on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectSupport {
    /// Supported, with these alignments in bytes.
    Aligned {
        /// Alignment of memory addresses.
        memory: u64,
        /// Alignment of file offsets and lengths.
        offset: u64,
    },
    /// The file cannot be read past the page cache.
    Refused,
    /// The kernel or the file system does not say (before Linux 6.1, and many file systems after it).
    Unknown,
}

/// What the kernel says about the page cache of a file.
#[derive(Debug)]
pub enum Cached {
    /// This many pages of the range are in the page cache.
    Pages(u64),
    /// This kernel has no `cachestat` (before 6.5), or a sandbox hides it.
    Unsupported(io::Error),
    /// The caller neither owns the file nor may write it, so the kernel does not tell.
    NotPermitted(io::Error),
}

/// What to tell the kernel about the use of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Read ahead further.
    Sequential,
    /// Do not read ahead.
    Random,
    /// Start reading it now.
    WillNeed,
    /// Drop clean, unmapped pages from the page cache.
    DontNeed,
}

/// CPU time of the process, all threads, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CpuSeconds {
    /// In the program itself.
    pub user: f64,
    /// In the kernel on behalf of it.
    pub system: f64,
}

impl CpuSeconds {
    /// Both together.
    pub fn total(&self) -> f64 {
        self.user + self.system
    }
}

/// Asks for the alignments that `O_DIRECT` needs on this file (`statx`, `STATX_DIOALIGN`).
///
/// # Errors
/// When `statx` itself fails.
pub fn direct_support(file: BorrowedFd<'_>) -> io::Result<DirectSupport> {
    let answer = fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let (memory, offset) = (u64::from(answer.stx_dio_mem_align), u64::from(answer.stx_dio_offset_align));
    if answer.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(DirectSupport::Unknown);
    }
    let usable = memory.is_power_of_two() && offset.is_power_of_two();
    Ok(if usable { DirectSupport::Aligned { memory, offset } } else { DirectSupport::Refused })
}

/// Counts the pages of a byte range that are in the page cache (`cachestat`). A `len` of 0 means up to the end.
///
/// # Errors
/// Any refusal that is not about support or permission.
pub fn cached_pages(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Cached> {
    let range = [offset, len];
    let mut answer = [0u64; 5];
    // SAFETY: `range` and `answer` have the layout of `struct cachestat_range` and `struct cachestat` (two and five u64).
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), answer.as_mut_ptr(), 0u32) };
    if result == 0 {
        return Ok(Cached::Pages(answer[0]));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => Ok(Cached::Unsupported(error)),
        Some(libc::EPERM | libc::EACCES) => Ok(Cached::NotPermitted(error)),
        _ => Err(error),
    }
}

/// Which pages of a byte range are in the page cache, one entry a page (`mincore` over a mapping that is never touched).
/// `offset` is a multiple of the page size. See [`may_see_cache`]: to others than the owner the kernel says "all".
///
/// # Errors
/// When the range cannot be mapped or asked about.
pub fn resident_pages(file: &File, offset: u64, len: usize) -> io::Result<Vec<bool>> {
    if len == 0 {
        return Ok(Vec::new());
    }
    let mut options = memmap2::MmapOptions::new();
    let map = options.offset(offset).len(len).map_raw_read_only(file)?;
    let mut pages = vec![0u8; len.div_ceil(page_bytes())];
    // SAFETY: the range is exactly the mapping, which lives until the end of this function; one byte a page is there.
    let failed = unsafe { libc::mincore(map.as_mut_ptr().cast(), len, pages.as_mut_ptr()) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    Ok(pages.iter().map(|page| page & 1 == 1).collect())
}

/// Whether the kernel tells this process the truth about the page cache of a file: it owns it, or may write it.
pub fn may_see_cache(file: &File) -> bool {
    let user = rustix::process::geteuid();
    let owns = file.metadata().is_ok_and(|meta| meta.uid() == user.as_raw());
    owns || user.is_root() || may_write(file.as_raw_fd())
}

fn may_write(fd: i32) -> bool {
    // SAFETY: the path is a terminated empty string, which AT_EMPTY_PATH makes mean the descriptor itself.
    unsafe { libc::faccessat(fd, c"".as_ptr(), libc::W_OK, libc::AT_EMPTY_PATH | libc::AT_EACCESS) == 0 }
}

/// Whether the byte at `offset` is in the page cache, asked by a read that may not wait (`RWF_NOWAIT`). The kernel may
/// start reading the page, so this is for samples. `None` when the file system does not know such reads.
pub fn is_cached_at(file: BorrowedFd<'_>, offset: u64) -> Option<bool> {
    i64::try_from(offset).ok()?; // beyond it the kernel takes the file's own position
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut [0])], offset, ReadWriteFlags::NOWAIT) {
        Ok(got) => Some(got == 1),
        Err(Errno::AGAIN) => Some(false),
        Err(_) => None,
    }
}

/// The magic number of the file system that a file lies on (`fstatfs`).
///
/// # Errors
/// What the kernel says.
pub fn file_system_magic(file: BorrowedFd<'_>) -> io::Result<u64> {
    let answer = fs::fstatfs(file)?;
    // The field is signed on some targets, and magics with the top bit set come sign-extended there.
    #[allow(clippy::cast_sign_loss, clippy::cast_possible_truncation, clippy::unnecessary_cast)]
    Ok(u64::from(answer.f_type as u32))
}

/// Tells the kernel how a byte range of a file will be used. A `len` of 0 means up to the end.
///
/// # Errors
/// What the kernel says.
pub fn advise(file: BorrowedFd<'_>, offset: u64, len: u64, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::Sequential => fs::Advice::Sequential,
        Advice::Random => fs::Advice::Random,
        Advice::WillNeed => fs::Advice::WillNeed,
        Advice::DontNeed => fs::Advice::DontNeed,
    };
    Ok(fs::fadvise(file, offset, NonZeroU64::new(len), advice)?)
}

/// Has the kernel begin to write a byte range of a file to its storage, without waiting for it and without a promise
/// (`sync_file_range`): what follows is then written meanwhile, and the sync at the end finds little left to do.
///
/// # Errors
/// What the kernel says.
pub fn start_writeback(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    let too_big = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let (offset, len) =
        (libc::off64_t::try_from(offset).map_err(too_big)?, libc::off64_t::try_from(len).map_err(too_big)?);
    // SAFETY: takes a descriptor and numbers only.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Locks an open file or folder against others who ask (`flock`), until it is closed, without waiting. `false`: another has it.
///
/// # Errors
/// What the kernel says: that the file system has no locks.
pub fn try_lock(file: BorrowedFd<'_>) -> io::Result<bool> {
    match fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Gives a file another name, unless something has that name already (`renameat2`, `RENAME_NOREPLACE`): one step, so that of two
/// who do it at the same time one gets `AlreadyExists`.
///
/// # Errors
/// What the kernel says; `EINVAL` or `ENOSYS` where the file system or the kernel does not have it.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    Ok(renameat_with(fs::CWD, from, fs::CWD, to, RenameFlags::NOREPLACE)?)
}

/// Has this open file read and written past the page cache (`O_DIRECT`), or through it again.
///
/// # Errors
/// What the kernel says: that the file system does not have it.
pub fn set_direct(file: BorrowedFd<'_>, direct: bool) -> io::Result<()> {
    let mut flags = fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(fs::fcntl_setfl(file, flags)?)
}

/// Makes reads of this open file wait as usual again, after it was opened with `O_NONBLOCK`.
///
/// # Errors
/// What the kernel says.
pub fn make_blocking(file: BorrowedFd<'_>) -> io::Result<()> {
    let flags = fs::fcntl_getfl(file)?;
    Ok(fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)?)
}

/// Whether the contents of this file can no longer change: a `memfd` sealed against writing and shrinking.
pub fn is_sealed(file: BorrowedFd<'_>) -> bool {
    // Other kinds of file answer with an error.
    fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::WRITE | SealFlags::SHRINK))
}

/// A counter whose changes wake whoever polls it: writing eight bytes adds, reading eight bytes takes all. Never blocks.
///
/// # Errors
/// When no descriptor is left.
pub fn event_counter() -> io::Result<File> {
    Ok(File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Descriptors that this process may have open (the soft limit). By libc: rustix takes it for granted that the kernel answers, which
/// a sandbox may forbid.
///
/// # Errors
/// What the kernel says.
pub fn open_files_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a whole rlimit.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0;
    if failed { Err(io::Error::last_os_error()) } else { Ok(limit.rlim_cur) }
}

/// Has what is written beyond the limit on the size of files (`ulimit -f`) fail with `EFBIG` for the whole process, which the
/// kernel otherwise ends by a signal (`SIGXFSZ`). For programs; a library leaves signals to them.
pub fn let_large_writes_fail() {
    // SAFETY: takes numbers only; no handler is installed. It fails only for a number that is no signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// CPU time that the process has used so far.
pub fn cpu_seconds() -> CpuSeconds {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is a whole rusage; this call fails only for an unknown `who`.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    // SAFETY: rusage is made of integers, so even the zeros it began as are a valid value.
    let usage = unsafe { usage.assume_init() };
    CpuSeconds { user: seconds(usage.ru_utime), system: seconds(usage.ru_stime) }
}

fn seconds(time: libc::timeval) -> f64 {
    time.tv_sec as f64 + time.tv_usec as f64 / 1e6
}

/// Bytes that an unprivileged process may still write to the file system of `path`.
///
/// # Errors
/// What the kernel says.
pub fn free_disk_bytes(path: &Path) -> io::Result<u64> {
    let stat = fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Gives a file so many bytes of disk (`fallocate`), which read as zeros until they are written: writes of several threads need not
/// grow it any more.
///
/// # Errors
/// What the kernel says: that there is no room, or that the file system cannot.
pub fn reserve_space(file: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    i64::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    Ok(fs::fallocate(file, FallocateFlags::empty(), 0, bytes)?)
}

/// Makes whole pages resident and writable ahead of their use, on the NUMA node `node` where one is wanted and there is more
/// than one. Best effort: what the kernel does not do, the first touch does.
///
/// # Safety
/// The `len` bytes from `start` on are a private anonymous mapping of the caller's.
#[cfg(feature = "cuda")]
pub(crate) unsafe fn prepare_pages(start: *mut u8, len: usize, node: Option<u32>) {
    /// A node is preferred, not demanded: another one rather than no memory.
    const PREFERRED: libc::c_int = 1;
    if let Some(node) = node.filter(|&node| node < usize::BITS) {
        let mask: usize = 1 << node;
        // SAFETY: the kernel reads one word, and sets the policy of the caller's own pages.
        unsafe { libc::syscall(libc::SYS_mbind, start, len, PREFERRED, &raw const mask, usize::BITS + 1, 0) };
    }
    // SAFETY: the caller's promise; populating changes no byte.
    let _ = unsafe { mm::madvise(start.cast(), len, mm::Advice::LinuxPopulateWrite) };
}

/// The size of a page in bytes.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// The number of a block device or file system as the system shows it: `259:1`.
pub fn device_number(device: u64) -> String {
    format!("{}:{}", fs::major(device), fs::minor(device))
}

/// The release of the running kernel, as `6.18.44`.
pub fn kernel_release() -> Option<String> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(release.trim().to_owned())
}

/// The name of the first processor, as its maker writes it.
pub fn processor_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).trim().to_owned())
}

/// The machine's memory in bytes.
pub fn memory_bytes() -> Option<u64> {
    bytes_in("/proc/meminfo", "MemTotal:")
}

/// The most memory that was ever resident in this process, in bytes.
pub fn peak_resident_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Memory that is resident in this process now, in bytes: its own, of mapped files and shared.
pub fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Memory of mapped files that is resident in this process now, in bytes.
pub fn resident_file_bytes() -> Option<u64> {
    status_bytes("RssFile:")
}

fn status_bytes(field: &str) -> Option<u64> {
    bytes_in("/proc/self/status", field)
}

/// The number of KiB after `field` at the beginning of a line, in bytes.
fn bytes_in(path: &str, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(path).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Has the kernel refuse these system calls to this thread, and to the threads that it starts, with the error `code`, as a
/// sandbox does. For ever: call it on a thread of its own. Returns whether the kernel did it.
#[cfg(test)]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the numbers of system calls and of errors are small
pub(crate) fn refuse(calls: &[libc::c_long], code: libc::c_int) -> bool {
    let (load, jump) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let give = libc::BPF_RET | libc::BPF_K;
    let statement = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut program = vec![statement(load, 0)];
    for &call in calls {
        program.push(libc::sock_filter { jf: 1, ..statement(jump, call as u32) });
        program.push(statement(give, libc::SECCOMP_RET_ERRNO | code as u32));
    }
    program.push(statement(give, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes numbers only.
    let bound = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
    // SAFETY: `filter` points to a whole program, which the kernel copies.
    bound && unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) } == 0
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_process_knows_its_own_figures() {
        assert!(page_bytes() >= 4096);
        assert!(open_files_limit().unwrap() > 0);
        assert!(kernel_release().unwrap().contains('.'));
        assert!(peak_resident_bytes().unwrap() >= resident_file_bytes().unwrap());
        assert!(resident_bytes().unwrap() > 0);
        let before = cpu_seconds();
        assert!(before.user + before.system >= 0.0);
    }

    #[test]
    fn questions_about_a_file_are_answered_or_typed() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        assert_ne!(file_system_magic(file.as_fd()).unwrap(), 0);
        direct_support(file.as_fd()).unwrap();
        if let Cached::Pages(pages) = cached_pages(file.as_fd(), 0, 0).unwrap() {
            assert!(pages <= 3);
        }
        assert_eq!(resident_pages(&file, 0, 10_000).unwrap().len(), 10_000usize.div_ceil(page_bytes()));
        assert!(resident_pages(&file, 0, 0).unwrap().is_empty());
        assert!(may_see_cache(&file));
        assert_ne!(is_cached_at(file.as_fd(), 0), Some(false), "it was written a moment ago");
        assert!(!is_sealed(file.as_fd()));
        for advice in [Advice::Sequential, Advice::Random, Advice::WillNeed, Advice::DontNeed] {
            advise(file.as_fd(), 0, 0, advice).unwrap();
        }
        start_writeback(file.as_fd(), 0, 10_000).unwrap();
        set_direct(file.as_fd(), false).unwrap();
        make_blocking(file.as_fd()).unwrap();
    }

    #[test]
    fn an_event_counter_adds_up_and_never_blocks() {
        let mut counter = event_counter().unwrap();
        let mut taken = [0; 8];
        assert_eq!(counter.read(&mut taken).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        counter.write_all(&2u64.to_ne_bytes()).unwrap();
        counter.write_all(&3u64.to_ne_bytes()).unwrap();
        counter.read_exact(&mut taken).unwrap();
        assert_eq!(u64::from_ne_bytes(taken), 5);
    }
}
