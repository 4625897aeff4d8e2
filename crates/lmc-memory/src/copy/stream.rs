//! Copies that bypass the cache.
//!
//! An ordinary store to a line that is not cached first reads the line from memory, so a copy moves three
//! bytes for each byte copied. A non-temporal store of a whole line moves two. Chunks are far larger than a
//! core's caches and are not read again soon, so this is 1.6 times as fast (`examples/copy_speed.rs`). The C
//! library does the same for copies of many megabytes, but the runs of paged memory are too short for that.

use std::ptr;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// A kind of copy, chosen once for a whole gather or scatter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// Through the cache.
    Plain,
    /// With non-temporal stores, which bypass the cache.
    #[cfg(target_arch = "x86_64")]
    Around(Width, Order),
}

/// Width of the copy instructions.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// 64 bytes.
    Avx512,
    /// 32 bytes.
    Avx,
    /// 16 bytes.
    Sse2,
}

/// The order in which the lines of a long run are copied.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// One line after another.
    Ascending,
    /// Four pages interleaved, so that the hardware prefetches four streams. Faster on some Intel processors,
    /// and 2 to 3 times slower on AMD's Milan.
    FourPages,
}

impl Store {
    /// Returns the fastest kind of copy on this machine that bypasses the cache. The first call measures,
    /// which takes about 10 ms.
    pub(super) fn around_the_cache() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            static BEST: OnceLock<Store> = OnceLock::new();
            *BEST.get_or_init(|| {
                let width = if is_x86_feature_detected!("avx512f") {
                    Width::Avx512
                } else if is_x86_feature_detected!("avx") {
                    Width::Avx
                } else {
                    Width::Sse2
                };
                Self::Around(width, x86::faster_order(width))
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::Plain
    }

    /// Copies a run of `len` bytes, and meanwhile prefetches as many bytes from `ahead`. The memory at
    /// `ahead` need not exist. Blocks are far apart, and the hardware's prefetchers have to start again at
    /// each one.
    ///
    /// # Safety
    /// Both sides have the run and do not overlap. This thread calls [`Store::finish`] before another thread
    /// may read the bytes.
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, len: usize, ahead: *const u8) {
        match self {
            // SAFETY: by the caller's promise.
            Self::Plain => unsafe { ptr::copy_nonoverlapping(from, to, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: by the caller's promise; the value exists only where the CPU has the width.
            Self::Around(width, order) => unsafe {
                match (width, order) {
                    (Width::Avx512, Order::Ascending) => x86::avx512::<1>(from, to, len, ahead),
                    (Width::Avx512, Order::FourPages) => x86::avx512::<4>(from, to, len, ahead),
                    (Width::Avx, Order::Ascending) => x86::avx::<1>(from, to, len, ahead),
                    (Width::Avx, Order::FourPages) => x86::avx::<4>(from, to, len, ahead),
                    (Width::Sse2, Order::Ascending) => x86::sse2::<1>(from, to, len, ahead),
                    (Width::Sse2, Order::FourPages) => x86::sse2::<4>(from, to, len, ahead),
                }
            },
        }
    }

    /// Makes this thread's copies visible to others before anything that it does next. Ordinary
    /// synchronisation does not order stores that bypass the cache.
    pub(super) fn finish(self) {
        #[cfg(target_arch = "x86_64")]
        if self != Self::Plain {
            // SAFETY: every x86-64 CPU has the instruction; it only orders stores.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_HINT_T1, _mm_clflush, _mm_loadu_si128, _mm_mfence, _mm_prefetch, _mm_stream_si128,
        _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };
    use std::ptr;
    use std::time::{Duration, Instant};

    use super::{LINE, Order, Store, Width};

    /// Lines of a page: the prefetchers follow one stream per page.
    const PAGE: usize = 4096 / LINE;

    /// Measures both orders on memory that is not cached.
    pub(super) fn faster_order(width: Width) -> Order {
        const BYTES: usize = 4 << 20;
        const ROUNDS: usize = 3;
        let (from, mut to) = (vec![1u8; BYTES], vec![2u8; BYTES]);
        let mut time = |order| {
            for line in from.chunks(LINE) {
                // SAFETY: every x86-64 CPU has it, and the line is readable.
                unsafe { _mm_clflush(line.as_ptr()) };
            }
            // SAFETY: every x86-64 CPU has it; it only orders what came before.
            unsafe { _mm_mfence() };
            let began = Instant::now();
            let store = Store::Around(width, order);
            let (read, written) = (from.as_ptr(), to.as_mut_ptr());
            // SAFETY: both have the bytes, and the caller has found that the CPU has the width.
            unsafe { store.copy(read, written, BYTES, read) };
            store.finish();
            began.elapsed()
        };
        let (mut ascending, mut four_pages) = (Duration::MAX, Duration::MAX);
        for _ in 0..ROUNDS {
            ascending = ascending.min(time(Order::Ascending));
            four_pages = four_pages.min(time(Order::FourPages));
        }
        // Other traffic slows down both orders; the margin prevents a wrong choice because of noise.
        if four_pages.mul_f64(1.1) < ascending {
            Order::FourPages
        } else {
            Order::Ascending
        }
    }

    macro_rules! kind {
        (
            $run:ident, $lines:ident, $line:ident,
            $feature:literal, $load:ident, $stream:ident, $width:literal
        ) => {
            /// Copies a run that need not start or end at a line boundary. Partial lines would be written to
            /// memory on their own, so the ends go through the cache.
            ///
            /// # Safety
            /// Both sides have the run and do not overlap, and the CPU has the feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $run<const PAGES: usize>(
                from: *const u8,
                to: *mut u8,
                run: usize,
                ahead: *const u8,
            ) {
                let head = to.align_offset(LINE).min(run);
                let lines = (run - head) / LINE;
                let tail = run - head - lines * LINE;
                // SAFETY: head, lines and tail make up the run, and the lines are aligned.
                unsafe {
                    ptr::copy_nonoverlapping(from, to, head);
                    let (from, to) = (from.add(head), to.add(head));
                    $lines::<PAGES>(from, to, lines, ahead);
                    ptr::copy_nonoverlapping(from.add(lines * LINE), to.add(lines * LINE), tail);
                }
            }

            /// # Safety
            /// Both sides have `lines` lines and do not overlap, `to` starts on a line, and
            /// the CPU has the feature.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn $lines<const PAGES: usize>(
                from: *const u8,
                to: *mut u8,
                lines: usize,
                ahead: *const u8,
            ) {
                let mut done = 0;
                while PAGES > 1 && lines - done >= PAGES * PAGE {
                    for line in done..done + PAGE {
                        for page in 0..PAGES {
                            // SAFETY: below `done + PAGES * PAGE`, which is at most `lines`.
                            unsafe { $line(from, to, ahead, line + page * PAGE) };
                        }
                    }
                    done += PAGES * PAGE;
                }
                for line in done..lines {
                    // SAFETY: below `lines`.
                    unsafe { $line(from, to, ahead, line) };
                }
            }

            /// # Safety
            /// Both sides have the line, `to` is aligned to it, and the CPU has the feature.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn $line(from: *const u8, to: *mut u8, ahead: *const u8, line: usize) {
                const PARTS: usize = LINE / $width;
                // SAFETY: parts cover exactly one line, each aligned to its width on the side
                // that is written. A prefetch of any address is allowed.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * LINE).cast());
                    let (from, to) = (from.add(line * LINE), to.add(line * LINE));
                    let parts: [_; PARTS] =
                        std::array::from_fn(|i| $load(from.add(i * $width).cast()));
                    for (i, part) in parts.into_iter().enumerate() {
                        $stream(to.add(i * $width).cast(), part);
                    }
                }
            }
        };
    }
    kind!(
        avx512,
        avx512_lines,
        avx512_line,
        "avx512f",
        _mm512_loadu_si512,
        _mm512_stream_si512,
        64
    );
    kind!(
        avx,
        avx_lines,
        avx_line,
        "avx",
        _mm256_loadu_si256,
        _mm256_stream_si256,
        32
    );
    kind!(
        sse2,
        sse2_lines,
        sse2_line,
        "sse2",
        _mm_loadu_si128,
        _mm_stream_si128,
        16
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds() -> Vec<Store> {
        let mut kinds = vec![Store::Plain, Store::around_the_cache()];
        #[cfg(target_arch = "x86_64")]
        for order in [Order::Ascending, Order::FourPages] {
            kinds.push(Store::Around(Width::Sse2, order));
            if is_x86_feature_detected!("avx") {
                kinds.push(Store::Around(Width::Avx, order));
            }
            if is_x86_feature_detected!("avx512f") {
                kinds.push(Store::Around(Width::Avx512, order));
            }
        }
        kinds
    }

    #[test]
    fn every_kind_copies_every_length_at_every_alignment() {
        let from: Vec<u8> = (0..60_000u32).map(|i| (i % 251) as u8).collect();
        for kind in kinds() {
            for (shift, skew) in [(0, 0), (1, 0), (0, 1), (63, 17), (64, 3)] {
                for run in [
                    0, 1, 63, 64, 127, 128, 129, 191, 192, 256, 1000, 16_384, 50_000,
                ] {
                    let mut to = vec![0xee; 60_000];
                    // SAFETY: shift and skew are at most 64 and the run at most 50,000 bytes.
                    unsafe {
                        let (from, to) = (from.as_ptr().add(skew), to.as_mut_ptr().add(shift));
                        kind.copy(from, to, run, from);
                    }
                    kind.finish();
                    assert_eq!(to[shift..shift + run], from[skew..skew + run]);
                    assert!(
                        to[..shift]
                            .iter()
                            .chain(&to[shift + run..])
                            .all(|&b| b == 0xee)
                    );
                }
            }
        }
    }
}
