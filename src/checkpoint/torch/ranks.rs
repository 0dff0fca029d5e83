//! The files that the ranks of a parallel program wrote with `torch.save`, one each, put together to whole tensors.
//!
//! `sharded` says which box of which tensor a file has; here all ranks must be there and agree, and `dcp` puts the boxes together as it
//! does those of a distributed checkpoint. Boxes that several ranks have are taken from the first. What no rank says to be cut is taken
//! from the first rank, if all have it alike. It reads no tensor: no byte is compared, but the sums that archives state are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use vramp_pickle::bytes::{self, Bytes};
use vramp_pickle::{Bounds, Layout};

use super::Opened;
use super::{BEGINNING, Part, Reader, recognise};
use crate::checkpoint::dcp::{self, Piece};
use crate::checkpoint::options::OpenOptions;
use crate::checkpoint::rank_files::RankSet;
use crate::checkpoint::safetensors::Stored;
use crate::checkpoint::{Checkpoint, Format, Shard, Skipped, TensorData, TensorInfo};
use crate::dtype::{StoredDtype, dims};
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::fault::{Fault, Listed, counted, quoted};

/// Opens a set of such files; `None` where the names do not say how many there are, and no tensor in them is cut.
pub(crate) fn open(folder: &Path, set: &RankSet, options: &OpenOptions) -> Result<Option<Checkpoint>> {
    if let Some(world) = set.world {
        demand_all(folder, set, world)?;
    }
    let mut all = Ranks::new(folder, options);
    for (rank, name) in &set.files {
        all.file(*rank, name)?;
    }
    match set.world {
        _ if all.cut.is_empty() && set.world.is_none() => return Ok(None),
        _ if all.cut.is_empty() => return Err(nothing_cut(folder, set)),
        Some(_) => {}
        None => demand_all(folder, set, all.world())?,
    }
    all.finish(set.world).map(Some)
}

fn demand_all(folder: &Path, set: &RankSet, world: u64) -> Result<()> {
    let (missing, names, beyond) = set.differs(world);
    if missing == 0 && beyond.is_empty() {
        return Ok(());
    }
    let more = if names.len() as u64 == missing { "" } else { ", …" };
    let what = match beyond.first() {
        Some(name) => format!("{}: {} is the file of no rank of {world}", folder.display(), quoted(name)),
        None => format!(
            "{}: the files of {missing} of {world} ranks are missing: {}{more}",
            folder.display(),
            names.join(", ")
        ),
    };
    let hint = "each rank holds a part of the tensors: the files of all ranks of one save are needed, and of no other";
    Err(Error::NotFound { what, hint: Some(hint.into()) })
}

fn nothing_cut(folder: &Path, set: &RankSet) -> Error {
    let what = format!(
        "the files of {} ranks, in which no tensor says how it is cut over them (no DTensor, no ShardedTensor): whether they \
         are copies or parts is not known; name the one file that you want, as {}",
        set.files.len(),
        quoted(&set.example())
    );
    Error::Unsupported { path: folder.to_owned(), tensor: None, what }
}

/// A tensor that is cut.
struct Whole {
    /// The first rank that has it, and its layout there.
    rank: u64,
    shape: Vec<usize>,
    dtype: Option<StoredDtype>,
    layout: Layout,
    /// The ranks that have it.
    ranks: BTreeSet<u64>,
    pieces: BTreeMap<Bounds, (ShardIndex, Stored)>,
}

/// A tensor that is not cut, as the first rank has it.
struct Plain {
    tensor: TensorInfo,
    sum: Option<u32>,
    ranks: u64,
    differs: bool,
}

/// The files so far.
struct Ranks<'a> {
    folder: &'a Path,
    options: &'a OpenOptions,
    files: u64,
    format: Format,
    shards: Vec<Shard>,
    cut: BTreeMap<String, Whole>,
    plain: BTreeMap<Arc<str>, Plain>,
    shared: Vec<Vec<Arc<str>>>,
    skipped: Vec<Skipped>,
    warnings: Vec<String>,
    problems: Listed,
    /// Those that have a problem: one is told of each.
    wrong: BTreeSet<String>,
}

