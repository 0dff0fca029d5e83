//! From a path to a [`Checkpoint`]: a weight file of whichever format, a folder, an index, a Hugging Face cache folder or a name in that cache.
//!
//! It reads headers, an index and `refs/main`, and nothing else. Which names of a folder count is `folder`'s knowledge, what
//! a header may say `safetensors`'s, and how files fit together `merge`'s.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vramp_text::lookalike;

use super::folder::{self, Choice, Files, LOOKED_FOR, NoChoice};
use super::index::Index;
use super::options::OpenOptions;
use super::torch::Opened;
use super::{Checkpoint, combine, hub, merge, nearest, rank_files, shard, torch};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::{Fault, Listed, counted, quoted};
use crate::setting::Setting;
use crate::storage::{Entry, EntryKind, Head, Location};

/// Ends of names that are weights in formats that are not read.
const FOREIGN: &[&str] = &[".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx", ".pkl", ".distcp"];

/// The end of the names of the parts of a distributed checkpoint.
const PART: &str = "distcp";

/// Ends of names of PyTorch's files.
const TORCH: &[&str] = &[".bin", ".pt", ".pth", ".ckpt"];

impl Checkpoint {
    /// Opens a checkpoint: a safetensors file, one of PyTorch's own (recognised by its content, never executed), a folder
    /// of either, an `*.index.json`, or a Hugging Face cache folder. Only headers are read, and no file stays open.
    ///
    /// # Errors
    /// When something is not there, or may not be read, or breaks a rule of its format; the message names the file, the
    /// tensor, what was expected and what was found.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_with(path, &OpenOptions::default())
    }

    /// Opens a checkpoint with other than the default options.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]. A header above the limit is [`Error::Limit`].
    pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Checkpoint> {
        let path = path.as_ref();
        let mut checkpoint = match head(options, path) {
            Ok(Head { kind: EntryKind::Folder, .. }) => open_folder(path, options),
            Ok(_) if is_index(path) => open_index(path, None, options),
            Ok(_) => open_file(path, options),
            Err(error) if is_absent(&error) && dangling(options, path).is_none() => open_name(path, options),
            Err(error) => Err(error),
        }?;
        checkpoint.storage = Arc::clone(&options.storage);
        let emptiness = checkpoint.emptiness();
        checkpoint.warnings.extend(emptiness);
        Ok(checkpoint)
    }
}

fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

fn head(options: &OpenOptions, path: &Path) -> Result<Head> {
    options.storage.head(&Location::from(path))
}

fn is_folder(options: &OpenOptions, path: &Path) -> bool {
    head(options, path).is_ok_and(|head| head.kind == EntryKind::Folder)
}

fn dangling(options: &OpenOptions, path: &Path) -> Option<String> {
    options.storage.dangling(&Location::from(path))
}

fn is_absent(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFound
}

/// Opens one file, whatever its name says that it is.
fn open_file(path: &Path, options: &OpenOptions) -> Result<Checkpoint> {
    let file = shard::open(&*options.storage, path)?;
    torch::dcp::refuse_alone(path, &*options.storage)?;
    let (beginning, len) = (shard::beginning(&*file, torch::BEGINNING)?, file.version().len());
    if let Some(kind) = torch::recognise(&beginning, len) {
        return torch::open(path, &Opened::from(&*file), kind, options);
    }
    // Under its own name a safetensors file is what everyone takes it for; under another, a second archive may be in it.
    let named = path.extension().is_some_and(|extension| extension == "safetensors");
    if !named && torch::hides_archive(&Opened::from(&*file)).map_err(|error| Error::io("read", path, error))? {
        return Err(Error::malformed(path, torch::hidden_archive()));
    }
    demand_no_key(path, options)?;
    refuse_openvino(path, &beginning, len, options)?;
    match shard::head_of(&*file, options.max_header_bytes) {
        Ok(head) => Ok(merge::one(path, head)),
        Err(error) => Err(by_name(path, error)),
    }
}

