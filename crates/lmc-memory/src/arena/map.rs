//! Mappings: the only calls of `mmap` and its kin, each wrapped so that the rest is safe.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

/// A transparent or explicit huge page on the machines we serve.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// A mapping, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory without thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: as above; the code that hands out addresses governs access to the bytes.
unsafe impl Sync for Mapping {}

/// Size of a base page, in bytes.
pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("every system has a page size")
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

impl Mapping {
    /// Private, zero-filled memory. With `huge`, from the reserved huge pages (which are then
    /// reserved at once, so that a later touch cannot fail); without, aligned to a huge page
    /// so that transparent ones fit from the first byte.
    pub(crate) fn anonymous(len: usize, huge: bool) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if huge {
            return Self::map(len, flags | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB, None);
        }
        // Miri, under which the slots are tested, knows only the flags without it.
        let flags = if cfg!(miri) {
            flags
        } else {
            flags | libc::MAP_NORESERVE
        };
        if len < HUGE_PAGE {
            return Self::map(len, flags, None);
        }
        let span = len
            .checked_add(HUGE_PAGE)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let mut wide = Self::map(span, flags, None)?;
        let head = wide.base.as_ptr().align_offset(HUGE_PAGE);
        wide.trim(head, len);
        Ok(wide)
    }

    /// The first `len` bytes of a file, shared with every process that maps it.
    pub(crate) fn shared(file: &File, len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED, Some(file))
    }

    fn map(len: usize, flags: libc::c_int, file: Option<&File>) -> io::Result<Self> {
        let fd = file.map_or(-1, AsRawFd::as_raw_fd);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no fixed address is asked for, so no existing mapping is touched.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).expect("mmap never maps address 0 unasked");
        Ok(Self { base, len })
    }

    /// Keeps `len` bytes from `head` on and unmaps what lies around them.
    fn trim(&mut self, head: usize, len: usize) {
        let old = self.base.as_ptr();
        let tail = self.len - head - len;
        // SAFETY: `head + len + tail` is the old length, so every address lies in or one past
        // the mapping, the parts cut off are page-aligned, and their addresses are not known elsewhere.
        unsafe {
            self.base = NonNull::new_unchecked(old.add(head));
            self.len = len;
            if head > 0 {
                libc::munmap(old.cast(), head);
            }
            if tail > 0 {
                libc::munmap(old.add(head + len).cast(), tail);
            }
        }
    }

    /// First byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Gives the kernel advice about the whole mapping.
    pub(crate) fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is this mapping, and none of the advices used here drops bytes.
        check(unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) })
    }

    /// Locks every page as it becomes present; does not make any present now.
    pub(crate) fn lock_on_fault(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping; locking changes no byte.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mlock2,
                self.base.as_ptr(),
                self.len,
                libc::MLOCK_ONFAULT as libc::c_ulong,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Lets pages of the mapping come from one NUMA node only.
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
                self.base.as_ptr(),
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

    /// Makes the pages of a part present and writable without changing a byte.
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

    /// Makes pages present where the kernel can report a lack of memory as an error.
    pub(crate) fn try_populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let part = self.part(offset, len);
        loop {
            // SAFETY: the range lies in this mapping; populating changes no byte.
            let result = unsafe { libc::madvise(part.cast(), len, libc::MADV_POPULATE_WRITE) };
            if result == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) {
                return Err(error);
            }
        }
    }

    /// Makes pages present by writing to each what it already holds. The write is one atomic
    /// instruction, so it cannot undo a byte that is written at the same time.
    pub(crate) fn touch(&self, offset: usize, len: usize) {
        let part = self.part(offset, len);
        for at in (0..len).step_by(page_size()) {
            // SAFETY: `at` is below `len`, so the byte lies in this mapping; an atomic write
            // of an unchanged value disturbs neither readers nor writers of other processes.
            unsafe { AtomicU8::from_ptr(part.add(at)) }.fetch_or(0, Ordering::Relaxed);
        }
    }

    /// First byte of a part, which is checked to lie inside.
    fn part(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset} + {len} lies outside a mapping of {} bytes",
            self.len
        );
        // SAFETY: checked above to stay inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value and is unmapped once; owners of addresses
        // (slots, copies) hold the arena or segment alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
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
