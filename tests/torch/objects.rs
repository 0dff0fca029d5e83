//! What a file's object holds: each tensor is loaded or set aside by name, whatever it lies in, and NumPy's arrays are read.

use vramp::durable::FileStore;
use vramp::error::Error;
use vramp::save::{ConvertOptions, Target, convert};

use super::*;

/// A pickle `{"w": tensor, "x": value}`.
fn beside(value: impl FnOnce(Pickle) -> Pickle) -> Vec<u8> {
    let pickle = value(Pickle::new().raw(b"}(").text("w").tensor(&one()).text("x"));
    archive(&pickle.raw(b"u").stop(), &[("0", &data(4))])
}

fn tensor(pickle: Pickle) -> Pickle {
    pickle.tensor(&one())
}

/// The names that are loaded beside `w`, and what is said of the names that are not.
fn opened(file: &[u8], skip_unknown: bool) -> (Vec<String>, Vec<(String, String)>) {
    let (_dir, path) = written(file);
    let options = OpenOptions::default().skip_unknown(skip_unknown);
    let checkpoint = Checkpoint::open_with(&path, &options).unwrap();
    let names = checkpoint.tensors().iter().map(|tensor| tensor.name.to_string()).filter(|name| name != "w");
    let skipped = checkpoint.skipped().iter().map(|skipped| (skipped.name.clone(), skipped.why.clone()));
    let skipped: Vec<_> = skipped.collect();
    for (name, _) in skipped.iter().filter(|(_, why)| why.contains("tensor")) {
        assert!(checkpoint.warnings().iter().any(|warning| warning.contains(name)), "{name} is not told");
    }
    (names.collect(), skipped)
}

#[test]
fn what_containers_hold_is_loaded_whatever_class_they_are_of() {
    let namespace = |pickle: Pickle| pickle.global("argparse", "Namespace");
    let dict = |pickle: Pickle, key: &str| tensor(pickle.raw(b"}").text(key)).raw(b"s");
    let table: Vec<(&str, Vec<u8>, &[&str])> = vec![
        ("Namespace", beside(|p| dict(namespace(p).raw(b")\x81"), "a").raw(b"b")), &["x.a"]),
        (
            "Namespace with slots",
            beside(|p| dict(dict(namespace(p).raw(b")\x81"), "a"), "b").raw(b"\x86b")),
            &["x.a", "x.b"],
        ),
        (
            "Namespace at protocols 0 and 1",
            beside(|p| {
                let p = namespace(p.global("copy_reg", "_reconstructor").raw(b"("));
                dict(p.global("__builtin__", "object").raw(b"NtR"), "a").raw(b"b")
            }),
            &["x.a"],
        ),
        (
            "deque with what it was made of and what was added",
            beside(|p| tensor(tensor(p.global("collections", "deque").raw(b"](")).raw(b"eK\x04\x86R")).raw(b"a")),
            &["x.0", "x.1"],
        ),
        (
            "defaultdict",
            beside(|p| {
                let p = p.global("collections", "defaultdict").global("__builtin__", "list").raw(b"\x85R");
                tensor(p.text("k")).raw(b"s")
            }),
            &["x.k"],
        ),
        ("Counter", beside(|p| dict(p.global("collections", "Counter"), "k").raw(b"\x85R")), &["x.k"]),
        (
            "OrderedDict with what it was made of and what was added",
            beside(|p| {
                let p = tensor(p.global("collections", "OrderedDict").raw(b"](").text("a")).raw(b"e");
                tensor(p.raw(b"\x85\x85R").text("b")).raw(b"s")
            }),
            &["x.a", "x.b"],
        ),
        ("set", beside(|p| tensor(p.raw(b"\x8f(")).raw(b"\x90")), &["x.0"]),
        ("frozenset", beside(|p| tensor(p.raw(b"(")).raw(b"\x91")), &["x.0"]),
        ("set of Python 2", beside(|p| tensor(p.global("__builtin__", "set").raw(b"](")).raw(b"e\x85R")), &["x.0"]),
    ];
    for (what, file, names) in table {
        let (loaded, skipped) = opened(&file, false);
        assert_eq!(
            (loaded.as_slice(), skipped.as_slice()),
            (&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()[..], &[][..]),
            "{what}"
        );
    }
}

