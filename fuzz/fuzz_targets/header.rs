//! Arbitrary bytes as a whole weight file: never a panic, and whatever is accepted lies within the file and covers it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp::checkpoint::safetensors::{self, MAX_HEADER_BYTES};

fuzz_target!(|file: &[u8]| {
    let file_len = file.len() as u64;
    let Ok(len) = safetensors::header_len(file, file_len, MAX_HEADER_BYTES) else { return };
    let header = &file[8..8 + len as usize];
    let Ok(parsed) = safetensors::parse(header, file_len) else { return };
    let mut next = 8 + len;
    for tensor in &parsed.tensors {
        assert_eq!(tensor.offset, next);
        next += tensor.len;
    }
    assert_eq!(next, file_len);
});
