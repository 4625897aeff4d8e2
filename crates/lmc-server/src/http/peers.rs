//! Peers: their state, and copies to them that an operator orders.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use lmc_backend_p2p::{CopyError, P2pBackend};
use lmc_key::{ChunkKey, SpaceId};
use lmc_transfer::PeerId;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{Http, HttpState, refusal, state_of};

/// Pause before a peer that still reads for an earlier order is asked again, and the number of tries.
const BUSY: (Duration, u32) = (Duration::from_millis(500), 60);

/// The copy that was ordered last.
pub(super) type LastCopy = Arc<Mutex<Option<Copy>>>;

/// State of a copy to a peer.
#[derive(Debug, Clone)]
pub(super) struct Copy {
    peer: String,
    chunks: u64,
    bytes: u64,
    /// Chunks that the peer was ordered to read so far.
    ordered: u64,
    /// Ordered chunks that the peer has in memory.
    copied: u64,
    /// `None` while the copy goes on.
    end: Option<Result<(), String>>,
}

impl Copy {
    fn to_json(&self) -> Value {
        let (state, reason) = state_of(&self.end, "copying");
        json!({
            "peer": self.peer,
            "state": state,
            "chunks": self.chunks,
            "bytes": self.bytes,
            "ordered": self.ordered,
            "copied": self.copied,
            "reason": reason,
        })
    }
}

pub(super) fn routes() -> Router<Arc<Http>> {
    Router::new()
        .route("/peers", get(status))
        .route("/peers/copy", get(last_copy).post(copy))
}

fn no_peers() -> Response {
    refusal(
        StatusCode::NOT_FOUND,
        "this server has no peers: start it with --p2p-listen HOST:PORT",
    )
}

async fn status(State(http): HttpState) -> Response {
    if http.peers.is_none() && http.directory.is_none() {
        return no_peers();
    }
    let mut status = match &http.peers {
        Some(peers) => json!(peers.status()),
        None => json!({}),
    };
    status["hosted_directory"] = json!(http.directory.as_ref().map(|host| host.status()));
    Json(status).into_response()
}

async fn last_copy(State(http): HttpState) -> Response {
    match &*http.copy.lock() {
        Some(copy) => Json(copy.to_json()).into_response(),
        None => refusal(StatusCode::NOT_FOUND, "no copy was ordered since the start"),
    }
}

/// Orders a peer to read chunks of this server: `{"peer": NAME, "model": NAME, "space": ID,
/// "limit": BYTES}`, all but the first optional.
async fn copy(State(http): HttpState, body: Bytes) -> Response {
    let Some(peers) = &http.peers else {
        return no_peers();
    };
    let asked: Value = match serde_json::from_slice(&body) {
        Ok(asked) => asked,
        Err(error) => return refusal(StatusCode::BAD_REQUEST, error.to_string()),
    };
    let (peer, id) = match peer_named(peers, asked["peer"].as_str().unwrap_or("")) {
        Ok(found) => found,
        Err((code, reason)) => return refusal(code, reason),
    };
    let wanted = match wanted_spaces(&http, &asked) {
        Ok(wanted) => wanted,
        Err((code, reason)) => return refusal(code, reason),
    };
    let engine = http.service.engine().clone();
    let limit = asked["limit"]
        .as_u64()
        .unwrap_or_else(|| quarter_of_pool(peers, &id));
    let listed = tokio::task::spawn_blocking(move || {
        let space = |key: &ChunkKey| engine.space_of(key.space);
        let wanted = |key: &ChunkKey| wanted.as_ref().is_none_or(|set| set.contains(&space(key)));
        engine.dram_runs(limit, wanted)
    });
    let Ok(runs) = listed.await else {
        return refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            "listing the chunks failed",
        );
    };
    let begun = Copy {
        peer,
        chunks: runs.iter().map(|run| run.len() as u64).sum(),
        bytes: runs.iter().flatten().map(|(_, len)| len).sum(),
        ordered: 0,
        copied: 0,
        end: None,
    };
    let answer = begun.to_json();
    {
        let mut last = http.copy.lock();
        if last.as_ref().is_some_and(|copy| copy.end.is_none()) {
            let text = "a copy is under way: GET /peers/copy shows its progress";
            return refusal(StatusCode::CONFLICT, text);
        }
        *last = Some(begun);
    }
    tokio::spawn(carry_out(
        Arc::clone(peers),
        id,
        runs,
        Arc::clone(&http.copy),
    ));
    Json(answer).into_response()
}

/// Code and reason of a refusal.
type Refused = (StatusCode, String);

/// Finds the one connected peer of a name, an address or an id.
fn peer_named(peers: &P2pBackend, name: &str) -> Result<(String, PeerId), Refused> {
    match &peers.node().peers_named(name)[..] {
        [id] => Ok((name.to_owned(), id.clone())),
        [] => {
            let text = format!("no connected peer is named {name:?}: `lmc peers` lists the peers");
            Err((StatusCode::NOT_FOUND, text))
        }
        several => {
            let count = several.len();
            let text =
                format!("{count} peers are named {name:?}: name one by its address or its id");
            Err((StatusCode::CONFLICT, text))
        }
    }
}

/// Returns the spaces whose chunks are asked for; `None` for all.
fn wanted_spaces(http: &Http, asked: &Value) -> Result<Option<HashSet<SpaceId>>, Refused> {
    let (model, space) = (asked["model"].as_str(), asked["space"].as_str());
    if model.is_none() && space.is_none() {
        return Ok(None);
    }
    let spaces = http.service.spaces().into_iter().filter(|one| {
        model.is_none_or(|model| one.description.model.as_str() == model)
            && space.is_none_or(|space| one.id.to_string().starts_with(space))
    });
    let found: HashSet<SpaceId> = spaces.map(|one| one.id).collect();
    match found.is_empty() {
        true => {
            let text =
                "this server has no live space of that model and id: `lmc peers` lists the spaces";
            Err((StatusCode::NOT_FOUND, text.to_owned()))
        }
        false => Ok(Some(found)),
    }
}

/// Returns a quarter of a peer's memory, the most that its promotions hold at a time.
fn quarter_of_pool(peers: &P2pBackend, id: &PeerId) -> u64 {
    let status = peers.node().status();
    let peer = status.peers.iter().find(|peer| peer.id == id.as_str());
    let pool = peer.and_then(|peer| peer.holds).map(|holds| holds.pool);
    pool.map_or(status.leasable_bytes, |pool| pool / 4)
}

async fn carry_out(
    peers: Arc<P2pBackend>,
    id: PeerId,
    runs: Vec<Vec<(ChunkKey, u64)>>,
    last: LastCopy,
) {
    let mut end = Ok(());
    for run in runs {
        let mut tries = 0;
        let copied = loop {
            match peers.node().copy_to(&id, &run).await {
                Err(CopyError::Busy) if tries < BUSY.1 => {
                    tries += 1;
                    tokio::time::sleep(BUSY.0).await;
                }
                copied => break copied,
            }
        };
        let copied = match copied {
            Ok(copied) => copied,
            Err(error) => {
                end = Err(error.to_string());
                break;
            }
        };
        if let Some(copy) = &mut *last.lock() {
            copy.ordered += run.len() as u64;
            copy.copied += copied;
        }
    }
    if let Some(copy) = &mut *last.lock() {
        copy.end = Some(end);
    }
}