#[test]
fn a_tensor_that_is_not_loaded_is_named_with_what_it_hangs_on() {
    let with_state = |state: fn(Pickle) -> Pickle| {
        beside(|p| {
            let p = tensor(p.global("torch._utils", "_rebuild_parameter_with_state").raw(b"(")).raw(b"\x88");
            state(p.ordered_dict()).raw(b"tR")
        })
    };
    let attribute = |p: Pickle| tensor(p.raw(b"}(").text("tag").raw(b"K\x01").text("scale")).raw(b"u");
    let hooked = |p: Pickle| {
        let p = p.global("torch._utils", "_rebuild_tensor_v2").raw(b"(");
        let p = p.storage("FloatStorage", "0", 4).int(0).ints(&[4]).ints(&[1]).raw(b"\x89");
        tensor(p.raw(b"}").text("hook")).raw(b"stR")
    };
    type Case<'a> = (&'a str, Vec<u8>, &'a [&'a str], &'a str, &'a str);
    let table: Vec<Case> = vec![
        ("attribute", with_state(attribute), &["x"], "x.scale", "float32 [2, 2]"),
        (
            "attribute beside slots",
            with_state(|p| tensor(p.raw(b"N}").text("scale")).raw(b"s\x86")),
            &["x"],
            "x.scale",
            "attribute",
        ),
        ("attributes in a list", with_state(|p| tensor(p.raw(b"](")).raw(b"e")), &["x"], "x", "1 tensor"),
        ("hook", beside(hooked), &["x"], "x.hook", "float32 [2, 2]"),
        (
            "attribute of an OrderedDict",
            beside(|p| tensor(p.ordered_dict().raw(b"}").text("mask")).raw(b"sb")),
            &[],
            "x.mask",
            "container",
        ),
        (
            "slice",
            beside(|p| tensor(p.global("__builtin__", "slice").raw(b"(")).raw(b"NNtR")),
            &[],
            "x",
            "builtins.slice with 1 tensor",
        ),
        ("key", beside(|p| tensor(p.raw(b"}")).raw(b"K\x01s")), &[], "x", "1 tensor among its keys"),
        ("size", beside(|p| tensor(p.global("torch", "Size")).raw(b"\x85\x85R")), &[], "x", "torch.Size with 1 tensor"),
    ];
    for (what, file, names, name, why) in table {
        let (loaded, skipped) = opened(&file, false);
        assert_eq!(loaded, names, "{what}");
        let [(found, said)] = skipped.as_slice() else { panic!("{what}: {skipped:?}") };
        assert!(found == name && said.contains(why), "{what}: {found}: {said}");
    }
    // What hangs on an attribute is named too.
    let nested = |p: Pickle| {
        let p = tensor(p.raw(b"}").text("scale").global("torch._utils", "_rebuild_parameter_with_state").raw(b"("));
        tensor(p.raw(b"\x88").ordered_dict().raw(b"}").text("zero")).raw(b"stRs")
    };
    let names: Vec<String> = opened(&with_state(nested), false).1.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["x.scale", "x.scale.zero"]);
    // Of the state of a tensor with several attributes only those with tensors are named, and shared ones count once.
    let (loaded, skipped) = opened(&beside(typed_list), false);
    assert_eq!((loaded, skipped.len()), (vec!["x".to_owned()], 1));
    assert!(skipped[0].0 == "x.deep" && skipped[0].1.contains("2 tensors"), "{skipped:?}");
}

fn typed_list(p: Pickle) -> Pickle {
    let p = p.global("torch._tensor", "_rebuild_from_type_v2").raw(b"(");
    let p = p.global("torch._utils", "_rebuild_tensor_v2").global("torch", "Tensor").raw(b"(");
    let p = p.storage("FloatStorage", "0", 4).int(0).ints(&[4]).ints(&[1]).raw(b"\x89").ordered_dict();
    let p = tensor(p.raw(b"t}").text("deep").raw(b"](")).raw(b"q\x07h\x07");
    tensor(p).raw(b"estR")
}

