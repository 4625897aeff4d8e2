//! A drive that can crash and err, for tests: the same seam as the real one.

mod clear_tests;
mod crash_tests;
pub(crate) use crash_tests::pool;
mod fault_tests;
mod segment_tests;
mod set_tests;
mod space_tests;
mod watch_tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use lmc_backend::conformance::Rng;
use parking_lot::{Mutex, MutexGuard};

use crate::volume::{BLOCK, Buf, Done, FileId, Kind, Volume, VolumeOp, abandoned_error};

/// The part of a write that survives a crash.
const SECTOR: usize = 512;

#[derive(Clone, Debug, Default)]
struct Inode {
    /// Content that reads see.
    data: Vec<u8>,
    /// Content after a crash, without the writes since the last sync.
    durable: Vec<u8>,
    /// Sectors written since the last sync.
    unsynced: Vec<usize>,
}

#[derive(Clone, Debug)]
enum NameChange {
    Make(String, u32),
    Rename(String, String),
    Remove(String),
}

fn change_names(names: &mut BTreeMap<String, u32>, change: &NameChange) {
    match change {
        NameChange::Make(name, inode) => {
            names.insert(name.clone(), *inode);
        }
        NameChange::Rename(from, to) => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
        NameChange::Remove(name) => {
            names.remove(name);
        }
    }
}

/// A fault that operations of one kind meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The operation ends with this error and does nothing.
    Error(i32),
    /// Fails as [`Self::Error`] does for writes longer than a block: there is only a little space
    /// left.
    ErrorIfLong(i32),
    /// The operation is not answered until [`SimVolume::thaw`].
    Stall,
}

#[derive(Debug, Default)]
struct State {
    inodes: Vec<Inode>,
    names: BTreeMap<String, u32>,
    /// The names as this volume has left them.
    left: BTreeMap<String, u32>,
    durable_names: BTreeMap<String, u32>,
    unsynced_names: Vec<NameChange>,
    /// Writes, syncs and changes of names so far.
    events: u64,
    /// Events until the machine is dead: then nothing is written and nothing is answered well.
    crash_after: Option<u64>,
    faults: Vec<(&'static str, Kind, Fault)>,
    stalled: Vec<VolumeOp>,
    capacity: u64,
    /// The least that was ever left of it.
    least_free: Option<u64>,
    opened: u64,
    closed: u64,
    turns: u64,
}

/// A drive in memory.
#[derive(Debug)]
pub(crate) struct SimVolume {
    state: Mutex<State>,
    /// Opening files and syncing names is not answered while this is held.
    names: Mutex<()>,
}

fn dead() -> io::Error {
    io::Error::other("the machine is dead")
}

impl State {
    /// Numbers batches.
    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    /// Counts an event. False when the machine is dead.
    fn event(&mut self) -> bool {
        if self.crash_after.is_some_and(|last| self.events >= last) {
            return false;
        }
        self.events += 1;
        true
    }

    fn change_name(&mut self, change: NameChange) -> io::Result<()> {
        if !self.event() {
            return Err(dead());
        }
        change_names(&mut self.names, &change);
        change_names(&mut self.left, &change);
        self.unsynced_names.push(change);
        Ok(())
    }

    /// Fault that an operation meets.
    fn fault(&self, op: &VolumeOp) -> Option<Fault> {
        // A durable write is both, and fails as either does.
        let parts: &[Kind] = match op.kind {
            Kind::WriteDurably => &[Kind::WriteDurably, Kind::Write, Kind::Sync],
            ref kind => std::slice::from_ref(kind),
        };
        let in_file = |prefix| {
            let mut names = self.names.iter();
            names.any(|(name, &inode)| inode == op.file.0 && name.starts_with(prefix))
        };
        let meets = |(prefix, kind, _): &&(_, _, _)| parts.contains(kind) && in_file(*prefix);
        self.faults.iter().find(meets).map(|&(.., fault)| fault)
    }

    fn free(&self) -> u64 {
        let taken = self
            .names
            .values()
            .map(|&inode| self.inodes[inode as usize].data.len());
        self.capacity.saturating_sub(taken.sum::<usize>() as u64)
    }

