//! Questions to peers that did not answer in time: the pause of one that is only slow stays short.

use std::sync::Arc;
use std::time::Duration;

use lmc_backend::now;
use lmc_transfer::PeerId;

use crate::link::Link;
use crate::message::{Describe, Request};
use crate::node::Node;

/// Time that a peer has for an answer before it is taken for one that is gone.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

impl<L: Link> Node<L> {
    /// Asks a peer whose pause has just begun something small, in the background: its answer ends
    /// the pause, or cuts it where it comes late as well.
    pub(crate) fn probe(self: &Arc<Self>, peer: &PeerId) {
        let digest = {
            let mut peers = self.peers.lock();
            let known = peers.get_mut(peer);
            known.and_then(|peer| peer.begin_probe().then_some(peer.holds.digest))
        };
        let Some(digest) = digest else {
            return;
        };
        let (this, peer) = (Arc::clone(self), peer.clone());
        tokio::spawn(async move {
            let request = Request::Describe(Describe { digest });
            // `ask` notes what comes of it.
            let _ = this.ask(&peer, &request, now() + PROBE_TIMEOUT).await;
        });
    }
}
