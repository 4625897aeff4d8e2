//! A machine with fake devices, and the controls that tests have over it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi;
use crate::ipc::is_locked;
use crate::shared::{Control, DEVICES, Record, SharedMapping};
use crate::{Code, DEVICES_VARIABLE, FOLDER_VARIABLE};

/// A machine with fake devices, in a temporary folder that is removed on drop.
#[derive(Debug)]
pub struct Machine {
    folder: PathBuf,
    devices: usize,
    control: SharedMapping<Control>,
    /// True for the value that made the folder.
    is_owner: bool,
}

/// One process that has used a machine, or an [`Engine`](crate::Engine).
#[derive(Debug, Clone)]
pub struct Process {
    /// Id of the process; 0 for an engine.
    pub pid: u32,
    /// True until the process ends, or the engine is dropped.
    pub is_alive: bool,
    /// Objects that the process has not released; for a process that has ended, the objects at its
    /// end.
    pub live: Live,
}

/// Numbers of objects that a process has at the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Live {
    /// Devices whose primary context is retained.
    pub contexts: u64,
    /// Streams, without default streams.
    pub streams: u64,
    /// Own events, and events of other processes that are open.
    pub events: u64,
    /// Modules that are loaded.
    pub modules: u64,
    /// Allocations of device memory.
    pub allocations: u64,
    /// Memory of other processes that is mapped; memory that is opened twice counts once.
    pub mappings: u64,
    /// Bytes of those mappings.
    pub mapped_bytes: u64,
    /// Allocations of pinned memory of the host.
    pub host_allocations: u64,
    /// Registered ranges of memory of the host.
    pub registrations: u64,
    /// Bytes of those ranges.
    pub registered_bytes: u64,
}

impl Live {
    fn of(record: &Record) -> Self {
        let [
            contexts,
            streams,
            events,
            modules,
            allocations,
            mappings,
            host_allocations,
            registrations,
        ] = record.things.each_ref().map(|n| n.load(Ordering::SeqCst));
        let [.., mapped_bytes, _, registered_bytes] =
            record.bytes.each_ref().map(|n| n.load(Ordering::SeqCst));
        Self {
            contexts,
            streams,
            events,
            modules,
            allocations,
            mappings,
            mapped_bytes,
            host_allocations,
            registrations,
            registered_bytes,
        }
    }
}

