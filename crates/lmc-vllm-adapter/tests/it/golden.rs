//! Replays recorded traffic between a real vLLM and LMCache's own server: our replies must be
//! equal.
//!
//! `data/*.jsonl` was recorded with `xtask/python/record.py`. The first line describes the
//! recording; each other line is a message of one session, in order.

use std::collections::HashMap;

use crate::common::{Segment, Server};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use lmc_key::{ChunkHasher, HashAlgorithm};
use lmc_vllm_adapter::Client;
use serde_json::Value;

/// Tokens per chunk in the recordings.
const RECORDED_CHUNK: u32 = 256;

struct Message {
    from_client: bool,
    connection: u64,
    frames: Vec<Bytes>,
}

fn messages(recording: &str) -> Vec<Message> {
    let message = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        let frame = |text: &Value| {
            let text = text.as_str().expect("a frame in base64");
            Bytes::from(BASE64_STANDARD.decode(text).expect("base64"))
        };
        Message {
            from_client: line["from"] == "client",
            connection: line["connection"].as_u64().expect("a connection"),
            frames: line["frames"]
                .as_array()
                .expect("frames")
                .iter()
                .map(frame)
                .collect(),
        }
    };
    recording.lines().skip(1).map(message).collect()
}

fn server() -> Server {
    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, RECORDED_CHUNK).expect("a chunk size");
    Server::with(64 << 20, |config| config.hasher = hasher, |_| {})
}

/// Returns an answer without the capabilities that only lmc has.
fn without_own_capability(mut answer: Vec<Bytes>) -> Vec<Bytes> {
    let ours = b"\x95\xafkv_event_stream\xaflmc_engine_keys\xb3lmc_abandon_earlier\xaflmc_wait_lookup\xa9lmc_units";
    if let Some(value) = answer.last_mut()
        && value[..] == ours[..]
    {
        *value = Bytes::from_static(b"\x91\xafkv_event_stream");
    }
    answer
}

/// Sends the recorded requests, each on its connection, and compares the replies. `differs` removes
/// the parts of a reply that may differ between servers.
fn replay(server: &Server, recording: &str, differs: impl Fn(&[Bytes]) -> Vec<Bytes>) {
    let mut clients: HashMap<u64, Client> = HashMap::new();
    let mut said: HashMap<(u64, Bytes), Vec<Bytes>> = HashMap::new();
    let (mut asked, mut compared) = (0, 0);
    for message in messages(recording) {
        let Message {
            from_client,
            connection,
            frames,
        } = message;
        let uid = frames[0].clone();
        if from_client {
            let client = clients.entry(connection).or_insert_with(|| server.client());
            client.send_frames(&frames).expect("sent");
            let answer = client.receive_frames().expect("an answer");
            assert_eq!(answer[0], uid, "the answer names the request");
            for worker in server.status().instances {
                let unknown = worker.unknown_fields;
                assert_eq!(unknown, [""; 0], "the recorded client is known");
            }
            said.insert((connection, uid), answer);
            asked += 1;
        } else {
            let answer = said
                .remove(&(connection, uid))
                .expect("it was asked before");
            let answer = without_own_capability(answer);
            assert_eq!(differs(&answer), differs(&frames), "answer {compared}");
            compared += 1;
        }
    }
    assert!(asked > 30, "the recording holds a whole session");
    assert_eq!(asked, compared, "every request has its answer");
    assert!(
        server.status().instances.is_empty(),
        "it ends with an unregistration"
    );
    server.assert_idle();
}

/// Returns a frame without the integers that follow a field's name, such as offsets in the pool.
fn without(frame: &[u8], field: &str) -> Bytes {
    let mut marked = vec![0xa0 | field.len() as u8];
    marked.extend_from_slice(field.as_bytes());
    let mut left = Vec::with_capacity(frame.len());
    let mut at = 0;
    while at < frame.len() {
        if !frame[at..].starts_with(&marked) {
            left.push(frame[at]);
            at += 1;
            continue;
        }
        left.extend_from_slice(&marked);
        at += marked.len();
        at += match frame[at] {
            0x00..=0x7f => 1,
            0xcc => 2,
            0xcd => 3,
            0xce => 5,
            0xcf => 9,
            marker => panic!("{field} is not an unsigned number: {marker:#x}"),
        };
    }
    left.into()
}

#[test]
fn an_engine_driven_session_gets_the_replies_of_lmcache() {
    const REGISTER: &[u8] = b"\x0e";
    let server = server();
    replay(
        &server,
        include_str!("../data/engine_driven.jsonl"),
        |frames| {
            let mut frames = frames.to_vec();
            if frames[1] == REGISTER {
                // The pool's name and size.
                frames.truncate(2);
            }
            frames
                .iter()
                .map(|frame| without(frame, "offset"))
                .collect()
        },
    );
    let counts = server.status().counts;
    assert_eq!((counts.stored_chunks, counts.hit_tokens), (3, 5 * 256));
}

#[test]
fn an_lmcache_driven_session_gets_the_replies_of_lmcache() {
    const COPIES: [&[u8]; 2] = [b"\x06", b"\x07"];
    // The engine's memory, by the name in its registration; only pages that are written use memory.
    let _segment = Segment::new("lmcache_kv_9662_0", 1 << 30);
    let server = server();
    replay(
        &server,
        include_str!("../data/lmcache_driven.jsonl"),
        |frames| {
            let mut frames = frames.to_vec();
            if COPIES.contains(&&frames[1][..]) {
                // `[handle, ok]`: the handle of device work differs between servers.
                let ok = frames[2].len() - 1;
                frames[2] = frames[2].slice(ok..);
            }
            frames
        },
    );
    let counts = server.status().counts;
    assert_eq!((counts.stored_chunks, counts.hit_tokens), (3, 5 * 256));
}
