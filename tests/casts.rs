//! Loads that convert, against an oracle that knows no plan: each element by itself, from the stored bytes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selection, SliceRequest, Tie};
use vramp::convert::{Float, Scales, convert};
use vramp::device::{CpuDevice, Device};
use vramp::dtype::Dtype;
use vramp::load::{Convert, Loaded, Loader, TransferOptions};
use vramp::report::Staging;
use vramp::testing::{LazyDevice, Random, watched};

/// One tensor of a file.
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A checkpoint of one file, and what a load of it must give.
pub(crate) struct Sample {
    _folder: tempfile::TempDir,
    checkpoint: Checkpoint,
    selection: Selection,
    to: Float,
    expected: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

fn stored(name: &str, dtype: Dtype, shape: &[usize], random: &mut Random) -> Stored {
    let bytes = random.bytes(dtype.tensor_bytes(shape).unwrap() as usize);
    Stored { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

fn scales(name: &str, shape: &[usize], random: &mut Random) -> Stored {
    let count = shape.iter().product::<usize>();
    let values = (0..count).flat_map(|_| ((random.below(2000) as f32 - 900.0) / 777.0).to_le_bytes());
    Stored { name: name.to_owned(), dtype: Dtype::F32, shape: shape.to_vec(), bytes: values.collect() }
}

fn write(path: &Path, tensors: &[Stored], pad: usize) {
    write_tied(path, tensors, pad, &[]);
}

/// The same, with `ties` recorded as `save_model` records them: the further name, then the stored one.
fn write_tied(path: &Path, tensors: &[Stored], pad: usize, ties: &[(&str, &str)]) {
    let mut header = serde_json::Map::new();
    if !ties.is_empty() {
        header.insert(
            "__metadata__".to_owned(),
            ties.iter().map(|&(alias, name)| (alias.to_owned(), json!(name))).collect(),
        );
    }
    let mut data = Vec::new();
    for tensor in tensors {
        let offsets = [data.len(), data.len() + tensor.bytes.len()];
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": offsets});
        header.insert(tensor.name.clone(), entry);
        data.extend_from_slice(&tensor.bytes);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len() + pad, b' ');
    std::fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}

/// The elements of rows `rows` and columns `columns` of a matrix, each converted by itself, with its own scale.
fn oracle(
    tensor: &Stored,
    to: Float,
    scale: Option<(&Stored, [usize; 2])>,
    cut: [std::ops::Range<usize>; 2],
) -> Vec<u8> {
    let Some(from) = Float::of(tensor.dtype) else { return tensor.bytes.clone() };
    let (width, [_, columns]) = (from.bytes() as usize, matrix(&tensor.shape));
    let mut result = Vec::new();
    for row in cut[0].clone() {
        for column in cut[1].clone() {
            let at = (row * columns + column) * width;
            let value = scale.map(|(table, block)| {
                let per_row = columns.div_ceil(block[1]);
                let index = (row / block[0] * per_row + column / block[1]) * 4;
                [f32::from_le_bytes(table.bytes[index..index + 4].try_into().unwrap())]
            });
            let one = value.as_ref().map(|values| Scales {
                values: values.into(),
                first: 0,
                columns: 1,
                block_rows: 1,
                block_columns: 1,
            });
            let mut element = vec![0; to.bytes() as usize];
            convert(&tensor.bytes[at..at + width], from, &mut element, to, one).unwrap();
            result.extend(element);
        }
    }
    result
}

fn matrix(shape: &[usize]) -> [usize; 2] {
    let columns = shape.last().copied().unwrap_or(1);
    [shape.iter().rev().skip(1).product(), columns]
}

impl Sample {
    /// Tensors of every kind that a load converts, some cut, some with scales, at offsets of any alignment.
    pub(crate) fn new(seed: u64, to: Float) -> Sample {
        let mut random = Random::new(seed);
        let (rows, columns) = (130 + random.below(40), 140 + random.below(60));
        let block_scales = [rows.div_ceil(128), columns.div_ceil(128)];
        let tensors = [
            stored("a.odd", Dtype::U8, &[1 + random.below(7)], &mut random),
            stored("b.f32", Dtype::F32, &[37, 11], &mut random),
            stored("c.f16", Dtype::F16, &[5, 300], &mut random),
            stored("d.bf16", Dtype::BF16, &[64, 33], &mut random),
            stored("e.f64", Dtype::F64, &[9, 10], &mut random),
            stored("f.i32", Dtype::I32, &[10], &mut random),
            stored("g.weight", Dtype::F8_E4M3, &[rows, columns], &mut random),
            scales("g.weight_scale_inv", &block_scales, &mut random),
            stored("h.weight", Dtype::F8_E5M2, &[20, 30], &mut random),
            scales("h.weight_scale", &[20, 1], &mut random),
            stored("i.weight", Dtype::F8_E4M3, &[4, 30], &mut random),
            scales("i.scale_weight", &[], &mut random),
            stored("j.plain", Dtype::F8_E4M3FNUZ, &[3, 50], &mut random),
            stored("k.empty", Dtype::F32, &[0, 4], &mut random),
            stored("l.cut", Dtype::F32, &[24, 50], &mut random),
            stored("m.experts", Dtype::F8_E4M3, &[3, 128, 40], &mut random),
            scales("m.experts_scale_inv", &[3, 1, 1], &mut random),
        ];
        let slice = |name: &str, dim, range| SliceRequest { name: name.to_owned(), dim, range };
        let slices = vec![slice("g.weight", 1, 100..137), slice("l.cut", 1, 7..31), slice("h.weight", 0, 5..11)];
        let selection = Selection::default().slices(slices.clone());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        write(&path, &tensors, random.below(9));
        let mut expected = BTreeMap::new();
        for tensor in tensors.iter().filter(|tensor| !tensor.name.contains("scale")) {
            let [rows, columns] = matrix(&tensor.shape);
            let mut cut = [0..rows, 0..columns];
            let mut shape = tensor.shape.clone();
            for slice in slices.iter().filter(|slice| slice.name == tensor.name) {
                cut[slice.dim] = slice.range.clone();
                shape[slice.dim] = slice.range.end - slice.range.start;
            }
            let scale_of = |name: &str| tensors.iter().find(|tensor| tensor.name == name).unwrap();
            let scale = match tensor.name.as_str() {
                "g.weight" => Some((scale_of("g.weight_scale_inv"), [128, 128])),
                "h.weight" => Some((scale_of("h.weight_scale"), [1, 30])),
                "i.weight" => Some((scale_of("i.scale_weight"), [4, 30])),
                "m.experts" => Some((scale_of("m.experts_scale_inv"), [128, 40])),
                _ => None,
            };
            let dtype = Float::of(tensor.dtype).map_or(tensor.dtype, |_| to.dtype());
            expected.insert(tensor.name.clone(), (dtype, shape, oracle(tensor, to, scale, cut)));
        }
        let checkpoint = Checkpoint::open(&path).unwrap();
        Sample { _folder: folder, checkpoint, selection, to, expected }
    }

    /// Loads it to `device`, overflow allowed (the bytes are random), with staging that makes pieces of everything.
    pub(crate) fn load(&self, device: Arc<dyn Device>, staging: Option<Staging>) -> vramp::Result<Loaded> {
        let convert = Some(Convert::to(self.to).allow_overflow(true));
        let mut loader = Loader::new(device, TransferOptions::default().convert(convert).staging(staging));
        let selected = self.checkpoint.select(&self.selection)?;
        let prepared = loader.prepare(self.checkpoint.clone(), &selected)?;
        loader.load(&prepared)
    }

    /// Demands that `loaded` is what it must be.
    pub(crate) fn check(&self, loaded: &Loaded, what: &str) {
        self.try_check(loaded, what).unwrap();
    }

    /// The same; an error is that of the device, which could not give the bytes back.
    pub(crate) fn try_check(&self, loaded: &Loaded, what: &str) -> vramp::Result<()> {
        let names: Vec<_> = loaded.tensors().iter().map(|tensor| tensor.name().to_owned()).collect();
        assert_eq!(names, self.expected.keys().cloned().collect::<Vec<_>>(), "{what}");
        for (name, (dtype, shape, bytes)) in &self.expected {
            let tensor = loaded.tensor(name).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, shape.as_slice()), "{name}: {what}");
            assert!(tensor.download()? == *bytes, "wrong elements in {name}: {what}");
        }
        Ok(())
    }
}

const TARGETS: [Float; 3] = [Float::BF16, Float::F16, Float::F32];

#[test]
fn every_element_is_converted_by_itself() {
    watched(|| {
        for seed in 0..12 {
            let sample = Sample::new(seed, TARGETS[seed as usize % 3]);
            let devices: [Arc<dyn Device>; 3] =
                [Arc::new(CpuDevice::new()), Arc::new(CpuDevice::with_align(256)), Arc::new(LazyDevice::new(seed))];
            for device in devices {
                for staging in [None, Some(Staging { count: 2, bytes: 12 << 10 })] {
                    let what = format!("seed {seed} to {:?} on {} by {staging:?}", sample.to, device.name());
                    let loaded = sample.load(Arc::clone(&device), staging).unwrap_or_else(|e| panic!("{what}: {e}"));
                    sample.check(&loaded, &what);
                }
            }
        }
    });
}

/// A file of one F32 tensor for each of `values`.
fn values(folder: &Path, values: &[(&str, &[f32])]) -> Checkpoint {
    let stored = values.iter().map(|(name, values)| Stored {
        name: (*name).to_owned(),
        dtype: Dtype::F32,
        shape: vec![values.len()],
        bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    });
    let path = folder.join("values.safetensors");
    write(&path, &stored.collect::<Vec<_>>(), 0);
    Checkpoint::open(path).unwrap()
}

fn load_values(checkpoint: &Checkpoint, device: Arc<dyn Device>, convert: Convert) -> vramp::Result<Loaded> {
    let options = TransferOptions::default().convert(convert);
    let mut loader = Loader::new(device, options);
    let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default())?)?;
    loader.load(&prepared)
}

