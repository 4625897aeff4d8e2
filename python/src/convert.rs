//! Values of Python as values of the adapters.

use std::collections::HashMap;

use lmc_vllm_adapter::adapters::{self, AdapterError, ChunkHash, Endpoint, Level, LogLine, Prompt};
use lmc_vllm_adapter::{ConfigValue, RequestConfigs};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PySequence};

/// Bytes of the hash of a chunk.
const HASH: usize = 32;

/// Entries of a request's `kv_transfer_params`.
pub(crate) type Configs<'py> = Option<HashMap<String, Bound<'py, PyAny>>>;

/// Returns the error of Python that says the same.
pub(crate) fn error(error: AdapterError) -> PyErr {
    match error {
        AdapterError::System(error) => PyOSError::new_err(error.to_string()),
        error => PyValueError::new_err(error.to_string()),
    }
}

pub(crate) fn endpoint(text: &str) -> PyResult<Endpoint> {
    text.parse()
        .map_err(|error: adapters::EndpointError| PyValueError::new_err(error.to_string()))
}

/// Returns the entries for the server. Other values than numbers and texts are no value.
pub(crate) fn configs(entries: &Configs<'_>) -> RequestConfigs {
    let mut configs = RequestConfigs::default();
    for (name, value) in entries.iter().flatten() {
        let value = if let Ok(value) = value.cast::<PyBool>() {
            ConfigValue::Bool(value.is_true())
        } else if let Ok(value) = value.extract() {
            ConfigValue::Int(value)
        } else if let Ok(value) = value.extract() {
            ConfigValue::Float(value)
        } else if let Ok(value) = value.extract() {
            ConfigValue::Text(value)
        } else {
            ConfigValue::Nil
        };
        configs.set(name, value);
    }
    configs
}

/// Returns a prompt from its tokens or from the hashes of its chunks, of which exactly one is given. With
/// `is_tail` the hashes are those of the blocks of its tail.
pub(crate) fn prompt(
    tokens: Option<Vec<u32>>,
    hashes: Option<&[u8]>,
    is_tail: bool,
) -> PyResult<Prompt> {
    match (tokens, hashes) {
        (Some(_), None) if is_tail => Err(PyValueError::new_err(
            "a tail is named by chunk_hashes: give these instead of token_ids",
        )),
        (Some(tokens), None) => Ok(Prompt::Tokens(tokens.into())),
        (None, Some(hashes)) => {
            let (hashes, []) = hashes.as_chunks::<HASH>() else {
                return Err(PyValueError::new_err(
                    "chunk hashes must have 32 bytes for each chunk",
                ));
            };
            let hashes = adapters::chunk_hashes(hashes.iter().map(|hash| &hash[..]), 1);
            Ok(match is_tail {
                true => Prompt::Tail(hashes.into()),
                false => Prompt::Chunks(hashes.into()),
            })
        }
        _ => Err(PyValueError::new_err(
            "exactly one of tokens and hashes must be given",
        )),
    }
}

/// Returns the last block hash of each of the first `chunks` chunks.
pub(crate) fn last_hashes(
    block_hashes: &Bound<'_, PySequence>,
    blocks_per_chunk: usize,
    chunks: usize,
) -> PyResult<Vec<ChunkHash>> {
    if blocks_per_chunk == 0 || block_hashes.len()? / blocks_per_chunk < chunks {
        return Err(PyValueError::new_err(
            "there are fewer block hashes than the chunks need",
        ));
    }
    let last = (1..=chunks)
        .map(|chunk| {
            let hash = block_hashes.get_item(chunk * blocks_per_chunk - 1)?;
            Ok(hash.cast_into::<PyBytes>()?)
        })
        .collect::<PyResult<Vec<_>>>()?;
    let last = last.iter().map(|hash| hash.as_bytes());
    Ok(adapters::chunk_hashes(last, 1))
}

/// Returns the hashes of all blocks.
pub(crate) fn all_hashes(block_hashes: &Bound<'_, PySequence>) -> PyResult<Vec<ChunkHash>> {
    let blocks = block_hashes.len()?;
    // One call for all of them: taking each by itself takes ten times as long.
    let joined = PyBytes::new(block_hashes.py(), &[]).call_method1("join", (block_hashes,))?;
    let joined = joined.cast_into::<PyBytes>()?;
    match joined.as_bytes().as_chunks::<HASH>() {
        // A vLLM's hashes have one length.
        (hashes, []) if hashes.len() == blocks => {
            Ok(hashes.iter().copied().map(ChunkHash::new).collect())
        }
        _ => last_hashes(block_hashes, 1, blocks),
    }
}

/// Returns the last block hash of each of the first `chunks` chunks, 32 bytes each. A hash of
/// another length is replaced by its BLAKE3 digest.
#[pyfunction]
pub(crate) fn chunk_hashes<'py>(
    block_hashes: &Bound<'py, PySequence>,
    blocks_per_chunk: usize,
    chunks: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let py = block_hashes.py();
    let hashes = last_hashes(block_hashes, blocks_per_chunk, chunks)?;
    let bytes = hashes.iter().flat_map(|hash| *hash.as_bytes());
    Ok(PyBytes::new(py, &bytes.collect::<Vec<u8>>()))
}

/// Returns lines for the log: level of Python's `logging`, text.
pub(crate) fn log(lines: Vec<LogLine>) -> Vec<(u32, String)> {
    let level = |level| match level {
        Level::Info => 20,
        Level::Warning => 30,
    };
    let lines = lines.into_iter();
    lines.map(|line| (level(line.level), line.text)).collect()
}
