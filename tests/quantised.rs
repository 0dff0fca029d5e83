//! Quantised checkpoints that are cast: which weights are dequantised, to which numbers; what stays as it is, and what is said of it.
//! The numbers are computed by plain F64 arithmetic, rounded once.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use vramp::Error;
use vramp::Float;
use vramp::checkpoint::{Checkpoint, Selection, SliceRequest};
use vramp::device::{CpuDevice, Device};
use vramp::durable::FileStore;
use vramp::load::{Convert, Loaded, Loader, TransferOptions};
use vramp::report::Staging;
use vramp::save::{ConvertOptions, Converted, Target, convert};
use vramp::testing::{LazyDevice, Random, safetensors, watched};

use crate::kernels::reference::{e2m1, product, value};

/// A tensor of a file: name, type, shape, bytes.
type Stored = (&'static str, &'static str, Vec<usize>, Vec<u8>);

/// A quantised weight and what it must become.
struct Weight {
    tensors: Vec<Stored>,
    config: Value,
    /// Under which name it is handed out, in which shape.
    name: &'static str,
    shape: Vec<usize>,
    /// The numbers and their scales.
    numbers: Vec<(f64, f64)>,
}

fn write(folder: &Path, tensors: &[Stored], config: &Value, metadata: Value) -> Checkpoint {
    let tensors: Vec<(&str, &str, &[usize], &[u8])> =
        tensors.iter().map(|(name, dtype, shape, bytes)| (*name, *dtype, &shape[..], &bytes[..])).collect();
    std::fs::write(folder.join("model.safetensors"), safetensors(&tensors, metadata)).unwrap();
    std::fs::write(folder.join("config.json"), json!({"quantization_config": config}).to_string()).unwrap();
    Checkpoint::open(folder.join("model.safetensors")).unwrap()
}

fn options(to: Float, staging: Option<Staging>) -> TransferOptions {
    let convert = Some(Convert::to(to).allow_overflow(true));
    TransferOptions::default().convert(convert).staging(staging)
}

fn load_part(
    checkpoint: &Checkpoint,
    selection: &Selection,
    device: &Arc<dyn Device>,
    options: TransferOptions,
) -> Loaded {
    let mut loader = Loader::new(Arc::clone(device), options);
    let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(selection).unwrap()).unwrap();
    loader.load(&prepared).unwrap()
}

fn load(checkpoint: &Checkpoint, to: Float) -> Loaded {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new());
    load_part(checkpoint, &Selection::default(), &device, options(to, None))
}

fn cpu() -> Arc<dyn Device> {
    Arc::new(CpuDevice::new())
}

/// Exponents around those of usual weights.
fn exponents(count: usize, random: &mut Random) -> Vec<u8> {
    (0..count).map(|_| 100 + random.below(40) as u8).collect()
}

/// E4M3 scales without NaN.
fn small_floats(count: usize, random: &mut Random) -> Vec<u8> {
    (0..count).map(|_| random.below(0x7e) as u8).collect()
}

