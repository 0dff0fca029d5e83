//! The text forms of protocol 0 as Python reads them: numbers in decimal, quoted strings, escaped Unicode.
//!
//! Plain functions over bytes; what they make is at most twice as long as what they are given.

/// What an integer as text is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Number {
    Small(i64),
    /// Two's complement, little-endian.
    Big(Vec<u8>),
    /// Above the limit of bytes.
    TooWide,
    /// Some unpickler takes it for a number, or two take it for different ones: hexadecimal, octal, cut by a NUL.
    Odd,
    Nothing,
}

/// Decimal digits that certainly pass the limit of 128 bytes.
const MOST_DIGITS: usize = 310;

/// Reads an integer.
pub(super) fn integer(text: &[u8], most_bytes: usize) -> Number {
    let (negative, body) = signed(text);
    let Some(digits) = digits(body) else { return if is_odd(body) { Number::Odd } else { Number::Nothing } };
    let number = std::str::from_utf8(&digits).ok().and_then(|digits| digits.parse::<i128>().ok());
    match number.and_then(|number| i64::try_from(if negative { -number } else { number }).ok()) {
        // Octal to C.
        Some(number) if number != 0 && body.first() == Some(&b'0') => Number::Odd,
        Some(number) => Number::Small(number),
        None if digits.len() > MOST_DIGITS => Number::TooWide,
        None => wide(&digits, negative, most_bytes),
    }
}

/// The slot of the memo that a line names, in decimal and without needless zeros; `None` where that is none.
pub(super) fn slot(text: &[u8]) -> Option<(bool, Vec<u8>)> {
    let (negative, body) = signed(text);
    let body = body.split(|&byte| byte == 0).next().unwrap_or_default();
    let digits = digits(body)?;
    let zeros = digits.iter().take_while(|&&digit| digit == b'0').count();
    let digits = digits.get(zeros..).unwrap_or_default().to_vec();
    Some((negative && !digits.is_empty(), digits))
}

fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

fn trim(mut text: &[u8]) -> &[u8] {
    while let [first, rest @ ..] = text
        && is_space(*first)
    {
        text = rest;
    }
    while let [rest @ .., last] = text
        && is_space(*last)
    {
        text = rest;
    }
    text
}

/// Whether there is a minus, and what stands behind the sign.
fn signed(text: &[u8]) -> (bool, &[u8]) {
    match trim(text) {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    }
}

/// Decimal digits, with the single underscores that Python allows between them taken out.
fn digits(body: &[u8]) -> Option<Vec<u8>> {
    let groups = body.split(|&byte| byte == b'_');
    let whole = groups.clone().all(|group| !group.is_empty() && group.iter().all(u8::is_ascii_digit));
    whole.then(|| groups.collect::<Vec<_>>().concat())
}

/// To C a text ends at its first NUL, and one that is empty by then is 0.
fn is_odd(body: &[u8]) -> bool {
    let is_cut = body.contains(&0);
    let body = trim(body.split(|&byte| byte == 0).next().unwrap_or_default());
    (is_cut && body.is_empty())
        || body.first().is_some_and(u8::is_ascii_digit)
            && body.iter().all(|&byte| byte.is_ascii_hexdigit() || b"xXoO_".contains(&byte))
}

/// Reads a number with a point or an exponent.
pub(super) fn float(text: &[u8]) -> Option<f64> {
    let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
    let text: Vec<u8> = trim(text).iter().copied().filter(|&byte| byte != b'_').collect();
    std::str::from_utf8(&text).ok()?.parse().ok()
}

fn wide(digits: &[u8], negative: bool, most_bytes: usize) -> Number {
    let mut bytes: Vec<u8> = Vec::new();
    for digit in digits {
        let mut carry = u16::from(digit - b'0');
        for byte in &mut bytes {
            let value = u16::from(*byte) * 10 + carry;
            *byte = value.to_le_bytes()[0];
            carry = value >> 8;
        }
        if carry > 0 {
            bytes.push(carry.to_le_bytes()[0]);
        }
    }
    bytes.push(0);
    if negative {
        negate(&mut bytes);
    }
    if bytes.len() > most_bytes { Number::TooWide } else { Number::Big(bytes) }
}

fn negate(bytes: &mut [u8]) {
    let mut carry = true;
    for byte in bytes {
        let (value, over) = (!*byte).overflowing_add(u8::from(carry));
        *byte = value;
        carry = over;
    }
}

