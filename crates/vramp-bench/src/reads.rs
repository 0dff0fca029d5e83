//! The reading stages alone: files to staging buffers by one route, pages of the page cache to fresh memory.
//!
//! The reads are made by the same queues as a load's, but nothing is planned, uploaded or kept. Making the queue and its
//! buffers does not count. The files are read from where the last sample ended, so that no sample lives on what another left.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::data::{Sample, Setting};
use vramp::device::{CpuDevice, Device, Region};
use vramp::error::{Error, Result};
use vramp::load::Cancel;
use vramp::memory::staging::StagingPool;
use vramp::storage::{Engine, Fallbacks, OpenFile, QueueOptions, Read, ReadQueue, ReadTarget, Route, Source, queue};

/// How much of the files a sample reads.
#[derive(Debug, Clone, Copy)]
pub(super) enum Portion {
    /// As much as the time allows, but each file at least once begun.
    Seconds(f64),
    /// This many bytes.
    Bytes(u64),
}

/// One way of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadWay {
    pub(super) route: Route,
    pub(super) engine: Engine,
    pub(super) block_bytes: u64,
    pub(super) at_once: usize,
}

impl ReadWay {
    /// In words.
    pub(super) fn setting(&self, engine: &str) -> Setting {
        let way = match self.route {
            Route::Direct => format!("O_DIRECT, {engine}"),
            Route::Mapped => "out of a mapping, threads".to_owned(),
            _ => "read, threads".to_owned(),
        };
        Setting { way, block_bytes: self.block_bytes, at_once: self.at_once }
    }

    /// Reads handed to the queue at a time: threads that copy out of the page cache must find the next one waiting, while a
    /// disk's depth is what is in flight.
    fn handed_over(&self) -> usize {
        let at_once = self.at_once.max(1);
        if self.route == Route::Direct { at_once } else { 2 * at_once }
    }

    fn queue(&self, pool: Option<&StagingPool>, fallbacks: &Fallbacks) -> Box<dyn ReadQueue> {
        let at_once = self.at_once.max(1);
        let options = QueueOptions::default().engine(self.engine).page_cache_threads(at_once).direct_depth(at_once);
        queue(&options, pool, fallbacks)
    }
}

/// A part of an open file.
pub(super) type Part = (Arc<dyn OpenFile>, Range<u64>);

/// Parts of files as one endless tape.
pub(super) struct Tape {
    files: Vec<Part>,
    /// Which part, and how much of it has been read.
    at: (usize, u64),
}

impl Tape {
    /// # Errors
    /// When there is nothing to read.
    pub(super) fn new(files: Vec<Part>) -> Result<Tape> {
        if files.iter().all(|(_, range)| range.is_empty()) {
            let what = "there is nothing to read: the tensors have no bytes".to_owned();
            return Err(Error::Request { what, hint: None });
        }
        Ok(Tape { files, at: (0, 0) })
    }

    /// Whether reads by this route are what they are called, for most bytes: some shards may be made on the host.
    pub(super) fn has(&self, route: Route) -> bool {
        let bytes = |range: &Range<u64>| range.end.saturating_sub(range.start);
        let by_it = self.files.iter().filter(|(file, _)| file.source(route).route() == route);
        let all: u64 = self.files.iter().map(|(_, range)| bytes(range)).sum();
        by_it.map(|(_, range)| bytes(range)).sum::<u64>() > all / 2
    }

    /// Back to the first byte.
    pub(super) fn rewind(&mut self) {
        self.at = (0, 0);
    }

    /// The next stretch: whole blocks of one file, the last of each part shorter.
    fn next(&mut self, way: &ReadWay) -> (Arc<dyn Source>, u64, usize) {
        loop {
            let (index, done) = self.at;
            let (file, range) = &self.files[index];
            let offset = range.start + done;
            let left = range.end.saturating_sub(offset);
            if left > 0 {
                let len = left.min(way.block_bytes);
                self.at = (index, done + len);
                return (file.source(way.route), offset, usize::try_from(len).unwrap_or(usize::MAX));
            }
            self.at = ((index + 1) % self.files.len(), 0);
        }
    }
}

/// Reads into staging buffers that are reused.
pub(super) fn to_staging(
    tape: &mut Tape,
    way: &ReadWay,
    portion: Portion,
    device: &dyn Device,
    cancel: &Cancel,
    fallbacks: &Fallbacks,
) -> Result<(Sample, &'static str)> {
    let block =
        usize::try_from(way.block_bytes).map_err(|_| Error::Poisoned { what: "a block above the word size" })?;
    let pool = device.staging(way.handed_over(), block, fallbacks)?;
    let mut queue = way.queue(Some(&pool), fallbacks);
    let mut reading = Reading::begin(portion, cancel);
    while let Some(buffer) = pool.acquire() {
        reading.submit(&mut *queue, tape, way, ReadTarget::Staging(buffer));
    }
    while let Some(completed) = queue.complete() {
        completed.outcome?;
        reading.check()?;
        if !reading.is_enough() {
            reading.submit(&mut *queue, tape, way, completed.target);
        }
    }
    Ok((reading.end(), queue.engine()))
}

