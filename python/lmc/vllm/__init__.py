"""The connector for vLLM 0.32.

vLLM loads it with `"kv_connector": "LmcConnector"` and `"kv_connector_module_path": "lmc.vllm"`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmc.vllm.connector import LmcConnector

__all__ = ["LmcConnector"]


def __getattr__(name: str) -> object:
    # vLLM, and torch with it, is loaded only when the connector is used.
    if name == "LmcConnector":
        from lmc.vllm import interface

        with interface.explained_imports():
            from lmc.vllm.connector import LmcConnector

        return LmcConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
