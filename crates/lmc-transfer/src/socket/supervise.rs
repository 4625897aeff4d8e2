//! The life of a connection: its tasks, signs of life, and its end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::channel_core::ChannelCore;
use super::connection::{Connection, End, Gone};
use super::frame::Frame;
use super::outgoing::Outgoing;
use super::reader::StreamReader;
use super::stream_writer::StreamWriter;
use crate::net::{Socket, Sockets};
use crate::session::Opener;

/// Keepalive intervals without progress on a stream after which the connection ends.
pub(super) const SILENT_INTERVALS: u32 = 3;
/// Time, after an error of a stream, to find that the peer has closed this stream or another.
const CLOSED_TOO: Duration = Duration::from_millis(100);

/// The parts from which a stream's tasks are made.
pub(super) struct Begin {
    pub(super) thread: Handle,
    pub(super) opener: Opener,
    pub(super) queue: mpsc::UnboundedReceiver<Outgoing>,
}

/// Runs the streams of a connection, each on its thread, until the connection ends, and cleans up.
/// `remove` takes the connection out of the table of peers.
pub(super) async fn supervise(
    core: Arc<ChannelCore>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    streams: Vec<Begin>,
    remove: impl FnOnce(&Arc<Connection>, &End),
) {
    // All tasks own all sockets: none is closed before all tasks have ended (see `End`).
    let unix = sockets.0.iter().all(Socket::is_unix);
    let mut tasks = JoinSet::new();
    for (stream, begin) in streams.into_iter().enumerate() {
        let Begin {
            thread,
            opener,
            queue,
        } = begin;
        let reader = StreamReader::new(&core, &connection, &sockets, stream, opener);
        tasks.spawn_on(reader.run(), &thread);
        let writer = StreamWriter::new(&core, &connection, &sockets, stream, queue);
        tasks.spawn_on(writer.run(), &thread);
    }
    #[cfg(feature = "nixl")]
    tasks.spawn(announce(Arc::clone(&connection)));
    let end = match watch(&connection, &mut tasks).await {
        Err(end) => end,
        Ok(Gone::Io(error)) => {
            let closed = timeout(CLOSED_TOO, closed_too(&mut tasks)).await;
            end_of(closed.unwrap_or(Gone::Io(error)), unix, &core)
        }
        Ok(gone) => end_of(gone, unix, &core),
    };
    tasks.shutdown().await;
    #[cfg(feature = "nixl")]
    if let Some(link) = &connection.plane {
        link.end();
    }
    drop(sockets);
    tracing::debug!(peer = %connection.remote.id, reason = end.reason, "connection ended");
    remove(&connection, &end);
    // A receive that begins after the end finds none of its offers.
    connection.incoming.forget(&connection);
    connection.end.send_replace(Some(end));
    connection.offer_capacity.close();
    let offered = std::mem::take(&mut *connection.offered.lock());
    drop(offered);
    for stream in &connection.streams {
        stream.close();
    }
}

/// Announces the memory that the peer of a connection may write to, once the arena is registered as
/// well. Never returns.
#[cfg(feature = "nixl")]
async fn announce<T>(connection: Arc<Connection>) -> T {
    if let Some(link) = &connection.plane {
        let registration = link.plane.registered().await;
        connection.send(0, &Frame::Plane(registration.into()));
        link.has_announced();
    }
    std::future::pending().await
}

fn by_us(reason: String) -> End {
    End {
        reason,
        by_peer: false,
    }
}

/// Waits for the end of a task, or finds that the peer is dead.
async fn watch(connection: &Connection, tasks: &mut JoinSet<Gone>) -> Result<Gone, End> {
    let mut stop = connection.stop.subscribe();
    let keepalive = connection.remote.keepalive;
    let mut ticks = interval(keepalive);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut signs = vec![Signs::default(); connection.streams.len()];
    loop {
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => {
                return Err(by_us("this side ended the connection".into()));
            }
            Some(ended) = tasks.join_next() => {
                return ended.map_err(|error| by_us(format!("a task failed: {error}")));
            }
            _ = ticks.tick() => {
                let all = connection.streams.iter().zip(&mut signs).enumerate();
                for (number, (stream, signs)) in all {
                    let behind = stream.queue.behind();
                    let received = stream.received.load(Ordering::Relaxed);
                    // A request that its call has abandoned keeps its capacity until it is
                    // answered.
                    let answered = stream.answered.load(Ordering::Relaxed);
                    let answered = answered.wrapping_add(behind.unwrap_or(0));
                    let given_up = stream.has_given_up().then_some(answered);
                    let fault = if signs.received.lasts(Some(received)) {
                        "the peer sent nothing"
                    } else if signs.sent.lasts(behind) {
                        "the peer read nothing"
                    } else if signs.answered.lasts(given_up) {
                        "the peer answered no request"
                    } else {
                        // Queued bytes are a sign of life, too.
                        if behind.is_none() {
                            connection.send_now(number, &Frame::Ping(0));
                        }
                        continue;
                    };
                    let silence = keepalive * SILENT_INTERVALS;
                    let reason = format!("{fault} on stream {number} in {silence:?}");
                    return Err(by_us(reason));
                }
            }
        }
    }
}

/// Signs of life on one stream.
#[derive(Debug, Clone, Default)]
struct Signs {
    received: Standstill,
    sent: Standstill,
    answered: Standstill,
}

/// Time for which a counter has not changed.
#[derive(Debug, Clone, Default)]
struct Standstill {
    last: Option<u64>,
    intervals: u32,
}

impl Standstill {
    /// Returns whether a counter has stood still for too long; called once in each interval.
    /// `None`: nothing is expected to move.
    fn lasts(&mut self, now: Option<u64>) -> bool {
        let still = now.is_some() && now == self.last;
        self.intervals = if still { self.intervals + 1 } else { 0 };
        self.last = now;
        self.intervals > SILENT_INTERVALS
    }
}

/// Waits for a stream that the peer has closed.
async fn closed_too(tasks: &mut JoinSet<Gone>) -> Gone {
    loop {
        match tasks.join_next().await {
            Some(Ok(Gone::Closed)) => return Gone::Closed,
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn end_of(gone: Gone, unix: bool, core: &ChannelCore) -> End {
    let closed = || End {
        reason: "it closed the connection".into(),
        by_peer: true,
    };
    match gone {
        Gone::Closed => closed(),
        // On a Unix socket only the peer's end resets; on TCP anything on the path can.
        Gone::Io(error) if unix && is_reset(&error) => closed(),
        Gone::Io(error) => by_us(error.to_string()),
        Gone::Broken(what) => {
            core.counters.broken.add(1);
            by_us(format!("it broke the protocol: {what}"))
        }
    }
}

fn is_reset(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), ConnectionReset | BrokenPipe)
}
