//! How much memory this process may still take, and which limit says so. It asks the kernel and decides nothing.
#![allow(unsafe_code)] // getrlimit and mallopt, which take numbers and memory that the calling function owns

use std::io;
use std::path::Path;

use super::{bytes_in, status_bytes};
use crate::error::Error;

/// What bounds the memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// `RLIMIT_AS`: all that is mapped, touched or not.
    AddressSpace,
    /// `RLIMIT_DATA`: private memory, touched or not.
    Data,
    /// What the machine may promise, where `vm.overcommit_memory` is 2.
    Commit,
    /// The memory limit of a control group: a container, a job, a unit.
    ControlGroup,
    /// The memory of the machine that nothing else needs.
    Machine,
}

/// Memory that can still be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLeft {
    /// Bytes, room for the program's own threads deducted where they count.
    pub bytes: u64,
    /// The limit that leaves the least.
    pub limit: MemoryLimit,
}

impl MemoryLimit {
    /// What it is called; `None` for the machine itself, whose memory is simply free.
    pub fn name(self) -> Option<&'static str> {
        match self {
            MemoryLimit::AddressSpace => Some("RLIMIT_AS (ulimit -v)"),
            MemoryLimit::Data => Some("RLIMIT_DATA (ulimit -d)"),
            MemoryLimit::Commit => Some("the machine's commit limit (vm.overcommit_memory is 2)"),
            MemoryLimit::ControlGroup => Some("the memory limit of the control group (container)"),
            MemoryLimit::Machine => None,
        }
    }
}

/// What can still be allocated without being refused, swapping or being killed: the least of what the limits of the process, its
/// control groups and the machine leave. Page cache that the kernel takes back counts as free. `None` where none of them says.
pub fn memory_left() -> Option<MemoryLeft> {
    let left = |limit, bytes: Option<u64>| bytes.map(|bytes| MemoryLeft { bytes, limit });
    let room = |bytes: u64| bytes.saturating_sub(threads_room());
    let all = [
        left(MemoryLimit::AddressSpace, limit_left(libc::RLIMIT_AS, "VmSize:").map(room)),
        left(MemoryLimit::Data, limit_left(libc::RLIMIT_DATA, "VmData:").map(room)),
        left(MemoryLimit::Commit, commit_left().map(room)),
        left(MemoryLimit::ControlGroup, control_groups_left()),
        left(MemoryLimit::Machine, bytes_in("/proc/meminfo", "MemAvailable:")),
    ];
    all.into_iter().flatten().min_by_key(|left| left.bytes)
}

/// The bytes of [`memory_left`].
pub fn available_memory_bytes() -> Option<u64> {
    memory_left().map(|left| left.bytes)
}

/// The error of memory of the host that is not to be had.
pub(crate) fn out_of_memory(device: &str, needed: u64) -> Error {
    let left = memory_left();
    Error::OutOfMemory {
        device: device.to_owned(),
        needed,
        free: left.map(|left| left.bytes),
        limit: left.and_then(|left| left.limit.name()),
    }
}

/// The same as an [`io::Error`].
pub(crate) fn no_memory(needed: u64) -> io::Error {
    let which = |left: MemoryLeft| match left.limit.name() {
        Some(limit) => format!(", {limit} leaves {} MB", left.bytes / 1_000_000),
        None => format!(", {} MB are free", left.bytes / 1_000_000),
    };
    let which = memory_left().map_or(String::new(), which);
    io::Error::new(
        io::ErrorKind::OutOfMemory,
        format!("out of memory: {} MB needed{which}", needed.div_ceil(1_000_000)),
    )
}

/// Whether a limit bounds the address space or the data of this process.
pub fn is_memory_limited() -> bool {
    soft_limit(libc::RLIMIT_AS).or_else(|| soft_limit(libc::RLIMIT_DATA)).is_some()
}

/// Lets all threads allocate from one arena: each further arena reserves 64 MiB of address space, which `ulimit -v` counts. For
/// programs, before they start threads: with more than one thread, and without glibc, it does nothing. Returns whether it did.
pub fn share_one_arena() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    if threads != 1 || cfg!(not(target_env = "gnu")) {
        return false;
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: takes numbers only. It is not thread-safe, and this thread, which starts no other meanwhile, is the only one.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
    true
}

/// What the threads of a load take of the address space, and the small allocations beside it: a stack for each that a queue, a
/// stream and a ring start on this machine.
fn threads_room() -> u64 {
    const STACK_BYTES: u64 = (2 << 20) + (64 << 10);
    const SMALL_BYTES: u64 = 24 << 20;
    let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get() as u64);
    let threads = cores.min(16) + 8 + (cores / 4).clamp(1, 4) + cores.min(8) + 4;
    threads * STACK_BYTES + SMALL_BYTES
}

