//! JSON as the formats need it: streamed, each duplicate key seen, whole numbers exact, nothing built on a hostile word.
//!
//! It knows JSON and its dangers, not what a header or an index means: those are [`Object`]s that are handed their members
//! one by one. Nesting is bounded by the JSON parser (127 levels), and containers deeper than a format needs are walked for
//! duplicates and dropped.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::fault::{Fault, Listed, quoted};

/// What an entry of a header takes at least, about: for a first guess at their number. The text is in memory, so the guess
/// is bounded by it.
const BYTES_PER_KEY: usize = 128;

/// A list of more elements than this is cut when it is kept (shapes and offsets have a few).
const LONGEST_LIST: usize = 1024;

/// Takes the members of a JSON object one by one.
pub(crate) trait Object {
    /// Takes one member; must consume exactly one value of `map`.
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error>;

    /// Told instead that the value is no object but `found`.
    fn instead(&mut self, found: Scalar);
}

/// What is noted while walking: where we are, and the duplicate keys seen on the way.
#[derive(Default)]
pub(crate) struct Notes {
    /// The keys that lead here: the first `depth`. The texts behind are kept to be written over.
    within: Vec<String>,
    depth: usize,
    /// A guess at the number of keys of the outermost object, so that their set need not grow again and again.
    keys_expected: usize,
    pub(crate) duplicates: Listed,
}

/// A value that is no container, or the mention that a container was there.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Scalar {
    Null,
    Bool(bool),
    Whole(u64),
    Negative(i64),
    Float(f64),
    Text(String),
    List,
    Object,
}

/// A value of at most one level.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Field {
    Scalar(Scalar),
    /// A list of whole numbers only: the common case, kept as it is.
    Whole(Vec<u64>),
    /// Any other list: the elements (the first [`LONGEST_LIST`]) and how many there were.
    List(Vec<Scalar>, usize),
}

/// Walks `text`, which must be one object and nothing else. `what` names the text in faults.
pub(crate) fn read(text: &[u8], what: &'static str, object: &mut impl Object) -> Result<(), Fault> {
    let text = std::str::from_utf8(text).map_err(|e| Fault::NotUtf8 { what, at: e.valid_up_to() })?;
    let mut notes = Notes { keys_expected: text.len() / BYTES_PER_KEY, ..Notes::default() };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    ObjectSeed { object, notes: &mut notes }
        .deserialize(&mut deserializer)
        .and_then(|()| deserializer.end())
        .map_err(|e| Fault::Json { what, why: reason(&e) })?;
    notes.duplicates.into_fault(Fault::Duplicate)
}

/// A text without the byte order mark that some editors put in front of it.
///
/// # Errors
/// When the mark is that of another encoding than UTF-8.
pub(crate) fn without_mark(text: &[u8]) -> Result<&[u8], Fault> {
    let other = match text {
        [0xef, 0xbb, 0xbf, rest @ ..] => return Ok(rest),
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => "UTF-32",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "UTF-16",
        _ => return Ok(text),
    };
    Err(Fault::Other(format!("it begins with a byte order mark (BOM) of {other}: JSON is UTF-8; save it as that")))
}

fn reason(error: &serde_json::Error) -> String {
    let said = error.to_string();
    match said.strip_prefix("recursion limit exceeded") {
        Some(place) => format!("nested deeper than 127 levels{place}"),
        None if said.starts_with("trailing characters") => {
            said.replacen("trailing characters", "something follows the object", 1)
        }
        None if error.is_eof() => format!("{said}: it is cut short"),
        None => said,
    }
}

/// Reads the value of the current member as at most one level.
pub(crate) fn field<'de, A: MapAccess<'de>>(map: &mut A, notes: &mut Notes) -> Result<Field, A::Error> {
    map.next_value_seed(FieldSeed { notes })
}

/// Reads the value of the current member as an object.
pub(crate) fn object<'de, A: MapAccess<'de>>(
    key: &str,
    map: &mut A,
    notes: &mut Notes,
    object: &mut impl Object,
) -> Result<(), A::Error> {
    notes.enter(key);
    map.next_value_seed(ObjectSeed { object, notes: &mut *notes })?;
    notes.depth -= 1;
    Ok(())
}

impl Notes {
    fn enter(&mut self, key: &str) {
        match self.within.get_mut(self.depth) {
            Some(text) => {
                text.clear();
                text.push_str(key);
            }
            None => self.within.push(key.to_owned()),
        }
        self.depth += 1;
    }

    fn duplicate(&mut self, key: &str) {
        let path =
            self.within.iter().take(self.depth).map(|part| quoted(part) + " > ").collect::<String>() + &quoted(key);
        self.duplicates.push(|| path);
    }
}

impl Field {
    /// What it is, with its value where that is short.
    pub(crate) fn describe(&self) -> String {
        match self {
            Field::Scalar(scalar) => scalar.describe(),
            Field::Whole(numbers) => format!("a list of {}", numbers.len()),
            Field::List(_, count) => format!("a list of {count}"),
        }
    }
}

