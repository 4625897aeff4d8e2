//! One connection to a server, on a thread of its own.
//!
//! Any thread may send requests; answers are passed to callbacks on the link's thread. While no
//! server is connected, requests fail at once. A connection whose server answers no ping in time is
//! closed. The link then connects again, and repeats the requests of its [`Setup`] before other
//! requests may pass.

use std::collections::HashMap;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use parking_lot::{Condvar, Mutex};
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::adapters::endpoint::Endpoint;
use crate::adapters::log::{Level, Log, shown};
use crate::protocol::msgpack::Reader;
use crate::protocol::{ENGINE_KEYS, Operation, Reply, Request, decode_reply, encode_request};
use crate::transport::{
    Decoder, Event, Limits, Stream, TrustedUsers, encode_message, encode_pong, encode_ready,
    greeting,
};

/// Timeout of connecting, the ZMTP handshake and the setup together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time after the start in which a server of this host may still be started, by a scheduler that
/// begins when all workers are ready. A missing server is not a warning before that.
const NO_SERVER_YET: Duration = Duration::from_secs(600);
/// Shortest and longest pause between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Time between two checks of deadlines.
const TICK: Duration = Duration::from_millis(100);
/// Time between two pings.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// Requests that may wait for an answer; more fail at once.
const MAX_PENDING: usize = 16_384;
/// Limits of a reply.
const LIMITS: Limits = Limits {
    message_bytes: 64 << 20,
    frames: 16,
};

/// Why a request has no reply.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum LinkError {
    #[error("no server is connected")]
    Down,
    #[error("the server did not answer in time")]
    Timeout,
    #[error("the server refused: {0}")]
    Refused(String),
    #[error("the server's answer is malformed: {0}")]
    Malformed(String),
    #[error("too many requests wait for an answer")]
    Full,
}

pub(crate) type Answer = Result<Reply, LinkError>;
type OnAnswer = Box<dyn FnOnce(Answer) + Send>;

/// The pending answer to a request.
pub(crate) struct Awaited {
    answered: std::sync::mpsc::Receiver<Answer>,
    deadline: Instant,
}

impl Awaited {
    /// Waits for the answer, until the request's deadline.
    pub(crate) fn wait(&self) -> Answer {
        // The link itself answers by the deadline; the extra time is for a starved thread of the
        // link.
        let time = self.deadline.saturating_duration_since(Instant::now());
        let answer = self.answered.recv_timeout(time + Duration::from_secs(2));
        answer.unwrap_or(Err(LinkError::Timeout))
    }
}

/// Number of a connection; 0 is none.
pub(crate) type SessionId = u64;

/// The requests that begin each connection, before other requests may pass.
pub(crate) trait Setup: Send + Sync {
    /// Returns the next request, given the earlier replies and the descriptor that came with the
    /// last of them; `None` when the setup is over.
    ///
    /// # Errors
    /// The reason why this server cannot be used.
    fn next(
        &self,
        session: SessionId,
        replies: &[Reply],
        descriptor: &mut Option<OwnedFd>,
    ) -> Result<Option<Request>, String>;

    /// Called when the setup is over, and requests may pass. Default: does nothing.
    fn up(&self) {}

    /// Returns the request that asks whether the server is alive.
    fn ping(&self) -> Request {
        Request::Ping { instance_id: None }
    }
}

struct Asked {
    request: Request,
    deadline: Instant,
    /// The only connection that may carry the request; 0 stands for any.
    session: SessionId,
    on_answer: OnAnswer,
}

enum Command {
    Ask(Box<Asked>),
    Reconnect,
    Stop,
}

/// State of the link that other threads read.
#[derive(Debug, Default)]
struct LinkState {
    /// The connection that requests may use.
    session: Mutex<SessionId>,
    changed: Condvar,
    /// Connections that were lost since the start.
    lost: AtomicU64,
}

