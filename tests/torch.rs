//! PyTorch's files, made here byte by byte: what is loaded is what was meant, and what is hostile is refused and named.

mod foreign;
mod inert;
mod lost;
mod objects;
mod ranks;
mod ties;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use vramp::checkpoint::torch::audit::{Audit, Verdict, audit};
use vramp::checkpoint::{Checkpoint, Format, OpenOptions, Selection, SliceRequest, strict};
use vramp::device::CpuDevice;
use vramp::load::{Loader, Options, TransferOptions, load};
use vramp::plan::RouteChoice;
use vramp::testing::torch::{Member, Pickle, TensorOver, archive, legacy, legacy_object, members, state_dict, zip};
use vramp::testing::watched;

/// A row-major tensor of F32 over the whole of storage `key`.
fn floats<'a>(key: &'a str, shape: &'a [i64], stride: &'a [i64]) -> TensorOver<'a> {
    let count = shape.iter().product();
    TensorOver { key, storage: "FloatStorage", count, offset: 0, shape, stride, bits: &[] }
}

fn one() -> TensorOver<'static> {
    floats("0", &[2, 2], &[2, 1])
}

fn data(count: usize) -> Vec<u8> {
    (0..count).flat_map(|number| (number as f32 + 1.0).to_le_bytes()).collect()
}

fn written(bytes: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.pt");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn loaded(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let loaded = load(path, &Options::default()).unwrap();
    loaded.tensors().iter().map(|tensor| (tensor.name().to_owned(), tensor.bytes().unwrap().to_vec())).collect()
}

/// What a load says of the bytes, and what an audit does.
fn judged(bytes: &[u8]) -> (String, Audit) {
    let (_dir, path) = written(bytes);
    let said = match Checkpoint::open(&path) {
        Ok(_) => "opened".to_owned(),
        Err(error) => {
            assert_eq!(error.exit_code(), 3, "{error}");
            assert!(error.to_string().contains("model.pt"), "{error}");
            error.to_string()
        }
    };
    (said, audit(&path).unwrap())
}

// ---- what is loaded is what was meant

/// A tensor over one of the storages of a file.
#[derive(Debug, Clone)]
struct View {
    storage: usize,
    offset: i64,
    dims: Vec<(i64, i64)>,
    neg: bool,
}

const CLASSES: [(&str, usize); 4] = [("FloatStorage", 4), ("ByteStorage", 1), ("DoubleStorage", 8), ("HalfStorage", 2)];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Container {
    Stored,
    Deflated,
    BigEndian,
    Legacy,
}

fn view() -> impl Strategy<Value = View> {
    (0..CLASSES.len(), 0i64..4, prop::collection::vec((0i64..5, 0i64..6), 0..4), any::<bool>())
        .prop_map(|(storage, offset, dims, neg)| View { storage, offset, dims, neg })
}

impl View {
    /// Elements that its storage must have.
    fn reach(&self) -> i64 {
        self.offset + 1 + self.dims.iter().map(|(count, stride)| (count - 1).max(0) * stride).sum::<i64>()
    }

    /// The elements' bytes, by walking every index.
    fn expected(&self, storage: &[u8], element: usize, swap: bool) -> Vec<u8> {
        let count: i64 = self.dims.iter().map(|(count, _)| count).product();
        let mut out = Vec::new();
        for number in 0..count {
            let (mut rest, mut at) = (number, self.offset);
            for (count, stride) in self.dims.iter().rev() {
                at += rest % count * stride;
                rest /= count;
            }
            let mut one = storage[at as usize * element..][..element].to_vec();
            if swap {
                one.reverse();
            }
            match (self.neg, element) {
                (true, 1) => one[0] = one[0].wrapping_neg(),
                (true, _) => *one.last_mut().unwrap() ^= 0x80,
                (false, _) => {}
            }
            out.extend(one);
        }
        out
    }
}

