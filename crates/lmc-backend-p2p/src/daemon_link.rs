//! [`DaemonLink`]: the channel of a daemon to its peers.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use bytes::Bytes;
use futures_util::FutureExt;
use lmc_memory::{ReservedSlot, SealedSlot};
use lmc_transfer::{
    Address, BoxFuture, ConnectError, DataPlane, Filled, Index, PeerId, ReadLease, SocketChannel,
    TransferChannel, TransferError,
};
use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use crate::link::{Link, Session};

/// The channel of a daemon to its peers.
#[derive(Debug)]
pub struct DaemonLink {
    pub(crate) channel: SocketChannel,
}

impl Link for DaemonLink {
    type Grant = ReadLease;

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        at: &'a Address,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), ConnectError>> {
        Box::pin(async move {
            self.channel
                .connect(peer, at, None, deadline)
                .await
                .map(drop)
        })
    }

    fn disconnect<'a>(&'a self, peer: &'a PeerId, deadline: Instant) -> BoxFuture<'a, ()> {
        // What has not ended by the deadline ends later.
        Box::pin(async move { drop(self.channel.disconnect(peer, deadline).await) })
    }

    fn is_current(&self, session: &Session) -> bool {
        self.channel.peer_incarnation(&session.peer) == Some(session.incarnation)
    }

    fn home(&self, peer: &PeerId) -> Option<Handle> {
        self.channel.home(peer)
    }

    fn data_plane(&self, peer: &PeerId) -> DataPlane {
        self.channel.data_plane(peer).unwrap_or_default()
    }

    fn request<'a>(
        &'a self,
        peer: &'a PeerId,
        body: Vec<u8>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Vec<u8>, TransferError>> {
        Box::pin(async move {
            let answer = self.channel.ask(peer, body.into(), deadline).await;
            answer.map(Vec::from)
        })
    }

    fn grant(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<(Vec<Index>, ReadLease), TransferError> {
        let lease = self.channel.grant_read(peer, slots)?;
        Ok((lease.indices().to_vec(), lease))
    }

    fn read<'a>(
        &'a self,
        peer: &'a PeerId,
        slots: Vec<ReservedSlot>,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        self.channel.read(slots, peer, indices, deadline)
    }
}

/// Answers a peer's request. If nothing has to be waited for, answers on the channel's thread that received
/// the request, because waking two threads takes longer than most answers; otherwise on a runtime. After a
/// panic the answer is empty, so that the channel's thread continues.
pub(crate) fn answer_on(
    runtime: &Handle,
    answer: impl Future<Output = Vec<u8>> + Send + 'static,
) -> BoxFuture<'static, Bytes> {
    let answer = AssertUnwindSafe(answer).catch_unwind();
    let mut answer = Box::pin(answer.map(Result::unwrap_or_default));
    let entered = runtime.enter();
    if let Some(answer) = answer.as_mut().now_or_never() {
        return Box::pin(std::future::ready(answer.into()));
    }
    drop(entered);
    let serving = AbortOnDropHandle::new(runtime.spawn(answer));
    Box::pin(async move { serving.await.unwrap_or_default().into() })
}

/// Returns a random number from the system.
pub(crate) fn random() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use tokio::runtime::Builder;
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn an_answer_that_waits_for_nothing_is_made_at_once_and_another_on_the_runtime() {
        let runtime = Builder::new_multi_thread().worker_threads(1).build();
        let runtime = runtime.expect("a runtime");
        let here = thread::current().id();
        let elsewhere = move || vec![u8::from(thread::current().id() != here)];
        let at_once = answer_on(runtime.handle(), async move { elsewhere() });
        assert_eq!(at_once.now_or_never(), Some(Bytes::from(vec![0])));
        let (go, gone) = oneshot::channel::<()>();
        let later = answer_on(runtime.handle(), async move {
            let _ = gone.await;
            elsewhere()
        });
        go.send(()).expect("it waits for this");
        assert_eq!(runtime.block_on(later), Bytes::from(vec![1]));
    }

    #[test]
    fn a_panic_is_an_empty_answer_and_does_not_reach_the_thread_of_the_channel() {
        let runtime = Builder::new_multi_thread().worker_threads(1).build();
        let runtime = runtime.expect("a runtime");
        let answer = answer_on(runtime.handle(), async { panic!("a fault of this test") });
        assert_eq!(answer.now_or_never(), Some(Bytes::new()));
    }
}
