//! What `.metadata` says of a folder of PyTorch's distributed checkpoint (DCP): which boxes of which tensors lie where in which file.
//!
//! It is a pickle, which PyTorch itself unpickles without a check; here it goes through the same machine as every other. Objects
//! that are no tensors are named and not read. No file is opened here.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;

use vramp_text::{Listed, quoted};

use crate::aside::{Aside, Loss};
use crate::finding::Finding;
use crate::kinds;
use crate::nested::{class, numbers};
use crate::pickle::{Arena, Id};
use crate::pickled::Pickled;
use crate::read::{Refused, demand};

/// The name of the file that describes the folder.
pub const METADATA: &str = ".metadata";

/// A tensor as `.metadata` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// Its element type, as safetensors calls it.
    pub element: &'static str,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// Where each box begins, and its size.
    pub boxes: Vec<(Vec<u64>, Vec<u64>)>,
}

/// Where an item lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The name of the file.
    pub file: String,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Whether a file of that name describes such a folder: all of it, or what one rank has.
pub fn is_metadata(name: &OsStr) -> bool {
    let rank = name.to_str().and_then(|name| name.strip_prefix("__")?.strip_suffix(METADATA));
    name == METADATA || rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What is wrong with a description.
pub(crate) fn objection(pickled: &Pickled) -> Option<Finding> {
    let escapes = match Description::of(pickled) {
        Ok(description) => description.escapes(),
        Err(finding) => return Some(finding),
    };
    let list: Listed = escapes.into_iter().collect();
    let what = format!("it places items in files elsewhere: {list}");
    (!list.is_empty()).then(|| Finding::suspicious("dcp-metadata", what))
}

/// What `.metadata` says.
#[derive(Debug)]
pub struct Description {
    /// By name.
    pub tensors: Vec<(String, Described)>,
    /// By the tensor's name and where the box begins.
    pub places: HashMap<(String, Option<Vec<u64>>), Place>,
    /// What is no tensor, or of a type that safetensors lacks.
    pub skipped: Vec<Aside>,
}

type Checked<T> = Result<T, Finding>;

fn damaged<T>(what: impl Into<String>) -> Checked<T> {
    Err(Finding::malformed("dcp-metadata", what))
}

/// The fields of a data class, by name.
fn field(arena: &Arena, object: Id, name: &str) -> Option<Id> {
    arena.member(arena.as_call(object)?.state?, name)
}

impl Description {
    /// Reads a description.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(bytes: Vec<u8>, skip_unknown: bool) -> Result<Description, Refused> {
        let len = bytes.len();
        let mut pickled = Pickled::run(bytes, 0, None);
        pickled.check_end(len, METADATA);
        demand(&pickled.findings, skip_unknown)?;
        let refused = |finding| Refused { findings: vec![finding], ..Refused::default() };
        Description::of(&pickled).map_err(refused)
    }

    fn of(pickled: &Pickled) -> Checked<Description> {
        let arena = &pickled.ran.arena;
        let root = pickled.ran.result.filter(|root| class(arena, *root) == "Metadata");
        let Some(root) = root else { return damaged("it does not hold a description of a distributed checkpoint") };
        let pairs = |name| field(arena, root, name).and_then(|id| arena.as_dict(id));
        let (Some(tensors), Some(places)) = (pairs("state_dict_metadata"), pairs("storage_data")) else {
            return damaged("the list of tensors or that of their places is missing");
        };
        let mut found = Description { tensors: Vec::new(), places: HashMap::new(), skipped: Vec::new() };
        for (name, object) in tensors {
            let Some(name) = arena.as_text(*name) else { return damaged("a tensor whose name is no text") };
            found.describe(arena, name, *object)?;
        }
        for (key, info) in places {
            found.place(arena, *key, *info)?;
        }
        found.tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    fn describe(&mut self, arena: &Arena, name: &str, object: Id) -> Checked<()> {
        if class(arena, object) != "TensorStorageMetadata" {
            let why = "plain data that is pickled: not read".to_owned();
            self.skipped.push(Aside::new(name, why, 0, Loss::None));
            return Ok(());
        }
        let described = described(arena, object);
        let Some((module, kind, shape, boxes)) = described else {
            return damaged(format!("the description of tensor {name:?} is not whole"));
        };
        match kinds::of_dtype(&module, &kind).and_then(|kind| kind.dtype) {
            Some(element) => self.tensors.push((name.to_owned(), Described { element, shape, boxes })),
            None => {
                let why = format!("a tensor of {kind}, which safetensors lacks");
                let loss = Loss::OfConvert("tensor of a type that safetensors lacks");
                self.skipped.push(Aside::new(name, why, 1, loss));
            }
        }
        Ok(())
    }

    fn place(&mut self, arena: &Arena, key: Id, info: Id) -> Checked<()> {
        let read = || {
            let name = arena.as_text(field(arena, key, "fqn")?)?.to_owned();
            let offset = field(arena, key, "offset").and_then(|offset| numbers(arena, offset));
            let number = |name| u64::try_from(arena.as_int(field(arena, info, name)?)?).ok();
            let file = arena.as_text(field(arena, info, "relative_path")?)?.to_owned();
            Some(((name, offset), Place { file, offset: number("offset")?, len: number("length")? }))
        };
        let Some((key, place)) = read() else { return damaged("the place of a tensor is not whole") };
        match self.places.insert(key, place) {
            None => Ok(()),
            Some(_) => damaged("one box of a tensor has two places"),
        }
    }

    /// Files of other folders that it names, quoted.
    pub fn escapes(&self) -> BTreeSet<String> {
        let escapes = self.places.values().filter(|place| !is_plain_name(&place.file));
        escapes.map(|place| quoted(&place.file)).collect()
    }
}

/// Whether a name is that of a file beside the one that names it, on any system.
fn is_plain_name(name: &str) -> bool {
    let is_drive = matches!(name.as_bytes(), [letter, b':', ..] if letter.is_ascii_alphabetic());
    !name.is_empty() && name != "." && name != ".." && !is_drive && !name.contains(['/', '\\', '\0'])
}

/// Module and name of the element type, the shape, the boxes.
type Read = (String, String, Vec<u64>, Vec<(Vec<u64>, Vec<u64>)>);

fn described(arena: &Arena, object: Id) -> Option<Read> {
    let properties = arena.as_call(field(arena, object, "properties")?)?.state?;
    let dtype = match arena.as_tuple(properties) {
        Some(fields) => *fields.first()?,
        None => arena.member(properties, "dtype")?,
    };
    let (module, name) = arena.as_global(dtype)?;
    let shape = numbers(arena, field(arena, object, "size")?)?;
    let chunk = |chunk: &Id| {
        let part = |name| numbers(arena, field(arena, *chunk, name)?);
        Some((part("offsets")?, part("sizes")?))
    };
    let boxes = arena.as_sequence(field(arena, object, "chunks")?)?.iter().map(chunk).collect::<Option<_>>()?;
    Some((module.to_owned(), name.to_owned(), shape, boxes))
}
