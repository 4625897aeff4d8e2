//! The transfers of a worker that are queued or under way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use lmc_memory::cuda::{CudaError, Mark};

use crate::adapters::Prompt;
use crate::adapters::link::SessionId;
use crate::protocol::RequestConfigs;

/// One transfer between blocks of the engine and chunks of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadStoreOp {
    /// Id of the request.
    pub request_id: String,
    /// The prompt up to the end of the range, at least.
    pub prompt: Prompt,
    /// The range in tokens: whole chunks, or the blocks of a [`Prompt::Tail`].
    pub tokens: Range<usize>,
    /// The blocks of the range in each group of layers, in the order in which the groups are
    /// registered.
    pub block_ids: Vec<Vec<u32>>,
    /// Tokens at the start of the range whose blocks a retrieve must not write.
    pub skip_first_n_tokens: usize,
    /// Name of the tenant.
    pub cache_salt: String,
    /// Settings of the request.
    pub configs: RequestConfigs,
    /// Number by which [`crate::adapters::WorkerAdapter::take_ended_stores`] reports this store; `None`: it does not
    /// report the store.
    pub store_number: Option<u64>,
}

/// A store that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedStore {
    /// Number of the store.
    pub number: u64,
    /// Chunks that this store has added to the server, counted from the first chunk of its range.
    pub chunks: Vec<u64>,
}

/// Requests whose transfers have ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Finished {
    /// Requests that the engine has reported as finished and that have no store left.
    pub stores: HashSet<String>,
    /// Requests whose retrieves have all ended, also failed ones.
    pub retrieves: HashSet<String>,
    /// The requests in `retrieves` that lack chunks.
    pub failed: HashSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Store,
    Retrieve,
}

/// A transfer that is queued or under way, with its number.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) number: u64,
    pub(super) direction: Direction,
    pub(super) op: LoadStoreOp,
    /// The engine's work on its GPU that must end before the copy; `None` for memory of the host.
    pub(super) after: Option<Result<Arc<Mark>, CudaError>>,
}

/// Progress of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Queued,
    /// The server has answered for the store's slots: lookups now see that its chunks are being
    /// written.
    Reserved,
    Copying,
    /// The blocks may be reused; the server has not confirmed the store yet.
    Copied,
}

/// A store that has not ended.
#[derive(Debug, Clone, Copy)]
struct Store {
    progress: Progress,
    /// First token of the store's range.
    start: usize,
}

/// Transfers of one request that have not ended.
#[derive(Debug, Default)]
struct OfRequest {
    /// Stores by their numbers.
    stores: HashMap<u64, Store>,
    retrieves: usize,
    /// True if the request had a store whose end was not reported yet.
    had_stores: bool,
    /// True once the engine has reported the request as finished.
    finished: bool,
}

#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) retrieves: VecDeque<Transfer>,
    pub(super) stores: VecDeque<Transfer>,
    requests: HashMap<String, OfRequest>,
    /// Requests whose retrieves have ended since the last report.
    retrieved: HashSet<String>,
    /// Requests with a retrieve that failed, until they are reported.
    pub(super) failed: HashSet<String>,
    pub(super) failed_blocks: HashSet<u32>,
    /// Stores with a number that have ended since the last report.
    pub(super) ended: Vec<EndedStore>,
    pub(super) stopped: bool,
    /// True while the engine takes back its memory: no copy begins.
    pub(super) withdrawing: bool,
    /// Number of threads that carry out transfers now.
    pub(super) carrying: usize,
    /// Last connection over which the server was notified that nothing is copied for earlier
    /// connections.
    pub(super) settled: SessionId,
    /// True once another thread carries out the retrieves.
    pub(super) has_loader: bool,
    next_number: u64,
}

impl Work {
    pub(super) fn queue(
        &mut self,
        direction: Direction,
        op: LoadStoreOp,
        after: Option<Result<Arc<Mark>, CudaError>>,
    ) {
        let number = self.next_number;
        self.next_number += 1;
        let request = self.requests.entry(op.request_id.clone()).or_default();
        let queue = match direction {
            Direction::Store => {
                let store = Store {
                    progress: Progress::Queued,
                    start: op.tokens.start,
                };
                request.stores.insert(number, store);
                request.had_stores = true;
                &mut self.stores
            }
            Direction::Retrieve => {
                request.retrieves += 1;
                &mut self.retrieves
            }
        };
        queue.push_back(Transfer {
            number,
            direction,
            op,
            after,
        });
    }

    /// Returns true while transfers are carried out, or are queued for running threads.
    pub(super) fn is_busy(&self) -> bool {
        let is_queued = !self.stores.is_empty() || !self.retrieves.is_empty();
        self.carrying > 0 || (is_queued && !self.stopped)
    }

    /// Returns true if a transfer is still to be carried out.
    pub(super) fn is_wanted(&self, transfer: &Transfer) -> bool {
        let request = self.requests.get(&transfer.op.request_id);
        let has_store = |request: &OfRequest| request.stores.contains_key(&transfer.number);
        !self.stopped
            && !self.withdrawing
            && (transfer.direction == Direction::Retrieve || request.is_some_and(has_store))
    }

    /// Notes that the server has answered for the slots of a store.
    pub(super) fn reserved(&mut self, request_id: &str, number: u64) {
        if let Some(request) = self.requests.get_mut(request_id)
            && let Some(store) = request.stores.get_mut(&number)
            && store.progress == Progress::Queued
        {
            store.progress = Progress::Reserved;
        }
    }

