//! State of one request of an engine, from its lookup to its end.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_engine::{EngineTask, Leases, TierRun};
use lmc_key::{ClearsId, SpaceId};

use crate::protocol::Reply;
use crate::service::ClientId;
use crate::service::notices::NoticeGuard;
use crate::service::prefills::Prefills;

/// Most chunks of one part of a hold, so that a range is cut out of a long prompt without moving
/// all of its leases.
const PART: usize = 512;

/// Longest wait for the answer to a lookup.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// Leases to be released, by dropping them where nothing is locked.
pub(crate) type Released = Vec<Leases>;

/// Consecutive chunks that are held for the same number of readers.
#[derive(Debug)]
struct HoldPart {
    /// First chunk, counted from the start of the prompt.
    first: usize,
    leases: Leases,
    /// Workers that will still read each chunk; at least one.
    readers: u32,
}

impl HoldPart {
    /// Splits off the chunks from chunk `at`.
    fn split_off(&mut self, at: usize) -> Self {
        let leases = self.leases.split_off(at.saturating_sub(self.first));
        Self {
            first: self.first + self.leases.len(),
            leases,
            readers: self.readers,
        }
    }
}

/// The chunks of one space and KV rank that a lookup holds.
#[derive(Debug)]
pub(crate) struct RankHold {
    pub(crate) space: SpaceId,
    pub(crate) kv_rank: u16,
    parts: Vec<HoldPart>,
}

impl RankHold {
    /// Returns a hold. `first` is the chunk of the prompt that the first lease belongs to.
    pub(crate) fn new(
        space: SpaceId,
        kv_rank: u16,
        first: usize,
        leases: Leases,
        readers: u32,
    ) -> Self {
        let mut rest = HoldPart {
            first,
            leases,
            readers,
        };
        let mut parts = Vec::with_capacity(rest.leases.len().div_ceil(PART));
        // From the end, so that no lease is moved twice.
        while rest.leases.len() > PART {
            let last = (rest.leases.len() - 1) / PART * PART;
            parts.push(rest.split_off(rest.first + last));
        }
        parts.push(rest);
        parts.reverse();
        Self {
            space,
            kv_rank,
            parts,
        }
    }

    /// Takes `readers` readers off each chunk of a range. Returns the leases of chunks that are
    /// left without a reader.
    fn release(&mut self, range: Range<usize>, readers: u32) -> Released {
        let mut released = Vec::new();
        for mut before in mem::take(&mut self.parts) {
            if before.first >= range.end || before.first + before.leases.len() <= range.start {
                self.parts.push(before);
                continue;
            }
            let mut inside = before.split_off(range.start);
            let after = inside.split_off(range.end);
            inside.readers = inside.readers.saturating_sub(readers);
            for part in [before, inside, after] {
                match part.readers > 0 && !part.leases.is_empty() {
                    true => self.parts.push(part),
                    false => released.push(part.leases),
                }
            }
        }
        released
    }

    fn held(&self) -> usize {
        self.parts.iter().map(|part| part.leases.len()).sum()
    }
}

/// A subscription to the answer of a request's lookup.
#[derive(Debug)]
pub(crate) struct Wait {
    pub(crate) client: ClientId,
    request_id: String,
    until: Instant,
    /// True if the answer names the tiers that the chunks came from.
    with_tiers: bool,
}

impl Wait {
    /// Returns a subscription. `timeout` is in seconds; a value that is no number of seconds is
    /// over at once.
    pub(crate) fn new(
        client: ClientId,
        request_id: String,
        timeout: f64,
        with_tiers: bool,
        now: Instant,
    ) -> Self {
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or_default();
        Self {
            client,
            request_id,
            until: now + timeout.min(MAX_WAIT),
            with_tiers,
        }
    }

    pub(crate) fn request_id(&self) -> &str {
        &self.request_id
    }
}

/// A waiter for the answer to a lookup. The code that takes a waiter out must answer it: a waiter
/// must not be dropped while its connection may still exist.
pub(crate) struct Waiter {
    until: Instant,
    /// True if the answer names the tiers that the chunks came from.
    pub(crate) with_tiers: bool,
    tell: Option<Box<dyn FnOnce(Reply) + Send>>,
}

