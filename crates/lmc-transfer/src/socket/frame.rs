//! Frames of a stream, as bytes. No IO.
//!
//! A frame consists of the length of its header (u32, little endian) and the header: a [`Frame`] as
//! postcard, sealed. [`Frame::Data`], [`Frame::Write`] and an inlined [`Frame::Offer`] are followed
//! by a payload: for each range or object in order its pieces of at most [`PIECE`] bytes, each
//! after a [`PieceHead`]. Pieces are sealed where either side asks for it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(feature = "nixl")]
use super::announcement::Announcement;
use crate::lease::{Range, Segment};
use crate::session::{NoiseError, Opener, Sealer, sealed_len};
use crate::{MAX_BATCH, MAX_MESSAGE};

/// Bytes of a header at most. Offers of [`MAX_BATCH`] objects fit, with lengths below 2^49.
pub(super) const MAX_HEADER: usize = 512 << 10;
/// Ranges of one read or write at most.
pub(super) const MAX_RANGES: usize = 4096;
/// Bytes under one checksum: few enough to be in a core's cache still after the kernel's copy.
pub(super) const PIECE: u64 = 256 << 10;
/// Maximum bytes of the objects that are inlined in their offer.
pub(super) const MAX_INLINED: u64 = 64 << 10;
/// Maximum number of objects that are inlined in their offer.
const MAX_INLINED_OBJECTS: usize = 64;
/// Bytes of a reason at most.
const MAX_REASON: usize = 1024;

const PREFIX: usize = 4;

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

/// The outcome of a request, as a frame reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FrameOutcome {
    /// All bytes are in place.
    Done,
    /// The range (of a write) or object (of an offer) arrived with a wrong checksum.
    Corrupt(u32),
    /// The object of an offer does not fit the slot of its number.
    Length {
        object: u32,
        sent: u64,
        capacity: u64,
    },
    /// The sender aborted the payload.
    Aborted,
    /// The offer that was to be read was withdrawn.
    Withdrawn,
    /// The range is in no lease of the asking side.
    NotLeased(u32),
    /// The asking side may only read.
    ReadOnly,
    /// Any other reason.
    Refused(String),
    /// NIXL does not move these ranges: they are for the streams.
    NoPlane,
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// Asks for a [`Frame::Pong`] with the same number.
    Ping(u64),
    Pong(u64),
    /// Asks for ranges of the other side's memory.
    Read {
        id: u64,
        ranges: Vec<Range>,
    },
    /// Answers a read; the payload has its ranges.
    Data {
        id: u64,
    },
    /// Writes to ranges of the other side's memory; the payload has them.
    Write {
        id: u64,
        ranges: Vec<Range>,
    },
    /// Answers a write, or a read that brings no data.
    Answer {
        id: u64,
        outcome: FrameOutcome,
    },
    /// Objects of these lengths, to be received under a tag.
    Offer {
        id: u64,
        tag: u64,
        lens: Vec<u64>,
        /// True if the objects are the payload. They may be read all the same.
        inlined: bool,
    },
    /// Withdraws an offer. If it was inlined and not received, it is finished by this, as
    /// withdrawn.
    Withdraw {
        id: u64,
    },
    /// Ends an offer that was received: the number of leading objects in place, and the outcome.
    Finish {
        id: u64,
        done: u64,
        outcome: FrameOutcome,
    },
    /// Asks a question of the embedder.
    Ask {
        id: u64,
        question: Vec<u8>,
    },
    /// Answers a question; a refused question is answered by [`Frame::Answer`].
    Reply {
        id: u64,
        answer: Vec<u8>,
    },
    /// Describes the memory that the other side may write to, for NIXL.
    #[cfg(feature = "nixl")]
    Plane(Announcement),
    /// Asks the other side to write these ranges of its memory to the announced memory by NIXL, one
    /// after the other, starting at this offset. This side cancels after this number of
    /// milliseconds.
    #[cfg(feature = "nixl")]
    Fetch {
        id: u64,
        ranges: Vec<Range>,
        offset: u64,
        millis: u64,
    },
    /// Answers a fetch that is written in full, with the XXH3 of each range where objects carry
    /// checksums.
    #[cfg(feature = "nixl")]
    Moved {
        id: u64,
        sums: Vec<u64>,
    },
    /// Answers a fetch that is not written in full. Unless it is `idle`, some of it may still be
    /// written.
    #[cfg(feature = "nixl")]
    Unmoved {
        id: u64,
        idle: bool,
        reason: String,
    },
    /// Cancels a fetch.
    #[cfg(feature = "nixl")]
    Stop {
        id: u64,
    },
}

