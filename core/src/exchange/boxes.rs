//! Boxes of cells: cut from shards, sent, and assembled on the rank that needs them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use super::plan::Transfer;
use super::{Direction, Exchange, Move};
use crate::cells;
use crate::comm::{Batch, Communicator, Expected, InFlight, Overlap, Payload, collectives};
use crate::dispatch::{added, blank_of, cast, cut, flipped, paste, wide, widened};
use crate::{IndexBox, Result};

/// Boxes in flight: this rank's sends are posted, and its receives are not finished.
#[derive(Debug)]
#[must_use = "boxes are received by finish()"]
pub struct Boxes<'a> {
    comm: &'a Arc<dyn Communicator>,
    in_flight: Option<InFlight>,
    /// The number of bytes that this rank receives.
    bytes: usize,
    expected: &'a [(usize, Vec<Transfer>)],
}

impl<'a> Boxes<'a> {
    /// Lets the boxes travel while the rank computes; see [`InFlight::in_background`].
    pub fn in_background(&self) {
        self.in_flight.iter().for_each(InFlight::in_background);
    }

    /// Decides whether to compute the cells that need none of the boxes, which are `fraction` of
    /// the work, while the boxes travel. If so, calls [`in_background`](Self::in_background).
    ///
    /// [`Overlap::Auto`] requires an engine whose messages take time, boxes of at least 128 KiB,
    /// and a fraction above one half.
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

    /// Detaches the boxes from the exchange; [`Exchange::boxes`] attaches them again.
    pub(crate) fn into_in_flight(self) -> Option<InFlight> {
        self.in_flight
    }

    /// Waits for the boxes that this rank receives. Their cells are in the owner's order if the
    /// exchange runs forward, else in the order of the assembled tensor; the two orders differ only
    /// by [`Transfer::flip`].
    ///
    /// # Errors
    /// Communication fails.
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
    /// Sends the boxes of the exchange's forward pass. `cells_of` returns the cells of each box,
    /// which must have the element type and device of `like`.
    ///
    /// For operators that use boxes one by one, rather than as an assembled tensor. In an exchange
    /// that runs forward, a box is [`cut`] from this rank's shard; in one that runs in reverse, it
    /// is the gradient of a box that this rank needed.
    ///
    /// # Errors
    /// Communication fails.
    pub fn send<'a>(
        &'a self,
        like: &DispatchTensor,
        mut cells_of: impl FnMut(&'a Transfer) -> DispatchTensor,
    ) -> Result<Boxes<'a>> {
        let Self {
            operation,
            comm,
            ranks,
            forward,
            ..
        } = self;
        let Move { plan, direction } = forward;
        let operation = operation.of_type(like.dtype()).of_arguments(plan.arguments);
        collectives::agree(comm, ranks, &operation)?;
        let (outgoing, expected) = match direction {
            Direction::Forward => (&plan.sends, &plan.receives),
            Direction::Reverse => (&plan.receives, &plan.sends),
        };
        if outgoing.is_empty() && expected.is_empty() {
            return Ok(self.boxes(None));
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
            operation,
            sends: sends.collect(),
            receives: receives.collect(),
        };
        let transfers = expected.iter().flat_map(|(_, transfers)| transfers);
        let cells: usize = transfers.map(|transfer| transfer.src.volume()).sum();
        let in_flight = comm.clone().start(batch)?;
        comm.describe_boxes(forward);
        Ok(Boxes {
            comm,
            in_flight: Some(in_flight),
            bytes: cells * like.dtype().size(),
            expected,
        })
    }

    /// [Sends](Self::send) the boxes of a tensor: of this rank's shard in an exchange that runs
    /// forward, or of the gradient of its assembled tensor in one that runs in reverse.
    ///
    /// # Errors
    /// Communication fails.
    pub fn send_all<'a>(&'a self, tensor: &DispatchTensor) -> Result<Boxes<'a>> {
        let direction = self.forward.direction;
        self.send(tensor, |transfer| match direction {
            Direction::Forward => cut(tensor, &transfer.src),
            Direction::Reverse => cut(tensor, &transfer.dst),
        })
    }

    /// Attaches boxes whose [`send`](Self::send) this exchange has started; `None` if nothing
    /// travels.
    pub(crate) fn boxes(&self, in_flight: Option<InFlight>) -> Boxes<'_> {
        let Move { plan, direction } = &self.forward;
        Boxes {
            comm: &self.comm,
            in_flight,
            bytes: 0,
            expected: match direction {
                Direction::Forward => &plan.receives,
                Direction::Reverse => &plan.sends,
            },
        }
    }

    /// Assembles the result of the exchange's forward pass from this rank's own tensor and the
    /// received boxes.
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
                let copies = plan.copies.iter();
                let copies = copies.map(|copy| (copy, cut(&tensor, &copy.dst)));
                let dtype = tensor.dtype();
                let turned = |(transfer, cells): (&Transfer, _)| {
                    (transfer.src.clone(), flipped(cells, &transfer.flip))
                };
                let boxes: Vec<_> = copies.chain(received).map(turned).collect();
                if let Some(sum) = cells::summed(&tensor, &plan.source_shape, &boxes) {
                    return sum;
                }
                // Sums of half-precision numbers are rounded only once.
                let sum = blank_of(
                    (tensor.device(), wide(dtype)),
                    &plan.source_shape,
                    Some(0.0),
                );
                let add = |sum, (place, cells)| add_cells(sum, &place, widened(cells));
                cast(boxes.into_iter().fold(sum, add), dtype)
            }
        }
    }

    /// Assembles one box, `part`, of the result of an exchange that runs forward. Cells of boxes
    /// missing from `received` are unspecified.
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
        // The intersection of a box with the part, relative to each of the two.
        let common = |transfer: &Transfer| {
            let overlap = transfer.dst.intersection(part)?;
            Some((overlap.seen_from(part), overlap.seen_from(&transfer.dst)))
        };
        let inside = |cells, flip: &[bool], portion: &IndexBox| {
            let cells = flipped(cells, flip);
            if portion.shape() == cells.shape()[..] {
                cells
            } else {
                cut(&cells, portion)
            }
        };
        let copied = plan.copies.iter().filter_map(|copy| {
            let (target, portion) = common(copy)?;
            Some((target, inside(cut(tensor, &copy.src), &copy.flip, &portion)))
        });
        let others = received.iter().filter_map(|(transfer, cells)| {
            let (target, portion) = common(transfer)?;
            Some((target, inside(cells.clone(), &transfer.flip, &portion)))
        });
        let boxes: Vec<_> = copied.chain(others).collect();
        // A single box that fills the part is used as it is; a whole result is copied, so that it
        // owns its memory.
        if let [(target, cells)] = &boxes[..]
            && target.shape() == shape
            && shape != plan.output_shape
        {
            return cells.clone();
        }
        let from_others = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let planned = from_others.chain(&plan.copies).filter_map(common);
        // Pieces do not overlap, so volumes add up; only cells that no box covers need the fill
        // value.
        let covered: usize = planned.map(|(target, _)| target.volume()).sum();
        let value = (covered < part.volume()).then_some(plan.fill);
        cells::of_boxes(tensor, &shape, value, &boxes)
    }
}

