//! Stores and removals.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use futures_util::{Stream, StreamExt, stream};
use lmc_backend::{Answers, BackendError, StoreItem, Stored, now, ready};
use lmc_key::ChunkKey;
use tokio::sync::{mpsc, oneshot};

use super::access::{StoreAccess, each};
use super::breaker::Attempt;
use super::claims::{Claim, Claims};
use super::clears::ClearsSync;
use super::recent::RecentKeys;
use super::spaces::SpaceDescriptions;
use crate::format::{ChunkFolder, Header, MAX_PAYLOAD_LEN, Name, ValueName};
use crate::store::{Head, Put, PutItem, PutMode, StoreError};

/// Number of values, and bytes, of a group: the store begins with a group while the checksums of the next one
/// are computed.
const GROUP: (usize, u64) = (4, 1 << 20);

/// The answers to a batch in which a key may occur more than once.
struct BatchAnswers {
    answers: mpsc::UnboundedSender<(usize, Result<Stored, BackendError>)>,
    /// Further indices of keys that occur more than once in the batch.
    twins: HashMap<usize, Vec<usize>>,
}

impl BatchAnswers {
    /// Answers an item and its twins. The twins get the answer that the chunk is present.
    fn answer(&self, index: usize, result: Result<Stored, BackendError>) {
        let twins = self.twins.get(&index).into_iter().flatten();
        for &twin in twins {
            let result = match &result {
                Ok(Stored::Written) => Ok(Stored::Present),
                Ok(other) => Ok(*other),
                Err(error) => Err(error.clone()),
            };
            // If the caller is gone, so is the receiver.
            let _ = self.answers.send((twin, result));
        }
        let _ = self.answers.send((index, result));
    }

    fn is_abandoned(&self) -> bool {
        self.answers.is_closed()
    }
}

/// Decision about a chunk.
enum Decision {
    Answer(Result<Stored, BackendError>),
    Put(PutMode),
}

/// Stores and removals of values.
#[derive(Debug)]
pub(super) struct ValueWriter {
    access: Arc<StoreAccess>,
    clears: Arc<ClearsSync>,
    spaces: Arc<SpaceDescriptions>,
    /// Keys that the reader has not found, and keys whose value it found damaged.
    absent: Arc<RecentKeys>,
    damaged: Arc<RecentKeys>,
    claims: Arc<Claims>,
}

impl ValueWriter {
    pub(super) fn new(
        access: &Arc<StoreAccess>,
        clears: &Arc<ClearsSync>,
        spaces: &Arc<SpaceDescriptions>,
        absent: &Arc<RecentKeys>,
        damaged: &Arc<RecentKeys>,
    ) -> Self {
        Self {
            access: Arc::clone(access),
            clears: Arc::clone(clears),
            spaces: Arc::clone(spaces),
            absent: Arc::clone(absent),
            damaged: Arc::clone(damaged),
            claims: Arc::default(),
        }
    }

    pub(super) fn store(
        self: &Arc<Self>,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        let folder = match self.check_writes() {
            Ok(folder) => folder,
            Err(error) => return ready(each(items.len(), &error)),
        };
        if items.is_empty() {
            return ready([]);
        }
        let (answers, mut answered) = mpsc::unbounded_channel();
        // Requests that the store was given run to their end; otherwise it would not be known when they end.
        self.access
            .spawn_tracked(Arc::clone(self).write(folder, items, deadline, answers));
        Box::pin(stream::poll_fn(move |context| answered.poll_recv(context)))
    }

    /// Returns the folder for a store or a removal that begins now, or the reason why none can begin.
    fn check_writes(&self) -> Result<ChunkFolder, BackendError> {
        let folder = self.clears.check()?;
        self.access.paths.writes.check(now())?;
        Ok(folder)
    }

