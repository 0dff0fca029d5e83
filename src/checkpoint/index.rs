//! `*.safetensors.index.json`: which file holds which tensor.
//!
//! Its values are file names from a stranger: only plain names beside the index are accepted, judged as text and before
//! anything is opened (where links lead is no matter: the Hugging Face cache is made of links). Sub-folders are refused
//! too: no writer makes them. This file opens nothing; `merge` compares the index with the headers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::de::MapAccess;

use vramp_text::lookalike::{self, Foreign};

use super::json::{self, Field, Notes, Object, Scalar};
use crate::fault::{Fault, Listed, quoted};

/// A checked index: each tensor and the file that it names.
#[derive(Debug, Clone, Default)]
pub struct Index {
    files: Vec<String>,
    tensors: BTreeMap<Arc<str>, usize>,
}

impl Index {
    /// Reads an index.
    ///
    /// # Errors
    /// The first kind of problem found, with all problems of that kind.
    pub fn parse(text: &[u8]) -> Result<Index, Fault> {
        let text = json::without_mark(text)?;
        let mut draft = Draft::default();
        json::read(text, "index", &mut draft).map_err(|fault| named(text, fault))?;
        if let Some(why) = draft.no_map() {
            return Err(Fault::NoWeightMap { why });
        }
        draft.map.problems.into_fault(Fault::Member)?;
        check_names(&draft.map.files)?;
        Ok(Index { files: draft.map.files, tensors: draft.map.tensors })
    }

    /// The files, each once, in the order in which the index first names them.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// The tensors, sorted, each with the number of its file in [`Index::files`].
    pub fn tensors(&self) -> &BTreeMap<Arc<str>, usize> {
        &self.tensors
    }

    /// The names of the tensors that lie in one file.
    pub(crate) fn tensors_of(&self, file: usize) -> impl Iterator<Item = &str> {
        self.tensors.iter().filter(move |(_, at)| **at == file).map(|(name, _)| name.as_ref())
    }
}

/// A file that is not JSON at all is named for what it is.
fn named(text: &[u8], fault: Fault) -> Fault {
    let beginning = text.get(..lookalike::BEGINNING).unwrap_or(text);
    let is_json = matches!(beginning.trim_ascii_start().first(), Some(b'{' | b'['));
    match fault {
        Fault::Json { .. } | Fault::NotUtf8 { .. } if !is_json => match lookalike::recognise(beginning) {
            Some(Foreign { what, advice }) => Fault::Other(format!("not an index but {what}; {advice}")),
            _ => fault,
        },
        fault => fault,
    }
}

fn check_names(files: &[String]) -> Result<(), Fault> {
    let mut escapes = Listed::new();
    for name in files.iter().filter(|name| !is_plain_name(name)) {
        escapes.push(|| quoted(name));
    }
    escapes.into_fault(Fault::Escapes)
}

/// Whether `name` is one component that stays in its folder, on every operating system.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let is_drive = matches!(name.as_bytes(), [letter, b':', ..] if letter.is_ascii_alphabetic());
    !name.is_empty() && name != "." && name != ".." && !is_drive && !name.contains(['/', '\\', '\0'])
}

#[derive(Default)]
struct Draft {
    seen: bool,
    map: Map,
    instead: Option<Scalar>,
}

impl Draft {
    fn no_map(&self) -> Option<String> {
        match (&self.instead, &self.map.instead) {
            (Some(found), _) => Some(format!("the file holds {}", found.describe())),
            (None, Some(found)) => Some(format!("it is {}", found.describe())),
            (None, None) => (!self.seen).then(|| "the member is missing".into()),
        }
    }
}

impl Object for Draft {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        if key != "weight_map" {
            return json::field(map, notes).map(drop);
        }
        self.seen = true;
        json::object(key, map, notes, &mut self.map)
    }

    fn instead(&mut self, found: Scalar) {
        self.instead = Some(found);
    }
}

#[derive(Default)]
struct Map {
    files: Vec<String>,
    numbers: HashMap<String, usize>,
    tensors: BTreeMap<Arc<str>, usize>,
    problems: Listed,
    instead: Option<Scalar>,
}

