//! Tensors that PyTorch's distributed checkpointing cut over several safetensors files, put together again.
//!
//! Its Hugging Face writer notes in each file's `__metadata__`, under `DCP_SHARDING_INFO`, where each piece begins in the
//! whole tensor. Where it notes the whole tensor's shape too (`global_shape`), the pieces must make that. Otherwise the shape is the
//! bounding box of the pieces, which must fill it exactly once; a last row of pieces that is missing with its file cannot be noticed
//! then, and [`doubt`] says so.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::de::MapAccess;

use super::json::{self, Field, Notes, Object, Scalar};
use super::safetensors::{Stored, index_numbers};
use super::{Part, TensorData};
use crate::extent::{Extent, ShardIndex};
use crate::fault::{Fault, Listed, dtype_name, quoted};

pub(super) const KEY: &str = "DCP_SHARDING_INFO";

/// Where each piece of one file begins in its tensor.
pub(crate) type Offsets = HashMap<String, Placed>;

/// Where a piece begins in its tensor, and the shape of that where it is recorded.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) start: Vec<usize>,
    pub(crate) whole: Option<Vec<usize>>,
}

/// The offsets of a file, if it is one of those.
pub(crate) fn offsets(metadata: &BTreeMap<String, String>) -> Result<Option<Offsets>, Fault> {
    let Some(text) = metadata.get(KEY) else { return Ok(None) };
    let mut info = Info::default();
    json::read(text.as_bytes(), KEY, &mut info)?;
    info.problems.into_fault(Fault::Member)?;
    Ok(Some(info.offsets))
}

#[derive(Default)]
struct Info {
    offsets: Offsets,
    problems: Listed,
}

impl Object for Info {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        let mut entry = Entry::default();
        json::object(key, map, notes, &mut entry)?;
        let start = index_numbers("saved_offsets", entry.start);
        let whole = entry.whole.map(|field| index_numbers("global_shape", Some(field))).transpose();
        match start.and_then(|start| Ok(Placed { start, whole: whole? })) {
            Ok(placed) => drop(self.offsets.insert(key.to_owned(), placed)),
            Err(why) => self.problems.push_tensor(key, || format!("{KEY} of tensor {}: {why}", quoted(key))),
        }
        Ok(())
    }

    fn instead(&mut self, found: Scalar) {
        self.problems.push(|| format!("{KEY} must be an object, found {}", found.describe()));
    }
}

#[derive(Default)]
struct Entry {
    start: Option<Field>,
    whole: Option<Field>,
}

impl Object for Entry {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        let value = json::field(map, notes)?;
        match key {
            "saved_offsets" => self.start = Some(value),
            "global_shape" => self.whole = Some(value),
            _ => {}
        }
        Ok(())
    }

    fn instead(&mut self, _: Scalar) {
        // The member `saved_offsets` will be missing, which is then said.
    }
}

/// The shape that the pieces must make, where files record it.
pub(crate) fn check_whole<'a>(placed: impl Iterator<Item = &'a Placed>, shape: &[usize]) -> Result<(), String> {
    match placed.filter_map(|placed| placed.whole.as_ref()).find(|whole| *whole != shape) {
        None => Ok(()),
        Some(whole) => {
            Err(format!("its pieces make {shape:?}, but its shape is recorded as {whole:?}: is a file missing?"))
        }
    }
}

/// What cannot be known of the files of such a save, by their names and what each records: where the shapes of whole tensors are not
/// recorded, pieces that are missing at the end leave no trace.
pub(crate) fn doubt<'a>(files: impl Iterator<Item = (&'a str, &'a Offsets)>) -> Option<String> {
    let (mut doubtful, mut numbers) = (Vec::new(), BTreeSet::new());
    for (name, offsets) in files {
        let number = rank_number(name);
        numbers.extend(number);
        // A save by one rank has whole tensors, all of them at zero.
        let is_cut = number.is_some() || offsets.values().any(|placed| placed.start.iter().any(|&at| at > 0));
        if is_cut && offsets.values().any(|placed| placed.whole.is_none()) {
            doubtful.push(quoted(name));
        }
    }
    let first = doubtful.first()?;
    let last = numbers.last().copied().unwrap_or(0);
    let absent: Listed = (1..last)
        .filter(|number| !numbers.contains(number))
        .take(1000)
        .map(|number| format!("shard-{number:05}"))
        .collect();
    let absent = if absent.is_empty() {
        String::new()
    } else {
        format!("; not there: {absent} (a rank without a piece writes no file)")
    };
    Some(format!(
        "{first}{} the pieces that ranks wrote in one DCP save, which does not record the shapes of whole tensors: the end of tensors \
         cannot be checked; if the file of a last rank is missing, they are too short (make sure that there is a file of each rank){absent}",
        match doubtful.len() - 1 {
            0 => " holds".to_owned(),
            1 => " and one more file hold".to_owned(),
            more => format!(" and {more} more files hold"),
        }
    ))
}

/// The number of a rank's file, from 1 on: `shard-00002-model-…`.
fn rank_number(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("shard-")?.split('-').next()?;
    digits.parse().ok().filter(|number| (1..=1_000_000).contains(number))
}

