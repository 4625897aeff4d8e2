"""A server that the connector starts, with scripts for the program."""

import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from lmc.vllm import server


class Start(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = Path(folder.name, "lmc")
        found = mock.patch.object(server, "program", return_value=str(self.program))
        found.start()
        self.addCleanup(found.stop)

    def log_of(self, script, flags=()):
        self.program.write_text(f"#!/bin/sh\n{script}\n")
        os.chmod(self.program, 0o755)
        with self.assertLogs("vllm.lmc") as caught:
            server.start(flags)
        return caught.output

    def test_flags_are_passed_on_and_the_answer_is_shown(self):
        answer = {"address": "ipc:///s", "http": "http://127.0.0.1:1", "started": True,
                  "log": "/l", "warnings": ["older"]}
        lines = self.log_of(
            f"test \"$1 $2 $4 $5\" = \"start --json -- --port=1\" && echo '{json.dumps(answer)}'",
            ["--port=1"],
        )
        self.assertEqual(len(lines), 2)
        self.assertIn("older", lines[0])
        self.assertIn("ipc:///s", lines[1])

    def test_each_failure_is_one_line(self):
        lines = self.log_of("echo no memory >&2; echo ' at all' >&2; exit 1")
        self.assertEqual(len(lines), 1)
        self.assertIn("no memory; at all;", lines[0])
        self.assertIn("ended with -9", self.log_of("kill -9 $$")[0])
        for answer in ("", "[]", "{}", "no JSON", "\\377"):
            self.assertEqual(len(self.log_of(f"printf '{answer}'")), 1)
        self.program.unlink()
        with self.assertLogs("vllm.lmc") as caught:
            server.start([])
        self.assertEqual(len(caught.output), 1)
        with mock.patch.object(server, "program", return_value=None):
            with self.assertLogs("vllm.lmc") as caught:
                server.start([])
        self.assertEqual(len(caught.output), 1)

    def test_one_that_hangs_is_given_up(self):
        with mock.patch.object(server, "START_TIMEOUT", -9.5):
            lines = self.log_of("exec sleep 60")
        self.assertEqual(len(lines), 1)
        self.assertIn("timed out", lines[0])


if __name__ == "__main__":
    unittest.main()
