//! What a rank has in transit: messages that leave, and those that are expected.

use std::ops::Range;

use super::raw::{Incoming, Link, Step, Transfer};
use super::wire::{self, Packed, Part, Tag, Tags};
use crate::Result;
use crate::comm::Expected;
use crate::comm::wire::Outgoing;
use crate::memory::Block;

/// The bytes of a rank's last message: how many payloads it has sent.
const END: usize = size_of::<u32>();

/// A message that was asked for; tickets are given in order.
pub(super) type Ticket = u64;

/// A message that has come.
pub(super) enum Arrival {
    /// The payload: the first bytes of the memory, so many.
    Payload(Incoming, usize),
    /// Another one than was asked for.
    Other {
        /// Whether it is of the same operation.
        same_operation: bool,
        /// The size of what came, or of its first piece.
        bytes: usize,
    },
}

/// What was asked for and has not come.
struct Ask {
    ticket: Ticket,
    /// Whether somebody still waits for it.
    wanted: bool,
    peer: usize,
    number: u32,
    fingerprint: u64,
    tag: Tag,
    /// The payload's size, if that is known; else its first message comes.
    bytes: Option<usize>,
    /// What of it came with the first message.
    begun: usize,
    transfer: Transfer<Incoming>,
}

/// What a rank knows of another.
#[derive(Default)]
struct Peer {
    /// How many payloads went there.
    sent: u32,
    /// How many of its payloads were asked for.
    asked: u32,
    /// Its last message, on its way.
    end: Option<Transfer<Incoming>>,
    /// How many payloads it has sent in all, when its program has ended.
    ended: Option<u32>,
    /// It has been told that this rank's program has ended.
    told: bool,
}

/// A message that leaves: the batch that it is of, and where it goes.
struct Leaving {
    batch: Ticket,
    peer: usize,
    transfer: Transfer<Outgoing>,
}

/// All messages of a rank in transit.
pub(super) struct Traffic {
    link: Link,
    tags: Tags,
    peers: Vec<Peer>,
    leaving: Vec<Leaving>,
    asks: Vec<Ask>,
    arrived: Vec<(Ticket, Arrival)>,
    /// Messages that nobody asked for.
    strays: Vec<Transfer<Incoming>>,
    next: Ticket,
}

impl Traffic {
    pub(super) fn new(link: Link) -> Self {
        Self {
            tags: Tags::new(link.tag_bits()),
            peers: (0..link.size()).map(|_| Peer::default()).collect(),
            link,
            leaving: Vec::new(),
            asks: Vec::new(),
            arrived: Vec::new(),
            strays: Vec::new(),
            next: 0,
        }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// A new ticket, for a message or a batch.
    pub(super) fn ticket(&mut self) -> Ticket {
        self.next += 1;
        self.next - 1
    }

    /// Asks for the next payload of a peer, of an operation's fingerprint. The tickets of a batch's asks follow its own.
    pub(super) fn ask(&mut self, peer: usize, fingerprint: u64, expected: &Expected) -> Result<()> {
        let bytes = expected.bytes();
        self.listen(peer)?;
        let ticket = self.ticket();
        let number = self.peers[peer].asked;
        self.peers[peer].asked = number.wrapping_add(1);
        let part = bytes.map_or(Part::First, Part::Whole);
        let tag = self.tags.tag(number, fingerprint, part);
        let room = bytes.unwrap_or(wire::FIRST);
        let memory = match expected {
            Expected::Place(place) => Incoming::Place(place.clone()),
            // What comes may be shorter.
            Expected::Bytes => Incoming::Block(Block::new(room)),
            // SAFETY: read when all of it has come.
            Expected::Tensors { .. } => Incoming::Block(unsafe { Block::uninit(room) }),
        };
        self.asks.push(Ask {
            ticket,
            wanted: true,
            peer,
            number,
            fingerprint,
            tag,
            bytes,
            begun: 0,
            transfer: self.link.receive(peer, tag, memory, 0..room)?,
        });
        Ok(())
    }

    /// Starts to send a payload. A short one is on its way when this returns.
    pub(super) fn send(
        &mut self,
        batch: Ticket,
        peer: usize,
        fingerprint: u64,
        packed: Packed,
    ) -> Result<()> {
        let number = self.peers[peer].sent;
        self.peers[peer].sent = number.wrapping_add(1);
        let mut send = |part, memory| {
            let tag = self.tags.tag(number, fingerprint, part);
            self.send_message(batch, peer, tag, memory)
        };
        match packed {
            Packed::Tensors(memory) => send(Part::Whole(memory.bytes().len()), memory),
            Packed::Metadata(first, rest) => {
                send(Part::First, first)?;
                rest.map_or(Ok(()), |rest| send(Part::Rest, rest))
            }
        }
    }

    fn send_message(
        &mut self,
        batch: Ticket,
        peer: usize,
        tag: Tag,
        memory: Outgoing,
    ) -> Result<()> {
        let transfer = self.link.send(peer, tag, memory)?;
        self.leaving.push(Leaving {
            batch,
            peer,
            transfer,
        });
        Ok(())
    }

    /// The message of a ticket, if it has come.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Arrival> {
        let place = self.arrived.iter().position(|(of, _)| *of == ticket)?;
        Some(self.arrived.swap_remove(place).1)
    }