/// A piece of a tensor: the file that holds it, its description there, and where it begins in the tensor.
#[derive(Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) shard: ShardIndex,
    pub(crate) stored: &'a Stored,
    pub(crate) start: &'a [usize],
}

/// The whole tensor's shape and data, or why the pieces do not make one.
pub(crate) fn assemble(pieces: &[Piece]) -> Result<(Vec<usize>, TensorData), String> {
    check_alike(pieces)?;
    let shape = bounding_box(pieces)?;
    check_cover(pieces, &shape)?;
    if let Some(whole) = pieces.iter().find(|piece| piece.stored.shape == shape) {
        return Ok((shape, TensorData::Whole(whole.extent())));
    }
    check_unpacked(pieces)?;
    let parts = pieces.iter().filter(|piece| piece.stored.len > 0).map(|piece| piece.part()).collect();
    Ok((shape, TensorData::Parts(parts)))
}

impl Piece<'_> {
    fn extent(&self) -> Extent {
        Extent { shard: self.shard, offset: self.stored.offset, len: self.stored.len }
    }

    fn part(&self) -> Part {
        Part { extent: self.extent(), start: self.start.to_vec(), shape: self.stored.shape.clone() }
    }

    fn ends(&self) -> impl Iterator<Item = Option<usize>> {
        self.start.iter().zip(&self.stored.shape).map(|(start, len)| start.checked_add(*len))
    }

    fn overlaps(&self, other: &Piece) -> bool {
        let apart = |(mine, theirs): ((&usize, &usize), (&usize, &usize))| {
            let (end, other_end) = (mine.0.saturating_add(*mine.1), theirs.0.saturating_add(*theirs.1));
            end <= *theirs.0 || other_end <= *mine.0
        };
        let mine = self.start.iter().zip(&self.stored.shape);
        !mine.zip(other.start.iter().zip(&other.stored.shape)).any(apart)
    }

    fn volume(&self) -> u128 {
        self.stored.shape.iter().fold(1, |product: u128, &dim| product.saturating_mul(dim as u128))
    }

    fn describe(&self) -> String {
        format!("{:?} at {:?}", self.stored.shape, self.start)
    }
}

fn check_alike(pieces: &[Piece]) -> Result<(), String> {
    let Some(first) = pieces.first() else { return Err("no piece".into()) };
    for piece in pieces {
        if piece.start.len() != piece.stored.shape.len() {
            return Err(format!("the piece {} has another number of offsets than of dimensions", piece.describe()));
        }
        if piece.start.len() != first.start.len() {
            return Err(format!("the pieces {} and {} differ in rank", first.describe(), piece.describe()));
        }
        if piece.stored.dtype != first.stored.dtype {
            let (one, other) = (dtype_name(&first.stored.dtype), dtype_name(&piece.stored.dtype));
            return Err(format!("its pieces are of {one} and of {other}"));
        }
    }
    Ok(())
}

fn bounding_box(pieces: &[Piece]) -> Result<Vec<usize>, String> {
    let mut shape = pieces.first().map_or(Vec::new(), |piece| vec![0; piece.start.len()]);
    for piece in pieces {
        for (dim, end) in shape.iter_mut().zip(piece.ends()) {
            *dim = end.ok_or_else(|| format!("the piece {} ends past 64 bits", piece.describe()))?.max(*dim);
        }
    }
    Ok(shape)
}

/// Neither overlap nor gap: no two boxes meet, and together they have as many elements as the whole.
fn check_cover(pieces: &[Piece], shape: &[usize]) -> Result<(), String> {
    let mut boxes: Vec<&Piece> = pieces.iter().filter(|piece| piece.volume() > 0).collect();
    boxes.sort_by_key(|piece| piece.start);
    for (at, piece) in boxes.iter().enumerate() {
        let end = piece.ends().next().flatten().unwrap_or(usize::MAX);
        let near = boxes[at + 1..].iter().take_while(|other| other.start.first().is_none_or(|&start| start < end));
        if let Some(other) = near.into_iter().find(|other| piece.overlaps(other)) {
            return Err(format!("its pieces {} and {} overlap", piece.describe(), other.describe()));
        }
    }
    let found = boxes.iter().fold(0u128, |sum, piece| sum.saturating_add(piece.volume()));
    let needed = shape.iter().fold(1u128, |product, &dim| product.saturating_mul(dim as u128));
    if found == needed { Ok(()) } else { Err(gap(pieces, shape, needed, found)) }
}

fn gap(pieces: &[Piece], shape: &[usize], needed: u128, found: u128) -> String {
    let shown: Vec<_> = pieces.iter().take(8).map(Piece::describe).collect();
    let count = pieces.len();
    format!(
        "a gap: its {count} pieces ({}) hold {found} elements of the {needed} of shape {shape:?}; is a file missing?",
        shown.join(", ")
    )
}

/// Elements that share bytes cannot be cut apart here.
fn check_unpacked(pieces: &[Piece]) -> Result<(), String> {
    match pieces.first().map(|piece| &piece.stored.dtype) {
        Some(dtype) if dtype.bits().is_none_or(|bits| bits % 8 != 0) => {
            let dtype = dtype_name(dtype);
            Err(format!("pieces of {dtype}, whose elements do not fill whole bytes or are unknown, are not supported"))
        }
        _ => Ok(()),
    }
}
