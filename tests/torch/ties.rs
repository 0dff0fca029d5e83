//! Tensors of one file over the same bytes: one place, several names; and right again where only one is taken, or each otherwise.

use std::ops::Range;

use vramp::Float;
use vramp::checkpoint::TensorParallel;
use vramp::durable::FileStore;
use vramp::load::{Convert, Loaded};
use vramp::plan::LoadPlan;
use vramp::save::{ConvertOptions, Target, Ties, convert};

use super::*;

const SHAPE: [i64; 2] = [6, 4];
const BYTES: u64 = 6 * 4 * 4;

fn whole() -> TensorOver<'static> {
    floats("0", &SHAPE, &[4, 1])
}

fn containers() -> [Container; 4] {
    [Container::Stored, Container::Deflated, Container::BigEndian, Container::Legacy]
}

/// A file of tensors over the storage "0" of 24 numbers.
fn file(container: Container, tensors: &[(&str, TensorOver)]) -> Vec<u8> {
    let pickle = state_dict(tensors);
    let values = data(24);
    match container {
        Container::Stored => archive(&pickle, &[("0", &values)]),
        Container::Legacy => legacy(&legacy_object(&pickle), &[("0", 24, &values)]),
        Container::Deflated => {
            let mut members = members(&pickle, &[]);
            members.push(Member::deflated("archive/data/0", &values));
            zip(&members)
        }
        Container::BigEndian => {
            let swapped: Vec<u8> = values.chunks(4).flat_map(|number| number.iter().rev().copied()).collect();
            let mut members = members(&pickle, &[("0", &swapped)]);
            members.push(Member::stored("archive/byteorder", b"big"));
            zip(&members)
        }
    }
}

fn loaded_with(path: &Path, selection: Selection, convert: Option<Convert>) -> (LoadPlan, Loaded) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let options = TransferOptions::default().convert(convert);
    let mut loader = Loader::new(Arc::new(CpuDevice::new()), options);
    let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(&selection).unwrap()).unwrap();
    let loaded = loader.load(&prepared).unwrap();
    (prepared.plan, loaded)
}

fn place(loaded: &Loaded, name: &str) -> Range<*const u8> {
    loaded.tensor(name).unwrap().bytes().unwrap().as_ptr_range()
}

fn bytes<'a>(loaded: &'a Loaded, name: &str) -> &'a [u8] {
    loaded.tensor(name).unwrap().bytes().unwrap()
}

fn apart(a: &Range<*const u8>, b: &Range<*const u8>) -> bool {
    a.end <= b.start || b.end <= a.start
}

#[test]
fn tensors_over_the_same_bytes_have_one_place_and_all_their_names() {
    let other_shape = TensorOver { shape: &[24], stride: &[1], ..whole() };
    let part = TensorOver { shape: &[3, 4], stride: &[4, 1], ..whole() };
    let turned = TensorOver { shape: &[4, 6], stride: &[1, 4], ..whole() };
    let tensors = [
        ("embed", whole()),
        ("head", whole()),
        ("flat", other_shape),
        ("part", part),
        ("turned", turned.clone()),
        ("turned_again", turned),
    ];
    for container in containers() {
        let (_dir, path) = written(&file(container, &tensors));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let ties: Vec<_> = checkpoint.ties().into_iter().map(|tie| (tie.alias, tie.target)).collect();
        let expected = [("flat", "embed"), ("head", "embed"), ("turned_again", "turned")];
        assert_eq!(ties, expected.map(|(alias, target)| (alias.to_owned(), target.to_owned())), "{container:?}");
        assert_eq!(checkpoint.total_bytes(), 2 * BYTES + BYTES / 2);
        assert!(strict::same_bytes(&checkpoint, &checkpoint.tensors()[0], &checkpoint.tensors()[1]).unwrap());

        let (plan, loaded) = loaded_with(&path, Selection::default(), None);
        let (embed, part) = (place(&loaded, "embed"), place(&loaded, "part"));
        assert!(embed == place(&loaded, "head") && embed == place(&loaded, "flat") && apart(&embed, &part));
        assert_eq!(place(&loaded, "turned"), place(&loaded, "turned_again"));
        assert!(apart(&embed, &place(&loaded, "turned")) && apart(&part, &place(&loaded, "turned")));
        assert_eq!(bytes(&loaded, "head"), data(24), "{container:?}");
        assert_eq!(bytes(&loaded, "part"), &data(24)[..48]);
        assert_eq!(loaded.tensor("flat").unwrap().shape(), [24]);
        let report = &loaded.report;
        assert_eq!((report.tensors, report.names, report.bytes), (3, 6, 2 * BYTES + BYTES / 2));
        assert!(plan.arena_bytes <= report.bytes + 3 * 64, "{} bytes of memory, {container:?}", plan.arena_bytes);
    }
}

