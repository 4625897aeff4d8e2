//! The table of a directory: which members have which chunks, and which members are alive. No I/O and no
//! clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::buckets::{Buckets, Fingerprint, SetDigest};
use super::message::{Announce, Announced, Candidate};
use super::runs::Runs;
use crate::link::Session;

/// Number of a prompt's keys whose buckets are loaded into the cache together.
const TOUCHED: usize = 16;

/// Limits of a [`Table`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableLimits {
    /// Most entries of all members together. Default: 64 Mi, which take about 0.7 GiB.
    pub entries: usize,
    /// Most entries of one member. Default: a quarter of all.
    pub member_entries: usize,
    /// Most members. Default: 8192.
    pub members: usize,
    /// Time after which a silent member counts as dead. Default: 15 s.
    pub silence: Duration,
}

impl TableLimits {
    /// Returns the defaults for a table of `entries` entries.
    pub fn for_entries(entries: usize) -> Self {
        Self {
            entries,
            member_entries: (entries / 4).max(1),
            members: 8192,
            silence: Duration::from_secs(15),
        }
    }
}

impl Default for TableLimits {
    fn default() -> Self {
        Self::for_entries(64 << 20)
    }
}

/// A member, and the progress of its announcements.
#[derive(Debug)]
struct Member {
    session: Session,
    address: String,
    heard: Instant,
    generation: u64,
    sequence: u64,
    /// Answer to the last announcement.
    answer: Announced,
    digest: SetDigest,
    /// Number of former numbers of the member that are still being swept.
    retired: usize,
}

/// State of one number, by which entries refer to their member.
#[derive(Debug)]
enum Number {
    Free,
    /// The number is in use. `answered` is false while the member is silent or not connected.
    Taken {
        member: Box<Member>,
        answered: bool,
    },
    /// The number is not in use; its entries are swept until the end of this lap.
    Retired {
        lap: u64,
        of: Option<Session>,
    },
}

/// Table of the chunks that members have.
///
/// An entry has 8 bytes: a fingerprint and the number of its member. When a member is gone, or begins a new
/// generation, its number is retired: entries with that number are not returned any more, and are swept in
/// small steps.
#[derive(Debug)]
pub struct Table {
    limits: TableLimits,
    entries: Buckets,
    numbers: Vec<Number>,
    by_session: HashMap<Session, u16>,
    /// Next bucket to sweep, and the number of laps so far.
    sweep: (usize, u64),
    retired: usize,
}

impl Table {
    /// Makes a table without members. `seed` is a random number of this process.
    pub fn new(limits: TableLimits, seed: u64) -> Self {
        Self {
            limits,
            entries: Buckets::new(seed),
            numbers: Vec::new(),
            by_session: HashMap::new(),
            sweep: (0, 0),
            retired: 0,
        }
    }

