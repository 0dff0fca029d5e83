//! Conversions in many small batches: the bytes of tensors that are cut into parts, and writers that fail at every step.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::super::convert::convert_in;
use super::super::{Bytes, ConvertOptions, Converted, FileStore, Input, Outline, SaveOptions, Store, Target, save};
use super::*;
use crate::convert::Float;
use crate::dtype::Dtype;
use crate::load::{Convert, Options, load};
use crate::testing::{CrashStore, Random, StoreTrouble, refused, watched};

struct Given {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn given(name: &'static str, dtype: Dtype, shape: &[usize], random: &mut Random) -> Given {
    let len = usize::try_from(dtype.tensor_bytes(shape).unwrap()).unwrap();
    Given { name, dtype, shape: shape.into(), bytes: random.bytes(len) }
}

fn write(path: &Path, tensors: &[Given]) {
    let input = |tensor: &'_ Given| Outline {
        name: tensor.name.into(),
        dtype: tensor.dtype,
        shape: tensor.shape.as_slice().into(),
    };
    let inputs: Vec<Input<'_>> =
        tensors.iter().map(|it| Input { outline: input(it), bytes: Bytes::Host(&it.bytes) }).collect();
    save(path, &inputs, &SaveOptions::default()).unwrap();
}

fn to(dtype: Float, allow_overflow: bool) -> ConvertOptions {
    let convert = Some(Convert { to: dtype, allow_overflow });
    ConvertOptions { transfer: TransferOptions { convert, ..TransferOptions::default() }, ..ConvertOptions::default() }
}

fn converted(from: &Path, out: &Path, options: &ConvertOptions, batch_bytes: u64) -> Result<Converted> {
    let options = ConvertOptions { check: true, ..options.clone() };
    convert_in(&Checkpoint::open(from).unwrap(), &FileStore, &Target::of(out), &options, batch_bytes)
}

#[test]
fn tensors_larger_than_a_batch_arrive_whole() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let mut random = Random::new(3);
        let tensors = [
            given("a", Dtype::U8, &[7, 1001], &mut random),
            given("b", Dtype::F64, &[1, 777], &mut random),
            given("c", Dtype::BF16, &[3, 5, 300], &mut random),
            given("d", Dtype::I32, &[], &mut random),
            given("e", Dtype::F4, &[9, 34], &mut random),
            given("f", Dtype::C64, &[400], &mut random),
            given("g", Dtype::F32, &[0, 3], &mut random),
        ];
        let from = folder.path().join("in.safetensors");
        write(&from, &tensors);
        for (round, batch_bytes) in [16, 48, 1000, 4096, 1 << 20].into_iter().enumerate() {
            let out = folder.path().join(format!("out-{round}.safetensors"));
            converted(&from, &out, &ConvertOptions::default(), batch_bytes).unwrap();
            let found = load(&out, &Options::default()).unwrap();
            for tensor in &tensors {
                let found = found.tensor(tensor.name).unwrap();
                assert_eq!((found.dtype(), found.shape()), (tensor.dtype, tensor.shape.as_slice()), "{}", tensor.name);
                assert!(found.bytes().unwrap() == tensor.bytes, "{} in batches of {batch_bytes}", tensor.name);
            }
        }
    });
}

/// The value of an E4M3 number, by its definition.
fn e4m3(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = (byte >> 7, i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let value = match exponent {
        0 => mantissa / 8.0 * f32::powi(2.0, -6),
        _ => (1.0 + mantissa / 8.0) * f32::powi(2.0, exponent - 7),
    };
    if sign == 1 { -value } else { value }
}

#[test]
fn every_part_of_a_quantised_tensor_gets_the_scales_of_its_own_blocks() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let mut random = Random::new(5);
        let (rows, columns) = (200usize, 300usize);
        let mut weight = given("l.weight", Dtype::F8_E4M3, &[rows, columns], &mut random);
        weight.bytes.iter_mut().for_each(|byte| *byte &= 0xf7); // no NaN
        let values: Vec<f32> = (0..6u8).map(|at| 0.37 + f32::from(at)).collect();
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let scale = Given { name: "l.weight_scale_inv", dtype: Dtype::F32, shape: vec![2, 3], bytes };
        let expected: Vec<f32> = (0..rows * columns)
            .map(|at| e4m3(weight.bytes[at]) * values[at / columns / 128 * 3 + at % columns / 128])
            .collect();
        let from = folder.path().join("in.safetensors");
        write(&from, &[weight, scale]);
        for (round, batch_bytes) in [64, 5000, 9999, 1 << 20].into_iter().enumerate() {
            let out = folder.path().join(format!("out-{round}.safetensors"));
            converted(&from, &out, &to(Float::F32, false), batch_bytes).unwrap();
            let found = load(&out, &Options::default()).unwrap();
            assert_eq!(found.tensors().len(), 1);
            let found = found.tensor("l.weight").unwrap();
            assert_eq!(found.shape(), [rows, columns]);
            assert!(found.as_slice::<f32>().unwrap() == expected, "in batches of {batch_bytes}");
        }
    });
}

