//! What a caller says may be wrong: no kernel gets to see it, and tensors that lie oddly are still summed rightly.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramp::checkpoint::Selection;
use vramp::convert::{Float, Meaning, Table};
use vramp::device::{BlockScale, Cast, CpuDevice, CudaDevice, Device, Piece, StreamNeeds};
use vramp::fallback::Fallbacks;
use vramp::load::{Loader, TransferOptions};
use vramp::testing::Synthetic;
use vramp::{Error, Result};

use super::{Rig, scheduled};

/// One upload of one piece to byte `at` of an arena.
fn upload(device: &dyn Device, piece: Piece, at: u64) -> Result<()> {
    let (fallbacks, buffer_bytes) = (Fallbacks::default(), 4096);
    let pool = device.staging(1, 2 * buffer_bytes, &fallbacks)?;
    let mut stream = device.stream(None, &fallbacks)?;
    let casts = vec![(Float::F32, Float::BF16), (Float::F8E4M3, Float::F32)];
    let codes = [127, 128, 129, 130].into();
    let scales = vec![[1.0, 2.0, 3.0, 4.0].into(), Table::Coded { codes, meaning: Meaning::Exponents }];
    stream.prepare(&StreamNeeds { buffers: 1, buffer_bytes, casts, small_pieces: 0, scales })?;
    let (regions, _) = device.alloc(1 << 16)?.carve(std::slice::from_ref(&(at..at + piece.len())))?;
    let buffer = pool.acquire().expect("nobody has it");
    stream.upload(buffer, vec![(piece, regions.into_iter().next().expect("one range"))])?.finish().map(drop)
}

#[test]
fn pieces_that_a_kernel_would_run_out_of_are_refused() {
    let Some(double) = Rig::double(scheduled(swcuda::Schedule::Eager)) else { return };
    let gpu = CudaDevice::open(0).unwrap();
    let plain = Cast { from: Float::F32, to: Float::BF16, scale: None };
    let blocks = BlockScale { table: 0, first: 0, columns: 16, block_rows: 8, block_columns: 8 };
    let scaled = |scale| Some(Cast { from: Float::F8E4M3, to: Float::F32, scale: Some(scale) });
    let right = Piece { at: 0, run: 8, stride: 16, count: 4, cast: Some(plain) };
    let wide = Piece { cast: scaled(blocks), ..Piece::contiguous(0, 256) };
    let coded = BlockScale { table: 1, ..blocks };
    let paired = |scale| Some(Cast { from: Float::E2M1x2, to: Float::F32, scale });
    for piece in [right, wide, Piece { cast: paired(Some(coded)), ..wide }] {
        upload(&gpu, piece, 64).unwrap();
        upload(&CpuDevice::new(), piece, 64).unwrap();
    }
    let kernels = double.stats().kernels;
    let wrong = [
        ("runs of half an element", Piece { run: 2, stride: 4, ..right }),
        ("runs of a quarter", Piece { run: 1, stride: 4, count: 8, ..right }),
        ("runs that begin within an element", Piece { stride: 10, ..right }),
        ("more elements than scales", Piece { cast: scaled(blocks), ..Piece::contiguous(0, 257) }),
        ("a far first", Piece { cast: scaled(BlockScale { first: 1, ..blocks }), ..wide }),
        ("the farthest first", Piece { cast: scaled(BlockScale { first: u64::MAX, ..blocks }), ..wide }),
        ("no columns", Piece { cast: scaled(BlockScale { columns: 0, ..blocks }), ..wide }),
        ("blocks without rows", Piece { cast: scaled(BlockScale { block_rows: 0, ..blocks }), ..wide }),
        ("blocks without columns", Piece { cast: scaled(BlockScale { block_columns: 0, ..blocks }), ..wide }),
        ("no such table", Piece { cast: scaled(BlockScale { table: 2, ..blocks }), ..wide }),
        ("more pairs than codes", Piece { cast: paired(Some(coded)), ..Piece::contiguous(0, 257) }),
        ("pairs a code too far", Piece { cast: paired(Some(BlockScale { first: 1, ..coded })), ..wide }),
    ];
    for (what, piece) in wrong {
        assert!(matches!(upload(&gpu, piece, 64), Err(Error::Poisoned { .. })), "{what}");
        assert!(matches!(upload(&CpuDevice::new(), piece, 64), Err(Error::Poisoned { .. })), "{what} on the CPU");
    }
    // There are no kernels for these.
    for scale in [None, Some(blocks)] {
        assert!(
            matches!(upload(&gpu, Piece { cast: paired(scale), ..wide }, 64), Err(Error::Poisoned { .. })),
            "{scale:?}"
        );
    }
    assert!(matches!(upload(&gpu, right, 65), Err(Error::Poisoned { .. })), "a misaligned target");
    let beyond = Piece { at: 4096, ..right };
    assert!(matches!(upload(&gpu, beyond, 64), Err(Error::Poisoned { .. })), "more than was prepared for");
    assert_eq!(double.stats().kernels, kernels, "no kernel has run");
}

#[test]
fn memory_that_lies_misaligned_is_refused_and_odd_places_are_summed() {
    let _rig = Rig::new(scheduled(swcuda::Schedule::Eager));
    let device = Arc::new(CudaDevice::open(0).unwrap());
    let synthetic = Synthetic::new(7, 4, 3_000, |_, file| file);
    let loader = Loader::new(Arc::clone(&device) as Arc<dyn Device>, TransferOptions::default());
    let mut loader = loader;
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let (mut places, mut end) = (BTreeMap::new(), 0u64);
    for chosen in &selected {
        let info = &synthetic.checkpoint.tensors()[chosen.tensor];
        let place = end.next_multiple_of(info.dtype.alignment()) + info.dtype.alignment();
        end = place + info.bytes();
        places.insert(Arc::clone(&chosen.name), place);
    }
    let prepared = loader.prepare_into(synthetic.checkpoint.clone(), &selected, &places).unwrap();
    let keep = Arc::new(device.alloc(end + 8).unwrap());
    let address = keep.address().unwrap();
    // SAFETY: the memory is `keep`'s, and nobody else's until the load is over.
    #[allow(unsafe_code)]
    let memory = |at| unsafe { device.memory_at(address + at, end, Arc::clone(&keep) as _) };
    let error = loader.load_into(&prepared, memory(1)).unwrap_err();
    assert!(matches!(&error, Error::Request { what, .. } if what.contains("-byte elements")), "{error}");
    let loaded = loader.load_into(&prepared, memory(0)).unwrap();
    let odd = loaded.tensors().iter().filter(|tensor| !tensor.is_empty() && tensor.view().range().start % 8 > 0);
    assert!(odd.count() > 0);
    for (name, bytes) in &synthetic.expected {
        assert_eq!(loaded.tensor(name).unwrap().checksum().unwrap(), vramp::digest::checksum(bytes), "{name}");
    }
}
