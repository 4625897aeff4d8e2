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

    def configuration(self, device="cpu", sleeps=False):
        parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            device_config=SimpleNamespace(device_type=device),
            model_config=SimpleNamespace(enable_sleep_mode=sleeps),
            cache_config=SimpleNamespace(block_size=16),
        )

    def test_sleep_mode_is_refused_where_memory_goes_away_under_copies(self):
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
        groups = SimpleNamespace(kv_cache_groups=[group])
        with stub.vllm():
            from lmc.vllm import connector

            with mock.patch.object(connector, "is_full_attention_spec", lambda spec: True):
                for device, sleeps in (("cpu", True), ("cuda", False)):
                    connector._refuse_unsupported(self.configuration(device, sleeps), groups)
                with self.assertRaisesRegex(ValueError, "--enable-sleep-mode"):
                    connector._refuse_unsupported(self.configuration("cuda", True), groups)

    def test_layers_are_held_that_look_back_to_the_start_or_a_window(self):
        with stub.vllm():
            from lmc.vllm import connector

            class Full:
                block_size = 16

            class Sliding(Full):
                sliding_window, extra_retained_tokens = 512, 3

            class Other(Full):
                pass

            class OtherSliding(Sliding):
                pass

            class Large(Sliding):
                block_size = 32

            with mock.patch.multiple(
                connector,
                is_full_attention_spec=lambda spec: type(spec) in (Full, Other),
                FullAttentionSpec=Full,
                SlidingWindowSpec=Sliding,
            ):
                for kinds, refusal in (
                    ([Full], None),
                    ([Full, Sliding], None),
                    ([Sliding], None),
                    ([Sliding, Full, Sliding], None),
                    # The only group may be of a kind of full attention, such as MLA.
                    ([Other], None),
                    ([Full, Other], "2 groups .Full, Other.: start vLLM with --disable-hybrid"),
                    ([Full, OtherSliding], "OtherSliding"),
                    ([OtherSliding], "1 groups"),
                    ([], "0 groups"),
                ):
                    specs = [SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
                    groups = SimpleNamespace(kv_cache_groups=specs)
                    if refusal is None:
                        connector._refuse_unsupported(self.configuration(), groups)
                    else:
                        with self.assertRaisesRegex(ValueError, refusal):
                            connector._refuse_unsupported(self.configuration(), groups)
                with (
                    mock.patch.object(connector, "SlidingWindowSpec", Large),
                    self.assertRaisesRegex(ValueError, "a group has 32, the hashes 16"),
                ):
                    large = SimpleNamespace(
                        kv_cache_groups=[SimpleNamespace(kv_cache_spec=Large())]
                    )
                    connector._refuse_unsupported(self.configuration(), large)
                self.assertEqual([connector._window(kind()) for kind in (Full, Sliding)], [None, 515])
