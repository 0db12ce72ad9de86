//! What a rank has in transit: messages that leave, and those that are expected, per peer in the order in which they
//! were asked for.

use std::collections::VecDeque;

use super::raw::{Link, Outgoing, Step, Tag, Transfer};
use super::wire::{Head, SHORT};
use crate::Result;
use crate::memory::Block;

/// A message that was asked for; tickets are given in order.
pub(super) type Ticket = u64;

/// A message that has come.
pub(super) enum Arrival {
    /// The payload: the first bytes of the block, so many.
    Payload(Block, usize),
    /// Another one than was asked for.
    Other(Head),
}

/// What was asked for.
struct Ask {
    ticket: Ticket,
    fingerprint: u64,
    /// Its size, if that is known.
    bytes: Option<usize>,
}

/// What comes from one peer.
#[derive(Default)]
struct Inbox {
    asked: VecDeque<Ask>,
    /// Where the peer's next head goes.
    head: Option<Transfer<Block>>,
    /// Long payloads on their way, and whether somebody asked for them.
    bodies: Vec<(Option<Ticket>, usize, Transfer<Block>)>,
    ended: bool,
}

/// All messages of a rank in transit.
pub(super) struct Traffic {
    link: Link,
    /// Messages that have not left, with the batch that they are of.
    leaving: Vec<(Ticket, Transfer<Outgoing>)>,
    inboxes: Vec<Inbox>,
    next: Ticket,
    arrived: Vec<(Ticket, Arrival)>,
    /// Tickets that nobody waits for any more.
    dropped: Vec<Ticket>,
    /// Blocks for messages that begin with a head, to be used again.
    spare: Vec<Block>,
}

