//! The members of a tar archive, as PyTorch wrote before 0.1.10, and as Python's `tarfile` would find them.
//!
//! Long names and sizes of GNU and of pax are read; nothing is unpacked. A block that is no header ends the list, and what follows is
//! for the caller to look at.

use std::collections::BTreeSet;
use std::io;

use crate::archive::packed_weights;
use crate::bytes::{Bytes, read_vec};
use vramp_text::counted;

pub(crate) const BLOCK: u64 = 512;
/// The longest record of names and sizes that is read.
const MAX_RECORD: u64 = 1 << 20;

/// One member with bytes of its own.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Offset in bytes of its first byte.
    pub(crate) start: u64,
    /// Its bytes, as far as they are there.
    pub(crate) len: u64,
}

/// Whether the block begins a member: its bytes have the sum that it states.
pub(crate) fn is_header(block: &[u8]) -> bool {
    let Some(block) = block.first_chunk::<512>() else { return false };
    let (before, rest) = block.split_at(148);
    let (stated, after) = rest.split_at(8);
    let sum: u64 = before.iter().chain(after).map(|byte| u64::from(*byte)).sum();
    let signed: i64 = before.iter().chain(after).map(|byte| i64::from(byte.cast_signed())).sum();
    let spaces = 8 * u64::from(b' ');
    let is_sum = |stated: u64| stated == sum + spaces || i64::try_from(stated) == Ok(signed + 8 * i64::from(b' '));
    sum > 0 && number(stated).is_some_and(is_sum)
}

/// A number as Python's `int(text, 8)` takes it, or in the base-256 form of GNU. None is negative.
fn number(field: &[u8]) -> Option<u64> {
    match field {
        [0x80, rest @ ..] => rest.iter().try_fold(0u64, |sum, byte| sum.checked_mul(256)?.checked_add((*byte).into())),
        digits => {
            // Python's spaces are more than those of ASCII.
            let is_space = |c: char| c.is_ascii_whitespace() || matches!(c, '\x0b' | '\x1c'..='\x1f');
            let text = std::str::from_utf8(until_nul(digits)).ok()?.trim_matches(is_space);
            if text.is_empty() {
                return Some(0);
            }
            let text = text.strip_prefix(['+', '-']).unwrap_or(text);
            let digits = text.strip_prefix("0o").or_else(|| text.strip_prefix("0O"));
            let digits = digits.map_or(text, |digits| digits.strip_prefix('_').unwrap_or(digits));
            let plain: String = digits.split('_').collect();
            let whole =
                digits.split('_').all(|group| group.bytes().all(|byte| byte.is_ascii_digit()) && !group.is_empty());
            let number = u64::from_str_radix(&plain, 8).ok().filter(|_| whole)?;
            (number == 0 || !field.trim_ascii_start().starts_with(b"-")).then_some(number)
        }
    }
}

