//! The ways by which bytes come out of a file, and the lane of each. A new way is a variant here with its name and its lane, and a
//! source that takes it.

use std::fmt;

/// The way by which bytes come out of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Route {
    /// `O_DIRECT`: from the storage device, past the page cache.
    Direct,
    /// `read` through the page cache.
    Buffered,
    /// Copied out of a read-only mapping of the page cache.
    Mapped,
    /// From the storage device into the memory of a GPU, past the host.
    GpuDirect,
}

/// Reads that have places in flight of their own: so a file that is half in the page cache uses the disk and the memory bus at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Lane {
    /// Reads past the page cache.
    Direct,
    /// Reads through the page cache.
    PageCache,
    /// Reads that a device makes itself.
    Device,
}

impl Route {
    /// Its name: `direct`, `buffered`, `mapped`, `gpu-direct`.
    pub fn name(self) -> &'static str {
        match self {
            Route::Direct => "direct",
            Route::Buffered => "buffered",
            Route::Mapped => "mapped",
            Route::GpuDirect => "gpu-direct",
        }
    }

    /// The lane of its reads.
    pub fn lane(self) -> Lane {
        match self {
            Route::Direct => Lane::Direct,
            Route::Buffered | Route::Mapped => Lane::PageCache,
            Route::GpuDirect => Lane::Device,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Lane {
    /// How many there are.
    pub const COUNT: usize = 3;

    /// Its number, below [`Lane::COUNT`].
    pub fn index(self) -> usize {
        match self {
            Lane::Direct => 0,
            Lane::PageCache => 1,
            Lane::Device => 2,
        }
    }
}
