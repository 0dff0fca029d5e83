//! The loops of conversion, for every pair of formats, compiled twice: for any processor of the kind, and for those with wider vectors,
//! chosen when the program runs. They know no scales but one factor for each element, and trust nobody's lengths: the shorter slice
//! ends a loop.
//!
//! There is one loop. It is written for the compiler to vectorise; no instruction is named here.
#![allow(unsafe_code)] // one call: of code for the vectors that were asked for just before

use super::elements::{BF16, Decode, E4M3, E4M3Fnuz, E5M2, E5M2Fnuz, Encode, F16, F32, F64, multiply, multiply_wide};
use super::float::Float;

/// Elements that are converted at a time: their scales stay in the first-level cache.
pub(super) const CHUNK: usize = 2048;

/// Vectors to compute in.
#[derive(Debug, Clone, Copy)]
pub(super) enum Vectors {
    /// Those that every processor of the kind has.
    Usual,
    /// 32 bytes.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

/// The processor has AVX2. Only [`Vectors::widest`] makes one.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Vectors {
    /// The widest that this processor has, of those that the loops are compiled for.
    pub(super) fn widest() -> Vectors {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Vectors::Avx2(Avx2(()));
        }
        Vectors::Usual
    }
}

/// A scale for each element.
#[derive(Debug, Clone, Copy)]
pub(super) enum Factors<'a> {
    /// Products are rounded to F32 first.
    Single(&'a [f32]),
    /// Products are rounded once.
    Double(&'a [f64]),
}

/// One call of a loop: `source` to `target`, at most `u32::MAX` elements, times their factors if there are some.
pub(super) struct Job<'a> {
    pub(super) source: &'a [u8],
    pub(super) factors: Option<Factors<'a>>,
    pub(super) target: &'a mut [u8],
}

impl Job<'_> {
    /// Converts. Returns how many elements that were finite, and whose factor was, became infinite.
    pub(super) fn run(self, from: Float, to: Float, vectors: Vectors) -> u32 {
        match to {
            Float::F16 => self.run_to::<2, F16>(from, vectors),
            Float::BF16 => self.run_to::<2, BF16>(from, vectors),
            _ => self.run_to::<4, F32>(from, vectors),
        }
    }

    fn run_to<const M: usize, T: Encode<M>>(self, from: Float, vectors: Vectors) -> u32 {
        match from {
            Float::F64 => self.run_in::<8, M, F64, T>(vectors),
            Float::F32 => self.run_in::<4, M, F32, T>(vectors),
            Float::F16 => self.run_in::<2, M, F16, T>(vectors),
            Float::BF16 => self.run_in::<2, M, BF16, T>(vectors),
            Float::F8E4M3 => self.run_in::<1, M, E4M3, T>(vectors),
            Float::F8E5M2 => self.run_in::<1, M, E5M2, T>(vectors),
            Float::F8E4M3Fnuz => self.run_in::<1, M, E4M3Fnuz, T>(vectors),
            Float::F8E5M2Fnuz => self.run_in::<1, M, E5M2Fnuz, T>(vectors),
            // Pairs come as E4M3: this would take one number of each byte, and `by_chunks` never asks for it.
            Float::E2M1x2 => self.run_in::<1, M, E4M3, T>(vectors),
        }
    }

    fn run_in<const N: usize, const M: usize, S: Decode<N>, T: Encode<M>>(self, vectors: Vectors) -> u32 {
        match vectors {
            Vectors::Usual => each::<N, M, S, T>(self),
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2(Avx2(())) => {
                // SAFETY: the processor has AVX2, as the value proves; the function has no other demand.
                unsafe { each_in_avx2::<N, M, S, T>(self) }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn each_in_avx2<const N: usize, const M: usize, S: Decode<N>, T: Encode<M>>(job: Job<'_>) -> u32 {
    each::<N, M, S, T>(job)
}

/// Inlined always, so that it is compiled for the vectors of whoever calls it.
#[inline(always)]
fn each<const N: usize, const M: usize, S: Decode<N>, T: Encode<M>>(job: Job<'_>) -> u32 {
    let pairs = job.source.as_chunks::<N>().0.iter().zip(job.target.as_chunks_mut::<M>().0);
    let mut overflowed = 0;
    match job.factors {
        None => {
            for (from, to) in pairs {
                let value = S::decode(*from, T::HOLDS_F32);
                let element = T::encode(value);
                *to = T::bytes(element);
                overflowed += u32::from(T::is_infinite(element) & S::is_finite(*from, value));
            }
        }
        Some(Factors::Double(factors)) => {
            for ((from, to), factor) in pairs.zip(factors) {
                let value = S::decode(*from, T::HOLDS_F32);
                let element = T::encode(multiply_wide(value, *factor, T::HOLDS_F32));
                *to = T::bytes(element);
                overflowed += u32::from(T::is_infinite(element) & S::is_finite(*from, value) & factor.is_finite());
            }
        }
        Some(Factors::Single(factors)) => {
            for ((from, to), factor) in pairs.zip(factors) {
                let value = S::decode(*from, T::HOLDS_F32);
                let element = T::encode(multiply(value, *factor));
                *to = T::bytes(element);
                overflowed += u32::from(T::is_infinite(element) & S::is_finite(*from, value) & factor.is_finite());
            }
        }
    }
    overflowed
}