/// A small integer in two's complement, or `None` where it does not fit 64 bits.
pub(super) fn small(bytes: &[u8]) -> Option<i64> {
    let fill = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xff } else { 0 };
    let (low, high) = bytes.split_at(bytes.len().min(8));
    let mut number = [fill; 8];
    number.get_mut(..low.len())?.copy_from_slice(low);
    let fits = high.iter().all(|&byte| byte == fill) && (high.is_empty() || (number[7] & 0x80 != 0) == (fill == 0xff));
    fits.then(|| i64::from_le_bytes(number))
}

/// A number in two's complement as decimal digits. Work grows with the square of the bytes: for few of them.
pub(super) fn written(bytes: &[u8]) -> String {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut rest = bytes.to_vec();
    if negative {
        rest.push(0xff);
        negate(&mut rest);
    }
    let mut digits = Vec::new();
    while rest.iter().any(|&byte| byte != 0) {
        let mut carry = 0u16;
        for byte in rest.iter_mut().rev() {
            let value = carry << 8 | u16::from(*byte);
            *byte = (value / 10).to_le_bytes()[0];
            carry = value % 10;
        }
        digits.push(char::from(b'0' + carry.to_le_bytes()[0]));
    }
    let sign = if negative { "-" } else { "" };
    sign.chars().chain(digits.into_iter().rev()).collect()
}

/// A string in quotes with Python's escapes, as bytes.
pub(super) fn unquote(text: &[u8]) -> Option<Vec<u8>> {
    let quote = *text.first().filter(|quote| matches!(quote, b'\'' | b'"'))?;
    let inner = text.get(1..)?.strip_suffix(&[quote])?;
    let mut out = Vec::with_capacity(inner.len());
    let mut rest = inner;
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte == b'\\' { escape(&mut rest, &mut out)? } else { out.push(*byte) }
    }
    Some(out)
}

/// What follows a backslash. One that no escape begins with stays as it is.
fn escape(rest: &mut &[u8], out: &mut Vec<u8>) -> Option<()> {
    let (first, after) = rest.split_first()?;
    *rest = after;
    let byte = match first {
        b'a' => 7,
        b'b' => 8,
        b'f' => 12,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'v' => 11,
        b'x' => u8::try_from(hex(rest, 2)?).ok()?,
        b'0'..=b'7' => octal(*first, rest),
        plain @ (b'\\' | b'\'' | b'"') => *plain,
        other => {
            out.push(b'\\');
            *other
        }
    };
    out.push(byte);
    Some(())
}

/// Up to three octal digits, of which Python keeps eight bits.
fn octal(first: u8, rest: &mut &[u8]) -> u8 {
    let mut value = u16::from(first - b'0');
    for _ in 0..2 {
        let Some((digit @ b'0'..=b'7', after)) = rest.split_first() else { break };
        value = value << 3 | u16::from(digit - b'0');
        *rest = after;
    }
    value.to_le_bytes()[0]
}

fn hex(rest: &mut &[u8], digits: usize) -> Option<u32> {
    let (digits, after) = rest.split_at_checked(digits)?;
    *rest = after;
    digits.iter().try_fold(0, |number, digit| Some(number << 4 | char::from(*digit).to_digit(16)?))
}

/// Python's `raw-unicode-escape`: Latin-1, and `\uXXXX` and `\UXXXXXXXX`. Halves of surrogate pairs, which Python takes, come out
/// as the replacement character; whether there were any is said.
pub(super) fn raw_unicode(text: &[u8]) -> Option<(String, bool)> {
    let (mut out, mut lossy) = (String::with_capacity(text.len()), false);
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        out.push(char::from(*byte));
        let ([next, after @ ..], b'\\') = (rest, byte) else { continue };
        rest = after;
        let digits = match next {
            b'u' => 4,
            b'U' => 8,
            other => {
                out.push(char::from(*other));
                continue;
            }
        };
        out.pop();
        let code = hex(&mut rest, digits)?;
        let is_half = (0xd800..0xe000).contains(&code);
        lossy |= is_half;
        out.push(if is_half { char::REPLACEMENT_CHARACTER } else { char::from_u32(code)? });
    }
    Some((out, lossy))
}