/// Numbers that the type does not reach are counted by tensor, on any device.
pub(crate) fn overflow_is_an_error_that_counts(device: &Arc<dyn Device>) {
    let folder = tempfile::tempdir().unwrap();
    let tensors: &[(&str, &[f32])] =
        &[("fits", &[1.0, -65504.0, f32::INFINITY, f32::NAN]), ("no", &[70_000.0, -1e30, 1.0]), ("nor", &[65520.0])];
    let checkpoint = values(folder.path(), tensors);
    let strict = Convert::to(Float::F16);
    let error = load_values(&checkpoint, Arc::clone(device), strict).unwrap_err();
    let Error::Overflow { to, tensors, .. } = &error else { panic!("{error}") };
    assert_eq!((to.as_str(), tensors), ("F16", &vec![("no".to_owned(), 2), ("nor".to_owned(), 1)]));
    assert!(error.to_string().contains("\"no\" (2 numbers)"), "{error}");
    let lax = load_values(&checkpoint, Arc::clone(device), strict.allow_overflow(true)).unwrap();
    assert_eq!(lax.warnings, ["finite numbers became infinite in F16: \"no\" (2 numbers), \"nor\" (1 number)"]);
    let bits: Vec<u8> = [0x7c00u16, 0xfc00, 0x3c00].into_iter().flat_map(u16::to_le_bytes).collect();
    assert_eq!(lax.tensor("no").unwrap().download().unwrap(), bits);
    load_values(&checkpoint, Arc::clone(device), Convert::to(Float::BF16)).unwrap();
}

