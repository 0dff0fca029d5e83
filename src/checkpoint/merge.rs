//! The headers of all files of a checkpoint, made into one: each tensor in one place, the index and the headers agreeing.
//!
//! It opens nothing. An index decides tensor by tensor: what it does not list is left alone with a warning, what it lists
//! must be where it says and is taken from there, whatever other files hold under that name. Without an index no two files may
//! share a tensor. Only pieces that PyTorch's distributed checkpointing cut apart may, and then `dcp` puts them together.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::dcp::{self, Offsets, Piece};
use super::index::Index;
use super::safetensors::Stored;
use super::shard::FileHeader;
use super::{Checkpoint, Format, Shard, TensorData, TensorInfo};
use crate::error::{Error, Result};
use crate::extent::{Extent, ShardIndex};
use crate::fault::{Fault, Listed, counted, quoted};
use crate::storage::LocalStorage;

/// A single file as a checkpoint, its tensors as they are stored: pieces stay pieces.
pub(crate) fn one(path: &Path, head: FileHeader) -> Checkpoint {
    let mut warnings = head.header.warnings;
    let cut = dcp::offsets(&head.header.metadata).ok().flatten().unwrap_or_default();
    let pieces: Listed =
        head.header.tensors.iter().filter(|stored| is_inner(&cut, stored)).map(|s| quoted(&s.name)).collect();
    if !pieces.is_empty() {
        warnings.push(format!(
            "pieces of tensors that were cut over several files (open the folder for the whole): {pieces}"
        ));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let doubt = dcp::doubt(std::iter::once((name.as_ref(), &cut))).filter(|_| pieces.is_empty());
    warnings.extend(doubt.map(|doubt| format!("{doubt}; open the folder for the whole")));
    let whole = |stored: Stored| {
        let data = TensorData::Whole(Extent { shard: 0, offset: stored.offset, len: stored.len });
        TensorInfo { name: stored.name, dtype: stored.dtype, shape: stored.shape.into(), data }
    };
    let mut tensors: Vec<TensorInfo> = head.header.tensors.into_iter().map(whole).collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    checkpoint(path, vec![head.shard], tensors, head.header.metadata, warnings)
}

fn is_inner(cut: &Offsets, stored: &Stored) -> bool {
    cut.get(stored.name.as_ref()).is_some_and(|placed| {
        placed.start.iter().any(|&at| at > 0) || placed.whole.as_ref().is_some_and(|whole| *whole != stored.shape)
    })
}

/// Many files as one checkpoint. `heads` are those of the index's files, in its order, where there is an index.
pub(crate) fn many(path: &Path, heads: Vec<FileHeader>, index: Option<&Index>) -> Result<Checkpoint> {
    let cuts = heads.iter().map(cut).collect::<Result<Vec<_>>>()?;
    let mut merge = Merge { index, heads: &heads, cuts: &cuts, ..Merge::new(&heads, &cuts) };
    let tensors = merge.run().map_err(|fault| Error::malformed(path, fault))?;
    let mut warnings = std::mem::take(&mut merge.warnings);
    let names: Vec<_> = heads.iter().map(plain_name).collect();
    warnings.extend(dcp::doubt(names.iter().map(AsRef::as_ref).zip(&cuts)));
    warnings.extend(heads.iter().flat_map(warnings_of));
    warnings.extend(disagreements(&heads));
    let (shards, metadata) = parts(heads);
    Ok(checkpoint(path, shards, tensors, metadata, warnings))
}

fn checkpoint(
    path: &Path,
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
    warnings: Vec<String>,
) -> Checkpoint {
    let (path, format) = (path.to_owned(), Format::Safetensors);
    let storage = Arc::new(LocalStorage); // `Checkpoint::open_with` sets the storage that was read
    let (skipped, shared) = (Vec::new(), Vec::new());
    Checkpoint { path, shards, tensors, metadata, warnings, format, skipped, shared, storage }
}

fn cut(head: &FileHeader) -> Result<Offsets> {
    let offsets = dcp::offsets(&head.header.metadata).map_err(|fault| Error::malformed(&head.shard.path, fault))?;
    Ok(offsets.unwrap_or_default())
}

fn warnings_of(head: &FileHeader) -> impl Iterator<Item = String> {
    head.header.warnings.iter().map(|warning| format!("{}: {warning}", name_of(head)))
}

fn parts(heads: Vec<FileHeader>) -> (Vec<Shard>, BTreeMap<String, String>) {
    let mut metadata = BTreeMap::new();
    let mut shards = Vec::with_capacity(heads.len());
    for head in heads {
        for (key, value) in head.header.metadata {
            metadata.entry(key).or_insert(value);
        }
        shards.push(head.shard);
    }
    (shards, metadata)
}

/// The keys of the metadata that say different things in different files: the first file's value is the one that is kept.
fn disagreements(heads: &[FileHeader]) -> Option<String> {
    let mut first: BTreeMap<&str, (&str, &FileHeader)> = BTreeMap::new();
    let mut differ: BTreeMap<&str, &FileHeader> = BTreeMap::new();
    for head in heads {
        // Where the pieces of tensors begin is another thing in each file.
        let own = head.header.metadata.iter().filter(|(key, _)| *key != dcp::KEY);
        for (key, value) in own {
            let (kept, _) = *first.entry(key).or_insert((value, head));
            if kept != value {
                differ.entry(key).or_insert(head);
            }
        }
    }
    let said = |(key, other): (&str, &FileHeader)| {
        let (kept, head) = first.get(key)?;
        let kept = kept.char_indices().nth(60).map_or((*kept).to_owned(), |(end, _)| format!("{}…", &kept[..end]));
        Some(format!("{} is {} as in {}, not as in {}", quoted(key), quoted(&kept), name_of(head), name_of(other)))
    };
    let differ: Listed = differ.into_iter().filter_map(said).collect();
    (!differ.is_empty()).then(|| format!("the files disagree on their metadata, and the first one's is kept: {differ}"))
}

fn plain_name(head: &FileHeader) -> Cow<'_, str> {
    let path = &head.shard.path;
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy()
}