    async fn write(
        self: Arc<Self>,
        folder: ChunkFolder,
        items: Vec<StoreItem>,
        deadline: Instant,
        answers: mpsc::UnboundedSender<(usize, Result<Stored, BackendError>)>,
    ) {
        let mut batch = BatchAnswers {
            answers,
            twins: HashMap::new(),
        };
        let mut firsts: HashMap<ChunkKey, usize> = HashMap::new();
        let mut left = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let first = *firsts.entry(item.key).or_insert(index);
            match first == index {
                true => left.push((index, item)),
                false => batch.twins.entry(first).or_default().push(index),
            }
        }
        while !left.is_empty() && !batch.is_abandoned() {
            let free = self.claims.take(&mut left, |(_, item)| item.key, deadline);
            let free = free.await;
            if free.is_empty() {
                for (index, _) in left.drain(..) {
                    batch.answer(index, Err(BackendError::Deadline));
                }
            }
            self.write_claimed(&batch, folder, free, deadline).await;
        }
    }

    /// Writes chunks whose keys are claimed.
    async fn write_claimed(
        &self,
        batch: &BatchAnswers,
        folder: ChunkFolder,
        claimed: Vec<(Claim, (usize, StoreItem))>,
        deadline: Instant,
    ) {
        let begun = now();
        // Chunks that a lookup has just not found are written without another lookup.
        let is_absent =
            |(_, (_, item)): &(Claim, (usize, StoreItem))| self.absent.contains(&item.key, begun);
        let (absent, unknown): (Vec<_>, Vec<_>) = claimed.into_iter().partition(is_absent);
        let names = unknown.iter().map(|(_, (_, item))| folder.value(item.key));
        let names: Vec<ValueName> = names.collect();
        let heads = self.heads_for_writes(&names, deadline).await;
        let heads = std::iter::repeat_with(|| Ok(None))
            .take(absent.len())
            .chain(heads);
        let (mut puts, mut given) = (Vec::new(), Vec::new());
        let claimed = absent.into_iter().chain(unknown).zip(heads);
        for ((claim, (index, item)), head) in claimed {
            match self.decide(&item, head) {
                Decision::Answer(answer) => batch.answer(index, answer),
                Decision::Put(mode) => {
                    given.push(Some((claim, index, item.clone())));
                    puts.push((item, mode));
                }
            }
        }
        if puts.is_empty() || batch.is_abandoned() {
            return;
        }
        let largest = puts.iter().map(|(item, _)| item.slot.len()).max();
        let beginning = self.begin_writes(folder, largest.unwrap_or(0), deadline);
        let mut attempt = match beginning.await {
            Ok(Some(attempt)) => attempt,
            declined => {
                for (claim, index, _) in given.into_iter().flatten() {
                    drop(claim);
                    let answer = declined.as_ref().map(|_| Stored::Declined);
                    batch.answer(index, answer.map_err(|error| error.clone().into()));
                }
                return;
            }
        };
        let mut answers = self.put(folder, puts, deadline);
        while let Some((at, put)) = answers.next().await {
            let Some((claim, index, item)) = given.get_mut(at).and_then(Option::take) else {
                continue;
            };
            let len = item.slot.len();
            match &put {
                Ok(Put::Written) => {
                    attempt.succeeded();
                    self.access.refusals.written(len, now());
                }
                // The store may have found a value, and kept it.
                Ok(Put::Present) => {}
                Err(error) => self.access.note_failed_write(&mut attempt, error, len),
            }
            // After an error the chunk may be present too.
            self.absent.stored(&item.key);
            if put.is_ok() {
                self.spaces.note((folder, item.key.space));
            }
            let stored = match put {
                Ok(_) if item.slot.arena().is_lost() => {
                    // The written bytes may be the zeroes that follow the loss.
                    let name = folder.value(item.key).into();
                    self.access.store.remove(&[name], deadline).await;
                    Err(std::io::Error::other("the slot's memory was lost").into())
                }
                Ok(Put::Written) => {
                    self.damaged.stored(&item.key);
                    Ok(Stored::Written)
                }
                Ok(Put::Present) => Ok(Stored::Present),
                Err(error) => Err(error.into()),
            };
            drop(claim);
            batch.answer(index, stored);
        }
        for (claim, index, ..) in given.into_iter().flatten() {
            drop(claim);
            batch.answer(index, Err(BackendError::Deadline));
        }
    }

    /// Reads the headers of chunks that are about to be written.
    async fn heads_for_writes(
        &self,
        names: &[ValueName],
        deadline: Instant,
    ) -> Vec<Result<Option<Head>, StoreError>> {
        if names.is_empty() {
            return Vec::new();
        }
        let attempt = match self.access.paths.lookups.begin(now()) {
            Ok(attempt) => attempt,
            Err(error) => return error.each(names.len()),
        };
        let heads = self.access.store.heads(names, deadline).await;
        self.access.note(attempt, &heads);
        heads
    }

    /// Begins to write values, the largest of `len` bytes, by writing the map of their folder. Returns `None`
    /// for a folder that no lookup uses.
    async fn begin_writes(
        &self,
        folder: ChunkFolder,
        len: u64,
        deadline: Instant,
    ) -> Result<Option<Attempt>, StoreError> {
        let mut attempt = self.access.paths.writes.begin(now())?;
        match self.clears.write_map(folder, deadline).await {
            Ok(is_asked_for) => Ok(is_asked_for.then_some(attempt)),
            Err(error) => {
                self.access.note_failed_write(&mut attempt, &error, len);
                Err(error)
            }
        }
    }

    fn decide(&self, item: &StoreItem, head: Result<Option<Head>, StoreError>) -> Decision {
        let answer = |answer| Decision::Answer(answer);
        let (offset, found) = (self.access.store.payload_offset(), item.slot.len());
        let max = self
            .access
            .store
            .max_value_len()
            .saturating_sub(offset)
            .min(MAX_PAYLOAD_LEN);
        if found > max {
            let error = StoreError::TooLarge { max, found };
            self.access.refusals.refused(&error, found, now());
            return answer(Err(error.into()));
        }
        let head = match head {
            Ok(Some(head)) => head,
            Ok(None) => return Decision::Put(PutMode::Create),
            Err(error) => return answer(Err(error.into())),
        };
        match head.check(&item.key) {
            Ok(_) if self.damaged.contains(&item.key, now()) => Decision::Put(PutMode::Replace),
            Ok(_) => answer(Ok(Stored::Present)),
            Err(refusal) => {
                self.access.counters.refused(refusal);
                match refusal.is_newer() {
                    true => answer(Ok(Stored::Declined)),
                    false => Decision::Put(PutMode::Replace),
                }
            }
        }
    }

    /// Writes values. Their headers, with checksums that are not known yet, are computed on a thread while
    /// earlier values are being sent to the store.
    fn put(
        &self,
        folder: ChunkFolder,
        puts: Vec<(StoreItem, PutMode)>,
        deadline: Instant,
    ) -> impl Stream<Item = (usize, Result<Put, StoreError>)> {
        let offset = self.access.store.payload_offset();
        let (groups, mut summed) = mpsc::unbounded_channel();
        tokio::task::spawn_blocking(move || {
            let (mut first, mut group, mut bytes) = (0, Vec::new(), 0);
            for (item, mode) in puts {
                let StoreItem { key, slot, .. } = item;
                let header = Header::raw(key, offset, slot.len(), slot.checksum());
                bytes += slot.len();
                group.push(PutItem {
                    folder,
                    header,
                    slot,
                    mode,
                });
                if group.len() < GROUP.0 || bytes < GROUP.1 {
                    continue;
                }
                let next = first + group.len();
                // If the writer is gone, so is the receiver.
                if groups.send((first, std::mem::take(&mut group))).is_err() {
                    return;
                }
                (first, bytes) = (next, 0);
            }
            let _ = groups.send((first, group));
        });
        let groups = stream::poll_fn(move |context| summed.poll_recv(context));
        let put = move |(first, items)| {
            let put = self.access.store.put(items, deadline);
            put.map(move |(at, put)| (first + at, put))
        };
        groups.map(put).flatten_unordered(None)
    }

    pub(super) async fn remove(
        self: &Arc<Self>,
        keys: &[ChunkKey],
        deadline: Instant,
    ) -> Vec<Result<bool, BackendError>> {
        let folder = match self.check_writes() {
            Ok(folder) => folder,
            Err(error) => return each(keys.len(), &error),
        };
        if keys.is_empty() {
            return Vec::new();
        }
        let (answer, answered) = oneshot::channel();
        let (this, batch) = (Arc::clone(self), keys.to_vec());
        self.access.spawn_tracked(async move {
            let is_abandoned = || answer.is_closed();
            let removed = this
                .remove_all(folder, &batch, deadline, is_abandoned)
                .await;
            // If the caller is gone, so is the receiver.
            let _ = answer.send(removed);
        });
        let removed = answered.await;
        removed.unwrap_or_else(|_| each(keys.len(), &BackendError::Closed))
    }

    async fn remove_all(
        self: &Arc<Self>,
        folder: ChunkFolder,
        keys: &[ChunkKey],
        deadline: Instant,
        is_abandoned: impl Fn() -> bool,
    ) -> Vec<Result<bool, BackendError>> {
        let mut results: HashMap<ChunkKey, Result<bool, BackendError>> = HashMap::new();
        let mut left = keys.to_vec();
        left.sort();
        left.dedup();
        while !left.is_empty() {
            let claimed = self.claims.take(&mut left, |key| *key, deadline).await;
            // A removal whose caller left before it began could overtake the caller's next operation.
            if claimed.is_empty() || is_abandoned() {
                break;
            }
            let names = claimed.iter().map(|(_, key)| folder.value(*key).into());
            let names: Vec<Name> = names.collect();
            let removed = self.access.store.remove(&names, deadline).await;
            self.access.note_aside(&removed);
            let removed = removed
                .into_iter()
                .map(|one| one.map_err(BackendError::from));
            results.extend(claimed.iter().map(|(_, key)| *key).zip(removed));
        }
        let answer = |key: &ChunkKey| match results.get_mut(key) {
            None => Err(BackendError::Deadline),
            Some(Err(error)) => Err(error.clone()),
            // The second of two equal keys finds that the first one was removed.
            Some(Ok(removed)) => Ok(std::mem::take(removed)),
        };
        keys.iter().map(answer).collect()
    }
}
