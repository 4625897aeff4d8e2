"""The identity record: what decides whether two engines' chunks mean the same.

Scheduler and workers of one engine make the same text, and so do engines that may share chunks. It
holds no paths and nothing that differs between processes of one engine.
"""

import errno
import hashlib
import json
import os
import pickle
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

VERSION = 2
# Hash algorithms whose seed vLLM fixes, so that engines agree on hashes without PYTHONHASHSEED.
CRYPTOGRAPHIC = frozenset(("sha256", "sha256_cbor"))
# vLLM's default for PYTHONHASHSEED with these.
DEFAULT_SEED = "vllm-none-hash"
# Fields of a model's config that name where it lies or which library wrote it.
NOT_IN_DIGEST = frozenset(("_name_or_path", "name_or_path", "transformers_version", "_commit_hash"))
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Bytes at each end of a file of weights that have a part in its digest.
SAMPLE = 64 << 10
# Features of a processor by which vLLM's attention on CPU decides how it packs keys (`_get_attn_isa`
# in `vllm/v1/attention/backends/cpu_attn.py`).
PACKINGS = frozenset(("amx_tile", "avx512f"))
# Instead of the ends of a file that this process may not read. Nor can vLLM load it.
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class HashMode:
    """How an engine's chunks are named."""

    # By vLLM's block hashes; by tokens otherwise.
    by_hash: bool
    record: dict[str, object]
    # Why block hashes cannot be used though they were asked for.
    warning: str | None = None


def hash_mode(algorithm: str, wanted: bool, seed: str | None) -> HashMode:
    """Decides how chunks are named. `seed` is PYTHONHASHSEED."""
    tokens: dict[str, object] = {"mode": "tokens"}
    if not wanted:
        return HashMode(False, tokens)
    if algorithm not in CRYPTOGRAPHIC and seed is None:
        warning = (
            f"block hashes of --prefix-caching-hash-algo {algorithm} differ between processes "
            "without PYTHONHASHSEED, so lmc names chunks by their tokens, and requests with images "
            "or prompt embeddings are not cached: set PYTHONHASHSEED to one value for all engines, "
            "or use sha256"
        )
        return HashMode(False, tokens, warning)
    record: dict[str, object] = {
        "mode": "blocks",
        "algorithm": algorithm,
        # A seed may be a secret.
        "seed": digest([DEFAULT_SEED if seed is None else seed]),
    }
    if not algorithm.endswith("_cbor"):
        # These algorithms hash pickled objects, and pickles differ between protocols.
        record["pickle"] = pickle.HIGHEST_PROTOCOL
    return HashMode(True, record)


def identity_record(
    config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    mode: HashMode,
    engine: str,
    device: str,
    layers: list[tuple[int, int]],
    windows: list[int | None] | None,
    text: str,
) -> str:
    """Returns the record as JSON with sorted keys.

    `engine` is the engine's name and release, `device` that of `device_name`, `layers` the first
    layer and the one after the last of each pipeline rank, `windows` the tokens that
    each KV group looks back, unless there is one group of full attention, and `text` the user's
    own.
    """
    model, cache, lora = config.model_config, config.cache_config, config.lora_config
    record: dict[str, object] = {
        "version": VERSION,
        "engine": engine,
        "model": model_name(model.model),
        "revision": model.revision,
        "code_revision": model.code_revision,
        # The snapshot of a hub name, where vLLM knows it: a branch moves.
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "config": digest(_config_without_paths(model)),
        "max_model_len": _length_that_matters(model),
        "kv_cache_dtype": cache.cache_dtype,
        "kv_cache_dtype_skip_layers": sorted(map(str, cache.kv_cache_dtype_skip_layers)),
        "kv_layout": kv_cache_config.kv_cache_layout,
        "device": device,
        # Backends lay keys and values out differently under equal shapes.
        "attention": [
            str(config.attention_config.backend),
            sorted((kind, str(one)) for kind, one in config.attention_config.backend_per_kind.items()),
        ],
        "block_size": cache.block_size,
        "layers": [list(layer) for layer in layers],
        "lora": None
        if lora is None
        else {
            "max_rank": lora.max_lora_rank,
            "dtype": str(lora.lora_dtype),
            "target_modules": lora.target_modules and sorted(lora.target_modules),
        },
        "speculative": _speculative(config),
        "hash": mode.record,
    }
    if windows is not None:
        record["windows"] = windows
    if text:
        record["identity"] = text
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def device_name(
    kind: str, capability: tuple[int, int] | None, cpuinfo: str = "/proc/cpuinfo"
) -> str:
    """Returns the kind of device, with what decides how vLLM lays its KV cache out.

    That is the compute capability of a GPU, from which the choice of the attention backend
    follows, and of a CPU its architecture and some of its features.
    """
    if kind != "cpu":
        return kind if capability is None else f"{kind} {capability[0]}.{capability[1]}"
    with open(cpuinfo) as lines:
        features = next((line.split() for line in lines if line.startswith("flags")), [])
    return " ".join(("cpu", platform.machine(), *sorted(PACKINGS.intersection(features))))


def model_name(model: str) -> str:
    """Returns a hub name as it is, and a digest for a folder or file.

    The digest covers the path, and of each file of weights the name, size, first and last 64 KiB.
    """
    if not os.path.exists(model):
        return model
    path = os.path.realpath(model)
    return "local:" + digest([path, sorted(_weights(path))])


def adapter_digest(path: str) -> str | None:
    """Returns a digest of a LoRA adapter's folder, as that of a model; `None` for a hub name.

    It covers the adapter's config as well. Raises `OSError` for files that are gone or cannot be
    read: vLLM may have loaded the adapter before.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path) and not os.path.isabs(path):
        return None
    try:
        with open(os.path.join(path, "adapter_config.json"), "rb") as config:
            settings = hashlib.sha256(config.read()).hexdigest()
    except FileNotFoundError:
        settings = ""
    weights = sorted(_weights(path))
    for name, _, sample in weights:
        if sample == UNREADABLE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    return digest([settings, weights])


def digest(value: object) -> str:
    """Returns the SHA-256 digest of a value's JSON text with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weights(path: str) -> Iterable[tuple[str, int, str]]:
    if os.path.isfile(path):
        yield "", *_sample(path)
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(WEIGHTS) and entry.is_file():
                yield entry.name, *_sample(entry.path)


def _sample(path: str) -> tuple[int, str]:
    """Returns a file's size and the digest of its ends."""
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            sample = file.read(SAMPLE)
            file.seek(max(size - SAMPLE, 0))
            sample += file.read(SAMPLE)
    except PermissionError:
        return size, UNREADABLE
    return size, hashlib.sha256(sample).hexdigest()


def _config_without_paths(model: "ModelConfig") -> object:
    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in NOT_IN_DIGEST}
        if isinstance(value, (list, tuple)):
            return [strip(item) for item in value]
        return value

    return strip(model.hf_config.to_dict())


def _length_that_matters(model: "ModelConfig") -> int | None:
    """Returns the longest length of a prompt where the rotary embedding depends on it."""
    text: Any = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = (
        rope.get("rope_type", rope.get("type")),
        *(inner.get("rope_type") for inner in rope.values() if isinstance(inner, dict)),
    )
    return model.max_model_len if {"longrope", "su", "dynamic"} & set(kinds) else None


def _speculative(config: "VllmConfig") -> object:
    """Names the draft model, whose layers may lie in the same KV group."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    return {
        "method": speculative.method,
        "model": None if draft is None else model_name(draft.model),
        "config": None if draft is None else digest(_config_without_paths(draft)),
    }