#[test]
fn overflow_is_an_error_that_names_each_tensor_and_the_number() {
    overflow_is_an_error_that_counts(&(Arc::new(CpuDevice::new()) as Arc<dyn Device>));
    overflow_is_an_error_that_counts(&(Arc::new(LazyDevice::new(3)) as Arc<dyn Device>));
}

#[test]
fn scales_that_do_not_fit_are_refused_and_named() {
    let mut random = Random::new(1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let tensors = [
        stored("w.weight", Dtype::F8_E4M3, &[100, 300], &mut random),
        scales("w.weight_scale_inv", &[2, 3], &mut random),
    ];
    write(&path, &tensors, 0);
    let convert = Convert::to(Float::BF16).allow_overflow(true);
    let error = load_values(&Checkpoint::open(&path).unwrap(), Arc::new(CpuDevice::new()), convert).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { tensor: Some(name), .. } if name == "w.weight"), "{error}");
    for word in ["w.weight_scale_inv", "[2, 3]", "[100, 300]", "`Options::convert`"] {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

/// Opens a file of these tensors.
fn file_of(folder: &Path, tensors: &[Stored]) -> Checkpoint {
    let path = folder.join("m.safetensors");
    write(&path, tensors, 0);
    Checkpoint::open(path).unwrap()
}

const TO_BF16: Convert = Convert::to(Float::BF16).allow_overflow(true);

#[test]
fn every_spelling_and_every_shape_of_scales_is_applied_and_said() {
    let mut random = Random::new(7);
    let spellings = [
        ("w.weight", "w.weight_scale_inv"),
        ("w.weight", "w.weight_scale"),
        ("w.weight", "w.scale_weight"),
        ("w.weight", "w.qscale_weight"),
        ("w.weight", "w.weights_scaling_factor"),
        ("w.weight", "w.scale"),
        ("weight", "scale"),
        ("w.gate_up_proj", "w.gate_up_proj_scale"),
        ("w.gate_up_proj", "w.gate_up_proj_scale_inv"),
        ("w.gate_weight", "w.gate_scale_weight"),
    ];
    let shapes: [(&[usize], [usize; 2]); 8] = [
        (&[], [200, 300]),
        (&[1], [200, 300]),
        (&[1, 1], [200, 300]),
        (&[200], [1, 300]),
        (&[200, 1], [1, 300]),
        (&[1, 300], [200, 1]),
        (&[2, 3], [128, 128]),
        (&[25, 1], [8, 300]),
    ];
    let every_spelling = spellings.into_iter().map(|names| (names, shapes[6]));
    let every_shape = shapes.into_iter().map(|shape| (spellings[1], shape));
    for ((weight, name), (shape, block)) in every_spelling.chain(every_shape) {
        let folder = tempfile::tempdir().unwrap();
        let tensors = [
            stored(weight, Dtype::F8_E4M3, &[200, 300], &mut random),
            scales(name, shape, &mut random),
            scales("w.input_scale", &[1], &mut random),
            scales("w.scale_input", &[], &mut random),
            scales("w.k_scale", &[], &mut random),
        ];
        let loaded = load_values(&file_of(folder.path(), &tensors), Arc::new(CpuDevice::new()), TO_BF16).unwrap();
        let wanted = oracle(&tensors[0], Float::BF16, Some((&tensors[1], block)), [0..200, 0..300]);
        assert!(loaded.tensor(weight).unwrap().download().unwrap() == wanted, "{weight} by {name} of {shape:?}");
        let left: Vec<_> = loaded.tensors().iter().map(|tensor| tensor.name().to_owned()).collect();
        assert!(!left.iter().any(|left| left == name) && left.len() == 4, "{name}: {left:?}");
    }
}

#[test]
fn scales_of_any_float_type_are_applied() {
    let mut random = Random::new(8);
    let exact = Stored {
        name: "w.weight_scale".to_owned(),
        dtype: Dtype::F32,
        shape: vec![2, 2],
        bytes: [0.5f32, 2.0, 4.0, 0.25].iter().flat_map(|value| value.to_le_bytes()).collect(),
    };
    let halves = |bits: [u16; 4]| bits.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let cases = [
        (Dtype::BF16, halves([0x3f00, 0x4000, 0x4080, 0x3e80])),
        (Dtype::F16, halves([0x3800, 0x4000, 0x4400, 0x3400])),
        (Dtype::F64, [0.5f64, 2.0, 4.0, 0.25].iter().flat_map(|value| value.to_le_bytes()).collect()),
        (Dtype::F8_E8M0, vec![126, 128, 129, 125]),
    ];
    for (dtype, bytes) in cases {
        let folder = tempfile::tempdir().unwrap();
        let table = Stored { dtype, bytes, name: exact.name.clone(), shape: exact.shape.clone() };
        let tensors = [stored("w.weight", Dtype::F8_E5M2, &[130, 256], &mut random), table];
        let loaded = load_values(&file_of(folder.path(), &tensors), Arc::new(CpuDevice::new()), TO_BF16).unwrap();
        let wanted = oracle(&tensors[0], Float::BF16, Some((&exact, [128, 128])), [0..130, 0..256]);
        assert!(loaded.tensor("w.weight").unwrap().download().unwrap() == wanted, "{}", tensors[1].dtype);
    }
}

#[test]
fn a_scale_that_a_cast_would_ignore_is_refused_by_name() {
    let mut random = Random::new(9);
    let cases = [
        ("w.weight", vec!["w.weight_scale", "w.weight_scale_2"], "\"w.weight_scale_2\" beside it looks like a scale"),
        ("w.weight", vec!["w.weight_scales"], "\"w.weight_scales\" beside it looks like a scale"),
        ("w.weight", vec!["w.weight_zero_point"], "\"w.weight_zero_point\""),
        ("w.weight", vec!["w.scaling"], "\"w.scaling\""),
        ("w.weight", vec!["w.scaling_factor"], "\"w.scaling_factor\""),
        ("w.weight", vec!["w.scale_factors"], "\"w.scale_factors\""),
        ("w.weight", vec!["w.weight_inv_scale"], "\"w.weight_inv_scale\""),
        ("w.weight", vec!["w.weight_block_scale"], "\"w.weight_block_scale\""),
        ("w.weight", vec!["w.dequant_scale"], "\"w.dequant_scale\""),
        ("w.weight", vec!["w.weight_quantizer._scale"], "\"w.weight_quantizer._scale\""),
        ("w.weight", vec!["w.zero_point"], "\"w.zero_point\""),
        ("w.weight", vec!["w.weight_zp"], "\"w.weight_zp\""),
        ("w.weight._data", vec!["w.weight._scale"], "\"w.weight._scale\""),
        ("w._weight_qdata", vec!["w._weight_scale"], "\"w._weight_scale\""),
        ("w.weight:qdata", vec!["w.weight:scale"], "\"w.weight:scale\""),
        ("experts.gate", vec!["experts.gate.scale"], "\"experts.gate.scale\""),
        ("w.up_proj", vec!["w.up_proj_scales"], "\"w.up_proj_scales\""),
        ("w.weight", vec!["w.scale", "w.weight_scale"], "scales under two names"),
    ];
    for (weight, names, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let table = |name: &&str| scales(name, &[1], &mut Random::new(3));
        let tensors: Vec<Stored> = std::iter::once(stored(weight, Dtype::F8_E4M3, &[4, 4], &mut random))
            .chain(names.iter().map(table))
            .collect();
        let checkpoint = file_of(folder.path(), &tensors);
        let error = load_values(&checkpoint, Arc::new(CpuDevice::new()), TO_BF16).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { tensor: Some(name), .. } if name == weight), "{error}");
        assert!(
            error.to_string().contains(expected) && error.to_string().contains("without `Options::convert`"),
            "{error}"
        );
        // As stored there is nothing to ignore.
        let mut loader = Loader::new(Arc::new(CpuDevice::new()) as Arc<dyn Device>, TransferOptions::default());
        let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default()).unwrap()).unwrap();
        assert_eq!(loader.load(&prepared).unwrap().tensors().len(), tensors.len());
    }
}

