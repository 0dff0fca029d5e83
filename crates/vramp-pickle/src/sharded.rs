//! Tensors of which a file holds one rank's part: what a DTensor (FSDP2, tensor parallelism) or a ShardedTensor (FSDP1) records of the
//! whole, and which box of it this rank has.
//!
//! It reads values of a pickle and no file. How boxes follow from placements is PyTorch's arithmetic: `torch.chunk`, one dimension of
//! the mesh after the other. What cannot be placed for certain (partial sums, ragged strided shards) is refused, never guessed.

use crate::finding::{Checked, fault};
use crate::nested::numbers;
use crate::pickle::{Arena, Id, Value};

/// The rule of what cannot be placed.
const RULE: &str = "shard-placement";
/// Ranks of a mesh that are looked through.
const MAX_RANKS: u64 = 1 << 20;
/// Wrappers around a tensor that are looked through.
const MAX_WRAPPERS: usize = 8;

/// A part of a tensor: first element along each dimension, elements along each.
pub type Bounds = (Vec<u64>, Vec<u64>);

/// How a tensor is cut over ranks, the same in each rank's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// By the placements of a DTensor.
    Mesh {
        /// Elements of the mesh along each of its dimensions.
        mesh: Vec<u64>,
        /// The ranks of the mesh, row-major.
        ranks: Vec<u64>,
        /// What happens along each dimension of the mesh.
        placements: Vec<Placement>,
    },
    /// By the list of boxes of a ShardedTensor, sorted.
    Boxes(Vec<Bounds>),
}

/// What happens to a tensor along one dimension of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Each has all of it.
    Replicate,
    /// Cut along that dimension of the tensor.
    Shard(u64),
    /// The same, but after later dimensions of the mesh have cut it into so many.
    Strided(u64, u64),
}

/// A tensor that is cut, as one rank's file describes it.
#[derive(Debug, Clone)]
pub struct Cut {
    /// Shape of the whole.
    pub shape: Vec<u64>,
    /// How it is cut.
    pub layout: Layout,
    /// The values that are this rank's parts, and where they belong.
    pub parts: Vec<(Id, Bounds)>,
}

impl Layout {
    /// How many ranks it needs at least.
    pub fn ranks(&self) -> u64 {
        match self {
            Layout::Mesh { ranks, .. } => ranks.iter().max().map_or(0, |most| most.saturating_add(1)),
            Layout::Boxes(_) => 0,
        }
    }
}

/// What `rank`'s file says of a cut tensor; `None` for a value that is none.
pub(crate) fn cut(arena: &Arena, mut id: Id, rank: u64) -> Option<Checked<Cut>> {
    for _ in 0..MAX_WRAPPERS {
        let call = arena.as_call(id)?;
        let (module, name) = arena.as_global(call.function)?;
        id = match (module, name) {
            ("torch._utils", "_rebuild_parameter") => *arena.as_tuple(call.arguments)?.first()?,
            ("torch._tensor", "_rebuild_from_type_v2") => {
                let [_, class, arguments, state] = arena.as_tuple(call.arguments)? else { return None };
                let size = arena.as_tuple(*arguments).and_then(|arguments| arguments.get(2).copied());
                return match kind(arena.as_global(*class)?)? {
                    Kind::Mesh => Some(of_mesh(arena, *state, size, rank)),
                    Kind::Boxes => Some(of_boxes(arena, *state, rank)),
                };
            }
            // As PyTorch wrote before 1.13.
            class => match kind(class)? {
                Kind::Boxes => return Some(of_boxes(arena, call.state?, rank)),
                Kind::Mesh => return None,
            },
        };
    }
    None
}

enum Kind {
    Mesh,
    Boxes,
}

fn kind((module, name): (&str, &str)) -> Option<Kind> {
    match name {
        "DTensor" if module.starts_with("torch.distributed.") => Some(Kind::Mesh),
        "ShardedTensor" if module.starts_with("torch.distributed._shard.") => Some(Kind::Boxes),
        _ => None,
    }
}

fn unclear<T>(what: impl Into<String>) -> Checked<T> {
    fault(RULE, what)
}

/// An attribute that a state sets: a dictionary's member, or one of the slots beside it.
fn member(arena: &Arena, state: Id, name: &str) -> Option<Id> {
    let one = std::slice::from_ref(&state);
    arena.as_tuple(state).unwrap_or(one).iter().find_map(|part| arena.member(*part, name))
}

fn attribute(arena: &Arena, object: Id, name: &str) -> Option<Id> {
    member(arena, arena.as_call(object)?.state?, name)
}

