//! Lookups and loads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use lmc_backend::{
    Answers, BackendError, FailedSlot, LoadItem, Loaded, Located, Location, ReadRate, Unavailable,
    now, ready,
};
use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, checksum};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

use super::access::{StoreAccess, each};
use super::breaker::Attempt;
use super::clears::ClearsSync;
use super::recent::{Asked, RecentKeys};
use crate::format::{ChunkFolder, Header, Refusal, ValueName};
use crate::store::{GetItem, Got, Head, StoreError};

/// Most lookups in progress.
const MAX_LOOKUPS: usize = 64;
/// Most keys that are remembered as touched.
const MAX_TOUCHED: usize = 65_536;
/// Time before a key is touched again, if its store keeps values for at least twice this time.
const TOUCH_PAUSE: Duration = Duration::from_secs(3600);

type Heads = Vec<Result<Option<Head>, StoreError>>;

/// Lookups and loads of values.
#[derive(Debug)]
pub(super) struct ValueReader {
    access: Arc<StoreAccess>,
    clears: Arc<ClearsSync>,
    /// Keys that the store lacks; the writer removes the keys that it stores.
    absent: Arc<RecentKeys>,
    /// Keys whose value was damaged: they count as absent too, until they are stored here again.
    damaged: Arc<RecentKeys>,
    /// Keys that were touched recently.
    touched: RecentKeys,
    lookups: Semaphore,
    rate: ReadRate,
}

impl ValueReader {
    pub(super) fn new(
        access: &Arc<StoreAccess>,
        clears: &Arc<ClearsSync>,
        absent: &Arc<RecentKeys>,
        damaged: &Arc<RecentKeys>,
    ) -> Self {
        Self {
            touched: RecentKeys::new(touch_pause(access.store.touch_age()), MAX_TOUCHED),
            lookups: Semaphore::new(MAX_LOOKUPS),
            rate: ReadRate::default(),
            access: Arc::clone(access),
            clears: Arc::clone(clears),
            absent: Arc::clone(absent),
            damaged: Arc::clone(damaged),
        }
    }

    pub(super) async fn locate(
        self: &Arc<Self>,
        keys: &[ChunkKey],
        deadline: Instant,
    ) -> Vec<Result<Located, BackendError>> {
        let now = now();
        // A chunk that cannot be loaded is not reported as present, except to the load that tries the path.
        let checked = self.clears.check().and_then(|folder| {
            self.access.paths.loads.check(now)?;
            Ok(folder)
        });
        let folder = match checked {
            Ok(folder) => folder,
            Err(error) => return each(keys.len(), &error),
        };
        let asked = keys.iter().filter(|key| !self.is_known_absent(key, now));
        let asked: Vec<ChunkKey> = asked.copied().collect();
        self.access
            .counters
            .known_absent
            .add((keys.len() - asked.len()) as u64);
        if asked.is_empty() {
            return keys.iter().map(|_| Ok(Located::Absent)).collect();
        }
        let mut found = match self.access.paths.lookups.begin(now) {
            Ok(attempt) => self.ask(attempt, folder, asked.clone(), deadline).await,
            Err(error) => each(asked.len(), &error.into()),
        }
        .into_iter();
        // The looked-up keys are in the order of the batch.
        let mut asked = asked.into_iter().peekable();
        let answer = |key: &ChunkKey| match asked.next_if_eq(key) {
            Some(_) => found.next().unwrap_or(Err(BackendError::Deadline)),
            None => Ok(Located::Absent),
        };
        keys.iter().map(answer).collect()
    }

    fn is_known_absent(&self, key: &ChunkKey, now: Instant) -> bool {
        self.absent.contains(key, now) || self.damaged.contains(key, now)
    }

