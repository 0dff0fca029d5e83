//! The name that a mistyped name or glob most likely stands for.
//!
//! Plain text against plain text; it knows no tensor and no file.

use crate::error::{Absent, Error};

/// Candidates that are looked at, at most: a hint must stay cheap.
const MOST: usize = 20_000;

/// Names longer than this many bytes are not compared.
const LONGEST: usize = 200;

/// In names up to this many bytes a mistyped first character leaves too little to tell what was meant.
const SHORT: usize = 6;

/// Names that are given as the nearest ones, at most.
const SHOWN: usize = 3;

/// The candidates that are nearest to `name`, at most three and all equally near; none where even those have little in common
/// with it.
pub(crate) fn few<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    // `*` of a glob stands for any text and is no typing error.
    let typed = name.bytes().filter(|byte| *byte != b'*').count();
    if typed == 0 || name.len() > LONGEST {
        return Vec::new();
    }
    let is_glob = typed < name.len();
    let most_steps = typed / 3;
    let near = |candidate: &&str| {
        candidate.len() <= LONGEST
            && (is_glob || candidate.len().abs_diff(typed) <= most_steps)
            && (is_glob || typed > SHORT || candidate.chars().next() == name.chars().next())
    };
    let (mut least, mut nearest) = (most_steps, Vec::new());
    for candidate in candidates.take(MOST).filter(near) {
        let steps = distance(name, candidate);
        if steps < least {
            nearest.clear();
        }
        if steps <= least {
            least = steps;
            nearest.push(candidate);
        }
    }
    nearest.truncate(if is_glob { 1 } else { SHOWN });
    nearest
}

/// The first of the nearest candidates.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    few(name, candidates).first().copied()
}

/// What to say of a name that is not among the candidates.
pub(crate) fn absent<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Absent {
    let nearest = few(name, candidates).into_iter().map(str::to_owned).collect();
    Absent { name: name.to_owned(), nearest }
}

/// The error of a tensor that is not among the candidates.
pub(crate) fn no_tensor<'a>(name: &str, what: &'static str, candidates: impl Iterator<Item = &'a str>) -> Error {
    let Absent { name, nearest } = absent(name, candidates);
    Error::NoTensor { name, what, nearest }
}

/// `the nearest name is "…"`, as a hint.
pub(crate) fn hint<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<String> {
    nearest(name, candidates).map(|near| format!("the nearest name is {near:?}"))
}

/// Insertions, removals and replacements that lead from one text to the other; a `*` in the first stands for any text.
fn distance(from: &str, to: &str) -> usize {
    let to = to.as_bytes();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for byte in from.bytes() {
        if byte == b'*' {
            (1..row.len()).for_each(|at| row[at] = row[at].min(row[at - 1]));
            continue;
        }
        let mut diagonal = row[0];
        row[0] += 1;
        for (at, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != *other);
            diagonal = row[at + 1];
            row[at + 1] = replaced.min(diagonal + 1).min(row[at] + 1);
        }
    }
    row.last().copied().unwrap_or(from.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_edits() {
        assert_eq!((distance("kitten", "sitting"), distance("", "ab"), distance("ab", "")), (3, 2, 2));
        assert_eq!((distance("*.b", "a.b"), distance("*.layer.0.*", "m.layers.0.w"), distance("*", "")), (0, 1, 0));
        assert_eq!((distance("a*z", "abcz"), distance("a*z", "abc"), distance("a**", "b")), (0, 1, 1));
    }

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        let names = ["model.norm.weight", "lm_head.weight", "model.layers.0.q_proj.weight"];
        let near = |name| nearest(name, names.into_iter());
        assert_eq!(near("lm_haed.weight"), Some("lm_head.weight"));
        assert_eq!(near("*.layer.0.*"), Some("model.layers.0.q_proj.weight"));
        assert_eq!(near("*q_porj*"), Some("model.layers.0.q_proj.weight"));
        let twins = ["layers.0.attn.weight", "layers.1.attn.weight", "layers.2.attn.weight", "layers.3.attn.weight"];
        assert_eq!(few("layers.5.attn.weight", twins.into_iter()), twins[..3], "equally near, and no more than three");
        assert_eq!((near("x"), near("*vision_tower*"), near("*"), near("")), (None, None, None, None));
    }

    #[test]
    fn short_names_are_not_mistaken_for_each_other() {
        let names = ["o", "home", "model"];
        for name in ["m", "nope", "hose2", "odel", "yodel"] {
            assert_eq!(nearest(name, names.into_iter()), None, "{name}");
        }
        assert_eq!(nearest("modl", names.into_iter()), Some("model"));
        assert_eq!(nearest("hom", names.into_iter()), Some("home"));
    }
}
