//! The lock of the tier. Unit tests take one whose order of threads they choose.

#[cfg(not(test))]
pub(crate) use parking_lot::Mutex;

#[cfg(test)]
pub(crate) use lmc_testkit::interleave::Mutex;