/// The same for text that is UTF-8 but for halves of surrogate pairs.
pub(super) fn without_surrogates(text: &[u8]) -> Option<String> {
    let mut bytes = text.to_vec();
    for at in 0..bytes.len().saturating_sub(2) {
        if let Some(half @ [0xed, 0xa0..=0xbf, _]) = bytes.get_mut(at..at + 3) {
            half.copy_from_slice("\u{fffd}".as_bytes());
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `int(text, 0)` of Python and `strtol` of C say.
    #[test]
    fn integers_are_python_s_whatever_their_width() {
        for (text, number) in [
            (&b"-12"[..], Number::Small(-12)),
            (b"1_0", Number::Small(10)),
            (b" \t+1\r\x0b", Number::Small(1)),
            (b"-0", Number::Small(0)),
            (b"-9223372036854775808", Number::Small(i64::MIN)),
            (
                b"119547037146038801333356",
                Number::Big(vec![0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0]),
            ),
            (b"-18446744073709551616", Number::Big(vec![0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])),
            (&[b'9'; 400], Number::TooWide),
            (b"0x1F", Number::Odd),
            (b"0b1_1", Number::Odd),
            (b"010", Number::Odd),
            (b"1\0junk", Number::Odd),
            (b"\0", Number::Odd),
            (b" +\0junk", Number::Odd),
            (b"1__0", Number::Odd),
            (b"1.5", Number::Nothing),
            (b"m happy", Number::Nothing),
            (b"_1", Number::Nothing),
            (b"", Number::Nothing),
        ] {
            assert_eq!(integer(text, 128), number, "{}", text.escape_ascii());
        }
    }

    #[test]
    fn numbers_are_written_as_they_were_read() {
        for text in
            ["18446744073709551616", "-18446744073709551616", "-9223372036854775809", "119547037146038801333356"]
        {
            let Number::Big(bytes) = integer(text.as_bytes(), 128) else { panic!("not big") };
            assert_eq!(written(&bytes), text);
        }
    }

    #[test]
    fn slots_and_floats_are_python_s() {
        assert_eq!(slot(b" +0_7 "), Some((false, b"7".to_vec())));
        assert_eq!(slot(b"-0"), Some((false, Vec::new())));
        assert_eq!(slot(b"-1"), Some((true, b"1".to_vec())));
        assert_eq!(slot(b"x"), None);
        for (text, number) in [(&b" 1_0.5e1\n"[..], 105.0), (b"-Inf", f64::NEG_INFINITY), (b"1.", 1.0), (b".5\0x", 0.5)]
        {
            assert_eq!(float(text), Some(number));
        }
        assert_eq!(float(b"1,5"), None);
    }

    #[test]
    fn twos_complement_is_small_where_it_fits() {
        for number in [0, 1, -1, 127, -128, 255, i64::MAX, i64::MIN] {
            let mut bytes = number.to_le_bytes().to_vec();
            assert_eq!(small(&bytes), Some(number));
            bytes.push(if number < 0 { 0xff } else { 0 });
            assert_eq!(small(&bytes), Some(number));
        }
        assert_eq!(small(&[]), Some(0));
        assert_eq!(small(&[0, 0, 0, 0, 0, 0, 0, 0x80, 0]), None);
    }

    #[test]
    fn escapes_are_python_s() {
        for (text, bytes) in [
            (&br"'a\'\x41\n'"[..], Some(&b"a'A\n"[..])),
            (br"'\157s\z\0\7777'", Some(b"os\\z\0\xff7")),
            (br#""\a\b\f\v\\""#, Some(b"\x07\x08\x0c\x0b\\")),
            (b"'a", None),
            (b"'", None),
            (br"'\x4'", None),
            (br"'a\'", None),
        ] {
            assert_eq!(unquote(text).as_deref(), bytes, "{}", text.escape_ascii());
        }
        for (text, meaning) in [
            (&br"a\u00e9\U0001F600"[..], Some(("aé😀", false))),
            (br"\\u0041\x", Some((r"\\u0041\x", false))),
            (b"\xe9\\", Some(("é\\", false))),
            (br"\ud800", Some(("\u{fffd}", true))),
            (br"\u00", None),
            (br"\U00110000", None),
        ] {
            let found = raw_unicode(text);
            assert_eq!(found.as_ref().map(|(text, lossy)| (text.as_str(), *lossy)), meaning, "{}", text.escape_ascii());
        }
        assert_eq!(without_surrogates(b"a\xed\xa0\x80").as_deref(), Some("a\u{fffd}"));
        assert_eq!(without_surrogates(b"\xff"), None);
    }
}
