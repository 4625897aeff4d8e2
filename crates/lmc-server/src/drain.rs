//! Taking a server out of service before it is stopped: it takes no chunks any more, writes to its
//! tiers what memory holds and they lack, and answers with what it has meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{Service, ServiceStatus};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tracing::{info, warn};

/// Time between two looks at the stores that had begun before the drain.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The drain of one server. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Drain {
    service: Service,
    current: Arc<Mutex<Option<Current>>>,
}

/// A drain that goes on.
#[derive(Debug, Clone)]
struct Current {
    begun: Instant,
    /// Chunks that tiers had not taken before.
    failed_before: u64,
    /// True once each tier has been given all that it lacks.
    is_offered: Arc<AtomicBool>,
}

impl Drain {
    pub(crate) fn new(service: Service) -> Self {
        Self {
            service,
            current: Arc::default(),
        }
    }

    /// Begins, unless it has begun.
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
            Ok(_) => info!("draining: no chunks are stored any more, and tiers get what they lack"),
            Err(error) => {
                // The stop writes back as well.
                warn!(%error, "draining: no chunks are stored any more; tiers get what they lack at the stop");
            }
        }
        *current = Some(new);
    }

    /// Takes chunks again.
    pub(crate) fn cancel(&self) {
        if self.current.lock().take().is_some() {
            self.service.engine().end_drain();
            info!("the drain was cancelled: chunks are stored again");
        }
    }

    /// Returns how far it is.
    pub(crate) fn state(&self, status: &ServiceStatus) -> Value {
        let current = self.current.lock().clone();
        let (stores, unwritten) = (
            status.transfers.stores,
            self.service.engine().unwritten_bytes(),
        );
        let is_done = |current: &Current| {
            current.is_offered.load(Ordering::Acquire) && stores == 0 && unwritten == 0
        };
        json!({
            "state": match &current {
                None => "serving",
                Some(current) if is_done(current) => "drained",
                Some(_) => "draining",
            },
            "seconds": current.as_ref().map_or(0.0, |current| current.begun.elapsed().as_secs_f64()),
            "stores": stores,
            "unwritten_bytes": unwritten,
            "failed_chunks": current.as_ref().map_or(0, |current| failed(status) - current.failed_before),
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

/// Gives the tiers what memory holds, and once more what was committed meanwhile, until no store is left
/// from before the drain.
fn write_back(service: &Service, is_offered: &AtomicBool) {
    let engine = service.engine();
    let stored = |status: &ServiceStatus| status.counts.stored_chunks;
    let mut before = stored(&service.status(Instant::now()));
    engine.write_back();
    while engine.is_draining() {
        let status = service.status(Instant::now());
        if status.transfers.stores > 0 {
            thread::sleep(LOOK_EVERY);
        } else if stored(&status) > before {
            before = stored(&status);
            engine.write_back();
        } else {
            is_offered.store(true, Ordering::Release);
            return;
        }
    }
}
