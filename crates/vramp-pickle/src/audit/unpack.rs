//! Archives as an audit sees them: every member, what lies between and behind them, archives in archives, archives in a row.
//!
//! Part of an audit. What members unpack to is bounded by what the file has; where a limit ends the search, that is a finding.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};

use super::data::{Audit, afford};
use super::scan::Place;
use crate::archive::{Archive, EXPORT, PACKAGE, SERVED};
use crate::bytes::{Ahead, Bytes, Memory, Section, read_vec};
use crate::finding::{self, Finding, Severity};
use crate::objects::Objects;
use crate::pickle::MAX_PICKLE_BYTES;
use crate::pickled::Pickled;
use crate::zip::{Entry, Method, Placed};
use crate::{Kind, concat, legacy, members, recognise};

/// Archives within archives that are looked into.
pub(crate) const MOST_NESTED: usize = 3;
const TOO_DEEP: &str = "archives within archives within archives: not looked into";
/// Bytes at the beginning of a member that show whether it is a pickle.
const FIRST_READ: u64 = 64 << 10;

impl Audit {
    /// One archive, read from its end, with all that lies in it; archives in it down to so many levels.
    pub(crate) fn zip(&mut self, bytes: &dyn Bytes, nested: usize) -> io::Result<()> {
        let ahead = Ahead::new(bytes);
        let archive = Archive::open(&ahead, 0)?;
        archive.directory.findings.iter().cloned().for_each(|finding| self.add(finding));
        if archive.script {
            self.format = "torchscript";
            let what = "a TorchScript archive: it holds code, which torch.jit.load would run";
            self.add(Finding::notice("torchscript", what));
        }
        if !archive.script && !archive.directory.entries.is_empty() && archive.member("data.pkl").is_none() {
            self.format = "zip";
        }
        if let Some(other) = archive.other {
            self.format = other.format;
            self.add(Finding::notice(other.format, other.what));
        }
        self.code(&archive);
        self.checksums(&archive)?;
        let referenced = match archive.other {
            Some(_) => HashSet::new(),
            None => self.main_pickle(&archive, bytes.len())?,
        };
        let main = archive.member("data.pkl").map(|entry| entry.header);
        let mut seen = HashSet::new();
        for entry in archive.directory.entries.iter().filter(|entry| Some(entry.header) != main) {
            self.other_member(bytes, entry, &referenced, &mut seen, nested)?;
        }
        for (from, to) in &archive.directory.strays {
            let len = bytes.len().min(*to).saturating_sub(*from);
            if len > 0 {
                self.stray(&Section { whole: bytes, start: *from, len }, nested)?;
            }
        }
        Ok(())
    }

    /// Members that a reader of such an archive would run, whatever its pickles say.
    fn code(&mut self, archive: &Archive) {
        let native = "native code, or what belongs to it: torch.export.load would run it";
        let python = "Python code, which whoever imports it or serves the model would run";
        for entry in &archive.directory.entries {
            let name = entry.name.to_ascii_lowercase();
            let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
            let found = match archive.other {
                None => return,
                Some(EXPORT) if name.contains("/aotinductor/") || ends(&[".so", ".dll", ".dylib", ".pyd"]) => {
                    Finding::new("native-code", Severity::Dangerous, native)
                }
                Some(PACKAGE | SERVED) if ends(&[".py", ".pyc"]) => Finding::suspicious("python-code", python),
                Some(_) => continue,
            };
            self.add(found.within(&entry.name));
        }
    }

    /// Archives one after the other. Returns whether it is that.
    pub(crate) fn archives(&mut self, bytes: &dyn Bytes) -> io::Result<bool> {
        let Some(archives) = concat::archives(bytes)? else { return Ok(false) };
        let what = format!("{} archives one after the other, as a distributed checkpoint holds them", archives.len());
        self.add(Finding::notice("archives", what));
        for (start, end) in archives {
            self.archives.insert((start, end));
            self.zip(&Section { whole: bytes, start, len: end - start }, MOST_NESTED)?;
        }
        Ok(true)
    }

    fn checksums(&mut self, archive: &Archive) -> io::Result<()> {
        let absent = archive.storages().any(|entry| entry.crc == 0 && entry.len > 0);
        self.crc = if absent { "absent" } else { "checked" };
        archive.wrong_crcs()?.into_iter().for_each(|finding| self.add(finding));
        if absent && archive.is_unwritten()? {
            let what = "no storage has a CRC and all are zeros: the file was laid out and its weights never written";
            self.add(Finding::suspicious("crc-absent", what));
        }
        Ok(())
    }

