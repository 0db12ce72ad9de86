//! Collective operations over a group of ranks, built on batches of messages.
//!
//! Sums run in the order of the group on every rank, so that all ranks, and all engines, get the same bits.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{Batch, Communicator, Expected, Operation, Payload, Traffic, host};
use crate::{Error, Result};

/// Above this many elements a sum is split over the ranks; below it every rank adds all contributions.
const SPLIT_REDUCTION_ABOVE: usize = 1 << 14;

/// Sends one payload to every rank of the group but this one, and returns what they sent, by place in the group.
fn exchange_all(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    send: impl Fn(usize) -> Payload,
    expected: impl Fn(usize) -> Expected,
) -> Result<Vec<Option<Payload>>> {
    let peers = || {
        let others = group.iter().enumerate();
        others.filter(|(_, rank)| **rank != comm.rank())
    };
    let in_flight = comm.clone().start(Batch {
        operation: operation.clone(),
        sends: peers().map(|(place, &rank)| (rank, send(place))).collect(),
        receives: peers()
            .map(|(place, &rank)| (rank, expected(place)))
            .collect(),
    })?;
    let mut received = in_flight.finish()?.into_iter();
    Ok(group
        .iter()
        .map(|rank| (*rank != comm.rank()).then(|| received.next()).flatten())
        .collect())
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

fn only_tensor(payload: Option<Payload>) -> Option<Tensor<1>> {
    match payload {
        Some(Payload::Tensors(mut tensors)) => tensors.pop().map(Tensor::from_dispatch),
        _ => None,
    }
}

fn payload(tensor: Tensor<1>) -> Payload {
    Payload::Tensors(vec![tensor.into_dispatch()])
}

fn expected_like(tensor: &Tensor<1>, elements: usize) -> Expected {
    Expected::Tensors {
        shapes: vec![vec![elements]],
        dtype: tensor.dtype(),
        device: tensor.device(),
    }
}

/// Every rank's tensor, by place in the group; all have the same size.
pub(crate) fn all_gather(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    tensor: &Tensor<1>,
) -> Result<Vec<Tensor<1>>> {
    let expected = |_| expected_like(tensor, tensor.dims()[0]);
    let send = |_| payload(tensor.clone());
    let received = exchange_all(comm, group, operation, send, expected)?;
    Ok(received
        .into_iter()
        .map(|payload| only_tensor(payload).unwrap_or_else(|| tensor.clone()))
        .collect())
}

/// Adds tensors, in order.
fn add(tensors: Vec<Tensor<1>>) -> Tensor<1> {
    if let Some(sum) = host::sum(&tensors) {
        return sum;
    }
    let sum = tensors.into_iter().reduce(|lhs, rhs| lhs + rhs);
    sum.expect("a group has at least one rank")
}

/// The sum of all ranks' tensors, on every rank.
pub(crate) fn all_reduce_sum(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    tensor: Tensor<1>,
) -> Result<Tensor<1>> {
    let [elements] = tensor.dims();
    if group.len() == 1 || elements == 0 {
        return Ok(tensor);
    }
    if elements <= SPLIT_REDUCTION_ABOVE {
        return Ok(add(all_gather(comm, group, operation, &tensor)?));
    }
    // Each rank adds its share, then all collect the shares: an element travels twice, whatever the group's size.
    let bound = |place: usize| place * elements / group.len();
    let share = |place: usize| bound(place)..bound(place + 1);
    let cut = |place: usize| tensor.clone().slice([share(place)]);
    let expected = |place: usize| expected_like(&tensor, share(place).len());
    let own = group.iter().position(|&rank| rank == comm.rank());
    let own = own.expect("a rank reduces in groups that it is in");
    let contributions = exchange_all(
        comm,
        group,
        operation,
        |place| payload(cut(place)),
        |_| expected(own),
    )?;
    let contributions = contributions.into_iter();
    let contributions =
        contributions.map(|payload| only_tensor(payload).unwrap_or_else(|| cut(own)));
    let sum = add(contributions.collect());
    let shares = exchange_all(comm, group, operation, |_| payload(sum.clone()), expected)?;
    let shares = shares.into_iter();
    let shares = shares.map(|payload| only_tensor(payload).unwrap_or_else(|| sum.clone()));
    let shares: Vec<_> = shares.collect();
    Ok(host::concatenation(&shares).unwrap_or_else(|| Tensor::cat(shares, 0)))
}
