//! Requests that are encoded before the clock starts.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use lmc_vllm_adapter::{Client, ClientError, Operation, Reply, Request, encode_request_frames};

/// An encoded request, which can be sent repeatedly.
#[derive(Debug, Clone)]
pub(crate) struct Encoded {
    uid: u64,
    operation: Operation,
    bytes: Vec<u8>,
}

impl Encoded {
    pub(crate) fn new(request: &Request) -> Self {
        // Above the numbers that a client gives to requests that it encodes itself.
        static NEXT: AtomicU64 = AtomicU64::new(1 << 32);
        let uid = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            uid,
            operation: request.operation(),
            bytes: encode_request_frames(uid, request),
        }
    }

    pub(crate) fn send(&self, client: &mut Client) -> Result<()> {
        Ok(client.send_encoded(&self.bytes)?)
    }

    pub(crate) fn receive(&self, client: &mut Client) -> Result<Reply> {
        match client.receive(self.uid, self.operation)? {
            Reply::Error(text) => bail!("the server refused {}: {text}", self.operation),
            reply => Ok(reply),
        }
    }

    pub(crate) fn ask(&self, client: &mut Client) -> Result<Reply> {
        self.send(client)?;
        self.receive(client)
    }

    /// Receives the answer to a lookup; `None` if it is not ready yet, for which LMCache's server answers
    /// nil.
    pub(crate) fn receive_hits(&self, client: &mut Client) -> Result<Option<u64>> {
        match client.receive(self.uid, self.operation) {
            Ok(Reply::Int(chunks)) => Ok(Some(chunks)),
            Ok(Reply::None) => Ok(None),
            Ok(Reply::Error(text)) => bail!("the server refused {}: {text}", self.operation),
            Ok(other) => bail!("unexpected answer to {}: {other:?}", self.operation),
            Err(ClientError::Reply { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
