//! Sums over a group of ranks, which may be started and finished apart.
//!
//! They run in the order of the group on every rank, so that all ranks, and all engines, get the same bits.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Slice;

use super::collectives::{
    concatenated, exchange_all, expected_like, finish_all, only_tensor, payload, start_all,
};
use super::{Communicator, Expected, InFlight, Operation, host};
use crate::Result;

/// Above this many elements a sum is split over the ranks; below it every rank adds all contributions.
const SPLIT_REDUCTION_ABOVE: usize = 1 << 14;
/// So many elements of a share are added at a time.
const PIECE: usize = 1 << 17;
/// So many pieces of a sum travel at a time.
const AHEAD: usize = 8;

/// The sum of all ranks' tensors, on every rank.
pub(crate) fn all_reduce_sum(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    tensor: DispatchTensor,
) -> Result<DispatchTensor> {
    if group.len() == 1 {
        return Ok(tensor);
    }
    start_sum(comm, group, operation, tensor)?.finish()
}

/// A sum of all ranks' tensors on its way.
#[derive(Debug)]
#[must_use = "a sum on its way must be finished"]
pub(crate) struct PendingSum {
    comm: Arc<dyn Communicator>,
    /// The ranks of this rank's row, which add first.
    row: Vec<usize>,
    /// The ranks of this rank's column, which add the sums of rows.
    column: Vec<usize>,
    operation: Operation,
    /// What this rank adds.
    own: DispatchTensor,
    elements: usize,
    /// This rank's place in its row.
    place: usize,
    /// Whether each rank adds a share.
    split: bool,
    /// Whether shares are added and received in their place in the sum.
    in_place: bool,
    /// In how many pieces shares travel; none if there is nothing to add.
    pieces: usize,
    /// The pieces that are on their way, the first of them first.
    in_flight: VecDeque<InFlight>,
    /// How many pieces have been started.
    started: usize,
}

/// Groups of at most so many ranks add at once; larger ones in rows and columns.
const ADD_AT_ONCE: usize = 16;

/// The number of ranks of a row, where so many add.
fn row_length(ranks: usize) -> usize {
    if ranks <= ADD_AT_ONCE {
        return ranks;
    }
    let divides = |length: &usize| ranks.is_multiple_of(*length);
    let square = ranks.isqrt();
    (square..=ranks)
        .find(|length| length * length >= ranks && divides(length))
        .unwrap_or(ranks)
}

/// Starts to sum all ranks' tensors. Small ones go to every rank; of large ones each rank adds a share, then all collect
/// the shares, so that an element travels twice, whatever the group's size. Shares travel in pieces that are added, and
/// collected, while they are in a cache.
///
/// Many ranks are arranged in rows and columns: rows add, then columns what rows have added, so that the number of
/// messages grows with the root of the number of ranks, unless that is a prime, which has but one row. The order of additions depends on that number alone.
pub(crate) fn start_sum(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    tensor: DispatchTensor,
) -> Result<PendingSum> {
    let place = group.iter().position(|&rank| rank == comm.rank());
    let place = place.expect("a rank reduces in groups that it is in");
    let length = row_length(group.len());
    let (first, across) = (place / length * length, place % length);
    let elements = tensor.shape()[0];
    let split = elements > SPLIT_REDUCTION_ABOVE;
    let in_place = split && host::holds(&tensor);
    let pieces = if elements == 0 || group.len() == 1 {
        0
    } else if in_place {
        elements.div_ceil(length * PIECE)
    } else {
        1
    };
    let mut sum = PendingSum {
        comm: comm.clone(),
        row: group[first..first + length].to_vec(),
        column: group.iter().skip(across).step_by(length).copied().collect(),
        operation: operation.clone(),
        own: tensor,
        elements,
        place: across,
        split,
        in_place,
        pieces,
        in_flight: VecDeque::new(),
        started: 0,
    };
    sum.start_piece()?;
    Ok(sum)
}

impl PendingSum {
    /// The elements of a piece of what the rank at a place of the row adds.
    fn piece(&self, place: usize, index: usize) -> Range<usize> {
        if !self.split {
            return 0..self.elements;
        }
        let share = |place: usize| place * self.elements / self.row.len();
        let (start, length) = (share(place), share(place + 1) - share(place));
        let bound = |index: usize| start + index * length / self.pieces;
        bound(index)..bound(index + 1)
    }

