//! The chunks that this daemon can lend, and which of them each directory does not know yet. No I/O and no
//! clock.

use std::collections::VecDeque;

use super::buckets::{Buckets, Fingerprint, SetDigest};
use super::message::{Announce, Announced, Fingerprints, MAX_ANNOUNCED};

/// Most changes that are kept for directories. A directory that has missed more changes is sent a new
/// generation.
const CHANGES: usize = 1 << 16;

/// The chunks that this daemon can lend, and the recent changes.
#[derive(Debug)]
pub(crate) struct Lendable {
    /// The chunks, each with the number of the last listing that contained it.
    chunks: Buckets,
    digest: SetDigest,
    changes: VecDeque<Fingerprint>,
    /// Number of changes so far.
    head: u64,
    listing: u16,
}

impl Lendable {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            chunks: Buckets::new(seed),
            digest: SetDigest::default(),
            changes: VecDeque::new(),
            head: 0,
            listing: 0,
        }
    }

    /// Returns the number of chunks.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Records that a chunk can be lent, or cannot.
    pub(crate) fn note(&mut self, fingerprint: Fingerprint, lendable: bool) {
        match lendable {
            true if self.chunks.set(fingerprint, self.listing).is_none() => {
                self.digest.add(fingerprint);
            }
            false if self.take(fingerprint) => self.digest.remove(fingerprint),
            _ => return,
        }
        self.changed(fingerprint);
    }

    fn take(&mut self, fingerprint: Fingerprint) -> bool {
        let tag = self.chunks.tags(fingerprint, 0).next();
        tag.is_some_and(|tag| self.chunks.remove(fingerprint, tag))
    }

    fn changed(&mut self, fingerprint: Fingerprint) {
        if self.changes.len() == CHANGES {
            self.changes.pop_front();
        }
        self.changes.push_back(fingerprint);
        self.head += 1;
    }

    fn has(&self, fingerprint: Fingerprint) -> bool {
        self.chunks.tags(fingerprint, 0).next().is_some()
    }

    /// Begins a listing: from now on every chunk that can be lent is recorded.
    pub(crate) fn begin_listing(&mut self) {
        self.listing = self.listing.wrapping_add(1);
    }

    /// Ends a listing: chunks that were not recorded since its beginning cannot be lent.
    pub(crate) fn end_listing(&mut self) {
        let listing = self.listing;
        for number in 0..self.chunks.buckets() {
            let all = self.chunks.entries(number);
            let gone: Vec<_> = all.filter(|(_, tag)| *tag != listing).collect();
            for (fingerprint, tag) in gone {
                self.chunks.remove(fingerprint, tag);
                self.digest.remove(fingerprint);
                self.changed(fingerprint);
            }
        }
    }

    /// Returns the next announcement to a directory. While the last announcement has no answer, returns it
    /// again.
    pub(crate) fn next(&self, progress: &mut Progress) -> Announce {
        if let Some((announce, _)) = &progress.pending {
            return announce.clone();
        }
        if progress.generation == 0
            || progress.at.position + (self.changes.len() as u64) < self.head
        {
            progress.begin(progress.generation, self.head);
        }
        let mut after = progress.at;
        let mut announce = Announce {
            generation: progress.generation,
            sequence: progress.sequence + 1,
            ..Announce::default()
        };
        if let Some(first) = after.bucket {
            let mut added: Vec<Fingerprint> = Vec::new();
            let mut bucket = first;
            while bucket < self.chunks.buckets() && added.len() < MAX_ANNOUNCED / 2 {
                let missing = MAX_ANNOUNCED - added.len();
                let entries = self.chunks.entries(bucket).take(missing);
                added.extend(entries.map(|(fingerprint, _)| fingerprint));
                bucket += 1;
            }
            announce.added = added.into_iter().collect();
            after.bucket = (bucket < self.chunks.buckets()).then_some(bucket);
        } else {
            let seen = self.changes.len() as u64 - (self.head - after.position);
            let changes = self.changes.range(seen as usize..).take(MAX_ANNOUNCED);
            let mut changes: Vec<Fingerprint> = changes.copied().collect();
            after.position += changes.len() as u64;
            changes.sort_unstable();
            changes.dedup();
            // The current state counts: a change that follows has the same state.
            let (added, removed) = changes.into_iter().partition(|one| self.has(*one));
            let fingerprints =
                |list: Vec<Fingerprint>| -> Fingerprints { list.into_iter().collect() };
            (announce.added, announce.removed) = (fingerprints(added), fingerprints(removed));
        }
        let all = after.bucket.is_none() && after.position == self.head && !progress.partly;
        announce.digest = all.then_some(self.digest);
        progress.pending = Some((announce.clone(), after));
        announce
    }

    /// Returns true if a directory lacks more changes than fit into the next announcement.
    pub(crate) fn is_ahead_of(&self, progress: &Progress) -> bool {
        progress.at.bucket.is_some() || self.head - progress.at.position > MAX_ANNOUNCED as u64
    }

    /// Returns true if a directory lacks any change.
    pub(crate) fn has_news(&self, progress: &Progress) -> bool {
        progress.pending.is_some()
            || progress.at.bucket.is_some()
            || progress.at.position != self.head
    }
}

