//! Registration of the pool's memory with a ring: the kernel then looks up its pages once, not at every
//! operation.

use std::io;
use std::sync::Arc;

use io_uring::Submitter;
use lmc_memory::Arena;

/// Bytes of a registered part: the most that the kernel accepts.
const PART: u64 = 1 << 30;

/// State of the registration.
#[derive(Debug)]
enum RegistrationState {
    /// There is nothing to register, or registration has not begun.
    Idle,
    /// There is an empty table, which is filled part by part.
    Filling,
    Whole,
    Refused,
}

/// An arena in parts, of which the first `registered` can be used by the ring.
///
/// Must be dropped after the ring, because the kernel uses the addresses until then.
#[derive(Debug)]
pub(super) struct PoolBuffers {
    arena: Option<Arc<Arena>>,
    parts: u64,
    registered: u64,
    state: RegistrationState,
}

impl PoolBuffers {
    pub(super) fn new(arena: Option<Arc<Arena>>) -> Self {
        let parts = arena
            .as_ref()
            .map_or(0, |arena| (arena.len() as u64).div_ceil(PART));
        Self {
            arena,
            parts,
            registered: 0,
            state: RegistrationState::Idle,
        }
    }

    /// Registers the next part, if it is time. Returns a message for the operator once.
    ///
    /// Registers one part at a time, because each takes a while and operations wait meanwhile. Begins after
    /// the prefault has finished: registering makes all pages present, and would do so on this one thread.
    pub(super) fn advance(&mut self, submitter: &Submitter<'_>) -> Option<String> {
        if matches!(
            self.state,
            RegistrationState::Whole | RegistrationState::Refused
        ) {
            return None;
        }
        let arena = Arc::clone(self.arena.as_ref()?);
        if matches!(self.state, RegistrationState::Idle) {
            let prefault = arena.prefault_progress();
            if let Some(error) = prefault.error {
                return Some(self.refused(&format!("its pages are not all present: {error}")));
            }
            if prefault.done < prefault.total {
                return None;
            }
        }
        match self.register(&arena, submitter) {
            Err(error) => Some(self.refused(&error.to_string())),
            Ok(()) if self.registered == self.parts => {
                self.state = RegistrationState::Whole;
                Some("pool registered".to_owned())
            }
            Ok(()) => None,
        }
    }

    fn register(&mut self, arena: &Arena, submitter: &Submitter<'_>) -> io::Result<()> {
        if matches!(self.state, RegistrationState::Idle) {
            let parts = u32::try_from(self.parts).map_err(|_| io::ErrorKind::InvalidInput)?;
            if submitter.register_buffers_sparse(parts).is_err() {
                // Kernels before 5.19 do not support an empty table: then all parts are registered at once.
                let all: Vec<_> = (0..self.parts).map(|part| span(arena, part)).collect();
                // SAFETY: all of it is the arena's mapping, which lives until after the ring.
                unsafe { submitter.register_buffers(&all) }?;
                self.registered = self.parts;
                return Ok(());
            }
            self.state = RegistrationState::Filling;
        }
        let next = [span(arena, self.registered)];
        // SAFETY: a part of the arena's mapping, which lives until after the ring.
        unsafe { submitter.register_buffers_update(self.registered as u32, &next, None) }?;
        self.registered += 1;
        Ok(())
    }

    fn refused(&mut self, why: &str) -> String {
        self.state = RegistrationState::Refused;
        match self.registered {
            0 => format!("pool not registered: {why}"),
            some => format!("pool registered up to {some} of {} GiB: {why}", self.parts),
        }
    }

    /// Returns the number of the registered part that has this memory, if there is one.
    pub(super) fn index_of(&self, at: *const u8, len: u64) -> Option<u16> {
        let arena = self.arena.as_ref()?;
        let from = (at as u64).checked_sub(arena.base_ptr().as_ptr() as u64)?;
        let last = from.checked_add(len)?.checked_sub(1)?;
        let part = from / PART;
        if last >= arena.len() as u64 || part != last / PART || part >= self.registered {
            return None;
        }
        u16::try_from(part).ok()
    }
}

/// Returns the address range of a part.
fn span(arena: &Arena, part: u64) -> libc::iovec {
    let from = part * PART;
    libc::iovec {
        iov_base: arena.base_ptr().as_ptr().wrapping_add(from as usize).cast(),
        iov_len: (arena.len() as u64 - from).min(PART) as usize,
    }
}