    /// This rank's elements of a piece.
    fn cut(&self, piece: Range<usize>) -> DispatchTensor {
        let own = self.own.clone();
        if piece.len() == self.elements {
            return own;
        }
        Dispatch::float_slice(own, &[Slice::from(piece)])
    }

    /// Starts the next piece, if there is one.
    fn start_piece(&mut self) -> Result<()> {
        if self.started == self.pieces {
            return Ok(());
        }
        let piece = |place| self.piece(place, self.started);
        let own = piece(self.place);
        let send = |place| payload(self.cut(piece(place)));
        let expected = |_| expected_like(&self.own, own.len());
        let in_flight = start_all(&self.comm, &self.row, &self.operation, send, expected)?;
        self.in_flight.push_back(in_flight);
        self.started += 1;
        Ok(())
    }

    /// Has more of it travel on while the ranks compute. All of them ask for that at the same point of their programs.
    pub(crate) fn in_background(&mut self) -> Result<()> {
        while self.started < self.pieces.min(AHEAD) {
            self.start_piece()?;
        }
        self.in_flight.iter().for_each(InFlight::in_background);
        Ok(())
    }

    /// What each rank of the row adds to a piece, when it has come; the next one is started.
    fn arrive(&mut self, index: usize) -> Result<Vec<DispatchTensor>> {
        let in_flight = self.in_flight.pop_front();
        self.start_piece()?;
        let in_flight = in_flight.expect("pieces arrive once each, in order");
        let others = finish_all(&self.comm, &self.row, in_flight)?.into_iter();
        let own = || self.cut(self.piece(self.place, index));
        Ok(others
            .map(|payload| only_tensor(payload).unwrap_or_else(own))
            .collect())
    }

    /// Waits for the sum.
    pub(crate) fn finish(mut self) -> Result<DispatchTensor> {
        if self.pieces == 0 {
            return Ok(self.own);
        }
        if !self.in_place {
            return self.finish_in_one();
        }
        let room = host::Room::new(self.elements, self.own.dtype());
        let mut collected = VecDeque::new();
        for index in 0..self.pieces {
            let tensors = self.arrive(index)?;
            let piece = self.piece(self.place, index);
            if self.column.len() > 1 {
                let sum = all_reduce_sum(&self.comm, &self.column, &self.operation, add(tensors))?;
                room.place(piece.clone()).fill(sum);
            } else {
                room.add_up(piece.clone(), tensors);
            }
            let send = |_| payload(room.part(piece.clone()));
            let expected = |place| Expected::Place(room.place(self.piece(place, index)));
            let (comm, row, operation) = (&self.comm, &self.row, &self.operation);
            collected.push_back(start_all(comm, row, operation, send, expected)?);
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

    /// Waits for the sum of small tensors, or of tensors on a GPU.
    fn finish_in_one(mut self) -> Result<DispatchTensor> {
        let own = add(self.arrive(0)?);
        let (comm, row, operation) = (&self.comm, &self.row, &self.operation);
        let sum = all_reduce_sum(comm, &self.column, operation, own)?;
        if !self.split {
            return Ok(sum);
        }
        let expected = |place| expected_like(&sum, self.piece(place, 0).len());
        let shares = exchange_all(comm, row, operation, |_| payload(sum.clone()), expected)?;
        let share = |payload| only_tensor(payload).unwrap_or_else(|| sum.clone());
        Ok(concatenated(shares.into_iter().map(share).collect()))
    }
}

/// Adds tensors, in order.
fn add(tensors: Vec<DispatchTensor>) -> DispatchTensor {
    if tensors.iter().all(host::holds) {
        return host::sum(tensors);
    }
    let sum = tensors.into_iter().reduce(Dispatch::float_add);
    sum.expect("a group has at least one rank")
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor, TensorData};

    use super::*;
    use crate::Launcher;
    use crate::comm::Traffic;

    #[test]
    fn rows_are_about_as_long_as_columns() {
        let lengths = [1, 16, 17, 18, 20, 64, 4096].map(row_length);
        assert_eq!(lengths, [1, 16, 17, 6, 5, 8, 64]);
    }

    /// The values that a rank adds: of all magnitudes, so that the order of additions shows.
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
                let group: Vec<usize> = (0..ranks).collect();
                let operation = Operation::new("sum", Traffic::Reduce, None);
                let own = values(world.rank(), elements).into_dispatch();
                let start = || start_sum(world.comm(), &group, &operation, own.clone());
                let [mut early, mut late] = [start()?, start()?];
                early.in_background()?;
                late.in_background()?;
                // In another order than they were started in, by all ranks alike.
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
