//! A bounded reader and a small writer of MessagePack values, as far as the protocol needs them.
//!
//! The reader never allocates memory for a length that the input claims: strings and byte strings
//! are borrowed, arrays are read element by element, and nesting is limited. Format:
//! <https://github.com/msgpack/msgpack/blob/master/spec.md>.

use bytes::Bytes;
use thiserror::Error;

mod tokens;

/// Greatest nesting depth of arrays and maps.
pub(crate) const MAX_DEPTH: usize = 16;

/// Why bytes are not the MessagePack value that was expected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The input ends before the value does.
    #[error("value ends early at byte {at}")]
    Truncated {
        /// Offset at which more bytes were needed.
        at: usize,
    },
    /// The value has another type than expected.
    #[error("expected {expected} at byte {at}, found {found}")]
    Type {
        /// Type that was expected.
        expected: &'static str,
        /// Type that the marker byte stands for.
        found: &'static str,
        /// Offset of the marker byte.
        at: usize,
    },
    /// A number is out of the field's range.
    #[error("number at byte {at} is out of range for {what}")]
    Range {
        /// Name of the field.
        what: &'static str,
        /// Offset of the marker byte.
        at: usize,
    },
    /// A field has more elements or bytes than it may have.
    #[error("{what} has {len} elements, the limit is {max}")]
    TooLong {
        /// Name of the field.
        what: &'static str,
        /// Elements or bytes that the input claims.
        len: usize,
        /// Elements or bytes that are allowed.
        max: usize,
    },
    /// Arrays or maps are nested too deeply.
    #[error("value is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// A string is not UTF-8.
    #[error("string at byte {at} is not utf-8")]
    Utf8 {
        /// Offset of the string's first byte.
        at: usize,
    },
    /// The input has bytes after the value.
    #[error("{extra} bytes after the value")]
    Trailing {
        /// Number of bytes after the value.
        extra: usize,
    },
    /// A required field is missing.
    #[error("field `{0}` is missing")]
    Missing(&'static str),
    /// A field's value breaks a rule of the protocol.
    #[error("{0}")]
    Invalid(String),
}

