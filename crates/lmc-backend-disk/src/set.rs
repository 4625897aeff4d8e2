//! Drive sets: which drives serve together, and what each has to forget before it serves.
//!
//! Pure: bytes and values. A record of the set lies in the file `set` of every drive, and another
//! in the state folder, outside of the drives. docs/disk-format.md has the layout.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::epoch::{agreed, random_id};
use crate::format::{
    BLOCK_LEN, FormatError, Head, Reader, VERSION, Writer, check_head, put_sum, sum_is_right,
};
use lmc_backend::ClearEpoch;

/// Name of the file with a drive's record of its set.
pub(crate) const SET_NAME: &str = "set";

const MAGIC: [u8; 8] = *b"LMCDRSET";
/// Offset of the checksum.
const SUM_AT: usize = 72;
const HEAD: usize = 128;
const MEMBER: usize = 512;
/// Most bytes of a path that are kept.
const PATH: usize = MEMBER - 32;
/// Most members of a set; a greater number is damage.
const MAX_MEMBERS: usize = 4096;

/// A drive of a set, as the others remember it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetMember {
    /// Id of the drive.
    pub drive_id: [u8; 16],
    /// Seconds from 1970 to its last start with the set.
    pub last_seen: u64,
    /// Folder in which it was then.
    pub path: PathBuf,
}

/// The record of a set, as one drive or the state folder remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetRecord {
    /// The drive on which this record lies; zeroes outside of the drives.
    pub(crate) drive_id: [u8; 16],
    pub(crate) set_id: [u8; 16],
    /// The newest clear when this was written. A drive's log may know of a later one.
    pub(crate) epoch: ClearEpoch,
    pub(crate) members: Vec<SetMember>,
}

impl SetRecord {
    /// Returns the record as whole blocks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let members = &self.members[..self.members.len().min(MAX_MEMBERS)];
        let len = (HEAD + members.len() * MEMBER).next_multiple_of(BLOCK_LEN);
        let mut out = vec![0; len];
        let mut w = Writer::new(&mut out);
        w.put(&MAGIC);
        w.u32(VERSION);
        w.u32(members.len() as u32);
        w.put(&self.drive_id);
        w.put(&self.set_id);
        w.u64(self.epoch.counter);
        w.put(&self.epoch.origin);
        for (number, member) in members.iter().enumerate() {
            let path = member.path.as_os_str().as_bytes();
            let path = &path[..path.len().min(PATH)];
            let mut w = Writer::new(&mut out[HEAD + number * MEMBER..][..MEMBER]);
            w.put(&member.drive_id);
            w.u64(member.last_seen);
            w.u32(path.len() as u32);
            w.u32(0);
            w.put(path);
        }
        put_sum(&mut out, SUM_AT);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let what = "record of a drive set";
        if bytes.len() < BLOCK_LEN {
            return Err(FormatError::Magic { what });
        }
        let head = Head {
            magic: MAGIC,
            what,
            newest: VERSION,
        };
        check_head(bytes, head, || sum_is_right(bytes, SUM_AT))?;
        let mut r = Reader::new(&bytes[12..]);
        let count = r.u32() as usize;
        if count > MAX_MEMBERS || HEAD + count * MEMBER > bytes.len() {
            let field = "number of members";
            return Err(FormatError::Field { what, field });
        }
        let (drive_id, set_id) = (r.array(), r.array());
        let (counter, origin) = (r.u64(), r.array());
        if counter > ClearEpoch::MAX_COUNTER {
            let field = "epoch";
            return Err(FormatError::Field { what, field });
        }
        let members = bytes[HEAD..].chunks_exact(MEMBER).take(count);
        let member = |bytes: &[u8]| {
            let mut r = Reader::new(bytes);
            let (drive_id, last_seen) = (r.array(), r.u64());
            let len = (r.u32() as usize).min(PATH);
            let path = OsString::from_vec(bytes[32..32 + len].to_vec());
            SetMember {
                drive_id,
                last_seen,
                path: path.into(),
            }
        };
        Ok(Self {
            drive_id,
            set_id,
            epoch: ClearEpoch { counter, origin },
            members: members.map(member).collect(),
        })
    }
}

/// A drive that is to serve.
#[derive(Clone, Debug)]
pub(crate) struct Present {
    pub(crate) drive_id: [u8; 16],
    pub(crate) path: PathBuf,
    /// The last clear that its log knows of.
    pub(crate) epoch: ClearEpoch,
    /// The drive's own record; `None` on a drive that is new or of an lmc without sets.
    pub(crate) record: Option<SetRecord>,
}

/// The outcome of comparing the drives of a set.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Joined {
    pub(crate) set_id: [u8; 16],
    /// Epoch of the set. Drives of another epoch are to be cleared.
    pub(crate) epoch: ClearEpoch,
    pub(crate) members: Vec<SetMember>,
    /// Members that are not present.
    pub(crate) missing: Vec<SetMember>,
}

/// Two drives of different sets, by their numbers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DifferentSets(pub(crate) usize, pub(crate) usize);

