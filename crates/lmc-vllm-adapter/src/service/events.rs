//! The log of stored and removed chunks, and the subscriptions that read it.
//!
//! The log is bounded: a subscriber that falls behind is notified that it lost events and starts
//! over. Appending never waits for a subscriber.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use lmc_key::ChunkHash;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::protocol::{KvEvent, KvEventBatch, KvEventKind};
use crate::service::ClientId;

/// Most events of one batch, as in LMCache.
pub(crate) const MAX_BATCH: usize = 1024;

/// A chunk that became findable, with what a router needs to know about it.
#[derive(Debug, Clone)]
pub(crate) struct StoredChunk {
    pub(crate) hash: ChunkHash,
    pub(crate) parent: Option<ChunkHash>,
    pub(crate) tokens: Box<[u32]>,
}

#[derive(Debug)]
struct Record {
    model: Arc<str>,
    hash: ChunkHash,
    /// Parent and tokens of a stored chunk; `None` for a removal.
    stored: Option<(Option<ChunkHash>, Box<[u32]>)>,
}

#[derive(Debug, Default)]
struct Log {
    records: VecDeque<Record>,
    /// Sequence number of the record at the front; the first ever is 1.
    first_seq: u64,
    /// The running subscriptions of each instance: at most one for each connection.
    subscribers: HashMap<u64, HashMap<ClientId, u64>>,
    next_subscription: u64,
}

impl Log {
    /// Returns false once a subscription has ended or was replaced.
    fn runs(&self, subscription: &Subscription) -> bool {
        let of_instance = self.subscribers.get(&subscription.instance_id);
        let running = of_instance.and_then(|of_instance| of_instance.get(&subscription.client));
        running == Some(&subscription.number)
    }
}

/// A reader's position in the log.
#[derive(Debug)]
pub(crate) struct Subscription {
    instance_id: u64,
    client: ClientId,
    /// Number among all subscriptions; a later one of the instance and connection ends this one.
    number: u64,
    model: String,
    cursor: u64,
    max_events: usize,
    /// True while the batch that confirms the subscription is still owed.
    first: bool,
    ended: bool,
}

/// The answer of a subscription to its reader.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextBatch {
    /// No events.
    Nothing,
    /// A batch to send.
    Batch(KvEventBatch),
    /// The subscription is over.
    End,
}

/// State of the log, for status reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogStatus {
    pub(crate) enabled: bool,
    pub(crate) incarnation: u64,
    pub(crate) depth: usize,
    pub(crate) capacity: usize,
    pub(crate) next_seq: u64,
    pub(crate) subscribers: usize,
}

#[derive(Debug)]
pub(crate) struct EventLog {
    capacity: usize,
    incarnation: u64,
    log: Mutex<Log>,
    /// Sequence number of the newest record; a change wakes the waiting readers.
    newest: watch::Sender<u64>,
}

impl EventLog {
    /// Makes a log of `capacity` records; with 0 it keeps none and reports that to subscribers. The
    /// incarnation must differ from that of every earlier start.
    pub(crate) fn new(capacity: usize, incarnation: u64) -> Self {
        let log = Log {
            first_seq: 1,
            ..Log::default()
        };
        Self {
            capacity,
            incarnation,
            log: Mutex::new(log),
            newest: watch::Sender::new(0),
        }
    }

    pub(crate) fn enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Returns a receiver that changes with every record and with the end of every subscription.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    pub(crate) fn stored(&self, model: &Arc<str>, chunks: impl IntoIterator<Item = StoredChunk>) {
        self.append(chunks.into_iter().map(|chunk| Record {
            model: Arc::clone(model),
            hash: chunk.hash,
            stored: Some((chunk.parent, chunk.tokens)),
        }));
    }

    pub(crate) fn removed(&self, model: &Arc<str>, hash: ChunkHash) {
        self.append([Record {
            model: Arc::clone(model),
            hash,
            stored: None,
        }]);
    }

    fn append(&self, records: impl IntoIterator<Item = Record>) {
        if !self.enabled() {
            return;
        }
        let newest = {
            let mut log = self.log.lock();
            for record in records {
                if log.records.len() == self.capacity {
                    log.records.pop_front();
                    log.first_seq += 1;
                }
                log.records.push_back(record);
            }
            log.first_seq + log.records.len() as u64 - 1
        };
        self.newest.send_replace(newest);
    }

