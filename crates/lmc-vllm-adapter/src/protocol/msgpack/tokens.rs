//! Arrays of unsigned 32-bit numbers: prompts and block tables, the bulk of what arrives.
//!
//! Where a number begins is known only when the one before it was read: load the marker, look
//! up its width, add. That chain takes some eleven cycles a number and leaves most of the core
//! idle, so a long array is read by several chains at once, each from a place of its own. A
//! place is a guess (the next byte that looks like the marker of a wide number), and a chain
//! counts only if the one before it ends exactly there; otherwise its numbers are thrown away
//! and read again in order. The outcome is that of reading in order, whatever the bytes.

/// Chains that are read at once.
const CHAINS: usize = 4;
/// Numbers below which one chain is enough.
const LONG: usize = 2048;

/// For each marker of an unsigned number of at most 32 bits, how to cut the number out of the
/// eight bytes that begin there: bytes of the number in the lowest byte (0 for any other
/// marker), then the shift to the left that drops the marker, then the one to the right that
/// drops what follows.
static CLASS: [u32; 256] = {
    const fn class(width: u32, left: u32, right: u32) -> u32 {
        width | left << 8 | right << 16
    }
    let mut table = [0; 256];
    let mut marker = 0;
    while marker < 0x80 {
        table[marker] = class(1, 0, 56);
        marker += 1;
    }
    table[0xcc] = class(2, 8, 56);
    table[0xcd] = class(3, 8, 48);
    table[0xce] = class(5, 8, 32);
    table
};

/// Most bytes of a number.
const WIDEST: usize = 5;

/// The number at the front of a window, and its bytes; 0 bytes when it is of another kind.
#[inline(always)]
fn cut(window: &[u8; 8]) -> (u32, usize) {
    let class = CLASS[usize::from(window[0])];
    let word = u64::from_be_bytes(*window) << (class >> 8 & 63);
    ((word >> (class >> 16 & 63)) as u32, (class & 0xff) as usize)
}

/// The number at `pos` and the place after it; nothing when it is of another kind or less than
/// eight bytes are left.
#[inline(always)]
fn next(buf: &[u8], pos: usize) -> Option<(u32, usize)> {
    let (number, width) = cut(buf.get(pos..)?.first_chunk::<8>()?);
    (width > 0).then_some((number, pos + width))
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
        let until = chain.until.min(buf.len().saturating_sub(8));
        (until.saturating_sub(chain.pos) / WIDEST).min(chain.end - chain.at)
    };
    let count = chains.iter().map(surely).min().unwrap_or(0);
    if count < 16 {
        return false;
    }
    let mut places = chains.map(|chain| chain.pos);
    let mut rest = &mut out[..];
    let mut taken = 0;
    let mut rooms: [&mut [u32]; CHAINS] = chains.map(|chain| {
        let (_, tail) = std::mem::take(&mut rest).split_at_mut(chain.at - taken);
        let (room, tail) = tail.split_at_mut(count);
        taken = chain.at + count;
        rest = tail;
        room
    });
    let mut strange = false;
    for index in 0..count {
        for (place, room) in places.iter_mut().zip(&mut rooms) {
            let Some(window) = buf.get(*place..).and_then(|rest| rest.first_chunk::<8>()) else {
                return false;
            };
            let (number, width) = cut(window);
            room[index] = number;
            strange |= width == 0;
            *place += width;
        }
    }
    if strange {
        return false;
    }
    for (chain, place) in chains.iter_mut().zip(places) {
        chain.pos = place;
        chain.at += count;
    }
    true
}

/// Reads up to `len` numbers from the front of `buf` into `out` and returns the bytes that they
/// took. Fewer come when a number is of another kind or lies in the last eight bytes.
pub(super) fn read(buf: &[u8], len: usize, out: &mut Vec<u32>) -> usize {
    let mut pos = 0;
    if len >= LONG {
        pos = read_chains(buf, len, out);
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

/// Reads what several chains can; the numbers that count and the bytes that they took.
fn read_chains(buf: &[u8], len: usize, out: &mut Vec<u32>) -> usize {
    // What follows the array in its frame is short, so its bytes are nearly all of the rest.
    let bytes = buf.len().min(len * 5);
    let part = bytes / CHAINS;
    // Parts differ in how many numbers they hold; a quarter more room is enough for most.
    let room = len / CHAINS + len / (4 * CHAINS);
    *out = vec![0; room * CHAINS];
    let mut chains = [Chain {
        pos: 0,
        until: 0,
        at: 0,
        end: 0,
        first: 0,
        start: 0,
    }; CHAINS];
    for (index, chain) in chains.iter_mut().enumerate() {
        let from = index * part;
        let wide = |&byte: &u8| byte == 0xcd || byte == 0xce;
        let offset = if index == 0 {
            Some(0)
        } else {
            buf[from..].iter().position(wide)
        };
        let start = offset.map_or(bytes, |offset| from + offset);
        let first = index * room;
        *chain = Chain {
            pos: start,
            start,
            until: bytes,
            at: first,
            end: first + room,
            first,
        };
    }
    for index in 0..CHAINS - 1 {
        chains[index].until = chains[index + 1].start;
    }
    while read_together(buf, &mut chains, out) {}
    for chain in &mut chains {
        while chain.step(buf, out) {}
    }
    // Join those that meet, and move their numbers together.
    let (mut count, mut pos) = (0, 0);
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
        pos = 0;
    }
    out.truncate(count);
    pos
}
