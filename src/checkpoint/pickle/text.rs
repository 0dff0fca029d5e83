//! The text forms of protocol 0: numbers in decimal, quoted strings, escaped Unicode.
//!
//! Plain functions over bytes; they allocate no more than they are given.

/// What a decimal number is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decimal {
    Small(i64),
    /// Two's complement, little-endian.
    Big(Vec<u8>),
    /// Above the limit of bytes.
    TooWide,
    NotANumber,
}

/// Decimal digits that certainly pass the limit of 128 bytes.
const MOST_DIGITS: usize = 310;

/// Reads an integer in decimal.
pub(super) fn decimal(text: &[u8], most_bytes: usize) -> Decimal {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Decimal::NotANumber;
    }
    let small = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    match small {
        Some(small) => Decimal::Small(small),
        None if digits.len() > MOST_DIGITS => Decimal::TooWide,
        None => wide(digits, negative, most_bytes),
    }
}

fn wide(digits: &[u8], negative: bool, most_bytes: usize) -> Decimal {
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
    if bytes.len() > most_bytes { Decimal::TooWide } else { Decimal::Big(bytes) }
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

/// A string in quotes with Python's escapes, as bytes.
pub(super) fn unquote(text: &[u8]) -> Option<Vec<u8>> {
    let quote = *text.first().filter(|quote| matches!(quote, b'\'' | b'"'))?;
    let inner = text.get(1..)?.strip_suffix(&[quote])?;
    let mut out = Vec::with_capacity(inner.len());
    let mut rest = inner.iter().copied();
    while let Some(byte) = rest.next() {
        match byte {
            b'\\' => out.push(escape(&mut rest)?),
            byte => out.push(byte),
        }
    }
    Some(out)
}

fn escape(rest: &mut impl Iterator<Item = u8>) -> Option<u8> {
    match rest.next()? {
        b'n' => Some(b'\n'),
        b't' => Some(b'\t'),
        b'r' => Some(b'\r'),
        b'x' => u8::try_from(hex(rest, 2)?).ok(),
        plain @ (b'\\' | b'\'' | b'"') => Some(plain),
        _ => None,
    }
}

fn hex(rest: &mut impl Iterator<Item = u8>, digits: usize) -> Option<u32> {
    (0..digits).try_fold(0, |number, _| Some(number * 16 + char::from(rest.next()?).to_digit(16)?))
}

/// Python's `raw-unicode-escape`: Latin-1, and `\uXXXX` and `\UXXXXXXXX`.
pub(super) fn raw_unicode(text: &[u8]) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        let digits = match (byte, rest.peek()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => {
                out.push(char::from(byte));
                continue;
            }
        };
        rest.next();
        out.push(char::from_u32(hex(&mut rest, digits)?)?);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_exact_whatever_their_width() {
        assert_eq!(decimal(b"-12", 128), Decimal::Small(-12));
        let magic = decimal(b"119547037146038801333356", 128);
        assert_eq!(magic, Decimal::Big(vec![0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0]));
        let Decimal::Big(minus) = decimal(b"-18446744073709551616", 128) else { panic!("not big") };
        assert_eq!(minus, [0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        assert_eq!(decimal(&[b'9'; 400], 128), Decimal::TooWide);
        assert_eq!(decimal(b"1e5", 128), Decimal::NotANumber);
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
        assert_eq!(unquote(br"'a\'\x41\n'").unwrap(), b"a'A\n");
        assert_eq!(unquote(b"'a"), None);
        assert_eq!(raw_unicode(br"a\u00e9\U0001F600").unwrap(), "aé😀");
        assert_eq!(raw_unicode(br"\ud800"), None);
    }
}