/// What a file is by its name, where its content says no more than that it is no safetensors file.
fn by_name(path: &Path, error: Error) -> Error {
    let says_nothing = match &error {
        Error::Malformed { fault, .. } => {
            matches!(
                **fault,
                Fault::HeaderPastEnd { .. }
                    | Fault::HeaderStart { .. }
                    | Fault::TooShort { .. }
                    | Fault::NotUtf8 { .. }
            )
        }
        Error::Limit { .. } => true,
        _ => false,
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match lookalike::by_name(&name).filter(|_| says_nothing) {
        Some(foreign) => Error::malformed(path, foreign.into()),
        None => error,
    }
}

/// The weights of OpenVINO are bytes without a head; what they are stands in the `.xml` of the same name.
fn refuse_openvino(path: &Path, beginning: &[u8], len: u64, options: &OpenOptions) -> Result<()> {
    let description = path.with_extension("xml");
    if path.extension().is_none_or(|end| end != "bin") || torch::is_safetensors(beginning, len) {
        return Ok(());
    }
    let begins = |text: &[u8]| text.starts_with(b"<?xml") || text.starts_with(b"<net");
    let known = shard::open(&*options.storage, &description).ok();
    let known = known.and_then(|file| shard::beginning(&*file, torch::BEGINNING).ok());
    if !known.is_some_and(|text| begins(text.trim_ascii_start())) {
        return Ok(());
    }
    let what = format!(
        "the weights of an OpenVINO model, without names or shapes: those are in {}; it is not read: use the safetensors or PyTorch \
         files that it was made from",
        description.file_name().unwrap_or_default().to_string_lossy()
    );
    Err(Error::Unsupported { path: path.to_owned(), tensor: None, what })
}

/// A key chooses within an object, and safetensors has none.
pub(super) fn demand_no_key(path: &Path, options: &OpenOptions) -> Result<()> {
    let Some(key) = &options.key else { return Ok(()) };
    let what = format!("{}: a safetensors file has no keys, so there is no {key:?}", path.display());
    Err(Error::Request { what, hint: Some(format!("choose tensors by their names, with {}", Setting::Include)) })
}

// ---- names

fn open_name(path: &Path, options: &OpenOptions) -> Result<Checkpoint> {
    let cached = options.hub_cache.as_deref().and_then(|cache| hub::cache_folder(path, cache));
    match cached.as_deref() {
        Some(folder) if is_folder(options, folder) => open_folder(folder, options),
        cached => Err(no_such_path(path, cached, options)),
    }
}

fn no_such_path(path: &Path, cached: Option<&Path>, options: &OpenOptions) -> Error {
    let what = match cached {
        None => format!("{}: no such file or folder", path.display()),
        Some(folder) => {
            format!("{}: no such file or folder, and not in the cache as {}", path.display(), folder.display())
        }
    };
    let download = || "vramp does not download: fetch the model first, for example with `hf download`".to_owned();
    let hint = near_file(path, options)
        .or_else(|| hub::model_name(path).filter(|name| name.contains('/')).map(|_| download()));
    Error::NotFound { what, hint }
}

fn near_file(path: &Path, options: &OpenOptions) -> Option<String> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(entries) = options.storage.list(&Location::from(parent)) else {
        return Some(format!("its folder {} is not there either", parent.display())).filter(|_| !path.is_relative());
    };
    let names: Vec<String> = entries.into_iter().take(10_000).map(|entry| entry.name).collect();
    nearest::hint(path.file_name()?.to_str()?, names.iter().map(String::as_str))
}

// ---- folders

fn open_folder(path: &Path, options: &OpenOptions) -> Result<Checkpoint> {
    if hub::is_cache_folder(&*options.storage, path) {
        return open_folder(&hub::snapshot(&*options.storage, path)?, options);
    }
    let listing = Listing::of(path, options)?;
    match folder::choose(&listing.files, options.variant.as_deref(), folder::SAFETENSORS) {
        Ok(Choice { files: Files::Index(name), others }) => open_index(&path.join(name), Some((path, others)), options),
        Ok(Choice { files: Files::Weights(names), others }) => open_weights(path, &names, &others, options),
        Err(why @ NoChoice::Nothing { .. }) => {
            open_torch_folder(path, &listing, options)?.ok_or_else(|| nothing_chosen(path, &listing, options, why))
        }
        Err(why) => Err(nothing_chosen(path, &listing, options, why)),
    }
}