    fn carry_out(&mut self, op: &mut VolumeOp) -> io::Result<()> {
        match self.fault(op) {
            Some(Fault::ErrorIfLong(_)) if op.len <= BLOCK => {}
            Some(Fault::Error(code) | Fault::ErrorIfLong(code)) => {
                return Err(io::Error::from_raw_os_error(code));
            }
            Some(Fault::Stall) | None => {}
        }
        let at = op.offset as usize;
        let range = at..at + op.len as usize;
        assert!(op.offset.is_multiple_of(BLOCK) && op.len.is_multiple_of(BLOCK));
        let alive = op.kind == Kind::Read || self.event();
        if !alive || self.crash_after.is_some_and(|last| self.events > last) {
            return Err(dead());
        }
        let inode = &mut self.inodes[op.file.0 as usize];
        if op.kind != Kind::Sync && range.end > inode.data.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match (op.kind, op.buf.as_mut()) {
            (Kind::Sync, None) => {
                for sector in inode.unsynced.drain(..) {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    inode.durable[range.clone()].copy_from_slice(&inode.data[range]);
                }
            }
            (Kind::Read, Some(Buf::Own(into))) => {
                into[..range.len()].copy_from_slice(&inode.data[range]);
            }
            (Kind::Read, Some(Buf::Into(part))) => {
                let len = part.bytes().len();
                part.bytes_mut().copy_from_slice(&inode.data[at..at + len]);
            }
            (Kind::Write | Kind::WriteDurably, Some(Buf::Own(from))) => {
                inode.data[range.clone()].copy_from_slice(&from[..range.len()]);
                let sectors = range.start / SECTOR..range.end / SECTOR;
                inode.unsynced.extend(sectors.clone());
                if op.kind == Kind::WriteDurably {
                    // The machine may die in between: then it is a write, and may be torn.
                    if !self.event() || self.crash_after.is_some_and(|last| self.events > last) {
                        return Err(dead());
                    }
                    let inode = &mut self.inodes[op.file.0 as usize];
                    inode.durable[range.clone()].copy_from_slice(&inode.data[range]);
                    inode.unsynced.retain(|sector| !sectors.contains(sector));
                }
            }
            (Kind::Write, Some(Buf::From(slot))) => {
                let len = slot.len() as usize;
                inode.data[at..at + len].copy_from_slice(slot.bytes());
                inode
                    .unsynced
                    .extend(range.start / SECTOR..range.end / SECTOR);
            }
            (kind, buf) => panic!("{kind:?} with {buf:?}"),
        }
        Ok(())
    }
}

impl SimVolume {
    pub(crate) fn new(capacity: u64) -> Arc<Self> {
        Self::with_state(State {
            capacity,
            ..State::default()
        })
    }

