//! Files that ranks of a parallel program wrote, put together: each layout against an oracle that cuts a whole tensor by hand, and each
//! way in which the files of a save do not fit.

use vramp::error::Error;

use super::*;

/// A tensor that is cut: its shape, and how.
#[derive(Clone)]
struct Spec<'a> {
    name: &'a str,
    shape: &'a [i64],
    placements: &'a [Place],
}

#[derive(Clone, Copy)]
enum Place {
    Replicate,
    Shard(i64),
    Strided(i64, i64),
    Partial,
}
use Place::{Partial, Replicate, Shard, Strided};

/// How a mesh is written: by PyTorch up to 2.8, and later.
#[derive(Clone, Copy, PartialEq)]
enum Age {
    Old,
    New,
}

/// A mesh, row-major.
#[derive(Clone, Copy)]
struct Mesh<'a> {
    shape: &'a [i64],
    ranks: &'a [i64],
    age: Age,
}

const TENSOR: &str = "torch.distributed.tensor";

fn dict(pickle: Pickle, pairs: impl IntoIterator<Item = (&'static str, Box<dyn FnOnce(Pickle) -> Pickle>)>) -> Pickle {
    pairs.into_iter().fold(pickle.raw(b"}("), |pickle, (key, value)| value(pickle.text(key))).raw(b"u")
}

fn boxed(f: impl FnOnce(Pickle) -> Pickle + 'static) -> Box<dyn FnOnce(Pickle) -> Pickle> {
    Box::new(f)
}

fn mesh(pickle: Pickle, mesh: Mesh, coordinate: &[i64]) -> Pickle {
    let pickle = pickle.global("torch.distributed.device_mesh", "DeviceMesh").raw(b")\x81");
    let (shape, ranks, coordinate) = (mesh.shape.to_vec(), mesh.ranks.to_vec(), coordinate.to_vec());
    let listed = ranks.clone();
    let count = i64::try_from(ranks.len()).unwrap();
    let mut stride: Vec<i64> = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        stride[at - 1] = stride[at] * shape[at];
    }
    let pickle = match mesh.age {
        Age::Old => dict(
            pickle,
            [
                ("device_type", boxed(|p| p.text("cuda"))),
                (
                    "mesh",
                    boxed(move |p| {
                        let over = TensorOver {
                            key: "m",
                            storage: "LongStorage",
                            count,
                            offset: 0,
                            shape: &shape,
                            stride: &stride,
                            bits: &[],
                        };
                        p.tensor(&over)
                    }),
                ),
                ("_flatten_mesh_list", boxed(move |p| p.ints(&listed))),
            ],
        ),
        Age::New => dict(
            pickle,
            [
                (
                    "_layout",
                    boxed(move |p| {
                        let p = p
                            .global("torch.distributed._mesh_layout", "_MeshLayout")
                            .raw(b")\x81}")
                            .text("axes")
                            .raw(b"(");
                        let axis = |p: Pickle, (shape, stride): (&i64, &i64)| {
                            let p = p.global("torch.distributed._mesh_layout", "_FlatLayout").raw(b")\x81}");
                            p.text("shape")
                                .ints(&[*shape])
                                .raw(b"s")
                                .raw(b"}")
                                .text("stride")
                                .ints(&[*stride])
                                .raw(b"s")
                                .raw(b"\x86b")
                        };
                        shape.iter().zip(&stride).fold(p, axis).raw(b"tsb")
                    }),
                ),
                ("_flatten_rank_map", boxed(move |p| p.ints(&listed))),
                ("_coordinate_on_dim", boxed(move |p| p.ints(&coordinate))),
            ],
        ),
    };
    pickle.raw(b"b")
}

fn placement(pickle: Pickle, place: Place) -> Pickle {
    let (name, fields): (_, &[(&str, i64)]) = match place {
        Replicate => ("Replicate", &[]),
        Shard(dim) => ("Shard", &[("dim", dim)]),
        Strided(dim, factor) => ("_StridedShard", &[("dim", dim), ("split_factor", factor)]),
        Partial => ("Partial", &[]),
    };
    let pickle = pickle.global(&format!("{TENSOR}.placement_types"), name).raw(b")\x81}");
    fields.iter().fold(pickle, |p, (key, number)| p.text(key).int(*number).raw(b"s")).raw(b"b")
}