    /// Begins a subscription after `cursor`; an earlier one of the instance on this connection
    /// ends.
    pub(crate) fn subscribe(
        &self,
        client: ClientId,
        instance_id: u64,
        model: String,
        cursor: u64,
        max_events: usize,
    ) -> Subscription {
        let mut log = self.log.lock();
        log.next_subscription += 1;
        let number = log.next_subscription;
        let of_instance = log.subscribers.entry(instance_id).or_default();
        of_instance.insert(client, number);
        drop(log);
        self.newest.send_modify(|_| {});
        let max_events = max_events.clamp(1, MAX_BATCH);
        Subscription {
            instance_id,
            client,
            number,
            model,
            cursor,
            max_events,
            first: true,
            ended: false,
        }
    }

    /// Ends the subscriptions of a removed instance.
    pub(crate) fn unsubscribe(&self, instance_id: u64) {
        if self.log.lock().subscribers.remove(&instance_id).is_some() {
            self.newest.send_modify(|_| {});
        }
    }

    /// Forgets a subscription whose reader went away, unless a newer one replaced it.
    pub(crate) fn forget(&self, subscription: &Subscription) {
        let mut log = self.log.lock();
        if !log.runs(subscription) {
            return;
        }
        if let Some(of_instance) = log.subscribers.get_mut(&subscription.instance_id) {
            of_instance.remove(&subscription.client);
            if of_instance.is_empty() {
                log.subscribers.remove(&subscription.instance_id);
            }
        }
    }

    pub(crate) fn ended(&self, subscription: &Subscription) -> bool {
        subscription.ended || !self.log.lock().runs(subscription)
    }

    /// Returns the next answer for the subscription's reader. The first call always returns a
    /// batch, which confirms the subscription.
    pub(crate) fn next(&self, subscription: &mut Subscription) -> NextBatch {
        if self.ended(subscription) {
            return NextBatch::End;
        }
        let batch = self.read(subscription);
        let confirm = std::mem::take(&mut subscription.first);
        subscription.cursor = batch.next_cursor;
        subscription.ended = !batch.enabled;
        if confirm || batch.lost || !batch.events.is_empty() {
            return NextBatch::Batch(batch);
        }
        NextBatch::Nothing
    }

    fn read(&self, subscription: &Subscription) -> KvEventBatch {
        let log = self.log.lock();
        let next_seq = log.first_seq + log.records.len() as u64;
        // A cursor from before this start (or from the future) cannot be continued.
        let lost = subscription.cursor.saturating_add(1) < log.first_seq
            || subscription.cursor >= next_seq;
        let lost = lost && !(subscription.cursor == 0 && next_seq == 1);
        let from = if lost {
            log.first_seq
        } else {
            subscription.cursor.saturating_add(1)
        };
        let mut next_cursor = from - 1;
        let mut events = Vec::new();
        let skip = usize::try_from(from - log.first_seq).unwrap_or(usize::MAX);
        for (seq, record) in (from..).zip(log.records.iter().skip(skip)) {
            next_cursor = seq;
            if *record.model == *subscription.model {
                events.push(event(seq, record));
                if events.len() == subscription.max_events {
                    break;
                }
            }
        }
        KvEventBatch {
            enabled: self.enabled(),
            incarnation: self.incarnation,
            next_cursor,
            lost: lost && self.enabled(),
            events,
        }
    }

    pub(crate) fn status(&self) -> LogStatus {
        let log = self.log.lock();
        LogStatus {
            enabled: self.enabled(),
            incarnation: self.incarnation,
            depth: log.records.len(),
            capacity: self.capacity,
            next_seq: log.first_seq + log.records.len() as u64,
            subscribers: log.subscribers.values().map(HashMap::len).sum(),
        }
    }
}