    fn with_state(state: State) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(state),
            names: Mutex::new(()),
        })
    }

    /// Lets the machine die after `events` more writes, syncs and changes of names.
    pub(crate) fn crash_after(&self, events: u64) {
        let mut state = self.state.lock();
        state.crash_after = Some(state.events + events);
    }

    /// Lets the next process begin: the last one died, and the machine lives. What was written is
    /// there, and is no more durable than it was.
    pub(crate) fn revive(&self) {
        let mut state = self.state.lock();
        state.crash_after = None;
        state.faults.clear();
    }

    /// Returns true once as much has happened as [`Self::crash_after`] lets happen.
    pub(crate) fn is_dead(&self) -> bool {
        let state = self.state.lock();
        state.crash_after.is_some_and(|last| state.events >= last)
    }

    pub(crate) fn events(&self) -> u64 {
        self.state.lock().events
    }

    /// The drive after the crash: what was synced, and of the rest some sectors and some names,
    /// by chance.
    pub(crate) fn after_crash(&self, seed: u64) -> Arc<Self> {
        let state = self.state.lock();
        let mut rng = Rng::new(seed);
        let mut inodes = state.inodes.clone();
        // Some crashes keep everything, some nothing, most some.
        let keep = rng.below(5) * 25;
        for inode in &mut inodes {
            for sector in std::mem::take(&mut inode.unsynced) {
                if rng.below(100) < keep {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    inode.durable[range.clone()].copy_from_slice(&inode.data[range]);
                }
            }
            inode.data = inode.durable.clone();
        }
        let mut names = state.durable_names.clone();
        let kept = rng.below(state.unsynced_names.len() as u64 + 1) as usize;
        for change in &state.unsynced_names[..kept] {
            change_names(&mut names, change);
        }
        Self::with_state(State {
            inodes,
            durable_names: names.clone(),
            left: names.clone(),
            names,
            capacity: state.capacity,
            ..State::default()
        })
    }

    /// Operations of a kind meet a fault from now on.
    pub(crate) fn fault(&self, kind: Kind, fault: Fault) {
        self.fault_in("", kind, fault);
    }

    /// Operations of a kind meet a fault from now on, in files whose names begin so.
    pub(crate) fn fault_in(&self, prefix: &'static str, kind: Kind, fault: Fault) {
        self.state.lock().faults.push((prefix, kind, fault));
    }

    /// Operations that are not answered.
    pub(crate) fn stalled(&self) -> usize {
        self.state.lock().stalled.len()
    }

    /// No more faults; what stalled ends with this error.
    pub(crate) fn fail_stalled(&self, code: i32) {
        let stalled = {
            let mut state = self.state.lock();
            state.faults.clear();
            std::mem::take(&mut state.stalled)
        };
        for VolumeOp { buf, done, .. } in stalled {
            let result = Err(io::Error::from_raw_os_error(code));
            done(Done { buf, result });
        }
    }

    /// Forgets what was not synced, as a kernel does whose sync failed: the next sync succeeds.
    pub(crate) fn call_all_synced(&self) {
        let mut state = self.state.lock();
        state
            .inodes
            .iter_mut()
            .for_each(|inode| inode.unsynced.clear());
    }

    /// While the guard lives no file is opened and no name made durable.
    pub(crate) fn hold_names(&self) -> MutexGuard<'_, ()> {
        self.names.lock()
    }

    /// Files that were opened so far.
    pub(crate) fn opened(&self) -> u64 {
        self.state.lock().opened
    }

    /// Files that were opened and not closed.
    pub(crate) fn open_files(&self) -> u64 {
        let state = self.state.lock();
        state.opened - state.closed
    }

    /// The fewest bytes that were ever free.
    pub(crate) fn least_free(&self) -> u64 {
        self.state.lock().least_free.unwrap_or(u64::MAX)
    }

    /// Returns the number of stalled operations that no caller waits for any more.
    pub(crate) fn abandoned(&self) -> usize {
        let state = self.state.lock();
        state.stalled.iter().filter(|op| op.is_abandoned()).count()
    }

    /// Ends the stalled operations that no caller waits for any more, as a real volume does, and
    /// injects no more faults.
    pub(crate) fn end_abandoned(&self) {
        let abandoned: Vec<VolumeOp> = {
            let mut state = self.state.lock();
            state.faults.clear();
            state
                .stalled
                .extract_if(.., |op| op.is_abandoned())
                .collect()
        };
        for VolumeOp { buf, done, .. } in abandoned {
            let result = Err(abandoned_error());
            done(Done { buf, result });
        }
    }

    /// No more faults; what stalled is carried out.
    pub(crate) fn thaw(&self) {
        let stalled = {
            let mut state = self.state.lock();
            state.faults.clear();
            std::mem::take(&mut state.stalled)
        };
        self.submit(stalled);
    }

    /// Files whose names begin so.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let state = self.state.lock();
        state
            .names
            .keys()
            .filter(|name| name.starts_with(prefix))
            .cloned()
            .collect()
    }

    /// Changes a file's bytes behind the tier's back.
    pub(crate) fn alter(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state.lock();
        let inode = state.names[name] as usize;
        let inode = &mut state.inodes[inode];
        change(&mut inode.data);
        inode.durable = inode.data.clone();
    }

    /// Removes a file while the drive is not open.
    pub(crate) fn lose(&self, name: &str) {
        self.take_away(name);
        self.state.lock().left.remove(name);
    }

    /// Removes a file under a drive that is open. Returns what [`Self::bring_back`] takes.
    pub(crate) fn take_away(&self, name: &str) -> u32 {
        let mut state = self.state.lock();
        state.durable_names.remove(name);
        state.names.remove(name).expect("there is such a file")
    }

    /// Undoes [`Self::take_away`].
    pub(crate) fn bring_back(&self, name: &str, file: u32) {
        let mut state = self.state.lock();
        state.names.insert(name.to_owned(), file);
        state.durable_names.insert(name.to_owned(), file);
    }
}

