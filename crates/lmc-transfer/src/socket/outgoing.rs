//! Frames that a stream sends, with their payloads, and the pins of the payloads' bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use super::budget::Charge;
use super::frame::{Frame, Pieces};
use crate::lease::{Granted, Pin, Segment};

/// Form of a piece of an object on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceForm {
    /// Encrypted and authenticated.
    Sealed,
    /// Objects carry a checksum.
    Summed,
    /// Neither: the embedder compares objects with digests of its own.
    Plain,
}

/// A frame that is to be sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) header: Vec<u8>,
    /// True if the header is encoded and sealed already.
    pub(super) raw: bool,
    pub(super) payload: Vec<Run>,
    /// Count of the peer's unanswered requests, where this frame is an answer.
    pub(super) answers: Option<Arc<AtomicUsize>>,
    /// Permit that is released when the frame is sent.
    pub(super) _permit: Option<OwnedSemaphorePermit>,
    pub(super) _charge: Option<Charge>,
}

impl Outgoing {
    /// A frame without payload.
    pub(super) fn of(frame: &Frame) -> Self {
        Self {
            header: frame.encode(),
            raw: false,
            payload: Vec::new(),
            answers: None,
            _permit: None,
            _charge: None,
        }
    }

    /// Parts of the payload.
    pub(super) fn segments(&self) -> impl Iterator<Item = Segment> {
        self.payload.iter().flat_map(|run| &run.segments).copied()
    }

    /// Pieces of the payload.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        self.payload.iter().flat_map(|run| {
            Pieces::of(&run.segments).map(|(part, bytes)| Piece {
                source: &run.source,
                part,
                whole: run.segments[part as usize],
                bytes,
            })
        })
    }

    /// Returns the write that this frame carries.
    pub(super) fn write(&self) -> Option<&Arc<Progress>> {
        match &self.payload.first()?.source {
            PayloadSource::Write(progress) => Some(progress),
            PayloadSource::Arena | PayloadSource::Lease { .. } | PayloadSource::Offer(_) => None,
        }
    }

    /// Ends the count of this answer. Called before the answer is sent, as the peer may ask again
    /// once it has the answer.
    pub(super) fn is_sent(&self) {
        if let Some(unanswered) = &self.answers {
            unanswered.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Undoes [`Self::is_sent`]: the frame was not sent after all.
    pub(super) fn is_unsent(&self) {
        if let Some(unanswered) = &self.answers {
            unanswered.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Parts of a payload that have one source.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) source: PayloadSource,
    pub(super) segments: Vec<Segment>,
}

/// A piece of a part of a payload.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    pub(super) source: &'a PayloadSource,
    /// Number of the part among those of its source.
    pub(super) part: u32,
    /// The part.
    pub(super) whole: Segment,
    pub(super) bytes: Segment,
}

/// The source of parts of a payload.
#[derive(Debug)]
pub(super) enum PayloadSource {
    /// The open arena.
    Arena,
    Lease {
        granted: Arc<Granted>,
        /// For each part, its slot of the lease.
        slots: Vec<u64>,
    },
    /// Slots that this side offers.
    Offer(Arc<Vec<SealedSlot>>),
    /// Slots of a write.
    Write(Arc<Progress>),
}

/// Pins the bytes that are being sent.
#[derive(Debug)]
pub(super) enum Kept {
    /// The frame pins the bytes, or they need no pin.
    Already,
    Lease {
        pin: Pin,
        /// Slot of the lease.
        slot: u64,
    },
    Slots {
        _slots: Arc<Vec<SealedSlot>>,
    },
}

impl Kept {
    /// Returns the slot of a piece, where a lease has granted it.
    pub(super) fn slot(&self) -> Option<&SealedSlot> {
        match self {
            Self::Lease { pin, slot } => pin.sealed(*slot),
            Self::Already | Self::Slots { .. } => None,
        }
    }
}

impl PayloadSource {
    /// Begins to read a piece of a part; `None` if that is no longer allowed.
    pub(super) fn keep(&self, part: u32) -> Option<Kept> {
        match self {
            Self::Arena => Some(Kept::Already),
            Self::Lease { granted, slots } => {
                let (pin, slot) = (granted.pin()?, *slots.get(part as usize)?);
                Some(Kept::Lease { pin, slot })
            }
            Self::Offer(slots) => Some(Kept::Slots {
                _slots: Arc::clone(slots),
            }),
            Self::Write(progress) => (!progress.is_cancelled()).then_some(Kept::Already),
        }
    }
}

/// The progress of sending a write.
#[derive(Debug)]
pub(super) struct Progress {
    /// Number of the request.
    pub(super) id: u64,
    /// Slots of the write, until it begins or is cancelled.
    slots: Mutex<Option<Arc<Vec<SealedSlot>>>>,
    cancelled: AtomicBool,
}

impl Progress {
    pub(super) fn new(id: u64, slots: Arc<Vec<SealedSlot>>) -> Self {
        Self {
            id,
            slots: Mutex::new(Some(slots)),
            cancelled: AtomicBool::new(false),
        }
    }

    /// Begins the write. Returns its slots, which the caller keeps until it is sent; `None` if it
    /// was cancelled.
    pub(super) fn begin(&self) -> Option<Arc<Vec<SealedSlot>>> {
        self.slots.lock().take()
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Cancels the write. Returns whether it never begins; its slots are released then.
    pub(super) fn cancel(&self) -> bool {
        self.cancelled.store(true, Ordering::Release);
        let never_sent = self.slots.lock().take();
        never_sent.is_some()
    }
}
