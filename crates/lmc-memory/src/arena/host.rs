//! Reads facts about the host's memory from `/proc` and `/sys`.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// Returns a number from text like `/proc/meminfo`: the first word after `key:`.
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the huge pages of the default size that are free and not reserved by others, and their total:
/// `(usable, total)`.
pub(super) fn huge_pages() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let get = |key| field(&text, key).unwrap_or(0);
    (
        get("HugePages_Free").saturating_sub(get("HugePages_Rsvd")),
        get("HugePages_Total"),
    )
}

/// Returns the word in brackets of a choice such as `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?
        .1
        .split_once(']')
        .map(|(word, _)| word)
}

/// Returns the kernel's setting for transparent huge pages of private memory.
pub(super) fn transparent_huge_pages() -> String {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    text.ok()
        .as_deref()
        .and_then(chosen)
        .unwrap_or("unknown")
        .to_owned()
}

/// Returns the `huge=` option of the file system at `/dev/shm`; `never` if it has none.
pub(super) fn shm_huge_option() -> String {
    let text = fs::read_to_string("/proc/mounts").unwrap_or_default();
    huge_option(&text).to_owned()
}

fn huge_option(mounts: &str) -> &str {
    let options = mounts.lines().rev().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        (words.next()? == "/dev/shm")
            .then(|| words.nth(1))
            .flatten()
    });
    options
        .and_then(|options| {
            options
                .split(',')
                .find_map(|option| option.strip_prefix("huge="))
        })
        .unwrap_or("never")
}

/// Returns whether a NUMA node is online, and the list of online nodes.
pub(super) fn numa_node(node: u32) -> (bool, String) {
    let list = fs::read_to_string("/sys/devices/system/node/has_memory")
        .or_else(|_| fs::read_to_string("/sys/devices/system/node/online"))
        .unwrap_or_else(|_| "0".to_owned());
    let list = list.trim().to_owned();
    (in_list(&list, node), list)
}

/// Returns true if a list such as `0-1,4` has a number.
fn in_list(list: &str, number: u32) -> bool {
    list.split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&number),
            _ => false,
        }
    })
}

/// Returns the limit of locked memory in bytes; `None` if there is none.
pub(super) fn lock_limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_choices_are_read() {
        let text = "HugePages_Total:      12\nHugePages_Free:   3\nHugepagesize:  2048 kB\n";
        assert_eq!(field(text, "HugePages_Free"), Some(3));
        assert_eq!(field(text, "HugePages_Rsvd"), None);
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("nothing"), None);
    }

    #[test]
    fn node_lists_are_read() {
        assert!(in_list("0-1,4", 1) && in_list("0-1,4", 4) && in_list("0", 0));
        assert!(!in_list("0-1,4", 2) && !in_list("", 0));
    }

    #[test]
    fn the_last_mount_over_dev_shm_counts() {
        let mounts = "tmpfs /dev/shm tmpfs rw,size=1k 0 0\nproc /proc proc rw 0 0\n\
                      tmpfs /dev/shm tmpfs rw,huge=advise,size=2k 0 0\n";
        assert_eq!(huge_option(mounts), "advise");
        assert_eq!(huge_option("tmpfs /dev/shm tmpfs rw 0 0\n"), "never");
    }
}
