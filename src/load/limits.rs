//! Measured limits: how fast each stage of a load can be on one machine. They are measured before the load, by `bench`, and are the B of
//! T = S / B that a load is compared with. A load never supplies its own B.
//!
//! Plain data with a file form. Limits of another machine, device or file system are not used, and the reason is given. Nothing here
//! measures, and nothing here knows where a program keeps its files.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::prepared::Prepared;
use crate::device::Device;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::os;
use crate::report::{Bound, Measured, Report, Stage, utc};
use crate::setting::Setting;

/// The version of the file's form.
const VERSION: u32 = 1;

/// A file of limits holds a few hundred bytes for each device and file system.
const MOST_FILE_BYTES: u64 = 1 << 20;

/// Entries that a file keeps; the oldest are dropped.
const MOST_ENTRIES: usize = 64;

/// A stage that less than this share of the bytes passes cannot be the limit.
const NEGLIGIBLE: f64 = 0.01;

/// Measured limits of one or several places.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLimits {
    /// The version of this form: 1.
    pub version: u32,
    /// One entry for each place, in any order.
    pub entries: Vec<MeasuredLimit>,
}

/// What was measured in one place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLimit {
    /// Where it was measured.
    pub place: LimitPlace,
    /// When, in seconds since 1970.
    pub unix_seconds: u64,
    /// By what, in words: `vramp bench 0.1.0`.
    pub by: String,
    /// Bytes per second of each stage.
    pub rates: LimitRates,
}

/// A machine, a device and a file system. Limits hold for one place only.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitPlace {
    /// A digest of the machine's id; empty where the system has none.
    pub machine: String,
    /// The processor's name.
    pub processor: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: String,
    /// The device: `cpu`, `cuda:0`.
    pub device: String,
    /// The product's name of a GPU; empty for host memory.
    pub product: String,
    /// The file system: `ext4`.
    pub file_system: String,
    /// The device number of the file system: `259:1`.
    pub volume: String,
}

/// Bytes per second of each stage; `None` where it was not measured.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitRates {
    /// Files that are not in the page cache to staging buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<f64>,
    /// Making fresh memory resident, as reads of cold files into host memory need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_touch: Option<f64>,
    /// The page cache to staging buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_cache: Option<f64>,
    /// The page cache to fresh host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_cache_to_fresh: Option<f64>,
    /// Staging buffers to the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<f64>,
}

impl Default for MeasuredLimits {
    fn default() -> MeasuredLimits {
        MeasuredLimits { version: VERSION, entries: Vec::new() }
    }
}

impl MeasuredLimits {
    /// Reads a file of limits.
    ///
    /// # Errors
    /// When the file cannot be read, is no file of limits, or holds a rate that is no rate.
    pub fn read(path: impl AsRef<Path>) -> Result<MeasuredLimits> {
        let path = path.as_ref();
        let failed = |source| Error::io("read", path, source);
        let found = std::fs::metadata(path).map_err(failed)?;
        if !found.is_file() || found.len() > MOST_FILE_BYTES {
            return Err(refused(path, "it is not a file of measured limits, which is a small JSON file"));
        }
        let mut text = Vec::new();
        // A FIFO that took the file's place meanwhile must not block.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        file.take(MOST_FILE_BYTES).read_to_end(&mut text).map_err(failed)?;
        let wrong = |error| refused(path, &format!("it is not a file of measured limits: {error}"));
        let value: Value = serde_json::from_slice(&text).map_err(wrong)?;
        let entries = value.get("entries").and_then(Value::as_array);
        if value.is_array() || entries.is_some_and(|entries| entries.iter().any(has_list)) {
            return Err(refused(path, "it is not a file of measured limits: it holds a list where an object belongs"));
        }
        // From the text again: a value forgets duplicate keys.
        let limits: MeasuredLimits = serde_json::from_slice(&text).map_err(wrong)?;
        limits.problem().map_or(Ok(limits), |problem| Err(refused(path, &problem)))
    }

