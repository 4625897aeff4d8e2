//! Requests that compute a prompt for another engine, by the id that their proxy gave them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most ids of ended requests that are remembered.
const MAX: usize = 4096;
/// Time for which the id of an ended request is remembered.
const REMEMBERED: Duration = Duration::from_secs(120);
/// Time after the end of a request in which its engine may still begin a store: workers end later.
pub(super) const LATE_STORES: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Prefill {
    /// Requests under way. A request with several prompts counts once for each prompt.
    running: usize,
    /// Time of the last end.
    ended: Instant,
}

/// The prefills that other servers may wait for.
#[derive(Debug, Default)]
pub(crate) struct Prefills {
    by_id: HashMap<Arc<str>, Prefill>,
    /// Ends, in their order.
    ended: VecDeque<(Arc<str>, Instant)>,
}

impl Prefills {
    /// Notes that a request with this id has begun.
    pub(crate) fn begin(&mut self, id: &Arc<str>, now: Instant) {
        let new = || Prefill {
            running: 0,
            ended: now,
        };
        let known = self.by_id.entry(Arc::clone(id)).or_insert_with(new);
        known.running += 1;
    }

    /// Notes that a request with this id has ended.
    pub(crate) fn end(&mut self, id: &Arc<str>, now: Instant) {
        if let Some(known) = self.by_id.get_mut(id) {
            known.running = known.running.saturating_sub(1);
            known.ended = now;
            self.ended.push_back((Arc::clone(id), now));
        }
        while let Some((id, ended)) = self.ended.front()
            && (self.ended.len() > MAX || *ended + REMEMBERED < now)
        {
            let known = self.by_id.get(id);
            if known.is_some_and(|known| known.running == 0 && known.ended == *ended) {
                self.by_id.remove(id);
            }
            self.ended.pop_front();
        }
    }

    /// Returns true if all requests with this id have ended, so that nothing more is stored for them.
    pub(crate) fn are_over(&self, id: &str, now: Instant) -> bool {
        let known = self.by_id.get(id);
        known.is_some_and(|known| known.running == 0 && now >= known.ended + LATE_STORES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_is_over_once_its_last_request_has_ended_and_stored() {
        let (mut prefills, now) = (Prefills::default(), Instant::now());
        let (id, later) = (Arc::from("id"), now + LATE_STORES);
        assert!(!prefills.are_over("id", later), "it may come");
        prefills.begin(&id, now);
        prefills.begin(&id, now);
        prefills.end(&id, now);
        assert!(!prefills.are_over("id", later), "one goes on");
        prefills.end(&id, now);
        assert!(!prefills.are_over("id", later - Duration::from_nanos(1)));
        assert!(prefills.are_over("id", later));
        assert!(!prefills.are_over("i", later));
        // It is sent once more.
        prefills.begin(&id, later);
        assert!(!prefills.are_over("id", later));
        // An end of what has not begun changes nothing.
        prefills.end(&Arc::from("other"), now);
        assert!(!prefills.are_over("other", later));
    }

    #[test]
    fn what_is_remembered_is_bounded_in_number_and_time() {
        let (mut prefills, now) = (Prefills::default(), Instant::now());
        let run = |prefills: &mut Prefills, number: usize, now| {
            let id = Arc::from(number.to_string());
            prefills.begin(&id, now);
            prefills.end(&id, now);
        };
        for number in 0..=MAX {
            run(&mut prefills, number, now);
        }
        assert_eq!((prefills.by_id.len(), prefills.ended.len()), (MAX, MAX));
        let later = now + LATE_STORES;
        assert!(!prefills.are_over("0", later) && prefills.are_over("1", later));
        run(&mut prefills, 0, later + REMEMBERED);
        assert_eq!((prefills.by_id.len(), prefills.ended.len()), (1, 1));
    }
}
