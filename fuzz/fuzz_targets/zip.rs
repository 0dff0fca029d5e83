//! Arbitrary bytes as a zip directory: never a panic, and in an archive without findings members lie apart, within the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp_pickle::bytes::Memory;
use vramp_pickle::zip;

fuzz_target!(|bytes: &[u8]| {
    let directory = zip::read(&Memory(bytes)).expect("memory does not fail");
    if directory.findings.iter().any(|finding| finding.severity.blocks()) {
        return;
    }
    let mut places: Vec<(u64, u64)> =
        directory.entries.iter().map(|entry| (entry.header, entry.data.expect("found") + entry.packed)).collect();
    places.sort_unstable();
    let mut done = 0;
    for (start, end) in places {
        assert!(done <= start && end <= bytes.len() as u64);
        done = end;
    }
});
