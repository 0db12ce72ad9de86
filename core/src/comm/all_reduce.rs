//! Reductions over a group of ranks, which may be started and finished separately.
//!
//! Every rank combines values in group order, so that all ranks and all engines get the same bits.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use super::collectives::{
    concatenated, exchange_all, expected_like, only_tensor, payload, place_in, row_length,
    start_all,
};
use super::host::{self, Room};
use super::{Communicator, Expected, InFlight, Operation, Payload};
use crate::dispatch::{cast, combined, cut, widened};
use crate::layout::ReduceOp;
use crate::{IndexBox, Result};

/// Above this number of elements, a reduction is divided between the ranks; up to it, every rank
/// combines all contributions.
const SPLIT_REDUCTION_ABOVE: usize = 1 << 14;
/// Number of elements of a share that are combined at a time.
const PIECE: usize = 1 << 17;
/// Number of pieces of a reduction in flight at a time.
const AHEAD: usize = 8;

/// Reduces the flat tensors of all ranks; every rank receives the result.
pub(crate) fn all_reduce(
    comm: &Arc<dyn Communicator>,
    group: &Arc<[usize]>,
    operation: &Operation,
    op: ReduceOp,
    tensor: DispatchTensor,
) -> Result<DispatchTensor> {
    if group.len() == 1 {
        return Ok(tensor);
    }
    start(comm, group, operation, op, tensor)?.finish()
}

/// Reduction of the tensors of all ranks, in flight.
#[derive(Debug)]
#[must_use = "a reduction that has started must be finished"]
pub(crate) struct PendingReduction {
    comm: Arc<dyn Communicator>,
    group: Arc<[usize]>,
    /// The range in the group of this rank's row, which combines first.
    row: Range<usize>,
    operation: Operation,
    op: ReduceOp,
    contribution: DispatchTensor,
    /// The element type of the result.
    dtype: DType,
    elements: usize,
    /// This rank's index in its row.
    place: usize,
    /// Whether each rank combines a share.
    split: bool,
    /// Whether the CPU combines, in a [`Room`].
    on_cpu: bool,
    /// The number of pieces of each share; zero if there is nothing to combine.
    pieces: usize,
    /// The pieces in flight, in their order.
    in_flight: VecDeque<InFlight>,
    /// The number of pieces that have been started.
    started: usize,
}

/// Starts to reduce the flat tensors of all ranks. Small tensors go to every rank. Of large ones
/// each rank combines a share, then all ranks collect the shares, so that an element travels twice,
/// regardless of the group's size. Shares travel in pieces, which are combined and collected while
/// they are in the processor's cache.
///
/// Large groups are arranged in rows and columns: rows combine first, then columns combine the
/// results of the rows, so that the number of messages per rank grows with the square root of the
/// number of ranks, except for prime numbers, which form a single row. The order of combination
/// depends only on the number of ranks.
pub(crate) fn start(
    comm: &Arc<dyn Communicator>,
    group: &Arc<[usize]>,
    operation: &Operation,
    op: ReduceOp,
    tensor: DispatchTensor,
) -> Result<PendingReduction> {
    let place = place_in(comm, group);
    let length = row_length(group.len());
    let (first, across) = (place / length * length, place % length);
    let elements = tensor.shape()[0];
    let dtype = tensor.dtype();
    // Sums of rows must not be rounded before columns add them.
    let tensor = if op == ReduceOp::Sum && length < group.len() {
        widened(tensor)
    } else {
        tensor
    };
    let split = elements > SPLIT_REDUCTION_ABOVE;
    let on_cpu = host::holds(&tensor);
    let pieces = if elements == 0 || group.len() == 1 {
        0
    } else if split && on_cpu {
        elements.div_ceil(length * PIECE)
    } else {
        1
    };
    let mut reduction = PendingReduction {
        comm: comm.clone(),
        group: group.clone(),
        row: first..first + length,
        operation: operation.clone(),
        op,
        contribution: host::in_one_piece(tensor),
        dtype,
        elements,
        place: across,
        split,
        on_cpu,
        pieces,
        in_flight: VecDeque::new(),
        started: 0,
    };
    reduction.start_piece()?;
    Ok(reduction)
}

