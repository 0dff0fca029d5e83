//! `vramp demo`: makes a checkpoint, measures this machine, loads the checkpoint cold and warm, and compares with T = S/B.
//!
//! It checks memory and disk before it writes, works in a folder of its own and removes it on every way out.

mod cache;
mod checkpoint;
mod machine;

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use vramp::Error;
use vramp::load::{self, Options, TransferOptions};
use vramp::os;
use vramp::report::Report;

use super::args::DemoArgs;
use super::interrupt::Interrupt;
use super::output::{Failure, Output};
use super::report::{efficiency_style, stage_name};
use super::text::{self, Align, BOLD, DIM, Table};
use checkpoint::Made;
use machine::Measured;

const DEFAULT_BYTES: u64 = 1 << 30;
const LEAST_BYTES: u64 = 1 << 20;

/// What the program, its staging and its buffers take beside the weights.
const SLACK_BYTES: u64 = 192 << 20;

/// Above this share of resident bytes a state is not cold; below one minus it, not warm.
const TOLERANCE: f64 = 0.01;

/// A load that takes less is mostly set-up, and says little about bandwidth.
const BRIEF_SECONDS: f64 = 0.05;

/// Loads of each state. The median is shown: single loads differ by the host of a virtual machine.
const ROUNDS: usize = 5;

/// Loads of one state of the page cache, and the limit that was measured apart from them.
struct State {
    /// The least favourable share that was in the page cache before a load.
    resident: f64,
    proven: bool,
    /// From the fastest to the slowest.
    reports: Vec<Report>,
    measured: Measured,
}

/// Everything the demo found out.
struct Findings {
    made: Made,
    folder: PathBuf,
    kept: bool,
    file_system: String,
    storage: Measured,
    memory: Measured,
    cold: State,
    warm: State,
    warnings: Vec<String>,
}

