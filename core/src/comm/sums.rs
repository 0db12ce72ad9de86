//! Sums over a group of ranks, which may be started and finished apart.
//!
//! They run in the order of the group on every rank, so that all ranks, and all engines, get the same bits.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Slice;

use super::collectives::{
    concatenated, exchange_all, expected_like, only_tensor, payload, start_all,
};
use super::host::{self, Room};
use super::{Communicator, Expected, InFlight, Operation, Payload};
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
    group: &Arc<[usize]>,
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
    group: Arc<[usize]>,
    /// The places in the group of this rank's row, which adds first.
    row: Range<usize>,
    operation: Operation,
    /// What this rank adds.
    own: DispatchTensor,
    elements: usize,
    /// This rank's place in its row.
    place: usize,
    /// Whether each rank adds a share.
    split: bool,
    /// Whether the CPU adds, in memory of its own.
    on_cpu: bool,
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
/// messages grows with the root of the number of ranks, unless that is a prime, which has but one row. The order of
/// additions depends on that number alone.
pub(crate) fn start_sum(
    comm: &Arc<dyn Communicator>,
    group: &Arc<[usize]>,
    operation: &Operation,
    tensor: DispatchTensor,
) -> Result<PendingSum> {
    let place = group.iter().position(|&rank| rank == comm.rank());
    let place = place.expect("a rank reduces in groups that it is in");
    let length = row_length(group.len());
    let (first, across) = (place / length * length, place % length);
    let elements = tensor.shape()[0];
    let split = elements > SPLIT_REDUCTION_ABOVE;
    let on_cpu = host::holds(&tensor);
    let pieces = if elements == 0 || group.len() == 1 {
        0
    } else if split && on_cpu {
        elements.div_ceil(length * PIECE)
    } else {
        1
    };
    let mut sum = PendingSum {
        comm: comm.clone(),
        group: group.clone(),
        row: first..first + length,
        operation: operation.clone(),
        own: host::in_one_piece(tensor),
        elements,
        place: across,
        split,
        on_cpu,
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

    /// The ranks of this rank's row.
    fn row(&self) -> &[usize] {
        &self.group[self.row.clone()]
    }

    /// The ranks of this rank's column, which add the sums of rows.
    fn column(&self) -> Arc<[usize]> {
        let column = self.group.iter().skip(self.place);
        column.step_by(self.row.len()).copied().collect()
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
        let in_flight = start_all(&self.comm, self.row(), &self.operation, send, expected)?;
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

    /// What the other ranks of the row add to a piece, when it has come; the next one is started.
    fn arrive(&mut self) -> Result<Vec<Payload>> {
        let in_flight = self.in_flight.pop_front();
        self.start_piece()?;
        in_flight.expect("pieces arrive once each").finish()
    }

    /// Writes the sum of a piece over the row to a part of `room`.
    fn add_up(&self, index: usize, received: &[Payload], room: &Room, to: Range<usize>) {
        let own = self.piece(self.place, index);
        let summand = |place: usize| match place.cmp(&self.place) {
            Ordering::Less => received_cells(&received[place]),
            Ordering::Equal => host::cells(&self.own, own.clone()),
            Ordering::Greater => received_cells(&received[place - 1]),
        };
        room.add_up(to, (0..self.row.len()).map(summand));
    }

    /// Waits for the sum.
    pub(crate) fn finish(mut self) -> Result<DispatchTensor> {
        if self.pieces == 0 {
            return Ok(self.own);
        }
        if !self.on_cpu {
            return self.finish_on_device();
        }
        let one_row = self.row.len() == self.group.len();
        let room = Room::new(self.elements, self.own.dtype());
        let mut collected = VecDeque::new();
        for index in 0..self.pieces {
            let received = self.arrive()?;
            let piece = self.piece(self.place, index);
            if one_row {
                self.add_up(index, &received, &room, piece.clone());
            } else {
                let of_row = Room::new(piece.len(), self.own.dtype());
                self.add_up(index, &received, &of_row, 0..piece.len());
                let of_row = of_row.into_tensor();
                let sum = all_reduce_sum(&self.comm, &self.column(), &self.operation, of_row)?;
                room.place(piece.clone()).fill(sum);
            }
            if !self.split {
                break;
            }
            let part = room.part(piece);
            let send = |_| payload(part.clone());
            let expected = |place| Expected::Place(room.place(self.piece(place, index)));
            let (comm, row, operation) = (&self.comm, self.row(), &self.operation);
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

    /// Waits for the sum of tensors that another device, or burn, adds.
    fn finish_on_device(mut self) -> Result<DispatchTensor> {
        let mut received = self.arrive()?.into_iter();
        let own = || self.cut(self.piece(self.place, 0));
        let summands = (0..self.row.len()).map(|place| match place == self.place {
            true => own(),
            false => only_tensor(received.next()).expect("a tensor for each rank"),
        });
        let of_row = summands.reduce(Dispatch::float_add);
        let of_row = of_row.expect("a group has at least one rank");
        let sum = all_reduce_sum(&self.comm, &self.column(), &self.operation, of_row)?;
        if !self.split {
            return Ok(sum);
        }
        let (comm, row, operation) = (&self.comm, self.row(), &self.operation);
        let expected = |place| expected_like(&sum, self.piece(place, 0).len());
        let shares = exchange_all(comm, row, operation, |_| payload(sum.clone()), expected)?;
        let share = |payload| only_tensor(payload).unwrap_or_else(|| sum.clone());
        Ok(concatenated(shares.into_iter().map(share).collect()))
    }
}

/// The bytes of a tensor of the CPU that has been received.
fn received_cells(payload: &Payload) -> &[u8] {
    match payload {
        Payload::Tensors(tensors) => host::cells(&tensors[0], 0..tensors[0].shape()[0]),
        Payload::Bytes(_) => unreachable!("the engine gives what was expected, or an error"),
    }
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
                let group: Arc<[usize]> = (0..ranks).collect();
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
