//! [`DirectoryHost`]: the side of a directory that answers its members, without a channel.
//! [`DirectoryServer`] adds the channel.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use lmc_backend::{Clears, now};
use lmc_key::ClearsId;
use lmc_transfer::{Address, PeerEvent, SocketChannel, SocketConfig, SocketError, TransferChannel};
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

#[cfg(test)]
use super::buckets::Fingerprint;
use super::message::{Announce, Announced, Find, Found};
use super::table::{Table, TableLimits};
use crate::daemon_link::{answer_on, random};
use crate::link::Session;
use crate::message::{
    ClearsPage, FEATURE_DIRECTORY, Hello, MessageError, OLDEST_VERSION, Refusal, Reply, Request,
    Stamped, VERSION,
};

/// Time between two rounds of housekeeping.
const HOUSEKEEPING: Duration = Duration::from_millis(100);
/// Buckets that are swept under one lock.
const SWEEP_AT_ONCE: usize = 1024;
/// Least part of the table that one round sweeps: one in 64.
const SWEEP_PART: usize = 64;
/// Time after the start during which a chunk that is not found may not have been announced yet.
const SETTLING: Duration = Duration::from_secs(10);
/// Requests that one member may send per second, and at once.
const MEMBER_RATE: f64 = 2000.0;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a directory since its start.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct DirectoryCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        struct HostCounters {
            $($name: AtomicU64,)*
        }

        impl HostCounters {
            fn read(&self) -> DirectoryCounters {
                DirectoryCounters {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                }
            }
        }

        impl DirectoryCounters {
            /// Returns each counter with its name, which fits a metric's label.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Announcements that were applied.
    announced,
    /// Announcements of which not every chunk was kept, because a limit was reached.
    full,
    /// Announcements after which the member has to announce everything again.
    restarted,
    /// Prompts whose holders members asked for.
    asked,
    /// Prompts for which a member was named.
    found,
    /// Messages that are invalid in the protocol.
    malformed,
    /// Requests that were refused, malformed ones included.
    refused,
}

/// Usage of a directory, and its counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DirectoryStatus {
    /// Members that are connected, or were so within the last seconds.
    pub members: usize,
    /// Number of entries: one for each chunk of each member.
    pub entries: usize,
    /// Largest number of entries.
    pub limit: usize,
    /// Bytes of memory of entries and members.
    pub bytes: usize,
    /// Counters since the start.
    pub counters: DirectoryCounters,
}

/// Requests that a member may still send: a token bucket that holds one second's worth.
#[derive(Debug)]
struct Meter {
    left: f64,
    at: Instant,
}

/// A directory that answers its members.
#[derive(Debug)]
pub struct DirectoryHost {
    name: String,
    limits: TableLimits,
    table: RwLock<Table>,
    /// The clears that members have carried out, which are passed on to other members, and their digest.
    clears: Mutex<(Clears, ClearsId)>,
    meters: Mutex<HashMap<Session, Meter>>,
    counters: HostCounters,
    started: Instant,
}

impl DirectoryHost {
    /// Makes a directory without members. `name` is for an operator.
    ///
    /// # Errors
    /// [`SocketError::Start`]: the system has no random numbers.
    pub fn new(name: String, limits: TableLimits) -> Result<Arc<Self>, SocketError> {
        let seed = random()?;
        Ok(Self::with_seed(name, limits, seed))
    }

