//! Questions to a peer, and their answers.

use bytes::Bytes;

use super::*;
use crate::MAX_MESSAGE;

fn answering(answer: impl Fn(&PeerId, u64, Bytes) -> Bytes + Send + Sync + 'static) -> Victim {
    Victim::new(|config| {
        let answer = Arc::new(answer);
        config.channel.on_ask = Some(Arc::new(move |peer, incarnation, question| {
            let (answer, peer) = (Arc::clone(&answer), peer.clone());
            Box::pin(async move { answer(&peer, incarnation, question) })
        }));
    })
}

fn asker() -> SocketChannel {
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("1 MiB");
    let channel = ChannelConfig::new(name("asker"), Arc::new(arena));
    SocketConfig::new(channel, local(0))
        .build()
        .expect("a free port")
}

fn connected(victim: &Victim) -> SocketChannel {
    let asker = asker();
    let (to, at) = (name("victim"), victim.channel.address());
    block_on(TransferChannel::connect(&asker, &to, at, None, soon())).expect("it listens");
    asker
}

#[test]
fn questions_of_all_sizes_are_answered_each_with_its_own() {
    let victim = answering(|peer, _, question| {
        assert_eq!(peer, &name("asker"));
        question.iter().rev().copied().collect()
    });
    let asker = connected(&victim);
    let to = name("victim");
    let ask = |len: usize| {
        let (asker, to) = (&asker, &to);
        async move {
            let question: Vec<u8> = (0..len).map(|n| (n * 7 + len) as u8).collect();
            let answer = asker.ask(to, question.clone().into(), soon()).await;
            let reversed: Vec<u8> = question.into_iter().rev().collect();
            assert_eq!(answer.expect("an answer"), reversed);
        }
    };
    // More at a time than a stream takes, few of them long.
    let len = |n: usize| match n % 60 {
        0 => MAX_MESSAGE,
        n => [0, 1, 100, 5_000][n % 4],
    };
    let all = (0..600).map(len).map(ask);
    block_on(futures_util::future::join_all(all));
    drop(asker);
    victim.ends();
}

#[test]
fn a_question_without_an_answer_ends_by_its_deadline_or_with_its_peer() {
    let silent = Victim::new(|config| {
        config.channel.on_ask = Some(Arc::new(|_, _, _| Box::pin(std::future::pending())));
    });
    let asker = connected(&silent);
    let to = name("victim");
    let late = block_on(asker.ask(&to, Bytes::new(), after(300)));
    assert!(matches!(late, Err(TransferError::Deadline)), "{late:?}");
    let gone = thread::scope(|scope| {
        let asked = scope.spawn(|| block_on(asker.ask(&to, Bytes::new(), soon())));
        silent.eventually("asked twice", |victim| victim.channel.stats().served >= 2);
        block_on(silent.channel.close(soon())).expect("it closes");
        asked.join().expect("no panic")
    });
    assert!(
        matches!(gone, Err(TransferError::PeerGone { .. })),
        "{gone:?}"
    );
    let unknown = block_on(asker.ask(&name("stranger"), Bytes::new(), soon()));
    assert!(matches!(unknown, Err(TransferError::UnknownPeer { .. })));
}

#[test]
fn questions_that_are_not_taken_are_refused() {
    let deaf = Victim::new(|_| {});
    let asker = connected(&deaf);
    let to = name("victim");
    let refused = block_on(asker.ask(&to, Bytes::new(), soon()));
    assert!(
        matches!(refused, Err(TransferError::Refused(_))),
        "{refused:?}"
    );
    let long = Bytes::from(vec![0; MAX_MESSAGE + 1]);
    let refused = block_on(asker.ask(&to, long, soon()));
    assert!(
        matches!(refused, Err(TransferError::Refused(_))),
        "{refused:?}"
    );
    drop(asker);
    deaf.ends();
    let verbose = answering(|_, _, _| vec![0; MAX_MESSAGE + 1].into());
    let asker = connected(&verbose);
    let refused = block_on(asker.ask(&to, Bytes::new(), soon()));
    assert!(
        matches!(refused, Err(TransferError::Refused(_))),
        "{refused:?}"
    );
}

#[test]
fn an_answer_that_was_not_asked_for_ends_the_connection() {
    let victim = Victim::new(|_| {});
    for frame in [
        Frame::Reply {
            id: 77,
            answer: vec![1],
        },
        Frame::Ask {
            id: 1,
            question: vec![0; MAX_MESSAGE + 1],
        },
    ] {
        let mut raw = Raw::connect(&victim, 1);
        let bytes = raw.bytes_of(&frame);
        raw.stream.write_all(&bytes).expect("it is connected");
        assert!(raw.finds_it_closed());
    }
    assert_eq!(victim.channel.stats().broken, 2);
    victim.ends();
}

#[test]
fn a_peer_is_identified_by_its_address() {
    let victim = Victim::new(|_| {});
    let asker = asker();
    let found = block_on(asker.identify(victim.channel.address(), soon()));
    assert_eq!(found.expect("it listens"), name("victim"));
    assert!(!asker.is_connected(&name("victim")));
    block_on(asker.identify(&local(1), soon())).expect_err("nothing listens there");
}