impl LinkState {
    fn set(&self, session: SessionId) {
        *self.session.lock() = session;
        self.changed.notify_all();
    }
}

/// A connection to a server.
#[derive(Debug)]
pub(crate) struct Link {
    commands: mpsc::UnboundedSender<Command>,
    state: Arc<LinkState>,
    thread: OwnThread,
}

/// A thread of this process; a forked process does not have it.
#[derive(Debug)]
pub(crate) struct OwnThread {
    process: u32,
    handle: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl OwnThread {
    pub(crate) fn new(handle: std::thread::JoinHandle<()>) -> Self {
        Self {
            process: std::process::id(),
            handle: Mutex::new(Some(handle)),
        }
    }

    /// Returns true in a process that was forked from this one. A lock that another thread held at
    /// that time stays locked there forever.
    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Waits for the end of the thread, unless called on that thread.
    pub(crate) fn join(&self) {
        let handle = self.handle.lock().take();
        if let Some(handle) = handle
            && handle.thread().id() != std::thread::current().id()
        {
            let _ = handle.join();
        }
    }
}

impl Drop for OwnThread {
    fn drop(&mut self) {
        if self.is_forked() {
            // Neither joined nor detached: the system does not know the thread in this process.
            let _ = ManuallyDrop::new(self.handle.get_mut().take());
        }
    }
}

impl Link {
    /// Starts the thread, which connects at once.
    pub(crate) fn start(
        endpoint: Endpoint,
        setup: Arc<dyn Setup>,
        log: Arc<Log>,
        ping_timeout: Duration,
    ) -> io::Result<Self> {
        let (commands, received) = mpsc::unbounded_channel();
        let state = Arc::new(LinkState::default());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let driver = Driver {
            is_looked_for: endpoint == Endpoint::Local,
            endpoint,
            setup,
            log,
            ping_looks: u32::try_from(ping_timeout.as_millis() / TICK.as_millis())
                .unwrap_or(u32::MAX),
            state: Arc::clone(&state),
            commands: received,
            last_session: 0,
            // Smaller numbers are used by setups.
            next_uid: 1 << 10,
        };
        let thread = std::thread::Builder::new()
            .name("lmc-link".to_owned())
            .spawn(move || runtime.block_on(driver.run()))?;
        Ok(Self {
            commands,
            state,
            thread: OwnThread::new(thread),
        })
    }

    /// Returns the connection that requests may use; 0 where there is none, and in a forked process.
    pub(crate) fn session(&self) -> SessionId {
        match self.thread.is_forked() {
            true => 0,
            false => *self.state.session.lock(),
        }
    }

    /// Returns the number of connections that were lost since the start.
    pub(crate) fn lost(&self) -> u64 {
        self.state.lost.load(Ordering::Relaxed)
    }

    /// Waits until requests may pass, and returns true if they may. Stops waiting when `is_in_vain`
    /// returns true after an attempt to connect.
    pub(crate) fn wait_until_up(&self, time: Duration, is_in_vain: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + time;
        let mut session = self.state.session.lock();
        while *session == 0 && !is_in_vain() {
            if self
                .state
                .changed
                .wait_until(&mut session, deadline)
                .timed_out()
            {
                break;
            }
        }
        *session != 0
    }

    /// Sends a request and passes the answer to `on_answer`: on this thread if no server is
    /// connected, otherwise on the link's thread.
    pub(crate) fn ask(
        &self,
        request: Request,
        time: Duration,
        on_answer: impl FnOnce(Answer) + Send + 'static,
    ) {
        self.ask_in(0, request, time, on_answer);
    }

