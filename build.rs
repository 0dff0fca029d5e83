//! Refuses to build with PTX that does not come from the kernels' sources beside it. It compiles nothing: the PTX is checked
//! in, so that a build needs no CUDA, and `scripts/kernels` makes it.
#![allow(clippy::print_stdout)] // how a build script speaks to cargo

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    ptx::demand();
}

/// Without the feature `cuda` no PTX is built in, and nothing that hashes is compiled for this script.
#[cfg(feature = "cuda")]
mod ptx {
    use std::fs;
    use std::path::{Path, PathBuf};

    use sha2::{Digest, Sha256};

    pub(super) fn demand() {
        println!("cargo::rerun-if-changed=kernels");
        if let Err(wrong) = check(Path::new("kernels")) {
            println!("cargo::error={wrong}");
        }
    }

    /// The first line of every PTX file must hold the SHA-256 of the header and source it was made from.
    fn check(folder: &Path) -> Result<(), String> {
        let header = read(&folder.join("common.cuh"))?;
        let sources = files(folder, "cu")?;
        for path in files(&folder.join("ptx"), "ptx")? {
            let source = sources.iter().find(|source| comes_from(&path, source));
            let source =
                source.ok_or_else(|| format!("no source in kernels/ gives {}: run scripts/kernels", path.display()))?;
            let hash = Sha256::new().chain_update(&header).chain_update(read(source)?).finalize();
            let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            if !read(&path)?.starts_with(format!("// sha256 {hash}\n").as_bytes()) {
                let (path, source) = (path.display(), source.display());
                return Err(format!(
                    "{path} was not made from {source} as it is now: run scripts/kernels and commit kernels/ptx"
                ));
            }
        }
        Ok(())
    }

    /// `convert_f16.ptx` and `convert.ptx` come from `convert.cu`.
    fn comes_from(ptx: &Path, source: &Path) -> bool {
        let (Some(ptx), Some(source)) = (ptx.file_stem(), source.file_stem()) else { return false };
        let rest = ptx.to_str().and_then(|ptx| ptx.strip_prefix(source.to_str()?));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    }

    fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
        let entries = fs::read_dir(folder).map_err(|error| format!("cannot list {}: {error}", folder.display()))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        Ok(paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect())
    }

    fn read(path: &Path) -> Result<Vec<u8>, String> {
        fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
    }
}
