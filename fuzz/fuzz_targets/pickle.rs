//! Arbitrary bytes as a pickle: never a panic, every value in the arena, and a result only where nothing broke.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp_pickle::pickle;

fuzz_target!(|bytes: &[u8]| {
    let ran = pickle::run(bytes.to_vec(), bytes.len() as u64);
    assert!(ran.end <= bytes.len());
    assert_eq!(ran.result.is_some(), ran.stopped && !ran.faults.iter().any(pickle::Broken::blocks));
    let Some(root) = ran.result else { return };
    let walk = pickle::walk(&ran.arena, root);
    assert!(walk.reaches(root));
    assert!(ran.arena.preview(root).chars().count() <= 121);
});
