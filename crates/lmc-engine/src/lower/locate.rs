//! Location of a prompt's chunks in the tiers.

use std::collections::BTreeSet;
use std::iter;
use std::mem;
use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lmc_backend::{BackendError, Cursor, Handle, LocateHint, Located, Location, Parts, now};
use lmc_key::{ChunkKey, ClearsId};

use super::{Tiers, count};
use crate::misses::{Miss, MissReason};
use crate::request::fits;

/// Time between two lookups of chunks that are being written: at first, and at most.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));
/// The pause before the next lookup is this fraction (one part of 50) of the time that a prompt has already
/// waited for its sources, if that is longer.
const ASK_AGAIN_PART: u32 = 50;
/// Least timeout of a tier when the prompt waits for its sources: they may be busy with the prompt.
const BUSY: Duration = Duration::from_millis(250);

/// Time that nearer tiers have left to answer once other tiers are known to have all chunks; a timer may
/// double it. Longer than a nearby peer or store takes to answer, and shorter than a prompt would notice.
const GRACE: Duration = Duration::from_millis(1);
/// Most keys that are asked about at once to find the end of the chunks that a store has.
const PROBES: usize = 16;
/// Time for which a late tier is not waited for at all.
pub(super) const LATE: Duration = Duration::from_millis(100);

/// The tier that a chunk is read from.
#[derive(Debug, Clone)]
pub(crate) enum ChunkSource {
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
        /// Handle of the chunk from the tier.
        handle: Option<Handle>,
    },
}

impl ChunkSource {
    /// Returns the bytes that a promotion of the chunk would read.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Dram => 0,
            Self::Tier { len, .. } => *len,
        }
    }

    pub(super) fn tier(&self) -> Option<usize> {
        match self {
            Self::Dram => None,
            Self::Tier { index, .. } => Some(*index),
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
    /// Source of each leading key that was found.
    pub(crate) found: Vec<ChunkSource>,
    /// False if a tier that is still to be asked may have the next key.
    pub(crate) is_final: bool,
}

impl Sources {
    /// Returns the bytes that a promotion of the chunks would read.
    pub(crate) fn bytes(&self) -> u64 {
        self.found.iter().map(ChunkSource::bytes).sum()
    }
}

/// Combined answer of the asked tiers about one key.
#[derive(Debug, Clone, Default)]
enum Answer {
    Found(ChunkSource),
    /// An engine is writing the chunk to this tier; `None`: a push is bringing it to DRAM.
    Pending(Option<usize>),
    /// A source of this tier may write the chunk.
    Expected(usize),
    /// No tier is known to have the chunk, and at least one has not answered.
    Unknown(Miss),
    #[default]
    Absent,
}

/// Time limits of a prompt's waits for chunks that no tier has yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    /// End of the wait for chunks that are being written.
    pub(crate) written_until: Instant,
    /// End of the wait for chunks that sources may write.
    pub(crate) expected_until: Instant,
    /// The clears in the names of the keys: after another clear, no more chunks come under these names.
    pub(crate) clears: ClearsId,
}

impl Waits {
    /// Returns waits that have ended.
    pub(crate) fn over(self) -> Self {
        let now = now();
        Self {
            written_until: now,
            expected_until: now,
            ..self
        }
    }

    /// Returns the end of the wait for a chunk; `None` if it is not waited for.
    fn end_for(self, answer: &Answer) -> Option<Instant> {
        match answer {
            // A source that the prompt waits for may take long to write.
            Answer::Pending(_) => Some(self.written_until.max(self.expected_until)),
            Answer::Expected(_) => Some(self.expected_until),
            Answer::Found(_) | Answer::Unknown(_) | Answer::Absent => None,
        }
    }
}

/// Keys that tiers are asked about.
#[derive(Debug, Clone, Copy)]
struct Question<'a> {
    keys: &'a [ChunkKey],
    /// Number of leading keys that every tier is asked about, and whose answers are waited for. A tier whose
    /// requests cover several keys is also asked about the keys after them.
    needed: usize,
    /// True if the last key is for the tiers whose requests cover one key.
    has_sample: bool,
}

impl<'a> Question<'a> {
    fn about(keys: &'a [ChunkKey]) -> Self {
        Self {
            keys,
            needed: keys.len(),
            has_sample: false,
        }
    }

