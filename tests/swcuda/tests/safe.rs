//! cudarc's safe layer on the double: that it works, and the hole in it.

use cudarc::driver::{CudaContext, DriverError};
use swcuda::{Config, Double, Schedule};

const BYTES: usize = 1 << 16;

fn schedules() -> [Schedule; 4] {
    [Schedule::Eager, Schedule::Lazy, Schedule::Random(1), Schedule::Random(2)]
}

#[test]
fn a_safe_program() -> Result<(), DriverError> {
    for schedule in schedules() {
        let double = Double::acquire(Config::default().schedule(schedule));
        let context = CudaContext::new(0)?;
        assert_eq!(context.name()?, "Software CUDA (test double, no GPU)");
        assert_eq!(context.compute_capability()?, (9, 0));
        let (upload, download) = (context.new_stream()?, context.new_stream_with_priority(-1)?);
        // SAFETY: filled below, before anything reads it.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(BYTES, 0)? };
        pinned.as_mut_slice()?.iter_mut().zip(0..).for_each(|(byte, at): (&mut u8, usize)| *byte = at as u8);
        let mut device = upload.alloc_zeros::<u8>(2 * BYTES)?;
        upload.memcpy_htod(&pinned, &mut device.slice_mut(BYTES..2 * BYTES))?;
        let back = download.clone_dtoh(&device.slice(BYTES..2 * BYTES))?;
        download.synchronize()?;
        assert_eq!(back, pinned.as_slice()?);
        assert_eq!(context.mem_get_info()?, ((1 << 30) - 2 * BYTES, 1 << 30));
        drop((pinned, device, upload, download));
        context.check_err()?;
        drop(context);
        drop(double);
    }
    Ok(())
}

/// Safe Rust, no `unsafe` at the copy: the slice hides the pinned buffer from cudarc's event tracking.
#[test]
fn the_hole_is_seen() -> Result<(), DriverError> {
    let double = Double::acquire(Config::default().schedule(Schedule::Lazy));
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    // SAFETY: filled below.
    let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(BYTES, 0)? };
    pinned.as_mut_slice()?.fill(1);
    let mut device = stream.alloc_zeros::<u8>(BYTES / 2)?;
    stream.memcpy_htod(&pinned.as_slice()?[..BYTES / 2], &mut device)?;
    pinned.as_mut_slice()?[0] = 77;
    stream.synchronize()?;
    let reports = double.reports();
    assert!(reports.len() == 1 && reports[0].starts_with("SOURCE_CHANGED: "), "{reports:?}");
    drop((pinned, device, stream));
    drop(context);
    drop(double);
    Ok(())
}
