//! Whole loads: to host memory and to nowhere, few large tensors and many small ones, cold and warm.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use vramp::device::{CpuDevice, Device, NullDevice};
use vramp::load::{Options, load};

#[allow(dead_code)]
mod common;

fn loads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("load");
    for (name, count, elements) in [("64 x 4 MiB", 64, 2 << 20), ("8192 x 32 KiB", 8192, 16 << 10)] {
        let folder = tempfile::tempdir().unwrap();
        let path = common::write(folder.path(), count, elements);
        group.sample_size(10).throughput(Throughput::Bytes((count * elements * 2) as u64));
        let hosts = [Arc::new(CpuDevice::new()) as Arc<dyn Device>, Arc::new(NullDevice::new())];
        for device in hosts.into_iter().chain(common::gpu()) {
            for cold in [true, false] {
                let state = if cold { "cold" } else { "warm" };
                let options = Options::default().device(Arc::clone(&device));
                group.bench_function(format!("{name} to {}, {state}", device.name()), |bencher| {
                    bencher.iter_custom(|rounds| {
                        let mut spent = Duration::ZERO;
                        for _ in 0..rounds {
                            if cold {
                                common::cool(&path)
                            } else {
                                common::warm(&path)
                            }
                            let started = Instant::now();
                            let loaded = load(&path, &options).unwrap();
                            spent += started.elapsed();
                            drop(loaded);
                        }
                        spent
                    });
                });
            }
        }
    }
}

criterion_group!(benches, loads);
criterion_main!(benches);
