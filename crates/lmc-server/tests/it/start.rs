//! `lmc start`, in containers of its own: the folder of a user's server is the same for all tests.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use lmc_testkit::{DEADLINE, Folder, Process, until};
use lmc_vllm_adapter::{Client, LOCAL_ADDRESS, LOCAL_SOCKET, Request};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::{Pid, Resource, Rlimit, geteuid, getrlimit, prlimit, setrlimit, umask};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::common::Server;
use crate::containers::{impossible, pass, spawn_test};

/// Makes a process of [`in_a_container`] do this.
const TASK: &str = "LMC_TEST_START";
/// The program, where containers see it.
const LMC: &str = "/run/lmc/lmc";
/// Settings that take little memory of the machine, and leave its state folders alone.
const FLAGS: [&str; 5] = [
    "--l1-size-gb",
    "16MiB",
    "--no-prefault",
    "--state-dir",
    "none",
];

/// Makes the program visible at a path.
fn put_program(path: &Path) {
    let program = env!("CARGO_BIN_EXE_lmc");
    if fs::hard_link(program, path).is_err() {
        fs::copy(program, path).expect("space");
    }
}

/// Runs a task in a container.
fn run(task: &str) {
    let folder = Folder::temporary();
    if let Some(why) = impossible(&folder) {
        println!("SKIPPED: no namespaces: {why}");
        return;
    }
    if std::net::TcpStream::connect(LOCAL_ADDRESS).is_ok() {
        println!("SKIPPED: something listens at {LOCAL_ADDRESS}, where engines look for a server");
        return;
    }
    put_program(&folder.join("lmc"));
    pass(
        task,
        spawn_test(&folder, false, in_a_container, (TASK, task)),
    );
}

/// Does nothing when the test suite runs it.
#[test]
fn in_a_container() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    match &*task {
        "once" => once(),
        "detached" => detached(),
        "settings" => settings(),
        "again" => again(),
        "waiting" => waiting(),
        "refused" => refused(),
        other => panic!("unknown task {other:?}"),
    }
}

/// Returns the command that starts a server with these flags and [`FLAGS`].
fn start(more: &[&str]) -> Command {
    start_by(LMC, more)
}