impl Waiter {
    pub(crate) fn new(wait: &Wait, tell: Box<dyn FnOnce(Reply) + Send>) -> Self {
        Self {
            until: wait.until,
            with_tiers: wait.with_tiers,
            tell: Some(tell),
        }
    }

    /// Answers that nothing was found.
    fn tell_nothing(self) {
        let reply = match self.with_tiers {
            false => Reply::Int(0),
            true => Reply::Found {
                chunks: 0,
                tiers: Vec::new(),
            },
        };
        self.tell(reply);
    }

    pub(crate) fn tell(mut self, reply: Reply) {
        if let Some(tell) = self.tell.take() {
            tell(reply);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        debug_assert!(
            self.tell.is_none() || std::thread::panicking(),
            "a waiter was dropped without an answer"
        );
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Waiter({:?})", self.until)
    }
}

/// The answer to a lookup and the leases behind it.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// Distinguishes the lookups of a request.
    number: u64,
    /// Number of leading chunks that every rank has; `None` while chunks are being promoted.
    hits: Option<u64>,
    /// Tiers that the chunks came from; empty if all were in DRAM.
    runs: Vec<TierRun>,
    holds: Vec<RankHold>,
    /// Time at which the leases expire.
    expires: Instant,
    /// The task that waits for the promotion of chunks.
    task: Option<EngineTask>,
    waiting: Vec<Waiter>,
}

impl Lookup {
    /// A lookup whose chunks are being promoted.
    pub(crate) fn promoting(number: u64, expires: Instant) -> Self {
        Self {
            number,
            hits: None,
            runs: Vec::new(),
            holds: Vec::new(),
            expires,
            waiting: Vec::new(),
            task: None,
        }
    }

    /// Makes a lookup whose result is known.
    pub(crate) fn known(number: u64, hits: u64, holds: Vec<RankHold>, expires: Instant) -> Self {
        Self {
            hits: Some(hits),
            holds,
            ..Self::promoting(number, expires)
        }
    }

    /// Names the tiers that the chunks came from, if not all were in DRAM.
    pub(crate) fn with_runs(mut self, runs: Vec<TierRun>) -> Self {
        self.runs = runs;
        self
    }

    /// Ends the lookup. Call it where nothing is locked. The promotion ends before its waiters are
    /// answered, so that nothing is promoted for a lookup whose end was reported. Remaining waiters
    /// are answered that no chunk was found, and the leases are released.
    pub(crate) fn end(self) {
        drop(self.task);
        for waiter in self.waiting {
            waiter.tell_nothing();
        }
        drop(self.holds);
    }
}

/// Result of a request's lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hits {
    /// The request never looked up.
    Never,
    /// The leading chunks are not known yet.
    Promoting,
    /// Number of leading chunks that were found.
    Known(u64),
}

/// One request of an engine.
#[derive(Debug)]
pub(crate) struct Session {
    /// Connection of the scheduler that looked up.
    pub(crate) client: ClientId,
    pub(crate) last_used: Instant,
    lookup: Option<Lookup>,
    /// End of the chunks that a worker has retrieved since the lookup.
    retrieved: usize,
    began: Instant,
    clears: Digests,
    /// Id under which other servers wait for the chunks that are computed for the request.
    prefill: Option<Arc<str>>,
    /// Reports the end of the request when dropped.
    _notice: Option<NoticeGuard>,
}

/// The clears that a request follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Digests {
    /// Clears before the request's first lookup. The engine may have begun to compute right after
    /// these clears, so the request's chunks are stored after these clears.
    first: ClearsId,
    /// Clears before the request's last lookup. The chunks that the lookup found are read after these clears.
    last: ClearsId,
}

/// The clears that the request of a name follows, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Followed {
    /// Clears after which its chunks are stored; `None` if it was not looked up.
    pub(crate) stores: Option<ClearsId>,
    /// Clears after which its chunks are read; `None` if it is not looked up now.
    pub(crate) reads: Option<ClearsId>,
    /// True if a request that is not known was looked up by no connection recently.
    pub(crate) knows_all: bool,
}

/// The first digests of requests that ended, for stores that come late. A name that is used again
/// keeps the digest of its oldest request.
#[derive(Debug, Default)]
struct Ended {
    hasher: RandomState,
    /// Digests by the hash of the name, with the time of the request's last use. Two names with one
    /// hash share the older digest, which drops a store too many.
    digests: HashMap<u64, (ClearsId, Instant)>,
    order: VecDeque<(u64, Instant)>,
    /// Last use of the last request that was forgotten before its time.
    forgotten: Option<Instant>,
}