    /// Sends a request over one connection only: it fails if that connection was lost. 0 stands for
    /// any connection.
    pub(crate) fn ask_in(
        &self,
        session: SessionId,
        request: Request,
        time: Duration,
        on_answer: impl FnOnce(Answer) + Send + 'static,
    ) {
        if self.session() == 0 {
            return on_answer(Err(LinkError::Down));
        }
        let asked = Box::new(Asked {
            request,
            deadline: Instant::now() + time,
            session,
            on_answer: Box::new(on_answer),
        });
        if let Err(mpsc::error::SendError(Command::Ask(asked))) =
            self.commands.send(Command::Ask(asked))
        {
            (asked.on_answer)(Err(LinkError::Down));
        }
    }

    /// Sends a request over one connection only, as [`Self::ask_in`], for a thread that waits for
    /// the answer. `note` is called once the answer has arrived, before that thread continues.
    pub(crate) fn begin_in(
        &self,
        session: SessionId,
        request: Request,
        time: Duration,
        note: impl FnOnce() + Send + 'static,
    ) -> Awaited {
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        let deadline = Instant::now() + time;
        self.ask_in(session, request, time, move |reply| {
            note();
            let _ = answer.send(reply);
        });
        Awaited { answered, deadline }
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call(&self, request: Request, time: Duration) -> Answer {
        self.begin_in(0, request, time, || ()).wait()
    }

    /// Ends the connection and makes a new one, with a new setup.
    pub(crate) fn reconnect(&self) {
        self.state.set(0);
        let _ = self.commands.send(Command::Reconnect);
    }

    /// Ends the thread and waits for it. Requests without an answer fail.
    pub(crate) fn stop(&self) {
        if self.thread.is_forked() {
            return;
        }
        let _ = self.commands.send(Command::Stop);
        // A callback may drop the last owner on the link's own thread.
        self.thread.join();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why a connection ended.
enum End {
    Stopped,
    Reconnect,
    Lost(String),
}

/// A request that was sent.
struct Pending {
    operation: Operation,
    deadline: Instant,
    on_answer: OnAnswer,
}

/// An open connection.
struct Connection {
    stream: Stream,
    decoder: Decoder,
    input: BytesMut,
    output: BytesMut,
    /// True while a descriptor may arrive; at other times the kernel closes descriptors.
    takes_descriptor: bool,
    descriptor: Option<OwnedFd>,
}

impl Connection {
    /// Connects. With `is_looked_for`, a server on TCP must belong to this user or root: any user
    /// of the host may have been the first to listen there.
    async fn open(endpoint: &Endpoint, is_looked_for: bool) -> io::Result<Self> {
        let stream = match endpoint {
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Stream::Tcp(stream)
            }
            Endpoint::Ipc(path) => Stream::Unix(UnixStream::connect(path).await?),
            // The caller passes the candidates instead.
            Endpoint::Local => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let mut output = BytesMut::new();
        output.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut output);
        let mut connection = Self {
            stream,
            decoder: Decoder::new(LIMITS),
            input: BytesMut::new(),
            output,
            takes_descriptor: false,
            descriptor: None,
        };
        while !connection.decoder.is_ready() {
            connection.event().await?;
            yield_now().await;
        }
        // Before the server has accepted, the other end has no user.
        if let (true, Stream::Tcp(stream)) = (is_looked_for, &connection.stream) {
            TrustedUsers::default().check(stream).map_err(|_| {
                io::Error::other("another user of this host listens there: set its address if you mean this server")
            })?;
        }
        Ok(connection)
    }

    /// Writes the buffered bytes and reads until the next event; returns a message. Cancel safe: no
    /// byte is lost.
    async fn event(&mut self) -> io::Result<Option<Vec<Bytes>>> {
        loop {
            let event = self.decoder.next(&mut self.input);
            match event.map_err(io::Error::other)? {
                Some(Event::Message(frames)) => return Ok(Some(frames)),
                Some(Event::Ping(context)) => {
                    if self.output.len() > LIMITS.message_bytes {
                        return Err(io::Error::other("it sends pings and reads no answers"));
                    }
                    encode_pong(&context, &mut self.output);
                    return Ok(None);
                }
                Some(Event::Ready(_)) => return Ok(None),
                None => {}
            }
            let interest = match self.output.is_empty() {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            let ready = self.stream.ready(interest).await?;
            if ready.is_writable()
                && let Some(count) = unless_blocked(self.stream.try_write(&self.output))?
            {
                self.output.advance(count);
            }
            if ready.is_readable() && unless_blocked(self.read())? == Some(0) {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the server closed the connection",
                ));
            }
        }
    }

    fn read(&mut self) -> io::Result<usize> {
        if self.takes_descriptor {
            return (self.stream).try_read_with(&mut self.input, &mut self.descriptor);
        }
        self.input.reserve(16 << 10);
        self.stream.try_read_buf(&mut self.input)
    }

    /// Waits for the next message. Yields first: a server that floods must not keep the caller from
    /// its timeout or from a stop.
    async fn message(&mut self) -> io::Result<Vec<Bytes>> {
        loop {
            yield_now().await;
            if let Some(frames) = self.event().await? {
                return Ok(frames);
            }
        }
    }
}

fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        result => result.map(Some),
    }
}

