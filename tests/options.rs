//! The front door: what `load` is told in one flat struct, what a tensor says of its size, and what a device that keeps nothing
//! says when its bytes are asked for.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vramp::Error;
use vramp::Float;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::NullDevice;
use vramp::dtype::Dtype;
use vramp::load::{Cancel, Convert, Observer, Options, load};
use vramp::plan::LoadPlan;
use vramp::testing::LazyDevice;

use crate::files::folder;

#[test]
fn progress_comes_to_all_bytes_and_stands_beside_an_observer() {
    #[derive(Default)]
    struct Seen(AtomicU64);
    impl Observer for Seen {
        fn planned(&self, plan: &LoadPlan) {
            assert_eq!(plan.tensors(), 6);
        }
        fn advanced(&self, done: u64) {
            self.0.store(done, Ordering::Relaxed);
        }
    }
    let made = folder(3, 2, 3, 300_000);
    let told = Arc::new(Mutex::new(Vec::new()));
    let (seen, log) = (Arc::new(Seen::default()), Arc::clone(&told));
    let options = Options::default()
        .progress(move |done, total| log.lock().unwrap().push((done, total)))
        .observer(Arc::clone(&seen) as Arc<dyn Observer>);
    let loaded = load(made.path(), &options).unwrap();
    for (name, bytes) in &made.expected {
        assert!(loaded.tensor(name).unwrap().bytes().unwrap() == bytes, "{name}");
    }
    let told = told.lock().unwrap();
    let &(done, total) = told.last().unwrap();
    assert!(total >= 6 * 300_000 && done == total, "{told:?}");
    assert!(told.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 == pair[1].1), "{told:?}");
    assert_eq!(seen.0.load(Ordering::Relaxed), total);
}

#[test]
fn a_switch_that_is_thrown_stops_the_load() {
    let made = folder(4, 1, 2, 1000);
    let cancel = Cancel::new();
    cancel.cancel();
    let error = load(made.path(), &Options::default().cancel(cancel)).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
}

/// A file with one F32 tensor `w`, of these values.
fn floats(shape: &str, values: &[f32]) -> tempfile::NamedTempFile {
    let len = values.len() * 4;
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{len}]}}}}"#);
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let file = tempfile::Builder::new().suffix(".safetensors").tempfile().unwrap();
    fs::write(file.path(), [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
    file
}

#[test]
fn a_cast_is_said_at_the_top_and_bytes_and_elements_have_names_of_their_own() {
    for (shape, values, count) in
        [("[2,3]", &[1.0f32, 2.0, 3.0, -4.0, 0.5, 6.0][..], 6), ("[]", &[7.0][..], 1), ("[0,5]", &[][..], 0)]
    {
        let file = floats(shape, values);
        let plain = load(file.path(), &Options::default()).unwrap();
        let weight = plain.tensor("w").unwrap();
        assert_eq!((weight.element_count(), weight.byte_len(), weight.is_empty()), (count, 4 * count, count == 0));
        let convert = Some(Convert::to(Float::BF16));
        let cast = load(file.path(), &Options::default().convert(convert)).unwrap();
        let weight = cast.tensor("w").unwrap();
        assert_eq!((weight.dtype(), weight.element_count(), weight.byte_len()), (Dtype::BF16, count, 2 * count));
        let expected: Vec<u16> = values.iter().map(|value| (value.to_bits() >> 16) as u16).collect(); // exact in BF16
        let bits: Vec<u16> =
            weight.as_slice::<half::bf16>().unwrap().iter().map(|value: &half::bf16| value.to_bits()).collect();
        assert_eq!(bits, expected);
        let checkpoint = Checkpoint::open(file.path()).unwrap();
        let mapped = checkpoint.map(&checkpoint.select(&Selection::default()).unwrap()).unwrap();
        let view = mapped.tensor("w").unwrap();
        assert_eq!((view.element_count(), view.byte_len()), (count, 4 * count));
    }
}

#[test]
fn the_null_device_says_what_it_is_for_whatever_is_asked_of_its_tensors() {
    let file = floats("[2,3]", &[1.0, 2.0, 3.0, -4.0, 0.5, 6.0]);
    let loaded = load(file.path(), &Options::default().device(Arc::new(NullDevice::new()))).unwrap();
    let tensor = loaded.tensor("w").unwrap();
    let errors = [
        tensor.bytes().unwrap_err(),
        tensor.as_slice::<f32>().unwrap_err(),
        tensor.download().unwrap_err(),
        tensor.sha256().unwrap_err(),
        tensor.checksum().unwrap_err(),
        tensor.transposed().unwrap_err(),
    ];
    for error in errors {
        let said = error.to_string();
        assert!(said.contains("null") && said.contains("keeps no bytes; it measures reading"), "{said}");
    }
}

#[test]
fn a_device_that_keeps_bytes_elsewhere_names_the_way_to_them() {
    let file = floats("[1]", &[2.0]);
    let loaded = load(file.path(), &Options::default().device(Arc::new(LazyDevice::new(1)))).unwrap();
    let tensor = loaded.tensor("w").unwrap();
    let said = tensor.bytes().unwrap_err().to_string();
    assert!(said.contains("not in host memory") && said.contains("download"), "{said}");
    assert_eq!(tensor.download().unwrap(), 2.0f32.to_le_bytes());
}

#[test]
fn a_tensor_hands_over_its_address_and_what_keeps_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let tensors = [("a", "U8", &[4][..], &[1, 2, 3, 4][..]), ("none", "F32", &[0, 3], &[])];
    std::fs::write(&path, vramp::testing::safetensors(&tensors, serde_json::json!({}))).unwrap();
    let loaded = vramp::load(&path, &vramp::Options::default()).unwrap();
    let (tensor, none) = (loaded.tensor("a").unwrap().clone(), loaded.tensor("none").unwrap().clone());
    let address = tensor.bytes().unwrap().as_ptr().addr() as u64;
    let raw = tensor.into_raw().unwrap();
    assert_eq!((raw.address, raw.byte_len, raw.device.as_str()), (address, 4, "cpu"));
    assert_eq!((raw.dtype, &raw.shape[..]), (vramp::Dtype::U8, &[4][..]));
    let none = none.into_raw().unwrap();
    assert_eq!((none.address, none.byte_len, &none.shape[..]), (0, 0, &[0, 3][..]));
    // The guards keep the memory: it cannot be had back while one lives.
    drop(none);
    let loaded = loaded.into_arena().map(drop).expect_err("a guard lives");
    drop(raw);
    assert!(loaded.into_arena().is_ok());
    let device = std::sync::Arc::new(vramp::device::NullDevice::new());
    let null = vramp::load(&path, &vramp::Options::default().device(device)).unwrap();
    assert!(null.tensor("a").unwrap().clone().into_raw().is_err(), "the null device keeps nothing");
}
