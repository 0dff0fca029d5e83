//! Files of `torch.save` before 1.6: five pickles back to back, then each storage after its number of elements.
//!
//! It finds where the storages lie and reads no byte of them. The file must end where the last one does.

use std::collections::HashMap;
use std::io;

use crate::bytes::{Bytes, read_vec};
use crate::declared::Declared;
use crate::finding::Finding;
use crate::pickle::{MAX_PICKLE_BYTES, Value};
use crate::pickled::Pickled;
use crate::recipe::Storage;

/// 0x1950a86a20f9469cfc6c, little-endian, as a pickle of protocol 2 writes it after its PROTO.
pub(crate) const MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
/// The same as the protocols 0 and 1 write it.
const TEXT_MAGIC: &[u8] = b"L119547037146038801333356L\n.";
/// The number of the format that follows the magic one.
const VERSION: i64 = 1001;
/// The names of the five pickles, for messages.
const NAMES: [&str; 5] = ["magic number", "protocol", "sys_info", "object", "storage keys"];
/// Bytes read for a pickle at first: what follows it is large, and not wanted.
const FIRST_READ: u64 = 4 << 10;

/// The pickles of a legacy file and what is wrong with its frame.
pub(crate) struct Stack {
    pub(crate) pickles: Vec<Pickled>,
    /// Where the storages begin.
    pub(crate) end: u64,
    pub(crate) findings: Vec<Finding>,
}

/// Whether the bytes begin as such a file does.
pub(crate) fn is_legacy(beginning: &[u8]) -> bool {
    beginning.starts_with(TEXT_MAGIC) || matches!(beginning, [0x80, 2..=5, ..]) && window(beginning, MAGIC)
}

fn window(beginning: &[u8], magic: &[u8]) -> bool {
    // Protocol 4 puts a frame between.
    [2, 11].iter().any(|at| beginning.get(*at..).is_some_and(|rest| rest.starts_with(magic)))
}

/// Runs the pickle at `at`, reading no more of the file than it takes.
pub(crate) fn run_at(bytes: &dyn Bytes, at: u64, name: Option<&str>) -> io::Result<Pickled> {
    let all = bytes.len().saturating_sub(at);
    let most = all.min(MAX_PICKLE_BYTES);
    let mut len = most.min(FIRST_READ);
    loop {
        let mut pickled = Pickled::run_part(read_vec(bytes, at, len)?, all, at, name);
        let wants = pickled.ran.wants;
        if wants <= len || wants > all {
            return Ok(pickled);
        }
        if len == most {
            let what = format!("a pickle of more than {MAX_PICKLE_BYTES} bytes: the rest was not looked at");
            pickled.limited(what, name);
            return Ok(pickled);
        }
        len = len.saturating_mul(8).max(wants).min(most);
    }
}

impl Stack {
    /// Runs the five pickles, as far as they are whole.
    pub(crate) fn read(bytes: &dyn Bytes) -> io::Result<Stack> {
        let mut stack = Stack { pickles: Vec::new(), end: 0, findings: Vec::new() };
        for name in NAMES {
            let pickled = run_at(bytes, stack.end, Some(name))?;
            stack.end = stack.end.saturating_add(pickled.ran.end as u64);
            let stopped = pickled.ran.stopped;
            stack.pickles.push(pickled);
            if !stopped {
                return Ok(stack);
            }
        }
        let version = stack.pickles.get(1).and_then(|pickled| Some(pickled.ran.arena.get(pickled.ran.result?)));
        if version != Some(Value::Int(VERSION)) {
            stack
                .findings
                .push(Finding::malformed("format-version", format!("a legacy file of another version than {VERSION}")));
        }
        Ok(stack)
    }

    /// The pickle that holds the object.
    pub(crate) fn object(&self) -> Option<&Pickled> {
        self.pickles.get(3)
    }

    /// The keys of the storages, in the order in which these follow.
    pub(crate) fn keys(&self) -> Option<Vec<String>> {
        let pickled = self.pickles.get(4)?;
        let arena = &pickled.ran.arena;
        let keys = arena.as_sequence(pickled.ran.result?)?;
        keys.iter().map(|key| arena.as_text(*key).map(str::to_owned)).collect()
    }
}

/// Where each storage lies, by its key, and what is wrong with the rest of the file.
pub(crate) fn locate<'d>(
    bytes: &dyn Bytes,
    end: u64,
    keys: Vec<String>,
    declared: impl Fn(&str) -> Option<&'d Declared>,
) -> io::Result<Result<HashMap<String, Storage>, Finding>> {
    let mut places = HashMap::new();
    let mut at = end;
    for key in keys {
        let Some(declared) = declared(&key) else {
            let what = format!("storage {key:?} belongs to no tensor: its size is unknown");
            return Ok(Err(Finding::malformed("record-missing", what)));
        };
        let place = match place(bytes, at, declared)? {
            Ok(place) => place,
            Err(finding) => return Ok(Err(finding)),
        };
        at = place.offset + place.len;
        places.insert(key, place);
    }
    if at < bytes.len() {
        let what = format!("{} bytes follow the last storage", bytes.len() - at);
        return Ok(Err(Finding::suspicious("trailing-data", what)));
    }
    Ok(Ok(places))
}

fn place(bytes: &dyn Bytes, at: u64, declared: &Declared) -> io::Result<Result<Storage, Finding>> {
    let truncated = || {
        let what = format!(
            "storage {:?} of {} bytes is cut off at the end of the file: truncated",
            declared.key,
            declared.bytes()
        );
        Finding::malformed("record-past-eof", what)
    };
    let Some(offset) = at.checked_add(8).filter(|offset| *offset <= bytes.len()) else { return Ok(Err(truncated())) };
    let mut count = [0; 8];
    bytes.read(at, &mut count)?;
    let count = u64::from_le_bytes(count);
    if count != declared.count {
        let what = format!("storage {:?} has {count} elements, the object says {}", declared.key, declared.count);
        return Ok(Err(Finding::malformed("storage-size", what)));
    }
    let len = declared.bytes();
    if offset.checked_add(len).is_none_or(|end| end > bytes.len()) {
        return Ok(Err(truncated()));
    }
    Ok(Ok(Storage { offset, packed: len, len, deflated: false, crc: 0 }))
}
