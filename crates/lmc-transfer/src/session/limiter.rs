//! Limits on handshakes under way.
//!
//! No connection waits before `accept`. When the limit is reached, a new handshake evicts the
//! oldest handshake that has not proved the key: an honest one takes milliseconds, and is rarely
//! the oldest. Sources (an IPv4 address, an IPv6 /64) that authenticated before have reserved
//! capacity, and unknown sources never evict them.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Handshakes under way at a time.
const MAX_HANDSHAKES: usize = 256;
/// Handshakes reserved for sources that authenticated before.
const RESERVED: usize = 64;
/// Handshakes at a time from one source that has not authenticated yet.
const MAX_PER_SOURCE: usize = 128;
/// Sources that are remembered.
const MAX_TRUSTED: usize = 4096;

/// The source of a connection: one value for each host, as far as that can be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum HandshakeSource {
    V4([u8; 4]),
    /// The first 64 bits: one host may use all addresses with this prefix.
    V6([u8; 8]),
}

impl HandshakeSource {
    pub(super) fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.octets()),
            IpAddr::V6(address) => {
                let [a, b, c, d, e, f, g, h, ..] = address.octets();
                Self::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Limiter(Mutex<HandshakeTable>);

#[derive(Debug, Default)]
struct HandshakeTable {
    next: u64,
    /// Handshakes under way, the oldest first.
    pending: BTreeMap<u64, Pending>,
    /// Sources that authenticated, with a time stamp: a count of events.
    trusted: HashMap<HandshakeSource, u64>,
}

#[derive(Debug)]
struct Pending {
    source: Option<HandshakeSource>,
    /// True if the initiator has shown that it knows the key.
    knows_the_key: bool,
    evict: oneshot::Sender<()>,
}

impl HandshakeTable {
    /// Unix sockets have no source: their file's permissions say who connects.
    fn is_trusted(&self, source: Option<HandshakeSource>) -> bool {
        source.is_none_or(|source| self.trusted.contains_key(&source))
    }

    fn count(&self, is_meant: impl Fn(&Pending) -> bool) -> usize {
        self.pending.values().filter(|one| is_meant(one)).count()
    }

    /// Evicts the oldest of the handshakes that `is_meant` selects, first those that have not shown
    /// the key.
    fn evict(&mut self, is_meant: impl Fn(&Self, &Pending) -> bool) {
        let meant = self.pending.iter().filter(|(_, one)| is_meant(self, one));
        let victim = meant.min_by_key(|(number, one)| (one.knows_the_key, **number));
        if let Some(number) = victim.map(|(number, _)| *number)
            && let Some(pending) = self.pending.remove(&number)
        {
            // Its task may have ended meanwhile.
            let _ = pending.evict.send(());
        }
    }

    fn make_capacity(&mut self, source: Option<HandshakeSource>) {
        let trusted = self.is_trusted(source);
        if !trusted && self.count(|one| one.source == source) >= MAX_PER_SOURCE {
            self.evict(|_, one| one.source == source);
        }
        let strangers = |state: &Self, one: &Pending| !state.is_trusted(one.source);
        let full = match trusted {
            true => self.pending.len() >= MAX_HANDSHAKES,
            false => self.count(|one| strangers(self, one)) >= MAX_HANDSHAKES - RESERVED,
        };
        if full && self.count(|one| strangers(self, one)) > 0 {
            self.evict(strangers);
        } else if full {
            self.evict(|_, _| true);
        }
    }
}

impl Limiter {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::default()))
    }

    /// Admits a handshake. The receiver gets a value if it is evicted.
    pub(super) fn enter(
        self: &Arc<Self>,
        source: Option<HandshakeSource>,
    ) -> (Permit, oneshot::Receiver<()>) {
        let (evict, evicted) = oneshot::channel();
        let mut state = self.0.lock();
        state.make_capacity(source);
        let number = state.next;
        state.next += 1;
        let pending = Pending {
            source,
            knows_the_key: false,
            evict,
        };
        state.pending.insert(number, pending);
        let permit = Permit {
            limiter: Arc::clone(self),
            number,
            source,
        };
        (permit, evicted)
    }

    fn leave(&self, number: u64) -> Option<Pending> {
        self.0.lock().pending.remove(&number)
    }
}