fn e8m0(code: u8) -> f64 {
    if code == 255 { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
}

/// The numbers of rows of `row_bytes` bytes of pairs, each with the scale of its block of `block` bytes.
fn pairs(bytes: &[u8], row_bytes: usize, block: usize, scale: impl Fn(usize) -> f64) -> Vec<(f64, f64)> {
    let across = row_bytes / block;
    let of = |(at, byte): (usize, &u8)| {
        let scale = scale(at / row_bytes * across + at % row_bytes / block);
        [(e2m1(byte & 15), scale), (e2m1(byte >> 4), scale)]
    };
    bytes.iter().enumerate().flat_map(of).collect()
}

/// NVFP4 under these names: the weight, the scales, the scale of all blocks and whether it divides.
fn nvfp4(
    names: [&'static str; 3],
    divides: bool,
    rows: &[usize],
    row_bytes: usize,
    global: f32,
    random: &mut Random,
) -> Weight {
    let count: usize = rows.iter().product();
    let bytes = random.bytes(count * row_bytes);
    let codes = small_floats(count * row_bytes / 8, random);
    let scale = |at: usize| {
        let block = value(Float::F8E4M3, codes[at].into());
        if divides { block / f64::from(global) } else { block * f64::from(global) }
    };
    let numbers = pairs(&bytes, row_bytes, 8, scale);
    let shape = |last| [rows, &[last]].concat();
    let tensors = vec![
        (names[0], "U8", shape(row_bytes), bytes),
        (names[1], "F8_E4M3", shape(row_bytes / 8), codes.clone()),
        (names[2], "F32", if divides { vec![1] } else { vec![] }, global.to_le_bytes().to_vec()),
    ];
    let name = names[0].strip_suffix("_packed").unwrap_or(names[0]);
    Weight { tensors, config: json!({}), name, shape: shape(row_bytes * 2), numbers }
}

/// MXFP4: `dtypes` and `names` of the weight and the scales; `in_blocks`: each block of 16 bytes is a dimension.
fn mxfp4(
    names: [&'static str; 2],
    dtypes: [&'static str; 2],
    rows: &[usize],
    row_bytes: usize,
    in_blocks: bool,
    config: Value,
    random: &mut Random,
) -> Weight {
    let count: usize = rows.iter().product();
    let bytes = random.bytes(count * row_bytes);
    let codes = exponents(count * row_bytes / 16, random);
    let numbers = pairs(&bytes, row_bytes, 16, |at| e8m0(codes[at]));
    let shape = |last: &[usize]| [rows, last].concat();
    let stored = if in_blocks { shape(&[row_bytes / 16, 16]) } else { shape(&[row_bytes]) };
    let tensors =
        vec![(names[0], dtypes[0], stored, bytes), (names[1], dtypes[1], shape(&[row_bytes / 16]), codes.clone())];
    let name = names[0].strip_suffix("_packed").unwrap_or(names[0]);
    Weight { tensors, config, name, shape: shape(&[row_bytes * 2]), numbers }
}

/// An FP8 weight `[rows, columns]` with scales for blocks of `block`, given as bytes and as numbers.
fn fp8(
    scale: Stored,
    scales: &[f64],
    rows: usize,
    columns: usize,
    block: [usize; 2],
    config: Value,
    random: &mut Random,
) -> Weight {
    let bytes: Vec<u8> = random.bytes(rows * columns);
    let across = columns.div_ceil(block[1]);
    let of = |(at, byte): (usize, &u8)| {
        let (row, column) = (at / columns, at % columns);
        let index = row / block[0] * across + column / block[1];
        (value(Float::F8E4M3, (*byte).into()), scales[index])
    };
    let numbers = (0..).zip(&bytes).map(of).collect();
    let tensors = vec![("l.weight", "F8_E4M3", vec![rows, columns], bytes), scale];
    Weight { tensors, config, name: "l.weight", shape: vec![rows, columns], numbers }
}

fn weights(random: &mut Random) -> Vec<Weight> {
    let ct = ["l.q.weight_packed", "l.q.weight_scale", "l.q.weight_global_scale"];
    let modelopt = ["l.weight", "l.weight_scale", "l.weight_scale_2"];
    let experts = ["l.experts.down_proj", "l.experts.down_proj_weight_scale", "l.experts.down_proj_weight_scale_2"];
    let mut found = vec![
        nvfp4(modelopt, false, &[40], 1024, 0.012_345, random),
        nvfp4(modelopt, false, &[5], 24, 3e38, random),
        nvfp4(ct, true, &[7], 64, 3584.7, random),
        nvfp4(experts, false, &[3, 4], 32, 0.37, random),
    ];
    // The type of packed pairs counts numbers.
    let mut typed = nvfp4(modelopt, false, &[6], 32, 0.7, random);
    typed.tensors[0] = ("l.weight", "F4", vec![6, 64], typed.tensors[0].3.clone());
    found.push(typed);
    let gpt_oss = ["l.experts.gate_up_proj_blocks", "l.experts.gate_up_proj_scales"];
    let original = ["block.0.mlp.mlp1_weight.blocks", "block.0.mlp.mlp1_weight.scales"];
    let packed = ["l.weight_packed", "l.weight_scale"];
    let mxfp4s = json!({"quant_method": "mxfp4"});
    found.push(mxfp4(gpt_oss, ["U8", "U8"], &[2, 60], 48, true, mxfp4s.clone(), random));
    found.push(mxfp4(original, ["U8", "U8"], &[2, 6], 32, true, json!({}), random));
    found.push(mxfp4(packed, ["U8", "U8"], &[9], 32, false, json!({"format": "mxfp4-pack-quantized"}), random));
    found.push(mxfp4(["l.weight", "l.weight_scale"], ["U8", "U8"], &[9], 32, false, mxfp4s, random));
    found.push(mxfp4(["l.weight", "l.scale"], ["I8", "F8_E8M0"], &[6], 48, false, json!({}), random));
    // MXFP8, in each way that its exponents are stored.
    let codes = exponents(4 * 3, random);
    let scales: Vec<f64> = codes.iter().map(|code| e8m0(*code)).collect();
    for (dtype, shape) in [("U8", vec![4, 3]), ("F8_E8M0", vec![4, 3]), ("U8", vec![4, 3, 1])] {
        let scale = ("l.weight_scale_inv", dtype, shape, codes.clone());
        found.push(fp8(scale, &scales, 4, 96, [1, 32], json!({}), random));
    }
    let ragged = ("l.weight_scale", "F8_E8M0", vec![4, 3], codes.clone());
    found.push(fp8(ragged, &scales, 4, 70, [1, 32], json!({}), random));
    let large = ("l.weight_scale_inv", "U8", vec![2, 2], codes[..4].to_vec());
    found.push(fp8(large, &scales[..4], 130, 140, [128, 128], json!({"scale_fmt": "ue8m0"}), random));
    // F64 scales are not rounded before they are multiplied.
    let wide: Vec<f64> = (0..12).map(|at| 0.1 + f64::from(at) / 7.0).collect();
    let bytes = wide.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    found.push(fp8(("l.weight_scale", "F64", vec![4, 3], bytes), &wide, 4, 96, [1, 32], json!({}), random));
    // F32 scales of blocks, with a one behind: powers of two, so that the product is exact.
    let powers: Vec<f64> = (0..12).map(|at| 2f64.powi(at - 6)).collect();
    let bytes = powers.iter().flat_map(|scale| (*scale as f32).to_le_bytes()).collect();
    found.push(fp8(("l.weight_scale", "F32", vec![4, 3, 1], bytes), &powers, 4, 96, [1, 32], json!({}), random));
    found
}

fn rounded(numbers: &[(f64, f64)], to: Float) -> Vec<u8> {
    let bytes =
        |&(number, scale): &(f64, f64)| product(number, scale, to).0.to_le_bytes()[..to.bytes() as usize].to_vec();
    numbers.iter().flat_map(bytes).collect()
}

/// Every scheme, to every target, on one device, through buffers that cut.
pub(crate) fn every_scheme_gives_its_numbers(device: &Arc<dyn Device>) {
    for (at, weight) in weights(&mut Random::new(21)).iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = weight.tensors.clone();
        tensors.insert(0, ("a.odd", "U8", vec![3], vec![1, 2, 3])); // so that nothing is aligned
        let checkpoint = write(folder.path(), &tensors, &weight.config, json!({}));
        for (to, staging) in [
            (Float::BF16, Some(Staging { count: 2, bytes: 12 << 10 })),
            (Float::F16, None),
            (Float::F32, Some(Staging { count: 3, bytes: 16 << 10 })),
        ] {
            let what = format!("weight {at}, {}, to {to:?} on {}", weight.tensors[0].0, device.name());
            let loaded = load_part(&checkpoint, &Selection::default(), device, options(to, staging));
            let tensor = loaded.tensor(weight.name).unwrap_or_else(|e| panic!("{what}: {e}; {:?}", loaded.warnings));
            assert_eq!((tensor.dtype(), tensor.shape()), (to.dtype(), &weight.shape[..]), "{what}");
            let (found, wanted) = (tensor.download().unwrap(), rounded(&weight.numbers, to));
            assert!(found == wanted, "wrong numbers: {what}");
            assert_eq!(loaded.tensors().len(), 2, "the scales are used up: {what}");
        }
    }
}

#[test]
fn packed_weights_become_the_numbers_that_they_mean() {
    watched(|| {
        every_scheme_gives_its_numbers(&cpu());
        every_scheme_gives_its_numbers(&(Arc::new(LazyDevice::new(5)) as Arc<dyn Device>));
    });
}

fn slice(name: &str, dim: usize, range: std::ops::Range<usize>) -> Selection {
    Selection::default().slices(vec![SliceRequest { name: name.to_owned(), dim, range }])
}

#[test]
fn parts_of_packed_weights_are_those_of_the_whole() {
    let mut random = Random::new(22);
    let names = ["l.weight", "l.weight_scale", "l.weight_scale_2"];
    let weight = nvfp4(names, false, &[20], 64, 0.3, &mut random);
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write(folder.path(), &weight.tensors, &weight.config, json!({}));
    let part = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| -> Vec<(f64, f64)> {
        rows.flat_map(|row| weight.numbers[row * 128..][columns.clone()].to_vec()).collect()
    };
    // Bytes 12 to 40 of each row are its numbers 24 to 80: blocks are cut.
    for (selection, shape, numbers) in [
        (slice("l.weight", 0, 3..17), [14, 128], part(3..17, 0..128)),
        (slice("l.weight", 1, 12..40), [20, 56], part(0..20, 24..80)),
    ] {
        let loaded = load_part(&checkpoint, &selection, &cpu(), options(Float::F32, None));
        let tensor = loaded.tensor("l.weight").unwrap();
        assert_eq!(tensor.shape(), shape);
        assert!(tensor.download().unwrap() == rounded(&numbers, Float::F32), "{shape:?}");
    }

    let names = ["l.w_blocks", "l.w_scales"];
    let weight = mxfp4(names, ["U8", "U8"], &[2, 5], 48, true, json!({}), &mut random);
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write(folder.path(), &weight.tensors, &weight.config, json!({}));
    let loaded = load_part(&checkpoint, &slice("l.w_blocks", 2, 1..3), &cpu(), options(Float::BF16, None));
    let numbers: Vec<_> = weight.numbers.chunks(96).flat_map(|row| row[32..96].to_vec()).collect();
    let tensor = loaded.tensor("l.w_blocks").unwrap();
    assert_eq!(tensor.shape(), [2, 5, 64]);
    assert!(tensor.download().unwrap() == rounded(&numbers, Float::BF16));
    // Half a block has no place of its own.
    let loaded = load_part(&checkpoint, &slice("l.w_blocks", 3, 0..8), &cpu(), options(Float::BF16, None));
    assert_eq!(loaded.tensor("l.w_blocks").unwrap().shape(), [2, 5, 3, 8]);
    assert!(loaded.warnings.concat().contains("cut within its blocks"), "{:?}", loaded.warnings);
}

#[test]
fn parts_that_are_missing_or_of_another_shape_leave_a_weight_packed_and_say_why() {
    let mut random = Random::new(23);
    let names = ["l.weight", "l.weight_scale", "l.weight_scale_2"];
    let whole = || nvfp4(names, false, &[4], 32, 0.3, &mut Random::new(2)).tensors;
    let without = |at: usize| {
        let mut tensors = whole();
        tensors.remove(at);
        tensors
    };
    let changed = |at: usize, to: Stored| {
        let mut tensors = whole();
        tensors[at] = to;
        tensors
    };
    let mut marked = whole();
    marked.push(("l.comfy_quant", "U8", vec![19], b"{\"format\": \"nvfp4\"}".to_vec()));
    let experts = mxfp4(["l.w_blocks", "l.w_scales"], ["U8", "U8"], &[2, 4], 32, true, json!({}), &mut random).tensors;
    let mut short = experts;
    short[1] = ("l.w_scales", "U8", vec![2, 4, 1], vec![127; 8]);
    let cases: Vec<(&str, Vec<Stored>, &[&str])> = vec![
        ("no scale of all", without(2), &["\"weight_scale_2\"", "not there"]),
        (
            "scales of other blocks",
            changed(1, ("l.weight_scale", "F8_E4M3", vec![4, 2], vec![0x38; 8])),
            &["[4, 2]", "[4, 32]", "[4, 4]"],
        ),
        (
            "padded scales",
            changed(1, ("l.weight_scale", "F8_E4M3", vec![128, 4], vec![0x38; 512])),
            &["[128, 4]", "[4, 32]"],
        ),
        ("two scales of all", changed(2, ("l.weight_scale_2", "F32", vec![2], vec![0; 8])), &["F32 [2]"]),
        ("ComfyUI's tiles", marked, &["ComfyUI", "tiles"]),
        ("exponents for fewer blocks", short, &["[2, 4, 1]", "[2, 4, 2]"]),
        (
            "bytes that nothing calls exponents",
            mxfp4(["l.weight", "l.weight_scale"], ["U8", "U8"], &[4], 32, false, json!({}), &mut random).tensors,
            &["exponents"],
        ),
    ];
    for (what, tensors, words) in cases {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write(folder.path(), &tensors, &json!({}), json!({}));
        let loaded = load(&checkpoint, Float::BF16);
        for (name, dtype, _, bytes) in &tensors {
            let found = loaded.tensor(name).unwrap();
            assert!(found.dtype().name() == *dtype && found.bytes().unwrap() == bytes, "{what}: {name}");
        }
        assert_eq!(loaded.warnings.len(), 1, "{what}: {:?}", loaded.warnings);
        for word in ["1 packed weight stays", words[0], words[words.len() - 1]] {
            assert!(loaded.warnings[0].contains(word), "{what}: {word}: {:?}", loaded.warnings);
        }
    }
}

/// Layers of packed weights as quantisers write them, each with what is told of it; `p.` is plain and cast.
fn layers() -> Vec<(&'static str, Value, Vec<Stored>)> {
    let f32s = |name, shape: &[usize]| -> Stored {
        let count: usize = shape.iter().product();
        (name, "F32", shape.to_vec(), (0..count).flat_map(|at| (at as f32 * 0.37 + 0.1).to_le_bytes()).collect())
    };
    let ints = |name, dtype, shape: &[usize]| -> Stored {
        let width = if dtype == "I32" || dtype == "U32" { 4 } else { 1 };
        let count = shape.iter().product::<usize>() * width;
        (name, dtype, shape.to_vec(), (0..count).map(|at| at as u8).collect())
    };
    vec![
        (
            "bitsandbytes NF4",
            json!({"quant_method": "bitsandbytes"}),
            vec![
                ints("l.weight", "U8", &[64, 1]),
                ints("l.weight.absmax", "U8", &[2]),
                f32s("l.weight.quant_map", &[16]),
                f32s("l.weight.nested_absmax", &[1]),
                f32s("l.weight.nested_quant_map", &[256]),
                ints("l.weight.quant_state.bitsandbytes__nf4", "U8", &[80]),
            ],
        ),
        (
            "bitsandbytes INT8",
            json!({}),
            vec![ints("l.weight", "I8", &[4, 8]), f32s("l.SCB", &[4]), ints("l.weight_format", "U8", &[])],
        ),
        ("HQQ", json!({}), vec![ints("l.W_q", "U8", &[4, 8]), f32s("l.scale", &[8, 1]), f32s("l.zero", &[8, 1])]),
        (
            "quanto",
            json!({}),
            vec![ints("l.weight._data", "I8", &[4, 8]), f32s("l.weight._scale", &[4, 1]), f32s("l.input_scale", &[])],
        ),
        (
            "GPTQ",
            json!({"quant_method": "gptq"}),
            vec![
                ints("l.qweight", "I32", &[4, 8]),
                ints("l.qzeros", "I32", &[1, 1]),
                f32s("l.scales", &[1, 8]),
                ints("l.g_idx", "I32", &[32]),
            ],
        ),
        (
            "AWQ",
            json!({}),
            vec![ints("l.qweight", "I32", &[32, 1]), ints("l.qzeros", "I32", &[1, 1]), f32s("l.scales", &[1, 8])],
        ),
        (
            "compressed-tensors",
            json!({"quant_method": "compressed-tensors"}),
            vec![
                ints("l.weight_packed", "I32", &[4, 8]),
                f32s("l.weight_scale", &[4, 2]),
                ("l.weight_shape", "I64", vec![2], vec![0; 16]),
            ],
        ),
        (
            "MLX",
            json!({}),
            vec![ints("l.weight", "U32", &[4, 8]), f32s("l.scales", &[4, 1]), f32s("l.biases", &[4, 1])],
        ),
        // A scheme that only the configuration names.
        (
            "aqlm",
            json!({"quant_method": "aqlm"}),
            vec![ints("l.codes", "I8", &[4, 8, 1]), f32s("l.books", &[2, 3]), f32s("l.fits", &[4])],
        ),
        ("packed U8", json!({}), vec![ints("l.weight", "U8", &[4, 34])]),
        (
            "packed U8",
            json!({}),
            vec![ints("experts.w1_qweight", "U8", &[2, 4, 8]), f32s("experts.w1_scales", &[2, 4])],
        ),
    ]
}

#[test]
fn casts_keep_their_hands_off_what_belongs_to_packed_weights() {
    for (scheme, config, state) in layers() {
        let folder = tempfile::tempdir().unwrap();
        let one: Vec<u8> = [1.0f32; 8].iter().flat_map(|value| value.to_le_bytes()).collect();
        let is_fused = state[0].0.starts_with("experts");
        let layer = if is_fused { "experts.w2" } else { "p.weight" };
        let bias = if is_fused { "experts.w1_bias" } else { "l.bias" };
        let mut tensors = state.clone();
        tensors.push((layer, "F32", vec![2, 4], one.clone()));
        tensors.push((bias, "F32", vec![8], one));
        let checkpoint = write(folder.path(), &tensors, &config, json!({}));
        let loaded = load(&checkpoint, Float::BF16);
        for (name, dtype, shape, bytes) in &state {
            let found = loaded.tensor(name).unwrap();
            let same =
                (found.dtype().name(), found.shape(), found.bytes().unwrap()) == (*dtype, &shape[..], &bytes[..]);
            assert!(same, "{scheme}: {name} is {found:?}");
        }
        for name in [layer, bias] {
            assert_eq!(loaded.tensor(name).unwrap().dtype().name(), "BF16", "{scheme}: {name}");
        }
        let [warning] = &loaded.warnings[..] else { panic!("{scheme}: {:?}", loaded.warnings) };
        let (weight, number) = (format!("{:?}", state[0].0), "1 packed weight stays quantised");
        assert!(
            warning.contains(number) && warning.contains(scheme) && warning.contains(&weight),
            "{scheme}: {warning}"
        );
        // Without a cast there is nothing to say.
        let whole =
            vramp::load::load(folder.path().join("model.safetensors"), &vramp::load::Options::default()).unwrap();
        assert_eq!(whole.warnings, Vec::<String>::new());
    }
}

#[test]
fn whole_numbers_that_are_no_weights_keep_nothing_from_being_cast() {
    let folder = tempfile::tempdir().unwrap();
    let float = |name, shape: &[usize]| -> Stored {
        (name, "F32", shape.to_vec(), vec![0; shape.iter().product::<usize>() * 4])
    };
    let tensors = vec![
        ("attn.bias", "U8", vec![1, 1, 4, 4], vec![1; 16]),
        float("attn.masked_bias", &[]),
        float("attn.logit_scale", &[2]),
        ("bn.num_batches_tracked", "I64", vec![], vec![0; 8]),
        float("bn.running_mean", &[4]),
        ("swin.relative_position_index", "I32", vec![4, 4], vec![0; 64]),
        float("swin.relative_position_bias_table", &[4, 2]),
        float("swin.scale", &[2]),
        ("pos.table", "I32", vec![4, 2], vec![0; 32]),
        float("pos.freqs", &[4]),
    ];
    let checkpoint = write(folder.path(), &tensors, &json!(null), json!({}));
    let loaded = load(&checkpoint, Float::BF16);
    for (name, dtype, ..) in &tensors {
        let wanted = if *dtype == "F32" { "BF16" } else { dtype };
        assert_eq!(loaded.tensor(name).unwrap().dtype().name(), wanted, "{name}");
    }
    assert_eq!(loaded.warnings, Vec::<String>::new());
}

#[test]
fn a_weight_whose_bare_name_is_taken_keeps_its_own_or_is_refused() {
    let mut tensors =
        nvfp4(["l.weight_packed", "l.weight_scale", "l.weight_global_scale"], true, &[4], 32, 8.0, &mut Random::new(3))
            .tensors;
    tensors.push(("l.weight", "I64", vec![1], vec![0; 8]));
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write(folder.path(), &tensors, &json!({}), json!({}));
    assert_eq!(load(&checkpoint, Float::BF16).tensor("l.weight_packed").unwrap().shape(), [4, 64]);
    assert_eq!(load(&checkpoint, Float::BF16).tensor("l.weight").unwrap().shape(), [1]);
    // Under names without a prefix the same two meet.
    let stripped: Vec<Stored> = tensors
        .into_iter()
        .map(|(name, dtype, shape, bytes)| (if name == "l.weight" { "m.l.weight" } else { name }, dtype, shape, bytes))
        .collect();
    let checkpoint = write(folder.path(), &stripped, &json!({}), json!({}));
    let selection = Selection::default().strip_prefix(["m."]);
    let loader = Loader::new(cpu(), options(Float::BF16, None));
    let error = loader.prepare(checkpoint.clone(), &checkpoint.select(&selection).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Request { .. }), "{error}");
    assert!(error.to_string().contains("\"l.weight_packed\" is called \"l.weight\""), "{error}");
}

#[test]
fn every_spelling_that_says_scale_is_applied_or_refused() {
    for name in [
        "l.weight.scale",
        "l.weight.Scale",
        "l.weightScale",
        "l.weight.input_scale",
        "l.weight.q_scale",
        "l.weight_k_scale",
        "l.weight.quantizer.scale",
        "l.quantizer.weight_scale",
        "l.weight.SCALE_INV",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let tensors = vec![
            ("l.weight", "F8_E4M3", vec![2, 4], vec![0x38; 8]),
            (name, "F32", vec![], 0.5f32.to_le_bytes().to_vec()),
        ];
        let checkpoint = write(folder.path(), &tensors, &json!({}), json!({}));
        let loader = Loader::new(cpu(), options(Float::BF16, None));
        let error = loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default()).unwrap()).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { tensor: Some(of), .. } if of == "l.weight"), "{name}: {error}");
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
}