/// Joins drives to one set. `remembered` are records from outside of the drives, of any set;
/// `now` is in seconds from 1970.
///
/// A drive without a set (new, or of an lmc that had none) joins that of the others.
pub(crate) fn join(
    present: &[Present],
    remembered: &[SetRecord],
    now: u64,
) -> Result<Joined, DifferentSets> {
    let lists = |record: &&SetRecord, drive: &Present| {
        let mut members = record.members.iter();
        members.any(|member| member.drive_id == drive.drive_id)
    };
    let set_of = |drive: &Present| match &drive.record {
        Some(record) => Some(record.set_id),
        // It may be an old copy, from before it had a set.
        None => {
            let known = remembered.iter().find(|record| lists(record, drive));
            known.map(|record| record.set_id)
        }
    };
    let mut found: Option<(usize, [u8; 16])> = None;
    for (number, drive) in present.iter().enumerate() {
        match (set_of(drive), found) {
            (Some(set), None) => found = Some((number, set)),
            (Some(set), Some((first, other))) if set != other => {
                return Err(DifferentSets(first, number));
            }
            _ => {}
        }
    }
    let set_id = found.map_or_else(random_id, |(_, set_id)| set_id);
    let remembered = remembered.iter().filter(|record| record.set_id == set_id);
    let own = present.iter().filter_map(|drive| drive.record.as_ref());
    let epochs = present.iter().map(|drive| drive.epoch);
    let epochs = epochs
        .chain(own.clone().map(|record| record.epoch))
        .chain(remembered.map(|record| record.epoch));
    let epoch = agreed(epochs);
    let mut members: Vec<SetMember> = Vec::new();
    for drive in present {
        members.push(SetMember {
            drive_id: drive.drive_id,
            last_seen: now,
            path: drive.path.clone(),
        });
    }
    let mut missing: Vec<SetMember> = Vec::new();
    for member in own.flat_map(|record| &record.members) {
        if members.iter().any(|here| here.drive_id == member.drive_id) {
            continue;
        }
        let known = missing
            .iter_mut()
            .find(|known| known.drive_id == member.drive_id);
        match known {
            Some(known) if known.last_seen < member.last_seen => *known = member.clone(),
            Some(_) => {}
            None => missing.push(member.clone()),
        }
    }
    members.extend(missing.iter().cloned());
    Ok(Joined {
        set_id,
        epoch,
        members,
        missing,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> [u8; 16] {
        [number; 16]
    }

    fn member(number: u8, last_seen: u64) -> SetMember {
        SetMember {
            drive_id: id(number),
            last_seen,
            path: format!("/data/{number}").into(),
        }
    }

    fn record(drive: u8, set: u8, epoch: ClearEpoch, members: &[u8]) -> SetRecord {
        SetRecord {
            drive_id: id(drive),
            set_id: id(set),
            epoch,
            members: members.iter().map(|&number| member(number, 5)).collect(),
        }
    }

    fn drive(number: u8, epoch: ClearEpoch, record: Option<SetRecord>) -> Present {
        Present {
            drive_id: id(number),
            path: format!("/data/{number}").into(),
            epoch,
            record,
        }
    }

    #[test]
    fn a_record_comes_back_and_damage_does_not() {
        let mut right = record(1, 9, ClearEpoch::default().next(), &[1, 2, 3]);
        right.members[0].path = OsString::from_vec(vec![0xff; 600]).into();
        let bytes = right.encode();
        assert_eq!(bytes.len(), 4096);
        right.members[0].path = OsString::from_vec(vec![0xff; PATH]).into();
        assert_eq!(SetRecord::decode(&bytes), Ok(right));
        for at in (0..700).chain([4095]) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            SetRecord::decode(&bytes).expect_err("damage");
        }
        SetRecord::decode(&[]).expect_err("nothing");
    }

    #[test]
    fn a_drive_that_was_absent_from_a_clear_is_behind() {
        let never = ClearEpoch::default();
        let cleared = never.next();
        let a = drive(1, cleared, Some(record(1, 9, never, &[1, 2])));
        let b = drive(2, never, Some(record(2, 9, never, &[1, 2])));
        let alone = join(std::slice::from_ref(&a), &[], 7).expect("one set");
        assert_eq!((alone.set_id, alone.epoch), (id(9), cleared));
        assert_eq!(alone.missing, [member(2, 5)]);
        assert_eq!(alone.members, [member(1, 7), member(2, 5)]);
        let both = join(&[b, a], &[], 7).expect("one set");
        assert_eq!((both.epoch, both.missing), (cleared, Vec::new()));
    }

    #[test]
    fn what_was_cleared_is_known_from_outside_of_the_drives() {
        let never = ClearEpoch::default();
        let cleared = never.next();
        let outside = [record(0, 8, never, &[7]), record(0, 9, cleared, &[1])];
        // An old copy of the only drive, with its set and from before it had one.
        for old in [Some(record(1, 9, never, &[1])), None] {
            let joined = join(&[drive(1, never, old)], &outside, 7).expect("one set");
            assert_eq!((joined.set_id, joined.epoch), (id(9), cleared));
        }
    }

    #[test]
    fn clears_that_did_not_know_of_each_other_clear_all() {
        let never = ClearEpoch::default();
        let (one, other) = (never.next(), never.next());
        let a = drive(1, one, Some(record(1, 9, never, &[1, 2])));
        let b = drive(2, other, Some(record(2, 9, never, &[1, 2])));
        let joined = join(&[a, b], &[], 7).expect("one set");
        assert!(joined.epoch != one && joined.epoch != other);
        assert_eq!(joined.epoch.counter, 2);
    }

    #[test]
    fn drives_of_two_sets_do_not_serve_together_and_new_ones_join() {
        let never = ClearEpoch::default();
        let new = drive(3, never, None);
        let a = drive(1, never, Some(record(1, 9, never, &[1])));
        let b = drive(2, never, Some(record(2, 8, never, &[2])));
        let refused = join(&[new.clone(), a.clone(), b], &[], 7);
        assert_eq!(refused, Err(DifferentSets(1, 2)));
        let joined = join(&[new.clone(), a], &[], 7).expect("one set");
        assert_eq!(joined.set_id, id(9));
        assert_eq!(joined.members, [member(3, 7), member(1, 7)]);
        let first = join(std::slice::from_ref(&new), &[], 7).expect("its own");
        let second = join(&[new], &[], 7).expect("its own");
        assert_ne!(first.set_id, second.set_id);
    }
}
