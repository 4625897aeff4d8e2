//! How a batch is spread over the streams of a connection.

use super::frame::{MAX_SEGMENTS, PIECE, Segment};

/// An object of a batch, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Portion {
    /// The object's place in the batch.
    pub(super) place: usize,
    /// In this side's arena.
    pub(super) local: Segment,
    /// Bytes from the start of the peer's arena.
    pub(super) remote: u64,
}

impl Portion {
    /// In the peer's arena.
    pub(super) fn at_peer(&self) -> Segment {
        Segment {
            offset: self.remote,
            len: self.local.len,
        }
    }
}

/// Portions for each frame, with the stream that it goes by, counted from any: about as many
/// bytes for each stream, none with less than a piece unless there is no more.
pub(super) fn spread(
    objects: impl Iterator<Item = Portion> + Clone,
    streams: usize,
) -> Vec<(usize, Vec<Portion>)> {
    let total: u64 = objects.clone().map(|object| object.local.len).sum();
    let share = total.div_ceil(streams as u64).next_multiple_of(PIECE);
    let mut frames: Vec<(usize, Vec<Portion>)> = Vec::new();
    let mut before = 0;
    for mut rest in objects {
        while rest.local.len > 0 {
            let stream = before / share;
            let len = rest.local.len.min((stream + 1) * share - before);
            let mut now = rest;
            now.local.len = len;
            rest.local.offset += len;
            rest.local.len -= len;
            rest.remote += len;
            before += len;
            match frames.last_mut() {
                Some((last, portions))
                    if *last == stream as usize && portions.len() < MAX_SEGMENTS =>
                {
                    portions.push(now);
                }
                _ => frames.push((stream as usize, vec![now])),
            }
        }
    }
    frames
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_goes_once_and_streams_have_like_shares(
            lens in prop::collection::vec(1u64..3 << 20, 1..300), streams in 1usize..9
        ) {
            let mut at = 0;
            let objects: Vec<Portion> = lens.iter().enumerate().map(|(place, &len)| {
                let local = Segment { offset: at, len };
                at += len;
                Portion { place, local, remote: 7 + local.offset }
            }).collect();
            let frames = spread(objects.iter().copied(), streams);
            let mut shares = vec![0; streams];
            let mut next = 0;
            for (stream, portions) in &frames {
                prop_assert!((1..=MAX_SEGMENTS).contains(&portions.len()));
                for portion in portions {
                    let object = &objects[portion.place].local;
                    prop_assert_eq!(portion.local.offset, next);
                    prop_assert_eq!(portion.remote, next + 7);
                    prop_assert!(next >= object.offset);
                    next += portion.local.len;
                    prop_assert!(next <= object.offset + object.len);
                    shares[*stream] += portion.local.len;
                }
            }
            prop_assert_eq!(next, at);
            let most = at.div_ceil(streams as u64) + PIECE;
            prop_assert!(shares.iter().all(|&share| share <= most), "{:?}", shares);
        }
    }

    #[test]
    fn many_small_ones_are_cut_into_frames() {
        let local = Segment { offset: 0, len: 8 };
        let one = Portion {
            place: 0,
            local,
            remote: 0,
        };
        let frames = spread(std::iter::repeat_n(one, 10_000), 4);
        let counts: Vec<_> = frames.iter().map(|(s, p)| (*s, p.len())).collect();
        assert_eq!(counts, [(0, 4096), (0, 4096), (0, 1808)]);
    }
}