impl PendingReduction {
    /// The elements of a piece of the share that is combined by the rank at a place of the row.
    fn piece(&self, place: usize, index: usize) -> Range<usize> {
        if !self.split {
            return 0..self.elements;
        }
        // Bounds are computed identically on all ranks; shares and pieces cover all elements even
        // if they do not divide evenly.
        let share = |place: usize| place * self.elements / self.row.len();
        let (start, length) = (share(place), share(place + 1) - share(place));
        let bound = |index: usize| start + index * length / self.pieces;
        bound(index)..bound(index + 1)
    }

    /// The ranks of this rank's row.
    fn row(&self) -> &[usize] {
        &self.group[self.row.clone()]
    }

    /// The ranks of this rank's column, which combines the results of rows.
    fn column(&self) -> Arc<[usize]> {
        let column = self.group.iter().skip(self.place);
        column.step_by(self.row.len()).copied().collect()
    }

    /// This rank's elements of a piece.
    fn cut(&self, piece: Range<usize>) -> DispatchTensor {
        if piece.len() == self.elements {
            return self.contribution.clone();
        }
        cut(&self.contribution, &IndexBox::new(Vec::from([piece])))
    }

    /// Starts the next piece, if there is one.
    fn start_piece(&mut self) -> Result<()> {
        if self.started == self.pieces {
            return Ok(());
        }
        let piece = |place| self.piece(place, self.started);
        let share = piece(self.place);
        let send = |place| payload(self.cut(piece(place)));
        let expected = |_| expected_like(&self.contribution, share.len());
        let in_flight = start_all(&self.comm, self.row(), &self.operation, send, expected)?;
        self.in_flight.push_back(in_flight);
        self.started += 1;
        Ok(())
    }

    /// Lets more pieces travel while the ranks compute. All ranks must call this at the same point
    /// of their programs, because messages between two ranks are matched by their order.
    pub(crate) fn in_background(&mut self) -> Result<()> {
        while self.started < self.pieces.min(AHEAD) {
            self.start_piece()?;
        }
        self.in_flight.iter().for_each(InFlight::in_background);
        Ok(())
    }

    /// Starts the next piece, and waits for the contributions of the other ranks of the row to the
    /// first piece in flight.
    fn arrive(&mut self) -> Result<Vec<Payload>> {
        let in_flight = self.in_flight.pop_front();
        self.start_piece()?;
        in_flight.expect("pieces arrive once each").finish()
    }

    /// Writes the reduction of a piece over the row to a part of `room`.
    fn combine(&self, index: usize, received: &[Payload], room: &Room, target: Range<usize>) {
        let share = self.piece(self.place, index);
        // In row order, with this rank's contribution at its index among the received ones.
        let value = |place: usize| match place.cmp(&self.place) {
            Ordering::Less => received_cells(&received[place]),
            Ordering::Equal => host::cells(&self.contribution, share.clone()),
            Ordering::Greater => received_cells(&received[place - 1]),
        };
        let values: Vec<&[u8]> = (0..self.row.len()).map(value).collect();
        room.combine(self.op, target, &values);
    }

    /// Waits for the result.
    pub(crate) fn finish(self) -> Result<DispatchTensor> {
        let dtype = self.dtype;
        Ok(cast(self.reduced()?, dtype))
    }

