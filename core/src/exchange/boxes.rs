//! Boxes of cells: cut from shards, sent, and put together on the rank that needs them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use super::plan::Transfer;
use super::{Direction, Exchange, Move};
use crate::comm::{Batch, Communicator, Expected, InFlight, Overlap, Payload, collectives};
use crate::dispatch::{added, blank, cut, flipped, paste};
use crate::{IndexBox, Result};

/// Boxes on their way between ranks: what this rank sends has left, what it receives has not come.
#[derive(Debug)]
#[must_use = "boxes on their way must be received"]
pub struct Boxes<'a> {
    comm: &'a Arc<dyn Communicator>,
    in_flight: Option<InFlight>,
    /// The size of what comes.
    bytes: usize,
    expected: &'a [(usize, Vec<Transfer>)],
}

impl<'a> Boxes<'a> {
    /// Has the boxes travel on while the rank computes: see [`InFlight::in_background`].
    pub fn in_background(&self) {
        self.in_flight.iter().for_each(InFlight::in_background);
    }

    /// Whether to compute what needs none of the boxes, a fraction of the work, while they travel. If so they travel on.
    ///
    /// The rule: the engine takes time, the boxes have at least 128 KiB, and the fraction is more than half.
    pub fn overlap(&self, fraction: f64) -> bool {
        const WORTH_WHILE: usize = 128 << 10;
        let Some(in_flight) = &self.in_flight else {
            return false;
        };
        let overlap = match self.comm.settings().overlap {
            Overlap::On => fraction > 0.0,
            Overlap::Off => false,
            Overlap::Auto => self.comm.takes_time() && self.bytes >= WORTH_WHILE && fraction > 0.5,
        };
        if overlap {
            in_flight.in_background();
        }
        overlap
    }

    /// Waits for what this rank receives: each box as it lies on its owner if the exchange runs forward, as it lies
    /// where it was needed otherwise, which is the same but for [`Transfer::flip`].
    ///
    /// # Errors
    /// A failure of communication.
    pub fn finish(self) -> Result<Vec<(&'a Transfer, DispatchTensor)>> {
        let received = self.in_flight.map_or(Ok(Vec::new()), InFlight::finish)?;
        let tensors = received.into_iter().flat_map(|payload| match payload {
            Payload::Tensors(tensors) => tensors,
            Payload::Bytes(_) => unreachable!("an engine gives what was expected"),
        });
        let transfers = self.expected.iter().flat_map(|(_, transfers)| transfers);
        Ok(transfers.zip(tensors).collect())
    }
}

