//! TEMPORARY
#![allow(missing_docs, reason = "temporary")]
mod mini;
pub use mini::*;
