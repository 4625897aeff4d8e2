//! Requests of a peer for NIXL, and its answers. NIXL moves the same ranges as the streams, under
//! the same rights.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{FrameOutcome, Gone, PayloadSource, RANGE_BYTES, Run, StreamReader};
use crate::lease::{Range, Segment};
use crate::nixl::{BLOCK, Block, NixlBatch, Remote, Report, Sources, TransferPart, WriteError};
use crate::session::reason;
use crate::socket::announcement::Announcement;
use crate::socket::connection::{Arrival, Reply};
use crate::socket::frame::{Frame, Pieces};
use crate::socket::landing::Target;
use crate::socket::outgoing::PieceForm;
use crate::socket::plane_link::PlaneLink;
use crate::socket::window::Parted;

/// Time that a fetch goes on after its reader's limit.
const SLACK: Duration = Duration::from_secs(2);
/// Maximum of the reader's limit, since a fetch keeps leases.
const SERVE: Duration = Duration::from_secs(10);

impl StreamReader {
    fn link(&self) -> Result<&PlaneLink, Gone> {
        let link = self.connection.plane.as_ref();
        link.ok_or_else(|| Gone::Broken("a plane that was not agreed on".into()))
    }

    /// Takes the description of the memory that the peer lets this side write to.
    pub(super) fn announced(&self, announcement: Announcement) -> Result<(), Gone> {
        let (link, peer) = (self.link()?, &self.connection.remote);
        let agent = &announcement.agent;
        let number = agent.strip_prefix(peer.id.as_str());
        let number = number.and_then(|number| number.strip_prefix('@'));
        let hex = |number: &str| {
            number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        if !number.is_some_and(hex) {
            return Err(Gone::Broken("the agent of another peer".into()));
        }
        let charge =
            self.charge(announcement.metadata.len().div_ceil(RANGE_BYTES) * RANGE_BYTES)?;
        if !link.hear(charge) {
            return Err(Gone::Broken("a plane that is announced twice".into()));
        }
        let remote = Arc::new(Remote {
            agent: announcement.agent,
            metadata: announcement.metadata,
            base: announcement.base,
            len: announcement.len,
        });
        link.know(remote);
        tracing::info!(peer = %peer.id, "peer has NIXL: reads go over it");
        Ok(())
    }

    /// Writes the ranges that the peer wants to read to the peer's memory.
    pub(super) async fn fetch(
        &mut self,
        id: u64,
        ranges: &[Range],
        offset: u64,
        millis: u64,
    ) -> Result<(), Gone> {
        let (link, charge) = (self.link()?, self.admit(ranges.len())?);
        let Some(remote) = link.known() else {
            self.stream()
                .queue
                .push(self.answer(id, FrameOutcome::NoPlane));
            return Ok(());
        };
        let lens = ranges.iter().map(|range| range.len);
        let bytes = lens.fold(0, u64::saturating_add);
        let end = offset.checked_add(bytes);
        if bytes > BLOCK || end.is_none_or(|end| end > remote.len) {
            let what = "a fetch beyond the memory that it is for";
            return Err(Gone::Broken(what.into()));
        }
        let sources = self.runs(ranges).and_then(|runs| {
            let sources = pinned(&runs)?;
            Ok((sources, runs))
        });
        let (sources, runs) = match sources {
            Ok(resolved) => resolved,
            Err(outcome) => {
                if outcome != FrameOutcome::Withdrawn {
                    self.core.counters.refused_requests.add(1);
                }
                self.stream().queue.push(self.answer(id, outcome));
                return Ok(());
            }
        };
        let unanswered = &self.stream().unanswered;
        let Some(stopped) = link.serve(id, unanswered, charge) else {
            self.stream()
                .queue
                .push(self.answer(id, FrameOutcome::NoPlane));
            return Ok(());
        };
        let mut there = offset;
        let part = |segment: &Segment| {
            let part = TransferPart {
                local: segment.offset,
                remote: there,
                len: segment.len,
            };
            there += segment.len;
            part
        };
        let segments = runs.iter().flat_map(|run| &run.segments);
        let parts: Vec<TransferPart> = segments.map(part).collect();
        let mut sums = Vec::new();
        if self.connection.remote.form == PieceForm::Summed {
            for segment in runs.iter().flat_map(|run| &run.segments) {
                sums.push(self.core.window.sum(*segment));
                self.moved.add(segment.len).await;
            }
        }
        let (connection, stream) = (Arc::clone(&self.connection), self.stream);
        let report = move |report: Report| {
            let Some(link) = &connection.plane else {
                return;
            };
            let frame = match report.error {
                None => Frame::Moved { id, sums },
                Some(error) => {
                    if let WriteError::Refused(why) = &error {
                        link.refuses(&connection.remote.id, why);
                    }
                    Frame::Unmoved {
                        id,
                        idle: report.idle,
                        reason: reason(&error.to_string()),
                    }
                }
            };
            if let Some(answer) = link.answer(id, &frame, true) {
                connection.streams[stream].queue.push(answer);
            }
        };
        // The reader's limit passes first, and the reader says so.
        let limit = Duration::from_millis(millis).min(SERVE) + SLACK;
        let link = self.link()?;
        link.plane.begin(NixlBatch {
            connection: link.number,
            remote,
            parts,
            sources,
            stopped,
            report: Box::new(report),
            deadline: Instant::now() + limit,
        });
        Ok(())
    }

    /// Handles the peer's cancellation of a fetch.
    pub(super) fn stopped(&self, id: u64) -> Result<(), Gone> {
        if let Some(answer) = self.link()?.stop(id) {
            self.stream().queue.push(answer);
        }
        Ok(())
    }

    /// Handles the report that the peer has written all of a fetch.
    pub(super) async fn landed(&mut self, id: u64, sums: &[u64]) -> Result<(), Gone> {
        self.link()?;
        let pending = self.stream().take(id);
        let asked = pending.and_then(|mut pending| {
            let (target, block) = (pending.target.take()?, pending.block.take()?);
            Some((target, block, pending))
        });
        let Some((target, block, pending)) = asked else {
            return Err(Gone::Broken("a fetch that was not asked for".into()));
        };
        let summed = self.connection.remote.form == PieceForm::Summed;
        if sums.len() != if summed { target.segments.len() } else { 0 } {
            return Err(Gone::Broken("other checksums than were asked for".into()));
        }
        self.answered(1);
        let arrival = self.land(&target, &block, sums).await;
        block.over();
        pending.answer(Reply::Arrived(arrival));
        Ok(())
    }

    /// Copies the bytes that the peer has written to the slots of the call, while the call holds
    /// them.
    async fn land(&mut self, target: &Target, block: &Block, sums: &[u64]) -> Arrival {
        let mut arrival = Arrival::default();
        let (mut parted, mut at) = (Parted::default(), 0);
        let mut pieces = Pieces::of(&target.segments).peekable();
        while let Some((number, piece)) = pieces.next() {
            let is_last = pieces.peek().is_none_or(|(next, _)| *next != number);
            let window = &self.core.window;
            let landed = target.with(|| {
                // The checksum is of the copy, since the peer may still write to the block.
                let sum = window.land(piece, (block, at), &mut parted, is_last);
                match sums.get(number as usize) {
                    Some(wanted) if is_last => {
                        let all = || window.sum(target.segments[number as usize]);
                        Some(*wanted == sum.unwrap_or_else(all))
                    }
                    _ => {
                        arrival.sums.extend(sum.map(|sum| (number, sum)));
                        Some(true)
                    }
                }
            });
            match landed.flatten() {
                Some(true) => {}
                Some(false) => {
                    self.core.counters.corrupt.add(1);
                    arrival.bad.push(number);
                }
                None => {
                    self.core.counters.discarded.add(1);
                    arrival.aborted = true;
                    break;
                }
            }
            at += piece.len;
            self.moved.add(piece.len).await;
        }
        arrival
    }

    /// Handles the report that the peer has not written all of a fetch.
    pub(super) fn not_landed(&self, id: u64, idle: bool, reason: String) -> Result<(), Gone> {
        let pending = self.stream().take(id);
        let asked = pending.and_then(|mut pending| Some((pending.block.take()?, pending)));
        let Some((block, pending)) = asked else {
            return Err(Gone::Broken("a fetch that was not asked for".into()));
        };
        if idle {
            block.over();
        }
        self.answered(1);
        pending.answer(Reply::Unmoved(reason));
        Ok(())
    }
}

/// Pins the memory that a peer may read while NIXL moves it.
fn pinned(runs: &[Run]) -> Result<Sources, FrameOutcome> {
    let (mut sources, mut number) = (Sources::default(), 0);
    for run in runs {
        match &run.source {
            PayloadSource::Arena | PayloadSource::Write(_) => {}
            PayloadSource::Lease { granted, .. } => {
                let pin = granted.pin().ok_or(FrameOutcome::NotLeased(number))?;
                sources.pins.push(pin);
            }
            PayloadSource::Offer(slots) => sources.objects.push(Arc::clone(slots)),
        }
        number += run.segments.len() as u32;
    }
    Ok(sources)
}
