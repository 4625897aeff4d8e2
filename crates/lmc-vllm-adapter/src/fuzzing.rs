//! Entry points of the fuzz targets: each takes any bytes and panics if a property does not hold.
//!
//! The properties: no input causes a panic; every request that has a request number gets a reply;
//! every byte that is read was stored under the same key; and when all clients are gone, nothing is
//! leased or reserved.

mod service;
pub use service::service;

use bytes::{Bytes, BytesMut};

use crate::protocol::codec::{Incoming, classify, decode_operation, encode_reply};
use crate::protocol::{KvDescriptor, Reply, Request, decode_reply, decode_request, encode_request};
use crate::transport::{Decoder, Event, Limits, encode_ready, greeting};

/// Runs the decoder of a connection on pieces whose sizes come from the input.
pub fn zmtp(data: &[u8]) {
    let [mode, rest @ ..] = data else { return };
    let limits = Limits {
        message_bytes: 64 << 10,
        frames: 8,
    };
    let mut decoder = Decoder::new(limits);
    let mut input = BytesMut::new();
    if mode & 1 == 1 {
        input.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut input);
    }
    let step = usize::from(mode >> 1) + 1;
    for piece in rest.chunks(step) {
        input.extend_from_slice(piece);
        assert!(decoder.missing(&input) <= limits.message_bytes + 9);
        loop {
            match decoder.next(&mut input) {
                Ok(Some(Event::Message(frames))) => {
                    assert!(frames.len() <= limits.frames);
                    assert!(frames.iter().map(Bytes::len).sum::<usize>() <= limits.message_bytes);
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// Runs the request decoder on frames cut from the input. A decoded request must survive the round
/// trip through the encoder.
pub fn request(data: &[u8]) {
    let mut rest = data;
    let mut frames = Vec::new();
    while let [low, high, tail @ ..] = rest {
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        frames.push(Bytes::copy_from_slice(&tail[..len]));
        rest = &tail[len..];
    }
    let Ok(Incoming::Request {
        operation,
        payloads,
        ..
    }) = classify(&frames)
    else {
        return;
    };
    match decode_request(operation, payloads) {
        Err(error) => {
            let (text, value) = encode_reply(operation, &Reply::Error(format!("lmc: {error}")));
            assert!(value.is_none());
            // A refusal must never decode as a reply of the operation.
            if let Ok(operation) = decode_operation(operation) {
                assert!(matches!(
                    decode_reply(operation, &[text]),
                    Ok(Reply::Error(_))
                ));
            }
        }
        Ok(Request::RegisterKvCache(r))
            if r.kv_caches
                .iter()
                .any(|d| matches!(d, KvDescriptor::Unsupported(_))) => {}
        // The bits of a float and an ignored payload may change in the round trip.
        Ok(
            Request::WaitPrefetchStatus { .. }
            | Request::WaitLookup { .. }
            | Request::CommitStore { .. },
        ) => {}
        Ok(request) => {
            let frames = encode_request(1, &request);
            assert_eq!(
                decode_request(&frames[1], &frames[2..]).as_ref(),
                Ok(&request)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use lmc_testkit::rounds;
    use proptest::prelude::*;

    /// Replays the inputs that libFuzzer kept because each reaches code that the others do not.
    #[test]
    fn the_committed_seeds_pass() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
        let check = |target: &str, run: fn(&[u8])| {
            let entries = std::fs::read_dir(seeds.join(target)).expect("seeds are committed");
            let mut count = 0;
            for entry in entries {
                let path = entry.expect("a file").path();
                run(&std::fs::read(&path).expect("a file can be read"));
                count += 1;
            }
            assert!(count > 1, "{target}: {count} seeds");
        };
        check("zmtp", super::zmtp);
        check("request", super::request);
        check("service", super::service);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(rounds(300, 600) as u32))]

        #[test]
        fn no_stream_panics(data in prop::collection::vec(any::<u8>(), 0..500)) {
            super::zmtp(&data);
        }

        #[test]
        fn no_frames_panic(data in prop::collection::vec(any::<u8>(), 0..300)) {
            super::request(&data);
        }

        #[test]
        fn any_order_of_operations_leaves_nothing_behind(
            data in prop::collection::vec(any::<u8>(), 0..600)) {
            super::service(&data);
        }
    }
}
