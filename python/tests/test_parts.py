"""Settings, request fields, the identity record, the interface table, the worker's side."""

import contextlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from lmc.ops import LoadStoreOp
from lmc.vllm import adapters, identity, interface
from lmc.vllm.adapters import Adapters
from lmc.vllm.metadata import Step
from lmc.vllm.request import effective_salt, transfer_configs
from lmc.vllm.settings import Settings
from lmc.vllm.weights import TAG, Weights
from lmc.vllm.worker import WorkerSide
from tests.engine import Request


class SettingsTest(unittest.TestCase):
    def test_defaults_and_values(self):
        self.assertEqual(Settings.read({}), Settings())
        self.assertEqual(Settings.read({"other": 1}).endpoint, "local")
        found = Settings.read({"lmc.server": "tcp://10.0.0.5:6555", "lmc.hash_mode": False})
        self.assertEqual((found.endpoint, found.hash_mode), ("tcp://10.0.0.5:6555", False))
        self.assertFalse(found.starts)
        self.assertEqual(Settings.read({"lmc.server": "/run/l"}).endpoint, "ipc:///run/l")
        local = Settings.read({"lmc.server": "local"})
        self.assertEqual((local.endpoint, local.starts), ("local", False))

    def test_settings_of_a_server_that_is_started_are_its_flags(self):
        found = Settings.read({"lmc.serve.l1-size-gb": 64, "lmc.serve.disk-fill": True,
                               "lmc.serve.disk": "/data"})
        self.assertTrue(found.starts)
        self.assertEqual(
            found.serve_flags, ("--disk=/data", "--disk-fill=true", "--l1-size-gb=64")
        )
        for wrong in ({"lmc.serve.": 1}, {"lmc.serve.no-prefault": True}, {"lmc.serve.disk": ["/data"]},
                      {"lmc.serve.disk": "/data", "lmc.server": "local"}):
            with self.assertRaises(ValueError) as caught:
                Settings.read(wrong)
            self.assertIn("lmc.serve", str(caught.exception))

    def test_all_mistakes_are_named(self):
        wrong = {
            "lmc.server": "10.0.0.5:5555",
            "lmc.port": 5555,
            "lmc.copy_threads": True,
        }
        with self.assertRaises(ValueError) as caught:
            Settings.read(wrong)
        for key in wrong:
            self.assertIn(key, str(caught.exception))


def adapter(name, path, number=1, load_inplace=False):
    return SimpleNamespace(
        lora_name=name, lora_path=path, lora_int_id=number, load_inplace=load_inplace
    )


class WeightsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name, "weights")

    def test_each_reset_has_a_name_that_no_chunk_has_had(self):
        names = set()
        for setting in ("", "step 1", "step 1"):
            weights = Weights(setting)
            self.assertEqual(weights.tags(), {TAG: setting} if setting else {})
            for _ in range(3):
                weights.renew()
                names.add(weights.tags()[TAG])
        self.assertEqual(len(names), 9)

    def test_a_file_names_the_weights_of_replicas(self):
        self.file.write_text("step 1\n")
        one, two = (Weights(f"@{self.file}") for _ in range(2))
        self.assertEqual((one.name, two.name), ("step 1", "step 1"))
        self.file.write_text("step 2\n")
        one.renew()
        two.renew()
        self.assertEqual((one.name, two.name), ("step 2", "step 2"))

    def test_a_reset_without_a_new_name_is_shared_with_no_other_engine(self):
        self.file.write_text("step 1")
        names = []
        long = (" " * 5 + "x" * 257, " " * 900 + "x" * 200, "x" * 5000)
        for text in (None, "step 1", "", "x" * 257, "step 2", "step 1", *long):
            weights = Weights(f"@{self.file}")
            if text is None:
                self.file.unlink()
            else:
                self.file.write_text(text)
            if text == "step 2":
                weights.renew()
                self.file.write_text("step 1")
            with self.assertLogs("vllm.lmc"):
                weights.renew()
            names.append(weights.name)
            self.file.write_text("step 1")
        self.assertEqual(len(set(names)), 9)
        self.assertTrue(all(name.startswith("reset-") for name in names), names)

    def test_a_file_without_a_name_is_refused_at_the_start(self):
        self.file.write_text("\n")
        for setting in (f"@{self.file}", f"@{self.file}.none", "x" * 257):
            with self.assertRaises(ValueError) as caught:
                Weights(setting)
            self.assertIn("lmc.weights", str(caught.exception))


