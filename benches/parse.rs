//! Opening a checkpoint: headers only, in the page cache.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use vramp::checkpoint::{Checkpoint, Selection, safetensors};

#[allow(dead_code)]
mod common;

fn parse(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("parse");
    for count in [300, 12_000, 100_000] {
        let header = common::header(count, 2);
        let file_len = 8 + header.len() as u64 + count as u64 * 4;
        group.throughput(Throughput::Bytes(header.len() as u64));
        group.bench_function(format!("header of {count} tensors in memory"), |bencher| {
            bencher.iter(|| safetensors::parse(header.as_bytes(), file_len).unwrap());
        });
    }
    let folder = tempfile::tempdir().unwrap();
    let path = common::write(folder.path(), 12_000, 64);
    common::warm(&path);
    group.throughput(Throughput::Elements(12_000));
    group.bench_function("open 12000 tensors, warm", |bencher| bencher.iter(|| Checkpoint::open(&path).unwrap()));
    let checkpoint = Checkpoint::open(&path).unwrap();
    group.bench_function("select 12000 tensors", |bencher| {
        bencher.iter(|| checkpoint.select(&Selection::default()).unwrap());
    });
}

criterion_group!(benches, parse);
criterion_main!(benches);
