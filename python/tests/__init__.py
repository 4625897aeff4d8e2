"""Tests of the connector's logic, without vLLM and without a server: `cargo xtask test-python`."""
