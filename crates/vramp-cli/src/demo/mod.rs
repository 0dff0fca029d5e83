//! `vramp demo`: makes a checkpoint and has `bench` measure this machine with it, load it cold and warm, and compare with
//! T = S/B.
//!
//! It checks memory and disk before it writes, works in a folder of its own and removes it on every way out, and before it starts
//! what killed demos left in the same place.

mod abandoned;
mod checkpoint;

use std::env;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{self, Path, PathBuf};

use serde::Serialize;
use tempfile::TempDir;
use vramp::Error;
use vramp::os;
use vramp::storage::{Fallbacks, LocalStorage, Location, Storage};
use vramp_bench::{BenchReport, Effort};

use super::args::DemoArgs;
use super::bench;
use super::interrupt::Interrupt;
use super::output::{Failure, Output};
use super::text;
use checkpoint::Made;

const DEFAULT_BYTES: u64 = 1 << 30;
/// The least that can be asked for.
const LEAST_BYTES: u64 = 1 << 20;

/// The least that is made where nothing was asked for: what is loaded in less than a few milliseconds shows no bandwidth.
const LEAST_UNASKED_BYTES: u64 = 64 << 20;

/// What the program, its staging and its buffers take beside the weights.
const SLACK_BYTES: u64 = 192 << 20;

/// A brief look at each stage; loads of the whole checkpoint, as many as a median needs: single loads differ by the host of a
/// virtual machine.
const EFFORT: Effort = Effort { rounds: 5, most_bytes: u64::MAX, most_seconds: None, ..Effort::QUICK };

/// Everything the demo found out.
struct Findings {
    made: Made,
    folder: PathBuf,
    kept: bool,
    report: BenchReport,
    warnings: Vec<String>,
}

/// What programs get.
#[derive(Serialize)]
struct Answer<'a> {
    checkpoint: CheckpointLine<'a>,
    #[serde(flatten)]
    bench: bench::Answer<'a>,
}

#[derive(Serialize)]
struct CheckpointLine<'a> {
    /// Where it was kept.
    path: Option<String>,
    bytes: u64,
    tensors: usize,
    shards: usize,
    file_system: &'a str,
}

pub(crate) fn run(args: &DemoArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut warnings = Vec::new();
    let folder = Folder::new(args.dir.as_deref(), interrupt, &mut warnings)?;
    let bytes = size(args.bytes, &folder, &mut warnings)?;
    let made = folder.watched(|| make(&folder, bytes, output, interrupt))?;
    let report = folder.watched(|| bench::on_host(folder.path(), EFFORT, output, interrupt))?;
    warnings.extend(report.warnings.iter().cloned());
    let mut findings = Findings { made, folder: folder.path().to_owned(), kept: false, report, warnings };
    if args.keep {
        findings.folder = folder.keep();
        findings.kept = true;
    } else {
        folder.remove()?;
    }
    output.warnings(&findings.warnings);
    let said = if output.json { output.json(&findings.as_json()) } else { output.text(&findings.as_text()) };
    if findings.kept && (said.is_err() || output.is_lost()) {
        output.aside(&format!("kept: {}", findings.folder.display()));
    }
    said
}

/// The folder of the demo. Removed when it goes out of scope, and by an interrupt.
struct Folder {
    dir: TempDir,
    /// Tells other demos that it is in use.
    _lock: Option<std::fs::File>,
    interrupt: Interrupt,
    file_system: String,
}

impl Folder {
    /// Makes the folder where it was asked for, or in the first usual place that is no memory.
    fn new(dir: Option<&Path>, interrupt: &Interrupt, warnings: &mut Vec<String>) -> Result<Folder, Failure> {
        if let Some(dir) = dir {
            if !dir.try_exists().unwrap_or(true) {
                let what = format!("{} does not exist", dir.display());
                return Err(Error::NotFound { what, hint: Some("make it first".to_owned()) }.into());
            }
            let (folder, memory) = Folder::inside(dir, interrupt)?;
            return Ok(folder.with_warning(memory, warnings));
        }
        let mut places = vec![env::temp_dir(), PathBuf::from("/var/tmp")];
        places.extend(env::current_dir());
        let first = Folder::inside(&places[0], interrupt);
        let others = places.iter().skip(1).map(|place| Folder::inside(place, interrupt));
        if let Ok((folder, false)) = first {
            return Ok(folder);
        }
        match others.flatten().find(|(_, memory)| !memory) {
            Some((folder, _)) => Ok(folder.registered()),
            None => first.map(|(folder, memory)| folder.registered().with_warning(memory, warnings)),
        }
    }

