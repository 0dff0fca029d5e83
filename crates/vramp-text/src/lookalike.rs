//! What a file is that should have been a safetensors file: recognised by its first bytes, with what to do about it.
//!
//! Only asked once the file has been refused, so a guess here can never refuse a good file. It reads nothing itself.

use std::fmt;

/// Bytes at the beginning of a file that are enough to recognise all of these.
pub const BEGINNING: usize = 1024;

/// What a file is instead of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// What it looks like.
    pub what: String,
    /// What to do.
    pub advice: String,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a safetensors file but {}; {}", self.what, self.advice)
    }
}

const CONVERT: &str = "convert it to safetensors first";
const AGAIN: &str = "fetch the file again";
const ORIGINAL: &str = "use the safetensors files that it was made from";

/// Ends of names of files whose content says nothing, what these are, what to do.
const NAMES: &[(&str, &str, &str)] = &[
    (".onnx", "an ONNX model, by its name", ORIGINAL),
    (".onnx_data", "the tensors of an ONNX model, by its name", ORIGINAL),
    (".onnx.data", "the tensors of an ONNX model, by its name", ORIGINAL),
    (
        ".msgpack",
        "a Flax checkpoint, by its name",
        "convert it with Flax, or use the safetensors files of the same model",
    ),
    (".tflite", "a TensorFlow Lite model, by its name", ORIGINAL),
    (".pb", "a TensorFlow graph, by its name", ORIGINAL),
    (".h5", "a TensorFlow or Keras file, by its name", CONVERT),
    (".mlmodel", "a Core ML model, by its name", ORIGINAL),
    (".gguf", "a GGUF file, by its name", ORIGINAL),
    (".ggml", "a GGML file, by its name", ORIGINAL),
];

/// Offset, bytes found there, what that is, what to do.
const MAGIC: &[(usize, &[u8], &str, &str)] = &[
    (0, b"PK\x03\x04", "a zip archive (a PyTorch `.pt`/`.bin` file under a wrong name?)", CONVERT),
    (0, b"PK\x05\x06", "an empty zip archive", AGAIN),
    (0, b"GGUF", "a GGUF file", ORIGINAL),
    (0, b"lmgg", "a GGML file (llama.cpp before GGUF)", ORIGINAL),
    (0, b"fmgg", "a GGMF file (llama.cpp before GGUF)", ORIGINAL),
    (0, b"tjgg", "a GGJT file (llama.cpp before GGUF)", ORIGINAL),
    (4, b"TFL3", "a TensorFlow Lite model", ORIGINAL),
    (0, b"\x1f\x8b", "a gzip archive", "unpack it with `gunzip` first (a `.tar.gz` with `tar -xzf`)"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it with `unzstd` first"),
    (0, b"\xfd7zXZ\x00", "an xz archive", "unpack it with `unxz` first"),
    (0, b"BZh", "a bzip2 archive", "unpack it with `bunzip2` first"),
    (0, b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (TensorFlow or Keras `.h5`?)", CONVERT),
    (0, b"\x93NUMPY", "a NumPy `.npy` array", CONVERT),
    (0, b"\x04\x22\x4d\x18", "an lz4 archive", "unpack it with `unlz4` first"),
    (257, b"ustar", "a tar archive", "unpack it with `tar -xf` first"),
    (0, b"PAR1", "a Parquet file", "that is a data set, not weights"),
    (0, b"\x7fELF", "an ELF program or library", AGAIN),
    (0, b"%PDF", "a PDF document", AGAIN),
];

/// What a file is that begins with `beginning`, where that is something known.
pub fn recognise(beginning: &[u8]) -> Option<Foreign> {
    lfs_pointer(beginning)
        .or_else(|| magic(beginning))
        .or_else(|| onnx(beginning))
        .or_else(|| text(beginning))
        .or_else(|| pickle(beginning))
        .or_else(|| zeros(beginning))
}

/// Whether the file is no weights of any format, whatever its name: text, a page, a pointer, zeros.
pub fn is_stand_in(beginning: &[u8]) -> bool {
    lfs_pointer(beginning).or_else(|| zeros(beginning)).or_else(|| text(beginning)).is_some()
}

/// What a file is that is nothing known, by the end of its name.
pub fn by_name(name: &str) -> Option<Foreign> {
    let lower = name.to_lowercase();
    let (_, what, advice) = NAMES.iter().find(|(end, ..)| lower.ends_with(end))?;
    Some(foreign(*what, *advice))
}

/// An ONNX model has no mark: it is a message whose first field is a small version, followed by the names of who made it, the
/// operators that it needs, and the graph.
fn onnx(beginning: &[u8]) -> Option<Foreign> {
    const HIGHEST_VERSION: u64 = 100;
    let [0x08, rest @ ..] = beginning else { return None };
    let (version, mut rest) = varint(rest)?;
    if version == 0 || version > HIGHEST_VERSION {
        return None;
    }
    loop {
        let (key, after) = varint(rest)?;
        rest = match (key >> 3, key & 7) {
            // The graph, or operators: a message.
            (7 | 8, 2) => {
                let (len, body) = varint(after)?;
                let is_message =
                    len > 0 && body.first().is_none_or(|first| matches!(first & 7, 0 | 2) && first >> 3 > 0);
                return is_message.then(|| foreign("an ONNX model", ORIGINAL));
            }
            (2..=4 | 6, 2) => {
                let (len, body) = varint(after)?;
                let (text, body) = body.split_at_checked(usize::try_from(len).ok()?)?;
                std::str::from_utf8(text).ok()?;
                body
            }
            (5, 0) => varint(after)?.1,
            _ => return None,
        };
    }
}

/// A number of protocol buffers, and what follows it.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0u64;
    for (at, byte) in bytes.iter().enumerate().take(9) {
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some((number, bytes.get(at + 1..)?));
        }
    }
    None
}