/// Requests and pings of one connection that have no answer yet.
struct Traffic {
    pending: HashMap<u64, Pending>,
    /// The ping under way.
    ping: Option<Ping>,
    next_ping: Instant,
}

/// A ping without an answer. Its time is counted in checks of the deadlines, not by the clock: on a
/// starved machine, this thread and the server are both late.
struct Ping {
    uid: u64,
    /// Checks since the last sign of life of the server.
    silent_looks: u32,
}

impl Traffic {
    fn new() -> Self {
        Self {
            pending: HashMap::new(),
            ping: None,
            next_ping: Instant::now() + PING_INTERVAL,
        }
    }

    /// Handles a message of the server.
    fn answered(&mut self, frames: &[Bytes]) -> Option<End> {
        let Some(uid) = frames.first().and_then(number) else {
            return Some(End::Lost("its answer has no number".to_owned()));
        };
        if self.ping.as_ref().is_some_and(|ping| ping.uid == uid) {
            self.ping = None;
            // The server does not know this worker: the setup registers it again.
            let is_unknown = decode_reply(Operation::Ping, &frames[1..]) == Ok(Reply::Bool(false));
            return is_unknown.then_some(End::Reconnect);
        }
        if let Some(asked) = self.pending.remove(&uid) {
            if let Some(ping) = &mut self.ping {
                ping.silent_looks = 0;
            }
            (asked.on_answer)(answer(asked.operation, &frames[1..]));
        }
        None
    }

    /// Fails the requests whose deadline has passed. Ends the connection if a ping has been without
    /// an answer for `ping_looks` checks.
    fn expire(&mut self, now: Instant, ping_looks: u32) -> Option<End> {
        let late = (self.pending).extract_if(|_, pending| pending.deadline <= now);
        for (_, late) in late {
            (late.on_answer)(Err(LinkError::Timeout));
        }
        let ping = self.ping.as_mut()?;
        ping.silent_looks += 1;
        let is_silent = ping.silent_looks > ping_looks;
        is_silent.then(|| End::Lost("it does not answer pings".to_owned()))
    }
}

/// The thread's side of a [`Link`].
struct Driver {
    /// The server that was connected, once there was one: scheduler and workers of an engine must
    /// not use different servers.
    endpoint: Endpoint,
    is_looked_for: bool,
    setup: Arc<dyn Setup>,
    log: Arc<Log>,
    /// Checks of the deadlines within which a ping must be answered; then the server is considered
    /// dead.
    ping_looks: u32,
    state: Arc<LinkState>,
    commands: mpsc::UnboundedReceiver<Command>,
    last_session: SessionId,
    next_uid: u64,
}