impl Ended {
    /// Requests that are remembered, at most.
    const MAX: usize = 65_536;

    fn note(&mut self, name: &str, session: &Session) {
        let name = self.hasher.hash_one(name);
        let used = session.last_used;
        self.digests
            .entry(name)
            .or_insert((session.clears.first, used));
        self.order.push_back((name, used));
        if self.order.len() > Self::MAX
            && let Some((oldest, used)) = self.order.pop_front()
        {
            self.forget(oldest, used);
            self.forgotten = self.forgotten.max(Some(used));
        }
    }

    fn forget(&mut self, name: u64, used: Instant) {
        if self.digests.get(&name).is_some_and(|known| known.1 <= used) {
            self.digests.remove(&name);
        }
    }

    fn forget_before(&mut self, then: Instant) {
        while let Some(&(name, used)) = self.order.front()
            && used <= then
        {
            self.order.pop_front();
            self.forget(name, used);
        }
        self.forgotten = self.forgotten.filter(|used| *used > then);
    }

    fn of(&self, name: &str) -> Option<ClearsId> {
        let digest = self.digests.get(&self.hasher.hash_one(name))?;
        Some(digest.0)
    }
}

impl Session {
    /// Returns a request that began after these clears.
    pub(crate) fn new(client: ClientId, now: Instant, clears: ClearsId) -> Self {
        Self {
            client,
            last_used: now,
            lookup: None,
            retrieved: 0,
            began: now,
            prefill: None,
            _notice: None,
            clears: Digests {
                first: clears,
                last: clears,
            },
        }
    }

    /// Sets the id under which other servers wait for the request's chunks.
    pub(crate) fn with_prefill(mut self, id: Option<Arc<str>>) -> Self {
        self.prefill = id;
        self
    }

    /// Attaches the guard that reports the end of the request.
    pub(crate) fn with_notice(mut self, notice: Option<NoticeGuard>) -> Self {
        self._notice = notice;
        self
    }

    /// Ends the request and its lookup. Call it where nothing is locked.
    pub(crate) fn end(self) {
        if let Some(lookup) = self.lookup {
            lookup.end();
        }
    }

    /// Notes that a worker has retrieved these chunks. Returns how many of them no worker of the
    /// request had retrieved before: each rank, and each reader of a rank, retrieves the same
    /// chunks.
    pub(crate) fn retrieve(&mut self, chunks: &Range<usize>) -> usize {
        let new = chunks.end.saturating_sub(chunks.start.max(self.retrieved));
        self.retrieved = self.retrieved.max(chunks.end);
        new
    }

    /// Sets a lookup, made after these clears, and returns the earlier one.
    #[must_use = "it is ended where nothing is locked"]
    pub(crate) fn set_lookup(&mut self, lookup: Lookup, clears: ClearsId) -> Option<Lookup> {
        self.retrieved = 0;
        self.clears.last = clears;
        self.lookup.replace(lookup)
    }

    /// Sets the outcome of a lookup whose chunks were being promoted. Returns its waiters.
    ///
    /// # Errors
    /// Returns the holds when the request has looked up again since.
    pub(crate) fn promoted(
        &mut self,
        number: u64,
        (hits, runs): (u64, Vec<TierRun>),
        holds: Vec<RankHold>,
        expires: Instant,
    ) -> Result<Vec<Waiter>, Vec<RankHold>> {
        match &mut self.lookup {
            Some(lookup) if lookup.number == number && lookup.hits.is_none() => {
                lookup.hits = Some(hits);
                lookup.runs = runs;
                lookup.holds = holds;
                lookup.expires = expires;
                Ok(mem::take(&mut lookup.waiting))
            }
            _ => Err(holds),
        }
    }

    /// Returns the tiers that the chunks of the lookup came from; empty if all were in DRAM.
    pub(crate) fn runs(&self) -> Vec<TierRun> {
        let lookup = self.lookup.as_ref();
        lookup.map_or(Vec::new(), |lookup| lookup.runs.clone())
    }