/// Reads MessagePack values from a slice, front to back.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    buf: &'a [u8],
    pos: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(buf: &'a [u8]) -> Self {
        Self { buf, pos: 0 }
    }

    /// Checks that every byte was read.
    pub(crate) fn finish(&self) -> Result<(), ValueError> {
        match self.buf.len() - self.pos {
            0 => Ok(()),
            extra => Err(ValueError::Trailing { extra }),
        }
    }

    fn peek(&self) -> Result<u8, ValueError> {
        self.buf
            .get(self.pos)
            .copied()
            .ok_or(ValueError::Truncated { at: self.pos })
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ValueError> {
        let rest = &self.buf[self.pos..];
        if rest.len() < len {
            return Err(ValueError::Truncated { at: self.buf.len() });
        }
        self.pos += len;
        Ok(&rest[..len])
    }

    fn uint(&mut self, width: usize) -> Result<u64, ValueError> {
        let mut bytes = [0; 8];
        bytes[8 - width..].copy_from_slice(self.take(width)?);
        Ok(u64::from_be_bytes(bytes))
    }

    fn wrong(&self, expected: &'static str, at: usize) -> ValueError {
        let found = self.buf.get(at).map_or("nothing", |&marker| kind(marker));
        ValueError::Type {
            expected,
            found,
            at,
        }
    }

    /// Returns true and consumes the next value if it is nil.
    pub(crate) fn nil(&mut self) -> Result<bool, ValueError> {
        let nil = self.peek()? == 0xc0;
        self.pos += usize::from(nil);
        Ok(nil)
    }

    /// Reads an integer. Accepts booleans as 0 and 1, as the reference client does.
    pub(crate) fn int(&mut self) -> Result<i128, ValueError> {
        let at = self.pos;
        let marker = self.peek()?;
        self.pos += 1;
        let signed =
            |value: u64, bits: u32| i128::from((value << (64 - bits)) as i64 >> (64 - bits));
        Ok(match marker {
            0x00..=0x7f => i128::from(marker),
            0xe0..=0xff => i128::from(marker as i8),
            0xc2 => 0,
            0xc3 => 1,
            0xcc => i128::from(self.uint(1)?),
            0xcd => i128::from(self.uint(2)?),
            0xce => i128::from(self.uint(4)?),
            0xcf => i128::from(self.uint(8)?),
            0xd0 => signed(self.uint(1)?, 8),
            0xd1 => signed(self.uint(2)?, 16),
            0xd2 => signed(self.uint(4)?, 32),
            0xd3 => signed(self.uint(8)?, 64),
            _ => {
                self.pos = at;
                return Err(self.wrong("an integer", at));
            }
        })
    }

    /// Reads an integer that fits `T`.
    pub(crate) fn number<T: TryFrom<i128>>(&mut self, what: &'static str) -> Result<T, ValueError> {
        let at = self.pos;
        T::try_from(self.int()?).map_err(|_| ValueError::Range { what, at })
    }

    /// Reads a boolean if the next value is one.
    pub(crate) fn if_bool(&mut self) -> Option<bool> {
        let value = match self.peek() {
            Ok(0xc2) => false,
            Ok(0xc3) => true,
            _ => return None,
        };
        self.pos += 1;
        Some(value)
    }

    /// Reads a boolean. Accepts integers; all but 0 are true.
    pub(crate) fn bool(&mut self) -> Result<bool, ValueError> {
        Ok(self.int()? != 0)
    }

    /// Reads a floating-point number. Accepts integers.
    pub(crate) fn float(&mut self) -> Result<f64, ValueError> {
        match self.peek()? {
            0xca => {
                self.pos += 1;
                Ok(f64::from(f32::from_bits(self.uint(4)? as u32)))
            }
            0xcb => {
                self.pos += 1;
                Ok(f64::from_bits(self.uint(8)?))
            }
            _ => Ok(self.int()? as f64),
        }
    }

    /// Reads the marker of a value with a length, and the length. `short` returns the length that a
    /// marker contains; `long` has the markers of lengths of 1, 2 and 4 bytes.
    #[inline]
    fn header(
        &mut self,
        expected: &'static str,
        short: impl Fn(u8) -> Option<u8>,
        long: [Option<u8>; 3],
    ) -> Result<usize, ValueError> {
        let at = self.pos;
        let marker = self.peek()?;
        self.pos += 1;
        if let Some(len) = short(marker) {
            return Ok(usize::from(len));
        }
        match long.iter().position(|known| *known == Some(marker)) {
            // At most 32 bits wide, so it always fits.
            Some(width) => Ok(self.uint(1 << width)? as usize),
            None => {
                self.pos = at;
                Err(self.wrong(expected, at))
            }
        }
    }

    /// Reads a string of at most `max` bytes.
    pub(crate) fn str(&mut self, what: &'static str, max: usize) -> Result<&'a str, ValueError> {
        let short = |marker| matches!(marker, 0xa0..=0xbf).then_some(marker & 0x1f);
        let len = self.header("a string", short, [0xd9, 0xda, 0xdb].map(Some))?;
        bounded(what, len, max)?;
        let at = self.pos;
        std::str::from_utf8(self.take(len)?).map_err(|_| ValueError::Utf8 { at })
    }

    /// Reads a byte string of at most `max` bytes.
    pub(crate) fn bin(&mut self, what: &'static str, max: usize) -> Result<&'a [u8], ValueError> {
        let len = self.header("a byte string", |_| None, [0xc4, 0xc5, 0xc6].map(Some))?;
        bounded(what, len, max)?;
        self.take(len)
    }

    /// Reads an extension value of at most `max` bytes: its type code and its bytes.
    pub(crate) fn ext(
        &mut self,
        what: &'static str,
        max: usize,
    ) -> Result<(i8, &'a [u8]), ValueError> {
        let short = |marker| matches!(marker, 0xd4..=0xd8).then(|| 1 << (marker - 0xd4));
        let len = self.header("an extension value", short, [0xc7, 0xc8, 0xc9].map(Some))?;
        bounded(what, len, max)?;
        let code = self.take(1)?[0] as i8;
        Ok((code, self.take(len)?))
    }

    /// Reads the length of an array of at most `max` elements; the elements follow.
    pub(crate) fn array(&mut self, what: &'static str, max: usize) -> Result<usize, ValueError> {
        let short = |marker| matches!(marker, 0x90..=0x9f).then_some(marker & 0x0f);
        let len = self.header("an array", short, [None, Some(0xdc), Some(0xdd)])?;
        self.elements(what, len, max)
    }

    /// Reads the number of pairs of a map of at most `max` pairs; keys and values follow in turn.
    pub(crate) fn map(&mut self, what: &'static str, max: usize) -> Result<usize, ValueError> {
        let short = |marker| matches!(marker, 0x80..=0x8f).then_some(marker & 0x0f);
        let len = self.header("a map", short, [None, Some(0xde), Some(0xdf)])?;
        self.elements(what, len, max)
    }

    /// Refuses a count that exceeds the limit or that the rest of the input cannot hold.
    fn elements(&self, what: &'static str, len: usize, max: usize) -> Result<usize, ValueError> {
        bounded(what, len, max)?;
        if len > self.buf.len() - self.pos {
            return Err(ValueError::Truncated { at: self.buf.len() });
        }
        Ok(len)
    }

    /// Reads one value of any type and returns its bytes.
    pub(crate) fn raw(&mut self) -> Result<&'a [u8], ValueError> {
        let start = self.pos;
        self.skip()?;
        Ok(&self.buf[start..self.pos])
    }

    /// Skips one value of any type.
    pub(crate) fn skip(&mut self) -> Result<(), ValueError> {
        self.skip_at(0)
    }

    fn skip_at(&mut self, depth: usize) -> Result<(), ValueError> {
        if depth >= MAX_DEPTH {
            return Err(ValueError::TooDeep);
        }
        let unbounded = usize::MAX;
        match self.peek()? {
            0xc0 => self.pos += 1,
            0x80..=0x8f | 0xde | 0xdf => {
                for _ in 0..self.map("map", unbounded)? {
                    self.skip_at(depth + 1)?;
                    self.skip_at(depth + 1)?;
                }
            }
            0x90..=0x9f | 0xdc | 0xdd => {
                for _ in 0..self.array("array", unbounded)? {
                    self.skip_at(depth + 1)?;
                }
            }
            0xa0..=0xbf | 0xd9..=0xdb => {
                self.str("string", unbounded)?;
            }
            0xc4..=0xc6 => {
                self.bin("bytes", unbounded)?;
            }
            0xc7..=0xc9 | 0xd4..=0xd8 => {
                self.ext("extension", unbounded)?;
            }
            0xca | 0xcb => {
                self.float()?;
            }
            _ => {
                self.int()?;
            }
        }
        Ok(())
    }

    /// Reads an array of unsigned 32-bit numbers into `out`, replacing its contents.
    pub(crate) fn tokens(&mut self, max: usize, out: &mut Vec<u32>) -> Result<(), ValueError> {
        let len = self.array("token_ids", max)?;
        out.clear();
        self.pos = tokens::read(self.buf, self.pos, len, out);
        // The rest is close to the end of the buffer or not such a number. Reading it one by one
        // yields an error with its offset.
        while out.len() < len {
            out.push(self.number("token id")?);
        }
        Ok(())
    }
}

fn bounded(what: &'static str, len: usize, max: usize) -> Result<(), ValueError> {
    if len > max {
        return Err(ValueError::TooLong { what, len, max });
    }
    Ok(())
}

fn kind(marker: u8) -> &'static str {
    match marker {
        0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xd3 => "an integer",
        0x80..=0x8f | 0xde | 0xdf => "a map",
        0x90..=0x9f | 0xdc | 0xdd => "an array",
        0xa0..=0xbf | 0xd9..=0xdb => "a string",
        0xc0 => "nil",
        0xc1 => "an unused marker",
        0xc2 | 0xc3 => "a boolean",
        0xc4..=0xc6 => "a byte string",
        0xc7..=0xc9 | 0xd4..=0xd8 => "an extension value",
        0xca | 0xcb => "a float",
    }
}