/// Reads into memory that was never touched, each byte once.
pub(super) fn to_fresh(
    tape: &mut Tape,
    way: &ReadWay,
    bytes: u64,
    cancel: &Cancel,
    fallbacks: &Fallbacks,
) -> Result<Sample> {
    let mut queue = way.queue(None, fallbacks);
    let mut reading = Reading::begin(Portion::Bytes(bytes), cancel);
    let (mut regions, _written) = CpuDevice::new().alloc(bytes)?.carve(&blocks(bytes, way.block_bytes))?;
    regions.reverse();
    let mut next = |reading: &mut Reading<'_>, queue: &mut dyn ReadQueue| {
        let Some(region) = regions.pop() else { return };
        reading.submit_into(queue, tape, way, region);
    };
    (0..way.handed_over()).for_each(|_| next(&mut reading, &mut *queue));
    while let Some(completed) = queue.complete() {
        completed.outcome?;
        reading.check()?;
        next(&mut reading, &mut *queue);
    }
    Ok(reading.end())
}

/// `bytes` bytes cut into blocks.
pub(super) fn blocks(bytes: u64, block_bytes: u64) -> Vec<Range<u64>> {
    let step = usize::try_from(block_bytes).unwrap_or(usize::MAX).max(1);
    (0..bytes).step_by(step).map(|start| start..bytes.min(start + block_bytes)).collect()
}

/// One sample in the making.
struct Reading<'a> {
    portion: Portion,
    cancel: &'a Cancel,
    began: Instant,
    submitted: u64,
    count: usize,
}

impl Reading<'_> {
    fn begin(portion: Portion, cancel: &Cancel) -> Reading<'_> {
        Reading { portion, cancel, began: Instant::now(), submitted: 0, count: 0 }
    }

    fn check(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn is_enough(&self) -> bool {
        match self.portion {
            Portion::Seconds(seconds) => self.began.elapsed() >= Duration::from_secs_f64(seconds),
            Portion::Bytes(bytes) => self.submitted >= bytes,
        }
    }

    fn submit(&mut self, queue: &mut dyn ReadQueue, tape: &mut Tape, way: &ReadWay, target: ReadTarget) {
        let (source, offset, len) = tape.next(way);
        self.count += 1;
        self.submitted += len as u64;
        queue.submit(Read { id: self.count, source, offset, len }, target);
    }

    /// Fills the beginning of a region with the next stretch, or all of it where that is long enough.
    fn submit_into(&mut self, queue: &mut dyn ReadQueue, tape: &mut Tape, way: &ReadWay, region: Region) {
        let block_bytes = region.len().min(way.block_bytes);
        self.submit(queue, tape, &ReadWay { block_bytes, ..*way }, ReadTarget::InPlace(region));
    }

    fn end(self) -> Sample {
        Sample { bytes: self.submitted, seconds: self.began.elapsed().as_secs_f64() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramp::device::NullDevice;
    use vramp::testing::MemoryFile;

    fn way(route: Route, block_bytes: u64, at_once: usize) -> ReadWay {
        ReadWay { route, engine: Engine::Threads, block_bytes, at_once }
    }

    fn tape(lens: &[usize]) -> Tape {
        let part = |(index, len): (usize, &usize)| {
            let file: Arc<dyn OpenFile> = Arc::new(MemoryFile::new(format!("file-{index}"), vec![7; len + 3]));
            (file, 3..3 + *len as u64)
        };
        Tape::new(lens.iter().enumerate().map(part).collect()).unwrap()
    }

    #[test]
    fn a_tape_goes_round_and_never_leaves_a_file() {
        let mut tape = tape(&[10, 0, 5]);
        let way = way(Route::Buffered, 4, 1);
        let stretches: Vec<_> =
            (0..6).map(|_| tape.next(&way)).map(|(source, at, len)| (source.len(), at - 3, len)).collect();
        assert_eq!(stretches, [(13, 0, 4), (13, 4, 4), (13, 8, 2), (8, 0, 4), (8, 4, 1), (13, 0, 4)]);
    }

    #[test]
    fn samples_count_what_they_read() {
        let (cancel, fallbacks) = (Cancel::new(), Fallbacks::default());
        let mut tape = tape(&[1000, 300]);
        let way = way(Route::Buffered, 128, 3);
        let (sample, engine) =
            to_staging(&mut tape, &way, Portion::Bytes(2000), &NullDevice::new(), &cancel, &fallbacks).unwrap();
        assert!((2000..2000 + 6 * 128).contains(&sample.bytes), "{sample:?}");
        assert_eq!(engine, "threads");
        let fresh = to_fresh(&mut tape, &way, 1024, &cancel, &fallbacks).unwrap();
        assert!(fresh.bytes <= 1024 && fresh.bytes > 512, "{fresh:?}"); // ends of files make shorter reads
    }

    #[test]
    fn a_thrown_switch_ends_a_sample() {
        let cancel = Cancel::new();
        cancel.cancel();
        let result = to_staging(
            &mut tape(&[1000]),
            &way(Route::Direct, 100, 2),
            Portion::Seconds(1e9),
            &NullDevice::new(),
            &cancel,
            &Fallbacks::default(),
        );
        assert!(matches!(result, Err(Error::Cancelled)));
    }
}
