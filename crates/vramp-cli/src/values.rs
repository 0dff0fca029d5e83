//! Single values as people type them: sizes, rates, slices, ranks, ties. Each parser says what it wanted.
//!
//! Pure functions of text; the message of an error ends up after clap's own `invalid value … for …`.

use std::time::Duration;

use vramp::Float;
use vramp::checkpoint::{SliceRequest, Tie};
use vramp::dtype::{Dtype, StoredDtype};
use vramp::report::Staging;
use vramp_bench::estimate::{Link, NAMED_LINKS, QUANTISED, Scales, element_bits};

/// The smallest staging buffer that any block of direct I/O fits in.
const MIN_STAGING_BYTES: u64 = 4096;

/// More hosts than anybody starts at once.
const MAX_HOSTS: u64 = 100_000;

type Parsed<T> = Result<T, String>;

/// One rank of a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) world: usize,
}

/// Parameters of one type, once or as often as there are experts. Without a type, that of `--dtype`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) copies: u64,
    pub(crate) parameters: u64,
    pub(crate) dtype: Option<StoredDtype>,
}

/// Two bandwidths, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pair {
    pub(crate) first: f64,
    pub(crate) second: Option<f64>,
}

/// Tensors and the dimension that they are cut along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) glob: String,
    pub(crate) dim: usize,
}

/// `cpu`, `null`, `cuda`, `cuda:0`, `cuda:GPU-8c6f…`: a name that may stand for a device. Whether there is one is for whoever opens it.
pub(crate) fn device(text: &str) -> Parsed<String> {
    let number = |rest: &str| rest.strip_prefix(':').is_some_and(|number| number.parse::<u32>().is_ok());
    let known = match text.strip_prefix("cuda") {
        Some(rest) => rest.is_empty() || number(rest) || rest.starts_with(":GPU-"),
        None => matches!(text, "cpu" | "null"),
    };
    if known {
        Ok(text.to_owned())
    } else {
        Err("a device is cpu, null, cuda, cuda:N or cuda:GPU-… (a UUID)".to_owned())
    }
}

/// `bf16`, `F16`, `f32`: what floating-point tensors may become.
pub(crate) fn target(text: &str) -> Parsed<Float> {
    let float = Dtype::from_safetensors(&text.to_uppercase()).and_then(Float::of).filter(|float| float.is_target());
    float.ok_or_else(|| "tensors can become BF16, F16 or F32".to_owned())
}

/// `4MiB`, `1.5GB`, `4096`.
pub(crate) fn bytes(text: &str) -> Parsed<u64> {
    let wanted = || "a size is a number with a unit: 4096, 16MB (10^6 bytes), 4MiB (2^20 bytes)".to_owned();
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    if let (Ok(bytes), "") = (number.parse(), unit) {
        return Ok(bytes); // exact, however large
    }
    let unit = unit.trim_start().to_ascii_lowercase();
    let (first, rest) = unit.split_at(usize::from(unit.starts_with(['k', 'm', 'g', 't', 'p', 'e'])));
    let step: f64 = match rest.strip_suffix('b').unwrap_or(rest) {
        "" => 1000.0,
        "i" if !first.is_empty() => 1024.0,
        _ => return Err(wanted()),
    };
    let power = match first {
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        "e" => 6,
        _ => 0,
    };
    number.parse().ok().and_then(|number: f64| whole((number * step.powi(power)).floor())).ok_or_else(wanted)
}

