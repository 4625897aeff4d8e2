//! The properties of a host that the server needs.

use std::fs;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lmc_backend_disk::{DiskIo, check_io_uring, usable_bytes};
use lmc_backend_remote::format::ClearsError;
use lmc_backend_remote::{StoreOptions, open_store, read_clears};
use lmc_memory::{ArenaConfig, Demand, own_uid};
use rustix::fs::{Access, access, statfs};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::runtime::Builder;
use tokio_rustls::rustls::pki_types::UnixTime;

use super::Finding;
use crate::config::{
    DiskSettings, PoolSize, RemoteSettings, RemoteUrl, ServeConfig, StateDir, human_bytes,
};
use crate::http::access::{Access as HttpAccess, check_times};
use crate::text::error_text;
use crate::tools::remote::explained;
use crate::{FreeMemory, choose_pool_size, limits, occupant, remote, state};

/// Longest wait for a peer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for a shared store, and for the end of its connections.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);
/// Open files that a server with many engines, peers and segments of drives needs.
const OPEN_FILES: usize = 4096;
/// Bytes of the memory in which huge pages and NUMA nodes are tried.
const TRIED_BYTES: usize = 4 << 20;
/// Type of the file system of `/dev/shm`, and of a file system in memory that cannot be swapped, from
/// linux/magic.h.
const TMPFS: u32 = 0x0102_1994;
const RAMFS: u32 = 0x8584_58f6;
/// Bit of the capability to lock memory beyond the limit, in the capability sets of a process.
const CAP_IPC_LOCK: u64 = 1 << 14;

/// Checks everything, in the order in which a server needs it.
pub(super) fn all(config: &ServeConfig) -> Vec<Finding> {
    let free = FreeMemory::now(config.shm_name.is_in_dev_shm());
    let (pool, chosen) = match config.pool_size {
        PoolSize::Bytes(bytes) => (bytes, None),
        PoolSize::Auto => {
            let (bytes, why) = choose_pool_size(free);
            (bytes, Some(why))
        }
    };
    let mut findings = vec![
        kernel(),
        user(own_uid()),
        open_files(limits::open_files()),
        memory(free, pool, chosen),
    ];
    if config.shm_name.is_in_dev_shm() {
        findings.push(shm(pool));
    }
    findings.push(lock(config.lock_memory, pool));
    findings.push(huge_pages(config));
    findings.push(numa(config.numa_node));
    findings.push(gpu());
    findings.push(port("port", &config.host, config.port, "--port"));
    findings.push(port(
        "http port",
        &config.http_host,
        config.http_port,
        "--http-port",
    ));
    if let Some(number) = config.prometheus_port {
        let (check, flag) = ("metrics port", "--prometheus-port");
        findings.push(port(check, &config.host, number, flag));
    }
    if let Some(path) = &config.ipc_path {
        findings.push(socket(path));
    }
    findings.extend(http_files(config));
    findings.push(state_folder(&config.state_dir, &state::usual_folders()));
    if let Some(settings) = config.disk() {
        findings.push(io_uring(settings.io));
        findings.extend(settings.folders.iter().map(|path| drive(path, settings)));
    }
    if let Some(settings) = config.peers() {
        let peers = settings.peers.iter();
        findings.extend(peers.map(|at| peer(&at.host, at.port)));
    }
    findings.extend(config.remotes().filter_map(|settings| {
        let url = settings.url.as_ref()?;
        Some(store(config, settings, url))
    }));
    findings
}

fn text(path: &str) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn kernel() -> Finding {
    let release = text("/proc/sys/kernel/osrelease");
    Finding::ok("kernel", format!("Linux {release}"))
}

fn user(uid: u32) -> Finding {
    match uid {
        0 => Finding::warning(
            "user",
            "root",
            "run the server as the user of the engines: an attacker who takes over the server has the rights of its user",
        ),
        uid => Finding::ok(
            "user",
            format!(
                "uid {uid}; run engines as the same user, or name their users in --trusted-users"
            ),
        ),
    }
}