/// The file that holds the views, and the bytes of its storages.
fn file_of(views: &[View], container: Container) -> (Vec<u8>, Vec<Vec<u8>>) {
    let reach = |at| views.iter().filter(|view| view.storage == at).map(View::reach).max().unwrap_or(0) as usize;
    let storages: Vec<Vec<u8>> =
        (0..CLASSES.len()).map(|at| (0..reach(at) * CLASSES[at].1).map(|n| (n * 37 + at) as u8).collect()).collect();
    let names: Vec<String> = (0..views.len()).map(|at| format!("t{at}")).collect();
    let keys: Vec<String> = (0..CLASSES.len()).map(|at| at.to_string()).collect();
    let mut pickle = Pickle::new().raw(b"}(");
    for (name, view) in names.iter().zip(views) {
        let (shape, stride): (Vec<i64>, Vec<i64>) = view.dims.iter().copied().unzip();
        let (class, width) = CLASSES[view.storage];
        let count = (storages[view.storage].len() / width) as i64;
        let bits: &[&str] = if view.neg { &["neg"] } else { &[] };
        let tensor = TensorOver {
            key: &keys[view.storage],
            storage: class,
            count,
            offset: view.offset,
            shape: &shape,
            stride: &stride,
            bits,
        };
        pickle = pickle.text(name).tensor(&tensor);
    }
    let pickle = pickle.raw(b"u").stop();
    let used: Vec<usize> = (0..CLASSES.len()).filter(|at| views.iter().any(|view| view.storage == *at)).collect();
    let listed: Vec<(&str, &[u8])> = used.iter().map(|at| (keys[*at].as_str(), &storages[*at][..])).collect();
    let file = match container {
        Container::Stored => archive(&pickle, &listed),
        Container::Deflated => {
            let deflated =
                |member: Member| Member::deflated(std::str::from_utf8(&member.name).unwrap(), &member.packed);
            zip(&members(&pickle, &listed).into_iter().map(deflated).collect::<Vec<_>>())
        }
        Container::BigEndian => {
            let mut members = members(&pickle, &listed);
            members.push(Member::stored("archive/byteorder", b"big"));
            zip(&members)
        }
        Container::Legacy => {
            let count = |at: &usize| (storages[*at].len() / CLASSES[*at].1) as i64;
            let listed: Vec<_> = used.iter().map(|at| (keys[*at].as_str(), count(at), &storages[*at][..])).collect();
            legacy(&legacy_object(&pickle), &listed)
        }
    };
    (file, storages)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_views_of_any_storages_load_as_their_indices_say(
        views in prop::collection::vec(view(), 1..6),
        container in prop::sample::select(vec![
            Container::Stored, Container::Deflated, Container::BigEndian, Container::Legacy,
        ]),
        route in prop::sample::select(vec![RouteChoice::Auto, RouteChoice::Direct, RouteChoice::Buffered, RouteChoice::Mapped]),
    ) {
        let (file, storages) = file_of(&views, container);
        let (_dir, path) = written(&file);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options = TransferOptions::default().route(route);
        let mut loader = Loader::new(Arc::new(CpuDevice::new()), options);
        let selected = checkpoint.select(&Selection::default()).unwrap();
        let prepared = loader.prepare(checkpoint.clone(), &selected).unwrap();
        let loaded = loader.load(&prepared).unwrap();
        for (at, view) in views.iter().enumerate() {
            let (_, width) = CLASSES[view.storage];
            let tensor = loaded.tensor(&format!("t{at}")).unwrap();
            let shape: Vec<usize> = view.dims.iter().map(|(count, _)| *count as usize).collect();
            prop_assert_eq!(tensor.shape(), &shape[..]);
            let expected = view.expected(&storages[view.storage], width, container == Container::BigEndian);
            prop_assert_eq!(tensor.bytes().unwrap(), &expected[..]);
        }
        // A mapping fails for no file; tensors that are made have none.
        let made = |why: &str| why.contains("do not lie in their file as they are loaded");
        let mapped = loaded.report.fallbacks.iter().all(|fallback| fallback.what != "mmap" || made(&fallback.why));
        prop_assert!(mapped, "{:?}", loaded.report.fallbacks);
    }

    /// One byte changed anywhere: an error or the right tensors with other bytes, never a panic.
    #[test]
    fn no_damage_panics(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>(), legacy_file in any::<bool>()) {
        let dict = state_dict(&[("a", one()), ("b", floats("1", &[3], &[1]))]);
        let (first, second) = (data(4), data(3));
        let mut file = match legacy_file {
            true => legacy(&legacy_object(&dict), &[("0", 4, &first), ("1", 3, &second)]),
            false => archive(&dict, &[("0", &first), ("1", &second)]),
        };
        let at = at.index(file.len());
        file[at] = byte;
        let (_dir, path) = written(&file);
        if Checkpoint::open(&path).is_ok() {
            let loaded = load(&path, &Options::default()).unwrap();
            prop_assert!(loaded.tensors().len() <= 2);
        }
        audit(&path).unwrap();
        file.truncate(cut.index(file.len()));
        std::fs::write(&path, &file).unwrap();
        prop_assert!(Checkpoint::open(&path).is_err());
        audit(&path).unwrap();
    }
}