    /// Keeps the task that waits for the promotion of its lookup's chunks.
    pub(crate) fn set_task(&mut self, task: Option<EngineTask>) {
        if let Some(lookup) = &mut self.lookup {
            lookup.task = task;
        }
    }

    /// Returns true if this is the request's lookup.
    fn looks_up(&self, number: u64) -> bool {
        self.lookup
            .as_ref()
            .is_some_and(|lookup| lookup.number == number)
    }

    /// Returns the result of the lookup.
    pub(crate) fn hits(&self) -> Hits {
        match &self.lookup {
            None => Hits::Never,
            Some(lookup) => lookup.hits.map_or(Hits::Promoting, Hits::Known),
        }
    }

    /// Keeps a waiter for a lookup whose chunks are being promoted, or returns it with the answer.
    pub(crate) fn wait(&mut self, waiter: Waiter) -> Result<(), (Waiter, u64)> {
        match &mut self.lookup {
            Some(lookup) => match lookup.hits {
                None => {
                    lookup.waiting.push(waiter);
                    Ok(())
                }
                Some(hits) => Err((waiter, hits)),
            },
            None => Err((waiter, 0)),
        }
    }

    /// Removes the waiters whose timeout has passed.
    pub(crate) fn take_timed_out(&mut self, now: Instant) -> Vec<Waiter> {
        let Some(lookup) = &mut self.lookup else {
            return Vec::new();
        };
        let timed_out = |waiter: &mut Waiter| waiter.until <= now;
        lookup.waiting.extract_if(.., timed_out).collect()
    }

    /// Notes that one worker has read, or will not read, a range of chunks of its rank.
    #[must_use = "its leases should go back where nothing is locked"]
    pub(crate) fn reader_done(
        &mut self,
        space: SpaceId,
        kv_rank: u16,
        chunks: &Range<usize>,
    ) -> Released {
        let of_rank = |hold: &&mut RankHold| hold.space == space && hold.kv_rank == kv_rank;
        let holds = self.lookup.iter_mut().flat_map(|lookup| &mut lookup.holds);
        let released = holds.filter(of_rank);
        released
            .flat_map(|hold| hold.release(chunks.clone(), 1))
            .collect()
    }

    /// Takes readers off a range of chunks, of all ranks or of one, in `count` of the lookup's
    /// holds, starting at `first`. `None` if there are no such holds.
    #[must_use = "its leases should go back where nothing is locked"]
    pub(crate) fn free(
        &mut self,
        first: usize,
        count: usize,
        kv_rank: Option<u16>,
        chunks: &Range<usize>,
        readers: u32,
    ) -> Option<Released> {
        let holds = self.lookup.as_mut()?.holds.get_mut(first..)?;
        if holds.is_empty() {
            return None;
        }
        let of_rank = |hold: &&mut RankHold| kv_rank.is_none_or(|rank| rank == hold.kv_rank);
        let released = holds.iter_mut().take(count).filter(of_rank);
        let released = released.flat_map(|hold| hold.release(chunks.clone(), readers));
        Some(released.collect())
    }

    /// Ends a lookup whose time is over. Returns the number of its leases, and the lookup that held
    /// them, to be ended where nothing is locked. A lookup whose chunks are not promoted by then
    /// has no hits.
    #[must_use = "the lookup is ended where nothing is locked"]
    pub(crate) fn expire(&mut self, now: Instant) -> Option<(usize, Lookup)> {
        let lookup = self
            .lookup
            .as_mut()
            .filter(|lookup| lookup.expires <= now)?;
        if lookup.hits.is_some() && lookup.holds.is_empty() {
            return None;
        }
        let held = lookup.holds.iter().map(RankHold::held).sum();
        let hits = lookup.hits.unwrap_or(0);
        let over = Lookup::known(lookup.number, hits, Vec::new(), lookup.expires);
        let over = over.with_runs(mem::take(&mut lookup.runs));
        Some((held, mem::replace(lookup, over)))
    }
}

/// The requests under way. A request belongs to the connection that looked it up: two engines may
/// give their requests the same name.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    by_name: HashMap<Arc<str>, Vec<Session>>,
    /// Names of each connection's requests.
    by_client: HashMap<ClientId, HashSet<Arc<str>>>,
    /// Names in the order of [`Self::sweep`]. A name whose requests have ended is removed when it
    /// is visited.
    visits: VecDeque<Arc<str>>,
    len: usize,
    ended: Ended,
    prefills: Prefills,
}