    /// The archive's own pickle. Returns the names of the storages that it declares.
    fn main_pickle(&mut self, archive: &Archive, file_bytes: u64) -> io::Result<HashSet<String>> {
        let mut referenced = HashSet::new();
        let (bytes, member) = match archive.pickle()? {
            Ok(pickle) => pickle,
            Err(finding) => {
                self.add(finding);
                let Some(entry) = archive.member("data.pkl") else { return Ok(referenced) };
                (self.bytes_of(archive.bytes, entry)?, entry.name.clone())
            }
        };
        let len = bytes.len();
        let mut pickled = Pickled::run(bytes, 0, Some(&member));
        pickled.check_end(len, &member);
        self.take(&pickled);
        if pickled.ran.end < len {
            let rest = Memory(&pickled.ran.arena.bytes);
            self.pickles(Place { several: true, ..Place::of(&rest, Some(&member)) }, pickled.ran.end as u64)?;
        }
        let Some(root) = pickled.ran.result.filter(|_| pickled.walk.broken.is_none() && !archive.script) else {
            return Ok(referenced);
        };
        let mut objects = Objects::new(&pickled.ran.arena);
        objects.declare(|_| true);
        objects.gather(root);
        let mut places = HashMap::new();
        for (declared, users) in objects.storages_by_key().into_values() {
            referenced.insert(format!("data/{}", declared.key));
            match archive.locate(declared, &users) {
                Ok(storage) => drop(places.insert(declared.key.clone(), storage)),
                Err(finding) => self.add(finding),
            }
        }
        self.tensors(objects, file_bytes, |declared| places.get(&declared.key).copied());
        Ok(referenced)
    }

