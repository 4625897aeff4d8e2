//! The `lmc` daemon and its command-line tools, as a library so that tests can run them.
//!
//! [`cli`] reads the command line, [`config`] merges flags, variables and file, `daemon`
//! starts and stops everything, [`http`] answers browsers, scrapers and LMCache's own tools.
//! `lmc-vllm-adapter` carries out the operations of the protocol.

// `println!` panics when the reader of a pipe has closed it.
#![deny(clippy::print_stdout)]

mod bars;
mod bench;
pub mod cli;
pub mod config;
mod daemon;
mod disk;
mod doctor;
mod drain;
pub mod http;
mod http_client;
mod late_filter;
mod limits;
mod log;
mod losses;
pub mod metrics;
mod nixl;
mod notices;
mod occupant;
mod peers;
mod pool;
mod pool_size;
mod process;
mod proxy;
mod quotas;
pub mod reload;
mod remote;
mod salts;
mod signals;
mod spans;
mod start;
mod state;
mod stdout;
mod supervisor;
mod text;
mod tools;
mod trace;
mod vllm;

pub use pool_size::{CgroupLimit, FreeMemory, choose_pool_size};
pub use vllm::transfer_config;

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