fn open_files(limit: usize) -> Finding {
    match limit {
        OPEN_FILES.. => Finding::ok("open files", format!("{limit} at most")),
        _ => Finding::warning(
            "open files",
            format!(
                "{limit} at most, expected {OPEN_FILES} or more: each connection and each segment of a drive is an \
                 open file"
            ),
            "raise the limit (ulimit -Hn, LimitNOFILE=, docker --ulimit nofile=)",
        ),
    }
}

/// Compares the pool with the free memory, as the start does. `chosen` explains a size that the server
/// chooses.
fn memory(free: FreeMemory, pool: u64, chosen: Option<String>) -> Finding {
    let size = human_bytes(pool);
    if let Err(why) = free.check_cgroup(pool) {
        return Finding::problem("memory", why, "");
    }
    if pool > free.available {
        return Finding::warning(
            "memory",
            format!(
                "the pool is {size}, and {} of memory are free: the system may kill the server once the pool \
                 fills",
                human_bytes(free.available)
            ),
            "make the pool smaller (--l1-size-gb)",
        );
    }
    let of = format!("{size}, with {} of memory free", human_bytes(free.bound()));
    Finding::ok("memory", format!("a pool of {}", chosen.unwrap_or(of)))
}

fn shm(pool: u64) -> Finding {
    let check = "/dev/shm";
    let Ok(stat) = statfs("/dev/shm") else {
        return Finding::problem(
            check,
            "it does not exist",
            "mount it (mount -t tmpfs tmpfs /dev/shm), or use --shm-name sealed with lmc's own connector",
        );
    };
    let bytes = |blocks: u64| blocks.saturating_mul(u64::try_from(stat.f_bsize).unwrap_or(0));
    let is_memory = [TMPFS, RAMFS].contains(&(stat.f_type as u32));
    judge_shm(pool, is_memory, bytes(stat.f_blocks), bytes(stat.f_bavail))
}

fn judge_shm(pool: u64, is_memory: bool, size: u64, free: u64) -> Finding {
    let check = "/dev/shm";
    if !is_memory {
        return Finding::problem(
            check,
            "its file system is not tmpfs: the pool would be on a drive",
            "mount a tmpfs there (mount -t tmpfs tmpfs /dev/shm)",
        );
    }
    let state = format!("tmpfs of {}, {} free", human_bytes(size), human_bytes(free));
    if pool > free {
        return Finding::problem(
            check,
            format!("{state}; the pool needs {}", human_bytes(pool)),
            "enlarge it (mount -o remount,size=… /dev/shm; in a container --shm-size or --ipc=host), \
             or make the pool smaller (--l1-size-gb)",
        );
    }
    Finding::ok(check, state)
}

fn lock(demand: Demand, pool: u64) -> Finding {
    let limit = getrlimit(Resource::Memlock).maximum;
    let status = text("/proc/self/status");
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let rights = rights.and_then(|rights| u64::from_str_radix(rights.trim(), 16).ok());
    let is_free = rights.is_some_and(|rights| rights & CAP_IPC_LOCK != 0);
    judge_lock(demand, pool, limit.filter(|_| !is_free))
}

/// Judges a limit on locked memory; `None` for no limit.
fn judge_lock(demand: Demand, pool: u64, limit: Option<u64>) -> Finding {
    let check = "memlock";
    let Some(limit) = limit else {
        return Finding::ok(check, "no limit");
    };
    let state = format!("{} at most", human_bytes(limit));
    if demand == Demand::Off || pool <= limit {
        return Finding::ok(check, state);
    }
    let found = format!("{state}; the pool needs {}", human_bytes(pool));
    let remedy = "raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit \
                  memlock=-1), or omit --lock-memory";
    match demand {
        Demand::Required => Finding::problem(check, found, remedy),
        _ => Finding::warning(check, found, remedy),
    }
}

