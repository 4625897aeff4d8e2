//! Prompts that an engine computes chunk by chunk, while other daemons wait for its daemon.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lmc_backend::{Host as _, LocateHint, Located, now};
use lmc_key::ChunkKey;
use lmc_memory::SealedSlot;
use tokio::time::sleep;

use super::chunks::SimChunks;
use super::net::{Faults, Net, name};
use super::schedules::{
    LATEST, LOCATE, Tally, assert_idle, faults, fetch_named, prompt, run_of, seeds,
};
use super::{Rng, bytes, delay, once_in, run};
use crate::exchange::IN_STEP_PAUSE;

/// Time of an answer to a question that is asked again.
const BUSY: Duration = Duration::from_millis(250);
/// Least time between two questions, and the part of the time since the first one that it is at least.
const ASK_AGAIN: Duration = Duration::from_millis(10);
const ASK_AGAIN_PART: u32 = 50;
/// Longest time of a wait beyond its bound: the last question, and a read of what has come.
const BEYOND_WAIT: Duration = BUSY
    .saturating_add(LOCATE.saturating_mul(2))
    .saturating_add(LATEST);
/// Longest time from a peer's end to the last answer that expects chunks of it: the cut is noticed, and a
/// daemon hears of that, each within two seconds.
const HEARD: Duration = Duration::from_secs(4).saturating_add(BEYOND_WAIT);
/// Failed reads after which a prompt is computed.
const MAX_FAILURES: u32 = 3;

/// The reason why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Every chunk has come.
    Whole,
    /// The deadline has passed.
    Late,
    /// Nothing more is expected of the source, or it is not known whether anything is.
    NothingMore,
    /// The waiting daemon has carried out a clear.
    Cleared,
    /// Chunks that were located could not be read.
    NotRead,
}

/// A prompt that an engine computes for others.
#[derive(Debug, Clone)]
pub(super) struct Prefill {
    /// Host of the engine.
    source: usize,
    keys: Vec<ChunkKey>,
    /// Leading chunks that the engine stores.
    stored: usize,
    /// Longest time for one chunk.
    pace: Duration,
    /// True where the engine begins one more chunk, which it never stores.
    begins_more: bool,
    /// Id of the request; none where its end is not known.
    id: Option<Arc<str>>,
    /// Hosts that the chunks are pushed to.
    push_to: Vec<usize>,
    seed: u64,
}

impl Prefill {
    /// Returns a request that may end in any way.
    pub(super) fn any(rng: &mut Rng, source: usize, keys: Vec<ChunkKey>) -> Self {
        let fails = once_in(rng, 2);
        Self {
            source,
            stored: match fails {
                true => rng.below(keys.len() as u64) as usize,
                false => keys.len(),
            },
            keys,
            pace: Duration::from_millis([1, 20, 100, 1_000][rng.below(4) as usize]),
            begins_more: once_in(rng, 4),
            id: (!once_in(rng, 4)).then(|| rng.next_u64().to_string().into()),
            push_to: Vec::new(),
            seed: rng.next_u64(),
        }
    }

    pub(super) fn pushed_to(mut self, host: usize) -> Self {
        self.push_to.push(host);
        self
    }

    /// Computes the prompt at the host that runs now.
    pub(super) async fn compute(&self, net: &Net) {
        let (node, chunks) = (net.node(self.source), net.chunks(self.source));
        let mut rng = Rng::new(self.seed);
        for &key in &self.keys[..self.stored] {
            sleep(delay(&mut rng, self.pace)).await;
            chunks.begin_store(key);
            sleep(delay(&mut rng, self.pace / 4)).await;
            chunks.store(key, rng.next_u64());
            for &to in &self.push_to {
                node.push(run_of(&chunks, &[key]), name(to).as_str());
            }
        }
        if let Some(&next) = self.keys.get(self.stored).filter(|_| self.begins_more) {
            let next = chunks.name(&next);
            chunks.begin_store(next);
            sleep(delay(&mut rng, Duration::from_secs(2))).await;
            chunks.give_up_store(&next);
        }
        if let Some(id) = &self.id {
            chunks.over.lock().insert(id.to_string());
        }
    }

    /// Does what an engine does for a prompt that waits for its source: asks the source again and again for
    /// the next chunk, reads what is there, and keeps it. Checks every byte, and that the wait ends in time.
    pub(super) async fn wait(&self, net: &Net, host: usize, wait: Duration) -> (Tally, End) {
        let chunks = net.chunks(host);
        let names: Vec<ChunkKey> = self.keys.iter().map(|key| chunks.name(key)).collect();
        let mut tally = Tally::default();
        let mut kept = Vec::new();
        let begun = now();
        let waited = self.wait_for(net, (host, &chunks), &names, wait, (&mut tally, &mut kept));
        let end = waited.await;
        let took = now() - begun;
        assert!(took <= wait + BEYOND_WAIT, "a wait was late: {took:?}");
        for (slot, name) in kept.iter().zip(&names) {
            assert_eq!(slot.bytes(), bytes(name), "wrong bytes");
        }
        match end {
            End::Whole => tally.waits_whole += 1,
            End::Late => tally.waits_late += 1,
            End::NothingMore | End::Cleared | End::NotRead => tally.waits_short += 1,
        }
        (tally, end)
    }

