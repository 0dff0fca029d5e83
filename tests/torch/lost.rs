//! A tensor is never dropped in silence: what cannot be loaded ends a load and a conversion, unless the user agreed to less; a whole
//! module is read as its state dict.

use vramp::durable::FileStore;
use vramp::error::Error;
use vramp::save::{ConvertOptions, Target, convert};

use super::*;

type Value = fn(Pickle) -> Pickle;

fn tensor(p: Pickle) -> Pickle {
    p.tensor(&one())
}

fn file_of(value: impl FnOnce(Pickle) -> Pickle) -> Vec<u8> {
    let pickle = value(Pickle::new().raw(b"}(").text("w").tensor(&one()).text("x"));
    archive(&pickle.raw(b"u").stop(), &[("0", &data(4)), ("1", &[0; 16])])
}

fn array(p: Pickle, kind: &str, shape: &[i64], bytes: usize) -> Pickle {
    let p = p.global("numpy.core.multiarray", "_reconstruct").raw(b"(").global("numpy", "ndarray");
    let p = p.ints(&[0]).raw(b"U\x01btR(K\x01").ints(shape).global("numpy", "dtype").raw(b"(").text(kind);
    let p = p.raw(b"\x89\x88tR(K\x03").text("<").raw(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89");
    p.raw(b"B").raw(&(bytes as u32).to_le_bytes()).raw(&vec![0; bytes]).raw(b"tb")
}

fn of_class(p: Pickle, module: &str, class: &str) -> Pickle {
    let p = p.global("torch._tensor", "_rebuild_from_type_v2").raw(b"(");
    let p = p.global("torch._utils", "_rebuild_wrapper_subclass").global(module, class).raw(b"()");
    tensor(p.raw(b"t}").text("_local_tensor")).raw(b"stR")
}

const LOST: &[(&str, Value)] = &[
    ("quantised tensor", |p| p.global("torch._utils", "_rebuild_qtensor").raw(b"(NNtR")),
    ("sparse tensor", |p| p.global("torch._utils", "_rebuild_sparse_tensor").raw(b"(NNtR")),
    ("meta tensor", |p| p.global("torch._utils", "_rebuild_meta_tensor_no_storage").raw(b"(NNtR")),
    ("nested tensor", |p| p.global("torch._utils", "_rebuild_nested_tensor").raw(b"(NNtR")),
    ("DTensor", |p| of_class(p, "torch.distributed.tensor", "DTensor")),
    ("ShardedTensor", |p| of_class(p, "torch.distributed._shard.sharded_tensor.api", "ShardedTensor")),
    ("tensor subclass instance", |p| of_class(p, "torch", "FloatTensor")),
    ("NumPy array of weights", |p| array(p, "f4", &[3], 12)),
];

fn target(dir: &Path) -> Target {
    Target::of(dir.join("out.safetensors"))
}

#[test]
fn a_tensor_that_cannot_be_loaded_ends_a_load_and_a_conversion_and_is_named() {
    for (word, value) in LOST {
        let (dir, path) = written(&file_of(value));
        let checkpoint = Checkpoint::open(&path).unwrap(); // to be looked at
        assert!(checkpoint.warnings().iter().any(|warning| warning.contains("\"x\"")), "{word}");
        let errors = [
            load(&path, &Options::default()).map(drop).unwrap_err(),
            convert(&checkpoint, &FileStore, &target(dir.path()), &ConvertOptions::default()).map(drop).unwrap_err(),
        ];
        for error in errors {
            let said = error.to_string();
            assert!(matches!(error, Error::Unsupported { .. }) && error.exit_code() == 3, "{said}");
            assert!(
                said.contains(&format!("1 of 2 tensors cannot be loaded and would be missing: 1 {word} (\"x\")")),
                "{said}"
            );
            assert!(!said.contains("--"), "the library knows no flags: {said}");
        }
        assert!(!dir.path().join("out.safetensors").exists(), "{word}");
        // What the user leaves out is not lost.
        for selection in [Selection::default().exclude(["x"]), Selection::default().include(["w"])] {
            let options = Options::default().selection(selection);
            assert_eq!(load(&path, &options).unwrap().tensor("w").unwrap().bytes().unwrap(), data(4), "{word}");
        }
        let agreed = Checkpoint::open(&path).unwrap().passing_over();
        let converted = convert(&agreed, &FileStore, &target(dir.path()), &ConvertOptions::default()).unwrap();
        assert_eq!((converted.saved.tensors, converted.skipped[0].tensors), (1, 1), "{word}");
    }
}

#[test]
fn several_are_told_in_one_message_by_their_kinds() {
    let file = file_of(|p| {
        let p = p.global("torch._utils", "_rebuild_qtensor").raw(b"(NNtR").text("y");
        let p = p.global("torch._utils", "_rebuild_sparse_tensor").raw(b"(NNtR").text("z");
        p.global("torch._utils", "_rebuild_qtensor").raw(b"(NNtR")
    });
    let (_dir, path) = written(&file);
    let said = load(&path, &Options::default()).unwrap_err().to_string();
    assert!(
        said.contains(r#"3 of 4 tensors"#) && said.contains(r#"2 quantised tensors ("x"; "z"); 1 sparse tensor ("y")"#),
        "{said}"
    );
    assert!(said.contains("dequantize()") && said.contains("to_dense()"), "{said}");
}

/// Types that safetensors lacks, and tensors that hang on others: a load can do without, a converted file would lack them.
#[test]
fn a_conversion_demands_what_a_load_warns_of() {
    let complex: Value = |p| {
        let twice = TensorOver { storage: "ComplexDoubleStorage", count: 1, ..floats("1", &[1], &[1]) };
        p.tensor(&twice)
    };
    let attribute: Value = |p| {
        let p = tensor(p.global("torch._utils", "_rebuild_parameter_with_state").raw(b"(")).raw(b"\x88");
        tensor(p.ordered_dict().raw(b"}").text("scale")).raw(b"stR")
    };
    for (value, name) in [(complex, "\"x\""), (attribute, "\"x.scale\"")] {
        let (dir, path) = written(&file_of(value));
        assert!(load(&path, &Options::default()).unwrap().warnings.iter().any(|warning| warning.contains(name)));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let error = convert(&checkpoint, &FileStore, &target(dir.path()), &ConvertOptions::default()).unwrap_err();
        assert!(error.exit_code() == 3 && error.to_string().contains(name), "{error}");
    }
}

/// Which arrays of NumPy are weights.
#[test]
fn arrays_of_numpy_are_weights_beside_tensors_and_as_matrices_and_data_elsewhere() {
    let random: Value = |p| array(p.raw(b"(").text("MT19937"), "u4", &[624], 2496).raw(b"K\x05K\x00G\0\0\0\0\0\0\0\0t");
    let cases: &[(&str, Value, u64)] = &[
        ("beside a tensor", |p| array(p, "f4", &[3], 12), 1),
        ("integers beside a tensor", |p| array(p, "i1", &[3], 3), 1),
        ("a number beside a tensor", |p| array(p, "f4", &[], 4), 0),
        ("a matrix by itself", |p| array(p.raw(b"}").text("a"), "f8", &[2, 2], 32).raw(b"s"), 1),
        (
            "a vector by a matrix",
            |p| {
                let p = array(p.raw(b"}(").text("a"), "f2", &[2, 2], 8).text("b");
                array(p, "f2", &[2], 4).raw(b"u")
            },
            2,
        ),
        ("a record of losses", |p| array(p.raw(b"}").text("loss"), "f8", &[5], 40).raw(b"s"), 0),
        ("the state of a random generator", random, 0),
        ("in a list", |p| array(p.raw(b"]"), "f4", &[3], 12).raw(b"a"), 0),
    ];
    for (what, value, weights) in cases {
        let (_dir, path) = written(&file_of(value));
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.tensors_left_out(), *weights, "{what}");
        assert_eq!(load(&path, &Options::default()).is_err(), *weights > 0, "{what}");
    }
}

#[test]
fn a_file_of_one_rank_says_which() {
    let dir = tempfile::tempdir().unwrap();
    for (module, class, advice) in [
        ("torch.distributed.tensor", "DTensor", "the folder with the files of all ranks"),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", "full state dict"),
    ] {
        for (name, rank) in [
            ("model_world_size_8_rank_3.pt", "rank 3 of 8"),
            ("model_world_size_16_rank_0.pt", "rank 0 of 16"),
            ("other.pt", "one rank of a sharded save (FSDP)"),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, file_of(|p| of_class(p, module, class))).unwrap();
            let said = load(&path, &Options::default()).unwrap_err().to_string();
            assert!(said.contains(rank) && said.contains(class) && said.contains(advice), "{said}");
        }
    }
}

