//! Arrays of unsigned 32-bit numbers: prompts and block tables, which are most of the input.
//!
//! The offset of a number depends on the width of the number before it: load the marker, look
//! up its width, add. This dependency chain takes about eleven cycles per number and leaves most
//! of the core idle, so a long array is read by several [`Chain`]s at once, each from its own
//! start offset (see [`boundary`]). The numbers of a chain are used only if the chain before it
//! ends exactly at its start; otherwise they are discarded and read again in order. The result
//! is always the same as reading in order.

/// Number of chains that one long array is read with.
const CHAINS: usize = 4;
/// Shortest array, in numbers, that is read with several chains.
const LONG: usize = 2048;

/// Number of bytes after each marker of an unsigned number of at most 32 bits; [`OTHER`] for any
/// other marker.
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
/// Mask that extracts the number from its last four bytes (marker included), by marker.
static MASK: [u32; 256] = {
    let mut table = [0xff; 256];
    table[0xcd] = 0xffff;
    table[0xce] = 0xffff_ffff;
    table
};
/// Bit that is set in [`FOLLOWING`] for markers of other types.
const OTHER: u8 = 8;

/// Bytes before the marker that a window includes, so that no number needs a shift.
const BEFORE: usize = 3;
/// Bytes of a window; [`decode`] indexes up to byte 10, whatever the marker.
const WINDOW: usize = 12;
/// Longest encoding of a number, in bytes, with its marker.
const WIDEST: usize = 5;

/// Decodes the number whose marker is at index [`BEFORE`] of a window. Also returns the number of
/// bytes after the marker, with [`OTHER`] set if the value has another type.
#[inline(always)]
fn decode(window: &[u8; WINDOW]) -> (u32, u8) {
    let marker = usize::from(window[BEFORE]);
    let following = FOLLOWING[marker];
    let at = usize::from(following & 7);
    let last = [window[at], window[at + 1], window[at + 2], window[at + 3]];
    (u32::from_be_bytes(last) & MASK[marker], following)
}

/// Returns the number at `pos` and the offset after it, or `None` if the value has another type or
/// its window is not wholly inside the buffer.
#[inline(always)]
fn next(buf: &[u8], pos: usize) -> Option<(u32, usize)> {
    let window = buf.get(pos.checked_sub(BEFORE)?..)?.first_chunk()?;
    let (number, following) = decode(window);
    (following != OTHER).then_some((number, pos + 1 + usize::from(following)))
}

/// Finds an offset at or soon after `from` where a number begins, if only numbers follow.
///
/// One of [`WIDEST`] successive offsets begins a number, so numbers are read on from each of
/// them. A wrong start soon meets a marker of another type or reaches the offsets of the right
/// one. When all remaining candidates agree, the offset is right. Input can be built so that they
/// never agree; the result is then a guess, which [`read_chains`] detects.
fn boundary(buf: &[u8], from: usize) -> usize {
    let mut candidates: [Option<usize>; WIDEST] = std::array::from_fn(|offset| Some(from + offset));
    for _ in 0..64 * WIDEST {
        let remaining = candidates.iter().flatten();
        let (Some(&first), Some(&last)) = (remaining.clone().min(), remaining.max()) else {
            break;
        };
        if first == last {
            return first;
        }
        let behind = candidates.iter_mut().find(|c| **c == Some(first));
        let behind = behind.expect("the smallest is one of them");
        *behind = next(buf, first).map(|(_, after)| after);
    }
    let smallest = candidates.iter().flatten().copied().min();
    smallest.unwrap_or(buf.len())
}

/// Reads one part of an array into one part of the output.
#[derive(Clone, Copy)]
struct Chain {
    /// Offset of the first number.
    start: usize,
    /// Offset of the next number.
    pos: usize,
    /// Offset at which the next chain starts.
    until: usize,
    /// Output index of the first number.
    out_start: usize,
    /// Output index of the next number.
    out_pos: usize,
    /// End of this chain's part of the output.
    out_end: usize,
}