/// A folder without safetensors: one of PyTorch's own files, a set of them, or its distributed checkpoint.
fn open_torch_folder(path: &Path, listing: &Listing, options: &OpenOptions) -> Result<Option<Checkpoint>> {
    match folder::choose(&listing.files, options.variant.as_deref(), folder::PYTORCH) {
        Ok(Choice { files: Files::Index(name), others }) => {
            return open_index(&path.join(name), Some((path, others)), options).map(Some);
        }
        Ok(Choice { files: Files::Weights(names), others }) => {
            let paths: Vec<PathBuf> = names.iter().map(|name| path.join(name)).collect();
            refuse_dangling(path, &paths, options)?;
            let mut checkpoint = open_each(path, paths.into_iter(), None, options)?;
            checkpoint.warnings.extend(left_alone(others.iter()));
            return Ok(Some(checkpoint));
        }
        Err(why @ (NoChoice::Incomplete { .. } | NoChoice::Ambiguous(_))) => {
            return Err(nothing_chosen(path, listing, options, why));
        }
        Err(NoChoice::Nothing { .. }) => {}
    }
    if listing.files.iter().any(|name| name == torch::dcp::METADATA) {
        return torch::dcp::open(path, options).map(Some);
    }
    let is_piece = |name: &&String| name.ends_with(".distcp");
    if let Some(name) = listing.files.iter().find(is_piece) {
        torch::dcp::refuse_alone(&path.join(name), &*options.storage)?;
    }
    if let Some(checkpoint) = open_ranks(path, listing, options)? {
        return Ok(Some(checkpoint));
    }
    let is_torch = |name: &&String| (name.ends_with(".pt") || name.ends_with(".pth")) && !folder::is_ignored(name);
    match listing.files.iter().filter(is_torch).collect::<Vec<_>>().as_slice() {
        [only] => open_each(path, std::iter::once(path.join(only)), None, options).map(Some),
        _ => Ok(None),
    }
}

/// The files that ranks of a parallel program wrote, one each.
fn open_ranks(path: &Path, listing: &Listing, options: &OpenOptions) -> Result<Option<Checkpoint>> {
    let sets = rank_files::sets(&listing.files);
    let Some(set) = sets.first() else { return Ok(None) };
    if let Some(other) = sets.iter().skip(1).find(|other| set.rivals(other)) {
        return Err(Error::NotFound {
            what: format!("{}: the files of several saves, each of several ranks", path.display()),
            hint: Some(format!(
                "put one set into a folder of its own: {}, {}",
                quoted(&set.example()),
                quoted(&other.example())
            )),
        });
    }
    let Some(mut checkpoint) = torch::ranks::open(path, set, options)? else { return Ok(None) };
    let is_other =
        |name: &&String| TORCH.iter().any(|end| name.ends_with(end)) && !set.files.values().any(|file| file == *name);
    checkpoint.warnings.extend(left_alone(listing.files.iter().filter(is_other)));
    Ok(Some(checkpoint))
}

/// Files that are opened each for itself, by their content, and joined.
fn open_each(
    path: &Path,
    files: impl Iterator<Item = PathBuf>,
    index: Option<&Index>,
    options: &OpenOptions,
) -> Result<Checkpoint> {
    let parts = files.map(|file| open_file(&file, options)).collect::<Result<Vec<_>>>()?;
    combine::join(path, parts, index)
}

/// The names of a folder, sorted.
struct Listing {
    files: Vec<String>,
    folders: Vec<String>,
}

impl Listing {
    fn of(path: &Path, options: &OpenOptions) -> Result<Listing> {
        let mut listing = Listing { files: Vec::new(), folders: Vec::new() };
        for Entry { name, kind } in options.storage.list(&Location::from(path))? {
            if kind == EntryKind::Folder { listing.folders.push(name) } else { listing.files.push(name) }
        }
        listing.files.sort();
        listing.folders.sort();
        Ok(listing)
    }
}

impl Listing {
    /// Whether some file is weights by its name.
    fn holds_weights(&self) -> bool {
        let is_weights = |name: &String| {
            let end = Path::new(name).extension().and_then(|end| end.to_str()).unwrap_or_default();
            let ends = ["safetensors", "bin", "pt", "pth", PART];
            name == torch::dcp::METADATA || (ends.contains(&end) && !folder::is_ignored(name))
        };
        self.files.iter().any(is_weights)
    }
}

fn open_weights(path: &Path, names: &[String], others: &[String], options: &OpenOptions) -> Result<Checkpoint> {
    demand_no_key(path, options)?;
    let paths: Vec<PathBuf> = names.iter().map(|name| path.join(name)).collect();
    refuse_dangling(path, &paths, options)?;
    let heads = shard::read_heads(&*options.storage, &paths, options.max_header_bytes)?;
    let mut checkpoint = merge::many(path, heads, None)?;
    checkpoint.warnings.extend(left_alone(others.iter()));
    Ok(checkpoint)
}

