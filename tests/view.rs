//! Views: what they show, what they refuse, and what they say when the file changes under them.
#![allow(unsafe_code)] // the accessor that borrows, tested here

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};

use vramp::checkpoint::{Checkpoint, Selection, SliceRequest};
use vramp::digest::Digest;
use vramp::{Error, os};

use crate::files::{file_bytes, folder};

fn map(path: &std::path::Path, selection: &Selection) -> vramp::Result<vramp::view::Mapped> {
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.map(&checkpoint.select(selection)?)
}

#[test]
fn views_show_the_bytes_of_each_tensor_and_of_leading_slices() {
    let made = folder(1, 2, 3, 10_000);
    let slices = vec![SliceRequest { name: "layer.0.1".into(), dim: 0, range: 100..300 }];
    let mapped = map(made.path(), &Selection::default().slices(slices)).unwrap();
    assert_eq!(mapped.tensors().len(), made.expected.len());
    assert_eq!(mapped.report.routes.view, mapped.report.bytes);
    for (name, bytes) in &made.expected {
        let bytes = if name == "layer.0.1" { &bytes[100..300] } else { &bytes[..] };
        let tensor = mapped.tensor(name).unwrap();
        let mut copy = vec![0; bytes.len()];
        tensor.copy_to(0, &mut copy).unwrap();
        assert!(copy == bytes, "{name}");
        assert_eq!(tensor.sha256().unwrap(), Digest::of(bytes));
        // SAFETY: the folder is this test's own.
        assert!(unsafe { tensor.bytes() } == bytes, "{name}");
        assert!(tensor.sealed_bytes().is_none(), "an ordinary file is not sealed");
        assert!(tensor.copy_to(1, &mut copy).is_err(), "past the end");
    }
}

#[test]
fn mapping_a_large_file_reads_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = 8u64 << 30;
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    let before = os::resident_file_bytes().unwrap_or(0);
    let mapped = map(&path, &Selection::default()).unwrap();
    let mut last = [1];
    mapped.tensor("w").unwrap().copy_to(bytes - 1, &mut last).unwrap();
    assert_eq!(last, [0]);
    let grown = os::resident_file_bytes().unwrap_or(0).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes became resident");
}

#[test]
fn what_does_not_lie_in_one_piece_cannot_be_viewed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = r#"{"w":{"dtype":"U8","shape":[4,4],"data_offsets":[0,16]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7; 16]].concat();
    fs::write(&path, bytes).unwrap();
    let slices = vec![SliceRequest { name: "w".into(), dim: 1, range: 0..2 }];
    let error = map(&path, &Selection::default().slices(slices)).unwrap_err();
    assert!(matches!(error, Error::Request { .. }) && error.to_string().contains("one piece"), "{error}");
}

#[test]
fn a_file_that_shrinks_under_a_view_is_an_error_not_a_signal() {
    let made = folder(3, 1, 1, 1 << 20);
    let mapped = map(made.path(), &Selection::default()).unwrap();
    let tensor = mapped.tensor("layer.0.0").unwrap();
    File::options().write(true).open(&made.shards[0]).unwrap().set_len(4096).unwrap();
    let mut copy = vec![0; 1 << 20];
    assert!(matches!(tensor.copy_to(0, &mut copy), Err(Error::Changed { .. })));
    // Touching it directly reads zeros and is found out by `check`.
    // SAFETY: nobody writes to the file any more; its end is gone, which is what this test is about.
    let touched: u64 = unsafe { tensor.bytes() }.iter().rev().step_by(4096).map(|&byte| u64::from(byte)).sum();
    assert!(touched < 256 * 300);
    assert!(tensor.check().is_err());
}

#[test]
fn a_sealed_file_is_lent_safely() {
    // SAFETY: a plain system call with a valid name; the descriptor becomes the File's own.
    let descriptor = unsafe { libc::memfd_create(c"weights".as_ptr(), libc::MFD_ALLOW_SEALING) };
    assert!(descriptor >= 0);
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    file.write_all(&file_bytes(&[("w".to_owned(), vec![42; 100])])).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let open = map(path.as_ref(), &Selection::default()).unwrap();
    assert!(open.tensor("w").unwrap().sealed_bytes().is_none(), "not sealed yet");
    drop(open);
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: a plain system call on a descriptor that is open.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
    let sealed = map(path.as_ref(), &Selection::default()).unwrap();
    assert_eq!(sealed.tensor("w").unwrap().sealed_bytes(), Some(&[42; 100][..]));
}