fn name_of(head: &FileHeader) -> String {
    quoted(&plain_name(head))
}

/// The state of one merge: the inputs, and the problems and remarks so far.
struct Merge<'a> {
    index: Option<&'a Index>,
    heads: &'a [FileHeader],
    cuts: &'a [Offsets],
    stale: Listed,
    twice: Listed,
    boxes: Listed,
    unlisted: Listed,
    copies: Listed,
    warnings: Vec<String>,
}

impl<'a> Merge<'a> {
    fn new(heads: &'a [FileHeader], cuts: &'a [Offsets]) -> Merge<'a> {
        Merge {
            index: None,
            heads,
            cuts,
            stale: Listed::new(),
            twice: Listed::new(),
            boxes: Listed::new(),
            unlisted: Listed::new(),
            copies: Listed::new(),
            warnings: Vec::new(),
        }
    }

    fn run(&mut self) -> Result<Vec<TensorInfo>, Fault> {
        let stored = self.stored();
        self.find_absent(&stored);
        let groups = stored.chunk_by(|a, b| a.1.name == b.1.name);
        let tensors = groups.filter_map(|group| self.tensor(group)).collect();
        std::mem::take(&mut self.stale).into_fault(Fault::Stale)?;
        std::mem::take(&mut self.twice).into_fault(Fault::TwoFiles)?;
        std::mem::take(&mut self.boxes).into_fault(Fault::Boxes)?;
        if !self.unlisted.is_empty() {
            let (count, unlisted) = (counted(self.unlisted.len(), "tensor"), &self.unlisted);
            self.warnings.push(format!("left alone because the index does not name them: {count}: {unlisted}"));
        }
        self.warnings.extend(copies_left_alone(&self.copies));
        Ok(tensors)
    }

    /// Every stored tensor with its shard, by name.
    fn stored(&self) -> Vec<(ShardIndex, &'a Stored)> {
        let number = |at: usize| ShardIndex::try_from(at).unwrap_or(ShardIndex::MAX);
        let of =
            |(at, head): (usize, &'a FileHeader)| head.header.tensors.iter().map(move |stored| (number(at), stored));
        let mut stored: Vec<_> = self.heads.iter().enumerate().flat_map(of).collect();
        stored.sort_by(|a, b| a.1.name.cmp(&b.1.name).then(a.0.cmp(&b.0)));
        stored
    }

    /// Notes what the index lists and no file holds.
    fn find_absent(&mut self, stored: &[(ShardIndex, &Stored)]) {
        for (name, file) in self.index.iter().flat_map(|index| index.tensors()) {
            if stored.binary_search_by(|(_, stored)| stored.name.cmp(name)).is_err() {
                let file = self.file(*file);
                self.stale.push_tensor(name, || format!("{} is not in {file}", quoted(name)));
            }
        }
    }

    /// The tensor that all pieces of one name make, unless it is left alone or wrong.
    fn tensor(&mut self, group: &[(ShardIndex, &'a Stored)]) -> Option<TensorInfo> {
        let (_, first) = group.first()?;
        let chosen = self.chosen(&first.name, group)?;
        let (_, first) = chosen.first()?;
        let made = match self.pieces(&chosen) {
            Some(pieces) => self.whole(&chosen, &pieces).map_err(|why| {
                self.boxes.push_tensor(&first.name, || format!("{}: {why}", quoted(&first.name)));
            }),
            None => self.only(&chosen),
        };
        let (shape, data) = made.ok()?;
        Some(TensorInfo { name: Arc::clone(&first.name), dtype: first.dtype.clone(), shape: shape.into(), data })
    }

    /// The pieces put together to the shape that is recorded, if one is.
    fn whole(&self, group: &[(ShardIndex, &Stored)], pieces: &[Piece]) -> Result<(Vec<usize>, TensorData), String> {
        let (shape, data) = dcp::assemble(pieces)?;
        let placed =
            |(shard, stored): &(ShardIndex, &Stored)| self.cuts.get(*shard as usize)?.get(stored.name.as_ref());
        dcp::check_whole(group.iter().filter_map(placed), &shape)?;
        Ok((shape, data))
    }

    /// Those of one name that count: all of them without an index, else what lies in the file that the index names, and the
    /// other pieces of the same tensor where that is a piece. Where the index disagrees with the files, that is noted.
    fn chosen(&mut self, name: &Arc<str>, group: &[(ShardIndex, &'a Stored)]) -> Option<Vec<(ShardIndex, &'a Stored)>> {
        let Some(index) = self.index else { return Some(group.to_vec()) };
        let Some(&file) = index.tensors().get(name) else {
            self.unlisted.push(|| quoted(name));
            return None;
        };
        let Some(named) = group.iter().find(|(shard, _)| *shard as usize == file) else {
            let (said, found) =
                (self.file(file), group.first().map_or(String::new(), |(at, _)| self.file(*at as usize)));
            self.stale.push_tensor(name, || format!("{} is not in {said} but in {found}", quoted(name)));
            return None;
        };
        let start = self.start(named);
        let is_other_piece = |other: &(ShardIndex, &Stored)| {
            let there = self.start(other);
            start.is_some() && there.is_some() && (there != start || other.1.shape != named.1.shape)
        };
        let counts = |other: &&(ShardIndex, &Stored)| other.0 == named.0 || is_other_piece(other);
        let (chosen, copies): (Vec<_>, Vec<_>) = group.iter().partition(counts);
        if !copies.is_empty() {
            let files: Vec<_> = copies.iter().map(|(shard, _)| self.file(*shard as usize)).collect();
            let taken = self.file(file);
            self.copies.push(|| copy(name, &taken, &files));
        }
        Some(chosen)
    }

    /// Where a piece begins in its tensor, if its file says that it is one.
    fn start(&self, (shard, stored): &(ShardIndex, &Stored)) -> Option<&'a Vec<usize>> {
        Some(&self.cuts.get(*shard as usize)?.get(stored.name.as_ref())?.start)
    }

    /// The group as pieces of a cut tensor, if every file says that it is one.
    fn pieces(&self, group: &[(ShardIndex, &'a Stored)]) -> Option<Vec<Piece<'a>>> {
        let piece = |it: &(ShardIndex, &'a Stored)| Some(Piece { shard: it.0, stored: it.1, start: self.start(it)? });
        group.iter().map(piece).collect()
    }

    /// A tensor that must be in one file only.
    fn only(&mut self, group: &[(ShardIndex, &Stored)]) -> Result<(Vec<usize>, TensorData), ()> {
        let &[(shard, stored)] = group else {
            let name = &group.first().ok_or(())?.1.name;
            let files: Vec<_> = group.iter().map(|(shard, _)| self.file(*shard as usize)).collect();
            self.twice.push_tensor(name, || format!("{} is in {}", quoted(name), files.join(" and in ")));
            return Err(());
        };
        let extent = Extent { shard, offset: stored.offset, len: stored.len };
        Ok((stored.shape.clone(), TensorData::Whole(extent)))
    }

    fn file(&self, at: usize) -> String {
        self.heads.get(at).map_or(String::new(), name_of)
    }
}

/// `"a" is taken from "x", not from "y"`: a tensor that lies in several files and that the index maps to one of them.
pub(super) fn copy(name: &str, taken: &str, others: &[String]) -> String {
    format!("{} is taken from {taken}, not from {}", quoted(name), others.join(" or "))
}

/// The warning about copies in files that the index does not name for them.
pub(super) fn copies_left_alone(copies: &Listed) -> Option<String> {
    let count = || counted(copies.len(), "tensor");
    (!copies.is_empty())
        .then(|| format!("the index decides where {} that lie in several files come from: {copies}", count()))
}