    /// Reads headers from the store. The request continues to its end even if its caller waits for less time,
    /// so that the answer is known to the next caller.
    async fn ask(
        self: &Arc<Self>,
        attempt: Attempt,
        folder: ChunkFolder,
        keys: Vec<ChunkKey>,
        deadline: Instant,
    ) -> Vec<Result<Located, BackendError>> {
        let len = keys.len();
        let (answer, answered) = oneshot::channel();
        let this = Arc::clone(self);
        self.access.spawn_tracked(async move {
            let Ok(_permit) = this.lookups.try_acquire() else {
                this.access.counters.lookups_refused.add(1);
                let reason = "too many lookups wait for the store".to_owned();
                let _ = answer.send(each(keys.len(), &Unavailable { reason }.into()));
                return;
            };
            let asked: Vec<Asked> = keys.iter().map(|key| this.absent.asking(key)).collect();
            let until = deadline.max(now() + this.access.config.timeout);
            let names: Vec<ValueName> = keys.iter().map(|&key| folder.value(key)).collect();
            let mut heads = this.access.store.heads(&names, until);
            let in_time = tokio::time::timeout_at(deadline.into(), &mut heads).await;
            // The caller may be gone: the answers are useful to the next one.
            match in_time {
                Ok(heads) => {
                    let _ = answer.send(this.located(attempt, &keys, &asked, heads));
                }
                Err(_) => {
                    let _ = answer.send(each(keys.len(), &BackendError::Deadline));
                    let heads = heads.await;
                    this.located(attempt, &keys, &asked, heads);
                }
            }
        });
        let closed = |_| each(len, &BackendError::Closed);
        answered.await.unwrap_or_else(closed)
    }

    /// Records and checks the headers of values.
    fn located(
        &self,
        attempt: Attempt,
        keys: &[ChunkKey],
        asked: &[Asked],
        heads: Heads,
    ) -> Vec<Result<Located, BackendError>> {
        self.access.note(attempt, &heads);
        let now = now();
        let heads = keys.iter().zip(asked).zip(heads);
        let located = heads.map(|((key, asked), head)| {
            let Some(head) = head? else {
                self.absent.insert(*key, *asked, now);
                return Ok(Located::Absent);
            };
            match head.check(key) {
                Ok(header) => Ok(self.location(&header)),
                Err(refusal) => {
                    self.access.counters.refused(refusal);
                    Ok(Located::Absent)
                }
            }
        });
        located.collect()
    }

    fn location(&self, header: &Header) -> Located {
        let cost = self.rate.time(header.stored_len);
        Located::Present(Location::new(header.plain_len).with_cost(cost))
    }

