//! The tensors of one file as one ordered stream of bytes, wherever they are: what a save fills its blocks with.
//!
//! Tensors in memory never change, so nothing is copied to take a snapshot of them: it keeps them alive and knows how far it has
//! come. Host memory is copied into a block at once; memory of a device comes by a download, and the block is filled when that
//! is over. Nothing here knows a file, or decides what comes next.

use std::collections::VecDeque;

use super::input::{Bytes, Input};
use crate::device::{Download, Stream, View};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::Filled;
use crate::memory::staging::StagingBuffer;

/// The bytes of one file that are still to come.
pub(super) struct Snapshot<'a> {
    parts: VecDeque<Part<'a>>,
}

enum Part<'a> {
    Host(&'a [u8]),
    /// The bytes of the view, by the stream of that number; `None`: by [`View::download`], the only way that its device has.
    Device(View, Option<usize>),
}

/// The streams from the devices that tensors of a save are on, by the devices' names.
pub(super) struct Streams {
    open: Vec<(String, Box<dyn Stream>)>,
    fallbacks: Fallbacks,
}

impl Streams {
    pub(super) fn new(fallbacks: &Fallbacks) -> Streams {
        Streams { open: Vec::new(), fallbacks: fallbacks.clone() }
    }

    /// The number of the stream from the device that `view` is on, opened for the first view of that device.
    fn number(&mut self, view: &View) -> Result<Option<usize>> {
        let Some(device) = view.device() else { return Ok(None) };
        let name = device.name();
        if let Some(at) = self.open.iter().position(|(known, _)| *known == name) {
            return Ok(Some(at));
        }
        self.open.push((name, device.stream(None, &self.fallbacks)?));
        Ok(Some(self.open.len() - 1))
    }
}

impl<'a> Snapshot<'a> {
    /// A stream of `header` and then `tensors`.
    pub(super) fn of(
        header: &'a [u8],
        tensors: impl Iterator<Item = &'a Input<'a>>,
        streams: &mut Streams,
    ) -> Result<Snapshot<'a>> {
        let mut parts = VecDeque::from([Part::Host(header)]);
        for Input { bytes, .. } in tensors {
            parts.push_back(match bytes {
                Bytes::Host(bytes) => Part::Host(bytes),
                Bytes::Tensor(tensor) => match tensor.bytes() {
                    Ok(bytes) => Part::Host(bytes),
                    Err(_) => {
                        tensor.view().must_keep()?;
                        Part::Device(tensor.view().clone(), streams.number(tensor.view())?)
                    }
                },
            });
        }
        parts.retain(|part| part.len() > 0);
        Ok(Snapshot { parts })
    }

    /// Whether all bytes have been taken.
    pub(super) fn is_over(&self) -> bool {
        self.parts.is_empty()
    }

    /// Begins to fill `buffer` with the next bytes, as many as it holds. A download comes from one device: what a block holds of
    /// a second one is copied here.
    pub(super) fn fill(&mut self, mut buffer: StagingBuffer, streams: &mut Streams) -> Result<Filling> {
        let (mut len, mut views, mut from) = (0, Vec::new(), None);
        while let Some(part) = self.take(buffer.len() - len) {
            let at = len;
            len += part.word_len();
            let target = buffer.bytes_mut().get_mut(at..len).ok_or(MISFIT)?;
            match part {
                Part::Host(bytes) => target.copy_from_slice(bytes),
                Part::Device(view, Some(stream)) if *from.get_or_insert(stream) == stream => {
                    views.push((at as u64, view));
                }
                Part::Device(view, _) => view.download(0..view.len(), target)?,
            }
        }
        let stream = from.and_then(|stream| streams.open.get_mut(stream));
        match stream {
            Some((_, stream)) => Ok(Filling::Download(stream.download(buffer, views)?, len)),
            None => Ok(Filling::Done(Filled::new(buffer, len))),
        }
    }

    /// The next part, or as much of it as fits `room`; `None` where nothing is left or fits.
    fn take(&mut self, room: usize) -> Option<Part<'a>> {
        if room == 0 {
            return None;
        }
        let front = self.parts.front_mut()?;
        if front.len() <= room as u64 {
            return self.parts.pop_front();
        }
        Some(match front {
            Part::Host(bytes) => {
                let (now, later) = bytes.split_at(room);
                *bytes = later;
                Part::Host(now)
            }
            Part::Device(view, stream) => {
                let now = view.part(0..room as u64)?;
                let stream = *stream;
                *view = view.part(room as u64..view.len())?;
                Part::Device(now, stream)
            }
        })
    }
}

const MISFIT: Error = Error::Poisoned { what: "more bytes than a block holds" };

impl Part<'_> {
    fn len(&self) -> u64 {
        match self {
            Part::Host(bytes) => bytes.len() as u64,
            Part::Device(view, _) => view.len(),
        }
    }

    /// The length of a part that fits a block.
    fn word_len(&self) -> usize {
        usize::try_from(self.len()).unwrap_or(usize::MAX)
    }
}

/// A block that is being filled.
pub(super) enum Filling {
    Done(Filled),
    /// By a download, of so many bytes and what is in the buffer already.
    Download(Box<dyn Download>, usize),
}

impl Filling {
    /// Whether [`Filling::finish`] would return without waiting.
    pub(super) fn is_done(&mut self) -> bool {
        match self {
            Filling::Done(_) => true,
            Filling::Download(download, _) => download.is_done(),
        }
    }

    /// Waits until the block is filled.
    pub(super) fn finish(self) -> Result<Filled> {
        match self {
            Filling::Done(filled) => Ok(filled),
            Filling::Download(download, len) => Ok(Filled::new(download.finish()?.buffer, len)),
        }
    }
}
