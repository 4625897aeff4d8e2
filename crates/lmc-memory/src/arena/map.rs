//! Mappings of anonymous memory and of shared files.

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::io::Errno;
use rustix::mm::{MlockFlags, mlock_with};
pub(crate) use rustix::param::page_size;

/// Size of a huge page, transparent or explicit, on supported machines.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// A mapping, unmapped on drop. Holders of addresses in it (slots, copies) keep the arena or segment alive.
#[derive(Debug)]
pub(crate) struct Mapping {
    map: MmapRaw,
    /// Unused bytes at the start of the mapping.
    head: usize,
    len: usize,
}

impl Mapping {
    /// Maps private, zero-filled memory. With `huge`, it comes from the reserved huge pages, which are then
    /// reserved at once, so that a later touch cannot fail. Otherwise it is aligned to a huge page, so that
    /// transparent huge pages fit from the first byte.
    pub(crate) fn anonymous(len: usize, huge: bool) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        if huge {
            options.huge(Some(HUGE_PAGE.ilog2() as u8));
        } else if !cfg!(miri) {
            // Miri, under which the slots are tested, does not know this flag.
            options.no_reserve_swap();
        }
        let more = if huge || len < HUGE_PAGE {
            0
        } else {
            HUGE_PAGE
        };
        let span = len.checked_add(more);
        let span = span.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let map = MmapRaw::from(options.len(span).map_anon()?);
        let head = match more {
            0 => 0,
            _ => map.as_mut_ptr().align_offset(HUGE_PAGE),
        };
        Ok(Self { map, head, len })
    }

    /// Maps the first `len` bytes of a file, shared with every process that maps the file.
    ///
    /// # Errors
    /// Errors of the system, and `EINVAL` if `len` is 0.
    pub(crate) fn shared(file: &File, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(Errno::INVAL.into());
        }
        let map = MmapOptions::new().len(len).map_raw(file)?;
        Ok(Self { map, head: 0, len })
    }

    /// Returns the first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        let base = self.map.as_mut_ptr().wrapping_add(self.head);
        NonNull::new(base).expect("mmap never maps address 0 unasked")
    }

    /// Returns the number of bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Requests transparent huge pages for the whole mapping.
    pub(crate) fn advise_huge_pages(&self) -> io::Result<()> {
        self.map.advise_range(Advice::HugePage, self.head, self.len)
    }

    /// Locks every page when it becomes present; makes none present now.
    pub(crate) fn lock_on_fault(&self) -> io::Result<()> {
        let start = self.base().as_ptr().cast();
        // SAFETY: the range is this mapping; locking changes no byte.
        Ok(unsafe { mlock_with(start, self.len, MlockFlags::ONFAULT) }?)
    }

    /// Binds the pages of the mapping to one NUMA node.
    pub(crate) fn bind(&self, node: u32) -> io::Result<()> {
        const BITS: usize = libc::c_ulong::BITS as usize;
        const MPOL_BIND: libc::c_ulong = 2;
        let node = node as usize;
        let mut mask = vec![0 as libc::c_ulong; node / BITS + 1];
        mask[node / BITS] |= 1 << (node % BITS);
        // SAFETY: the range is this mapping, and the mask has the bits that are announced
        // (the kernel reads one bit fewer than the count, hence the 1).
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base().as_ptr(),
                self.len,
                MPOL_BIND,
                mask.as_ptr(),
                mask.len() * BITS + 1,
                0 as libc::c_ulong,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Makes the pages of a part present and writable without changing any byte.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        match self.try_populate(offset, len) {
            // Linux before 5.14 does not know the advice.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.touch(offset, len);
                Ok(())
            }
            done => done,
        }
    }

    /// Makes pages present, if the kernel can report a lack of memory as an error.
    pub(crate) fn try_populate(&self, offset: usize, len: usize) -> io::Result<()> {
        self.check(offset, len);
        let start = self.head + offset;
        loop {
            match self.map.advise_range(Advice::PopulateWrite, start, len) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
                done => return done,
            }
        }
    }

    /// Returns true if all pages of a part are in memory, even if they are not in the page table of this
    /// process.
    pub(crate) fn is_in_memory(&self, offset: usize, len: usize) -> io::Result<bool> {
        self.check(offset, len);
        let mut pages = vec![0_u8; len.div_ceil(page_size())];
        let start = self.base().as_ptr().wrapping_add(offset);
        // SAFETY: the range is this mapping, and `pages` has a byte for each of its pages.
        match unsafe { libc::mincore(start.cast(), len, pages.as_mut_ptr()) } {
            0 => Ok(pages.iter().all(|page| page & 1 == 1)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes pages present by writing to each the value that it already has. The write is one atomic
    /// instruction, so it cannot undo a concurrent write.
    pub(crate) fn touch(&self, offset: usize, len: usize) {
        self.check(offset, len);
        let part = self.base().as_ptr().wrapping_add(offset);
        for at in (0..len).step_by(page_size()) {
            // SAFETY: `at` is below `len`, so the byte lies in this mapping; an atomic write
            // of an unchanged value disturbs neither readers nor writers of other processes.
            unsafe { AtomicU8::from_ptr(part.add(at)) }.fetch_or(0, Ordering::Relaxed);
        }
    }

    /// Checks that a part lies inside the mapping.
    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset} + {len} lies outside a mapping of {} bytes",
            self.len
        );
    }
}

/// Lets the memory of this thread, and of threads that it starts, come from any NUMA node, even if this
/// process was started with a policy (`numactl`).
///
/// # Errors
/// The system refuses, as in some containers.
pub fn use_all_nodes() -> io::Result<()> {
    const MPOL_DEFAULT: libc::c_long = 0;
    // SAFETY: the policy has no mask, and changes no memory that is there.
    let result = unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            MPOL_DEFAULT,
            std::ptr::null::<libc::c_ulong>(),
            0 as libc::c_ulong,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_keeps_bytes() {
        let map = Mapping::anonymous(HUGE_PAGE + 3 * page_size(), false).unwrap();
        assert_eq!(map.base().as_ptr() as usize % HUGE_PAGE, 0);
        let at = page_size();
        // SAFETY: the second page lies in the mapping and only this test uses it.
        unsafe { map.base().add(at).write(7) };
        map.touch(0, map.len());
        map.populate(0, map.len()).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { map.base().add(at).read() }, 7);
        // SAFETY: as above, for the last byte.
        assert_eq!(unsafe { map.base().add(map.len() - 1).read() }, 0);
    }

    #[test]
    #[should_panic(expected = "outside a mapping")]
    fn a_part_outside_is_refused() {
        let map = Mapping::anonymous(page_size(), false).unwrap();
        map.touch(1, page_size());
    }
}