/// Whether only Python reads the number so: other programs know digits, spaces around them, and a NUL at their end.
fn is_odd(field: &[u8]) -> bool {
    let digits = until_nul(field).trim_ascii();
    field.first() != Some(&0x80) && !digits.iter().all(|byte| matches!(byte, b'0'..=b'7'))
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// What a tar archive holds.
#[derive(Default)]
pub(crate) struct Listing {
    pub(crate) members: Vec<Member>,
    /// Where the first block is that begins no member.
    pub(crate) end: u64,
    /// What readers do not agree about, each once.
    pub(crate) odd: BTreeSet<&'static str>,
}

const NUMBER: &str = "a number that is not written in plain octal digits";
const SPARSE: &str = "a sparse member, whose size is not that of its bytes";
const SIZE: &str = "a record gives a member another size than its header: where the next one begins is not certain";
const RECORD: &str = "a record of names and sizes that cannot be read to its end";

/// What records say of the next member, and of all that follow.
#[derive(Default)]
struct Said {
    name: Option<Vec<u8>>,
    len: Option<u64>,
    /// For all that follow, as their size, but not as the way to the next header.
    every: Option<u64>,
    has_pax: bool,
}

/// What is in an archive, in words, and what to do with it. Nothing is unpacked.
pub(crate) fn contents(bytes: &dyn Bytes) -> io::Result<String> {
    const PYTORCH: [&str; 3] = ["pickle", "storages", "tensors"];
    let listing = members(bytes)?;
    let names: Vec<&str> = listing.members.iter().map(|member| member.name.trim_start_matches("./")).collect();
    if PYTORCH.iter().all(|name| names.contains(name)) {
        return Ok(
            "a tar archive, as PyTorch wrote before 0.1.10: not read; save it again with a newer PyTorch".to_owned()
        );
    }
    let has = |end: &str| names.iter().any(|name| *name == end || name.ends_with(&format!("/{end}")));
    // A large NeMo model is a distributed checkpoint in a folder.
    let open = match has("model_weights/.metadata") || has("weights/.metadata") {
        true => "then open the folder with `.metadata` in it".to_owned(),
        false => match names.iter().find(|name| name.ends_with("model_weights.ckpt")) {
            Some(name) => format!("then open {name}"),
            None => match packed_weights(names.iter().copied()) {
                Some(packed) => format!("then open the weights; it has {packed}"),
                None => format!("it has {}, and none is a weight file by its name", counted(names.len(), "member")),
            },
        },
    };
    let what =
        if has("model_config.yaml") { "a NeMo model (`.nemo`), which is a tar archive" } else { "a tar archive" };
    Ok(format!("{what}: it is not read; unpack it first (`tar -xf`); {open}"))
}

/// The members, up to the first block that begins none.
pub(crate) fn members(bytes: &dyn Bytes) -> io::Result<Listing> {
    let (mut out, mut at) = (Listing::default(), 0u64);
    let mut said = Said::default();
    while at.saturating_add(BLOCK) <= bytes.len() {
        let header = read_vec(bytes, at, BLOCK)?;
        let field = |from: usize, to: usize| header.get(from..to).unwrap_or_default();
        let Some(mut step) = number(field(124, 136)).filter(|_| is_header(&header)) else { break };
        if is_odd(field(124, 136)) || is_odd(field(148, 156)) {
            out.odd.insert(NUMBER);
        }
        let start = at + BLOCK;
        let left = bytes.len() - start;
        let name = until_nul(field(0, 100));
        let kind = match header.get(156).copied().unwrap_or_default() {
            // A folder of the oldest form.
            0 if name.ends_with(b"/") => b'5',
            b'X' => b'x',
            kind => kind,
        };
        match kind {
            b'x' | b'g' | b'L' | b'K' => {
                let record = read_vec(bytes, start, step.min(left).min(MAX_RECORD))?;
                if step > MAX_RECORD || !said.read(kind, &record, &mut out.odd) {
                    out.odd.insert(RECORD);
                }
            }
            // Links, devices and folders have no bytes, whatever length they state.
            b'1'..=b'6' => (said, step) = (Said { every: said.every, ..Said::default() }, 0),
            _ => {
                if kind == b'S' {
                    out.odd.insert(SPARSE);
                }
                let len = said.len.or(said.every).unwrap_or(step);
                if len != step {
                    out.odd.insert(SIZE);
                }
                let name = said.name.take().unwrap_or_else(|| name.to_vec());
                let name = String::from_utf8_lossy(&name).into_owned();
                out.members.push(Member { name, start, len: len.min(left) });
                step = if said.has_pax { len } else { step };
                said = Said { every: said.every, ..Said::default() };
            }
        }
        let Some(next) = step.checked_next_multiple_of(BLOCK).and_then(|step| start.checked_add(step)) else { break };
        at = next;
    }
    out.end = at.min(bytes.len());
    Ok(out)
}

impl Said {
    /// Whether all of the record could be read.
    fn read(&mut self, kind: u8, record: &[u8], odd: &mut BTreeSet<&'static str>) -> bool {
        match kind {
            b'L' => self.name = Some(until_nul(record).to_vec()),
            b'x' | b'g' => {
                self.has_pax |= kind == b'x';
                return self.read_pax(kind, record, odd);
            }
            _ => {}
        }
        true
    }

    /// Lines of the form `30 path=…`, which begin with their own length.
    fn read_pax(&mut self, kind: u8, mut record: &[u8], odd: &mut BTreeSet<&'static str>) -> bool {
        while let Some(space) = record.iter().take(20).position(|byte| *byte == b' ') {
            let len =
                std::str::from_utf8(record.get(..space).unwrap_or_default()).ok().and_then(|len| len.parse().ok());
            let Some((line, rest)) = len.filter(|len| *len > space).and_then(|len| record.split_at_checked(len)) else {
                return false;
            };
            record = rest;
            let Some(line) = line.get(space + 1..).and_then(|line| line.strip_suffix(b"\n")) else { return false };
            if let Some(name) = line.strip_prefix(b"path=") {
                self.name = Some(name.to_vec());
            } else if let Some(len) = line.strip_prefix(b"size=") {
                let Some(len) = std::str::from_utf8(len).ok().and_then(|len| len.parse().ok()) else { return false };
                *(if kind == b'g' { &mut self.every } else { &mut self.len }) = Some(len);
            } else if line.starts_with(b"GNU.sparse.") {
                odd.insert(SPARSE);
            }
        }
        record.iter().all(|byte| *byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Memory;

    fn block(name: &[u8], kind: u8, size: &[u8]) -> Vec<u8> {
        let mut block = vec![0; 512];
        block[..name.len()].copy_from_slice(name);
        block[124..124 + size.len()].copy_from_slice(size);
        block[156] = kind;
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    fn padded(data: &[u8]) -> Vec<u8> {
        let mut data = data.to_vec();
        data.resize(data.len().next_multiple_of(512), 0);
        data
    }

    #[test]
    fn names_and_sizes_are_read_in_every_form() {
        let pax = b"13 path=long\n13 size=1025\n";
        let tar = [
            block(b"plain", b'0', b"00000000003\0"),
            padded(b"abc"),
            block(b"base256", 0, &[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1]),
            padded(&[1; 513]),
            block(b"././@LongLink", b'L', b"200\0"),
            padded(&[&[b'n'; 127][..], b"\0"].concat()),
            block(b"n", b'0', b"1"),
            padded(b"x"),
            block(b"pax", b'x', b"32"),
            padded(pax),
            block(b"short", b'0', b"0"),
            padded(&[2; 1025]),
            block(b"link", b'2', b"77777"),
            block(b"last", b'0', b"77777"),
            padded(b"cut"),
        ]
        .concat();
        let Listing { members, end, odd } = members(&Memory(&tar)).unwrap();
        assert_eq!(odd, BTreeSet::from([SIZE]));
        let found: Vec<(&str, u64)> = members.iter().map(|member| (member.name.as_str(), member.len)).collect();
        let long = "n".repeat(127);
        assert_eq!(found, [("plain", 3), ("base256", 513), (&long, 1), ("long", 1025), ("last", 512)]);
        assert_eq!(end, tar.len() as u64);
        let start = usize::try_from(members[3].start).unwrap();
        assert_eq!(&tar[start..start + 2], [2, 2]);
    }

    #[test]
    fn a_block_that_is_no_header_ends_the_list() {
        let tar = [block(b"a", b'0', b"1"), padded(b"x"), vec![0; 512], block(b"b", b'0', b"1"), padded(b"y")].concat();
        let found = members(&Memory(&tar)).unwrap();
        assert_eq!((found.members.len(), found.end), (1, 1024));
        assert!(!is_header(&[0; 512]) && !is_header(&[b'a'; 512]) && !is_header(b"short"));
    }

    /// What `tarfile.nti` of Python says.
    #[test]
    fn numbers_are_python_s() {
        for (field, value, odd) in [
            (&b"0000017\0"[..], Some(15), false),
            (b"   17 \0 ", Some(15), false),
            (b"\0junk", Some(0), false),
            (b"0o17\0", Some(15), true),
            (b"0O_1_7", Some(15), true),
            (b"+17\x1f", Some(15), true),
            (b"-0", Some(0), true),
            (b"-1", None, true),
            (b"1__7", None, true),
            (b"0o", None, true),
            (b"18", None, true),
            (b"\x80\0\x01\x02", Some(258), false),
            (b"\xff\xff", None, true),
        ] {
            assert_eq!((number(field), is_odd(field)), (value, odd), "{}", field.escape_ascii());
        }
    }

    #[test]
    fn a_global_size_is_that_of_members_and_not_the_way_to_the_next() {
        let record = b"13 size=8192\n";
        let two = [block(b"a", b'0', b"1"), padded(b"x"), block(b"b", b'0', b"0o1"), padded(b"y")].concat();
        let tar = [block(b"g", b'g', b"15"), padded(record), two, vec![0; 1024]].concat();
        let found = members(&Memory(&tar)).unwrap();
        let names: Vec<&str> = found.members.iter().map(|member| member.name.as_str()).collect();
        assert_eq!((names, found.end), (vec!["a", "b"], 3072));
        assert_eq!(found.odd, BTreeSet::from([NUMBER, SIZE]));
    }

    /// In the oldest form a folder is a member whose name ends so.
    #[test]
    fn folders_have_no_bytes() {
        let tar = [block(b"a/", 0, b"1000"), block(b"b", b'0', b"1"), padded(b"y")].concat();
        let found = members(&Memory(&tar)).unwrap();
        assert_eq!(found.members.len(), 1);
        assert_eq!(found.members[0].name, "b");
    }
}
