//! Arrays of unsigned 32-bit numbers: prompts and block tables, the bulk of what arrives.
//!
//! Where a number begins is known only when the one before it was read: load the marker, look
//! up its width, add. That chain takes some eleven cycles a number and leaves most of the core
//! idle, so a long array is read by several chains at once, each from a place of its own (see
//! [`boundary`]). A chain counts only if the one before it ends exactly where it began;
//! otherwise its numbers are thrown away and read again in order. The outcome is that of
//! reading in order, whatever the bytes.

/// Chains that are read at once.
const CHAINS: usize = 4;
/// Numbers below which one chain is enough.
const LONG: usize = 2048;

/// For each marker of an unsigned number of at most 32 bits, the bytes of the number that follow
/// it; [`OTHER`] for any other marker.
static FOLLOWING: [u8; 256] = {
    let mut table = [OTHER; 256];
    let mut marker = 0;
    while marker < 0x80 {
        table[marker] = 0;
        marker += 1;
    }
    table[0xcc] = 1;
    table[0xcd] = 2;
    table[0xce] = 4;
    table
};
/// For each such marker, which bits of the last four bytes of marker and number are the number.
static MASK: [u32; 256] = {
    let mut table = [0xff; 256];
    table[0xcd] = 0xffff;
    table[0xce] = 0xffff_ffff;
    table
};
/// The bit by which other markers are told.
const OTHER: u8 = 8;

/// Bytes before a marker that are read with it, so that no number needs a shift.
const BEFORE: usize = 3;
/// Bytes that are read for a number: what lies before, the marker, and what may follow, to the
/// next power of two in [`cut`]'s index.
const WINDOW: usize = 12;
/// Most bytes of a number.
const WIDEST: usize = 5;

/// The number whose marker lies [`BEFORE`] bytes into a window, and how many bytes follow the
/// marker; with [`OTHER`] set when it is of another kind.
#[inline(always)]
fn cut(window: &[u8; WINDOW]) -> (u32, u8) {
    let marker = usize::from(window[BEFORE]);
    let following = FOLLOWING[marker];
    let at = usize::from(following & 7);
    let last = [window[at], window[at + 1], window[at + 2], window[at + 3]];
    (u32::from_be_bytes(last) & MASK[marker], following)
}

/// The number at `pos` and the place after it; nothing when it is of another kind, at the very
/// beginning, or within the last bytes.
#[inline(always)]
fn next(buf: &[u8], pos: usize) -> Option<(u32, usize)> {
    let window = buf.get(pos.checked_sub(BEFORE)?..)?.first_chunk()?;
    let (number, following) = cut(window);
    (following != OTHER).then_some((number, pos + 1 + usize::from(following)))
}

/// A place at or soon after `from` where a number begins, if all is numbers there.
///
/// One of any [`WIDEST`] places in a row begins a number. All of them are read on from: what
/// is wrong soon meets another kind of marker, or falls in step. Where all that are left have
/// met, it is the right one. In bytes that are made so that they never meet, it is a guess.
fn boundary(buf: &[u8], from: usize) -> usize {
    let mut places: [Option<usize>; WIDEST] = std::array::from_fn(|offset| Some(from + offset));
    for _ in 0..64 * WIDEST {
        let left = places.iter().flatten();
        let (Some(&first), Some(&last)) = (left.clone().min(), left.max()) else {
            break;
        };
        if first == last {
            return first;
        }
        let behind = places.iter_mut().find(|place| **place == Some(first));
        let behind = behind.expect("the smallest is one of them");
        *behind = next(buf, first).map(|(_, after)| after);
    }
    places.iter().flatten().copied().min().unwrap_or(buf.len())
}

/// One reader of a part of the array.
#[derive(Clone, Copy)]
struct Chain {
    pos: usize,
    /// Place from which another chain reads.
    until: usize,
    /// Where its next number goes, and where its room ends.
    at: usize,
    end: usize,
    /// Where its first number went.
    first: usize,
    /// Its first place.
    start: usize,
}

