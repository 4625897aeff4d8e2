//! Which model and tenant a space of keys belongs to, for as long as the cache holds any of it.

use std::collections::HashMap;
use std::sync::Arc;

use lmc_engine::{EventSink, RemovedEvent, StoredEvent, TenantId};
use lmc_key::{Salt, SpaceId};
use parking_lot::Mutex;

use crate::service::events::EventLog;

/// Names above which those of spaces without chunks are forgotten.
const PURGE_ABOVE: usize = 65_536;

#[derive(Debug)]
struct Space {
    model: Arc<str>,
    chunks: u64,
}

#[derive(Debug, Default)]
struct Table {
    spaces: HashMap<SpaceId, Space>,
    tenants: HashMap<Salt, TenantId>,
    next_tenant: u32,
}

/// Names of spaces and tenants. Hears from the cache what was stored and removed, and passes
/// removals on to the event log.
#[derive(Debug)]
pub(crate) struct Spaces {
    table: Mutex<Table>,
    log: Arc<EventLog>,
}

impl Spaces {
    pub(crate) fn new(log: Arc<EventLog>) -> Self {
        Self {
            table: Mutex::default(),
            log,
        }
    }

    /// Remembers the model of a space that is about to be stored into.
    pub(crate) fn name(&self, space: SpaceId, model: &str) -> Arc<str> {
        let mut table = self.table.lock();
        if table.spaces.len() > PURGE_ABOVE {
            table.spaces.retain(|_, space| space.chunks > 0);
        }
        let entry = table.spaces.entry(space).or_insert_with(|| Space {
            model: model.into(),
            chunks: 0,
        });
        Arc::clone(&entry.model)
    }

    /// The number of a tenant. The empty salt is tenant 0.
    pub(crate) fn tenant(&self, salt: &Salt) -> TenantId {
        if salt.is_empty() {
            return TenantId::default();
        }
        let mut table = self.table.lock();
        if let Some(&tenant) = table.tenants.get(salt) {
            return tenant;
        }
        table.next_tenant += 1;
        let tenant = TenantId(table.next_tenant);
        table.tenants.insert(salt.clone(), tenant);
        tenant
    }

    /// The tenants that were ever named, with their salts.
    pub(crate) fn tenants(&self) -> Vec<(String, TenantId)> {
        let table = self.table.lock();
        table
            .tenants
            .iter()
            .map(|(salt, &id)| (salt.as_str().to_owned(), id))
            .collect()
    }
}

impl EventSink for Spaces {
    fn on_stored(&self, event: StoredEvent<'_>) {
        if let Some(space) = self.table.lock().spaces.get_mut(&event.key.space) {
            space.chunks += 1;
        }
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        let key = event.key;
        let model = {
            let mut table = self.table.lock();
            let Some(space) = table.spaces.get_mut(&key.space) else {
                return;
            };
            space.chunks = space.chunks.saturating_sub(1);
            Arc::clone(&space.model)
        };
        self.log.removed(&model, key.hash);
    }
}