#[allow(clippy::unnecessary_cast, clippy::cast_possible_wrap)] // the numbers of limits have one type with glibc and another without
fn soft_limit(which: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a whole rlimit.
    let known = unsafe { libc::getrlimit(which, &raw mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur as u64)
}

fn limit_left(which: libc::__rlimit_resource_t, used: &str) -> Option<u64> {
    Some(soft_limit(which)?.saturating_sub(status_bytes(used).unwrap_or(0)))
}

fn commit_left() -> Option<u64> {
    let strict = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2");
    let number = |field| bytes_in("/proc/meminfo", field);
    Some(number("CommitLimit:")?.saturating_sub(number("Committed_AS:")?)).filter(|_| strict)
}

fn control_groups_left() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups.lines().filter_map(MemoryGroup::of).filter_map(|group| group.least_left(Path::new(CGROUPS))).min()
}

/// Where control groups are mounted by convention.
const CGROUPS: &str = "/sys/fs/cgroup";

/// A control group that accounts memory: its path below the mount, and the names of its files.
struct MemoryGroup<'a> {
    mount: &'static str,
    path: &'a str,
    limit: &'static str,
    used: &'static str,
    /// The lines of `memory.stat` that count pages of files, which the kernel takes back before it kills, and those among them
    /// that belong to files in memory, which it cannot.
    cache: [&'static str; 2],
}

impl MemoryGroup<'_> {
    /// The group that a line of `/proc/self/cgroup` names, if it accounts memory (version 2, or the memory hierarchy of 1).
    fn of(line: &str) -> Option<MemoryGroup<'_>> {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?.trim_start_matches('/'));
        if number == "0" && controllers.is_empty() {
            return Some(MemoryGroup {
                mount: "",
                path,
                limit: "memory.max",
                used: "memory.current",
                cache: ["file ", "shmem "],
            });
        }
        controllers.split(',').any(|controller| controller == "memory").then_some(MemoryGroup {
            mount: "memory",
            path,
            limit: "memory.limit_in_bytes",
            used: "memory.usage_in_bytes",
            cache: ["total_cache ", "total_shmem "],
        })
    }

    /// The least that the group or one of its ancestors leaves; `None` where none has a limit.
    fn least_left(&self, root: &Path) -> Option<u64> {
        let number = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let left = |folder: &Path| {
            let (limit, used) = (number(&folder.join(self.limit))?, number(&folder.join(self.used))?);
            let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let count = |field| stat.lines().find_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok());
            let [cache, kept] = self.cache.map(|field| count(field).unwrap_or(0));
            Some(limit.saturating_sub(used.saturating_sub(cache.saturating_sub(kept))))
        };
        let mount = root.join(self.mount);
        mount.join(self.path).ancestors().take_while(|folder| folder.starts_with(&mount)).filter_map(left).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allocator_stays_as_it_is_once_there_are_threads() {
        std::thread::scope(|scope| {
            let here = scope.spawn(share_one_arena);
            assert!(!here.join().unwrap());
        });
    }

    #[test]
    fn the_tightest_control_group_counts_and_its_page_cache_does_not() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/memory.max", "1000\n");
        write("a/memory.current", "700\n");
        write("a/memory.stat", "anon 100\nfile 650\nshmem 50\n");
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "10\n");
        let left = |line: &str| MemoryGroup::of(line).and_then(|group| group.least_left(root.path()));
        assert_eq!(left("0::/a/b"), Some(900));
        assert_eq!(left("0::/"), None);
        assert_eq!(left("0::/../../not/there"), None);
        write("memory/x/memory.limit_in_bytes", "500\n");
        write("memory/x/memory.usage_in_bytes", "600\n");
        assert_eq!(left("4:memory:/x"), Some(0));
        assert_eq!(left("7:cpu,cpuacct:/x"), None);
        assert_eq!(left("nonsense"), None);
    }

    #[test]
    fn the_least_of_all_limits_is_named() {
        let left = memory_left().unwrap();
        assert!(left.bytes <= bytes_in("/proc/meminfo", "MemTotal:").unwrap());
        let Error::OutOfMemory { needed, free, limit, .. } = out_of_memory("cpu", 5) else { panic!() };
        assert!(needed == 5 && free.is_some() && limit == left.limit.name());
        assert!(no_memory(5_000_001).to_string().contains("6 MB needed"));
        assert!(threads_room() > 24 << 20);
    }
}