fn number(arena: &Arena, id: Id) -> Option<u64> {
    u64::try_from(arena.as_int(id)?).ok()
}

fn is_none(arena: &Arena, id: Id) -> bool {
    arena.get(id) == Value::None
}

// ---- DTensor

fn of_mesh(arena: &Arena, state: Id, size: Option<Id>, rank: u64) -> Checked<Cut> {
    let (local, spec) = (member(arena, state, "_local_tensor"), member(arena, state, "_spec"));
    let (Some(local), Some(spec)) = (local, spec) else { return unclear("a DTensor without its part or its layout") };
    let Some(shape) = size.and_then(|size| numbers(arena, size)) else {
        return unclear("a DTensor without the shape of the whole");
    };
    let of_meta = attribute(arena, spec, "tensor_meta").filter(|meta| !is_none(arena, *meta));
    if let Some(meta) = of_meta
        && meta_shape(arena, meta).is_none_or(|meta| meta != shape)
    {
        return unclear(format!("a DTensor of shape {shape:?} whose layout is that of another shape"));
    }
    let Some(mesh) = attribute(arena, spec, "mesh") else { return unclear("a DTensor without its mesh") };
    let (mesh_shape, ranks) = mesh_of(arena, mesh)?;
    let Some(placements) = attribute(arena, spec, "placements").and_then(|id| arena.as_sequence(id)) else {
        return unclear("a DTensor without its placements");
    };
    let placements = placements.iter().map(|id| placement(arena, *id)).collect::<Checked<Vec<_>>>()?;
    if placements.len() != mesh_shape.len() {
        return unclear(format!("{} placements on a mesh of {} dimensions", placements.len(), mesh_shape.len()));
    }
    check_order(arena, spec, &placements)?;
    let mut parts = Vec::new();
    if let Some(at) = ranks.iter().position(|of_mesh| *of_mesh == rank) {
        let coordinates = coordinates(&mesh_shape, at as u64);
        let noted = attribute(arena, mesh, "_coordinate_on_dim").and_then(|noted| numbers(arena, noted));
        if let Some(noted) = noted.filter(|noted| *noted != coordinates) {
            return unclear(format!(
                "the file of rank {rank}, which has the place {coordinates:?} in the mesh {mesh_shape:?}, was written by the rank at \
                 {noted:?}: was it renamed?"
            ));
        }
        parts.push((local, bounds(&shape, &mesh_shape, &coordinates, &placements)?));
    }
    Ok(Cut { shape, layout: Layout::Mesh { mesh: mesh_shape, ranks, placements }, parts })
}

/// The shape of a `TensorMeta`.
fn meta_shape(arena: &Arena, meta: Id) -> Option<Vec<u64>> {
    let call = arena.as_call(meta)?;
    numbers(arena, *arena.as_tuple(call.arguments)?.first()?)
}

/// The shape of a mesh and its ranks, row-major.
fn mesh_of(arena: &Arena, mesh: Id) -> Checked<(Vec<u64>, Vec<u64>)> {
    let list = |name| attribute(arena, mesh, name).and_then(|id| numbers(arena, id));
    let found = match (list("_flatten_rank_map"), attribute(arena, mesh, "_layout")) {
        (Some(map), Some(layout)) => laid_out(arena, layout, &map),
        _ => list("_flatten_mesh_list").zip(
            // The tensor of ranks itself: its numbers are in the list, its shape is here.
            attribute(arena, mesh, "mesh").and_then(|tensor| {
                let arguments = arena.as_tuple(arena.as_call(tensor)?.arguments)?;
                numbers(arena, *arguments.get(2)?)
            }),
        ),
    };
    let Some((ranks, shape)) = found else { return unclear("a mesh that does not say which ranks it is made of") };
    let count = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
    let distinct: std::collections::HashSet<_> = ranks.iter().collect();
    if count != Some(ranks.len() as u64) || distinct.len() != ranks.len() {
        return unclear(format!("a mesh of shape {shape:?} with {} ranks, {} different", ranks.len(), distinct.len()));
    }
    Ok((shape, ranks))
}

