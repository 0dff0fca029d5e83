//! Files that a GPU reads itself, by cuFile: from the disk into its memory, in the context of the GPU. What cuFile is and what it
//! must be guarded against is in `cufile`. Nothing here decides what is read.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cufile::{Cufile, KnownFile, ReadRefusal};
use super::gpu::Gpu;
use crate::device::{DirectFile, DirectReads, Region};
use crate::error::{Error, Result};

/// Reads of one GPU.
pub(super) struct CudaReads {
    gpu: Arc<Gpu>,
    cufile: &'static Cufile,
}

/// A file that the GPU reads.
struct CudaFile {
    gpu: Arc<Gpu>,
    /// `None` only while it is dropped.
    file: Option<KnownFile>,
    path: PathBuf,
}

impl CudaReads {
    /// The reads of a GPU, where there is a cuFile that starts; with `native_only`, only where it goes past the host.
    pub(super) fn of(gpu: &Arc<Gpu>, native_only: bool) -> Option<Result<CudaReads, String>> {
        if native_only && Cufile::is_out_of_question() {
            return None;
        }
        let native = |cufile: &'static Cufile| match cufile.detour() {
            Some(detour) if native_only => Err(detour.to_owned()),
            _ => Ok(cufile),
        };
        Some(Cufile::start().and_then(native).map(|cufile| CudaReads { gpu: Arc::clone(gpu), cufile }))
    }
}

impl DirectReads for CudaReads {
    fn register(&self, file: BorrowedFd<'_>, path: &Path) -> Result<Arc<dyn DirectFile>, String> {
        let _bound = self.gpu.bind().map_err(|error| error.to_string())?;
        let known = self.cufile.register(file).map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(Arc::new(CudaFile { gpu: Arc::clone(&self.gpu), file: Some(known), path: path.to_owned() }))
    }

    fn detour(&self) -> Option<String> {
        self.cufile.detour().map(str::to_owned)
    }
}

impl DirectFile for CudaFile {
    fn read(&self, offset: u64, len: u64, region: &mut Region) -> Result<()> {
        let _bound = self.gpu.bind()?;
        let file = self.file.as_ref().ok_or(Error::Poisoned { what: "a file that is being dropped" })?;
        let error =
            |refusal: ReadRefusal| refusal.error(self.gpu.name(), &self.path, offset..offset.saturating_add(len));
        let mut done = 0;
        while done < len {
            match file.read(&self.gpu, offset.saturating_add(done), len - done, region, done) {
                Ok(0) => {
                    let message = format!("the file ended after {done} of {len} bytes");
                    return Err(error(ReadRefusal::System(std::io::Error::new(
                        std::io::ErrorKind::UnexpectedEof,
                        message,
                    ))));
                }
                Ok(count) => done += count,
                Err(refusal) if refusal.is_interruption() => {}
                Err(refusal) => return Err(error(refusal)),
            }
        }
        Ok(())
    }
}

impl Drop for CudaFile {
    /// cuFile gives back what it holds in the GPU's context.
    fn drop(&mut self) {
        let _bound = self.gpu.bind_to_release();
        drop(self.file.take());
    }
}