/// `60`, `90s`, `5min`: how long something may take, from a second to a day.
pub(crate) fn budget(text: &str) -> Parsed<Duration> {
    let text = text.trim();
    let (number, unit) = match text.strip_suffix("min") {
        Some(number) => (number, 60),
        None => (text.strip_suffix('s').unwrap_or(text), 1),
    };
    let seconds = number.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    let seconds = seconds.filter(|seconds| (1..=86_400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| "a time is 60, 90s or 5min, and a day at most".to_owned())
}

/// Like [`bytes`], above zero.
pub(crate) fn shard_bytes(text: &str) -> Parsed<u64> {
    bytes(text).and_then(|size| if size > 0 { Ok(size) } else { Err("a file holds at least one byte".to_owned()) })
}

/// `64`, `4KiB`: a power of two.
pub(crate) fn alignment(text: &str) -> Parsed<u64> {
    match bytes(text)? {
        align if align.is_power_of_two() && align <= 2 << 20 => Ok(align),
        align => Err(format!("an alignment is a power of two up to 2MiB, and {align} is not")),
    }
}

/// `16x4MiB`.
pub(crate) fn staging(text: &str) -> Parsed<Staging> {
    let wanted = || "staging is a number of buffers and the size of each: 16x4MiB".to_owned();
    let (count, size) = text.split_once(['x', 'X']).ok_or_else(wanted)?;
    let count: usize = count.trim().parse().map_err(|_| wanted())?;
    let size = bytes(size)?;
    if count == 0 || size < MIN_STAGING_BYTES || !size.is_multiple_of(MIN_STAGING_BYTES) {
        return Err(format!(
            "at least one buffer, of a multiple of {MIN_STAGING_BYTES} bytes; this is {count} of {size} bytes"
        ));
    }
    let too_large = || "that is more than this machine can address".to_owned();
    let size = usize::try_from(size).map_err(|_| too_large())?;
    count.checked_mul(size).ok_or_else(too_large)?;
    Ok(Staging { count, bytes: size })
}

/// `NAME=DIM:START:END`. The name may hold `=` and `:`.
pub(crate) fn slice(text: &str) -> Parsed<SliceRequest> {
    let wanted = || "a slice is NAME=DIM:START:END, as lm_head.weight=0:0:1000".to_owned();
    let (name, numbers) = named(text).ok_or_else(wanted)?;
    let numbers: Vec<usize> =
        numbers.split(':').map(|number| number.trim().parse().map_err(|_| wanted())).collect::<Parsed<_>>()?;
    let &[dim, start, end] = numbers.as_slice() else { return Err(wanted()) };
    if start > end {
        return Err(format!("a slice starts before it ends, and {start} is above {end}"));
    }
    Ok(SliceRequest { name: name.to_owned(), dim, range: start..end })
}

/// `RANK/WORLD`.
pub(crate) fn rank(text: &str) -> Parsed<Rank> {
    let wanted = || "a rank is RANK/WORLD, as 0/4 for the first of four".to_owned();
    let (rank, world) = text.split_once('/').ok_or_else(wanted)?;
    let rank: usize = rank.trim().parse().map_err(|_| wanted())?;
    let world: usize = world.trim().parse().map_err(|_| wanted())?;
    if world == 0 {
        return Err("WORLD must be at least 1".to_owned());
    }
    if rank >= world {
        return Err(format!("ranks count from 0, so the last of {world} is {}", world - 1));
    }
    Ok(Rank { rank, world })
}

/// `GLOB=DIM`.
pub(crate) fn cut(text: &str) -> Parsed<Cut> {
    let wanted = || "a cut is GLOB=DIM, as '*.q_proj.weight=0'".to_owned();
    let (glob, dim) = named(text).ok_or_else(wanted)?;
    let dim = dim.trim().parse().map_err(|_| wanted())?;
    Ok(Cut { glob: glob.to_owned(), dim })
}

/// `ALIAS=NAME`.
pub(crate) fn tie(text: &str) -> Parsed<Tie> {
    let (alias, target) = named(text)
        .filter(|(_, target)| !target.is_empty())
        .ok_or("a tie is ALIAS=NAME, as lm_head.weight=model.embed_tokens.weight")?;
    Ok(Tie { alias: alias.to_owned(), target: target.to_owned() })
}

/// `70B`, `560M`, `1.5T`, `123456`.
pub(crate) fn parameters(text: &str) -> Parsed<u64> {
    let wanted = || "a number of parameters is as 70B, 560M, 1.5T or 123456".to_owned();
    let text = text.trim();
    let scaled = |scale: f64| {
        let number: f64 = text[..text.len() - 1].trim().parse().map_err(|_| wanted())?;
        whole(number * scale).ok_or_else(wanted)
    };
    let number = match text.chars().last().map(|unit| unit.to_ascii_uppercase()) {
        Some('K') => scaled(1e3),
        Some('M') => scaled(1e6),
        Some('B' | 'G') => scaled(1e9),
        Some('T') => scaled(1e12),
        _ => text.replace('_', "").parse().map_err(|_| wanted()),
    }?;
    if number == 0 { Err("a model has at least one parameter".to_owned()) } else { Ok(number) }
}

/// `f16`, `BF16`, `float32`, `fp8`.
pub(crate) fn dtype(text: &str) -> Parsed<StoredDtype> {
    let upper = text.trim().to_ascii_uppercase();
    let name = match upper.as_str() {
        "FP64" | "FLOAT64" | "DOUBLE" => "F64",
        "FP32" | "FLOAT32" | "FLOAT" => "F32",
        "FP16" | "FLOAT16" | "HALF" => "F16",
        "BFLOAT16" => "BF16",
        "FP8" | "F8" | "FLOAT8" | "FLOAT8_E4M3FN" => "F8_E4M3",
        "FLOAT8_E5M2" => "F8_E5M2",
        "FP4" => "F4",
        "I4" => "INT4",
        "U4" => "UINT4",
        "INT8" => "I8",
        "UINT8" => "U8",
        "INT16" => "I16",
        "INT32" => "I32",
        "INT64" => "I64",
        other => other,
    };
    match StoredDtype::from_safetensors(name) {
        quantised if element_bits(&quantised).is_some() => Ok(quantised),
        StoredDtype::Unknown(_) => {
            let quantised = QUANTISED.iter().map(|(name, ..)| *name);
            let names: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.name()).chain(quantised).collect();
            Err(format!("element types are {}", names.join(", ")))
        }
        known => Ok(known),
    }
}