/// A DTensor whose part is the storage of its name.
fn dtensor(pickle: Pickle, spec: &Spec, part: &[i64], of: Mesh, coordinate: &[i64]) -> Pickle {
    let whole_stride = strides(spec.shape);
    let pickle = pickle.global("torch._tensor", "_rebuild_from_type_v2").raw(b"(");
    let pickle = pickle.global("torch._utils", "_rebuild_wrapper_subclass").global(TENSOR, "DTensor").raw(b"(");
    let pickle =
        pickle.global(TENSOR, "DTensor").global("torch", "float32").ints(spec.shape).ints(&whole_stride).int(0);
    let pickle = pickle.raw(b"NN\x89t(N}(").text("_local_tensor").tensor(&over(spec.name, part));
    let pickle = pickle.text("_spec").global(&format!("{TENSOR}._dtensor_spec"), "DTensorSpec").raw(b")\x81}(");
    let pickle = mesh(pickle.text("mesh"), of, coordinate).text("placements").raw(b"(");
    let pickle = spec.placements.iter().fold(pickle, |pickle, place| placement(pickle, *place)).raw(b"t");
    let pickle = pickle.text("tensor_meta").global(&format!("{TENSOR}._dtensor_spec"), "TensorMeta").raw(b"(");
    let pickle = pickle.global("torch", "Size").raw(b"(").ints(spec.shape).raw(b"tR").ints(&whole_stride);
    pickle.global("torch", "float32").raw(b"t\x81").raw(b"ubu\x00".strip_suffix(b"\x00").unwrap()).raw(b"ttR")
}

fn strides(shape: &[i64]) -> Vec<i64> {
    let mut stride = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        stride[at - 1] = stride[at] * shape[at];
    }
    stride
}

fn over<'a>(key: &'a str, shape: &'a [i64]) -> TensorOver<'a> {
    // Leaked: a few bytes in a test.
    let stride: &'static [i64] = Vec::leak(strides(shape));
    TensorOver { key, storage: "FloatStorage", count: shape.iter().product(), offset: 0, shape, stride, bits: &[] }
}

/// The whole of a tensor: its elements' numbers, times something of its name.
fn whole(name: &str, shape: &[i64]) -> Vec<f32> {
    let seed = name.bytes().map(f32::from).sum::<f32>();
    (0..shape.iter().product::<i64>()).map(|number| seed + number as f32).collect()
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Which indices along each dimension a place of the mesh has: lists of them, cut as `torch.chunk` does. It knows no offsets.
fn indices(spec: &Spec, mesh: &[i64], coordinate: &[i64]) -> Vec<Vec<i64>> {
    let mut along: Vec<Vec<i64>> = spec.shape.iter().map(|len| (0..*len).collect()).collect();
    for (at, place) in spec.placements.iter().enumerate() {
        let (count, number) = (mesh[at] as usize, coordinate[at] as usize);
        match *place {
            Shard(dim) => {
                let all = &mut along[dim as usize];
                let chunk = all.len().div_ceil(count).max(1);
                *all = all.chunks(chunk).nth(number).unwrap_or_default().to_vec();
            }
            // PyTorch's own definition: cut into factor times count, and each takes every count-th.
            Strided(dim, factor) => {
                let all = &mut along[dim as usize];
                let chunk = all.len().div_ceil(count * factor as usize).max(1);
                *all = all.chunks(chunk).skip(number).step_by(count).flatten().copied().collect();
            }
            Replicate | Partial => {}
        }
    }
    along
}

/// The elements of a tensor at those indices.
fn taken(numbers: &[f32], shape: &[i64], along: &[Vec<i64>]) -> Vec<f32> {
    let places = along.iter().zip(shape).fold(vec![0], |places: Vec<i64>, (indices, len)| {
        places.iter().flat_map(|place| indices.iter().map(move |index| place * len + index)).collect()
    });
    places.iter().map(|place| numbers[*place as usize]).collect()
}

fn coordinate(mesh: &[i64], mut number: i64) -> Vec<i64> {
    let mut place: Vec<i64> = mesh
        .iter()
        .rev()
        .map(|len| {
            let at = number % len;
            number /= len;
            at
        })
        .collect();
    place.reverse();
    place
}

/// The file of one rank: cut tensors, and one that is not.
fn file(specs: &[Spec], of: Mesh, rank: i64, plain: &[f32]) -> Vec<u8> {
    let (pickle, storages) = parts_of(specs, of, rank, plain);
    let storages: Vec<(&str, &[u8])> = storages.iter().map(|(key, data)| (key.as_str(), data.as_slice())).collect();
    archive(&pickle, &storages)
}

/// Its pickle and its storages.
fn parts_of(specs: &[Spec], of: Mesh, rank: i64, plain: &[f32]) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let at = of.ranks.iter().position(|of_mesh| *of_mesh == rank).unwrap();
    let place = coordinate(of.shape, at as i64);
    let mut pickle = Pickle::new().raw(b"}(");
    let mut storages = vec![("m".to_owned(), of.ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect::<Vec<u8>>())];
    for spec in specs {
        let along = indices(spec, of.shape, &place);
        let part: Vec<i64> = along.iter().map(|indices| indices.len() as i64).collect();
        pickle = dtensor(pickle.text(spec.name), spec, &part, of, &place);
        storages.push((spec.name.to_owned(), bytes_of(&taken(&whole(spec.name, spec.shape), spec.shape, &along))));
    }
    let shape = [plain.len() as i64];
    pickle = pickle.text("plain").tensor(&over("p", &shape));
    storages.push(("p".to_owned(), bytes_of(plain)));
    (pickle.raw(b"u").stop(), storages)
}