    fn problem(&self) -> Option<String> {
        if self.version != VERSION {
            return Some(format!("its version is {}, and this vramp reads version {VERSION}", self.version));
        }
        let rates = self.entries.iter().flat_map(|entry| entry.rates.named());
        let wrong = rates.into_iter().find(|(_, rate)| rate.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)));
        wrong.map(|(name, rate)| format!("{name} is {}; it must be a positive number", rate.unwrap_or_default()))
    }

    /// Adds an entry, which replaces what was known of the same place.
    pub fn add(&mut self, entry: MeasuredLimit) {
        self.entries.retain(|known| known.place != entry.place);
        self.entries.push(entry);
        self.entries.sort_by_key(|entry| entry.unix_seconds);
        let excess = self.entries.len().saturating_sub(MOST_ENTRIES);
        self.entries.drain(..excess);
    }

    /// The newest entry for a place.
    ///
    /// # Errors
    /// In words: why none of the entries can be used, by the one that comes nearest.
    pub fn for_place(&self, place: &LimitPlace) -> std::result::Result<&MeasuredLimit, String> {
        let found = self.entries.iter().filter(|entry| entry.place == *place);
        if let Some(entry) = found.max_by_key(|entry| entry.unix_seconds) {
            return Ok(entry);
        }
        let differences = |entry: &MeasuredLimit| entry.place.differences(place);
        let nearest = self.entries.iter().rev().min_by_key(|entry| differences(entry).len());
        let Some(nearest) = nearest else { return Err("the file of limits has no entry".to_owned()) };
        let why = differences(nearest).join("; ");
        Err(format!("the limits measured on {} do not apply: {why}", date(nearest.unix_seconds)))
    }
}

impl LimitPlace {
    /// This machine, with a device and a file system. `volume` is the device number of the file system.
    pub fn here(device: &dyn Device, file_system: &str, volume: &str) -> LimitPlace {
        LimitPlace {
            machine: machine_digest(),
            processor: os::processor_name().unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: os::kernel_release().unwrap_or_default(),
            device: device.name(),
            product: device.product().unwrap_or_default(),
            file_system: file_system.to_owned(),
            volume: volume.to_owned(),
        }
    }

    /// How this place differs from another one, in words.
    fn differences(&self, now: &LimitPlace) -> Vec<String> {
        let mut found = Vec::new();
        let mut differ = |what: &str, was: &str, is: &str| {
            if was != is {
                found.push(format!("{what} was {}, now it is {}", or_none(was), or_none(is)));
            }
        };
        differ("the device", &self.device, &now.device);
        differ("the GPU", &self.product, &now.product);
        differ("the file system", &self.file_system, &now.file_system);
        differ("the kernel", &self.kernel, &now.kernel);
        differ("the number of cores", &self.cores.to_string(), &now.cores.to_string());
        differ("the processor", &self.processor, &now.processor);
        if self.file_system == now.file_system {
            differ("the device number of the file system", &self.volume, &now.volume);
        }
        if self.machine != now.machine {
            found.push("they are of another machine".to_owned());
        }
        found
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "unknown" } else { text }
}

/// What stands for this machine in files of limits: a digest of its id, which is not to be shown to others. Empty where the system has
/// no id.
pub fn machine_digest() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id = id.trim();
    if id.is_empty() {
        return String::new();
    }
    Digest::of(format!("vramp limits {id}").as_bytes()).to_string().chars().take(16).collect()
}