/// Refuses files of a folder that are links to nothing, all of them at once.
fn refuse_dangling(path: &Path, files: &[PathBuf], options: &OpenOptions) -> Result<()> {
    let name = |file: &PathBuf| quoted(&file.file_name().unwrap_or_default().to_string_lossy());
    let links = files.iter().filter_map(|file| Some(format!("{} is {}", name(file), dangling(options, file)?)));
    let links: Listed = links.collect();
    if links.is_empty() {
        return Ok(());
    }
    let what = format!("{}: {} to nothing: {links}", path.display(), counted(links.len(), "link"));
    Err(Error::NotFound { what, hint: Some(FETCH_BLOBS.into()) })
}

/// What to do about links to nothing.
const FETCH_BLOBS: &str = "the download was cut short or the files they mean were removed: fetch them again";

fn left_alone<'a>(files: impl Iterator<Item = &'a String>) -> Option<String> {
    let files: Listed = files.map(|name| quoted(name)).collect();
    (!files.is_empty())
        .then(|| format!("left alone: {}, no part of the model: {files}", counted(files.len(), "weight file")))
}

fn nothing_chosen(path: &Path, listing: &Listing, options: &OpenOptions, why: NoChoice) -> Error {
    match why {
        NoChoice::Incomplete { missing, total, names } => Error::NotFound {
            what: format!(
                "{}: {missing} of the {total} numbered weight files are missing: {}{}",
                path.display(),
                names.join(", "),
                if names.len() as u64 == missing { "" } else { ", …" }
            ),
            hint: Some("fetch them, or name the one file that you want".into()),
        },
        NoChoice::Ambiguous(indexes) => Error::NotFound {
            what: format!("{}: several indexes, and none is model.safetensors.index.json", path.display()),
            hint: Some(format!("name the one that you want: {}", indexes.join(", "))),
        },
        NoChoice::Nothing { ignored, variants } => match foreign(path, listing, options) {
            Some(what) if ignored.is_empty() && variants.is_empty() => {
                Error::Unsupported { path: path.to_owned(), tensor: None, what }
            }
            _ => nothing_found(path, listing, options, &ignored, &variants),
        },
    }
}

fn foreign(path: &Path, listing: &Listing, options: &OpenOptions) -> Option<String> {
    let is_foreign = |name: &&String| FOREIGN.iter().chain(TORCH).chain(&[".sft"]).any(|end| name.ends_with(end));
    let found: Listed = listing.files.iter().filter(is_foreign).map(|name| quoted(name)).collect();
    let below = folders_hint(path, listing, options);
    let then = if below.is_some() { "" } else { ": name the file that you want" };
    let what = format!("nothing here is the model's by its name, there is only {found}{then}");
    (!found.is_empty()).then(|| below.map_or(what.clone(), |below| format!("{what}; {below}")))
}

fn nothing_found(
    path: &Path,
    listing: &Listing,
    options: &OpenOptions,
    ignored: &[String],
    variants: &[String],
) -> Error {
    let looked_for = match &options.variant {
        None => LOOKED_FOR.to_owned(),
        Some(word) => format!("model.safetensors.index.{word}.json, model.{word}.safetensors, *.{word}.safetensors"),
    };
    let what = format!("{}: no weights found; looked for {looked_for}", path.display());
    let hint = variants_hint(options, variants)
        .or_else(|| ignored_hint(ignored))
        .or_else(|| folders_hint(path, listing, options));
    Error::NotFound { what, hint }
}

fn variants_hint(options: &OpenOptions, variants: &[String]) -> Option<String> {
    let found: Listed = variants.iter().map(|name| quoted(name)).collect();
    let ask = match options.variant {
        None => format!(" (ask for a copy with {})", Setting::Variant),
        Some(_) => String::new(),
    };
    (!found.is_empty()).then(|| format!("there is {found}{ask}"))
}

fn ignored_hint(ignored: &[String]) -> Option<String> {
    let found: Listed = ignored.iter().map(|name| quoted(name)).collect();
    (!found.is_empty()).then(|| format!("files that are not the model's weights are left alone unless named: {found}"))
}

