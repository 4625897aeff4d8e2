//! The table of leases that peers have: which peer may read which part of this daemon's memory, and until
//! when. No I/O and no clock.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use lmc_key::ChunkKey;

use crate::link::Session;

/// Most bytes of one lease, and so of one request and one read. One lease is read while the owner computes
/// checksums for the next, if chunks have none yet.
pub(crate) const LEASE_BYTES: u64 = 16 << 20;

/// Limits of what peers may lease.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnerLimits {
    /// Most bytes leased to all peers together.
    pub bytes: u64,
    /// Most bytes leased to one peer.
    pub peer_bytes: u64,
    /// Most leases of one peer.
    pub peer_leases: usize,
    /// Most bytes of one lease, unless it has only one chunk.
    pub lease_bytes: u64,
    /// Longest duration of a lease.
    pub duration: Duration,
    /// Longest time from a lease's grant to its end, however often it is renewed.
    pub age: Duration,
    /// Most bytes that peers may lease in a second; `None` for no limit.
    pub bytes_per_second: Option<u64>,
}

impl OwnerLimits {
    /// Returns the limits for a pool of `pool` bytes: a quarter of the pool for all peers, an eighth for each
    /// peer.
    pub fn for_pool(pool: u64) -> Self {
        Self {
            bytes: pool / 4,
            peer_bytes: pool / 8,
            peer_leases: 256,
            lease_bytes: LEASE_BYTES,
            duration: Duration::from_secs(30),
            age: Duration::from_secs(60),
            bytes_per_second: None,
        }
    }
}

/// A lease that was granted. Dropping its grant ends the access, and unpins the slots.
///
/// `G` holds the channel's and the engine's lease; the simulation has a type of its own.
#[derive(Debug)]
struct Granted<G> {
    session: Session,
    keys: Vec<ChunkKey>,
    bytes: u64,
    expires: Instant,
    /// Latest possible end, however often the lease is renewed.
    latest: Instant,
    grant: G,
}

#[derive(Debug, Default)]
struct SessionUse {
    bytes: u64,
    leases: usize,
}

/// Reason why a lease is not granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    /// All peers together have leased as much as they may.
    Pool,
    /// This peer has leased as much as it may.
    Peer,
    /// Peers have leased bytes faster than they may.
    Rate,
}

/// All leases of peers in this daemon's memory.
///
/// The current time is passed as an argument. An expired lease serves nothing more, whether [`Self::expire`]
/// was called or not.
#[derive(Debug)]
pub struct LeaseTable<G> {
    limits: OwnerLimits,
    leases: HashMap<u64, Granted<G>>,
    by_expiry: BTreeSet<(Instant, u64)>,
    uses: HashMap<Session, SessionUse>,
    bytes: u64,
    /// Number of the last lease; numbers are never reused.
    last: u64,
    /// Bytes of leases that are about to be granted, by reservation number.
    reserved: HashMap<u64, u64>,
    rate: Option<Rate>,
}

/// A limit of bytes per time: a token bucket that holds one second's worth. For a lease that is larger than
/// the remaining tokens, the bucket goes negative.
#[derive(Debug)]
struct Rate {
    per_second: u64,
    left: i128,
    at: Option<Instant>,
}

impl Rate {
    /// Refills the bucket, and returns the bytes left.
    fn left(&mut self, now: Instant) -> i128 {
        let most = i128::from(self.per_second);
        let Some(at) = self.at else {
            (self.left, self.at) = (most, Some(now));
            return most;
        };
        let nanos = now.saturating_duration_since(at).as_nanos() as i128;
        let gained = most * nanos / 1_000_000_000;
        if gained > 0 {
            self.left = (self.left + gained).min(most);
            // Time that yields less than a byte counts at the next call.
            let counted = gained * 1_000_000_000 / most;
            self.at = Some(at + Duration::from_nanos(counted as u64));
        }
        self.left
    }
}

impl<G> LeaseTable<G> {
    /// Makes a table without leases.
    pub fn new(limits: OwnerLimits) -> Self {
        let rate = limits.bytes_per_second.map(|per_second| Rate {
            per_second,
            left: 0,
            at: None,
        });
        Self {
            limits,
            leases: HashMap::new(),
            by_expiry: BTreeSet::new(),
            uses: HashMap::new(),
            bytes: 0,
            last: 0,
            reserved: HashMap::new(),
            rate,
        }
    }

    /// Returns how many leading chunks of these lengths a peer may lease now, and the reason if not all. A
    /// chunk that is longer than the limit may be leased to a peer that leases nothing else.
    pub fn admit(
        &mut self,
        session: &Session,
        lens: &[u64],
        now: Instant,
    ) -> (usize, Option<Busy>) {
        let (bytes, leases) = match self.uses.get(session) {
            Some(used) => (used.bytes, used.leases),
            None => (0, 0),
        };
        if leases >= self.limits.peer_leases {
            return (0, Some(Busy::Peer));
        }
        let rate = self.rate.as_mut().map(|rate| rate.left(now));
        let mut sum = 0;
        for (index, &len) in lens.iter().enumerate() {
            sum += len;
            let busy = if self.bytes + sum > self.limits.bytes && self.bytes + index as u64 > 0 {
                Busy::Pool
            } else if (bytes + sum > self.limits.peer_bytes && bytes + index as u64 > 0)
                || (sum > self.limits.lease_bytes && index > 0)
            {
                Busy::Peer
            } else if rate.is_some_and(|left| left <= 0 || (i128::from(sum) > left && index > 0)) {
                Busy::Rate
            } else {
                continue;
            };
            return (index, Some(busy));
        }
        (lens.len(), None)
    }

