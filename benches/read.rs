//! Reading by each route into a reused buffer, from the page cache and from storage.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use vramp::memory::staging::StagingPool;
use vramp::storage::{Fallbacks, LocalStorage, Location, Route, Storage};

#[allow(dead_code)]
mod common;

const READ_BYTES: usize = 4 << 20;

fn read(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let path = common::write(folder.path(), 64, 2 << 20);
    let file = LocalStorage.open(&Location::from(&path), &Fallbacks::default()).unwrap();
    let pool = StagingPool::new(1, READ_BYTES).unwrap();
    let mut buffer = pool.acquire().unwrap();
    let reads = file.version().len() / READ_BYTES as u64;
    let mut group = criterion.benchmark_group("read");
    group.sample_size(10).throughput(Throughput::Bytes(reads * READ_BYTES as u64));
    for route in [Route::Direct, Route::Buffered, Route::Mapped] {
        let source = file.source(route);
        for cold in [true, false] {
            let state = if cold { "cold" } else { "warm" };
            group.bench_function(format!("{route:?}, 1 thread, 4 MiB, {state}"), |bencher| {
                bencher.iter_custom(|rounds| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..rounds {
                        if cold {
                            common::cool(&path)
                        } else {
                            common::warm(&path)
                        }
                        let started = Instant::now();
                        for index in 0..reads {
                            source.read_at(index * READ_BYTES as u64, buffer.bytes_mut()).unwrap();
                        }
                        spent += started.elapsed();
                    }
                    spent
                });
            });
        }
    }
}

criterion_group!(benches, read);
criterion_main!(benches);
