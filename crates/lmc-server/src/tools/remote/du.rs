//! `lmc remote du`: the chunks and bytes of each model, space and tenant.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use clap::Args;
use lmc_backend_remote::format::{ChunkFolder, Name, PROBE_SPACE, SpaceRecord, ValueName};
use lmc_backend_remote::{ListedObject, Store};
use lmc_key::{Printable, SpaceId};
use serde_json::{Value, json};

use super::listing::{Listing, descriptions};
use super::{Target, Url, deadline, explained};
use crate::config::human_bytes;
use crate::stdout::{out, outln};

/// Limit on the spaces that are counted separately; further spaces are counted together.
const MAX_SPACES: usize = 16_384;

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Examples:
  lmc remote du file:///mnt/shared/lmc
  lmc remote du s3://bucket/lmc --json | jq '.models'
A tenant is shown as the digest of its cache_salt, which daemons with --remote-key or --p2p-key write;
as `salted` if they had no key; as `none` without a salt. Chunks of a space without a description have
no model: an older lmc wrote them, or a lifecycle rule removed the description.";

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) url: Url,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Chunks and their bytes, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) chunks: u64,
    pub(super) bytes: u64,
}

impl Usage {
    pub(super) fn add(&mut self, other: Self) {
        self.chunks += other.chunks;
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Usage by space.
#[derive(Debug, Default)]
struct Spaces {
    spaces: HashMap<SpaceId, (ChunkFolder, Usage)>,
    /// Usage of the spaces beyond [`MAX_SPACES`].
    others: Usage,
}

impl Spaces {
    fn add(&mut self, name: ValueName, usage: Usage) {
        let (folder, space) = (name.folder, name.key.space);
        let is_full = self.spaces.len() >= MAX_SPACES;
        match self.spaces.get_mut(&space) {
            Some((_, known)) => known.add(usage),
            None if is_full => self.others.add(usage),
            None => _ = self.spaces.insert(space, (folder, usage)),
        }
    }
}

pub(super) async fn run(target: Target, arguments: &Arguments) -> Result<()> {
    let store = target.opened.store();
    let mut spaces = Spaces::default();
    let mut listing = Listing::of_chunks(&target.opened, None);
    while let Some(page) = listing.next().await? {
        for (name, len) in sized(&store, page).await? {
            let usage = Usage {
                chunks: 1,
                bytes: len,
            };
            spaces.add(name, usage);
        }
    }
    let found = spaces.spaces.iter();
    let found: Vec<_> = found
        .map(|(&space, (folder, _))| (*folder, space))
        .collect();
    let records = descriptions(&store, &found).await?;
    let report = Report::of(spaces, records);
    match arguments.json {
        true => outln!(
            "{}",
            serde_json::to_string_pretty(&report.as_json(&target.url.to_string()))?
        ),
        false => out!("{}", report.as_text(&target.url.to_string())),
    }
    Ok(())
}

/// Returns chunks with their lengths, from the listing, or from the values if the listing has none. A chunk
/// that was removed meanwhile is omitted.
pub(super) async fn sized(
    store: &Arc<dyn Store>,
    objects: Vec<ListedObject>,
) -> Result<Vec<(ValueName, u64)>> {
    let (mut sized, mut unsized_) = (Vec::with_capacity(objects.len()), Vec::new());
    for object in objects {
        match (object.name, object.len) {
            (Name::Value(key), Some(len)) => sized.push((key, len)),
            (Name::Value(key), None) => unsized_.push(key),
            _ => {}
        }
    }
    let heads = match unsized_.is_empty() {
        true => Vec::new(),
        false => store.heads(&unsized_, deadline()).await,
    };
    for (key, head) in unsized_.into_iter().zip(heads) {
        let head = head
            .map_err(|error| anyhow!("cannot read the length of a chunk: {}", explained(&error)))?;
        sized.extend(head.map(|head| (key, head.value_len)));
    }
    Ok(sized)
}

/// One space of the report.
#[derive(Debug)]
struct Row {
    space: SpaceId,
    record: Option<SpaceRecord>,
    usage: Usage,
}

/// The usage of a store.
#[derive(Debug)]
struct Report {
    /// One row for each space, the largest first.
    rows: Vec<Row>,
    others: Usage,
    total: Usage,
}

impl Report {
    fn of(spaces: Spaces, mut records: HashMap<SpaceId, SpaceRecord>) -> Self {
        let mut total = spaces.others;
        let mut rows = Vec::with_capacity(spaces.spaces.len());
        for (space, (_, usage)) in spaces.spaces {
            total.add(usage);
            let record = records.remove(&space);
            rows.push(Row {
                space,
                record,
                usage,
            });
        }
        rows.sort_by_key(|row| (std::cmp::Reverse(row.usage.bytes), row.space));
        Self {
            rows,
            others: spaces.others,
            total,
        }
    }

    /// Sums the rows by a name, the largest sum first.
    fn sums(&self, name: impl Fn(&Row) -> Option<String>) -> Vec<(Option<String>, Usage)> {
        let mut sums: BTreeMap<Option<String>, Usage> = BTreeMap::new();
        for row in &self.rows {
            sums.entry(name(row)).or_default().add(row.usage);
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by_key(|(_, usage)| std::cmp::Reverse(usage.bytes));
        sums
    }

    fn models(&self) -> Vec<(Option<String>, Usage)> {
        self.sums(|row| Some(row.record.as_ref()?.fields().model.to_string()))
    }

    fn tenants(&self) -> Vec<(Option<String>, Usage)> {
        self.sums(|row| Some(row.record.as_ref()?.tenant().to_string()))
    }

    fn as_json(&self, url: &str) -> Value {
        let sums = |name: &str, sums: Vec<(Option<String>, Usage)>| -> Vec<Value> {
            let sum = |(of, usage): (Option<String>, Usage)| json!({name: of, "chunks": usage.chunks, "bytes": usage.bytes});
            sums.into_iter().map(sum).collect()
        };
        let row = |row: &Row| {
            let fields = row.record.as_ref().map(SpaceRecord::fields);
            json!({
                "space": row.space.to_string(),
                "chunks": row.usage.chunks,
                "bytes": row.usage.bytes,
                "model": fields.map(|fields| fields.model.as_str()),
                "world_size": fields.map(|fields| fields.world_size),
                "dtype": fields.map(|fields| fields.dtype.as_str()),
                "layout": fields.map(|fields| fields.layout.to_string()),
                "chunk_size": fields.map(|fields| fields.chunk_size),
                "hash_algorithm": fields.map(|fields| fields.algorithm.name()),
                "identity": fields.map(|fields| fields.identity.as_str()),
                "tenant": row.record.as_ref().map(|record| record.tenant().to_string()),
            })
        };
        json!({
            "url": url,
            "chunks": self.total.chunks,
            "bytes": self.total.bytes,
            "models": sums("model", self.models()),
            "tenants": sums("tenant", self.tenants()),
            "spaces": self.rows.iter().map(row).collect::<Vec<_>>(),
            "other_spaces": {"chunks": self.others.chunks, "bytes": self.others.bytes},
        })
    }

    fn as_text(&self, url: &str) -> String {
        let mut out = format!("{url}: {}\n", shown(self.total));
        // Writing to a string cannot fail.
        for (model, usage) in self.models() {
            let name = match &model {
                Some(model) => format!("model {}", Printable(model)),
                None => "no description".to_owned(),
            };
            let _ = writeln!(out, "\n{name}: {}", shown(usage));
            let rows = self.rows.iter().filter(|row| {
                let of = row.record.as_ref().map(|r| r.fields().model.as_str());
                of == model.as_deref()
            });
            for row in rows {
                let _ = writeln!(out, "  space {}: {}", row.space, shown(row.usage));
                let _ = writeln!(out, "    {}", described(row));
            }
        }
        if self.others != Usage::default() {
            let _ = writeln!(
                out,
                "\nspaces beyond the first {MAX_SPACES}: {}",
                shown(self.others)
            );
        }
        let tenants = self.tenants();
        if tenants.len() > 1 {
            let _ = writeln!(out, "\ntenants");
            for (tenant, usage) in tenants {
                let tenant = tenant.as_deref().unwrap_or("not known");
                let _ = writeln!(out, "  {tenant}: {}", shown(usage));
            }
        }
        out
    }
}

pub(super) fn shown(usage: Usage) -> String {
    let chunks = usage.chunks;
    let noun = if chunks == 1 { "chunk" } else { "chunks" };
    format!("{chunks} {noun}, {}", human_bytes(usage.bytes))
}

fn described(row: &Row) -> String {
    let Some(record) = &row.record else {
        return match row.space {
            PROBE_SPACE => "probes of `lmc remote check`; `lmc remote gc` removes them",
            _ => "no description; select it with --space",
        }
        .to_owned();
    };
    let fields = record.fields();
    let mut text = format!(
        "world size {}, {}, {} tokens a chunk, {}, tenant {}",
        fields.world_size,
        fields.dtype,
        fields.chunk_size,
        fields.algorithm,
        record.tenant()
    );
    if !fields.identity.is_empty() {
        let _ = write!(text, ", identity {}", Printable(fields.identity.as_str()));
    }
    text
}

#[cfg(test)]
mod tests {
    use lmc_backend_remote::format::probe;
    use lmc_key::ChunkKey;

    use super::*;

    #[test]
    fn spaces_beyond_the_bound_are_counted_together() {
        let name = |space| {
            let probe = probe([0; 32]);
            probe.folder.value(ChunkKey { space, ..probe.key })
        };
        let mut spaces = Spaces::default();
        let one = Usage {
            chunks: 1,
            bytes: 10,
        };
        for n in 0..(MAX_SPACES + 5) as u128 {
            spaces.add(name(SpaceId::new(n.to_be_bytes())), one);
            spaces.add(name(SpaceId::new([0; 16])), one);
        }
        assert_eq!((spaces.spaces.len(), spaces.others.chunks), (MAX_SPACES, 5));
        let report = Report::of(spaces, HashMap::new());
        assert_eq!(report.total.chunks, 2 * (MAX_SPACES as u64 + 5));
        assert_eq!(report.as_json("x")["other_spaces"]["bytes"], 50);
        assert!(report.as_text("x").contains("beyond"));
    }
}