#[test]
fn scales_without_their_weight_and_narrow_parameters_called_scale_are_tensors_like_others() {
    let mut random = Random::new(10);
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        stored("norm.scale", Dtype::F8_E4M3, &[4], &mut random),
        stored("norm.weight", Dtype::F8_E4M3, &[4], &mut random),
        scales("w.weight_scale", &[4], &mut random),
    ];
    let loaded = load_values(&file_of(folder.path(), &tensors), Arc::new(CpuDevice::new()), TO_BF16).unwrap();
    for tensor in &tensors {
        let wanted = oracle(tensor, Float::BF16, None, [0..1, 0..4]);
        assert_eq!(loaded.tensor(&tensor.name).unwrap().download().unwrap(), wanted, "{}", tensor.name);
    }
}

/// The same memory gets the tensors of a second checkpoint: those that it names, and nothing else.
#[test]
fn weights_of_whole_numbers_keep_their_scales_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random::new(3);
    let packed = |name: &str, dtype: Dtype, random: &mut Random| stored(name, dtype, &[4, 8], random);
    let tensors = vec![
        packed("a.weight", Dtype::I8, &mut random),
        scales("a.weight_scale", &[4], &mut random),
        packed("b.weight_packed", Dtype::U8, &mut random),
        packed("b.weight_scale", Dtype::F8_E4M3, &mut random),
        scales("b.weight_global_scale", &[1], &mut random),
        scales("b.bias", &[4], &mut random),
    ];
    let checkpoint = file_of(folder.path(), &tensors);
    let convert = Convert::to(Float::BF16);
    let loaded = load_values(&checkpoint, Arc::new(CpuDevice::new()), convert).unwrap();
    for tensor in &tensors {
        let found = loaded.tensor(&tensor.name).unwrap();
        if tensor.name == "b.bias" {
            assert_eq!(found.dtype(), Dtype::BF16);
        } else {
            assert_eq!((found.dtype(), found.bytes().unwrap()), (tensor.dtype, &tensor.bytes[..]), "{}", tensor.name);
        }
    }
}

