//! Messages of a rank in transit, outgoing and expected.

use std::ops::Range;

use super::raw::{Incoming, Link, Step, Transfer};
use super::wire::{self, Packed, Part, Tag, Tags};
use crate::Result;
use crate::comm::Expected;
use crate::comm::wire::Outgoing;
use crate::memory::Block;

/// Number of bytes of a rank's last message, which holds the number of payloads that it has sent.
const END: usize = size_of::<u32>();

/// Number of a requested message or a batch; tickets are issued in order.
pub(super) type Ticket = u64;

/// Message that has arrived.
pub(super) enum Arrival {
    /// The payload: memory, and the number of its leading bytes that are used.
    Payload(Incoming, usize),
    /// A message other than the requested one.
    Other {
        /// Whether it belongs to the same operation.
        same_operation: bool,
        /// The size of the message, or of its first piece.
        bytes: usize,
    },
}

/// Request for a message that has not arrived.
struct Ask {
    ticket: Ticket,
    /// Whether a batch still waits for it.
    wanted: bool,
    peer: usize,
    number: u32,
    fingerprint: u64,
    tag: Tag,
    /// The payload's size, if it is known; otherwise the request is for its first message.
    bytes: Option<usize>,
    /// The number of bytes that arrived with the first message.
    begun: usize,
    transfer: Transfer<Incoming>,
}

/// State of the traffic with another rank.
#[derive(Default)]
struct Peer {
    /// The number of payloads sent to the peer.
    sent: u32,
    /// The number of payloads requested from the peer.
    asked: u32,
    /// The request for the peer's last message.
    end: Option<Transfer<Incoming>>,
    /// The total number of payloads that the peer has sent, once its program has ended.
    ended: Option<u32>,
    /// Whether this rank's last message to the peer has been posted.
    told: bool,
}