    /// Returns the indices of the keys for a tier whose requests cover `at_once` keys.
    fn indices_for(self, at_once: usize) -> impl Iterator<Item = usize> + Clone {
        let sample = self.keys.len() - usize::from(self.has_sample);
        let (end, sample) = match at_once {
            0 | 1 => (self.needed, sample..self.keys.len()),
            more => (self.needed.max(more.min(sample)), 0..0),
        };
        (0..end).chain(sample)
    }
}

/// Selection of the tiers that have no local index.
#[derive(Debug, Clone, Copy)]
enum Asked<'a> {
    All,
    Except(usize),
    Only(&'a BTreeSet<usize>),
}

impl Asked<'_> {
    fn includes(self, tier: usize) -> bool {
        match self {
            Self::All => true,
            Self::Except(one) => one != tier,
            Self::Only(these) => these.contains(&tier),
        }
    }
}

impl Tiers {
    /// Returns the leading keys, up to the first that is being removed.
    fn not_removing<'a>(&self, keys: &'a [ChunkKey]) -> &'a [ChunkKey] {
        let removing = self.removing.lock();
        if removing.is_empty() {
            return keys;
        }
        let removed = |key: &ChunkKey| removing.iter().any(|set| set.contains(key));
        let first = keys.iter().position(removed);
        &keys[..first.unwrap_or(keys.len())]
    }

    /// Returns true while a chunk is being removed.
    pub(super) fn is_removing(&self, key: &ChunkKey) -> bool {
        self.not_removing(std::slice::from_ref(key)).is_empty()
    }

    /// Returns true if a tier has no local index and is asked for chunks of this size.
    fn is_asked(&self, index: usize, parts: Parts) -> bool {
        let tier = &self.tiers[index];
        tier.backend.index().is_none() && (parts == Parts::WHOLE || tier.policy.asks_for_parts)
    }

    /// Finds the sources of the leading keys in DRAM and in the tiers with a local index. Chunks of another
    /// length do not count.
    pub(crate) fn locate_now(
        &self,
        keys: &[ChunkKey],
        chunk_bytes: Option<u64>,
        parts: Parts,
    ) -> Sources {
        let known = self.not_removing(keys);
        let has_to_ask = (0..self.tiers.len()).any(|index| self.is_asked(index, parts));
        let is_final = known.len() < keys.len() || !has_to_ask;
        // Most prompts that DRAM does not know are in no tier.
        let found = match known {
            [] => Vec::new(),
            [first, ..] => match self.each_now(&[*first], [], chunk_bytes, None).pop() {
                Some(first @ Some(_)) if known.len() > 1 => self
                    .each_now(known, [first], chunk_bytes, None)
                    .into_iter()
                    .map_while(|one| one)
                    .collect(),
                first => first.flatten().into_iter().collect(),
            },
        };
        let is_final = is_final || found.len() == keys.len();
        Sources { found, is_final }
    }

    /// Finds the source of each key in DRAM and in the tiers with a local index except one, up to the first
    /// key that is being removed. Chunks of another length do not count.
    pub(crate) fn sources_now(
        &self,
        keys: &[ChunkKey],
        chunk_bytes: Option<u64>,
        except: Option<usize>,
    ) -> Vec<Option<ChunkSource>> {
        self.each_now(self.not_removing(keys), [], chunk_bytes, except)
    }

    /// Finds the source of each key as [`Self::sources_now`] does, but asks no tier for the keys whose source
    /// is known. DRAM counts before a known source.
    pub(crate) fn sources_after(
        &self,
        keys: &[ChunkKey],
        known: impl IntoIterator<Item = Option<ChunkSource>>,
        chunk_bytes: Option<u64>,
    ) -> Vec<Option<ChunkSource>> {
        self.each_now(self.not_removing(keys), known, chunk_bytes, None)
    }

    /// Returns the reason of a miss if a tier with a local index may have the chunk but is faulty.
    pub(crate) fn fault_of(&self, key: &ChunkKey) -> Option<Miss> {
        let mut tiers = self.tiers.iter().enumerate();
        tiers.find_map(|(tier, known)| {
            let fault = known.backend.index()?.fault_of(key)?;
            Some(Miss::of_question(&fault, tier))
        })
    }

    /// Returns true if a tier has chunks that were stored under other settings than the current ones.
    pub(crate) fn has_unreachable(&self) -> bool {
        let mut tiers = self.tiers.iter();
        tiers.any(|tier| tier.backend.has_unreachable())
    }

    /// Returns the number of tiers.
    pub(crate) fn len(&self) -> usize {
        self.tiers.len()
    }

    /// Lists some chunks of a tier with a local index that can be written to; lists none of other tiers.
    pub(crate) async fn list_now(
        &self,
        tier: usize,
        from: u128,
        limit: usize,
    ) -> (Vec<ChunkKey>, Option<u128>) {
        let tier = self.tiers.get(tier);
        let tier = tier.filter(|tier| tier.backend.index().is_some());
        let Some((tier, writer)) = tier.and_then(|tier| Some((tier, tier.backend.writer()?)))
        else {
            return (Vec::new(), None);
        };
        let deadline = now() + tier.policy.locate_timeout;
        let page = writer.list(Cursor::from_raw(from), limit, deadline);
        let page = match page.await {
            Ok(page) => page,
            // Not the end of the listing: at the end, chunks that were not listed count as gone.
            Err(BackendError::Deadline) => return (Vec::new(), Some(from)),
            Err(_) => return (Vec::new(), None),
        };
        let keys = page.items.iter().map(|item| item.key).collect();
        (keys, page.next.map(Cursor::raw))
    }

    /// Returns for each chunk whether it is in DRAM and has this length.
    fn each_in_dram(&self, keys: &[ChunkKey], chunk_bytes: Option<u64>) -> Vec<bool> {
        let found = self.local.contains(keys).into_iter();
        let is_it = |len: Option<u64>| len.is_some_and(|len| fits(len, chunk_bytes));
        found.map(is_it).collect()
    }

    fn each_now(
        &self,
        keys: &[ChunkKey],
        known: impl IntoIterator<Item = Option<ChunkSource>>,
        chunk_bytes: Option<u64>,
        except: Option<usize>,
    ) -> Vec<Option<ChunkSource>> {
        let local = self.local.contains(keys).into_iter();
        // A chunk in DRAM is read from no tier, whatever its length.
        let in_dram = |len: u64| fits(len, chunk_bytes).then_some(ChunkSource::Dram);
        let known = known.into_iter().map(|source| source.map(Some));
        let mut found: Vec<Option<Option<ChunkSource>>> = (local
            .zip(known.chain(iter::repeat(None))))
        .map(|(len, known)| len.map(in_dram).or(known))
        .collect();
        for (index, tier) in self.tiers.iter().enumerate() {
            let Some(tier_index) = tier.backend.index().filter(|_| except != Some(index)) else {
                continue;
            };
            let open: Vec<usize> = (0..keys.len()).filter(|&at| found[at].is_none()).collect();
            let located = match open.len() {
                0 => break,
                all if all == keys.len() => tier_index.locate_now(keys),
                _ => tier_index.locate_now(&open.iter().map(|&at| keys[at]).collect::<Vec<_>>()),
            };
            for (at, located) in open.into_iter().zip(located) {
                if let Ok(Located::Present(location)) = located {
                    found[at] = self.source(index, location, chunk_bytes).map(Some);
                }
            }
        }
        found.into_iter().map(Option::flatten).collect()
    }

    /// Returns the source of a chunk that a tier has; `None` if its length is not the expected one or no slot
    /// can have that length.
    fn source(
        &self,
        index: usize,
        location: Location,
        chunk_bytes: Option<u64>,
    ) -> Option<ChunkSource> {
        let pool = self.local.pool().arena().len() as u64;
        if !fits(location.len, chunk_bytes) || location.len > pool {
            count(&self.tiers[index].counters.promote_missed, 1);
            return None;
        }
        Some(ChunkSource::Tier {
            index,
            len: location.len,
            cost: location.cost,
            handle: location.handle,
        })
    }

    /// Finds the sources of the leading keys in all tiers; `known` has the sources found so far. Asks each tier
    /// first about as many keys as one request covers at about the cost of one key. If the first key is in no
    /// tier, the rest is not asked for. If each key costs a request of its own, also asks about the last key:
    /// a tier that has both is assumed to have the chunks between them, and of a tier that lacks the last
    /// chunk, the end of its chunks is searched for.
    ///
    /// Waits for chunks that are being written, pushed or expected. If the prompt waits for its sources,
    /// waits for the first chunk only, so that it is read while the next one is computed. Also returns the
    /// reason why the next key has no source, if a tier's answer shows one.
    pub(crate) async fn locate(
        &self,
        keys: &[ChunkKey],
        known: Sources,
        hint: &LocateHint,
        waits: Waits,
    ) -> (Vec<ChunkSource>, Option<Miss>) {
        let (mut found, mut miss) = (known.found, None);
        if known.is_final || found.len() >= keys.len() {
            return (found, miss);
        }
        let asked = (0..self.tiers.len()).filter(|&index| self.is_asked(index, hint.parts));
        let at_once = asked.map(|index| self.tiers[index].backend.asks_at_once().max(1));
        let (mut at_least, mut at_most) = at_once.fold((usize::MAX, 1), |(least, most), n| {
            (least.min(n), most.max(n))
        });
        while found.len() < keys.len() {
            let rest = &keys[found.len()..];
            let (all, part) = (at_least.min(rest.len()), &rest[..at_most.min(rest.len())]);
            let mut sources = self.sources_now(part, hint.chunk_bytes, None);
            let asked: Vec<usize> = (0..sources.len())
                .filter(|&n| sources[n].is_none())
                .collect();
            let mut asked_keys: Vec<ChunkKey> = asked.iter().map(|&n| part[n]).collect();
            let sample = match (all, asked.first()) {
                (1, Some(0)) => self.last_to_ask(rest, hint),
                _ => None,
            };
            asked_keys.extend(sample);
            let question = Question {
                keys: &asked_keys,
                needed: asked.iter().filter(|&&n| n < all).count(),
                has_sample: sample.is_some(),
            };
            let waits = match hint.wait {
                Some(_) if !found.is_empty() => waits.over(),
                _ => waits,
            };
            let (mut answers, has_waited) = self.ask_until_known(question, hint, waits).await;
            let last = answers.split_off(asked.len()).pop();
            let is_absent = matches!(last, Some(Answer::Absent));
            let last = last.and_then(Answer::source);
            let needed = asked.iter().zip(&answers).take(question.needed);
            let mut missing = needed.filter(|(_, answer)| !matches!(answer, Answer::Found(_)));
            miss = missing.next().and_then(|(_, answer)| answer.miss());
            for (n, answer) in asked.into_iter().zip(answers) {
                sources[n] = answer.source();
            }
            let before = found.len();
            found.extend(sources.into_iter().map_while(|source| source));
            (at_least, at_most) = (keys.len(), keys.len());
            let end = match (found.get(before), last) {
                (Some(first), Some(last)) if !has_waited => {
                    assumed_between(first, &last).then_some(rest.len()..rest.len())
                }
                (Some(first), None) if !has_waited && is_absent => {
                    self.search_end(rest, first, hint).await
                }
                _ => None,
            };
            if let Some(end) = end {
                let (first, known) = (found[before].clone(), found.len() - before);
                let keys = &rest[known.min(end.start)..end.start];
                let sources = self.sources_now(keys, hint.chunk_bytes, None);
                let is_whole = sources.len() == keys.len();
                found.extend(sources.into_iter().map(|it| it.unwrap_or(first.clone())));
                if !is_whole {
                    break;
                }
                // Also about the chunk that the tier lacks: an engine may be writing it elsewhere.
                at_least = end.len() + 1;
                at_most = at_least;
                continue;
            }
            // An engine may meanwhile have begun to write a chunk that was absent before.
            let goes_on = has_waited && found.len() > before;
            if found.len() < before + all && !goes_on {
                break;
            }
        }
        (found, miss)
    }

    /// Searches for the end of the chunks of a tier that has the first of these keys and lacks the last one.
    /// Asks about several keys in between at a time. Returns the range of the keys that may be the first one
    /// that the tier lacks, without the last of them; the tier is assumed to have the keys before the range.
    /// Returns `None` if there are few keys, or nothing is to be assumed of the tier.
    async fn search_end(
        &self,
        keys: &[ChunkKey],
        first: &ChunkSource,
        hint: &LocateHint,
    ) -> Option<Range<usize>> {
        let of_tier = BTreeSet::from([first.tier()?]);
        let mut open = 1..keys.len() - 1;
        if open.len() <= PROBES || !assumed_between(first, first) {
            return None;
        }
        while open.len() > PROBES {
            let step = open.len().div_ceil(PROBES + 1);
            let probes = (open.start + step - 1..open.end).step_by(step);
            let probed: Vec<ChunkKey> = probes.clone().map(|n| keys[n]).collect();
            let question = Question::about(&probed);
            let answers = self.ask(question, hint, Asked::Only(&of_tier)).await;
            let has = |answer: &Answer| match answer {
                Answer::Found(source) => assumed_between(first, source),
                _ => false,
            };
            let leading = answers.iter().take_while(|answer| has(answer)).count();
            let end = probes.clone().nth(leading).unwrap_or(open.end);
            let before_end = leading.checked_sub(1).and_then(|n| probes.clone().nth(n));
            open = before_end.map_or(open.start, |n| n + 1)..end;
        }
        Some(open)
    }

    /// Returns the last of these keys if a request for the first one should name it too: there are keys
    /// between the two, their length is known, and no local index has the last key.
    fn last_to_ask(&self, keys: &[ChunkKey], hint: &LocateHint) -> Option<ChunkKey> {
        let last = keys.last().filter(|_| keys.len() > 2)?;
        hint.chunk_bytes?;
        let known = self.sources_now(&[*last], hint.chunk_bytes, None);
        matches!(known[..], [None]).then_some(*last)
    }

    /// Asks the tiers about keys. Waits for answers about the needed keys; uses the answers about the other keys
    /// that arrive by then. Waits for needed chunks that an engine is writing to a tier or a peer is pushing,
    /// and then returns true with the answers.
    async fn ask_until_known(
        &self,
        question: Question<'_>,
        hint: &LocateHint,
        waits: Waits,
    ) -> (Vec<Answer>, bool) {
        let Question { keys, needed, .. } = question;
        let mut has_waited = false;
        let mut answers: Vec<Answer> = self.ask(question, hint, Asked::All).await;
        // Most prompts that no tier has are nowhere.
        let is_absent = |answer: &Answer| matches!(answer, Answer::Absent | Answer::Unknown(_));
        let mut first_absent = None;
        if !(self.pushed.is_empty() && answers[..needed].iter().all(is_absent)) {
            self.look_at_dram(&mut answers[..needed], &keys[..needed], hint);
        }
        let others = answers.split_off(needed);
        let again = match hint.wait {
            Some(_) => &hint.clone().repeated(),
            None => hint,
        };
        let begun = now();
        let mut pause = ASK_AGAIN.0;
        loop {
            // A chunk after an absent one is useless.
            if let Some(end) = answers.iter().position(is_absent) {
                first_absent = answers.drain(end..).next();
            }
            let tiers: BTreeSet<usize> = answers.iter().filter_map(Answer::expected_by).collect();
            let is_awaited = |n: &usize| waits.end_for(&answers[*n]).is_some();
            let mut pending: Vec<usize> = (0..answers.len()).filter(is_awaited).collect();
            if hint.wait.is_some() {
                // The next chunks are computed after the first one.
                pending.retain(|&n| n == 0 && self.clears.id() == waits.clears);
            }
            let first = pending.first().map(|&n| &answers[n]);
            let until = first.and_then(|first| waits.end_for(first));
            let left = until.map(|until| until.saturating_duration_since(now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else {
                break;
            };
            has_waited = true;
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(ASK_AGAIN.1.max((now() - begun) / ASK_AGAIN_PART));
            let asked: Vec<ChunkKey> = pending.iter().map(|&n| keys[n]).collect();
            let is_pushed = |n: &&usize| matches!(answers[**n], Answer::Pending(None));
            let pushed = pending.iter().filter(is_pushed).map(|&n| keys[n]);
            let pushed: Vec<ChunkKey> = pushed.collect();
            let which = match self.push_has_failed(&pushed, hint.chunk_bytes) {
                true => Asked::All,
                false => Asked::Only(&tiers),
            };
            let mut again = self.ask(Question::about(&asked), again, which).await;
            self.look_at_dram(&mut again, &asked, hint);
            for (n, answer) in pending.into_iter().zip(again) {
                answers[n] = answer;
            }
        }
        answers.extend(first_absent);
        answers.resize(needed, Answer::Absent);
        answers.extend(others);
        (answers, has_waited)
    }

    /// Returns true if a chunk is neither in DRAM nor being pushed there: then another tier may have it.
    fn push_has_failed(&self, keys: &[ChunkKey], chunk_bytes: Option<u64>) -> bool {
        let arriving = self.pushed.are_receiving(keys).into_iter();
        let there = self.each_in_dram(keys, chunk_bytes);
        arriving
            .zip(there)
            .any(|(arriving, there)| !arriving && !there)
    }

    /// Checks which of these chunks have arrived in DRAM since the tiers were asked, and which of the absent
    /// chunks are being pushed. A lookup on behalf of a push (`hint.sources_only`) does not wait for pushes,
    /// because it would wait for itself.
    fn look_at_dram(&self, answers: &mut [Answer], keys: &[ChunkKey], hint: &LocateHint) {
        // Pushed chunks are in DRAM before the push ends.
        let arriving = match hint.sources_only {
            true => vec![false; keys.len()],
            false => self.pushed.are_receiving(keys),
        };
        let there = self.each_in_dram(keys, hint.chunk_bytes);
        for ((answer, arriving), there) in answers.iter_mut().zip(arriving).zip(there) {
            match answer {
                Answer::Found(_) => {}
                _ if there => *answer = Answer::Found(ChunkSource::Dram),
                Answer::Absent | Answer::Unknown(_) if arriving => *answer = Answer::Pending(None),
                _ => {}
            }
        }
    }

    /// Asks all tiers except one about keys, once.
    pub(super) async fn ask_others(
        &self,
        keys: &[ChunkKey],
        hint: &LocateHint,
        except: usize,
    ) -> Vec<Option<ChunkSource>> {
        let which = Asked::Except(except);
        let answers = self.ask(Question::about(keys), hint, which).await;
        answers.into_iter().map(Answer::source).collect()
    }

    /// Asks all tiers without a local index at the same time, each with its own deadline and about its own
    /// keys. Ends when all needed chunks are found and the nearer tiers have answered or are late. A failure
    /// of a tier is counted, and the tier is not used for this prompt.
    async fn ask(
        &self,
        question: Question<'_>,
        hint: &LocateHint,
        which: Asked<'_>,
    ) -> Vec<Answer> {
        let Question { keys, needed, .. } = question;
        let mut answers = vec![Answer::Absent; keys.len()];
        if needed == 0 {
            return answers;
        }
        let is_asked = |index: &usize| which.includes(*index) && self.is_asked(*index, hint.parts);
        let mut awaited: BTreeSet<usize> = (0..self.tiers.len()).filter(is_asked).collect();
        let asked = awaited.iter().map(|&index| (index, &self.tiers[index]));
        let mut located: FuturesUnordered<_> = asked
            .map(|(index, tier)| async move {
                let indices = question.indices_for(tier.backend.asks_at_once());
                let keys: Vec<ChunkKey> = indices.clone().map(|n| keys[n]).collect();
                let mut timeout = hint.timeout.unwrap_or(tier.policy.locate_timeout);
                if let Some(wait) = hint.wait.filter(|_| hint.is_repeated) {
                    timeout = timeout.max(BUSY.min(wait));
                }
                let deadline = now() + timeout;
                let located = tier.backend.locate(&keys, hint, deadline);
                // A tier that breaks its contract must not delay the prompt.
                let located = tokio::time::timeout(timeout, located).await;
                let failed = || keys.iter().map(|_| Err(BackendError::Deadline)).collect();
                (index, indices, located.unwrap_or_else(|_| failed()))
            })
            .collect();
        let mut grace = None;
        loop {
            let next = located.next();
            let next = match grace {
                None => next.await,
                Some(until) => tokio::time::timeout_at(until, next).await.ok().flatten(),
            };
            let Some((index, indices, located)) = next else {
                break;
            };
            awaited.remove(&index);
            if located.len() != indices.clone().count() || located.iter().any(Result::is_err) {
                count(&self.tiers[index].counters.locate_failed, 1);
            }
            for (n, located) in indices.zip(located) {
                let located = match located {
                    Ok(Located::Present(location)) => {
                        let source = self.source(index, location, hint.chunk_bytes);
                        source.map_or(Answer::Absent, Answer::Found)
                    }
                    Ok(Located::Pending) => Answer::Pending(Some(index)),
                    Ok(Located::Expected) => Answer::Expected(index),
                    Ok(Located::Absent) => Answer::Absent,
                    Err(error) => Answer::Unknown(Miss::of_question(&error, index)),
                };
                answers[n] = mem::take(&mut answers[n]).or(located);
            }
            // Once all chunks are found, only nearer tiers can have a better source. With a recompute time,
            // also a cheaper source is better, because the cost decides whether the chunks are read at all.
            let is_any_read = self.limits.recompute_time.is_none();
            if let Some(farthest) = farthest(&answers[..needed]).filter(|_| is_any_read) {
                grace.get_or_insert_with(|| tokio::time::Instant::now() + GRACE);
                awaited.retain(|tier| *tier < farthest && !self.tiers[*tier].is_late());
            }
            if awaited.is_empty() {
                break;
            }
        }
        if grace.is_some() {
            awaited
                .iter()
                .for_each(|tier| self.tiers[*tier].note_late());
        }
        answers
    }

    /// Decides whether chunks of several ranks are read or recomputed, by which is faster. Returns the number
    /// of leading chunks to use: `reach`, or only `resident`, the number of leading chunks that are in DRAM
    /// for every rank.
    pub(crate) fn worth_reading(
        &self,
        ranks: &[&[ChunkSource]],
        resident: usize,
        reach: usize,
        parts: Parts,
    ) -> usize {
        let Some(recompute_time) = self.limits.recompute_time else {
            return reach;
        };
        let cost: Duration = ranks
            .iter()
            .flat_map(|rank| rank.iter())
            .map(ChunkSource::cost)
            .sum();
        let chunks = u32::try_from(reach - resident).unwrap_or(u32::MAX);
        let recompute = recompute_time * chunks / parts.get();
        if cost < recompute {
            return reach;
        }
        for source in ranks.iter().flat_map(|rank| rank.iter()) {
            if let ChunkSource::Tier { index, .. } = source {
                count(&self.tiers[*index].counters.promote_skipped, 1);
            }
        }
        resident
    }
}

impl Answer {
    fn source(self) -> Option<ChunkSource> {
        match self {
            Self::Found(source) => Some(source),
            _ => None,
        }
    }

    /// Returns the reason why the chunk is not found, if the answer shows one.
    fn miss(&self) -> Option<Miss> {
        match self {
            Self::Found(_) | Self::Absent => None,
            Self::Pending(tier) => Some(Miss::certain(MissReason::TierLate(*tier))),
            Self::Expected(tier) => Some(Miss::probable(MissReason::TierLate(Some(*tier)))),
            Self::Unknown(miss) => Some(*miss),
        }
    }

    /// Returns the tier that the chunk is being written to or expected in.
    fn expected_by(&self) -> Option<usize> {
        match self {
            Self::Pending(tier) => *tier,
            Self::Expected(tier) => Some(*tier),
            _ => None,
        }
    }

    /// Returns the tier that has the chunk.
    fn tier(&self) -> Option<usize> {
        match self {
            Self::Found(source) => source.tier(),
            _ => None,
        }
    }

    /// Combines the answers of two tiers: of two tiers that have the chunk, the nearer one counts.
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Found(one), Self::Found(other)) => Self::Found(if one.tier() <= other.tier() {
                one
            } else {
                other
            }),
            (found @ Self::Found(_), _) | (_, found @ Self::Found(_)) => found,
            (Self::Pending(one), Self::Pending(other)) => Self::Pending(one.min(other)),
            (pending @ Self::Pending(_), _) | (_, pending @ Self::Pending(_)) => pending,
            (Self::Expected(one), Self::Expected(other)) => Self::Expected(one.min(other)),
            (expected @ Self::Expected(_), _) | (_, expected @ Self::Expected(_)) => expected,
            (unknown @ Self::Unknown(_), _) | (_, unknown @ Self::Unknown(_)) => unknown,
            (Self::Absent, Self::Absent) => Self::Absent,
        }
    }
}

/// Returns true if the chunks between two located ones are assumed to be where the first one is: one tier has
/// both and gave no handles.
fn assumed_between(first: &ChunkSource, last: &ChunkSource) -> bool {
    let both = (first, last);
    let (
        ChunkSource::Tier {
            index,
            handle: None,
            ..
        },
        ChunkSource::Tier {
            index: of_last,
            handle: None,
            ..
        },
    ) = both
    else {
        return false;
    };
    index == of_last
}

/// Returns the farthest tier among the sources of the chunks; `None` if a chunk is not found.
fn farthest(answers: &[Answer]) -> Option<usize> {
    let mut tiers = answers.iter().map(Answer::tier);
    tiers.try_fold(0, |farthest, tier| Some(farthest.max(tier?)))
}