/// Tries huge pages on memory of the kind that the pool has.
fn huge_pages(config: &ServeConfig) -> Finding {
    let check = "huge pages";
    if config.huge_pages == Demand::Off {
        return Finding::ok(check, "not requested");
    }
    let name = format!("lmc_doctor_{}", std::process::id());
    let arena = match config.shm_name.is_in_dev_shm() {
        true => ArenaConfig::shared_unique(name, TRIED_BYTES),
        false => ArenaConfig::sealed(TRIED_BYTES),
    };
    match arena.with_huge_pages(config.huge_pages).build() {
        Ok(arena) => {
            arena.unlink();
            let report = arena.report();
            match report.huge_pages {
                true => Finding::ok(check, "the pool gets them"),
                // The notes name the remedy, and so does the error.
                false => Finding::warning(check, report.notes.join("; "), ""),
            }
        }
        Err(error) => Finding::problem(check, error.to_string(), ""),
    }
}

fn numa(chosen: Option<u32>) -> Finding {
    let check = "NUMA";
    let entries = fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten();
    let is_node = |name: &str| {
        let number = name.strip_prefix("node");
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let nodes = names
        .filter(|name| name.to_str().is_some_and(is_node))
        .count();
    match chosen {
        Some(node) => {
            let arena = ArenaConfig::anonymous(TRIED_BYTES)
                .with_numa_node(chosen)
                .build();
            match arena {
                Ok(_) => Finding::ok(check, format!("the pool is bound to node {node}")),
                Err(error) => Finding::problem(check, error.to_string(), ""),
            }
        }
        None if nodes > 1 => Finding::warning(
            check,
            format!("{nodes} nodes, and the pool may be on any of them"),
            "bind the pool to the node of the engines' GPUs (--numa-node; nvidia-smi topo -m shows the node)",
        ),
        None => Finding::ok(check, "one node"),
    }
}

fn gpu() -> Finding {
    let driver = text("/proc/driver/nvidia/version");
    let devices = fs::read_dir("/proc/driver/nvidia/gpus");
    let devices = devices.map_or(0, |devices| devices.flatten().count());
    judge_gpu(&driver, devices, Path::new("/dev/nvidiactl").exists())
}

/// Judges the driver's version text, the number of GPUs, and whether the container has the device.
fn judge_gpu(driver: &str, gpus: usize, has_device: bool) -> Finding {
    let check = "GPU";
    // NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  …
    let version = driver.split_whitespace().find(|word| {
        word.split('.').count() > 1 && word.split('.').all(|part| part.parse::<u32>().is_ok())
    });
    match version {
        None => Finding::ok(check, "no GPU, and none is needed"),
        Some(version) if has_device => {
            Finding::ok(check, format!("NVIDIA driver {version}, {gpus} GPUs"))
        }
        Some(version) => Finding::warning(
            check,
            format!("NVIDIA driver {version}, {gpus} GPUs, but no device in /dev"),
            "pass the devices to the container (docker --gpus all); not needed if engines use lmc's own connector",
        ),
    }
}

fn port(check: &'static str, host: &str, port: u16, flag: &str) -> Finding {
    match TcpListener::bind((host, port)) {
        Ok(_) => Finding::ok(check, format!("{host}:{port} is free")),
        Err(error) if error.kind() == ErrorKind::AddrInUse => match occupant::of_port(port) {
            Some(holder) if holder.is_lmc() => Finding::warning(
                check,
                format!("{host}:{port} is held by a running server, {holder}"),
                format!("for a second server, choose another {flag}"),
            ),
            Some(holder) => Finding::problem(
                check,
                format!("{host}:{port} is held by {holder}"),
                format!("stop that process, or choose another {flag}"),
            ),
            None => Finding::problem(
                check,
                format!("{host}:{port} is in use"),
                format!("stop the process that listens there, or choose another {flag}"),
            ),
        },
        Err(error) => Finding::problem(
            check,
            format!("{host}:{port} cannot be opened: {error}"),
            format!("check {flag} and the address"),
        ),
    }
}

/// Checks the folder of the Unix socket for engines.
fn socket(path: &Path) -> Finding {
    let check = "socket";
    let folder = path.parent().unwrap_or(Path::new("/"));
    match access(folder, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => Finding::ok(check, format!("{} can be created", path.display())),
        Err(error) => Finding::problem(
            check,
            format!("{} cannot be created: {error}", path.display()),
            "create its folder, owned by the user of the server (RuntimeDirectory=)",
        ),
    }
}

/// Returns a folder, or if it does not exist the nearest of its parents that does.
fn nearest_existing(path: &Path) -> &Path {
    let nearest = path.ancestors().find(|path| path.exists());
    nearest.unwrap_or(Path::new("."))
}

/// Checks that this user may create files in a folder.
fn can_write(folder: &Path) -> Result<(), Errno> {
    match folder.is_dir() {
        true => access(folder, Access::WRITE_OK | Access::EXEC_OK),
        false => Err(Errno::NOTDIR),
    }
}

/// Checks the files of the HTTP side; `None` if the settings name none.
fn http_files(config: &ServeConfig) -> Option<Finding> {
    let check = "HTTP files";
    let cert = config.http_tls_cert.as_deref();
    let token = config.http_token_file.as_deref();
    cert.or(token)?;
    if let Err(error) = HttpAccess::read(config) {
        // The error names the setting, the file and the remedy.
        return Some(Finding::problem(check, error_text(&error), ""));
    }
    let times = cert.map_or(Ok(()), |path| check_times(path, UnixTime::now()));
    Some(match times {
        Ok(()) => Finding::ok(
            check,
            "token, certificate and key can be used, where they are named",
        ),
        Err(error) => Finding::problem(
            check,
            format!("--http-tls-cert: {}", error_text(&error)),
            "renew the certificate; a running server reads it again with `lmc reload`",
        ),
    })
}

/// Checks the folder for clears and quotas. `usual` are the folders of `auto`.
fn state_folder(chosen: &StateDir, usual: &[PathBuf]) -> Finding {
    let check = "state folder";
    let judged = |path: &Path| can_write(nearest_existing(path));
    match chosen {
        StateDir::None => Finding::ok(check, "not requested"),
        StateDir::Path(path) => match judged(path) {
            Ok(()) => Finding::ok(check, format!("{} can be written to", path.display())),
            Err(error) => Finding::problem(
                check,
                format!("{} cannot be written to: {error}", path.display()),
                "make the user of the server its owner (StateDirectory=), or name another folder with --state-dir",
            ),
        },
        StateDir::Auto => match usual.iter().find(|path| judged(path).is_ok()) {
            Some(path) => Finding::ok(check, format!("{} can be written to", path.display())),
            None => Finding::warning(
                check,
                "none of the usual folders can be written to: a restart may lose clears, and loses quotas \
                 that were set over HTTP",
                "set --state-dir to a folder that the user of the server may write to",
            ),
        },
    }
}

fn io_uring(io: DiskIo) -> Finding {
    let check = "io_uring";
    match (check_io_uring(), io) {
        (_, DiskIo::Threads) => Finding::ok(check, "not requested"),
        (Ok(()), _) => Finding::ok(check, "the drives use it"),
        (Err(error), io) => {
            let found = format!("the kernel refuses io_uring: {error}");
            let remedy = "sysctl kernel.io_uring_disabled=0; in a container allow io_uring_setup, \
                          io_uring_enter and io_uring_register (seccomp)";
            match io {
                DiskIo::Uring => Finding::problem(check, found, remedy),
                _ => Finding::warning(
                    check,
                    format!("{found}; threads read and write instead, which is slower"),
                    remedy,
                ),
            }
        }
    }
}

fn drive(path: &Path, settings: &DiskSettings) -> Finding {
    let check = "disk";
    let shown = path.display();
    let usable = match usable_bytes(path) {
        Ok(usable) => usable.saturating_sub(settings.keep_free),
        // The error names the folder already.
        Err(error) => return Finding::problem(check, error.to_string(), ""),
    };
    let nearest = nearest_existing(path);
    if let Err(error) = can_write(nearest) {
        return Finding::problem(
            check,
            format!("{} cannot be written to: {error}", nearest.display()),
            "make the user of the server its owner, and name it in the unit (ReadWritePaths=)",
        );
    }
    if !path.join("drive").exists() && !settings.create {
        return Finding::problem(
            check,
            format!("{shown} holds no drive"),
            "for the first start use --disk-create; otherwise mount the file system that belongs there",
        );
    }
    let is_memory =
        statfs(nearest).is_ok_and(|stat| [TMPFS, RAMFS].contains(&(stat.f_type as u32)));
    if is_memory {
        return Finding::warning(
            check,
            format!("{shown} is in memory: its chunks are lost at a restart of the host"),
            "name a folder on a drive",
        );
    }
    let drives = settings.folders.len() as u64;
    match settings.size {
        PoolSize::Bytes(size) if size / drives > usable => {
            let found = format!(
                "{shown} has {} for chunks, but --disk-size asks for {}",
                human_bytes(usable),
                human_bytes(size / drives)
            );
            let remedy = "free some space, or set a smaller --disk-size";
            // The server uses a drive that it has used before as far as there is space.
            match path.join("drive").exists() {
                true => Finding::warning(check, found, remedy),
                false => Finding::problem(check, found, remedy),
            }
        }
        _ => Finding::ok(
            check,
            format!("{shown} has {} for chunks", human_bytes(usable)),
        ),
    }
}

/// Opens a store and reads its clears, which a server does first.
fn store(config: &ServeConfig, settings: &RemoteSettings, url: &RemoteUrl) -> Finding {
    let check = "store";
    if let Err(error) = remote::keys(config, Some(settings)) {
        return Finding::problem(check, error_text(&error), "");
    }
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Finding::problem(check, format!("cannot start: {error}"), ""),
    };
    let read = runtime.block_on(async {
        let opened = open_store(url.with_secrets(), StoreOptions::default());
        let store = opened.map_err(|error| error.to_string())?.store();
        let deadline = || Instant::now() + STORE_TIMEOUT;
        let read = read_clears(&*store, deadline()).await;
        store.close(deadline()).await;
        // The text has the remedy.
        read.map_err(|error| explained(&error))
    });
    runtime.shutdown_background();
    match read {
        Ok(Ok(_)) => Finding::ok(
            check,
            format!("{url} answers; `lmc remote check` also writes to it"),
        ),
        Ok(Err(error @ ClearsError::Damaged)) => Finding::warning(
            check,
            format!("{url}: {error}, and all its chunks count as cleared"),
            "start the server, which writes the object again",
        ),
        Ok(Err(error)) => Finding::problem(
            check,
            format!("{url}: {error}"),
            "use one release of lmc with one store",
        ),
        Err(why) => Finding::problem(check, format!("{url}: {why}"), ""),
    }
}

