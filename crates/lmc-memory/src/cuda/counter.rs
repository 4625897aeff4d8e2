//! Reference counters of the storages that PyTorch shares.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::{MappedSegment, SegmentError, SharedName};

/// Bytes before the first counter: PyTorch counts the users of the file itself there.
const HEADER: u64 = 64;
/// Number of counters in one file, as PyTorch creates it.
const COUNTERS: u64 = 10_000;

/// A receiver's reference in the counter of one storage. Dropping it decrements the counter.
///
/// The process that shares a storage keeps the memory until the counter shows that every receiver has
/// finished.
#[derive(Debug)]
pub struct StorageCounter {
    file: MappedSegment,
    at: u64,
}

impl StorageCounter {
    /// Opens counter `number` of a file in `/dev/shm` that `user` owns.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn open_for(user: u32, name: &SharedName, number: u64) -> Result<Self, SegmentError> {
        let at = HEADER + number.min(COUNTERS) * 8;
        let file = MappedSegment::open_for(user, name, at + 8)?;
        Ok(Self { file, at })
    }
}

impl Drop for StorageCounter {
    fn drop(&mut self) {
        let counter = self.file.base_ptr().as_ptr().wrapping_add(self.at as usize);
        // SAFETY: the mapping has these eight bytes, which are aligned since a mapping begins with a
        // page; other processes change them by atomic operations only.
        let counter = unsafe { AtomicI64::from_ptr(counter.cast()) };
        counter.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::own_uid;

    #[test]
    fn a_receiver_counts_itself_off_once() {
        let name = SharedName::new(&format!("lmc_test_torch_{}", std::process::id())).unwrap();
        let mut bytes = vec![0; (HEADER + COUNTERS * 8) as usize];
        bytes[64 + 3 * 8] = 2;
        fs::write(name.path(), &bytes).unwrap();
        let counter = StorageCounter::open_for(own_uid(), &name, 3).unwrap();
        assert_eq!(fs::read(name.path()).unwrap(), bytes);
        drop(counter);
        bytes[64 + 3 * 8] = 1;
        assert_eq!(fs::read(name.path()).unwrap(), bytes);
        assert!(StorageCounter::open_for(own_uid(), &name, COUNTERS).is_err());
        assert!(StorageCounter::open_for(own_uid() + 1, &name, 3).is_err());
        fs::remove_file(name.path()).unwrap();
    }
}