fn name(world: usize, rank: i64) -> String {
    format!("model_world_size_{world}_rank_{rank}.pt")
}

fn folder(specs: &[Spec], of: Mesh) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for rank in of.ranks {
        std::fs::write(dir.path().join(name(of.ranks.len(), *rank)), file(specs, of, *rank, &[7.0, 8.0])).unwrap();
    }
    dir
}

fn refused(dir: &Path) -> String {
    let error = Checkpoint::open(dir).unwrap_err();
    assert_eq!(error.exit_code(), if matches!(error, Error::NotFound { .. }) { 4 } else { 3 }, "{error}");
    error.to_string()
}

#[test]
fn every_layout_is_put_together_to_what_was_cut() {
    let spec = |name, shape, placements| Spec { name, shape, placements };
    type Layout<'a> = (&'a [i64], &'a [i64], Vec<Spec<'a>>);
    let layouts: Vec<Layout> = vec![
        (
            &[4],
            &[0, 1, 2, 3],
            vec![
                spec("even", &[8, 3], &[Shard(0)]),
                spec("columns", &[3, 8], &[Shard(1)]),
                spec("uneven", &[9, 2], &[Shard(0)]),
                spec("last is empty", &[6], &[Shard(0)]),
                spec("fewer than ranks", &[2, 5], &[Shard(0)]),
                spec("middle", &[2, 7, 3], &[Shard(1)]),
                spec("replicated", &[3, 3], &[Replicate]),
                spec("scalar", &[], &[Replicate]),
                spec("nothing", &[0, 4], &[Shard(0)]),
            ],
        ),
        (
            &[2, 2],
            &[0, 1, 2, 3],
            vec![
                spec("hsdp", &[5, 3], &[Replicate, Shard(0)]),
                spec("hsdp columns", &[3, 5], &[Replicate, Shard(1)]),
                spec("inner", &[5, 3], &[Shard(0), Replicate]),
                spec("twice", &[7, 3], &[Shard(0), Shard(0)]),
                spec("both", &[5, 7], &[Shard(1), Shard(0)]),
                spec("tensor parallel", &[8, 2], &[Strided(0, 2), Shard(0)]),
                spec("tensor parallel of columns", &[5, 6], &[Shard(0), Shard(1)]),
            ],
        ),
        (&[3, 2], &[0, 1, 2, 3, 4, 5], vec![spec("strided", &[12, 2], &[Strided(0, 2), Shard(0)])]),
        // Ranks in another order than the mesh.
        (&[4], &[2, 0, 3, 1], vec![spec("turned", &[9, 2], &[Shard(0)])]),
        (&[1], &[0], vec![spec("alone", &[3, 2], &[Shard(0)])]),
    ];
    for (shape, ranks, specs) in &layouts {
        for age in [Age::Old, Age::New] {
            let dir = folder(specs, Mesh { shape, ranks, age });
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            assert_eq!(checkpoint.warnings(), [] as [String; 0]);
            let found = loaded(dir.path());
            assert_eq!(found.len(), specs.len() + 1);
            assert_eq!(found["plain"], bytes_of(&[7.0, 8.0]));
            for Spec { name, shape, .. } in specs {
                assert_eq!(found[*name], bytes_of(&whole(name, shape)), "{name}");
                let of_checkpoint: Vec<i64> =
                    checkpoint.tensor(name).unwrap().shape.iter().map(|len| *len as i64).collect();
                assert_eq!(of_checkpoint, *shape, "{name}");
            }
        }
    }
}

