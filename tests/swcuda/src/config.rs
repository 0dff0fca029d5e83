//! What the double pretends to be: how it schedules, how much memory it has, how fast its copies are.
//!
//! A [`Config`] travels as `NAME=VALUE` lines, the same names that child processes read from `SWCUDA_NAME`: one parser, so
//! that a test in this process and one that starts a program cannot mean different things. This file keeps no state.

use std::fmt::Write;
use std::str::FromStr;
use std::time::Duration;

/// When queued work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// As soon as stream order allows.
    Eager,
    /// Not before something waits for it: turns most races into certain failures.
    Lazy,
    /// After random delays, from this seed.
    Random(u64),
}

/// In which order the threads of a block run between two barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Thread 0 first.
    Forward,
    /// Thread 0 last: a kernel without its barrier passes one of the two orders only.
    Reverse,
}

/// The properties of the double. [`Config::default`] is eager, one device of 1 GiB, no bandwidth model, driver 12.0.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// When queued work runs.
    pub schedule: Schedule,
    /// Number of devices; 0 makes `cuInit` fail with 100.
    pub devices: usize,
    /// Memory of each device. An allocation takes whole pages of 4 KiB of it.
    pub vram_bytes: u64,
    /// Modelled bandwidth from host to device; `None` is as fast as the machine copies.
    pub h2d_bytes_per_s: Option<f64>,
    /// Modelled bandwidth from device to host.
    pub d2h_bytes_per_s: Option<f64>,
    /// Modelled time that each copy takes besides its bytes.
    pub latency: Duration,
    /// What `cuDriverGetVersion` says; PTX that is newer is refused with 222.
    pub driver_version: i32,
    /// Compute capability.
    pub compute: (i32, i32),
    /// 1: both directions share one engine; 2 or more: one engine each.
    pub copy_engines: i32,
    /// Whether memory pools (`cuMemAllocAsync`) are supported.
    pub pools: bool,
    /// Whether a copy from or to memory that is not pinned is reported.
    pub pageable_is_error: bool,
    /// Order of a block's threads.
    pub thread_order: Order,
    /// Most bytes that may be registered at once; beyond it `cuMemHostRegister` answers 2.
    pub pin_limit: Option<u64>,
    /// What `CUDA_VISIBLE_DEVICES` says; `None` is all devices. A child process reads the variable itself.
    pub visible_devices: Option<String>,
    /// How long the lazy schedule holds work that nobody waits for.
    pub lazy_limit: Duration,
    /// Whether pinned sources are compared with a copy taken at enqueue (`SOURCE_CHANGED`). It costs a second pass over
    /// the bytes; a test of speed may turn it off.
    pub check_sources: bool,
    /// Whether copies from the host move their bytes. Without, they only take the time that the model says: for tests of
    /// timing, where the double's own copying would be slower than the link that it stands for.
    pub moves_bytes: bool,
    /// Whether time passes by the model alone: nothing waits for a clock on the wall, and the host's time is [`Double::clock`]'s.
    /// Without rates copies take no time at all.
    ///
    /// [`Double::clock`]: crate::Double::clock
    pub modelled_clock: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            schedule: Schedule::Eager,
            devices: 1,
            vram_bytes: 1 << 30,
            h2d_bytes_per_s: None,
            d2h_bytes_per_s: None,
            latency: Duration::ZERO,
            driver_version: 12000,
            compute: (9, 0),
            copy_engines: 2,
            pools: true,
            pageable_is_error: false,
            thread_order: Order::Forward,
            pin_limit: None,
            visible_devices: None,
            lazy_limit: Duration::from_secs(2),
            check_sources: true,
            moves_bytes: true,
            modelled_clock: false,
        }
    }
}