    /// Loads a batch. The store reads several values at a time. Each value is verified on a task of its own
    /// while the next ones are being read, and then answered.
    pub(super) fn load(
        self: &Arc<Self>,
        items: Vec<LoadItem>,
        deadline: Instant,
    ) -> Answers<'_, Loaded> {
        if items.is_empty() {
            return ready([]);
        }
        let begun = self.clears.check().and_then(|folder| {
            let attempt = self.access.paths.loads.begin(now())?;
            Ok((folder, attempt))
        });
        let (folder, attempt) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                let failed = |item: LoadItem| failed(error.clone(), item.slot);
                return ready(items.into_iter().map(failed).collect::<Vec<_>>());
            }
        };
        let (answers, mut answered) = mpsc::unbounded_channel();
        let reading = Arc::clone(self).read(attempt, folder, items, deadline, answers);
        let reading = self.access.spawn(reading);
        Box::pin(stream::poll_fn(move |context| {
            // The task ends with the stream.
            let _ = &reading;
            answered.poll_recv(context)
        }))
    }

    async fn read(
        self: Arc<Self>,
        mut attempt: Attempt,
        folder: ChunkFolder,
        items: Vec<LoadItem>,
        deadline: Instant,
        answers: mpsc::UnboundedSender<(usize, Loaded)>,
    ) {
        let keys: Vec<ChunkKey> = items.iter().map(|item| item.key).collect();
        let asking = |key| (self.absent.asking(key), self.damaged.asking(key));
        let asked: Vec<(Asked, Asked)> = keys.iter().map(asking).collect();
        let item = |LoadItem { key, slot, .. }| GetItem {
            name: folder.value(key),
            slot,
        };
        let items = items.into_iter().map(item).collect();
        let mut reading = Reading::begin(&self.rate);
        let mut verifying = JoinSet::new();
        let mut got = self.access.store.get(items, deadline);
        while let Some((index, got)) = got.next().await {
            match &got {
                Got::Value { .. } => attempt.succeeded(),
                Got::Failed { error, .. } => self.access.note_failure(&mut attempt, error),
                // The header, or its absence, was the answer.
                Got::Absent(_) | Got::Refused { .. } => {}
            }
            // If the caller is gone, the receiver is gone, and this task ends with it.
            let answer = |loaded| drop(answers.send((index, loaded)));
            match got {
                Got::Value { header, slot, age } => {
                    let asked = asked.get(index).map(|(_, damaged)| *damaged);
                    reading.bytes += header.stored_len;
                    let (this, answers) = (Arc::clone(&self), answers.clone());
                    verifying.spawn(async move {
                        let loaded = this.verify(&header, slot, asked);
                        let is_hit = matches!(loaded, Loaded::Hit(_));
                        let _ = answers.send((index, loaded));
                        (is_hit && this.is_aging(&header.key, age)).then_some(header.key)
                    });
                }
                Got::Absent(slot) => {
                    if let (Some(key), Some((asked, _))) = (keys.get(index), asked.get(index)) {
                        self.absent.insert(*key, *asked, now());
                    }
                    answer(Loaded::Miss(slot));
                }
                Got::Refused { refusal, slot } => {
                    self.access.counters.refused(refusal);
                    answer(match refusal {
                        Refusal::Length { expected, found } => {
                            failed(BackendError::Length { expected, found }, slot)
                        }
                        _ => Loaded::Miss(slot),
                    });
                }
                Got::Failed { error, slot } => answer(Loaded::Failed {
                    error: error.into(),
                    slot,
                }),
            }
        }
        drop((reading, attempt));
        let verified = verifying.join_all().await;
        let aging = verified.into_iter().flatten();
        let aging: Vec<ValueName> = aging.map(|key| folder.value(key)).collect();
        if !aging.is_empty() {
            let this = Arc::clone(&self);
            self.access
                .spawn_tracked(async move { this.touch(aging).await });
        }
    }

    /// Returns true if a value has lived for more than half of its lifetime and was not touched recently.
    fn is_aging(&self, key: &ChunkKey, age: Option<Duration>) -> bool {
        let (Some(age), Some(touch_age)) = (age, self.access.store.touch_age()) else {
            return false;
        };
        age > touch_age && !self.touched.contains(key, now())
    }

    /// Resets the age of values that are read. Otherwise the shared heads of prompts would expire first, and
    /// leave tails that no prompt can reach.
    async fn touch(&self, names: Vec<ValueName>) {
        let now = now();
        if self.access.paths.writes.check(now).is_err() {
            return;
        }
        for ValueName { key, .. } in &names {
            self.touched.insert(*key, self.touched.asking(key), now);
        }
        let deadline = now + self.access.config.timeout;
        let touched = self.access.store.touch(&names, deadline).await;
        self.access.note_aside(&touched);
        for (name, touched) in names.iter().zip(&touched) {
            if touched.as_ref().is_err_and(|error| !error.is_refusal()) {
                // The next hit tries again, before the value expires.
                self.touched.stored(&name.key);
            }
        }
        let done = touched.iter().filter(|touched| matches!(touched, Ok(true)));
        self.access.counters.touched.add(done.count() as u64);
    }

    /// Compares a payload with its header. `asked`: state of the damaged keys before the read.
    fn verify(&self, header: &Header, slot: ReservedSlot, asked: Option<Asked>) -> Loaded {
        let slot = slot.written();
        let sum = checksum(slot.bytes());
        if slot.arena().is_lost() {
            let error = std::io::Error::other("the slot's memory was lost");
            return failed(error.into(), slot.into_reserved());
        }
        if sum == header.plain_sum {
            return Loaded::Hit(slot.with_checksum(sum));
        }
        self.access.counters.damaged.add(1);
        if let Some(asked) = asked {
            self.damaged.insert(header.key, asked, now());
        }
        Loaded::Miss(slot.into_reserved())
    }
}

fn failed(error: BackendError, slot: ReservedSlot) -> Loaded {
    let slot = FailedSlot::Released(slot);
    Loaded::Failed { error, slot }
}

/// Returns the time before a key of a store is touched again. A value is touched from the age `touch_age` on,
/// which is at most half of its lifetime. With a pause of that length, no value that is read again expires.
fn touch_pause(touch_age: Option<Duration>) -> Duration {
    touch_age.map_or(TOUCH_PAUSE, |age| TOUCH_PAUSE.min(age))
}

/// Measures the time in which a batch is read, for estimates.
struct Reading<'a> {
    rate: &'a ReadRate,
    bytes: u64,
}

impl<'a> Reading<'a> {
    fn begin(rate: &'a ReadRate) -> Self {
        rate.begin(now());
        Self { rate, bytes: 0 }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.rate.end(self.bytes, now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_touched_once_an_hour_where_its_time_allows_that_and_before_it_expires() {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        for (age, pause) in [(1, 1), (59, 59), (60, 60), (10_000, 60)] {
            assert_eq!(touch_pause(Some(minutes(age))), minutes(pause), "{age}");
        }
        assert_eq!(touch_pause(None), minutes(60));
    }
}