/// Connects to a peer, as the tier of peers does.
fn peer(host: &str, port: u16) -> Finding {
    let check = "peer";
    let remedy = format!(
        "start the peer with --p2p-listen, and allow this host to reach port {port} (firewall, security \
         group)"
    );
    let addresses = match (host, port).to_socket_addrs() {
        Ok(addresses) => addresses,
        Err(error) => {
            let found = format!("{host}:{port} has no address: {error}");
            return Finding::problem(check, found, "check --p2p-peer and the name service");
        }
    };
    let mut last = "the name has no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(_) => return Finding::ok(check, format!("{host}:{port} answers")),
            Err(error) => last = error.to_string(),
        }
    }
    Finding::problem(
        check,
        format!("{host}:{port} cannot be reached: {last}"),
        remedy,
    )
}

#[cfg(test)]
mod tests {
    use lmc_testkit::Folder;

    use super::super::Verdict;
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_pool_has_to_fit_into_dev_shm() {
        let judge = |pool, is_memory, free| judge_shm(pool, is_memory, 2 * GIB, free).verdict;
        assert_eq!(judge(GIB, true, GIB), Verdict::Ok);
        assert_eq!(judge(GIB + 1, true, GIB), Verdict::Problem);
        assert_eq!(judge(GIB, false, GIB), Verdict::Problem);
    }

