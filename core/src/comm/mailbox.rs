//! Mailboxes: messages that have arrived for a rank and wait to be taken.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};

#[cfg(feature = "cube")]
use super::handle::Handle;
use super::{Expected, Operation, Payload};
use crate::memory::Block;

/// Message in a mailbox.
pub(super) struct Message {
    pub(super) sender: Sender,
    pub(super) content: Content,
}

/// Operation that a message belongs to.
pub(super) enum Sender {
    /// Operation of a rank of this process.
    Here(Operation),
    /// Operation of another process: fingerprint and name.
    Elsewhere(u64, String),
}

/// Content of a message.
pub(super) enum Content {
    /// A payload handed over as handles.
    Handed(Payload),
    /// Handles of tensors on a GPU.
    #[cfg(feature = "cube")]
    OnGpu(Vec<Handle>),
    /// The bytes of tensors: a block and the number of its leading bytes that are used.
    Packed(Block, usize),
}

impl Sender {
    pub(super) fn fingerprint(&self) -> u64 {
        match self {
            Self::Here(operation) => operation.fingerprint(),
            Self::Elsewhere(fingerprint, _) => *fingerprint,
        }
    }
}

impl std::fmt::Display for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(operation) => write!(f, "{operation:#}"),
            Self::Elsewhere(_, name) => f.write_str(name),
        }
    }
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Handed(payload) => payload.fmt(f),
            #[cfg(feature = "cube")]
            Self::OnGpu(handles) => {
                let shapes = handles.iter().map(|handle| handle.shape().to_vec());
                write!(f, "{:?}", shapes.collect::<Vec<_>>())
            }
            Self::Packed(_, bytes) => write!(f, "{bytes} bytes"),
        }
    }
}

impl Content {
    /// Returns the payload, if it has the expected form.
    ///
    /// # Errors
    /// A description of the content, if it has another form.
    pub(super) fn into_payload(self, expected: &Expected) -> Result<Payload, String> {
        match self {
            #[cfg(feature = "cube")]
            Self::OnGpu(handles) => {
                let tensors = handles.into_iter().map(Handle::into_tensor).collect();
                Self::Handed(Payload::Tensors(tensors)).into_payload(expected)
            }
            Self::Handed(payload) if expected.accepts(&payload) => Ok(match (payload, expected) {
                (Payload::Tensors(tensors), Expected::Place(place)) => {
                    tensors.iter().for_each(|tensor| place.fill(tensor.clone()));
                    Payload::Tensors(Vec::new())
                }
                (payload, _) => payload,
            }),
            Self::Packed(block, bytes) if expected.bytes() == Some(bytes) => Ok(match expected {
                Expected::Place(place) => {
                    place.write(&block.bytes()[..bytes]);
                    Payload::Tensors(Vec::new())
                }
                expected => expected.unpack(block, bytes),
            }),
            other => Err(other.to_string()),
        }
    }
}

/// Messages for one rank, one queue per sender.
pub(super) struct Mailbox {
    pub(super) queues: Mutex<Vec<Queue>>,
    pub(super) arrived: Condvar,
}

/// Sequence number of a message between two ranks.
pub(super) type Ticket = usize;

/// Messages of one sender, in order; the receiver may take them in another order.
#[derive(Default)]
pub(super) struct Queue {
    messages: VecDeque<Option<Message>>,
    /// The ticket of the first message.
    first: Ticket,
    /// The ticket of the next message that the receiver requests.
    next: Ticket,
    /// Tickets of messages that have not arrived and are dropped on arrival.
    forgotten: Vec<Ticket>,
}

impl Queue {
    pub(super) fn push(&mut self, message: Message) {
        let ticket = self.first + self.messages.len();
        self.messages.push_back(Some(message));
        if let Some(place) = self.forgotten.iter().position(|&other| other == ticket) {
            self.forgotten.swap_remove(place);
            self.take(ticket);
        }
    }

    pub(super) fn forget(&mut self, ticket: Ticket) {
        if self.take(ticket).is_none() {
            self.forgotten.push(ticket);
        }
    }

    pub(super) fn ask(&mut self) -> Ticket {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Message> {
        let message = self.messages.get_mut(ticket - self.first)?.take();
        while matches!(self.messages.front(), Some(None)) {
            self.messages.pop_front();
            self.first += 1;
        }
        message
    }
}
