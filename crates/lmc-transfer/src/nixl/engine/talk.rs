//! What peers say.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::SealedSlot;

use super::{Engine, Peer};
use crate::nixl::paired::Words;
use crate::nixl::plan::Part;
use crate::nixl::transfers::{Batch, Transfer};
use crate::nixl::wire::{FETCH, Message, reason};
use crate::{Index, MAX_BATCH, Sent, TransferError, checks};

/// Batches that one peer may have fetched at a time.
const SERVED: usize = 1024;
/// Objects in them, at most.
const SERVED_OBJECTS: usize = 16 * MAX_BATCH;
/// A fetch is given up after this long; its reader does so earlier, at its own deadline.
const SERVE: Duration = Duration::from_secs(600);

impl Engine {
    pub(super) fn heard(&mut self, number: u64, message: Message) {
        let from = self.state.peers.values_mut().find_map(|connected| {
            let mut links = connected.links.iter_mut();
            let link = links.find(|link| link.number == number)?;
            link.used = true;
            Some(Arc::clone(&connected.peer))
        });
        let Some(peer) = from else {
            return;
        };
        let mut words = Words::new();
        match message {
            Message::Offer { send, tag, lens } => {
                if lens.len() > MAX_BATCH || send & FETCH != 0 {
                    words.push((peer, Message::Cancel { send }));
                } else if self.state.closing.is_none() {
                    let paired = &mut self.state.paired;
                    paired.offered(&peer, send, tag, lens, &mut words);
                }
            }
            Message::Withdraw { send } => self.state.paired.withdrawn(&peer, send, &mut words),
            Message::Places { send, offsets } => self.placed(&peer, send, &offsets, &mut words),
            Message::Unfit {
                send,
                place,
                sent,
                room,
            } => {
                let place = usize::try_from(place).unwrap_or(usize::MAX);
                let error = TransferError::Length { place, sent, room };
                self.state.paired.refused(&peer, send, error);
            }
            Message::Fetch {
                send,
                offsets,
                lens,
                places,
            } => {
                if let Err(why) = self.serve(&peer, send, &offsets, &lens, &places) {
                    let over = Message::Over {
                        send,
                        done: 0,
                        quiet: true,
                        reason: Some(why),
                    };
                    words.push((peer, over));
                }
            }
            Message::Cancel { send } => self.cancelled(&peer, send),
            Message::Over {
                send,
                done,
                quiet,
                reason: why,
            } => {
                let why = why.map(|why| reason(&why));
                self.state.paired.over(&peer, send, done, quiet, why);
            }
        }
        self.say(words);
    }

    /// The receiver of a send has answered.
    fn placed(&mut self, peer: &Arc<Peer>, send: u64, offsets: &[u64], words: &mut Words) {
        let Some(sending) = self.state.paired.placed(peer, send) else {
            return;
        };
        let indices: Vec<Index> = offsets.iter().copied().map(Index).collect();
        let lens = sending.objects.iter().map(SealedSlot::len);
        // As indices of one byte each.
        match checks::places(lens, &indices, 1, peer.remote.len) {
            Ok(places) => {
                let batch = Batch::Write {
                    objects: sending.objects,
                    reply: sending.reply,
                    send: Some(send),
                };
                let transfer = Transfer::new(Arc::clone(peer), batch, &places, sending.deadline);
                self.state.transfers.push(transfer);
            }
            Err(error) => {
                let over = Message::Over {
                    send,
                    done: 0,
                    quiet: true,
                    reason: Some(reason(&error.to_string())),
                };
                words.push((Arc::clone(peer), over));
                let _ = sending.reply.send(Sent::failed(error));
            }
        }
    }

    /// Writes to a peer what it wants to read. Why not, where that cannot be.
    fn serve(
        &mut self,
        peer: &Arc<Peer>,
        send: u64,
        offsets: &[u64],
        lens: &[u64],
        places: &[u64],
    ) -> Result<(), String> {
        let number = lens.len();
        let alike = offsets.len() == number && places.len() == number && number <= MAX_BATCH;
        if !alike || send & FETCH == 0 {
            return Err("a fetch that cannot be".to_owned());
        }
        if self.state.closing.is_some() {
            return Ok(());
        }
        let its = |one: &&Transfer| one.peer.incarnation == peer.incarnation;
        let served = self.state.transfers.iter().filter(its);
        let served = served.filter_map(Transfer::served);
        let (count, objects) = served.fold((0, number), |(count, objects), one| {
            (count + 1, objects + one)
        });
        if count >= SERVED || objects > SERVED_OBJECTS {
            return Err("too many batches of one peer are under way".to_owned());
        }
        let inside = |starts: &[u64], arena: u64| {
            let indices: Vec<Index> = starts.iter().copied().map(Index).collect();
            checks::places(lens.iter().copied(), &indices, 1, arena)
                .map_err(|error| reason(&error.to_string()))
        };
        let here = inside(offsets, self.arena.len() as u64)?;
        let there = inside(places, peer.remote.len)?;
        let part = |((local, remote), &len)| Part { local, remote, len };
        let parts = here.into_iter().zip(there).zip(lens).map(part);
        let objects = number;
        let batch = Batch::Serve { objects, send };
        let deadline = Instant::now() + SERVE;
        let transfer = Transfer::of_parts(Arc::clone(peer), batch, parts, deadline);
        self.state.transfers.push(transfer);
        Ok(())
    }

    /// The receiver of a send wants no more.
    fn cancelled(&mut self, peer: &Arc<Peer>, send: u64) {
        let error = TransferError::Failed {
            reason: "the receiver has given up".to_owned(),
            quiet: true,
        };
        self.state.paired.refused(peer, send, error.clone());
        let its =
            |one: &Transfer| one.send() == Some(send) && one.peer.incarnation == peer.incarnation;
        if let Some(at) = self.state.transfers.iter().position(its) {
            let transfer = self.state.transfers.remove(at);
            self.end(transfer, Some(error), false);
        }
    }
}
