//! Conversion, transposition and checksum in memory, on one thread, beside a copy of the same bytes. No file is touched.
//! Throughput counts the bytes read and written (of the checksum: read).
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use vramp::convert::{Float, Scales, convert, transpose};
use vramp::digest::checksum;

const ELEMENTS: usize = 16 << 20;

/// Values like those of weights: both signs, below 1, no NaN; any format holds them.
fn weights(format: Float) -> Vec<u8> {
    let values = (0..ELEMENTS as u32).map(|at| (at.wrapping_mul(2_654_435_761) as i32) as f32 / 2.0f32.powi(34));
    match format {
        Float::F64 => values.flat_map(|value| f64::from(value).to_le_bytes()).collect(),
        Float::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Float::F16 => values.flat_map(|value| half::f16::from_f32(value).to_le_bytes()).collect(),
        Float::BF16 => values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        _ => (0..ELEMENTS as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 & 0xf7).collect(),
    }
}

fn converting(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("convert");
    group.sample_size(20);
    let source = weights(Float::F32);
    let mut target = vec![0; source.len()];
    group.throughput(Throughput::Bytes(2 * source.len() as u64));
    group.bench_function("copy", |bencher| bencher.iter(|| black_box(&mut target).copy_from_slice(black_box(&source))));
    let mut case = |from: Float, to: Float, scales: Option<Scales<'_>>| {
        let source = weights(from);
        let mut target = vec![0; ELEMENTS * to.bytes() as usize];
        group.throughput(Throughput::Bytes((source.len() + target.len()) as u64));
        let scaled = if scales.is_some() { ", 128x128 scales" } else { "" };
        group.bench_function(format!("{} to {}{scaled}", from.name(), to.name()), |bencher| {
            bencher.iter(|| convert(black_box(&source), from, black_box(&mut target), to, scales).unwrap());
        });
    };
    for from in [Float::F64, Float::F32, Float::F16, Float::BF16, Float::F8E4M3] {
        for to in [Float::F32, Float::F16, Float::BF16] {
            if from != to {
                case(from, to, None);
            }
        }
    }
    let values = vec![0.37; 32 * 32];
    let scales = Scales { values: &values, first: 0, columns: 4096, block_rows: 128, block_columns: 128 };
    case(Float::F8E4M3, Float::BF16, Some(scales));
}

fn others(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("bytes");
    group.sample_size(20);
    let source = weights(Float::F32);
    let mut target = vec![0; source.len()];
    group.throughput(Throughput::Bytes(source.len() as u64));
    group.bench_function("checksum", |bencher| bencher.iter(|| checksum(black_box(&source))));
    group.throughput(Throughput::Bytes(2 * source.len() as u64));
    for bytes in [2, 4] {
        let columns = (source.len() / bytes / 4096) as u64;
        group.bench_function(format!("transpose, elements of {bytes} bytes"), |bencher| {
            bencher.iter(|| transpose(black_box(&source), black_box(&mut target), 4096, columns, bytes).unwrap());
        });
    }
}

criterion_group!(benches, converting, others);
criterion_main!(benches);
