//! Tenants: what they use, and what they may.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

/// A tenant: a cache salt, as the engine numbers them. 0 is the tenant without a salt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// What a tenant uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUsage {
    /// Bytes of resident chunks, as long as they are; what the pool's alignment adds is not
    /// counted.
    pub bytes: u64,
    /// Bytes of reservations that are not committed yet.
    pub writing: u64,
    /// What it may use, in bytes; `None` for a tenant that shares what is not promised to others.
    pub quota: Option<u64>,
}

/// Who evicts from whom: all tenants without a quota together, or one tenant with a quota.
/// Each shard tells here how old its next candidate is, so that the oldest of all can be chosen
/// without a look into every shard.
#[derive(Debug)]
pub(crate) struct Class {
    bytes: AtomicU64,
    /// Stamp of each shard's next candidate; `u64::MAX` where nothing is queued.
    coldest: Box<[AtomicU64]>,
    /// The same for the entries whose turn came while they had children.
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

    /// The same among those whose turn came while they had children.
    pub(crate) fn coldest_parent(&self) -> Option<usize> {
        oldest(&self.coldest_parent)
    }
}

fn publish(place: &AtomicU64, stamp: Option<u64>) {
    let stamp = stamp.unwrap_or(u64::MAX);
    // Most changes leave the old end alone: do not take the line from the readers then.
    if place.load(Ordering::Relaxed) != stamp {
        place.store(stamp, Ordering::Relaxed);
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
    /// Its own class while it has a quota.
    pub(crate) class: Arc<Class>,
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

    pub(crate) fn set_quota(&self, quota: Option<u64>) {
        self.quota
            .store(quota.unwrap_or(NO_QUOTA), Ordering::Relaxed);
    }

    pub(crate) fn usage(&self) -> TenantUsage {
        TenantUsage {
            bytes: self.bytes.load(Ordering::Relaxed),
            writing: self.writing.load(Ordering::Relaxed),
            quota: self.quota(),
        }
    }
}

/// All tenants that were ever seen. They are few, and their numbers small, so none is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    all: RwLock<HashMap<TenantId, Arc<Tenant>>>,
    /// Tenants with a quota: while 0, nothing about quotas is looked at.
    with_quota: AtomicU64,
}

impl Tenants {
    pub(crate) fn get(&self, id: TenantId, shards: usize) -> Arc<Tenant> {
        if let Some(tenant) = self.all.read().get(&id) {
            return Arc::clone(tenant);
        }
        let mut all = self.all.write();
        let fresh = || {
            Arc::new(Tenant {
                id,
                bytes: AtomicU64::new(0),
                writing: AtomicU64::new(0),
                quota: AtomicU64::new(NO_QUOTA),
                class: Arc::new(Class::new(shards)),
            })
        };
        Arc::clone(all.entry(id).or_insert_with(fresh))
    }

    pub(crate) fn known(&self, id: TenantId) -> Option<Arc<Tenant>> {
        self.all.read().get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Tenant>> {
        self.all.read().values().cloned().collect()
    }

    /// The tenants with a quota; none, and no lock taken, while nobody has one.
    pub(crate) fn with_quota(&self) -> Vec<Arc<Tenant>> {
        if !self.any_quota() {
            return Vec::new();
        }
        let all = self.all.read();
        let with_quota = all.values().filter(|tenant| tenant.quota().is_some());
        with_quota.cloned().collect()
    }

    pub(crate) fn any_quota(&self) -> bool {
        self.with_quota.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn count_quotas(&self) {
        let all = self.all.read();
        let count = all
            .values()
            .filter(|tenant| tenant.quota().is_some())
            .count();
        self.with_quota.store(count as u64, Ordering::Relaxed);
    }
}
