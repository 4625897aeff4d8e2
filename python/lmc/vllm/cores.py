"""The cores for a worker's copies: cores to which vLLM has not bound its computation.

vLLM starts a worker on CPU with the cores of its OpenMP threads in the environment
(VLLM_CPU_OMP_THREADS_BIND), and the OpenMP library binds the worker's first thread when it is
loaded, long before the connector is created. A thread that is started after that inherits the
binding, which may be a single core of the computation.
"""

import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")
# Variables for Intel's, GNU's and any other OpenMP library.
OPENMP = {
    "KMP_AFFINITY": r".*proclist=\[([\d,]+)\]",
    "GOMP_CPU_AFFINITY": r"([\d ]+)",
    "OMP_PLACES": r"\{([\d,]+)\}",
}


@contextmanager
def beside_the_engine() -> Iterator[None]:
    """Starts threads on cores that the engine does not use.

    If the engine uses all cores, the threads run on all cores of the worker's parent. If the engine
    is not bound, or its worker was not started as vLLM starts workers, they run where this thread runs.
    """
    cores = other_cores()
    if not cores:
        yield
        return
    own = os.sched_getaffinity(0)
    # If these cores are no longer available, the threads run where this thread runs.
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)


def other_cores() -> set[int]:
    """Returns the cores for this worker's copies; empty if they may run where the worker runs."""
    bound, parent = _openmp_cores(os.environ), os.getppid()
    starter = multiprocessing.parent_process()
    # Not bound by vLLM; a narrower mask is the user's wish.
    if not bound or starter is None or starter.pid != parent:
        return set()
    try:
        # vLLM binds workers, but not the process that starts them.
        allowed = os.sched_getaffinity(parent)
    except OSError:
        return set()
    # Other ranks have cores of their own, read from their environment: the masks of their threads
    # would include the cores of their copies.
    for process in _children(parent):
        bound |= _openmp_cores(_environment(process))
    left = allowed - bound
    # Copies on a sibling of one of the engine's cores would slow the engine down.
    apart = {core for core in left if not _siblings(core) & bound}
    return apart or left or allowed


def _openmp_cores(environment: Mapping[str, str]) -> set[int]:
    """Returns the cores that vLLM names to the OpenMP library, in each form that vLLM uses."""
    for name, form in OPENMP.items():
        found = re.fullmatch(form, environment.get(name, ""))
        if found is not None:
            return {int(core) for core in re.findall(r"\d+", found[1])}
    return set()


def _environment(process: int) -> dict[str, str]:
    """Returns the variables with which a process was started; none for another user's process."""
    try:
        content = (PROC / str(process) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _siblings(core: int) -> set[int]:
    """Returns the logical cores of a physical core."""
    try:
        text = (CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return {core}
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _threads(process: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC / str(process) / "task")]
    except OSError:
        return []


def _children(process: int) -> list[int]:
    found: list[int] = []
    for thread in _threads(process):
        with suppress(OSError):
            children = PROC / str(process) / "task" / str(thread) / "children"
            found += map(int, children.read_text().split())
    return found
