//! Digests of the tensors in one file, computed from the bytes of the file as they pass.
//!
//! A cursor over the file: bytes go to the tensor that they belong to. It reads nothing back and starts no thread.

use std::collections::VecDeque;
use std::sync::Arc;

use super::layout::{Layout, ShardLayout};
use crate::digest::{Digest, Hasher};

/// The digests of a file's tensors, in the making.
#[derive(Debug)]
pub(super) struct Sums {
    /// What is still to come, in the order of the file: a tensor (none: the header) and how many of its bytes are missing.
    parts: VecDeque<(Option<Arc<str>>, u64)>,
    hasher: Hasher,
    done: Vec<(Arc<str>, Digest)>,
}

impl Sums {
    pub(super) fn of(shard: &ShardLayout, layout: &Layout) -> Sums {
        let tensors = shard.tensors.iter().filter_map(|&at| layout.tensors.get(at));
        let tensors = tensors.map(|tensor| (Some(Arc::clone(&tensor.name)), tensor.bytes().unwrap_or(0)));
        let parts = std::iter::once((None, shard.header.len() as u64)).chain(tensors).collect();
        Sums { parts, hasher: Hasher::new(), done: Vec::new() }
    }

    /// Takes the next bytes of the file.
    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while let (false, Some((tensor, missing))) = (bytes.is_empty(), self.parts.front_mut()) {
            let len = usize::try_from(*missing).map_or(bytes.len(), |missing| missing.min(bytes.len()));
            let (now, later) = bytes.split_at(len);
            if tensor.is_some() {
                self.hasher.update(now);
            }
            *missing -= len as u64;
            bytes = later;
            self.settle();
        }
    }

    /// Closes what has all of its bytes.
    fn settle(&mut self) {
        while self.parts.front().is_some_and(|(_, missing)| *missing == 0) {
            let tensor = self.parts.pop_front().and_then(|(tensor, _)| tensor);
            self.done.extend(tensor.map(|name| (name, std::mem::take(&mut self.hasher).finish())));
        }
    }

    /// The digests of all tensors whose bytes have come.
    pub(super) fn finish(mut self) -> Vec<(Arc<str>, Digest)> {
        self.settle();
        self.done
    }
}
