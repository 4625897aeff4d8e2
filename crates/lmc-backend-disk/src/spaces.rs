//! Record of the settings that the chunks of a drive were stored under.
//!
//! A space id is a digest, so it does not show the chunk size or hash algorithm in it. A server has the same
//! values of these settings as long as it runs, so the spaces that are new on a drive during the run have
//! these values. The file `spaces` has the settings of the present run, and of each space that existed when
//! the run began. It is written once at each start, so stores do not pay for it.

use std::collections::HashMap;

use lmc_key::SpaceId;

use crate::format::{
    BLOCK_LEN, FormatError, Head, Reader, VERSION, Writer, check_head, put_sum, sum_is_right,
};
use crate::index::IndexSpace;

/// Name of the file.
pub(crate) const SPACES_NAME: &str = "spaces";

const MAGIC: [u8; 8] = *b"LMCSPACE";
/// Offset of the checksum in the file.
const SUM_AT: usize = 40;
const HEAD: usize = 64;
const TEXT: usize = 256;
const SPACE: usize = 32;

/// Chunks of one space on a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpaceUsage {
    /// The space.
    pub space: SpaceId,
    /// Settings under which the chunks were stored, as named by the server; none if the process that stored
    /// them named none.
    pub settings: Option<String>,
    /// Number of chunks.
    pub chunks: u64,
    /// Payload bytes of these chunks.
    pub bytes: u64,
}

/// Chunks that cannot be hit with the present settings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unreachable {
    /// Settings under which the chunks were stored.
    pub settings: String,
    /// Number of chunks.
    pub chunks: u64,
    /// Payload bytes of these chunks.
    pub bytes: u64,
}

/// A segment that had chunks of other settings when its drive was opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnreachableSegment {
    /// Index of the drive.
    pub(crate) drive: usize,
    pub(crate) segment: u32,
    /// Generation of the segment's use.
    pub(crate) generation: u64,
}

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpacesRecord {
    pub(crate) drive_id: [u8; 16],
    /// Settings of the run that wrote the file.
    pub(crate) current: String,
    /// Newest generation of a segment with chunks at that time. Chunks of later generations belong to that
    /// run.
    pub(crate) generation: u64,
    /// Settings of each space that existed at that time; empty if unknown.
    pub(crate) of_space: Vec<(SpaceId, String)>,
}

impl SpacesRecord {
    /// Returns the record as whole blocks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut texts = vec![self.current.as_str()];
        let mut spaces = Vec::new();
        for (space, text) in &self.of_space {
            let known = texts.iter().position(|known| known == text);
            let number = known.unwrap_or_else(|| {
                texts.push(text);
                texts.len() - 1
            });
            spaces.push((space, number as u32));
        }
        let len = HEAD + texts.len() * TEXT + spaces.len() * SPACE;
        let mut out = vec![0; len.next_multiple_of(BLOCK_LEN)];
        let mut w = Writer::new(&mut out);
        w.put(&MAGIC);
        w.u32(VERSION);
        w.u32(texts.len() as u32);
        w.put(&self.drive_id);
        w.u64(spaces.len() as u64);
        w.u64(0);
        w.u64(self.generation);
        for (number, text) in texts.iter().enumerate() {
            let text = text.as_bytes();
            let mut w = Writer::new(&mut out[HEAD + number * TEXT..]);
            w.u32(text.len() as u32);
            w.put(text);
        }
        let at = HEAD + texts.len() * TEXT;
        for (number, (space, text)) in spaces.into_iter().enumerate() {
            let mut w = Writer::new(&mut out[at + number * SPACE..]);
            w.put(space.as_bytes());
            w.u32(text);
        }
        put_sum(&mut out, SUM_AT);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let what = "record of spaces";
        if bytes.len() < BLOCK_LEN {
            return Err(FormatError::Magic { what });
        }
        let head = Head { magic: MAGIC, what };
        check_head(bytes, head, || sum_is_right(bytes, SUM_AT))?;
        let mut r = Reader::new(&bytes[12..]);
        let texts = r.u32() as usize;
        let drive_id = r.array();
        let spaces = r.u64() as usize;
        r.u64();
        let generation = r.u64();
        let impossible = || FormatError::Field {
            what,
            field: "number of settings or spaces",
        };
        let at = texts
            .checked_mul(TEXT)
            .and_then(|len| len.checked_add(HEAD));
        let len = spaces.checked_mul(SPACE);
        let end = at.zip(len).and_then(|(at, len)| at.checked_add(len));
        if texts == 0 || end.is_none_or(|end| end > bytes.len()) {
            return Err(impossible());
        }
        let (texts, rest) = bytes[HEAD..].split_at(texts * TEXT);
        let text = |bytes: &[u8]| {
            let len = (Reader::new(bytes).u32() as usize).min(TEXT - 4);
            String::from_utf8_lossy(&bytes[4..4 + len]).into_owned()
        };
        let texts: Vec<String> = texts.chunks_exact(TEXT).map(text).collect();
        let mut of_space = Vec::new();
        for bytes in rest.chunks_exact(SPACE).take(spaces) {
            let mut r = Reader::new(bytes);
            let space = SpaceId::new(r.array());
            let text = texts.get(r.u32() as usize).ok_or_else(impossible)?;
            of_space.push((space, text.clone()));
        }
        Ok(Self {
            drive_id,
            current: texts[0].clone(),
            generation,
            of_space,
        })
    }

    /// Returns the settings of a space, according to this record and the run that wrote it.
    fn settings_of(&self, space: SpaceId, has: &IndexSpace) -> &str {
        let known = self.of_space.iter().find(|(known, _)| *known == space);
        match known {
            Some((_, text)) if !text.is_empty() || has.generation <= self.generation => text,
            _ => &self.current,
        }
    }
}

