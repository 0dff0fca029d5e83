//! Which readers look at a file, by its content: pickles, archives, stacks, text, parts of distributed checkpoints. What they find
//! goes into an [`Audit`]; nothing is executed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::Path;

use vramp_text::lookalike::{self, Foreign};

use super::data::{Audit, afford};
use super::names::{FOREIGN, WEIGHTS, end_of_name};
use super::scan::{MOST_PICKLES, Place};
use super::unpack::MOST_NESTED;
use crate::bytes::{Bytes, Memory, Section, read_vec};
use crate::dcp::{self, Description};
use crate::declared::Declared;
use crate::finding::{Finding, Severity};
use crate::legacy::Stack;
use crate::objects::Objects;
use crate::{BEGINNING, Kind, hides_archive, is_safetensors, legacy, recognise, tar};

/// Bytes of items that are looked at beyond twice those of their file.
const SPARE_BYTES: u64 = 64 << 20;

/// Which parts of which files of a folder are read for themselves, as its `.metadata` says (or one for each rank): a distributed checkpoint is unpickled item
/// by item, wherever in a file an item lies.
#[derive(Debug, Clone, Default)]
pub struct Items(BTreeMap<String, BTreeSet<(u64, u64)>>);

impl Items {
    /// Those that the descriptions of a folder name, its files for which [`dcp::is_metadata`]. One that is refused says nothing: an
    /// audit of that file says why.
    pub fn described(descriptions: impl IntoIterator<Item = Description>) -> Items {
        let mut places: BTreeMap<String, BTreeSet<(u64, u64)>> = BTreeMap::new();
        for description in descriptions {
            for dcp::Place { file, offset, len } in description.places.into_values() {
                places.entry(file).or_default().insert((offset, len));
            }
        }
        Items(places)
    }

    /// Offset and length in bytes of those in one file.
    fn in_file(&self, path: &Path) -> impl Iterator<Item = (u64, u64)> {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| self.0.get(name)).into_iter().flatten().copied()
    }
}

/// Audits the bytes of a file of that name, and what in it `items` says to be read for itself. `header` says what is wrong with
/// the header of a safetensors file, which is for others to read.
///
/// # Errors
/// When the bytes cannot be read. Whatever is wrong with their content is a finding.
pub fn audit_file(
    path: &Path,
    bytes: &dyn Bytes,
    items: &Items,
    header: &dyn Fn() -> Option<String>,
) -> io::Result<Audit> {
    let mut audit = Audit::new(path, bytes.len());
    // Such a file is read as a whole only where it is one item.
    let in_parts = path.extension().is_some_and(|extension| extension == "distcp");
    audit.look(bytes, in_parts)?;
    if audit.format == "safetensors"
        && let Some(wrong) = header()
    {
        audit.add(Finding::malformed("safetensors", wrong));
        // A header that is right leaves no room for anything else.
        audit.search(Place::of(bytes, None), 0)?;
    }
    audit.items(bytes, items.in_file(path))?;
    if audit.format == "pickle" && path.file_name().is_some_and(dcp::is_metadata) {
        audit.description(bytes)?;
    }
    Ok(audit.judged())
}

/// What is said of something with the name of a file that is none, and that is not opened: a pipe would be waited for.
pub fn special(path: &Path, what: &str) -> Audit {
    let mut audit = Audit::new(path, 0);
    let what =
        format!("{what} where weights should be; it was not opened, and a program that opens it may wait for ever");
    audit.add(Finding::malformed("not-regular", what));
    audit.judged()
}

/// Audits bytes as if they were a file.
///
/// # Errors
/// None but those of the memory.
pub fn audit_bytes(bytes: &[u8]) -> io::Result<Audit> {
    let mut audit = Audit::new(Path::new("bytes"), bytes.len() as u64);
    audit.look(&Memory(bytes), false)?;
    Ok(audit.judged())
}

fn is_cut_safetensors(beginning: &[u8]) -> bool {
    beginning.get(8) == Some(&b'{') && lookalike::recognise(beginning).is_none()
}

/// Whether only the rest of the file is missing: text that happens to have a brace there is none.
/// Whether nothing but blanks follows byte `end`.
fn ends_with(bytes: &dyn Bytes, end: usize) -> io::Result<bool> {
    const MOST_BLANKS: u64 = 64;
    let left = bytes.len().saturating_sub(end as u64);
    Ok(left <= MOST_BLANKS && read_vec(bytes, end as u64, left)?.iter().all(u8::is_ascii_whitespace))
}

impl Audit {
    /// Outside TorchScript Python resolves its names, and no archive holds such classes.
    pub(super) fn judge_script(&mut self) {
        let is_script = self.format == "torchscript";
        let names = self.findings.iter_mut().filter(|finding| finding.rule == "torchscript" && !is_script);
        names.for_each(|finding| finding.severity = Severity::Suspicious);
    }