#[test]
fn overflows_in_several_parts_of_a_tensor_are_counted_together() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let values = |large: &[usize]| -> Vec<u8> {
            (0..1000).map(|at| if large.contains(&at) { 1e6f32 } else { 0.5 }).flat_map(f32::to_le_bytes).collect()
        };
        let tensor = |name, large: &[usize]| Given { name, dtype: Dtype::F32, shape: vec![1000], bytes: values(large) };
        let (from, out) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
        write(&from, &[tensor("a", &[0, 500, 999]), tensor("b", &[7]), tensor("c", &[])]);
        let refused = converted(&from, &out, &to(Float::F16, false), 256).unwrap_err();
        let Error::Overflow { tensors, .. } = &refused else { panic!("{refused}") };
        assert_eq!(tensors, &[("a".to_owned(), 3), ("b".to_owned(), 1)]);
        assert!(!out.exists());
        let done = converted(&from, &out, &to(Float::F16, true), 256).unwrap();
        let said: Vec<&String> = done.warnings.iter().filter(|warning| warning.contains("infinite")).collect();
        assert_eq!(said, ["finite numbers became infinite in F16: \"a\" (3 numbers), \"b\" (1 number)"]);
    });
}

#[test]
fn batches_and_parts_never_pass_the_limit() {
    let cast = Some(Cast { from: Float::F8E4M3, to: Float::F32, scale: None });
    for (bytes, cast, most) in [(1000, None, 64), (1000, cast, 64), (4096, cast, 1000), (17, None, 16), (64, None, 64)]
    {
        let all = parts(bytes, cast, most);
        assert!(all.iter().all(|part| part.written.end - part.written.start <= most), "{all:?}");
        assert_eq!((all[0].written.start, all.last().unwrap().written.end), (0, bytes));
        assert!(all.windows(2).all(|pair| pair[0].written.end == pair[1].written.start));
        assert!(all.windows(2).all(|pair| pair[0].stored.end == pair[1].stored.start));
    }
    let sizes = [10, 20, 100, 5, 40, 20, 70];
    let parts_of = |at: usize| if at == 6 { Vec::new() } else { parts(sizes[at], None, 64) };
    let made = batches(&[0, 1, 2, 3, 4, 5, 6], |at| sizes[at], parts_of, 64);
    let shown: Vec<String> = made
        .iter()
        .map(|batch| match batch {
            Batch::Whole(outputs) => format!("{outputs:?}"),
            Batch::Part(at, part) => format!("{at}: {:?}", part.written),
        })
        .collect();
    assert_eq!(shown, ["[0, 1]", "2: 0..64", "2: 64..100", "[3, 4]", "[5]", "[6]"]);
}

// ---- writers that fail

/// 40 tensors of 1,000 bytes and one of 10,000, in one file.
fn many(folder: &Path) -> PathBuf {
    let names: Vec<&'static str> = (0..41).map(|at| &*format!("t.{at:02}").leak()).collect();
    let mut random = Random::new(1);
    let shape = |at: usize| if at == 20 { [10_000] } else { [1000] };
    let tensors: Vec<Given> =
        names.iter().enumerate().map(|(at, name)| given(name, Dtype::U8, &shape(at), &mut random)).collect();
    let path = folder.join("in.safetensors");
    write(&path, &tensors);
    path
}