pub(crate) fn run(args: &DemoArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut warnings = Vec::new();
    let folder = Folder::new(args.dir.as_deref(), interrupt, &mut warnings)?;
    let bytes = size(args.bytes, &folder, &mut warnings)?;
    let made = folder.watched(|| make(&folder, bytes, output, interrupt))?;
    let mut findings = measure(&folder, made, output, interrupt, warnings)?;
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
        let dir = tempfile::Builder::new().prefix("vramp-demo-").tempdir_in(dir).map_err(failed("make a folder"))?;
        let probe = dir.path().join("probe");
        let write = || std::fs::File::create_new(&probe).and_then(|mut file| file.write_all(b"vramp"));
        write().map_err(failed("write"))?;
        let (file_system, memory) = cache::file_system(&probe)?;
        let _ = std::fs::remove_file(&probe);
        let folder = Folder { dir, interrupt: interrupt.clone(), file_system };
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

/// The size that was asked for, or the usual one as far as it fits; says which number is too small.
fn size(asked: Option<u64>, folder: &Folder, warnings: &mut Vec<String>) -> Result<u64, Failure> {
    if asked.is_some_and(|bytes| bytes < LEAST_BYTES) {
        return Err(Failure::Usage(format!("the demo needs at least {}", text::both(LEAST_BYTES))));
    }
    let memory = machine::available_memory().unwrap_or(u64::MAX);
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
        format!("{} of memory are needed ({why}) and {} are available", text::both(needed), text::both(memory))
    } else {
        let needed = wanted.saturating_add(SLACK_BYTES / 4);
        let place = folder.path().parent().unwrap_or(folder.path()).display();
        format!("{} of disk are needed in {place} and {} are free", text::both(needed), text::both(disk))
    };
    if asked.is_none() && most >= 64 * LEAST_BYTES {
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

fn measure(
    folder: &Folder,
    made: Made,
    output: Output,
    interrupt: &Interrupt,
    mut warnings: Vec<String>,
) -> Result<Findings, Failure> {
    output.note("measuring the storage …");
    cache::drop_from_cache(&made.shards)?;
    let storage = machine::storage(&made.shards, interrupt)?;
    output.note("measuring the memory …");
    cache::warm(&made.shards[..1], interrupt)?;
    let memory = machine::memory(&made.shards, made.bytes, interrupt)?;
    output.note("loading cold …");
    let mut cold = State { resident: 0.0, proven: true, reports: Vec::new(), measured: storage.clone() };
    for _ in 0..ROUNDS {
        cache::drop_from_cache(&made.shards)?;
        cold.load(folder, &made, |share| share <= TOLERANCE, interrupt)?;
    }
    if !cold.proven {
        let share = text::percent(cold.resident);
        warnings
            .push(format!("{share} of the files could not be dropped from the page cache: the cold load is not cold"));
    }
    output.note("loading warm …");
    let mut warm = State { resident: 0.0, proven: true, reports: Vec::new(), measured: memory.clone() };
    for _ in 0..ROUNDS {
        cache::warm(&made.shards, interrupt)?;
        warm.load(folder, &made, |share| share >= 1.0 - TOLERANCE, interrupt)?;
    }
    if !warm.proven {
        let share = text::percent(warm.resident);
        warnings.push(format!("only {share} of the files are in the page cache: the warm load is not warm"));
    }
    let (path, file_system) = (folder.path().to_owned(), folder.file_system.clone());
    Ok(Findings { made, folder: path, kept: false, file_system, storage, memory, cold, warm, warnings })
}

impl State {
    /// Asks the kernel what is in the page cache, loads, and lets go of the weights.
    fn load(
        &mut self,
        folder: &Folder,
        made: &Made,
        is_as_wanted: impl Fn(f64) -> bool,
        interrupt: &Interrupt,
    ) -> Result<(), Failure> {
        interrupt.check()?;
        machine::touch(made.bytes)?;
        let resident = cache::resident_share(&made.shards)?;
        if self.reports.is_empty() || !is_as_wanted(resident) {
            self.resident = resident;
        }
        self.proven &= is_as_wanted(resident);
        let transfer = TransferOptions { cancel: interrupt.cancel(), ..TransferOptions::default() };
        let loaded = load::load(folder.path(), &Options { transfer, ..Options::default() })?;
        self.reports.push(loaded.report);
        self.reports.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Ok(())
    }

    /// The median load. There is at least one.
    fn report(&self) -> &Report {
        &self.reports[self.reports.len() / 2]
    }

    fn seconds(&self) -> Vec<f64> {
        self.reports.iter().map(|report| report.seconds).collect()
    }

    /// T = S/B with the B that was measured apart from the load.
    fn least_seconds(&self) -> f64 {
        text::as_f64(self.report().bytes) / self.measured.bytes_per_second.max(f64::MIN_POSITIVE)
    }

    fn efficiency(&self) -> f64 {
        self.least_seconds() / self.report().seconds.max(f64::MIN_POSITIVE)
    }

    fn route(&self) -> &'static str {
        let routes = &self.report().routes;
        let named = [("direct", routes.direct), ("buffered", routes.buffered), ("mapped", routes.mapped)];
        named.into_iter().max_by_key(|(_, bytes)| *bytes).map_or("none", |(name, _)| name)
    }

    fn as_json(&self) -> serde_json::Value {
        json!({
            "resident_before": self.resident,
            "proven": self.proven,
            "bandwidth": self.measured.bytes_per_second,
            "least_seconds": self.least_seconds(),
            "efficiency": self.efficiency(),
            "seconds": self.seconds(),
            "report": self.report(),
        })
    }
}

impl Findings {
    fn as_json(&self) -> serde_json::Value {
        json!({
            "checkpoint": {
                "path": self.kept.then(|| self.folder.display().to_string()),
                "bytes": self.made.bytes,
                "tensors": self.made.tensors,
                "shards": self.made.shards.len(),
                "file_system": self.file_system,
            },
            "measured": {"storage": self.storage, "memory": self.memory},
            "cold": self.cold.as_json(),
            "warm": self.warm.as_json(),
            "warnings": self.warnings,
        })
    }

    fn as_text(&self) -> String {
        let mut out = format!(
            "checkpoint  S = {}, {} in {}, BF16, on {}\n",
            text::both(self.made.bytes),
            text::plural(self.made.tensors as u64, "tensor"),
            text::plural(self.made.shards.len() as u64, "shard"),
            text::escape(&self.file_system)
        );
        let limit = |name: &str, limit: &Measured| {
            let rate = text::rate(limit.bytes_per_second);
            format!("{name:<12}B = {rate:<10}  {}\n", text::styled(DIM, &limit.how))
        };
        out.push_str(&limit("storage", &self.storage));
        out.push_str(&limit("memory", &self.memory));
        out.push('\n');
        out.push_str(&self.table());
        let note = "Before each load as much memory was touched and given back. A slow one among fast ones: the host of a virtual machine\nhad taken idle memory back, and the load had to wait for it.";
        out.push_str(&format!("{}\n", text::styled(DIM, note)));
        for remark in remarks([&self.cold, &self.warm].map(|state| (state.efficiency(), state.report().seconds))) {
            out.push_str(&format!("{}\n", text::styled(DIM, remark)));
        }
        if self.kept {
            out.push_str(&format!("\nkept: {}\n", text::escape(&self.folder.display().to_string())));
        }
        out
    }

    /// Both loads side by side.
    fn table(&self) -> String {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Right]);
        table.heading(["", "cold", "warm"]);
        let states = [&self.cold, &self.warm];
        let mut line = |name: &str, of: &dyn Fn(&State) -> String| {
            let [cold, warm] = states.map(of);
            table.row([name.to_owned(), cold, warm]);
        };
        line("in the page cache before", &|state| text::percent(state.resident));
        line("route", &|state| state.route().to_owned());
        line("B measured", &|state| text::rate(state.measured.bytes_per_second));
        line("T = S/B, at best", &|state| text::seconds(state.least_seconds()));
        line(&format!("load took, median of {ROUNDS}"), &|state| text::seconds(state.report().seconds));
        line("fastest and slowest", &|state| {
            let ends = [state.reports.first(), state.reports.last()].map(|report| report.map_or(0.0, |it| it.seconds));
            ends.map(text::seconds).join(" … ")
        });
        line("load rate", &|state| text::rate(state.report().gb_per_s * 1e9));
        line("CPU time", &|state| text::seconds(state.report().cpu_seconds));
        line("set-up, apart", &|state| text::seconds(state.report().setup_seconds));
        line("bound by", &|state| stage_name(state.report().estimate.bound_by).to_owned());
        let [cold, warm] =
            states.map(|state| (efficiency_style(state.efficiency()), text::percent(state.efficiency())));
        table.styled_row([(BOLD, "reached of T = S/B".to_owned()), cold, warm]);
        table.render()
    }
}

/// What a person has to know to read the table: of each state, the share of T = S/B that was reached, and the seconds.
fn remarks(loads: [(f64, f64); 2]) -> Vec<&'static str> {
    let mut remarks = Vec::new();
    // What is shown as 100 % needs no words.
    if loads.iter().any(|(efficiency, _)| *efficiency >= 1.005) {
        remarks
            .push("More than 100 %: the limit was measured at a slower moment of this machine; compare several runs.");
    }
    if loads.iter().any(|(_, seconds)| *seconds < BRIEF_SECONDS) {
        remarks.push(
            "A load of less than 50 ms is mostly set-up: a larger checkpoint (--bytes) says more about bandwidth.",
        );
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_odd_is_remarked_on() {
        assert_eq!(remarks([(0.9, 1.0), (1.004, 0.2)]), Vec::<&str>::new());
        assert!(remarks([(0.9, 1.0), (1.07, 0.2)])[0].contains("compare several runs"));
        assert!(remarks([(0.3, 0.049), (0.9, 0.2)])[0].contains("--bytes"));
        assert_eq!(remarks([(1.1, 0.01), (1.1, 0.01)]).len(), 2);
    }
}