    /// Waits for the chunks with these names, and adds what is read and the chunks to keep.
    async fn wait_for(
        &self,
        net: &Net,
        (host, chunks): (usize, &SimChunks),
        names: &[ChunkKey],
        wait: Duration,
        (tally, kept): (&mut Tally, &mut Vec<SealedSlot>),
    ) -> End {
        let node = net.node(host);
        let clears = chunks.carried_out().id();
        let (begun, mut last_linked) = (now(), now());
        let until = begun + wait;
        let mut hint = LocateHint::default()
            .with_sources(Arc::new([name(self.source).to_string()]))
            .with_wait(Some(wait))
            .with_awaited(self.id.clone());
        let mut failures = 0;
        loop {
            while let Some(slot) = names.get(kept.len()).and_then(|next| chunks.keep(next)) {
                kept.push(slot);
                failures = 0;
            }
            if kept.len() == names.len() {
                return End::Whole;
            }
            // After a clear nothing comes under these names.
            if chunks.carried_out().id() != clears {
                return End::Cleared;
            }
            if failures > MAX_FAILURES {
                return End::NotRead;
            }
            if net.are_linked(host, self.source) {
                last_linked = now();
            }
            let is_late = now() >= until;
            let next = &names[kept.len()..];
            let deadline = now() + if hint.is_repeated { BUSY } else { LOCATE };
            let mut answers = node.locate(&next[..1], &hint, deadline).await;
            let late = now().saturating_duration_since(deadline);
            assert!(
                late <= Duration::from_millis(1),
                "a locate was late: {late:?}"
            );
            // The others are asked once.
            let asked = hint.clone();
            hint = hint.repeated();
            match answers.remove(0) {
                Ok(Located::Present(_)) => {
                    let read = fetch_named(net, (&node, chunks), next, &asked);
                    tally.add(read.await);
                    failures += 1;
                }
                Ok(Located::Pending | Located::Expected) if is_late => return End::Late,
                Ok(found @ (Located::Pending | Located::Expected)) => {
                    let since = now() - last_linked;
                    let is_gone = found == Located::Expected && since > HEARD;
                    assert!(!is_gone, "a peer that is gone for {since:?} is waited for");
                    let pause = ASK_AGAIN.max((now() - begun) / ASK_AGAIN_PART);
                    sleep(pause.min(until.saturating_duration_since(now()))).await;
                }
                Ok(Located::Absent) | Err(_) => return End::NothingMore,
            }
        }
    }
}

/// Something that happens at any moment of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Nothing,
    SourceDies,
    ReaderDies,
    IsCut,
    SourceDrains,
    SourceClears,
    ReaderClears,
    SourceStops,
    ReaderIsFull,
}

impl Event {
    fn any(rng: &mut Rng) -> Self {
        let all = [
            Self::Nothing,
            Self::Nothing,
            Self::SourceDies,
            Self::ReaderDies,
            Self::IsCut,
            Self::SourceDrains,
            Self::SourceClears,
            Self::ReaderClears,
            Self::SourceStops,
            Self::SourceStops,
            Self::ReaderIsFull,
        ];
        all[rng.below(all.len() as u64) as usize]
    }
}

/// Starts daemons that have ended, ends cuts and drains, and waits until all know of each other again, and no
/// peer is left alone for what it did. Frees the memory of all.
async fn mend(net: &Net, hosts: usize, start: impl Fn(usize)) {
    for host in 0..hosts {
        if !net.is_alive(host) {
            start(host);
        }
        let chunks = net.chunks(host);
        chunks.is_draining.store(false, Ordering::Relaxed);
        chunks.events().report_host();
    }
    for a in 0..hosts {
        for b in 0..a {
            net.cut(a, b, false, Duration::ZERO);
            if !net.are_linked(a, b) {
                net.connect(a, b).await;
            }
        }
    }
    sleep(Duration::from_secs(90)).await;
    for host in 0..hosts {
        while net.chunks(host).evict(0).is_some() {}
    }
}

