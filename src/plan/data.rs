//! What goes into a plan and what comes out: plain data.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{Cast, Piece};
use crate::dtype::Dtype;
use crate::extent::{ShardIndex, Strided};
use crate::storage::{Limits, Residency, Route};

/// One tensor to load: its bytes come from `runs`.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Name under which it is handed out.
    pub name: Arc<str>,
    /// Further names of the same memory.
    pub aliases: Vec<Arc<str>>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape after slicing.
    pub shape: Arc<[usize]>,
    /// Bytes after slicing and converting.
    pub bytes: u64,
    /// Where the bytes are; together they give each byte of the tensor once. `at` counts bytes as stored.
    pub runs: Vec<Strided>,
    /// How the elements are converted, if they are.
    pub cast: Option<WantedCast>,
    /// Where the tensor goes, in an arena that the caller has; for all tensors of a plan or for none.
    pub place: Option<u64>,
}

/// How the elements of a tensor are converted while they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WantedCast {
    /// From what to what, and by which scales (their `first` is the plan's to set).
    pub cast: Cast,
    /// Where in its file the first element of the tensor as stored lies.
    pub origin: u64,
}

/// What the plan must know of one file.
#[derive(Debug, Clone)]
pub struct ShardFacts {
    /// Length in bytes.
    pub bytes: u64,
    /// What is in the page cache.
    pub residency: Residency,
    /// Limits of direct reads; `None` where the file cannot be read so.
    pub direct: Option<Limits>,
    /// Limits of reads that the device makes itself; `None` where it does not, or where that does not pay.
    pub gpu_direct: Option<Limits>,
    /// Limits of reads through the page cache.
    pub cached: Limits,
    /// Whether the file may be mapped.
    pub mappable: bool,
}

impl ShardFacts {
    /// A file that nothing is read from.
    pub fn untouched(bytes: u64) -> ShardFacts {
        let cached = Limits { align: 1, memory_align: 1, max_read: 1, gap: 0, depth: 1 };
        ShardFacts { bytes, residency: Residency::none(bytes), direct: None, gpu_direct: None, cached, mappable: false }
    }

    /// Whether anything may be read from the file.
    pub fn is_used(&self) -> bool {
        self.cached.max_read > 1
    }
}

/// Which way the bytes shall go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouteChoice {
    /// By what is in the page cache, read by read.
    #[default]
    Auto,
    /// Past the page cache wherever the file system allows it.
    Direct,
    /// Through the page cache, by `read`.
    Buffered,
    /// Through the page cache, out of a mapping.
    Mapped,
    /// By the device itself, past the host, wherever it can; the rest by what is in the page cache.
    GpuDirect,
}

/// What the caller of [`plan`](super::plan) chooses.
#[derive(Debug, Clone, Copy)]
pub struct PlanOptions {
    /// Which way the bytes shall go.
    pub route: RouteChoice,
    /// Bytes of a staging buffer.
    pub buffer_bytes: u64,
}

/// A complete plan. Offsets and lengths are bytes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct LoadPlan {
    /// Size of the arena.
    pub arena_bytes: u64,
    /// The size that staging buffers must have, at most what was allowed; 0 if no transfer needs one.
    pub buffer_bytes: u64,
    /// Where each tensor lies, in the order of the selection.
    pub placements: Vec<Placement>,
    /// The reads, by file and offset.
    pub transfers: Vec<Transfer>,
    /// The tables of scales that converting needs, read before everything else.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<ScaleTable>,
}

/// A tensor that holds the scales of quantised ones.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct ScaleTable {
    /// Its name as stored.
    pub name: Arc<str>,
    /// The tensors that it scales, by the names they are handed out under.
    pub scales: Vec<Arc<str>>,
    /// Its element type.
    pub dtype: Dtype,
    /// Where its bytes are.
    #[serde(skip)]
    pub runs: Vec<Strided>,
    /// The one number that all of its scales are multiplied by or divided by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global: Option<GlobalScale>,
}

/// The upper level of scales on two levels: one F32 number.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct GlobalScale {
    /// The tensor that holds it, as stored.
    pub name: Arc<str>,
    /// Whether scales are divided by it.
    pub divides: bool,
    /// Where its bytes are.
    #[serde(skip)]
    pub runs: Vec<Strided>,
}