    /// Returns the number of entries, including those that are still to be swept.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.len() == 0
    }

    /// Returns the number of members.
    pub fn members(&self) -> usize {
        self.by_session.len()
    }

    /// Returns the number of buckets that [`Self::sweep`] visits in one lap.
    pub fn buckets(&self) -> usize {
        self.entries.buckets()
    }

    /// Returns the bytes that are allocated for entries and members.
    pub fn allocated(&self) -> usize {
        // A map has a slot for each member, and as much again while it grows.
        let by_session = self.by_session.capacity() * 2 * size_of::<(Session, u16)>();
        let members = self.members() * (size_of::<Member>() + 128);
        self.entries.allocated()
            + self.numbers.capacity() * size_of::<Number>()
            + by_session
            + members
    }

    /// Adds a member, or updates its address. Returns false if there are too many members.
    pub fn join(&mut self, session: &Session, address: &str, now: Instant) -> bool {
        if let Some(member) = self.heard(session, now) {
            address.clone_into(&mut member.address);
            return true;
        }
        if self.members() >= self.limits.members {
            return false;
        }
        let member = Member {
            session: session.clone(),
            address: address.to_owned(),
            heard: now,
            generation: 0,
            sequence: 0,
            answer: Announced::Applied,
            digest: SetDigest::default(),
            retired: 0,
        };
        self.take_number(Box::new(member)).is_some()
    }

    fn take_number(&mut self, member: Box<Member>) -> Option<u16> {
        let free = |number: &Number| matches!(number, Number::Free);
        let free = self.numbers.iter().position(free);
        let number = free.unwrap_or(self.numbers.len());
        let name = u16::try_from(number).ok()?;
        self.by_session.insert(member.session.clone(), name);
        let taken = Number::Taken {
            member,
            answered: true,
        };
        match self.numbers.get_mut(number) {
            Some(free) => *free = taken,
            None => self.numbers.push(taken),
        }
        Some(name)
    }

    /// Marks a member as alive, and returns it.
    fn heard(&mut self, session: &Session, now: Instant) -> Option<&mut Member> {
        let number = *self.by_session.get(session)?;
        let Number::Taken { member, answered } = &mut self.numbers[usize::from(number)] else {
            return None;
        };
        member.heard = now;
        *answered = true;
        Some(member)
    }

    /// Applies an announcement. Returns `None` if the sender is not a member.
    pub fn announce(
        &mut self,
        session: &Session,
        announce: &Announce,
        now: Instant,
    ) -> Option<Announced> {
        let member = self.heard(session, now)?;
        let known = member.generation;
        if announce.generation < known {
            return Some(Announced::Restart { known });
        }
        if announce.generation > known {
            if announce.sequence != 1 {
                return Some(Announced::Restart { known });
            }
            if member.digest.count > 0 && (member.retired > 0 || !self.renumber(session)) {
                return Some(Announced::Busy);
            }
        }
        let number = *self.by_session.get(session)?;
        let Number::Taken { member, .. } = &mut self.numbers[usize::from(number)] else {
            return None;
        };
        if announce.generation > member.generation {
            (member.generation, member.sequence) = (announce.generation, 0);
        }
        if announce.sequence == member.sequence {
            return Some(member.answer);
        }
        if announce.sequence != member.sequence + 1 {
            return Some(Announced::Restart { known });
        }
        member.sequence += 1;
        let mut full = None;
        for fingerprint in announce.removed.iter() {
            if self.entries.remove(fingerprint, number) {
                member.digest.remove(fingerprint);
            }
        }
        for fingerprint in announce.added.iter() {
            let limit = match () {
                () if member.digest.count >= self.limits.member_entries as u64 => {
                    self.limits.member_entries
                }
                () if self.entries.len() >= self.limits.entries => self.limits.entries,
                () => {
                    if self.entries.insert(fingerprint, number) {
                        member.digest.add(fingerprint);
                    }
                    continue;
                }
            };
            full = Some(limit as u64);
        }
        member.answer = match full {
            Some(limit) => Announced::Full { limit },
            None if announce.digest.is_some_and(|all| all != member.digest) => Announced::Restart {
                known: member.generation,
            },
            None => Announced::Applied,
        };
        Some(member.answer)
    }

    /// Gives a member another number, so that its previous announcements are swept.
    fn renumber(&mut self, session: &Session) -> bool {
        let numbers = usize::from(u16::MAX);
        if self.numbers.len() >= numbers && !self.numbers.iter().any(|n| matches!(n, Number::Free))
        {
            return false;
        }
        let Some(mut member) = self.retire(session, true) else {
            return false;
        };
        member.digest = SetDigest::default();
        member.retired += 1;
        self.take_number(member).is_some()
    }

    /// Removes a member; its announcements are swept.
    fn retire(&mut self, session: &Session, stays: bool) -> Option<Box<Member>> {
        let number = self.by_session.remove(session)?;
        let retired = Number::Retired {
            // The next lap begins at the first bucket.
            lap: self.sweep.1 + 2,
            of: stays.then(|| session.clone()),
        };
        let number = &mut self.numbers[usize::from(number)];
        let Number::Taken { member, .. } = std::mem::replace(number, retired) else {
            return None;
        };
        match member.digest.count {
            0 => *number = Number::Free,
            _ => self.retired += 1,
        }
        Some(member)
    }

    /// Records that a member is not connected: it is not named until it sends something.
    pub fn disconnected(&mut self, session: &Session) {
        let number = self.by_session.get(session).copied();
        if let Some(number) = number
            && let Number::Taken { answered, .. } = &mut self.numbers[usize::from(number)]
        {
            *answered = false;
        }
    }

    /// Removes members that have been silent for too long.
    pub fn expire(&mut self, now: Instant) {
        let silence = self.limits.silence;
        let silent = |number: &Number| match number {
            Number::Taken { member, .. } if now >= member.heard + silence => {
                Some(member.session.clone())
            }
            _ => None,
        };
        let silent: Vec<Session> = self.numbers.iter().filter_map(silent).collect();
        for session in silent {
            self.retire(&session, false);
        }
    }

    /// Removes entries of retired numbers from some buckets.
    pub fn sweep(&mut self, buckets: usize) {
        for _ in 0..buckets {
            if self.retired == 0 {
                break;
            }
            let numbers = &self.numbers;
            let stays = |_, number| !matches!(numbers[usize::from(number)], Number::Retired { .. });
            self.entries.retain(self.sweep.0, stays);
            self.sweep.0 += 1;
            if self.sweep.0 >= self.entries.buckets() {
                self.sweep = (0, self.sweep.1 + 1);
                self.free_numbers();
            }
        }
        // A merge moves entries towards the first bucket, which this lap has already swept.
        if self.sweep.0 == 0 {
            self.entries.shrink();
        }
    }

    /// Frees the numbers whose last entry was swept.
    fn free_numbers(&mut self) {
        for number in 0..self.numbers.len() {
            let Number::Retired { lap, of } = &self.numbers[number] else {
                continue;
            };
            if *lap > self.sweep.1 {
                continue;
            }
            let of = of.as_ref().and_then(|of| self.by_session.get(of)).copied();
            self.numbers[number] = Number::Free;
            self.retired -= 1;
            if let Some(of) = of
                && let Number::Taken { member, .. } = &mut self.numbers[usize::from(of)]
            {
                member.retired -= 1;
            }
        }
    }

    /// Returns the members that have leading chunks of a prompt, without the asking member. First comes a
    /// member with the longest prefix, then a member that has the chunks after it, and so on, then further
    /// members with a prefix. Of equal members, different askers get different ones.
    pub fn find(
        &self,
        keys: impl Iterator<Item = Fingerprint>,
        asker: &Session,
        turn: u64,
    ) -> Vec<Candidate> {
        let own = self.by_session.get(asker).copied();
        let mut runs = Runs::new(self.numbers.len());
        let keys: Vec<Fingerprint> = keys.collect();
        for (at, &key) in keys.iter().enumerate() {
            // Not before the first chunk is found: no member has most of the prompts that are looked up.
            if at % TOUCHED == 1 {
                let end = keys.len().min(at + TOUCHED);
                self.entries.touch(&keys[at..end]);
            }
            let may_begin = |number| Some(number) != own && self.answering(number).is_some();
            if !runs.note(at, self.entries.tags(key, turn), may_begin) {
                break;
            }
        }
        let candidate = |number| {
            let member = self.answering(number)?;
            Some(Candidate {
                peer: member.session.peer.to_string(),
                address: member.address.clone(),
            })
        };
        runs.best().into_iter().filter_map(candidate).collect()
    }

    /// Returns the member with a number, if it may be named to others.
    fn answering(&self, number: u16) -> Option<&Member> {
        match self.numbers.get(usize::from(number))? {
            Number::Taken {
                member,
                answered: true,
            } => Some(member),
            _ => None,
        }
    }

    #[cfg(test)]
    pub(crate) fn entries_of(&self, session: &Session) -> std::collections::BTreeSet<Fingerprint> {
        let number = self.by_session.get(session).copied();
        let all = (0..self.entries.buckets()).flat_map(|bucket| self.entries.entries(bucket));
        let its = all.filter(|(_, tag)| Some(*tag) == number);
        its.map(|(fingerprint, _)| fingerprint).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use lmc_backend::conformance::Rng;
    use lmc_key::{ChunkHash, ChunkKey, SpaceId};

    use super::super::message::MAX_CANDIDATES;
    use super::*;

    fn session(name: u64) -> Session {
        Session {
            peer: format!("member-{name}").parse().expect("a name"),
            incarnation: name,
        }
    }

    fn one(n: u64) -> Fingerprint {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&n.to_le_bytes());
        Fingerprint::of(&ChunkKey {
            space: SpaceId::new([0; 16]),
            kv_rank: 0,
            group: 0,
            hash: ChunkHash::new(hash),
        })
    }

    fn all(range: std::ops::Range<u64>) -> super::super::message::Fingerprints {
        range.map(one).collect()
    }

    fn announce(generation: u64, sequence: u64, added: std::ops::Range<u64>) -> Announce {
        Announce {
            generation,
            sequence,
            added: all(added),
            ..Announce::default()
        }
    }

    fn named(table: &Table, keys: std::ops::Range<u64>, asker: u64) -> Vec<String> {
        let found = table.find(keys.map(one), &session(asker), asker);
        found
            .into_iter()
            .map(|candidate| candidate.address)
            .collect()
    }

    /// Returns a table whose members listen at `a0`, `a1` and so on.
    fn table(limits: TableLimits, members: u64, now: Instant) -> Table {
        let mut table = Table::new(limits, 7);
        for member in 0..members {
            assert!(table.join(&session(member), &format!("a{member}"), now));
        }
        table
    }

    #[test]
    fn announcements_are_applied_once_and_in_order() {
        let now = Instant::now();
        let mut table = table(TableLimits::default(), 1, now);
        let member = session(0);
        let mut send = |announce: &Announce| table.announce(&member, announce, now);
        let restart = |known| Some(Announced::Restart { known });
        assert_eq!(send(&announce(1, 2, 0..3)), restart(0));
        assert_eq!(send(&announce(1, 1, 0..3)), Some(Announced::Applied));
        let mut second = announce(1, 2, 3..5);
        second.removed = all(0..1);
        assert_eq!(send(&second), Some(Announced::Applied));
        // Doubled, late, and after one that is lost.
        assert_eq!(send(&second), Some(Announced::Applied));
        assert_eq!(send(&announce(1, 1, 0..3)), restart(1));
        assert_eq!(send(&announce(1, 4, 9..10)), restart(1));
        let mut digest = SetDigest::default();
        (1..5).for_each(|n| digest.add(one(n)));
        let with_digest = |digest| Announce {
            digest: Some(digest),
            ..announce(1, 3, 0..0)
        };
        assert_eq!(send(&with_digest(digest)), Some(Announced::Applied));
        digest.remove(one(4));
        let wrong = Announce {
            sequence: 4,
            ..with_digest(digest)
        };
        assert_eq!(send(&wrong), restart(1));
        assert_eq!(table.entries_of(&member), (1..5).map(one).collect());
        assert_eq!(
            table.announce(&session(9), &announce(1, 1, 0..3), now),
            None
        );
    }

    #[test]
    fn a_new_generation_forgets_the_one_before_at_once_and_sweeps_it_later() {
        let now = Instant::now();
        let mut table = table(TableLimits::default(), 2, now);
        for member in 0..2 {
            let first = announce(1, 1, 0..1000);
            table.announce(&session(member), &first, now);
        }
        let second = announce(2, 1, 1000..1003);
        let said = table.announce(&session(0), &second, now);
        assert_eq!(said, Some(Announced::Applied));
        assert_eq!(named(&table, 0..5, 9), ["a1"]);
        assert_eq!(named(&table, 1000..1005, 9), ["a0"]);
        assert_eq!(table.len(), 2003);
        // One generation of a member is swept at a time.
        let third = announce(3, 1, 0..0);
        assert_eq!(
            table.announce(&session(0), &third, now),
            Some(Announced::Busy)
        );
        while table.len() > 1003 {
            table.sweep(1);
        }
        table.sweep(1000);
        assert_eq!(
            table.announce(&session(0), &third, now),
            Some(Announced::Applied)
        );
        table.sweep(1000);
        assert_eq!(table.len(), 1000);
        assert_eq!(table.retired, 0, "every number is free again");
    }

    #[test]
    fn members_that_are_gone_or_silent_are_not_named_and_swept_in_time() {
        let begun = Instant::now();
        let mut table = table(TableLimits::default(), 3, begun);
        for member in 0..3 {
            table.announce(&session(member), &announce(1, 1, 0..100), begun);
        }
        table.disconnected(&session(0));
        assert_eq!(
            BTreeSet::from_iter(named(&table, 0..9, 9)),
            BTreeSet::from(["a1".into(), "a2".into()])
        );
        // It was cut off for a while, and announces on.
        let later = begun + Duration::from_secs(14);
        let alive = announce(1, 2, 0..0);
        assert_eq!(
            table.announce(&session(0), &alive, later),
            Some(Announced::Applied)
        );
        table.expire(begun + Duration::from_secs(15));
        assert_eq!(named(&table, 0..9, 9), ["a0"]);
        assert_eq!((table.members(), table.len()), (1, 300));
        while table.len() > 100 {
            table.sweep(1);
        }
        // The dead one comes back as another.
        assert_eq!(
            table.announce(&session(1), &announce(1, 2, 0..0), later),
            None
        );
        assert!(table.join(&session(1), "a1", later));
        assert_eq!(named(&table, 0..9, 0), Vec::<String>::new());
    }

    #[test]
    fn the_longest_prefix_is_named_first_however_many_have_its_begin() {
        let now = Instant::now();
        let mut table = table(TableLimits::default(), 300, now);
        for member in 0..300 {
            table.announce(&session(member), &announce(1, 1, 0..10), now);
        }
        table.announce(&session(7), &announce(1, 2, 10..20), now);
        table.announce(&session(8), &announce(1, 2, 18..30), now);
        for asker in 900..950 {
            let found = named(&table, 0..30, asker);
            assert_eq!(found.len(), MAX_CANDIDATES);
            assert!(
                found.contains(&"a7".into()) && found.contains(&"a8".into()),
                "{found:?}"
            );
        }
        // Those who ask are sent to different members.
        let firsts = (900..950).map(|asker| named(&table, 0..10, asker)[0].clone());
        assert!(firsts.collect::<BTreeSet<_>>().len() > 10);
        // One who has it all but for what it asks for is not sent to itself.
        assert!(!named(&table, 10..20, 7).contains(&"a7".into()));
        assert_eq!(named(&table, 5000..5010, 7), Vec::<String>::new());
    }

    #[test]
    fn above_a_limit_chunks_are_refused_and_removals_are_not() {
        let now = Instant::now();
        let mut limits = TableLimits::for_entries(1000);
        (limits.member_entries, limits.members) = (300, 4);
        let mut table = table(limits, 4, now);
        assert!(!table.join(&session(4), "a4", now), "too many members");
        let full = |limit| Some(Announced::Full { limit });
        for member in 0..3 {
            let said = table.announce(&session(member), &announce(1, 1, 0..400), now);
            assert_eq!(said, full(300), "no member takes more than its share");
        }
        let said = table.announce(&session(3), &announce(1, 1, 0..200), now);
        assert_eq!((said, table.len()), (full(1000), 1000));
        let mut swap = announce(1, 2, 1000..1001);
        swap.removed = all(0..1);
        let said = table.announce(&session(0), &swap, now);
        assert_eq!((said, table.len()), (Some(Announced::Applied), 1000));
    }

    /// A hostile member begins a generation with every message.
    #[test]
    fn a_member_that_begins_again_and_again_takes_no_more_than_two_numbers() {
        let now = Instant::now();
        let mut table = table(TableLimits::default(), 2, now);
        let mut rng = Rng::new(1);
        for generation in 1..2000 {
            let any = announce(generation, 1 + rng.below(2), rng.below(100)..100);
            table.announce(&session(0), &any, now);
            table.sweep(rng.below(2) as usize);
            assert!(table.numbers.len() <= 3, "{} numbers", table.numbers.len());
        }
    }

    #[test]
    fn any_order_of_messages_leaves_what_was_applied() {
        let begun = Instant::now();
        let mut now = begun;
        let mut rng = Rng::new(11);
        let mut table = table(TableLimits::default(), 0, now);
        type State = (u64, u64, BTreeSet<u64>);
        let mut model: BTreeMap<u64, State> = BTreeMap::new();
        for _ in 0..5_000 {
            let member = rng.below(6);
            match rng.below(12) {
                0 => {
                    assert!(table.join(&session(member), &format!("a{member}"), now));
                    model.entry(member).or_default();
                }
                1 => {
                    now += Duration::from_millis(rng.below(3000));
                    let before = table.members();
                    table.expire(now);
                    model.retain(|member, _| table.by_session.contains_key(&session(*member)));
                    assert!(table.members() <= before);
                }
                2..4 => table.sweep(rng.below(4) as usize),
                _ => {
                    let known = model.get(&member).cloned().unwrap_or_default();
                    let generation = known.0 + u64::from(rng.below(30) == 0);
                    let next = if generation > known.0 { 1 } else { known.1 + 1 };
                    let sequence = if rng.below(10) == 0 {
                        rng.below(5)
                    } else {
                        next
                    };
                    let from = rng.below(200);
                    let mut any = announce(generation, sequence, from..from + rng.below(20));
                    any.removed = all(rng.below(200)..rng.below(200));
                    let said = table.announce(&session(member), &any, now);
                    assert_eq!(said.is_some(), model.contains_key(&member));
                    let Some(state) = model.get_mut(&member) else {
                        continue;
                    };
                    if said == Some(Announced::Applied) && sequence == next {
                        if generation > state.0 {
                            state.2.clear();
                        }
                        (state.0, state.1) = (generation, sequence);
                        let fingerprints = |of: &super::super::message::Fingerprints| {
                            of.iter().collect::<BTreeSet<_>>()
                        };
                        let (added, removed) =
                            (fingerprints(&any.added), fingerprints(&any.removed));
                        state.2.retain(|n| !removed.contains(&one(*n)));
                        state
                            .2
                            .extend((0..300).filter(|n| added.contains(&one(*n))));
                    }
                    let expected = state.2.iter().map(|n| one(*n)).collect();
                    assert_eq!(table.entries_of(&session(member)), expected);
                }
            }
        }
    }
}
