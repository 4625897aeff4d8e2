"""What the connector says where vLLM lacks something that it imports."""

import ast
import unittest
from pathlib import Path

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