    /// Nobody waits for this ticket any more.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        if self.take(ticket).is_none()
            && let Some(ask) = self.asks.iter_mut().find(|ask| ask.ticket == ticket)
        {
            ask.wanted = false;
        }
    }

    /// Whether what a ticket waits for has never been sent, and its sender's program has ended.
    pub(super) fn is_lost(&self, ticket: Ticket) -> bool {
        let mut asks = self.asks.iter();
        asks.any(|ask| ask.ticket == ticket && self.is_never_sent(ask))
    }

    fn is_never_sent(&self, ask: &Ask) -> bool {
        let sent = self.peers[ask.peer].ended;
        // Both count up and may wrap around.
        sent.is_some_and(|sent| ask.number.wrapping_sub(sent) < u32::MAX / 2)
    }

    /// Whether nothing is in transit that this rank knows of.
    pub(super) fn is_idle(&self) -> bool {
        let mut asks = self.asks.iter();
        self.leaving.is_empty() && self.strays.is_empty() && asks.all(|ask| self.is_never_sent(ask))
    }

    /// Is ready for the last message of a peer; this rank sends itself none.
    fn listen(&mut self, peer: usize) -> Result<()> {
        let of = &self.peers[peer];
        if peer != self.link.rank() && of.end.is_none() && of.ended.is_none() {
            let memory = Incoming::Block(Block::new(END));
            let end = self.link.receive(peer, Tag::END, memory, 0..END)?;
            self.peers[peer].end = Some(end);
        }
        Ok(())
    }

    /// Drives messages on; whether something moved.
    pub(super) fn drive(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut next = 0;
        while let Some(message) = self.leaving.get_mut(next) {
            let step = self.link.poll(&mut message.transfer)?;
            moved |= step != Step::None;
            if step == Step::Complete {
                drop(self.leaving.swap_remove(next).transfer.into_memory());
            } else {
                next += 1;
            }
        }
        next = 0;
        while let Some(ask) = self.asks.get_mut(next) {
            let step = self.link.poll(&mut ask.transfer)?;
            moved |= step != Step::None;
            if step == Step::Complete {
                // In order, so that what follows is asked for in order.
                let ask = self.asks.remove(next);
                self.complete(ask)?;
            } else {
                next += 1;
            }
        }
        Ok(moved)
    }

    /// Watches for the first message of these tickets that has not come, at most so many times; whether one is there.
    ///
    /// One call of MPI at a time drives on all of a rank's messages.
    pub(super) fn watch(&mut self, tickets: &Range<Ticket>, times: u32) -> Result<bool> {
        let mut arrived = self.arrived.iter();
        if arrived.any(|(ticket, _)| tickets.contains(ticket)) {
            return Ok(true);
        }
        let mut asks = self.asks.iter();
        let Some(place) = asks.position(|ask| tickets.contains(&ask.ticket)) else {
            return Ok(false);
        };
        for _ in 0..times {
            match self.link.poll(&mut self.asks[place].transfer)? {
                Step::None => std::hint::spin_loop(),
                Step::Some => return Ok(true),
                Step::Complete => {
                    let ask = self.asks.remove(place);
                    self.complete(ask)?;
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Watches for the messages of a batch to leave, at most so many times; whether all have.
    pub(super) fn see_off(&mut self, batch: Ticket, times: u32) -> Result<bool> {
        for _ in 0..times {
            let mut leaving = self.leaving.iter();
            let Some(place) = leaving.position(|message| message.batch == batch) else {
                return Ok(true);
            };
            match self.link.poll(&mut self.leaving[place].transfer)? {
                Step::Complete => drop(self.leaving.swap_remove(place).transfer.into_memory()),
                _ => std::hint::spin_loop(),
            }
        }
        Ok(false)
    }

    /// Drives on what is not on the way of an operation: last messages of ranks, and those that nobody asked for.
    pub(super) fn drive_others(&mut self) -> Result<()> {
        for peer in &mut self.peers {
            if let Some(end) = &mut peer.end
                && self.link.poll(end)? == Step::Complete
                && let Some(Incoming::Block(sent)) = peer.end.take().map(Transfer::into_memory)
            {
                let sent = sent.bytes().first_chunk().copied();
                peer.ended = Some(u32::from_ne_bytes(sent.unwrap_or_default()));
            }
        }
        for mut stray in std::mem::take(&mut self.strays) {
            match self.link.poll(&mut stray)? {
                Step::Complete => drop(stray.into_memory()),
                _ => self.strays.push(stray),
            }
        }
        Ok(())
    }

    /// What an ask received has come.
    fn complete(&mut self, ask: Ask) -> Result<()> {
        let came = ask.begun + ask.transfer.bytes();
        let memory = ask.transfer.into_memory();
        let arrival = match (ask.bytes, memory) {
            (Some(bytes), memory) if came == bytes => Arrival::Payload(memory, bytes),
            (Some(_), _) | (None, Incoming::Place(_)) => Arrival::Other {
                same_operation: true,
                bytes: came,
            },
            (None, Incoming::Block(block)) => {
                let (room, rest) = wire::unpack_first(&block);
                let room = Incoming::Block(room);
                if rest.is_empty() {
                    Arrival::Payload(room, rest.end)
                } else {
                    let tag = self.tags.tag(ask.number, ask.fingerprint, Part::Rest);
                    self.asks.push(Ask {
                        tag,
                        bytes: Some(rest.end),
                        begun: rest.start,
                        transfer: self.link.receive(ask.peer, tag, room, rest)?,
                        ..ask
                    });
                    return Ok(());
                }
            }
        };
        if ask.wanted {
            self.arrived.push((ask.ticket, arrival));
        }
        Ok(())
    }

    /// Looks whether another message came in the place of what a ticket waits for.
    pub(super) fn look(&mut self, ticket: Ticket) -> Result<()> {
        let Some(place) = self.asks.iter().position(|ask| ask.ticket == ticket) else {
            return Ok(());
        };
        let ask = &self.asks[place];
        let Some((tag, bytes)) = self.link.stray(ask.peer)? else {
            return Ok(());
        };
        // The rest of metadata may come before its first message is looked at, and what this rank will ask for next may
        // have the number, which comes again, of what it asks for here.
        let next = self.peers[ask.peer].asked;
        if !self.tags.same_place(tag, ask.tag)
            || self.tags.is_rest(tag)
            || self.tags.same_number(next, ask.number)
        {
            return Ok(());
        }
        let same_operation = self.tags.same_operation(tag, ask.tag);
        self.discard(ask.peer, tag, bytes)?;
        let ask = self.asks.remove(place);
        self.link.cancel(ask.transfer)?;
        let arrival = Arrival::Other {
            same_operation,
            bytes,
        };
        self.arrived.push((ticket, arrival));
        Ok(())
    }

    /// Receives what a peer sent and nobody asked for, if there is such a message.
    fn clear(&mut self, peer: usize) -> Result<()> {
        let Some((tag, bytes)) = self.link.stray(peer)? else {
            return Ok(());
        };
        let mut asks = self.asks.iter();
        let of_ask = asks.position(|ask| ask.peer == peer && self.tags.same_place(tag, ask.tag));
        // The rest of metadata, whose first message has come since: it will be asked for.
        if of_ask.is_some() && self.tags.is_rest(tag) {
            return Ok(());
        }
        self.discard(peer, tag, bytes)?;
        // In the place of what was asked for, which will not come.
        of_ask.map_or(Ok(()), |ask| {
            self.link.cancel(self.asks.remove(ask).transfer)
        })
    }

    /// Receives a message that nobody asked for, so that its sender can go on.
    fn discard(&mut self, peer: usize, tag: Tag, bytes: usize) -> Result<()> {
        let stray = self.link.receive_message(peer, tag, Block::new(bytes))?;
        self.strays.push(stray);
        Ok(())
    }

    /// Drives on what is left at the end; whether all has left and every peer has ended.
    ///
    /// What a peer sent and nobody asked for is received here, or the peer could not leave.
    pub(super) fn drain(&mut self) -> Result<bool> {
        self.drive_others()?;
        self.drive()?;
        let own = self.link.rank();
        for peer in 0..self.peers.len() {
            self.listen(peer)?;
            let told = peer == own || self.peers[peer].told;
            if !told && self.leaving.iter().all(|message| message.peer != peer) {
                let sent = self.peers[peer].sent.to_ne_bytes();
                let farewell = Outgoing::Block(Block::copy_of(&sent), END);
                let batch = self.ticket();
                self.send_message(batch, peer, Tag::END, farewell)?;
                self.peers[peer].told = true;
            }
            self.clear(peer)?;
        }
        let mut peers = self.peers.iter().enumerate();
        let ended = peers.all(|(rank, peer)| rank == own || (peer.told && peer.ended.is_some()));
        if !ended || !self.is_idle() {
            return Ok(false);
        }
        // Nobody has sent these.
        let mut asks = std::mem::take(&mut self.asks).into_iter();
        asks.try_for_each(|ask| self.link.cancel(ask.transfer))?;
        Ok(true)
    }
}
