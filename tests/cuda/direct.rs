//! Files that the GPU reads itself, on the double of cuFile over the double of the driver: the same bytes as by any other route,
//! and whatever cuFile does, a load that ends well and says why it went by way of the host.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fakecufile::{Fake, Plan, ReadFault};
use swcuda::{Config, Double};
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::{CudaDevice, forget_cufile};
use vramp::load::{Loaded, Loader, TransferOptions};
use vramp::plan::{LoadPlan, RouteChoice};
use vramp::report::Staging;
use vramp::storage::{Fallback, Route};
use vramp::testing::{Random, Synthetic, watched};

use super::{Rig, scheduled, schedules};

/// A file that every Linux has, in the place of the kernel's list of modules: the double starts without one.
const A_FILE: &str = "/proc/version";

/// Both doubles, and a process that knows nothing of cuFile yet. The limit of its start is one that a busy machine keeps.
fn doubles(config: Config, plan: Plan) -> Option<(Double, Fake)> {
    let double = Rig::double(config)?;
    let fake = Fake::acquire(plan);
    forget_cufile(Path::new(A_FILE), Duration::from_secs(20));
    Some((double, fake))
}

fn options() -> TransferOptions {
    let staging = Some(Staging { count: 2, bytes: 32 << 10 });
    TransferOptions::default().route(RouteChoice::GpuDirect).staging(staging)
}

fn synthetic(seed: u64) -> Synthetic {
    Synthetic::new(seed, 1 + (seed % 3) as u32, 250_000, |_, file| file.with_descriptor())
}

fn load(synthetic: &Synthetic, what: &str) -> (Loaded, LoadPlan) {
    let loader = Loader::new(Arc::new(CudaDevice::open(0).unwrap()), options());
    let mut loader = loader;
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
    let loaded = loader.load(&prepared).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    for (name, bytes) in &synthetic.expected {
        let tensor = loaded.tensor(name).unwrap();
        assert!(tensor.download().unwrap() == *bytes, "wrong bytes in {name}: {what}");
        assert_eq!(tensor.address().is_some_and(|address| address.is_multiple_of(256)), !bytes.is_empty(), "{what}");
    }
    (loaded, prepared.plan)
}

fn notes(loaded: &Loaded) -> Vec<&Fallback> {
    loaded.report.fallbacks.iter().filter(|note| note.what == "gpu-direct").collect()
}

#[test]
fn what_the_gpu_reads_itself_arrives_under_every_schedule() {
    watched(|| {
        let mut past_host = 0;
        for (seed, schedule) in (0..).zip(schedules(6)) {
            let plan = Plan { most_bytes: [0, 100_000, 4096, 70_001][seed as usize % 4], ..Plan::default() };
            let Some((_double, fake)) = doubles(scheduled(schedule), plan) else { return };
            let synthetic = synthetic(seed);
            let (loaded, plan) = load(&synthetic, &format!("seed {seed}, {schedule:?}"));
            let read = plan.route_bytes(Route::GpuDirect);
            assert_eq!((loaded.report.routes.gpu_direct, fake.counters().bytes), (read, read), "seed {seed}");
            assert_eq!(loaded.report.fallbacks, [], "seed {seed}");
            assert_eq!((fake.counters().opens, fake.counters().known, fake.counters().buffers), (1, 0, 0));
            assert!(fake.counters().most_at_once <= 8);
            past_host += read;
        }
        assert!(past_host > 1_000_000, "only {past_host} bytes went past the host: the test tests nothing");
    });
}

