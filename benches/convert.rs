//! Conversion, transposition and checksum in memory, on one thread, beside a copy of the same bytes. No file is touched.
//! Throughput counts the bytes read and written (of the checksum: read).
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use vramp::convert::{Float, Scales, Values, convert, transpose};
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

/// One line, and below it a copy that reads and writes as many bytes.
fn beside_a_copy(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    source: &[u8],
    target_bytes: usize,
    mut work: impl FnMut(&[u8], &mut [u8]),
) {
    let mut target = vec![0; target_bytes];
    group.throughput(Throughput::Bytes((source.len() + target_bytes) as u64));
    group.bench_function(name, |bencher| bencher.iter(|| work(black_box(source), black_box(&mut target))));
    let (from, mut to) = (vec![1; (source.len() + target_bytes) / 2], vec![0; (source.len() + target_bytes) / 2]);
    group.bench_function(format!("{name}: copy"), |bencher| {
        bencher.iter(|| black_box(&mut to).copy_from_slice(black_box(&from)));
    });
}

fn converting(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("convert");
    group.sample_size(20);
    let mut case = |from: Float, to: Float, what: &str, scales: Option<Scales<'_>>| {
        let name = format!("{} to {}{what}", from.name(), to.name());
        beside_a_copy(
            &mut group,
            &name,
            &weights(from),
            ELEMENTS * (from.numbers() * to.bytes()) as usize,
            |source, target| {
                convert(source, from, target, to, scales).unwrap();
            },
        );
    };
    for from in [Float::F64, Float::F32, Float::F16, Float::BF16, Float::F8E4M3, Float::F8E5M2] {
        for to in [Float::F32, Float::F16, Float::BF16] {
            if from != to {
                case(from, to, "", None);
            }
        }
    }
    let columns = 4096;
    let rows = ELEMENTS as u64 / columns;
    for (what, block_rows, block_columns) in [
        (", one scale", rows, columns),
        (", a scale a row", 1, columns),
        (", 128x128 scales", 128, 128),
        (", 1x32 scales", 1, 32),
        (", a scale a column", rows, 1),
    ] {
        let values = vec![0.37; (rows.div_ceil(block_rows) * columns.div_ceil(block_columns)) as usize];
        let scales = Scales { values: (&values).into(), first: 0, columns, block_rows, block_columns };
        case(Float::F8E4M3, Float::BF16, what, Some(scales));
    }
    // Scales of one byte: MXFP8, MXFP4, and NVFP4 with its two levels. An element of pairs is a byte.
    let codes = |block: u64| vec![120u8; (rows * columns / block) as usize];
    let meaning: Vec<f64> = (0..256).map(|code| f64::from(code) * 0.37).collect();
    let coded = |values, block_columns| Some(Scales { values, first: 0, columns, block_rows: 1, block_columns });
    let (eights, sixteens, thirties) = (codes(8), codes(16), codes(32));
    case(Float::F8E4M3, Float::BF16, ", 1x32 exponents", coded(Values::Exponents(&thirties), 32));
    case(Float::E2M1x2, Float::BF16, ", 1x32 exponents", coded(Values::Exponents(&sixteens), 16));
    case(Float::E2M1x2, Float::BF16, ", 1x16 scales on two levels", coded(Values::Coded(&eights, &meaning), 8));
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
