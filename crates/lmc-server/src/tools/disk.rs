//! `lmc disk`: inspects the folder of a disk tier while no server uses it.

use std::fmt::Write;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use lmc_backend::{Backend, Cursor, Listed, LoadItem, Loaded, NoEngine, WriteBackend, in_order};
use lmc_backend_disk::{
    DiskBackend, DiskConfig, DriveStatus, FORMAT_VERSION, SetMember, SpaceUsage,
};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use serde_json::json;

use super::progress_bar;
use crate::config::human_bytes;
use crate::stdout::{out, outln};

/// Time for each chunk, or page of a listing.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are read at a time.
const AT_ONCE: u64 = 64 << 20;
/// Chunks that are listed at a time.
const PAGE: usize = 4096;
/// Key spaces that are shown to people.
const MOST_SPACES: usize = 8;

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Shows what each folder holds, and the set to which its drive belongs
    Inspect {
        #[command(flatten)]
        on: On,
        /// Also show the fill of each segment.
        #[arg(long)]
        segments: bool,
    },
    /// Reads every chunk and checks every byte; removes damaged chunks
    Verify(On),
    /// Moves chunks together and returns space to the file system
    Compact {
        #[command(flatten)]
        on: On,
        /// Segments filled to less than this share are emptied, 0 to 1.
        #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
        below: f64,
    },
    /// Removes a missing drive from its set, so that it is no longer reported as missing
    Forget {
        /// The id of the missing drive, as `lmc disk inspect` shows it.
        #[arg(value_name = "DRIVE-ID")]
        drive: String,
        #[command(flatten)]
        on: On,
    },
}

// A doc comment here would become the text of each command.
#[derive(Debug, Args)]
pub(crate) struct On {
    /// The folder of `lmc serve --disk`; several folders are separated by commas.
    #[arg(required = true, value_name = "PATH", value_delimiter = ',', num_args = 1..)]
    path: Vec<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(verb: &Verb) -> Result<()> {
    let (Verb::Inspect { on, .. }
    | Verb::Verify(on)
    | Verb::Compact { on, .. }
    | Verb::Forget { on, .. }) = verb;
    let tier = DiskConfig::existing(&on.path).and_then(|config| config.open(&NoEngine::default()));
    // The error's text already names the cause.
    let tier = tier.map_err(|error| anyhow!("{error}"))?;
    let answer = match verb {
        Verb::Inspect { segments, .. } => inspect(&tier, &on.path, *segments),
        Verb::Forget { drive, .. } => forget(&tier, drive)?,
        Verb::Verify(_) => verify(&tier)?,
        Verb::Compact { below, .. } => {
            if !(0.0..=1.0).contains(below) {
                bail!("--below {below}: expected a share from 0 to 1");
            }
            compact(&tier, *below)?
        }
    };
    wait(tier.close(Instant::now() + TIMEOUT))?;
    match on.json {
        true => outln!("{}", serde_json::to_string_pretty(&answer.1)?),
        false => out!("{}", answer.0),
    }
    match answer.1["damaged"].as_u64() {
        Some(damaged) if damaged > 0 => Err(anyhow!(
            "{damaged} chunks were damaged; they are removed, and an engine computes them again"
        )),
        _ => Ok(()),
    }
}

/// An answer as text for people, and as JSON.
type Answer = (String, serde_json::Value);

fn wait<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime
        .expect("a runtime without threads needs nothing")
        .block_on(work)
}

fn inspect(tier: &DiskBackend, paths: &[PathBuf], segments: bool) -> Answer {
    let drives = tier.inspect();
    let mut out = String::new();
    for ((drive, path), how) in drives.iter().zip(paths).zip(tier.describe()) {
        out += &summary(drive, path, &how);
        if segments {
            out += &filling(drive);
        }
    }
    let drives: Vec<_> = drives.iter().map(as_json).collect();
    (out, json!({"drives": drives}))
}

