//! The way back: what a device's stream answers to [`Stream::download`](super::Stream::download), and the same for a device
//! without a way of its own.
//!
//! A finished range of an arena never changes, so a download needs its views kept alive and nothing else of the arena. Nothing
//! here knows what the bytes are for.

use std::ops::Range;

use super::View;
use crate::error::{Error, Result};
use crate::memory::staging::StagingBuffer;

/// A download on its way. Dropping it waits until the device no longer touches the buffer.
pub trait Download: Send {
    /// Whether [`Download::finish`] would return without waiting.
    fn is_done(&mut self) -> bool;

    /// Waits for the copies and gives the buffer, filled, and the views back.
    ///
    /// # Errors
    /// When a copy failed.
    fn finish(self: Box<Self>) -> Result<Downloaded>;
}

/// A download that is over.
#[derive(Debug)]
pub struct Downloaded {
    /// The buffer, filled.
    pub buffer: StagingBuffer,
    /// The views, as they were given.
    pub views: Vec<(u64, View)>,
}

/// Where in a buffer of `buffer_bytes` bytes a view goes that begins at its byte `at`.
///
/// # Errors
/// When it leaves the buffer.
pub(super) fn place(buffer_bytes: usize, at: u64, view: &View) -> Result<Range<usize>> {
    let end = at.checked_add(view.len()).filter(|&end| end <= buffer_bytes as u64);
    let place = end.and_then(|end| Some(usize::try_from(at).ok()?..usize::try_from(end).ok()?));
    place.ok_or(Error::Poisoned { what: "a view leaves the staging buffer that it is copied to" })
}

/// Copies before it returns, one view after the other.
pub(super) fn at_once(mut buffer: StagingBuffer, views: Vec<(u64, View)>) -> Result<Box<dyn Download>> {
    for (at, view) in &views {
        let place = place(buffer.len(), *at, view)?;
        let target = buffer.bytes_mut().get_mut(place).unwrap_or_default();
        view.download(0..view.len(), target)?;
    }
    Ok(Box::new(AtOnce(Downloaded { buffer, views })))
}

struct AtOnce(Downloaded);

impl Download for AtOnce {
    fn is_done(&mut self) -> bool {
        true
    }

    fn finish(self: Box<Self>) -> Result<Downloaded> {
        Ok(self.0)
    }
}
