//! Frames of a stream, as bytes. No IO.
//!
//! A frame is 12 bytes of prefix (u32 length of the header, u64 XXH3 of it, little endian), the
//! header (a [`Frame`] as postcard), and for [`Frame::Data`], [`Frame::Write`] and a
//! [`Frame::Offer`] that carries its objects the payload: for each segment or object in order its
//! pieces of at most [`PIECE`] bytes, each after a [`PieceHead`].

use lmc_memory::checksum;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::MAX_BATCH;

/// Bytes of a header at most. Offers of [`MAX_BATCH`] objects fit, with offsets below 2⁴⁹.
pub(super) const MAX_HEADER: usize = 1 << 20;
/// Segments of one read or write at most.
pub(super) const MAX_SEGMENTS: usize = 4096;
/// Bytes under one checksum: few enough to be still in a core's cache after the kernel's copy.
pub(super) const PIECE: u64 = 256 << 10;
/// Bytes that go along with an offer at most.
pub(super) const MAX_CARRIED: u64 = 64 << 10;
/// Objects that go along with an offer at most.
const MAX_CARRIED_OBJECTS: usize = 64;
/// Bytes of a reason at most.
const MAX_REASON: usize = 1024;

const PREFIX: usize = 12;

/// A range of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Segment {
    /// Bytes from the arena's start.
    pub(super) offset: u64,
    /// Bytes; never 0.
    pub(super) len: u64,
}

/// The parts of segments that have a checksum each, with the number of the segment.
#[derive(Debug, Clone)]
pub(super) struct Pieces<'a> {
    segments: &'a [Segment],
    number: u32,
    /// Bytes of the first segment that were given out.
    done: u64,
}

impl<'a> Pieces<'a> {
    pub(super) fn of(segments: &'a [Segment]) -> Self {
        Self {
            segments,
            number: 0,
            done: 0,
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = (u32, Segment);

    fn next(&mut self) -> Option<Self::Item> {
        let (segment, rest) = self.segments.split_first()?;
        let piece = Segment {
            offset: segment.offset + self.done,
            len: (segment.len - self.done).min(PIECE),
        };
        let number = self.number;
        self.done += piece.len;
        if self.done == segment.len {
            (self.segments, self.done) = (rest, 0);
            self.number += 1;
        }
        Some((number, piece))
    }
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    /// All bytes are in place.
    Done,
    /// The segment (of a write) or object (of an offer) arrived with a wrong checksum.
    Corrupt(u32),
    /// The object of an offer does not go into the slot of its place.
    Length { place: u32, sent: u64, room: u64 },
    /// The one who sent it broke it off.
    Aborted,
    /// The offer that was to be read is no longer there.
    Withdrawn,
    /// Why not.
    Refused(String),
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// Says that this side is there.
    Ping,
    /// Asks for ranges of the other's arena; those of an offer while that stands.
    Read {
        id: u64,
        offer: Option<u64>,
        segments: Vec<Segment>,
    },
    /// Answers a read; the payload has its segments.
    Data { id: u64 },
    /// Writes into the other's arena; the payload has the segments.
    Write { id: u64, segments: Vec<Segment> },
    /// Answers a write, or a read that brings no data.
    Answer { id: u64, outcome: Outcome },
    /// Objects to be received under a tag.
    Offer {
        id: u64,
        tag: u64,
        objects: Vec<Segment>,
        /// Whether they are the payload. They may be read all the same.
        carried: bool,
    },
    /// The offer stands no longer. Where its objects went along and it was not received, it is
    /// finished now, as withdrawn.
    Withdraw { id: u64 },
    /// The offer was received: leading objects that are in place, and why not all.
    Finish {
        id: u64,
        done: u64,
        outcome: Outcome,
    },
}

/// Bytes that are no frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum FrameError {
    #[error("a header of {0} bytes")]
    Length(usize),
    #[error("a header with a wrong checksum")]
    Checksum,
    #[error("a header that cannot be parsed")]
    Parse,
    #[error("{0} segments or objects")]
    Count(usize),
    #[error("more than may go along with an offer")]
    Carried,
    #[error("a segment without bytes, or beyond the end of numbers")]
    Segment,
    #[error("a reason of {0} bytes")]
    Reason(usize),
}

impl Frame {
    /// Prefix and header.
    pub(super) fn encode(&self) -> Vec<u8> {
        let header = postcard::to_extend(self, vec![0; PREFIX]);
        let mut bytes = header.expect("a vector takes any number of bytes");
        let (prefix, header) = bytes.split_at_mut(PREFIX);
        debug_assert!(header.len() <= MAX_HEADER);
        prefix[..4].copy_from_slice(&(header.len() as u32).to_le_bytes());
        prefix[4..].copy_from_slice(&checksum(header).to_le_bytes());
        bytes
    }