#[test]
fn eight_bit_floats_without_a_scale_are_counted_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let weight = |name| -> Stored { (name, "F8_E4M3", vec![2, 4], vec![0x38; 8]) };
    let scale: Stored = ("b.weight_scale", "F32", vec![], 0.5f32.to_le_bytes().to_vec());
    let tensors = vec![weight("a.weight"), weight("b.weight"), scale, weight("c.weight")];
    let loaded = load(&write(folder.path(), &tensors, &json!({}), json!({})), Float::BF16);
    let [warning] = &loaded.warnings[..] else { panic!("{:?}", loaded.warnings) };
    for word in ["2 8-bit float tensors", "\"a.weight\", \"c.weight\""] {
        assert!(warning.contains(word), "{warning}");
    }
    assert!(!warning.contains("b.weight"), "{warning}");
}

#[test]
fn exponents_in_bytes_are_taken_for_such_only_where_something_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = vec![
        ("l.weight", "F8_E4M3", vec![64, 64], vec![0x38; 4096]),
        ("l.weight_scale_inv", "U8", vec![1, 1], vec![128]),
    ];
    let prepare = |config: &Value| {
        let checkpoint = write(folder.path(), &tensors, config, json!({}));
        let loader = Loader::new(cpu(), options(Float::BF16, None));
        loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default()).unwrap())
    };
    let error = prepare(&json!({"quant_method": "fp8"})).unwrap_err().to_string();
    assert!(error.contains("l.weight_scale_inv") && error.contains("E8M0"), "{error}");
    prepare(&json!({"quant_method": "fp8", "scale_fmt": "ue8m0"})).unwrap();
}

