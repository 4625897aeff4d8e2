"""What the connector says where vLLM lacks something that it imports, or has what lmc cannot hold."""

import ast
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lmc.vllm
from lmc.vllm import interface
from tests import stub


def imported():
    """What lmc's modules import of vLLM when the connector is loaded: `module` or `module:name`."""
    for path in Path(lmc.vllm.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                yield from (item.name for item in node.names if item.name.startswith("vllm"))
            elif isinstance(node, ast.ImportFrom) and node.module.startswith("vllm"):
                yield node.module
                yield from (f"{node.module}:{item.name}" for item in node.names)


class Imports(unittest.TestCase):
    def test_the_connector_is_loaded_where_all_is_there(self):
        with stub.vllm():
            self.assertEqual(lmc.vllm.LmcConnector.__name__, "LmcConnector")

    def test_each_import_that_vllm_lacks_is_named_with_the_release_that_has_it(self):
        release, _ = interface.expected()
        names = sorted(set(imported()))
        self.assertGreater(len(names), 20)
        for name in names:
            module, _, attribute = name.partition(":")
            with self.subTest(name):
                with stub.vllm(name), self.assertRaises(RuntimeError) as caught:
                    lmc.vllm.LmcConnector  # noqa: B018
                self.assertIn(attribute or module, str(caught.exception))
                self.assertIn(f"install vLLM {release}", str(caught.exception))

    def test_what_is_missing_elsewhere_says_so_itself(self):
        with stub.vllm(), self.assertRaises(ModuleNotFoundError), interface.explained_imports():
            import lmc.absent  # noqa: F401

    def test_sleep_mode_is_refused_where_memory_goes_away_under_copies(self):
        def configuration(device, sleeps):
            parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
            return SimpleNamespace(
                parallel_config=SimpleNamespace(**parallel),
                device_config=SimpleNamespace(device_type=device),
                model_config=SimpleNamespace(enable_sleep_mode=sleeps),
                cache_config=SimpleNamespace(block_size=16),
            )

        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
        groups = SimpleNamespace(kv_cache_groups=[group])
        with stub.vllm():
            from lmc.vllm import connector

            with mock.patch.object(connector, "is_full_attention_spec", lambda spec: True):
                for device, sleeps in (("cpu", True), ("cuda", False)):
                    found = connector._supported_group(configuration(device, sleeps), groups)
                    self.assertIs(found, group.kv_cache_spec)
                with self.assertRaisesRegex(ValueError, "--enable-sleep-mode"):
                    connector._supported_group(configuration("cuda", True), groups)