/// Whether it is text of any kind, but no pointer to another file and nothing else that is known.
pub fn is_text(beginning: &[u8]) -> bool {
    lfs_pointer(beginning).or_else(|| magic(beginning)).is_none() && text(beginning).is_some()
}

fn zeros(beginning: &[u8]) -> Option<Foreign> {
    let zero = !beginning.is_empty() && beginning.iter().all(|&byte| byte == 0);
    zero.then(|| foreign("zero bytes only (space that was set aside but never written)", AGAIN))
}

fn foreign(what: impl Into<String>, advice: impl Into<String>) -> Foreign {
    Foreign { what: what.into(), advice: advice.into() }
}

fn lfs_pointer(beginning: &[u8]) -> Option<Foreign> {
    let rest = beginning.strip_prefix(b"version https://git-lfs.github.com/spec/")?;
    let size = rest.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"size "));
    let size = size.and_then(|digits| std::str::from_utf8(digits).ok()?.trim().parse::<u64>().ok());
    let of = size.map_or(String::new(), |bytes| format!(" of {bytes} bytes"));
    Some(foreign(
        format!("a Git LFS pointer: the real file{of} was not fetched"),
        "run `git lfs pull` in the repository, or download the file itself",
    ))
}

fn magic(beginning: &[u8]) -> Option<Foreign> {
    let found = MAGIC.iter().find(|(at, magic, ..)| beginning.get(*at..).is_some_and(|rest| rest.starts_with(magic)));
    found.map(|&(_, _, what, advice)| foreign(what, advice))
}

/// A pickle of protocol 2 to 5: the PROTO opcode, then an opcode that such a file can go on with.
fn pickle(beginning: &[u8]) -> Option<Foreign> {
    let is_pickle = matches!(beginning, [0x80, 2..=5, ..]);
    is_pickle.then(|| foreign("a Python pickle (a PyTorch `.pt`/`.bin` file under a wrong name?)", CONVERT))
}