    /// A member's bytes whatever its checksum says, as far as they can be had.
    fn bytes_of(&mut self, bytes: &dyn Bytes, entry: &Entry) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        if members::is_bomb(entry) {
            let what = format!("{} bytes would become {}", entry.packed, entry.len);
            self.add(Finding::suspicious("ratio-limit", what).within(&entry.name));
            return Ok(out);
        }
        let Some(stream) = members::stream(bytes, entry) else { return Ok(out) };
        match stream.take(entry.len.min(MAX_PICKLE_BYTES)).read_to_end(&mut out) {
            Err(e) if e.kind() == io::ErrorKind::OutOfMemory => Err(e),
            _ => Ok(out),
        }
    }

    /// A member besides the archive's own pickle. Of those that are the same bytes only the first is run.
    fn other_member(
        &mut self,
        bytes: &dyn Bytes,
        entry: &Entry,
        referenced: &HashSet<String>,
        seen: &mut HashSet<(Placed, bool)>,
        nested: usize,
    ) -> io::Result<()> {
        let name = entry.name.split('\0').next().unwrap_or_default().to_ascii_lowercase();
        let inner = entry.name.split_once('/').map_or("", |(_, inner)| inner);
        let is_storage = inner.starts_with("data/");
        if referenced.contains(inner) || entry.len == 0 {
            return Ok(());
        }
        if is_storage && self.format == "torch-zip" {
            self.bytes_in_no_tensor = self.bytes_in_no_tensor.saturating_add(entry.len);
            self.add(Finding::notice("unreferenced-record", "a storage that no tensor has").within(&entry.name));
        }
        // TorchScript says there where in the source each piece of code came from.
        let traces = self.format == "torchscript" && inner.starts_with("code/") && name.ends_with(".debug_pkl");
        let named = name.ends_with(".pkl") || traces;
        if !seen.insert((entry.placed(), named)) || !self.spend(entry.len.min(FIRST_READ)) {
            return Ok(());
        }
        if beginning_of(bytes, entry, 4)?.is_some_and(|beginning| beginning == b"PK\x03\x04") {
            return match nested.checked_sub(1) {
                Some(nested) => self.inner_archive(bytes, entry, nested),
                None => {
                    self.add(Finding::suspicious("resource-limit", TOO_DEEP).within(&entry.name));
                    Ok(())
                }
            };
        }
        if (!named && !may_be_pickle(bytes, entry)?) || !self.spend(entry.len) {
            return Ok(());
        }
        let content = self.bytes_of(bytes, entry)?;
        let content = Memory(&content);
        if self.holds_files() && recognise(content.0, content.len()) == Some(Kind::Legacy) {
            let found = self.inside(&finding::name(&entry.name), |audit| audit.legacy(&content))?;
            self.parts.extend(found);
            return Ok(());
        }
        let pickled = legacy::run_at(&content, 0, Some(&entry.name))?;
        if !named && pickled.is_pickle() {
            self.add(Finding::suspicious("extra-pickle", "a pickle where a storage should be").within(&entry.name));
        }
        if named || pickled.is_pickle() {
            self.pickles(Place::of(&content, Some(&entry.name)), 0)?;
        }
        Ok(())
    }

    /// Whether members are files of their own, each as somebody saved it.
    fn holds_files(&self) -> bool {
        !matches!(self.format, "torch-zip" | "torchscript")
    }

    /// A member that is an archive itself, in which nobody expects a model.
    fn inner_archive(&mut self, bytes: &dyn Bytes, entry: &Entry, nested: usize) -> io::Result<()> {
        if !afford(&mut self.inner, entry.len.max(entry.packed)) {
            let what = "archives within archives, of far more bytes than the file has: not all of them were looked at";
            self.add(Finding::suspicious("resource-limit", what));
            return Ok(());
        }
        let found = self.inside(&finding::name(&entry.name), |audit| {
            if let Some(start) = entry.data.filter(|_| entry.method == Some(Method::Stored)) {
                return audit.zip(&Section { whole: bytes, start, len: entry.packed }, nested);
            }
            if entry.len > MAX_PICKLE_BYTES {
                let what = format!("a packed archive of {} bytes: not looked into", entry.len);
                audit.add(Finding::suspicious("resource-limit", what));
                return Ok(());
            }
            let content = audit.bytes_of(bytes, entry)?;
            audit.zip(&Memory(&content), nested)
        })?;
        let expected = |finding: &Finding| !matches!(finding.rule, "pickle-missing" | "ambiguous-root");
        self.parts.extend(found.into_iter().filter(expected));
        Ok(())
    }

    /// Whether so many bytes may still be run.
    fn spend(&mut self, bytes: u64) -> bool {
        let affords = afford(&mut self.spare, bytes);
        if !affords {
            let what = "members that unpack to far more bytes than the file has: not all of them were looked at";
            self.add(Finding::suspicious("resource-limit", what));
        }
        affords
    }

    /// Bytes that belong to no member: whatever could be read there is looked at.
    fn stray(&mut self, part: &Section<'_, dyn Bytes + '_>, nested: usize) -> io::Result<()> {
        let beginning = read_vec(part, 0, part.len().min(4))?;
        match nested.checked_sub(1).filter(|_| beginning.starts_with(b"PK")) {
            Some(nested) => return self.zip(part, nested),
            None if beginning.starts_with(b"PK\x03\x04") => self.add(Finding::suspicious("resource-limit", TOO_DEEP)),
            None => {}
        }
        self.region(Place::of(part, None))
    }
}

/// The first bytes of a member, at most so many; `None` where they cannot be had.
fn beginning_of(bytes: &dyn Bytes, entry: &Entry, most: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(stream) = members::stream(bytes, entry) else { return Ok(None) };
    let mut beginning = Vec::new();
    Ok(stream.take(most).read_to_end(&mut beginning).is_ok().then_some(beginning))
}

/// Whether a member may be a pickle: it has the mark of one, its beginning runs as one, or that is cut off.
fn may_be_pickle(bytes: &dyn Bytes, entry: &Entry) -> io::Result<bool> {
    let Some(head) = beginning_of(bytes, entry, FIRST_READ)? else { return Ok(false) };
    let first = Pickled::run_part(head, entry.len, 0, None);
    let is_cut = first.ran.wants > first.read as u64 && first.ran.wants <= entry.len;
    Ok(first.is_pickle() || first.ran.protocol > 0 || is_cut)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn bytes_beyond_the_limit_are_not_run_and_that_is_told() {
        let mut audit = Audit::new(Path::new("file"), 0);
        audit.spare = 10;
        assert!(audit.spend(6) && audit.findings.is_empty());
        assert!(!audit.spend(5) && audit.spend(4));
        assert_eq!(audit.findings.iter().map(|finding| finding.severity).collect::<Vec<_>>(), [Severity::Suspicious]);
    }
}
