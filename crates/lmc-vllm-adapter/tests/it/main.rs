//! Tests of the protocol over real connections, in one program.

#[cfg(feature = "adapters")]
mod adapters;
mod clears;
mod common;
mod connections;
mod cut_connections;
mod descriptors;
mod engine_driven;
mod fairness;
mod golden;
mod hostile;
mod identity;
mod interop;
#[cfg(feature = "adapters")]
mod meddling;
mod misses;
#[cfg(feature = "adapters")]
mod on_gpu;
mod orders;
mod server_driven;
mod slower_tiers;
#[cfg(feature = "adapters")]
mod tails;