impl Volume for SimVolume {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.state.lock().names.keys().cloned().collect())
    }

    fn read_all(&self, name: &str) -> io::Result<Box<dyn AsRef<[u8]>>> {
        let state = self.state.lock();
        let inode = state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(state.inodes[*inode as usize].data.clone()))
    }

    fn open(&self, name: &str, make: Option<u64>) -> io::Result<FileId> {
        let _not_held = self.names.lock();
        let mut state = self.state.lock();
        let known = state.names.get(name).copied();
        let inode = match (known, make) {
            (Some(inode), _) => inode,
            (None, None) => return Err(io::ErrorKind::NotFound.into()),
            (None, Some(_)) => {
                state.inodes.push(Inode::default());
                let inode = state.inodes.len() as u32 - 1;
                state.change_name(NameChange::Make(name.to_owned(), inode))?;
                inode
            }
        };
        let free = state.free();
        let file = &mut state.inodes[inode as usize];
        let len = make.unwrap_or(0) as usize;
        if len > file.data.len() {
            if (len - file.data.len()) as u64 > free {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            file.data.resize(len, 0);
            file.durable.resize(len, 0);
        }
        let free = state.free();
        state.least_free = Some(state.least_free.unwrap_or(free).min(free));
        state.opened += 1;
        Ok(FileId(inode))
    }

    fn close(&self, _file: FileId) {
        self.state.lock().closed += 1;
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let change = NameChange::Rename(from.to_owned(), to.to_owned());
        self.state.lock().change_name(change)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.state
            .lock()
            .change_name(NameChange::Remove(name.to_owned()))
    }

    fn sync_names(&self) -> io::Result<()> {
        let _not_held = self.names.lock();
        let mut state = self.state.lock();
        if !state.event() {
            return Err(dead());
        }
        state.unsynced_names.clear();
        state.durable_names = state.names.clone();
        Ok(())
    }

    fn changed(&self) -> Option<String> {
        let state = self.state.lock();
        let mut left = state.left.iter();
        let changed = left.find(|(name, inode)| state.names.get(*name) != Some(*inode));
        changed.map(|(name, _)| format!("`{name}` was removed"))
    }

    fn free(&self) -> io::Result<u64> {
        Ok(self.state.lock().free())
    }

    fn submit(&self, mut ops: Vec<VolumeOp>) {
        // They may end in any order.
        if let Some(last) = ops.len().checked_sub(1) {
            let turn = self.state.lock().next_turn() as usize;
            ops.rotate_left(turn % (last + 1));
            if turn.is_multiple_of(3) {
                ops.reverse();
            }
        }
        for mut op in ops {
            let result = {
                let mut state = self.state.lock();
                if state.fault(&op) == Some(Fault::Stall) {
                    state.stalled.push(op);
                    continue;
                }
                state.carry_out(&mut op)
            };
            let VolumeOp { buf, done, .. } = op;
            done(Done { buf, result });
        }
    }

    fn describe(&self) -> String {
        "simulated".to_owned()
    }

    fn stop(&self) {
        let stalled = std::mem::take(&mut self.state.lock().stalled);
        for op in stalled {
            let result = Err(io::Error::other("stopped"));
            let VolumeOp { buf, done, .. } = op;
            done(Done { buf, result });
        }
    }
}
