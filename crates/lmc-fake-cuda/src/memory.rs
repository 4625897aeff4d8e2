//! Memory that a process of the machine may use in copies and kernels.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use memmap2::MmapRaw;

use crate::driver::Count;
use crate::ipc::Handle;
use crate::shared::Kind;
use crate::{Code, code::Done};

/// One allocation, mapping or registration.
#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    /// The handle of device memory.
    pub(crate) handle: Option<Handle>,
    /// Times that a mapping was opened and not closed.
    pub(crate) opened: usize,
    /// The file of the process's own device memory, removed with it.
    pub(crate) file: Option<PathBuf>,
    pub(crate) _map: Option<MmapRaw>,
    pub(crate) _count: Count,
}

impl Range {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind, Kind::Allocation | Kind::Mapping)
    }

    fn contains(&self, start: usize, len: usize) -> bool {
        let offset = start.checked_sub(self.start);
        offset.is_some_and(|offset| offset <= self.len && len <= self.len - offset)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = fs::remove_file(file);
        }
    }
}

/// Ranges of a process, by their first address. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) ranges: BTreeMap<usize, Range>,
}

impl Memory {
    /// Returns the ranges that share bytes with a range of addresses, the last one first.
    pub(crate) fn overlapping(&self, start: usize, len: usize) -> impl Iterator<Item = &Range> {
        let end = start.saturating_add(len);
        let before = self.ranges.range(..end).rev().map(|(_, range)| range);
        before.take_while(move |range| range.start + range.len > start)
    }

    /// Returns the device memory that contains all of a range.
    pub(crate) fn device(&self, start: usize, len: usize) -> Done<&Range> {
        let mut ranges = self.overlapping(start, len.max(1));
        let found = ranges.find(|range| range.is_device() && range.contains(start, len));
        found.ok_or(Code::INVALID_VALUE)
    }

    /// Returns true for host memory that is registered, and false for memory that is not.
    pub(crate) fn is_pinned(&self, start: usize, len: usize) -> Done<bool> {
        let Some(range) = self.overlapping(start, len).next() else {
            return Ok(false);
        };
        let whole = !range.is_device() && range.contains(start, len);
        whole.then_some(true).ok_or(Code::INVALID_VALUE)
    }

    /// Fails unless a kernel on `device` reaches all of a range.
    pub(crate) fn reaches(&self, device: usize, start: usize, len: usize) -> Done {
        let reachable = |range: &Range| !range.is_device() || range.device == device;
        let mut ranges = self.overlapping(start, len);
        let reached = ranges.any(|range| reachable(range) && range.contains(start, len));
        (reached || len == 0)
            .then_some(())
            .ok_or(Code::ILLEGAL_ADDRESS)
    }

    /// Copies as a kernel on `device` does.
    pub(crate) fn kernel_copy(&self, device: usize, from: usize, to: usize, len: usize) -> Done {
        self.reaches(device, from, len)?;
        self.reaches(device, to, len)?;
        // SAFETY: both ranges are mapped or registered. Ranges leave `self` only under a lock whose
        // other side the caller holds.
        unsafe { copy(from, to, len) };
        Ok(())
    }
}

/// Copies bytes between addresses.
///
/// # Safety
/// `len` bytes at `from` can be read, and at `to` written.
pub(crate) unsafe fn copy(from: usize, to: usize, len: usize) {
    let from: *const u8 = std::ptr::with_exposed_provenance(from);
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
    // SAFETY: the caller's promise. Bytes that another process writes at the same time are torn at
    // worst; nothing here reads their values.
    unsafe { std::ptr::copy(from, to, len) };
}

/// Faults in the pages of host memory, as registration does. Fails if a page is not mapped, or lies
/// beyond the end of its file.
pub(crate) fn populate(start: usize, len: usize) -> Done {
    let page = rustix::param::page_size();
    let first = start / page * page;
    let end = (start + len).next_multiple_of(page);
    let at = std::ptr::with_exposed_provenance_mut(first);
    let advice = rustix::mm::Advice::LinuxPopulateWrite;
    // SAFETY: this advice changes no byte.
    let populated = unsafe { rustix::mm::madvise(at, end - first, advice) };
    populated.map_err(|_| Code::INVALID_VALUE)
}
