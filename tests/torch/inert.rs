//! What is passed over is inert: whatever an unknown object does to itself, the tensors beside it load, and an audit tells of it.

use super::*;

/// A pickle `{"w": tensor, "x": value}`.
fn beside(value: impl FnOnce(Pickle) -> Pickle) -> Vec<u8> {
    let pickle = value(Pickle::new().raw(b"}(").text("w").tensor(&one()).text("x"));
    archive(&pickle.raw(b"u").stop(), &[("0", &data(4))])
}

/// The same under `{"state_dict": {"w": tensor}, "x": value}`.
fn below_a_key(value: impl FnOnce(Pickle) -> Pickle) -> Vec<u8> {
    let pickle = Pickle::new().raw(b"}(").text("state_dict").raw(b"}").text("w").tensor(&one()).raw(b"s");
    archive(&value(pickle.text("x")).raw(b"u").stop(), &[("0", &data(4))])
}

fn open(key: Option<&str>, skip_unknown: bool) -> OpenOptions {
    key.into_iter().fold(OpenOptions::default(), OpenOptions::key).skip_unknown(skip_unknown)
}

fn with(file: &[u8], key: Option<&str>, skip_unknown: bool) -> Result<Checkpoint, vramp::error::Error> {
    let (_dir, path) = written(file);
    Checkpoint::open_with(&path, &open(key, skip_unknown))
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().iter().map(|tensor| &*tensor.name).collect()
}

fn unknown(pickle: Pickle) -> Pickle {
    pickle.global("my.config", "Node").raw(b")\x81")
}

/// What an object of an unknown class does to itself.
type Deed = fn(Pickle) -> Pickle;

const DEEDS: &[(&str, Deed)] = &[
    ("nothing", unknown),
    ("a subclass of dict", |p| unknown(p).raw(b"(").text("lr").raw(b"K\x01").text("n").raw(b"K\x02u")),
    ("a subclass of dict with one item", |p| unknown(p).text("lr").raw(b"K\x01s")),
    ("a subclass of OrderedDict", |p| {
        p.global("my.config", "Ordered").raw(b")R(").text("lr").raw(b"K\x01u}").text("_frozen").raw(b"\x88sb")
    }),
    ("a subclass of list", |p| unknown(p).raw(b"(K\x01K\x02e}").text("tag").raw(b"K\x01sb")),
    ("one item appended", |p| unknown(p).raw(b"K\x01a")),
    ("items of a set", |p| unknown(p).raw(b"(K\x01K\x02\x90")),
    ("a class of the protocols 0 and 1", |p| {
        let p = p.global("copy_reg", "_reconstructor").raw(b"(").global("my.config", "Node");
        p.global("__builtin__", "dict").raw(b"}tR").text("lr").raw(b"K\x01s")
    }),
    ("it points to itself", |p| unknown(p).raw(b"q\x20}").text("self").raw(b"h\x20sb")),
    ("its child points to it", |p| {
        let p = unknown(p).raw(b"q\x20}(").text("_content").raw(b"}").text("child");
        unknown(p).raw(b"}").text("_parent").raw(b"h\x20sbsub")
    }),
    ("it is its own item", |p| unknown(p).raw(b"q\x20").text("k").raw(b"h\x20s")),
    ("a state that is set twice", |p| unknown(p).raw(b"}").text("a").raw(b"K\x01sb}").text("b").raw(b"K\x02sb")),
    ("a state with methods", |p| unknown(p).raw(b"}").text("__class__").global("my.config", "Other").raw(b"sb")),
    ("arguments that change after the call", |p| p.global("my.config", "make").raw(b"]q\x20\x85Rh\x20K\x01a0")),
    ("the result of a call is called", |p| p.global("my.config", "factory").raw(b")R)R")),
    ("a key twice", |p| unknown(p).raw(b"}(").text("a").raw(b"K\x01").text("a").raw(b"K\x02ub")),
    ("a key that is none", |p| unknown(p).raw(b"}]K\x01sb")),
    ("it is a key", |p| unknown(p.raw(b"}")).raw(b"K\x01s")),
    ("a nested class", |p| {
        let p = p.global("__builtin__", "getattr").global("my.config", "Outer").text("Inner").raw(b"\x86R");
        p.raw(b")\x81}").text("a").raw(b"K\x01sb")
    }),
    ("a member of an enumeration", |p| p.global("my.config", "Colour").raw(b"K\x01\x85R")),
    ("a generator of NumPy", |p| {
        p.global("numpy.random._pickle", "__generator_ctor").text("PCG64").raw(b"\x85R}").text("state").raw(b"}sb")
    }),
    ("an encoding within", |p| {
        let p = unknown(p).raw(b"}").text("raw").global("_codecs", "encode").text("a").text("rot13");
        p.raw(b"\x86Rsb")
    }),
    ("more than a thousand levels", |p| {
        let p = (0..1200).fold(unknown(p).raw(b"}").text("deep"), |p, _| p.raw(b"]"));
        (0..1200).fold(p, |p, at| if at < 1199 { p.raw(b"a") } else { p }).raw(b"sb")
    }),
];