/// Appends MessagePack values to a buffer, each in its shortest encoding, as msgspec does.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    out: Vec<u8>,
}

impl Writer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.out
    }

    pub(crate) fn nil(&mut self) {
        self.out.push(0xc0);
    }

    pub(crate) fn bool(&mut self, value: bool) {
        self.out.push(if value { 0xc3 } else { 0xc2 });
    }

    pub(crate) fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.out.push(value as u8),
            0x80..=0xff => self.marked(0xcc, &[value as u8]),
            0x100..=0xffff => self.marked(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.marked(0xce, &(value as u32).to_be_bytes()),
            _ => self.marked(0xcf, &value.to_be_bytes()),
        }
    }

    pub(crate) fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.uint(value),
            Err(_) if value >= -32 => self.out.push(value as u8),
            Err(_) => self.marked(0xd3, &value.to_be_bytes()),
        }
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.marked(0xcb, &value.to_bits().to_be_bytes());
    }

    pub(crate) fn str(&mut self, value: &str) {
        match value.len() {
            len @ 0..=31 => self.out.push(0xa0 | len as u8),
            len @ 32..=0xff => self.marked(0xd9, &[len as u8]),
            len @ 0x100..=0xffff => self.marked(0xda, &(len as u16).to_be_bytes()),
            len => self.marked(0xdb, &(len as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(value.as_bytes());
    }

    pub(crate) fn bin(&mut self, value: &[u8]) {
        match value.len() {
            len @ 0..=0xff => self.marked(0xc4, &[len as u8]),
            len @ 0x100..=0xffff => self.marked(0xc5, &(len as u16).to_be_bytes()),
            len => self.marked(0xc6, &(len as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(value);
    }

    pub(crate) fn ext(&mut self, code: i8, value: &[u8]) {
        match value.len() {
            len @ 0..=0xff => self.marked(0xc7, &[len as u8]),
            len @ 0x100..=0xffff => self.marked(0xc8, &(len as u16).to_be_bytes()),
            len => self.marked(0xc9, &(len as u32).to_be_bytes()),
        }
        self.out.push(code as u8);
        self.out.extend_from_slice(value);
    }

    pub(crate) fn array(&mut self, len: usize) {
        match len {
            0..=15 => self.out.push(0x90 | len as u8),
            16..=0xffff => self.marked(0xdc, &(len as u16).to_be_bytes()),
            _ => self.marked(0xdd, &(len as u32).to_be_bytes()),
        }
    }

    pub(crate) fn map(&mut self, len: usize) {
        match len {
            0..=15 => self.out.push(0x80 | len as u8),
            16..=0xffff => self.marked(0xde, &(len as u16).to_be_bytes()),
            _ => self.marked(0xdf, &(len as u32).to_be_bytes()),
        }
    }

    /// Appends a value that is encoded already.
    pub(crate) fn raw(&mut self, value: &[u8]) {
        self.out.extend_from_slice(value);
    }

    fn marked(&mut self, marker: u8, bytes: &[u8]) {
        self.out.push(marker);
        self.out.extend_from_slice(bytes);
    }
}

/// A value that has one encoding.
pub(crate) trait Encode {
    /// Appends the value.
    fn encode(&self, out: &mut Writer);
}

/// Returns the encoding of a value.
pub(crate) fn encoded(value: &(impl Encode + ?Sized)) -> Bytes {
    let mut out = Writer::new();
    value.encode(&mut out);
    out.into_bytes().into()
}

/// A byte string.
pub(crate) struct Bin<'a>(pub(crate) &'a [u8]);

/// A map with these keys.
pub(crate) struct Record<'a>(pub(crate) &'a [(&'a str, &'a dyn Encode)]);

macro_rules! encode {
    ($($ty:ty: $write:expr;)+) => {$(
        impl Encode for $ty {
            fn encode(&self, out: &mut Writer) {
                let write: fn(&Self, &mut Writer) = $write;
                write(self, out);
            }
        }
    )+};
}

encode! {
    bool: |value, out| out.bool(*value);
    u32: |value, out| out.uint(u64::from(*value));
    u64: |value, out| out.uint(*value);
    i64: |value, out| out.int(*value);
    f64: |value, out| out.float(*value);
    &str: |value, out| out.str(value);
    String: |value, out| out.str(value);
    Bin<'_>: |value, out| out.bin(value.0);
}

/// Encodes a type as a map: `record!(Type, |value| "key": value.field, …)`.
macro_rules! record {
    ($ty:ty, |$value:ident| $($name:literal: $field:expr),+ $(,)?) => {
        impl Encode for $ty {
            fn encode(&self, out: &mut Writer) {
                let $value = self;
                let fields: &[(&str, &dyn Encode)] = &[$(($name, &$field)),+];
                Record(fields).encode(out);
            }
        }
    };
}
pub(crate) use record;

impl Encode for Record<'_> {
    fn encode(&self, out: &mut Writer) {
        out.map(self.0.len());
        for (name, value) in self.0 {
            out.str(name);
            value.encode(out);
        }
    }
}

impl<T: Encode> Encode for Option<T> {
    fn encode(&self, out: &mut Writer) {
        match self {
            None => out.nil(),
            Some(value) => value.encode(out),
        }
    }
}

impl<T: Encode> Encode for Vec<T> {
    fn encode(&self, out: &mut Writer) {
        out.array(self.len());
        self.iter().for_each(|value| value.encode(out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lmc_testkit::rounds;
    use proptest::prelude::*;

    fn tokens(bytes: &[u8]) -> Result<Vec<u32>, ValueError> {
        let mut reader = Reader::new(bytes);
        let mut out = Vec::new();
        reader.tokens(1 << 20, &mut out)?;
        reader.finish()?;
        Ok(out)
    }

    #[test]
    fn numbers_at_every_width_survive_the_round_trip() {
        for value in [
            0,
            1,
            127,
            128,
            255,
            256,
            65_535,
            65_536,
            u64::from(u32::MAX),
            u64::MAX,
        ] {
            let bytes = encoded(&value);
            assert_eq!(Reader::new(&bytes).int(), Ok(i128::from(value)));
        }
        assert_eq!(Reader::new(&[0xff]).int(), Ok(-1));
        assert_eq!(Reader::new(&[0xd1, 0xff, 0x00]).int(), Ok(-256));
        assert_eq!(Reader::new(&[0xc3]).int(), Ok(1));
    }

    #[test]
    fn a_giant_length_is_refused_before_anything_is_allocated() {
        let claim = [0xdd, 0xff, 0xff, 0xff, 0xff];
        assert!(matches!(tokens(&claim), Err(ValueError::TooLong { .. })));
        let claim = [0xdd, 0x00, 0x0f, 0xff, 0xff, 1, 2, 3];
        assert!(matches!(tokens(&claim), Err(ValueError::Truncated { .. })));
    }

    #[test]
    fn deep_nesting_is_refused() {
        let deep = vec![0x91; 100_000];
        assert_eq!(Reader::new(&deep).skip(), Err(ValueError::TooDeep));
    }

    #[test]
    fn a_token_that_is_negative_or_too_large_is_refused() {
        assert!(matches!(
            tokens(&[0x91, 0xff]),
            Err(ValueError::Range { .. })
        ));
        let large = [0x91, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0];
        assert!(matches!(tokens(&large), Err(ValueError::Range { .. })));
        assert!(matches!(
            tokens(&[0x91, 0xa1, b'x']),
            Err(ValueError::Type { .. })
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(rounds(120, 256) as u32))]

        #[test]
        fn token_lists_survive_the_round_trip(list in prop::collection::vec(
            prop_oneof![0u32..200, 100u32..70_000, any::<u32>()], 0..600)) {
            prop_assert_eq!(tokens(&encoded(&list)), Ok(list));
        }

        #[test]
        fn long_token_lists_survive_the_round_trip(
            seed: u64, len in 2000usize..6000, wide in 0u64..4, tail in 0usize..40) {
            // Ids of one width or of all, so that number boundaries are hard to guess.
            let mut state = seed | 1;
            let list: Vec<u32> = (0..len).map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let kind = if wide == 3 { state >> 60 & 3 } else { wide };
                match kind {
                    0 => (state >> 20) as u32 & 0x7f,
                    1 => 0xcdce_cdce & ((state >> 20) as u32 | 0xffff),
                    _ => (state >> 20) as u32,
                }
            }).collect();
            let mut bytes = encoded(&list).to_vec();
            let array = bytes.len();
            for _ in 0..tail {
                bytes.extend_from_slice(&encoded(&0xcdcd_u32));
            }
            let mut reader = Reader::new(&bytes);
            let mut out = Vec::new();
            prop_assert_eq!(reader.tokens(1 << 20, &mut out), Ok(()));
            prop_assert_eq!(out, list);
            prop_assert_eq!(reader.pos, array);
        }

        #[test]
        fn no_input_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Reader::new(&bytes).skip();
            let _ = tokens(&bytes);
        }

        #[test]
        fn no_long_array_panics(
            seed: u64, count in 2048usize..6000, len in 2048u16..4096) {
            let mut array = vec![0xdc];
            array.extend_from_slice(&len.to_be_bytes());
            // Small numbers, heads of wide ones, and anything.
            let mut state = seed | 1;
            array.extend((0..count).map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let byte = (state >> 20) as u8;
                match (state >> 40) % 3 {
                    0 => byte & 0x7f,
                    1 => 0xcb + byte % 5,
                    _ => byte,
                }
            }));
            let _ = tokens(&array);
        }
    }
}