#[test]
fn an_unknown_object_is_listed_with_the_number_of_tensors_in_it() {
    let file = beside(|p| {
        let p = p.global("my.models", "Net").raw(b")\x81}(").text("weight").tensor(&one()).raw(b"q\x09");
        let p = p.text("again").raw(b"h\x09").text("layers").raw(b"](");
        p.tensor(&one()).global("my.models", "Layer").raw(b")\x81}").text("bias").tensor(&one()).raw(b"sbeub")
    });
    let (_dir, path) = written(&file);
    assert!(Checkpoint::open(&path).unwrap_err().to_string().contains("my.models.Net"));
    let (loaded, skipped) = opened(&file, true);
    let said = ("x".to_owned(), "an unknown object: my.models.Net with 3 tensors in it".to_owned());
    assert_eq!((loaded, skipped), (Vec::new(), vec![said]));
}

/// `object` is named as the base of every class at the protocols 0 and 1, and is nothing by itself.
#[test]
fn a_bare_object_is_unknown() {
    let file = beside(|p| tensor(p.global("builtins", "object").raw(b")}\x92}").text("a")).raw(b"sb"));
    let (said, audit) = judged(&file);
    assert!(said.contains("builtins.object") && audit.verdict == Verdict::Suspicious, "{said}");
    let (loaded, skipped) = opened(&file, true);
    assert_eq!((loaded.len(), skipped[0].1.as_str()), (0, "an unknown object: builtins.object with 1 tensor in it"));
}

#[test]
fn the_object_itself_may_be_what_is_not_loaded() {
    let pickle = Pickle::new().global("my.models", "Net").raw(b")\x81}").text("w").tensor(&one()).raw(b"sb").stop();
    let (loaded, skipped) = opened(&archive(&pickle, &[("0", &data(4))]), true);
    assert!(loaded.is_empty() && skipped[0].0 == "the object itself" && skipped[0].1.contains("1 tensor"));
}

// ---- NumPy

const CORE: &str = "numpy.core.multiarray";

fn dtype(p: Pickle, text: &str, order: &str) -> Pickle {
    let ([size, alignment], flags) = match text {
        "O8" => ([-1; 2], 63),
        "U5" => ([20, 4], 8),
        "V3" => ([3, 1], 0),
        _ => ([-1; 2], 0),
    };
    forged(p, text, order, |p| p.raw(b"NNN").int(size).int(alignment).int(flags))
}

/// An element type with that behind version and byte order in its state.
fn forged(p: Pickle, text: &str, order: &str, state: impl FnOnce(Pickle) -> Pickle) -> Pickle {
    let p = p.global("numpy", "dtype").text(text).raw(b"\x89\x88\x87R(K\x03").text(order);
    state(p).raw(b"tb")
}

/// Bytes as Python 3 writes them at protocol 2.
fn encoded(p: Pickle, bytes: &[u8]) -> Pickle {
    let text: String = bytes.iter().map(|byte| char::from(*byte)).collect();
    p.global("_codecs", "encode").text(&text).text("latin1").raw(b"\x86R")
}

fn raw_bytes(p: Pickle, bytes: &[u8]) -> Pickle {
    p.raw(b"B").raw(&u32::try_from(bytes.len()).unwrap().to_le_bytes()).raw(bytes)
}

fn array(p: Pickle, shape: &[i64], of: (&str, &str), fortran: bool, bytes: impl FnOnce(Pickle) -> Pickle) -> Pickle {
    let p = p.global(CORE, "_reconstruct").global("numpy", "ndarray").raw(b"K\x00\x85");
    let p = encoded(p, b"b").raw(b"\x87R(K\x01").ints(shape);
    bytes(dtype(p, of.0, of.1).raw(if fortran { b"\x88" } else { b"\x89" })).raw(b"tb")
}

/// What protocol 5 makes of an array of three axes.
fn turned(p: Pickle, order: &str, axes: &[i64]) -> Pickle {
    let p = dtype(raw_bytes(p.global("numpy._core.numeric", "_frombuffer").raw(b"("), &[0; 48]), "f2", "<");
    p.ints(&[2, 3, 4]).text(order).ints(axes).raw(b"tR")
}

