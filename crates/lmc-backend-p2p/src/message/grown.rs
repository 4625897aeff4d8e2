//! Fields that were added at the end of bodies since version 1.

use postcard::{Result, take_from_bytes, to_extend};
use serde::{Serialize, de::DeserializeOwned};

use crate::directory::{Announce, Announced, Find, Found};

use super::{
    ClearsPage, Describe, Described, Hello, KeyBatch, Lease, Leased, Located, Push, Pushed,
    Refusal, Release, Released, Renew, Stamped,
};

/// Bit of [`Hello::features`]: the side understands the digest [`LATE_DIGEST`] in
/// [`ChunkLease::Granted`](super::ChunkLease::Granted).
pub const FEATURE_LATE_DIGESTS: u64 = 1 << 1;

/// Stands for a digest that comes with the answer to the lease's release: the owner computes it while the
/// chunk is read.
pub const LATE_DIGEST: u64 = 0;

/// Most bytes of a request's id; a longer id is ignored.
pub(super) const MAX_REQUEST_ID: usize = 1024;

/// The body of a frame.
pub(super) trait Body: Serialize + DeserializeOwned {
    /// Appends the added fields of the body.
    fn write_tail(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        Ok(bytes)
    }

    /// Reads the added fields of the body, if present.
    fn read_tail(&mut self, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

impl<T: Body> Body for Stamped<T> {
    fn write_tail(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.message.write_tail(bytes)
    }

    fn read_tail(&mut self, tail: &[u8]) -> Result<()> {
        self.message.read_tail(tail)
    }
}

impl Body for KeyBatch {
    fn write_tail(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match &self.awaited {
            Some(request) => to_extend(&**request, bytes),
            None => Ok(bytes),
        }
    }

    fn read_tail(&mut self, tail: &[u8]) -> Result<()> {
        let request = take_from_bytes::<&str>(tail).ok();
        let request = request.filter(|(id, _)| (1..=MAX_REQUEST_ID).contains(&id.len()));
        self.awaited = request.map(|(id, _)| id.into());
        Ok(())
    }
}

/// Writes nothing for false, so that the bytes are the same as without the field.
fn write_flag(flag: bool, bytes: Vec<u8>) -> Result<Vec<u8>> {
    match flag {
        true => to_extend(&true, bytes),
        false => Ok(bytes),
    }
}

fn read_flag(tail: &[u8]) -> bool {
    matches!(take_from_bytes(tail), Ok((true, _)))
}

impl Body for Released {
    fn write_tail(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match self.digests.is_empty() {
            true => Ok(bytes),
            false => to_extend(&self.digests, bytes),
        }
    }

    fn read_tail(&mut self, tail: &[u8]) -> Result<()> {
        if let Ok((digests, _newer)) = take_from_bytes(tail) {
            self.digests = digests;
        }
        Ok(())
    }
}

macro_rules! grown_by_flag {
    ($($body:ty: $flag:ident),*) => {$(
        impl Body for $body {
            fn write_tail(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
                write_flag(self.$flag, bytes)
            }

            fn read_tail(&mut self, tail: &[u8]) -> Result<()> {
                self.$flag = read_flag(tail);
                Ok(())
            }
        }
    )*};
}

grown_by_flag!(
    ClearsPage: is_volatile,
    Hello: is_draining,
    Described: is_draining,
    Located: is_over
);

macro_rules! not_grown {
    ($($body:ty),*) => {$( impl Body for $body {} )*};
}

not_grown!(
    Lease, Leased, Renew, Release, Refusal, Announce, Announced, Find, Found, Describe, Push,
    Pushed
);
not_grown!(bool, (), u32, u16);