/// Truncates a text to the length that a record can hold.
pub(crate) fn cut(text: &str) -> String {
    let fits = |&end: &usize| end <= TEXT - 4 && text.is_char_boundary(end);
    let end = (0..=text.len()).rev().find(fits).unwrap_or(0);
    text[..end].to_owned()
}

/// Returns the chunks and bytes of each space with its settings, the largest first. `before` is the record on
/// the drive.
pub(crate) fn attribute(
    before: Option<&SpacesRecord>,
    usage: &HashMap<SpaceId, IndexSpace>,
) -> Vec<SpaceUsage> {
    let settings_of = |space, has| match before.map_or("", |before| before.settings_of(space, has))
    {
        "" => None,
        text => Some(text.to_owned()),
    };
    let usage = usage.iter().map(|(&space, has)| SpaceUsage {
        space,
        settings: settings_of(space, has),
        chunks: has.chunks,
        bytes: has.bytes,
    });
    let mut spaces: Vec<SpaceUsage> = usage.collect();
    spaces.sort_by_key(|usage| (std::cmp::Reverse(usage.bytes), usage.space));
    spaces
}

/// Returns true if a space was stored under other settings than the present ones.
pub(crate) fn is_unreachable(usage: &SpaceUsage, current: &str) -> bool {
    let settings = usage.settings.as_deref();
    settings.is_some_and(|settings| settings != current)
}

/// Sums up the chunks that cannot be hit with the present settings, the largest sum first.
pub(crate) fn unreachable<'a>(
    spaces: impl IntoIterator<Item = &'a SpaceUsage>,
    current: &str,
) -> Vec<Unreachable> {
    let mut sums: HashMap<&str, (u64, u64)> = HashMap::new();
    for usage in spaces {
        match usage.settings.as_deref() {
            Some(settings) if is_unreachable(usage, current) => {
                let sum = sums.entry(settings).or_default();
                *sum = (sum.0 + usage.chunks, sum.1 + usage.bytes);
            }
            _ => {}
        }
    }
    let sum = |(settings, (chunks, bytes)): (&str, _)| Unreachable {
        settings: settings.to_owned(),
        chunks,
        bytes,
    };
    let mut sums: Vec<Unreachable> = sums.into_iter().map(sum).collect();
    sums.sort_by(|a, b| (b.bytes, &a.settings).cmp(&(a.bytes, &b.settings)));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(number: u8) -> SpaceId {
        SpaceId::new([number; 16])
    }

    #[test]
    fn a_record_comes_back_and_damage_does_not() {
        let spaces = (0..200).map(|number| {
            let text = ["", "b", "current"][number as usize % 3];
            (space(number), text.to_owned())
        });
        let right = SpacesRecord {
            drive_id: [7; 16],
            current: "current".to_owned(),
            generation: 12,
            of_space: spaces.collect(),
        };
        let bytes = right.encode();
        assert_eq!(SpacesRecord::decode(&bytes), Ok(right));
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            SpacesRecord::decode(&bytes).expect_err("damage");
        }
        let long = "ä".repeat(200);
        assert_eq!(cut(&long).len(), 252);
        let record = SpacesRecord {
            current: cut(&long),
            ..SpacesRecord::default()
        };
        assert_eq!(SpacesRecord::decode(&record.encode()), Ok(record));
    }

    #[test]
    fn spaces_that_came_during_a_run_are_of_its_settings() {
        let before = SpacesRecord {
            drive_id: [0; 16],
            current: "second".to_owned(),
            generation: 5,
            of_space: vec![
                (space(1), "first".to_owned()),
                (space(2), String::new()),
                (space(4), String::new()),
            ],
        };
        let has = |chunks, bytes, generation| IndexSpace {
            chunks,
            bytes,
            generation,
        };
        let usage = HashMap::from([
            (space(1), has(1, 100, 6)),
            (space(2), has(2, 300, 5)),
            (space(3), has(3, 200, 5)),
            (space(4), has(1, 50, 6)),
        ]);
        let spaces = attribute(Some(&before), &usage);
        let settings: Vec<_> = spaces.iter().map(|s| s.settings.as_deref()).collect();
        assert_eq!(
            settings,
            [None, Some("second"), Some("first"), Some("second")]
        );
        let sums = unreachable(&spaces, "second");
        let first = Unreachable {
            settings: "first".to_owned(),
            chunks: 1,
            bytes: 100,
        };
        assert_eq!(sums, [first]);
        assert_eq!(unreachable(&spaces, "third").len(), 2);
        let unknown = attribute(None, &usage);
        assert!(unreachable(&unknown, "third").is_empty());
    }
}
