//! The engine's side of the protocol: a scheduler and a worker that use a server.
//!
//! Each adapter has one connection, on a thread of its own (`link.rs`), and never waits for the
//! network on a thread of the engine, except where a method's documentation says so. A server that
//! is gone costs misses: requests are answered at once, and the connection is made again without
//! the engine's help.
//!
//! An adapter works in the process that made it. In a process that was forked from it, lookups are
//! misses, transfers do not begin, and the adapter may be shut down and dropped.

mod common;
mod endpoint;
mod link;
mod log;
mod mover;
mod prompt;
mod scheduler;
mod tensors;
mod work;
mod worker;
mod worker_state;

pub use common::ServerState;
pub use endpoint::{Endpoint, EndpointError};
pub use link::local_server;
pub use lmc_key::ChunkHash;
#[doc(no_inline)]
pub use lmc_memory::KvOrder;
pub use log::{Level, LogLine};
pub use prompt::{Prompt, chunk_hashes};
pub use scheduler::{SchedulerAdapter, SchedulerStats};
pub use tensors::{KvLayers, LayerGroup, LayerTensor};
pub use work::{EndedStore, Finished, LoadStoreOp};
pub use worker::{EngineStream, WorkerAdapter, WorkerStats};

use std::io;
use std::sync::Arc;
use std::time::Duration;

use lmc_memory::cuda::CudaError;
use thiserror::Error;

/// Description of an engine, on which its adapters must agree.
#[derive(Debug, Clone)]
pub struct EngineDescription {
    /// Model name as the engine gives it.
    pub model: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// Number of workers that will each retrieve the same rank: more than 1 for MLA under tensor
    /// parallelism.
    pub num_kv_readers: u32,
    /// Identity record of the engine. Chunks are shared between engines of equal records only.
    pub identity: String,
    /// True if chunks are named by the engine's own block hashes, where the server understands
    /// them. Otherwise they are named by the prompt's tokens, which the server hashes.
    pub hash_mode: bool,
    /// Tokens of one block of the engine.
    pub block_size: u32,
    /// True if the *tail* is cached too: the blocks after a prompt's last whole chunk. It is cached
    /// if chunks are named by block hashes and have several blocks, and the server accepts tails.
    pub tails: bool,
}

/// Timeouts of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of a constructor, and of a registration, for the server. Default: 5 s.
    pub start: Duration,
    /// Timeout of an answer that needs no work of the server. Default: 5 s.
    pub answer: Duration,
    /// Timeout of the answer to a ping, after which the server is considered dead. It is longer
    /// when the machine is so busy that the wait itself is late. Default: 2 s.
    pub ping: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(5),
            answer: Duration::from_secs(5),
            ping: Duration::from_secs(2),
        }
    }
}

/// Why an adapter cannot be made or used.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// A thread cannot be started, or the system has no random bytes.
    #[error("cannot start the adapter: {0}")]
    System(#[source] Arc<io::Error>),
    /// The server's chunks are not whole blocks of the engine.
    #[error(
        "the server's chunk size {chunk_size} is not a multiple of the engine's block size \
         {block_size}: start the server with a --chunk-size that is"
    )]
    ChunkSize {
        /// Tokens of one chunk of the server.
        chunk_size: u32,
        /// Tokens of one block of the engine.
        block_size: u32,
    },
    /// The GPU that the engine's memory lies on cannot be used.
    #[error("the KV cache's GPU cannot be used: {0}")]
    Gpu(#[from] CudaError),
    /// A value from the engine is invalid.
    #[error("{0}")]
    Invalid(String),
}

impl From<io::Error> for AdapterError {
    fn from(error: io::Error) -> Self {
        Self::System(Arc::new(error))
    }
}