    /// Waits for the result, in the element type that travels.
    fn reduced(mut self) -> Result<DispatchTensor> {
        if self.pieces == 0 {
            return Ok(self.contribution);
        }
        if !self.on_cpu {
            return self.finish_on_device();
        }
        let one_row = self.row.len() == self.group.len();
        let room = Room::new(self.elements, self.contribution.dtype());
        // Three stages overlap: later pieces arrive, this one is combined, earlier ones are
        // collected. All ranks run the stages of a piece in this order, so the messages of each
        // pair of ranks match.
        let mut collected = VecDeque::new();
        for index in 0..self.pieces {
            let received = self.arrive()?;
            let piece = self.piece(self.place, index);
            if one_row {
                self.combine(index, &received, &room, piece.clone());
            } else {
                let of_row = Room::new(piece.len(), self.contribution.dtype());
                self.combine(index, &received, &of_row, 0..piece.len());
                let result = self.over_column(of_row.into_tensor())?;
                room.place(piece.clone()).fill(result);
            }
            if !self.split {
                break;
            }
            // The combined piece is sent directly from the result, and those of other ranks are
            // received into it.
            let part = room.part(piece);
            let send = |_| payload(part.clone());
            let expected = |place| Expected::Place(room.place(self.piece(place, index)));
            let (comm, row, operation) = (&self.comm, self.row(), &self.operation);
            collected.push_back(start_all(comm, row, operation, send, expected)?);
            // Bounds the number of messages in flight.
            if collected.len() == AHEAD
                && let Some(first) = collected.pop_front()
            {
                first.finish()?;
            }
        }
        for in_flight in collected {
            in_flight.finish()?;
        }
        Ok(room.into_tensor())
    }

    /// Reduces the results of rows over this rank's column.
    fn over_column(&self, of_row: DispatchTensor) -> Result<DispatchTensor> {
        let column = self.column();
        all_reduce(&self.comm, &column, &self.operation, self.op, of_row)
    }

    /// Waits for the result if values are combined by burn, possibly on another device.
    fn finish_on_device(mut self) -> Result<DispatchTensor> {
        let mut received = self.arrive()?.into_iter();
        let contribution = || self.cut(self.piece(self.place, 0));
        let values = (0..self.row.len()).map(|place| {
            if place == self.place {
                contribution()
            } else {
                only_tensor(received.next()).expect("a tensor for each rank")
            }
        });
        let result = self.over_column(combination(self.op, values.collect()))?;
        if !self.split {
            return Ok(result);
        }
        let (comm, row, operation) = (&self.comm, self.row(), &self.operation);
        let expected = |place| expected_like(&result, self.piece(place, 0).len());
        let send = |_| payload(result.clone());
        let shares = exchange_all(comm, row, operation, send, expected)?;
        let share = |payload| only_tensor(payload).unwrap_or_else(|| result.clone());
        Ok(concatenated(shares.into_iter().map(share).collect()))
    }
}

/// Combines flat tensors of the same size, in order.
pub(crate) fn combination(op: ReduceOp, tensors: Vec<DispatchTensor>) -> DispatchTensor {
    if tensors.iter().all(host::holds) {
        return host::combination(op, tensors);
    }
    let dtype = tensors[0].dtype();
    // A sum of several half-precision numbers is rounded once.
    let widen = op == ReduceOp::Sum && tensors.len() > 2;
    let combined = tensors
        .into_iter()
        .map(|tensor| if widen { widened(tensor) } else { tensor })
        .reduce(|first, second| combined(op, first, second));
    let combined = combined.expect("a group has at least one rank");
    if widen {
        cast(combined, dtype)
    } else {
        combined
    }
}

