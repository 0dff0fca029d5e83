//! Which file each tensor of a save goes to, and the bytes of headers and index: plain data, made before anything is written.
//!
//! What it lays out is what the safetensors crate writes: within a file wide element types first, then by name, nothing
//! between the tensors, the header filled up with spaces. It never opens anything and never sees a tensor's bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use crate::checkpoint::safetensors::{LENGTH_BYTES, MAX_HEADER_BYTES};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::extent::align_up;
use crate::fault::{Listed, quoted};

/// The metadata of every file that says who may read it; some readers demand it.
const FORMAT: (&str, &str) = ("format", "pt");

/// The name that the format keeps for itself.
const RESERVED: &str = "__metadata__";

/// Where the tensors of a small file begin: on a multiple of 8 bytes, as in files of the safetensors crate.
const SMALL_ALIGN: u64 = 8;

/// Where the tensors of a large file begin: on a block, so that direct I/O needs no copy where a tensor's length is a whole
/// number of blocks too, which those of most matrices are.
const LARGE_ALIGN: u64 = 4096;

/// A file with as many bytes of tensors is large.
const LARGE_BYTES: u64 = 1 << 20;

/// A tensor to be saved, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outline {
    /// Name.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first; empty for a scalar.
    pub shape: Arc<[usize]>,
}

impl Outline {
    /// A tensor of that name, element type and shape.
    pub fn new(name: impl Into<Arc<str>>, dtype: Dtype, shape: impl Into<Arc<[usize]>>) -> Outline {
        Outline { name: name.into(), dtype, shape: shape.into() }
    }
}

/// Names and texts that belong to a save beside its tensors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notes {
    /// The `__metadata__` of every file. `format: pt` is added where there is no `format`.
    pub metadata: BTreeMap<String, String>,
    /// Further names of tensors, as `safetensors.torch.save_model` records them: alias and name.
    pub ties: BTreeMap<Arc<str>, Arc<str>>,
}

/// A save as it will lie on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layout {
    /// The tensors, as they were given.
    pub tensors: Vec<Outline>,
    /// The files, in the order in which they are written.
    pub shards: Vec<ShardLayout>,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// One file of a save.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardLayout {
    /// The bytes before the tensors: the header and its length.
    pub header: Vec<u8>,
    /// The tensors in the order of their bytes: indices into [`Layout::tensors`].
    pub tensors: Vec<usize>,
    /// Bytes of the whole file.
    pub bytes: u64,
}

impl Outline {
    /// Bytes of the elements; `None` where they do not fill whole bytes, overflow 64 bits, or the type is unknown.
    pub fn bytes(&self) -> Option<u64> {
        self.dtype.tensor_bytes(&self.shape)
    }
}

impl Layout {
    /// Divides `tensors`, in their order, into files with at most `max_shard_bytes` bytes of tensors each; a larger tensor has
    /// a file of its own. `to` is where they go, for errors.
    ///
    /// # Errors
    /// All tensors of the first kind that cannot be saved: the name `__metadata__`, an unknown element type, a shape that
    /// does not fill bytes, a name given twice. [`Error::Limit`] for a header that no reader takes.
    pub fn new(to: &Path, tensors: Vec<Outline>, notes: &Notes, max_shard_bytes: u64) -> Result<Layout> {
        let sizes = check(to, &tensors, notes)?;
        let shards =
            divide(&sizes, max_shard_bytes).into_iter().map(|shard| ShardLayout::new(to, shard, &tensors, notes));
        let shards = shards.collect::<Result<Vec<_>>>()?;
        let bytes = sizes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        Ok(Layout { tensors, shards, bytes })
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().fold(0, |sum, shard| sum.saturating_add(shard.bytes))
    }

    /// The `index.json` of the files, given their names.
    pub fn index(&self, names: &[String]) -> String {
        let of = |(shard, file): (&ShardLayout, &String)| {
            let name = |&at: &usize| Some((self.tensors.get(at)?.name.to_string(), file.clone()));
            shard.tensors.iter().filter_map(name).collect::<Vec<_>>()
        };
        let map: BTreeMap<String, String> = self.shards.iter().zip(names).flat_map(of).collect();
        let index = json!({"metadata": {"total_size": self.bytes}, "weight_map": map});
        format!("{index:#}\n")
    }
}

// ---- what cannot be saved

/// The bytes of each tensor, if all can be saved.
fn check(to: &Path, tensors: &[Outline], notes: &Notes) -> Result<Vec<u64>> {
    refuse_reserved(to, tensors, notes)?;
    refuse_twice(tensors, notes)?;
    sizes(to, tensors)
}

fn unsupported(to: &Path, problems: &Listed, what: String) -> Result<()> {
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Error::Unsupported { path: to.to_owned(), tensor: problems.tensor().map(str::to_owned), what }),
    }
}

