//! The lock of the tier. Unit tests replace it with one whose thread interleavings they choose.

#[cfg(not(test))]
pub(crate) use parking_lot::Mutex;

#[cfg(test)]
pub(crate) use lmc_testkit::interleave::Mutex;
