//! Where the program keeps measured limits: a file a machine in the user's cache folder, or the file of `--limits`.
//!
//! `bench` adds to it, `load` reads it. The library reads no environment; this file does.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vramp::load::{MeasuredLimit, MeasuredLimits, machine_digest};

use super::output::Failure;
use super::text;
use super::whole_file::WholeFile;

/// What a load is compared with: the file that was named, which must be readable, or that of the cache folder, whose absence says
/// nothing and whose damage is worth a warning.
pub(crate) fn for_load(
    named: Option<&Path>,
    warnings: &mut Vec<String>,
) -> Result<Option<Arc<MeasuredLimits>>, Failure> {
    if let Some(path) = named {
        let read = MeasuredLimits::read(path);
        return read.map(|limits| Some(Arc::new(limits))).map_err(|error| at(error, path));
    }
    let Some(path) = kept_in().filter(|path| path.exists()) else { return Ok(None) };
    match MeasuredLimits::read(&path) {
        Ok(limits) => Ok(Some(Arc::new(limits))),
        Err(error) => {
            warnings.push(format!("the measured limits are not used: {error}"));
            Ok(None)
        }
    }
}

/// Where a benchmark keeps what it measured.
pub(crate) struct Keeper {
    /// The file of `--limits`; without it, that of the cache folder.
    named: Option<WholeFile>,
    path: Option<PathBuf>,
    /// What is there already.
    known: MeasuredLimits,
}

impl Keeper {
    /// A keeper for the file that was named, or for the cache folder.
    pub(crate) fn to(named: Option<&Path>) -> Result<Keeper, Failure> {
        let whole = named.map(|path| WholeFile::to(path, "--limits", "limits")).transpose()?;
        let path = named.map(Path::to_owned).or_else(kept_in);
        let read = path.as_ref().filter(|path| path.exists()).map(MeasuredLimits::read).transpose();
        let known = match (read, named) {
            (Ok(known), _) => known.unwrap_or_default(),
            // A file that holds something else is not written over.
            (Err(error), Some(path)) => return Err(at(error, path)),
            (Err(_), None) => MeasuredLimits::default(),
        };
        Ok(Keeper { named: whole, path, known })
    }

    /// The file of `--limits`.
    pub(crate) fn named(&self) -> Option<&WholeFile> {
        self.named.as_ref()
    }

    /// Adds what was measured; returns a warning, if any. Only a file that was named is worth a failure.
    pub(crate) fn keep(&self, limit: Option<&MeasuredLimit>) -> Result<Option<String>, Failure> {
        let Some(limit) = limit else { return Ok(None) };
        let mut known = self.known.clone();
        known.add(limit.clone());
        let write = |file: &WholeFile| {
            file.write(|out| {
                serde_json::to_writer_pretty(&mut *out, &known)?;
                out.write_all(b"\n")
            })
        };
        if let Some(file) = &self.named {
            return write(file).map(|()| None);
        }
        let Some(path) = &self.path else {
            return Ok(Some("the limits were not kept: neither XDG_CACHE_HOME nor HOME is set".to_owned()));
        };
        let kept = path.parent().map_or(Ok(()), std::fs::create_dir_all).is_ok()
            && WholeFile::to(path, "--limits", "limits").and_then(|file| write(&file)).is_ok();
        let unkept = || {
            let path = text::escape(&path.display().to_string());
            format!("the limits were not kept, since {path} cannot be written; --limits FILE names another place")
        };
        Ok((!kept).then(unkept))
    }
}

fn at(error: vramp::Error, path: &Path) -> Failure {
    Failure::LibraryAt { error, path: path.to_owned() }
}

/// The file of this machine: home folders may be shared by many.
fn kept_in() -> Option<PathBuf> {
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
    let name = match machine_digest() {
        machine if machine.is_empty() => "limits.json".to_owned(),
        machine => format!("limits-{machine}.json"),
    };
    Some(cache.join("vramp").join(name))
}
