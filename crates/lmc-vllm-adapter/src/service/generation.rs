//! Generations of opaque layouts: chunks whose format nothing on the wire names.
//!
//! vLLM registers `fp8_e4m3`, `fp8_e5m2`, `nvfp4` and every packed KV cache as `uint8`, so two
//! formats have one layout. Only the processes that wrote such chunks know their format. Without an
//! identity from the operator, the chunks therefore belong to a *generation*: a random fingerprint
//! that lasts while a worker of it is registered, and that no later worker can name, in any tier. A
//! tier that outlives this process need not keep them: `Service::lasting_spaces`.

use std::sync::Arc;
use std::{io, mem};

use lmc_key::{LayoutFingerprint, ModelName};

use crate::service::ClientId;
use crate::service::instance::Instance;
use crate::service::jobs::Lane;
use crate::service::opaque::Joined;
use crate::service::registry::{Registry, Workers};
use crate::service::stats::add;

/// Workers of two engines in one generation.
#[derive(Debug)]
pub(crate) struct TwoEngines {
    model: ModelName,
    shape: Vec<u64>,
    /// The workers, with their connections.
    instances: Vec<(u64, ClientId)>,
}

impl Instance {
    fn is_alike(&self, other: &Self) -> bool {
        let layout = |one: &Self| one.opaque.as_ref().map(|opaque| opaque.layout);
        layout(self) == layout(other)
            && self.model == other.model
            && self.world_size == other.world_size
    }
}

impl Workers {
    /// Puts a worker that is about to be registered into a generation: its own if it registers
    /// again, else that of a connected worker of its layout, else a new one.
    ///
    /// A worker whose connection was cut keeps its generation until it is removed, but no other
    /// worker joins it: the process that registers now may be the engine's next one, with another
    /// format. It may have the same id where ids are made of pids.
    ///
    /// # Errors
    /// When the system has no random bytes.
    pub(crate) fn join_generation(
        &self,
        instance_id: u64,
        instance: &mut Instance,
    ) -> io::Result<Option<Joined>> {
        let Some(opaque) = &instance.opaque else {
            return Ok(None);
        };
        let alike = |known: &&Instance| known.is_alike(instance);
        let connected = || {
            let alike = self.instances.values().filter(alike);
            let connected = alike.filter(|known| known.orphaned.is_none());
            // The newest, in case a worker of an older generation came back: ranks of one engine
            // register one after another.
            connected.max_by_key(|known| known.registered)
        };
        let own = self.instances.get(&instance_id).filter(alike);
        let own = own.filter(|known| known.orphaned.is_none());
        let (fingerprint, joined) = match own.or_else(connected) {
            Some(known) => (known.fingerprint, Joined::Later),
            None => (opaque.draw()?, Joined::First),
        };
        instance.fingerprint = fingerprint;
        Ok(Some(joined))
    }

    /// Returns the generation of a worker that was removed, if no other worker belongs to it.
    pub(crate) fn ended_generation(&self, removed: &Instance) -> Option<LayoutFingerprint> {
        removed.opaque.as_ref()?;
        let mut left = self.instances.values();
        let ended = left.all(|known| known.fingerprint != removed.fingerprint);
        ended.then_some(removed.fingerprint)
    }