impl Sessions {
    /// Returns true if a prefill with this id is over.
    pub(crate) fn is_over(&self, prefill: &str, now: Instant) -> bool {
        self.prefills.are_over(prefill, now)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of requests of one connection.
    pub(crate) fn len_of(&self, client: ClientId) -> usize {
        self.by_client.get(&client).map_or(0, HashSet::len)
    }

    /// Returns the connections that the requests belong to.
    pub(crate) fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.by_client.keys().copied()
    }

    /// Returns the request of this name that a connection looked up.
    pub(crate) fn of(&mut self, client: ClientId, request_id: &str) -> Option<&mut Session> {
        let of_client = |session: &&mut Session| session.client == client;
        self.named(request_id).iter_mut().find(of_client)
    }

    /// Returns the request of this name that a worker's connection serves. If several connections
    /// looked up the name, and the worker's is not among them, the request is not known: the chunks
    /// are held until the requests end.
    pub(crate) fn of_worker(&mut self, client: ClientId, request_id: &str) -> Option<&mut Session> {
        match self.named(request_id) {
            [only] => Some(only),
            named => named.iter_mut().find(|session| session.client == client),
        }
    }

    /// Returns the clears that the request of this name follows, on the connection of a worker. If
    /// several requests have the name, returns safe clears: for stores the oldest, also of requests
    /// that ended after `then`; for reads the clears of the last lookup.
    pub(crate) fn followed(&mut self, client: ClientId, name: &str, then: Instant) -> Followed {
        self.ended.forget_before(then);
        let own = self.of_worker(client, name).map(|own| own.clears);
        let named = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        let oldest = named.iter().min_by_key(|session| session.began);
        let number = |session: &&Session| session.lookup.as_ref().map(|lookup| lookup.number);
        let newest = named.iter().max_by_key(number);
        let first = own.map(|own| own.first);
        let last = own.map(|own| own.last);
        Followed {
            stores: (self.ended.of(name))
                .or(first)
                .or(oldest.map(|session| session.clears.first)),
            reads: last.or(newest.map(|session| session.clears.last)),
            knows_all: self.ended.forgotten.is_none(),
        }
    }

    /// Returns all requests of this name.
    pub(crate) fn named(&mut self, request_id: &str) -> &mut [Session] {
        self.by_name
            .get_mut(request_id)
            .map_or(&mut [], Vec::as_mut_slice)
    }

    /// Returns the request whose lookup has this number.
    pub(crate) fn looking_up(&mut self, request_id: &str, number: u64) -> Option<&mut Session> {
        let mut named = self.named(request_id).iter_mut();
        named.find(|session| session.looks_up(number))
    }

    /// Returns the request that a connection looks up, made by `new` if there is none yet.
    pub(crate) fn begin(
        &mut self,
        client: ClientId,
        request_id: &str,
        new: impl FnOnce() -> Session,
    ) -> &mut Session {
        let known = self.by_name.get_key_value(request_id);
        let name = known.map(|(name, _)| Arc::clone(name)).unwrap_or_else(|| {
            let name: Arc<str> = request_id.into();
            self.visits.push_back(Arc::clone(&name));
            name
        });
        let named = self.by_name.entry(Arc::clone(&name)).or_default();
        let index = named.iter().position(|session| session.client == client);
        let index = index.unwrap_or_else(|| {
            self.len += 1;
            self.by_client.entry(client).or_default().insert(name);
            let session = new();
            if let Some(id) = &session.prefill {
                self.prefills.begin(id, session.began);
            }
            named.push(session);
            named.len() - 1
        });
        &mut named[index]
    }

    /// Removes the request of this name that a connection looked up.
    #[must_use = "it is ended where nothing is locked"]
    pub(crate) fn end(&mut self, client: ClientId, request_id: &str) -> Option<Session> {
        let named = self.by_name.get_mut(request_id)?;
        let index = named.iter().position(|session| session.client == client)?;
        let ended = named.swap_remove(index);
        self.len -= 1;
        if named.is_empty() {
            self.by_name.remove(request_id);
        }
        self.forget(client, request_id);
        self.ended.note(request_id, &ended);
        self.end_prefill(&ended);
        Some(ended)
    }

