//! Collective operations over a group of ranks, built on batches of messages.
//!
//! Sums run in the order of the group on every rank, so that all ranks, and all engines, get the same bits.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::{Batch, Communicator, Expected, InFlight, Operation, Payload, Traffic, host};
use crate::{Error, Result};

/// Above this many elements a sum is split over the ranks; below it every rank adds all contributions.
const SPLIT_REDUCTION_ABOVE: usize = 1 << 14;

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

/// The bytes that `source` has, on every rank of the group.
pub(crate) fn broadcast_bytes(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    operation: &Operation,
    bytes: Option<Vec<u8>>,
) -> Result<Vec<u8>> {
    let is_source = comm.rank() == source;
    let bytes = bytes.unwrap_or_default();
    let others = group.iter().filter(|rank| is_source && **rank != source);
    let received = comm
        .clone()
        .start(Batch {
            operation: operation.clone(),
            sends: others
                .map(|&rank| (rank, Payload::Bytes(bytes.clone())))
                .collect(),
            receives: if is_source {
                Vec::new()
            } else {
                vec![(source, Expected::Bytes)]
            },
        })?
        .finish()?;
    Ok(match received.into_iter().next() {
        Some(Payload::Bytes(bytes)) => bytes,
        _ => bytes,
    })
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
    in_flight: Option<InFlight>,
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
/// the shares, so that an element travels twice, whatever the group's size.
///
/// Many ranks are arranged in rows and columns: rows add, then columns what rows have added, so that the number of
/// messages grows with the root of the number of ranks, unless that is a prime, which has but one row. The order of additions depends on that number alone.
pub(crate) fn start_sum(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    tensor: DispatchTensor,
) -> Result<PendingSum> {
    let place = place(comm, group);
    let length = row_length(group.len());
    let (first, across) = (place / length * length, place % length);
    let mut sum = PendingSum {
        comm: comm.clone(),
        row: group[first..first + length].to_vec(),
        column: group.iter().skip(across).step_by(length).copied().collect(),
        operation: operation.clone(),
        own: tensor,
        in_flight: None,
    };
    if group.len() > 1 && sum.elements() > 0 {
        let in_flight = if sum.is_split() {
            let own = sum.place();
            let expected = |_| expected_like(&sum.own, sum.share(own).len());
            let send = |place| payload(sum.cut(place));
            start_all(comm, &sum.row, operation, send, expected)?
        } else {
            let expected = |_| expected_like(&sum.own, sum.elements());
            let send = |_| payload(sum.own.clone());
            start_all(comm, &sum.row, operation, send, expected)?
        };
        sum.in_flight = Some(in_flight);
    }
    Ok(sum)
}

/// This rank's place in a group.
fn place(comm: &Arc<dyn Communicator>, group: &[usize]) -> usize {
    let place = group.iter().position(|&rank| rank == comm.rank());
    place.expect("a rank reduces in groups that it is in")
}

impl PendingSum {
    fn elements(&self) -> usize {
        self.own.shape()[0]
    }

    fn is_split(&self) -> bool {
        self.elements() > SPLIT_REDUCTION_ABOVE
    }

    /// This rank's place in its row.
    fn place(&self) -> usize {
        place(&self.comm, &self.row)
    }

    /// The elements that the rank at a place of the row adds.
    fn share(&self, place: usize) -> Range<usize> {
        let bound = |place: usize| place * self.elements() / self.row.len();
        bound(place)..bound(place + 1)
    }

    fn cut(&self, place: usize) -> DispatchTensor {
        Dispatch::float_slice(self.own.clone(), &[Slice::from(self.share(place))])
    }

    /// Has it travel on while the rank computes.
    pub(crate) fn in_background(&self) {
        self.in_flight.iter().for_each(InFlight::in_background);
    }

    /// Waits for the sum.
    pub(crate) fn finish(mut self) -> Result<DispatchTensor> {
        let Some(in_flight) = self.in_flight.take() else {
            return Ok(self.own);
        };
        let Self {
            comm,
            row,
            column,
            operation,
            ..
        } = &self;
        let contributions = finish_all(comm, row, in_flight)?.into_iter();
        let tensors = contributions.map(only_tensor);
        if !self.is_split() {
            let all = tensors.map(|tensor| tensor.unwrap_or_else(|| self.own.clone()));
            return all_reduce_sum(comm, column, operation, add(all.collect()));
        }
        let own = self.place();
        let tensors = tensors.map(|tensor| tensor.unwrap_or_else(|| self.cut(own)));
        let tensors: Vec<_> = tensors.collect();
        if !host::holds(&self.own) {
            let sum = all_reduce_sum(comm, column, operation, add(tensors))?;
            let expected = |place| expected_like(&self.own, self.share(place).len());
            let send = |_| payload(sum.clone());
            let shares = exchange_all(comm, row, operation, send, expected)?.into_iter();
            let shares = shares.map(|payload| only_tensor(payload).unwrap_or_else(|| sum.clone()));
            return Ok(concatenated(shares.collect()));
        }
        let room = host::Room::new(self.elements(), self.own.dtype());
        if column.len() > 1 {
            let sum = all_reduce_sum(comm, column, operation, add(tensors))?;
            room.place(self.share(own)).fill(sum);
        } else {
            room.add_up(self.share(own), tensors);
        }
        let send = |_| payload(room.part(self.share(own)));
        let expected = |place| Expected::Place(room.place(self.share(place)));
        exchange_all(comm, row, operation, send, expected)?;
        Ok(room.into_tensor())
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
        for (ranks, elements) in [(20, 5), (18, SPLIT_REDUCTION_ABOVE + 7)] {
            let sums = Launcher::local(ranks).collect(|world| {
                let group: Vec<usize> = (0..ranks).collect();
                let operation = Operation::new("sum", Traffic::Reduce, None);
                let own = values(world.rank(), elements).into_dispatch();
                let sum = all_reduce_sum(world.comm(), &group, &operation, own)?;
                Ok(Tensor::<1>::from_dispatch(sum).into_data())
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