fn summary(drive: &DriveStatus, path: &Path, how: &str) -> String {
    let files = drive.segments.len() as u64 * drive.segment_bytes;
    let filled = match files {
        0 => 0,
        files => drive.bytes * 100 / files,
    };
    // Writing to a string cannot fail.
    let mut out = String::new();
    let _ = writeln!(
        out,
        "folder     {}\n\
         drive      {}, format {}, created {} days ago\n\
         chunks     {} ({}), {filled} % of its segments\n\
         segments   {} of {}, {} in all\n\
         moved by   {how}",
        path.display(),
        hex(&drive.drive_id),
        FORMAT_VERSION,
        days_since(drive.created),
        drive.chunks,
        human_bytes(drive.bytes),
        drive.segments.len(),
        human_bytes(drive.segment_bytes),
        human_bytes(files),
    );
    if let Some(set) = &drive.set_id {
        let _ = writeln!(
            out,
            "set        {}, {} drives, cleared {} times",
            hex(set),
            drive.members.len(),
            drive.clears.total()
        );
    }
    let others = drive.members.iter();
    for other in others.filter(|member| member.drive_id != drive.drive_id) {
        let _ = writeln!(
            out,
            "  with     {}, {} days ago at {}",
            hex(&other.drive_id),
            days_since(other.last_seen),
            other.path.display()
        );
    }
    for space in drive.spaces.iter().take(MOST_SPACES) {
        let _ = writeln!(
            out,
            "space      {}: {} chunks ({}), {}",
            space.space,
            space.chunks,
            human_bytes(space.bytes),
            space.settings.as_deref().unwrap_or("settings not known")
        );
    }
    if drive.spaces.len() > MOST_SPACES {
        let more = drive.spaces.len() - MOST_SPACES;
        let _ = writeln!(out, "           and {more} more spaces (--json lists all)");
    }
    out
}

fn forget(tier: &DiskBackend, drive: &str) -> Result<Answer> {
    let id = u128::from_str_radix(drive, 16).ok();
    let Some(id) = id.filter(|_| drive.len() == 32) else {
        bail!("{drive}: expected a drive id of 32 hexadecimal digits");
    };
    if !tier.forget_member(&id.to_be_bytes())? {
        bail!(
            "{drive}: no drive with this id is in the set; `lmc disk inspect` shows the drives of the set"
        );
    }
    Ok((
        format!("drive {drive} is no longer in the set\n"),
        json!({"forgotten": drive}),
    ))
}