impl Chain {
    /// Reads one number. False when the chain is over.
    #[inline(always)]
    fn step(&mut self, buf: &[u8], out: &mut [u32]) -> bool {
        if self.pos >= self.until || self.at >= self.end {
            return false;
        }
        let Some((number, pos)) = next(buf, self.pos) else {
            return false;
        };
        out[self.at] = number;
        self.at += 1;
        self.pos = pos;
        true
    }
}

/// Reads the same count of numbers with each chain, as many as surely lie before its end. False
/// when there are few of them, or when a chain met something else (nothing is read then).
fn read_together(buf: &[u8], chains: &mut [Chain; CHAINS], out: &mut [u32]) -> bool {
    let surely = |chain: &Chain| {
        let until = chain.until.min(buf.len().saturating_sub(WINDOW));
        (until.saturating_sub(chain.pos) / WIDEST).min(chain.end - chain.at)
    };
    let count = chains.iter().map(surely).min().unwrap_or(0);
    if count < 16 {
        return false;
    }
    let mut places = chains.map(|chain| chain.pos - BEFORE);
    let mut rest = &mut out[..];
    let mut taken = 0;
    let mut rooms: [&mut [u32]; CHAINS] = chains.map(|chain| {
        let (_, tail) = std::mem::take(&mut rest).split_at_mut(chain.at - taken);
        let (room, tail) = tail.split_at_mut(count);
        taken = chain.at + count;
        rest = tail;
        room
    });
    let mut kinds = 0;
    for index in 0..count {
        for (place, room) in places.iter_mut().zip(&mut rooms) {
            let Some(window) = buf.get(*place..).and_then(|rest| rest.first_chunk()) else {
                return false;
            };
            let (number, following) = cut(window);
            room[index] = number;
            kinds |= following;
            *place += 1 + usize::from(following & 7);
        }
    }
    if kinds & OTHER != 0 {
        return false;
    }
    for (chain, place) in chains.iter_mut().zip(places) {
        chain.pos = place + BEFORE;
        chain.at += count;
    }
    true
}

/// Reads up to `len` numbers from `pos` on into `out` and returns the place after them. Fewer
/// come when a number is of another kind or lies within the last bytes.
pub(super) fn read(buf: &[u8], mut pos: usize, len: usize, out: &mut Vec<u32>) -> usize {
    if len >= LONG && pos >= BEFORE {
        pos = read_chains(buf, pos, len, out);
    }
    out.reserve(len - out.len());
    while out.len() < len {
        let Some((number, after)) = next(buf, pos) else {
            break;
        };
        out.push(number);
        pos = after;
    }
    pos
}

/// Reads what several chains can into `out`, and returns the place after it.
fn read_chains(buf: &[u8], begin: usize, len: usize, out: &mut Vec<u32>) -> usize {
    // What follows the array in its frame is short, so its bytes are nearly all of the rest.
    let bytes = (buf.len() - begin).min(len * WIDEST);
    let part = bytes / CHAINS;
    // Parts differ in how many numbers they hold; a quarter more room is enough for most.
    let room = len / CHAINS + len / (4 * CHAINS);
    *out = vec![0; room * CHAINS];
    let mut chains = std::array::from_fn(|index| {
        let start = match index {
            0 => begin,
            _ => boundary(buf, begin + index * part),
        };
        let first = index * room;
        Chain {
            pos: start,
            start,
            until: begin + bytes,
            at: first,
            end: first + room,
            first,
        }
    });
    for index in 0..CHAINS - 1 {
        chains[index].until = chains[index + 1].start;
    }
    while read_together(buf, &mut chains, out) {}
    for chain in &mut chains {
        while chain.step(buf, out) {}
    }
    // Join those that meet, and move their numbers together.
    let (mut count, mut pos) = (0, begin);
    for chain in chains {
        if chain.start != pos {
            break;
        }
        out.copy_within(chain.first..chain.at, count);
        count += chain.at - chain.first;
        pos = chain.pos;
        if pos < chain.until {
            break;
        }
    }
    if count > len {
        // The last chain went on into what follows the array.
        count = 0;
        pos = begin;
    }
    out.truncate(count);
    pos
}
