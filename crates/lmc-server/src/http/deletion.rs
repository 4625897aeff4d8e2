//! `lmc clear --shared`: deletes the chunks that a clear has made stale from the shared stores, in
//! the background.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use lmc_backend::Backend;
use lmc_backend_remote::{RemoteTier, StaleDeleted};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{HttpState, refusal, state_of};

/// The deletion that was ordered last.
#[derive(Clone, Debug, Default)]
pub(super) struct LastDeletion(Arc<Mutex<Vec<Store>>>);

/// State of the deletion in one store.
#[derive(Debug)]
struct Store {
    name: String,
    done: StaleDeleted,
    /// `None` while the deletion goes on.
    end: Option<Result<(), String>>,
}

impl Store {
    fn to_json(&self) -> Value {
        let (state, reason) = state_of(&self.end, "deleting");
        json!({
            "store": self.name,
            "state": state,
            "seen": self.done.seen,
            "deleted": self.done.deleted,
            "reason": reason,
        })
    }
}

impl LastDeletion {
    pub(super) fn is_under_way(&self) -> bool {
        self.0.lock().iter().any(|store| store.end.is_none())
    }

    /// Starts to delete in all stores at the same time. Returns false if a deletion is under way.
    pub(super) fn start(&self, tiers: &[Arc<RemoteTier>]) -> bool {
        let mut stores = self.0.lock();
        if stores.iter().any(|store| store.end.is_none()) {
            return false;
        }
        let begun = |tier: &Arc<RemoteTier>| Store {
            name: tier.name().to_owned(),
            done: StaleDeleted::default(),
            end: None,
        };
        *stores = tiers.iter().map(begun).collect();
        drop(stores);
        for (index, tier) in tiers.iter().enumerate() {
            tokio::spawn(self.clone().delete(index, Arc::clone(tier)));
        }
        true
    }

    async fn delete(self, index: usize, tier: Arc<RemoteTier>) {
        let this = self.clone();
        let note = move |done| {
            if let Some(store) = this.0.lock().get_mut(index) {
                store.done = done;
            }
        };
        let deleted = tier.delete_stale(note).await;
        match &deleted {
            Ok(done) => {
                let (seen, deleted) = (done.seen, done.deleted);
                tracing::info!(store = tier.name(), seen, deleted, "stale chunks deleted");
            }
            Err(error) => {
                tracing::warn!(store = tier.name(), %error, "not all stale chunks were deleted; they are misses, and are removed by age or size");
            }
        }
        if let Some(store) = self.0.lock().get_mut(index) {
            store.end = Some(deleted.map(drop).map_err(|error| error.to_string()));
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let stores = self.0.lock();
        json!(stores.iter().map(Store::to_json).collect::<Vec<_>>())
    }
}

/// Answers with the progress of the last deletion in each store.
pub(super) async fn status(State(http): HttpState) -> Response {
    let stores = http.deletion.to_json();
    match stores.as_array().is_some_and(Vec::is_empty) {
        true => refusal(
            StatusCode::NOT_FOUND,
            "no deletion was ordered since the start",
        ),
        false => Json(json!({"stores": stores})).into_response(),
    }
}