class RequestFields(unittest.TestCase):
    def test_the_servers_fields_are_passed_on(self):
        self.assertIsNone(transfer_configs(None, {}))
        self.assertIsNone(transfer_configs({"remote_host": "x"}, {}))
        spoofed = transfer_configs({TAG: "those of others"}, {TAG: "own"})
        self.assertEqual(spoofed, {TAG: "own"})
        params = {
            "lmcache.skip_save": True,
            "lmc.x": [1],
            "remote_prefiller": {"remote_port": 1, "remote_host": "h"},
            "remote_decoder": "d",
            3: "not text",
        }
        self.assertEqual(
            transfer_configs(params, {}),
            {
                "lmcache.skip_save": True,
                "lmc.x": "[1]",
                "remote_prefiller": '{"remote_host":"h","remote_port":1}',
                "remote_decoder": "d",
            },
        )

    def test_salts_keep_tenants_and_adapters_apart(self):
        def salt(text, lora=None):
            if lora is not None:
                lora = adapter(*lora)
            return effective_salt(Request("a", [], cache_salt=text, lora_request=lora), Adapters())

        self.assertEqual((salt(None), salt("tenant")), ("", "tenant"))
        made = [
            salt(text, lora)
            for text in (None, "tenant", "x" * 200, "a/b", "lmc-")
            for lora in (("name", "hub/a"), ("name", "hub/b"), ("other", "hub/a"))
        ]
        made += [salt("x" * 200), salt("x" * 201), salt("a/b"), salt("lmc-"), salt(made[0])]
        self.assertEqual(len(set(made)), len(made))
        for text in made:
            self.assertRegex(text, r"^lmc-[0-9a-f]{64}$")

    def test_the_files_of_an_adapter_have_a_part_in_its_salt(self):
        with folder_of_an_adapter() as (folder, weights, config):

            def salt():
                return salt_of(Adapters(), folder)

            salts = [salt()]
            self.assertEqual(salt(), salts[0])
            # Of the same size, as after another training.
            weights.write_bytes(b"x" * ((1 << 20) - 1) + b"y")
            salts.append(salt())
            config.write_text('{"r": 8}')
            salts.append(salt())
            weights.write_bytes(b"x")
            salts.append(salt())
            self.assertEqual(len({*salts, None}), 5)


def salt_of(known, folder, number=1, **options):
    lora = adapter("name", folder, number, **options)
    return effective_salt(Request("a", [], lora_request=lora), known)


@contextlib.contextmanager
def folder_of_an_adapter(**options):
    with tempfile.TemporaryDirectory(**options) as folder:
        weights = Path(folder, "adapter_model.safetensors")
        config = Path(folder, "adapter_config.json")
        weights.write_bytes(b"x" * (1 << 20))
        config.write_text("{}")
        yield folder, weights, config


