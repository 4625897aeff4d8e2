//! The worker's side.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use lmc_vllm_adapter::adapters::{
    self, EngineDescription, EngineStream, KvLayers, KvOrder, LayerGroup, LayerTensor,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::{self, Configs};

/// An object with the attributes of `lmc.ops.LoadStoreOp`.
#[derive(FromPyObject)]
struct LoadStoreOp<'py> {
    request_id: String,
    block_ids: Vec<Vec<u32>>,
    start: usize,
    end: usize,
    token_ids: Option<Vec<u32>>,
    chunk_hashes: Option<Bound<'py, PyBytes>>,
    is_tail: bool,
    cache_salt: String,
    configs: Configs<'py>,
    skip_first_n_tokens: usize,
    store_number: Option<u64>,
}

impl LoadStoreOp<'_> {
    fn convert(self) -> PyResult<adapters::LoadStoreOp> {
        if self.start > self.end {
            return Err(PyValueError::new_err("start must not be above end"));
        }
        let hashes = self.chunk_hashes.as_ref().map(|hashes| hashes.as_bytes());
        Ok(adapters::LoadStoreOp {
            prompt: convert::prompt(self.token_ids, hashes, self.is_tail)?,
            request_id: self.request_id,
            tokens: self.start..self.end,
            block_ids: self.block_ids,
            skip_first_n_tokens: self.skip_first_n_tokens,
            cache_salt: self.cache_salt,
            configs: convert::configs(&self.configs),
            store_number: self.store_number,
        })
    }
}

fn convert_all(ops: Vec<LoadStoreOp<'_>>) -> PyResult<Vec<adapters::LoadStoreOp>> {
    ops.into_iter().map(LoadStoreOp::convert).collect()
}

fn after(stream: Option<u64>) -> Option<EngineStream> {
    // SAFETY: the caller names a stream of the GPU whose memory it has registered, as the methods' text
    // demands.
    stream.map(|stream| unsafe { EngineStream::new(stream) })
}

fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Address, shape, strides in elements and element type of a layer's tensor.
type Tensor = (usize, Vec<u64>, Vec<u64>, String);

/// Copies between an engine's KV cache and the server's pool.
#[pyclass(frozen, module = "lmc._native")]
pub(crate) struct WorkerAdapter(adapters::WorkerAdapter);

#[pymethods]
impl WorkerAdapter {
    #[new]
    #[pyo3(signature = (endpoint, *, model, world_size, kv_rank, block_size, num_kv_readers = 1, identity = String::new(), hash_mode = true, tails = true, copy_threads = 1))]
    #[allow(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn new(
        py: Python<'_>,
        endpoint: &str,
        model: String,
        world_size: u32,
        kv_rank: u32,
        block_size: u32,
        num_kv_readers: u32,
        identity: String,
        hash_mode: bool,
        tails: bool,
        copy_threads: usize,
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
        py.detach(|| adapters::WorkerAdapter::start(endpoint, engine, kv_rank, copy_threads))
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
    fn healthy(&self) -> bool {
        self.0.server().is_healthy
    }

    fn unregister_kv_caches(&self, py: Python<'_>) {
        py.detach(|| self.0.unregister_kv_caches());
    }

