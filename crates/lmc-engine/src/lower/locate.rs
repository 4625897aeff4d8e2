//! Finding out which tier has the chunks of a prompt.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use lmc_backend::{BackendError, Cursor, LocateHint, Located, Location};
use lmc_key::ChunkKey;

use super::{Tiers, count};

/// Time between two questions about chunks that are being written, at first and at most.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// The tier that a chunk is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// DRAM.
    Dram,
    /// A lower tier.
    Tier {
        /// Index of the tier.
        index: usize,
        /// Payload bytes of the chunk.
        len: u64,
        /// Estimated time to load the chunk.
        cost: Duration,
    },
}

impl Source {
    /// Returns the bytes that a promotion would read.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Dram => 0,
            Self::Tier { len, .. } => *len,
        }
    }

    fn cost(&self) -> Duration {
        match self {
            Self::Dram => Duration::ZERO,
            Self::Tier { cost, .. } => *cost,
        }
    }
}

/// Sources of the leading keys of a prompt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    /// Source of each key, as far as they are found.
    pub(crate) found: Vec<Source>,
    /// False if a tier that has to be asked may have the next key.
    pub(crate) is_final: bool,
}

impl Sources {
    /// Returns the bytes that a promotion would read.
    pub(crate) fn bytes(&self) -> u64 {
        self.found.iter().map(Source::bytes).sum()
    }
}

/// The answer of the asked tiers about one key.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Found(Source),
    Pending,
    Absent,
}

