//! PyTorch's names for element types and storages, and what they are in safetensors.
//!
//! A table and nothing else. A type that safetensors lacks has a width, so that its storage can be measured, and no name there.

/// An element type of PyTorch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Kind {
    /// Its name in `torch`.
    pub(crate) name: &'static str,
    /// What it is here; `None` for what is named and not converted.
    pub(crate) dtype: Option<&'static str>,
    /// Bytes of one element.
    pub(crate) bytes: u64,
    /// What its numbers are, for a lazy sign and for byte order.
    pub(crate) numbers: Numbers,
}

/// What an element is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbers {
    Float,
    Complex,
    Integer,
}

const FLOAT: Numbers = Numbers::Float;
const COMPLEX: Numbers = Numbers::Complex;
const INTEGER: Numbers = Numbers::Integer;

/// Names in `torch`, names of storages, what it is, bytes, numbers.
type Row = (&'static [&'static str], &'static [&'static str], Option<&'static str>, u64, Numbers);

const ROWS: &[Row] = &[
    (&["float64", "double"], &["DoubleStorage"], Some("F64"), 8, FLOAT),
    (&["float32", "float"], &["FloatStorage"], Some("F32"), 4, FLOAT),
    (&["float16", "half"], &["HalfStorage"], Some("F16"), 2, FLOAT),
    (&["bfloat16"], &["BFloat16Storage"], Some("BF16"), 2, FLOAT),
    (&["int64", "long"], &["LongStorage"], Some("I64"), 8, INTEGER),
    (&["int32", "int"], &["IntStorage"], Some("I32"), 4, INTEGER),
    (&["int16", "short"], &["ShortStorage"], Some("I16"), 2, INTEGER),
    (&["int8"], &["CharStorage"], Some("I8"), 1, INTEGER),
    (&["uint8"], &["ByteStorage"], Some("U8"), 1, INTEGER),
    (&["bool"], &["BoolStorage"], Some("BOOL"), 1, INTEGER),
    (&["uint16"], &[], Some("U16"), 2, INTEGER),
    (&["uint32"], &[], Some("U32"), 4, INTEGER),
    (&["uint64"], &[], Some("U64"), 8, INTEGER),
    (&["complex64", "cfloat"], &["ComplexFloatStorage"], Some("C64"), 8, COMPLEX),
    (&["complex128", "cdouble"], &["ComplexDoubleStorage"], None, 16, COMPLEX),
    (&["complex32", "chalf"], &[], None, 4, COMPLEX),
    (&["float8_e4m3fn"], &[], Some("F8_E4M3"), 1, FLOAT),
    (&["float8_e5m2"], &[], Some("F8_E5M2"), 1, FLOAT),
    (&["float8_e4m3fnuz"], &[], Some("F8_E4M3FNUZ"), 1, FLOAT),
    (&["float8_e5m2fnuz"], &[], Some("F8_E5M2FNUZ"), 1, FLOAT),
    (&["float8_e8m0fnu"], &[], Some("F8_E8M0"), 1, FLOAT),
    (&["float4_e2m1fn_x2"], &[], Some("F4"), 1, FLOAT),
    (&["qint8"], &["QInt8Storage"], None, 1, INTEGER),
    (&["quint8"], &["QUInt8Storage"], None, 1, INTEGER),
    (&["qint32"], &["QInt32Storage"], None, 4, INTEGER),
    (&["quint4x2"], &["QUInt4x2Storage"], None, 1, INTEGER),
    (&["quint2x4"], &["QUInt2x4Storage"], None, 1, INTEGER),
    (&["bits8"], &[], None, 1, INTEGER),
    (&["bits16"], &[], None, 2, INTEGER),
    (&["bits1x8"], &[], None, 1, INTEGER),
    (&["bits2x4"], &[], None, 1, INTEGER),
    (&["bits4x2"], &[], None, 1, INTEGER),
];

fn kind(row: &Row) -> Kind {
    let (names, _, dtype, bytes, numbers) = row;
    Kind { name: names.first().copied().unwrap_or_default(), dtype: *dtype, bytes: *bytes, numbers: *numbers }
}

/// The element type that `torch` calls so.
pub(crate) fn of_dtype(module: &str, name: &str) -> Option<Kind> {
    let row = ROWS.iter().find(|(names, ..)| names.contains(&name));
    row.filter(|_| module == "torch").map(kind)
}

/// What a storage of that class holds; untyped ones hold bytes.
pub(crate) fn of_storage(module: &str, name: &str) -> Option<Kind> {
    let untyped = matches!(name, "UntypedStorage" | "_UntypedStorage") && matches!(module, "torch.storage" | "torch");
    if untyped {
        return Some(Kind { name: "untyped", dtype: None, bytes: 1, numbers: INTEGER });
    }
    let row = ROWS.iter().find(|(_, storages, ..)| storages.contains(&name));
    row.filter(|_| matches!(module, "torch" | "torch.cuda")).map(kind)
}

impl Kind {
    /// Whether it is the class of storages that hold plain bytes.
    pub(crate) fn is_untyped(&self) -> bool {
        self.name == "untyped"
    }

    /// Bytes of one number: the unit of byte order and of signs.
    pub(crate) fn number_bytes(&self) -> u64 {
        if self.numbers == Numbers::Complex { self.bytes / 2 } else { self.bytes }
    }
}