/// The bytes of a received CPU tensor.
fn received_cells(payload: &Payload) -> &[u8] {
    match payload {
        Payload::Tensors(tensors) => host::cells(&tensors[0], 0..tensors[0].shape()[0]),
        Payload::Bytes(_) => unreachable!("the engine gives what was expected, or an error"),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Tensor, TensorData};

    use super::*;
    use crate::Launcher;
    use crate::comm::Traffic;

    #[test]
    fn sums_of_half_precision_are_rounded_once() {
        let device = Device::flex();
        // Added to 256, which bf16 stores with eight bits, a single 1 is lost.
        let values = [256.0, 1.0, 1.0].map(|value| {
            let value = Tensor::<1>::from_data(TensorData::from([value]), (&device, DType::BF16));
            value.into_dispatch()
        });
        let sum = Tensor::<1>::from_dispatch(combination(ReduceOp::Sum, values.to_vec()));
        assert_eq!(sum.dtype(), DType::BF16);
        assert_eq!(sum.into_data().iter::<f32>().next(), Some(258.0));
    }

    #[test]
    fn sums_of_rows_are_not_rounded_to_half_precision() {
        // Five ranks form a row. The sums of the first two rows overflow f16, but the total does
        // not.
        let ranks = 20;
        let sums = Launcher::local(ranks).collect(|world| {
            let value = match world.rank() {
                0..5 => 20_000.0,
                5..10 => -20_000.0,
                _ => 1.0,
            };
            let data = TensorData::from([value, 0.5]);
            let tensor = Tensor::<1>::from_data(data, (&Device::flex(), DType::F16));
            let group: Arc<[usize]> = (0..ranks).collect();
            let operation = Operation::new("sum", Traffic::Reduce, None);
            let tensor = tensor.into_dispatch();
            let sum = all_reduce(world.comm(), &group, &operation, ReduceOp::Sum, tensor)?;
            assert_eq!(sum.dtype(), DType::F16);
            Ok(Tensor::<1>::from_dispatch(sum)
                .into_data()
                .iter::<f32>()
                .collect::<Vec<_>>())
        });
        for sum in sums.unwrap() {
            assert_eq!(sum, [10.0, 10.0]);
        }
    }

    /// The values that a rank contributes, of all magnitudes, so that the order of additions shows.
    fn values(rank: usize, elements: usize) -> Tensor<1> {
        let value = |i: usize| {
            let bits = (rank * 7919 + i * 104_729) % 1009;
            (bits as f32 - 504.0) * 10_f32.powi((bits % 7) as i32)
        };
        let values: Vec<f32> = (0..elements).map(value).collect();
        Tensor::from_data(TensorData::new(values, [elements]), &Device::flex())
    }

    #[test]
    fn many_ranks_add_in_rows_and_columns() {
        for (ranks, elements) in [
            (20, 5),
            (18, SPLIT_REDUCTION_ABOVE + 7),
            (18, 6 * PIECE + 7),
            (3, 7 * PIECE - 1),
        ] {
            let sums = Launcher::local(ranks).collect(|world| {
                let group: Arc<[usize]> = (0..ranks).collect();
                let operation = Operation::new("sum", Traffic::Reduce, None);
                let part = values(world.rank(), elements).into_dispatch();
                let sum = ReduceOp::Sum;
                let start = || start(world.comm(), &group, &operation, sum, part.clone());
                let [mut early, mut late] = [start()?, start()?];
                early.in_background()?;
                late.in_background()?;
                // Finished in another order than they were started in, the same on all ranks.
                let sums = [late.finish()?, early.finish()?, start()?.finish()?];
                let [first, second, third] =
                    sums.map(|sum| Tensor::<1>::from_dispatch(sum).into_data());
                assert!(first == second && second == third);
                Ok(first)
            });
            let sums = sums.unwrap();
            assert!(
                sums.iter().all(|sum| *sum == sums[0]),
                "{ranks} ranks differ"
            );
            let length = row_length(ranks);
            let rows = (0..ranks / length).map(|row| {
                let row = (row * length..(row + 1) * length).map(|rank| values(rank, elements));
                row.reduce(|lhs, rhs| lhs + rhs).unwrap()
            });
            let expected = rows.reduce(|lhs, rhs| lhs + rhs).unwrap();
            assert_eq!(sums[0], expected.into_data(), "{ranks} ranks");
        }
    }
}