    #[test]
    fn a_limit_on_locked_memory_counts_if_the_pool_is_locked() {
        let judge = |demand, limit| judge_lock(demand, GIB, limit).verdict;
        assert_eq!(judge(Demand::Required, None), Verdict::Ok);
        assert_eq!(judge(Demand::Required, Some(GIB)), Verdict::Ok);
        assert_eq!(judge(Demand::Required, Some(65_536)), Verdict::Problem);
        assert_eq!(judge(Demand::Auto, Some(65_536)), Verdict::Warning);
        assert_eq!(judge(Demand::Off, Some(65_536)), Verdict::Ok);
    }

    #[test]
    fn a_driver_without_devices_is_that_of_a_container_without_gpus() {
        let driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23";
        assert_eq!(judge_gpu("", 0, false).verdict, Verdict::Ok);
        assert_eq!(
            judge_gpu(driver, 8, true),
            Finding::ok("GPU", "NVIDIA driver 580.95.05, 8 GPUs")
        );
        assert_eq!(judge_gpu(driver, 8, false).verdict, Verdict::Warning);
    }

    #[test]
    fn a_pool_beyond_the_limit_of_the_cgroup_is_a_problem() {
        let free = FreeMemory {
            available: 16 * GIB,
            cgroup: Some(crate::CgroupLimit {
                limit: 2 * GIB,
                left: GIB,
            }),
            shm: None,
        };
        let verdict = |pool| memory(free, pool, None).verdict;
        assert_eq!(verdict(GIB / 2), Verdict::Ok);
        assert_eq!(verdict(2 * GIB), Verdict::Problem);
        let free = FreeMemory {
            cgroup: None,
            ..free
        };
        assert_eq!(memory(free, 17 * GIB, None).verdict, Verdict::Warning);
    }

