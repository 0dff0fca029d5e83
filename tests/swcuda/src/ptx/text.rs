//! PTX as characters: comments, words, statements, lists of operands. Knows no instruction.

/// A place in the text; comments are gone, lines still count.
#[derive(Debug, Clone)]
pub(super) struct Cursor<'a> {
    rest: &'a str,
    line: u32,
}

/// The next thing in a kernel's body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    Open,
    Close,
    Label(&'a str),
    /// Without its semicolon.
    Statement(&'a str),
}

/// The text with comments replaced by spaces, so that lines keep their numbers.
pub(super) fn without_comments(text: &str) -> String {
    let (mut clean, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(start) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
        let (before, comment) = rest.split_at(start);
        let end = if comment.starts_with("//") { comment.find('\n') } else { comment.find("*/").map(|end| end + 2) };
        let (comment, after) = comment.split_at(end.unwrap_or(comment.len()));
        clean.push_str(before);
        clean.extend(comment.chars().map(|c| if c == '\n' { c } else { ' ' }));
        rest = after;
    }
    clean + rest
}

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a str) -> Cursor<'a> {
        Cursor { rest: text, line: 1 }
    }

    /// The line of what comes next.
    pub(super) fn line(&mut self) -> u32 {
        self.skip_space();
        self.line
    }

    /// An error at this place.
    pub(super) fn error(&self, what: &str) -> String {
        format!("PTX line {}: {what}", self.line)
    }

    pub(super) fn is_at_end(&mut self) -> bool {
        self.skip_space();
        self.rest.is_empty()
    }

    fn skip_space(&mut self) {
        let len = self.rest.find(|c: char| !c.is_whitespace()).unwrap_or(self.rest.len());
        self.advance(len);
    }

    fn advance(&mut self, len: usize) -> &'a str {
        let (passed, rest) = self.rest.split_at(len);
        self.line += u32::try_from(passed.matches('\n').count()).unwrap_or(u32::MAX);
        self.rest = rest;
        passed
    }

    /// The next word: everything up to white space or a bracket, comma or semicolon.
    pub(super) fn word(&mut self) -> &'a str {
        self.skip_space();
        let ends = |c: char| c.is_whitespace() || "(){}[],;".contains(c);
        let len = self.rest.find(ends).unwrap_or(self.rest.len());
        self.advance(len)
    }

    /// Everything up to `end`, trimmed; the cursor is behind it then.
    pub(super) fn until(&mut self, end: char) -> Result<&'a str, String> {
        self.skip_space();
        let Some(len) = self.rest.find(end) else { return Err(self.error(&format!("no {end:?} follows"))) };
        let text = self.advance(len);
        self.advance(end.len_utf8());
        Ok(text.trim())
    }

    /// The next piece of a body.
    pub(super) fn piece(&mut self) -> Result<Piece<'a>, String> {
        self.skip_space();
        if self.rest.starts_with('{') {
            self.advance(1);
            return Ok(Piece::Open);
        }
        if self.rest.starts_with('}') {
            self.advance(1);
            return Ok(Piece::Close);
        }
        let in_name = |c: char| c.is_alphanumeric() || "_$".contains(c);
        let name = self.rest.find(|c| !in_name(c)).unwrap_or(0);
        if name > 0 && self.rest[name..].starts_with(':') {
            let label = self.advance(name);
            self.advance(1);
            return Ok(Piece::Label(label));
        }
        self.until(';').map(Piece::Statement)
    }
}

/// Splits at commas that are not inside brackets or braces.
pub(super) fn operands(text: &str) -> Vec<&str> {
    let (mut found, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        found.push(last);
    }
    found
}

/// The members of `{a, b}`, or the one thing that is not in braces.
pub(super) fn members(text: &str) -> Vec<&str> {
    match text.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')) {
        Some(inner) => inner.split(',').map(str::trim).collect(),
        None => vec![text],
    }
}