#[test]
fn what_is_skipped_or_outside_the_key_takes_nothing_from_the_parts() {
    let (specs, of) = two();
    let dir = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        // The dictionary of a file, as the value of a key beside an unknown object.
        let begin = Pickle::new().raw(b"}(").text("config").global("project", "Config").raw(b")\x81").text("model");
        let (pickle, storages) = parts_of(&specs, of, rank, &[7.0, 8.0]);
        let pickle = begin.raw(&pickle[2..pickle.len() - 1]).raw(b"u").stop();
        let storages: Vec<(&str, &[u8])> = storages.iter().map(|(key, data)| (key.as_str(), data.as_slice())).collect();
        std::fs::write(dir.path().join(name(2, rank)), archive(&pickle, &storages)).unwrap();
    }
    assert!(refused(dir.path()).contains("project.Config"));
    for (key, skip_unknown, prefix) in [(None, true, "model."), (Some("model"), false, ""), (Some("model"), true, "")] {
        let options = key.into_iter().fold(OpenOptions::default().skip_unknown(skip_unknown), OpenOptions::key);
        let options = Options::default().open(options);
        let loaded = load(dir.path(), &options).unwrap();
        let of = |name: &str| loaded.tensor(&format!("{prefix}{name}")).unwrap().bytes().unwrap().to_vec();
        assert_eq!(of("w"), bytes_of(&whole("w", &[5, 2])));
        assert_eq!(of("plain"), bytes_of(&[7.0, 8.0]));
    }
}

fn two() -> (Vec<Spec<'static>>, Mesh<'static>) {
    let specs = vec![Spec { name: "w", shape: &[5, 2], placements: &[Shard(0)] }];
    (specs, Mesh { shape: &[2], ranks: &[0, 1], age: Age::New })
}

#[test]
fn a_rank_that_is_missing_is_named() {
    let (specs, of) = two();
    for missing in [0, 1] {
        let dir = folder(&specs, of);
        std::fs::remove_file(dir.path().join(name(2, missing))).unwrap();
        let said = refused(dir.path());
        assert!(said.contains("1 of 2 ranks") && said.contains(&name(2, missing)), "{said}");
    }
    let dir = folder(&specs, of);
    std::fs::write(dir.path().join(name(2, 2)), b"x").unwrap();
    assert!(refused(dir.path()).contains("the file of no rank of 2"));
    // Names without a number of ranks: the mesh has it.
    let dir = tempfile::tempdir().unwrap();
    let of = Mesh { shape: &[3], ranks: &[0, 1, 2], ..of };
    for rank in [0, 2] {
        std::fs::write(dir.path().join(format!("ep0-rank{rank}.pt")), file(&specs, of, rank, &[1.0])).unwrap();
    }
    let said = refused(dir.path());
    assert!(said.contains("1 of 3 ranks") && said.contains("ep0-rank1.pt"), "{said}");
    std::fs::write(dir.path().join("ep0-rank1.pt"), file(&specs, of, 1, &[1.0])).unwrap();
    assert_eq!(loaded(dir.path())["w"], bytes_of(&whole("w", &[5, 2])));
}

