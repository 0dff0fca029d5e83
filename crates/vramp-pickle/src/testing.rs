//! Makes PyTorch's files byte by byte: pickles, zip archives and stacks of pickles, well-formed or not.
//!
//! It checks nothing on purpose, and shares no code with the readers that its files are for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // makers for tests

use std::io::Write;

/// A pickle that is being written, opcode by opcode, protocol 2.
#[derive(Debug, Clone, Default)]
pub struct Pickle(Vec<u8>);

/// A tensor as a pickle describes it.
#[derive(Debug, Clone)]
pub struct TensorOver<'a> {
    /// Key of its storage.
    pub key: &'a str,
    /// Class of its storage, in `torch`.
    pub storage: &'a str,
    /// Elements of its storage.
    pub count: i64,
    /// First element.
    pub offset: i64,
    /// Elements along each dimension.
    pub shape: &'a [i64],
    /// Elements from one to the next along each.
    pub stride: &'a [i64],
    /// Lazy bits that are set: `conj`, `neg`.
    pub bits: &'a [&'a str],
}

impl Pickle {
    /// Begins a pickle.
    pub fn new() -> Pickle {
        Pickle(b"\x80\x02".to_vec())
    }

    /// Appends bytes as they are.
    #[must_use]
    pub fn raw(mut self, bytes: &[u8]) -> Pickle {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Pushes text.
    #[must_use]
    pub fn text(self, text: &str) -> Pickle {
        let len = u32::try_from(text.len()).unwrap();
        self.raw(b"X").raw(&len.to_le_bytes()).raw(text.as_bytes())
    }

    /// Pushes an integer.
    #[must_use]
    pub fn int(self, number: i64) -> Pickle {
        self.raw(b"\x8a\x08").raw(&number.to_le_bytes())
    }

    /// Pushes a tuple of integers.
    #[must_use]
    pub fn ints(self, numbers: &[i64]) -> Pickle {
        numbers.iter().fold(self.raw(b"("), |pickle, number| pickle.int(*number)).raw(b"t")
    }

    /// Pushes a global.
    #[must_use]
    pub fn global(self, module: &str, name: &str) -> Pickle {
        self.raw(format!("c{module}\n{name}\n").as_bytes())
    }

    /// Pushes an empty `OrderedDict`.
    #[must_use]
    pub fn ordered_dict(self) -> Pickle {
        self.global("collections", "OrderedDict").raw(b")R")
    }

    /// Pushes a storage.
    #[must_use]
    pub fn storage(self, class: &str, key: &str, count: i64) -> Pickle {
        self.raw(b"(").text("storage").global("torch", class).text(key).text("cpu").int(count).raw(b"tQ")
    }

    /// Pushes a tensor.
    #[must_use]
    pub fn tensor(self, tensor: &TensorOver) -> Pickle {
        let pickle = self.global("torch._utils", "_rebuild_tensor_v2").raw(b"(");
        let pickle = pickle.storage(tensor.storage, tensor.key, tensor.count).int(tensor.offset);
        let pickle = pickle.ints(tensor.shape).ints(tensor.stride).raw(b"\x89").ordered_dict();
        let pickle = match tensor.bits {
            [] => pickle,
            bits => bits.iter().fold(pickle.raw(b"}"), |pickle, bit| pickle.text(bit).raw(b"\x88s")),
        };
        pickle.raw(b"tR")
    }

    /// Ends it.
    pub fn stop(self) -> Vec<u8> {
        self.raw(b".").0
    }

    /// The bytes so far.
    pub fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// A pickle of a dictionary from names to tensors.
pub fn state_dict(tensors: &[(&str, TensorOver)]) -> Vec<u8> {
    let begin = Pickle::new().raw(b"}(");
    tensors.iter().fold(begin, |pickle, (name, tensor)| pickle.text(name).tensor(tensor)).raw(b"u").stop()
}

/// A member of an archive, and how it lies about itself.
#[derive(Debug, Clone)]
pub struct Member {
    /// Name in the directory.
    pub name: Vec<u8>,
    /// Name in the local header.
    pub local_name: Vec<u8>,
    /// Bytes in the archive.
    pub packed: Vec<u8>,
    /// Bytes once unpacked, as the directory says.
    pub len: u32,
    /// CRC-32, as both headers say.
    pub crc: u32,
    /// 0: stored, 8: deflated.
    pub method: u16,
    /// Flags of both headers.
    pub flags: u16,
    /// External attributes.
    pub attributes: u32,
}

impl Member {
    /// A stored member.
    pub fn stored(name: &str, data: &[u8]) -> Member {
        Member {
            name: name.into(),
            local_name: name.into(),
            packed: data.to_vec(),
            len: u32::try_from(data.len()).unwrap(),
            crc: crc32fast::hash(data),
            method: 0,
            flags: 0,
            attributes: 0,
        }
    }

    /// A deflated member.
    pub fn deflated(name: &str, data: &[u8]) -> Member {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        Member { packed: encoder.finish().unwrap(), method: 8, ..Member::stored(name, data) }
    }

    fn fields(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.flags.to_le_bytes());
        out.extend(self.method.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.crc.to_le_bytes());
        out.extend(u32::try_from(self.packed.len()).unwrap().to_le_bytes());
        out.extend(self.len.to_le_bytes());
        out
    }
}

/// An archive of those members.
pub fn zip(members: &[Member]) -> Vec<u8> {
    let (mut out, mut central) = (Vec::new(), Vec::new());
    for member in members {
        let at = u32::try_from(out.len()).unwrap();
        let name_len = |name: &[u8]| u16::try_from(name.len()).unwrap().to_le_bytes();
        out.extend(b"PK\x03\x04\x14\x00");
        out.extend(member.fields());
        out.extend(name_len(&member.local_name));
        out.extend([0; 2]);
        out.extend(&member.local_name);
        out.extend(&member.packed);
        central.extend(b"PK\x01\x02\x14\x03\x14\x00");
        central.extend(member.fields());
        central.extend(name_len(&member.name));
        central.extend([0; 8]);
        central.extend(member.attributes.to_le_bytes());
        central.extend(at.to_le_bytes());
        central.extend(&member.name);
    }
    let count = u16::try_from(members.len()).unwrap().to_le_bytes();
    let (at, len) = (u32::try_from(out.len()).unwrap(), u32::try_from(central.len()).unwrap());
    out.extend(central);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend([count, count].concat());
    out.extend([len.to_le_bytes(), at.to_le_bytes()].concat());
    out.extend([0; 2]);
    out
}

/// The members of an archive of `torch.save`: its pickle, and storages by key.
pub fn members(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<Member> {
    let mut members = vec![Member::stored("archive/data.pkl", pickle)];
    members.extend(storages.iter().map(|(key, data)| Member::stored(&format!("archive/data/{key}"), data)));
    members.push(Member::stored("archive/version", b"3\n"));
    members
}

/// An archive of `torch.save`.
pub fn archive(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    zip(&members(pickle, storages))
}

/// A file as `torch.save` wrote before 1.6: the object's pickle, and storages with their number of elements. Storages in the
/// object must have a sixth field; [`legacy_object`] gives it to them.
pub fn legacy(object: &[u8], storages: &[(&str, i64, &[u8])]) -> Vec<u8> {
    let mut out = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.".to_vec();
    out.extend(Pickle::new().raw(b"}").text("little_endian").raw(b"\x88s").stop());
    out.extend(object);
    let keys = storages.iter().fold(Pickle::new().raw(b"]("), |pickle, (key, ..)| pickle.text(key));
    out.extend(keys.raw(b"e").stop());
    for (_, count, data) in storages {
        out.extend(count.to_le_bytes());
        out.extend(*data);
    }
    out
}

/// The pickle of a legacy file: storages have a sixth field, here `None`.
pub fn legacy_object(pickle: &[u8]) -> Vec<u8> {
    // The end of each storage is `tQ`; no text of these makers holds it.
    let mut out = Vec::new();
    let mut rest = pickle;
    while let Some(at) = rest.windows(2).position(|pair| pair == b"tQ") {
        out.extend(&rest[..at]);
        out.extend(b"NtQ");
        rest = &rest[at + 2..];
    }
    out.extend(rest);
    out
}

/// Repeatable random numbers (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next_u64() % (end as u64).max(1)).unwrap_or(0)
    }

    /// `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next_u64().to_le_bytes());
        words.take(len).collect()
    }
}