    /// Pickles that follow what a text is by chance, where they name something; else that of which a name is known to run code.
    fn behind_text(&mut self, bytes: &dyn Bytes, mut at: u64) -> io::Result<()> {
        for _ in 0..MOST_PICKLES {
            let next = legacy::run_at(bytes, at, None)?;
            if next.names_something() && next.acts() {
                self.format = "pickle";
                return self.pickles(Place::of(bytes, None), 0);
            }
            if !next.ran.stopped {
                return self.search(Place::of(bytes, None), at);
            }
            at = at.saturating_add(next.ran.end as u64);
        }
        // Each further one is reported for what it is.
        self.pickles(Place::of(bytes, None), 0)
    }

    /// Recognises the bytes and looks at them as what they are, and as what else they could be taken for: archives one after the
    /// other are one to who reads them from their end, unless they are read `in_parts`.
    fn look(&mut self, bytes: &dyn Bytes, in_parts: bool) -> io::Result<()> {
        let beginning = read_vec(bytes, 0, bytes.len().min(BEGINNING))?;
        let kind = recognise(&beginning, bytes.len());
        if !matches!(kind, Some(Kind::Zip | Kind::Tar)) && hides_archive(bytes)? {
            self.add(Finding::suspicious("prefix-data", "a zip archive stands behind other data"));
            self.zip(bytes, MOST_NESTED)?;
        }
        if kind != Some(Kind::Tar) && tar::is_header(&beginning) {
            self.add(Finding::suspicious(
                "polyglot",
                "torch.load sees a tar archive in this file, and others something else",
            ));
            self.tar(bytes)?;
        }
        match kind {
            Some(Kind::Zip) => {
                self.format = "torch-zip";
                if !self.archives(bytes)? || !in_parts {
                    self.archives.insert((0, bytes.len()));
                    self.zip(bytes, MOST_NESTED)?;
                }
                self.polyglot(bytes)
            }
            Some(Kind::Legacy) => {
                self.format = "torch-legacy";
                self.legacy(bytes)
            }
            Some(Kind::Tar) => {
                self.format = "tar";
                self.tar(bytes)?;
                self.polyglot(bytes)
            }
            Some(Kind::Pickle) => {
                self.format = "pickle";
                self.pickles(Place::of(bytes, None), 0)
            }
            None if is_safetensors(&beginning, bytes.len()) || is_cut_safetensors(&beginning) => {
                self.format = "safetensors";
                self.polyglot(bytes)
            }
            None => self.unknown(bytes, &beginning),
        }
    }

    /// Old pickles have no mark at their beginning: whatever runs as one, or names a global, is one.
    fn unknown(&mut self, bytes: &dyn Bytes, beginning: &[u8]) -> io::Result<()> {
        let other = lookalike::recognise(beginning);
        let first = legacy::run_at(bytes, 0, None)?;
        let is_text = lookalike::is_text(beginning);
        // Text runs as a pickle by chance: `C` takes as many bytes as the next letter says, `G` takes eight, and a full stop ends it.
        if is_text && first.ran.stopped && !first.names_something() && !ends_with(bytes, first.ran.end)? {
            self.behind_text(bytes, first.ran.end as u64)?;
            self.add(self.of_text(other));
            return Ok(());
        }
        if first.is_pickle() && (first.acts() || other.is_none()) {
            self.format = "pickle";
            return self.pickles(Place::of(bytes, None), 0);
        }
        if first.ran.stopped {
            self.pickles(Place::of(bytes, None), 0)?;
        } else if first.names_something() && is_text {
            // It would be imported, and then the text is no pickle: as a list of packages that begins with `click`.
            self.name(&first.globals);
            let names = first.findings.iter().filter(|finding| finding.rule == "global-not-allowed").cloned();
            names.for_each(|finding| self.add(Finding { severity: Severity::Notice, ..finding }));
        } else if first.names_something() {
            self.take(&first);
        } else if !is_text {
            self.name(&first.globals);
        }
        self.add(match other {
            _ if bytes.is_empty() => Finding::malformed("empty-file", "an empty file: nothing was written, or fetched"),
            other if is_text => self.of_text(other),
            Some(Foreign { what, advice }) => {
                let rule = if lookalike::is_stand_in(beginning) { "not-weights" } else { "other-format" };
                Finding::malformed(rule, format!("{what}; {advice}"))
            }
            _ => Finding::malformed("not-recognised", "neither a file of PyTorch, nor a pickle, nor safetensors"),
        });
        Ok(())
    }