    /// Returns true if the server has not answered yet for the slots of a store of these requests.
    pub(super) fn is_unreserved(&self, request_ids: &[String]) -> bool {
        let is_queued = |store: &Store| store.progress == Progress::Queued;
        let requests = request_ids.iter().filter_map(|id| self.requests.get(id));
        requests
            .flat_map(|request| request.stores.values())
            .any(is_queued)
    }

    /// Returns true if a transfer may be copied now: it was not dropped meanwhile.
    pub(super) fn begin_copy(&mut self, transfer: &Transfer) -> bool {
        if self.withdrawing {
            return false;
        }
        let request = self.requests.get_mut(&transfer.op.request_id);
        match transfer.direction {
            Direction::Retrieve => true,
            Direction::Store => request
                .and_then(|request| request.stores.get_mut(&transfer.number))
                .is_some_and(|store| {
                    store.progress = Progress::Copying;
                    true
                }),
        }
    }

    /// Notes that a store no longer needs its blocks.
    pub(super) fn end_copy(&mut self, transfer: &Transfer) {
        if let Some(request) = self.requests.get_mut(&transfer.op.request_id)
            && let Some(store) = request.stores.get_mut(&transfer.number)
        {
            store.progress = Progress::Copied;
        }
    }

    /// Notes the end of a transfer, and the chunks that it moved. Returns false for a store that was
    /// dropped before.
    pub(super) fn end(&mut self, transfer: &Transfer, chunks: &[u64]) -> bool {
        let request_id = &transfer.op.request_id;
        if let (Direction::Store, Some(number)) = (transfer.direction, transfer.op.store_number) {
            let chunks = chunks.to_vec();
            self.ended.push(EndedStore { number, chunks });
        }
        let Some(request) = self.requests.get_mut(request_id) else {
            return false;
        };
        match transfer.direction {
            Direction::Store => request.stores.remove(&transfer.number).is_some(),
            Direction::Retrieve => {
                request.retrieves -= 1;
                if request.retrieves == 0 {
                    self.retrieved.insert(request_id.clone());
                    if !request.had_stores {
                        self.requests.remove(request_id);
                    }
                }
                true
            }
        }
    }

    /// Notes the requests that the engine has reported as finished, and returns those whose
    /// transfers have ended.
    pub(super) fn report(&mut self, finished: impl IntoIterator<Item = String>) -> Finished {
        for request_id in finished {
            if let Some(request) = self.requests.get_mut(&request_id) {
                request.finished = true;
            }
        }
        let mut stores = HashSet::new();
        self.requests.retain(|request_id, request| {
            if request.had_stores && request.finished && request.stores.is_empty() {
                request.had_stores = false;
                stores.insert(request_id.clone());
            }
            request.had_stores || request.retrieves > 0
        });
        let retrieves = std::mem::take(&mut self.retrieved);
        let failed = (self.failed)
            .extract_if(|request_id| retrieves.contains(request_id))
            .collect();
        Finished {
            stores,
            retrieves,
            failed,
        }
    }

    /// Returns true while a store of the request needs blocks of tokens before token `before`.
    pub(super) fn has_stores(&self, request_id: &str, before: usize) -> bool {
        let request = self.requests.get(request_id);
        let needs_blocks =
            |store: &Store| store.start < before && store.progress != Progress::Copied;
        request.is_some_and(|request| request.stores.values().any(needs_blocks))
    }

    /// Drops the stores of a request that need blocks of tokens before token `before` and are not
    /// being copied. Returns their number.
    pub(super) fn drop_stores(&mut self, request_id: &str, before: usize) -> usize {
        let Some(request) = self.requests.get_mut(request_id) else {
            return 0;
        };
        let count = request.stores.len();
        let stays = |store: &Store| {
            let has_begun = matches!(store.progress, Progress::Copying | Progress::Copied);
            store.start >= before || has_begun
        };
        request.stores.retain(|_, store| stays(store));
        let stores = &request.stores;
        self.stores.retain(|transfer| {
            let stays =
                transfer.op.request_id != request_id || stores.contains_key(&transfer.number);
            if let (false, Some(number)) = (stays, transfer.op.store_number) {
                let chunks = Vec::new();
                self.ended.push(EndedStore { number, chunks });
            }
            stays
        });
        count - stores.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapters::Prompt;
    use crate::protocol::RequestConfigs;

    #[test]
    fn no_copy_begins_while_the_memory_is_being_taken_out_of_use() {
        let mut work = Work::default();
        let op = LoadStoreOp {
            request_id: "a".to_owned(),
            prompt: Prompt::Chunks(Arc::from([])),
            tokens: 0..0,
            block_ids: Vec::new(),
            skip_first_n_tokens: 0,
            cache_salt: String::new(),
            configs: RequestConfigs::default(),
            store_number: None,
        };
        work.queue(Direction::Store, op.clone(), None);
        work.queue(Direction::Retrieve, op, None);
        let transfers = [work.stores.pop_front(), work.retrieves.pop_front()].map(Option::unwrap);
        for withdrawing in [false, true] {
            work.withdrawing = withdrawing;
            for transfer in &transfers {
                let what = (transfer.direction, withdrawing);
                assert_eq!(work.is_wanted(transfer), !withdrawing, "{what:?}");
                assert_eq!(work.begin_copy(transfer), !withdrawing, "{what:?}");
            }
        }
        work.carrying = 1;
        assert!(work.is_busy());
    }
}