#[test]
fn a_plain_tensor_streams_from_where_it_lies_and_a_made_one_is_sliced_and_compared() {
    let transposed = TensorOver { shape: &[4, 6], stride: &[1, 4], ..floats("0", &[6, 4], &[4, 1]) };
    let dict = state_dict(&[
        ("plain", floats("0", &[6, 4], &[4, 1])),
        ("turned", transposed),
        ("same", floats("0", &[6, 4], &[4, 1])),
    ]);
    let (_dir, path) = written(&archive(&dict, &[("0", &data(24))]));
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.format(), Format::TorchZip);
    assert_eq!(checkpoint.shards().iter().map(|shard| shard.derived.is_some()).collect::<Vec<_>>(), [false, true]);
    assert_eq!(checkpoint.tensor("plain").unwrap().shard(), 0);
    assert_eq!(checkpoint.shared().len(), 1);
    let rows = SliceRequest { name: "turned".into(), dim: 1, range: 2..4 };
    let options = Options::default().selection(Selection::default().slices(vec![rows]));
    let loaded = load(&path, &options).unwrap();
    let turned: Vec<f32> = loaded.tensor("turned").unwrap().as_slice::<f32>().unwrap().to_vec();
    assert_eq!(turned, [9.0, 13.0, 10.0, 14.0, 11.0, 15.0, 12.0, 16.0]);
    let at = |name: &str| checkpoint.tensor(name).unwrap();
    assert!(strict::same_bytes(&checkpoint, at("plain"), at("same")).unwrap());
    assert!(!strict::same_bytes(&checkpoint, at("plain"), at("turned")).unwrap_or(false));
    let all = checkpoint.select(&Selection::default()).unwrap();
    assert!(checkpoint.map(&all).unwrap_err().to_string().contains("cannot be viewed"));
    let only = checkpoint.select(&Selection::default().include(["plain"])).unwrap();
    checkpoint.map(&only).unwrap();
}

#[test]
fn a_file_that_changed_since_it_was_opened_is_refused_also_for_what_is_made() {
    let turned = TensorOver { shape: &[2, 2], stride: &[1, 2], ..one() };
    let (_dir, path) = written(&archive(&state_dict(&[("a", turned)]), &[("0", &data(4))]));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let selected = checkpoint.select(&Selection::default()).unwrap();
    std::fs::write(&path, archive(&state_dict(&[("a", one())]), &[("0", &data(4))])).unwrap();
    let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    assert_eq!(loader.prepare(checkpoint.clone(), &selected).unwrap_err().kind().as_str(), "changed");
}

#[test]
fn nested_objects_have_joined_names_and_a_key_chooses_among_them() {
    let pickle = Pickle::new().raw(b"}(").text("model").raw(b"}").text("w").tensor(&one()).raw(b"s");
    let pickle = pickle.text("list").raw(b"](").tensor(&floats("1", &[1], &[1])).raw(b"K\x05e");
    let file = archive(&pickle.raw(b"u").stop(), &[("0", &data(4)), ("1", &data(1))]);
    let (_dir, path) = written(&file);
    assert_eq!(loaded(&path).into_keys().collect::<Vec<_>>(), ["list.0", "model.w"]);
    let with = |key: &str| Checkpoint::open_with(&path, &OpenOptions::default().key(key));
    assert_eq!(&*with("model").unwrap().tensors()[0].name, "w");
    let error = with("ema").unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("\"model\""), "{error}");
}

/// Files of 2018 that public packages still carry: `OrderedDict([[key, value], …])` was taken for a list of lists, and
/// `lin0.model.1.weight` came out as `0.1`.
#[test]
fn what_python_2_made_a_dictionary_of_is_one() {
    let pair = |pickle: Pickle, name: &str| pickle.raw(b"](").text(name).tensor(&one()).raw(b"e");
    let begin = Pickle::new().global("collections", "OrderedDict").raw(b"](");
    let object = pair(pair(begin, "lin0.weight"), "lin1.weight").raw(b"e\x85R").stop();
    let (_dir, path) = written(&archive(&object, &[("0", &data(4))]));
    let loaded = loaded(&path);
    assert_eq!(loaded.keys().map(String::as_str).collect::<Vec<_>>(), ["lin0.weight", "lin1.weight"]);
    assert!(loaded.values().all(|bytes| *bytes == data(4)));
}

#[test]
fn two_paths_with_one_name_are_refused_naming_both() {
    let pickle = Pickle::new().raw(b"}(").text("a.b").tensor(&one());
    let pickle = pickle.text("a").raw(b"}").text("b").tensor(&floats("1", &[1], &[1])).raw(b"su");
    let (said, audit) = judged(&archive(&pickle.stop(), &[("0", &data(4)), ("1", &data(1))]));
    assert!(said.contains(r#"["a"]["b"]"#) && said.contains(r#"["a.b"]"#), "{said}");
    assert_eq!(audit.verdict, Verdict::Notice);
}

#[test]
fn what_is_no_dense_tensor_is_named_and_the_rest_is_not_lost() {
    let pickle = Pickle::new().raw(b"}(").text("w").tensor(&one());
    let pickle = pickle.text("s").global("torch._utils", "_rebuild_sparse_tensor").raw(b"(NNtR");
    let pickle = pickle.text("c").tensor(&TensorOver { storage: "ComplexDoubleStorage", ..floats("1", &[1], &[1]) });
    let (_dir, path) = written(&archive(&pickle.raw(b"u").stop(), &[("0", &data(4)), ("1", &[0; 16])]));
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.tensors().len(), 1);
    let mut skipped: Vec<_> = checkpoint.skipped().iter().map(|skipped| skipped.name.as_str()).collect();
    skipped.sort_unstable();
    assert_eq!(skipped, ["c", "s"]);
    assert!(checkpoint.warnings()[0].contains("sparse") && checkpoint.warnings()[0].contains("complex128"));
}

#[test]
fn unknown_objects_are_passed_over_only_where_that_was_asked_for_and_code_never() {
    let with = |module: &str, name: &str| {
        let pickle = Pickle::new().raw(b"}(").text("w").tensor(&one()).text("x").global(module, name).raw(b")Ru");
        archive(&pickle.stop(), &[("0", &data(4))])
    };
    let lax = OpenOptions::default().skip_unknown(true);
    let (_dir, path) = written(&with("my.models", "Net"));
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("my.models.Net") && said.contains("`OpenOptions::skip_unknown`"), "{said}");
    let checkpoint = Checkpoint::open_with(&path, &lax).unwrap();
    assert_eq!((checkpoint.tensors().len(), checkpoint.skipped()[0].name.as_str()), (1, "x"));
    std::fs::write(&path, with("posix", "system")).unwrap();
    assert!(Checkpoint::open_with(&path, &lax).unwrap_err().to_string().contains("posix.system"));
}