fn start_by(program: impl AsRef<OsStr>, more: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .args(["start", "--json", "--"])
        .args(FLAGS)
        .args(more);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the answer of a start that succeeds.
fn answer(output: &Output) -> Value {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    serde_json::from_str(&out).expect("JSON")
}

fn started(more: &[&str]) -> Value {
    answer(&start(more).output().expect("it runs"))
}

/// Returns the id of the server's process.
fn server() -> u32 {
    recorded(Path::new("/run/lmc/serve.json"))
}

fn recorded(path: &Path) -> u32 {
    let record = fs::read(path).expect("a record");
    let record: Value = serde_json::from_slice(&record).expect("JSON");
    u32::try_from(record["process"].as_u64().expect("an id")).expect("an id")
}

fn answers(socket: &Path) -> bool {
    let client = Client::connect_unix(socket, DEADLINE);
    client.is_ok_and(|mut client| client.ask(&Request::Noop).is_ok())
}

fn kill(signal: &str, process: u32) {
    let status = Command::new("kill")
        .args([signal, &process.to_string()])
        .status();
    assert!(status.expect("it runs").success());
}

fn is_running(process: u32) -> bool {
    // Its parent, the test, does not wait for it.
    fs::read_to_string(format!("/proc/{process}/status"))
        .is_ok_and(|status| !status.contains("State:\tZ"))
}

/// Many ranks that start at once.
fn once() {
    let starting = [(); 6].map(|()| start(&[]).spawn().expect("it runs"));
    let answers_of = starting.map(|child| answer(&child.wait_with_output().expect("it ends")));
    let count = answers_of
        .iter()
        .filter(|found| found["started"] == true)
        .count();
    assert_eq!(count, 1, "{answers_of:?}");
    for found in answers_of {
        assert_eq!(found["address"], format!("ipc://{LOCAL_SOCKET}"));
        assert_eq!(found["warnings"], serde_json::json!([]));
    }
    assert!(answers(Path::new(LOCAL_SOCKET)));
}

fn detached() {
    let cores = sched_getaffinity(None).expect("its cores");
    let mut one = CpuSet::new();
    let first = (0..CpuSet::MAX_CPU).find(|core| cores.is_set(*core));
    one.set(first.expect("a core"));
    sched_setaffinity(None, &one).expect("a part of them");
    umask(Mode::empty());
    let files = Rlimit {
        current: Some(1 << 30),
        ..getrlimit(Resource::Fsize)
    };
    setrlimit(Resource::Fsize, files).expect("a lower limit");
    // With a descriptor that is none of the program's.
    let mut command = Command::new("sh");
    command.args(["-c", "exec 9</dev/null; exec \"$@\"", "sh", LMC]);
    command.args(["start", "--json", "--"]).args(FLAGS);
    command
        .env("OMP_NUM_THREADS", "1")
        .env("LD_PRELOAD", "")
        .env("LMC_CHUNK_SIZE", "32");
    answer(&command.output().expect("it runs"));
    let process = server();
    let about = |file: &str| fs::read(format!("/proc/{process}/{file}")).expect("it runs");
    let variables = text(&about("environ"));
    assert!(variables.contains("LMC_CHUNK_SIZE=32"), "{variables}");
    assert!(!variables.contains("OMP_NUM_THREADS"), "{variables}");
    assert!(!variables.contains("LD_PRELOAD"), "{variables}");
    assert_eq!(text(&about("oom_score_adj")).trim(), "1000");
    let descriptors = fs::read_dir(format!("/proc/{process}/fd")).expect("it runs");
    for descriptor in descriptors.flatten() {
        let target = fs::read_link(descriptor.path()).unwrap_or_default();
        assert_ne!(target, Path::new("/dev/null"), "{descriptor:?}");
    }
    let status = text(&about("status"));
    assert!(status.contains("Umask:\t0022"), "{status}");
    let id = Pid::from_raw(process as i32);
    let found = prlimit(id, Resource::Fsize, files).expect("it is ours");
    assert_eq!(found.current, files.maximum);
    // After the name: state, parent, group, session.
    let stat = text(&about("stat"));
    let numbers = stat.rsplit_once(')').expect("a name").1;
    let numbers: Vec<&str> = numbers.split_whitespace().collect();
    assert_eq!(numbers[1], "1", "the one that started it is gone");
    assert_eq!(numbers[3], process.to_string(), "a session of its own");
    assert!(sched_getaffinity(id).expect("its cores") == cores);
}

fn settings() {
    started(&["--chunk-size", "16"]);
    assert_eq!(
        started(&["--chunk-size", "16"])["warnings"],
        serde_json::json!([])
    );
    let found = started(&["--chunk-size", "32"]);
    assert_eq!(found["started"], false);
    let warning = found["warnings"][0].as_str().expect("one");
    assert!(warning.contains("--chunk-size=16"), "{warning}");
    assert!(
        warning.contains(&format!("process {}", server())),
        "{warning}"
    );
    // FLAGS alone name other settings, too; a start without flags asks for none.
    let mut none = Command::new(LMC);
    let found = none.args(["start", "--json"]).output().expect("it runs");
    assert_eq!(answer(&found)["warnings"], serde_json::json!([]));
}

/// While a server starts or ends, no other is started.
fn waiting() {
    let lock = File::create("/run/lmc/lmc.lock").expect("a file");
    flock(&lock, FlockOperation::NonBlockingLockExclusive).expect("it is new");
    let mut command = Command::new(LMC);
    let command = command.args(["start", "--json", "--timeout-seconds", "1"]);
    let found = answer(&command.output().expect("it runs"));
    assert_eq!(found["started"], false);
    let warning = found["warnings"][0].as_str().expect("one");
    assert!(warning.contains("starting or stopping"), "{warning}");
    assert!(!Path::new(LOCAL_SOCKET).exists());
    drop(lock);
    assert_eq!(started(&[])["started"], true);
    let first = server();
    kill("-TERM", first);
    let found = started(&[]);
    if found["started"] == false {
        // It had still answered.
        until("it is gone", || !is_running(first));
        assert_eq!(started(&[])["started"], true);
    }
    assert!(!is_running(first), "two at once");
    assert_ne!(server(), first);
}

fn again() {
    started(&[]);
    let killed = server();
    kill("-KILL", killed);
    until("it is gone", || !is_running(killed));
    assert!(Path::new(LOCAL_SOCKET).exists(), "left behind");
    assert_eq!(started(&[])["started"], true);
    let process = server();
    assert_ne!(process, killed);
    kill("-TERM", process);
    until("it ends", || !is_running(process));
    assert!(!Path::new(LOCAL_SOCKET).exists());
    // One that was started by hand, where the record of the other still lies.
    let mut by_hand = Command::new(LMC);
    by_hand.args([
        "serve",
        "--port",
        "0",
        "--http-port",
        "0",
        "--ipc-path",
        LOCAL_SOCKET,
    ]);
    let _by_hand = Process::spawn(by_hand.args(FLAGS).stdout(Stdio::null()));
    until("it listens", || answers(Path::new(LOCAL_SOCKET)));
    let found = started(&["--chunk-size", "32"]);
    assert_eq!(found["started"], false);
    let warning = found["warnings"][0].as_str().expect("one");
    assert!(warning.contains("not started by `lmc start`"), "{warning}");
}

fn refused() {
    let fails = |more: &[&str], part: &str| {
        let output = start(more).output().expect("it runs");
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(!output.status.success(), "{out}");
        assert!(err.contains(part), "{err}");
    };
    fails(&["--chunk-size", "none"], "--chunk-size");
    fails(&["--ipc-path", "/run/other"], "omit --ipc-path");
    let open = |mode| {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions("/run/lmc", mode).expect("it is ours");
    };
    open(0o777);
    fails(&[], "chmod go-w /run/lmc");
    open(0o755);
    assert_eq!(started(&[])["started"], true);
}

#[test]
fn one_server_is_started_however_many_ask_for_it() {
    run("once");
}

#[test]
fn a_server_in_the_background_depends_on_nothing_of_an_engine() {
    run("detached");
}

#[test]
fn the_settings_of_a_server_that_runs_stay_in_effect_with_a_warning() {
    run("settings");
}

#[test]
fn a_server_is_started_again_after_one_that_was_killed_or_has_ended() {
    run("again");
}

#[test]
fn no_server_is_started_beside_one_that_starts_or_ends() {
    run("waiting");
}

/// A user who is not root does not use root's server.
#[test]
fn each_user_has_a_server_of_its_own() {
    if !geteuid().is_root() {
        println!("SKIPPED: only root can run a program as another user");
        return;
    }
    // As a rule also where few users are known.
    let user = 65_000 - std::process::id() % 20_000;
    let folder = Folder::temporary();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let (program, home) = (folder.join("lmc"), folder.join("home"));
    put_program(&program);
    fs::create_dir(&home).expect("space");
    if let Err(error) = chown(&home, Some(user), Some(user)) {
        println!("SKIPPED: there is no user {user} here: {error}");
        return;
    }
    let own = PathBuf::from(format!("/tmp/lmc-{user}"));
    let start = |more: &[&str]| {
        let mut command = start_by(&program, more);
        command.uid(user).gid(user).env("HOME", &home);
        command.env_remove("XDG_STATE_HOME");
        command.output().expect("it runs")
    };
    // Another user was there first.
    fs::create_dir(&own).expect("a new name");
    let refused = start(&[]);
    assert!(!refused.status.success());
    let error = text(&refused.stderr);
    assert!(error.contains("belongs to user 0"), "{error}");
    fs::remove_dir(&own).expect("it is empty");
    let found = answer(&start(&[]));
    let socket = own.join("lmc.sock");
    assert_eq!(found["address"], format!("ipc://{}", socket.display()));
    assert_eq!(found["started"], true);
    assert!(answers(&socket), "root is trusted");
    kill("-TERM", recorded(&own.join("serve.json")));
    until("it ends", || !socket.exists());
    fs::remove_dir_all(own).expect("it is there");
}

#[test]
fn what_cannot_be_started_is_refused_with_its_reason() {
    run("refused");
}

#[test]
fn a_server_ends_by_itself_where_no_engine_is_connected() {
    let mut server = Server::start(&["--exit-when-idle-seconds", "1"]);
    assert!(server.process.wait().success());
}
