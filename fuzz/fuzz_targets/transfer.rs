#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lmc_transfer::fuzzing::transfer_frame(data));
