//! Questions of the embedder to a peer.

use std::time::Instant;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::connection::{Pending, Reply};
use super::frame::{Frame, FrameOutcome};
use super::outgoing::Outgoing;
use super::shared::ChannelState;
use crate::{MAX_MESSAGE, PeerId, TransferError};

impl ChannelState {
    pub(super) async fn ask(
        &self,
        peer: &PeerId,
        question: Bytes,
        deadline: Instant,
    ) -> Result<Bytes, TransferError> {
        if question.len() > MAX_MESSAGE {
            let reason = format!(
                "a question of {} bytes: at most {MAX_MESSAGE} are allowed",
                question.len()
            );
            return Err(TransferError::Refused(reason));
        }
        let connection = self.connection(peer)?;
        let asked = async {
            let stream = &connection.streams[connection.next_stream(question.len() as u64)];
            let permit = stream.acquire().await?;
            let id = connection.next_id();
            let (reply, replied) = oneshot::channel();
            let pending = Pending::of_streams(None, reply, permit);
            let frame = Frame::Ask {
                id,
                question: question.into(),
            };
            match stream.request(id, pending, Outgoing::of(&frame)) {
                true => replied.await.ok(),
                false => None,
            }
        };
        match self.within(deadline, asked).await? {
            Some(Reply::Message(answer)) => Ok(answer.into()),
            Some(Reply::Outcome(FrameOutcome::Refused(why))) => Err(TransferError::Refused(why)),
            Some(_) => Err(TransferError::Refused(
                "the answer is of another kind than the question".into(),
            )),
            None => Err(self.gone(&connection, deadline).await.0),
        }
    }
}
