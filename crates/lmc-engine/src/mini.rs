use lmc_key::ChunkKey;
use lmc_memory::*;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerId(u64);
impl OwnerId { pub fn new(n: u64) -> Self { Self(n) } }
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
pub struct TenantId(u32);
impl TenantId { pub fn new(n: u32) -> Self { Self(n) } }
pub trait ChunkEvents: Send + Sync { fn on_stored(&self, key: &ChunkKey); fn on_removed(&self, key: &ChunkKey); }
#[derive(Default)]
struct Index { map: HashMap<ChunkKey, SealedSlot>, order: VecDeque<ChunkKey>, writing: HashSet<ChunkKey>, events: Option<Arc<dyn ChunkEvents>> }
struct Inner { pool: Pool, index: Mutex<Index> }
#[derive(Clone)]
pub struct CacheEngine(Arc<Inner>);
#[derive(Debug)]
pub struct Lease(SealedSlot);
impl Lease { pub fn offset(&self) -> u64 { self.0.offset() } pub fn len(&self) -> u64 { self.0.len() } pub fn bytes(&self) -> &[u8] { self.0.bytes() } }
#[derive(Debug)]
pub struct Leases(Vec<Option<Lease>>);
impl Leases {
    pub fn len(&self) -> usize { self.0.len() }
    pub fn is_empty(&self) -> bool { self.0.is_empty() }
    pub fn iter(&self) -> impl Iterator<Item = &Lease> { self.0.iter().flatten() }
    pub fn truncate(&mut self, n: usize) { self.0.truncate(n) }
    pub fn release(&mut self, i: usize) { self.0[i] = None; }
    pub fn held(&self) -> usize { self.0.iter().flatten().count() }
}
pub struct WriteRequest { pub key: ChunkKey, pub parent: Option<ChunkKey>, pub tenant: TenantId, pub len: u64 }
pub struct WriteTicket { key: ChunkKey, slot: Option<ReservedSlot>, inner: Arc<Inner> }
impl std::fmt::Debug for WriteTicket { fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str("ticket") } }
impl WriteTicket { pub fn offset(&self) -> u64 { self.slot.as_ref().unwrap().offset() } pub fn len(&self) -> u64 { self.slot.as_ref().unwrap().len() }
 pub fn bytes_mut(&mut self) -> &mut [u8] { self.slot.as_mut().unwrap().bytes_mut() } }
impl Drop for WriteTicket { fn drop(&mut self) { self.inner.index.lock().writing.remove(&self.key); } }
#[derive(Debug)]
pub enum Reservation { Reserved(WriteTicket), Present, Busy, NoRoom }
#[derive(Debug, Clone, PartialEq, serde::Serialize, Default)]
pub struct EngineUsage { pub used: u64, pub leases: u64, pub reserved_slots: u64, pub quarantined_slots: u64 }
#[derive(Default, Debug, Clone)]
pub struct EngineConfig {}
#[derive(Debug, Clone, PartialEq, serde::Serialize, Default)]
pub struct EngineStats { pub evictions: u64 }
impl CacheEngine {
    pub fn new(_c: EngineConfig, arena: Arc<Arena>) -> Result<Self, PoolError> { Ok(Self(Arc::new(Inner { pool: Pool::new(arena, PoolConfig::default())?, index: Mutex::default() }))) }
    pub fn set_events(&self, e: Arc<dyn ChunkEvents>) { self.0.index.lock().events = Some(e); }
    pub fn shared_name(&self) -> Option<&SharedName> { self.0.pool.arena().shared_name() }
    pub fn pool_bytes(&self) -> u64 { self.0.pool.arena().len() as u64 }
    pub fn lookup(&self, _o: OwnerId, keys: &[ChunkKey]) -> Leases {
        let i = self.0.index.lock();
        Leases(keys.iter().map_while(|k| i.map.get(k).cloned()).map(|s| Some(Lease(s))).collect())
    }
    pub fn reserve(&self, reqs: &[WriteRequest]) -> Vec<Reservation> {
        reqs.iter().map(|r| {
            let mut i = self.0.index.lock();
            if i.map.contains_key(&r.key) { return Reservation::Present; }
            if i.writing.contains(&r.key) { return Reservation::Busy; }
            loop {
                if let Some(slot) = self.0.pool.reserve(r.len) { i.writing.insert(r.key); return Reservation::Reserved(WriteTicket { key: r.key, slot: Some(slot), inner: self.0.clone() }); }
                let Some(p) = i.order.iter().position(|k| i.map[k].owners() == 1) else { return Reservation::NoRoom };
                let k = i.order.remove(p).unwrap();
                i.map.remove(&k); if let Some(e) = &i.events { e.on_removed(&k); }
            }
        }).collect()
    }
    pub fn commit(&self, t: Vec<WriteTicket>) {
        for mut t in t { let s = t.slot.take().unwrap().written().seal(); let mut i = self.0.index.lock(); i.map.insert(t.key, s); i.order.push_back(t.key); if let Some(e) = &i.events { e.on_stored(&t.key); } }
    }
    pub fn clear(&self, _f: bool) { let mut i = self.0.index.lock(); i.map.clear(); i.order.clear(); }
    pub fn usage(&self) -> EngineUsage { let i = self.0.index.lock(); EngineUsage { used: self.0.pool.usage().used, leases: i.map.values().map(|s| u64::from(s.owners()) - 1).sum(), reserved_slots: i.writing.len() as u64, quarantined_slots: 0 } }
    pub fn stats(&self) -> EngineStats { EngineStats::default() }
    pub fn tick(&self, _n: Instant) {}
}