#[test]
fn arrays_and_scalars_of_numpy_are_named_with_type_and_shape() {
    let scalar =
        |p: Pickle, of: &str, bytes: &[u8]| encoded(dtype(p.global(CORE, "scalar"), of, "<"), bytes).raw(b"\x86R");
    let buffer = |p: Pickle, order: &str| {
        let p = dtype(raw_bytes(p.global("numpy._core.numeric", "_frombuffer").raw(b"("), &[0; 12]), "f2", "<");
        p.ints(&[2, 3]).text(order).raw(b"tR")
    };
    let table: Vec<(Vec<u8>, &str)> = vec![
        (beside(|p| array(p, &[3, 4], ("f4", "<"), false, |p| encoded(p, &[200; 48]))), "a NumPy array of F32 [3, 4]"),
        (
            beside(|p| array(p, &[3, 2], ("u2", ">"), true, |p| raw_bytes(p, &[0; 12]))),
            "a NumPy array of U16 [3, 2], column-major, big-endian",
        ),
        (beside(|p| array(p, &[2], ("c16", "="), false, |p| raw_bytes(p, &[0; 32]))), "a NumPy array of C128 [2]"),
        (beside(|p| array(p, &[0, 7], ("i8", "<"), false, |p| raw_bytes(p, b""))), "a NumPy array of I64 [0, 7]"),
        (beside(|p| array(p, &[], ("b1", "|"), false, |p| raw_bytes(p, b"\x01"))), "a NumPy array of BOOL []"),
        // Python 2 wrote a string of bytes, which may be text by chance.
        (
            beside(|p| array(p, &[3], ("i1", "|"), false, |p| p.raw("U\x03\u{20ac}".as_bytes()))),
            "a NumPy array of I8 [3]",
        ),
        (beside(|p| array(p, &[1], ("U5", "<"), false, |p| raw_bytes(p, &[0; 20]))), "a NumPy array of strings [1]"),
        (beside(|p| array(p, &[1], ("M8", "<"), false, |p| raw_bytes(p, &[0; 8]))), "a NumPy array of dates [1]"),
        (beside(|p| array(p, &[1], ("V3", "|"), false, |p| raw_bytes(p, &[0; 3]))), "a NumPy array of records [1]"),
        (
            beside(|p| array(p, &[2], ("O8", "|"), false, |p| tensor(p.raw(b"](")).raw(b"Ne"))),
            "a NumPy array of objects [2] with 1 tensor in it",
        ),
        (beside(|p| scalar(p, "f8", &[0x80; 8])), "a NumPy scalar of F64"),
        (beside(|p| buffer(p, "C")), "a NumPy array of F16 [2, 3]"),
        (beside(|p| buffer(p, "F")), "a NumPy array of F16 [2, 3], column-major"),
        (beside(|p| turned(p, "K", &[2, 0, 1])), "a NumPy array of F16 [4, 2, 3]"),
    ];
    for (file, why) in table {
        let (loaded, skipped) = opened(&file, false);
        assert_eq!((loaded.len(), skipped), (0, vec![("x".to_owned(), why.to_owned())]));
    }
}

#[test]
fn an_array_whose_bytes_are_not_as_many_as_its_shape_says_is_refused() {
    let scalar = |p: Pickle| raw_bytes(dtype(p.global(CORE, "scalar"), "f8", "<"), &[0; 4]).raw(b"\x86R");
    let table: Vec<(Vec<u8>, &str)> = vec![
        (beside(|p| turned(p, "K", &[2, 0, 0])), "axes [2, 0, 0]"),
        (beside(|p| turned(p, "K", &[1, 2, 3])), "axes [1, 2, 3]"),
        (beside(|p| turned(p, "K", &[1, 0])), "axes [1, 0]"),
        (beside(|p| turned(p, "C", &[2, 0, 1])), "the order \"C\" and axes"),
        (beside(|p| array(p, &[3, 4], ("f4", "<"), false, |p| raw_bytes(p, &[0; 44]))), "needs 48 bytes and has 44"),
        (beside(|p| array(p, &[3, 4], ("f4", "<"), false, |p| encoded(p, &[200; 49]))), "needs 48 bytes and has 49"),
        (beside(|p| array(p, &[1 << 40, 1 << 40], ("f4", "<"), false, |p| raw_bytes(p, b""))), "2^64"),
        (beside(|p| array(p, &[-1], ("f4", "<"), false, |p| raw_bytes(p, b""))), "is -1"),
        (beside(|p| array(p, &[1; 65], ("f4", "<"), false, |p| raw_bytes(p, &[0; 4]))), "65 dimensions"),
        (beside(|p| array(p, &[1], ("f4", "!"), false, |p| raw_bytes(p, &[0; 4]))), "byte order"),
        (beside(|p| array(p, &[1], ("f4", "<"), false, |p| p.raw(b"K\x01"))), "the bytes of a NumPy array are 1"),
        (beside(|p| array(p, &[2], ("O8", "|"), false, |p| p.raw(b"](Ne"))), "needs 2 objects and has 1"),
        (beside(|p| p.global(CORE, "_reconstruct").raw(b")R")), "0 arguments"),
        (beside(scalar), "needs 8 bytes and has 4"),
    ];
    for (file, why) in table {
        let (said, audit) = judged(&file);
        assert!(said.contains(why) && said.contains("\"x\""), "{why}: {said}");
        assert_eq!(audit.verdict, Verdict::Malformed, "{why}");
    }
}