/// `70B`, `2B=bf16`.
pub(crate) fn part(text: &str) -> Parsed<Part> {
    let (count, of_type) = text.split_once('=').map_or((text, None), |(count, name)| (count, Some(name)));
    Ok(Part { copies: 1, parameters: parameters(count)?, dtype: of_type.map(dtype).transpose()? })
}

/// `8x5.6B`, `256x2.5B=fp8`.
pub(crate) fn experts(text: &str) -> Parsed<Part> {
    let wanted =
        || "experts are their number and the parameters of one, over all layers: 8x5.6B, 8x5.6B=fp8".to_owned();
    let (copies, rest) = text.split_once(['x', 'X']).ok_or_else(wanted)?;
    let copies = copies.trim().parse().ok().filter(|&copies| copies > 0).ok_or_else(wanted)?;
    Ok(Part { copies, ..part(rest)? })
}

/// `128x128=f32`, `32=F8_E8M0`.
pub(crate) fn scales(text: &str) -> Parsed<Scales> {
    let wanted = || "scales are the block that shares one and their type: 128x128=f32, 32=F8_E8M0, 16=fp8".to_owned();
    let (block, of_type) = named(text).ok_or_else(wanted)?;
    let sides = block.split(['x', 'X']).map(|side| side.trim().parse::<u64>().ok());
    let block = sides.reduce(|a, b| a?.checked_mul(b?)).flatten().filter(|&block| block > 0).ok_or_else(wanted)?;
    Ok(Scales { block, dtype: dtype(of_type)?.known().ok_or_else(wanted)? })
}

/// `12GB/s`, `disk=7GB/s`, `pcie4x16`, `disk=nvme-gen4`.
pub(crate) fn link(text: &str) -> Parsed<Link> {
    let text = text.trim();
    if let Some(link) = Link::named(text) {
        return Ok(link);
    }
    let (name, of) = named(text).unwrap_or((text, text));
    let bytes_per_second = match Link::named(of) {
        Some(link) => link.bytes_per_second,
        None => rate(of)?,
    };
    Ok(Link { name: name.to_owned(), bytes_per_second })
}

