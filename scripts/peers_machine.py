"""The machine as `scripts/peers` needs it: pages of files in the page cache or out of it, proved; memory that is held between the
loads; what else ran; what this machine is. Linux.
"""
import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23


def memory(field):
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


class Held:
    """Memory that is kept resident between the loads."""

    def __init__(self, size):
        self.size, self.at = min(size, int(memory("MemAvailable") * 0.6)), None

    def hold(self):
        self.at = libc.mmap(None, self.size, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        libc.madvise(self.at, self.size, MADV_HUGEPAGE)
        libc.madvise(self.at, self.size, MADV_POPULATE_WRITE)

    def free(self):
        libc.munmap(self.at, self.size)


def resident_share(files):
    found = total = 0
    for path in files:
        size = path.stat().st_size
        pages = -(-size // mmap.PAGESIZE)
        with open(path, "rb") as file:
            at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            answer = (ctypes.c_ubyte * pages)()
            libc.mincore(at, size, answer)
            libc.munmap(at, size)
        found += sum(page & 1 for page in bytes(answer))
        total += pages
    return found / total


def make_cold(files):
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = resident_share(files)
    if share > 0.01:
        sys.exit(f"cannot make the files cold: {share:.0%} stays in the page cache")
    return share


def make_warm(files):
    buffer = bytearray(4 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    share = resident_share(files)
    if share < 0.99:
        sys.exit(f"cannot make the files warm: only {share:.0%} is in the page cache after reading all; is memory short?")
    return share


def busy():
    """CPU seconds that everything on this machine has used."""
    with open("/proc/stat") as lines:
        ticks = [int(value) for value in lines.readline().split()[1:]]
    return (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]) / os.sysconf("SC_CLK_TCK")


def machine(folder):
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    virtual = " (virtual)" if " hypervisor" in Path("/proc/cpuinfo").read_text() else ""
    mounts = [line.split() for line in open("/proc/mounts")]
    place = folder.resolve()
    mount = max((m for m in mounts if place.is_relative_to(m[1])), key=lambda m: len(m[1]), default=["?", "?", "?"])
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": cpu + virtual, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory("MemTotal") / 2**30, 1),
        "kernel": os.uname().release, "storage": f"{mount[2]} on {mount[0]}",
        "huge_pages": huge.read_text().split("[")[1].split("]")[0] if huge.exists() else "none",
        "load_average": os.getloadavg()[0],
    }
