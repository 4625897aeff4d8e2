//! One connection: decodes requests, passes them to the service, and sends the replies.

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
use crate::service::{ClientId, NextBatch, RequestOutcome, Service, Subscription};
use crate::transport::admission::Permit;
use crate::transport::search::Search;
use crate::transport::serving::Serving;
use crate::transport::stream::Stream;
use crate::transport::zmtp::{Decoder, Event, encode_message, encode_pong, encode_ready, greeting};

/// Buffer capacity for one read when no larger frame is announced, in bytes.
const READ_CHUNK: usize = 64 << 10;
/// Most bytes by which the buffer grows for an announced frame before a read.
const GROW_CHUNK: usize = 1 << 20;
/// Time for which a connection is polled after bytes were read or written, before its task sleeps.
/// A scheduler's lookup is two requests in a row, and waking an idle core takes tens of
/// microseconds. Other connections are served between two polls; at most one connection for each
/// thread of the runtime polls.
const BUSY_POLL: Duration = Duration::from_micros(50);
/// Longest time for which the requests of one connection are handled before other connections are
/// served.
const TIME_SLICE: Duration = Duration::from_micros(500);
/// Most event streams of one connection.
const MAX_STREAMS: usize = 64;
/// Bytes of unread replies above which a connection's event streams wait.
const MAX_UNREAD_EVENTS: usize = 256 << 10;
/// Buffered bytes above which a stalled connection is closed although its workers hold slots.
const MAX_STALLED: usize = 1 << 20;

/// Reply that another thread has finished.
struct DeferredReply {
    uid: Bytes,
    operation: Bytes,
    reply: Reply,
}

struct EventStream {
    operation: Bytes,
    subscription: Subscription,
    /// True if the reader has asked for the next batch.
    credit: bool,
    /// True if the last batch reported that the server keeps no log. LMCache's client discards an
    /// unread batch at the end of a stream, and would then subscribe again, so the end is sent
    /// after the reader has acknowledged this batch.
    last: bool,
}

/// Result of one time slice of a connection.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    /// True if at least one message was handled.
    handled_message: bool,
    /// True if a byte was sent.
    wrote: bool,
    /// True if the time slice ended with work left.
    has_more: bool,
}

/// Kind of an event that was handled.
enum Handled {
    /// A ping, which a client may send in the middle of a message; it does not move the deadline of
    /// the message.
    Ping,
    Message,
}