/// NumPy believes the state of an element type: what it takes for objects would be addresses out of the file.
#[test]
fn an_element_type_whose_state_does_not_fit_it_is_suspicious_wherever_it_stands() {
    let plain = |p: Pickle, text: &str, [size, alignment, flags]: [i64; 3]| {
        forged(p, text, "|", |p| p.raw(b"NNN").int(size).int(alignment).int(flags))
    };
    let field = |p: Pickle, flags: i64| {
        let field = |p: Pickle| dtype(p.text("f").raw(b"\x85}").text("f"), "O8", "|").raw(b"K\x00\x86s");
        forged(p, "V8", "|", |p| field(p.raw(b"N")).int(8).int(1).int(flags))
    };
    let base = |p: Pickle| forged(p, "V8", "|", |p| dtype(p, "O8", "|").raw(b"K\x01\x85\x86NN").int(8).int(1).int(0));
    let of = |dtype: &dyn Fn(Pickle) -> Pickle| {
        let p = Pickle::new().raw(b"}(").text("w").tensor(&one()).text("x");
        let p = p.global(CORE, "_reconstruct").global("numpy", "ndarray").raw(b"K\x00\x85");
        let p = dtype(encoded(p, b"b").raw(b"\x87R(K\x01").ints(&[1])).raw(b"\x89");
        archive(&raw_bytes(p, b"AAAAAAAA").raw(b"tbu").stop(), &[("0", &data(4))])
    };
    let files = vec![
        of(&|p| field(p, 0)),
        of(&|p| field(p, 1)),
        of(&|p| base(p)),
        of(&|p| dtype(p, "O8", "|")),
        of(&|p| plain(p, "O8", [-1, -1, 0])),
        of(&|p| plain(p, "V8", [8, 1, 63])),
        of(&|p| plain(p, "V8", [4096, 1, 0])),
        of(&|p| plain(p, "f8", [-1, -1, 1])),
        of(&|p| plain(p, "S8", [-1, -1, 0])),
        of(&|p| plain(p, "object", [-1, -1, 0])),
        // Not of an array, and not even reached.
        beside(|p| plain(p, "O8", [-1, -1, 0])),
        beside(|p| plain(p, "O8", [-1, -1, 0]).raw(b"0N")),
    ];
    for (at, file) in files.iter().enumerate() {
        let (said, audit) = judged(file);
        assert!(said.contains("numpy-"), "{at}: {said}");
        assert_eq!(audit.verdict, Verdict::Suspicious, "{at}: {said}");
    }
}