#[test]
fn a_cufile_that_cannot_be_had_is_a_line_in_the_report() {
    watched(|| {
        let cases: [(Plan, &str); 4] = [
            (Plan { open_code: 5033, ..Plan::default() }, "cuFileDriverOpen says 5033"),
            (Plan { open_code: 5001, ..Plan::default() }, "the nvidia-fs module is not loaded"),
            (Plan { register_code: 5030, ..Plan::default() }, "udev"),
            (Plan { register_code: 5999, ..Plan::default() }, "a code that vramp does not know"),
        ];
        for (plan, reason) in cases {
            let Some((_double, fake)) = doubles(Config::default(), plan) else { return };
            let (loaded, plan) = load(&synthetic(2), reason);
            assert_eq!((plan.route_bytes(Route::GpuDirect), fake.counters().reads), (0, 0), "{reason}");
            let [note] = notes(&loaded)[..] else { panic!("{reason}: {:?}", notes(&loaded)) };
            assert!(note.why.contains(reason) && note.why.contains("by way of the host"), "{}", note.why);
        }
    });
}

#[test]
fn a_cufile_that_is_already_open_is_used() {
    let Some((_double, fake)) = doubles(Config::default(), Plan { open_code: 5026, ..Plan::default() }) else { return };
    let (loaded, _) = load(&synthetic(2), "already open");
    assert!(notes(&loaded).is_empty() && fake.counters().bytes > 0);
}

#[test]
fn a_start_that_hangs_hangs_nobody_and_is_not_tried_again() {
    watched(|| {
        let Some((_double, fake)) = doubles(Config::default(), Plan { open_hangs: true, ..Plan::default() }) else {
            return;
        };
        forget_cufile(Path::new(A_FILE), Duration::ZERO);
        for _ in 0..2 {
            let (loaded, _) = load(&synthetic(2), "hangs");
            let [note] = notes(&loaded)[..] else { panic!("{:?}", notes(&loaded)) };
            assert!(note.why.contains("did not come back within 0ns"), "{}", note.why);
        }
        while fake.counters().opens == 0 {
            std::thread::yield_now(); // the thread that was given up has not come to it yet
        }
        assert_eq!((fake.counters().opens, fake.counters().registered), (1, 0));
        fake.release();
    });
}

#[test]
fn a_system_without_modules_does_not_start_cufile() {
    let Some((_double, fake)) = doubles(Config::default(), Plan::default()) else { return };
    forget_cufile(Path::new("/no/such/list"), Duration::from_secs(20));
    let (loaded, _) = load(&synthetic(2), "no modules");
    assert!(matches!(notes(&loaded)[..], [note] if note.why.contains("/no/such/list")), "{:?}", notes(&loaded));
    assert_eq!(fake.counters().opens, 0);
}

#[test]
fn compatibility_mode_works_and_is_said() {
    let Some((_double, fake)) = doubles(Config::default(), Plan { compat: true, ..Plan::default() }) else { return };
    let (loaded, _) = load(&synthetic(2), "compat");
    assert!(matches!(notes(&loaded)[..], [note] if note.why.contains("compatibility mode")), "{:?}", notes(&loaded));
    assert_eq!(loaded.report.routes.gpu_direct, fake.counters().bytes);
    assert!(fake.counters().bytes > 0);
}

#[test]
fn a_read_that_fails_is_made_by_way_of_the_host_and_noted_once() {
    watched(|| {
        let faults = [
            (ReadFault::Code(5044), "5044"),
            (ReadFault::Code(5008), "file system or disk has no GPUDirect Storage"),
            (ReadFault::Errno(libc::EIO), "Input/output error"),
            (ReadFault::End, "the file ended after 0 of"),
            (ReadFault::TooMuch, "says that it read"),
        ];
        for (seed, schedule) in (0..).zip(schedules(3)) {
            for (fault, reason) in faults {
                let plan = Plan { read_fault: Some((seed % 2, fault)), ..Plan::default() };
                let Some((double, fake)) = doubles(scheduled(schedule), plan) else { return };
                let (loaded, plan) = load(&synthetic(seed + 2), reason);
                if fake.counters().reads <= seed % 2 {
                    continue; // the load was over before its trouble
                }
                assert!(loaded.report.routes.gpu_direct < plan.route_bytes(Route::GpuDirect), "{reason}");
                let [note] = notes(&loaded)[..] else { panic!("{reason}: {:?}", notes(&loaded)) };
                assert!(note.why.contains(reason) && note.why.contains("way of the host"), "{}", note.why);
                assert_eq!(double.stats().pageable_copies, 0, "the way round is by locked memory");
            }
        }
    });
}

