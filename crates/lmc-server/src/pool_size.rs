//! How large the pool becomes when nobody says.

use std::fs;
use std::path::Path;

/// Memory that a pool could take, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeMemory {
    /// `MemAvailable` of `/proc/meminfo`.
    pub available: u64,
    /// What the control group may still take, where it has a limit.
    pub cgroup: Option<u64>,
    /// Free space of `/dev/shm`, when the pool lies there.
    pub shm: Option<u64>,
}

impl FreeMemory {
    /// Looks at this machine.
    pub fn now(shared: bool) -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let available = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
            .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .map_or(1 << 30, |kib| kib << 10);
        Self {
            available,
            cgroup: cgroup(),
            shm: shared.then(free_shm).flatten(),
        }
    }
}

impl FreeMemory {
    /// The memory that may be taken before something gives.
    pub fn bound(&self) -> u64 {
        self.available.min(self.cgroup.unwrap_or(u64::MAX))
    }
}

/// What this process's control groups (version 2, or 1) may still take: the least of any from
/// its own up to the root.
fn cgroup() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            match controllers {
                "" => rest_of("/sys/fs/cgroup", path, "memory.max", "memory.current"),
                _ if controllers.split(',').any(|name| name == "memory") => rest_of(
                    "/sys/fs/cgroup/memory",
                    path,
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                ),
                _ => None,
            }
        })
        .min()
}

/// Inside a container the path is often the host's and not there, while the root is the
/// container's own.
fn rest_of(root: &str, path: &str, limit: &str, used: &str) -> Option<u64> {
    let number = |folder: &Path, name: &str| {
        fs::read_to_string(folder.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let own = Path::new(root).join(path.trim_start_matches('/'));
    own.ancestors()
        .take_while(|folder| folder.starts_with(root))
        .filter_map(|folder| {
            let limit = number(folder, limit)?;
            Some(limit.saturating_sub(number(folder, used).unwrap_or(0)))
        })
        .min()
}

fn free_shm() -> Option<u64> {
    // statvfs through `df` would need a process; the memory crate checks the real limit when it
    // makes the segment, so an estimate is enough here.
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path is a C string and `stat` is written by a call that succeeds.
    let stat = unsafe {
        if libc::statvfs(c"/dev/shm".as_ptr(), stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// A quarter of the memory that is free, in whole MiB, and the sentence that says so.
pub fn choose_pool_size(free: FreeMemory) -> (u64, String) {
    let quarter = free.bound() / 4;
    // Leave /dev/shm some room for the engines' own segments.
    let shm = free.shm.map_or(u64::MAX, |free| free / 10 * 9);
    let bytes = (quarter.min(shm) >> 20 << 20).max(64 << 20);
    let of = match (free.cgroup, free.shm) {
        _ if shm < quarter => "as much as /dev/shm has",
        (Some(cgroup), _) if cgroup < free.available => "a quarter of what the cgroup has left",
        _ => "a quarter of the memory that is free",
    };
    let size = crate::config::human_bytes(bytes);
    (bytes, format!("{size}, {of}; --l1-size-gb changes it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(available: u64, cgroup: Option<u64>, shm: Option<u64>, bytes: u64, why: &str) {
        let (found, text) = choose_pool_size(FreeMemory {
            available,
            cgroup,
            shm,
        });
        assert_eq!(found, bytes, "{text}");
        assert!(text.contains(why), "{text:?} lacks {why:?}");
    }

    #[test]
    fn the_pool_is_a_quarter_of_what_is_free_within_every_limit() {
        let gib = 1 << 30;
        check(16 * gib, None, None, 4 * gib, "a quarter of the memory");
        check(16 * gib, Some(8 * gib), None, 2 * gib, "cgroup");
        check(
            16 * gib,
            Some(64 * gib),
            Some(100 * gib),
            4 * gib,
            "a quarter of the memory",
        );
        check(
            16 * gib,
            None,
            Some(gib),
            (gib / 10 * 9) >> 20 << 20,
            "/dev/shm",
        );
        check(1 << 20, None, None, 64 << 20, "quarter");
    }
}