/// The ranks and the shape of a mesh that picks them from a map by strides.
fn laid_out(arena: &Arena, layout: Id, map: &[u64]) -> Option<(Vec<u64>, Vec<u64>)> {
    let axes = match attribute(arena, layout, "axes") {
        Some(axes) => arena.as_sequence(axes)?.iter().map(|axis| strided(arena, *axis)).collect::<Option<Vec<_>>>()?,
        None => {
            let (shape, stride) = (attribute(arena, layout, "shape")?, attribute(arena, layout, "stride")?);
            match (arena.as_sequence(shape), arena.as_sequence(stride)) {
                (Some(shapes), Some(strides)) if shapes.len() == strides.len() => shapes
                    .iter()
                    .zip(strides)
                    .map(|(shape, stride)| flat(arena, *shape, *stride))
                    .collect::<Option<_>>()?,
                _ => vec![flat(arena, shape, stride)?],
            }
        }
    };
    let shape: Vec<u64> = axes.iter().map(Vec::len).map(|len| len as u64).collect();
    let total = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim))?;
    if total > MAX_RANKS {
        return None;
    }
    let offsets = axes.iter().fold(vec![0u64], |all, axis| {
        all.iter().flat_map(|before| axis.iter().map(move |step| before.saturating_add(*step))).collect()
    });
    let ranks = offsets.iter().map(|at| map.get(usize::try_from(*at).ok()?).copied()).collect::<Option<_>>()?;
    Some((ranks, shape))
}

fn strided(arena: &Arena, axis: Id) -> Option<Vec<u64>> {
    flat(arena, attribute(arena, axis, "shape")?, attribute(arena, axis, "stride")?)
}

/// The offsets of one dimension of a mesh, which may itself be several, the last one fastest.
fn flat(arena: &Arena, shape: Id, stride: Id) -> Option<Vec<u64>> {
    let list = |id| number(arena, id).map(|one| vec![one]).or_else(|| numbers(arena, id));
    let (shape, stride) = (list(shape)?, list(stride)?);
    let total = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim))?;
    if shape.len() != stride.len() || total > MAX_RANKS {
        return None;
    }
    let offsets = shape.iter().zip(&stride).fold(vec![0u64], |all, (count, stride)| {
        all.iter()
            .flat_map(|before| (0..*count).map(move |at| before.saturating_add(at.saturating_mul(*stride))))
            .collect()
    });
    Some(offsets)
}

fn placement(arena: &Arena, id: Id) -> Checked<Placement> {
    let call = arena.as_call(id);
    let name = call.and_then(|call| arena.as_global(call.function)).map_or("", |(_, name)| name);
    let given = |name, at: usize| {
        let argument = || arena.as_tuple(call?.arguments)?.get(at).copied();
        number(arena, attribute(arena, id, name).or_else(argument)?)
    };
    match (name, given("dim", 0)) {
        ("Replicate", _) => Ok(Placement::Replicate),
        ("Shard", Some(dim)) => Ok(Placement::Shard(dim)),
        ("_StridedShard", Some(dim)) => match given("split_factor", 1) {
            Some(factor) => Ok(Placement::Strided(dim, factor)),
            None => unclear("a strided shard that does not say into how many it was cut before"),
        },
        ("Partial" | "_Partial", _) => unclear("the ranks hold partial sums (Partial), which are no parts of a tensor"),
        _ => unclear(format!("an unknown placement: {}", arena.preview(id))),
    }
}

/// Newer versions record in which order the dimensions of the mesh cut; only the usual one is known here.
fn check_order(arena: &Arena, spec: Id, placements: &[Placement]) -> Checked<()> {
    let Some(order) = attribute(arena, spec, "shard_order").filter(|order| !is_none(arena, *order)) else {
        return Ok(());
    };
    if placements.iter().any(|placement| matches!(placement, Placement::Strided(..))) {
        return unclear("strided shards that are not meant as the order of cuts");
    }
    let ascends = |entry: &Id| {
        let fields = arena.as_tuple(arena.as_call(*entry)?.arguments)?;
        let dims = numbers(arena, *fields.get(1)?)?;
        Some(dims.windows(2).all(|pair| pair[0] < pair[1]))
    };
    match arena.as_sequence(order).map(|entries| entries.iter().all(|entry| ascends(entry) == Some(true))) {
        Some(true) => Ok(()),
        _ => unclear("a tensor whose dimensions are cut in another order than that of the mesh"),
    }
}

/// The place of a number in a mesh.
fn coordinates(mesh: &[u64], mut number: u64) -> Vec<u64> {
    let mut coordinates = vec![0; mesh.len()];
    for (coordinate, count) in coordinates.iter_mut().zip(mesh).rev() {
        *coordinate = number % (*count).max(1);
        number /= (*count).max(1);
    }
    coordinates
}

