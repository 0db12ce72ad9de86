//! Collective operations over a group of ranks, built on batches of messages.
//!
//! Sums run in the order of the group on every rank, so that all ranks, and all engines, get the same bits.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::{Batch, Communicator, Expected, InFlight, Operation, Payload, Traffic, host};
use crate::{Error, Result};

/// Above this many elements a sum is split over the ranks; below it every rank adds all contributions.
const SPLIT_REDUCTION_ABOVE: usize = 1 << 14;
/// So many elements of a share are added at a time.
const PIECE: usize = 1 << 17;
/// So many pieces of a sum travel at a time.
const AHEAD: usize = 8;

/// Starts to send one payload to every rank of the group but this one.
fn start_all(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    send: impl Fn(usize) -> Payload,
    expected: impl Fn(usize) -> Expected,
) -> Result<InFlight> {
    let peers = || {
        let others = group.iter().enumerate();
        others.filter(|(_, rank)| **rank != comm.rank())
    };
    comm.clone().start(Batch {
        operation: operation.clone(),
        sends: peers().map(|(place, &rank)| (rank, send(place))).collect(),
        receives: peers()
            .map(|(place, &rank)| (rank, expected(place)))
            .collect(),
    })
}

/// What all ranks of the group but this one sent, by place in the group.
fn finish_all(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    in_flight: InFlight,
) -> Result<Vec<Option<Payload>>> {
    let mut received = in_flight.finish()?.into_iter();
    Ok(group
        .iter()
        .map(|rank| (*rank != comm.rank()).then(|| received.next()).flatten())
        .collect())
}

/// Sends one payload to every rank of the group but this one, and returns what they sent, by place in the group.
fn exchange_all(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    send: impl Fn(usize) -> Payload,
    expected: impl Fn(usize) -> Expected,
) -> Result<Vec<Option<Payload>>> {
    let in_flight = start_all(comm, group, operation, send, expected)?;
    finish_all(comm, group, in_flight)
}

/// Every rank's bytes, by place in the group.
pub(crate) fn all_gather_bytes(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    let send = |_| Payload::Bytes(bytes.to_vec());
    let received = exchange_all(comm, group, operation, send, |_| Expected::Bytes)?;
    Ok(received
        .into_iter()
        .map(|payload| match payload {
            Some(Payload::Bytes(bytes)) => bytes,
            _ => bytes.to_vec(),
        })
        .collect())
}

/// The payload that `source` has, on the other ranks of the group; nothing on the source.
///
/// # Errors
/// On all ranks, a source that is not one of the group; a failure of communication.
pub(crate) fn broadcast(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    operation: &Operation,
    payload: &Payload,
    expected: Expected,
) -> Result<Option<Payload>> {
    if !group.contains(&source) {
        let message = format!("source {source} is not one of the ranks {group:?}");
        return Err(Error::operator(operation.name(), message));
    }
    let is_source = comm.rank() == source;
    let others = group.iter().filter(|rank| is_source && **rank != source);
    let batch = Batch {
        operation: operation.clone(),
        sends: others.map(|&rank| (rank, payload.clone())).collect(),
        receives: (!is_source)
            .then_some((source, expected))
            .into_iter()
            .collect(),
    };
    let received = comm.clone().start(batch)?.finish()?;
    Ok(received.into_iter().next())
}

/// The bytes that `source` has, on every rank of the group.
pub(crate) fn broadcast_bytes(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    operation: &Operation,
    bytes: Option<Vec<u8>>,
) -> Result<Vec<u8>> {
    let own = Payload::Bytes(bytes.unwrap_or_default());
    let received = broadcast(comm, group, source, operation, &own, Expected::Bytes)?;
    match received.unwrap_or(own) {
        Payload::Bytes(bytes) => Ok(bytes),
        Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
    }
}

/// Waits until every rank of the group is here.
pub(crate) fn barrier(comm: &Arc<dyn Communicator>, group: &[usize]) -> Result<()> {
    let operation = Operation::new("barrier", Traffic::Control, None);
    all_gather_bytes(comm, group, &operation, &[]).map(|_| ())
}

/// Checks that all ranks of the group are about to run the same operation, if the settings ask for it.
pub(crate) fn agree(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
) -> Result<()> {
    if !comm.settings().check || group.len() == 1 {
        return Ok(());
    }
    let check = Operation::new("agreement", Traffic::Control, None);
    let own = operation.to_string();
    let texts = all_gather_bytes(comm, group, &check, own.as_bytes()).map_err(|e| match e {
        // The name of the check helps nobody; the operation does.
        Error::Timeout {
            rank,
            peer,
            expected,
            seconds,
            ..
        } => Error::Timeout {
            rank,
            operation: own.clone(),
            peer,
            expected,
            seconds,
        },
        Error::PeerEnded {
            rank, peer, cause, ..
        } => Error::PeerEnded {
            rank,
            operation: own.clone(),
            peer,
            cause,
        },
        other => other,
    })?;
    for (&peer, text) in group.iter().zip(texts) {
        if text != own.as_bytes() {
            return Err(Error::Diverged {
                rank: comm.rank(),
                operation: own,
                peer,
                peer_operation: String::from_utf8_lossy(&text).into_owned(),
            });
        }
    }
    Ok(())
}

fn only_tensor(payload: Option<Payload>) -> Option<DispatchTensor> {
    match payload {
        Some(Payload::Tensors(mut tensors)) => tensors.pop(),
        _ => None,
    }
}

fn payload(tensor: DispatchTensor) -> Payload {
    Payload::Tensors(vec![tensor])
}

fn expected_like(tensor: &DispatchTensor, elements: usize) -> Expected {
    Expected::Tensors {
        shapes: vec![Shape::from([elements])],
        dtype: tensor.dtype(),
        device: tensor.device(),
    }
}

/// Every rank's tensor, by place in the group; all have the same size.
pub(crate) fn all_gather(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    tensor: &DispatchTensor,
) -> Result<Vec<DispatchTensor>> {
    let expected = |_| expected_like(tensor, tensor.shape()[0]);
    let send = |_| payload(tensor.clone());
    let received = exchange_all(comm, group, operation, send, expected)?;
    Ok(received
        .into_iter()
        .map(|payload| only_tensor(payload).unwrap_or_else(|| tensor.clone()))
        .collect())
}

/// Adds tensors, in order.
fn add(tensors: Vec<DispatchTensor>) -> DispatchTensor {
    if tensors.iter().all(host::holds) {
        return host::sum(tensors);
    }
    let sum = tensors.into_iter().reduce(Dispatch::float_add);
    sum.expect("a group has at least one rank")
}

/// Tensors one after the other.
pub(crate) fn concatenated(mut tensors: Vec<DispatchTensor>) -> DispatchTensor {
    if tensors.len() == 1 {
        return tensors.remove(0);
    }
    if tensors.iter().all(host::holds) {
        return host::concatenation(tensors);
    }
    Dispatch::float_cat(tensors, 0)
}

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

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor, TensorData};

    use super::*;
    use crate::Launcher;

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