impl Traffic {
    pub(super) fn new(link: Link) -> Self {
        let inboxes = (0..link.size()).map(|_| Inbox::default());
        Self {
            inboxes: inboxes.collect(),
            link,
            leaving: Vec::new(),
            next: 0,
            arrived: Vec::new(),
            dropped: Vec::new(),
            spare: Vec::new(),
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

    /// A block for a message that begins with a head.
    pub(super) fn blank(&mut self) -> Block {
        self.spare
            .pop()
            .unwrap_or_else(|| Block::new(Head::SIZE + SHORT))
    }

    /// Keeps the memory of a message that has left, if it is one of [`blank`](Self::blank)'s.
    fn keep(&mut self, memory: Outgoing) {
        if let Outgoing::Message(block, _) = memory {
            self.spare.push(block);
        }
    }

    /// Starts to send a message. Short ones are on their way when this returns.
    pub(super) fn send(
        &mut self,
        batch: Ticket,
        peer: usize,
        head: Outgoing,
        body: Option<Outgoing>,
    ) -> Result<()> {
        for (tag, memory) in [(Tag::Head, Some(head)), (Tag::Body, body)] {
            let Some(memory) = memory else { continue };
            let mut transfer = self.link.send(peer, tag, memory)?;
            match self.link.poll(&mut transfer)? {
                Step::Complete => self.keep(transfer.into_memory()),
                _ => self.leaving.push((batch, transfer)),
            }
        }
        Ok(())
    }

    /// Asks for the next message of a peer that nobody has asked for.
    pub(super) fn ask(
        &mut self,
        peer: usize,
        fingerprint: u64,
        bytes: Option<usize>,
    ) -> Result<Ticket> {
        let ticket = self.ticket();
        self.inboxes[peer].asked.push_back(Ask {
            ticket,
            fingerprint,
            bytes,
        });
        self.listen(peer)?;
        Ok(ticket)
    }

    /// The message of a ticket, if it has come.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Arrival> {
        let place = self.arrived.iter().position(|(of, _)| *of == ticket)?;
        Some(self.arrived.swap_remove(place).1)
    }

    /// Nobody waits for this ticket any more.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        if self.take(ticket).is_none() {
            self.dropped.push(ticket);
        }
    }

    /// Whether the message of a ticket, which has not come, cannot come any more: the peer's program has ended.
    pub(super) fn is_lost(&self, peer: usize, ticket: Ticket) -> bool {
        let inbox = &self.inboxes[peer];
        let mut coming = inbox.bodies.iter();
        inbox.ended && !coming.any(|(of, ..)| *of == Some(ticket))
    }

    /// Whether all messages of a batch have left.
    pub(super) fn has_sent(&self, batch: Ticket) -> bool {
        self.leaving.iter().all(|(of, _)| *of != batch)
    }

    /// Whether nothing is in transit that this rank knows of.
    pub(super) fn is_idle(&self) -> bool {
        let quiet =
            |inbox: &Inbox| inbox.bodies.is_empty() && (inbox.asked.is_empty() || inbox.ended);
        self.leaving.is_empty() && self.inboxes.iter().all(quiet)
    }

    /// Is ready for a head of a peer.
    fn listen(&mut self, peer: usize) -> Result<()> {
        if self.inboxes[peer].head.is_some() || self.inboxes[peer].ended {
            return Ok(());
        }
        let message = self.blank();
        self.listen_with(peer, message)
    }

    fn listen_with(&mut self, peer: usize, message: Block) -> Result<()> {
        let bytes = message.size();
        let head = self.link.receive(peer, Tag::Head, message, bytes)?;
        self.inboxes[peer].head = Some(head);
        Ok(())
    }

    /// Drives everything on; whether something moved.
    pub(super) fn drive(&mut self) -> Result<bool> {
        let mut moved = false;
        for (batch, mut transfer) in std::mem::take(&mut self.leaving) {
            let step = self.link.poll(&mut transfer)?;
            moved |= step != Step::None;
            match step {
                Step::Complete => self.keep(transfer.into_memory()),
                _ => self.leaving.push((batch, transfer)),
            }
        }
        for peer in 0..self.inboxes.len() {
            if !self.inboxes[peer].asked.is_empty() {
                moved |= self.drive_head(peer)?;
            }
            moved |= self.drive_bodies(peer)?;
        }
        Ok(moved)
    }

    fn drive_head(&mut self, peer: usize) -> Result<bool> {
        let inbox = &mut self.inboxes[peer];
        let Some(transfer) = &mut inbox.head else {
            return Ok(false);
        };
        if self.link.poll(transfer)? != Step::Complete {
            return Ok(false);
        }
        let Some(transfer) = inbox.head.take() else {
            return Ok(false);
        };
        let message = transfer.into_memory();
        let head = Head::of(&message);
        let Some(bytes) = head.length else {
            inbox.ended = true;
            return Ok(true);
        };
        let ask = inbox.asked.pop_front();
        let fits = |ask: &Ask| {
            ask.fingerprint == head.fingerprint && ask.bytes.is_none_or(|asked| asked == bytes)
        };
        let wrong = ask.as_ref().filter(|ask| !fits(ask)).map(|ask| ask.ticket);
        let ticket = ask.map(|ask| ask.ticket);
        if let Some(ticket) = wrong {
            self.arrive(ticket, Arrival::Other(head));
        }
        let ticket = ticket.filter(|_| wrong.is_none());
        if bytes > SHORT {
            // Also if nobody wants it: it must not be taken for the body of a later message.
            let body = self
                .link
                .receive(peer, Tag::Body, Block::new(bytes), bytes)?;
            self.inboxes[peer].bodies.push((ticket, bytes, body));
        } else if let Some(ticket) = ticket {
            let payload = Block::copy_of(&message.bytes()[Head::SIZE..][..bytes]);
            self.arrive(ticket, Arrival::Payload(payload, bytes));
        }
        self.listen_with(peer, message)?;
        Ok(true)
    }

    fn drive_bodies(&mut self, peer: usize) -> Result<bool> {
        let mut moved = false;
        for (ticket, bytes, mut transfer) in std::mem::take(&mut self.inboxes[peer].bodies) {
            let step = self.link.poll(&mut transfer)?;
            moved |= step != Step::None;
            match (step, ticket) {
                (Step::Complete, None) => drop(transfer.into_memory()),
                (Step::Complete, Some(ticket)) => {
                    self.arrive(ticket, Arrival::Payload(transfer.into_memory(), bytes));
                }
                _ => self.inboxes[peer].bodies.push((ticket, bytes, transfer)),
            }
        }
        Ok(moved)
    }

    fn arrive(&mut self, ticket: Ticket, arrival: Arrival) {
        match self.dropped.iter().position(|of| *of == ticket) {
            Some(place) => drop(self.dropped.swap_remove(place)),
            None => self.arrived.push((ticket, arrival)),
        }
    }

    /// Tells a peer that this rank's program has ended.
    pub(super) fn bid_farewell(&mut self, peer: usize) -> Result<()> {
        let mut message = self.blank();
        Head::end().write(&mut message);
        let farewell = Outgoing::Message(message, Head::SIZE);
        let batch = self.ticket();
        self.send(batch, peer, farewell, None)?;
        self.listen(peer)
    }

    /// Drives on what is left at the end; whether all has left and every peer has ended.
    ///
    /// What a peer sent and nobody asked for is received here, or the peer could not leave.
    pub(super) fn drain(&mut self) -> Result<bool> {
        self.drive()?;
        let own = self.link.rank();
        let mut all = self.leaving.is_empty();
        for peer in (0..self.inboxes.len()).filter(|&peer| peer != own) {
            self.drive_head(peer)?;
            let inbox = &self.inboxes[peer];
            all &= inbox.ended && inbox.bodies.is_empty();
        }
        Ok(all)
    }
}
