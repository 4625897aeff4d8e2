//! The building of an arena from its configuration.

use std::io;
use std::sync::Arc;

use super::backing::{Backing, Behind};
use super::config::{Kind, Naming};
use super::map::{HUGE_PAGE, Mapping, page_size};
use super::prefault::Prefaulter;
use super::shared_file::SharedFile;
use super::{Arena, ArenaConfig, ArenaError, ArenaReport, Demand, Prefault, host, memfd};

/// Largest arena: half of the address space.
const MAX_BYTES: usize = 1 << 46;

impl ArenaConfig {
    /// Checks the configuration and makes the arena. The time does not depend on the size: pages become
    /// present on first touch, or by the background prefault.
    ///
    /// # Errors
    /// [`ArenaError`]; each message has the remedy.
    pub fn build(self) -> Result<Arena, ArenaError> {
        if self.bytes == 0 || self.bytes > MAX_BYTES {
            return Err(ArenaError::Size {
                bytes: self.bytes,
                max: MAX_BYTES,
            });
        }
        if self.prefault == (Prefault::Background { threads: 0 }) {
            return Err(ArenaError::PrefaultThreads);
        }
        let page = if self.huge_pages == Demand::Off {
            page_size()
        } else {
            HUGE_PAGE
        };
        let bytes = self.bytes.next_multiple_of(page);
        let mut report = ArenaReport {
            bytes,
            huge_pages: false,
            locked: false,
            numa_node: self.numa_node,
            reclaimed: false,
            notes: Vec::new(),
        };
        let backing = match &self.kind {
            Kind::Anonymous => {
                let map = anonymous(bytes, self.huge_pages, &mut report)?;
                backing(map, Behind::Nothing)?
            }
            Kind::Sealed => sealed(bytes, self.huge_pages, &mut report)?,
            Kind::Shared(naming) => shared(naming, bytes, self.huge_pages, &mut report)?,
        };
        // Before any page is present, so that all pages come from the node.
        if let Some(node) = self.numa_node {
            bind(backing.map(), node)?;
        }
        if self.lock != Demand::Off {
            lock(backing.map(), self.lock, &mut report)?;
        }
        let backing = Arc::new(backing);
        let prefault = match self.prefault {
            Prefault::None => None,
            Prefault::Background { threads } => {
                let started = Prefaulter::start(Arc::clone(&backing), threads);
                let what = "starting the prefault threads".to_owned();
                Some(started.map_err(|source| ArenaError::System {
                    what,
                    source: source.into(),
                })?)
            }
        };
        Ok(Arena {
            prefault,
            backing,
            report,
        })
    }
}

fn map_error(bytes: usize) -> impl FnOnce(io::Error) -> ArenaError {
    move |source| ArenaError::System {
        what: format!("mapping {bytes} bytes"),
        source: source.into(),
    }
}

fn anonymous(bytes: usize, huge: Demand, report: &mut ArenaReport) -> Result<Mapping, ArenaError> {
    if huge == Demand::Off {
        return Mapping::anonymous(bytes, false).map_err(map_error(bytes));
    }
    let need = bytes / HUGE_PAGE;
    // Reserved huge pages first: they are guaranteed at once and are never split.
    if let Ok(map) = Mapping::anonymous(bytes, true) {
        report.huge_pages = true;
        return Ok(map);
    }
    let (usable, total) = host::huge_pages();
    let why = format!(
        "{need} huge pages of 2 MiB are needed and {usable} of {total} are free: \
         set vm.nr_hugepages (sysctl -w vm.nr_hugepages={})",
        total - usable.min(total) + need as u64
    );
    if huge == Demand::Required {
        return Err(ArenaError::HugePages { why });
    }
    let map = Mapping::anonymous(bytes, false).map_err(map_error(bytes))?;
    let setting = host::transparent_huge_pages();
    match map.advise_huge_pages() {
        Ok(()) if setting != "never" => {
            report.huge_pages = true;
            report
                .notes
                .push(format!("using transparent huge pages, as {why}"));
        }
        Ok(()) => report.notes.push(format!(
            "no huge pages: {why}; transparent ones are off \
             (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)"
        )),
        Err(error) => report
            .notes
            .push(format!("no huge pages: {why}; madvise: {error}")),
    }
    Ok(map)
}

