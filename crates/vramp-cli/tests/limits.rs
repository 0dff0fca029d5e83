//! Measured limits: a load is compared only with what was measured before it, in the same place, and never with itself.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use vramp::Float;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::{CpuDevice, Device, NullDevice};
use vramp::load::{Convert, LimitPlace, LimitRates, Loader, MeasuredLimit, MeasuredLimits, TransferOptions};
use vramp::plan::RouteChoice;
use vramp::report::{Report, Stage};
use vramp::storage::Residency;
use vramp::testing::{Feature, Synthetic, required_if, safetensors};

use super::cli::{Said, command, folder, vramp};

/// Rates that no machine has, so that the right one shows.
const RATES: LimitRates = LimitRates {
    storage: Some(1e6),
    first_touch: Some(3e6),
    page_cache: Some(7e6),
    page_cache_to_fresh: Some(2e6),
    upload: Some(1e12),
};

fn limits(place: LimitPlace, rates: LimitRates) -> MeasuredLimits {
    let entry = MeasuredLimit { place, unix_seconds: 1_796_012_940, by: "a test".to_owned(), rates };
    MeasuredLimits { entries: vec![entry], ..MeasuredLimits::default() }
}

/// One load of a checkpoint that is all cold or all warm, and where it was made.
fn load(device: Arc<dyn Device>, warm: bool, transfer: TransferOptions, rates: LimitRates) -> Report {
    let synthetic = Synthetic::new(5, 3, 300_000, |_, file| file);
    synthetic.set_residency(if warm { Residency::all } else { Residency::none });
    let load = |transfer| {
        let mut loader = Loader::new(Arc::clone(&device), transfer);
        let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
        let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
        let place = LimitPlace::here(&*device, &prepared.file_system, &prepared.volume);
        (loader.load(&prepared).unwrap().report, place)
    };
    let (ungraded, place) = load(transfer.clone());
    assert!(ungraded.estimate.is_none() && ungraded.efficiency.is_none() && ungraded.no_estimate.is_some());
    load(transfer.limits(Arc::new(limits(place, rates)))).0
}

fn by(route: RouteChoice) -> TransferOptions {
    TransferOptions::default().route(route)
}

#[test]
fn the_slowest_of_the_stages_that_were_passed_is_the_limit_at_its_measured_rate() {
    let (cpu, null) = (|| Arc::new(CpuDevice::new()) as Arc<dyn Device>, || Arc::new(NullDevice::new()) as _);
    let slow_memory = LimitRates { first_touch: Some(1e3), ..RATES };
    let cases = [
        (load(cpu(), false, by(RouteChoice::Direct), RATES), Stage::Storage, 1e6),
        (load(cpu(), false, by(RouteChoice::Buffered), RATES), Stage::Storage, 1e6),
        (load(null(), false, by(RouteChoice::Direct), RATES), Stage::Storage, 1e6),
        // The null device takes no memory.
        (load(null(), false, by(RouteChoice::Direct), slow_memory), Stage::Storage, 1e6),
        (load(null(), true, by(RouteChoice::Buffered), RATES), Stage::PageCache, 7e6),
        (load(cpu(), true, by(RouteChoice::Buffered), RATES), Stage::PageCache, 2e6),
        // What is read past the page cache comes from storage, whatever the page cache holds.
        (load(cpu(), true, by(RouteChoice::Direct), RATES), Stage::Storage, 1e6),
    ];
    for (at, (report, stage, rate)) in cases.into_iter().enumerate() {
        let bound = report.estimate.clone().unwrap_or_else(|| panic!("{at}: {report:#?}"));
        assert_eq!((bound.bound_by, bound.bandwidth), (stage, rate), "{at}: {report:#?}");
        assert!((bound.seconds - bound.bytes as f64 / rate).abs() < 1e-9 && bound.bytes <= report.stages.read.bytes);
        let efficiency = report.efficiency.unwrap();
        assert!((efficiency - bound.seconds / report.seconds).abs() < 1e-9, "{at}: {report:#?}");
        assert_eq!((bound.measured.when.as_str(), bound.measured.by.as_str()), ("2026-11-30T04:29:00Z", "a test"));
    }
}