#[test]
fn an_unknown_object_does_not_condemn_the_file_whatever_it_does_to_itself() {
    for (what, deed) in DEEDS {
        let (flat, nested) = (beside(deed), below_a_key(deed));
        let skipped = with(&flat, None, true).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(names(&skipped), ["w"], "{what}");
        let (_dir, path) = written(&flat);
        let options = OpenOptions::default().skip_unknown(true);
        let loaded = load(&path, &Options::default().open(options)).unwrap();
        assert_eq!(loaded.tensor("w").unwrap().bytes().unwrap(), data(4), "{what}");
        // Outside the key it is not even met.
        for skips in [false, true] {
            let keyed = with(&nested, Some("state_dict"), skips).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!((names(&keyed), keyed.skipped().len()), (vec!["w"], 0), "{what}");
        }
        // Without either it is refused, and an audit tells of it.
        for (file, key) in [(&flat, None), (&nested, None), (&nested, Some("x"))] {
            let error = with(file, key, false).unwrap_err();
            assert_eq!((error.exit_code(), error.kind().as_str()), (3, "malformed"), "{what}: {error}");
        }
        assert_eq!(audit(&path).unwrap().verdict, Verdict::Suspicious, "{what}");
    }
}

#[test]
fn what_is_used_is_refused_for_the_same_faults_and_code_is_refused_everywhere() {
    let used: &[(&str, Deed, &str)] = &[
        ("a list in itself", |p| p.raw(b"]q\x20h\x20a"), "cycle"),
        ("a key twice", |p| p.raw(b"}(").text("a").raw(b"K\x01").text("a").raw(b"K\x02u"), "duplicate-key"),
        ("appended to a Size", |p| p.global("torch", "Size").raw(b"(K\x01t\x85RK\x01a"), "append-target"),
        ("a popped object that is appended to", |p| unknown(p).raw(b"K\x01a0N"), "append-target"),
        ("too many levels", |p| (0..1200).fold(p.raw(b"N"), |p, _| p.raw(b"\x85")), "depth-limit"),
    ];
    for (what, deed, rule) in used {
        let error = with(&beside(deed), None, true).unwrap_err();
        assert!(error.to_string().contains(rule), "{what}: {error}");
    }
    let code: &[(&str, Deed)] = &[
        ("called", |p| p.global("os", "system").text("true").raw(b"\x85R")),
        ("within an unknown object", |p| unknown(p).raw(b"}").text("f").global("builtins", "eval").raw(b"sb")),
        ("popped", |p| p.global("subprocess", "Popen").raw(b"0N")),
        ("getattr of a module", |p| p.global("builtins", "getattr").global("os", "path").text("join").raw(b"\x86R")),
        ("getattr by a name that is made", |p| {
            let p = p.global("builtins", "getattr").global("my.config", "Node");
            p.global("my.config", "name").raw(b")R\x86R")
        }),
        ("getattr that is handed on", |p| p.global("my.config", "map").global("builtins", "getattr").raw(b"\x85R")),
        ("getattr that leads on", |p| {
            p.global("builtins", "getattr").global("torch", "hub").text("load").raw(b"\x86R")
        }),
        ("getattr of what Python uses", |p| {
            p.global("builtins", "getattr").global("my.config", "Node").text("__globals__").raw(b"\x86R")
        }),
    ];
    for (what, deed) in code {
        for (file, key) in [(beside(deed), None), (below_a_key(deed), Some("state_dict"))] {
            let error = with(&file, key, true).unwrap_err().to_string();
            assert!(error.contains("global-denied"), "{what}: {error}");
        }
        let (_dir, path) = written(&beside(deed));
        assert_eq!(audit(&path).unwrap().verdict, Verdict::Dangerous, "{what}");
    }
}

/// What hangs on a tensor is no part of it, and is not followed.
#[test]
fn an_attribute_of_a_tensor_may_hold_itself() {
    let with_attribute = |value: Deed| {
        let p = |p: Pickle| {
            let p = p.global("torch._utils", "_rebuild_parameter_with_state").raw(b"(").tensor(&one()).raw(b"\x88");
            value(p.ordered_dict().raw(b"}").text("me")).raw(b"stR")
        };
        beside(p)
    };
    let itself: Deed = |p| p.raw(b"]q\x20h\x20a");
    let other: Deed = |p| {
        let p = p.raw(b"}q\x20").text("t").global("torch._utils", "_rebuild_parameter_with_state").raw(b"(");
        p.tensor(&one()).raw(b"\x88").ordered_dict().raw(b"h\x20tRs")
    };
    // As PyTorch writes `p.me = p`: the state is shared, and changes after the call that took it.
    let whole = beside(|p| {
        let p = p.global("torch._utils", "_rebuild_parameter_with_state").raw(b"q\x21(").tensor(&one()).raw(b"\x88");
        let p = p.ordered_dict().raw(b"}q\x20").text("me").raw(b"h\x21(").tensor(&one()).raw(b"\x88").ordered_dict();
        p.raw(b"h\x20tRstR")
    });
    let said = with(&whole, None, false).unwrap();
    assert_eq!(names(&said), ["w", "x"]);
    for (value, skipped) in [(itself, 0), (other, 1)] {
        let file = with_attribute(value);
        let checkpoint = with(&file, None, false).unwrap();
        assert_eq!((names(&checkpoint), checkpoint.skipped().len()), (vec!["w", "x"], skipped));
    }
}