/// Whether messages may travel while ranks compute; with [`Overlap::Auto`], only on engines whose
/// messages take time.
pub(crate) fn travels(comm: &Arc<dyn Communicator>) -> bool {
    match comm.settings().overlap {
        Overlap::On => true,
        Overlap::Off => false,
        Overlap::Auto => comm.takes_time(),
    }
}

/// Adds the gradient of a box, in the order of the assembled tensor, to the cells from which the
/// box was copied.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::IndexBox;
/// use halocline_core::ops::add_box;
/// use halocline_core::plan::Transfer;
///
/// let cells = |range| IndexBox::new(Vec::from([range]));
/// let mirrored = Transfer { src: cells(0..2), dst: cells(3..5), flip: vec![true] };
/// let device = Device::default();
/// let sum = Tensor::<1>::zeros([3], &device).into_dispatch();
/// let gradient = Tensor::<1>::from_floats([1.0, 2.0], &device).into_dispatch();
/// let sum = Tensor::<1>::from_dispatch(add_box(sum, (&mirrored, gradient)));
/// sum.into_data().assert_eq(&[2.0_f32, 1.0, 0.0].into(), false);
/// ```
pub fn add_box(
    sum: DispatchTensor,
    (transfer, gradient): (&Transfer, DispatchTensor),
) -> DispatchTensor {
    add_cells(sum, &transfer.src, flipped(gradient, &transfer.flip))
}

fn add_cells(sum: DispatchTensor, place: &IndexBox, cells: DispatchTensor) -> DispatchTensor {
    let cells = added(cut(&sum, place), cells);
    paste(sum, place, cells)
}