#[test]
fn what_was_not_measured_gives_no_estimate_and_says_so() {
    let cpu = || Arc::new(CpuDevice::new()) as Arc<dyn Device>;
    let why = |report: Report| {
        assert!(report.estimate.is_none() && report.efficiency.is_none(), "{report:#?}");
        report.no_estimate.unwrap()
    };
    let without = LimitRates { storage: None, ..RATES };
    let said = why(load(cpu(), false, by(RouteChoice::Direct), without));
    assert_eq!(said, "the limits measured on 2026-11-30 lack the rate of the storage");
    let convert = Some(Convert::to(Float::F32).allow_overflow(true));
    let said = why(load(cpu(), true, TransferOptions::default().convert(convert), RATES));
    assert!(said.contains("converted"), "{said}");
}

#[test]
fn limits_of_another_place_are_not_used_and_the_difference_is_named() {
    let here = LimitPlace::here(&CpuDevice::new(), "ext4", "259:1");
    assert!(limits(here.clone(), RATES).for_place(&here).is_ok());
    type Change = fn(&mut LimitPlace);
    let cases: [(Change, &str); 7] = [
        (|place| place.kernel = "5.4".into(), "the kernel was 5.4, now it is"),
        (|place| place.cores = 999, "the number of cores was 999, now it is"),
        (|place| place.device = "cuda:0".into(), "the device was cuda:0, now it is cpu"),
        (|place| place.product = "NVIDIA H200".into(), "the GPU was NVIDIA H200, now it is unknown"),
        (|place| place.file_system = "xfs".into(), "the file system was xfs, now it is ext4"),
        (|place| place.volume = "8:1".into(), "the device number of the file system was 8:1, now it is 259:1"),
        (|place| place.machine = "another".into(), "they are of another machine"),
    ];
    for (change, part) in cases {
        let mut other = here.clone();
        change(&mut other);
        let why = limits(other, RATES).for_place(&here).unwrap_err();
        assert!(why.contains(part) && why.starts_with("the limits measured on 2026-11-30 do not apply"), "{why}");
    }
    assert!(MeasuredLimits::default().for_place(&here).is_err());
}

#[test]
fn a_place_has_one_entry_and_a_file_of_limits_is_checked() {
    let here = LimitPlace::here(&CpuDevice::new(), "ext4", "259:1");
    let mut kept = limits(here.clone(), RATES);
    kept.add(MeasuredLimit { unix_seconds: 1_800_000_000, ..kept.entries[0].clone() });
    let other = LimitPlace { volume: "8:1".to_owned(), ..here.clone() };
    kept.add(MeasuredLimit { place: other, ..kept.entries[0].clone() });
    assert_eq!((kept.entries.len(), kept.for_place(&here).unwrap().unix_seconds), (2, 1_800_000_000));
    for number in 0..200 {
        let place = LimitPlace { volume: number.to_string(), ..here.clone() };
        kept.add(MeasuredLimit { place, unix_seconds: 1_800_000_001, ..kept.entries[0].clone() });
    }
    assert!(kept.entries.len() == 64 && kept.for_place(&here).is_err(), "the oldest go first");

    let folder = folder();
    let path = folder.path().join("limits.json");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        MeasuredLimits::read(&path)
    };
    assert_eq!(read(&serde_json::to_string(&kept).unwrap()).unwrap(), kept);
    let entry = serde_json::to_value(&kept.entries[0]).unwrap();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut whole = json!({"version": 1, "entries": [entry.clone()]});
        change(&mut whole);
        read(&whole.to_string()).unwrap_err().to_string()
    };
    for (said, part) in [
        (with(&|it| it["version"] = json!(2)), "version is 2"),
        (with(&|it| it["entries"][0]["rates"]["storage"] = json!(0.0)), "storage is 0"),
        (with(&|it| it["entries"][0]["rates"]["upload"] = json!(-1.0)), "upload is -1"),
        (with(&|it| it["entries"][0]["rates"]["network"] = json!(1.0)), "unknown field"),
        (with(&|it| it["entries"][0]["place"] = json!(["a", "b"])), "a list where an object belongs"),
        (read("").unwrap_err().to_string(), "not a file of measured limits"),
        (read("[1, []]").unwrap_err().to_string(), "a list where an object belongs"),
    ] {
        assert!(said.contains(part), "{said}");
    }
}

// ---- the program

/// `x` U8 of so many bytes.
fn checkpoint(folder: &Path, bytes: usize) -> String {
    let path = folder.join("m.safetensors");
    std::fs::write(&path, safetensors(&[("x", "U8", &[bytes], &vec![7; bytes])], json!({}))).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The place of a load of this file.
fn place(path: &str, device: &dyn Device) -> LimitPlace {
    let checkpoint = Checkpoint::open(path).unwrap();
    let loader = Loader::new(Arc::new(NullDevice::new()), TransferOptions::default());
    let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default()).unwrap()).unwrap();
    LimitPlace::here(device, &prepared.file_system, &prepared.volume)
}