fn hex(id: &[u8; 16]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn days_since(second: u64) -> u64 {
    let age = (UNIX_EPOCH + Duration::from_secs(second)).elapsed();
    age.map_or(0, |age| age.as_secs() / 86_400)
}

/// Draws the fill of the segments.
fn filling(drive: &DriveStatus) -> String {
    const WIDTH: usize = 40;
    const MOST: usize = 32;
    let mut out = String::from("segment    # in use, - written and not in use\n");
    for segment in drive.segments.iter().take(MOST) {
        let cells = |bytes: u64| {
            let share = bytes as f64 / drive.segment_bytes as f64;
            (share * WIDTH as f64).round() as usize
        };
        let live = cells(segment.bytes).min(WIDTH);
        let used = cells(segment.used_bytes).clamp(live, WIDTH);
        let _ = writeln!(
            out,
            "{:>8}   [{}{}{}] {} chunks, {}{}",
            segment.number,
            "#".repeat(live),
            "-".repeat(used - live),
            " ".repeat(WIDTH - used),
            segment.chunks,
            human_bytes(segment.bytes),
            if segment.active { ", written to" } else { "" },
        );
    }
    if drive.segments.len() > MOST {
        let _ = writeln!(
            out,
            "           and {} more (--json lists all)",
            drive.segments.len() - MOST
        );
    }
    out
}

fn as_json(drive: &DriveStatus) -> serde_json::Value {
    let member = |member: &SetMember| {
        json!({
            "drive_id": hex(&member.drive_id),
            "last_seen": member.last_seen,
            "path": member.path.display().to_string(),
        })
    };
    let space = |usage: &SpaceUsage| {
        json!({
            "space": usage.space.to_string(),
            "settings": usage.settings,
            "chunks": usage.chunks,
            "bytes": usage.bytes,
        })
    };
    let segment = |s: &lmc_backend_disk::SegmentStatus| {
        json!({
            "number": s.number,
            "generation": s.generation,
            "used_bytes": s.used_bytes,
            "chunks": s.chunks,
            "bytes": s.bytes,
            "active": s.active,
        })
    };
    json!({
        "version": FORMAT_VERSION,
        "drive_id": hex(&drive.drive_id),
        "set_id": drive.set_id.as_ref().map(hex),
        "clears": drive.clears.total(),
        "clears_id": drive.clears.id().to_string(),
        "members": drive.members.iter().map(member).collect::<Vec<_>>(),
        "created": drive.created,
        "segment_bytes": drive.segment_bytes,
        "chunks": drive.chunks,
        "bytes": drive.bytes,
        "spaces": drive.spaces.iter().map(space).collect::<Vec<_>>(),
        "segments": drive.segments.iter().map(segment).collect::<Vec<_>>(),
    })
}

fn list(tier: &DiskBackend) -> Result<Vec<Listed>> {
    let (mut found, mut cursor) = (Vec::new(), Cursor::START);
    loop {
        let page = wait(tier.list(cursor, PAGE, Instant::now() + TIMEOUT))?;
        found.extend(page.items);
        match page.next {
            Some(next) => cursor = next,
            None => return Ok(found),
        }
    }
}

/// Returns memory to read into: for two of the largest chunks, or [`AT_ONCE`] if that is more.
fn pool(largest: u64) -> Result<Pool> {
    let bytes = AT_ONCE.max(2 * largest).next_multiple_of(4096);
    let arena = ArenaConfig::anonymous(usize::try_from(bytes)?).build()?;
    Ok(Pool::new(Arc::new(arena), PoolConfig::default())?)
}

fn verify(tier: &DiskBackend) -> Result<Answer> {
    let chunks = list(tier)?;
    let pool = pool(chunks.iter().map(|chunk| chunk.len).max().unwrap_or(0))?;
    let bar = progress_bar(chunks.len() as u64, "verifying");
    let (mut whole, mut damaged, mut unread, mut bytes) = (0u64, 0u64, 0u64, 0u64);
    let mut rest = &chunks[..];
    while !rest.is_empty() {
        let reserve = |chunk: &Listed| Some(LoadItem::new(chunk.key, pool.reserve(chunk.len)?));
        let items: Vec<LoadItem> = rest.iter().map_while(reserve).collect();
        let count = items.len();
        if count == 0 {
            bail!("no memory to read a chunk of {} bytes into", rest[0].len);
        }
        let loaded = tier.load(items, Instant::now() + TIMEOUT);
        let loaded = wait(in_order(loaded, count));
        for loaded in loaded {
            match loaded {
                Some(Loaded::Hit(slot)) => {
                    whole += 1;
                    bytes += slot.len();
                }
                Some(Loaded::Miss(_)) => damaged += 1,
                Some(Loaded::Failed { .. }) | None => unread += 1,
            }
        }
        bar.inc(count as u64);
        rest = &rest[count..];
    }
    bar.finish_and_clear();
    if unread > 0 {
        bail!("{unread} chunks could not be read: check the drive's health (dmesg, smartctl)");
    }
    let text = format!(
        "{whole} chunks are whole ({}), {damaged} were damaged\n",
        human_bytes(bytes)
    );
    Ok((
        text,
        json!({"whole": whole, "bytes": bytes, "damaged": damaged}),
    ))
}

fn compact(tier: &DiskBackend, below: f64) -> Result<Answer> {
    let chunks = list(tier)?;
    let pool = pool(chunks.iter().map(|chunk| chunk.len).max().unwrap_or(0))?;
    let bar = progress_bar(chunks.len() as u64, "compacting");
    let done = wait(tier.compact(&pool, below, TIMEOUT, |done, of| {
        bar.set_length(of);
        bar.set_position(done);
    }))?;
    bar.finish_and_clear();
    let mut text = format!(
        "{} returned to the file system ({} segments), {} chunks moved, {} damaged chunks removed\n",
        human_bytes(done.freed_bytes),
        done.segments,
        done.moved,
        done.lost
    );
    // Writing to a string cannot fail.
    if done.stayed > 0 {
        let _ = writeln!(
            text,
            "{} chunks were not moved: they could not be read or written",
            done.stayed
        );
    }
    if done.no_space {
        text += "compaction ended early: the file system has no space to move chunks to; free some \
                 space, and run it again\n";
    }
    Ok((
        text,
        json!({
            "freed_bytes": done.freed_bytes,
            "segments": done.segments,
            "moved": done.moved,
            "lost": done.lost,
            "stayed": done.stayed,
            "no_room": done.no_space,
        }),
    ))
}
