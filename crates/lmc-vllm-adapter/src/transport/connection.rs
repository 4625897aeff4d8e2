//! One connection: bytes in, requests to the service, answers out.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::io::Interest;
use tokio::sync::{mpsc, watch};
use tracing::debug;

use crate::protocol::codec::{DecodeError, Incoming, classify, decode_operation, encode_reply};
use crate::protocol::{Operation, Reply, Request, decode_request};
use crate::service::{ClientId, NextBatch, Outcome, Service, Subscription};
use crate::transport::admission::Permit;
use crate::transport::router::Serving;
use crate::transport::search::Search;
use crate::transport::stream::Stream;
use crate::transport::zmtp::{Decoder, Event, encode_message, encode_pong, encode_ready, greeting};

/// Bytes asked from the socket at a time when nothing larger is announced.
const READ_CHUNK: usize = 64 << 10;
/// Bytes that an announced frame makes the buffer grow at a time.
const GROW_CHUNK: usize = 1 << 20;
/// How long a connection is looked at again and again after bytes came or went, before its
/// thread sleeps. A scheduler's lookup is two requests in a row, and to wake a core that sleeps
/// takes tens of microseconds; other connections are served in between.
const BUSY_POLL: Duration = Duration::from_micros(50);
/// Longest that a connection's requests are handled one after the other before the requests of
/// others are.
const TIME_SLICE: Duration = Duration::from_micros(500);
/// Event streams of one connection.
const MAX_STREAMS: usize = 64;
/// Bytes of unread answers above which a connection's event streams wait.
const MAX_UNREAD_EVENTS: usize = 256 << 10;
/// Bytes of unread answers above which a connection that stalls is closed although its workers
/// hold slots.
const MAX_STALLED: usize = 1 << 20;

/// An answer that comes later, from a thread that copies.
struct DeferredReply {
    uid: Bytes,
    operation: Bytes,
    reply: Reply,
}

struct EventStream {
    operation: Bytes,
    subscription: Subscription,
    /// Whether the reader has asked for the next batch.
    credit: bool,
    /// Whether the last batch said that there is no log. A reader that hears of the end before
    /// it has read that one (the stock client throws it away then) would subscribe again.
    last: bool,
}

/// Result of one turn of a connection.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    /// True if at least one message of the input was handled.
    handled_message: bool,
    /// True if a byte was sent.
    wrote: bool,
    /// True if the turn was over before all was done that needs no waiting.
    has_more: bool,
}

/// An event that was taken from the input.
enum Handled {
    /// A peer may send these in the middle of a message, which they do not bring to its end.
    Ping,
    Message,
}

/// A connection is over: the peer ended it, broke a rule or stalled, or the server stops. None of
/// these says what has become of the process behind it.
pub(super) struct Ended;

pub(super) struct Connection {
    stream: Stream,
    client: ClientId,
    service: Service,
    serving: Arc<Serving>,
    permit: Arc<Permit>,
    search: Search,
    stop: watch::Receiver<bool>,
    decoder: Decoder,
    input: BytesMut,
    output: BytesMut,
    in_flight: usize,
    deferred_sender: mpsc::UnboundedSender<DeferredReply>,
    deferred: mpsc::UnboundedReceiver<DeferredReply>,
    streams: HashMap<Bytes, EventStream>,
    events: watch::Receiver<u64>,
}

impl Connection {
    pub(super) fn new(
        stream: Stream,
        service: Service,
        serving: Arc<Serving>,
        permit: Arc<Permit>,
        search: Search,
        stop: watch::Receiver<bool>,
    ) -> Self {
        let mut output = BytesMut::with_capacity(4096);
        output.extend_from_slice(&greeting());
        encode_ready("ROUTER", &mut output);
        let (deferred_sender, deferred) = mpsc::unbounded_channel();
        let events = service.watch_events();
        Self {
            stream,
            client: permit.client(),
            service,
            decoder: Decoder::new(serving.config.limits),
            serving,
            permit,
            search,
            stop,
            input: BytesMut::new(),
            output,
            in_flight: 0,
            deferred_sender,
            deferred,
            streams: HashMap::new(),
            events,
        }
    }

