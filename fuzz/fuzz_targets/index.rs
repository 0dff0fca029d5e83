//! Arbitrary bytes as an index: never a panic, and no accepted file name leaves the folder.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use vramp::checkpoint::index::Index;

fuzz_target!(|text: &[u8]| {
    let Ok(index) = Index::parse(text) else { return };
    for file in index.files() {
        let mut components = Path::new(file).components();
        assert!(matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)));
    }
});