impl<'a> Ranks<'a> {
    fn new(folder: &'a Path, options: &'a OpenOptions) -> Ranks<'a> {
        Ranks {
            folder,
            options,
            files: 0,
            format: Format::TorchZip,
            shards: Vec::new(),
            cut: BTreeMap::new(),
            plain: BTreeMap::new(),
            shared: Vec::new(),
            skipped: Vec::new(),
            warnings: Vec::new(),
            problems: Listed::new(),
            wrong: BTreeSet::new(),
        }
    }

    /// How many ranks there must be at least, by what the files say.
    fn world(&self) -> u64 {
        let least = self.cut.values().map(|whole| match &whole.layout {
            // Each box is some rank's; copies of it do not say how many they are.
            Layout::Boxes(boxes) => boxes.len() as u64,
            Layout::Mesh { .. } => whole.layout.ranks(),
        });
        least.max().unwrap_or(0).max(self.files)
    }

    fn file(&mut self, rank: u64, name: &str) -> Result<()> {
        let path = self.folder.join(name);
        let file = Opened::of(&*self.options.storage, &path)?;
        let beginning = bytes::read_vec(&file, 0, file.len().min(BEGINNING));
        let beginning = beginning.map_err(|error| Error::io("read", &path, error))?;
        let Some(kind) = recognise(&beginning, file.len()) else {
            let what = "no file of torch.save, though its name is that of one rank of a parallel program".to_owned();
            return Err(Error::Unsupported { path, tensor: None, what });
        };
        let number = ShardIndex::try_from(self.shards.len()).unwrap_or(ShardIndex::MAX);
        let reader = Reader { path: &path, options: self.options, rank: Some(rank) };
        let (part, format) = reader.part(&file, kind, number)?;
        let Part { tensors, recipe, shared, skipped, warnings, cut, sums } = part;
        (self.files, self.format) = (self.files + 1, format);
        let shard = Shard { path: path.clone(), bytes: file.len(), version: file.version().clone(), derived: None };
        let made = (!recipe.is_empty()).then(|| shard.made_by(recipe));
        self.shards.push(shard);
        self.shards.extend(made);
        self.shared.extend(shared);
        self.skipped.extend(skipped);
        self.warnings.extend(warnings);
        let mut tensors: BTreeMap<Arc<str>, TensorInfo> =
            tensors.into_iter().map(|tensor| (Arc::clone(&tensor.name), tensor)).collect();
        for found in cut {
            let mut parts = Vec::new();
            for (name, (_, bounds)) in found.parts.iter().zip(found.cut.parts) {
                if let Some(tensor) = tensors.remove(name.as_str()) {
                    parts.push((bounds, tensor));
                }
            }
            self.cut(rank, found.name, (dims(&found.cut.shape), found.cut.layout), parts);
        }
        for (name, tensor) in tensors {
            let sum = sums.get(name.as_ref()).copied();
            self.plain(rank, name, tensor, sum);
        }
        Ok(())
    }

    fn cut(
        &mut self,
        rank: u64,
        name: String,
        (shape, layout): (Vec<usize>, Layout),
        parts: Vec<(Bounds, TensorInfo)>,
    ) {
        let whole = self.cut.entry(name.clone()).or_insert_with(|| Whole {
            rank,
            shape: shape.clone(),
            dtype: None,
            layout: layout.clone(),
            ranks: BTreeSet::new(),
            pieces: BTreeMap::new(),
        });
        let first = whole.rank;
        if whole.shape != shape {
            let known = whole.shape.clone();
            return self.problem(&name, format!("{known:?} in all to rank {first}, {shape:?} to rank {rank}"));
        }
        if whole.layout != layout {
            return self.problem(
                &name,
                format!("rank {first} and rank {rank} say that it is cut differently, or over other ranks"),
            );
        }
        whole.ranks.insert(rank);
        let mut other = None;
        for (bounds, tensor) in parts {
            let known = whole.dtype.get_or_insert_with(|| tensor.dtype.clone());
            if *known != tensor.dtype {
                other = Some(format!("{known} to rank {first}, {} to rank {rank}", tensor.dtype));
                continue;
            }
            let TensorData::Whole(extent) = &tensor.data else { continue };
            let shape = tensor.shape.to_vec();
            let stored =
                Stored { name: tensor.name, dtype: tensor.dtype, shape, offset: extent.offset, len: extent.len };
            whole.pieces.entry(bounds).or_insert((extent.shard, stored));
        }
        if let Some(what) = other {
            self.problem(&name, what);
        }
    }

    fn problem(&mut self, name: &str, what: String) {
        if self.wrong.insert(name.to_owned()) {
            self.problems.push_tensor(name, || format!("{}: {what}", quoted(name)));
        }
    }

    fn plain(&mut self, rank: u64, name: Arc<str>, tensor: TensorInfo, sum: Option<u32>) {
        let Some(known) = self.plain.get_mut(&name) else {
            self.plain.insert(name, Plain { tensor, sum, ranks: 1, differs: false });
            return;
        };
        known.ranks += 1;
        if (&known.tensor.dtype, &known.tensor.shape) != (&tensor.dtype, &tensor.shape) {
            let (dtype, shape) = (known.tensor.dtype.clone(), known.tensor.shape.to_vec());
            let what =
                format!("{dtype} {shape:?} to the first rank, {} {:?} to rank {rank}", tensor.dtype, tensor.shape);
            return self.problem(&name, what);
        }
        known.differs |= known.sum.zip(sum).is_some_and(|(one, other)| one != other);
    }

    fn finish(mut self, world: Option<u64>) -> Result<Checkpoint> {
        self.check(world);
        let mut tensors = Vec::with_capacity(self.cut.len() + self.plain.len());
        for (name, whole) in std::mem::take(&mut self.cut) {
            match whole.tensor(&name) {
                Ok(tensor) => tensors.push(tensor),
                Err(why) => self.problem(&name, why),
            }
        }
        std::mem::take(&mut self.problems)
            .into_fault(Fault::Boxes)
            .map_err(|fault| Error::malformed(self.folder, fault))?;
        let differ: Listed =
            self.plain.iter().filter(|(_, plain)| plain.differs).map(|(name, _)| quoted(name)).collect();
        if !differ.is_empty() {
            self.warnings.push(format!(
                "{} that no rank says to be cut: the ranks have other values, those of the first were taken: {differ}",
                counted(differ.len(), "tensor")
            ));
        }
        tensors.extend(self.plain.into_values().map(|plain| plain.tensor));
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Reader { path: self.folder, options: self.options, rank: None }.demand_free_names(&tensors)?;
        let known = |name: &Arc<str>| tensors.binary_search_by(|tensor| tensor.name.cmp(name)).is_ok();
        self.shared.iter_mut().for_each(|group| group.retain(known));
        self.shared.retain(|group| group.len() > 1);
        let mut seen = BTreeSet::new();
        self.shared.retain(|group| seen.insert(group.clone()));
        let mut seen = BTreeSet::new();
        self.skipped.retain(|skipped| seen.insert((skipped.name.clone(), skipped.why.clone())));
        let mut seen = BTreeSet::new();
        self.warnings.retain(|warning| seen.insert(warning.clone()));
        Ok(Checkpoint {
            path: self.folder.to_owned(),
            shards: self.shards,
            tensors,
            metadata: BTreeMap::new(),
            warnings: self.warnings,
            format: self.format,
            skipped: self.skipped,
            shared: self.shared,
            storage: Arc::clone(&self.options.storage),
        })
    }

    /// What must hold of all ranks together.
    fn check(&mut self, world: Option<u64>) {
        let world = world.unwrap_or(self.files);
        let mut wrong = Vec::new();
        for (name, whole) in &self.cut {
            if self.plain.contains_key(name.as_str()) {
                wrong.push((name.clone(), "some ranks say that it is cut, others that it is not cut".to_owned()));
            }
            let needed = whole.layout.ranks();
            if needed > world {
                wrong.push((
                    name.clone(),
                    format!("it is cut over a mesh with rank {}, but there are {world} ranks", needed - 1),
                ));
            }
            if let Layout::Mesh { ranks, .. } = &whole.layout
                && let Some(rank) = ranks.iter().find(|rank| !whole.ranks.contains(rank) && **rank < world)
            {
                wrong.push((name.clone(), format!("it is not in the file of rank {rank}, which should have a part")));
            }
        }
        for (name, plain) in self.plain.iter().filter(|(_, plain)| plain.ranks != self.files) {
            let what = format!("it is in the files of {} of {} ranks only, and not cut", plain.ranks, self.files);
            wrong.push((name.to_string(), what));
        }
        for (name, what) in wrong {
            self.problem(&name, what);
        }
    }
}

impl Whole {
    fn tensor(self, name: &str) -> Result<TensorInfo, String> {
        let Some(dtype) = self.dtype else { return Err("no rank has a part of it".into()) };
        let starts: Vec<Vec<usize>> = self.pieces.keys().map(|(start, _)| dims(start)).collect();
        let pieces = starts.iter().zip(self.pieces.values());
        let pieces: Vec<Piece> =
            pieces.map(|(start, (shard, stored))| Piece { shard: *shard, stored, start }).collect();
        let (shape, data) = dcp::assemble(&pieces)?;
        if shape != self.shape {
            return Err(format!("its parts make {shape:?}, its shape is {:?}", self.shape));
        }
        Ok(TensorInfo { name: name.into(), dtype, shape: shape.into(), data })
    }
}