/// The loader waited for ever to hand over the next batch when the writer had failed.
#[test]
fn a_writer_that_fails_at_any_step_of_many_batches_ends_the_conversion() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(many(folder.path())).unwrap();
        for (target, max_shard_bytes) in [
            (Target::File("/d/out.safetensors".into()), u64::MAX),
            (Target::Folder("/d/out".into()), u64::MAX),
            (Target::Folder("/d/out".into()), 12_000),
        ] {
            let options = ConvertOptions { max_shard_bytes, ..ConvertOptions::default() };
            let mut failed = 0;
            for at in 0.. {
                let store = CrashStore::new();
                store.put_folder("/d");
                store.plan(at, StoreTrouble::Fail);
                let done = convert_in(&checkpoint, &store, &target, &options, 1000);
                if store.steps() <= at {
                    assert!(done.is_ok());
                    break;
                }
                failed += usize::from(done.is_err());
                let left = store.files();
                let temporary =
                    |path: &PathBuf| crate::durable::is_temporary(path.file_name().unwrap().to_str().unwrap());
                assert!(!left.keys().any(temporary), "step {at}: {:?}", left.keys());
                if let Err(error) = done {
                    assert_ne!(error.kind().as_str(), "cancelled", "step {at}: the reason is the writer's");
                }
            }
            assert!(failed > 50, "{failed}");
        }
    });
}

/// What the kernel refuses in the middle of files of several blocks.
#[test]
fn a_disk_that_refuses_ends_a_conversion_of_many_batches() {
    let cases: [(&'static [libc::c_long], libc::c_int); 4] = [
        (&[libc::SYS_pwrite64], libc::ENOSPC),
        (&[libc::SYS_pwrite64], libc::EIO),
        (&[libc::SYS_fsync], libc::EIO),
        (&[libc::SYS_pwrite64], libc::EFBIG),
    ];
    for (calls, code) in cases {
        for out in ["out.safetensors", "out"] {
            watched(move || {
                let folder = tempfile::tempdir().unwrap();
                let from = folder.path().join("in.safetensors");
                let tensor = |name, len: usize| Given { name, dtype: Dtype::U8, shape: vec![len], bytes: vec![7; len] };
                write(&from, &[tensor("a", 30 << 20), tensor("b", 9 << 20), tensor("c", 1 << 20)]);
                if !refused(calls, code) {
                    return;
                }
                let options = ConvertOptions { max_shard_bytes: 20 << 20, ..ConvertOptions::default() };
                let target = Target::of(folder.path().join(out));
                let checkpoint = Checkpoint::open(&from).unwrap();
                let error = convert_in(&checkpoint, &FileStore, &target, &options, 1 << 20).unwrap_err();
                assert_eq!(error.exit_code(), 4, "{error:?}");
                let names: Vec<_> =
                    std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
                assert_eq!(names, ["in.safetensors"]);
            });
        }
    }
}

/// A reader that fails while the writer waits, and a switch that is thrown between two batches.
#[test]
fn a_loader_that_fails_or_is_cancelled_ends_the_writer() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let from = many(folder.path());
        let checkpoint = Checkpoint::open(&from).unwrap();
        let (out, seen) = (folder.path().join("out.safetensors"), Arc::new(Mutex::new(0)));
        let options = ConvertOptions::default();
        let (cancel, count) = (options.transfer.cancel.clone(), Arc::clone(&seen));
        let progress = move |done: u64, _| {
            *count.lock().unwrap() = done;
            if done > 20_000 {
                cancel.cancel();
            }
        };
        let options = ConvertOptions { progress: Some(Arc::new(progress)), ..options };
        let error = convert_in(&checkpoint, &FileStore, &Target::of(&out), &options, 2500).unwrap_err();
        assert_eq!(error.kind().as_str(), "cancelled");
        assert!(*seen.lock().unwrap() < 40_000 && !out.exists());
        // The file is gone when the loader opens it.
        std::fs::remove_file(&from).unwrap();
        let store: &dyn Store = &FileStore;
        let error = convert_in(&checkpoint, store, &Target::of(&out), &ConvertOptions::default(), 2500).unwrap_err();
        assert_eq!(error.exit_code(), 4, "{error}");
        assert!(!out.exists());
    });
}
