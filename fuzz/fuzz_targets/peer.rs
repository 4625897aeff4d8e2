#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lmc_backend_p2p::fuzzing::peer(data));