#[test]
fn one_name_alone_takes_its_bytes_and_no_more() {
    let tensors = [("embed", whole()), ("head", whole())];
    for container in containers() {
        let (_dir, path) = written(&file(container, &tensors));
        for name in ["embed", "head"] {
            let only = Selection::default().include([name]);
            let (plan, loaded) = loaded_with(&path, only, None);
            assert_eq!((bytes(&loaded, name), loaded.tensors().len()), (&data(24)[..], 1));
            assert!(plan.arena_bytes <= BYTES + 64, "{container:?}");
        }
    }
}

#[test]
fn cuts_that_are_the_same_stay_one_and_others_are_apart() {
    let rows = |name: &str, range| SliceRequest { name: name.into(), dim: 0, range };
    let tensors = [("embed", whole()), ("head", whole())];
    for container in containers() {
        let (_dir, path) = written(&file(container, &tensors));
        let cut = |slices| loaded_with(&path, Selection::default().slices(slices), None).1;
        let same = cut(vec![rows("embed", 1..3), rows("head", 1..3)]);
        assert_eq!(place(&same, "embed"), place(&same, "head"));
        assert_eq!(bytes(&same, "head"), &data(24)[16..48]);
        for slices in [vec![rows("embed", 0..4), rows("head", 2..6)], vec![rows("head", 2..6)]] {
            let loaded = cut(slices.clone());
            assert!(apart(&place(&loaded, "embed"), &place(&loaded, "head")), "{container:?}");
            assert_eq!(bytes(&loaded, "head"), &data(24)[32..]);
            assert_eq!(bytes(&loaded, "embed"), &data(24)[..if slices.len() == 2 { 64 } else { 96 }]);
        }
        // One is cut by rows, the other by columns, for the second of two ranks.
        let dims = vec![("embed".to_owned(), 0), ("head".to_owned(), 1)];
        let parallel = TensorParallel { rank: 1, world: 2, dims };
        let ranked = Selection::default().tensor_parallel(parallel);
        let (_, loaded) = loaded_with(&path, ranked, None);
        assert_eq!(bytes(&loaded, "embed"), &data(24)[48..]);
        let columns: Vec<u8> = data(24).chunks(16).flat_map(|row| row[8..].to_vec()).collect();
        assert_eq!(bytes(&loaded, "head"), columns, "{container:?}");
    }
}

#[test]
fn casts_that_are_the_same_are_made_once() {
    let to_bf16 = Convert::to(Float::BF16);
    let (_dir, path) = written(&file(Container::Stored, &[("embed", whole()), ("head", whole())]));
    let (plan, loaded) = loaded_with(&path, Selection::default(), Some(to_bf16));
    assert_eq!(place(&loaded, "embed"), place(&loaded, "head"));
    // Numbers up to 24 have their upper half in BF16 exactly.
    let expected: Vec<u8> = data(24).chunks(4).flat_map(|number| number[2..].to_vec()).collect();
    assert_eq!((bytes(&loaded, "head"), loaded.report.bytes), (&expected[..], BYTES / 2));
    assert!(plan.arena_bytes <= BYTES / 2 + 64);
}

/// FP8 weights over the same bytes that have scales of their own are different weights once they are multiplied.
#[test]
fn weights_with_scales_of_their_own_are_apart_once_they_are_multiplied() {
    let quantised = |pickle: Pickle, name: &str| {
        let pickle = pickle.text(name).global("torch._utils", "_rebuild_tensor_v3").raw(b"(");
        let pickle = pickle.storage("UntypedStorage", "0", 4).int(0).ints(&[2, 2]).ints(&[2, 1]).raw(b"\x89");
        pickle.ordered_dict().global("torch", "float8_e4m3fn").raw(b"tR")
    };
    let scales =
        |first: i64| TensorOver { count: 2, offset: first, shape: &[1, 1], stride: &[1, 1], ..floats("1", &[2], &[1]) };
    let begin = quantised(quantised(Pickle::new().raw(b"}("), "a.weight"), "b.weight");
    let pickle = begin.text("a.weight_scale").tensor(&scales(0)).text("b.weight_scale").tensor(&scales(1)).raw(b"u");
    // 1, 2, 0.5 and -1 in E4M3; the scales are 1 and 2.
    let (_dir, path) = written(&archive(&pickle.stop(), &[("0", &[0x38, 0x40, 0x30, 0xb8]), ("1", &data(2))]));
    let (_, stored) = loaded_with(&path, Selection::default(), None);
    assert_eq!(place(&stored, "a.weight"), place(&stored, "b.weight"));
    let to_f32 = Convert::to(Float::F32);
    let (_, loaded) = loaded_with(&path, Selection::default(), Some(to_f32));
    let values = |name: &str| loaded.tensor(name).unwrap().as_slice::<f32>().unwrap().to_vec();
    assert_eq!(values("a.weight"), [1.0, 2.0, 0.5, -1.0]);
    assert_eq!(values("b.weight"), [2.0, 4.0, 1.0, -2.0]);
    // Nor is one recorded as a further name of the other.
    let target = Target::of(path.with_file_name("out.safetensors"));
    let transfer = TransferOptions::default().convert(to_f32);
    let options = ConvertOptions::default().transfer(transfer).ties(Ties::Alias);
    let converted = convert(&Checkpoint::open(&path).unwrap(), &FileStore, &target, &options).unwrap();
    assert!(converted.ties.is_empty(), "{:?}", converted.ties);
    let (_, written) = loaded_with(target.path(), Selection::default(), None);
    assert_eq!(bytes(&written, "b.weight"), bytes(&loaded, "b.weight"));
}

