//! The name that a mistyped name most likely stands for.
//!
//! Plain text against plain text; it knows no tensor and no file.

/// Candidates that are looked at, at most: a hint must stay cheap.
const MOST: usize = 20_000;

/// Names longer than this many bytes are not compared.
const LONGEST: usize = 200;

/// The candidate that is nearest to `name`, unless even that one has little in common with it.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = |candidate: &&str| candidate.len() <= LONGEST && candidate.len().abs_diff(name.len()) <= name.len() / 2;
    let scored = candidates.take(MOST).filter(near).map(|candidate| (distance(name, candidate), candidate));
    let (steps, candidate) = scored.min_by_key(|(steps, _)| *steps)?;
    (name.len() <= LONGEST && steps <= 1 + name.len() / 3).then_some(candidate)
}

/// `the nearest name is "…"`, as a hint.
pub(crate) fn hint<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<String> {
    nearest(name, candidates).map(|near| format!("the nearest name is {near:?}"))
}

/// Insertions, removals and replacements that lead from one text to the other.
fn distance(from: &str, to: &str) -> usize {
    let to = to.as_bytes();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (above, byte) in from.bytes().enumerate() {
        let mut diagonal = above;
        row[0] = above + 1;
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
    }

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        let names = ["model.norm.weight", "lm_head.weight"];
        assert_eq!(nearest("lm_haed.weight", names.into_iter()), Some("lm_head.weight"));
        assert_eq!(nearest("x", names.into_iter()), None);
    }
}
