//! Files that are registered with a ring by index, which avoids a look-up at each operation.

use std::collections::HashMap;
use std::os::fd::AsRawFd;

use io_uring::Submitter;

use super::FileId;
use super::task::Task;

/// Sizes of the table to try, until one is within the limit of open files.
const SIZES: [u32; 3] = [4096, 1024, 256];

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: FileId,
    /// Number of tasks that use the index.
    tasks: u32,
    /// True if the file is closed; the entry is cleared after the last task.
    forgotten: bool,
}

/// The ring's table of files. An index keeps its file open in the kernel.
#[derive(Debug)]
pub(super) struct FixedFiles {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    by_id: HashMap<FileId, u32>,
}

impl FixedFiles {
    /// Makes a table if the kernel supports it, otherwise one without entries.
    pub(super) fn new(submitter: &Submitter<'_>) -> Self {
        let size = SIZES
            .into_iter()
            .find(|&size| submitter.register_files_sparse(size).is_ok())
            .unwrap_or(0);
        Self {
            entries: vec![None; size as usize],
            free: (0..size).rev().collect(),
            by_id: HashMap::new(),
        }
    }

    /// Returns the index of the task's file, registered on first use. The caller must call [`Self::leave`]
    /// with it.
    pub(super) fn enter(&mut self, task: &Task, submitter: &Submitter<'_>) -> Option<u32> {
        if let Some(&index) = self.by_id.get(&task.id()) {
            self.at(index).tasks += 1;
            return Some(index);
        }
        // After the close, no message would come that clears the index.
        if task.file().is_closed() {
            return None;
        }
        let index = self.free.pop()?;
        let fd = task.file().file.as_raw_fd();
        if submitter.register_files_update(index, &[fd]).is_err() {
            self.free.push(index);
            return None;
        }
        self.by_id.insert(task.id(), index);
        self.entries[index as usize] = Some(Entry {
            id: task.id(),
            tasks: 1,
            forgotten: false,
        });
        Some(index)
    }

    /// Records that a task with this index has ended.
    pub(super) fn leave(&mut self, index: Option<u32>, submitter: &Submitter<'_>) {
        let Some(index) = index else { return };
        self.at(index).tasks -= 1;
        self.clear_if_unused(index, submitter);
    }

    /// Records that the file will not be used again.
    pub(super) fn forget(&mut self, id: FileId, submitter: &Submitter<'_>) {
        let Some(&index) = self.by_id.get(&id) else {
            return;
        };
        self.at(index).forgotten = true;
        self.clear_if_unused(index, submitter);
    }

    fn at(&mut self, index: u32) -> &mut Entry {
        self.entries[index as usize]
            .as_mut()
            .expect("a index that is named by a file or a task is taken")
    }

    fn clear_if_unused(&mut self, index: u32, submitter: &Submitter<'_>) {
        let Entry {
            id,
            tasks,
            forgotten,
        } = *self.at(index);
        if tasks > 0 || !forgotten {
            return;
        }
        self.by_id.remove(&id);
        self.entries[index as usize] = None;
        // An index that cannot be cleared is never used again.
        if submitter.register_files_update(index, &[-1]).is_ok() {
            self.free.push(index);
        }
    }
}
