//! Chooses the size of the pool for `auto`.

use std::fs;
use std::path::Path;

/// Memory that this process needs at least in addition to its pool and the pool's page tables: code,
/// stacks, index, hash memo.
const HEADROOM: u64 = 32 << 20;

/// Bytes of a pool without huge pages for each byte of its page tables: 8 bytes for a page of 4 KiB.
const POOL_PER_PAGE_TABLE: u64 = 512;

/// Smallest size that `auto` chooses if that much fits.
const FLOOR: u64 = 64 << 20;

/// Memory that a pool could take, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeMemory {
    /// `MemAvailable` of `/proc/meminfo`.
    pub available: u64,
    /// The tightest limit of this process's control groups, if there is a limit.
    pub cgroup: Option<CgroupLimit>,
    /// Free space of `/dev/shm`, if the pool is there.
    pub shm: Option<u64>,
}

/// A hard limit on the memory of a control group, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupLimit {
    /// The limit. The kernel kills a process that exceeds it.
    pub limit: u64,
    /// Bytes left below the limit. Page cache that the kernel can drop counts as left.
    pub left: u64,
}

impl FreeMemory {
    /// Returns the free memory of this machine. `shared`: the pool is in `/dev/shm`.
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

    /// Returns the memory that this process may use before the system or the cgroup runs out.
    pub fn bound(&self) -> u64 {
        let left = self.cgroup.map(|cgroup| cgroup.left);
        self.available.min(left.unwrap_or(u64::MAX))
    }

    /// Returns true if a pool of `bytes` fits within every limit.
    pub(crate) fn holds(&self, bytes: u64) -> bool {
        self.check_cgroup(bytes).is_ok()
            && bytes <= self.available
            && self.shm.is_none_or(|free| bytes <= free)
    }

    /// Returns the largest pool that this process and the pool's page tables leave space for, in bytes.
    /// docs/size.md has the limit that operators set, which is larger.
    fn largest(left: u64) -> u64 {
        let left = left.saturating_sub(HEADROOM);
        left - left / (POOL_PER_PAGE_TABLE + 1)
    }

    /// Checks that a pool of `bytes` does not get this process killed by its cgroup.
    ///
    /// # Errors
    /// A text with the numbers and the remedy.
    pub(crate) fn check_cgroup(&self, bytes: u64) -> Result<(), String> {
        let Some(CgroupLimit { limit, left }) = self.cgroup else {
            return Ok(());
        };
        let largest = Self::largest(left);
        if bytes <= largest {
            return Ok(());
        }
        let human = crate::config::human_bytes;
        Err(format!(
            "a pool of {} does not fit into the memory limit of this server's cgroup: {} of {} \
             are left, the server needs {} in addition to the pool, and the kernel kills \
             a process that exceeds the limit; set --l1-size-gb to at most {}MiB, or raise the limit (docker \
             --memory, Kubernetes resources.limits.memory, systemd MemoryMax=)",
            human(bytes),
            human(left),
            human(limit),
            human(HEADROOM.saturating_add(bytes / POOL_PER_PAGE_TABLE)),
            largest >> 20
        ))
    }
}

/// Files of a control group's memory controller.
struct Controller {
    root: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Fields of `memory.stat` that count page cache which the kernel can drop. They do not count
    /// shared memory.
    cache: [&'static str; 2],
}

const V2: Controller = Controller {
    root: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cache: ["inactive_file", "active_file"],
};

const V1: Controller = Controller {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};

/// Returns the tightest limit of this process's control groups (version 2, or 1), from its own group
/// up to the root.
fn cgroup() -> Option<CgroupLimit> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let limit_of = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        match controllers {
            "" => tightest(&V2, path),
            _ if controllers.split(',').any(|name| name == "memory") => tightest(&V1, path),
            _ => None,
        }
    };
    let limits = groups.lines().filter_map(limit_of);
    limits.min_by_key(|limit| limit.left)
}