/// Position of a directory: first the remaining buckets of a new generation, then changes.
#[derive(Debug, Clone, Copy)]
struct At {
    /// Next bucket to announce; `None` once all chunks were announced.
    bucket: Option<usize>,
    /// Number of changes that the directory knows.
    position: u64,
}

/// State of the announcements to one directory.
#[derive(Debug)]
pub(crate) struct Progress {
    generation: u64,
    sequence: u64,
    at: At,
    /// The announcement that is in progress, and the position after it.
    pending: Option<(Announce, At)>,
    /// True if the directory did not keep everything.
    partly: bool,
}

impl Progress {
    /// Returns the state for a directory that knows nothing.
    pub(crate) fn nothing() -> Self {
        Self {
            generation: 0,
            sequence: 0,
            at: At {
                bucket: Some(0),
                position: 0,
            },
            pending: None,
            partly: false,
        }
    }

    /// Begins a generation that is newer than all known ones: everything is announced again.
    fn begin(&mut self, known: u64, head: u64) {
        *self = Self {
            generation: self.generation.max(known) + 1,
            at: At {
                bucket: Some(0),
                position: head,
            },
            ..Self::nothing()
        };
    }

    /// Announces everything again, starting with the next announcement.
    pub(crate) fn begin_again(&mut self, lendable: &Lendable) {
        self.begin(self.generation, lendable.head);
    }

