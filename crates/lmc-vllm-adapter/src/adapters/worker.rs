//! The worker's side: moves chunks between the engine's blocks and the server's pool.
//!
//! The engine's thread only queues transfers for the threads of [`Mover`].

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::CopyPool;
use lmc_memory::cuda::Gpus;
use parking_lot::{Condvar, Mutex};

use crate::adapters::common::{Common, ServerState};
use crate::adapters::link::{Link, OwnThread};
use crate::adapters::mover::Mover;
use crate::adapters::work::{Direction, Work};
use crate::adapters::worker_state::{
    Layouts, Registered, WorkerCounters, WorkerSetup, WorkerState, add,
};
use crate::adapters::{
    AdapterError, EndedStore, Endpoint, EngineDescription, Finished, KvLayers, LoadStoreOp,
    LogLine, Timeouts,
};

/// Figures of a [`WorkerAdapter`] since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStats {
    /// Chunks written into the pool and committed.
    pub stored_chunks: u64,
    /// Payload bytes of those chunks.
    pub stored_bytes: u64,
    /// Stores that ended without a commit.
    pub stores_failed: u64,
    /// Chunks read from the pool.
    pub retrieved_chunks: u64,
    /// Payload bytes of those chunks.
    pub retrieved_bytes: u64,
    /// Retrieves that ended without all their chunks.
    pub retrieves_failed: u64,
    /// Time in which bytes were copied, in nanoseconds.
    pub copy_nanos: u64,
    /// Connections to the server that were lost.
    pub connections_lost: u64,
}

/// A stream of an engine's work on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct EngineStream(u64);

impl EngineStream {
    /// Takes a `CUstream` of this process by its address; 0 is the default stream.
    ///
    /// # Safety
    /// `stream` is a stream of the primary context of the GPU whose memory is registered, and stays
    /// one during the calls that it is passed to.
    pub unsafe fn new(stream: u64) -> Self {
        Self(stream)
    }
}

/// Moves the chunks of an engine's worker, without ever waiting on the engine's thread.
#[derive(Debug)]
pub struct WorkerAdapter {
    shared: Arc<WorkerState>,
    link: Arc<Link>,
    thread: OwnThread,
    /// Carries out retrieves if the memory lies on a GPU, whose link has two directions.
    loader: Mutex<Option<OwnThread>>,
}

impl WorkerAdapter {
    /// Connects to a server, and waits at most 5 s for it. Without a server, stores are dropped and
    /// retrieves fail until there is one. `copy_threads` threads copy, including the adapter's own.
    ///
    /// # Errors
    /// [`AdapterError`]: the server's chunks are not whole blocks of the engine, or no thread can be
    /// started.
    pub fn start(
        endpoint: Endpoint,
        engine: EngineDescription,
        kv_rank: u32,
        copy_threads: usize,
    ) -> Result<Self, AdapterError> {
        Self::start_with(endpoint, engine, kv_rank, copy_threads, Timeouts::default())
    }

