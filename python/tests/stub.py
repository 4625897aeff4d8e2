"""A vLLM that has every module and name, but for those that a test takes away."""

import importlib.abc
import importlib.machinery
import sys
from contextlib import contextmanager
from unittest import mock


class Base:
    """What stands for each of vLLM's names: a class that others can be derived from."""

    def __init__(self, *args, **fields):
        self.__dict__ |= fields
        self.fields = fields

    @classmethod
    def register(cls, other):
        """That of abstract classes."""

    def __eq__(self, other):
        return type(self) is type(other) and self.fields == other.fields

    def __hash__(self):
        return hash(repr(sorted(self.fields.items())))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, lacking):
        self.lacking = lacking

    def find_spec(self, name, path=None, target=None):
        # A name that is lacking is no module either.
        attribute = ":".join(name.rsplit(".", 1))
        if name.partition(".")[0] != "vllm" or {name, attribute} & set(self.lacking):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        def made(name):
            if name.startswith("__") or f"{module.__name__}:{name}" in self.lacking:
                raise AttributeError(name)
            # The same class each time.
            module.__dict__[name] = type(name, (Base,), {})
            return module.__dict__[name]

        module.__getattr__ = made
        module.__version__ = "0.32.0"


@contextmanager
def vllm(*lacking):
    """A vLLM without `module` or `module:name`, and lmc's modules as they are imported with it."""
    kept = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] != "vllm"
        and name not in ("lmc.vllm.connector", "lmc.vllm.kv_events", "lmc.vllm.stats")
    }
    finder = Finder(lacking)
    with mock.patch.dict(sys.modules, kept | {"lmc._native": mock.Mock()}, clear=True):
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
