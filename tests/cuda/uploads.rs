//! Uploads by themselves, without the loop that keeps its promises: several at once, given up half-way, or asked for what must
//! not be done.

use vramp::convert::{Float, Table};
use vramp::device::{BlockScale, Cast, Device, Piece, Region, Stream, StreamNeeds, Uploaded};
use vramp::fallback::Fallbacks;
use vramp::memory::staging::StagingPool;
use vramp::testing::watched;

use super::{Rig, scheduled, schedules};

const BYTES: usize = 64 << 10;

/// A stream and two staging buffers, for conversions from FP8 with the scales 1 and 2.
fn stream(device: &dyn Device) -> (Box<dyn Stream>, StagingPool) {
    let pool = device.staging(2, BYTES, &Fallbacks::default()).unwrap();
    let mut stream = device.stream(None, &Fallbacks::default()).unwrap();
    let scales: Vec<Table> = vec![[1.0, 2.0].into()];
    let casts = vec![(Float::F8E4M3, Float::BF16), (Float::F32, Float::BF16)];
    stream.prepare(&StreamNeeds { buffers: 2, buffer_bytes: BYTES, casts, small_pieces: 0, scales }).unwrap();
    (stream, pool)
}

fn region(device: &dyn Device, bytes: u64) -> Region {
    let (mut regions, _) = device.alloc(bytes).unwrap().carve(std::slice::from_ref(&(0..bytes))).unwrap();
    regions.pop().unwrap()
}

fn cast(from: Float, scale: Option<BlockScale>) -> Option<Cast> {
    Some(Cast { from, to: Float::BF16, scale })
}

/// The buffer is filled anew and the memory freed as soon as the upload is gone: nothing may still be reading or writing them.
#[test]
fn an_upload_that_is_given_up_is_waited_for() {
    watched(|| {
        for schedule in schedules(6) {
            let rig = Rig::new(scheduled(schedule));
            let device = rig.device();
            let (mut stream, pool) = stream(&*device);
            for round in 0..8u8 {
                let mut buffers: Vec<_> = std::iter::from_fn(|| pool.acquire()).collect();
                assert_eq!(buffers.len(), 2, "a given-up upload gives its buffer back");
                buffers.iter_mut().for_each(|buffer| buffer.bytes_mut().fill(round));
                let plain = Piece::contiguous(0, 40_000);
                let converted = Piece { cast: cast(Float::F8E4M3, None), ..Piece::contiguous(40_000, 8_000) };
                let uploads: Vec<_> = buffers
                    .into_iter()
                    .map(|buffer| {
                        let pieces = [plain, converted].map(|piece| (piece, region(&*device, piece.len())));
                        stream.upload(buffer, pieces.into()).unwrap()
                    })
                    .collect();
                drop(uploads);
            }
        }
    });
}

/// Two are in flight, and the first stays what it was when the second is waited for first.
#[test]
fn uploads_may_be_waited_for_in_any_order() {
    watched(|| {
        for schedule in schedules(6) {
            let rig = Rig::new(scheduled(schedule));
            let device = rig.device();
            let (mut stream, pool) = stream(&*device);
            let start = |value: u8, stream: &mut Box<dyn Stream>| {
                let mut buffer = pool.acquire().unwrap();
                buffer.bytes_mut().fill(value);
                let piece = Piece::contiguous(7, 50_000);
                let (mut regions, written) =
                    device.alloc(50_000).unwrap().carve(std::slice::from_ref(&(0..50_000))).unwrap();
                (value, written, stream.upload(buffer, vec![(piece, regions.pop().unwrap())]).unwrap())
            };
            let uploads = [start(3, &mut stream), start(5, &mut stream)];
            for (value, written, upload) in uploads.into_iter().rev() {
                let Uploaded { buffer, regions, .. } = upload.finish().unwrap();
                drop(buffer);
                regions.into_iter().for_each(Region::finish);
                let mut back = vec![0; 50_000];
                written.view(0..50_000).unwrap().download(0..50_000, &mut back).unwrap();
                assert!(back.iter().all(|&byte| byte == value), "{schedule:?}");
            }
        }
    });
}