/// Runs some prompts one after the other, each computed at one host while others wait for that, and lets
/// something happen in each.
async fn schedule(seed: u64) -> Tally {
    let mut rng = Rng::new(seed);
    let hosts = 2 + rng.below(2) as usize;
    let mut faults = faults(&mut rng);
    if !once_in(&mut rng, 3) {
        faults = Faults::none();
    }
    let heard = faults.events + BEYOND_WAIT;
    // Nothing is lost, doubled, wrong or late.
    let faulty = [
        faults.lost,
        faults.repeated,
        faults.corrupt,
        faults.broken,
        faults.clears,
    ];
    let is_quick = faults.delay.0.max(faults.delay.1) < LOCATE / 4;
    let is_clean = faulty.into_iter().all(|one| one == 0) && is_quick;
    let net = Net::new(seed ^ 0x5eed, faults);
    let start = |host| net.start(host, 32, |_| ());
    (0..hosts).for_each(start);
    let mut sum = Tally::default();
    for round in 0..8 {
        mend(&net, hosts, start).await;
        let source = rng.below(hosts as u64) as usize;
        let reader = (source + 1 + rng.below(hosts as u64 - 1) as usize) % hosts;
        let other = (source + 1 + rng.below(hosts as u64 - 1) as usize) % hosts;
        let keys = prompt(round, 1 + rng.below(10));
        let mut prefill = Prefill::any(&mut rng, source, keys);
        if once_in(&mut rng, 3) {
            prefill = prefill.pushed_to(reader);
        }
        let event = Event::any(&mut rng);
        let wait = Duration::from_millis([50, 1_000, 30_000, 30_000][rng.below(4) as usize]);
        let spawn_wait = |host| {
            let (net, prefill) = (net.clone(), prefill.clone());
            tokio::spawn(async move { (prefill.wait(&net, host, wait).await, now()) })
        };
        let mut waits = vec![(reader, spawn_wait(reader))];
        if once_in(&mut rng, 2) {
            waits.push((other, spawn_wait(other)));
        }
        let computing = {
            let (net, prefill) = (net.clone(), prefill.clone());
            tokio::spawn(async move {
                prefill.compute(&net).await;
                now()
            })
        };
        sleep(delay(&mut rng, prefill.pace * 20)).await;
        let happened = now();
        let noticed = delay(&mut rng, Duration::from_secs(2));
        let mut full = Vec::new();
        match event {
            Event::Nothing => {}
            Event::SourceDies => {
                net.kill(source, noticed);
                computing.abort();
            }
            Event::ReaderDies => {
                net.kill(reader, noticed);
                let of_reader = waits.extract_if(.., |(host, _)| *host == reader);
                of_reader.for_each(|(_, wait)| wait.abort());
            }
            Event::IsCut => net.cut(source, reader, true, noticed),
            Event::SourceDrains => {
                let chunks = net.chunks(source);
                chunks.is_draining.store(true, Ordering::Relaxed);
                chunks.events().report_host();
            }
            Event::SourceClears => net.chunks(source).clear(),
            Event::ReaderClears => net.chunks(reader).clear(),
            Event::SourceStops => net.freeze(source, noticed),
            Event::ReaderIsFull => {
                let chunks = net.chunks(reader);
                full.extend(std::iter::from_fn(|| chunks.reserve(rng.next_u64())));
            }
        }
        let computed = match event {
            Event::SourceDies => None,
            _ => Some(computing.await.expect("no store fails")),
        };
        let is_over = |at| computed.is_some_and(|computed| computed <= at) && prefill.id.is_some();
        // The time after which no wait goes on.
        let ends_by = match event {
            Event::SourceDies => Some(happened + noticed + heard),
            Event::IsCut if hosts == 2 => Some(happened + noticed + heard),
            Event::SourceDrains | Event::SourceClears if is_clean => {
                // The engine of a source that drains stores all the same.
                let last = computed.map(|computed| computed.max(happened + 2 * IN_STEP_PAUSE));
                last.map(|last| last + BEYOND_WAIT)
            }
            Event::SourceStops if is_clean && prefill.id.is_some() => {
                computed.map(|computed| computed.max(happened + noticed) + BEYOND_WAIT)
            }
            Event::IsCut => None,
            _ if is_clean && prefill.id.is_some() => {
                computed.map(|computed| computed + BEYOND_WAIT)
            }
            _ => None,
        };
        let is_whole = prefill.stored == prefill.keys.len() && event == Event::Nothing;
        let stays = matches!(
            event,
            Event::Nothing | Event::ReaderDies | Event::SourceStops | Event::ReaderIsFull
        );
        for (_, waiting) in waits {
            let waited = waiting.await;
            let ((tally, end), at) = waited.unwrap_or_else(|error| panic!("{event:?}: {error}"));
            let case = format!("{end:?} after {event:?}");
            if let Some(late) = ends_by.and_then(|by| at.checked_duration_since(by)) {
                assert!(late.is_zero(), "{case}: a wait went on for {late:?}");
            }
            if is_clean {
                let has_come = matches!(end, End::Whole | End::Late);
                assert!(has_come || !is_whole, "{case}: what is stored did not come");
                // A peer that fails to lend is not waited for.
                let is_expected = stays && !is_over(at) && tally.failed + tally.misses == 0;
                assert!(
                    end != End::NothingMore || !is_expected,
                    "{case}: nothing ended it"
                );
            }
            sum.add(tally);
        }
    }
    mend(&net, hosts, start).await;
    assert_idle(&net, hosts);
    sum
}

#[test]
fn every_wait_ends_with_its_source_or_in_time_and_takes_what_is_stored() {
    let mut sum = Tally::default();
    for seed in 0..seeds() {
        println!("seed {seed}");
        sum.add(run(schedule(seed)));
    }
    println!("{sum:?}");
    let waits = [sum.waits_whole, sum.waits_short, sum.waits_late];
    // One schedule alone, which shall be seen again, may have none of some.
    assert!(
        seeds() < 30 || waits.into_iter().all(|ended| ended > 10),
        "{sum:?}"
    );
}