#[test]
fn ranks_that_disagree_are_refused() {
    let (specs, of) = two();
    let other = |shape: &'static [i64], placements: &'static [Place], name| vec![Spec { name, shape, placements }];
    let old = Mesh { age: Age::Old, ..of };
    let table: Vec<(&str, Vec<u8>)> = vec![
        ("[5, 2] in all to rank 0, [4, 2] to rank 1", file(&other(&[4, 2], &[Shard(0)], "w"), of, 1, &[7.0, 8.0])),
        ("cut differently", file(&other(&[5, 2], &[Shard(1)], "w"), of, 1, &[7.0, 8.0])),
        ("which should have a part", file(&other(&[5, 2], &[Shard(0)], "v"), of, 1, &[7.0, 8.0])),
        ("F32 [2] to the first rank, F32 [1] to rank 1", file(&specs, of, 1, &[7.0])),
        ("was it renamed?", file(&specs, of, 0, &[7.0, 8.0])),
        // The older form does not say which rank it is, but its part is too long.
        ("this rank's part is [3, 2], not [2, 2] at [3, 0]", file(&specs, old, 0, &[7.0, 8.0])),
        ("over other ranks", file(&specs, Mesh { ranks: &[1, 0], ..of }, 1, &[7.0, 8.0])),
        (
            "not cut",
            archive(
                &state_dict(&[("w", over("0", &[5, 2])), ("plain", over("1", &[2]))]),
                &[("0", &data(10)), ("1", &data(2))],
            ),
        ),
    ];
    for (what, wrong) in table {
        let dir = folder(&specs, of);
        std::fs::write(dir.path().join(name(2, 1)), wrong).unwrap();
        let said = refused(dir.path());
        assert!(said.contains(what), "{what}: {said}");
    }
    // More ranks than the names say.
    let of = Mesh { ranks: &[0, 5], age: Age::Old, ..of };
    let dir = tempfile::tempdir().unwrap();
    for (number, rank) in [(0, 0), (1, 5)] {
        std::fs::write(dir.path().join(name(2, number)), file(&specs, of, rank, &[7.0])).unwrap();
    }
    assert!(refused(dir.path()).contains("a mesh with rank 5, but there are 2 ranks"));
}

#[test]
fn what_cannot_be_placed_is_refused_and_never_guessed() {
    let table: [(&str, Spec); 4] = [
        ("partial sums", Spec { name: "w", shape: &[4, 2], placements: &[Shard(0), Partial] }),
        ("does not come out even", Spec { name: "w", shape: &[10, 2], placements: &[Strided(0, 2), Shard(0)] }),
        ("a strided shard after 4 cuts", Spec { name: "w", shape: &[8, 2], placements: &[Strided(0, 4), Shard(0)] }),
        ("a shard along dimension 2", Spec { name: "w", shape: &[8, 2], placements: &[Shard(0), Replicate] }),
    ];
    for (what, spec) in table {
        let of = Mesh { shape: &[2, 2], ranks: &[0, 1, 2, 3], age: Age::Old };
        let dir = folder(std::slice::from_ref(&spec), of);
        if what.contains("dimension 2") {
            let wrong = Spec { placements: &[Shard(2), Replicate], ..spec };
            for rank in of.ranks {
                // The oracle cannot cut it: the part is that of a replicated tensor.
                let place = coordinate(of.shape, *rank);
                let pickle = dtensor(Pickle::new().raw(b"}(").text("w"), &wrong, &[8, 2], of, &place).raw(b"u").stop();
                let mesh: Vec<u8> = of.ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect();
                std::fs::write(dir.path().join(name(4, *rank)), archive(&pickle, &[("w", &data(16)), ("m", &mesh)]))
                    .unwrap();
            }
        }
        let said = refused(dir.path());
        assert!(said.contains(what), "{what}: {said}");
    }
}

#[test]
fn files_in_which_nothing_is_cut_are_not_taken_for_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let plain = archive(&state_dict(&[("w", one())]), &[("0", &data(4))]);
    for rank in 0..2 {
        std::fs::write(dir.path().join(name(2, rank)), &plain).unwrap();
    }
    let said = refused(dir.path());
    assert!(said.contains("no tensor says how it is cut") && said.contains(&name(2, 0)), "{said}");
    // One without a number of ranks in its names is no set at all then.
    let dir = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        std::fs::write(dir.path().join(format!("a-rank{rank}.pt")), &plain).unwrap();
    }
    assert!(refused(dir.path()).contains("name the file that you want"));
}