/// Rows of two tensors that lie in each other: the longer piece goes on after the shorter has ended.
#[test]
fn a_piece_that_lies_inside_another_is_converted_like_it() {
    let rig = Rig::new(scheduled(swcuda::Schedule::Lazy));
    let device = rig.device();
    let (mut stream, pool) = stream(&*device);
    let mut buffer = pool.acquire().unwrap();
    let one = 1.0f32.to_le_bytes();
    buffer.bytes_mut().chunks_exact_mut(4).for_each(|element| element.copy_from_slice(&one));
    let outer = Piece { cast: cast(Float::F32, None), ..Piece::contiguous(0, 4000) };
    let inner = Piece { at: 400, run: 8, stride: 80, count: 5, cast: cast(Float::F32, None) };
    let (regions, written) = device.alloc(2020).unwrap().carve(&[0..2000, 2000..2020]).unwrap();
    let upload = stream.upload(buffer, [outer, inner].into_iter().zip(regions).collect()).unwrap();
    upload.finish().unwrap().regions.into_iter().for_each(Region::finish);
    let mut back = vec![0; 2020];
    written.view(0..2020).unwrap().download(0..2020, &mut back).unwrap();
    assert!(back.chunks_exact(2).all(|element| element == [0x80, 0x3f]));
}

/// The counter that grows is that of the piece, whatever else the upload holds.
#[test]
fn an_overflow_is_told_of_the_piece_that_has_it() {
    let rig = Rig::new(scheduled(swcuda::Schedule::Lazy));
    let device = rig.device();
    let (mut stream, pool) = stream(&*device);
    let mut buffer = pool.acquire().unwrap();
    buffer.bytes_mut()[404..408].copy_from_slice(&f32::MAX.to_le_bytes());
    let converted = |at| Piece { cast: cast(Float::F32, None), ..Piece::contiguous(at, 200) };
    let pieces = [Piece::contiguous(0, 200), converted(200), Piece::contiguous(0, 200), converted(400)];
    let pieces = pieces.map(|piece| (piece, region(&*device, piece.len()))).into();
    let uploaded = stream.upload(buffer, pieces).unwrap().finish().unwrap();
    assert_eq!(uploaded.overflows, [(3, 1)]);
}

/// The GPU has no bounds of its own: what would read or write elsewhere is refused before anything is started.
#[test]
fn what_does_not_fit_is_not_started() {
    let rig = Rig::new(scheduled(swcuda::Schedule::Lazy));
    let device = rig.device();
    let (mut stream, pool) = stream(&*device);
    let last = BYTES as u64;
    let scaled = |scale| Piece { cast: cast(Float::F8E4M3, Some(scale)), ..Piece::contiguous(0, 128) };
    let good = BlockScale { table: 0, first: 0, columns: 64, block_rows: 1, block_columns: 64 };
    let rows = |run, stride| Piece { at: 0, run, stride, count: 4, cast: cast(Float::F32, None) };
    let misfits = [
        ("bytes after the buffer", Piece::contiguous(last - 1, 2), 2),
        ("rows after the buffer", Piece { at: 0, run: 8, stride: last, count: 2, cast: None }, 16),
        ("a region that is too short", Piece::contiguous(0, 100), 99),
        ("rows that overlap", Piece { at: 0, run: 8, stride: 4, count: 2, cast: None }, 16),
        ("an unknown table", scaled(BlockScale { table: 1, ..good }), 256),
        ("a third scale of two", scaled(BlockScale { first: 1, ..good }), 256),
        ("scales without columns", scaled(BlockScale { columns: 0, ..good }), 256),
        ("blocks without columns", scaled(BlockScale { block_columns: 0, ..good }), 256),
        ("blocks without rows", scaled(BlockScale { block_rows: 0, ..good }), 256),
        ("rows of half an element", rows(6, 8), 12),
        ("rows at half an element", rows(4, 6), 8),
    ];
    for (what, piece, bytes) in misfits {
        let upload = stream.upload(pool.acquire().unwrap(), vec![(piece, region(&*device, bytes))]);
        assert!(upload.is_err(), "{what}");
    }
    assert!(stream.upload(pool.acquire().unwrap(), vec![(scaled(good), region(&*device, 256))]).is_ok());
    // A buffer that is longer than was said: its copy on the GPU would not have room for it.
    let long = device.staging(1, 4 * BYTES, &Fallbacks::default()).unwrap();
    let piece = Piece { cast: cast(Float::F32, None), ..Piece::contiguous(3 * last, 64) };
    assert!(stream.upload(long.acquire().unwrap(), vec![(piece, region(&*device, 32))]).is_err());
}
