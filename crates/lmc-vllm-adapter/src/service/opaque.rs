//! Layouts whose element format nothing on the wire names.

use std::io;

use lmc_key::LayoutFingerprint;
use lmc_memory::DType;

/// Registration of a worker with an opaque layout.
#[derive(Debug)]
pub(crate) struct Opaque {
    /// The layout as it was registered, the same in every generation.
    pub(super) layout: LayoutFingerprint,
    /// True if several workers of one engine may serve one KV rank. A layout of one plane may be
    /// MLA, whose KV cache is the same on every tensor-parallel rank.
    pub(super) rank_is_shared: bool,
    /// True if the registration of this worker led to a warning.
    pub(super) warned: bool,
}

impl Opaque {
    /// Returns the registration; `None` if all element types have a known format.
    pub(crate) fn of(layout: LayoutFingerprint, dtypes: &[DType], shape: &[u64]) -> Option<Self> {
        dtypes
            .iter()
            .any(|dtype| dtype.is_opaque())
            .then_some(Self {
                layout,
                rank_is_shared: shape.len() < 4,
                warned: false,
            })
    }

    /// Draws a fingerprint that no layout and no other generation has.
    pub(super) fn draw(&self) -> io::Result<LayoutFingerprint> {
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).map_err(io::Error::from)?;
        let layout = self.layout.as_bytes();
        let description = [&b"lmc layout 3: generation"[..], layout, &nonce];
        Ok(LayoutFingerprint::of(&description.concat()))
    }
}

/// The way in which a worker of an opaque layout got its generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Joined {
    /// The worker is the first of the generation.
    First,
    /// Other workers have the generation, or this worker had it before.
    Later,
}