impl Driver {
    async fn run(mut self) {
        let mut pause = PAUSES.0;
        let began = Instant::now();
        loop {
            let session = self.last_session + 1;
            let connecting =
                connect_first(&self.endpoint, self.is_looked_for, &*self.setup, session);
            let connected = tokio::select! {
                connected = connecting => connected,
                stopped = refuse(&mut self.commands) => {
                    if stopped { return }
                    continue
                }
            };
            let (endpoint, why) = match connected {
                Ok((endpoint, connection)) => {
                    pause = PAUSES.0;
                    self.last_session = session;
                    self.endpoint = endpoint.clone();
                    self.log
                        .push(Level::Info, format!("connected to {endpoint}"));
                    self.state.set(session);
                    self.setup.up();
                    let (end, pending) = self.serve(connection, session).await;
                    self.state.set(0);
                    for (_, pending) in pending {
                        (pending.on_answer)(Err(LinkError::Down));
                    }
                    match end {
                        End::Stopped => return,
                        End::Reconnect => continue,
                        End::Lost(why) => {
                            self.state.lost.fetch_add(1, Ordering::Relaxed);
                            (endpoint, why)
                        }
                    }
                }
                Err(failed) => {
                    // Other threads wait for the outcome of the setup.
                    self.state.set(0);
                    failed
                }
            };
            let may_be_started =
                self.endpoint == Endpoint::Local && began.elapsed() < NO_SERVER_YET;
            let level = match may_be_started {
                true => Level::Info,
                false => Level::Warning,
            };
            let text = format!(
                "no KV cache: server {endpoint}: {}; requests go on without it until it answers",
                shown(&why)
            );
            self.log.push(level, text);
            tokio::select! {
                () = sleep(pause) => {}
                stopped = refuse(&mut self.commands) => {
                    if stopped { return }
                }
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Carries requests and replies until the connection ends. Returns the unanswered requests.
    async fn serve(
        &mut self,
        mut connection: Connection,
        session: SessionId,
    ) -> (End, HashMap<u64, Pending>) {
        let mut traffic = Traffic::new();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Messages since the last check of commands and deadlines.
        let mut unlooked = 0;
        let end = loop {
            // More messages than there are pending requests: the server floods.
            if unlooked > MAX_PENDING {
                unlooked = 0;
                let mut ended = None;
                while let (None, Ok(command)) = (&ended, self.commands.try_recv()) {
                    ended = self.command(command, &mut connection, session, &mut traffic);
                }
                if let Some(end) = ended.or_else(|| self.look(&mut connection, &mut traffic)) {
                    break end;
                }
            }
            let ended = tokio::select! {
                // Arrived messages are read before deadlines are checked.
                biased;
                event = connection.event() => {
                    unlooked += 1;
                    match event {
                        Err(error) => Some(End::Lost(error.to_string())),
                        Ok(None) => None,
                        Ok(Some(frames)) => traffic.answered(&frames),
                    }
                }
                command = self.commands.recv() => match command {
                    None => Some(End::Stopped),
                    Some(command) => self.command(command, &mut connection, session, &mut traffic),
                },
                _ = ticks.tick() => {
                    unlooked = 0;
                    self.look(&mut connection, &mut traffic)
                }
            };
            if let Some(end) = ended {
                break end;
            }
        };
        (end, traffic.pending)
    }

    fn command(
        &mut self,
        command: Command,
        connection: &mut Connection,
        session: SessionId,
        traffic: &mut Traffic,
    ) -> Option<End> {
        match command {
            Command::Stop => Some(End::Stopped),
            Command::Reconnect => Some(End::Reconnect),
            Command::Ask(asked) => {
                self.send(*asked, connection, session, &mut traffic.pending);
                None
            }
        }
    }

    /// Checks the deadlines, and sends a ping when it is due.
    fn look(&mut self, connection: &mut Connection, traffic: &mut Traffic) -> Option<End> {
        let now = Instant::now();
        if let Some(end) = traffic.expire(now, self.ping_looks) {
            return Some(end);
        }
        if traffic.ping.is_none() && traffic.next_ping <= now {
            traffic.next_ping = now + PING_INTERVAL;
            let uid = self.uid();
            traffic.ping = Some(Ping {
                uid,
                silent_looks: 0,
            });
            let request = encode_request(uid, &self.setup.ping());
            encode_message(&request, &mut connection.output);
        }
        None
    }

    fn uid(&mut self) -> u64 {
        self.next_uid += 1;
        self.next_uid
    }

    fn send(
        &mut self,
        asked: Asked,
        connection: &mut Connection,
        session: SessionId,
        pending: &mut HashMap<u64, Pending>,
    ) {
        if asked.session != 0 && asked.session != session {
            return (asked.on_answer)(Err(LinkError::Down));
        }
        if pending.len() >= MAX_PENDING {
            return (asked.on_answer)(Err(LinkError::Full));
        }
        let uid = self.uid();
        let frames = encode_request(uid, &asked.request);
        encode_message(&frames, &mut connection.output);
        let sent = Pending {
            operation: asked.request.operation(),
            deadline: asked.deadline,
            on_answer: asked.on_answer,
        };
        pending.insert(uid, sent);
    }
}

/// Reads the number of a reply.
fn number(frame: &Bytes) -> Option<u64> {
    let number = Reader::new(frame).int().ok()?;
    u64::try_from(number).ok()
}

fn answer(operation: Operation, frames: &[Bytes]) -> Answer {
    match decode_reply(operation, frames) {
        Ok(Reply::Error(text)) => Err(LinkError::Refused(shown(&text))),
        Ok(reply) => Ok(reply),
        Err(error) => Err(LinkError::Malformed(shown(&error.to_string()))),
    }
}

/// Refuses requests until the link is stopped or asked to reconnect; returns true if stopped.
async fn refuse(commands: &mut mpsc::UnboundedReceiver<Command>) -> bool {
    loop {
        match commands.recv().await {
            None | Some(Command::Stop) => return true,
            Some(Command::Reconnect) => return false,
            Some(Command::Ask(asked)) => (asked.on_answer)(Err(LinkError::Down)),
        }
    }
}

/// The setup of a search for servers: a server that knows lmc's own requests is usable.
struct Probe;

impl Setup for Probe {
    fn next(
        &self,
        _session: SessionId,
        replies: &[Reply],
        _descriptor: &mut Option<OwnedFd>,
    ) -> Result<Option<Request>, String> {
        match replies {
            [] => Ok(Some(Request::GetExperimental)),
            [Reply::Strings(known)] if known.iter().any(|name| name == ENGINE_KEYS) => Ok(None),
            _ => Err("it is not an lmc server".to_owned()),
        }
    }
}

/// Returns the server of this host that an adapter with [`Endpoint::Local`] would connect to now,
/// if there is one. Each candidate has `time` to answer.
///
/// # Errors
/// The system cannot provide a runtime to wait with.
pub fn local_server(time: Duration) -> io::Result<Option<Endpoint>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        for candidate in Endpoint::Local.candidates() {
            if let Ok(Ok(_)) = timeout(time, connect(&candidate, true, &Probe, 1)).await {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    })
}

/// Connects to the first usable server, and carries out the setup. If there is none, returns the
/// first candidate and the reason. A slow server is waited for.
async fn connect_first(
    endpoint: &Endpoint,
    is_looked_for: bool,
    setup: &dyn Setup,
    session: SessionId,
) -> Result<(Endpoint, Connection), (Endpoint, String)> {
    let mut failed = None;
    for candidate in endpoint.candidates() {
        let connecting = connect(&candidate, is_looked_for, setup, session);
        match timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(connection)) => return Ok((candidate, connection)),
            Ok(Err(why)) => failed = failed.or(Some((candidate, why))),
            Err(_) => return Err((candidate, "it does not answer".to_owned())),
        }
    }
    Err(failed.unwrap_or_else(|| (endpoint.clone(), "it has no address".to_owned())))
}