#[test]
fn keys_that_are_no_text_give_names_that_say_which_they_are() {
    fn scalar(p: Pickle, of: &str, order: &str, bytes: &[u8]) -> Pickle {
        encoded(dtype(p.global(CORE, "scalar"), of, order), bytes).raw(b"\x86R")
    }
    fn long(p: Pickle, last: i64) -> Pickle {
        let p = (0..20).fold(p.raw(b"("), |p, at| p.text(&"k".repeat(50)).int(at));
        p.int(last).raw(b"t")
    }
    let name = |last: i64| {
        let parts: Vec<String> = (0..20).map(|at| format!("\"{}\", {at}", "k".repeat(50))).collect();
        format!("({}, {last})", parts.join(", "))
    };
    type Push = fn(Pickle) -> Pickle;
    let keys: Vec<(Push, String)> = vec![
        (|p| scalar(p, "i8", "<", &[7, 0, 0, 0, 0, 0, 0, 0]), "7".into()),
        (|p| scalar(p, "i8", "<", &[0xfe, 255, 255, 255, 255, 255, 255, 255]), "-2".into()),
        (|p| scalar(p, "u2", ">", &[0xff, 1]), "65281".into()),
        (|p| scalar(p, "u8", "<", &[255; 8]), "18446744073709551615".into()),
        (|p| encoded(p, b"layer"), "layer".into()),
        (|p| raw_bytes(p, b"other"), "other".into()),
        (|p| encoded(p, b"\xff\x01"), "ff01".into()),
        (|p| raw_bytes(p, b"a").raw(b"\x85"), "(b\"a\")".into()),
        (|p| raw_bytes(p, b"b").raw(b"\x85"), "(b\"b\")".into()),
        (|p| long(p, 1), name(1)),
        (|p| long(p, 2), name(2)),
    ];
    let pickle = keys.iter().fold(Pickle::new().raw(b"}("), |p, (key, _)| key(p).tensor(&one()));
    let (_dir, path) = written(&archive(&pickle.raw(b"u").stop(), &[("0", &data(4))]));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let names: std::collections::BTreeSet<String> =
        checkpoint.tensors().iter().map(|tensor| tensor.name.to_string()).collect();
    assert_eq!(names, keys.into_iter().map(|(_, name)| name).collect());
}

// ---- what else must hold of an object

#[test]
fn no_tensor_has_the_name_that_safetensors_keeps() {
    let dict = state_dict(&[("__metadata__", one())]);
    for file in [archive(&dict, &[("0", &data(4))]), legacy(&legacy_object(&dict), &[("0", 4, &data(4))])] {
        let (said, _) = judged(&file);
        assert!(said.contains("__metadata__") && said.contains("reserved-name"), "{said}");
    }
    let below = Pickle::new().raw(b"}").text("x").raw(b"}").text("__metadata__").tensor(&one()).raw(b"ss").stop();
    let (_dir, path) = written(&archive(&below, &[("0", &data(4))]));
    assert_eq!(loaded(&path).into_keys().collect::<Vec<_>>(), ["x.__metadata__"]);
    let key = OpenOptions::default().key("x");
    assert_eq!(Checkpoint::open_with(&path, &key).unwrap_err().exit_code(), 3);
}

/// `torch.save(…, pickle_protocol=1)` writes numbers as text, and was taken for a truncated safetensors file.
#[test]
fn a_legacy_file_of_protocol_1_is_recognised() {
    let file = legacy(&legacy_object(&state_dict(&[("a", one())])), &[("0", 4, &data(4))]);
    let magic = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
    let rest = file.strip_prefix(magic).unwrap();
    let (_dir, path) = written(&[b"L119547037146038801333356L\n.", rest].concat());
    assert_eq!(Checkpoint::open(&path).unwrap().format(), Format::TorchLegacy);
    assert_eq!(loaded(&path)["a"], data(4));
}

/// PyTorch writes these storages little-endian on every machine ("convert big endian cpu to little endian storage"), and its reader
/// never looks at what `sys_info` says.
#[test]
fn a_legacy_file_of_a_big_endian_machine_has_little_endian_storages() {
    let file = legacy(&legacy_object(&state_dict(&[("a", one())])), &[("0", 4, &data(4))]);
    let at = file.windows(15).position(|part| part == b"little_endian\x88s").unwrap() + 13;
    let big = [&file[..at], b"\x89", &file[at + 1..]].concat();
    let (_dir, path) = written(&big);
    assert_eq!(loaded(&path)["a"], data(4));
}