    /// Counts bytes as leased to a peer until [`Self::unreserve`], so that several requests that are admitted
    /// at the same time stay within the limits. Returns the reservation's number.
    pub fn reserve(&mut self, session: &Session, bytes: u64) -> u64 {
        self.last += 1;
        self.reserved.insert(self.last, bytes);
        self.bytes += bytes;
        let used = self.uses.entry(session.clone()).or_default();
        used.bytes += bytes;
        used.leases += 1;
        self.last
    }

    /// Ends a reservation.
    pub fn unreserve(&mut self, session: &Session, number: u64) {
        if let Some(bytes) = self.reserved.remove(&number) {
            self.give_back(session, bytes);
        }
    }

    fn give_back(&mut self, session: &Session, bytes: u64) {
        self.bytes -= bytes;
        if let Some(used) = self.uses.get_mut(session) {
            used.bytes -= bytes;
            used.leases -= 1;
            if used.leases == 0 {
                self.uses.remove(session);
            }
        }
    }

    /// Records a lease that was granted. Returns its number and its duration, which is limited.
    pub fn grant(
        &mut self,
        session: Session,
        chunks: Vec<(ChunkKey, u64)>,
        duration: Duration,
        grant: G,
        now: Instant,
    ) -> (u64, Duration) {
        let duration = duration.min(self.limits.duration).min(self.limits.age);
        let bytes = chunks.iter().map(|(_, len)| len).sum();
        if let Some(rate) = &mut self.rate {
            rate.left = rate.left(now) - i128::from(bytes);
        }
        self.last += 1;
        let granted = Granted {
            session: session.clone(),
            keys: chunks.into_iter().map(|(key, _)| key).collect(),
            bytes,
            expires: now + duration,
            latest: now + self.limits.age,
            grant,
        };
        self.by_expiry.insert((granted.expires, self.last));
        self.leases.insert(self.last, granted);
        self.bytes += bytes;
        let used = self.uses.entry(session).or_default();
        used.bytes += bytes;
        used.leases += 1;
        (self.last, duration)
    }

    /// Extends a lease of this session. Returns false if the lease has ended, because an expired lease is
    /// never revived, or if it would last too long.
    pub fn renew(
        &mut self,
        session: &Session,
        lease: u64,
        duration: Duration,
        now: Instant,
    ) -> bool {
        let granted = self.leases.get_mut(&lease);
        let renewed = now + duration.min(self.limits.duration);
        let granted = granted.filter(|granted| {
            granted.session == *session && granted.expires > now && renewed <= granted.latest
        });
        let Some(granted) = granted else {
            return false;
        };
        self.by_expiry.remove(&(granted.expires, lease));
        granted.expires = granted.expires.max(renewed);
        self.by_expiry.insert((granted.expires, lease));
        true
    }

    /// Returns the grant of a lease of this session.
    pub fn granted(&self, session: &Session, lease: u64) -> Option<&G> {
        let granted = self.leases.get(&lease)?;
        (granted.session == *session).then_some(&granted.grant)
    }

    /// Ends a lease of this session. Returns the grant and its chunks if the lease was valid until now.
    pub fn release(
        &mut self,
        session: &Session,
        lease: u64,
        now: Instant,
    ) -> Option<(G, Vec<ChunkKey>)> {
        let its = self.leases.get(&lease)?.session == *session;
        let granted = its.then(|| self.remove(lease))??;
        (granted.expires > now).then_some((granted.grant, granted.keys))
    }

    /// Ends the leases that have expired. Returns their grants.
    pub fn expire(&mut self, now: Instant) -> Vec<G> {
        let mut over = Vec::new();
        while let Some(&(expires, lease)) = self.by_expiry.first() {
            if expires > now {
                break;
            }
            over.extend(self.remove(lease).map(|granted| granted.grant));
        }
        over
    }

    /// Returns the time at which the next lease expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.by_expiry.first().map(|(expires, _)| *expires)
    }

    /// Ends all leases of a session. Returns their grants.
    pub fn end_session(&mut self, session: &Session) -> Vec<G> {
        if !self.uses.contains_key(session) {
            return Vec::new();
        }
        let its =
            |(lease, granted): (&u64, &Granted<G>)| (granted.session == *session).then_some(*lease);
        let leases: Vec<u64> = self.leases.iter().filter_map(its).collect();
        let ended = leases.into_iter().filter_map(|lease| self.remove(lease));
        ended.map(|granted| granted.grant).collect()
    }

    fn remove(&mut self, lease: u64) -> Option<Granted<G>> {
        let granted = self.leases.remove(&lease)?;
        self.by_expiry.remove(&(granted.expires, lease));
        self.give_back(&granted.session, granted.bytes);
        Some(granted)
    }

    /// Returns the number of leases.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Returns true if nothing is leased.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Returns the bytes that are leased.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of leases of each session that has any, and their bytes.
    pub fn by_session(&self) -> HashMap<Session, (usize, u64)> {
        let uses = self.uses.iter();
        let used = uses.map(|(session, used)| (session.clone(), (used.leases, used.bytes)));
        used.collect()
    }

    /// Returns the bytes leased as a fraction of the limit, in units of 1/255.
    pub fn load(&self) -> u8 {
        let parts = u128::from(self.bytes) * 255 / u128::from(self.limits.bytes.max(1));
        parts.min(255) as u8
    }
}
