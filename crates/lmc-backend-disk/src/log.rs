//! The index log and its checkpoints: their files, and how they are read at the start.
//!
//! `checkpoint-N` has the index as it was when `log-N` began; `log-N`, `log-N+1`, … follow it. A log ends at
//! the first incomplete frame. Files are made under other names and renamed when they are complete, and older
//! files are removed only after newer ones are durable.

use std::io;

use tracing::debug;

use crate::format::{BLOCK_LEN, CheckpointHeader, FormatError, RECORD_LEN, Record, decode_frame};
use crate::index::Index;
use crate::volume::Volume;

/// Position of the next frame in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    pub(crate) log: u64,
    pub(crate) offset: u64,
    pub(crate) sequence: u64,
    /// Bytes of the log's file.
    pub(crate) bytes: u64,
}

/// Result of a recovery.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) index: Index,
    /// The end of the newest log, if the log can be continued. `None`: a new log with the number `next_log`
    /// is needed.
    pub(crate) tail: Option<Tail>,
    pub(crate) next_log: u64,
    /// Notes for an operator: damage, with its consequence.
    pub(crate) notes: Vec<String>,
}

pub(crate) fn log_name(number: u64) -> String {
    format!("log-{number:016x}")
}

pub(crate) fn checkpoint_name(number: u64) -> String {
    format!("checkpoint-{number:016x}")
}

pub(crate) fn segment_name(number: u32) -> String {
    format!("segment-{number:08x}")
}

/// Name of a checkpoint that is not complete yet.
pub(crate) const UNFINISHED: &str = "checkpoint.unfinished";

fn number(name: &str, prefix: &str, digits: usize) -> Option<u64> {
    let number = u64::from_str_radix(name.strip_prefix(prefix)?, 16).ok()?;
    // A name in any other notation is not lmc's.
    (name == format!("{prefix}{number:0digits$x}")).then_some(number)
}

fn numbers(names: &[String], prefix: &str, digits: usize) -> Vec<u64> {
    let number = |name: &String| number(name, prefix, digits);
    let mut found: Vec<u64> = names.iter().filter_map(number).collect();
    found.sort_unstable();
    found
}

/// Returns true for names of segments, logs and checkpoints.
pub(crate) fn is_numbered(name: &str) -> bool {
    let kinds = [("log-", 16), ("checkpoint-", 16), ("segment-", 8)];
    kinds
        .into_iter()
        .any(|(prefix, digits)| number(name, prefix, digits).is_some())
}

pub(crate) fn log_numbers(names: &[String]) -> Vec<u64> {
    numbers(names, "log-", 16)
}

pub(crate) fn checkpoint_numbers(names: &[String]) -> Vec<u64> {
    numbers(names, "checkpoint-", 16)
}

pub(crate) fn segment_numbers(names: &[String]) -> Vec<u32> {
    let found = numbers(names, "segment-", 8).into_iter();
    found.filter_map(|number| number.try_into().ok()).collect()
}

fn refused(error: FormatError) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, error)
}

