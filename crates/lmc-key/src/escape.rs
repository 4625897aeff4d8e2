//! Percent encoding for the parts of a text key.

/// Which characters stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plain {
    /// Visible ASCII but `@`, `%` and `\`: what LMCache writes for every usual name.
    Text,
    /// Letters, digits, `-`, `_` and `.`, so that the text is one component of a path everywhere.
    FileName,
}

impl Plain {
    const fn allows(self, byte: u8) -> bool {
        match self {
            Self::Text => byte.is_ascii_graphic() && !matches!(byte, b'@' | b'%' | b'\\'),
            Self::FileName => byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'),
        }
    }
}

/// Appends `text`, with every byte that `plain` does not allow as `%` and two upper-case digits.
pub(crate) fn encode(out: &mut String, text: &str, plain: Plain) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        if plain.allows(byte) {
            out.push(byte.into());
        } else {
            out.push('%');
            out.push(DIGITS[usize::from(byte >> 4)].into());
            out.push(DIGITS[usize::from(byte & 15)].into());
        }
    }
}

/// Why a text cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// A `%` at this byte without two hex digits behind it.
    Escape(usize),
    /// The escapes are no UTF-8.
    Utf8,
}

/// The inverse of [`encode`], for either set of plain characters.
pub(crate) fn decode(text: &str) -> Result<String, DecodeError> {
    if !text.contains('%') {
        return Ok(text.to_owned());
    }
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if byte != b'%' {
            out.push(byte);
            at += 1;
            continue;
        }
        let digit = |at: usize| bytes.get(at).and_then(|&b| char::from(b).to_digit(16));
        let (Some(high), Some(low)) = (digit(at + 1), digit(at + 2)) else {
            return Err(DecodeError::Escape(at));
        };
        out.push((high << 4 | low) as u8);
        at += 3;
    }
    String::from_utf8(out).map_err(|_| DecodeError::Utf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(text: &str, plain: Plain) -> String {
        let mut out = String::new();
        encode(&mut out, text, plain);
        out
    }

    #[test]
    fn only_what_confuses_is_escaped() {
        assert_eq!(
            encoded("meta-llama/L_3.1:x", Plain::Text),
            "meta-llama/L_3.1:x"
        );
        assert_eq!(encoded("a@b%c\\d e\n", Plain::Text), "a%40b%25c%5Cd%20e%0A");
        assert_eq!(encoded("a/b:c%", Plain::FileName), "a%2Fb%3Ac%25");
        assert_eq!(encoded("é", Plain::Text), "%C3%A9");
    }

    #[test]
    fn decoding_is_the_inverse_and_refuses_the_rest() {
        for text in ["", "a@b/c%d\\ \0é\u{202e}"] {
            for plain in [Plain::Text, Plain::FileName] {
                assert_eq!(decode(&encoded(text, plain)).as_deref(), Ok(text));
            }
        }
        assert_eq!(decode("%c3%a9").as_deref(), Ok("é"));
        assert_eq!(decode("ab%"), Err(DecodeError::Escape(2)));
        assert_eq!(decode("%4"), Err(DecodeError::Escape(0)));
        assert_eq!(decode("%4é"), Err(DecodeError::Escape(0)));
        assert_eq!(decode("%+1"), Err(DecodeError::Escape(0)));
        assert_eq!(decode("%ff"), Err(DecodeError::Utf8));
    }
}