/// Bytes that are not a valid frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum FrameError {
    #[error("a header of {0} bytes")]
    Length(usize),
    #[error("a header that was changed in transit")]
    Seal(NoiseError),
    #[error("a header that cannot be parsed")]
    Parse,
    #[error("{0} ranges or objects in one frame")]
    Count(usize),
    #[error("an inlined offer of too many objects or bytes")]
    Inlined,
    #[error("a range that is empty or overflows")]
    Range,
    #[error("a reason of {0} bytes")]
    Reason(usize),
    #[cfg(feature = "nixl")]
    #[error("an invalid description of memory")]
    Memory,
}

impl Frame {
    /// The header's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let header = postcard::to_extend(self, Vec::new());
        let header = header.expect("a vector takes any number of bytes");
        debug_assert!(header.len() <= MAX_HEADER);
        header
    }

    pub(super) fn parse(header: &[u8]) -> Result<Self, FrameError> {
        let parsed: Result<(Self, &[u8]), _> = postcard::take_from_bytes(header);
        let Ok((frame, [])) = parsed else {
            return Err(FrameError::Parse);
        };
        match &frame {
            Self::Read { ranges, .. } | Self::Write { ranges, .. } => {
                check(ranges, MAX_RANGES, is_sound)?;
            }
            #[cfg(feature = "nixl")]
            Self::Fetch { ranges, .. } => check(ranges, MAX_RANGES, is_sound)?,
            #[cfg(feature = "nixl")]
            Self::Moved { sums, .. } if sums.len() > MAX_RANGES => {
                return Err(FrameError::Count(sums.len()));
            }
            #[cfg(feature = "nixl")]
            Self::Unmoved { reason, .. } if reason.len() > MAX_REASON => {
                return Err(FrameError::Reason(reason.len()));
            }
            #[cfg(feature = "nixl")]
            Self::Plane(announcement) if !announcement.is_sound() => {
                return Err(FrameError::Memory);
            }
            Self::Offer { lens, inlined, .. } => {
                check(lens, MAX_BATCH, |len| *len > 0)?;
                if *inlined && !may_be_inlined(lens) {
                    return Err(FrameError::Inlined);
                }
            }
            Self::Answer { outcome, .. } | Self::Finish { outcome, .. } => check_reason(outcome)?,
            Self::Ask { question: body, .. } | Self::Reply { answer: body, .. } => {
                if body.len() > MAX_MESSAGE {
                    return Err(FrameError::Length(body.len()));
                }
            }
            Self::Ping(_) | Self::Pong(_) | Self::Data { .. } | Self::Withdraw { .. } => {}
            #[cfg(feature = "nixl")]
            Self::Plane(_) | Self::Moved { .. } | Self::Unmoved { .. } | Self::Stop { .. } => {}
        }
        Ok(frame)
    }
}

/// Appends a sealed header to the bytes to be sent.
pub(super) fn seal_header(header: &[u8], sealer: &mut Sealer, out: &mut Vec<u8>) {
    out.extend_from_slice(&(header.len() as u32).to_le_bytes());
    sealer.seal(header, out);
}

/// Returns whether objects of these lengths may be inlined in their offer.
pub(super) fn may_be_inlined(lens: &[u64]) -> bool {
    let total = lens
        .iter()
        .fold(0, |sum: u64, len| sum.saturating_add(*len));
    lens.len() <= MAX_INLINED_OBJECTS && total <= MAX_INLINED
}

fn is_sound(range: &Range) -> bool {
    range.len > 0 && range.offset.checked_add(range.len).is_some()
}

fn check_reason(outcome: &FrameOutcome) -> Result<(), FrameError> {
    match outcome {
        FrameOutcome::Refused(why) if why.len() > MAX_REASON => Err(FrameError::Reason(why.len())),
        _ => Ok(()),
    }
}

fn check<T>(list: &[T], most: usize, sound: impl Fn(&T) -> bool) -> Result<(), FrameError> {
    if list.is_empty() || list.len() > most {
        return Err(FrameError::Count(list.len()));
    }
    match list.iter().all(sound) {
        true => Ok(()),
        false => Err(FrameError::Range),
    }
}

/// Takes frames out of a stream, without their payloads. It cannot be used after an error.
#[derive(Debug)]
pub(super) struct Decoder {
    opener: Opener,
    /// The current prefix and sealed header, as far as received.
    buffer: Vec<u8>,
    /// The last header.
    plain: Vec<u8>,
}

