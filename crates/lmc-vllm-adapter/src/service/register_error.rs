//! Why a registration was refused.

use lmc_memory::cuda::CudaError;
use thiserror::Error;

/// Why a registration was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum RegisterError {
    /// The description is invalid, or cannot be served here.
    #[error("{0}")]
    Invalid(String),
    /// Memory that this server cannot open.
    #[error(
        "engine memory of kind {0:?} cannot be opened by this server: it serves host memory \
         (cpu_shm) and CUDA memory (cuda, cuda_raw); use \
         lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    Memory(String),
    /// Memory on a GPU of a user for whom this server opens none: the driver does not name the
    /// memory's owner.
    #[error(
        "memory on a GPU is opened for this server's own user and for root only, because the CUDA \
         driver does not say whose memory a handle opens: run the server as the engine's user, or \
         use lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    OtherUser,
    /// Memory on a GPU that this server cannot open.
    #[error(
        "the engine's CUDA memory cannot be opened: {0}; to serve the engine without it, use \
         lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    Cuda(#[from] CudaError),
    /// The user that names the memory is not known, so the server cannot check that the memory
    /// belongs to that user.
    #[error(
        "the user of this connection is not known, so this server maps no memory for it: connect \
         over loopback from the server's own network namespace, or use \
         lmcache.mp.mp_transfer_mode=engine_driven; for memory on a GPU, the server's --isolated-ipc \
         and the engine's lmcache.mp.isolated_ipc serve containers that share nothing else"
    )]
    UnknownUser,
}

pub(super) fn invalid(error: impl std::fmt::Display) -> RegisterError {
    RegisterError::Invalid(error.to_string())
}