/// Reads the newest complete checkpoint and the logs that follow it.
///
/// # Errors
/// A file cannot be read, or has another version and must not be treated as damaged.
pub(crate) fn recover(
    volume: &dyn Volume,
    names: &[String],
    drive_id: &[u8; 16],
    segment_bytes: u64,
) -> io::Result<Recovered> {
    let (logs, checkpoints) = (log_numbers(names), checkpoint_numbers(names));
    let newest = logs.iter().chain(&checkpoints).max().copied();
    let mut recovered = Recovered {
        index: Index::new(segment_bytes),
        tail: None,
        next_log: newest.map_or(0, |newest| newest + 1),
        notes: Vec::new(),
    };
    let mut from = None;
    for &number in checkpoints.iter().rev() {
        match read_checkpoint(volume, number, drive_id, segment_bytes)? {
            Ok(index) => {
                recovered.index = index;
                from = Some(number);
                break;
            }
            Err(error) => recovered
                .notes
                .push(format!("{}: {error}", checkpoint_name(number))),
        }
    }
    // Without a checkpoint, the logs are complete only from the very first one on.
    let Some(from) = from.or_else(|| logs.first().copied().filter(|&first| first == 0)) else {
        if newest.is_some() {
            let note = "the index is lost, and all chunks with it".to_owned();
            recovered.notes.push(note);
        }
        return Ok(recovered);
    };
    let mut number = from;
    while logs.binary_search(&number).is_ok() {
        let end = replay(volume, number, drive_id, &mut recovered.index)?;
        recovered.tail = end.clean.then_some(end.tail);
        if !end.clean {
            let name = log_name(number);
            let frames = end.tail.sequence;
            let note = format!("{name}: has other bytes than zeroes after {frames} frames");
            recovered.notes.push(note);
        }
        number += 1;
    }
    // A log is missing, between others or in front: later changes are not known.
    if logs.last().is_some_and(|&last| last >= number) {
        let note = format!("{} is missing; later changes are lost", log_name(number));
        recovered.notes.push(note);
        recovered.tail = None;
    }
    Ok(recovered)
}

fn read_checkpoint(
    volume: &dyn Volume,
    number: u64,
    drive_id: &[u8; 16],
    segment_bytes: u64,
) -> io::Result<Result<Index, FormatError>> {
    let bytes = volume.read_all(&checkpoint_name(number))?;
    let (header, body) = match CheckpointHeader::decode((*bytes).as_ref()) {
        Ok(whole) => whole,
        Err(error @ FormatError::Version { .. }) => return Err(refused(error)),
        Err(error) => return Ok(Err(error)),
    };
    let what = "checkpoint of the index";
    if header.drive_id != *drive_id || header.log != number {
        let field = "drive or number";
        return Ok(Err(FormatError::Field { what, field }));
    }
    let mut index = Index::new(segment_bytes);
    index.expect(header.records as usize);
    for bytes in body.chunks_exact(RECORD_LEN) {
        if !Record::decode(bytes).is_some_and(|record| index.apply(&record)) {
            let field = "record";
            return Ok(Err(FormatError::Field { what, field }));
        }
    }
    Ok(Ok(index))
}

struct End {
    tail: Tail,
    /// True if only zeroes follow.
    clean: bool,
}

fn replay(
    volume: &dyn Volume,
    number: u64,
    drive_id: &[u8; 16],
    index: &mut Index,
) -> io::Result<End> {
    let bytes = volume.read_all(&log_name(number))?;
    let bytes: &[u8] = (*bytes).as_ref();
    let (mut at, mut sequence) = (0, 0);
    let mut records = Vec::new();
    loop {
        records.clear();
        match decode_frame(drive_id, number, sequence, &bytes[at..], &mut records) {
            Ok(len) => {
                for record in &records {
                    if !index.apply(record) {
                        // A checkpoint is made while the log continues, so it may know a later use of the
                        // segment; after damage, an earlier one. In both cases the chunk is gone, and nothing
                        // else is wrong.
                        debug!(?record, "skipped an invalid change of the disk index");
                    }
                }
                at += len;
                sequence += 1;
            }
            Err(error @ FormatError::Version { .. }) => return Err(refused(error)),
            Err(_) => break,
        }
    }
    let rest = &bytes[at..];
    let tail = Tail {
        log: number,
        offset: at as u64,
        sequence,
        bytes: bytes.len() as u64,
    };
    let clean = rest.iter().all(|&byte| byte == 0) && rest.len().is_multiple_of(BLOCK_LEN);
    Ok(End { tail, clean })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_ours_are_those_named_as_we_name_them() {
        let ours = [0, 1, 0xab, u32::MAX].map(segment_name);
        let others = [
            "segment-+0000001",
            "segment-000000AB",
            "segment-00000001f",
            "segment-100000000",
            "segment-1",
            "segment-",
            "segments",
        ];
        let names: Vec<String> = others.map(str::to_owned).into_iter().chain(ours).collect();
        assert_eq!(segment_numbers(&names), [0, 1, 0xab, u32::MAX]);
    }
}