// ---- modules

/// A module: its class, and what its state dict holds.
fn module(p: Pickle, class: &str, parameters: Value, buffers: Value, modules: Value) -> Pickle {
    let p = p.global("my.models", class).raw(b")\x81}(").text("training").raw(b"\x88").text("_parameters").raw(b"}(");
    let p = buffers(parameters(p).raw(b"u").text("_buffers").ordered_dict().raw(b"(")).raw(b"u");
    let p = p.text("_non_persistent_buffers_set").global("__builtin__", "set").raw(b"](").text("cache").raw(b"e\x85R");
    modules(p.text("_modules").raw(b"}(")).raw(b"uub")
}

fn none(p: Pickle) -> Pickle {
    p
}

/// A module in a module, with a buffer that is not kept, one that is none, and a parent that is pointed to.
fn whole(p: Pickle) -> Pickle {
    let parameters: Value = |p| p.text("weight").tensor(&one()).text("bias").raw(b"N");
    let buffers: Value = |p| p.text("mean").tensor(&floats("1", &[4], &[1])).text("cache").tensor(&one());
    module(p.raw(b""), "Net", parameters, buffers, |p| {
        let p = module(p.text("0"), "Layer", |p| p.text("w").tensor(&one()), none, none);
        p.text("drop").raw(b"N")
    })
}

