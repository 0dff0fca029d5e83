//! SHA-256 digests, streamed, and the checksum by which bytes on a device are compared with those that were read. Nothing
//! here reads files: bytes are pushed in.

use std::fmt;
use std::str::FromStr;

use sha2::Digest as _;

/// A SHA-256 digest. `Display` and JSON give 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// A digest in the making.
#[derive(Debug, Clone, Default)]
pub struct Hasher(sha2::Sha256);

impl Hasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Hasher {
        Hasher::default()
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of everything taken.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The 32 bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{self}")
    }
}

impl FromStr for Digest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Digest, Self::Err> {
        const WRONG: &str = "a SHA-256 digest has 64 hexadecimal digits";
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(WRONG);
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| WRONG)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| WRONG)?;
        }
        Ok(Digest(bytes))
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A 64-bit checksum of `bytes` that a GPU computes as well (`kernels/checksum.cu`). It finds accidents: a flipped bit, blocks
/// that are swapped, missing or there twice. It is no protection from forgery; [`Digest`] is.
///
/// ```
/// use vramp::digest::checksum;
/// assert_ne!(checksum(b"weights"), checksum(b"weights\0"));
/// ```
pub fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let (fours, last) = words.as_chunks::<4>();
    // Four sums that do not wait for each other; the keys grow by addition.
    let (mut sums, mut keys) = ([0u64; 4], [key(0), key(1), key(2), key(3)]);
    let step = KEY.wrapping_mul(8);
    for four in fours {
        for ((sum, key), word) in sums.iter_mut().zip(&mut keys).zip(four) {
            *sum = sum.wrapping_add(mix(u64::from_le_bytes(*word), *key));
            *key = key.wrapping_add(step);
        }
    }
    let mut padded = [0; 8];
    padded[..rest.len()].copy_from_slice(rest);
    let last = last.iter().chain((!rest.is_empty()).then_some(&padded));
    let last = last.zip(keys).map(|(word, key)| mix(u64::from_le_bytes(*word), key));
    let sum = sums.into_iter().chain(last).fold(0, u64::wrapping_add);
    checksum_finish(sum, bytes.len() as u64)
}

/// The checksum of `len` bytes whose words' sum is `sum`: what a kernel has added up becomes comparable to [`checksum`].
pub fn checksum_finish(sum: u64, len: u64) -> u64 {
    let keyed = mix(sum, key(len));
    mix(keyed, KEY)
}

/// Odd, with its bits spread.
const KEY: u64 = 0x9e37_79b9_7f4a_7c15;

/// The key of the word at `index`: odd, and another one for every index below 2^63.
fn key(index: u64) -> u64 {
    KEY.wrapping_mul(index.wrapping_mul(2).wrapping_add(1))
}

/// For each key a bijection of the word, so that a changed word always changes a sum. The key is the factor too: the change
/// that swapping two words makes to one term is never undone by the other term, as it could be if all were multiplied alike.
fn mix(word: u64, key: u64) -> u64 {
    let keyed = word ^ key;
    let product = (keyed ^ keyed >> 32).wrapping_mul(key);
    product ^ product >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, word by word.
    fn plain(bytes: &[u8]) -> u64 {
        let words = bytes.chunks(8).map(|chunk| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)));
        let terms = (0..).zip(words).map(|(index, word)| mix(word, key(index)));
        checksum_finish(terms.fold(0, u64::wrapping_add), bytes.len() as u64)
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u64).map(|at| mix(at, KEY).to_le_bytes()[2]).collect()
    }

    #[test]
    fn checksums_are_the_sum_of_the_mixed_words() {
        for len in (0..100).chain([4096, 100_003]) {
            assert_eq!(checksum(&bytes(len)), plain(&bytes(len)), "{len} bytes");
        }
        // Pinned: a stored checksum must not change its meaning.
        assert_eq!(checksum(b""), 0xbe75_fbe7_9b13_c397);
        assert_eq!(checksum(b"vramp"), 0xc9ea_7574_0587_9eb7);
    }

    #[test]
    fn every_flipped_bit_every_length_and_every_swap_changes_the_checksum() {
        let original = bytes(200);
        let mut seen = std::collections::HashSet::from([checksum(&original)]);
        for bit in 0..original.len() * 8 {
            let mut flipped = original.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(checksum(&flipped)), "bit {bit}");
        }
        for first in 0..25 {
            for second in first + 1..25 {
                let mut swapped = original.clone();
                (0..8).for_each(|byte| swapped.swap(first * 8 + byte, second * 8 + byte));
                assert!(seen.insert(checksum(&swapped)), "words {first} and {second}");
            }
        }
        assert!((0..200).all(|len| seen.insert(checksum(&vec![0; len]))), "zeros of different lengths");
    }

    #[test]
    fn the_empty_digest_is_the_known_one_and_round_trips() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
        assert!("é".repeat(32).parse::<Digest>().is_err());
    }
}