impl Exchange {
    /// Sends the boxes of the exchange's forward pass, each as `cells_of` gives it, of the kind of `like`.
    ///
    /// For operators that use boxes one by one, rather than a tensor assembled of them. In an exchange that runs forward
    /// a box is [`cut`] from this rank's shard; in one that runs in reverse it is the gradient of a box that was needed
    /// here.
    ///
    /// # Errors
    /// A failure of communication.
    pub fn send<'a>(
        &'a self,
        like: &DispatchTensor,
        mut cells_of: impl FnMut(&'a Transfer) -> DispatchTensor,
    ) -> Result<Boxes<'a>> {
        let Self {
            operation,
            comm,
            ranks,
            forward: Move { plan, direction },
            ..
        } = self;
        collectives::agree(comm, ranks, operation)?;
        let (outgoing, expected) = match direction {
            Direction::Forward => (&plan.sends, &plan.receives),
            Direction::Reverse => (&plan.receives, &plan.sends),
        };
        if outgoing.is_empty() && expected.is_empty() {
            return Ok(Boxes {
                comm,
                in_flight: None,
                bytes: 0,
                expected,
            });
        }
        let sends = outgoing.iter().map(|(peer, transfers)| {
            let boxes = transfers.iter().map(&mut cells_of);
            (ranks[*peer], Payload::Tensors(boxes.collect()))
        });
        let device = like.device();
        let receives = expected.iter().map(|(peer, transfers)| {
            let expected = Expected::Tensors {
                shapes: transfers.iter().map(|t| t.src.shape().into()).collect(),
                dtype: like.dtype(),
                device: device.clone(),
            };
            (ranks[*peer], expected)
        });
        let batch = Batch {
            operation: operation.clone(),
            sends: sends.collect(),
            receives: receives.collect(),
        };
        let transfers = expected.iter().flat_map(|(_, transfers)| transfers);
        let cells: usize = transfers.map(|transfer| transfer.src.volume()).sum();
        let in_flight = comm.clone().start(batch)?;
        comm.describe_boxes(&**plan);
        Ok(Boxes {
            comm,
            in_flight: Some(in_flight),
            bytes: cells * like.dtype().size(),
            expected,
        })
    }

    /// [Sends](Self::send) the boxes of a tensor: this rank's shard in an exchange that runs forward, the gradient of
    /// what was assembled here in one that runs in reverse.
    ///
    /// # Errors
    /// A failure of communication.
    pub fn send_all<'a>(&'a self, tensor: &DispatchTensor) -> Result<Boxes<'a>> {
        let direction = self.forward.direction;
        self.send(tensor, |transfer| match direction {
            Direction::Forward => cut(tensor, &transfer.src),
            Direction::Reverse => cut(tensor, &transfer.dst),
        })
    }

    /// The result of the exchange's forward pass, from the boxes of this rank's own tensor and those it received.
    pub fn assemble<'a>(
        &'a self,
        tensor: DispatchTensor,
        received: Vec<(&'a Transfer, DispatchTensor)>,
    ) -> DispatchTensor {
        let Move { plan, direction } = &self.forward;
        if plan.is_identity() && received.is_empty() {
            return tensor;
        }
        match direction {
            Direction::Forward => {
                let whole = IndexBox::whole(&plan.output_shape);
                self.assemble_part(&tensor, &received, &whole)
            }
            Direction::Reverse => {
                let own = plan.copies.iter();
                let own = own.map(|copy| (copy, cut(&tensor, &copy.dst)));
                let sum = blank(&tensor, &plan.source_shape, Some(0.0));
                own.chain(received).fold(sum, add_box)
            }
        }
    }

    /// A box of what an exchange that runs forward assembles. Cells of boxes that have not come hold anything.
    pub fn assemble_part(
        &self,
        tensor: &DispatchTensor,
        received: &[(&Transfer, DispatchTensor)],
        part: &IndexBox,
    ) -> DispatchTensor {
        let plan = &self.forward.plan;
        let shape = part.shape();
        if plan.is_identity() && shape == plan.output_shape {
            return tensor.clone();
        }
        // Where in the part a box lies, and what of the box that is.
        let common = |transfer: &Transfer| {
            let at = transfer.dst.intersection(part)?;
            Some((at.seen_from(part), at.seen_from(&transfer.dst)))
        };
        let inside = |cells, flip: &[bool], of: &IndexBox| {
            let cells = flipped(cells, flip);
            if of.shape() == cells.shape()[..] {
                cells
            } else {
                cut(&cells, of)
            }
        };
        let own = plan.copies.iter().filter_map(|copy| {
            let (at, of) = common(copy)?;
            Some((at, inside(cut(tensor, &copy.src), &copy.flip, &of)))
        });
        let others = received.iter().filter_map(|(transfer, cells)| {
            let (at, of) = common(transfer)?;
            Some((at, inside(cells.clone(), &transfer.flip, &of)))
        });
        let boxes: Vec<_> = own.chain(others).collect();
        // What is kept has memory of its own.
        if let [(at, cells)] = &boxes[..]
            && at.shape() == shape
            && shape != plan.output_shape
        {
            return cells.clone();
        }
        let from_others = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let planned = from_others.chain(&plan.copies).filter_map(common);
        let covered: usize = planned.map(|(at, _)| at.volume()).sum();
        let value = (covered < part.volume()).then_some(plan.fill);
        let output = blank(tensor, &shape, value);
        let boxes = boxes.into_iter();
        boxes.fold(output, |output, (at, cells)| paste(output, &at, cells))
    }
}

/// Adds the gradient of a box, as it lies where it was needed, to the cells that it is a copy of.
pub fn add_box(
    sum: DispatchTensor,
    (transfer, gradient): (&Transfer, DispatchTensor),
) -> DispatchTensor {
    let gradient = flipped(gradient, &transfer.flip);
    let cells = added(cut(&sum, &transfer.src), gradient);
    paste(sum, &transfer.src, cells)
}
