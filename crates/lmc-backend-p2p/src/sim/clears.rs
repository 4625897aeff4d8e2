//! Clears of an owner's chunks at the worst moments of a read.

use std::time::Duration;

use lmc_key::ChunkKey;

use super::net::{Faults, Net};
use super::run;
use super::schedules::{fetch, prompt};
use crate::chunks::Chunks;
use crate::message::Request;

/// Starts two daemons, the first of which has the chunks.
async fn owner_and_reader(seed: u64) -> (Net, Vec<ChunkKey>) {
    let net = Net::new(seed, Faults::none());
    (0..2).for_each(|host| net.start(host, 64, |_| ()));
    assert!(net.connect(0, 1).await);
    let keys = prompt(0, 4);
    keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
    (net, keys)
}

/// Clears the owner's chunks, which its engine computes again at once.
fn clear(net: &Net, keys: &[ChunkKey]) {
    net.chunks(0).clear();
    keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
}

/// Clears the owner's chunks, and lets the reader learn of it before any other message arrives.
fn clear_both(net: &Net, keys: &[ChunkKey]) {
    clear(net, keys);
    net.chunks(1).learn(net.chunks(0).known_epoch());
}

/// Chunks that are leased then are newer than the reader knows: read under the reader's epoch, they
/// would be taken for those that were cleared.
#[test]
fn chunks_that_are_cleared_between_a_locate_and_its_lease_are_misses() {
    run(async {
        let (net, keys) = owner_and_reader(61).await;
        let (at, cleared) = (net.clone(), keys.clone());
        net.forge(0, move |request, reply| {
            if matches!(request, Request::Locate(locate) if locate.keys.len() == 3) {
                clear(&at, &cleared);
            }
            Some(reply)
        });
        let tally = fetch(&net, 1, &keys).await;
        assert_eq!((tally.hits, tally.misses), (0, 4), "{tally:?}");
        net.forge(0, |_, reply| Some(reply));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(fetch(&net, 1, &keys).await.hits, 4);
    });
}

/// An owner that named the epoch of its answer once could name one newer than the bytes.
#[test]
fn chunks_that_are_cleared_after_they_are_leased_are_misses() {
    run(async {
        let (net, keys) = owner_and_reader(63).await;
        let (at, cleared) = (net.clone(), keys.clone());
        net.chunks(0).after_lease(move || clear_both(&at, &cleared));
        let tally = fetch(&net, 1, &keys).await;
        assert_eq!((tally.hits, tally.misses), (0, 4), "{tally:?}");
    });
}

/// An owner that named the epoch from before the lease would make a miss of it.
#[test]
fn chunks_that_are_cleared_and_computed_again_before_they_are_leased_are_hits() {
    run(async {
        let (net, keys) = owner_and_reader(65).await;
        let (at, cleared) = (net.clone(), keys.clone());
        net.chunks(0)
            .before_lease(move || clear_both(&at, &cleared));
        let tally = fetch(&net, 1, &keys).await;
        assert_eq!(tally.hits, 4, "{tally:?}");
    });
}