// ---- what is hostile

#[test]
fn each_kind_of_attack_on_the_object_is_refused_by_its_rule() {
    let plain = |shape: &'static [i64], stride: &'static [i64]| TensorOver { count: 4, shape, stride, ..one() };
    let dict = |tensor: TensorOver| state_dict(&[("a", tensor)]);
    let around = |begin: &[u8]| Pickle::new().raw(begin).raw(b"0").raw(&dict(one())[2..]).bytes();
    let table: Vec<(Vec<u8>, &str, Verdict)> = vec![
        (dict(plain(&[5], &[1])), "bounds", Verdict::Malformed),
        (dict(plain(&[2, 2], &[3, 1])), "bounds", Verdict::Malformed),
        (dict(plain(&[1 << 40, 1 << 40], &[0, 0])), "overflow", Verdict::Malformed),
        (dict(plain(&[1 << 30], &[0])), "materialise-limit", Verdict::Malformed),
        (dict(plain(&[-1], &[1])), "number-range", Verdict::Malformed),
        (dict(plain(&[2], &[-1])), "number-range", Verdict::Malformed),
        (dict(plain(&[2], &[1, 1])), "argument-shape", Verdict::Malformed),
        (dict(plain(&[1; 65], &[1; 65])), "rank-limit", Verdict::Malformed),
        (dict(TensorOver { offset: -1, ..one() }), "number-range", Verdict::Malformed),
        (dict(TensorOver { count: 5, ..one() }), "storage-size", Verdict::Malformed),
        (dict(TensorOver { key: "7", ..one() }), "record-missing", Verdict::Malformed),
        (dict(TensorOver { key: "../data.pkl", ..one() }), "record-name", Verdict::Malformed),
        (dict(TensorOver { storage: "EvilStorage", ..one() }), "global-not-allowed", Verdict::Suspicious),
        (state_dict(&[("a", one()), ("a", one())]), "duplicate-key", Verdict::Malformed),
        (around(b"cos\ngetenv\n(X\x01\x00\x00\x00atR"), "global-denied", Verdict::Dangerous),
        (around(b"(cos\ngetenv\nX\x01\x00\x00\x00ao"), "global-denied", Verdict::Dangerous),
        (
            around(b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R"),
            "argument-denied",
            Verdict::Suspicious,
        ),
        ([dict(one()), b"N.".to_vec()].concat(), "trailing-pickle", Verdict::Suspicious),
        (Pickle::new().tensor(&one()).raw(b"NNs.").bytes(), "setitem-target", Verdict::Suspicious),
        (Pickle::new().tensor(&one()).raw(b"}b.").bytes(), "build-target", Verdict::Malformed),
    ];
    for (pickle, rule, verdict) in table {
        let (said, audit) = judged(&archive(&pickle, &[("0", &data(4))]));
        assert!(said.contains(rule), "{rule}: {said}");
        assert!(audit.findings.iter().any(|finding| finding.rule == rule), "{rule}: {:?}", audit.findings);
        assert_eq!(audit.verdict, verdict, "{rule}: {:?}", audit.findings);
    }
}

#[test]
fn each_kind_of_attack_on_the_archive_is_refused_by_its_rule() {
    let evil = Pickle::new().global("os", "getenv").text("HOME").raw(b"\x85R.").bytes();
    let good = || members(&state_dict(&[("a", one())]), &[("0", &data(4))]);
    let with = |change: &dyn Fn(&mut Vec<Member>)| {
        let mut members = good();
        change(&mut members);
        zip(&members)
    };
    let edit = |at: usize, change: &dyn Fn(&mut Member)| with(&|members| change(&mut members[at]));
    let mut comment = zip(&good());
    let inner = archive(&evil, &[]);
    let end = comment.len();
    comment[end - 2..].copy_from_slice(&(inner.len() as u16).to_le_bytes());
    comment.extend(&inner);
    let mut fewer = zip(&good());
    fewer[end - 12] = 2;
    fewer[end - 14] = 2;
    let stored = |name: &str, data: &[u8]| Member::stored(name, data);
    let table: Vec<(Vec<u8>, &str, Verdict)> = vec![
        (with(&|all| all.insert(0, stored("archive/DATA.PKL", &evil))), "duplicate-entry", Verdict::Dangerous),
        (with(&|all| all.push(stored("archive/data/0", &data(5)))), "duplicate-entry", Verdict::Malformed),
        (with(&|all| all.push(stored("other/data.pkl", &evil))), "ambiguous-root", Verdict::Dangerous),
        (comment, "ambiguous-eocd", Verdict::Dangerous),
        ([evil.clone(), zip(&good())].concat(), "prefix-data", Verdict::Dangerous),
        ([zip(&good()), evil.clone()].concat(), "trailing-data", Verdict::Dangerous),
        (fewer, "eocd-mismatch", Verdict::Malformed),
        (zip(&good())[..end - 4].to_vec(), "no-eocd", Verdict::Malformed),
        (zip(&[]), "pickle-missing", Verdict::Malformed),
        (edit(1, &|member| member.local_name = b"archive/data/9".to_vec()), "header-mismatch", Verdict::Malformed),
        (edit(1, &|member| member.len = 8), "header-mismatch", Verdict::Malformed),
        (edit(1, &|member| member.flags = 1), "encrypted-flag", Verdict::Suspicious),
        (edit(1, &|member| member.flags = 0x40), "zip-flags", Verdict::Suspicious),
        (edit(1, &|member| member.method = 12), "zip-method", Verdict::Malformed),
        (edit(1, &|member| member.crc = 1), "crc", Verdict::Malformed),
        (edit(1, &|member| member.attributes = 0o120_777 << 16), "entry-type", Verdict::Suspicious),
        (edit(2, &|member| member.packed = b"x".to_vec()), "version", Verdict::Malformed),
        (with(&|all| drop(all.pop())), "version", Verdict::Malformed),
        (with(&|all| all.push(stored("archive/byteorder", b"middle"))), "byteorder", Verdict::Malformed),
        (with(&|all| all.push(stored("archive/../x", b""))), "entry-name", Verdict::Malformed),
        (with(&|all| all.push(stored("archive/data.pkl\0x", &evil))), "entry-name", Verdict::Dangerous),
        (
            with(&|all| all[1] = Member::deflated("archive/data/0", &vec![0; 32 << 20])),
            "ratio-limit",
            Verdict::Suspicious,
        ),
    ];
    for (file, rule, verdict) in table {
        let (said, audit) = judged(&file);
        // What begins as a pickle is refused as one before anyone looks for the archive behind it.
        assert!(
            said.contains(rule) || said.contains("plain pickle") || said.contains("storage-size"),
            "{rule}: {said}"
        );
        assert!(audit.findings.iter().any(|finding| finding.rule == rule), "{rule}: {:?}", audit.findings);
        assert_eq!(audit.verdict, verdict, "{rule}: {:?}", audit.findings);
    }
}

/// A hostile review found that `torch.load` took the archive in the comment, and vramp the one around it.
#[test]
fn an_archive_in_the_comment_is_refused_also_one_whose_comment_would_not_fit() {
    let inner = archive(&state_dict(&[("w", one())]), &[("0", &data(4))]);
    let mut outer = inner.clone();
    let end = outer.len() - 2; // the length of the comment
    let comment = [&b"x"[..], &inner[..inner.len() - 2], &5u16.to_le_bytes()].concat();
    outer[end..].copy_from_slice(&u16::try_from(comment.len()).unwrap().to_le_bytes());
    outer.extend_from_slice(&comment);
    let (said, audit) = judged(&outer);
    assert!(said != "opened" && audit.verdict >= Verdict::Suspicious, "{said} {audit:#?}");
}

/// A thousand unknown names, or ten thousand notices, left out the one that runs code.
#[test]
fn what_runs_code_is_said_whatever_else_there_is_to_say() {
    let unknown = (0..1500).fold(Pickle::new(), |pickle, at| pickle.global("aaa", &format!("name{at}")).raw(b"0"));
    let pickle = unknown.global("posix", "system").raw(b"0}");
    let file = archive(&pickle.stop(), &[]);
    let (_dir, path) = written(&file);
    assert_eq!(audit(&path).unwrap().verdict, Verdict::Dangerous);
    let passing = OpenOptions::default().skip_unknown(true);
    assert!(Checkpoint::open_with(&path, &passing).unwrap_err().to_string().contains("posix.system"));
}

/// 6 kB of lists in lists made gigabytes of names.
#[test]
fn names_that_multiply_are_refused_in_bounded_memory() {
    // Lists of `len` times the same, inside each other; a tensor, or an empty list, in the innermost.
    let lists = |inner: Pickle, len: usize| {
        let list = |pickle: Pickle| (0..len).fold(pickle.raw(b"]("), |pickle, _| pickle.raw(b"h\x00")).raw(b"e");
        archive(&list(list(inner.raw(b"q\x000")).raw(b"q\x000")).stop(), &[("0", &data(4))])
    };
    let (said, _) = judged(&lists(Pickle::new().tensor(&one()), 1500));
    assert!(said.contains("resource-limit") && said.contains("65552 names for the 2 things"), "{said}");
    let (said, _) = judged(&lists(Pickle::new().raw(b"]"), 1500));
    assert!(said.contains("paths"), "{said}");
    let (_dir, path) = written(&lists(Pickle::new().tensor(&one()), 100));
    assert_eq!(Checkpoint::open(&path).unwrap().tensors().len(), 10_000);
}

/// Python uses what a call is given as it is then; it was read as it is in the end, with another sign, shape, or more tensors.
#[test]
fn what_is_changed_after_the_call_that_took_it_is_refused() {
    let tensor = |size: &[u8], metadata: &[u8]| {
        let begin = Pickle::new().text("w").global("torch._utils", "_rebuild_tensor_v2").raw(b"((").text("storage");
        let begin = begin.global("torch", "FloatStorage").text("0").text("cpu").int(4).raw(b"tQK\0").raw(size);
        begin.raw(b"K\x01\x85\x89").global("collections", "OrderedDict").raw(b")R").raw(metadata).raw(b"tR")
    };
    let of = |rest: Pickle| [&b"\x80\x02}"[..], &rest.bytes()[2..], b"."].concat();
    let list = b"]q\x05K\x02a";
    let dict = b"}q\x05";
    let neg = |pickle: Pickle| pickle.raw(b"h\x05").text("neg").raw(b"\x88s0");
    let made =
        |class: &str, argument: &[u8]| Pickle::new().text("x").global("collections", class).raw(argument).raw(b"\x85R");
    let pairs = |pickle: Pickle| pickle.raw(b"](").text("a").raw(b"K\x02e");
    let honest = [
        tensor(list, dict).raw(b"s"),
        neg(tensor(b"K\x04\x85", dict).raw(b"0}q\x05")).raw(b"0"), // another dictionary
        made("OrderedDict", &[&b"]q\x05"[..], &pairs(Pickle::new()).bytes()[2..], b"a"].concat()).raw(b"s"),
    ];
    let changed = [
        neg(tensor(b"K\x04\x85", dict).raw(b"s")),
        tensor(list, b"}").raw(b"sh\x05K\x01a0"),
        pairs(made("OrderedDict", b"]q\x05").raw(b"sh\x05")).raw(b"a0"),
        made("deque", b"]q\x05").raw(b"sh\x05K\x01a0"),
        made("OrderedDict", b"](]q\x05(X\x01\0\0\0aK\x01ee").raw(b"sh\x05K\x02a0"),
        Pickle::new().text("x").global("argparse", "Namespace").raw(b")\x81}q\x05bsh\x05").text("y").raw(b"K\x01s0"),
    ];
    for (is_changed, pickles) in [(false, &honest[..]), (true, &changed)] {
        for pickle in pickles {
            let (said, audit) = judged(&archive(&of(pickle.clone()), &[("0", &data(4))]));
            let found = audit.findings.iter().any(|finding| finding.rule == "argument-changed");
            assert_eq!(found, is_changed, "{}: {said} {:?}", pickle.clone().bytes().escape_ascii(), audit.findings);
            assert!(!is_changed || said.contains("argument-changed"), "{said}");
        }
    }
}

/// Older files have storages that are a part of another one; in an archive torch does not read them either.
#[test]
fn an_archive_has_no_storages_within_storages() {
    let part = b"(X\x01\0\0\0vK\x00K\x02ttQ";
    let storage = Pickle::new().raw(b"(").text("storage").global("torch", "FloatStorage").text("0").text("cpu").int(4);
    let tensor = Pickle::new()
        .text("w")
        .global("torch._utils", "_rebuild_tensor_v2")
        .raw(b"(")
        .raw(&storage.raw(part).bytes()[2..]);
    let tensor = tensor.raw(b"K\0K\x02\x85K\x01\x85\x89").global("collections", "OrderedDict").raw(b")RtR");
    let pickle = [&b"\x80\x02}"[..], &tensor.bytes()[2..], b"s."].concat();
    let (said, _) = judged(&archive(&pickle, &[("0", &data(4))]));
    assert!(said.contains("part of another one"), "{said}");
}

/// `deque([a, b], 1)` is `b`.
#[test]
fn a_deque_keeps_no_more_than_it_says() {
    let tensors = |pickle: Pickle| {
        ["0", "1"].iter().fold(pickle.raw(b"]("), |pickle, key| pickle.tensor(&floats(key, &[1], &[1]))).raw(b"e")
    };
    let deque = |most: i64| tensors(Pickle::new().global("collections", "deque").raw(b"(")).int(most).raw(b"tR").stop();
    let storages = [("0", &data(1)[..]), ("1", &data(2)[4..])];
    let (_dir, path) = written(&archive(&deque(1), &storages));
    assert_eq!(loaded(&path), std::collections::BTreeMap::from([("0".to_owned(), data(2)[4..].to_vec())]));
    let (_dir, path) = written(&archive(&deque(5), &storages));
    assert_eq!(loaded(&path).len(), 2);
}

#[test]
fn other_containers_are_named_for_what_they_are() {
    let script = {
        let mut members = members(&state_dict(&[("a", one())]), &[("0", &data(4))]);
        members.push(Member::stored("archive/constants.pkl", b"\x80\x02)."));
        zip(&members)
    };
    let tar = [&[b'a'; 257][..], b"ustar\0", &[0; 249]].concat();
    for (file, word, format) in [
        (script, "TorchScript", "torchscript"),
        (tar, "tar archive", "tar"),
        (Pickle::new().raw(b"}").stop(), "plain pickle", "pickle"),
        (b"cos\ngetenv\n(S'HOME'\ntR.".to_vec(), "", "pickle"),
    ] {
        let (said, audit) = judged(&file);
        assert!(said != "opened" && said.contains(word), "{word}: {said}");
        assert_eq!(audit.format, format);
    }
}

#[test]
fn a_pickle_that_announces_much_or_is_all_one_opcode_takes_little_memory_and_ends() {
    watched(|| {
        for (pickle, rule) in [
            (b"\x80\x02B\xff\xff\xff\xff".to_vec(), "truncated"),
            (vec![b'N'; 8 << 20], "resource-limit"),
            (vec![b']'; 8 << 20], "resource-limit"),
            ([&b"\x80\x02"[..], &vec![b'('; 8 << 20]].concat(), "resource-limit"),
        ] {
            let (said, _) = judged(&archive(&pickle, &[]));
            assert!(said.contains(rule), "{rule}: {said}");
        }
    });
}

// ---- folders

#[test]
fn a_set_of_bin_files_is_one_checkpoint_and_the_index_decides() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let turned = TensorOver { shape: &[2, 2], stride: &[1, 2], ..one() };
    put("pytorch_model-00001-of-00002.bin", &archive(&state_dict(&[("a", turned)]), &[("0", &data(4))]));
    put(
        "pytorch_model-00002-of-00002.bin",
        &archive(&state_dict(&[("b", one()), ("c", floats("1", &[1], &[1]))]), &[("0", &data(4)), ("1", &data(1))]),
    );
    put("training_args.bin", b"anything");
    assert_eq!(loaded(dir.path()).into_keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    let index = r#"{"weight_map":{"a":"pytorch_model-00001-of-00002.bin","b":"pytorch_model-00002-of-00002.bin"}}"#;
    put("pytorch_model.bin.index.json", index.as_bytes());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensors().len(), 2);
    assert!(checkpoint.warnings().iter().any(|warning| warning.contains("\"c\"")), "{:?}", checkpoint.warnings());
    assert_eq!(
        loaded(dir.path())["a"],
        [data(4)[..4].to_vec(), data(4)[8..12].to_vec(), data(4)[4..8].to_vec(), data(4)[12..].to_vec()].concat()
    );
    put("pytorch_model.bin.index.json", r#"{"weight_map":{"a":"../outside.bin"}}"#.as_bytes());
    assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("../outside.bin"));
    std::fs::remove_file(dir.path().join("pytorch_model.bin.index.json")).unwrap();
    put("pytorch_model-00002-of-00002.bin", &archive(&state_dict(&[("a", one())]), &[("0", &data(4))]));
    assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("in more than one file"));
}