#[test]
fn expanded_empty_and_single_elements_come_out_as_their_indices_say() {
    let over = |count, offset, shape, stride| TensorOver { count, offset, shape, stride, ..one() };
    let table: Vec<(&str, TensorOver, Vec<usize>, Vec<f32>)> = vec![
        ("expanded", over(4, 1, &[3, 2], &[0, 1]), vec![3, 2], vec![2.0, 3.0, 2.0, 3.0, 2.0, 3.0]),
        ("all_the_same", over(4, 3, &[2, 2], &[0, 0]), vec![2, 2], vec![4.0; 4]),
        ("scalar", over(4, 2, &[], &[]), vec![], vec![3.0]),
        ("none", over(4, 0, &[0, 7], &[7, 1]), vec![0, 7], vec![]),
        ("none_far_away", over(4, 1 << 60, &[2, 0], &[i64::MAX, i64::MAX]), vec![2, 0], vec![]),
        ("one_with_huge_strides", over(4, 1, &[1, 1], &[i64::MAX, i64::MAX]), vec![1, 1], vec![2.0]),
        ("row_with_a_huge_stride", over(4, 0, &[1, 4], &[i64::MAX, 1]), vec![1, 4], vec![1.0, 2.0, 3.0, 4.0]),
        ("overlapping", over(4, 0, &[3, 2], &[1, 1]), vec![3, 2], vec![1.0, 2.0, 2.0, 3.0, 3.0, 4.0]),
        ("front", over(4, 0, &[3], &[1]), vec![3], vec![1.0, 2.0, 3.0]),
        ("back", over(4, 1, &[3], &[1]), vec![3], vec![2.0, 3.0, 4.0]),
    ];
    let tensors: Vec<(&str, TensorOver)> = table.iter().map(|(name, tensor, ..)| (*name, tensor.clone())).collect();
    for deflate in [false, true] {
        let mut members = members(&state_dict(&tensors), &[("0", &data(4))]);
        if deflate {
            members[1] = Member::deflated("archive/data/0", &data(4));
        }
        let (_dir, path) = written(&zip(&members));
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert!(checkpoint.tensors().iter().all(|tensor| (tensor.shard() as usize) < checkpoint.shards().len()));
        let loaded = load(&path, &Options::default()).unwrap();
        for (name, _, shape, expected) in &table {
            let tensor = loaded.tensor(name).unwrap();
            let found: Vec<f32> = numbers(tensor.bytes().unwrap());
            assert_eq!((tensor.shape(), &found), (&shape[..], expected), "{name}, deflated: {deflate}");
        }
        // Each has a copy of its own.
        let place = |name: &str| loaded.tensor(name).unwrap().bytes().unwrap().as_ptr_range();
        let (front, back) = (place("front"), place("back"));
        assert!(front.end <= back.start || back.end <= front.start);
    }
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

// ---- checksums of what is too large to be read twice

#[test]
fn a_wrong_crc_of_a_large_archive_is_found_where_it_is_asked_for() {
    const LARGE: usize = 5 << 20;
    let values = data(LARGE);
    let shape = [LARGE as i64];
    let mut members = members(&state_dict(&[("a", floats("0", &shape, &[1]))]), &[("0", &values)]);
    let (_good_dir, good) = written(&zip(&members));
    let sums = Checkpoint::open(&good).unwrap().check_sums(&|| Ok(())).unwrap();
    assert_eq!((sums.same, sums.absent), (3, 0));
    members[1].packed[LARGE * 2] ^= 1;
    let (dir, path) = written(&zip(&members));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let error = checkpoint.check_sums(&|| Ok(())).unwrap_err();
    let said = error.to_string();
    assert!(error.exit_code() == 3 && said.contains("archive/data/0") && said.contains("CRC-32"), "{said}");
    assert_eq!(checkpoint.check_sums(&|| Err(Error::Cancelled)).unwrap_err().kind(), Error::Cancelled.kind());
    let target = Target::of(dir.path().join("out.safetensors"));
    let check = ConvertOptions::default().check(true);
    assert_eq!(convert(&checkpoint, &FileStore, &target, &check).unwrap_err().exit_code(), 3);
    assert!(!target.path().exists());
    std::fs::write(&path, zip(&members[..1])).unwrap();
    assert_eq!(checkpoint.check_sums(&|| Ok(())).unwrap_err().kind().as_str(), "changed");
}
