//! Descriptions of the spaces in which chunks are stored, written in the background.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{Host, now};
use lmc_key::SpaceId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::access::StoreAccess;
use super::clears::{ClearsSync, jittered};
use crate::format::{ChunkFolder, Name, SpaceError, SpaceRecord, Tenant};
use crate::small::read_description;
use crate::store::StoreError;

/// Most spaces whose description is known to be in the store.
const MAX_KNOWN: usize = 4096;
/// Most spaces that wait for a description; further spaces have to wait for another store of a chunk.
const MAX_WAITING: usize = 1024;
/// Time after which the store is checked again for a description: an operator, a lifecycle rule or an
/// eviction may have removed it.
const KNOWN_FOR: Duration = Duration::from_secs(600);

/// A space with chunks in a folder, by its name in keys.
type Space = (ChunkFolder, SpaceId);

/// The spaces in which chunks were stored, and the task that describes them in the store.
pub(super) struct SpaceDescriptions {
    access: Arc<StoreAccess>,
    clears: Arc<ClearsSync>,
    host: Arc<dyn Host>,
    state: Mutex<DescribedSpaces>,
    changed: Notify,
}

#[derive(Default)]
struct DescribedSpaces {
    /// Time at which a space's description was known to be in the store.
    known: HashMap<Space, Instant>,
    waiting: VecDeque<Space>,
}

impl fmt::Debug for SpaceDescriptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpaceDescriptions").finish_non_exhaustive()
    }
}

impl SpaceDescriptions {
    pub(super) fn new(
        access: &Arc<StoreAccess>,
        clears: &Arc<ClearsSync>,
        host: Arc<dyn Host>,
    ) -> Self {
        Self {
            access: Arc::clone(access),
            clears: Arc::clone(clears),
            host,
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Records that the store has a chunk of a space. Never waits.
    pub(super) fn note(&self, space: Space) {
        let mut state = self.state.lock();
        let known = state.known.get(&space);
        if known.is_some_and(|&at| now() - at < KNOWN_FOR)
            || state.waiting.len() >= MAX_WAITING
            || state.waiting.contains(&space)
        {
            return;
        }
        state.waiting.push_back(space);
        drop(state);
        self.changed.notify_one();
    }

    /// Returns the next space to describe. A space with unknown fields is skipped; it is recorded again when
    /// another chunk of it is stored.
    fn next(&self) -> Option<(Space, SpaceRecord)> {
        loop {
            let space = self.state.lock().waiting.pop_front()?;
            let Some(fields) = self.host.describe(space.1) else {
                continue;
            };
            // A clear has changed the name of the space since.
            if fields.id().after(space.0.clears) == space.1 {
                let salt = fields.salt.as_str();
                let digest = self.access.config.salt_digest.as_ref();
                let digest = digest.map(|digest| digest.of(salt));
                return Some((space, SpaceRecord::new(&fields, digest)));
            }
        }
    }

    fn described(&self, space: Space) {
        let mut state = self.state.lock();
        if state.known.len() >= MAX_KNOWN {
            state.known.clear();
        }
        state.known.insert(space, now());
    }

    /// Describes the recorded spaces, one at a time. A failure is counted, but does not count against the
    /// store's health.
    pub(super) async fn describe_all(self: Arc<Self>) {
        let pause = self.access.config.probe_pause.1;
        let mut is_failing = false;
        loop {
            let Some((space, record)) = self.next() else {
                self.changed.notified().await;
                continue;
            };
            let may_write = self.access.paths.writes.check(now()).is_ok();
            if may_write && self.clears.check().is_ok() {
                let Err(error) = self.write_description(space, &record).await else {
                    self.described(space);
                    is_failing = false;
                    continue;
                };
                self.access.counters.spaces_undescribed.add(1);
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(space = %record.space(), %error, "space not described in the remote store; `lmc remote` cannot select it by model or tenant until that succeeds");
                }
            }
            self.note(space);
            tokio::time::sleep(jittered(pause)).await;
        }
    }

    /// Writes a description, unless the store has an equivalent one.
    async fn write_description(
        &self,
        (folder, space): Space,
        record: &SpaceRecord,
    ) -> Result<(), StoreError> {
        let deadline = now() + self.access.config.timeout;
        let name = Name::Space(folder, space);
        let found = read_description(&*self.access.store, folder, space, deadline).await?;
        let has_digest = |tenant: Tenant| matches!(tenant, Tenant::Salted(Some(_)));
        let is_there = found.is_some_and(|found| match found {
            Ok(found) => has_digest(found.tenant()) || !has_digest(record.tenant()),
            Err(SpaceError::Version(_)) => true,
            Err(SpaceError::Damaged) => false,
        });
        match is_there {
            true => Ok(()),
            false => {
                self.access
                    .store
                    .write(name, record.encode().into(), deadline)
                    .await
            }
        }
    }
}
