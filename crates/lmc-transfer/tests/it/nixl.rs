//! The suite and the pitfalls of channels with NIXL, over TCP and over shared memory.
//!
//! UCX reads its settings when it is loaded, and what is tested includes the end of a process:
//! so every test runs in a process of its own, which is this program with the test's name. The
//! tests that a runner sees only begin those.
mod scenarios;

use std::process::Stdio;
use std::time::Instant;

use crate::support::nixl::{NixlRig, SCENARIO, skipped};
use lmc_testkit::own_test;
use lmc_transfer::conformance;

const TCP: &str = "tcp";
/// Bytes over `process_vm_readv` and its sister; `tcp` is for what else UCX has to say.
const SHARED_MEMORY: &str = "cma,posix,tcp";

/// Runs a scenario in a process of its own, which must end well: also its exit is tested.
fn run(scenario: &str, transports: &str) {
    if skipped() {
        return;
    }
    let output = own_test(self::scenario)
        .env(SCENARIO, scenario)
        .env("UCX_TLS", transports)
        .env("UCX_NET_DEVICES", "lo")
        // A library sets no variables: see `NixlConfig::open`.
        .env("UCX_MODULES", "^efa")
        .env("UCX_LOG_FILE", "stderr")
        .env("UCX_LOG_LEVEL", "error")
        .env("NIXL_LOG_LEVEL", "ERROR")
        .stdin(Stdio::null())
        .output()
        .expect("the test program can be run");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{scenario} over {transports}: {}\n{said}\n{complained}",
        output.status
    );
    println!("{said}");
}

/// Runs the scenario that the environment names.
#[test]
fn scenario() {
    let Ok(name) = std::env::var(SCENARIO) else {
        return;
    };
    let Some(property) = name.strip_prefix("suite:") else {
        scenarios::run(&name);
        return;
    };
    let suite = conformance::properties::<NixlRig>().into_iter();
    let wanted: Vec<_> = suite
        .filter(|(name, _)| property == "all" || property == *name)
        .collect();
    assert!(!wanted.is_empty(), "{property}");
    for (name, check) in wanted {
        let began = Instant::now();
        println!("{name}");
        check(&NixlRig::new());
        println!("{name}: {:.3} s", began.elapsed().as_secs_f64());
    }
}

#[test]
fn the_suite_holds_over_tcp() {
    run("suite:all", TCP);
}

#[test]
fn the_suite_holds_over_shared_memory() {
    run("suite:all", SHARED_MEMORY);
}

/// Each of these is a function of `scenarios`.
macro_rules! over_both {
    ($($name:ident: $tcp:ident, $shared:ident;)*) => {$(
        #[test]
        fn $tcp() {
            run(stringify!($name), TCP);
        }

        #[test]
        fn $shared() {
            run(stringify!($name), SHARED_MEMORY);
        }
    )*};
}

over_both! {
    dropped: dropped_reads_give_their_slots_back_over_tcp, dropped_reads_give_their_slots_back_over_shared_memory;
    killed: killed_peers_are_noticed_over_tcp, killed_peers_are_noticed_over_shared_memory;
    killed_at_work: peers_killed_at_work_harm_no_other_over_tcp, peers_killed_at_work_harm_no_other_over_shared_memory;
    frozen: frozen_peers_hold_nothing_up_over_tcp, frozen_peers_hold_nothing_up_over_shared_memory;
    frozen_then_replaced: a_frozen_peer_survives_a_new_agent_over_tcp, a_frozen_peer_survives_a_new_agent_over_shared_memory;
    frozen_writer: a_frozen_sender_writes_to_no_slot_later_over_tcp, a_frozen_sender_writes_to_no_slot_later_over_shared_memory;
    frozen_at_close: a_close_waits_for_no_frozen_sender_over_tcp, a_close_waits_for_no_frozen_sender_over_shared_memory;
    forgotten_writer: a_forgotten_sender_writes_to_no_slot_later_over_tcp, a_forgotten_sender_writes_to_no_slot_later_over_shared_memory;
    small: many_small_objects_arrive_over_tcp, many_small_objects_arrive_over_shared_memory;
    left_open: a_process_ends_well_with_its_channel_open_over_tcp, a_process_ends_well_with_its_channel_open_over_shared_memory;
    pieces: memory_is_registered_in_pieces_over_tcp, memory_is_registered_in_pieces_over_shared_memory;
    leased: a_frozen_reader_keeps_the_owners_slots_over_tcp, a_frozen_reader_keeps_the_owners_slots_over_shared_memory;
}

#[test]
fn an_idle_channel_burns_no_core() {
    run("idle", TCP);
}

#[test]
fn an_on_connect_that_blocks_takes_a_few_threads() {
    run("blocked_on_connect", TCP);
}

/// The first test in a process without the library; needs none.
#[test]
fn a_missing_library_is_an_error() {
    let output = own_test(scenario)
        .env(SCENARIO, "missing")
        .env("LMC_NIXL_LIBRARY", "/nonexistent/libnixl_capi.so")
        .output()
        .expect("the test program can be run");
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {complained}", output.status);
}