class AdaptersTest(unittest.TestCase):
    def test_what_vllm_has_loaded_stays_what_it_is_until_it_loads_it_again(self):
        with folder_of_an_adapter() as (folder, weights, _):
            known = Adapters()
            first = salt_of(known, folder)
            weights.write_bytes(b"y")
            self.assertEqual(salt_of(known, folder), first)

    def test_an_adapter_whose_weights_changed_is_named_no_more(self):
        # Unloaded and loaded, or loaded in place; vLLM keeps blocks of the first weights.
        in_place = {"load_inplace": True}
        for again, once_more in (({"number": 2}, {"number": 3}), (in_place, in_place)):
            with folder_of_an_adapter() as (folder, weights, _):
                known, content = Adapters(), weights.read_bytes()
                first = salt_of(known, folder)
                self.assertEqual(salt_of(known, folder, **again), first)
                self.assertFalse(known.are_refused(adapter("name", folder)))
                weights.write_bytes(b"y")
                with self.assertLogs("vllm.lmc", "WARNING") as logged:
                    self.assertIsNone(salt_of(known, folder, **once_more))
                    weights.write_bytes(content)
                    for number in (1, 7):
                        self.assertIsNone(salt_of(known, folder, number))
                self.assertEqual(len(logged.output), 1)
                self.assertIn("another name", logged.output[0])
                self.assertTrue(known.are_refused(adapter("name", folder)))
                other = effective_salt(Request("a", [], lora_request=adapter("b", folder)), known)
                self.assertIsNotNone(other)

    def test_an_adapter_that_another_replaced_in_place_is_named_no_more(self):
        with folder_of_an_adapter() as (first, *_), folder_of_an_adapter() as (second, *_):
            known = Adapters()
            salt_of(known, first)
            with self.assertLogs("vllm.lmc", "WARNING"):
                self.assertIsNotNone(salt_of(known, second, load_inplace=True))
            self.assertTrue(known.are_refused(adapter("name", first)))

    def test_files_of_an_adapter_loaded_in_place_are_read_when_they_change(self):
        with folder_of_an_adapter() as (folder, weights, _):
            known = Adapters()
            with mock.patch.object(
                adapters, "adapter_digest", side_effect=identity.adapter_digest
            ) as read:
                for _ in range(5):
                    salt_of(known, folder, load_inplace=True)
                self.assertEqual(read.call_count, 1)
                os.utime(weights, ns=(0, 0))
                self.assertIsNotNone(salt_of(known, folder, load_inplace=True))
                self.assertEqual(read.call_count, 2)

    def test_an_adapter_that_cannot_be_read_is_not_named(self):
        def refused(folder, **options):
            known = Adapters()
            with self.assertLogs("vllm.lmc", "WARNING") as logged:
                for _ in range(3):
                    self.assertIsNone(salt_of(known, folder, **options))
            self.assertEqual(len(logged.output), 1)

        for options in ({}, {"load_inplace": True}):
            with folder_of_an_adapter() as (folder, *_):
                for error in (PermissionError, OSError(5, "no answer")):
                    with mock.patch.object(identity, "open", side_effect=error, create=True):
                        refused(folder, **options)

                def forbidden(path, *mode):
                    if path.endswith(".safetensors"):
                        raise PermissionError(path)
                    return open(path, *mode)

                with mock.patch.object(identity, "open", forbidden, create=True):
                    refused(folder, **options)
            # The folder has gone since vLLM loaded it.
            refused(folder, **options)

    def test_a_path_in_the_home_folder_is_the_folder(self):
        home = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, home)
        with (
            mock.patch.dict(os.environ, {"HOME": home}),
            folder_of_an_adapter(dir=home) as (folder, weights, _),
        ):
            path = os.path.join("~", os.path.basename(folder))
            salts = [salt_of(Adapters(), path)]
            weights.write_bytes(b"y")
            salts.append(salt_of(Adapters(), path))
            self.assertNotEqual(*salts)
            # Also where it is looked at for changes.
            known = Adapters()
            salt_of(known, path, load_inplace=True)
            weights.write_bytes(b"z")
            with self.assertLogs("vllm.lmc", "WARNING"):
                self.assertIsNone(salt_of(known, path, load_inplace=True))


def configuration(**changed):
    """What the record reads of vLLM's configuration."""
    hf = {"hidden_size": 8, "_name_or_path": "/models/x", "text_config": {"_name_or_path": "/y"}}
    values = {
        "model": "org/model",
        "revision": "r",
        "commit": None,
        "quantization": None,
        "cache_dtype": "auto",
        "layout": "LBHNC",
        "block_size": 16,
        "layers": [(0, 4)],
        "windows": None,
        "hf": hf,
        "rope": None,
        "overrides": {},
        "text": "",
        "lora": None,
        "device": "cuda 9.0",
        "backend": None,
    } | changed
    model = SimpleNamespace(
        model=values["model"],
        revision=values["revision"],
        code_revision=None,
        dtype="torch.bfloat16",
        quantization=values["quantization"],
        hf_config=SimpleNamespace(
            to_dict=lambda: values["hf"], _commit_hash=values["commit"]
        ),
        hf_text_config=SimpleNamespace(rope_parameters=values["rope"]),
        hf_config_path=None,
        hf_overrides=values["overrides"],
        max_model_len=4096,
    )
    cache = SimpleNamespace(
        cache_dtype=values["cache_dtype"],
        kv_cache_dtype_skip_layers=[],
        block_size=values["block_size"],
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        lora_config=values["lora"],
        attention_config=SimpleNamespace(backend=values["backend"], backend_per_kind={}),
        speculative_config=None,
    )
    kv = SimpleNamespace(kv_cache_layout=values["layout"])
    mode = values.get("mode", identity.hash_mode("sha256", True, None))
    device, layers, text = values["device"], values["layers"], values["text"]
    windows = values["windows"]
    return identity.identity_record(config, kv, mode, "vllm 0.32", device, layers, windows, text)


