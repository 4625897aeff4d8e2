"""The native module with a real server: lookups, threads, processes that are forked or spawned."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

from tests import native

ROOT = Path(__file__).parent.parent
PER_CHUNK = native.CHUNK // native.BLOCK


@unittest.skipUnless(
    "LMC_NATIVE" in os.environ, "SKIPPED: cargo xtask test-python builds the native module"
)
class Native(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        running = native.server()
        cls.endpoint = running.__enter__()
        cls.addClassCleanup(running.__exit__, None, None, None)
        cls.native = native.load()

    def scheduler(self, hash_mode=True, tails=True):
        engine = native.engine(hash_mode) | {"tails": tails}
        made = self.native.SchedulerAdapter(self.endpoint, **engine)
        self.addCleanup(made.shutdown)
        self.assertTrue(made.healthy, made.take_log())
        return made

    def test_a_lookup_names_tokens_or_hashes_and_not_both(self):
        scheduler = self.scheduler()
        for prompt in ({}, {"token_ids": [1] * 64, "block_hashes": [bytes(32)] * 4}):
            with self.assertRaises(ValueError):
                scheduler.maybe_submit_lookup_request("a", **prompt)
        self.assertEqual(scheduler.check_lookup_result("a"), 0)
        self.assertEqual(scheduler.stats()["lookups"], 0)

    def test_without_a_whole_chunk_or_block_nothing_is_submitted(self):
        scheduler = self.scheduler()
        self.assertTrue(scheduler.tails)
        scheduler.maybe_submit_lookup_request("d", block_hashes=[])
        self.assertEqual(scheduler.check_lookup_result("d"), 0)
        self.assertEqual(scheduler.stats()["lookups"], 0)
        scheduler = self.scheduler(tails=False)
        self.assertFalse(scheduler.tails)
        scheduler.maybe_submit_lookup_request("a", token_ids=[1] * (native.CHUNK - 1))
        scheduler.maybe_submit_lookup_request("b", block_hashes=[bytes(32)] * (PER_CHUNK - 1))
        scheduler.maybe_submit_lookup_request("c", token_ids=[])
        for request_id in "abc":
            self.assertEqual(scheduler.check_lookup_result(request_id), 0)
        self.assertEqual(scheduler.stats()["lookups"], 0)

    def test_a_repeated_id_submits_nothing(self):
        scheduler = self.scheduler()
        for tokens in ([1] * 64, [1] * 64, [2] * 128):
            scheduler.maybe_submit_lookup_request("a", token_ids=tokens)
        native.eventually(lambda: scheduler.check_lookup_result("a") is not None)
        stats = scheduler.stats()
        self.assertEqual((stats["lookups"], stats["lookup_tokens"]), (1, 64))
        # A result that was removed makes way for the next.
        scheduler.cleanup_lookup_result("a")
        scheduler.maybe_submit_lookup_request("a", token_ids=[2] * 130)
        native.eventually(lambda: scheduler.check_lookup_result("a") is not None)
        stats = scheduler.stats()
        self.assertEqual((stats["lookups"], stats["lookup_tokens"]), (2, 64 + 128))
        scheduler.end_session("a")

    def test_hashes_name_a_chunk_by_its_last_block(self):
        scheduler = self.scheduler()
        cache = native.Cache(self.native, self.endpoint)
        self.addCleanup(cache.worker.shutdown)
        names = [bytes([1, at]) * 16 for at in range(3)]
        self.assertTrue(cache.store("s", 3, chunk_hashes=b"".join(names)))

        def blocks(names, other):
            return [
                hash
                for name in names
                for hash in [bytes([other, at]) * 16 for at in range(PER_CHUNK - 1)] + [name]
            ]

        for number, (hashes, wanted) in enumerate(
            (
                (blocks(names, 7), 3),
                # The other blocks have no part in it, nor has what is no whole chunk.
                (blocks(names, 8) + [bytes(32)] * (PER_CHUNK - 1), 3),
                (blocks(names[:2], 8), 2),
                ([*blocks(names[:2], 8)[:-1], bytes(32), *blocks(names[2:], 8)], 1),
                ([*names, bytes(32)], 0),
            )
        ):
            found = native.found(scheduler, f"l{number}", block_hashes=hashes)
            self.assertEqual(found, wanted * native.CHUNK, number)

    def run_alone(self, what, seed):
        """Runs a function of tests/native.py in a process of its own."""
        command = [sys.executable, "-m", "tests.native", what, self.endpoint, str(seed)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=2 * native.TIMEOUT
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_threads_are_there_between_construction_and_shutdown_alone(self):
        self.run_alone("use", 10)

    def test_a_process_that_is_forked_before_the_construction_works(self):
        self.run_alone("use_forked", 20)

    def test_a_process_that_is_spawned_works(self):
        self.run_alone("use_spawned", 30)

    def test_an_interpreter_may_end_while_adapters_are_at_work(self):
        for seed in range(40, 45):
            self.run_alone("leave_alive", seed)