impl Chain {
    /// Reads one number. Returns false at the end of the chain.
    #[inline(always)]
    fn step(&mut self, buf: &[u8], out: &mut [u32]) -> bool {
        if self.pos >= self.until || self.out_pos >= self.out_end {
            return false;
        }
        let Some((number, pos)) = next(buf, self.pos) else {
            return false;
        };
        out[self.out_pos] = number;
        self.out_pos += 1;
        self.pos = pos;
        true
    }
}

/// Reads the same count of numbers with each chain: the count that fits before its end even if
/// every number has the greatest width. Returns false, without reading, if that count is small or
/// a chain meets a value of another type.
fn read_together(buf: &[u8], chains: &mut [Chain; CHAINS], out: &mut [u32]) -> bool {
    let guaranteed = |chain: &Chain| {
        let until = chain.until.min(buf.len().saturating_sub(WINDOW));
        (until.saturating_sub(chain.pos) / WIDEST).min(chain.out_end - chain.out_pos)
    };
    let count = chains.iter().map(guaranteed).min().unwrap_or(0);
    if count < 16 {
        return false;
    }
    let mut windows = chains.map(|chain| chain.pos - BEFORE);
    let mut rest = &mut out[..];
    let mut split = 0;
    let mut outputs: [&mut [u32]; CHAINS] = chains.map(|chain| {
        let (_, tail) = std::mem::take(&mut rest).split_at_mut(chain.out_pos - split);
        let (output, tail) = tail.split_at_mut(count);
        split = chain.out_pos + count;
        rest = tail;
        output
    });
    let mut kinds = 0;
    for index in 0..count {
        for (start, output) in windows.iter_mut().zip(&mut outputs) {
            let Some(window) = buf.get(*start..).and_then(|rest| rest.first_chunk()) else {
                return false;
            };
            let (number, following) = decode(window);
            output[index] = number;
            kinds |= following;
            *start += 1 + usize::from(following & 7);
        }
    }
    if kinds & OTHER != 0 {
        return false;
    }
    for (chain, start) in chains.iter_mut().zip(windows) {
        chain.pos = start + BEFORE;
        chain.out_pos += count;
    }
    true
}

/// Reads up to `len` numbers from offset `pos` into `out` and returns the offset after them.
/// Stops early at a value of another type and close to the end of the buffer.
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

/// Reads numbers with several chains into `out`, and returns the offset after the last one.
fn read_chains(buf: &[u8], begin: usize, len: usize, out: &mut Vec<u32>) -> usize {
    // Little follows the array in its frame, so nearly all remaining bytes belong to it.
    let bytes = (buf.len() - begin).min(len * WIDEST);
    let part = bytes / CHAINS;
    // Parts hold different counts of numbers; a quarter of extra capacity is enough for most.
    let capacity = len / CHAINS + len / (4 * CHAINS);
    *out = vec![0; capacity * CHAINS];
    let mut chains = std::array::from_fn(|index| {
        let start = match index {
            0 => begin,
            _ => boundary(buf, begin + index * part),
        };
        let out_start = index * capacity;
        Chain {
            start,
            pos: start,
            until: begin + bytes,
            out_start,
            out_pos: out_start,
            out_end: out_start + capacity,
        }
    });
    for index in 0..CHAINS - 1 {
        chains[index].until = chains[index + 1].start;
    }
    while read_together(buf, &mut chains, out) {}
    for chain in &mut chains {
        while chain.step(buf, out) {}
    }
    // Join the chains that meet, and move their numbers together.
    let (mut count, mut pos) = (0, begin);
    for chain in chains {
        if chain.start != pos {
            break;
        }
        out.copy_within(chain.out_start..chain.out_pos, count);
        count += chain.out_pos - chain.out_start;
        pos = chain.pos;
        if pos < chain.until {
            break;
        }
    }
    if count > len {
        // The last chain read past the end of the array.
        count = 0;
        pos = begin;
    }
    out.truncate(count);
    pos
}