    fn parse(header: &[u8]) -> Result<Self, FrameError> {
        let parsed: Result<(Self, &[u8]), _> = postcard::take_from_bytes(header);
        let Ok((frame, [])) = parsed else {
            return Err(FrameError::Parse);
        };
        match &frame {
            Self::Read { segments, .. } | Self::Write { segments, .. } => {
                check(segments, MAX_SEGMENTS)?;
            }
            Self::Offer {
                objects, carried, ..
            } => {
                check(objects, MAX_BATCH)?;
                if *carried && !may_be_carried(objects) {
                    return Err(FrameError::Carried);
                }
            }
            Self::Answer { outcome, .. } | Self::Finish { outcome, .. } => match outcome {
                Outcome::Refused(why) if why.len() > MAX_REASON => {
                    return Err(FrameError::Reason(why.len()));
                }
                _ => {}
            },
            Self::Ping | Self::Data { .. } | Self::Withdraw { .. } => {}
        }
        Ok(frame)
    }
}

/// Whether the bytes of these objects may go along with their offer.
pub(super) fn may_be_carried(objects: &[Segment]) -> bool {
    let lens = objects.iter().map(|object| object.len);
    let total = lens.fold(0, u64::saturating_add);
    objects.len() <= MAX_CARRIED_OBJECTS && total <= MAX_CARRIED
}

fn check(segments: &[Segment], most: usize) -> Result<(), FrameError> {
    if segments.is_empty() || segments.len() > most {
        return Err(FrameError::Count(segments.len()));
    }
    let sound = |s: &Segment| s.len > 0 && s.offset.checked_add(s.len).is_some();
    match segments.iter().all(sound) {
        true => Ok(()),
        false => Err(FrameError::Segment),
    }
}

/// Takes frames out of a stream, without their payloads. After an error it is of no more use.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    /// What there is of the current prefix and header.
    buffer: Vec<u8>,
}

impl Decoder {
    /// Takes bytes from the input: up to the end of a frame's header, and then gives that frame,
    /// or all of them. What is left of the input is the payload and what follows it.
    pub(super) fn feed(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, FrameError> {
        if !self.fill(input, PREFIX) {
            return Ok(None);
        }
        let (len, sum) = self.buffer[..PREFIX].split_at(4);
        let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
        let sum = u64::from_le_bytes(sum.try_into().expect("eight bytes"));
        if len == 0 || len > MAX_HEADER {
            return Err(FrameError::Length(len));
        }
        if !self.fill(input, PREFIX + len) {
            return Ok(None);
        }
        let header = &self.buffer[PREFIX..];
        if checksum(header) != sum {
            return Err(FrameError::Checksum);
        }
        let frame = Frame::parse(header)?;
        self.buffer.clear();
        Ok(Some(frame))
    }

    /// Moves bytes over until the buffer has so many; whether it has.
    fn fill(&mut self, input: &mut &[u8], len: usize) -> bool {
        let missing = len.saturating_sub(self.buffer.len());
        let (now, rest) = input.split_at(missing.min(input.len()));
        self.buffer.extend_from_slice(now);
        *input = rest;
        self.buffer.len() >= len
    }
}

/// What stands before each piece of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceHead {
    /// Bytes of the piece; 0 when the sender breaks the payload off here.
    pub(super) len: u32,
    /// XXH3 of the piece.
    pub(super) sum: u64,
}

impl PieceHead {
    /// Bytes of a head.
    pub(super) const LEN: usize = 12;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&self.len.to_le_bytes());
        bytes[4..].copy_from_slice(&self.sum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; Self::LEN]) -> Self {
        let (len, sum) = bytes.split_at(4);
        Self {
            len: u32::from_le_bytes(len.try_into().expect("four bytes")),
            sum: u64::from_le_bytes(sum.try_into().expect("eight bytes")),
        }
    }
}

/// A reason that fits into a frame.
pub(super) fn reason(text: &str) -> String {
    text.chars().take(MAX_REASON / 4).collect()
}