/// `5GB/s,40GB/s`, `nvme-gen4`: a bandwidth and a second one that may be left out.
pub(crate) fn pair(text: &str) -> Parsed<Pair> {
    let (first, second) = text.split_once(',').map_or((text, None), |(first, second)| (first, Some(second)));
    let of = |text: &str| link(text).map(|link| link.bytes_per_second);
    Ok(Pair { first: of(first)?, second: second.map(of).transpose()? })
}

/// Hosts of a fleet.
pub(crate) fn hosts(text: &str) -> Parsed<u64> {
    let hosts = text.trim().replace(['_', ','], "").parse().ok().filter(|hosts| (1..=MAX_HOSTS).contains(hosts));
    hosts.ok_or_else(|| format!("a fleet has 1 to {MAX_HOSTS} hosts"))
}

/// `12GB/s`, `100Gbit/s`, `12e9B/s`: a number and a unit, which is never guessed.
pub(crate) fn rate(text: &str) -> Parsed<f64> {
    let wanted = || {
        let names: Vec<_> = NAMED_LINKS.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        format!("a bandwidth is a number with a unit, like 12GB/s, 12GiB/s or 100Gbit/s, or one of {names}")
    };
    let text = text.trim();
    if text.strip_prefix('-').is_some_and(|rest| number_len(rest) > 0) {
        return Err("a bandwidth is above zero".to_owned());
    }
    let number_len = number_len(text);
    let number: f64 = text[..number_len].parse().map_err(|_| wanted())?;
    let unit = text[number_len..].trim();
    let per_second = unit.strip_suffix("/s").map(str::trim_end);
    let scale = match (per_second.unwrap_or(unit), per_second.is_some()) {
        ("", false) => return Err(format!("a bandwidth is a number with a unit, like 12GB/s, and {text} has none")),
        ("B", _) => 1.0,
        ("Gb" | "gb" | "Mb" | "mb" | "Tb" | "tb", true) => {
            return Err(format!("{unit:?} may mean bits or bytes: write GB/s for bytes, Gbit/s for bits"));
        }
        (unit, true) if unit.ends_with("bit") => prefix(unit.trim_end_matches("bit")).ok_or_else(wanted)? / 8.0,
        (unit, false) if unit.ends_with("bps") => prefix(unit.trim_end_matches("bps")).ok_or_else(wanted)? / 8.0,
        (unit, _) if unit.ends_with('B') => prefix(unit.trim_end_matches('B')).ok_or_else(wanted)?,
        _ => return Err(wanted()),
    };
    let rate = number * scale;
    if rate.is_finite() && rate > 0.0 { Ok(rate) } else { Err("a bandwidth is above zero".to_owned()) }
}

/// Bytes at the beginning of `text` that are a number: digits, a point, an exponent.
fn number_len(text: &str) -> usize {
    let plain = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let rest = &text[plain..];
    let exponent = rest.strip_prefix(['e', 'E']).filter(|after| after.starts_with(|c: char| c.is_ascii_digit()));
    exponent.map_or(plain, |after| plain + 1 + after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len()))
}

fn prefix(text: &str) -> Option<f64> {
    Some(match text {
        "" => 1.0,
        "k" | "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        _ => return None,
    })
}

/// `name=value`, cut at the last `=`, since names of tensors may hold one.
fn named(text: &str) -> Option<(&str, &str)> {
    text.rsplit_once('=').filter(|(name, _)| !name.is_empty())
}