/// Where a tensor lies in the arena.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Placement {
    /// Name under which it is handed out.
    pub name: Arc<str>,
    /// Further names of the same memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<Arc<str>>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape after slicing.
    pub shape: Arc<[usize]>,
    /// First byte in the arena.
    pub arena: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The tensor that these bytes are placed for, where it is another one: tied weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_as: Option<Arc<str>>,
}

/// One read and what it feeds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Transfer {
    /// Which file.
    pub shard: ShardIndex,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The way to take.
    pub route: Route,
    /// Where the bytes go.
    pub landing: Landing,
}

/// Where the bytes of a read go.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Landing {
    /// Straight to their place, from this byte of the arena on.
    InPlace {
        /// First byte in the arena.
        arena: u64,
    },
    /// Into a staging buffer, and from there piece by piece.
    Staged {
        /// What to copy.
        pieces: Vec<PlacedPiece>,
    },
}

/// A piece of a staging buffer and its place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PlacedPiece {
    /// The bytes of the buffer.
    pub piece: Piece,
    /// First byte in the arena.
    pub arena: u64,
    /// The tensor, as an index of the placements, if the piece is converted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<usize>,
}

impl Placement {
    /// The bytes as a range of the arena.
    pub fn range(&self) -> Range<u64> {
        self.arena..self.arena + self.bytes
    }
}

impl Transfer {
    /// The bytes as a range of the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// The arena ranges it writes.
    pub fn writes(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let in_place = match &self.landing {
            Landing::InPlace { arena } => Some(*arena..*arena + self.len),
            Landing::Staged { .. } => None,
        };
        let pieces: &[PlacedPiece] = match &self.landing {
            Landing::InPlace { .. } => &[],
            Landing::Staged { pieces } => pieces,
        };
        in_place.into_iter().chain(pieces.iter().map(|p| p.arena..p.arena + p.piece.len()))
    }
}

impl LoadPlan {
    /// Number of tensors, those that share their bytes counted once.
    pub fn tensors(&self) -> usize {
        self.distinct().count()
    }

    /// Number of names that tensors are handed out under.
    pub fn names(&self) -> usize {
        self.placements.iter().map(|placement| 1 + placement.aliases.len()).sum()
    }

    /// Bytes of the tensors, shared ones counted once.
    pub fn tensor_bytes(&self) -> u64 {
        self.distinct().map(|placement| placement.bytes).sum()
    }

    fn distinct(&self) -> impl Iterator<Item = &Placement> {
        self.placements.iter().filter(|placement| placement.same_as.is_none())
    }

    /// Bytes that are read, gaps and block padding included.
    pub fn read_bytes(&self) -> u64 {
        self.transfers.iter().map(|transfer| transfer.len).sum()
    }

    /// Bytes read by `route`.
    pub fn route_bytes(&self, route: Route) -> u64 {
        self.transfers.iter().filter(|transfer| transfer.route == route).map(|transfer| transfer.len).sum()
    }

    /// Number of reads that need a staging buffer.
    pub fn staged(&self) -> usize {
        self.transfers.iter().filter(|transfer| matches!(transfer.landing, Landing::Staged { .. })).count()
    }

    /// Which tensor of scales each quantised weight is multiplied by.
    pub fn scaled(&self) -> BTreeMap<&str, &str> {
        let pairs = self.scales.iter().flat_map(|table| table.scales.iter().map(move |weight| (weight, &table.name)));
        pairs.map(|(weight, scales)| (weight.as_ref(), scales.as_ref())).collect()
    }
}

impl fmt::Display for LoadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (staged, total) = (self.staged(), self.transfers.len());
        writeln!(
            f,
            "{} tensors, {} bytes, in an arena of {} bytes",
            self.tensors(),
            self.tensor_bytes(),
            self.arena_bytes
        )?;
        writeln!(f, "{total} reads of {} bytes: {} in place, {staged} staged", self.read_bytes(), total - staged)?;
        for route in [Route::Direct, Route::Buffered, Route::Mapped, Route::GpuDirect] {
            let bytes = self.route_bytes(route);
            if bytes > 0 {
                writeln!(f, "  {route:?}: {bytes} bytes")?;
            }
        }
        Ok(())
    }
}