/// Protocol 2 writes `Outer.Inner` as `getattr(Outer, "Inner")`: a name like any other.
#[test]
fn a_nested_class_is_a_name_and_no_code() {
    let file = beside(|p| {
        let p = p.global("__builtin__", "getattr").raw(b"q\x20").global("my.metrics", "Metric").text("State");
        p.raw(b"\x86Rh\x20").global("my.metrics", "Metric").text("Mode").raw(b"\x86R)R\x86")
    });
    let (said, audit) = judged(&file);
    assert!(said.contains("my.metrics.Metric.State") && said.contains("my.metrics.Metric.Mode"), "{said}");
    assert!(!said.contains("run code") && !said.contains("getattr,"), "{said}");
    assert_eq!(audit.verdict, Verdict::Suspicious, "{:?}", audit.findings);
    let listed = |name: &str| audit.globals.iter().any(|global| global.name == name);
    assert!(listed("Metric.State") && listed("Metric.Mode") && listed("getattr"), "{:?}", audit.globals);
    let checkpoint = with(&file, None, true).unwrap();
    let whys: Vec<&str> = checkpoint.skipped().iter().map(|skipped| skipped.why.as_str()).collect();
    assert_eq!(whys, ["an unknown object: my.metrics.Metric.State", "an unknown object: my.metrics.Metric.Mode"]);
}

/// A storage that only an object needs which is passed over need not be there.
#[test]
fn a_storage_that_is_not_used_may_be_missing_and_one_that_is_names_its_tensors() {
    let lost = |p: Pickle| unknown(p).raw(b"}").text("t").tensor(&floats("7", &[3], &[1])).raw(b"sb");
    let checkpoint = with(&beside(lost), None, true).unwrap();
    assert_eq!((names(&checkpoint), checkpoint.tensors_left_out()), (vec!["w"], 1));
    // In an old file it stands before others, and says where these begin.
    let object = Pickle::new().raw(b"}(").text("x");
    let object = unknown(object).raw(b"}").text("t").tensor(&floats("0", &[3], &[1])).raw(b"sb");
    let object = object.text("state_dict").raw(b"}").text("w").tensor(&floats("1", &[4], &[1])).raw(b"su").stop();
    let old = legacy(&legacy_object(&object), &[("0", 3, &[0; 12]), ("1", 4, &data(4))]);
    let (_dir, path) = written(&old);
    for (key, skip_unknown, name) in [(Some("state_dict"), false, "w"), (None, true, "state_dict.w")] {
        let loaded = load(&path, &Options::default().open(open(key, skip_unknown))).unwrap();
        assert_eq!(loaded.tensor(name).unwrap().bytes().unwrap(), data(4));
    }
    let turned = TensorOver { shape: &[2, 2], stride: &[1, 2], ..one() };
    let dict = state_dict(&[("a", one()), ("b", turned), ("c", floats("1", &[3], &[1]))]);
    for file in [archive(&dict, &[("1", &data(3))]), legacy(&legacy_object(&dict), &[("1", 3, &data(3))])] {
        let error = with(&file, None, false).unwrap_err().to_string();
        assert!(error.contains(r#""a"; "b""#) && !error.contains(r#""c""#), "{error}");
    }
}

#[test]
fn an_archive_of_a_newer_format_is_refused_by_its_version() {
    let at = |version: &str| {
        let mut all = members(&state_dict(&[("a", one())]), &[("0", &data(4))]);
        all.retain(|member| member.name != b"archive/version");
        all.push(Member::stored("archive/version", version.as_bytes()));
        with(&zip(&all), None, false)
    };
    assert!(at("3\n").is_ok() && at("10").is_ok());
    for (version, number) in [("11\n", "11"), ("4000000000", "4000000000")] {
        let error = at(version).unwrap_err().to_string();
        assert!(error.contains(&format!("file format version {number}; this reads up to 10")), "{error}");
    }
}

#[test]
fn many_unknown_names_are_grouped_by_package_behind_the_next_step() {
    let names = ["a.One", "a.b.Two", "a.Three", "torch.nn.modules.conv.Conv9d", "zoo.Four"];
    let file = beside(|p| {
        let p = names.iter().fold(p.raw(b"("), |p, name| {
            let (module, name) = name.rsplit_once('.').unwrap();
            p.global(module, name).raw(b")R")
        });
        p.raw(b"l")
    });
    let error = with(&file, None, false).unwrap_err().to_string();
    let step = error.find("save a state_dict").unwrap();
    let at = |part: &str| error.find(part).unwrap_or_else(|| panic!("{part}: {error}"));
    assert!(step < at("3 names of a ") && at("3 names of a ") < at("1 name of torch.nn "), "{error}");
    assert!(names.iter().all(|name| at(name) > step), "{error}");
}