class Identity(unittest.TestCase):
    def test_devices_that_lay_keys_out_differently_are_kept_apart(self):
        name, found = identity.device_name, set()
        with tempfile.TemporaryDirectory() as folder:
            for flags in ("fpu sse", "fpu avx512f sse", "avx512f amx_tile"):
                path = os.path.join(folder, "cpuinfo")
                with open(path, "w") as file:
                    file.write(f"processor : 0\nflags : {flags}\nbugs :\n")
                found.add(name("cpu", None, path))
        self.assertEqual(len(found), 3)
        self.assertEqual(name("cuda", (9, 0)), "cuda 9.0")
        self.assertNotEqual(name("cuda", (9, 0)), name("cuda", (10, 0)))
        self.assertNotEqual(configuration(device="cpu"), configuration())
        self.assertNotEqual(configuration(backend="B12X"), configuration())

    def test_the_record_is_sorted_json_without_paths(self):
        record = configuration()
        parsed = json.loads(record)
        self.assertEqual(list(parsed), sorted(parsed))
        self.assertEqual(parsed["version"], identity.VERSION)
        self.assertNotIn("/models", record)
        moved = configuration(hf={"hidden_size": 8, "_name_or_path": "/b", "text_config": {}})
        self.assertEqual(moved, record)

    def test_what_a_model_changes_when_it_is_built_has_no_part_in_the_record(self):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.json")

            def record(written, built):
                config.write_text(written)
                return configuration(model=folder, hf=built)

            yarn = '{"hidden_size": 8, "rope_parameters": {"type": "yarn"}, "_name_or_path": "x"}'
            before = record(yarn, {"rope_parameters": {"type": "yarn"}})
            built = {"rope_parameters": {"type": "yarn", "rope_type": "deepseek_yarn"}}
            self.assertEqual(record(yarn, built), before)
            self.assertEqual(record(yarn.replace('"x"', '"y"'), built), before)
            others = {record(yarn.replace(*change), built) for change in (("8", "9"), ("yarn", "n"))}
            others.add(record("no json", built))
            others.add(record("no JSON", built))
            self.assertEqual(len(others - {before}), 4)
        # Of a model without files here, what models change is left out.
        self.assertEqual(configuration(hf=built), configuration(hf={"rope_parameters": {}}))

    def test_what_changes_kv_data_changes_the_record(self):
        lora = SimpleNamespace(max_lora_rank=8, lora_dtype="auto", target_modules=None)
        records = [
            configuration(**changed)
            for changed in (
                {},
                {"model": "org/other"},
                {"model": __file__},
                {"revision": "s"},
                {"commit": "1f2e"},
                {"quantization": "fp8"},
                {"cache_dtype": "fp8_e4m3"},
                {"cache_dtype": "fp8_e5m2"},
                {"layout": "LBNHC"},
                {"block_size": 32},
                {"layers": [(0, 2), (2, 4)]},
                {"layers": [(0, 1), (1, 4)]},
                {"windows": [None, 512]},
                {"windows": [None, 1024]},
                {"hf": {"hidden_size": 9}},
                {"overrides": {"rope_theta": 7}},
                {"overrides": configuration},
                {"rope": {"rope_type": "longrope"}},
                {"text": "mine"},
                {"lora": lora},
                {"mode": identity.hash_mode("sha256_cbor", True, None)},
                {"mode": identity.hash_mode("sha256", True, "7")},
                {"mode": identity.hash_mode("sha256", False, None)},
            )
        ]
        self.assertEqual(len(set(records)), len(records))

    def test_hashes_that_differ_between_processes_are_not_used(self):
        for algorithm in ("xxhash", "xxhash_cbor", "unknown"):
            mode = identity.hash_mode(algorithm, True, None)
            self.assertFalse(mode.by_hash)
            self.assertIn("PYTHONHASHSEED", mode.warning)
            self.assertTrue(identity.hash_mode(algorithm, True, "1").by_hash)
            self.assertIsNone(identity.hash_mode(algorithm, False, None).warning)
        # A seed may be a secret.
        self.assertNotIn("secret", json.dumps(identity.hash_mode("xxhash", True, "secret").record))

    def test_files_of_a_model_have_a_part_in_its_name(self):
        self.assertEqual(identity.model_name("org/model"), "org/model")
        with mock.patch.object(identity, "_weights", return_value=[("a", 1)]):
            one = identity.model_name("/tmp")
        with mock.patch.object(identity, "_weights", return_value=[("a", 2)]):
            other = identity.model_name("/tmp")
        self.assertNotEqual(one, other)
        self.assertTrue(one.startswith("local:"))

    def test_weights_of_the_same_name_and_size_are_kept_apart_by_their_ends(self):
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder, "model.safetensors")
            Path(folder, "broken.safetensors").symlink_to("absent")
            found = set()
            for first, last in ((0, 0), (1, 0), (0, 1)):
                weights.write_bytes(bytes([first]) + bytes(1 << 20) + bytes([last]))
                found.add(identity.model_name(folder))
                self.assertIn(identity.model_name(folder), found)
            self.assertEqual(len(found), 3)
            weights.write_bytes(b"")
            found.add(identity.model_name(str(weights)))
            self.assertEqual(len(found), 4)
            # A file that this process may not read counts by its size.
            with mock.patch.object(identity, "open", side_effect=PermissionError, create=True):
                self.assertNotIn(identity.model_name(folder), found)