    /// Returns the connected workers of a worker's generation if they are more than one engine has,
    /// so they must belong to two engines. `None` also if a warning about one of them was logged
    /// already.
    ///
    /// Counts the workers that serve a KV rank, of which one engine has `readers`. Without a rank,
    /// counts all of them, of which one engine has one for each rank.
    pub(crate) fn two_engines(
        &mut self,
        instance_id: u64,
        of_rank: Option<(u16, u32)>,
    ) -> Option<TwoEngines> {
        let instance = self.instances.get(&instance_id)?;
        let opaque = instance.opaque.as_ref()?;
        if of_rank.is_none() && opaque.rank_is_shared {
            return None;
        }
        let is_member = |known: &Instance| {
            known.fingerprint == instance.fingerprint && known.orphaned.is_none()
        };
        let most = of_rank.map_or(instance.world_size, |(_, readers)| readers) as usize;
        let (mut counted, mut warned) = (0, false);
        for known in self.instances.values().filter(|known| is_member(known)) {
            counted += usize::from(of_rank.is_none_or(|(rank, _)| known.ranks.contains(&rank)));
            warned |= known.opaque.as_ref().is_some_and(|opaque| opaque.warned);
        }
        if counted <= most || warned {
            return None;
        }
        let member = |(&id, known): (&u64, &Instance)| (id, known.client);
        let members = self.instances.iter().filter(|(_, known)| is_member(known));
        let mut two = TwoEngines {
            model: instance.model.clone(),
            shape: instance.shape.clone(),
            instances: members.map(member).collect(),
        };
        two.instances.sort_unstable();
        // The mark goes with this worker, so that the next engine is warned about again.
        let instance = self.instances.get_mut(&instance_id)?;
        instance.opaque.as_mut()?.warned = true;
        Some(two)
    }
}

impl Registry {
    /// Warns that workers of two engines are in one generation. Call it while the workers are not
    /// locked.
    pub(super) fn warn_of_two_engines(&self, two: &TwoEngines) {
        add(&self.context.counters().opaque_layouts_shared, 1);
        let member = |&(id, client): &(u64, ClientId)| {
            let address = self.connections.address_of(client);
            let address = if address.is_empty() {
                "unknown"
            } else {
                &address
            };
            format!("{id} at {address}")
        };
        let instances: Vec<String> = two.instances.iter().map(member).collect();
        tracing::warn!(
            model = ?two.model,
            ?instances,
            shape = ?two.shape,
            "two engines registered one KV layout of dtype uint8, which does not name its format, \
             and share its chunks: where their --kv-cache-dtype or weights differ, each reads \
             wrong KV data; give each format a server of its own with its own --identity, or set \
             --identity here when all engines of this server have the same"
        );
    }

    /// Warns of the limits of an opaque layout, whose first worker has registered. Call it while
    /// the workers are not locked.
    pub(super) fn report_opaque(&self, instance_id: u64, model: &ModelName) {
        let lower = match self.context.engine.has_lower_tiers() {
            true => ", and are written to no drive and no shared store",
            false => "",
        };
        tracing::warn!(
            instance = instance_id,
            ?model,
            "KV dtype uint8 does not name its format (fp8_e4m3, fp8_e5m2, nvfp4, ...), so chunks \
             of this layout are found only while a worker of it is registered{lower}: to keep \
             them, start lmc serve with --identity TEXT and change TEXT with --kv-cache-dtype \
             and with the weights"
        );
    }

    /// Removes the chunks of generations that ended from DRAM. No worker can name them any more;
    /// this releases their memory at once and notifies subscribers of KV events.
    pub(super) fn end_generations(&self, ended: impl IntoIterator<Item = LayoutFingerprint>) {
        for generation in ended {
            let spaces = self.context.spaces.of_generation(generation);
            if spaces.is_empty() {
                continue;
            }
            tracing::info!(
                layout = %generation,
                "the last worker of a layout of dtype uint8 has gone: its chunks are removed"
            );
            let mut ended = self.ended_spaces.lock();
            let is_queued = !ended.is_empty();
            ended.extend(spaces);
            drop(ended);
            // Each removal looks at the whole index, so one removal takes all generations that
            // ended until it begins.
            if !is_queued {
                let (context, spaces) = (Arc::clone(&self.context), Arc::clone(&self.ended_spaces));
                let remove = move || {
                    let ended = mem::take(&mut *spaces.lock());
                    context.engine.end_spaces(&ended);
                };
                self.clears
                    .run(ClientId::SERVER, Lane::Clear, Box::new(remove));
            }
        }
    }
}
