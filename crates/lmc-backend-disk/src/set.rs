//! Drive sets: the drives that serve together.
//!
//! Pure: bytes and values. The file `set` of every drive has a record of the set. docs/disk-format.md has the
//! layout.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::format::{
    BLOCK_LEN, FormatError, Head, Reader, VERSION, Writer, check_head, put_sum, sum_is_right,
};
use crate::id::random_id;

/// Name of the file with a drive's record of its set.
pub(crate) const SET_NAME: &str = "set";

const MAGIC: [u8; 8] = *b"LMCDRSET";
/// Offset of the checksum in the file.
const SUM_AT: usize = 48;
const HEAD: usize = 128;
const MEMBER: usize = 512;
/// Most bytes of a path that are stored.
const PATH: usize = MEMBER - 32;
/// Most members of a set; a greater number in a file is damage.
const MAX_MEMBERS: usize = 4096;

/// A drive of a set, as recorded by the other drives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetMember {
    /// Id of the drive.
    pub drive_id: [u8; 16],
    /// Time of its last start with the set, in seconds since 1970.
    pub last_seen: u64,
    /// Folder of the drive at that time.
    pub path: PathBuf,
}

/// The record of a set on one drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetRecord {
    /// The drive that has this record.
    pub(crate) drive_id: [u8; 16],
    pub(crate) set_id: [u8; 16],
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
        let head = Head { magic: MAGIC, what };
        check_head(bytes, head, || sum_is_right(bytes, SUM_AT))?;
        let mut r = Reader::new(&bytes[12..]);
        let count = r.u32() as usize;
        if count > MAX_MEMBERS || HEAD + count * MEMBER > bytes.len() {
            let field = "number of members";
            return Err(FormatError::Field { what, field });
        }
        let (drive_id, set_id) = (r.array(), r.array());
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
            members: members.map(member).collect(),
        })
    }
}

/// A drive that is to be opened.
#[derive(Clone, Debug)]
pub(crate) struct Present {
    pub(crate) drive_id: [u8; 16],
    pub(crate) path: PathBuf,
    /// The drive's own record; `None` on a new drive.
    pub(crate) record: Option<SetRecord>,
}

/// The outcome of comparing the drives of a set.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Joined {
    pub(crate) set_id: [u8; 16],
    pub(crate) members: Vec<SetMember>,
    /// Members that are not present.
    pub(crate) missing: Vec<SetMember>,
}

/// Two drives of different sets, by their numbers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DifferentSets(pub(crate) usize, pub(crate) usize);

/// Joins drives to one set; `now` is in seconds since 1970. A drive without a set joins the set of the
/// others.
pub(crate) fn join(present: &[Present], now: u64) -> Result<Joined, DifferentSets> {
    let set_of = |drive: &Present| drive.record.as_ref().map(|record| record.set_id);
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
    let own = present.iter().filter_map(|drive| drive.record.as_ref());
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

    fn record(drive: u8, set: u8, members: &[u8]) -> SetRecord {
        SetRecord {
            drive_id: id(drive),
            set_id: id(set),
            members: members.iter().map(|&number| member(number, 5)).collect(),
        }
    }

    fn drive(number: u8, record: Option<SetRecord>) -> Present {
        Present {
            drive_id: id(number),
            path: format!("/data/{number}").into(),
            record,
        }
    }

    #[test]
    fn a_record_comes_back_and_damage_does_not() {
        let mut right = record(1, 9, &[1, 2, 3]);
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
    fn a_member_that_is_not_present_is_missing() {
        let a = drive(1, Some(record(1, 9, &[1, 2])));
        let b = drive(2, Some(record(2, 9, &[1, 2])));
        let alone = join(std::slice::from_ref(&a), 7).expect("one set");
        assert_eq!((alone.set_id, alone.missing), (id(9), vec![member(2, 5)]));
        assert_eq!(alone.members, [member(1, 7), member(2, 5)]);
        let both = join(&[b, a], 7).expect("one set");
        assert_eq!(both.missing, []);
    }

    #[test]
    fn drives_of_two_sets_do_not_serve_together_and_new_ones_join() {
        let new = drive(3, None);
        let a = drive(1, Some(record(1, 9, &[1])));
        let b = drive(2, Some(record(2, 8, &[2])));
        let refused = join(&[new.clone(), a.clone(), b], 7);
        assert_eq!(refused, Err(DifferentSets(1, 2)));
        let joined = join(&[new.clone(), a], 7).expect("one set");
        assert_eq!(joined.set_id, id(9));
        assert_eq!(joined.members, [member(3, 7), member(1, 7)]);
        let first = join(std::slice::from_ref(&new), 7).expect("its own");
        let second = join(&[new], 7).expect("its own");
        assert_ne!(first.set_id, second.set_id);
    }
}