const ROOM: &str = "torch.distributed.checkpoint.metadata";

/// `.metadata` of one tensor in two boxes of two rows each.
fn metadata(file: &str, places: [(i64, i64); 2]) -> Vec<u8> {
    let object = |pickle: Pickle, class: &str| pickle.global(ROOM, class).raw(b")\x81}(");
    let size = |pickle: Pickle, numbers: &[i64]| pickle.global("torch", "Size").ints(numbers).raw(b"\x85R");
    let mut pickle = object(Pickle::new(), "Metadata").text("state_dict_metadata").raw(b"}").text("w");
    pickle = object(pickle, "TensorStorageMetadata").text("properties");
    pickle =
        pickle.global(ROOM, "TensorProperties").raw(b")\x81(").global("torch", "float32").raw(b"\x89tb").text("size");
    pickle = size(pickle, &[4, 2]).text("chunks").raw(b"](");
    for row in [0, 2] {
        pickle = size(object(pickle, "ChunkStorageMetadata").text("offsets"), &[row, 0]).text("sizes");
        pickle = size(pickle, &[2, 2]).raw(b"ub");
    }
    pickle = pickle.raw(b"eubs").text("storage_data").raw(b"}(");
    for (row, (offset, len)) in [0, 2].into_iter().zip(places) {
        pickle = object(pickle, "MetadataIndex").text("fqn").text("w").text("offset");
        pickle = size(pickle, &[row, 0]).text("index").raw(b"Nub");
        pickle = pickle.global("torch.distributed.checkpoint.filesystem", "_StorageInfo").raw(b")\x81}(");
        pickle = pickle.text("relative_path").text(file).text("offset").int(offset).text("length").int(len).raw(b"ub");
    }
    pickle.raw(b"uub.").bytes()
}

