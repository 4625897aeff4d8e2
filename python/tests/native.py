"""The native module, a server for it, and what the tests run in processes of their own.

`cargo xtask test-python` builds both and names them: LMC_NATIVE, LMC_PROGRAM.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import lmc

BLOCK, CHUNK = 16, 64
TIMEOUT = 60


def load():
    """Makes `lmc._native` of the library that was built."""
    path = os.environ["LMC_NATIVE"]
    loader = ExtensionFileLoader("lmc._native", path)
    spec = importlib.util.spec_from_file_location("lmc._native", path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["lmc._native"] = lmc._native = module
    return module


@contextlib.contextmanager
def server():
    """The endpoint of a server."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lmc.sock")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [os.environ["LMC_PROGRAM"], "serve", "--port", port, "--http-port", "0"]
        command += ["--ipc-path", path, "--l1-size-gb", "0.125", "--chunk-size", str(CHUNK)]
        command += ["--shm-name", "sealed"]
        with open(os.path.join(folder, "log"), "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                if not eventually(lambda: os.path.exists(path) or process.poll() is not None):
                    raise AssertionError("no server")
                if process.poll() is not None:
                    log.seek(0)
                    raise AssertionError(log.read())
                yield f"ipc://{path}"
            finally:
                process.kill()
                process.wait()


def eventually(what):
    """Tries until it returns something true; that value."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.002)
    return None


def engine(hash_mode=True):
    return {"model": "m", "world_size": 1, "hash_mode": hash_mode, "block_size": BLOCK}


def found(scheduler, request_id, **prompt):
    """The tokens that a lookup finds."""
    scheduler.maybe_submit_lookup_request(request_id, **prompt)
    eventually(lambda: scheduler.check_lookup_result(request_id) is not None)
    tokens = scheduler.check_lookup_result(request_id)
    scheduler.end_session(request_id)
    return tokens


class Cache:
    """A worker with a KV cache of its own."""

    BLOCKS = 32

    def __init__(self, native, endpoint, hash_mode=True):
        import ctypes

        self.worker = native.WorkerAdapter(endpoint, kv_rank=0, **engine(hash_mode))
        self.memory = (ctypes.c_float * (self.BLOCKS * BLOCK))()
        tensor = (ctypes.addressof(self.memory), (self.BLOCKS, BLOCK, 1, 1), (BLOCK, 1, 1, 1))
        groups = [([(*tensor, "float32")], None)]
        self.worker.register_kv_caches(groups, layout="NHD", tokens_per_block=BLOCK)

    def store(self, request_id, chunks, **prompt):
        from lmc.ops import LoadStoreOp

        blocks = list(range(chunks * CHUNK // BLOCK))
        self.worker.submit_store_request(
            LoadStoreOp(request_id, [blocks], 0, chunks * CHUNK, **prompt)
        )
        return eventually(lambda: request_id in self.worker.get_finished({request_id})[0])


def threads():
    """The names of lmc's threads in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if name.startswith("lmc"))


def use(endpoint, seed):
    """Makes both adapters, stores and looks up, and ends them. Nothing may be there before."""
    native = load()
    assert threads() == [], threads()
    cache = Cache(native, endpoint)
    scheduler = native.SchedulerAdapter(endpoint, **engine())
    assert threads(), "the adapters have threads"
    assert scheduler.healthy and cache.worker.healthy, scheduler.take_log()
    name = bytes([seed]) * 32
    assert cache.store(f"s{seed}", 1, chunk_hashes=name), cache.worker.take_log()
    blocks = [bytes([200 + at]) * 32 for at in range(CHUNK // BLOCK - 1)] + [name]
    assert found(scheduler, f"l{seed}", block_hashes=blocks) == CHUNK, scheduler.take_log()
    cache.worker.shutdown()
    scheduler.shutdown()
    # A thread that was joined may be in the list for a moment.
    eventually(lambda: not threads())
    assert threads() == [], threads()


def use_forked(endpoint, seed):
    """The same in a process that was forked after the import, and then in this one."""
    load()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            use(endpoint, seed)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    use(endpoint, seed + 1)


def use_spawned(endpoint, seed):
    """The same in a process that was spawned."""
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=use, args=(endpoint, seed))
    child.start()
    child.join(TIMEOUT)
    assert child.exitcode == 0, child.exitcode


def leave_alive(endpoint, seed):
    """Ends the interpreter with copies and lookups under way."""
    from lmc.ops import LoadStoreOp

    native = load()
    cache = Cache(native, endpoint)
    scheduler = native.SchedulerAdapter(endpoint, **engine())
    blocks = list(range(CHUNK // BLOCK))
    for at in range(200):
        name = bytes([seed, at]) * 16
        cache.worker.submit_store_request(
            LoadStoreOp(f"s{at}", [blocks], 0, CHUNK, chunk_hashes=name)
        )
        scheduler.maybe_submit_lookup_request(f"l{at}", block_hashes=[name] * len(blocks))
    # Until the interpreter has gone.
    sys.kept = cache, scheduler


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