fn refuse_reserved(to: &Path, tensors: &[Outline], notes: &Notes) -> Result<()> {
    let names = tensors.iter().map(|tensor| &tensor.name).chain(notes.ties.keys());
    let mut reserved = Listed::new();
    for name in names.filter(|name| name.as_ref() == RESERVED) {
        reserved.push_tensor(name, || quoted(name));
    }
    let what = "no tensor can have the name `__metadata__`: the format keeps it for itself; give it another name";
    unsupported(to, &reserved, what.to_owned())
}

fn refuse_twice(tensors: &[Outline], notes: &Notes) -> Result<()> {
    let mut seen = BTreeSet::new();
    let taken = notes.metadata.keys().map(String::as_str).filter(|_| !notes.ties.is_empty());
    let names = tensors.iter().map(|tensor| tensor.name.as_ref());
    let aliases: BTreeSet<&str> = notes.ties.keys().map(AsRef::as_ref).collect();
    let twice: Listed = names.filter(|name| !seen.insert(*name) || aliases.contains(name)).map(quoted).collect();
    let kept: Listed = taken.chain([FORMAT.0]).filter(|key| aliases.contains(key)).map(quoted).collect();
    let what = match (twice.is_empty(), kept.is_empty()) {
        (true, true) => return Ok(()),
        (false, _) => format!("tensors of the same name cannot be saved: {twice}"),
        (true, false) => {
            format!("a further name cannot be recorded, since the metadata has a text of that name: {kept}")
        }
    };
    Err(Error::Request { what, hint: None })
}

fn sizes(to: &Path, tensors: &[Outline]) -> Result<Vec<u64>> {
    let mut wrong = Listed::new();
    let mut sizes = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        match tensor.bytes() {
            Some(bytes) => sizes.push(bytes),
            None => wrong.push_tensor(&tensor.name, || {
                format!("{} (shape {:?} of {})", quoted(&tensor.name), tensor.shape, tensor.dtype)
            }),
        }
    }
    let what = format!("the elements do not fill whole bytes, or pass 64 bits: {wrong}");
    unsupported(to, &wrong, what).map(|()| sizes)
}

// ---- which file

/// The tensors of each file. Without any tensor there is one file, of none.
fn divide(sizes: &[u64], max_shard_bytes: u64) -> Vec<Vec<usize>> {
    let mut shards = vec![Vec::new()];
    let mut filled = 0u64;
    for (at, &bytes) in sizes.iter().enumerate() {
        let full = filled.saturating_add(bytes) > max_shard_bytes;
        if let Some(shard) = shards.last_mut().filter(|shard| !full || shard.is_empty()) {
            shard.push(at);
            filled = filled.saturating_add(bytes);
        } else {
            shards.push(vec![at]);
            filled = bytes;
        }
    }
    shards
}

// ---- one file

impl ShardLayout {
    fn new(to: &Path, mut tensors: Vec<usize>, outlines: &[Outline], notes: &Notes) -> Result<ShardLayout> {
        let outline = |at: &usize| outlines.get(*at);
        tensors
            .sort_by_cached_key(|at| outline(at).map(|it| (std::cmp::Reverse(rank(&it.dtype)), Arc::clone(&it.name))));
        let placed: Vec<&Outline> = tensors.iter().filter_map(outline).collect();
        let (text, data) = header_text(&placed, notes);
        let align = if data < LARGE_BYTES { SMALL_ALIGN } else { LARGE_ALIGN };
        let start = align_up(LENGTH_BYTES.saturating_add(text.len() as u64), align);
        let header_bytes = start - LENGTH_BYTES;
        if header_bytes > MAX_HEADER_BYTES {
            return Err(Error::Limit {
                what: format!("the length in bytes of a header for {}", to.display()),
                limit: MAX_HEADER_BYTES,
                found: header_bytes,
                hint: Some("readers refuse it: save to more files, of fewer tensors each".to_owned()),
            });
        }
        let mut header = header_bytes.to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        header.resize(usize::try_from(start).unwrap_or(usize::MAX), b' '); // start is below the limit
        Ok(ShardLayout { header, tensors, bytes: start.saturating_add(data) })
    }
}

/// Wide types have a high rank: whatever a tensor's length, the next one is aligned for its own type.
fn rank(dtype: &Dtype) -> usize {
    Dtype::ALL.iter().position(|known| known == dtype).unwrap_or(0)
}

