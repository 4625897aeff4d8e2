//! Tenants: what they use, and what they may.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

/// A tenant: a cache salt, as the engine numbers them. 0 is the tenant without a salt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// Usage of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUsage {
    /// Bytes of resident chunks, as long as they are; what the pool's alignment adds is not
    /// counted.
    pub bytes: u64,
    /// Bytes of reservations that are not committed yet.
    pub writing: u64,
    /// Most bytes of the tenant; `None` for a tenant that shares what is not promised to others.
    pub quota: Option<u64>,
}

/// A set of tenants that evict from each other: all tenants without a quota, or one tenant with
/// a quota. Each shard publishes here how old its next candidate is, so that the oldest of all can
/// be chosen without a look into every shard.
#[derive(Debug)]
pub(crate) struct Class {
    bytes: AtomicU64,
    /// Stamp of each shard's next candidate; `u64::MAX` where nothing is queued.
    coldest: Box<[AtomicU64]>,
    /// Stamp of each shard's next candidate among the entries whose turn came while they had children.
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

    // The numbers are changed under the lock of the shard that they belong to and read as hints
    // without any, so that relaxed order is enough.

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

    /// The shard whose next candidate is the oldest.
    pub(crate) fn coldest(&self) -> Option<usize> {
        oldest(&self.coldest)
    }

    /// Returns the shard with the oldest entry whose turn came while it had children.
    pub(crate) fn coldest_parent(&self) -> Option<usize> {
        oldest(&self.coldest_parent)
    }
}

fn publish(cell: &AtomicU64, stamp: Option<u64>) {
    let stamp = stamp.unwrap_or(u64::MAX);
    // Most changes leave the old end alone: do not take the line from the readers then.
    if cell.load(Ordering::Relaxed) != stamp {
        cell.store(stamp, Ordering::Relaxed);
    }
}

fn oldest(stamps: &[AtomicU64]) -> Option<usize> {
    let stamps = stamps.iter().map(|stamp| stamp.load(Ordering::Relaxed));
    let (shard, stamp) = stamps.enumerate().min_by_key(|(_, stamp)| *stamp)?;
    (stamp != u64::MAX).then_some(shard)
}

/// One tenant's numbers.
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

    /// Returns the class of the tenant's chunks while it has a quota.
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

/// Tenants above which those that use nothing are forgotten.
const PURGE_ABOVE: usize = 1024;

/// The tenants that use something, have a quota, or did lately.
#[derive(Debug)]
pub(crate) struct Tenants {
    shards: usize,
    known: RwLock<Known>,
    /// Tenants with a quota: a few, which every eviction looks at.
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
            // No thread acquires one meanwhile: that needs the lock.
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

    /// The tenants with a quota.
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