    /// A folder inside `dir`, and whether that lies in memory.
    fn inside(dir: &Path, interrupt: &Interrupt) -> Result<(Folder, bool), Failure> {
        let failed = |what: &str| {
            let what = format!("cannot {what} in {}", dir.display());
            move |source| Failure::System { what, path: Some(dir.to_owned()), source }
        };
        let dir = path::absolute(dir).unwrap_or_else(|_| dir.to_owned()); // "." is a place and no part of a name
        let place = dir.clone();
        let dir =
            tempfile::Builder::new().prefix(abandoned::PREFIX).tempdir_in(dir).map_err(failed("make a folder"))?;
        let lock = abandoned::lock(dir.path());
        if let Ok(own) = std::fs::metadata(dir.path()) {
            abandoned::remove(&place, own.uid());
        }
        let probe = dir.path().join("probe");
        let write = || std::fs::File::create_new(&probe).and_then(|mut file| file.write_all(b"vramp"));
        write().map_err(failed("write"))?;
        let (file_system, memory) = file_system(&probe)?;
        let _ = std::fs::remove_file(&probe);
        let folder = Folder { dir, _lock: lock, interrupt: interrupt.clone(), file_system };
        Ok((folder.registered(), memory))
    }

    /// Registers this folder as the one that an interrupt removes.
    fn registered(self) -> Folder {
        self.interrupt.remove_on_interrupt(Some(self.path()));
        self
    }

    fn with_warning(self, memory: bool, warnings: &mut Vec<String>) -> Folder {
        if memory {
            let what =
                format!("{} lies in memory ({}): nothing can be cold there", self.path().display(), self.file_system);
            warnings.push(what + "; --dir names a folder on a disk");
        }
        self
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Runs a step; one that fails because of an interrupt says so.
    fn watched<T>(&self, step: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        step().map_err(|failure| self.interrupt.check().err().unwrap_or(failure))
    }

    fn keep(self) -> PathBuf {
        self.interrupt.remove_on_interrupt(None);
        abandoned::unlock(self.dir.path());
        self.dir.keep()
    }

    fn remove(self) -> Result<(), Failure> {
        let what = format!("cannot remove {}", self.path().display());
        let path = Some(self.path().to_owned());
        let removed = self.dir.close().map_err(|source| Failure::System { what, path, source });
        self.interrupt.remove_on_interrupt(None);
        removed
    }
}

/// The file system that a file lies on: its name, and whether it is memory.
fn file_system(path: &Path) -> Result<(String, bool), Failure> {
    let file = LocalStorage.open(&Location::from(path), &Fallbacks::default())?;
    let system = file.file_system();
    Ok((system.name.clone(), system.memory))
}

/// The size that was asked for, or the usual one as far as it fits; says which number is too small.
fn size(asked: Option<u64>, folder: &Folder, warnings: &mut Vec<String>) -> Result<u64, Failure> {
    if asked.is_some_and(|bytes| bytes < LEAST_BYTES) {
        return Err(Failure::Usage(format!("the demo needs at least {}", text::both(LEAST_BYTES))));
    }
    let left = os::memory_left();
    let memory = left.map_or(u64::MAX, |left| left.bytes);
    let disk = os::free_disk_bytes(folder.path()).unwrap_or(u64::MAX);
    // The weights once as loaded and once in the page cache; on a file system in memory, once more.
    let most_by_memory = memory.saturating_sub(SLACK_BYTES) / 2;
    let most_by_disk = disk.saturating_sub(SLACK_BYTES / 4);
    let most = most_by_memory.min(most_by_disk);
    let wanted = asked.unwrap_or(DEFAULT_BYTES);
    if wanted <= most {
        return Ok(wanted);
    }
    let which = if most_by_memory < most_by_disk {
        let needed = wanted.saturating_mul(2).saturating_add(SLACK_BYTES);
        let why = "the weights in memory, the same again in the page cache";
        let available = match left.and_then(|left| left.limit.name()) {
            Some(limit) => format!("{limit} leaves {}", text::both(memory)),
            None => format!("{} are available", text::both(memory)),
        };
        format!("{} of memory are needed ({why}) and {available}", text::both(needed))
    } else {
        let needed = wanted.saturating_add(SLACK_BYTES / 4);
        let place = folder.path().parent().unwrap_or(folder.path()).display();
        format!("{} of disk are needed in {place} and {} are free", text::both(needed), text::both(disk))
    };
    if asked.is_none() && most >= LEAST_UNASKED_BYTES {
        warnings.push(format!("{which}: the checkpoint has {} instead of {}", text::both(most), text::both(wanted)));
        return Ok(most);
    }
    let by_memory = most_by_memory < most_by_disk;
    let hint = if most >= LEAST_BYTES { format!("; --bytes {most} would fit") } else { String::new() };
    Err(Failure::TooLittle { memory: by_memory, what: format!("{which}{hint}") })
}

fn make(folder: &Folder, bytes: u64, output: Output, interrupt: &Interrupt) -> Result<Made, Failure> {
    output.note(&format!("writing {} to {} …", text::both(bytes), folder.path().display()));
    checkpoint::make(folder.path(), bytes, interrupt)
}

impl Findings {
    fn as_json(&self) -> Answer<'_> {
        let checkpoint = CheckpointLine {
            path: self.kept.then(|| self.folder.display().to_string()),
            bytes: self.made.bytes,
            tensors: self.made.tensors,
            shards: self.made.shards.len(),
            file_system: &self.report.machine.file_system,
        };
        Answer { checkpoint, bench: bench::answer(&self.report, None) }
    }

    fn as_text(&self) -> String {
        let kept = || format!("\nkept: {}\n", text::escape(&self.folder.display().to_string()));
        bench::text(&self.report) + &if self.kept { kept() } else { String::new() }
    }
}