    /// Notes that a prefill counts as ended from now on.
    pub(crate) fn end_unbegun_prefill(&mut self, id: &Arc<str>, now: Instant) {
        self.prefills.begin(id, now);
        self.prefills.end(id, now);
    }

    fn end_prefill(&mut self, session: &Session) {
        if let Some(id) = &session.prefill {
            self.prefills.end(id, Instant::now());
        }
    }

    fn forget(&mut self, client: ClientId, request_id: &str) {
        if let Some(names) = self.by_client.get_mut(&client) {
            names.remove(request_id);
            if names.is_empty() {
                self.by_client.remove(&client);
            }
        }
    }

    /// Takes the names of a connection's requests, which [`Self::end`] then ends one by one.
    pub(crate) fn take_names(&mut self, client: ClientId) -> Vec<Arc<str>> {
        let names = self.by_client.remove(&client);
        names.into_iter().flatten().collect()
    }

    /// Returns the number of names that a sweep over all requests has to visit.
    pub(crate) fn to_visit(&self) -> usize {
        self.visits.len()
    }

    /// Visits the requests of the next `names` names. Returns those that `keep` refuses.
    #[must_use = "they are ended where nothing is locked"]
    pub(crate) fn sweep(
        &mut self,
        names: usize,
        mut keep: impl FnMut(&mut Session) -> bool,
    ) -> Vec<Session> {
        let mut ended = Vec::new();
        for _ in 0..names {
            let Some(name) = self.visits.pop_front() else {
                break;
            };
            let known = self.by_name.get_key_value(&name);
            // A name that was used again after its requests had ended is in the queue twice.
            if !known.is_some_and(|(known, _)| Arc::ptr_eq(known, &name)) {
                continue;
            }
            let Some(named) = self.by_name.get_mut(&name) else {
                continue;
            };
            let refused: Vec<Session> = named.extract_if(.., |session| !keep(session)).collect();
            match named.is_empty() {
                true => drop(self.by_name.remove(&name)),
                false => self.visits.push_back(Arc::clone(&name)),
            }
            self.len -= refused.len();
            for session in &refused {
                self.forget(session.client, &name);
                self.ended.note(&name, session);
                self.end_prefill(session);
            }
            ended.extend(refused);
        }
        ended
    }
}

impl Drop for Sessions {
    /// Drops waiters without an answer: the service is gone, and every connection with it.
    fn drop(&mut self) {
        let lookups = self
            .by_name
            .values_mut()
            .flatten()
            .filter_map(|session| session.lookup.as_mut());
        for waiter in lookups.flat_map(|lookup| &mut lookup.waiting) {
            waiter.tell = None;
        }
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_visits_each_request_once_and_no_name_stays_after_its_requests() {
        let mut sessions = Sessions::default();
        let now = Instant::now();
        let client = ClientId::new;
        for (owner, name) in [(1, "a"), (2, "a"), (1, "b"), (2, "c")] {
            sessions.begin(client(owner), name, || {
                Session::new(client(owner), now, ClearsId::NONE)
            });
        }
        // Used again: its first entry in the queue counts no more.
        assert!(sessions.end(client(2), "c").is_some());
        sessions.begin(client(2), "c", || {
            Session::new(client(2), now, ClearsId::NONE)
        });
        assert_eq!((sessions.len(), sessions.to_visit()), (4, 4));
        let mut visited = 0;
        for _ in 0..sessions.to_visit() {
            let ended = sessions.sweep(1, |_| {
                visited += 1;
                true
            });
            assert_eq!(ended.len(), 0);
        }
        assert_eq!((visited, sessions.to_visit()), (4, 3));
        let ended = sessions.sweep(9, |session| session.client == client(1));
        assert_eq!((ended.len(), sessions.len()), (2, 2));
        assert_eq!(
            (sessions.len_of(client(1)), sessions.len_of(client(2))),
            (2, 0)
        );
        let names = sessions.take_names(client(1));
        assert_eq!(names.len(), 2);
        for name in names {
            assert!(sessions.end(client(1), &name).is_some(), "{name}");
        }
        assert_eq!((sessions.len(), sessions.clients().count()), (0, 0));
        assert!(sessions.sweep(9, |_| true).is_empty());
        assert_eq!(sessions.to_visit(), 0);
    }
}