#[test]
fn a_load_into_places_that_exist_leaves_the_rest_alone() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = values(folder.path(), &[("a", &[1.0, 2.0]), ("b", &[3.0])]);
    let device = Arc::new(CpuDevice::new());
    let mut loader = Loader::new(Arc::clone(&device) as Arc<dyn Device>, TransferOptions::default());
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let places: BTreeMap<Arc<str>, u64> = [("a".into(), 64), ("b".into(), 4)].into();
    let prepared = loader.prepare_into(checkpoint.clone(), &selected, &places).unwrap();
    let loaded = loader.load_into(&prepared, device.alloc(100).unwrap()).unwrap();
    assert_eq!(loaded.tensor("a").unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!(loaded.tensor("a").unwrap().view().range(), 64..72);
    assert_eq!(loaded.tensor("b").unwrap().view().range(), 4..8);
    let refuse = |places: &[(&str, u64)], word: &str| {
        let places = places.iter().map(|(name, place)| (Arc::from(*name), *place)).collect();
        let error = loader.prepare_into(checkpoint.clone(), &selected, &places).unwrap_err();
        assert!(matches!(error, Error::Request { .. }) && error.to_string().contains(word), "{word}: {error}");
    };
    refuse(&[("a", 0)], "\"b\"");
    refuse(&[("a", 0), ("b", 4)], "\"a\" ends at byte 8");
    refuse(&[("a", 2), ("b", 12)], "4-byte elements");
    let error = loader.load_into(&prepared, device.alloc(71).unwrap()).unwrap_err();
    assert!(error.to_string().contains("71 bytes") && error.to_string().contains("byte 72"), "{error}");
}

