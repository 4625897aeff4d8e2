//! Tests of the real binary, in one program.

mod alerts;
mod bench;
mod browser;
mod clears;
mod cli;
mod common;
mod containers;
mod daemon;
mod disk;
mod doctor;
mod drain;
mod encrypted_peers;
mod first_chunks;
mod frozen_copies;
mod gpu;
mod hostile_peers;
mod http_access;
mod live;
mod metrics;
mod misses;
mod monitoring;
mod multinode;
#[cfg(feature = "nixl")]
mod nixl_peers;
mod notices;
mod operator;
mod other_users;
mod peers;
mod peers_kit;
mod pool;
mod pool_lost;
mod proxy;
mod reload;
mod remote;
mod remote_secrets;
mod remote_shared;
mod remote_tools;
#[allow(dead_code, reason = "the tests of the tier use all of it")]
#[path = "../../../lmc-backend-remote/tests/it/s3/servers.rs"]
mod s3_servers;
mod secrets;
mod spans;
mod start;
mod supervisor;
mod unequal;
