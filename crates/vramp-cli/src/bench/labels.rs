//! The names of stages, settings, states and days, as every face of a benchmark's report says them. Pure text.

use vramp_bench::{BenchReport, BenchStage, CacheState, Ceiling, Sample, Setting, Spread, StageBench, State};

use vramp::report::utc;

use super::super::text;

/// A stage in words.
pub(crate) fn stage(stage: BenchStage) -> &'static str {
    match stage {
        BenchStage::Opening => "opening and planning",
        BenchStage::Storage => "storage",
        BenchStage::PageCache => "page cache",
        BenchStage::PageCacheToFresh => "cache to fresh memory",
        BenchStage::FirstTouch => "first touch",
        BenchStage::HostCopy => "memory to memory",
        BenchStage::Context => "driver's context",
        BenchStage::Pinning => "locking staging",
        BenchStage::Upload => "upload",
        BenchStage::Download => "download",
        BenchStage::Kernels => "conversion",
        _ => "another stage",
    }
}

/// What a stage does, for those who meet its name for the first time.
pub(crate) fn stage_meaning(stage: BenchStage) -> &'static str {
    match stage {
        BenchStage::Opening => "reading headers and planning, before the first byte",
        BenchStage::Storage => "files to staging buffers, past the page cache",
        BenchStage::PageCache => "pages of the page cache to staging buffers",
        BenchStage::PageCacheToFresh => "pages of the page cache to fresh memory, first touch included",
        BenchStage::FirstTouch => "making fresh memory resident",
        BenchStage::HostCopy => "memory to memory",
        BenchStage::Context => "making the driver's context, once in a process",
        BenchStage::Pinning => "making staging buffers resident and locking them for the device",
        BenchStage::Upload => "staging buffers to the device",
        BenchStage::Download => "the device's memory to the host",
        BenchStage::Kernels => "staging buffers to the device, elements converted on the way",
        _ => "",
    }
}

/// `cold` or `warm`.
pub(crate) fn state(state: CacheState) -> &'static str {
    match state {
        CacheState::Cold => "cold",
        CacheState::Warm => "warm",
    }
}

/// `O_DIRECT, io_uring, 16 × 8 MiB`.
pub(crate) fn setting(setting: &Setting) -> String {
    joined([text::escape(&setting.way), amount(setting)])
}

/// The same with its numbers first, for where the rest may be cut off.
pub(crate) fn setting_by_numbers(setting: &Setting) -> String {
    joined([amount(setting), text::escape(&setting.way)])
}

fn joined(parts: [String; 2]) -> String {
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

fn amount(setting: &Setting) -> String {
    let block = text::binary(setting.block_bytes);
    match (setting.at_once, setting.block_bytes) {
        (0 | 1, 0) => String::new(),
        (at_once, 0) => format!("{at_once} at once"),
        (at_once, _) => format!("{} × {block}", at_once.max(1)),
    }
}

/// `278 ms [270 ms … 301 ms]`: the median, the least and the most.
pub(crate) fn spread(spread: Spread, of: impl Fn(f64) -> String) -> String {
    let [median, min, max] = [spread.median, spread.min, spread.max].map(of);
    if min == max { median } else { format!("{median} [{min} … {max}]") }
}

/// `2.00 GB/s`, or `-` where no bytes go through.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    if bytes_per_second > 0.0 { text::rate(bytes_per_second) } else { "-".to_owned() }
}

/// `storage at 2.00 GB/s`, or the stage alone where no bytes go through.
pub(crate) fn limit(of: BenchStage, bytes_per_second: f64) -> String {
    let at = if bytes_per_second > 0.0 { format!(" at {}", text::rate(bytes_per_second)) } else { String::new() };
    format!("{}{at}", stage(of))
}

/// `2.00 GB/s [1.96 … 2.06]`: a spread whose unit is that of its median, where all three have that unit.
fn spread_in_unit(spread: Spread, of: impl Fn(f64) -> String) -> String {
    let parts = [spread.median, spread.min, spread.max].map(of);
    let split: Option<Vec<(&str, &str)>> = parts.iter().map(|part| part.split_once(' ')).collect();
    match split.as_deref() {
        _ if parts[1] == parts[2] => parts[0].clone(),
        Some([median, min, max]) if min.1 == median.1 && max.1 == median.1 => {
            format!("{} [{} … {}]", parts[0], min.0, max.0)
        }
        _ => format!("{} [{} … {}]", parts[0], parts[1], parts[2]),
    }
}

/// `1.02 times T`: the time of the median load by the predicted one.
pub(crate) fn times_predicted(state: &State) -> String {
    format!("{} times T", factor(state.verdict.seconds / state.prediction.seconds.max(f64::MIN_POSITIVE)))
}

/// `1.02`, `12.3`.
pub(crate) fn factor(factor: f64) -> String {
    if factor < 9.995 { format!("{factor:.2}") } else { format!("{factor:.1}") }
}

/// The rate of the median load in bytes per second.
pub(crate) fn load_rate(state: &State) -> Option<f64> {
    let bytes = state.median_load()?.report.bytes;
    (bytes > 0 && state.verdict.seconds > 0.0).then(|| text::as_f64(bytes) / state.verdict.seconds)
}

/// The rates of samples, or their times where no bytes go through.
pub(crate) fn samples(samples: &[Sample]) -> Option<String> {
    if samples.iter().any(|sample| sample.bytes > 0) {
        return Some(spread_in_unit(Spread::of(samples.iter().map(Sample::rate))?, text::rate));
    }
    Some(spread(Spread::of(samples.iter().map(|sample| sample.seconds))?, text::seconds))
}