impl Tiers {
    /// Returns the leading keys that are not being removed.
    fn not_removing<'a>(&self, keys: &'a [ChunkKey]) -> &'a [ChunkKey] {
        let removing = self.removing.lock();
        if removing.is_empty() {
            return keys;
        }
        let removed = |key: &ChunkKey| removing.iter().any(|set| set.contains(key));
        let first = keys.iter().position(removed);
        &keys[..first.unwrap_or(keys.len())]
    }

    /// Returns true if there is a tier that has to be asked.
    fn has_to_ask(&self) -> bool {
        self.tiers.iter().any(|tier| tier.backend.index().is_none())
    }

    /// Finds the sources of the leading keys in DRAM and in the tiers whose index is in this
    /// process, as far as the chunks have this length.
    pub(crate) fn locate_now(&self, keys: &[ChunkKey], chunk_bytes: Option<u64>) -> Sources {
        let known = self.not_removing(keys);
        let is_final = known.len() < keys.len() || !self.has_to_ask();
        // Most prompts that DRAM does not know are known to no tier.
        let found = match known {
            [] => Vec::new(),
            [first, _, ..] if self.each_now(&[*first], chunk_bytes) == [None] => Vec::new(),
            _ => self
                .each_now(known, chunk_bytes)
                .into_iter()
                .map_while(|one| one)
                .collect(),
        };
        let is_final = is_final || found.len() == keys.len();
        Sources { found, is_final }
    }

    /// Finds the source of each key in DRAM and in the tiers whose index is in this process, up to
    /// the first key that is being removed, as far as the chunks have this length.
    pub(crate) fn sources_now(
        &self,
        keys: &[ChunkKey],
        chunk_bytes: Option<u64>,
    ) -> Vec<Option<Source>> {
        self.each_now(self.not_removing(keys), chunk_bytes)
    }

    /// Returns the number of tiers.
    pub(crate) fn len(&self) -> usize {
        self.tiers.len()
    }

    /// Lists some chunks of a tier whose index is in this process; none of any other.
    pub(crate) async fn list_now(
        &self,
        tier: usize,
        from: u128,
        limit: usize,
    ) -> (Vec<ChunkKey>, Option<u128>) {
        let tier = self.tiers.get(tier);
        let Some(tier) = tier.filter(|tier| tier.backend.index().is_some()) else {
            return (Vec::new(), None);
        };
        let deadline = Instant::now() + tier.policy.locate_timeout;
        // A tier that cannot list its chunks now is asked with the next listing.
        let page = tier
            .backend
            .list(Cursor::from_raw(from), limit, deadline)
            .await;
        let page = page.unwrap_or_default();
        let keys = page.items.iter().map(|item| item.key).collect();
        (keys, page.next.map(Cursor::raw))
    }

    fn each_now(&self, keys: &[ChunkKey], chunk_bytes: Option<u64>) -> Vec<Option<Source>> {
        let local = self.local.contains(keys).into_iter();
        // One in DRAM is read from no tier, whatever its length.
        let in_dram = |len: u64| fits(len, chunk_bytes).then_some(Source::Dram);
        let mut found: Vec<Option<Option<Source>>> = local.map(|len| len.map(in_dram)).collect();
        for (index, tier) in self.tiers.iter().enumerate() {
            let Some(tier_index) = tier.backend.index() else {
                continue;
            };
            let located = tier_index.locate_now(keys);
            for (found, located) in found.iter_mut().zip(located) {
                if found.is_some() {
                    continue;
                }
                if let Ok(Located::Present(location)) = located {
                    *found = self.source(index, location, chunk_bytes).map(Some);
                }
            }
        }
        found.into_iter().map(Option::flatten).collect()
    }

    /// Returns the source of a chunk that a tier has, unless it is of another length than it has to
    /// be.
    fn source(&self, index: usize, location: Location, chunk_bytes: Option<u64>) -> Option<Source> {
        if !fits(location.len, chunk_bytes) {
            count(&self.tiers[index].counters.promote_missed, 1);
            return None;
        }
        Some(Source::Tier {
            index,
            len: location.len,
            cost: location.cost,
        })
    }

    /// Finds the sources of the leading keys in all tiers, `known` of which are known. Asks first
    /// about the first key that no index in this process has: if no tier has it, the rest is not
    /// asked for.
    pub(crate) async fn locate(
        &self,
        keys: &[ChunkKey],
        known: Sources,
        hint: &LocateHint,
    ) -> Vec<Source> {
        let mut found = known.found;
        if known.is_final || found.len() >= keys.len() {
            return found;
        }
        let pending_until = Instant::now() + self.limits.pending_timeout;
        let rest = &keys[found.len()..];
        let first = self.ask_until_known(&rest[..1], hint, pending_until).await;
        let [Some(first)] = first[..] else {
            return found;
        };
        found.push(first);
        let rest = &rest[1..];
        let mut sources = self.sources_now(rest, hint.chunk_bytes);
        let asked: Vec<usize> = (0..sources.len())
            .filter(|&n| sources[n].is_none())
            .collect();
        let asked_keys: Vec<ChunkKey> = asked.iter().map(|&n| rest[n]).collect();
        let answers = self.ask_until_known(&asked_keys, hint, pending_until).await;
        for (n, answer) in asked.into_iter().zip(answers) {
            sources[n] = answer;
        }
        found.extend(sources.into_iter().map_while(|source| source));
        found
    }

    /// Asks the tiers about keys. Waits for chunks that an engine is writing to one of them.
    async fn ask_until_known(
        &self,
        keys: &[ChunkKey],
        hint: &LocateHint,
        pending_until: Instant,
    ) -> Vec<Option<Source>> {
        let mut answers: Vec<Answer> = self.ask(keys, hint).await;
        let mut pause = ASK_AGAIN.0;
        loop {
            // A chunk after one that is absent is of no use.
            let end = answers.iter().position(|one| matches!(one, Answer::Absent));
            answers.truncate(end.unwrap_or(keys.len()));
            let is_pending = |&n: &usize| matches!(answers[n], Answer::Pending);
            let pending: Vec<usize> = (0..answers.len()).filter(is_pending).collect();
            if pending.is_empty() || Instant::now() >= pending_until {
                break;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(ASK_AGAIN.1);
            let asked: Vec<ChunkKey> = pending.iter().map(|&n| keys[n]).collect();
            // Meanwhile it may have come to DRAM by another prompt.
            let local = self.local.contains(&asked);
            let again = self.ask(&asked, hint).await;
            for ((n, answer), local) in pending.into_iter().zip(again).zip(local) {
                answers[n] = match local {
                    Some(_) => Answer::Found(Source::Dram),
                    None => answer,
                };
            }
        }
        let mut sources: Vec<Option<Source>> = answers
            .into_iter()
            .map(|answer| match answer {
                Answer::Found(source) => Some(source),
                Answer::Pending | Answer::Absent => None,
            })
            .collect();
        sources.resize(keys.len(), None);
        sources
    }

    /// Asks all tiers that have no index in this process at once, each under its deadline. Ends when
    /// the nearer ones have all chunks. A tier that is late or fails is counted, and cannot be used
    /// for this prompt.
    async fn ask(&self, keys: &[ChunkKey], hint: &LocateHint) -> Vec<Answer> {
        let mut answers = vec![Answer::Absent; keys.len()];
        if keys.is_empty() {
            return answers;
        }
        let asked = self.tiers.iter().enumerate();
        let asked = asked.filter(|(_, tier)| tier.backend.index().is_none());
        let located = asked.map(|(index, tier)| async move {
            let timeout = hint.timeout.unwrap_or(tier.policy.locate_timeout);
            let deadline = Instant::now() + timeout;
            let located = tier.backend.locate(keys, hint, deadline);
            // A tier that breaks its contract must not hold the prompt up.
            let located = tokio::time::timeout(timeout, located).await;
            let failed = || keys.iter().map(|_| Err(BackendError::Deadline)).collect();
            (index, located.unwrap_or_else(|_| failed()))
        });
        let mut located: FuturesOrdered<_> = located.collect();
        while let Some((index, located)) = located.next().await {
            if located.len() != keys.len() || located.iter().any(Result::is_err) {
                count(&self.tiers[index].counters.locate_failed, 1);
            }
            for (answer, located) in answers.iter_mut().zip(located) {
                if matches!(answer, Answer::Found(_)) {
                    continue;
                }
                match located {
                    Ok(Located::Present(location)) => {
                        if let Some(source) = self.source(index, location, hint.chunk_bytes) {
                            *answer = Answer::Found(source);
                        }
                    }
                    Ok(Located::Pending) => *answer = Answer::Pending,
                    Ok(Located::Absent) | Err(_) => {}
                }
            }
            if answers.iter().all(|one| matches!(one, Answer::Found(_))) {
                break;
            }
        }
        answers
    }

    /// Cuts off the chunks of several ranks that are recomputed faster than they are read. Returns
    /// the number of leading chunks to read, of `reach` that are somewhere; the first `resident`
    /// of them are in DRAM for every rank.
    pub(crate) fn worth_reading(
        &self,
        ranks: &[&[Source]],
        resident: usize,
        reach: usize,
    ) -> usize {
        let Some(recompute_time) = self.limits.recompute_time else {
            return reach;
        };
        let cost: Duration = ranks
            .iter()
            .flat_map(|rank| rank.iter())
            .map(Source::cost)
            .sum();
        let recompute = recompute_time * u32::try_from(reach - resident).unwrap_or(u32::MAX);
        if cost < recompute {
            return reach;
        }
        for source in ranks.iter().flat_map(|rank| rank.iter()) {
            if let Source::Tier { index, .. } = source {
                count(&self.tiers[*index].counters.promote_skipped, 1);
            }
        }
        resident
    }
}

/// Returns true if this is the length that a chunk has to have, as far as that is known.
fn fits(len: u64, chunk_bytes: Option<u64>) -> bool {
    chunk_bytes.is_none_or(|bytes| bytes == len)
}