impl Map {
    fn number(&mut self, file: String) -> usize {
        let next = self.files.len();
        *self.numbers.entry(file).or_insert_with_key(|file| {
            self.files.push(file.clone());
            next
        })
    }
}

impl Object for Map {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        match json::field(map, notes)? {
            Field::Scalar(Scalar::Text(file)) => {
                let number = self.number(file);
                self.tensors.insert(key.into(), number);
            }
            other => self.problems.push_tensor(key, || {
                format!("the file of tensor {} must be a string, found {}", quoted(key), other.describe())
            }),
        }
        Ok(())
    }

    fn instead(&mut self, found: Scalar) {
        self.instead = Some(found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::hostile;

    fn said(text: &str) -> String {
        Index::parse(text.as_bytes()).map_or_else(|fault| fault.to_string(), |_| "accepted".into())
    }

    #[test]
    fn tensors_and_files_come_out() {
        let text = hostile::index(&[("b", "y.safetensors"), ("a", "x.safetensors"), ("c", "y.safetensors")]);
        let index = Index::parse(text.as_bytes()).unwrap();
        assert_eq!(index.files(), ["y.safetensors", "x.safetensors"]);
        assert_eq!(
            index.tensors().iter().map(|(n, f)| (n.as_ref(), *f)).collect::<Vec<_>>(),
            [("a", 1), ("b", 0), ("c", 0)]
        );
        assert_eq!(index.tensors_of(0).collect::<Vec<_>>(), ["b", "c"]);
    }

    #[test]
    fn names_that_leave_the_folder_are_quoted_and_refused_together() {
        for name in ["../x", "/etc/passwd", "sub/x", "..", ".", "", "C:x", "c:\\\\x", "..\\\\x", "a\\u0000b"] {
            let said = said(&hostile::index(&[("a", "fine.safetensors"), ("b", name)]));
            assert!(said.contains("may not be opened"), "{name}: {said}");
        }
        let both = said(&hostile::index(&[("a", "../one"), ("b", "/two")]));
        assert!(both.contains("\"../one\"") && both.contains("\"/two\""), "{both}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            (r#"{"weight_map":{"a":"x","a":"y"}}"#, "duplicate key: \"weight_map\" > \"a\""),
            (r#"{"weight_map":{"a":"x","a":"x"}}"#, "duplicate"),
            (r#"{"weight_map":{},"weight_map":{}}"#, "duplicate key: \"weight_map\""),
            (r#"{"metadata":{"total_size":1}}"#, "no `weight_map`"),
            (r#"{"weight_map":["a"]}"#, "it is a list"),
            (r#"["a"]"#, "holds a list"),
            (r#"{"weight_map":{"a":3}}"#, "tensor \"a\" must be a string, found 3"),
            (r#"{"weight_map":{"a":"x"}"#, "not valid JSON"),
            ("<!DOCTYPE html>", "an HTML page"),
        ] {
            assert!(said(text).contains(word), "{text}: {}", said(text));
        }
        assert_eq!(said(r#"{"metadata":{"total_size":1.5},"weight_map":{}}"#), "accepted");
    }

    #[test]
    fn a_byte_order_mark_is_passed_over_or_named() {
        let text = hostile::index(&[("a", "x.safetensors")]);
        let index = Index::parse(format!("\u{feff}{text}").as_bytes()).unwrap();
        assert_eq!(index.files(), ["x.safetensors"]);
        let wide =
            |bytes: fn(u16) -> [u8; 2]| format!("\u{feff}{text}").encode_utf16().flat_map(bytes).collect::<Vec<u8>>();
        for text in [wide(u16::to_le_bytes), wide(u16::to_be_bytes)] {
            let said = Index::parse(&text).unwrap_err().to_string();
            assert!(said.contains("byte order mark") && said.contains("UTF-16"), "{said}");
        }
        assert!(said("\u{feff}<!DOCTYPE html>").contains("an HTML page"), "{}", said("\u{feff}<!DOCTYPE html>"));
        assert_ne!(said(&format!("\u{feff}\u{feff}{text}")), "accepted", "one mark, not two");
    }
}