impl LimitRates {
    fn named(&self) -> [(&'static str, Option<f64>); 5] {
        [
            ("storage", self.storage),
            ("first_touch", self.first_touch),
            ("page_cache", self.page_cache),
            ("page_cache_to_fresh", self.page_cache_to_fresh),
            ("upload", self.upload),
        ]
    }
}

/// The stages that a load passed, for the comparison with limits.
pub(super) struct Passed {
    /// Whether the bytes stay on the device.
    pub(super) keeps: bool,
    /// Whether the memory they went to was reserved by this load.
    pub(super) fresh: bool,
}

/// Fills in T = S / B of a finished load, or why there is none.
pub(super) fn judge(
    report: &mut Report,
    limits: Option<&MeasuredLimits>,
    prepared: &Prepared,
    device: &dyn Device,
    passed: &Passed,
) {
    if report.stages.read.bytes == 0 {
        return; // nothing had to move
    }
    let Some(limits) = limits else {
        report.no_estimate = Some("no measured limits were given".to_owned());
        return;
    };
    let place = LimitPlace::here(device, &prepared.file_system, &prepared.volume);
    match limits.for_place(&place).and_then(|limit| estimate(limit, report, passed)) {
        Ok(bound) => {
            report.efficiency = Some(bound.seconds / report.seconds.max(f64::MIN_POSITIVE));
            report.estimate = Some(bound);
        }
        Err(why) => report.no_estimate = Some(why),
    }
}

/// The slowest of the stages that the bytes passed, each at its measured rate: they work side by side.
fn estimate(limit: &MeasuredLimit, report: &Report, passed: &Passed) -> std::result::Result<Bound, String> {
    if report.stages.kernels.bytes > 0 {
        return Err("the load converted, and limits of conversions are not kept".to_owned());
    }
    let rates = &limit.rates;
    let mut slowest: Option<(Stage, u64, f64)> = None;
    for (stage, bytes, rate, what) in stages(report, passed, rates) {
        if as_f64(bytes) < as_f64(report.stages.read.bytes) * NEGLIGIBLE {
            continue;
        }
        let missing = || format!("the limits measured on {} lack {what}", date(limit.unix_seconds));
        let rate = rate.ok_or_else(missing)?;
        let seconds = as_f64(bytes) / rate;
        if slowest.is_none_or(|(_, bytes, rate)| as_f64(bytes) / rate < seconds) {
            slowest = Some((stage, bytes, rate));
        }
    }
    let (bound_by, bytes, bandwidth) = slowest.ok_or_else(|| "no byte passed a measured stage".to_owned())?;
    let measured = Measured { when: utc(limit.unix_seconds), by: limit.by.clone() };
    Ok(Bound { bytes, bandwidth, bound_by, seconds: as_f64(bytes) / bandwidth, measured })
}

type Lane = (Stage, u64, Option<f64>, &'static str);

/// How many bytes passed which stage. What the page cache held before came from it if it was read through it; everything else came from
/// storage.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a share of a number of bytes
fn stages(report: &Report, passed: &Passed, rates: &LimitRates) -> Vec<Lane> {
    let (read, routes) = (report.stages.read.bytes, &report.routes);
    let warm = (routes.buffered + routes.mapped).min(report.cache.resident_before).min(read);
    let cold = read - warm;
    let staged_share = as_f64(report.stages.stage.bytes) / as_f64(read).max(1.0);
    let staged = |bytes: u64| (as_f64(bytes) * staged_share.clamp(0.0, 1.0)) as u64;
    let in_place = |bytes: u64| bytes.saturating_sub(staged(bytes));
    let to_fresh = rates.page_cache_to_fresh.filter(|_| passed.fresh);
    let kept = |bytes: u64| if passed.keeps { bytes } else { 0 };
    vec![
        (Stage::Storage, cold, rates.storage, "the rate of the storage"),
        (
            Stage::FirstTouch,
            if passed.fresh { kept(in_place(cold)) } else { 0 },
            rates.first_touch,
            "the rate of fresh memory",
        ),
        (Stage::PageCache, in_place(warm), to_fresh, "the rate of the page cache to this memory"),
        (Stage::PageCache, staged(warm), rates.page_cache, "the rate of the page cache"),
        (Stage::Upload, kept(report.stages.upload.bytes), rates.upload, "the rate of copies from staging buffers"),
    ]
}

fn date(unix_seconds: u64) -> String {
    utc(unix_seconds).chars().take(10).collect()
}

#[allow(clippy::cast_precision_loss)] // a rate has no use for the 54th bit
fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

fn refused(path: &Path, what: &str) -> Error {
    let what = format!("the limits {} are refused: {what}", path.display());
    Error::Request { what, hint: Some(format!("{} measures and writes them", Setting::Bench)) }
}

/// Whether there is a list anywhere; the parser has bounded how deep.
pub(super) fn has_list(value: &Value) -> bool {
    match value {
        Value::Array(_) => true,
        Value::Object(members) => members.values().any(has_list),
        _ => false,
    }
}