/// An item may lie anywhere in its file, also within another one, and is unpickled from there.
#[test]
fn the_audit_looks_at_every_item_of_a_distributed_checkpoint_wherever_it_lies() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let evil = archive(&Pickle::new().global("os", "getenv").text("HOME").raw(b"\x85R.").bytes(), &[]);
    let outer = archive(&Pickle::new().tensor(&one()).stop(), &[("0", &evil)]);
    let at = outer.windows(evil.len()).position(|part| part == evil).unwrap() as i64;
    put("__0_0.distcp", &[&outer[..], &outer].concat());
    let audited = |places| {
        put(".metadata", &metadata("__0_0.distcp", places));
        audit(dir.path().join("__0_0.distcp")).unwrap()
    };
    let (whole, inner) = (outer.len() as i64, evil.len() as i64);
    let both = audited([(0, whole), (whole, whole)]);
    assert!(both.globals.iter().all(|global| global.module != "os"), "{:?}", both.findings);
    let hidden = audited([(0, whole), (whole + at, inner)]);
    assert_eq!((hidden.format, hidden.verdict), ("torch-zip", Verdict::Dangerous), "{:?}", hidden.findings);
    let member = hidden.findings[0].member.as_deref();
    assert_eq!(member, Some(&*format!("byte {}!archive/data.pkl", whole + at)));
    let cut = audited([(0, whole), (whole, whole + 1)]);
    assert!(cut.findings.iter().any(|finding| finding.rule == "dcp-metadata"), "{:?}", cut.findings);
    // Read from its end, the file is another archive.
    put("__0_0.distcp", &[&outer[..], &evil].concat());
    let spans = audited([(0, whole + inner), (0, whole)]);
    assert!(spans.findings.iter().any(|finding| finding.rule == "prefix-data"), "{:?}", spans.findings);
    // What one rank has is described by a file of its own, and any file may hold an item.
    put("notes.txt", &[b"text ", &evil[..], b" text"].concat());
    std::fs::remove_file(dir.path().join(".metadata")).unwrap();
    put("__3.metadata", &metadata("notes.txt", [(5, inner), (5, inner)]));
    let notes = audit(dir.path().join("notes.txt")).unwrap();
    assert_eq!(notes.verdict, Verdict::Dangerous, "{:?}", notes.findings);
    std::fs::remove_file(dir.path().join("__3.metadata")).unwrap();
    put(".metadata", &metadata("__0_0.distcp", [(0, whole), (0, whole)]));
    let described = || audit(dir.path().join(".metadata")).unwrap();
    assert_eq!(described().verdict, Verdict::Clean, "{:?}", described().findings);
    put(".metadata", &metadata("../elsewhere", [(0, 1), (1, 1)]));
    assert!(described().findings[0].what.contains("../elsewhere"), "{:?}", described().findings);
}

