//! Tenants: their usage and their quotas.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

/// A tenant: the engine's number for a cache salt. 0 is the tenant without a salt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// Usage of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUsage {
    /// Payload bytes of resident chunks, without the padding of the pool's alignment.
    pub bytes: u64,
    /// Bytes of reservations that are not committed yet.
    pub writing: u64,
    /// Most bytes of the tenant; `None` for a tenant that shares the memory outside all quotas.
    pub quota: Option<u64>,
}

/// A set of tenants that evict from each other: all tenants without a quota, or one tenant with a quota. Each
/// shard publishes here how old its next eviction candidate is, so that the oldest of all is found without
/// locking every shard.
#[derive(Debug)]
pub(crate) struct Class {
    bytes: AtomicU64,
    /// Stamp of each shard's next candidate; `u64::MAX` if nothing is queued.
    coldest: Box<[AtomicU64]>,
    /// Stamp of each shard's oldest entry whose turn to be evicted came while it had children.
    coldest_parent: Box<[AtomicU64]>,
}

impl Class {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            bytes: AtomicU64::new(0),
            coldest: (0..shards).map(|_| AtomicU64::new(u64::MAX)).collect(),
            coldest_parent: (0..shards).map(|_| AtomicU64::new(u64::MAX)).collect(),
        }
    }

    // The numbers are written under the lock of their shard and read as hints without a lock, so relaxed
    // ordering is enough.

    pub(crate) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn publish(&self, shard: usize, coldest: Option<u64>, parent: Option<u64>) {
        publish(&self.coldest[shard], coldest);
        publish(&self.coldest_parent[shard], parent);
    }

    /// Returns the shard whose next candidate is the oldest.
    pub(crate) fn coldest(&self) -> Option<usize> {
        oldest(&self.coldest)
    }

    /// Returns the shard with the oldest entry whose turn to be evicted came while it had children.
    pub(crate) fn coldest_parent(&self) -> Option<usize> {
        oldest(&self.coldest_parent)
    }
}

fn publish(cell: &AtomicU64, stamp: Option<u64>) {
    let stamp = stamp.unwrap_or(u64::MAX);
    // Most changes do not change the old end: then the cache line stays shared with the readers.
    if cell.load(Ordering::Relaxed) != stamp {
        cell.store(stamp, Ordering::Relaxed);
    }
}

fn oldest(stamps: &[AtomicU64]) -> Option<usize> {
    let stamps = stamps.iter().map(|stamp| stamp.load(Ordering::Relaxed));
    let (shard, stamp) = stamps.enumerate().min_by_key(|(_, stamp)| *stamp)?;
    (stamp != u64::MAX).then_some(shard)
}

/// Numbers of one tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    bytes: AtomicU64,
    writing: AtomicU64,
    quota: AtomicU64,
    shards: usize,
    class: OnceLock<Arc<Class>>,
}

const NO_QUOTA: u64 = u64::MAX;

impl Tenant {
    pub(crate) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn begin_write(&self, bytes: u64) {
        self.writing.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn end_write(&self, bytes: u64) {
        self.writing.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn quota(&self) -> Option<u64> {
        let quota = self.quota.load(Ordering::Relaxed);
        (quota != NO_QUOTA).then_some(quota)
    }

    /// Returns the class of the tenant's chunks. Used only while the tenant has a quota.
    pub(crate) fn class(&self) -> &Arc<Class> {
        self.class.get_or_init(|| Arc::new(Class::new(self.shards)))
    }

    fn in_use(&self) -> bool {
        let usage = self.usage();
        usage.bytes > 0 || usage.writing > 0 || usage.quota.is_some()
    }

    pub(crate) fn usage(&self) -> TenantUsage {
        TenantUsage {
            bytes: self.bytes.load(Ordering::Relaxed),
            writing: self.writing.load(Ordering::Relaxed),
            quota: self.quota(),
        }
    }
}

/// Number of known tenants above which idle ones are removed.
const PURGE_ABOVE: usize = 1024;

/// Tenants that use memory, have a quota, or did so recently.
#[derive(Debug)]
pub(crate) struct Tenants {
    shards: usize,
    known: RwLock<Known>,
    /// Tenants with a quota. There are few; every eviction reads them.
    with_quota: RwLock<Arc<[Arc<Tenant>]>>,
}

#[derive(Debug)]
struct Known {
    tenants: HashMap<TenantId, Arc<Tenant>>,
    purge_above: usize,
}

impl Tenants {
    pub(crate) fn new(shards: usize) -> Self {
        let known = Known {
            tenants: HashMap::new(),
            purge_above: PURGE_ABOVE,
        };
        Self {
            shards,
            known: RwLock::new(known),
            with_quota: RwLock::default(),
        }
    }

    pub(crate) fn get(&self, id: TenantId) -> Arc<Tenant> {
        if let Some(tenant) = self.known(id) {
            return tenant;
        }
        let mut known = self.known.write();
        if known.tenants.len() >= known.purge_above {
            // No other thread acquires a tenant meanwhile, because that takes this lock.
            let used = |tenant: &Arc<Tenant>| tenant.in_use() || Arc::strong_count(tenant) > 1;
            known.tenants.retain(|_, tenant| used(tenant));
            known.purge_above = PURGE_ABOVE.max(2 * known.tenants.len());
        }
        let fresh = || {
            Arc::new(Tenant {
                id,
                bytes: AtomicU64::new(0),
                writing: AtomicU64::new(0),
                quota: AtomicU64::new(NO_QUOTA),
                shards: self.shards,
                class: OnceLock::new(),
            })
        };
        Arc::clone(known.tenants.entry(id).or_insert_with(fresh))
    }

    pub(crate) fn known(&self, id: TenantId) -> Option<Arc<Tenant>> {
        self.known.read().tenants.get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Tenant>> {
        self.known.read().tenants.values().cloned().collect()
    }

    /// Returns the tenants with a quota.
    pub(crate) fn with_quota(&self) -> Arc<[Arc<Tenant>]> {
        Arc::clone(&self.with_quota.read())
    }

    pub(crate) fn set_quota(&self, id: TenantId, quota: Option<u64>) -> Arc<Tenant> {
        let tenant = self.get(id);
        let mut with_quota = self.with_quota.write();
        let quota = quota.unwrap_or(NO_QUOTA);
        tenant.quota.store(quota, Ordering::Relaxed);
        let others = with_quota.iter().filter(|other| other.id != id).cloned();
        let this = (quota != NO_QUOTA).then(|| Arc::clone(&tenant));
        *with_quota = others.chain(this).collect();
        tenant
    }
}
