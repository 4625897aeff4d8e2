//! Prompts that wait for a peer whose engine computes them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lmc_backend::{BackendError, Host as _, LocateHint, Located, now};
use lmc_key::ChunkKey;

use super::net::{Faults, Net};
use super::schedules::{LOCATE, prompt};
use super::{LEN, run};
use crate::exchange::IN_STEP_PAUSE;

fn hint(name: &str) -> LocateHint {
    LocateHint::default().with_sources(Arc::new([name.to_owned()]))
}

fn waits(name: &str) -> LocateHint {
    hint(name).with_wait(Some(Duration::from_secs(30)))
}

/// Locates chunks for the first host. Returns a sign for each: it is there, written, expected, absent, or
/// not known.
async fn locate(net: &Net, keys: &[ChunkKey], hint: LocateHint) -> String {
    let located = net.node(0).locate(keys, &hint, now() + LOCATE).await;
    let state = |one: Result<Located, BackendError>| match one {
        Ok(Located::Present(_)) => 'P',
        Ok(Located::Pending) => 'w',
        Ok(Located::Expected) => '~',
        Ok(Located::Absent) => '-',
        Err(_) => '?',
    };
    located.into_iter().map(state).collect()
}

/// Chunks that a prefill had not computed yet were absent.
#[test]
fn a_prompt_waits_for_a_peer_that_it_names_as_long_as_that_is_connected() {
    run(async {
        let net = Net::with_daemons(26, Faults::none(), 3).await;
        let keys = &prompt(1, 4);
        net.chunks(2).store(keys[3], 0);
        let locate = async |hint| locate(&net, keys, hint).await;
        assert_eq!(locate(hint("host-1")).await, "---P");
        assert_eq!(locate(waits("stranger")).await, "---P");
        assert_eq!(locate(waits("host-1")).await, "~~~P");
        // The others were asked before.
        assert_eq!(locate(waits("host-1").repeated()).await, "~~~~");
        net.chunks(1).store(keys[0], 0);
        assert_eq!(locate(waits("host-1").repeated()).await, "P~~~");
        let named = |id: &str| waits("host-1").with_awaited(Some(id.into()));
        net.chunks(1).over.lock().insert("other".to_owned());
        assert_eq!(locate(named("request")).await, "P~~P");
        net.chunks(1).over.lock().insert("request".to_owned());
        assert_eq!(locate(named("request")).await, "P--P");
        // It is busy with the prompt.
        net.freeze(1, 2 * LOCATE);
        assert_eq!(locate(waits("host-1").repeated()).await, "~~~~");
        net.kill(1, Duration::ZERO);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(locate(waits("host-1")).await, "---P");
    });
}

#[test]
fn no_prompt_waits_for_a_peer_that_is_drained_but_reads_what_that_has() {
    run(async {
        let net = Net::with_daemons(28, Faults::none(), 2).await;
        let keys = prompt(1, 2);
        net.chunks(1).store(keys[0], 0);
        let locate = async || locate(&net, &keys, waits("host-1").repeated()).await;
        assert_eq!(locate().await, "P~");
        for (is_draining, found) in [(true, "P-"), (false, "P~")] {
            let chunks = net.chunks(1);
            chunks.is_draining.store(is_draining, Ordering::Relaxed);
            chunks.events().report_host();
            tokio::time::sleep(2 * IN_STEP_PAUSE).await;
            assert_eq!(locate().await, found);
            let status = net.node(0).status();
            assert_eq!(status.peers[0].draining, is_draining);
        }
        // The hello is lost.
        net.cut(0, 1, true, Duration::from_secs(600));
        net.chunks(1).is_draining.store(true, Ordering::Relaxed);
        net.chunks(1).events().report_host();
        tokio::time::sleep(Duration::from_secs(2)).await;
        net.cut(0, 1, false, Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(locate().await, "P-");
    });
}

/// Such a peer is not asked for long, so that it could not say that the request is over.
#[test]
fn nothing_is_expected_of_a_peer_that_lends_badly_again_and_again() {
    run(async {
        let net = Net::with_daemons(27, Faults::none(), 2).await;
        let keys = prompt(1, 3);
        net.chunks(1).begin_store(keys[1]);
        assert_eq!(locate(&net, &keys, waits("host-1")).await, "~w~");
        net.chunks(1).store(keys[0], 0);
        let mut answers = Vec::new();
        for _ in 0..4 {
            let other_length = waits("host-1").with_chunk_bytes(Some(LEN + 1));
            answers.push(locate(&net, &keys, other_length).await);
            tokio::time::sleep(Duration::from_millis(8100)).await;
        }
        // The pauses are of 1, 2, 4 and 8 seconds.
        assert_eq!(answers, ["~w~", "~w~", "?w?", "?w?"]);
    });
}

/// The engine tells a late tier from one that is down by the error.
#[test]
fn a_peer_that_does_not_answer_in_time_is_late_and_one_that_is_not_asked_is_down() {
    run(async {
        let net = Net::with_daemons(28, Faults::none(), 2).await;
        let keys = prompt(1, 3);
        net.chunks(1).store(keys[0], 0);
        let locate =
            async |hint: LocateHint| net.node(0).locate(&keys, &hint, now() + LOCATE).await;
        // The peer is paused for chunks of another length.
        locate(LocateHint::default().with_chunk_bytes(Some(LEN + 1))).await;
        let down = |one: &Result<Located, _>| matches!(one, Err(BackendError::Unavailable(_)));
        assert!(locate(LocateHint::default()).await.iter().all(down));
        tokio::time::sleep(Duration::from_secs(2)).await;
        let absent = |one: &Result<Located, _>| matches!(one, Ok(Located::Absent));
        assert!(locate(LocateHint::default()).await[1..].iter().all(absent));
        net.freeze(1, 2 * LOCATE);
        let late = |one: &Result<Located, _>| matches!(one, Err(BackendError::Deadline));
        assert!(locate(LocateHint::default()).await.iter().all(late));
    });
}