fn converted(checkpoint: &Checkpoint, folder: &Path, selection: Selection) -> (Converted, Checkpoint) {
    let out = folder.join("out.safetensors");
    let transfer = options(Float::BF16, None);
    let options = ConvertOptions::default().transfer(transfer).selection(selection).overwrite(true);
    let said = convert(checkpoint, &FileStore, &Target::of(&out), &options).unwrap();
    (said, Checkpoint::open(out).unwrap())
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().iter().map(|tensor| tensor.name.as_ref()).collect()
}

#[test]
fn records_go_with_the_quantisation_that_they_describe() {
    let marker = |name| -> Stored { (name, "U8", vec![27], b"{\"format\": \"float8_e4m3fn\"}".to_vec()) };
    let weight = |name| -> Stored { (name, "F8_E4M3", vec![2, 4], vec![0x38; 8]) };
    let scale = |name| -> Stored { (name, "F32", vec![], 0.5f32.to_le_bytes().to_vec()) };
    let packed: Stored = ("q.weight", "I8", vec![2, 4], vec![1; 8]);
    let tensors = vec![
        weight("d.weight"),
        scale("d.weight_scale"),
        scale("d.input_scale"),
        marker("d.comfy_quant"),
        packed,
        scale("q.weight_scale"),
        marker("q.comfy_quant"),
        ("scaled_fp8", "F8_E4M3", vec![2], vec![0; 2]),
    ];
    let layers =
        json!({"format_version": "1.0", "layers": {"d": {"format": "float8_e4m3fn"}, "q": {"format": "int8"}}});
    let metadata = json!({
        "_quantization_metadata": layers.to_string(), "d.weight": json!({"_type": "Float8Tensor"}).to_string(),
        "quantization_config": "{}", "note": "kept",
    });
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write(folder.path(), &tensors, &json!({}), metadata);
    let (said, out) = converted(&checkpoint, folder.path(), Selection::default());
    assert_eq!(
        names(&out),
        ["d.input_scale", "d.weight", "q.comfy_quant", "q.weight", "q.weight_scale", "scaled_fp8"],
        "q stays quantised"
    );
    let left: Value = serde_json::from_str(&out.metadata()["_quantization_metadata"]).unwrap();
    assert_eq!(left, json!({"format_version": "1.0", "layers": {"q": {"format": "int8"}}}));
    assert_eq!(out.metadata()["quantization_config"], "{}");
    assert!(!out.metadata().contains_key("d.weight") && out.metadata()["note"] == "kept");
    let warnings = said.warnings.join("\n");
    for word in
        ["\"d.comfy_quant\"", "a part of \"_quantization_metadata\"", "\"d.input_scale\"", "1 packed weight stays"]
    {
        assert!(warnings.contains(word), "{word}: {warnings}");
    }
    assert!(
        said.skipped.iter().any(|skipped| skipped.name == "d.comfy_quant" && skipped.why.contains("no longer true"))
    );

    let only = Selection::default().exclude(["q.*"]);
    let (said, out) = converted(&checkpoint, folder.path(), only);
    assert_eq!(names(&out), ["d.input_scale", "d.weight"]);
    let left: Vec<&str> = out.metadata().keys().map(String::as_str).collect();
    assert_eq!(left, ["_quantization_metadata", "format", "note"], "it still describes q: {said:?}");
}