impl Config {
    /// The configuration with another schedule.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Config {
        self.schedule = schedule;
        self
    }

    /// The same as environment variables, for a child process. [`Config::visible_devices`] becomes
    /// `CUDA_VISIBLE_DEVICES`, which the child's driver reads by itself.
    ///
    /// Beside these a child reads `SWCUDA_FAULTS` (faults as [`Fault`](crate::Fault) prints them, with commas between),
    /// `SWCUDA_REPORT` (a file for its last words: the reports, then lines `stat NAME VALUE`) and `SWCUDA_QUIET` (`1`: it
    /// does not say at `cuInit` what it is).
    pub fn environment(&self) -> Vec<(String, String)> {
        let text = self.to_text();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs
            .map(|(name, value)| match name {
                "VISIBLE_DEVICES" => ("CUDA_VISIBLE_DEVICES".to_owned(), value.to_owned()),
                _ => (format!("SWCUDA_{name}"), value.to_owned()),
            })
            .collect()
    }

    /// One `NAME=VALUE` line for each property.
    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name}={value}");
        };
        let (schedule, seed) = match self.schedule {
            Schedule::Eager => ("eager", None),
            Schedule::Lazy => ("lazy", None),
            Schedule::Random(seed) => ("random", Some(seed)),
        };
        line("SCHED", schedule.to_owned());
        if let Some(seed) = seed {
            line("SEED", seed.to_string());
        }
        line("DEVICES", self.devices.to_string());
        line("VRAM", self.vram_bytes.to_string());
        let optional = [("H2D_BPS", self.h2d_bytes_per_s), ("D2H_BPS", self.d2h_bytes_per_s)];
        optional.iter().for_each(|(name, value)| value.iter().for_each(|value| line(name, value.to_string())));
        line("LATENCY_US", (self.latency.as_secs_f64() * 1e6).to_string());
        line("DRIVER_VERSION", self.driver_version.to_string());
        line("COMPUTE", format!("{}.{}", self.compute.0, self.compute.1));
        line("COPY_ENGINES", self.copy_engines.to_string());
        line("MEMPOOLS", u8::from(self.pools).to_string());
        line("PAGEABLE", if self.pageable_is_error { "error" } else { "count" }.to_owned());
        line("THREAD_ORDER", if self.thread_order == Order::Reverse { "reverse" } else { "forward" }.to_owned());
        self.pin_limit.iter().for_each(|limit| line("PIN_LIMIT", limit.to_string()));
        self.visible_devices.iter().for_each(|list| line("VISIBLE_DEVICES", list.clone()));
        line("LAZY_MS", self.lazy_limit.as_millis().to_string());
        line("CHECK_SOURCES", u8::from(self.check_sources).to_string());
        line("MOVES_BYTES", u8::from(self.moves_bytes).to_string());
        line("MODELLED_CLOCK", u8::from(self.modelled_clock).to_string());
        text
    }

    /// The configuration that a lookup of names gives; what is absent keeps its default.
    ///
    /// # Errors
    /// The name and the value that make no sense.
    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Config, String> {
        let mut config = Config::default();
        let seed = number(&lookup, "SEED")?.unwrap_or(1);
        config.schedule = match lookup("SCHED").as_deref() {
            None | Some("eager") => Schedule::Eager,
            Some("lazy") => Schedule::Lazy,
            Some("random") => Schedule::Random(seed),
            Some(other) => return Err(format!("SCHED={other}: eager, lazy or random")),
        };
        set(&mut config.devices, number(&lookup, "DEVICES")?);
        set(&mut config.vram_bytes, number(&lookup, "VRAM")?);
        config.h2d_bytes_per_s = rate(&lookup, "H2D_BPS")?;
        config.d2h_bytes_per_s = rate(&lookup, "D2H_BPS")?;
        let latency = number::<f64>(&lookup, "LATENCY_US")?.filter(|us| us.is_finite() && *us >= 0.0);
        set(&mut config.latency, latency.map(|us| Duration::from_secs_f64(us / 1e6)));
        set(&mut config.driver_version, number(&lookup, "DRIVER_VERSION")?);
        if let Some(text) = lookup("COMPUTE") {
            let pair = text.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            config.compute = pair.ok_or_else(|| format!("COMPUTE={text}: MAJOR.MINOR"))?;
        }
        set(&mut config.copy_engines, number(&lookup, "COPY_ENGINES")?);
        config.pools = number::<u8>(&lookup, "MEMPOOLS")? != Some(0);
        config.pageable_is_error = lookup("PAGEABLE").as_deref() == Some("error");
        if lookup("THREAD_ORDER").as_deref() == Some("reverse") {
            config.thread_order = Order::Reverse;
        }
        config.pin_limit = number(&lookup, "PIN_LIMIT")?;
        config.visible_devices = lookup("VISIBLE_DEVICES");
        set(&mut config.lazy_limit, number(&lookup, "LAZY_MS")?.map(Duration::from_millis));
        config.check_sources = number::<u8>(&lookup, "CHECK_SOURCES")? != Some(0);
        config.moves_bytes = number::<u8>(&lookup, "MOVES_BYTES")? != Some(0);
        config.modelled_clock = number::<u8>(&lookup, "MODELLED_CLOCK")? == Some(1);
        Ok(config)
    }

    /// The configuration of [`Config::to_text`].
    pub(crate) fn from_text(text: &str) -> Result<Config, String> {
        let pairs: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
        Config::from_lookup(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    /// The configuration of this process' environment.
    pub(crate) fn from_environment() -> Result<Config, String> {
        Config::from_lookup(|name| std::env::var(format!("SWCUDA_{name}")).ok())
    }
}

fn set<T>(target: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *target = value;
    }
}

fn number<T: FromStr>(lookup: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<T>, String> {
    let Some(text) = lookup(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| format!("{name}={text}: not a number"))
}

/// A bandwidth; 0 means that there is no model.
fn rate(lookup: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<f64>, String> {
    Ok(number::<f64>(lookup, name)?.filter(|rate| rate.is_finite() && *rate > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let config = Config {
            schedule: Schedule::Random(77),
            devices: 3,
            vram_bytes: 5 << 20,
            h2d_bytes_per_s: Some(2.5e9),
            latency: Duration::from_micros(12),
            compute: (7, 5),
            pools: false,
            pageable_is_error: true,
            thread_order: Order::Reverse,
            pin_limit: Some(4096),
            visible_devices: Some("1,0".to_owned()),
            check_sources: false,
            moves_bytes: false,
            modelled_clock: true,
            ..Config::default()
        };
        assert_eq!(Config::from_text(&config.to_text()).unwrap(), config);
        assert_eq!(Config::from_text("").unwrap(), Config::default());
    }

    #[test]
    fn nonsense_is_named() {
        assert!(Config::from_text("VRAM=lots").unwrap_err().contains("VRAM=lots"));
        assert!(Config::from_text("SCHED=soon").is_err());
    }

    #[test]
    fn a_child_gets_the_same() {
        let config = Config { visible_devices: Some("0".to_owned()), ..Config::default() };
        let environment = config.environment();
        assert!(environment.contains(&("CUDA_VISIBLE_DEVICES".to_owned(), "0".to_owned())));
        assert!(environment.contains(&("SWCUDA_SCHED".to_owned(), "eager".to_owned())));
    }
}
