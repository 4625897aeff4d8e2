//! The scheduler's side.

use std::collections::HashMap;

use lmc_vllm_adapter::adapters::{self, EngineDescription, Prompt};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PySequence;

use crate::convert::{self, Configs};

/// Lookups of an engine's scheduler.
#[pyclass(frozen, module = "lmc._native")]
pub(crate) struct SchedulerAdapter(adapters::SchedulerAdapter);

#[pymethods]
impl SchedulerAdapter {
    #[new]
    #[pyo3(signature = (endpoint, *, model, world_size, block_size, num_kv_readers = 1, identity = String::new(), hash_mode = true, tails = true))]
    #[allow(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn new(
        py: Python<'_>,
        endpoint: &str,
        model: String,
        world_size: u32,
        block_size: u32,
        num_kv_readers: u32,
        identity: String,
        hash_mode: bool,
        tails: bool,
    ) -> PyResult<Self> {
        let endpoint = convert::endpoint(endpoint)?;
        let engine = EngineDescription {
            model,
            world_size,
            num_kv_readers,
            identity,
            hash_mode,
            block_size,
            tails,
        };
        py.detach(|| adapters::SchedulerAdapter::start(endpoint, engine))
            .map(Self)
            .map_err(convert::error)
    }

    #[getter]
    fn chunk_size(&self) -> u32 {
        self.0.server().chunk_size
    }

    #[getter]
    fn num_blocks_per_chunk(&self) -> u32 {
        self.0.server().num_blocks_per_chunk
    }

    #[getter]
    fn hash_mode(&self) -> bool {
        self.0.server().hash_mode
    }

    #[getter]
    fn tails(&self) -> bool {
        self.0.server().tails
    }

    #[getter]
    fn notices(&self) -> bool {
        self.0.server().notices
    }

    #[getter]
    fn healthy(&self) -> bool {
        self.0.server().is_healthy
    }

    #[pyo3(signature = (request_id, *, token_ids = None, block_hashes = None, cache_salt = "", configs = None))]
    fn maybe_submit_lookup_request(
        &self,
        request_id: &str,
        token_ids: Option<Vec<u32>>,
        block_hashes: Option<Bound<'_, PySequence>>,
        cache_salt: &str,
        configs: Configs<'_>,
    ) -> PyResult<()> {
        let prompt = match (token_ids, block_hashes) {
            (Some(tokens), None) => convert::prompt(Some(tokens), None, false)?,
            (None, Some(hashes)) if self.0.server().tails => {
                Prompt::Blocks(convert::all_hashes(&hashes)?.into())
            }
            (None, Some(hashes)) => {
                let per_chunk = self.0.server().num_blocks_per_chunk as usize;
                let chunks = hashes.len()?.checked_div(per_chunk).unwrap_or(0);
                let hashes = convert::last_hashes(&hashes, per_chunk.max(1), chunks)?;
                Prompt::Chunks(hashes.into())
            }
            _ => {
                return Err(PyValueError::new_err(
                    "exactly one of token_ids and block_hashes must be given",
                ));
            }
        };
        let configs = convert::configs(&configs);
        (self.0).maybe_submit_lookup_request(request_id, &prompt, cache_salt, &configs);
        Ok(())
    }

    fn check_lookup_result(&self, request_id: &str) -> Option<u64> {
        self.0.check_lookup_result(request_id)
    }

    fn lookup_tiers(&self, request_id: &str) -> Vec<(String, u64)> {
        self.0.lookup_tiers(request_id)
    }

    fn cleanup_lookup_result(&self, request_id: &str) {
        self.0.cleanup_lookup_result(request_id);
    }

    fn end_session(&self, request_id: &str) {
        self.0.end_session(request_id);
    }

    fn reset_cache(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.reset_cache())
    }

    fn stats(&self) -> HashMap<&'static str, u64> {
        let stats = self.0.stats();
        HashMap::from([
            ("lookups", stats.lookups),
            ("lookups_failed", stats.lookups_failed),
            ("lookup_tokens", stats.lookup_tokens),
            ("hit_tokens", stats.hit_tokens),
            ("scheduler_connections_lost", stats.connections_lost),
        ])
    }

    fn take_log(&self) -> Vec<(u32, String)> {
        convert::log(self.0.take_log())
    }

    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.0.shutdown());
    }
}
