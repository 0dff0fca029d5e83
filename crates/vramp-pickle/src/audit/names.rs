//! What the end of a file's name says: that it is unpickled, in another format, or not all there. It opens nothing.

use std::path::Path;

/// Ends of names of files that are unpickled, or taken for weights without asking.
#[rustfmt::skip]
pub const WEIGHTS: &[&str] =
    &["bin", "ckpt", "distcp", "joblib", "mar", "pickle", "pkl", "pt", "pt2", "pth", "ptl", "safetensors", "t7", "th"];

/// Ends of names of weights in formats that are not looked into.
pub const FOREIGN: &[&str] = &["ggml", "gguf", "h5", "keras", "msgpack", "npy", "npz", "onnx", "tflite"];

/// Ends of names of files that are not all there.
const PARTIAL: &[&str] = &["aria2", "crdownload", "download", "incomplete", "part", "partial", "tmp"];

/// The end of a file's name in lower case, without those of downloads that are not over.
pub fn end_of_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let mut ends = name.split('.').skip(1).collect::<Vec<_>>();
    while ends.last().is_some_and(|end| PARTIAL.contains(end)) {
        ends.pop();
    }
    ends.pop().map(str::to_owned)
}