    /// What is said of a text: worth knowing, unless the file's name says that it should be weights.
    fn of_text(&self, other: Option<Foreign>) -> Finding {
        let Some(Foreign { what, advice }) = other else { return Finding::notice("not-weights", "text") };
        match end_of_name(&self.path).as_deref() {
            // Python reads such files when it starts, and runs lines that begin with `import`.
            Some("pth") if what.starts_with("text that") => Finding::notice(
                "not-weights",
                format!("{what}: no weights, but perhaps paths for Python's `site`, which may import"),
            ),
            Some(end) if WEIGHTS.contains(&end) || FOREIGN.contains(&end) => {
                Finding::malformed("not-weights", format!("{what}; {advice}"))
            }
            _ => Finding::notice("not-weights", what),
        }
    }

    /// The description of a distributed checkpoint: one that is refused hides which items there are.
    fn description(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        let refused = dcp::objection(&legacy::run_at(bytes, 0, None)?);
        refused.into_iter().for_each(|finding| self.add(finding));
        Ok(())
    }

    /// What is unpickled of a file by itself, and is none of the archives that were looked at.
    fn items(&mut self, bytes: &dyn Bytes, items: impl Iterator<Item = (u64, u64)>) -> io::Result<()> {
        let mut spare = bytes.len().saturating_mul(2).saturating_add(SPARE_BYTES);
        for (start, len) in items {
            let Some(end) = start.checked_add(len).filter(|end| *end <= bytes.len()) else {
                let what = format!(".metadata has {len} bytes at {start} for an item, of {}", bytes.len());
                self.add(Finding::malformed("dcp-metadata", what));
                continue;
            };
            if self.archives.insert((start, end)) {
                if !afford(&mut spare, len) {
                    let what = "items of .metadata that overlap each other: not all of them were looked at";
                    self.add(Finding::suspicious("resource-limit", what));
                    return Ok(());
                }
                let part = Section { whole: bytes, start, len };
                let seen = std::mem::take(&mut self.archives); // places within the part are none of the file
                let found = self.inside(&format!("byte {start}"), |audit| audit.look(&part, false))?;
                self.archives = seen;
                self.parts.extend(found);
            }
        }
        Ok(())
    }

    /// What is found in a part, which is named in front of its members. The file stays what the whole makes of it.
    pub(crate) fn inside(
        &mut self,
        part: &str,
        look: impl FnOnce(&mut Audit) -> io::Result<()>,
    ) -> io::Result<Vec<Finding>> {
        let whole = (self.format, self.crc, std::mem::take(&mut self.findings), std::mem::take(&mut self.parts));
        look(self)?;
        self.judge_script();
        let mut found = std::mem::take(&mut self.findings);
        found.append(&mut self.parts);
        (self.format, self.crc, self.findings, self.parts) = whole;
        let named = found.into_iter().map(|finding| {
            let member = finding.member.as_ref().map_or(String::new(), |member| format!("!{member}"));
            Finding { member: Some(format!("{part}{member}")), ..finding }
        });
        Ok(named.collect())
    }

    pub(crate) fn legacy(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        let stack = Stack::read(bytes)?;
        stack.pickles.iter().for_each(|pickled| self.take(pickled));
        stack.findings.iter().cloned().for_each(|finding| self.add(finding));
        let (Some(pickled), Some(keys)) = (stack.object(), stack.keys()) else {
            return self.search(Place::of(bytes, None), stack.end);
        };
        let mut objects = Objects::new(&pickled.ran.arena);
        let Some(root) = pickled.ran.result.filter(|_| pickled.walk.broken.is_none()) else {
            return self.search(Place::of(bytes, None), stack.end);
        };
        objects.declare(|_| true);
        objects.gather(root);
        let by_key: HashMap<&str, &Declared> =
            objects.storages.values().map(|declared| (declared.key.as_str(), declared)).collect();
        let places = match legacy::locate(bytes, stack.end, keys, |key| by_key.get(key).copied())? {
            Ok(places) => places,
            Err(finding) => {
                self.add(finding);
                self.search(Place::of(bytes, None), stack.end)?;
                HashMap::new()
            }
        };
        self.tensors(objects, bytes.len(), |declared| places.get(&declared.key).copied());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hundred thousand items over the same gigabyte would be looked at for days.
    #[test]
    fn items_that_overlap_end_the_search_and_that_is_told() {
        let file = vec![0; 1 << 20];
        let len = file.len() as u64 - 100;
        let searched = |items: u64| {
            let mut audit = Audit::new(Path::new("file"), file.len() as u64);
            audit.items(&Memory(&file), (0..items).map(|at| (at, len))).unwrap();
            audit.findings.iter().any(|finding| finding.rule == "resource-limit")
        };
        assert_eq!((searched(60), searched(80)), (false, true));
    }
}