/// The right to a handshake, until dropped.
#[derive(Debug)]
pub(super) struct Permit {
    limiter: Arc<Limiter>,
    number: u64,
    source: Option<HandshakeSource>,
}

impl Permit {
    /// Notes that the initiator has shown the key: its handshake is evicted after those that have
    /// not.
    pub(super) fn knows_the_key(&self) {
        if let Some(pending) = self.limiter.0.lock().pending.get_mut(&self.number) {
            pending.knows_the_key = true;
        }
    }

    /// Notes that the initiator is authenticated: from here on the number of peers is the limit.
    pub(super) fn authenticated(&self) {
        let mut state = self.limiter.0.lock();
        let (Some(_), Some(source)) = (state.pending.remove(&self.number), self.source) else {
            return;
        };
        let now = state.next;
        state.next += 1;
        state.trusted.insert(source, now);
        if state.trusted.len() > MAX_TRUSTED
            && let Some((&oldest, _)) = state.trusted.iter().min_by_key(|(_, when)| **when)
        {
            state.trusted.remove(&oldest);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        drop(self.limiter.leave(self.number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(number: u8) -> Option<HandshakeSource> {
        Some(HandshakeSource::of(IpAddr::from([10, 0, 0, number])))
    }

    type Admitted = (Permit, oneshot::Receiver<()>);

    fn is_evicted((_, evicted): &mut Admitted) -> bool {
        evicted.try_recv().is_ok()
    }

    fn fill(limiter: &Arc<Limiter>, sources: u8, each: usize) -> Vec<Admitted> {
        let all = (0..each).flat_map(|_| 0..sources);
        all.map(|number| limiter.enter(source(number))).collect()
    }

    #[test]
    fn a_new_handshake_evicts_the_oldest_that_has_not_shown_the_key() {
        let limiter = Limiter::new();
        let mut all = fill(&limiter, 16, (MAX_HANDSHAKES - RESERVED) / 16);
        all[0].0.knows_the_key();
        assert!(!all.iter_mut().any(is_evicted));
        let mut newcomer = limiter.enter(source(200));
        assert!(!is_evicted(&mut newcomer));
        let evicted: Vec<usize> = (0..all.len())
            .filter(|n| is_evicted(&mut all[*n]))
            .collect();
        assert_eq!(evicted, [1]);
    }

    #[test]
    fn one_source_evicts_its_own() {
        let limiter = Limiter::new();
        let mut other = limiter.enter(source(9));
        let mut all = fill(&limiter, 1, MAX_PER_SOURCE + 10);
        assert!(!is_evicted(&mut other));
        let evicted: Vec<usize> = (0..all.len())
            .filter(|n| is_evicted(&mut all[*n]))
            .collect();
        assert_eq!(evicted, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn sources_that_authenticated_before_have_reserved_capacity() {
        let limiter = Limiter::new();
        let (known, _evicted) = limiter.enter(source(100));
        known.authenticated();
        drop(known);
        let mut known: Vec<_> = (0..RESERVED).map(|_| limiter.enter(source(100))).collect();
        let strangers = fill(&limiter, 50, 20);
        assert!(!known.iter_mut().any(is_evicted));
        drop((known, strangers));
        assert!(limiter.0.lock().pending.is_empty());
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_source() {
        let source = |text: &str| HandshakeSource::of(text.parse().expect("an address"));
        assert_eq!(source("fd00::1"), source("fd00::2:3"));
        assert_ne!(source("fd00::1"), source("fd00:0:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    }
}