/// The rate that a stage reached within the median load, in bytes per second, where the load tells the stages apart: its reads
/// are those of the storage when it is cold, and those of the page cache when it is warm.
pub(crate) fn reached_in_load(state: &State, ceiling: &Ceiling) -> Option<f64> {
    let stages = &state.median_load()?.report.stages;
    let time = match (ceiling.stage, state.state) {
        (BenchStage::Storage, CacheState::Cold) => stages.read,
        (BenchStage::PageCache | BenchStage::PageCacheToFresh, CacheState::Warm) => stages.read,
        (BenchStage::Upload | BenchStage::Kernels, _) => stages.upload,
        _ => return None,
    };
    (time.bytes > 0 && time.seconds > 0.0).then(|| text::as_f64(time.bytes) / time.seconds)
}

/// The stages that were not measured, by why: `upload, download: host memory`.
pub(crate) fn skipped(stages: &[StageBench]) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for (name, why) in stages.iter().filter_map(|it| Some((stage(it.stage), text::escape(it.skipped.as_deref()?)))) {
        match found.iter_mut().find(|known| known.1 == why) {
            Some(known) => known.0 = format!("{}, {name}", known.0),
            None => found.push((name.to_owned(), why)),
        }
    }
    found
}

/// What the kernel said of the page cache: `proved: 0 % of the files in the page cache before each load`.
pub(crate) fn proof(of: &State) -> String {
    let said = Spread::of(of.proof.before.iter().copied());
    let said = said.map_or("nobody looked".to_owned(), |it| spread(it, text::percent));
    let verdict = if of.proof.proven { "proved" } else { "NOT proved" };
    format!("{verdict}: {said} of the files in the page cache before the loads ({})", text::escape(&of.proof.how))
}

/// The checkpoint's own name: that of the model where it lies in the Hugging Face cache, else the last part of its path.
pub(crate) fn name(report: &BenchReport) -> String {
    let path = &report.subject.path;
    let parts = || path.iter().map(|part| part.to_string_lossy());
    let hub = parts().find_map(|part| Some(part.strip_prefix("models--")?.replace("--", "/")));
    text::escape(&hub.or_else(|| parts().next_back().map(String::from)).unwrap_or_default())
}

/// `S = 4.34 GB (4.04 GiB), 246 tensors in 3 files`.
pub(crate) fn subject(report: &BenchReport) -> String {
    let subject = &report.subject;
    let (tensors, files) =
        (text::plural(subject.tensors as u64, "tensor"), text::plural(subject.shards as u64, "file"));
    format!("S = {}, {tensors} in {files}", text::both(subject.bytes))
}

/// Which part was loaded, and why; `None` if all of it.
pub(crate) fn part(report: &BenchReport) -> Option<String> {
    let subject = &report.subject;
    let why = text::escape(subject.part.as_deref()?);
    let tensors = text::plural(subject.loaded_tensors as u64, "tensor");
    let runs = match subject.runs {
        1 => "a run of neighbours in the files".to_owned(),
        runs => format!("{runs} runs of neighbours, spread evenly over the files"),
    };
    Some(format!("{} in {tensors} were loaded, {runs}: {why}", text::both(subject.loaded_bytes)))
}

/// `cuda:0, NVIDIA H200`.
pub(crate) fn device(report: &BenchReport) -> String {
    let machine = &report.machine;
    let parts = [&machine.device, &machine.product].map(|part| text::escape(part));
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

/// The machine in a few words: processor, cores, memory, file system and kernel, as far as they are known.
pub(crate) fn machine(report: &BenchReport) -> Vec<String> {
    let machine = &report.machine;
    let parts = [
        text::escape(&machine.processor),
        text::plural(machine.cores as u64, "core"),
        machine.memory_bytes.map_or(String::new(), |bytes| format!("{} of memory", text::binary(bytes))),
        format!("{} on kernel {}", text::escape(&machine.file_system), text::escape(&machine.kernel)),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect()
}

/// `2026-11-30 04:29 UTC`.
pub(crate) fn date(unix_seconds: u64) -> String {
    let time = utc(unix_seconds);
    let minutes: String = time.chars().take(16).collect();
    format!("{} UTC", minutes.replace('T', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_end_with_the_minute() {
        assert_eq!(date(1_796_012_940), "2026-11-30 04:29 UTC");
    }

    #[test]
    fn a_checkpoint_is_called_as_its_model() {
        let of = |path: &str| {
            let mut report = super::super::sample::report();
            report.subject.path = path.into();
            name(&report)
        };
        assert_eq!(of("/models/llama"), "llama");
        assert_eq!(of("hub/models--org--llama-3--8b/snapshots/0123"), "org/llama-3/8b");
        assert_eq!((of("/").as_str(), of("").as_str(), of("a\x07").as_str()), ("/", "", "a\\u{7}"));
    }

    #[test]
    fn settings_name_what_means_something() {
        let of = |way: &str, block_bytes, at_once| setting(&Setting { way: way.to_owned(), block_bytes, at_once });
        assert_eq!(of("O_DIRECT, io_uring", 8 << 20, 16), "O_DIRECT, io_uring, 16 × 8 MiB");
        assert_eq!(of("read", 8 << 20, 1), "read, 1 × 8 MiB");
        assert_eq!(of("threads", 0, 4), "threads, 4 at once");
        assert_eq!(of("cuCtxCreate", 0, 1), "cuCtxCreate");
    }
}