/// Text of some kind: nothing but printable bytes.
fn text(beginning: &[u8]) -> Option<Foreign> {
    let is_text = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r' | 0x20..=0x7e | 0x80..);
    let shown = beginning.strip_prefix(b"\xef\xbb\xbf").unwrap_or(beginning).trim_ascii_start();
    if shown.is_empty() || !shown.iter().all(is_text) || !mostly_utf8(shown) {
        return None;
    }
    let lower = shown.iter().take(64).map(u8::to_ascii_lowercase).collect::<Vec<_>>();
    Some(match &lower[..] {
        [b'<', b'!', ..] => html(),
        begins if begins.starts_with(b"<html") || begins.starts_with(b"<head") => html(),
        [b'<', ..] => foreign("an XML document (an error answer of a server?)", AGAIN),
        [b'{' | b'[', ..] => foreign(
            "JSON text without the 8 bytes of length before it (an index, a config or an error answer of a server?)",
            "name the weight file itself",
        ),
        [b'.', b'.', b'/', ..] => foreign(
            format!("the text of a link to {:?} (a link copied or checked out as a plain file?)", first_words(shown)),
            "fetch the file that the link means",
        ),
        _ => foreign(format!("text that begins with {:?}", first_words(shown)), AGAIN),
    })
}

fn html() -> Foreign {
    foreign("an HTML page (a log-in or error page saved as weights?)", "download it again from its direct link")
}

/// Whether it is UTF-8, but for a character cut off at the end.
fn mostly_utf8(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).map_or_else(|e| e.error_len().is_none(), |_| true)
}

fn first_words(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).lines().next().unwrap_or_default().chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(beginning: &[u8]) -> String {
        recognise(beginning).map_or(String::new(), |fault| fault.to_string())
    }

    #[test]
    fn a_pointer_quotes_the_size_that_the_real_file_has() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4265380512\n";
        let said = said(pointer);
        assert!(said.contains("Git LFS") && said.contains("4265380512") && said.contains("git lfs pull"), "{said}");
    }

    #[test]
    fn each_kind_is_named() {
        let tar = [&[b'a'; 257][..], b"ustar\0"].concat();
        let table: &[(&[u8], &str)] = &[
            (b"PK\x03\x04rest", "zip"),
            (b"GGUF\x03\0\0\0", "GGUF"),
            (b"tjgg\x01\0\0\0", "GGJT"),
            (b"\x1c\0\0\0TFL3\x14\0", "TensorFlow Lite"),
            (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\xb2\x9c\x17\x0a\x05", "an ONNX model"),
            (b"\x08\x0aB\x04\x0a\0\x10\x11:\x10\x0a\x0e", "an ONNX model"),
            (b"\x80\x02}q\0.", "pickle"),
            (b"\x1f\x8b\x08\0", "gzip"),
            (b"\x89HDF\r\n\x1a\n", "HDF5"),
            (b"\x93NUMPY\x01\0", "NumPy"),
            (&tar, "tar"),
            (b"<!DOCTYPE html><html>", "HTML"),
            (b"\n<HTML><body>", "HTML"),
            (b"<?xml version=\"1.0\"?><Error>", "XML"),
            (b"{\"error\":\"not found\"}", "JSON"),
            (b"Not Found", "Not Found"),
            (b"../../blobs/0123", "a link to \"../../blobs/0123\""),
            (&[0; 64], "zero bytes"),
        ];
        for (bytes, word) in table {
            assert!(said(bytes).contains(word), "{word}: {}", said(bytes));
        }
    }

    #[test]
    fn a_message_that_is_no_model_is_not_taken_for_one() {
        for bytes in [
            &b"\x08\x00:\x05\x0a"[..],
            b"\x08\x08",
            b"\x08\x08\x12\xff\xffabc",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x08\x01\xfa\x01\0",
        ] {
            assert_eq!(recognise(bytes), None, "{bytes:?}");
        }
        assert!(by_name("Model.ONNX_data").is_some_and(|fault| fault.to_string().contains("ONNX")));
        assert_eq!(by_name("model.safetensors"), None);
    }

    #[test]
    fn nothing_is_said_about_bytes_that_are_nothing_known() {
        assert_eq!(recognise(&[1, 2, 3, 4, 5, 6, 7, 8, 9]), None);
        assert_eq!(recognise(&[]), None);
    }
}
