//! Staged reads: pieces that go from a staging buffer to their places. It decides nothing.

use std::ops::Range;

use super::data::{Landing, PlacedPiece, ShardFacts, Transfer};
use super::route::limits_of;
use crate::device::Piece;
use crate::extent::{ShardIndex, align_down, align_up};
use crate::storage::Route;

/// A piece of a staged read in the making.
pub(super) struct Loose {
    /// Where it begins in the file; `at` of the piece is still to be set.
    pub(super) offset: u64,
    pub(super) piece: Piece,
    pub(super) arena: u64,
    pub(super) tensor: Option<usize>,
}

impl Loose {
    /// Takes `next` in, if it goes on where this one ends, in the file and in the arena: one copy instead of two.
    pub(super) fn join(&mut self, next: &Loose) -> bool {
        let plain = |piece: &Piece| piece.count == 1 && piece.cast.is_none();
        let follows = self.offset + self.piece.run == next.offset && self.arena + self.piece.run == next.arena;
        let joins = plain(&self.piece) && plain(&next.piece) && follows;
        if joins {
            self.piece = Piece::contiguous(0, self.piece.run + next.piece.run);
        }
        joins
    }
}

/// A staged read of `range`, widened to whole blocks for direct I/O.
pub(super) fn staged_transfer(
    shard: ShardIndex,
    range: Range<u64>,
    route: Route,
    facts: &ShardFacts,
    pieces: Vec<Loose>,
) -> Transfer {
    let block = limits_of(route, facts).align;
    let offset = align_down(range.start, block);
    let end = align_up(range.end, block).min(facts.bytes.max(range.end));
    let pieces = pieces
        .into_iter()
        .map(|Loose { offset: from, piece, arena, tensor }| PlacedPiece {
            piece: Piece { at: from - offset, ..piece },
            arena,
            tensor,
        })
        .collect();
    Transfer { shard, offset, len: end - offset, route, landing: Landing::Staged { pieces } }
}
