//! lmc-vllm-adapter
