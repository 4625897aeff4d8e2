//! Descriptions for an operator of what this daemon and its peers hold: the live spaces, and the fields in
//! which two daemons with one model differ.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::{ChunkEvent, EventSink, Host, HostSpace, now};
use lmc_key::LayoutFingerprint;
use lmc_transfer::Keys;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use crate::message::{Describe, Described, MAX_SPACES, MAX_TEXT, SpaceNote};
use crate::peers::Peers;

/// Time for which a description of this daemon's spaces is reused.
const DESCRIBED_FOR: Duration = Duration::from_secs(1);

/// This daemon's live spaces, described for peers.
#[derive(Debug, Clone)]
pub(crate) struct SpaceNotes {
    /// Changes when the spaces change; never 0.
    pub(crate) digest: u64,
    pub(crate) spaces: Arc<[SpaceNote]>,
}

/// The spaces of this daemon's engines. Their description is computed at most once a second.
#[derive(Debug)]
pub(crate) struct OwnSpaces {
    host: Arc<dyn Host>,
    /// Keys for the digests of salts in descriptions.
    keys: Option<Keys>,
    /// The last description, and its time.
    last: Mutex<Option<(Instant, SpaceNotes)>>,
    heard: Arc<HostHeard>,
}

/// Listens for changes of this host that peers should know.
#[derive(Debug, Default)]
struct HostHeard {
    /// True until the spaces are described again.
    is_new: AtomicBool,
    /// Notified when the spaces have to be described to peers.
    changed: Notify,
}

impl EventSink for HostHeard {
    fn changed(&self, _event: &ChunkEvent<'_>) {}

    fn host_changed(&self) {
        self.is_new.store(true, Ordering::Release);
        self.changed.notify_one();
    }
}

/// Layouts whose chunks are merged here, each with its number of KV ranks.
pub(crate) type MergedLayouts = HashSet<([u8; 16], u32)>;

/// A field in which two spaces of one model differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Difference {
    /// Name of the field.
    pub field: &'static str,
    /// Value at this daemon.
    pub here: String,
    /// Value at the peer.
    pub there: String,
}

/// A model that this daemon and a peer serve without a common space: neither finds chunks of it at the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Mismatch {
    /// Name of the model.
    pub model: String,
    /// The differing fields, of the two spaces that differ the least.
    pub differences: Vec<Difference>,
}

/// Returns the models that both sides serve without a common space, if this side does not merge the other
/// side's chunks either.
pub(crate) fn mismatches(
    ours: &[SpaceNote],
    theirs: &[SpaceNote],
    merged: &MergedLayouts,
) -> Vec<Mismatch> {
    let models: BTreeSet<&str> = ours.iter().map(|space| space.model.as_str()).collect();
    let mismatch = |model: &str| {
        let of_model = |space: &&SpaceNote| space.model == model;
        let mut its = theirs.iter().filter(of_model);
        if its.any(|space| merged.contains(&(space.layout, space.world_size))) {
            return None;
        }
        let pairs = ours.iter().filter(of_model).flat_map(|our| {
            let theirs = theirs.iter().filter(of_model);
            theirs.map(move |their| (our, their))
        });
        let (our, their) = pairs.min_by_key(|(our, their)| match our.space == their.space {
            true => 0,
            false => 1 + differing(our, their).len(),
        })?;
        (our.space != their.space).then(|| Mismatch {
            model: model.to_owned(),
            differences: differing(our, their),
        })
    };
    models.into_iter().filter_map(mismatch).collect()
}

/// Returns the fields in which two spaces of one model differ; at least one.
fn differing(our: &SpaceNote, their: &SpaceNote) -> Vec<Difference> {
    let salt = |space: &SpaceNote| match space.salt {
        // Also the salt of a side that has no key to describe it.
        [0, ..] if space.salt == [0; 16] => "none".to_owned(),
        _ => format!("digest {}", &hex(&space.salt)[..8]),
    };
    let difference = |field, [here, there]: [String; 2]| Difference { field, here, there };
    let both = |value: &dyn Fn(&SpaceNote) -> String| [our, their].map(value);
    let fields = [
        difference("world_size", both(&|space| space.world_size.to_string())),
        difference("dtype", both(&|space| space.dtype.clone())),
        difference("layout", both(&|space| hex(&space.layout)[..8].to_owned())),
        difference("identity", both(&|space| space.identity.clone())),
        difference("salt", both(&salt)),
    ];
    let (mut differ, mut agree): (Vec<Difference>, Vec<Difference>) =
        fields.into_iter().partition(|one| one.here != one.there);
    if differ.is_empty() {
        // All other fields are shown whole.
        differ.extend(agree.pop());
    }
    differ
}

pub(crate) fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}

/// Describes a space to peers.
pub(crate) fn note(space: &HostSpace, keys: Option<&Keys>) -> SpaceNote {
    let described = &space.description;
    let salt = described.salt.as_str().as_bytes();
    let keys = keys.filter(|_| !salt.is_empty());
    let text = |text: &str| {
        let mut text = text.to_owned();
        cut(&mut text);
        text
    };
    SpaceNote {
        space: *space.id.as_bytes(),
        model: text(described.model.as_str()),
        world_size: described.world_size,
        layout: *described.layout.as_bytes(),
        dtype: text(described.dtype.as_str()),
        salt: keys.map_or([0; 16], |keys| keys.digest(salt)),
        identity: text(described.identity.as_str()),
    }
}

