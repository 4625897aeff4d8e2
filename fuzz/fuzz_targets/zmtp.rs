#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lmc_vllm_adapter::fuzzing::zmtp(data));