/// The box at a place of a mesh.
fn bounds(shape: &[u64], mesh: &[u64], place: &[u64], placements: &[Placement]) -> Checked<Bounds> {
    let (mut start, mut len) = (vec![0; shape.len()], shape.to_vec());
    let mut chunk = |dim: u64, at: usize, even: bool| {
        let along = usize::try_from(dim).ok();
        let (Some(start), Some(len)) =
            (along.and_then(|dim| start.get_mut(dim)), along.and_then(|dim| len.get_mut(dim)))
        else {
            return unclear(format!("a shard along dimension {dim} of a tensor of shape {shape:?}"));
        };
        let (count, number) = (mesh.get(at).copied().unwrap_or(1).max(1), place.get(at).copied().unwrap_or(0));
        if even && *len % count != 0 {
            return unclear(format!("a strided shard of {len} over {count} ranks, which does not come out even"));
        }
        let size = len.div_ceil(count);
        let first = size.saturating_mul(number).min(*len);
        *start += first;
        *len = size.min(*len - first);
        Ok(())
    };
    // Strided shards were cut last, by those dimensions of the mesh that stand before the others.
    let strided = |placement: &Placement| matches!(placement, Placement::Strided(..));
    let dims_strided: Vec<u64> = placements.iter().filter_map(|placement| placement.strided()).collect();
    for (at, placement) in placements.iter().enumerate().filter(|(_, placement)| !strided(placement)) {
        if let Placement::Shard(dim) = placement {
            chunk(*dim, at, dims_strided.contains(dim))?;
        }
    }
    for (at, placement) in placements.iter().enumerate().rev() {
        let Placement::Strided(dim, factor) = placement else { continue };
        let cuts_before = |(other, placement): (usize, &Placement)| match placement {
            Placement::Shard(cut) | Placement::Strided(cut, _) if cut == dim && other > at => {
                mesh.get(other).copied().unwrap_or(1)
            }
            _ => 1,
        };
        let before: u64 = placements.iter().enumerate().map(cuts_before).product();
        let earlier = placements.iter().take(at).any(|placement| *placement == Placement::Shard(*dim));
        if before != *factor || earlier {
            return unclear(format!("a strided shard after {factor} cuts, where {before} come after it in the mesh"));
        }
        chunk(*dim, at, true)?;
    }
    Ok((start, len))
}

impl Placement {
    fn strided(&self) -> Option<u64> {
        match self {
            Placement::Strided(dim, _) => Some(*dim),
            _ => None,
        }
    }
}

// ---- ShardedTensor

/// The state is (this rank's parts, what is known of all, the group of ranks, …).
fn of_boxes(arena: &Arena, state: Id, rank: u64) -> Checked<Cut> {
    let Some([local, metadata, group, ..]) = arena.as_tuple(state) else {
        return unclear("a ShardedTensor without its parts and what is known of all");
    };
    let shape = attribute(arena, *metadata, "size").and_then(|size| numbers(arena, size));
    let all = attribute(arena, *metadata, "shards_metadata").and_then(|all| arena.as_sequence(all));
    let (Some(shape), Some(all), Some(local)) = (shape, all, arena.as_sequence(*local)) else {
        return unclear("a ShardedTensor whose description is not whole");
    };
    let written = attribute(arena, *group, "global_rank").and_then(|rank| number(arena, rank));
    if let Some(written) = written.filter(|written| *written != rank) {
        return unclear(format!("the file of rank {rank} was written by rank {written}: was it renamed?"));
    }
    let mut boxes = all.iter().map(|one| box_of(arena, *one)).collect::<Checked<Vec<_>>>()?;
    boxes.sort_unstable();
    let part = |shard: &Id| match (attribute(arena, *shard, "tensor"), attribute(arena, *shard, "metadata")) {
        (Some(tensor), Some(metadata)) => Ok((tensor, box_of(arena, metadata)?)),
        _ => unclear("a part of a ShardedTensor without its place"),
    };
    let parts = local.iter().map(part).collect::<Checked<Vec<_>>>()?;
    match parts.iter().find(|(_, place)| boxes.binary_search(place).is_err()) {
        Some((_, (start, len))) => {
            unclear(format!("a part {len:?} at {start:?} of a ShardedTensor that is not in its list of parts"))
        }
        None => Ok(Cut { shape, layout: Layout::Boxes(boxes), parts }),
    }
}

fn box_of(arena: &Arena, metadata: Id) -> Checked<Bounds> {
    let list = |name| attribute(arena, metadata, name).and_then(|list| numbers(arena, list));
    match (list("shard_offsets"), list("shard_sizes")) {
        (Some(start), Some(len)) if start.len() == len.len() => Ok((start, len)),
        _ => unclear("a part of a ShardedTensor whose place is not whole"),
    }
}