/// Truncates a text to the length that a message may have.
pub(crate) fn cut(text: &mut String) {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

impl OwnSpaces {
    pub(crate) fn new(host: Arc<dyn Host>, keys: Option<Keys>) -> Self {
        let heard = Arc::<HostHeard>::default();
        host.events().listen(Arc::clone(&heard) as _);
        Self {
            host,
            keys,
            last: Mutex::default(),
            heard,
        }
    }

    /// Waits until engines of this host may use a space that they did not use before, or the host may be
    /// drained.
    pub(crate) async fn changed(&self) {
        self.heard.changed.notified().await;
    }

    /// Returns this daemon's live spaces as peers see them. The numbers of their chunks, which order them,
    /// are at most a second old.
    pub(crate) fn notes(&self) -> SpaceNotes {
        let mut last = self.last.lock();
        let is_new = self.heard.is_new.swap(false, Ordering::AcqRel);
        if let Some((at, notes)) = last.as_ref().filter(|_| !is_new)
            && now() < *at + DESCRIBED_FOR
        {
            return notes.clone();
        }
        let spaces = self.host.spaces();
        let spaces = spaces.iter().take(MAX_SPACES);
        let spaces: Vec<SpaceNote> = spaces.map(|one| note(one, self.keys.as_ref())).collect();
        let mut bytes = Vec::new();
        for space in &spaces {
            // The id decides all other fields.
            bytes.extend(space.space);
        }
        let notes = SpaceNotes {
            digest: xxh3_64(&bytes).max(1),
            spaces: spaces.into(),
        };
        *last = Some((now(), notes.clone()));
        notes
    }

    /// Returns the layouts of peers whose chunks engines of this host merge. The caller must not hold the
    /// lock of the peers.
    pub(crate) fn merged(&self, peers: &Mutex<Peers>) -> MergedLayouts {
        let mut layouts: HashSet<_> = {
            let peers = peers.lock();
            let all = peers.iter().flat_map(|peer| &peer.holds.spaces);
            all.map(|space| (space.layout, space.world_size)).collect()
        };
        let is_merged = |&(layout, ranks): &_| {
            self.host
                .merges_layout(LayoutFingerprint::new(layout), ranks)
        };
        layouts.retain(is_merged);
        layouts
    }

    /// Returns the description of what this daemon holds, for a peer.
    pub(crate) fn described(&self, asked: Describe) -> Described {
        let own = self.notes();
        let usage = self.host.usage();
        let spaces = match own.digest == asked.digest {
            true => Vec::new(),
            false => own.spaces.to_vec(),
        };
        Described {
            digest: own.digest,
            chunks: usage.chunks,
            bytes: usage.bytes,
            pool: usage.capacity.unwrap_or(0),
            spaces,
            is_draining: self.host.is_draining(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(id: u8) -> SpaceNote {
        SpaceNote {
            space: [id; 16],
            model: "m".into(),
            world_size: 1,
            layout: [4; 16],
            dtype: "bfloat16".into(),
            salt: [0; 16],
            identity: String::new(),
        }
    }

    fn fields(ours: &[SpaceNote], theirs: &[SpaceNote]) -> Vec<Vec<&'static str>> {
        let found = mismatches(ours, theirs, &HashSet::new()).into_iter();
        let names = |one: Mismatch| one.differences.iter().map(|d| d.field).collect();
        found.map(names).collect()
    }

    #[test]
    fn models_in_no_common_space_are_named_with_the_fields_that_differ_least() {
        let (a, b) = ([note(1)], note(2));
        let wide = SpaceNote {
            world_size: 2,
            layout: [5; 16],
            ..b.clone()
        };
        assert_eq!(fields(&a, &[note(1), wide.clone()]).len(), 0);
        assert_eq!(
            fields(&a, std::slice::from_ref(&wide)),
            [["world_size", "layout"]]
        );
        let other = SpaceNote {
            dtype: "half".into(),
            ..note(3)
        };
        let merges_wide = HashSet::from([(wide.layout, wide.world_size)]);
        assert_eq!(
            mismatches(&a, std::slice::from_ref(&wide), &merges_wide),
            []
        );
        let found = mismatches(&a, &[wide, other], &HashSet::new());
        let dtype = Difference {
            field: "dtype",
            here: "bfloat16".into(),
            there: "half".into(),
        };
        assert_eq!(found[0].differences, [dtype]);
        let tenant = SpaceNote {
            salt: [7; 16],
            ..note(4)
        };
        assert_eq!(fields(&a, &[tenant]), [["salt"]]);
        // A side without a key does not describe its salts.
        assert_eq!(fields(&a, &[b]), [["salt"]]);
        let unknown = SpaceNote {
            model: "n".into(),
            ..note(5)
        };
        assert_eq!(fields(&a, &[unknown]).len(), 0);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let mut text = "é".repeat(MAX_TEXT);
        cut(&mut text);
        assert_eq!(text, "é".repeat(MAX_TEXT / 2));
    }
}