#[test]
fn a_load_with_tiny_buffers_does_not_grade_itself() {
    let folder = folder();
    let path = checkpoint(folder.path(), 1 << 20);
    let load = ["load", &path, "--device", "null", "--staging", "1x4KiB"];
    let said = vramp(&load);
    assert!(said.out.contains("\nlimit       not known: ") && said.out.contains("vramp bench PATH"), "{}", said.out);
    assert!(!said.out.contains("T = ") && !said.out.contains("that rate") && !said.out.contains("memory ("));

    let file = folder.path().join("limits.json");
    let rates = LimitRates { storage: Some(1e12), page_cache: Some(1e12), ..RATES };
    let measured = limits(place(&path, &NullDevice::new()), rates);
    std::fs::write(&file, serde_json::to_string(&measured).unwrap()).unwrap();
    let with = |more: &[&str]| vramp(&[&load[..], &["--limits", file.to_str().unwrap()], more].concat());
    let report = with(&["--json"]).json()["report"].clone();
    assert_eq!(
        (&report["estimate"]["bandwidth"], &report["estimate"]["measured"]["by"]),
        (&json!(1e12), &json!("a test"))
    );
    assert!(report["efficiency"].as_f64().unwrap() < 0.1 && report.get("no_estimate").is_none(), "{report}");
    let out = with(&[]).out;
    assert!(out.contains("T = S/B = ") && out.contains("2026-11-30"), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");

    let view = vramp(&["load", &path, "--route", "view", "--limits", file.to_str().unwrap()]);
    assert_eq!(view.code, Some(2), "{}", view.err);
    let none = folder.path().join("none.json");
    let missing = vramp(&["load", &path, "--limits", none.to_str().unwrap()]);
    assert_eq!(missing.code, Some(4), "{}", missing.err);
    std::fs::write(&file, "{}").unwrap();
    assert_eq!(with(&[]).code, Some(2));
}

#[test]
fn a_benchmark_keeps_its_limits_where_loads_find_them() {
    let folder = folder();
    let path = checkpoint(folder.path(), 17 << 20);
    let cache = folder.path().join("cache");
    let in_cache = |args: &[&str]| {
        let output = command(args).env("XDG_CACHE_HOME", &cache).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    };
    let bench = ["bench", &path, "--device", "null", "--quick", "--rounds", "1", "--json"];
    let said = in_cache(&bench).json();
    let proven: Vec<&Value> =
        said["states"].as_array().unwrap().iter().filter(|it| it["proof"]["proven"] == true).collect();
    assert_eq!(said["limits"].is_null(), proven.is_empty(), "{said}");
    if !required_if(Feature::PageCache, !proven.is_empty(), "pages cannot be dropped or not be counted") {
        return;
    }
    let kept: Vec<_> = std::fs::read_dir(cache.join("vramp")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [kept] = kept.as_slice() else { panic!("{kept:?}") };
    let limits = MeasuredLimits::read(kept).unwrap();
    assert_eq!(limits.entries.len(), 1);
    assert_eq!(limits.entries[0].place, place(&path, &NullDevice::new()));
    assert!(limits.entries[0].by.starts_with("vramp bench "));
    let report = in_cache(&["load", &path, "--device", "null", "--json"]).json()["report"].clone();
    let warm = proven.iter().any(|state| state["state"] == "warm");
    assert!(!warm || report["estimate"]["bound_by"] == "page-cache", "{report}");

    // Named, it goes there and nowhere else; a file that holds something else is not written over.
    let named = folder.path().join("named.json");
    std::fs::remove_file(kept).unwrap();
    let again = in_cache(&[&bench[..], &["--limits", named.to_str().unwrap()]].concat());
    let has_limits = !again.json()["limits"].is_null(); // a machine that is short of memory may prove no state this time
    assert_eq!((again.code, named.exists(), kept.exists()), (Some(0), has_limits, false));
    std::fs::write(&named, "{\"something\": \"else\"}").unwrap();
    assert_eq!(in_cache(&[&bench[..], &["--limits", named.to_str().unwrap()]].concat()).code, Some(2));
    assert_eq!(std::fs::read_to_string(&named).unwrap(), "{\"something\": \"else\"}");
    // A damaged file in the cache folder stops no load.
    std::fs::write(kept, "damaged").unwrap();
    let said = in_cache(&["load", &path, "--device", "null"]);
    assert!(said.code == Some(0) && said.err.contains("limits are not used"), "{}", said.err);
}