    /// Serves until the peer goes, breaks a rule, stalls, is silent from the first, has to make
    /// way for another, or the server stops.
    pub(super) async fn run(mut self) {
        let mut waiting_since = Instant::now();
        // Since when the rest of a message, and the acceptance of answers, is owed.
        let (mut input_since, mut output_since) = (waiting_since, waiting_since);
        let (mut owed_input, mut owed_output) = (true, false);
        let first_request_by = waiting_since + self.serving.config.first_request_timeout;
        loop {
            let Ok(progress) = self.make_progress() else {
                return;
            };
            if progress.wrote {
                waiting_since = Instant::now();
                output_since = waiting_since;
            }
            let stopping = *self.stop.borrow();
            if stopping && self.in_flight == 0 && self.output.is_empty() {
                return;
            }
            // What came is handled before more is read.
            let may_read = !stopping && !progress.has_more && self.may_read();
            // A peer that owes us something (the rest of a message, the acceptance of an
            // answer) gets a deadline; one that is merely silent, or waits for us, does not.
            let owes_input =
                !self.decoder.is_ready() || self.decoder.in_message() || !self.input.is_empty();
            let owes_output = !self.output.is_empty();
            let owes_input = may_read && owes_input;
            let owes = owes_output || owes_input;
            if owes_output && !owed_output {
                output_since = Instant::now();
            }
            // A message has the whole time from its first byte to its last.
            if owes_input && (!owed_input || progress.handled_message) {
                input_since = Instant::now();
            }
            (owed_input, owed_output) = (owes_input, owes_output);
            let interest = match (may_read, self.output.is_empty()) {
                (true, true) => Some(Interest::READABLE),
                (true, false) => Some(Interest::READABLE | Interest::WRITABLE),
                (false, false) => Some(Interest::WRITABLE),
                (false, true) => None,
            };
            let silent = !self.permit.has_sent_request();
            let streaming = !self.streams.is_empty();
            // Not beside a copy, whose threads need the cores.
            let may_poll = interest.is_some() && self.in_flight == 0;
            let poll_again = may_poll && waiting_since.elapsed() < BUSY_POLL;
            let poll_again = poll_again || progress.has_more;
            let owed_since = match (owes_output, owes_input) {
                (true, true) => input_since.min(output_since),
                (true, false) => output_since,
                (false, _) => input_since,
            };
            let stalled = owed_since + self.serving.config.peer_timeout;
            tokio::select! {
                biased;
                ready = self.stream.ready(interest.unwrap_or(Interest::WRITABLE)),
                    if interest.is_some() => match ready {
                    Ok(ready) if ready.is_readable() && may_read => match self.read() {
                        Ok(true) => waiting_since = Instant::now(),
                        Ok(false) => {}
                        Err(Ended) => return,
                    },
                    Ok(_) => {}
                    Err(_) => return,
                },
                Some(deferred) = self.deferred.recv() => {
                    self.in_flight -= 1;
                    self.answer(&deferred.uid, &deferred.operation, &deferred.reply);
                }
                Ok(()) = self.events.changed(), if streaming => {}
                _ = self.stop.changed(), if !stopping => {}
                () = tokio::task::yield_now(), if poll_again => {}
                () = tokio::time::sleep_until(first_request_by.into()), if silent => {
                    self.service.transport_counters().silent.fetch_add(1, Ordering::Relaxed);
                    debug!(client = %self.client, "closing a connection that asks for nothing");
                    return;
                }
                () = tokio::time::sleep_until(stalled.into()), if owes => {
                    self.service.transport_counters().stalled.fetch_add(1, Ordering::Relaxed);
                    let input = self.input.len() + self.decoder.message_bytes();
                    let buffered = input + self.output.len();
                    if buffered > MAX_STALLED || !self.service.holds_slots(self.client) {
                        return;
                    }
                    // As long as the connection stands, its slots are held without a limit of
                    // time, and an engine that stood still for a while is served as before.
                    input_since = Instant::now();
                    output_since = input_since;
                }
                () = self.permit.close_requested() => {
                    self.service.transport_counters().closed_idle.fetch_add(1, Ordering::Relaxed);
                    debug!(client = %self.client, "closing an idle connection to admit another");
                    return;
                }
            }
        }
    }

    /// Does what needs no waiting, for one turn at most.
    fn make_progress(&mut self) -> Result<Progress, Ended> {
        let began = Instant::now();
        let mut progress = Progress::default();
        loop {
            while let Ok(deferred) = self.deferred.try_recv() {
                self.in_flight -= 1;
                self.answer(&deferred.uid, &deferred.operation, &deferred.reply);
            }
            if began.elapsed() >= TIME_SLICE {
                progress.has_more = true;
                break;
            }
            if !self.may_read() {
                break;
            }
            match self.next_event()? {
                None => break,
                Some(Handled::Ping) => {}
                Some(Handled::Message) => progress.handled_message = true,
            }
        }
        let waits = self.pump_streams();
        self.permit.set_streaming(!self.streams.is_empty());
        progress.wrote = self.write()?;
        progress.has_more |= waits && self.output.len() < MAX_UNREAD_EVENTS;
        Ok(progress)
    }