/// Capacity that a buffer keeps after a frame.
const KEPT: usize = 4 << 10;

impl Decoder {
    pub(super) fn new(opener: Opener) -> Self {
        Self {
            opener,
            buffer: Vec::new(),
            plain: Vec::new(),
        }
    }

    /// Takes bytes from the input. At the end of a frame's header, returns the frame, and leaves
    /// the payload and what follows in the input. Otherwise takes all of the input.
    pub(super) fn feed(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, FrameError> {
        if !self.fill(input, PREFIX) {
            return Ok(None);
        }
        let len = self.buffer[..PREFIX].try_into().expect("four bytes");
        let len = u32::from_le_bytes(len) as usize;
        if len == 0 || len > MAX_HEADER {
            return Err(FrameError::Length(len));
        }
        if !self.fill(input, PREFIX + sealed_len(len)) {
            return Ok(None);
        }
        self.plain.clear();
        let sealed = &self.buffer[PREFIX..];
        let opened = self.opener.open(sealed, &mut self.plain);
        opened.map_err(FrameError::Seal)?;
        let frame = Frame::parse(&self.plain)?;
        for buffer in [&mut self.buffer, &mut self.plain] {
            buffer.clear();
            buffer.shrink_to(KEPT);
        }
        Ok(Some(frame))
    }

    /// Opens a piece of a payload.
    pub(super) fn open(&mut self, sealed: &[u8], plain: &mut Vec<u8>) -> Result<(), NoiseError> {
        self.opener.open(sealed, plain)
    }

    /// Returns the bytes that the decoder holds.
    pub(super) fn held(&self) -> usize {
        self.buffer.capacity() + self.plain.capacity()
    }

    /// Moves bytes from the input until the buffer has `len`. Returns whether it has.
    fn fill(&mut self, input: &mut &[u8], len: usize) -> bool {
        let missing = len.saturating_sub(self.buffer.len());
        let (now, rest) = input.split_at(missing.min(input.len()));
        self.buffer.extend_from_slice(now);
        *input = rest;
        self.buffer.len() >= len
    }
}

/// The head of each piece of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceHead {
    /// Bytes of the piece; 0 when the sender breaks the payload off here.
    pub(super) len: u32,
    /// XXH3 of the piece; 0 where pieces are sealed.
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

/// Feeds any bytes to the decoder, in pieces whose size comes from the input, and parses them as a
/// header. What decodes must survive the round trip.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let [step, rest @ ..] = data else { return };
    let ((mut sealer, _), (_, opener)) = crate::session::pair();
    let mut decoder = Decoder::new(opener);
    let mut sealed = Vec::new();
    // As a sealed header, so that the parser is reached.
    if !rest.is_empty() && rest.len() <= MAX_HEADER {
        seal_header(rest, &mut sealer, &mut sealed);
    }
    sealed.extend_from_slice(rest);
    for mut piece in sealed.chunks(usize::from(*step) + 1) {
        while !piece.is_empty() {
            match decoder.feed(&mut piece) {
                Ok(None) => assert!(piece.is_empty(), "bytes are left without a frame"),
                Ok(Some(frame)) => assert_eq!(Frame::parse(&frame.encode()), Ok(frame)),
                Err(_) => return,
            }
            assert!(decoder.held() <= 3 * MAX_HEADER);
        }
    }
}

#[cfg(test)]
mod tests {
    use lmc_testkit::rounds;
    use proptest::prelude::*;