    /// Connects to a server as [`Self::start`] does, with other timeouts.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(
        endpoint: Endpoint,
        engine: EngineDescription,
        kv_rank: u32,
        copy_threads: usize,
        timeouts: Timeouts,
    ) -> Result<Self, AdapterError> {
        let common = Arc::new(Common::new(engine, timeouts)?);
        if kv_rank >= common.engine.world_size {
            let text = format!(
                "kv_rank must be less than world_size {}, found {kv_rank}",
                common.engine.world_size
            );
            return Err(AdapterError::Invalid(text));
        }
        let mut ids = [0; 16];
        getrandom::fill(&mut ids).map_err(std::io::Error::from)?;
        let ids = u128::from_le_bytes(ids);
        let shared = Arc::new(WorkerState {
            common: Arc::clone(&common),
            // LMCache's server reads a signed number.
            instance_ids: [ids as u64, (ids >> 64) as u64].map(|id| id >> 1),
            pings_second: AtomicBool::new(false),
            kv_rank,
            registered: Mutex::default(),
            gpus: Gpus::without_pool(),
            gpu: Mutex::default(),
            pool: Mutex::default(),
            by_name: AtomicBool::new(false),
            work: Mutex::default(),
            changed: Condvar::new(),
            counters: WorkerCounters::default(),
        });
        let setup = Arc::new(WorkerSetup(Arc::clone(&shared)));
        let link = Arc::new(Link::start(
            endpoint,
            setup,
            Arc::clone(&common.log),
            timeouts.ping,
        )?);
        common.wait_for_server(&link)?;
        let mover = Mover {
            shared: Arc::clone(&shared),
            link: Arc::clone(&link),
            copies: CopyPool::new(copy_threads.saturating_sub(1))?,
            is_loader: false,
        };
        let thread = thread::Builder::new()
            .name("lmc-worker".to_owned())
            .spawn(move || mover.run())?;
        Ok(Self {
            shared,
            link,
            thread: OwnThread::new(thread),
            loader: Mutex::default(),
        })
    }

    /// Registers the paged KV cache, and waits at most 5 s for the server's answer. Without a
    /// server it is registered once there is one. If the KV cache lies on a GPU, this takes 66 MiB
    /// there for copies.
    ///
    /// # Errors
    /// [`AdapterError::Invalid`] for tensors whose layout is not known, [`AdapterError::Gpu`] for a
    /// GPU that cannot be used.
    pub fn register_kv_caches(&self, layers: KvLayers) -> Result<(), AdapterError> {
        let shared = &self.shared;
        // Without a server any chunk size shows whether the layout is known.
        let chunk_size =
            (shared.common.server()).map_or(layers.tokens_per_block(), |s| s.chunk_size);
        let gpu = layers
            .gpu()
            .map(|uuid| shared.gpus.open(uuid))
            .transpose()?;
        let layouts = Layouts::describe(&layers, chunk_size, gpu.as_ref())?;
        if gpu.is_some() {
            self.start_loader()?;
        }
        *shared.gpu.lock() = gpu;
        *shared.registered.lock() = Some(Registered {
            layers,
            layouts,
            chunk_size,
        });
        self.link.reconnect();
        self.link
            .wait_until_up(shared.common.timeouts.start, || false);
        Ok(())
    }

    /// Takes the paged KV cache out of use, as before an engine sleeps. Once this has returned, its
    /// memory is not touched, and all GPU memory that the adapter took is freed. Queued transfers
    /// fail. Waits for copies under way, and for the server's outstanding answers as long as for
    /// any answer. Until the KV cache is registered again, stores are dropped and retrieves fail.
    pub fn unregister_kv_caches(&self) {
        if self.thread.is_forked() {
            return;
        }
        let shared = &self.shared;
        shared.work.lock().withdrawing = true;
        // The link's thread holds `registered` while it sets `pool`.
        *shared.registered.lock() = None;
        *shared.pool.lock() = None;
        *shared.gpu.lock() = None;
        let answered = Instant::now() + shared.common.timeouts.answer;
        let mut work = shared.work.lock();
        while work.is_busy() {
            if shared.changed.wait_until(&mut work, answered).timed_out() {
                break;
            }
        }
        drop(work);
        // The server releases the slots of the former connection.
        self.link.reconnect();
        let mut work = shared.work.lock();
        while work.carrying > 0 {
            shared.changed.wait(&mut work);
        }
        work.withdrawing = false;
        drop(work);
        shared.gpus.wait_until_given_back();
    }

    fn start_loader(&self) -> Result<(), AdapterError> {
        let mut loader = self.loader.lock();
        if loader.is_none() {
            let mover = Mover {
                shared: Arc::clone(&self.shared),
                link: Arc::clone(&self.link),
                copies: CopyPool::new(0)?,
                is_loader: true,
            };
            // From now on the other thread leaves retrieves to this one.
            self.shared.work.lock().has_loader = true;
            let thread = thread::Builder::new()
                .name("lmc-loader".to_owned())
                .spawn(move || mover.run())?;
            *loader = Some(OwnThread::new(thread));
        }
        Ok(())
    }

    /// Queues a store. Its blocks must keep their content until the request is reported by
    /// [`WorkerAdapter::get_finished`], or [`WorkerAdapter::wait_for_stores`] has returned.
    pub fn submit_store_request(&self, op: LoadStoreOp) {
        self.submit(Direction::Store, [op], None);
    }

    /// Queues a retrieve. Its blocks belong to the adapter until the request is reported by
    /// [`WorkerAdapter::get_finished`].
    pub fn submit_retrieve_request(&self, op: LoadStoreOp) {
        self.submit(Direction::Retrieve, [op], None);
    }

    /// Queues several stores, see [`WorkerAdapter::submit_store_request`]. Memory on a GPU is read
    /// once the work that the stream `after` has been given so far is done; without a stream such
    /// stores fail.
    pub fn batched_submit_store_requests(
        &self,
        ops: Vec<LoadStoreOp>,
        after: Option<EngineStream>,
    ) {
        self.submit(Direction::Store, ops, after);
    }

    /// Queues several retrieves, see [`WorkerAdapter::submit_retrieve_request`]. Memory on a GPU is
    /// written once the work that the stream `after` has been given so far is done; without a
    /// stream such retrieves fail.
    pub fn batched_submit_retrieve_requests(
        &self,
        ops: Vec<LoadStoreOp>,
        after: Option<EngineStream>,
    ) {
        self.submit(Direction::Retrieve, ops, after);
    }

    fn submit(
        &self,
        direction: Direction,
        ops: impl IntoIterator<Item = LoadStoreOp>,
        after: Option<EngineStream>,
    ) {
        // Nothing is carried out in a forked process, and the driver does not work there.
        let gpu = match self.thread.is_forked() {
            true => None,
            false => self.shared.gpu.lock().clone(),
        };
        let after = gpu.and_then(|gpu| {
            let EngineStream(stream) = after?;
            // SAFETY: the caller of `EngineStream::new` has promised it.
            let mark = unsafe { gpu.mark(stream) };
            Some(mark.map(Arc::new))
        });
        let mut work = self.shared.work.lock();
        for op in ops {
            work.queue(direction, op, after.clone());
        }
        drop(work);
        self.shared.changed.notify_all();
    }

    /// Returns the requests whose transfers have ended. A request with stores is reported once,
    /// after the engine has reported it as finished, in this call or before. A request with
    /// retrieves is reported when they have ended.
    pub fn get_finished(&self, finished: impl IntoIterator<Item = String>) -> Finished {
        self.shared.work.lock().report(finished)
    }

    /// Returns the blocks that retrieves failed to fill since the last call, for engines with one
    /// group of layers. With several groups, only [`Finished::failed`] reports failures. Called
    /// after [`WorkerAdapter::get_finished`], it returns the blocks of each reported request, now
    /// or in an earlier call.
    pub fn get_block_ids_with_load_errors(&self) -> HashSet<u32> {
        std::mem::take(&mut self.shared.work.lock().failed_blocks)
    }

    /// Returns the stores with a number that have ended since the last call. Called after
    /// [`WorkerAdapter::get_finished`], it returns the stores of each reported request, now or in
    /// an earlier call, except dropped stores.
    pub fn take_ended_stores(&self) -> Vec<EndedStore> {
        std::mem::take(&mut self.shared.work.lock().ended)
    }

    /// Waits, at most for `time`, until the server has answered for the slots of all queued stores
    /// of these requests. From then on a lookup, also of another server's engine, sees that their
    /// chunks are being written. Returns false on timeout.
    pub fn wait_until_reserved(&self, request_ids: &[String], time: Duration) -> bool {
        let shared = &self.shared;
        let deadline = Instant::now() + time;
        let mut work = shared.work.lock();
        while work.is_unreserved(request_ids) {
            if shared.changed.wait_until(&mut work, deadline).timed_out() {
                return !work.is_unreserved(request_ids);
            }
        }
        true
    }

    /// Returns true while a store of the request needs its blocks.
    pub fn has_stores(&self, request_id: &str) -> bool {
        self.shared.work.lock().has_stores(request_id, usize::MAX)
    }

    /// Waits until no store of these requests needs its blocks, so that the blocks may be reused.
    /// After `time`, stores that have not begun are dropped, and only the copy under way is waited
    /// for: its blocks must not change before it has ended. That copy waits for no other process,
    /// but for the GPU if blocks lie there. Returns true if nothing was dropped.
    pub fn wait_for_stores(&self, request_ids: &[String], time: Duration) -> bool {
        let all = request_ids.iter().map(|id| (&id[..], usize::MAX));
        self.wait_for_blocks(&all.collect::<Vec<_>>(), time)
    }

    /// Waits as [`WorkerAdapter::wait_for_stores`] does, but only for the stores of each request
    /// whose range begins before the request's token, and drops no others.
    pub fn wait_for_stores_before(&self, requests: &[(String, usize)], time: Duration) -> bool {
        let all = requests.iter().map(|(id, token)| (&id[..], *token));
        self.wait_for_blocks(&all.collect::<Vec<_>>(), time)
    }

    fn wait_for_blocks(&self, requests: &[(&str, usize)], time: Duration) -> bool {
        let shared = &self.shared;
        let deadline = Instant::now() + time;
        let mut work = shared.work.lock();
        let under_way =
            |work: &Work| (requests.iter()).any(|&(id, before)| work.has_stores(id, before));
        while under_way(&work) {
            if shared.changed.wait_until(&mut work, deadline).timed_out() {
                break;
            }
        }
        if !under_way(&work) {
            return true;
        }
        let dropped = requests
            .iter()
            .map(|&(id, before)| work.drop_stores(id, before))
            .sum::<usize>();
        add(&shared.counters.stores_failed, dropped as u64);
        // The remaining stores are being copied.
        while under_way(&work) {
            shared.changed.wait(&mut work);
        }
        dropped == 0
    }

    /// Returns the state of the connection to the server.
    pub fn server(&self) -> ServerState {
        self.shared.common.state(&self.link)
    }

    /// Returns the lines for the engine's log since the last call.
    pub fn take_log(&self) -> Vec<LogLine> {
        self.shared.common.log.take()
    }

    /// Returns the figures since the start.
    pub fn stats(&self) -> WorkerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        WorkerStats {
            stored_chunks: get(&counters.stored_chunks),
            stored_bytes: get(&counters.stored_bytes),
            stores_failed: get(&counters.stores_failed),
            retrieved_chunks: get(&counters.retrieved_chunks),
            retrieved_bytes: get(&counters.retrieved_bytes),
            retrieves_failed: get(&counters.retrieves_failed),
            copy_nanos: get(&counters.copy_nanos),
            connections_lost: self.link.lost(),
        }
    }

    /// Ends all threads. Queued transfers are dropped; the copy under way is waited for. The memory
    /// of the tensors is not touched afterwards.
    pub fn shutdown(&self) {
        if self.thread.is_forked() {
            return;
        }
        self.shared.work.lock().stopped = true;
        self.shared.changed.notify_all();
        // The answers that the thread waits for fail.
        self.link.stop();
        self.thread.join();
        if let Some(loader) = &*self.loader.lock() {
            loader.join();
        }
        {
            // Queued transfers hold marks of the GPU.
            let mut work = self.shared.work.lock();
            work.stores.clear();
            work.retrieves.clear();
        }
        *self.shared.pool.lock() = None;
        *self.shared.registered.lock() = None;
        *self.shared.gpu.lock() = None;
        self.shared.gpus.wait_until_given_back();
    }
}

impl Drop for WorkerAdapter {
    fn drop(&mut self) {
        self.shutdown();
    }
}