impl Scalar {
    /// What it is, with its value where that is short.
    pub(crate) fn describe(&self) -> String {
        match self {
            Scalar::Null => "null".into(),
            Scalar::Bool(value) => value.to_string(),
            Scalar::Whole(value) => value.to_string(),
            Scalar::Negative(value) => value.to_string(),
            Scalar::Float(value) if *value >= u64::MAX as f64 => format!("{value} (above 64 bits)"),
            Scalar::Float(value) if value.fract() == 0.0 => format!("the float {value:?}"),
            Scalar::Float(value) => value.to_string(),
            Scalar::Text(value) => format!("the string {}", quoted(value)),
            Scalar::List => "a list".into(),
            Scalar::Object => "an object".into(),
        }
    }
}

struct ObjectSeed<'a, O> {
    object: &'a mut O,
    notes: &'a mut Notes,
}

impl<'de, O: Object> DeserializeSeed<'de> for ObjectSeed<'_, O> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// The methods of a visitor that only report that a scalar was found.
macro_rules! scalars {
    ($then:expr) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("any JSON value")
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($then(self, Scalar::Null))
        }
        fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
            Ok($then(self, Scalar::Bool(value)))
        }
        fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
            Ok($then(self, Scalar::Whole(value)))
        }
        fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
            Ok($then(self, Scalar::Negative(value)))
        }
        fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
            Ok($then(self, Scalar::Float(value)))
        }
        fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
            Ok($then(self, Scalar::Text(value.to_owned())))
        }
    };
}

impl<'de, O: Object> Visitor<'de> for ObjectSeed<'_, O> {
    type Value = ();

    scalars!(|this: Self, scalar| this.object.instead(scalar));

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(ScalarSeed { notes: &mut *self.notes })?.is_some() {}
        self.object.instead(Scalar::List);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = Seen::default();
        while let Some(key) = map.next_key_seed(KeySeed)? {
            if !seen.insert(key.clone(), if self.notes.depth == 0 { self.notes.keys_expected } else { 0 }) {
                self.notes.duplicate(&key);
            }
            self.object.member(&key, &mut map, self.notes)?;
        }
        Ok(())
    }
}

/// The keys of one object: a short list while there are few, a set from there on.
#[derive(Default)]
struct Seen<'de> {
    few: Vec<Cow<'de, str>>,
    many: HashSet<Cow<'de, str>>,
}

impl<'de> Seen<'de> {
    const FEW: usize = 8;

    /// Whether the key is new. `expected` keys will come if there are many.
    fn insert(&mut self, key: Cow<'de, str>, expected: usize) -> bool {
        if self.many.is_empty() && self.few.len() < Self::FEW {
            let new = !self.few.contains(&key);
            self.few.push(key);
            return new;
        }
        if self.many.is_empty() {
            self.many.reserve(expected);
        }
        self.many.extend(self.few.drain(..));
        self.many.insert(key)
    }
}

struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(key))
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(key.to_owned()))
    }
}

struct FieldSeed<'a> {
    notes: &'a mut Notes,
}

impl<'de> DeserializeSeed<'de> for FieldSeed<'_> {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FieldSeed<'_> {
    type Value = Field;

    scalars!(|_, scalar| Field::Scalar(scalar));

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Field, A::Error> {
        let mut whole = Vec::new();
        let odd = loop {
            match list.next_element_seed(ScalarSeed { notes: &mut *self.notes })? {
                None => return Ok(Field::Whole(whole)),
                Some(Scalar::Whole(number)) if whole.len() < LONGEST_LIST => whole.push(number),
                Some(odd) => break odd,
            }
        };
        let mut count = whole.len() + 1;
        let mut kept: Vec<Scalar> = whole.into_iter().map(Scalar::Whole).chain([odd]).take(LONGEST_LIST).collect();
        while let Some(element) = list.next_element_seed(ScalarSeed { notes: &mut *self.notes })? {
            count += 1;
            if count <= LONGEST_LIST {
                kept.push(element);
            }
        }
        Ok(Field::List(kept, count))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Field, A::Error> {
        ScalarSeed { notes: self.notes }.visit_map(map).map(Field::Scalar)
    }
}

struct ScalarSeed<'a> {
    notes: &'a mut Notes,
}

impl<'de> DeserializeSeed<'de> for ScalarSeed<'_> {
    type Value = Scalar;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ScalarSeed<'_> {
    type Value = Scalar;

    scalars!(|_, scalar| scalar);

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Scalar, A::Error> {
        while list.next_element_seed(ScalarSeed { notes: &mut *self.notes })?.is_some() {}
        Ok(Scalar::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Scalar, A::Error> {
        ObjectSeed { object: &mut Dropped, notes: self.notes }.visit_map(map)?;
        Ok(Scalar::Object)
    }
}

/// An object of no interest: walked for duplicates, then forgotten.
struct Dropped;

impl Object for Dropped {
    fn member<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        map.next_value_seed(ScalarSeed { notes }).map(drop)
    }

    fn instead(&mut self, _: Scalar) {}
}