/// A finite number that is not negative, as an integer.
fn whole(number: f64) -> Option<u64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the range is checked
    (number.is_finite() && (0.0..1.8e19).contains(&number)).then_some(number.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_seconds_or_minutes() {
        let of = |text| budget(text).map(|budget| budget.as_secs()).ok();
        assert_eq!((of("60"), of("90s"), of(" 5min "), of("5 min")), (Some(60), Some(90), Some(300), Some(300)));
        assert_eq!(
            (of("0"), of("2h"), of("-1"), of("86401"), of("9999999999999999999min")),
            (None, None, None, None, None)
        );
    }

    #[test]
    fn devices() {
        for known in ["cpu", "null", "cuda", "cuda:0", "cuda:12", "cuda:GPU-8c6f"] {
            assert_eq!(device(known).as_deref(), Ok(known));
        }
        for wrong in ["", "tpu", "CPU", "cpu:0", "cuda:", "cuda:x", "cudax"] {
            assert!(device(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn element_types_to_become() {
        assert_eq!((target("bf16"), target("F32")), (Ok(Float::BF16), Ok(Float::F32)));
        for wrong in ["", "f64", "F8_E4M3", "i32", "float16"] {
            assert!(target(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_and_staging() {
        assert_eq!(bytes("4MiB"), Ok(4 << 20));
        assert_eq!(bytes("1.5GB"), Ok(1_500_000_000));
        assert_eq!(bytes("4096"), Ok(4096));
        let same = ["16MB", "16mb", "16 MB", "16M", "16m", "16000KB", "16000000B", "16000000", "0.016GB", ".016G"];
        assert!(same.iter().all(|text| bytes(text) == Ok(16_000_000)));
        assert!(["2GiB", "2gib", "2 Gi", "2048MiB", "2097152KiB"].iter().all(|text| bytes(text) == Ok(2 << 30)));
        assert_eq!((bytes("18446744073709551615"), bytes("1.5TiB"), bytes("0")), (Ok(u64::MAX), Ok(3 << 39), Ok(0)));
        for wrong in ["much", "", "-1", "MB", "1.2.3MB", "4MiX", "4ib", "4 5", "4MBs", "1e3", "99EB", "NaN", "+1"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(staging("16x4MiB"), Ok(Staging { count: 16, bytes: 4 << 20 }));
        for wrong in ["16", "0x4MiB", "x4MiB", "4x100", "4x", "99999999999999x4MiB", "4x5000"] {
            assert!(staging(wrong).is_err(), "{wrong}");
        }
        assert_eq!(shard_bytes("5GB"), Ok(5_000_000_000));
        assert!(shard_bytes("0").is_err() && shard_bytes("0MB").is_err());
        assert_eq!(alignment("4KiB"), Ok(4096));
        assert!(alignment("3").is_err() && alignment("0").is_err());
    }

    #[test]
    fn slices_cuts_and_ties_take_names_with_odd_characters() {
        let odd = slice("a=b:c=1:2:3").unwrap();
        assert_eq!((odd.name.as_str(), odd.dim, odd.range), ("a=b:c", 1, 2..3));
        for wrong in ["a", "a=", "=0:0:1", "a=0:1", "a=0:2:1", "a=0:1:2:3", "a=x:1:2", "a=-1:0:1"] {
            assert!(slice(wrong).is_err(), "{wrong}");
        }
        assert_eq!(cut("*.q=1"), Ok(Cut { glob: "*.q".to_owned(), dim: 1 }));
        assert!(cut("*.q").is_err() && cut("*.q=x").is_err());
        assert!(tie("a=b").is_ok() && tie("a").is_err() && tie("=b").is_err() && tie("a=").is_err());
    }

    #[test]
    fn ranks_stay_below_their_world() {
        assert_eq!(rank("3/4"), Ok(Rank { rank: 3, world: 4 }));
        for wrong in ["4/4", "0/0", "1", "a/b", "-1/2"] {
            assert!(rank(wrong).is_err(), "{wrong}");
        }
        assert_eq!(rank("0/0"), Err("WORLD must be at least 1".to_owned()));
    }

    #[test]
    fn parameters_and_types() {
        assert_eq!(parameters("70B"), Ok(70_000_000_000));
        assert_eq!(parameters("0.5b"), Ok(500_000_000));
        assert_eq!(parameters("123_456"), Ok(123_456));
        for zero in ["0", "0B", "0.0M"] {
            assert!(parameters(zero).unwrap_err().contains("at least one"), "{zero}");
        }
        assert!(parameters("many").is_err() && parameters("B").is_err() && parameters("-1B").is_err());
        assert_eq!(dtype("f16"), Ok(Dtype::F16.into()));
        assert_eq!(dtype("bfloat16"), Ok(Dtype::BF16.into()));
        assert!(dtype("f17").unwrap_err().contains("BF16"));
    }

    #[test]
    fn parts_of_a_mixture() {
        let of = |copies, parameters, dtype| Ok(Part { copies, parameters, dtype });
        assert_eq!(part("70B"), of(1, 70_000_000_000, None));
        assert_eq!(part("2B=bf16"), of(1, 2_000_000_000, Some(Dtype::BF16.into())));
        assert_eq!(experts("8x5.6B=fp8"), of(8, 5_600_000_000, Some(Dtype::F8_E4M3.into())));
        for wrong in ["", "=f16", "2B=", "2B=f17", "f16=2B"] {
            assert!(part(wrong).is_err(), "{wrong}");
        }
        for wrong in ["8", "0x2B", "x2B", "8x", "8x0", "-1x2B", "8x2B=f17"] {
            assert!(experts(wrong).is_err(), "{wrong}");
        }
        assert_eq!(scales("128x128=f32"), Ok(Scales { block: 16_384, dtype: Dtype::F32 }));
        assert_eq!(scales("32=F8_E8M0"), Ok(Scales { block: 32, dtype: Dtype::F8_E8M0 }));
        for wrong in ["128", "0=f32", "x=f32", "128x=f32", "=f32", "32=f17", "99999999999x99999999999=f32"] {
            assert!(scales(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn pairs_and_hosts() {
        assert_eq!(pair("5GB/s,40GB/s"), Ok(Pair { first: 5e9, second: Some(40e9) }));
        assert_eq!(pair("nvme-gen4"), Ok(Pair { first: 7e9, second: None }));
        assert!(pair("5GB/s,").is_err() && pair(",5GB/s").is_err() && pair("5,40").is_err());
        assert_eq!((hosts("1"), hosts("10_000")), (Ok(1), Ok(10_000)));
        assert!(hosts("0").is_err() && hosts("100001").is_err() && hosts("-1").is_err() && hosts("many").is_err());
    }

    #[test]
    fn bandwidths_tell_bits_from_bytes() {
        let of = |text: &str| link(text).map(|link| link.bytes_per_second);
        assert_eq!(of("12GB/s"), Ok(12e9));
        assert_eq!(of("12 GB/s"), Ok(12e9));
        assert_eq!(of("1GiB/s"), Ok(1_073_741_824.0));
        assert_eq!(of("100Gbit/s"), Ok(12.5e9));
        assert_eq!(of("10Gbps"), Ok(1.25e9));
        assert_eq!(of("12e9B/s"), Ok(12e9));
        assert_eq!(of("pcie4x16"), Ok(25e9));
        assert!(of("12Gb/s").unwrap_err().contains("bits or bytes"));
        for wrong in ["fast", "x=", "12GX/s", "7/s", "-fast"] {
            assert!(of(wrong).unwrap_err().contains("a number with a unit, like 12GB/s"), "{wrong}");
        }
        for bare in ["7", "12e9", "disk=7", "0"] {
            assert!(of(bare).unwrap_err().contains("has none"), "{bare}");
        }
        for wrong in ["0GB/s", "-3GB/s", "-3", "disk=0B/s", "1e-400GB/s"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        assert_eq!((of("0GB/s"), of("-3GB/s")), (of("0B/s"), of("-7B/s")), "both say that it is above zero");
        assert!(of("1e999GB/s").is_err());
        assert_eq!(link("disk=7GB/s").unwrap().name, "disk");
        assert_eq!(link("disk=NVMe-gen4"), Ok(Link { name: "disk".to_owned(), bytes_per_second: 7e9 }));
        assert_eq!(of("pcie5x4"), Ok(14e9));
    }
}