/// What the fuzz target does: any bytes, in pieces whose size comes from the input. What decodes
/// must survive the round trip.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let [step, rest @ ..] = data else { return };
    let mut decoder = Decoder::default();
    for mut piece in rest.chunks(usize::from(*step) + 1) {
        while !piece.is_empty() {
            match decoder.feed(&mut piece) {
                Ok(None) => assert!(piece.is_empty(), "bytes are left without a frame"),
                Ok(Some(frame)) => {
                    let bytes = frame.encode();
                    let again = Decoder::default().feed(&mut &bytes[..]);
                    assert_eq!(again, Ok(Some(frame)));
                }
                Err(_) => return,
            }
            assert!(decoder.buffer.len() <= PREFIX + MAX_HEADER);
        }
    }
    // The same bytes as a header with a right checksum, so that the parser is reached.
    let mut framed = (rest.len() as u32).to_le_bytes().to_vec();
    framed.extend_from_slice(&checksum(rest).to_le_bytes());
    framed.extend_from_slice(rest);
    if let Ok(Some(frame)) = Decoder::default().feed(&mut &framed[..]) {
        let bytes = frame.encode();
        let again = Decoder::default().feed(&mut &bytes[..]);
        assert_eq!(again, Ok(Some(frame)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segments() -> impl Strategy<Value = Vec<Segment>> {
        let segment = (0..1u64 << 49, 1..1u64 << 32);
        let segment = segment.prop_map(|(offset, len)| Segment { offset, len });
        prop::collection::vec(segment, 1..40)
    }

    fn small_objects() -> impl Strategy<Value = Vec<Segment>> {
        let segment = (0..1u64 << 49, 1..5000u64);
        let segment = segment.prop_map(|(offset, len)| Segment { offset, len });
        prop::collection::vec(segment, 1..70)
    }

    fn outcome() -> impl Strategy<Value = Outcome> {
        prop_oneof![
            Just(Outcome::Done),
            any::<u32>().prop_map(Outcome::Corrupt),
            any::<(u32, u64, u64)>().prop_map(|(place, sent, room)| Outcome::Length {
                place,
                sent,
                room
            }),
            Just(Outcome::Aborted),
            Just(Outcome::Withdrawn),
            ".{0,200}".prop_map(Outcome::Refused),
        ]
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let id = any::<u64>;
        prop_oneof![
            Just(Frame::Ping),
            (id(), any::<Option<u64>>(), segments()).prop_map(|(id, offer, segments)| {
                Frame::Read {
                    id,
                    offer,
                    segments,
                }
            }),
            id().prop_map(|id| Frame::Data { id }),
            (id(), segments()).prop_map(|(id, segments)| Frame::Write { id, segments }),
            (id(), outcome()).prop_map(|(id, outcome)| Frame::Answer { id, outcome }),
            (id(), id(), segments()).prop_map(|(id, tag, objects)| Frame::Offer {
                id,
                tag,
                carried: may_be_carried(&objects),
                objects,
            }),
            (id(), id(), small_objects()).prop_map(|(id, tag, objects)| Frame::Offer {
                id,
                tag,
                carried: may_be_carried(&objects),
                objects,
            }),
            id().prop_map(|id| Frame::Withdraw { id }),
            (id(), id(), outcome()).prop_map(|(id, done, outcome)| Frame::Finish {
                id,
                done,
                outcome
            }),
        ]
    }

    /// With `LMC_WRITE_SEEDS=1` it writes those of the fuzz target anew.
    #[test]
    fn the_seeds_of_the_fuzz_target_are_valid_frames() {
        let segments = vec![Segment {
            offset: 4096,
            len: 1 << 20,
        }];
        let (id, objects) = (7, segments.clone());
        let outcome = Outcome::Refused("no".to_owned());
        let frames = [
            Frame::Ping,
            Frame::Read {
                id,
                offer: Some(9),
                segments: segments.clone(),
            },
            Frame::Data { id },
            Frame::Write { id, segments },
            Frame::Answer {
                id,
                outcome: outcome.clone(),
            },
            Frame::Offer {
                id,
                tag: 3,
                objects,
                carried: false,
            },
            Frame::Withdraw { id },
            Frame::Finish {
                id,
                done: 1,
                outcome,
            },
            Frame::Offer {
                id,
                tag: 3,
                objects: vec![Segment {
                    offset: 4096,
                    len: 100,
                }],
                carried: true,
            },
        ];
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = folder.join("../../fuzz/seeds/transfer");
        let write = std::env::var_os("LMC_WRITE_SEEDS").is_some();
        for (number, frame) in frames.into_iter().enumerate() {
            // One step of up to 256 bytes, and the frame.
            let seed = [&[255][..], &frame.encode()].concat();
            let path = folder.join(format!("frame-{number}"));
            if write {
                std::fs::create_dir_all(&folder).expect("a folder");
                std::fs::write(&path, &seed).expect("a seed");
            }
            assert_eq!(std::fs::read(&path).expect("a seed"), seed, "{frame:?}");
            fuzz(&seed);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn frames_come_out_as_they_went_in_however_they_are_cut(
            frames in prop::collection::vec(frame(), 1..6), step in 1usize..64
        ) {
            let stream: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for mut piece in stream.chunks(step) {
                while !piece.is_empty() {
                    found.extend(decoder.feed(&mut piece).expect("valid frames"));
                }
            }
            prop_assert_eq!(found, frames);
        }

        #[test]
        fn a_changed_byte_never_passes(
            frame in frame(), place in any::<prop::sample::Index>(), flip in 1u8..
        ) {
            let mut bytes = frame.encode();
            let place = place.index(bytes.len());
            bytes[place] ^= flip;
            let decoded = Decoder::default().feed(&mut &bytes[..]);
            prop_assert!(!matches!(decoded, Ok(Some(_))), "{:?}", decoded);
        }

        #[test]
        fn any_bytes_are_survived(data in prop::collection::vec(any::<u8>(), 0..300)) {
            fuzz(&data);
        }

        #[test]
        fn changed_headers_with_right_sums_are_survived(
            frame in frame(), place in any::<prop::sample::Index>(), flip in any::<u8>()
        ) {
            let mut bytes = frame.encode();
            bytes[PREFIX - 1] = 7;
            let place = PREFIX + place.index(bytes.len() - PREFIX);
            bytes[place] ^= flip;
            fuzz(&bytes[PREFIX - 1..]);
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let whole = |len: u64| Segment { offset: 0, len };
        let check = |frame: Frame, error: FrameError| {
            let bytes = frame.encode();
            assert_eq!(Decoder::default().feed(&mut &bytes[..]), Err(error));
        };
        let write = |segments| Frame::Write { id: 1, segments };
        check(write(vec![]), FrameError::Count(0));
        check(write(vec![whole(1); 4097]), FrameError::Count(4097));
        check(write(vec![whole(0)]), FrameError::Segment);
        let beyond = Segment {
            offset: 2,
            len: u64::MAX - 1,
        };
        check(write(vec![beyond]), FrameError::Segment);
        let long = Outcome::Refused("x".repeat(1025));
        check(
            Frame::Answer {
                id: 1,
                outcome: long,
            },
            FrameError::Reason(1025),
        );
        for (count, len) in [(1, MAX_CARRIED + 1), (65, 1), (2, u64::MAX)] {
            let objects = vec![Segment { offset: 0, len }; count];
            let carries = Frame::Offer {
                id: 1,
                tag: 1,
                objects,
                carried: true,
            };
            check(carries, FrameError::Carried);
        }
        for len in [0, MAX_HEADER as u32 + 1, u32::MAX] {
            let mut bytes = [0u8; PREFIX];
            bytes[..4].copy_from_slice(&len.to_le_bytes());
            let error = FrameError::Length(len as usize);
            assert_eq!(Decoder::default().feed(&mut &bytes[..]), Err(error));
        }
        // The largest batch, with the largest numbers that memory has.
        let object = Segment {
            offset: (1 << 47) - 1,
            len: (1 << 47) - 1,
        };
        let offer = Frame::Offer {
            id: u64::MAX,
            tag: u64::MAX,
            objects: vec![object; MAX_BATCH],
            carried: false,
        };
        let bytes = offer.encode();
        assert_eq!(
            Decoder::default().feed(&mut &bytes[..]),
            Ok(Some(offer)),
            "{} bytes",
            bytes.len()
        );
    }

    #[test]
    fn pieces_cover_a_segment() {
        let segment = |offset, len| Segment { offset, len };
        let segments = [segment(5, 2 * PIECE + 1), segment(9, PIECE), segment(0, 1)];
        let wanted = [
            (0, segment(5, PIECE)),
            (0, segment(5 + PIECE, PIECE)),
            (0, segment(5 + 2 * PIECE, 1)),
            (1, segment(9, PIECE)),
            (2, segment(0, 1)),
        ];
        assert!(Pieces::of(&segments).eq(wanted));
    }
}