#[test]
fn weights_are_loaded_over_the_old_ones_by_their_only_owner() {
    let (old_folder, new_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let old = values(old_folder.path(), &[("a", &[1.0, 2.0]), ("b", &[3.0]), ("none", &[])]);
    let new = values(new_folder.path(), &[("a", &[4.0, 5.0]), ("b", &[6.0]), ("none", &[])]);
    let mut loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    let all = |checkpoint: &Checkpoint| checkpoint.select(&Selection::default()).unwrap();
    let selected = all(&old);
    let serving = loader.load(&loader.prepare(old, &selected).unwrap()).unwrap();
    let selected = all(&new);
    let prepared = loader.prepare_into(new, &selected, &serving.places()).unwrap();
    let used = serving.tensor("b").unwrap().clone();
    let serving = serving.into_arena().map(drop).expect_err("a tensor is still used");
    assert_eq!(serving.tensor("a").unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0], "nothing is lost");
    let filled = |loaded: &Loaded| -> Vec<*const u8> {
        let filled = loaded.tensors().iter().filter(|tensor| !tensor.is_empty());
        filled.map(|tensor| tensor.bytes().unwrap().as_ptr()).collect()
    };
    let places = filled(&serving);
    drop(used);
    let swapped = loader.load_into(&prepared, serving.into_arena().unwrap()).unwrap();
    assert_eq!(swapped.tensor("a").unwrap().as_slice::<f32>().unwrap(), [4.0, 5.0]);
    assert_eq!(swapped.tensor("b").unwrap().as_slice::<f32>().unwrap(), [6.0]);
    assert_eq!(filled(&swapped), places);
}

#[test]
fn a_tensor_without_elements_may_lie_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = values(folder.path(), &[("a", &[1.0, 2.0]), ("none", &[]), ("nothing", &[])]);
    let device = Arc::new(CpuDevice::new());
    let mut loader = Loader::new(Arc::clone(&device) as Arc<dyn Device>, TransferOptions::default());
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let places: BTreeMap<Arc<str>, u64> = [("a".into(), 64), ("none".into(), 68), ("nothing".into(), 1 << 40)].into();
    let prepared = loader.prepare_into(checkpoint.clone(), &selected, &places).unwrap();
    let loaded = loader.load_into(&prepared, device.alloc(72).unwrap()).unwrap();
    assert_eq!(loaded.tensor("a").unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0]);
    assert!(loaded.tensor("none").unwrap().is_empty() && loaded.tensor("nothing").unwrap().is_empty());
}

