//! `lmc._native`: the adapters of `lmc-vllm-adapter` for Python.
//!
//! Values are converted here and nothing else is done. Calls that may wait release the
//! interpreter's lock; the others are shorter than releasing it. No thread of the adapters ever
//! touches Python.

mod convert;
mod scheduler;
mod worker;

use pyo3::prelude::*;

/// Adapters between an engine and `lmc serve`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::convert::chunk_hashes;
    #[pymodule_export]
    use crate::scheduler::SchedulerAdapter;
    #[pymodule_export]
    use crate::worker::WorkerAdapter;
}
