//! Requests that have ended a short while ago, by the ids that their proxy gave them.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Requests that are remembered, at most.
const MAX: usize = 4096;
/// Time for which a request is remembered.
const REMEMBERED: Duration = Duration::from_secs(120);
/// Time after the end of a request in which its engine may still begin to store: workers are not
/// stopped with it.
const LATE_STORES: Duration = Duration::from_millis(500);

/// Requests that have ended. An engine makes its name of a request of the proxy's id, with a prefix and
/// digits behind it.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    ends: HashMap<Box<str>, Instant>,
    order: VecDeque<(Box<str>, Instant)>,
}

impl Finished {
    /// Notes that a request has ended.
    pub(crate) fn note(&mut self, name: &str, now: Instant) {
        for id in ids(name) {
            self.ends.insert(id.into(), now);
            self.order.push_back((id.into(), now));
        }
        while let Some((id, ended)) = self.order.front()
            && (self.order.len() > MAX || *ended + REMEMBERED < now)
        {
            if self.ends.get(id) == Some(ended) {
                self.ends.remove(id);
            }
            self.order.pop_front();
        }
    }

    /// Notes that a request has begun: its proxy may have sent it a second time.
    pub(crate) fn begin(&mut self, name: &str) {
        if !self.ends.is_empty() {
            ids(name).for_each(|id| _ = self.ends.remove(id));
        }
    }

    /// Returns true if a request with this id has ended, so that nothing more is stored for it.
    pub(crate) fn has(&self, id: &str, now: Instant) -> bool {
        let ended = self.ends.get(id);
        ended.is_some_and(|&ended| now >= ended + LATE_STORES)
    }
}

/// Returns the ids that a name can be made of: `cmpl-ID-0-HEX`, `chatcmpl-ID-HEX`, where `HEX` are eight
/// digits, and the name itself.
fn ids(name: &str) -> impl Iterator<Item = &str> {
    let digits = |text: &str, is_digit: fn(&u8) -> bool| text.bytes().all(|byte| is_digit(&byte));
    let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let bare = ["cmpl-", "chatcmpl-"]
        .into_iter()
        .find_map(|prefix| name.strip_prefix(prefix));
    let cut = bare.and_then(|bare| {
        let (id, hex) = bare.rsplit_once('-')?;
        (hex.len() == 8 && digits(hex, is_hex)).then_some(id)
    });
    let of_prompt = cut.and_then(|cut| {
        let (id, number) = cut.rsplit_once('-')?;
        (!number.is_empty() && digits(number, u8::is_ascii_digit)).then_some(id)
    });
    [Some(name), cut, of_prompt].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_known_by_its_proxys_id_once_its_stores_have_begun() {
        let (mut finished, now) = (Finished::default(), Instant::now());
        let later = now + LATE_STORES;
        for name in [
            "cmpl-a1b2-0-deadbeef",
            "chatcmpl-x-7-0123abcd",
            "cmpl-y-0-DEADBEEF",
            "plain",
        ] {
            finished.note(name, now);
        }
        for (id, has) in [
            ("a1b2", true),
            ("a1b2-0", true),
            ("x-7", true),
            ("x", true),
            ("plain", true),
            ("cmpl-a1b2-0-deadbeef", true),
            ("y", false),
            ("a1", false),
            ("", false),
        ] {
            assert_eq!(finished.has(id, later), has, "{id}");
        }
        assert!(!finished.has("a1b2", later - Duration::from_nanos(1)));
        // Sent again, under another name.
        finished.begin("cmpl-a1b2-0-00000000");
        assert!(!finished.has("a1b2", later));
    }

    #[test]
    fn what_is_remembered_is_bounded_in_number_and_time() {
        let (mut finished, now) = (Finished::default(), Instant::now());
        for number in 0..MAX {
            finished.note(&format!("cmpl-{number}-0-deadbeef"), now);
        }
        assert!(finished.order.len() <= MAX && finished.ends.len() <= MAX);
        let later = now + LATE_STORES;
        assert!(!finished.has("0", later));
        assert!(finished.has(&(MAX - 1).to_string(), later));
        finished.note("cmpl-last-0-deadbeef", later + REMEMBERED);
        assert_eq!((finished.order.len(), finished.ends.len()), (3, 3));
    }
}
