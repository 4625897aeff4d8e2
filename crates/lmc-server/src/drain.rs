//! Takes a server out of service before it is stopped: it stores no more chunks, writes the chunks in memory
//! to the tiers with write-back, and answers lookups and reads meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{Service, ServiceStatus};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tracing::{info, warn};

/// Time between two checks of the stores that had begun before the drain.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The drain of one server. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Drain {
    service: Service,
    current: Arc<Mutex<Option<Current>>>,
}

/// A drain under way.
#[derive(Debug, Clone)]
struct Current {
    begun: Instant,
    /// Chunks that tiers had not taken before the drain.
    failed_before: u64,
    /// True once each tier has been offered all chunks that it lacks.
    is_offered: Arc<AtomicBool>,
}

impl Drain {
    pub(crate) fn new(service: Service) -> Self {
        Self {
            service,
            current: Arc::default(),
        }
    }

    /// Begins a drain, unless one is under way.
    pub(crate) fn begin(&self) {
        let mut current = self.current.lock();
        if current.is_some() {
            return;
        }
        self.service.engine().begin_drain();
        let new = Current {
            begun: Instant::now(),
            failed_before: failed(&self.service.status(Instant::now())),
            is_offered: Arc::default(),
        };
        let (service, is_offered) = (self.service.clone(), Arc::clone(&new.is_offered));
        let thread = thread::Builder::new().name("lmc-drain".to_owned());
        match thread.spawn(move || write_back(&service, &is_offered)) {
            Ok(_) => info!(
                "draining: no more chunks are stored, and the chunks in memory are written to the tiers with write-back"
            ),
            Err(error) => {
                // The stop writes back as well.
                warn!(%error, "draining: no more chunks are stored; the stop writes the chunks in memory to the tiers with write-back");
            }
        }
        *current = Some(new);
    }

    /// Ends the drain: chunks are stored again.
    pub(crate) fn cancel(&self) {
        if self.current.lock().take().is_some() {
            self.service.engine().end_drain();
            info!("the drain was cancelled: chunks are stored again");
        }
    }

    /// Returns the progress of the drain.
    pub(crate) fn state(&self, status: &ServiceStatus) -> Value {
        let current = self.current.lock().clone();
        // Read this first: work that was under way before it shows in the other two values.
        let is_offered = |current: &Current| current.is_offered.load(Ordering::Acquire);
        let is_offered = current.as_ref().is_some_and(is_offered);
        let (stores, unwritten) = (
            stores_to_end(&self.service, status),
            self.service.engine().unwritten_bytes(),
        );
        let is_done = is_offered && stores == 0 && unwritten == 0;
        json!({
            "state": match &current {
                None => "serving",
                Some(_) if is_done => "drained",
                Some(_) => "draining",
            },
            "seconds": current.as_ref().map_or(0.0, |current| current.begun.elapsed().as_secs_f64()),
            "storing_chunks": stores,
            "unwritten_bytes": unwritten,
            "failed_chunks": current.as_ref().map_or(0, |current| failed(status).saturating_sub(current.failed_before)),
            "connections": status.transport.connections_open,
            "tiers": status.lower.len(),
        })
    }
}

/// Returns the chunks that tiers were offered and did not take.
fn failed(status: &ServiceStatus) -> u64 {
    let failed = |tier: &lmc_engine::LowerStatus| tier.write_failed + tier.write_dropped;
    status.lower.iter().map(failed).sum()
}

/// Returns the number of chunks whose store began before the drain and has not ended. Chunks of ended
/// connections do not count: their workers may never commit them.
fn stores_to_end(service: &Service, status: &ServiceStatus) -> u64 {
    let orphaned = status.transfers.orphaned_store_slots as u64;
    (service.engine().stores_under_way()).saturating_sub(orphaned)
}

/// Writes the chunks in memory to the tiers, and writes again after the end of the stores that had begun
/// before the drain.
fn write_back(service: &Service, is_offered: &AtomicBool) {
    let engine = service.engine();
    let stored = |status: &ServiceStatus| status.counts.stored_chunks;
    let before = stored(&service.status(Instant::now()));
    engine.write_back();
    let mut status = service.status(Instant::now());
    while engine.is_draining() && stores_to_end(service, &status) > 0 {
        thread::sleep(LOOK_EVERY);
        status = service.status(Instant::now());
    }
    if stored(&service.status(Instant::now())) > before {
        engine.write_back();
    }
    is_offered.store(engine.is_draining(), Ordering::Release);
}