/// Outgoing message with its batch and receiver.
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
    /// Messages that were not requested.
    strays: Vec<Transfer<Incoming>>,
    next: Ticket,
    /// The peer whose last message was looked for most recently.
    turn: usize,
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
            turn: 0,
        }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Issues a ticket, for a message or a batch.
    pub(super) fn ticket(&mut self) -> Ticket {
        self.next += 1;
        self.next - 1
    }

    /// Requests the next payload of a peer, for an operation with this fingerprint. The tickets of
    /// a batch's requests follow its own.
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
            // Zeroed, because the message may be shorter.
            Expected::Bytes => Incoming::Block(Block::new(room)),
            // SAFETY: read only once all of it has been received.
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

    /// Starts to send a payload. A short payload has left when this returns.
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

    /// Takes the message of a ticket, if it has arrived.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Arrival> {
        let place = self
            .arrived
            .iter()
            .position(|(other, _)| *other == ticket)?;
        Some(self.arrived.swap_remove(place).1)
    }

    /// Drops the message of a ticket, now or on arrival.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        if self.take(ticket).is_none()
            && let Some(ask) = self.asks.iter_mut().find(|ask| ask.ticket == ticket)
        {
            ask.wanted = false;
        }
    }

    /// Takes the messages with the given tickets that have arrived.
    pub(super) fn take_all(&mut self, tickets: &Range<Ticket>) -> Vec<(Ticket, Arrival)> {
        self.arrived
            .extract_if(.., |(ticket, _)| tickets.contains(ticket))
            .collect()
    }

    /// Returns the peer of a message with one of these tickets that will never be sent, because its
    /// sender's program has ended.
    pub(super) fn lost(&self, tickets: &Range<Ticket>) -> Option<usize> {
        let mut asks = self.asks.iter();
        let lost = asks.find(|ask| tickets.contains(&ask.ticket) && self.is_never_sent(ask));
        lost.map(|ask| ask.peer)
    }

    fn is_never_sent(&self, ask: &Ask) -> bool {
        let sent = self.peers[ask.peer].ended;
        // Both numbers count up and may wrap around.
        sent.is_some_and(|sent| ask.number.wrapping_sub(sent) < u32::MAX / 2)
    }

    /// Whether nothing is in transit, as far as this rank knows.
    pub(super) fn is_idle(&self) -> bool {
        let mut asks = self.asks.iter();
        self.leaving.is_empty() && self.strays.is_empty() && asks.all(|ask| self.is_never_sent(ask))
    }

    /// Requests the last message of a peer, once; a rank sends itself none.
    fn listen(&mut self, peer: usize) -> Result<()> {
        let state = &self.peers[peer];
        if peer != self.link.rank() && state.end.is_none() && state.ended.is_none() {
            let memory = Incoming::Block(Block::new(END));
            let end = self.link.receive(peer, Tag::END, memory, 0..END)?;
            self.peers[peer].end = Some(end);
        }
        Ok(())
    }

    /// Drives messages; returns whether any made progress.
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
                // Removed in order, so that the rests of metadata are requested in order.
                let ask = self.asks.remove(next);
                self.complete(ask)?;
            } else {
                next += 1;
            }
        }
        Ok(moved)
    }

    /// Polls the first of these tickets that has not arrived, at most `times` times; returns
    /// whether one has arrived.
    ///
    /// A single call of MPI drives all of a rank's messages.
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

    /// Polls the outgoing messages of a batch, at most `times` times; returns whether all have
    /// left.
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

    /// Looks for the last message of a peer.
    fn look_for_end(&mut self, peer: usize) -> Result<()> {
        let peer = &mut self.peers[peer];
        if let Some(end) = &mut peer.end
            && self.link.poll(end)? == Step::Complete
            && let Some(Incoming::Block(sent)) = peer.end.take().map(Transfer::into_memory)
        {
            let sent = sent.bytes().first_chunk().copied();
            peer.ended = Some(u32::from_ne_bytes(sent.unwrap_or_default()));
        }
        Ok(())
    }

    /// Drives messages outside operations: the last message of one peer, because polling those of
    /// many would take longer than most waits, and messages that were not requested.
    pub(super) fn drive_others(&mut self) -> Result<()> {
        self.turn = (self.turn + 1) % self.peers.len();
        self.look_for_end(self.turn)?;
        for mut stray in std::mem::take(&mut self.strays) {
            match self.link.poll(&mut stray)? {
                Step::Complete => drop(stray.into_memory()),
                _ => self.strays.push(stray),
            }
        }
        Ok(())
    }

    /// Completes a request whose message has arrived.
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

    /// Checks whether another message arrived in place of a ticket's message.
    pub(super) fn look(&mut self, ticket: Ticket) -> Result<()> {
        let Some(place) = self.asks.iter().position(|ask| ask.ticket == ticket) else {
            return Ok(());
        };
        let ask = &self.asks[place];
        let Some((tag, bytes)) = self.link.stray(ask.peer)? else {
            return Ok(());
        };
        // Not an error: the rest of metadata may arrive before its first message is polled, and the
        // peer's next payload, which this rank has not requested yet, may repeat the number of this
        // one.
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

    /// Receives a message of a peer that was not requested, if there is one.
    fn clear(&mut self, peer: usize) -> Result<()> {
        let Some((tag, bytes)) = self.link.stray(peer)? else {
            return Ok(());
        };
        let mut asks = self.asks.iter();
        let of_ask = asks.position(|ask| ask.peer == peer && self.tags.same_place(tag, ask.tag));
        // This is the rest of metadata whose first message has arrived meanwhile; it will be
        // requested.
        if of_ask.is_some() && self.tags.is_rest(tag) {
            return Ok(());
        }
        self.discard(peer, tag, bytes)?;
        // The message came in place of the requested message, which will not arrive.
        of_ask.map_or(Ok(()), |ask| {
            self.link.cancel(self.asks.remove(ask).transfer)
        })
    }

    /// Receives a message that was not requested, so that its sender can continue.
    fn discard(&mut self, peer: usize, tag: Tag, bytes: usize) -> Result<()> {
        let stray = self.link.receive_message(peer, tag, Block::new(bytes))?;
        self.strays.push(stray);
        Ok(())
    }

    /// Drives the remaining messages at the end; returns whether all have left and every peer has
    /// ended.
    ///
    /// Messages that were not requested are received here, because their senders could not end
    /// otherwise.
    pub(super) fn drain(&mut self) -> Result<bool> {
        self.drive_others()?;
        self.drive()?;
        let rank = self.link.rank();
        for peer in 0..self.peers.len() {
            self.listen(peer)?;
            self.look_for_end(peer)?;
            let told = peer == rank || self.peers[peer].told;
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
        let ended = peers.all(|(other, peer)| other == rank || (peer.told && peer.ended.is_some()));
        if !ended || !self.is_idle() {
            return Ok(false);
        }
        // These messages were never sent.
        let mut asks = std::mem::take(&mut self.asks).into_iter();
        asks.try_for_each(|ask| self.link.cancel(ask.transfer))?;
        Ok(true)
    }
}