    use super::*;
    use crate::lease::Region;
    use crate::session::pair;

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let region = prop_oneof![
            Just(Region::Arena),
            any::<u64>().prop_map(Region::Lease),
            any::<u64>().prop_map(Region::Offer),
        ];
        let range = (region, any::<u64>(), 0..1u64 << 49, 1..1u64 << 32);
        let range = range.prop_map(|(region, slot, offset, len)| Range {
            region,
            slot,
            offset,
            len,
        });
        prop::collection::vec(range, 1..40)
    }

    fn outcome() -> impl Strategy<Value = FrameOutcome> {
        prop_oneof![
            Just(FrameOutcome::Done),
            any::<u32>().prop_map(FrameOutcome::Corrupt),
            any::<(u32, u64, u64)>().prop_map(|(object, sent, capacity)| FrameOutcome::Length {
                object,
                sent,
                capacity
            }),
            Just(FrameOutcome::Aborted),
            Just(FrameOutcome::Withdrawn),
            any::<u32>().prop_map(FrameOutcome::NotLeased),
            Just(FrameOutcome::ReadOnly),
            ".{0,200}".prop_map(FrameOutcome::Refused),
        ]
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let id = any::<u64>;
        let lens = prop_oneof![
            prop::collection::vec(1..1u64 << 32, 1..40),
            prop::collection::vec(1..5000u64, 1..70),
        ];
        prop_oneof![
            id().prop_map(Frame::Ping),
            id().prop_map(Frame::Pong),
            (id(), ranges()).prop_map(|(id, ranges)| Frame::Read { id, ranges }),
            id().prop_map(|id| Frame::Data { id }),
            (id(), ranges()).prop_map(|(id, ranges)| Frame::Write { id, ranges }),
            (id(), outcome()).prop_map(|(id, outcome)| Frame::Answer { id, outcome }),
            (id(), id(), lens).prop_map(|(id, tag, lens)| Frame::Offer {
                id,
                tag,
                inlined: may_be_inlined(&lens),
                lens,
            }),
            id().prop_map(|id| Frame::Withdraw { id }),
            (id(), id(), outcome()).prop_map(|(id, done, outcome)| Frame::Finish {
                id,
                done,
                outcome
            }),
        ]
    }

    /// Frames of the other plane.
    #[cfg(feature = "nixl")]
    fn of_nixl(id: u64, ranges: Vec<Range>) -> [Frame; 5] {
        [
            Frame::Plane(Announcement {
                agent: "peer@0123456789abcdef".to_owned(),
                metadata: vec![3; 40],
                base: 1 << 46,
                len: 1 << 30,
            }),
            Frame::Moved {
                id,
                sums: vec![u64::MAX; ranges.len()],
            },
            Frame::Fetch {
                id,
                ranges,
                offset: 4096,
                millis: 500,
            },
            Frame::Unmoved {
                id,
                idle: false,
                reason: "no".to_owned(),
            },
            Frame::Stop { id },
        ]
    }

    #[cfg(feature = "nixl")]
    #[test]
    fn frames_of_the_other_plane_are_parsed_whole_or_refused() {
        let range = Range {
            region: Region::Lease(u64::MAX),
            slot: u64::MAX,
            offset: 1 << 47,
            len: 1 << 47,
        };
        for frame in of_nixl(u64::MAX, vec![range; MAX_RANGES]) {
            let bytes = frame.encode();
            assert!(bytes.len() <= MAX_HEADER, "{} bytes", bytes.len());
            assert_eq!(Frame::parse(&bytes), Ok(frame.clone()));
            assert!(Frame::parse(&bytes[..bytes.len() - 1]).is_err());
            fuzz(&[&[255][..], &bytes].concat());
        }
        let fetch = |ranges: usize| Frame::Fetch {
            id: 1,
            ranges: vec![range; ranges],
            offset: 0,
            millis: 0,
        };
        let moved = |sums: usize| Frame::Moved {
            id: 1,
            sums: vec![0; sums],
        };
        for frame in [fetch(0), fetch(MAX_RANGES + 1), moved(MAX_RANGES + 1)] {
            let parsed = Frame::parse(&frame.encode());
            assert!(matches!(parsed, Err(FrameError::Count(_))), "{parsed:?}");
        }
        let unmoved = Frame::Unmoved {
            id: 1,
            idle: true,
            reason: "x".repeat(MAX_REASON + 1),
        };
        let parsed = Frame::parse(&unmoved.encode());
        assert_eq!(parsed, Err(FrameError::Reason(MAX_REASON + 1)));
        let [Frame::Plane(announcement), ..] = of_nixl(1, vec![range]) else {
            panic!("the first one");
        };
        let metadata = vec![0; crate::nixl::MAX_METADATA + 1];
        let long = Frame::Plane(Announcement {
            metadata,
            ..announcement
        });
        assert_eq!(Frame::parse(&long.encode()), Err(FrameError::Memory));
    }

    /// Writes the seeds of the fuzz target again with `LMC_WRITE_SEEDS=1`.
    #[test]
    fn the_seeds_of_the_fuzz_target_are_valid_frames() {
        let ranges = vec![
            Range {
                region: Region::Lease(3),
                slot: 1,
                offset: 4096,
                len: 1 << 20,
            },
            Range {
                region: Region::Offer(9),
                slot: 0,
                offset: 0,
                len: 7,
            },
        ];
        let id = 7;
        let outcome = FrameOutcome::Refused("no".to_owned());
        let offer = |lens: Vec<u64>, inlined| Frame::Offer {
            id,
            tag: 3,
            lens,
            inlined,
        };
        let frames = vec![
            Frame::Ping(5),
            Frame::Read {
                id,
                ranges: ranges.clone(),
            },
            Frame::Data { id },
            Frame::Write {
                id,
                ranges: ranges.clone(),
            },
            Frame::Answer {
                id,
                outcome: outcome.clone(),
            },
            offer(vec![1 << 20], false),
            Frame::Withdraw { id },
            Frame::Finish {
                id,
                done: 1,
                outcome,
            },
            offer(vec![100], true),
            Frame::Answer {
                id,
                outcome: FrameOutcome::NotLeased(2),
            },
        ];
        #[cfg(feature = "nixl")]
        let frames = [frames, of_nixl(id, ranges).to_vec()].concat();
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = folder.join("../../fuzz/seeds/transfer");
        let write = std::env::var_os("LMC_WRITE_SEEDS").is_some();
        for (number, frame) in frames.into_iter().enumerate() {
            // One step of up to 256 bytes, and the header.
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

    fn sealed(frames: &[Frame]) -> (Vec<u8>, Decoder) {
        let ((mut sealer, _), (_, opener)) = pair();
        let mut bytes = Vec::new();
        for frame in frames {
            seal_header(&frame.encode(), &mut sealer, &mut bytes);
        }
        (bytes, Decoder::new(opener))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(rounds(100, 300) as u32))]

        #[test]
        fn frames_come_out_as_they_went_in_however_they_are_cut(
            frames in prop::collection::vec(frame(), 1..6), step in 1usize..64
        ) {
            let (stream, mut decoder) = sealed(&frames);
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
            frame in frame(), at in any::<prop::sample::Index>(), flip in 1u8..
        ) {
            let (mut bytes, mut decoder) = sealed(&[frame]);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let decoded = decoder.feed(&mut &bytes[..]);
            prop_assert!(!matches!(decoded, Ok(Some(_))), "{:?}", decoded);
        }

        #[test]
        fn any_bytes_are_survived(data in prop::collection::vec(any::<u8>(), 0..300)) {
            fuzz(&data);
        }

        #[test]
        fn changed_headers_are_survived(
            frame in frame(), at in any::<prop::sample::Index>(), flip in any::<u8>()
        ) {
            let mut bytes = [&[7][..], &frame.encode()].concat();
            let at = 1 + at.index(bytes.len() - 1);
            bytes[at] ^= flip;
            fuzz(&bytes);
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let check = |frame: Frame, error: FrameError| {
            assert_eq!(Frame::parse(&frame.encode()), Err(error));
        };
        let range = |offset, len| Range {
            region: Region::Arena,
            slot: 0,
            offset,
            len,
        };
        let write = |ranges| Frame::Write { id: 1, ranges };
        check(write(vec![]), FrameError::Count(0));
        check(write(vec![range(0, 1); 4097]), FrameError::Count(4097));
        check(write(vec![range(0, 0)]), FrameError::Range);
        check(write(vec![range(2, u64::MAX - 1)]), FrameError::Range);
        let long = FrameOutcome::Refused("x".repeat(1025));
        let answer = Frame::Answer {
            id: 1,
            outcome: long,
        };
        check(answer, FrameError::Reason(1025));
        let offer = |lens: Vec<u64>, inlined| Frame::Offer {
            id: u64::MAX,
            tag: u64::MAX,
            lens,
            inlined,
        };
        for (count, len) in [(1, MAX_INLINED + 1), (65, 1), (2, u64::MAX)] {
            check(offer(vec![len; count], true), FrameError::Inlined);
        }
        check(offer(vec![], false), FrameError::Count(0));
        check(offer(vec![0], false), FrameError::Range);
        for len in [0, MAX_HEADER as u32 + 1, u32::MAX] {
            let (_, mut decoder) = sealed(&[]);
            let error = FrameError::Length(len as usize);
            assert_eq!(decoder.feed(&mut &len.to_le_bytes()[..]), Err(error));
        }
        // The largest batch, with the largest lengths that memory has.
        let offer = offer(vec![(1 << 47) - 1; MAX_BATCH], false);
        let (bytes, mut decoder) = sealed(std::slice::from_ref(&offer));
        assert_eq!(decoder.feed(&mut &bytes[..]), Ok(Some(offer)));
        assert!(
            decoder.held() <= 3 * KEPT,
            "{} bytes are kept",
            decoder.held()
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