#[test]
fn a_distributed_checkpoint_is_put_together_from_boxes_and_no_path_leaves_it() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let item = |values: &[u8]| archive(&Pickle::new().tensor(&one()).stop(), &[("0", values)]);
    let (first, second) = (item(&data(8)[..16]), item(&data(8)[16..]));
    let (a, b) = (first.len() as i64, second.len() as i64);
    put("__0_0.distcp", &[first, second].concat());
    put(".metadata", &metadata("__0_0.distcp", [(0, a), (a, b)]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.format(), &*checkpoint.tensors()[0].shape), (Format::TorchDcp, &[4, 2][..]));
    assert_eq!(loaded(dir.path())["w"], data(8));
    put(".metadata", &metadata("__0_0.distcp", [(0, a), (0, a)]));
    assert_eq!(loaded(dir.path())["w"], [&data(8)[..16], &data(8)[..16]].concat());
    put(".metadata", &metadata("__0_0.distcp", [(0, a), (a, b + 1)]));
    assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("truncated"));
    put(".metadata", &metadata("../__0_0.distcp", [(0, a), (a, b)]));
    assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("../__0_0.distcp"));
    put(".metadata", &Pickle::new().global("os", "getenv").text("HOME").raw(b"\x85R.").bytes());
    assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("os.getenv"));
}
