//! Name patterns: `*`, `?`, `[ab]`, `[!a-z]`, `{a,b}` and `\` before a character that means itself.
//!
//! The crate `glob` matches; it has no alternatives and no escapes, so these are rewritten first. `*` matches any text, `.` and `/`
//! included, and `**` is the same. Nothing here knows a checkpoint.

use glob::{MatchOptions, Pattern};

/// The longest pattern in bytes.
pub(super) const MAX_BYTES: usize = 4 << 10;

/// The most `*` of a pattern: the matcher calls itself for each, and a thread's stack is small.
pub(super) const MAX_STARS: usize = 100;

/// The most patterns that one with alternatives stands for.
const MAX_ALTERNATIVES: usize = 4096;

const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: false, require_literal_leading_dot: false };

/// A compiled pattern.
#[derive(Debug)]
pub(super) struct Glob(Vec<Pattern>);

impl Glob {
    /// Compiles `pattern`; the error says what is wrong with it.
    pub(super) fn new(pattern: &str) -> Result<Glob, String> {
        if pattern.len() > MAX_BYTES {
            return Err(format!("it is longer than {MAX_BYTES} bytes: use several"));
        }
        let characters: Vec<char> = pattern.chars().collect();
        let (spellings, rest) = alternatives(&characters, 0)?;
        if !rest.is_empty() {
            return Err("a `}` has no `{`".to_owned());
        }
        let compile = |spelling: &String| Pattern::new(&joined_stars(spelling)?).map_err(|error| error.msg.to_owned());
        spellings.iter().map(compile).collect::<Result<_, _>>().map(Glob)
    }

    /// Whether the pattern matches the whole of `name`.
    pub(super) fn is_match(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches_with(name, OPTIONS))
    }
}

/// The patterns without alternatives and escapes that `text` stands for, up to the `,` or `}` that ends them inside braces, and
/// the text from there on.
fn alternatives(text: &[char], depth: usize) -> Result<(Vec<String>, &[char]), String> {
    let mut whole = vec![String::new()];
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        match first {
            '}' => break,
            ',' if depth > 0 => break,
            '{' => {
                let (choices, after) = choices(after, depth + 1)?;
                if whole.len().saturating_mul(choices.len()) > MAX_ALTERNATIVES {
                    return Err(format!("its braces stand for more than {MAX_ALTERNATIVES} patterns: use several"));
                }
                whole = whole.iter().flat_map(|start| choices.iter().map(move |end| format!("{start}{end}"))).collect();
                rest = after;
                continue;
            }
            '\\' => {
                let (&escaped, after) = after.split_first().ok_or("it ends with a `\\` that escapes nothing")?;
                extend(&mut whole, &Pattern::escape(escaped.encode_utf8(&mut [0; 4])));
                rest = after;
                continue;
            }
            '[' => {
                let (class, after) = class(after)?;
                extend(&mut whole, &class);
                rest = after;
                continue;
            }
            _ => extend(&mut whole, first.encode_utf8(&mut [0; 4])),
        }
        rest = after;
    }
    Ok((whole, rest))
}

/// The alternatives of a pair of braces, and the text behind it. Empty ones count only where all are.
fn choices(mut text: &[char], depth: usize) -> Result<(Vec<String>, &[char]), String> {
    const DEEPEST: usize = 64;
    if depth > DEEPEST {
        return Err(format!("its braces are nested more than {DEEPEST} deep"));
    }
    let mut all = Vec::new();
    loop {
        let (spellings, rest) = alternatives(text, depth)?;
        all.extend(spellings.into_iter().filter(|spelling| !spelling.is_empty()));
        match rest.split_first() {
            Some((',', rest)) => text = rest,
            Some((_, rest)) => {
                if all.is_empty() {
                    all.push(String::new());
                }
                return Ok((all, rest));
            }
            None => return Err("a `{` has no `}`".to_owned()),
        }
    }
}