    #[test]
    fn a_state_folder_has_to_be_a_folder_and_without_any_restarts_forget() {
        let folder = Folder::temporary();
        let new = folder.join("a/b");
        let file = folder.join("file");
        fs::write(&file, "").expect("a file");
        let verdict = |chosen: &StateDir, usual: &[PathBuf]| state_folder(chosen, usual).verdict;
        let path = |path: &Path| StateDir::Path(path.to_owned());
        assert_eq!(verdict(&path(&folder), &[]), Verdict::Ok);
        assert_eq!(verdict(&path(&new), &[]), Verdict::Ok);
        assert_eq!(verdict(&path(&file), &[]), Verdict::Problem);
        assert_eq!(verdict(&path(&file.join("a")), &[]), Verdict::Problem);
        assert_eq!(verdict(&StateDir::Auto, &[file.clone(), new]), Verdict::Ok);
        assert_eq!(verdict(&StateDir::Auto, &[file]), Verdict::Warning);
        assert_eq!(verdict(&StateDir::None, &[]), Verdict::Ok);
        assert!(!folder.join("a").exists(), "it has created nothing");
    }

    #[test]
    fn few_open_files_and_root_are_warnings() {
        assert_eq!(open_files(1024).verdict, Verdict::Warning);
        assert_eq!(open_files(65_536).verdict, Verdict::Ok);
        assert_eq!(user(0).verdict, Verdict::Warning);
        assert_eq!(user(1000).verdict, Verdict::Ok);
    }
}