class Interface(unittest.TestCase):
    def test_what_is_missing_ends_the_start_and_what_changed_warns_once(self):
        release, table = interface.expected()
        base = next(name for name in table if name.endswith("KVConnectorBase_V1"))
        warnings = []
        interface.check(warnings.append, table)
        self.assertEqual(warnings, [])
        changed = {**table, base: {**table[base], "get_finished": "self", "shutdown": "self, now"}}
        interface.check(warnings.append, changed)
        self.assertEqual(len(warnings), 1)
        self.assertIn("KVConnectorBase_V1.get_finished", warnings[0])
        self.assertIn("KVConnectorBase_V1.shutdown", warnings[0])
        del changed[base]["get_finished"]
        with self.assertRaises(RuntimeError) as caught:
            interface.check(warnings.append, changed)
        self.assertIn("KVConnectorBase_V1.get_finished", str(caught.exception))
        self.assertIn(f"vLLM {release}", str(caught.exception))
        del changed[base]
        with self.assertRaises(RuntimeError):
            interface.check(warnings.append, changed)

    def test_the_table_is_of_what_is_used(self):
        _, table = interface.expected()
        self.assertEqual({name: tuple(table[name]) for name in table}, interface.USED)

    def test_functions_of_a_module_are_looked_at(self):
        with mock.patch.object(interface, "USED", {"json:": ("dumps", "absent")}):
            found = interface.installed()
        self.assertEqual(list(found["json:"]), ["dumps"])
        wanted = {"json:": {"dumps": "obj", "absent": ""}}
        self.assertEqual(interface.compare(wanted, found), (["json.absent"], ["json.dumps"]))

    def test_parameters_are_read_off_classes(self):
        class Owner:
            def method(self, a, *rest, b=1, **named): ...
            @classmethod
            def made(cls, data=None): ...
            @property
            def field(self): ...

        members = ("method", "made", "field", "absent")
        with mock.patch.object(interface, "USED", {"module:Owner": members}):
            found = interface.installed(lambda name: Owner)
        wanted = {"method": "self, a, *rest, b=, **named", "made": "cls, data=", "field": None}
        self.assertEqual(found, {"module:Owner": wanted})