fn event(seq: u64, record: &Record) -> KvEvent {
    let (kind, parent, tokens) = match &record.stored {
        None => (KvEventKind::Removed, None, Vec::new()),
        Some((parent, tokens)) => (KvEventKind::Stored, *parent, tokens.to_vec()),
    };
    KvEvent {
        seq,
        kind,
        model_name: record.model.to_string(),
        hash: record.hash.as_bytes().to_vec(),
        parent: parent.map(|parent| parent.as_bytes().to_vec()),
        tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(number: u64) -> ClientId {
        ClientId::new(number)
    }

    fn chunk(byte: u8) -> StoredChunk {
        StoredChunk {
            hash: ChunkHash::new([byte; 32]),
            parent: Some(ChunkHash::new([byte - 1; 32])),
            tokens: vec![u32::from(byte); 4].into(),
        }
    }

    fn seqs(batch: NextBatch) -> Vec<u64> {
        let NextBatch::Batch(batch) = batch else {
            panic!("expected a batch, found {batch:?}")
        };
        batch.events.iter().map(|event| event.seq).collect()
    }

    #[test]
    fn a_subscriber_sees_its_model_in_order_from_its_cursor() {
        let log = EventLog::new(100, 7);
        let (ours, other): (Arc<str>, Arc<str>) = ("ours".into(), "other".into());
        log.stored(&ours, [chunk(1), chunk(2)]);
        log.stored(&other, [chunk(3)]);
        log.removed(&ours, chunk(1).hash);
        let mut subscription = log.subscribe(client(1), 5, "ours".to_owned(), 1, 10);
        assert_eq!(seqs(log.next(&mut subscription)), [2, 4]);
        assert_eq!(log.next(&mut subscription), NextBatch::Nothing);
        log.stored(&ours, [chunk(9)]);
        let NextBatch::Batch(batch) = log.next(&mut subscription) else {
            panic!("no batch")
        };
        assert_eq!(batch.events[0].tokens, [9; 4]);
        assert_eq!(batch.events[0].parent, Some(vec![8; 32]));
        assert_eq!(
            (batch.incarnation, batch.lost, batch.next_cursor),
            (7, false, 5)
        );
    }

    #[test]
    fn the_first_batch_comes_even_when_there_is_nothing() {
        let log = EventLog::new(4, 1);
        let mut subscription = log.subscribe(client(1), 5, "m".to_owned(), 0, 10);
        assert_eq!(seqs(log.next(&mut subscription)), [0; 0]);
        assert_eq!(log.next(&mut subscription), NextBatch::Nothing);
    }

    #[test]
    fn a_slow_subscriber_is_notified_that_it_lost_events() {
        let log = EventLog::new(2, 1);
        let model: Arc<str> = "m".into();
        let mut subscription = log.subscribe(client(1), 5, "m".to_owned(), 0, 10);
        assert_eq!(seqs(log.next(&mut subscription)), [0; 0]);
        log.stored(&model, (1..6).map(chunk));
        let NextBatch::Batch(batch) = log.next(&mut subscription) else {
            panic!("no batch")
        };
        assert!(batch.lost);
        assert_eq!(
            batch.events.iter().map(|e| e.seq).collect::<Vec<_>>(),
            [4, 5]
        );
    }

    #[test]
    fn a_new_subscription_of_a_connection_ends_its_old_one_and_no_other() {
        let log = EventLog::new(2, 1);
        let mut old = log.subscribe(client(1), 5, "m".to_owned(), 0, 10);
        let mut new = log.subscribe(client(1), 5, "m".to_owned(), 0, 10);
        let mut other = log.subscribe(client(2), 5, "m".to_owned(), 0, 10);
        assert_eq!(log.next(&mut old), NextBatch::End);
        log.forget(&old);
        assert_eq!(seqs(log.next(&mut new)), [0; 0]);
        assert_eq!(seqs(log.next(&mut other)), [0; 0]);
        assert_eq!(log.status().subscribers, 2);
        log.forget(&other);
        assert_eq!(log.next(&mut other), NextBatch::End);
        assert_eq!(log.next(&mut new), NextBatch::Nothing);
        log.unsubscribe(5);
        assert_eq!(log.next(&mut new), NextBatch::End);
        assert_eq!(log.status().subscribers, 0);
    }

    #[test]
    fn a_log_of_size_zero_says_so_and_ends() {
        let log = EventLog::new(0, 1);
        log.stored(&"m".into(), [chunk(1)]);
        let mut subscription = log.subscribe(client(1), 5, "m".to_owned(), 0, 10);
        let NextBatch::Batch(batch) = log.next(&mut subscription) else {
            panic!("no batch")
        };
        assert!(!batch.enabled);
        assert_eq!(log.next(&mut subscription), NextBatch::End);
    }
}