fn backing(map: Mapping, behind: Behind) -> Result<Backing, ArenaError> {
    let what = "guarding the arena".to_owned();
    Backing::new(map, behind).map_err(|source| ArenaError::System {
        what,
        source: source.into(),
    })
}

fn sealed(bytes: usize, huge: Demand, report: &mut ArenaReport) -> Result<Backing, ArenaError> {
    let why = "sealed memory is not backed by huge pages";
    match huge {
        Demand::Off => {}
        Demand::Auto => report.notes.push(format!("no huge pages: {why}")),
        Demand::Required => {
            let why = why.to_owned();
            return Err(ArenaError::HugePages { why });
        }
    }
    let file = memfd::create(bytes as u64).map_err(|source| ArenaError::System {
        what: format!("making a sealed file of {bytes} bytes"),
        source: source.into(),
    })?;
    let map = Mapping::shared(&file, bytes).map_err(map_error(bytes))?;
    backing(map, Behind::Sealed(file))
}

fn shared(
    naming: &Naming,
    bytes: usize,
    huge: Demand,
    report: &mut ArenaReport,
) -> Result<Backing, ArenaError> {
    let (file, reclaimed) = SharedFile::create(naming, bytes as u64)?;
    report.reclaimed = reclaimed.is_some();
    report.notes.extend(reclaimed);
    let map = Mapping::shared(file.file(), bytes).map_err(map_error(bytes))?;
    let mut backing = backing(map, Behind::Named(file))?;
    if huge != Demand::Off {
        let option = host::shm_huge_option();
        let why = match option.as_str() {
            "always" | "within_size" | "advise" => match backing.advise_huge() {
                Ok(()) => None,
                Err(error) => Some(format!("madvise (needs Linux 5.14): {error}")),
            },
            option => Some(format!(
                "/dev/shm is mounted with huge={option}: mount -o remount,huge=advise /dev/shm"
            )),
        };
        match why {
            None => report.huge_pages = true,
            Some(why) if huge == Demand::Required => return Err(ArenaError::HugePages { why }),
            Some(why) => report.notes.push(format!("no huge pages: {why}")),
        }
    }
    Ok(backing)
}

fn bind(map: &Mapping, node: u32) -> Result<(), ArenaError> {
    let (online, list) = host::numa_node(node);
    if !online {
        let why = format!("the nodes with memory are {list}");
        return Err(ArenaError::Numa { node, why });
    }
    map.bind(node).map_err(|error| {
        let why = match error.raw_os_error() {
            Some(libc::EPERM | libc::ENOSYS) => {
                format!(
                    "mbind: {error}; a container needs CAP_SYS_NICE or a seccomp profile with mbind"
                )
            }
            _ => format!("mbind: {error}"),
        };
        ArenaError::Numa { node, why }
    })
}

fn lock(map: &Mapping, demand: Demand, report: &mut ArenaReport) -> Result<(), ArenaError> {
    let Err(source) = map.lock_on_fault() else {
        report.locked = true;
        return Ok(());
    };
    let bytes = map.len();
    let remedy = match host::lock_limit() {
        Some(limit) => format!(
            "the limit is {limit} bytes: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, \
             docker --ulimit memlock=-1) or grant CAP_IPC_LOCK"
        ),
        None => "there is no limit on locked memory, so the kernel refuses for another reason \
                 (Linux 4.4 or newer is needed)"
            .to_owned(),
    };
    if demand == Demand::Required {
        return Err(ArenaError::Lock {
            bytes,
            remedy,
            source: source.into(),
        });
    }
    report
        .notes
        .push(format!("memory is not locked: {source}; {remedy}"));
    Ok(())
}
