"""Cores of the threads that copy, in processes that are bound as vLLM binds its workers."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from lmc.vllm import cores

ROOT = Path(__file__).parent.parent


def workers(allowed, *ranks):
    """Cores of the thread that copies in each rank, and of its first thread afterwards."""
    command = [sys.executable, "-m", "tests.bound", json.dumps(allowed), json.dumps(ranks)]
    environment = {name: os.environ[name] for name in set(os.environ) - set(cores.OPENMP)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Bound(unittest.TestCase):
    def setUp(self):
        self.cores = sorted(os.sched_getaffinity(0))
        if len(self.cores) < 2:
            self.skipTest("SKIPPED: one core")

    def test_copies_run_on_the_cores_that_the_engine_is_not_bound_to(self):
        both = self.cores[:2]
        for own, other in (both, both[::-1]):
            for name, value in (
                ("OMP_PLACES", "{%d}"),
                ("GOMP_CPU_AFFINITY", "%d"),
                ("KMP_AFFINITY", "granularity=fine,explicit,proclist=[%d]"),
            ):
                found = workers(both, [[own], {name: value % own}])
                self.assertEqual(found, [[[other], [own]]], name)

    def test_cores_of_another_ranks_copies_are_not_taken_for_the_engines(self):
        both = self.cores[:2]
        rank = [both[:1], {"OMP_PLACES": "{%d}" % both[0]}]
        self.assertEqual(workers(both, rank, rank), [[both[1:], both[:1]]] * 2)

    def test_where_no_core_is_left_copies_run_on_all_of_the_engines(self):
        both = self.cores[:2]
        alone = [both[:1], {"GOMP_CPU_AFFINITY": "%d %d" % tuple(both)}]
        self.assertEqual(workers(both, alone), [[both, both[:1]]])
        # Another rank is bound to the other.
        ranks = [[[core], {"OMP_PLACES": "{%d}" % core}] for core in both]
        self.assertEqual(workers(both, *ranks), [[both, [core]] for core in both])

    def test_what_vllm_has_not_bound_stays_where_it_is(self):
        both = self.cores[:2]
        self.assertEqual(workers(both, [both, {}]), [[both, both]])
        # By its user, who has left other cores to others.
        self.assertEqual(workers(both, [both[:1], {}]), [[both[:1], both[:1]]])


class Chosen(unittest.TestCase):
    """Which cores are chosen of more than this machine may have."""

    def chosen(self, environments, siblings=None, allowed=range(8), starter=5, parent=5):
        """`environments` of the ranks; the first is this process's."""
        own = os.getpid()
        with tempfile.TemporaryDirectory() as folder:
            proc, cpus = Path(folder, "proc"), Path(folder, "cpu")
            task = proc / "5" / "task" / "5"
            task.mkdir(parents=True)
            ranks = [own, *range(100, 99 + len(environments))]
            task.joinpath("children").write_text(" ".join(map(str, ranks)))
            for rank, environment in zip(ranks, environments, strict=True):
                (proc / str(rank)).mkdir()
                text = "".join(f"{name}={value}\0" for name, value in environment.items())
                (proc / str(rank) / "environ").write_bytes(b"X=\xff\0" + text.encode())
            for core, text in (siblings or {}).items():
                (cpus / f"cpu{core}" / "topology").mkdir(parents=True)
                (cpus / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(text)
            process = None if starter is None else SimpleNamespace(pid=starter)
            with (
                mock.patch.object(cores, "PROC", proc),
                mock.patch.object(cores, "CPUS", cpus),
                mock.patch.object(cores.os, "sched_getaffinity", lambda pid: set(allowed)),
                mock.patch.object(cores.os, "getppid", return_value=parent),
                mock.patch.object(cores.multiprocessing, "parent_process", return_value=process),
                mock.patch.dict(cores.os.environ, environments[0]),
            ):
                return cores.other_cores()

    def test_cores_of_all_ranks_are_left_alone(self):
        ranks = [{"OMP_PLACES": "{0,1}"}, {"OMP_PLACES": "{2,3}"}, {"PATH": "/bin"}]
        self.assertEqual(self.chosen(ranks), {4, 5, 6, 7})

    def test_physical_cores_of_the_engine_are_left_alone_where_others_are_left(self):
        siblings = {core: f"{core % 4},{core % 4 + 4}\n" for core in range(8)}
        for own, wanted in (("{0,1}", {2, 3, 6, 7}), ("{0,1,2,3}", {4, 5, 6, 7})):
            self.assertEqual(self.chosen([{"OMP_PLACES": own}], siblings), wanted)
        neighbours = {core: f"{core - core % 2}-{core - core % 2 + 1}\n" for core in range(8)}
        self.assertEqual(self.chosen([{"OMP_PLACES": "{0,2}"}], neighbours), {4, 5, 6, 7})

    def test_a_process_that_vllm_has_not_started_stays_where_it_is(self):
        rank = [{"OMP_PLACES": "{0}"}]
        self.assertEqual(self.chosen(rank), set(range(1, 8)))
        self.assertEqual(self.chosen(rank, starter=None), set())
        # Its starter has ended, and another process is its parent.
        self.assertEqual(self.chosen(rank, parent=1), set())
