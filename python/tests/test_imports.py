"""What the connector says where vLLM lacks something that it imports, or has what lmc cannot hold."""

import ast
import enum
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

    def groups(self, *specs, hashes=None):
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs]
        return SimpleNamespace(kv_cache_groups=groups, hash_block_size=hashes)

    def kinds(self, connector):
        """Kinds of layers instead of vLLM's, each a class with blocks of 16 tokens."""

        class Full:
            block_size = 16

        class Latent(Full):
            pass

        class Sliding:
            block_size, sliding_window, extra_retained_tokens = 16, 512, 3

        return mock.patch.multiple(
            connector, FullAttentionSpec=Full, MLAAttentionSpec=Latent, SlidingWindowSpec=Sliding
        ), (Full, Latent, Sliding)

    def test_sleep_mode_is_refused_where_memory_goes_away_under_copies(self):
        with stub.vllm():
            from lmc.vllm import connector

            patched, (full, *_) = self.kinds(connector)
            with patched:
                for device, sleeps in (("cpu", True), ("cuda", False)):
                    configuration = self.configuration(device, sleeps)
                    connector._refuse_unsupported(configuration, self.groups(full()))
                with self.assertRaisesRegex(ValueError, "--enable-sleep-mode"):
                    configuration = self.configuration("cuda", True)
                    connector._refuse_unsupported(configuration, self.groups(full()))
                # From 0.33 on, vLLM says when it sleeps.
                base = connector.KVConnectorBase_V1
                with mock.patch.object(base, "unregister_kv_caches", None, create=True):
                    connector._refuse_unsupported(configuration, self.groups(full()))

    def test_vllms_calls_reach_both_sides(self):
        with stub.vllm():
            from lmc.vllm import connector

            both = object.__new__(connector.LmcConnector)
            both._scheduler, both._worker, both._last_line = mock.Mock(), mock.Mock(), ""
            both.unregister_kv_caches()
            both._worker.unregister_kv_caches.assert_called_once_with()
            both.restore_kv_caches()
            both._worker.restore_kv_caches.assert_called_once_with()

            # Named as vLLM and as lmc's server name them.
            source = enum.Enum("CacheHitSource", ["HOST", "P2P", "DISK", "EXTERNAL_UNSPECIFIED"])
            request = SimpleNamespace(request_id="a")
            for tiers, tokens, wanted in (
                ({"dram": 8, "disk": 4}, 12, {source.HOST: 8, source.DISK: 4}),
                ({"peers": 8, "remote": 4}, 13, {source.P2P: 8, source.EXTERNAL_UNSPECIFIED: 5}),
                ({}, 3, {source.EXTERNAL_UNSPECIFIED: 3}),
                ({}, 0, {}),
            ):
                both._scheduler.tiers_of.return_value = tiers
                with mock.patch.object(connector, "CacheHitSource", source):
                    found = both.get_external_cache_hit_sources(request, tokens)
                self.assertEqual(found, wanted)
                both._scheduler.tiers_of.assert_called_with("a", tokens)

    def test_layers_are_held_that_look_back_to_the_start_or_a_window(self):
        with stub.vllm():
            from lmc.vllm import connector

            patched, (full, latent, sliding) = self.kinds(connector)

            # vLLM's kinds that keep blocks in another way are derived from these.
            class Other(full):
                pass

            class OtherSliding(sliding):
                pass

            with patched:
                for kinds, refusal in (
                    ([full], None),
                    ([full, sliding], None),
                    ([sliding], None),
                    ([sliding, full, sliding], None),
                    ([latent], None),
                    ([latent, sliding], "2 groups .Latent, Sliding.: start vLLM with --disable-hyb"),
                    ([Other], "1 groups"),
                    ([full, Other], "Other"),
                    ([full, OtherSliding], "OtherSliding"),
                    ([], "0 groups"),
                ):
                    groups = self.groups(*(kind() for kind in kinds))
                    if refusal is None:
                        connector._refuse_unsupported(self.configuration(), groups)
                    else:
                        with self.assertRaisesRegex(ValueError, refusal):
                            connector._refuse_unsupported(self.configuration(), groups)
                large = sliding()
                large.block_size = 32
                for groups, refusal in (
                    (self.groups(full(), large), "a group has 32, the hashes 16"),
                    (self.groups(full(), sliding(), hashes=4), "--prefix-match-unit"),
                ):
                    with self.assertRaisesRegex(ValueError, refusal):
                        connector._refuse_unsupported(self.configuration(), groups)
                connector._refuse_unsupported(self.configuration(), self.groups(full(), hashes=16))
                empty = self.groups(full(), sliding())
                empty.kv_cache_groups[1].layer_names = []
                with self.assertRaisesRegex(ValueError, "pipeline rank"):
                    connector._refuse_unsupported(self.configuration(), empty)
                self.assertEqual([connector._window(kind()) for kind in (full, sliding)], [None, 515])