class Worker(unittest.TestCase):
    def tensor(self, **changed):
        values = {
            "device": "cpu",
            "shape": (7, 2, 4, 8),
            "strides": (64, 32, 8, 1),
            "at": 1000,
        } | changed
        shape, strides = values["shape"], values["strides"]

        def permute(axes):
            picked = {"shape": [shape[a] for a in axes], "strides": [strides[a] for a in axes]}
            return self.tensor(**values | {key: tuple(v) for key, v in picked.items()})

        def squeeze(axis):
            keep = [a for a in range(len(shape)) if a != axis]
            picked = {"shape": [shape[a] for a in keep], "strides": [strides[a] for a in keep]}
            return self.tensor(**values | {key: tuple(v) for key, v in picked.items()})

        return SimpleNamespace(
            device=SimpleNamespace(type=values["device"]),
            shape=shape,
            dtype="torch.float32",
            dim=lambda: len(shape),
            data_ptr=lambda: values["at"],
            stride=lambda: strides,
            permute=permute,
            squeeze=squeeze,
        )

    def register(self, tensors, axes=(0, 1, 2, 3), is_latent=False):
        adapter = mock.Mock()
        worker = WorkerSide(adapter, can_store=True)
        worker.register_kv_caches(
            [(tensors, None)], axes, blocks=7, block_size=4, is_latent=is_latent
        )
        return adapter.register_kv_caches.call_args

    def test_tensors_are_named_in_memory_order_and_once(self):
        both = [self.tensor(), self.tensor(at=2000), self.tensor()]
        call = self.register(both)
        ((layers, window),) = call.args[0]
        self.assertEqual(([at for at, *_ in layers], window), ([1000, 2000], None))
        self.assertEqual(layers[0][1:], ([7, 2, 4, 8], [64, 32, 8, 1], "float32"))
        self.assertEqual(call.kwargs, {"layout": "HND", "tokens_per_block": 4, "gpu": None})
        tokens_first = self.tensor(strides=(64, 8, 16, 1))
        call = self.register([tokens_first], (0, 2, 1, 3))
        self.assertEqual(call.args[0][0][0][0][1:3], ([7, 4, 2, 8], [64, 16, 8, 1]))
        self.assertEqual(call.kwargs["layout"], "NHD")
        latent = self.tensor(shape=(7, 1, 4, 8), strides=(32, 32, 8, 1))
        for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):
            call = self.register([latent], axes, is_latent=True)
            self.assertEqual(call.args[0][0][0][0][1:3], ([7, 4, 8], [32, 8, 1]))

    def test_a_kv_cache_that_slept_is_registered_where_it_lies_then(self):
        adapter, at = mock.Mock(), [1000]
        worker = WorkerSide(adapter, can_store=True)
        # Neither comes before vLLM has registered its KV cache.
        worker.unregister_kv_caches()
        worker.restore_kv_caches()
        self.assertEqual(adapter.mock_calls, [])
        tensor = self.tensor()
        tensor.permute = lambda axes: self.tensor(at=at[0])
        worker.register_kv_caches(
            [([tensor], 512)], (0, 1, 2, 3), blocks=7, block_size=4, is_latent=False
        )
        worker.restore_kv_caches()
        adapter.register_kv_caches.assert_called_once()
        worker.unregister_kv_caches()
        adapter.unregister_kv_caches.assert_called_once()
        at[0] = 5000
        for _ in range(2):
            worker.restore_kv_caches()
        # vLLM wakes up all the same where the KV cache cannot be registered.
        worker.unregister_kv_caches()
        adapter.register_kv_caches.side_effect = ValueError("no memory")
        with self.assertLogs("vllm.lmc", "WARNING") as log:
            worker.restore_kv_caches()
        self.assertIn("no memory", log.output[0])
        before, after, _ = adapter.register_kv_caches.call_args_list
        self.assertEqual(before.kwargs, after.kwargs)
        self.assertEqual(
            [call.args[0][0][0][0][0] for call in (before, after)], [1000, 5000]
        )

    def test_groups_are_named_one_by_one_though_they_share_memory(self):
        adapter = mock.Mock()
        groups = [([self.tensor(), self.tensor(at=2000)], None), ([self.tensor()], 8)]
        WorkerSide(adapter, can_store=True).register_kv_caches(
            groups, (0, 1, 2, 3), blocks=7, block_size=4, is_latent=False
        )
        named = [
            ([at for at, *_ in layers], window)
            for layers, window in adapter.register_kv_caches.call_args.args[0]
        ]
        self.assertEqual(named, [([1000, 2000], None), ([1000], 8)])

    def test_what_cannot_be_copied_is_refused(self):
        for tensor, axes in (
            (self.tensor(shape=(14, 2, 2, 8)), (0, 1, 2, 3)),
            (self.tensor(shape=(7, 2, 4), strides=(8, 4, 1)), (0, 1, 2, 3)),
            (self.tensor(), (1, 0, 2, 3)),
        ):
            with self.assertRaises(ValueError):
                self.register([tensor], axes)

    def torch(self, cuda="12.8"):
        """A torch with one GPU, whose current stream is 77."""
        gpu = SimpleNamespace(
            get_device_properties=lambda device: SimpleNamespace(uuid=f"uuid of {device.type}"),
            current_stream=lambda device: SimpleNamespace(cuda_stream=77),
        )
        fake = SimpleNamespace(cuda=gpu, version=SimpleNamespace(cuda=cuda))
        return mock.patch.dict(sys.modules, {"torch": fake})

    def test_copies_on_a_gpu_come_after_the_stream_of_the_step(self):
        adapter = mock.Mock()
        worker = WorkerSide(adapter, can_store=True)
        tensors = [self.tensor(device="cuda"), self.tensor(device="cuda", at=2000)]
        with self.torch():
            worker.register_kv_caches(
                [(tensors, None)], (0, 1, 2, 3), blocks=7, block_size=4, is_latent=False
            )
            self.assertEqual(adapter.register_kv_caches.call_args.kwargs["gpu"], "uuid of cuda")
            worker.begin_step(Step(loads=["l"]))
            worker.submit_stores(Step(stores=["s"]))
        adapter.batched_submit_retrieve_requests.assert_called_once_with(["l"], stream=77)
        adapter.batched_submit_store_requests.assert_called_once_with(["s"], stream=77)

    def test_other_devices_than_one_nvidia_gpu_are_refused(self):
        for devices, cuda in ((["cuda"], None), (["xpu"], "12.8"), (["cuda", "cpu"], "12.8")):
            tensors = [self.tensor(device=device, at=at) for at, device in enumerate(devices)]
            with self.torch(cuda), self.assertRaises(ValueError):
                self.register(tensors)

    def test_only_requests_whose_blocks_are_kept_are_named(self):
        adapter = mock.Mock()
        adapter.get_finished.side_effect = lambda ids: (ids, {"loaded", "failed"}, {"failed"})
        worker = WorkerSide(adapter, can_store=True)
        loads = ({"loaded", "failed"}, {"failed"})
        self.assertEqual(worker.get_finished(Step(finished={"a"})), ({"a"}, *loads))
        self.assertEqual(worker.get_finished(None), (set(), *loads))

    def test_a_rank_that_stores_nothing_reports_at_once(self):
        adapter = mock.Mock()
        adapter.get_finished.side_effect = lambda ids: (set(), {"loaded"}, {"loaded"})
        worker = WorkerSide(adapter, can_store=False)
        step = Step(stores=[object()], finished={"a"})
        worker.submit_stores(step)
        adapter.batched_submit_store_requests.assert_not_called()
        self.assertEqual(worker.get_finished(step), ({"a"}, {"loaded"}, {"loaded"}))

    def test_requests_that_lost_blocks_are_waited_for(self):
        adapter = mock.Mock()
        adapter.wait_for_stores.return_value = False
        adapter.wait_for_stores_before.return_value = False
        worker = WorkerSide(adapter, can_store=True)
        worker.handle_preemptions(Step())
        adapter.wait_for_stores.assert_not_called()
        adapter.wait_for_stores_before.assert_not_called()
        with self.assertLogs("vllm.lmc", "WARNING"):
            worker.handle_preemptions(Step(preempted=["a"]))
        with self.assertLogs("vllm.lmc", "WARNING"):
            worker.handle_preemptions(Step(freed={"b": 16}))
        adapter.wait_for_stores.assert_called_once_with(["a"], 5.0)
        adapter.wait_for_stores_before.assert_called_once_with({"b": 16}, 0.5)

    def test_a_server_that_hangs_holds_steps_up_once_and_not_each(self):
        adapter, now = mock.Mock(), 100.0
        adapter.wait_for_stores_before.return_value = False
        worker = WorkerSide(adapter, can_store=True)
        with mock.patch("time.monotonic", lambda: now), self.assertLogs("vllm.lmc") as log:
            for now in (100.0, 101.0, 112.0):
                worker.handle_preemptions(Step(freed={"b": 16}))
        waits = [call.args[1] for call in adapter.wait_for_stores_before.call_args_list]
        self.assertEqual((waits, len(log.output)), ([0.5, 0.0, 0.5], 2))

    def test_a_step_passes_between_processes(self):
        op = LoadStoreOp("a", [[1]], 0, 4, chunk_hashes=b"x" * 32, configs={"lmc.x": 1})
        step = Step(loads=[op], finished={"b"}, preempted=["c"])
        self.assertEqual(pickle.loads(pickle.dumps(step)), step)