#[test]
fn a_matrix_can_be_transposed_and_summed_where_it_lies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(
        &path,
        &[stored("w", Dtype::BF16, &[3, 5], &mut Random::new(4)), stored("v", Dtype::U8, &[3], &mut Random::new(5))],
        0,
    );
    let loaded = vramp::load::load(&path, &vramp::load::Options::default()).unwrap();
    let (matrix, turned) = (loaded.tensor("w").unwrap(), loaded.tensor("w").unwrap().transposed().unwrap());
    assert_eq!(turned.shape(), [5, 3]);
    let (from, to) = (matrix.as_slice::<half::bf16>().unwrap(), turned.as_slice::<half::bf16>().unwrap());
    for row in 0..3 {
        for column in 0..5 {
            assert_eq!(from[row * 5 + column].to_bits(), to[column * 3 + row].to_bits());
        }
    }
    assert_eq!(turned.transposed().unwrap().checksum().unwrap(), matrix.checksum().unwrap());
    assert_ne!(turned.checksum().unwrap(), matrix.checksum().unwrap());
    assert!(loaded.tensor("v").unwrap().transposed().is_err());
}

/// Scales belong to their weight by any name that either of them has; two sets of scales are one too many.
#[test]
fn scales_are_found_under_every_name_and_never_passed_over() {
    let mut random = Random::new(9);
    let weight = |name: &str, random: &mut Random| Stored {
        bytes: vec![0x38; 4], // ones
        ..stored(name, Dtype::F8_E4M3, &[2, 2], random)
    };
    let scale = |name: &str, value: f32, random: &mut Random| Stored {
        bytes: value.to_le_bytes().to_vec(),
        ..scales(name, &[], random)
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let load = |given: &[(&str, &str)]| {
        let tie = |&(alias, target): &(&str, &str)| Tie { alias: alias.to_owned(), target: target.to_owned() };
        let selection = Selection::default().ties(given.iter().map(tie).collect());
        let convert = Some(Convert::to(Float::F32));
        vramp::load::load(&path, &vramp::load::Options::default().selection(selection).convert(convert))
    };
    let all_are = |loaded: &Loaded, names: &[&str], value: f32| {
        assert_eq!(loaded.tensors().iter().map(vramp::tensor::Tensor::name).collect::<Vec<_>>(), names);
        loaded.tensors().iter().for_each(|tensor| assert_eq!(tensor.as_slice::<f32>().unwrap(), [value; 4]));
    };

    // Two weights that share one scale.
    let shared =
        [weight("a.weight", &mut random), scale("a.weight_scale", 3.0, &mut random), weight("b.weight", &mut random)];
    write_tied(&path, &shared, 0, &[("b.weight_scale", "a.weight_scale")]);
    all_are(&load(&[]).unwrap(), &["a.weight", "b.weight"], 3.0);
    write(&path, &shared, 0);
    all_are(&load(&[("b.weight_scale", "a.weight_scale")]).unwrap(), &["a.weight", "b.weight"], 3.0);

    // One weight of two names, whose scale is stored beside the other one.
    let apart = [weight("a.weight", &mut random), scale("b.weight_scale_inv", 5.0, &mut random)];
    write_tied(&path, &apart, 0, &[("b.weight", "a.weight")]);
    all_are(&load(&[]).unwrap(), &["a.weight", "b.weight"], 5.0);

    let two = [
        weight("a.weight", &mut random),
        scale("a.weight_scale", 3.0, &mut random),
        scale("a.scale_weight", 5.0, &mut random),
    ];
    write(&path, &two, 0);
    let error = load(&[]).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { tensor: Some(name), .. } if name == "a.weight"), "{error}");
    assert!(error.to_string().contains("a.scale_weight") && error.to_string().contains("a.weight_scale"), "{error}");
}

#[test]
fn what_nothing_can_become_is_a_wrong_request() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = values(folder.path(), &[("a", &[1.0])]);
    for to in [Float::F64, Float::F8E4M3] {
        let convert = Convert::to(to);
        let error = load_values(&checkpoint, Arc::new(CpuDevice::new()), convert).unwrap_err();
        assert!(matches!(error, Error::Request { .. }) && error.to_string().contains("not to F"), "{error}");
    }
}

#[test]
fn memory_of_another_device_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = values(folder.path(), &[("a", &[1.0, 2.0])]);
    let mut loader = Loader::new(Arc::new(LazyDevice::new(1)), TransferOptions::default());
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare_into(checkpoint.clone(), &selected, &[("a".into(), 0)].into()).unwrap();
    let error = loader.load_into(&prepared, CpuDevice::new().alloc(100).unwrap()).unwrap_err();
    assert!(error.to_string().contains("cpu") && error.to_string().contains("lazy"), "{error}");
}
