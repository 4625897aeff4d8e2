//! Files that a ring knows by a number of its own, which spares it a look-up at each operation.

use std::collections::HashMap;
use std::os::fd::AsRawFd;

use io_uring::Submitter;

use super::FileId;
use super::task::Task;

/// Sizes of table to ask for, until one is within the limit on open files.
const SIZES: [u32; 3] = [4096, 1024, 256];

#[derive(Clone, Copy, Debug)]
struct Place {
    id: FileId,
    /// Tasks that name the place.
    tasks: u32,
    /// Nobody will ask for the file again; the place is cleared after the last task.
    forgotten: bool,
}

/// The ring's table of files. A place holds its file open in the kernel.
#[derive(Debug)]
pub(super) struct FixedFiles {
    places: Vec<Option<Place>>,
    free: Vec<u32>,
    by_id: HashMap<FileId, u32>,
}

impl FixedFiles {
    /// A table where the kernel has one, else one without places.
    pub(super) fn new(submitter: &Submitter<'_>) -> Self {
        let size = SIZES
            .into_iter()
            .find(|&size| submitter.register_files_sparse(size).is_ok())
            .unwrap_or(0);
        Self {
            places: vec![None; size as usize],
            free: (0..size).rev().collect(),
            by_id: HashMap::new(),
        }
    }

    /// The place of the task's file, made on first use; to be given back by [`Self::leave`].
    pub(super) fn enter(&mut self, task: &Task, submitter: &Submitter<'_>) -> Option<u32> {
        if let Some(&place) = self.by_id.get(&task.id()) {
            self.at(place).tasks += 1;
            return Some(place);
        }
        // After the close no message comes that would clear the place.
        if task.file().is_closed() {
            return None;
        }
        let place = self.free.pop()?;
        let fd = task.file().file.as_raw_fd();
        if submitter.register_files_update(place, &[fd]).is_err() {
            self.free.push(place);
            return None;
        }
        self.by_id.insert(task.id(), place);
        self.places[place as usize] = Some(Place {
            id: task.id(),
            tasks: 1,
            forgotten: false,
        });
        Some(place)
    }

    /// Says that a task with this place has ended.
    pub(super) fn leave(&mut self, place: Option<u32>, submitter: &Submitter<'_>) {
        let Some(place) = place else { return };
        self.at(place).tasks -= 1;
        self.clear_if_unused(place, submitter);
    }

    /// Says that the file will not be asked for again.
    pub(super) fn forget(&mut self, id: FileId, submitter: &Submitter<'_>) {
        let Some(&place) = self.by_id.get(&id) else {
            return;
        };
        self.at(place).forgotten = true;
        self.clear_if_unused(place, submitter);
    }

    fn at(&mut self, place: u32) -> &mut Place {
        self.places[place as usize]
            .as_mut()
            .expect("a place that is named by a file or a task is taken")
    }

    fn clear_if_unused(&mut self, place: u32, submitter: &Submitter<'_>) {
        let Place {
            id,
            tasks,
            forgotten,
        } = *self.at(place);
        if tasks > 0 || !forgotten {
            return;
        }
        self.by_id.remove(&id);
        self.places[place as usize] = None;
        // A place that cannot be cleared is never used again.
        if submitter.register_files_update(place, &[-1]).is_ok() {
            self.free.push(place);
        }
    }
}