/// Returns the tightest limit from a group up to the root. Inside a container the path is often the
/// host's path, which does not exist there, while the root is the container's own group.
fn tightest(controller: &Controller, path: &str) -> Option<CgroupLimit> {
    let read = |folder: &Path, name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |folder: &Path, name: &str| read(folder, name)?.trim().parse::<u64>().ok();
    let cache = |folder: &Path| {
        let stat = read(folder, "memory.stat").unwrap_or_default();
        let bytes = |line: &str| {
            let (name, bytes) = line.split_once(' ')?;
            let counted = controller.cache.contains(&name);
            counted.then(|| bytes.trim().parse::<u64>().ok()).flatten()
        };
        stat.lines().filter_map(bytes).sum::<u64>()
    };
    let own = Path::new(controller.root).join(path.trim_start_matches('/'));
    own.ancestors()
        .take_while(|folder| folder.starts_with(controller.root))
        .filter_map(|folder| {
            let limit = number(folder, controller.limit)?;
            let used = number(folder, controller.used).unwrap_or(0);
            let left = limit.saturating_sub(used.saturating_sub(cache(folder)));
            Some(CgroupLimit { limit, left })
        })
        .min_by_key(|limit| limit.left)
}

fn free_shm() -> Option<u64> {
    // An estimate is enough: the memory crate checks the real limit when it creates the segment.
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

/// Returns a quarter of the free memory, as far as it fits, and a sentence that explains the size.
pub fn choose_pool_size(free: FreeMemory) -> (u64, String) {
    let quarter = free.bound() / 4;
    // Leave /dev/shm some space for the engines' own segments.
    let shm = free.shm.map_or(u64::MAX, |free| free / 10 * 9);
    let fits = shm.min(FreeMemory::largest(free.bound()));
    // Whole huge pages, so that rounding up to them cannot exceed what fits.
    let bytes = (quarter.max(FLOOR).min(fits) >> 21 << 21).max(2 << 20);
    let of = match (free.cgroup, free.shm) {
        _ if shm < quarter.max(FLOOR) => {
            "as much as /dev/shm allows (docker --shm-size or --ipc=host enlarges it)"
        }
        (Some(cgroup), _) if cgroup.left < free.available => {
            "a quarter of the memory that the cgroup has left"
        }
        _ => "a quarter of the free memory",
    };
    let size = crate::config::human_bytes(bytes);
    (bytes, format!("{size}, {of}; --l1-size-gb changes it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(left: u64) -> Option<CgroupLimit> {
        let limit = left + (1 << 30);
        Some(CgroupLimit { limit, left })
    }

    fn check(available: u64, left: Option<u64>, shm: Option<u64>, bytes: u64, why: &str) {
        let (found, text) = choose_pool_size(FreeMemory {
            available,
            cgroup: left.and_then(cgroup),
            shm,
        });
        assert_eq!(found, bytes, "{text}");
        assert!(text.contains(why), "{text:?} lacks {why:?}");
    }

    #[test]
    fn the_pool_is_a_quarter_of_what_is_free_within_every_limit() {
        let (mib, gib) = (1 << 20, 1 << 30);
        check(
            16 * gib,
            None,
            None,
            4 * gib,
            "a quarter of the free memory",
        );
        check(16 * gib, Some(8 * gib), None, 2 * gib, "cgroup");
        let shm = Some(100 * gib);
        check(16 * gib, Some(64 * gib), shm, 4 * gib, "of the free memory");
        check(16 * gib, None, Some(gib), (gib / 10 * 9) >> 21 << 21, "shm");
        // A container's default /dev/shm, a page of it taken.
        check(16 * gib, None, Some(64 * mib - 4096), 56 * mib, "/dev/shm");
        check(16 * gib, Some(80 * mib), None, 46 * mib, "cgroup");
        check(16 * gib, Some(200 * mib), None, 64 * mib, "cgroup");
        check(mib, None, None, 2 * mib, "quarter");
    }

    #[test]
    fn a_pool_that_leaves_the_server_nothing_in_its_cgroup_is_refused() {
        let free = FreeMemory {
            available: 16 << 30,
            cgroup: cgroup(500 << 20),
            shm: None,
        };
        assert!(free.check_cgroup(1 << 30).is_err());
        // Of the 468 MiB beside the process, page tables take less than 1 MiB.
        assert!(free.check_cgroup(468 << 20).is_err());
        assert_eq!(free.check_cgroup(467 << 20), Ok(()));
        // The page tables of a large pool take more than the process.
        let large = FreeMemory {
            cgroup: cgroup(1 << 40),
            ..free
        };
        assert!(large.check_cgroup((1 << 40) - (1 << 30)).is_err());
        assert_eq!(large.check_cgroup((1 << 40) - (3 << 30)), Ok(()));
        let free = FreeMemory {
            cgroup: None,
            ..free
        };
        assert_eq!(free.check_cgroup(1 << 40), Ok(()));
    }
}