/// Sub-folders are never searched, but those that hold weights are worth a word: of any format, also two levels below.
fn folders_hint(path: &Path, listing: &Listing, options: &OpenOptions) -> Option<String> {
    const MOST_FOLDERS: usize = 50;
    let mut found = Listed::new();
    for name in listing.folders.iter().filter(|name| !folder::is_ignored(name)).take(MOST_FOLDERS) {
        let Ok(inside) = Listing::of(&path.join(name), options) else { continue };
        if inside.holds_weights() {
            found.push(|| quoted(name));
            continue;
        }
        for below in inside.folders.iter().filter(|below| !folder::is_ignored(below)).take(MOST_FOLDERS) {
            let below = format!("{name}/{below}");
            if Listing::of(&path.join(&below), options).is_ok_and(|listing| listing.holds_weights()) {
                found.push(|| quoted(&below));
            }
        }
    }
    (!found.is_empty())
        .then(|| format!("sub-folders are not searched, but there are weights in {found}: name one of them"))
}

// ---- indexes

/// Opens what an index names. `within` is the folder that was opened and its weight files, where it was a folder.
fn open_index(path: &Path, within: Option<(&Path, Vec<String>)>, options: &OpenOptions) -> Result<Checkpoint> {
    let text = shard::read_text(&*options.storage, path, options.max_header_bytes)?;
    let index = Index::parse(&text).map_err(|fault| Error::malformed(path, fault))?;
    refuse_foreign_files(path, &index)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let paths: Vec<PathBuf> = index.files().iter().map(|name| folder.join(name)).collect();
    demand_present(path, &index, &paths, options)?;
    let is_safetensors = |name: &String| name.ends_with(".safetensors");
    let mut checkpoint = if index.files().iter().all(is_safetensors) {
        demand_no_key(path, options)?;
        merge::many(path, shard::read_heads(&*options.storage, &paths, options.max_header_bytes)?, Some(&index))?
    } else {
        open_each(path, paths.into_iter(), Some(&index), options)?
    };
    if let Some((folder, files)) = within {
        checkpoint.path = folder.to_owned();
        checkpoint.warnings.extend(left_alone(files.iter().filter(|name| !index.files().contains(name))));
    }
    Ok(checkpoint)
}

fn refuse_foreign_files(path: &Path, index: &Index) -> Result<()> {
    let is_foreign = |name: &&String| FOREIGN.iter().any(|end| name.ends_with(end));
    let foreign: Listed = index.files().iter().filter(is_foreign).map(|name| quoted(name)).collect();
    if foreign.is_empty() {
        return Ok(());
    }
    let what = format!("the index names files of other formats, which are not loaded: {foreign}");
    Err(Error::Unsupported { path: path.to_owned(), tensor: None, what })
}

fn demand_present(path: &Path, index: &Index, paths: &[PathBuf], options: &OpenOptions) -> Result<()> {
    let is_absent = |path: &Path| head(options, path).is_err_and(|error| is_absent(&error));
    let (mut absent, mut links) = (Listed::new(), Listed::new());
    for (at, name) in index.files().iter().enumerate() {
        let Some(path) = paths.get(at).filter(|path| is_absent(path)) else { continue };
        // Looked up for the files that are shown only: an index may name a million of them.
        let tensors = || examples(index.tensors_of(at));
        match dangling(options, path) {
            Some(link) => links.push(|| format!("{} (with {}) is {link}", quoted(name), tensors())),
            None => absent.push(|| format!("{} (with {})", quoted(name), tensors())),
        }
    }
    if absent.is_empty() && links.is_empty() {
        return Ok(());
    }
    let absent_words = || format!("{}, not there: {absent}", counted(absent.len(), "file"));
    let dangling_words = || format!("{} to nothing: {links}", counted(links.len(), "link"));
    let what = match (absent.is_empty(), links.is_empty()) {
        (false, true) => absent_words(),
        (true, _) => dangling_words(),
        (false, false) => format!("{}; and {}", absent_words(), dangling_words()),
    };
    let whole = path.with_file_name("model.safetensors");
    Err(Error::NotFound {
        what: format!("{}: the index names {what}", path.display()),
        hint: Some(match shard::is_file(&*options.storage, &whole) {
            true => format!("fetch them; or, if the index is an old one, open {} itself", whole.display()),
            false if absent.is_empty() => FETCH_BLOBS.into(),
            false => "fetch them: the download was cut short, or the index is of another version".into(),
        }),
    })
}

/// `291 tensors, as "a", "b", "c"`: how many there are, and the first few.
fn examples<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 3;
    let (mut shown, mut total) = (Vec::with_capacity(SHOWN), 0);
    for name in names {
        total += 1;
        if total <= SHOWN {
            shown.push(quoted(name));
        }
    }
    let some = if total > SHOWN { ", as" } else { ":" };
    format!("{}{some} {}", counted(total, "tensor"), shown.join(", "))
}
