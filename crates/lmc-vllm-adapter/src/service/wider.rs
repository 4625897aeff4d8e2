//! Layouts of engines with more ranks, whose chunks can be merged into those of a worker.

use lmc_key::{KeySpace, LayoutFingerprint};
use lmc_memory::{ChunkOrder, Division, GroupLayout};

use crate::order::{AFTER_GROUPS, name_order, parse_order};
use crate::protocol::{EngineDrivenContext, EngineRecord, RegisterKvCache};
use crate::service::fingerprint;

/// Factors of the number of ranks that are known.
const FACTORS: [u16; 3] = [2, 4, 8];

/// The layout of the chunks of an engine with more ranks, of the same model and in the same format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WiderLayout {
    /// Number of the wider engine's ranks for each rank of the worker's engine.
    pub(crate) factor: u16,
    pub(crate) layout: LayoutFingerprint,
    /// Contiguous bytes of one wider rank in a chunk of the worker.
    pub(crate) run_bytes: u64,
}

impl WiderLayout {
    /// Returns the number of KV ranks of an engine with this layout.
    pub(crate) fn ranks(&self, own: u32) -> u32 {
        own.saturating_mul(self.factor.into())
    }

    /// Returns the space of this layout whose chunks stand for those of a space of the worker.
    pub(crate) fn space(&self, own: &KeySpace) -> KeySpace {
        KeySpace {
            world_size: self.ranks(own.world_size),
            layout: self.layout,
            ..own.clone()
        }
    }
}

/// Returns the layouts for a worker that copies by itself; none if its client does not declare an
/// order, as stock clients do not.
pub(super) fn of_engine_driven(
    context: &EngineDrivenContext,
    layout: GroupLayout,
) -> Vec<WiderLayout> {
    let Some(record) = &context.record else {
        return Vec::new();
    };
    let (groups, name) = match record.layout.rsplit_once(AFTER_GROUPS) {
        Some((groups, name)) => (groups.to_owned() + AFTER_GROUPS, name),
        None => (String::new(), record.layout.as_str()),
    };
    let Some(order) = parse_order(name, layout) else {
        return Vec::new();
    };
    let wider = |factor: u16| {
        let Division { order, run_bytes } = order.divide(factor.into())?;
        let (layout, name) = name_order(order);
        let context = EngineDrivenContext {
            record: Some(EngineRecord {
                layout: groups.clone() + &name,
                ..record.clone()
            }),
            ..context.clone()
        };
        let layout = fingerprint::of_engine_driven(&context, &layout).ok()?;
        Some(WiderLayout {
            factor,
            layout,
            run_bytes,
        })
    };
    FACTORS.into_iter().filter_map(wider).collect()
}

/// Returns the layouts for a worker whose KV groups the server copies in these orders.
pub(super) fn of_server_driven(
    registration: &RegisterKvCache,
    layers: &[u32],
    orders: &[ChunkOrder],
) -> Vec<WiderLayout> {
    let wider = |factor: u16| {
        let divided = orders.iter().map(|order| order.divide(factor.into()));
        let divided: Vec<Division> = divided.collect::<Option<_>>()?;
        let run_bytes = divided.first()?.run_bytes;
        // A chunk is merged in runs of one length.
        if divided.iter().any(|one| one.run_bytes != run_bytes) {
            return None;
        }
        let orders: Vec<ChunkOrder> = divided.iter().map(|one| one.order).collect();
        let layout = fingerprint::of_server_driven(registration, layers, &orders).ok()?;
        Some(WiderLayout {
            factor,
            layout,
            run_bytes,
        })
    };
    FACTORS.into_iter().filter_map(wider).collect()
}
