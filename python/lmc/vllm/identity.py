"""The identity record: it decides whether the chunks of two engines have the same meaning.

Scheduler and workers of one engine create the same text, and so do engines that may share chunks. The
text holds no paths and nothing that differs between processes of one engine.
"""

import contextlib
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

VERSION = 3
# Hash algorithms whose seed vLLM fixes, so that engines agree on hashes without PYTHONHASHSEED.
CRYPTOGRAPHIC = frozenset(("sha256", "sha256_cbor"))
# vLLM's default for PYTHONHASHSEED with these algorithms.
DEFAULT_SEED = "vllm-none-hash"
# Fields of a model's config that name its location or the library that wrote it.
NOT_IN_DIGEST = frozenset(("_name_or_path", "name_or_path", "transformers_version", "_commit_hash"))
# Fields that vLLM's models change when they are built, only in the worker's process.
CHANGED_BY_MODELS = frozenset(("rope_parameters", "rope_scaling"))
CONFIG_FILES = ("config.json", "params.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Bytes at each end of a file of weights that its digest covers.
SAMPLE = 64 << 10
# Features of a processor by which vLLM's attention on CPU decides how it packs keys (`_get_attn_isa`
# in `vllm/v1/attention/backends/cpu_attn.py`).
PACKINGS = frozenset(("amx_tile", "avx512f"))
# Replaces the ends of a file that this process may not read. vLLM cannot load such a file either.
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class HashMode:
    """The way in which an engine's chunks are named."""

    # True: by vLLM's block hashes; False: by tokens.
    by_hash: bool
    record: dict[str, object]
    # The reason why block hashes cannot be used although they were requested.
    warning: str | None = None


def hash_mode(algorithm: str, wanted: bool, seed: str | None) -> HashMode:
    """Decides the way in which chunks are named. `seed` is PYTHONHASHSEED."""
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

    `engine` is the engine's name and release, and `device` the result of `device_name`. `layers` has
    for each pipeline rank its first layer and the layer after its last. `windows` has the tokens that
    each KV group looks back; it is `None` for a single group with full attention. `text` is the
    user's own text.
    """
    model, cache, lora = config.model_config, config.cache_config, config.lora_config
    record: dict[str, object] = {
        "version": VERSION,
        "engine": engine,
        "model": model_name(model.model),
        "revision": model.revision,
        "code_revision": model.code_revision,
        # The snapshot of a hub name, if vLLM knows it: a branch moves.
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "config": digest(_config(model)),
        "max_model_len": _length_that_matters(model),
        "kv_cache_dtype": cache.cache_dtype,
        "kv_cache_dtype_skip_layers": sorted(map(str, cache.kv_cache_dtype_skip_layers)),
        "kv_layout": kv_cache_config.kv_cache_layout,
        "device": device,
        # Backends have different layouts of keys and values under equal shapes.
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
    """Returns the kind of device, with the properties that decide the layout of vLLM's KV cache.

    For a GPU this is the compute capability, which decides the attention backend; for a CPU it is the
    architecture and some features.
    """
    if kind != "cpu":
        return kind if capability is None else f"{kind} {capability[0]}.{capability[1]}"
    with open(cpuinfo) as lines:
        features = next((line.split() for line in lines if line.startswith("flags")), [])
    return " ".join(("cpu", platform.machine(), *sorted(PACKINGS.intersection(features))))


def model_name(model: str) -> str:
    """Returns a hub name as it is, and a digest for a folder or file.

    The digest covers the path, and for each file of weights its name, its size, and its first and last
    64 KiB.
    """
    if not os.path.exists(model):
        return model
    path = os.path.realpath(model)
    return "local:" + digest([path, sorted(_weights(path))])


def adapter_digest(path: str) -> str | None:
    """Returns a digest of a LoRA adapter's folder, as for a model; `None` for a hub name.

    The digest also covers the adapter's config. Raises `OSError` if files are gone or cannot be read,
    which is possible because vLLM may have loaded the adapter earlier.
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


def _config(model: "ModelConfig") -> object:
    """Returns a model's config without paths, and the user's changes to it.

    The config is read from files, if there are some: a model may change its config when it is built,
    as DeepSeek's models do, and the scheduler may run in a process that builds no model.
    """
    source = getattr(model, "hf_config_path", None) or model.model
    found = {name: _config_file(source, name, model.revision) for name in CONFIG_FILES}
    config: object = {name: _without(NOT_IN_DIGEST, text) for name, text in found.items() if text}
    if not config:
        config = _without(NOT_IN_DIGEST | CHANGED_BY_MODELS, model.hf_config.to_dict())
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides):
        overrides = getattr(overrides, "__qualname__", type(overrides).__qualname__)
    return [config, overrides or None]


def _config_file(source: str, name: str, revision: str | None) -> object:
    """Returns the content of a file in a model's folder or in a local hub snapshot; `None` without one."""
    path: object = os.path.join(source, name)
    if not os.path.exists(source):
        # Fails if the source is not a hub name, or without the library that knows the snapshots.
        with contextlib.suppress(ImportError, ValueError):
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(source, name, revision=revision)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        text = file.read()
    try:
        return json.loads(text)
    except ValueError:
        return hashlib.sha256(text).hexdigest()


def _without(fields: frozenset[str], value: object) -> object:
    """Returns a config without fields of these names, at any depth."""
    if isinstance(value, dict):
        return {k: _without(fields, v) for k, v in value.items() if k not in fields}
    if isinstance(value, (list, tuple)):
        return [_without(fields, item) for item in value]
    return value


def _length_that_matters(model: "ModelConfig") -> int | None:
    """Returns the longest length of a prompt if the rotary embedding depends on it, else `None`."""
    text: Any = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = (
        rope.get("rope_type", rope.get("type")),
        *(inner.get("rope_type") for inner in rope.values() if isinstance(inner, dict)),
    )
    return model.max_model_len if {"longrope", "su", "dynamic"} & set(kinds) else None


def _speculative(config: "VllmConfig") -> object:
    """Returns the draft model, whose layers may be in the same KV group."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    return {
        "method": speculative.method,
        "model": None if draft is None else model_name(draft.model),
        "config": None if draft is None else digest(_config(draft)),
    }
