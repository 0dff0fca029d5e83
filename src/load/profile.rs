//! A profile: how loads on one kind of machine move bytes, as a small file that `vramp bench --tune` writes and `load` takes.
//!
//! It is data of a person's making as well: what is in it is checked, and what is not known is refused.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::limits::has_list;
use super::options::TransferOptions;
use crate::error::{Error, Result};
use crate::report::Staging;
use crate::setting::Setting;
use crate::storage::{Engine, QueueOptions};

/// The version of the file's form.
const VERSION: u32 = 1;

/// A profile has a few lines.
const MOST_FILE_BYTES: u64 = 64 << 10;

/// Threads, reads in flight and lanes, at most: more than any machine has use for, less than a machine breaks at.
pub const MOST_AT_ONCE: usize = 1024;

/// Bytes of a read or of a staging buffer.
const READ_BYTES: std::ops::RangeInclusive<u64> = 4096..=1 << 30;

/// Bytes of all staging buffers together, at most.
const MOST_STAGING_BYTES: u64 = 64 << 30;

/// How loads on one kind of machine move bytes. What is not said is left as it is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The version of this form: 1.
    pub version: u32,
    /// The device that it was made for, in words. For people.
    #[serde(default)]
    pub device: String,
    /// The file system that it was made for. For people.
    #[serde(default)]
    pub file_system: String,
    /// The staging buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staging: Option<Staging>,
    /// Bytes of a read, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// Uploads that are worked on side by side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<usize>,
    /// What serves direct reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// Direct reads in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_depth: Option<usize>,
    /// Threads that copy out of the page cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_cache_threads: Option<usize>,
    /// Threads that make the pages of an arena resident ahead of direct reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub populate_threads: Option<usize>,
}

impl Profile {
    /// A profile that changes nothing.
    pub fn new(device: &str, file_system: &str) -> Profile {
        let (device, file_system) = (device.to_owned(), file_system.to_owned());
        Profile { version: VERSION, device, file_system, ..Profile::default() }
    }