#[test]
fn memory_that_exists_gets_each_name_where_it_was_put() {
    let (_dir, path) = written(&file(Container::Stored, &[("embed", whole()), ("head", whole())]));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    let put = |embed: u64, head: u64| {
        let places = [("embed".into(), embed), ("head".into(), head)].into();
        loader.prepare_into(checkpoint.clone(), &selected, &places).map(|prepared| prepared.plan)
    };
    assert_eq!(put(0, 128).unwrap().tensor_bytes(), 2 * BYTES);
    assert_eq!(put(64, 64).unwrap().tensor_bytes(), BYTES);
    assert!(put(0, 64).unwrap_err().to_string().contains("would lie at byte 64"));
}

#[test]
fn ties_within_the_files_of_a_folder_and_of_a_distributed_checkpoint_are_ties() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    put("pytorch_model-00001-of-00002.bin", &file(Container::Stored, &[("other", whole())]));
    put("pytorch_model-00002-of-00002.bin", &file(Container::Deflated, &[("embed", whole()), ("head", whole())]));
    let (_, loaded) = loaded_with(dir.path(), Selection::default(), None);
    assert_eq!((loaded.report.tensors, loaded.report.names), (2, 3));
    assert_eq!(place(&loaded, "embed"), place(&loaded, "head"));
    assert_eq!(bytes(&loaded, "other"), data(24));

    for turned in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let one = TensorOver { stride: if turned { &[1, 2] } else { &[2, 1] }, ..one() };
        let item = archive(&Pickle::new().tensor(&one).stop(), &[("0", &data(4))]);
        std::fs::write(dir.path().join(".metadata"), two_names(item.len() as i64)).unwrap();
        std::fs::write(dir.path().join("__0_0.distcp"), item).unwrap();
        let (_, loaded) = loaded_with(dir.path(), Selection::default(), None);
        assert_eq!((loaded.report.tensors, loaded.report.names), (1, 2));
        assert_eq!(place(&loaded, "embed"), place(&loaded, "head"));
        let sums = Checkpoint::open(dir.path()).unwrap().check_sums(&|| Ok(())).unwrap();
        assert_eq!((sums.same, sums.absent), (3, 0));
    }
}

/// `.metadata` of two tensors that are the one item of a file.
fn two_names(len: i64) -> Vec<u8> {
    let object = |pickle: Pickle, class: &str| pickle.global(ROOM, class).raw(b")\x81}(");
    let size = |pickle: Pickle, numbers: &[i64]| pickle.global("torch", "Size").ints(numbers).raw(b"\x85R");
    let mut pickle = object(Pickle::new(), "Metadata").text("state_dict_metadata").raw(b"}(");
    for name in ["embed", "head"] {
        pickle = object(pickle.text(name), "TensorStorageMetadata").text("properties");
        pickle = pickle.global(ROOM, "TensorProperties").raw(b")\x81(").global("torch", "float32").raw(b"\x89tb");
        pickle = size(pickle.text("size"), &[2, 2]).text("chunks").raw(b"](");
        pickle = size(object(pickle, "ChunkStorageMetadata").text("offsets"), &[0, 0]).text("sizes");
        pickle = size(pickle, &[2, 2]).raw(b"ubeub");
    }
    pickle = pickle.raw(b"u").text("storage_data").raw(b"}(");
    for name in ["embed", "head"] {
        pickle = size(object(pickle, "MetadataIndex").text("fqn").text(name).text("offset"), &[0, 0]).raw(b"ub");
        pickle = pickle.global("torch.distributed.checkpoint.filesystem", "_StorageInfo").raw(b")\x81}(");
        pickle = pickle.text("relative_path").text("__0_0.distcp").text("offset").int(0).text("length").int(len);
        pickle = pickle.raw(b"ub");
    }
    pickle.raw(b"uub.").bytes()
}
