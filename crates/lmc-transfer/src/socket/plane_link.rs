//! NIXL's state of one connection: whether it is used, and the fetches that it serves.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::budget::Charge;
use super::frame::Frame;
use super::outgoing::Outgoing;
use crate::PeerId;
use crate::nixl::{Plane, Remote};

/// Pause of NIXL after a failure; doubled with each further failure.
const PAUSE: Duration = Duration::from_secs(5);
/// Most doublings of the pause.
const DOUBLED: u32 = 6;
/// Pause before a peer that does not know this side's memory yet is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Fetches of one connection that are served at a time; others are for the streams. A cancelled
/// fetch counts until NIXL's thread has seen the cancellation.
const SERVED: usize = 32;

/// NIXL's state of one connection.
#[derive(Debug)]
pub(super) struct PlaneLink {
    pub(super) plane: Arc<Plane>,
    /// Number of the connection among those of the plane.
    pub(super) number: u64,
    state: Mutex<PlaneLinkState>,
    /// Fetches of the peer that NIXL serves.
    serving: Mutex<HashMap<u64, Serving>>,
}

/// A fetch of the peer.
#[derive(Debug)]
struct Serving {
    /// True once the peer wants no more.
    stopped: Arc<AtomicBool>,
    /// Present until the fetch is answered: the count of the peer's unanswered requests on its
    /// stream, and the fetch's charge.
    answer: Option<(Arc<AtomicUsize>, Charge)>,
}

#[derive(Debug, Default)]
struct PlaneLinkState {
    /// True when this side's memory has been announced.
    announced: bool,
    /// Present when the peer has announced its memory.
    heard: Option<Charge>,
    /// The memory that the peer lets this side write to.
    known: Option<Arc<Remote>>,
    failures: u32,
    paused_until: Option<Instant>,
}

impl PlaneLink {
    pub(super) fn new(plane: &Arc<Plane>) -> Self {
        Self {
            plane: Arc::clone(plane),
            number: plane.next_number(),
            state: Mutex::default(),
            serving: Mutex::default(),
        }
    }

    /// Notes a peer's announcement; `false` for a second one.
    pub(super) fn hear(&self, charge: Charge) -> bool {
        self.state.lock().heard.replace(charge).is_none()
    }

    /// Notes that this side's memory has been announced.
    pub(super) fn has_announced(&self) {
        self.state.lock().announced = true;
    }

    /// Notes the memory that the peer lets this side write to.
    pub(super) fn know(&self, remote: Arc<Remote>) {
        self.state.lock().known = Some(remote);
    }

    /// The memory that the peer lets this side write to.
    pub(super) fn known(&self) -> Option<Arc<Remote>> {
        self.state.lock().known.clone()
    }

    /// Returns whether this side reads by NIXL: both sides have announced their memory, and NIXL is
    /// not paused.
    pub(super) fn is_usable(&self) -> bool {
        let state = self.state.lock();
        let paused = state.paused_until;
        let paused = paused.is_some_and(|end| Instant::now() < end);
        state.announced && state.known.is_some() && !paused
    }

    /// Notes a failure of NIXL, unless another call has just noted one.
    pub(super) fn failed(&self, peer: &PeerId, reason: &str) {
        let mut state = self.state.lock();
        let now = Instant::now();
        if state.paused_until.is_some_and(|end| now < end) {
            return;
        }
        let pause = PAUSE * 2u32.pow(state.failures.min(DOUBLED));
        state.failures += 1;
        state.paused_until = Some(now + pause);
        drop(state);
        tracing::warn!(%peer, reason, ?pause, "NIXL failed; the peer is read over sockets");
    }

    /// Pauses NIXL for [`ASK_AGAIN`].
    pub(super) fn ask_later(&self) {
        let mut state = self.state.lock();
        state.paused_until = state.paused_until.max(Some(Instant::now() + ASK_AGAIN));
    }

    pub(super) fn worked(&self) {
        self.state.lock().failures = 0;
    }

    /// Notes that NIXL refuses the peer's metadata.
    pub(super) fn refuses(&self, peer: &PeerId, reason: &str) {
        if self.state.lock().known.take().is_some() {
            tracing::warn!(%peer, reason, "NIXL cannot reach the peer; it reads over sockets");
        }
    }

    /// Adds a fetch of the peer, which [`Self::answer`] answers. Returns its flag, which is set
    /// when the peer cancels the fetch; `None` if [`SERVED`] fetches are served already, or another
    /// one has its number.
    pub(super) fn serve(
        &self,
        id: u64,
        unanswered: &Arc<AtomicUsize>,
        charge: Charge,
    ) -> Option<Arc<AtomicBool>> {
        let mut serving = self.serving.lock();
        if serving.len() >= SERVED || serving.contains_key(&id) {
            return None;
        }
        let stopped = Arc::<AtomicBool>::default();
        let fetch = Serving {
            stopped: Arc::clone(&stopped),
            answer: Some((Arc::clone(unanswered), charge)),
        };
        serving.insert(id, fetch);
        Some(stopped)
    }

    /// Returns the answer to a fetch that has none yet. `ends`: nothing serves the fetch any more.
    pub(super) fn answer(&self, id: u64, frame: &Frame, ends: bool) -> Option<Outgoing> {
        let mut serving = self.serving.lock();
        let answer = serving.get_mut(&id)?.answer.take();
        if ends {
            serving.remove(&id);
        }
        drop(serving);
        let (unanswered, charge) = answer?;
        Some(Outgoing {
            answers: Some(unanswered),
            _charge: Some(charge),
            ..Outgoing::of(frame)
        })
    }

    /// Notes that the peer has cancelled a fetch. Returns its answer if it has none yet: the
    /// plane's thread may hang.
    pub(super) fn stop(&self, id: u64) -> Option<Outgoing> {
        let serving = self.serving.lock();
        serving.get(&id)?.stopped.store(true, Ordering::Release);
        drop(serving);
        let unmoved = Frame::Unmoved {
            id,
            idle: false,
            reason: "the fetch was cancelled".to_owned(),
        };
        let answer = self.answer(id, &unmoved, false)?;
        self.plane.look();
        Some(answer)
    }

    /// Notes the end of the connection.
    pub(super) fn end(&self) {
        self.plane.gone(self.number);
    }
}