/// More than the two halves of the block that bytes go through: each is emptied before it is filled again.
#[test]
fn bytes_that_are_written_from_the_host_arrive_under_every_schedule() {
    watched(|| {
        let bytes = Random::new(9).bytes((13 << 20) + 77);
        for schedule in schedules(3) {
            let rig = Rig::new(scheduled(schedule));
            let range = 256..256 + bytes.len() as u64 + 5;
            let arena = rig.device().alloc(range.end + 100).unwrap();
            let (mut regions, written) = arena.carve(std::slice::from_ref(&range)).unwrap();
            let mut region = regions.pop().unwrap();
            region.write(0, &[1; 5]).unwrap();
            region.write(5, &bytes).unwrap();
            region.write(range.end - range.start, &[]).unwrap();
            assert!(region.write(6, &bytes).is_err(), "one byte too many");
            region.finish();
            let mut back = vec![0; bytes.len() + 5];
            written.view(range).unwrap().download(0..back.len() as u64, &mut back).unwrap();
            assert!(back[..5] == [1; 5] && back[5..] == bytes, "{schedule:?}");
            assert_eq!(rig.pageable_copies(), 0);
        }
    });
}

#[test]
fn an_interruption_is_no_failure() {
    let plan = Plan { read_fault: Some((0, ReadFault::Interrupted)), ..Plan::default() };
    let Some((_double, fake)) = doubles(Config::default(), plan) else { return };
    let (loaded, plan) = load(&synthetic(2), "interrupted");
    assert!(notes(&loaded).is_empty(), "{:?}", notes(&loaded));
    assert_eq!(fake.counters().bytes, plan.route_bytes(Route::GpuDirect));
}

/// A checkpoint on the disk, whose header has the usual odd length.
#[test]
fn a_file_of_the_file_system_gives_the_same_digests_by_each_route() {
    watched(|| {
        let Some((_double, fake)) = doubles(Config::default(), Plan::default()) else { return };
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("model.safetensors");
        let (a, b) = (3 << 20, (1 << 20) + 4096);
        let header = format!(
            r#"{{"a":{{"dtype":"BF16","shape":[{}],"data_offsets":[0,{a}]}},"b":{{"dtype":"U8","shape":[{b}],"data_offsets":[{a},{}]}}}}"#,
            a / 2,
            a + b
        );
        let data = Random::new(3).bytes(a + b);
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let selected = checkpoint.select(&Selection::default()).unwrap();
        let digests = |route| {
            let options = TransferOptions::default().route(route);
            let mut loader = Loader::new(Arc::new(CudaDevice::open(0).unwrap()), options);
            let prepared = loader.prepare(checkpoint.clone(), &selected).unwrap();
            let loaded = loader.load(&prepared).unwrap();
            (["a", "b"].map(|name| loaded.tensor(name).unwrap().sha256().unwrap()), loaded.report)
        };
        let (by_host, _) = digests(RouteChoice::Buffered);
        let (past_host, report) = digests(RouteChoice::GpuDirect);
        assert_eq!(past_host, by_host);
        assert_eq!(report.routes.gpu_direct, fake.counters().bytes);
        // On a disk: a file system in memory is left alone, and says so.
        let in_memory = matches!(&report.fallbacks[..], [note, ..] if note.why.contains("in memory"));
        assert!(report.routes.gpu_direct > 3 << 20 || in_memory, "{report:?}");
        assert_eq!(
            digests(RouteChoice::Auto).1.routes.gpu_direct,
            0,
            "not where nobody asked and nothing was measured"
        );
    });
}