    /// Applies the answer to the announcement in progress.
    pub(crate) fn answered(&mut self, answer: Announced, lendable: &Lendable) {
        match answer {
            Announced::Applied | Announced::Full { .. } => {
                self.partly |= answer != Announced::Applied;
                if let Some((_, after)) = self.pending.take() {
                    self.sequence += 1;
                    self.at = after;
                }
            }
            Announced::Restart { known } => self.begin(known, lendable.head),
            Announced::Busy => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Instant;

    use lmc_backend::conformance::Rng;

    use super::super::table::{Table, TableLimits};
    use lmc_testkit::rounds;

    use super::*;
    use crate::link::Session;

    fn one(n: u64) -> Fingerprint {
        let [a, b, c, d, e, f, ..] = n.to_le_bytes();
        Fingerprint::from_bytes([a, b, c, d, e, f])
    }

    /// Chunks come and go while announcements and answers are lost, doubled and late, while the
    /// directory starts again and a member falls behind: in the end it knows what is there.
    #[test]
    fn a_directory_learns_all_whatever_is_lost() {
        let now = Instant::now();
        let session = Session {
            peer: "a".parse().expect("a name"),
            incarnation: 1,
        };
        let new_table = || {
            let mut table = Table::new(TableLimits::default(), 3);
            assert!(table.join(&session, "a", now));
            table
        };
        for seed in 0..rounds(2, 10) as u64 {
            let mut rng = Rng::new(seed);
            let (mut lendable, mut progress, mut table) =
                (Lendable::new(5), Progress::nothing(), new_table());
            let mut truth: BTreeSet<u64> = BTreeSet::new();
            let mut late: Vec<Announce> = Vec::new();
            let mut bound = 0;
            for round in 0..400u64 {
                let calm = round >= 300;
                if !calm && rng.below(40) == 0 {
                    // More than is kept.
                    for n in 0..CHANGES as u64 {
                        lendable.note(one(n % 7), n < 7);
                        truth.extend((n < 7).then_some(n));
                        if n >= 7 {
                            truth.remove(&(n % 7));
                        }
                    }
                }
                for _ in 0..if calm { 0 } else { rng.below(300) } {
                    let n = rng.below(5000);
                    let there = rng.below(3) > 0;
                    lendable.note(one(n), there);
                    match there {
                        true => truth.insert(n),
                        false => truth.remove(&n),
                    };
                }
                if !calm && rng.below(30) == 0 {
                    // Events were lost: a listing finds out.
                    lendable.begin_listing();
                    truth.retain(|n| n % 11 != round % 11);
                    truth.iter().for_each(|&n| lendable.note(one(n), true));
                    lendable.end_listing();
                }
                if !calm && rng.below(50) == 0 {
                    table = new_table();
                }
                table.sweep(50);
                let announce = lendable.next(&mut progress);
                bound = bound.max(announce.added.len() + announce.removed.len());
                if rng.below(4) == 0 {
                    late.push(announce.clone());
                }
                if calm || rng.below(4) > 0 {
                    let answer = table.announce(&session, &announce, now).expect("a member");
                    if calm || rng.below(4) > 0 {
                        progress.answered(answer, &lendable);
                    }
                }
                if !calm && rng.below(3) == 0 && !late.is_empty() {
                    let at = rng.below(late.len() as u64) as usize;
                    table.announce(&session, &late.swap_remove(at), now);
                }
            }
            assert!(!lendable.has_news(&progress), "seed {seed}");
            let expected = truth.iter().map(|&n| one(n)).collect();
            assert_eq!(table.entries_of(&session), expected, "seed {seed}");
            assert_eq!(lendable.len(), truth.len());
            assert!(bound > 1000 && bound <= MAX_ANNOUNCED);
        }
    }

    #[test]
    fn a_full_directory_learns_of_what_goes_and_later_of_all() {
        let now = Instant::now();
        let session = Session {
            peer: "a".parse().expect("a name"),
            incarnation: 1,
        };
        let mut limits = TableLimits::for_entries(400);
        limits.member_entries = 100;
        let mut table = Table::new(limits, 3);
        assert!(table.join(&session, "a", now));
        let (mut lendable, mut progress) = (Lendable::new(5), Progress::nothing());
        (0..150).for_each(|n| lendable.note(one(n), true));
        let mut announce = |lendable: &Lendable, progress: &mut Progress| {
            let mut answers = Vec::new();
            while progress.generation == 0 || lendable.has_news(progress) {
                let answer = table.announce(&session, &lendable.next(progress), now);
                progress.answered(answer.expect("a member"), lendable);
                answers.push(answer.expect("a member"));
            }
            (answers, table.len())
        };
        let full = Announced::Full { limit: 100 };
        assert_eq!(announce(&lendable, &mut progress), (vec![full], 100));
        (0..140).for_each(|n| lendable.note(one(n), false));
        let (answers, left) = announce(&lendable, &mut progress);
        assert_eq!(answers, [Announced::Applied]);
        assert!(left <= 10, "{left}");
        progress.begin_again(&lendable);
        let (answers, _) = announce(&lendable, &mut progress);
        assert_eq!(answers, [Announced::Applied]);
        assert_eq!(table.entries_of(&session), (140..150).map(one).collect());
    }
}