fn expected() -> BTreeMap<String, Vec<u8>> {
    let all = [("0.w", data(4)), ("mean", vec![0; 16]), ("weight", data(4))];
    all.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

fn read(path: &Path, key: Option<&str>) -> BTreeMap<String, Vec<u8>> {
    let open = key.into_iter().fold(OpenOptions::default().skip_unknown(true), OpenOptions::key);
    let loaded = load(path, &Options::default().open(open)).unwrap();
    loaded.tensors().iter().map(|tensor| (tensor.name().to_owned(), tensor.bytes().unwrap().to_vec())).collect()
}

#[test]
fn a_whole_module_is_named_with_its_tensors_and_read_as_its_state_dict() {
    let storages: &[(&str, &[u8])] = &[("0", &data(4)), ("1", &[0; 16])];
    let (_dir, path) = written(&archive(&whole(Pickle::new()).stop(), storages));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(
        said.contains("a whole model, torch.save(model): 4 tensors inside") && said.contains("my.models.Net"),
        "{said}"
    );
    assert_eq!(read(&path, None), expected());
    // Within a checkpoint it is read where it is asked for, and never lost in silence.
    let nested = whole(Pickle::new().raw(b"}(").text("epoch").raw(b"K\x01").text("model")).raw(b"u").stop();
    let (_dir, path) = written(&archive(&nested, storages));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("4 tensors inside at \"model\"") && said.contains("key \"model\""), "{said}");
    assert_eq!(read(&path, Some("model")), expected());
    let below: Vec<String> = read(&path, Some("model.0")).into_keys().collect();
    assert_eq!(below, ["w"]);
    let open = OpenOptions::default().skip_unknown(true);
    let error = load(&path, &Options::default().open(open)).unwrap_err();
    let said = error.to_string();
    assert!(
        error.exit_code() == 3 && said.contains("4 tensors") && said.contains("choose the key \"model\""),
        "{said}"
    );
}

/// Old files name the class of a module with its source, by a persistent id.
#[test]
fn a_module_of_an_old_file_is_read_too() {
    let class = |p: Pickle| {
        p.raw(b"(").text("module").global("my.models", "Old").text("old.py").text("class Old: ...").raw(b"tQ")
    };
    let p = class(Pickle::new()).raw(b")\x81}(").text("_parameters").raw(b"}").text("w").tensor(&one()).raw(b"s");
    let pickle = p.text("_buffers").raw(b"}").text("_modules").raw(b"}ub").stop();
    // `legacy_object` adds a field to what looks like a storage; this is none.
    let object = legacy_object(&pickle);
    let at = object.windows(3).position(|part| part == b"NtQ").unwrap();
    let object = [&object[..at], &object[at + 1..]].concat();
    for file in [legacy(&object, &[("0", 4, &data(4))]), archive(&pickle, &[("0", &data(4))])] {
        let (_dir, path) = written(&file);
        let said = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(said.contains("a whole model") && said.contains("my.models.Old"), "{said}");
        assert_eq!(read(&path, None), BTreeMap::from([("w".to_owned(), data(4))]));
    }
}

/// The hint to pass over unknown objects is not given where it loses weights.
#[test]
fn a_hint_that_loses_weights_is_not_given() {
    let object = |p: Pickle| p.global("my.models", "Box").raw(b")\x81}").text("t");
    let (_dir, path) = written(&file_of(|p| tensor(object(p)).raw(b"sb")));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("would lose 1 tensor: \"x\"") && !said.contains("skip_unknown"), "{said}");
    let (_dir, path) = written(&file_of(|p| of_class(p, "my.tensors", "Packed")));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("would lose 1 tensor: \"x\"") && said.contains("my.tensors.Packed"), "{said}");
    let nested = tensor(Pickle::new().raw(b"}(").text("good").raw(b"}").text("t")).raw(b"s").text("bad");
    let nested = tensor(object(nested)).raw(b"sbu").stop();
    let (_dir, path) = written(&archive(&nested, &[("0", &data(4))]));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("choose the key \"good\"") && said.contains("would lose 1 tensor: \"bad\""), "{said}");
    let (_dir, path) = written(&file_of(|p| object(p).raw(b"K\x01sb")));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("`OpenOptions::skip_unknown`"), "{said}");
}
