//! The body of an answer that is passed on from an engine to a client.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep};

use super::engines::{Engine, Engines, InFlight};
use super::warm::PromptBlocks;

/// Passes bytes on as they arrive, and fails when none arrive for too long. The engine counts as in use
/// until the end.
pub(super) struct Relayed {
    from: Incoming,
    _in_flight: InFlight,
    had: Option<HadAtEnd>,
    idle: Duration,
    deadline: Pin<Box<Sleep>>,
}

impl Relayed {
    pub(super) fn new(
        from: Incoming,
        in_flight: InFlight,
        had: Option<HadAtEnd>,
        idle: Duration,
    ) -> Self {
        Self {
            from,
            _in_flight: in_flight,
            had,
            idle,
            deadline: Box::pin(tokio::time::sleep(idle)),
        }
    }
}

/// The prompt that an engine has in its cache after the end of its answer.
pub(super) struct HadAtEnd {
    pub(super) engines: Arc<Engines>,
    pub(super) engine: Arc<Engine>,
    pub(super) prompt: Arc<PromptBlocks>,
}

impl Relayed {
    fn note_end(&mut self) {
        if let Some(had) = self.had.take() {
            let now = std::time::Instant::now();
            had.engines.note_had(&had.engine, &had.prompt, now);
        }
    }
}

/// A body whose first part has arrived; an empty body has none.
pub(super) struct Begun {
    first: Option<Result<Frame<Bytes>, axum::Error>>,
    rest: axum::body::Body,
}

impl Begun {
    /// Waits for the first part of a body.
    pub(super) async fn wait(mut rest: axum::body::Body) -> Self {
        let first = poll_fn(|cx| Pin::new(&mut rest).poll_frame(cx)).await;
        Self { first, rest }
    }
}

impl Body for Begun {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => Pin::new(&mut self.rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().and_then(|first| first.as_ref().ok());
        let first = first.and_then(Frame::data_ref).map_or(0, Bytes::len) as u64;
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + first);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + first);
        }
        hint
    }
}

/// Reason why the rest of an answer does not arrive.
#[derive(Debug)]
pub(super) enum BrokenOff {
    Engine(hyper::Error),
    Idle(Duration),
}

impl fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => write!(f, "the engine's answer broke off: {error}"),
            Self::Idle(idle) => write!(f, "the engine sent nothing for {} s", idle.as_secs()),
        }
    }
}

impl std::error::Error for BrokenOff {}

impl Body for Relayed {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.from).poll_frame(cx) {
            this.deadline.as_mut().reset(Instant::now() + this.idle);
            match &frame {
                Some(Err(_)) => this.had = None,
                None => this.note_end(),
                // The server may not poll again after the last frame.
                Some(Ok(_)) if this.from.is_end_stream() => this.note_end(),
                Some(Ok(_)) => {}
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(BrokenOff::Engine)));
        }
        // If the client does not read, this is not polled; the limits of its connection end it.
        match this.deadline.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(Err(BrokenOff::Idle(this.idle)))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.from.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.from.size_hint()
    }
}