    pub(crate) fn with_seed(name: String, limits: TableLimits, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            name,
            table: RwLock::new(Table::new(limits.clone(), seed)),
            limits,
            clears: Mutex::new((Clears::default(), ClearsId::NONE)),
            meters: Mutex::default(),
            counters: HostCounters::default(),
            started: now(),
        })
    }

    /// Answers a request.
    pub fn serve(&self, session: &Session, request: &[u8]) -> Vec<u8> {
        let reply = match Request::from_bytes(request) {
            Err(MessageError::Kind(kind)) => Reply::Unsupported(kind),
            Err(_) => {
                count(&self.counters.malformed);
                Reply::Refused(Refusal::of_unparsed(request))
            }
            Ok(_) if !self.within_rate(session) => Reply::Refused(Refusal::TooMany),
            Ok(request) => self.answer(session, request),
        };
        if matches!(reply, Reply::Refused(_)) {
            count(&self.counters.refused);
        }
        // Every field of a reply is limited so that it fits.
        reply.to_bytes().unwrap_or_default()
    }

    fn within_rate(&self, session: &Session) -> bool {
        let now = now();
        let mut meters = self.meters.lock();
        let meter = meters.entry(session.clone()).or_insert(Meter {
            left: MEMBER_RATE,
            at: now,
        });
        let gained = now.saturating_duration_since(meter.at).as_secs_f64() * MEMBER_RATE;
        (meter.left, meter.at) = ((meter.left + gained).min(MEMBER_RATE), now);
        let within = meter.left >= 1.0;
        meter.left -= f64::from(u8::from(within));
        within
    }

    fn answer(&self, session: &Session, request: Request) -> Reply {
        match request {
            Request::Hello(hello) => match self.join(session, hello) {
                Ok(hello) => Reply::Hello(hello),
                Err(refusal) => Reply::Refused(refusal),
            },
            // A member with another digest sees this from the answer, and exchanges maps. Its chunks may be
            // recorded nevertheless: their fingerprints come from names that contain the digest, so members
            // with another digest do not look for them.
            Request::Announce(announce) => match self.announce(session, &announce.message) {
                Some(answer) => Reply::Announced(self.stamped(answer)),
                None => Reply::Refused(Refusal::NoHello),
            },
            Request::Find(find) => Reply::Found(self.stamped(self.find(session, &find.message))),
            Request::Clears(page) => Reply::Cleared(self.answer_page(&page)),
            other => Reply::Unsupported(other.kind()),
        }
    }

    fn stamped<T>(&self, message: T) -> Stamped<T> {
        Stamped::new(self.clears.lock().1, message)
    }

    /// Adds a page of a member's clears. Returns the page with the same number of the clears that are known
    /// here.
    fn answer_page(&self, theirs: &ClearsPage) -> ClearsPage {
        let (known, id) = &mut *self.clears.lock();
        // If the map is full, the answer shows it, because it lacks the page's entries.
        if known.join(&theirs.entries) == Ok(true) {
            *id = known.id();
        }
        ClearsPage::of(known, *id, theirs.page)
    }

    /// Adds a member. A directory has no chunks, so it accepts every chunk size and algorithm.
    fn join(&self, session: &Session, theirs: Hello) -> Result<Hello, Refusal> {
        let common = theirs.common_version(OLDEST_VERSION, VERSION);
        common.ok_or(Refusal::Version {
            oldest: OLDEST_VERSION,
            newest: VERSION,
        })?;
        let joined = self.table.write().join(session, &theirs.address, now());
        if !joined {
            return Err(Refusal::TooMany);
        }
        Ok(Hello {
            oldest: OLDEST_VERSION,
            newest: VERSION,
            features: FEATURE_DIRECTORY,
            name: self.name.clone(),
            address: String::new(),
            clears: self.clears.lock().1,
            spaces: Vec::new(),
            is_draining: false,
            ..theirs
        })
    }

    /// Applies an announcement. Returns `None` if the sender is not a member.
    pub fn announce(&self, session: &Session, announce: &Announce) -> Option<Announced> {
        let answer = self.table.write().announce(session, announce, now())?;
        count(match answer {
            Announced::Applied => &self.counters.announced,
            Announced::Full { .. } => &self.counters.full,
            Announced::Restart { .. } | Announced::Busy => &self.counters.restarted,
        });
        Some(answer)
    }

    /// Returns the members that have leading chunks of a prompt.
    pub fn find(&self, session: &Session, find: &Find) -> Found {
        let turn = xxhash_rust::xxh3::xxh3_64(session.peer.as_str().as_bytes());
        let candidates = self.table.read().find(find.keys.iter(), session, turn);
        count(&self.counters.asked);
        if !candidates.is_empty() {
            count(&self.counters.found);
        }
        Found {
            settled: now() >= self.started + SETTLING,
            candidates,
        }
    }

    /// Records that a member is no longer connected.
    pub fn disconnected(&self, session: &Session) {
        self.table.write().disconnected(session);
    }

    /// Removes the announcements of members that are gone. Runs until it is dropped.
    pub async fn keep_house(&self) {
        loop {
            tokio::time::sleep(HOUSEKEEPING).await;
            self.table.write().expire(now());
            let second = now().checked_sub(Duration::from_secs(1));
            let idle = |meter: &Meter| second.is_some_and(|second| meter.at < second);
            self.meters.lock().retain(|_, meter| !idle(meter));
            let mut left = self.table.read().buckets() / SWEEP_PART + SWEEP_AT_ONCE;
            while left > 0 {
                self.table.write().sweep(left.min(SWEEP_AT_ONCE));
                left = left.saturating_sub(SWEEP_AT_ONCE);
                tokio::task::yield_now().await;
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn entries_of(&self, session: &Session) -> std::collections::BTreeSet<Fingerprint> {
        self.table.read().entries_of(session)
    }

    /// Returns the usage and the counters.
    pub fn status(&self) -> DirectoryStatus {
        let table = self.table.read();
        DirectoryStatus {
            members: table.members(),
            entries: table.len(),
            limit: self.limits.entries,
            bytes: table.allocated(),
            counters: self.counters.read(),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A directory that listens on a channel of sockets.
pub struct DirectoryServer {
    host: Arc<DirectoryHost>,
    channel: SocketChannel,
    /// Tasks that end with the server.
    tasks: Option<JoinSet<()>>,
    runtime: Handle,
}

impl DirectoryServer {
    /// Starts to listen for members. Sets the channel's handlers.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn start(
        host: Arc<DirectoryHost>,
        mut channel: SocketConfig,
        runtime: Handle,
    ) -> Result<Self, SocketError> {
        // Members send little, and there are many members.
        channel.streams = 1;
        channel.channel.max_peers = host.limits.members;
        let (at, on) = (Arc::downgrade(&host), runtime.clone());
        channel.channel.on_ask = Some(Arc::new(move |peer, incarnation, question| {
            let session = Session {
                peer: peer.clone(),
                incarnation,
            };
            let host = at.upgrade();
            answer_on(&on, async move {
                let answer = host.map(|host| host.serve(&session, &question));
                answer.unwrap_or_default()
            })
        }));
        let at: Weak<DirectoryHost> = Arc::downgrade(&host);
        channel.channel.on_peer = Some(Arc::new(move |peer, event| {
            if let (Some(host), PeerEvent::Gone { incarnation, .. }) = (at.upgrade(), event) {
                host.disconnected(&Session {
                    peer: peer.clone(),
                    incarnation,
                });
            }
        }));
        let channel = channel.build()?;
        let mut tasks = JoinSet::new();
        let house = Arc::clone(&host);
        tasks.spawn_on(async move { house.keep_house().await }, &runtime);
        Ok(Self {
            host,
            channel,
            tasks: Some(tasks),
            runtime,
        })
    }

    /// Returns the directory.
    pub fn host(&self) -> &Arc<DirectoryHost> {
        &self.host
    }

    /// Returns the address that members connect to.
    pub fn address(&self) -> &Address {
        self.channel.address()
    }
}

impl fmt::Debug for DirectoryServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryServer")
            .field("address", self.address())
            .finish_non_exhaustive()
    }
}

impl Drop for DirectoryServer {
    fn drop(&mut self) {
        // Tasks must be dropped on their runtime.
        let _entered = self.runtime.enter();
        drop(self.tasks.take());
    }
}
