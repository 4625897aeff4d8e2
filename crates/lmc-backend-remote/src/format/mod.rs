//! The layout that all stores share: names, the header of a value, the maps of clears, and the descriptions
//! of spaces. docs/remote-format.md has the tables.
//!
//! Pure functions from bytes to values. Everything read is limited and checked before it is used.

mod clears;
pub use clears::{ClearsError, ClearsRecord, MAX_CLEARS_LEN, Standing};

mod header;
pub use header::{CODEC_RAW, HEADER_LEN, Header, MAX_PAYLOAD_LEN, Refusal};

mod name;
pub use name::{
    ChunkFolder, Generation, Name, NameError, PROBE_FOLDER, PROBE_SPACE, Scope, ValueName, probe,
};
pub(crate) use name::{OLD_ROOT, ROOT};

mod space;
pub use space::{MAX_SPACE_LEN, SpaceError, SpaceRecord, Tenant};

/// The key in the golden bytes and names.
#[cfg(test)]
fn golden_key() -> lmc_key::ChunkKey {
    lmc_key::ChunkKey {
        space: lmc_key::SpaceId::new(std::array::from_fn(|i| i as u8)),
        hash: lmc_key::ChunkHash::new(std::array::from_fn(|i| 16 + i as u8)),
        kv_rank: 258,
        group: 772,
    }
}

/// The folder in the golden names.
#[cfg(test)]
fn golden_folder() -> ChunkFolder {
    ChunkFolder {
        generation: Generation::new(std::array::from_fn(|i| 0xA0 + i as u8)),
        clears: lmc_key::ClearsId::new(std::array::from_fn(|i| 0xC0 + i as u8)),
    }
}
