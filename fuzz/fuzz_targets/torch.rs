//! Arbitrary bytes as a file of PyTorch: an audit never panics, and its verdict is that of its worst finding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp_pickle::audit::{Verdict, audit_bytes};

fuzz_target!(|bytes: &[u8]| {
    let audit = audit_bytes(bytes).expect("memory does not fail");
    let blocks = audit.findings.iter().any(|finding| finding.severity.blocks());
    assert_eq!(audit.verdict > Verdict::Notice, blocks);
});