#[test]
fn plain_tensors_that_differ_are_told_and_states_of_training_left_alone() {
    let (specs, of) = two();
    let dir = folder(&specs, of);
    std::fs::write(dir.path().join(name(2, 1)), file(&specs, of, 1, &[7.0, 9.0])).unwrap();
    for other in ["optim_world_size_2_rank_0.pt", "extra_state_world_size_2_rank_1.pt"] {
        std::fs::write(dir.path().join(other), b"never opened").unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let [differs, left] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(differs.contains("the ranks have other values") && differs.contains("\"plain\""), "{differs}");
    assert!(left.contains("left alone") && left.contains("optim_world_size_2_rank_0.pt"), "{left}");
    assert_eq!(loaded(dir.path())["plain"], bytes_of(&[7.0, 8.0]));
    // Two saves in one folder: which is meant is not to be guessed.
    std::fs::write(dir.path().join(name(4, 0)), b"x").unwrap();
    assert!(refused(dir.path()).contains("several saves"));
}

// ---- ShardedTensor

const SHARD: &str = "torch.distributed._shard";

fn box_of(pickle: Pickle, start: &[i64], len: &[i64]) -> Pickle {
    let list = |pickle: Pickle, numbers: &[i64]| numbers.iter().fold(pickle.raw(b"]("), |p, n| p.int(*n)).raw(b"e");
    let pickle = pickle.global(&format!("{SHARD}.metadata"), "ShardMetadata").raw(b")\x81N}(");
    let pickle = list(pickle.text("shard_offsets"), start).text("shard_sizes");
    list(pickle, len).raw(b"u\x86b")
}

/// A ShardedTensor cut by boxes; `own` says which of them are this rank's, each a storage of its own.
fn sharded(rank: i64, world: i64, shape: &[i64], boxes: &[(Vec<i64>, Vec<i64>)], own: &[usize]) -> Vec<u8> {
    let asked = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", "ProcessGroupState");
    sharded_asking(asked, rank, world, shape, boxes, own)
}

/// The same, with what `getattr` is asked for: a module, a class in it, a name.
fn sharded_asking(
    asked: (&str, &str, &str),
    rank: i64,
    world: i64,
    shape: &[i64],
    boxes: &[(Vec<i64>, Vec<i64>)],
    own: &[usize],
) -> Vec<u8> {
    let api = format!("{SHARD}.sharded_tensor.api");
    let pickle = Pickle::new().raw(b"}(").text("w").global("torch._tensor", "_rebuild_from_type_v2").raw(b"(");
    let pickle = pickle.global("torch._utils", "_rebuild_wrapper_subclass").global(&api, "ShardedTensor").raw(b"(");
    let pickle = pickle.global(&api, "ShardedTensor").global("torch", "float32").ints(shape).raw(b"t(](");
    let numbers = whole("w", shape);
    let (mut storages, mut pickle) = (Vec::new(), pickle);
    for at in own {
        let (start, len) = &boxes[*at];
        let along: Vec<Vec<i64>> = start.iter().zip(len).map(|(start, len)| (*start..start + len).collect()).collect();
        let key = at.to_string();
        pickle = pickle.global(&format!("{SHARD}.sharded_tensor.shard"), "Shard").raw(b")\x81N}(");
        pickle = pickle.text("tensor").tensor(&over(&key, len)).text("metadata");
        pickle = box_of(pickle, start, len).raw(b"u\x86b");
        storages.push((key, bytes_of(&taken(&numbers, shape, &along))));
    }
    let pickle =
        pickle.raw(b"e").global(&format!("{SHARD}.sharded_tensor.metadata"), "ShardedTensorMetadata").raw(b")\x81}(");
    let pickle = pickle.text("shards_metadata").raw(b"](");
    let pickle = boxes.iter().fold(pickle, |pickle, (start, len)| box_of(pickle, start, len)).raw(b"e");
    let pickle = pickle.text("size").global("torch", "Size").raw(b"(").ints(shape).raw(b"tRub");
    // As protocol 2 writes a nested class.
    let pickle = pickle.global("__builtin__", "getattr").raw(b"(").global(asked.0, asked.1);
    let pickle = pickle.text(asked.2).raw(b"tR)\x81}(").text("global_rank").int(rank);
    let pickle = pickle.text("global_world_size").int(world).raw(b"ubN\x89ttRu");
    let storages: Vec<(&str, &[u8])> = storages.iter().map(|(key, data)| (key.as_str(), data.as_slice())).collect();
    archive(&pickle.stop(), &storages)
}

#[test]
fn sharded_tensors_are_put_together_by_their_boxes() {
    let shape = [5, 4];
    let rows = vec![(vec![0, 0], vec![2, 4]), (vec![2, 0], vec![2, 4]), (vec![4, 0], vec![1, 4])];
    let grid = vec![(vec![0, 0], vec![5, 1]), (vec![0, 1], vec![2, 3]), (vec![2, 1], vec![3, 3])];
    type Owned<'a> = Vec<&'a [usize]>;
    let table: Vec<(&Vec<_>, Owned)> = vec![
        (&rows, vec![&[0], &[1], &[2]]),
        (&rows, vec![&[0, 1], &[2]]),
        (&rows, vec![&[0, 1, 2], &[]]),
        // Two groups that each have all.
        (&rows, vec![&[0], &[1], &[2], &[0], &[1], &[2]]),
        (&grid, vec![&[2], &[0, 1]]),
    ];
    for (boxes, owned) in table {
        let (dir, world) = (tempfile::tempdir().unwrap(), owned.len());
        for (rank, own) in owned.iter().enumerate() {
            let rank = rank as i64;
            std::fs::write(dir.path().join(name(world, rank)), sharded(rank, world as i64, &shape, boxes, own))
                .unwrap();
        }
        assert_eq!(loaded(dir.path())["w"], bytes_of(&whole("w", &shape)), "{owned:?}");
    }
}

#[test]
fn sharded_tensors_that_do_not_fit_are_refused() {
    let shape = [5, 4];
    let rows = vec![(vec![0, 0], vec![3, 4]), (vec![3, 0], vec![2, 4])];
    let short = vec![(vec![0, 0], vec![3, 4]), (vec![3, 0], vec![1, 4])];
    let over = vec![(vec![0, 0], vec![3, 4]), (vec![2, 0], vec![3, 4])];
    let table: Vec<(&str, [Vec<u8>; 2])> = vec![
        ("was it renamed?", [sharded(0, 2, &shape, &rows, &[0]), sharded(0, 2, &shape, &rows, &[1])]),
        ("its shape is [5, 4]", [sharded(0, 2, &shape, &rows, &[0]), sharded(1, 2, &shape, &rows, &[])]),
        ("its shape is [5, 4]", [sharded(0, 2, &shape, &short, &[0]), sharded(1, 2, &shape, &short, &[1])]),
        ("overlap", [sharded(0, 2, &shape, &over, &[0]), sharded(1, 2, &shape, &over, &[1])]),
        ("cut differently", [sharded(0, 2, &shape, &rows, &[0]), sharded(1, 2, &shape, &short, &[1])]),
    ];
    for (what, files) in table {
        let dir = tempfile::tempdir().unwrap();
        for (rank, file) in files.iter().enumerate() {
            std::fs::write(dir.path().join(name(2, rank as i64)), file).unwrap();
        }
        let said = refused(dir.path());
        assert!(said.contains(what), "{what}: {said}");
    }
}

#[test]
fn a_nested_class_is_the_only_thing_that_getattr_may_be_asked_for() {
    let rows = vec![(vec![0, 0], vec![3, 4]), (vec![3, 0], vec![2, 4])];
    let api = "torch.distributed._shard.sharded_tensor.api";
    for (module, class, asked, word) in [
        (api, "ShardedTensor", "__init_subclass__", "getattr"),
        (api, "Sharded", "ProcessGroupState", "Sharded.ProcessGroupState"),
        ("torch.distributed.tensor", "DTensor", "ProcessGroupState", "DTensor.ProcessGroupState"),
        ("os", "system", "ProcessGroupState", "os.system"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for rank in 0..2 {
            let file = sharded_asking((module, class, asked), rank, 2, &[5, 4], &rows, &[rank as usize]);
            std::fs::write(dir.path().join(name(2, rank)), file).unwrap();
        }
        let said = refused(dir.path());
        assert!(said.contains(word), "{said}");
    }
}
