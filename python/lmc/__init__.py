"""lmc: a KV-cache layer for LLM serving.

The package holds the `lmc` program and the engine's side of it. `lmc.vllm` is the connector for
vLLM; importing `lmc` alone loads neither vLLM nor the native module.
"""

__all__: list[str] = []