#[test]
fn records_stay_where_nothing_is_dequantised() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = vec![
        ("q.weight", "I8", vec![2, 4], vec![1; 8]),
        ("q.weight_scale", "F32", vec![], 0.5f32.to_le_bytes().to_vec()),
        ("q.comfy_quant", "U8", vec![2], b"{}".to_vec()),
    ];
    let metadata = json!({"_quantization_metadata": "{}", "quantization_config": "{}"});
    let checkpoint = write(folder.path(), &tensors, &json!({}), metadata);
    let (said, out) = converted(&checkpoint, folder.path(), Selection::default());
    assert_eq!(names(&out), ["q.comfy_quant", "q.weight", "q.weight_scale"]);
    assert_eq!(out.metadata()["_quantization_metadata"], "{}");
    assert!(said.warnings.iter().all(|warning| !warning.contains("metadata")), "{:?}", said.warnings);
}

#[test]
fn a_converted_checkpoint_holds_what_a_load_gives() {
    let mut random = Random::new(24);
    for weight in weights(&mut random) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write(folder.path(), &weight.tensors, &weight.config, json!({}));
        let (said, out) = converted(&checkpoint, folder.path(), Selection::default());
        assert_eq!(names(&out), [weight.name]);
        let path = folder.path().join("out.safetensors");
        let loaded = vramp::load::load(path, &vramp::load::Options::default()).unwrap();
        let tensor = loaded.tensor(weight.name).unwrap();
        assert_eq!(tensor.shape(), weight.shape);
        assert!(tensor.bytes().unwrap() == rounded(&weight.numbers, Float::BF16), "{}", weight.tensors[0].0);
        let is_packed = weight.tensors[0].1 != "F8_E4M3";
        let told = said.warnings.iter().filter(|warning| warning.contains("dequantised")).count();
        assert_eq!(told, usize::from(is_packed), "once, not once a batch: {:?}", said.warnings);
    }
}