impl Machine {
    /// Makes a machine with one device.
    ///
    /// # Panics
    /// If the folder cannot be made.
    #[allow(
        clippy::new_without_default,
        reason = "a folder is made, which a default value does not do"
    )]
    pub fn new() -> Self {
        Self::with_devices(1)
    }

    /// Makes a machine with no, one or two devices.
    ///
    /// # Panics
    /// As [`Machine::new`], and with more than two devices.
    pub fn with_devices(devices: usize) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        assert!(
            devices <= DEVICES,
            "a machine has {DEVICES} devices at most"
        );
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lmc-fake-cuda-{}-{count}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        // Files that an earlier process with the same id has left.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("lib")).expect("a folder for a test can be made");
        let control = SharedMapping::open(&folder.join("control"));
        Self {
            control: control.expect("the folder can be written"),
            folder,
            devices,
            is_owner: true,
        }
    }

    /// Returns the machine that this process was started with, by [`envs`](Self::envs) of its
    /// parent; `None` in a process without one.
    ///
    /// # Panics
    /// If the parent has dropped the machine.
    fn of_this_process() -> Option<Self> {
        let folder = PathBuf::from(std::env::var_os(FOLDER_VARIABLE)?);
        let devices = std::env::var(DEVICES_VARIABLE).ok()?.parse().ok()?;
        let control = SharedMapping::open(&folder.join("control"));
        Some(Self {
            control: control.expect("the parent has the machine"),
            folder,
            devices,
            is_owner: false,
        })
    }

    /// Runs `inside` in a process with a machine of its own, whose loader finds the machine's
    /// driver. `test` runs the calling test again (`lmc_testkit::own_test`).
    ///
    /// # Panics
    /// As [`Machine::with_devices`], and if the test fails in that process.
    pub fn in_own_process(devices: usize, mut test: Command, inside: impl FnOnce(&Self)) {
        if let Some(machine) = Self::of_this_process() {
            return inside(&machine);
        }
        let machine = Self::with_devices(devices);
        let status = test.envs(machine.envs()).status();
        let status = status.expect("the test's program can be started");
        assert!(status.success(), "the test failed in its process: {status}");
    }

    /// Returns environment variables for a program that is started. With them its loader finds this
    /// machine's driver, and the driver finds this machine.
    ///
    /// # Panics
    /// If the library was not built next to the program that runs.
    pub fn envs(&self) -> [(&'static str, OsString); 3] {
        let lib = self.folder.join("lib");
        let link = lib.join("libcuda.so");
        let linked = link.exists() || symlink(library(), link).is_ok();
        assert!(linked, "{lib:?} can be written");
        let mut path = lib.into_os_string();
        if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(more);
        }
        [
            (FOLDER_VARIABLE, self.folder.clone().into()),
            (DEVICES_VARIABLE, self.devices.to_string().into()),
            ("LD_LIBRARY_PATH", path),
        ]
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn devices(&self) -> usize {
        self.devices
    }

    /// Stops a device: no stream of any process begins more work on it until
    /// [`resume`](Self::resume).
    ///
    /// # Panics
    /// If the machine cannot have that device.
    pub fn hold(&self, device: usize) {
        self.control.held[device].store(1, Ordering::SeqCst);
    }

    /// Lets a device continue.
    ///
    /// # Panics
    /// If the machine cannot have that device.
    pub fn resume(&self, device: usize) {
        self.control.held[device].store(0, Ordering::SeqCst);
        self.control.changed();
    }

    /// Makes the next `times` calls of a function fail without any other effect, in all processes.
    /// 0 ends this.
    ///
    /// # Panics
    /// If the fake has no such function.
    pub fn fail(&self, function: &str, times: u32, code: Code) {
        self.control.fail(abi::index(function), 0, times, code);
    }

    /// Makes one call of a function fail, as [`fail`](Self::fail) does, after `calls` more calls
    /// were carried out.
    ///
    /// # Panics
    /// If the fake has no such function.
    pub fn fail_after(&self, function: &str, calls: u32, code: Code) {
        self.control.fail(abi::index(function), calls, 1, code);
    }

    /// Returns true while a failure of this function is still to come.
    ///
    /// # Panics
    /// If the fake has no such function.
    pub fn will_fail(&self, function: &str) -> bool {
        self.control.will_fail(abi::index(function))
    }

    /// Returns how often the processes of this machine have called a function.
    ///
    /// # Panics
    /// If the fake has no such function.
    pub fn calls(&self, function: &str) -> u64 {
        let index = abi::index(function);
        let calls =
            |(_, record): (_, SharedMapping<Record>)| record.calls[index].load(Ordering::SeqCst);
        self.records().map(calls).sum()
    }

    /// Returns the processes that have used this machine, including engines.
    pub fn processes(&self) -> Vec<Process> {
        let process = |(path, record): (PathBuf, SharedMapping<Record>)| Process {
            pid: pid(&path).unwrap_or_default(),
            is_alive: is_locked(&path),
            live: Live::of(&record),
        };
        self.records().map(process).collect()
    }

    /// Returns the objects that a process has at the driver; none if it has not used this machine.
    pub fn live(&self, pid: u32) -> Live {
        let mut processes = self.processes().into_iter();
        let found = processes.find(|process| process.pid == pid);
        found.map(|process| process.live).unwrap_or_default()
    }

    fn records(&self) -> impl Iterator<Item = (PathBuf, SharedMapping<Record>)> {
        let files = fs::read_dir(&self.folder).expect("the folder is there until the drop");
        let paths = files.flatten().map(|file| file.path());
        let records = paths.filter(|path| pid(path).is_some());
        records.filter_map(|path| Some((path.clone(), SharedMapping::open(&path).ok()?)))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.is_owner {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Returns the id in the name of a process's record.
fn pid(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?.strip_prefix("process-")?;
    let (pid, token) = name.split_once('-')?;
    let complete = !token.contains('.');
    complete.then(|| pid.parse().ok())?
}

/// Returns the library that was built with the crate, next to the program that runs.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    let mut folders = program.ancestors().skip(1);
    let found = folders.find_map(|folder| {
        let here = [folder.to_owned(), folder.join("deps")];
        let paths = here.map(|folder| folder.join("liblmc_fake_cuda.so"));
        paths.into_iter().find(|path| path.exists())
    });
    found.expect("cargo builds liblmc_fake_cuda.so for each crate that depends on lmc-fake-cuda")
}