/// The class that begins with the text behind `[`, as the matcher spells it, and the text behind it.
fn class(text: &[char]) -> Result<(String, &[char]), String> {
    let (negated, body) = match text.split_first() {
        Some(('!' | '^', rest)) => (true, rest),
        _ => (false, text),
    };
    // A `]` at the beginning is a member.
    let end = body.iter().skip(1).position(|&it| it == ']').map(|at| at + 1).ok_or("a `[` has no `]`")?;
    let (members, rest) = (&body[..end], &body[end + 1..]);
    let mut at = 0;
    while at + 2 < members.len() {
        if members[at + 1] == '-' {
            let (low, high) = (members[at], members[at + 2]);
            if low > high {
                return Err(format!("the range {low}-{high} goes backwards"));
            }
            at += 2;
        }
        at += 1;
    }
    let mut class = String::from(if negated { "[!" } else { "[" });
    class.extend(members);
    class.push(']');
    Ok((class, rest))
}

fn extend(all: &mut [String], end: &str) {
    for one in all {
        one.push_str(end);
    }
}

/// Several `*` in a row mean what one means; the matcher refuses them.
fn joined_stars(pattern: &str) -> Result<String, String> {
    let characters: Vec<char> = pattern.chars().collect();
    let (mut joined, mut stars, mut rest) = (String::with_capacity(pattern.len()), 0, &characters[..]);
    while let Some((&first, after)) = rest.split_first() {
        if first == '[' {
            let (text, after) = class(after)?;
            joined.push_str(&text);
            rest = after;
            continue;
        }
        if first != '*' || after.first() != Some(&'*') {
            joined.push(first);
            stars += usize::from(first == '*');
        }
        rest = after;
    }
    if stars > MAX_STARS {
        return Err(format!("it has {stars} `*`, and {MAX_STARS} are the most"));
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Glob::new(pattern).unwrap().is_match(name)
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name) in [
            ("*", ""),
            ("*.layers.0.*", "model.layers.0.w"),
            ("a*b", "a/x.b"),
            ("l.{0,1[0-9]}.w", "l.17.w"),
            ("{a,b{c,d}}", "bd"),
            ("a{}", "a"),
            (r"\*\{x\}", "*{x}"),
            ("[]a]", "]"),
            ("[!a]?", "bé"),
            ("[*][*]", "**"),
            ("[**]", "*"),
            ("w{*,x}*", "w.y"),
            ("a***b", "ab"),
            ("x/**/y", "x/a/b/y"),
            ("a.**.b", "a.c.d.b"),
        ] {
            assert!(matches(pattern, name), "{pattern} does not match {name}");
        }
        for (pattern, name) in [("a", "ab"), ("[!a]", "a"), ("l.{0,1}", "l.2"), ("?", ""), ("A", "a"), (r"\*", "x")] {
            assert!(!matches(pattern, name), "{pattern} matches {name}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        let nested = "{".repeat(100);
        let many = "{a,b}".repeat(13);
        let long = "x".repeat(MAX_BYTES + 1);
        let stars = "*a".repeat(MAX_STARS + 1);
        for pattern in ["[", "[a", "[!]", "[z-a]", "{a", "{a,", "a}", "\\", &nested, &many, &long, &stars] {
            assert!(Glob::new(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn the_longest_patterns_end_in_time_and_on_a_small_stack() {
        let stars = "*a".repeat(MAX_STARS);
        let small = std::thread::Builder::new().stack_size(1 << 20);
        let matched = small.spawn(move || (matches(&stars, &"a".repeat(9000)), matches(&stars, &"b".repeat(9000))));
        assert_eq!(matched.unwrap().join().unwrap(), (true, false));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// The crate `globset` is another reader of the same language, but that `**` between slashes matches no folder too.
        #[test]
        fn globset_agrees(pattern in r"([ab.*?\\{},!^\[\]-]|\*|[ab]|\[[!^]?[ab.]\]|\{[ab*],[ab?]?\}){0,9}", name in "[ab.!^-]{0,6}") {
            let theirs = globset::GlobBuilder::new(&pattern).literal_separator(false).build();
            let ours = Glob::new(&pattern);
            prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{:?} and {:?}", ours, theirs.map(|glob| glob.regex().to_owned()));
            if let (Ok(ours), Ok(theirs)) = (ours, theirs) {
                let (ours, theirs) = (ours.is_match(&name), theirs.compile_matcher().is_match(&name));
                prop_assert_eq!(ours, theirs, "{} and {}", pattern, name);
            }
        }
    }
}