/// The connection has ended: the client closed it, broke the protocol or stalled, or the server
/// stops. The client's process may still run.
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
    /// Offset in `output` of the byte that the pool's descriptor goes with, if it is to be passed.
    pool_at: Option<usize>,
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
            pool_at: None,
            in_flight: 0,
            deferred_sender,
            deferred,
            streams: HashMap::new(),
            events,
        }
    }

    /// Serves until the client disconnects, breaks the protocol, stalls, sends no first request in
    /// time, is closed to admit another connection, or the server stops.
    pub(super) async fn run(mut self) {
        let mut waiting_since = Instant::now();
        // Start of the deadlines for the rest of a message and for the acceptance of replies.
        let (mut input_since, mut output_since) = (waiting_since, waiting_since);
        let (mut owed_input, mut owed_output) = (true, false);
        let serving = Arc::clone(&self.serving);
        let first_request_by = waiting_since + serving.config.first_request_timeout;
        let mut polling = None;
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
            // Input that has arrived is handled before more is read.
            let may_read = !stopping && !progress.has_more && self.may_read();
            // A client that owes the rest of a message or the acceptance of a reply has a deadline;
            // one that is idle or waits for the server has none.
            let owes_input =
                !self.decoder.is_ready() || self.decoder.in_message() || !self.input.is_empty();
            let owes_output = !self.output.is_empty();
            let owes_input = may_read && owes_input;
            let owes = owes_output || owes_input;
            if owes_output && !owed_output {
                output_since = Instant::now();
            }
            // The deadline is for the whole message, not for each of its bytes.
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
            // Do not poll during a copy: its threads need the cores.
            let may_poll = interest.is_some() && self.in_flight == 0;
            polling = match polling {
                _ if !may_poll || waiting_since.elapsed() >= BUSY_POLL => None,
                None => serving.poll(),
                polling => polling,
            };
            let poll_again = polling.is_some() || progress.has_more;
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
                    debug!(client = %self.client, "connection closed: no first request");
                    return;
                }
                () = tokio::time::sleep_until(stalled.into()), if owes => {
                    self.service.transport_counters().stalled.fetch_add(1, Ordering::Relaxed);
                    let input = self.input.len() + self.decoder.message_bytes();
                    let buffered = input + self.output.len();
                    if buffered > MAX_STALLED || !self.service.holds_slots(self.client) {
                        return;
                    }
                    // Slots are held while the connection is open, without a time limit, so that an
                    // engine that was stopped for a while is served as before.
                    input_since = Instant::now();
                    output_since = input_since;
                }
                () = self.permit.close_requested() => {
                    self.service.transport_counters().closed_idle.fetch_add(1, Ordering::Relaxed);
                    debug!(client = %self.client, "idle connection closed to admit another");
                    return;
                }
            }
        }
    }

    /// Does all work that needs no waiting, for at most one time slice.
    fn make_progress(&mut self) -> Result<Progress, Ended> {
        // Start of the time slice: when the first message was handled, since most polls have none.
        let mut began = None;
        let mut progress = Progress::default();
        let mut full;
        loop {
            while let Ok(deferred) = self.deferred.try_recv() {
                self.in_flight -= 1;
                self.answer(&deferred.uid, &deferred.operation, &deferred.reply);
            }
            full = !self.may_read();
            if full {
                break;
            }
            if began.is_some_and(|began: Instant| began.elapsed() >= TIME_SLICE) {
                progress.has_more = true;
                break;
            }
            match self.next_event()? {
                None => break,
                Some(Handled::Ping) => {}
                Some(Handled::Message) => progress.handled_message = true,
            }
            began.get_or_insert_with(Instant::now);
        }
        let waits = self.pump_streams();
        self.permit.set_streaming(!self.streams.is_empty());
        progress.wrote = self.write()?;
        progress.has_more |= waits && self.output.len() < MAX_UNREAD_EVENTS;
        // Requests that have arrived behind a full output follow once it is sent.
        progress.has_more |= full && self.may_read();
        Ok(progress)
    }

    fn may_read(&self) -> bool {
        self.in_flight < self.serving.config.hard_in_flight_limit()
            && self.output.len() < self.serving.config.max_unread
    }

    /// Handles one event. Returns `None` if the input has no complete event.
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
                debug!(client = %self.client, %error, "connection closed: protocol error");
                self.service
                    .warn_throttled(&format!("connection closed: {error}"));
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
                    .warn_throttled(&format!("message dropped: {error}"));
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
            Some(reply) => RequestOutcome::Reply(reply),
            None => {
                // A panic in a handler must neither leave the client without a reply nor end the
                // connection's other requests.
                let handle = || self.service.handle(self.client, request, started);
                let failed = || {
                    Reply::Error(
                        "lmc: internal error in the request handler; see the server's log"
                            .to_owned(),
                    )
                };
                catch_unwind(AssertUnwindSafe(handle))
                    .unwrap_or_else(|_| RequestOutcome::Reply(failed()))
            }
        };
        match outcome {
            RequestOutcome::Reply(reply) => {
                if asked == Operation::PoolDescriptor && matches!(reply, Reply::Int(_)) {
                    self.pass_pool();
                }
                self.answer(uid, operation, &reply);
                self.service.record(asked, &reply, started.elapsed());
                if let Operation::PrepareStore | Operation::PrepareRetrieve = asked {
                    self.search
                        .begin_if_due(&self.service, self.client, started);
                }
            }
            RequestOutcome::Job(job) => {
                let answer = self.defer(uid, operation, asked, started);
                let lane = job.lane;
                let work = move || {
                    // A panic in a copy must neither leave the client without a reply nor end the
                    // thread.
                    let reply = catch_unwind(AssertUnwindSafe(|| job.run()));
                    let failed = "lmc: internal error in the copy; see the server's log";
                    answer(reply.unwrap_or_else(|_| Reply::Error(failed.to_owned())));
                };
                self.service.run_job(self.client, lane, Box::new(work));
            }
            RequestOutcome::Wait(wait) => {
                let answer = self.defer(uid, operation, asked, started);
                self.service.wait(&wait, Box::new(answer));
            }
            RequestOutcome::WhenIdle(entrance) => {
                let answer = self.defer(uid, operation, asked, started);
                entrance.when_idle(Box::new(move || answer(Reply::None)));
            }
            RequestOutcome::Stream(subscription) => {
                self.subscribe(uid, operation, subscription);
                self.service.record(asked, &Reply::None, started.elapsed());
            }
        }
    }

    /// Sends the pool's descriptor with the next reply, and watches the process that gets it from
    /// now on, before the process has any slot.
    fn pass_pool(&mut self) {
        self.pool_at = Some(self.output.len());
        if let Some(process) = self.stream.pool_taker() {
            self.service.set_witness(self.client, Arc::new(process));
            self.search.end();
        }
    }

    /// Returns the reply to a request that exceeds a limit of this connection, or `None`.
    fn refusal_at_limit(&self, uid: &Bytes, asked: Operation) -> Option<Reply> {
        match asked {
            // A stream whose request number is in use replaces the earlier stream.
            Operation::SubscribeKvEvents
                if self.streams.len() >= MAX_STREAMS && !self.streams.contains_key(uid) =>
            {
                let text =
                    format!("lmc: one connection may have at most {MAX_STREAMS} event streams");
                Some(Reply::Error(text))
            }
            // Declined at once, so that a ping after it does not wait for the copies before it.
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
            .warn_throttled(&format!("request refused: {error}"));
        self.answer(uid, operation, &Reply::Error(format!("lmc: {error}")));
    }

    /// Returns a function that sends the reply to a request later, from any thread.
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
            // Sending fails if the connection has ended; the reply is then dropped.
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

    /// Sends a batch on each stream that has one and whose reader is ready, and the end on each
    /// stream that has ended. Returns true if streams wait until the reader takes unread replies.
    fn pump_streams(&mut self) -> bool {
        if self.streams.is_empty() {
            return false;
        }
        // Marked as seen before the log is read, so that an event in between wakes the task again.
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

    /// Reads the bytes that have arrived. Returns false if there were none.
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

    /// Writes what the socket accepts. Returns true if it accepted any byte.
    fn write(&mut self) -> Result<bool, Ended> {
        let mut moved = false;
        while !self.output.is_empty() {
            let sent = match self.pool_at {
                Some(0) => match self.service.engine().arena().shared_file() {
                    Some(pool) => self.stream.try_write_with(&self.output, pool),
                    None => return Err(Ended),
                },
                Some(at) => self.stream.try_write(&self.output[..at]),
                None => self.stream.try_write(&self.output),
            };
            match sent {
                Ok(written) => {
                    self.pool_at = match self.pool_at {
                        Some(at) if at > 0 => Some(at - written),
                        _ => None,
                    };
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