    fn may_read(&self) -> bool {
        self.in_flight < self.serving.config.hard_in_flight_limit()
            && self.output.len() < self.serving.config.max_unread
    }

    /// Handles one event of the input. `None` when the input holds no whole one.
    fn next_event(&mut self) -> Result<Option<Handled>, Ended> {
        match self.decoder.next(&mut self.input) {
            Ok(None) => Ok(None),
            Ok(Some(Event::Ready(_))) => Ok(Some(Handled::Message)),
            Ok(Some(Event::Ping(context))) => {
                encode_pong(&context, &mut self.output);
                Ok(Some(Handled::Ping))
            }
            Ok(Some(Event::Message(frames))) => {
                self.message(&frames);
                Ok(Some(Handled::Message))
            }
            Err(error) => {
                self.service
                    .transport_counters()
                    .broken
                    .fetch_add(1, Ordering::Relaxed);
                debug!(client = %self.client, %error, "closing a connection");
                self.service
                    .warn_throttled(&format!("closed a connection: {error}"));
                Err(Ended)
            }
        }
    }

    fn message(&mut self, frames: &[Bytes]) {
        let (uid, operation, payloads) = match classify(frames) {
            Ok(Incoming::Request {
                uid,
                operation,
                payloads,
            }) => (uid, operation, payloads),
            Ok(Incoming::StreamAck { uid }) => {
                if let Some(stream) = self.streams.get_mut(uid) {
                    stream.credit = true;
                }
                return;
            }
            Ok(Incoming::StreamCancel { uid }) => {
                if let Some(stream) = self.streams.remove(uid) {
                    self.service.forget_subscription(&stream.subscription);
                    self.answer(uid, &stream.operation, &Reply::None);
                }
                return;
            }
            Err(error) => {
                self.service
                    .transport_counters()
                    .unanswerable
                    .fetch_add(1, Ordering::Relaxed);
                self.service
                    .warn_throttled(&format!("dropped a message: {error}"));
                return;
            }
        };
        let started = Instant::now();
        match decode_request(operation, payloads) {
            Err(error) => self.refuse(uid, operation, &error),
            Ok(request) => self.request(uid, operation, request, started),
        }
    }

    fn request(&mut self, uid: &Bytes, operation: &Bytes, request: Request, started: Instant) {
        let asked = request.operation();
        self.permit.record_request(started);
        let outcome = match self.refusal_at_limit(uid, asked) {
            Some(reply) => Outcome::Reply(reply),
            None => {
                // A bug in a handler must not leave the client waiting, nor take what else the
                // connection has under way with it.
                let handle = || self.service.handle(self.client, request, started);
                let failed =
                    || Reply::Error("lmc: the request failed inside the server".to_owned());
                catch_unwind(AssertUnwindSafe(handle)).unwrap_or_else(|_| Outcome::Reply(failed()))
            }
        };
        match outcome {
            Outcome::Reply(reply) => {
                self.answer(uid, operation, &reply);
                self.service.record(asked, &reply, started.elapsed());
                if let Operation::PrepareStore | Operation::PrepareRetrieve = asked {
                    self.search
                        .begin_if_due(&self.service, self.client, started);
                }
            }
            Outcome::Job(job) => {
                let answer = self.defer(uid, operation, asked, started);
                let lane = job.lane;
                let work = move || {
                    // A bug in a copy must not leave the client waiting, nor take the thread
                    // with it.
                    let reply = catch_unwind(AssertUnwindSafe(|| job.run()));
                    let failed = "lmc: the copy failed inside the server";
                    answer(reply.unwrap_or_else(|_| Reply::Error(failed.to_owned())));
                };
                self.service.run_job(self.client, lane, Box::new(work));
            }
            Outcome::Wait(wait) => {
                let answer = self.defer(uid, operation, asked, started);
                self.service.wait(&wait, Box::new(answer));
            }
            Outcome::Quiet(entrance) => {
                let answer = self.defer(uid, operation, asked, started);
                entrance.when_quiet(Box::new(move || answer(Reply::None)));
            }
            Outcome::Stream(subscription) => {
                self.subscribe(uid, operation, subscription);
                self.service.record(asked, &Reply::None, started.elapsed());
            }
        }
    }