    /// A profile that says what these options say beyond the defaults.
    pub fn of(options: &TransferOptions, device: &str, file_system: &str) -> Profile {
        let (queue, usual) = (options.queue, QueueOptions::default());
        let unlike = |value: usize, usual: usize| (value != usual).then_some(value);
        Profile {
            staging: options.staging,
            read_bytes: options.read_bytes,
            lanes: options.lanes,
            engine: (queue.engine != usual.engine).then_some(queue.engine),
            direct_depth: unlike(queue.direct_depth, usual.direct_depth),
            page_cache_threads: unlike(queue.page_cache_threads, usual.page_cache_threads),
            populate_threads: unlike(queue.populate_threads, usual.populate_threads),
            ..Profile::new(device, file_system)
        }
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// When the file cannot be read, is no profile, or says what no load can do.
    pub fn read(path: impl AsRef<Path>) -> Result<Profile> {
        let path = path.as_ref();
        let failed = |source| Error::io("read", path, source);
        let found = std::fs::metadata(path).map_err(failed)?;
        if !found.is_file() || found.len() > MOST_FILE_BYTES {
            return Err(refused(path, "it is no profile: a profile is a file of a few lines of JSON"));
        }
        let mut text = Vec::new();
        // Some files say that they are empty and never end.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        file.take(MOST_FILE_BYTES).read_to_end(&mut text).map_err(failed)?;
        let no_profile = |error| refused(path, &format!("it is no profile: {error}"));
        // A list would do for an object, its items taken for members in the order of this file.
        if has_list(&serde_json::from_slice(&text).map_err(no_profile)?) {
            return Err(refused(path, "it is no profile: it holds a list, and a profile is objects of named numbers"));
        }
        let profile: Profile = serde_json::from_slice(&text).map_err(no_profile)?;
        profile.problem().map_or(Ok(profile), |problem| Err(refused(path, &problem)))
    }

    /// What no load can do.
    fn problem(&self) -> Option<String> {
        if self.version != VERSION {
            return Some(format!("its version is {}, and this vramp knows version {VERSION}", self.version));
        }
        let counts = [
            ("lanes", self.lanes),
            ("direct_depth", self.direct_depth),
            ("page_cache_threads", self.page_cache_threads),
            ("populate_threads", self.populate_threads),
            ("staging.count", self.staging.map(|staging| staging.count)),
        ];
        let out = |(_, count): &&(_, Option<usize>)| count.is_some_and(|count| count == 0 || count > MOST_AT_ONCE);
        if let Some((name, count)) = counts.iter().find(out) {
            return Some(format!("{name} is {}; it may be 1 to {MOST_AT_ONCE}", count.unwrap_or_default()));
        }
        let sizes =
            [("read_bytes", self.read_bytes), ("staging.bytes", self.staging.map(|staging| staging.bytes as u64))];
        let out = |(_, bytes): &&(_, Option<u64>)| bytes.is_some_and(|bytes| !READ_BYTES.contains(&bytes));
        if let Some((name, bytes)) = sizes.iter().find(out) {
            let (least, most) = (READ_BYTES.start(), READ_BYTES.end());
            return Some(format!("{name} is {}; it may be {least} to {most}", bytes.unwrap_or_default()));
        }
        let all = self.staging.map_or(0, |staging| (staging.count as u64).saturating_mul(staging.bytes as u64));
        (all > MOST_STAGING_BYTES).then(|| format!("staging is {all} bytes; it may be {MOST_STAGING_BYTES}"))
    }

    /// The options, with what this profile says.
    #[must_use]
    pub fn apply(&self, mut options: TransferOptions) -> TransferOptions {
        let queue = &mut options.queue;
        queue.engine = self.engine.unwrap_or(queue.engine);
        queue.direct_depth = self.direct_depth.unwrap_or(queue.direct_depth);
        queue.page_cache_threads = self.page_cache_threads.unwrap_or(queue.page_cache_threads);
        queue.populate_threads = self.populate_threads.unwrap_or(queue.populate_threads);
        let staging = self.staging.or(options.staging);
        let (read_bytes, lanes) = (self.read_bytes.or(options.read_bytes), self.lanes.or(options.lanes));
        TransferOptions { staging, read_bytes, lanes, ..options }
    }
}

fn refused(path: &Path, what: &str) -> Error {
    let what = format!("the profile {} is refused: {what}", path.display());
    let hint = Some(format!("{} makes one", Setting::Tune));
    Error::Request { what, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Profile> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Profile::read(file.path())
    }

    #[test]
    fn a_profile_comes_back_as_it_was_written_and_says_only_what_it_says() {
        let staging = Some(Staging { count: 3, bytes: 1 << 20 });
        let profile =
            Profile { staging, direct_depth: Some(4), engine: Some(Engine::Threads), ..Profile::new("cpu", "ext4") };
        assert_eq!(read(&serde_json::to_string(&profile).unwrap()).unwrap(), profile);
        let options = profile.apply(TransferOptions::default());
        assert_eq!((options.queue.direct_depth, options.queue.engine), (4, Engine::Threads));
        assert_eq!((options.staging, options.lanes, options.read_bytes), (staging, None, None));
        let usual = TransferOptions::default().queue;
        assert_eq!(options.queue.page_cache_threads, usual.page_cache_threads);
    }

    #[test]
    fn what_no_load_can_do_is_refused_with_its_name_and_the_limit() {
        let cases = [
            (r#"{"version": 2}"#, "version is 2"),
            (r#"{"version": 1, "direct_depth": 0}"#, "direct_depth is 0; it may be 1 to 1024"),
            (r#"{"version": 1, "page_cache_threads": 100000}"#, "page_cache_threads is 100000"),
            (r#"{"version": 1, "read_bytes": 1}"#, "read_bytes is 1; it may be 4096 to 1073741824"),
            (r#"{"version": 1, "staging": {"count": 1000, "bytes": 1073741824}}"#, "staging is 1073741824000 bytes"),
            (r#"{"version": 1, "depth": 4}"#, "unknown field `depth`"),
            (r#"{"version": 1, "engine": "warp"}"#, "unknown variant `warp`"),
            (r#"[1, "cpu", "ext4"]"#, "holds a list"),
            (r#"{"version": 1, "staging": [2, 65536]}"#, "holds a list"),
            (r#"{"version": 1, "version": 1}"#, "duplicate field `version`"),
            ("", "it is no profile"),
        ];
        for (text, expected) in cases {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
