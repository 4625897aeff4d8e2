//! Tests of the public API of the crate, in one program.

mod flaky;
#[cfg(feature = "nixl")]
mod nixl;
mod socket;
mod two_processes;

/// Starts and kills channels.
mod support {
    #[cfg(feature = "nixl")]
    pub(crate) mod nixl;
    pub(crate) mod socket;
}