    #[pyo3(signature = (groups, *, layout, tokens_per_block, gpu = None))]
    fn register_kv_caches(
        &self,
        py: Python<'_>,
        groups: Vec<(Vec<Tensor>, Option<u32>)>,
        layout: &str,
        tokens_per_block: u32,
        gpu: Option<String>,
    ) -> PyResult<()> {
        let order = match layout {
            "NHD" => KvOrder::TokensFirst,
            "HND" => KvOrder::HeadsFirst,
            other => {
                let text = format!("layout must be NHD or HND, found {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        let tensor = |(data, shape, strides, dtype)| LayerTensor {
            data,
            shape,
            strides,
            dtype,
        };
        let group = |(tensors, window): (Vec<Tensor>, _)| LayerGroup {
            tensors: tensors.into_iter().map(tensor).collect(),
            window,
        };
        let groups = groups.into_iter().map(group).collect();
        // SAFETY: the caller keeps the tensors until `shutdown` has returned, as the method's text
        // demands; their memory is the engine's, to which no Rust code has a reference.
        let mut layers = unsafe { KvLayers::new(groups, order, tokens_per_block) };
        if let Some(uuid) = gpu {
            layers = layers.on_gpu(uuid);
        }
        py.detach(|| self.0.register_kv_caches(layers))
            .map_err(convert::error)
    }

    fn submit_store_request(&self, op: LoadStoreOp<'_>) -> PyResult<()> {
        self.0.submit_store_request(op.convert()?);
        Ok(())
    }

    fn submit_retrieve_request(&self, op: LoadStoreOp<'_>) -> PyResult<()> {
        self.0.submit_retrieve_request(op.convert()?);
        Ok(())
    }

    #[pyo3(signature = (ops, *, stream = None))]
    fn batched_submit_store_requests(
        &self,
        ops: Vec<LoadStoreOp<'_>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let ops = convert_all(ops)?;
        self.0.batched_submit_store_requests(ops, after(stream));
        Ok(())
    }

    #[pyo3(signature = (ops, *, stream = None))]
    fn batched_submit_retrieve_requests(
        &self,
        ops: Vec<LoadStoreOp<'_>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let ops = convert_all(ops)?;
        self.0.batched_submit_retrieve_requests(ops, after(stream));
        Ok(())
    }

    fn get_finished(
        &self,
        finished_req_ids: HashSet<String>,
    ) -> (HashSet<String>, HashSet<String>, HashSet<String>) {
        let finished = self.0.get_finished(finished_req_ids);
        (finished.stores, finished.retrieves, finished.failed)
    }

    fn get_block_ids_with_load_errors(&self) -> HashSet<u32> {
        self.0.get_block_ids_with_load_errors()
    }

    fn take_ended_stores(&self) -> Vec<(u64, Vec<u64>)> {
        let ended = self.0.take_ended_stores().into_iter();
        ended.map(|store| (store.number, store.chunks)).collect()
    }

    fn wait_until_reserved(
        &self,
        py: Python<'_>,
        request_ids: Vec<String>,
        timeout: f64,
    ) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        Ok(py.detach(|| self.0.wait_until_reserved(&request_ids, timeout)))
    }

    fn has_stores(&self, request_id: &str) -> bool {
        self.0.has_stores(request_id)
    }

    fn wait_for_stores(
        &self,
        py: Python<'_>,
        request_ids: Vec<String>,
        timeout: f64,
    ) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        Ok(py.detach(|| self.0.wait_for_stores(&request_ids, timeout)))
    }

    fn wait_for_stores_before(
        &self,
        py: Python<'_>,
        requests: HashMap<String, usize>,
        timeout: f64,
    ) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        let requests: Vec<_> = requests.into_iter().collect();
        Ok(py.detach(|| self.0.wait_for_stores_before(&requests, timeout)))
    }

    fn stats(&self) -> HashMap<&'static str, u64> {
        let stats = self.0.stats();
        HashMap::from([
            ("stored_chunks", stats.stored_chunks),
            ("stored_bytes", stats.stored_bytes),
            ("stores_failed", stats.stores_failed),
            ("retrieved_chunks", stats.retrieved_chunks),
            ("retrieved_bytes", stats.retrieved_bytes),
            ("retrieves_failed", stats.retrieves_failed),
            ("copy_nanos", stats.copy_nanos),
            ("worker_connections_lost", stats.connections_lost),
        ])
    }

    fn take_log(&self) -> Vec<(u32, String)> {
        convert::log(self.0.take_log())
    }

    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.0.shutdown());
    }
}
