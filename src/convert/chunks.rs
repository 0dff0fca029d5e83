//! A conversion chunk by chunk: each chunk with its scales, at a size that stays in the first-level cache.

use super::elements;
use super::float::Float;
use super::loops::{CHUNK, Job, Vectors};
use super::scales::{Room, Scales};

/// Converts a chunk at a time, each with its scales. Returns how many finite elements became infinite.
pub(super) fn by_chunks(
    source: &[u8],
    from: Float,
    target: &mut [u8],
    to: Float,
    scales: Option<Scales<'_>>,
    vectors: Vectors,
) -> u64 {
    if from == Float::E2M1x2 {
        return by_pairs(source, target, to, scales, vectors);
    }
    let (mut room, mut overflowed) = (Room::new(), 0);
    let chunks = source.chunks(CHUNK * from.width()).zip(target.chunks_mut(CHUNK * to.width()));
    for (index, (source, target)) in (0..).zip(chunks) {
        let factors = room.of(scales.as_ref(), index * CHUNK as u64, source.len() / from.width());
        overflowed += u64::from(Job { source, factors, target }.run(from, to, vectors));
    }
    overflowed
}

/// The same for two numbers in a byte: each is an E4M3 number too, and converted as that.
fn by_pairs(source: &[u8], target: &mut [u8], to: Float, scales: Option<Scales<'_>>, vectors: Vectors) -> u64 {
    let scales = scales.map(|scales| scales.of_numbers(2));
    let (mut room, mut numbers, mut overflowed) = (Room::new(), [[0u8; 2]; CHUNK / 2], 0);
    let chunks = source.chunks(CHUNK / 2).zip(target.chunks_mut(CHUNK * to.width()));
    for (index, (bytes, target)) in (0..).zip(chunks) {
        let numbers = &mut numbers[..bytes.len()];
        numbers.iter_mut().zip(bytes).for_each(|(pair, byte)| *pair = elements::e2m1_as_e4m3(*byte));
        let source = numbers.as_flattened();
        let factors = room.of(scales.as_ref(), index * CHUNK as u64, source.len());
        overflowed += u64::from(Job { source, factors, target }.run(Float::F8E4M3, to, vectors));
    }
    overflowed
}