    /// What is answered to a request that this connection has no room for.
    fn refusal_at_limit(&self, uid: &Bytes, asked: Operation) -> Option<Reply> {
        match asked {
            // A stream under a number that is in use takes the place of the one before it.
            Operation::SubscribeKvEvents
                if self.streams.len() >= MAX_STREAMS && !self.streams.contains_key(uid) =>
            {
                let text = format!("lmc: more than {MAX_STREAMS} event streams on one connection");
                Some(Reply::Error(text))
            }
            // Read on and declined: a sign of life behind it must not wait for the copies
            // before it.
            Operation::Store | Operation::Retrieve
                if self.in_flight >= self.serving.config.max_in_flight =>
            {
                Some(self.service.decline_copy(asked))
            }
            _ => None,
        }
    }

    fn refuse(&mut self, uid: &Bytes, operation: &Bytes, error: &DecodeError) {
        self.service
            .record_refusal(decode_operation(operation).ok());
        self.service
            .warn_throttled(&format!("refused a request: {error}"));
        self.answer(uid, operation, &Reply::Error(format!("lmc: {error}")));
    }

    /// How a request is answered later, from any thread.
    fn defer(
        &mut self,
        uid: &Bytes,
        operation: &Bytes,
        asked: Operation,
        started: Instant,
    ) -> impl FnOnce(Reply) + Send + use<> {
        self.in_flight += 1;
        let (uid, operation) = (uid.clone(), operation.clone());
        let (sender, service) = (self.deferred_sender.clone(), self.service.clone());
        move |reply| {
            service.record(asked, &reply, started.elapsed());
            // Without a receiver the connection is gone, and the answer with it.
            let _ = sender.send(DeferredReply {
                uid,
                operation,
                reply,
            });
        }
    }

    fn subscribe(&mut self, uid: &Bytes, operation: &Bytes, subscription: Subscription) {
        let stream = EventStream {
            operation: operation.clone(),
            subscription,
            credit: true,
            last: false,
        };
        if let Some(replaced) = self.streams.insert(uid.clone(), stream) {
            self.service.forget_subscription(&replaced.subscription);
        }
    }

    /// Sends a batch on each stream whose reader is ready and that has one, and the end on each
    /// that is over, ready or not. Returns true if streams wait for the reader to take what is
    /// unread.
    fn pump_streams(&mut self) -> bool {
        if self.streams.is_empty() {
            return false;
        }
        // Seen before the log is read, so that what comes in between wakes us again.
        self.events.borrow_and_update();
        let mut answers = Vec::new();
        let mut unread = self.output.len();
        self.streams.retain(|uid, stream| {
            if stream.credit
                && unread < MAX_UNREAD_EVENTS
                && let NextBatch::Batch(batch) = self.service.next_batch(&mut stream.subscription)
            {
                stream.credit = false;
                stream.last = !batch.enabled;
                unread += batch.encoded_bytes();
                answers.push((uid.clone(), stream.operation.clone(), Reply::Events(batch)));
            }
            let waits = stream.last && !stream.credit;
            if waits || !self.service.subscription_ended(&stream.subscription) {
                return true;
            }
            self.service.forget_subscription(&stream.subscription);
            answers.push((uid.clone(), stream.operation.clone(), Reply::None));
            false
        });
        for (uid, operation, reply) in answers {
            self.answer(&uid, &operation, &reply);
        }
        unread >= MAX_UNREAD_EVENTS && self.streams.values().any(|stream| stream.credit)
    }

    fn answer(&mut self, uid: &Bytes, operation: &Bytes, reply: &Reply) {
        let (answered, payload) = encode_reply(operation, reply);
        match payload {
            Some(payload) => encode_message(&[uid, &answered, &payload], &mut self.output),
            None => encode_message(&[uid, &answered], &mut self.output),
        }
    }

    /// Takes what has arrived. False when nothing had, after all.
    fn read(&mut self) -> Result<bool, Ended> {
        let missing = self
            .decoder
            .missing(&self.input)
            .clamp(READ_CHUNK, GROW_CHUNK);
        self.input.reserve(missing);
        match self.stream.try_read_buf(&mut self.input) {
            Ok(0) => Err(Ended),
            Ok(read) => {
                let counters = self.service.transport_counters();
                counters.bytes_in.fetch_add(read as u64, Ordering::Relaxed);
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(_) => Err(Ended),
        }
    }

    /// Sends what the socket takes. Whether it took anything.
    fn write(&mut self) -> Result<bool, Ended> {
        let mut moved = false;
        while !self.output.is_empty() {
            match self.stream.try_write(&self.output) {
                Ok(written) => {
                    let counters = self.service.transport_counters();
                    counters
                        .bytes_out
                        .fetch_add(written as u64, Ordering::Relaxed);
                    bytes::Buf::advance(&mut self.output, written);
                    moved = true;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(Ended),
            }
        }
        Ok(moved)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for stream in self.streams.values() {
            self.service.forget_subscription(&stream.subscription);
        }
    }
}
