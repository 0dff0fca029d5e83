//! Planning: pure data, no file is touched.
#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use vramp::device::{CpuDevice, Device, NullDevice};
use vramp::dtype::Dtype;
use vramp::extent::{Extent, Strided};
use vramp::plan::{PlanOptions, RouteChoice, ShardFacts, Wanted, plan};
use vramp::storage::{Limits, Residency};

fn wanted(count: u64, bytes: u64) -> Vec<Wanted> {
    let tensor = |index: u64| {
        let runs = vec![Strided::contiguous(Extent { shard: 0, offset: 1_000_000 + index * bytes, len: bytes }, 0)];
        let (name, shape) = (format!("layers.{index}.weight").into(), [usize::try_from(bytes / 2).unwrap()].into());
        Wanted { name, aliases: Vec::new(), dtype: Dtype::BF16, shape, bytes, runs, cast: None, place: None }
    };
    (0..count).map(tensor).collect()
}

fn facts(bytes: u64) -> ShardFacts {
    let cached = Limits { align: 1, memory_align: 1, max_read: 4 << 20, gap: 64 << 10, depth: 4 };
    let direct = Some(Limits { align: 512, memory_align: 512, ..cached });
    ShardFacts { bytes, residency: Residency::none(bytes), direct, gpu_direct: None, cached, mappable: true }
}

fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    let options = PlanOptions { route: RouteChoice::Auto, buffer_bytes: 2 << 20 };
    for (count, bytes) in [(300u64, 64u64 << 20), (12_000, 44_000), (100_000, 4096)] {
        let tensors = wanted(count, bytes);
        let shards = [facts(1_000_000 + count * bytes)];
        group.throughput(Throughput::Elements(count));
        for device in [&CpuDevice::new() as &dyn Device, &NullDevice::new()] {
            let limits = device.limits();
            group.bench_function(format!("{count} tensors, cold, to {}", device.name()), |bencher| {
                bencher.iter_batched(
                    || (),
                    |()| plan(&tensors, &shards, limits, options).unwrap(),
                    BatchSize::LargeInput,
                );
            });
        }
    }
}

criterion_group!(benches, planning);
criterion_main!(benches);