/// Connects and carries out the setup.
async fn connect(
    endpoint: &Endpoint,
    is_looked_for: bool,
    setup: &dyn Setup,
    session: SessionId,
) -> Result<Connection, String> {
    let text = |error: io::Error| error.to_string();
    let mut connection = Connection::open(endpoint, is_looked_for)
        .await
        .map_err(text)?;
    let mut replies = Vec::new();
    while let Some(request) = setup.next(session, &replies, &mut connection.descriptor)? {
        let uid = replies.len() as u64;
        connection.takes_descriptor = request == Request::PoolDescriptor;
        encode_message(&encode_request(uid, &request), &mut connection.output);
        let frames = loop {
            let frames = connection.message().await.map_err(text)?;
            if frames.first().and_then(number) == Some(uid) {
                break frames;
            }
        };
        match answer(request.operation(), &frames[1..]) {
            Ok(reply) => replies.push(reply),
            Err(error) => return Err(error.to_string()),
        }
    }
    connection.takes_descriptor = false;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use lmc_memory::own_uid;
    use rustix::process::Uid;
    use rustix::thread::set_thread_uid;

    use super::*;

    /// Listens as a user, and takes `connections`.
    fn server_of(user: u32, connections: usize) -> Endpoint {
        let (bound, address) = std::sync::mpsc::sync_channel(1);
        std::thread::spawn(move || {
            // The user of this thread alone.
            set_thread_uid(Uid::from_raw(user)).expect("root may, and all may stay");
            let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
            let port = listener.local_addr().expect("bound");
            bound.send(port).expect("the test waits");
            for _ in 0..connections {
                let (mut stream, _) = listener.accept().expect("a connection");
                let mut output = BytesMut::from(&greeting()[..]);
                encode_ready("ROUTER", &mut output);
                stream.write_all(&output).expect("open");
                let _ = stream.read_to_end(&mut Vec::new());
            }
        });
        let address = address.recv().expect("it listens");
        Endpoint::Tcp(address.to_string())
    }

    /// A machine that stood still for an hour is one with a dead server, by the clock.
    #[test]
    fn a_late_look_does_not_make_the_server_dead() {
        let mut traffic = Traffic::new();
        let ping = |uid| {
            let silent_looks = 0;
            Some(Ping { uid, silent_looks })
        };
        traffic.ping = ping(1);
        let mut now = Instant::now();
        for _ in 0..3 {
            now += Duration::from_secs(3600);
            assert!(traffic.expire(now, 3).is_none());
        }
        assert!(matches!(traffic.expire(now, 3), Some(End::Lost(_))));
        // The answer to another request shows that it lives.
        traffic.ping = ping(2);
        let sent = Pending {
            operation: Operation::Ping,
            deadline: now + Duration::from_secs(3600),
            on_answer: Box::new(|_| ()),
        };
        traffic.pending.insert(3, sent);
        for _ in 0..3 {
            assert!(traffic.expire(now, 3).is_none());
        }
        let number = encode_request(3, &Request::GetExperimental).swap_remove(0);
        assert!(traffic.answered(&[number]).is_none());
        assert!(traffic.expire(now, 3).is_none(), "it was heard");
    }

    #[tokio::test]
    async fn a_server_that_is_looked_for_is_of_this_user_or_root() {
        let own = server_of(own_uid(), 1);
        assert!(Connection::open(&own, true).await.is_ok());
        if own_uid() != 0 {
            println!("SKIPPED: only root can listen as another user");
            return;
        }
        // Also a user namespace has it, as a rule.
        let other = server_of(65_534, 2);
        let Err(refused) = Connection::open(&other, true).await else {
            panic!("any user may listen there");
        };
        assert!(refused.to_string().contains("another user"), "{refused}");
        assert!(Connection::open(&other, false).await.is_ok(), "it is named");
    }
}