/// The header of a file with those tensors, and how many bytes they have.
fn header_text(tensors: &[&Outline], notes: &Notes) -> (String, u64) {
    let metadata = metadata_of(tensors, notes);
    let mut text = format!("{{{}:{}", json!(RESERVED), json!(metadata));
    let mut end = 0u64;
    for tensor in tensors {
        let begin = end;
        end = end.saturating_add(tensor.bytes().unwrap_or(0));
        let (name, dtype, shape) = (json!(tensor.name), json!(tensor.dtype), json!(tensor.shape));
        text += &format!(",{name}:{{\"dtype\":{dtype},\"shape\":{shape},\"data_offsets\":[{begin},{end}]}}");
    }
    (text + "}", end)
}

/// The metadata of every file, and the further names of the tensors in this one.
fn metadata_of(tensors: &[&Outline], notes: &Notes) -> BTreeMap<String, String> {
    let mut metadata = notes.metadata.clone();
    metadata.entry(FORMAT.0.to_owned()).or_insert_with(|| FORMAT.1.to_owned());
    if !notes.ties.is_empty() {
        let here: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_ref()).collect();
        let ties = notes.ties.iter().filter(|(_, name)| here.contains(name.as_ref()));
        metadata.extend(ties.map(|(alias, name)| (alias.to_string(), name.to_string())));
    }
    metadata
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::collection::{btree_map, vec};
    use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof};
    use proptest::{prop_assert_eq, proptest};
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::checkpoint::safetensors::parse;
    use crate::testing::Random;

    fn outline(name: &str, dtype: Dtype, shape: &[usize]) -> Outline {
        Outline { name: name.into(), dtype, shape: shape.into() }
    }

    fn layout(tensors: &[Outline], max: u64) -> Result<Layout> {
        Layout::new(Path::new("out"), tensors.to_vec(), &Notes::default(), max)
    }

    fn types() -> impl Strategy<Value = (Dtype, safetensors::Dtype)> {
        use safetensors::Dtype as Theirs;
        prop_oneof![
            Just((Dtype::Bool, Theirs::BOOL)),
            Just((Dtype::F4, Theirs::F4)),
            Just((Dtype::U8, Theirs::U8)),
            Just((Dtype::F8_E4M3, Theirs::F8_E4M3)),
            Just((Dtype::I16, Theirs::I16)),
            Just((Dtype::F16, Theirs::F16)),
            Just((Dtype::BF16, Theirs::BF16)),
            Just((Dtype::F32, Theirs::F32)),
            Just((Dtype::C64, Theirs::C64)),
            Just((Dtype::F64, Theirs::F64)),
            Just((Dtype::U64, Theirs::U64)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Byte for byte what the reference writes, and the reference and our own parser read it.
        #[test]
        fn a_small_file_is_the_one_that_the_reference_crate_writes(
            tensors in btree_map(any::<String>(), (types(), vec(0usize..5, 0..4)), 0..12), seed in any::<u64>()
        ) {
            let mut random = Random::new(seed);
            let named = tensors.into_iter().filter(|(name, _)| name != RESERVED);
            // F4 fills whole bytes when the last dimension is even.
            let even = named.map(|(name, ((ours, theirs), mut shape))| {
                if ours == Dtype::F4 {
                    shape.push(2);
                }
                (name, ours, theirs, shape)
            });
            let given: Vec<_> = even.map(|(name, ours, theirs, shape)| {
                let outline = outline(&name, ours, &shape);
                let bytes = random.bytes(usize::try_from(outline.bytes().unwrap()).unwrap());
                (outline, theirs, bytes)
            }).collect();
            let outlines: Vec<Outline> = given.iter().map(|(outline, ..)| outline.clone()).collect();
            let made = layout(&outlines, u64::MAX).unwrap();
            let [shard] = made.shards.as_slice() else { panic!("one file") };
            let data = shard.tensors.iter().flat_map(|&at| given[at].2.iter().copied());
            let file: Vec<u8> = shard.header.iter().copied().chain(data).collect();

            let views = given.iter().map(|(outline, theirs, bytes)| {
                (outline.name.to_string(), TensorView::new(*theirs, outline.shape.to_vec(), bytes).unwrap())
            });
            let metadata = Some(HashMap::from([("format".to_owned(), "pt".to_owned())]));
            let reference = safetensors::serialize(views, metadata).unwrap();
            prop_assert_eq!(&file, &reference);
            prop_assert_eq!(shard.bytes, file.len() as u64);

            let parsed = parse(&file[8..shard.header.len()], file.len() as u64).unwrap();
            prop_assert_eq!(parsed.tensors.len(), given.len());
            for stored in &parsed.tensors {
                let (outline, _, bytes) = given.iter().find(|(outline, ..)| outline.name == stored.name).unwrap();
                prop_assert_eq!(stored.dtype.known(), Some(outline.dtype));
                prop_assert_eq!(&stored.shape[..], &outline.shape[..]);
                let range = usize::try_from(stored.offset).unwrap()..usize::try_from(stored.offset + stored.len).unwrap();
                prop_assert_eq!(&file[range], bytes.as_slice());
            }
        }

        /// Every tensor is in one file, in order; no file is above the limit unless it holds one tensor only.
        #[test]
        fn shards_hold_every_tensor_once(sizes in vec(0usize..100, 0..60), max in 0u64..300) {
            let tensors: Vec<_> = sizes.iter().enumerate().map(|(at, &len)| outline(&format!("{at:03}"), Dtype::U8, &[len])).collect();
            let made = layout(&tensors, max).unwrap();
            let all: Vec<usize> = made.shards.iter().flat_map(|shard| shard.tensors.clone()).collect();
            prop_assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
            let held = |shard: &ShardLayout| shard.tensors.iter().map(|&at| sizes[at] as u64).sum::<u64>();
            for shard in &made.shards {
                assert!(held(shard) <= max || shard.tensors.iter().filter(|&&at| sizes[at] > 0).count() <= 1);
                assert!(!shard.tensors.is_empty() || sizes.is_empty());
            }
            for pair in made.shards.windows(2) {
                assert!(held(&pair[0]) + sizes[pair[1].tensors[0]] as u64 > max, "no file ends early");
            }
        }
    }

    #[test]
    fn the_tensors_of_a_large_file_begin_on_a_block() {
        let made = layout(&[outline("a", Dtype::BF16, &[1 << 19]), outline("b", Dtype::U8, &[5])], u64::MAX).unwrap();
        assert_eq!(made.shards[0].header.len(), 4096);
        assert_eq!(made.shards[0].bytes, 4096 + (1 << 20) + 5);
        let header = parse(&made.shards[0].header[8..], made.shards[0].bytes).unwrap();
        assert_eq!((header.tensors[0].offset, header.tensors[1].offset), (4096, 4096 + (1 << 20)));
    }

    #[test]
    fn what_cannot_be_saved_is_named_all_at_once() {
        let said = |tensors: &[Outline]| layout(tensors, 1).unwrap_err().to_string();
        let fine = outline("a", Dtype::U8, &[1]);
        assert!(said(&[outline("__metadata__", Dtype::U8, &[1])]).contains("`__metadata__`"));
        assert!(said(&[fine.clone(), fine.clone()]).contains("same name cannot be saved: \"a\""));
        assert!(said(&[outline("half", Dtype::F4, &[3])]).contains("\"half\" (shape [3] of F4)"));
        assert!(said(&[outline("huge", Dtype::F64, &[1 << 40, 1 << 40])]).contains("\"huge\""));
    }

    #[test]
    fn ties_are_recorded_where_their_tensor_is() {
        let tensors = vec![outline("a", Dtype::U8, &[1]), outline("b", Dtype::U8, &[1])];
        let metadata = BTreeMap::from([("note".to_owned(), "é \"quoted\"".to_owned())]);
        let notes = Notes { metadata, ties: BTreeMap::from([("z".into(), "b".into())]) };
        let made = Layout::new(Path::new("out"), tensors.clone(), &notes, 1).unwrap();
        let metadata = |at: usize| parse(&made.shards[at].header[8..], made.shards[at].bytes).unwrap().metadata;
        assert_eq!(
            metadata(0),
            BTreeMap::from([("format".into(), "pt".into()), ("note".into(), "é \"quoted\"".into())])
        );
        assert_eq!(metadata(1).get("z").map(String::as_str), Some("b"));
        for wrong in ["a", "format", "note"] {
            let notes = Notes { ties: BTreeMap::from([(wrong.into(), "b".into())]), ..notes.clone() };
            let refused = Layout::new(Path::new("out"), tensors.clone(), &notes, 1);
            assert!(matches!(refused, Err(Error::Request { .. })), "{wrong}");
        }
    }

    #[test]
    fn a_header_that_no_reader_takes_is_refused() {
        let name = "n".repeat(1 << 20);
        let tensors: Vec<_> = (0..100).map(|at| outline(&format!("{name}{at}"), Dtype::U8, &[1])).collect();
        assert!(matches!(layout(&tensors, u64::MAX), Err(Error::Limit { limit: MAX_HEADER_BYTES, .. })));
        assert!(layout(&tensors, 50).is_ok(), "two files");
    }

    #[test]
    fn the_index_maps_every_tensor_to_its_file() {
        let made = layout(&[outline("b", Dtype::U8, &[3]), outline("a", Dtype::F32, &[1])], 4).unwrap();
        let index = made.index(&["x".to_owned(), "y".to_owned()]);
        let expected = "{\n  \"metadata\": {\n    \"total_size\": 7\n  },\n  \"weight_map\": {\n    \"a\": \"y\",\n    \"b\": \"x\"\n  }\n}\n";
        assert_eq!(index, expected);
    }
}
