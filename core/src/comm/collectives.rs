//! Collective operations over a group of ranks, built on batches of messages; reductions are in
//! `all_reduce`.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use super::{Batch, Communicator, Expected, InFlight, Operation, Payload, Traffic, host};
use crate::dispatch::joined;
use crate::{Error, Result};

/// The index of this rank in a group that it is in.
pub(crate) fn place_in(comm: &Arc<dyn Communicator>, group: &[usize]) -> usize {
    let place = group.iter().position(|&rank| rank == comm.rank());
    place.expect("a rank reduces in groups that it is in")
}

/// Starts to send a payload to each other rank of the group.
pub(super) fn start_all(
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

/// Sends a payload to each other rank of the group, and returns their payloads, by index in the
/// group.
pub(crate) fn exchange_all(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    send: impl Fn(usize) -> Payload,
    expected: impl Fn(usize) -> Expected,
) -> Result<Vec<Option<Payload>>> {
    let in_flight = start_all(comm, group, operation, send, expected)?;
    let mut received = in_flight.finish()?.into_iter();
    Ok(group
        .iter()
        .map(|rank| (*rank != comm.rank()).then(|| received.next()).flatten())
        .collect())
}

/// Gathers every rank's bytes, by index in the group.
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

/// Largest group in which the source of a broadcast sends to all ranks itself, so that each can
/// name it if it does not answer.
const SEND_TO_ALL: usize = 16;

/// The place from which a broadcast reaches a place, if that is not the source, and the places to
/// which it goes on from there. Places count from the source, whose place is 0.
///
/// In large groups they form a binomial tree, so that no rank sends, or holds copies for, more than
/// a few others.
fn broadcast_route(place: usize, size: usize) -> (Option<usize>, Vec<usize>) {
    if size <= SEND_TO_ALL {
        return match place {
            0 => (None, (1..size).collect()),
            _ => (Some(0), Vec::new()),
        };
    }
    // The binary digits of a place, from the highest, are the way from the source to it.
    let before = (place > 0).then(|| place & (place - 1));
    let steps = (0..place.trailing_zeros()).map(|bit| place + (1_usize << bit));
    let mut after: Vec<usize> = steps.take_while(|&next| next < size).collect();
    // The one with the longest way ahead comes first.
    after.reverse();
    (before, after)
}

/// Sends a payload from `source` to the other ranks of the group, which return it; the source
/// returns `None`. In groups of more than [`SEND_TO_ALL`] ranks, other ranks pass the payload on,
/// so a timeout may name a rank that waits itself.
///
/// # Errors
/// On all ranks: the source is not in the group; communication fails.
pub(crate) fn broadcast(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    operation: &Operation,
    payload: &Payload,
    expected: Expected,
) -> Result<Option<Payload>> {
    let Some(first) = group.iter().position(|&rank| rank == source) else {
        let message = format!("source {source} is not one of the ranks {group:?}");
        return Err(Error::operator(operation.name(), message));
    };
    let size = group.len();
    let place = (place_in(comm, group) + size - first) % size;
    let (before, after) = broadcast_route(place, size);
    let rank_at = |place: usize| group[(first + place) % size];
    let sends = |payload: &Payload| -> Vec<(usize, Payload)> {
        let send = |&place: &usize| (rank_at(place), payload.clone());
        after.iter().map(send).collect()
    };
    let batch = Batch {
        operation: operation.clone(),
        sends: match before {
            None => sends(payload),
            Some(_) => Vec::new(),
        },
        receives: before
            .map(|place| (rank_at(place), expected))
            .into_iter()
            .collect(),
    };
    let received = comm.clone().start(batch)?.finish()?.into_iter().next();
    if let Some(received) = &received
        && !after.is_empty()
    {
        let passed_on = Batch {
            operation: operation.clone(),
            sends: sends(received),
            receives: Vec::new(),
        };
        comm.clone().start(passed_on)?.finish()?;
    }
    Ok(received)
}

/// Sends bytes from `source` to all ranks of the group; every rank returns them.
pub(crate) fn broadcast_bytes(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    operation: &Operation,
    bytes: Option<Vec<u8>>,
) -> Result<Vec<u8>> {
    let sent = Payload::Bytes(bytes.unwrap_or_default());
    let received = broadcast(comm, group, source, operation, &sent, Expected::Bytes)?;
    match received.unwrap_or(sent) {
        Payload::Bytes(bytes) => Ok(bytes),
        Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
    }
}

/// Waits until every rank of the group has called it.
pub(crate) fn barrier(comm: &Arc<dyn Communicator>, group: &[usize]) -> Result<()> {
    let operation = Operation::new("barrier", Traffic::Control, None);
    all_gather_bytes(comm, group, &operation, &[]).map(drop)
}

/// Name of the operation in which ranks [`agree`] to the gather of a parameter.
pub(super) const AGREEMENT_TO_GATHER: &str = "agreement to gather";

/// Checks that all ranks of the group are about to run the same operation, if checks are enabled.
pub(crate) fn agree(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
) -> Result<()> {
    if !comm.settings().check || group.len() == 1 {
        return Ok(());
    }
    let name = match operation.traffic() {
        Traffic::Gather => AGREEMENT_TO_GATHER,
        _ => "agreement",
    };
    let check = Operation::new(name, Traffic::Control, None);
    let text = format!("{operation:#}");
    let texts = all_gather_bytes(comm, group, &check, text.as_bytes());
    let texts = texts.map_err(|mut error| {
        let name = operation.to_string();
        // Errors name the operation, not the check.
        if let Error::Timeout { operation, .. } | Error::PeerEnded { operation, .. } = &mut error {
            *operation = name;
        }
        error
    })?;
    for (&peer, other) in group.iter().zip(texts) {
        if other != text.as_bytes() {
            return Err(Error::Diverged {
                rank: comm.rank(),
                operation: text,
                peer,
                peer_operation: String::from_utf8_lossy(&other).into_owned(),
            });
        }
    }
    Ok(())
}

pub(crate) fn only_tensor(payload: Option<Payload>) -> Option<DispatchTensor> {
    match payload {
        Some(Payload::Tensors(mut tensors)) => tensors.pop(),
        _ => None,
    }
}

pub(super) fn payload(tensor: DispatchTensor) -> Payload {
    Payload::Tensors(vec![tensor])
}

pub(crate) fn expected_like(tensor: &DispatchTensor, elements: usize) -> Expected {
    Expected::Tensors {
        shapes: vec![Shape::from([elements])],
        dtype: tensor.dtype(),
        device: tensor.device(),
    }
}

/// Concatenates flat tensors.
pub(crate) fn concatenated(mut tensors: Vec<DispatchTensor>) -> DispatchTensor {
    if tensors.len() == 1 {
        return tensors.remove(0);
    }
    if tensors.iter().all(host::holds) {
        return host::concatenation(tensors);
    }
    joined(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Launcher;

    #[test]
    fn a_broadcast_reaches_every_place_by_one_way() {
        for size in [1, 2, SEND_TO_ALL, SEND_TO_ALL + 1, 32, 100] {
            let mut reached = vec![0];
            for place in 0..size {
                let (before, after) = broadcast_route(place, size);
                assert_eq!(before.is_none(), place == 0);
                for next in after {
                    assert_eq!(broadcast_route(next, size).0, Some(place));
                    reached.push(next);
                }
            }
            reached.sort_unstable();
            assert!(reached.into_iter().eq(0..size), "{size} ranks");
        }
    }

    #[test]
    fn in_large_groups_no_rank_sends_to_all() {
        for (ranks, most) in [(SEND_TO_ALL, 15), (SEND_TO_ALL + 1, 5), (23, 5)] {
            let sent = Launcher::local(ranks).collect(|world| {
                let name = (world.rank() == 3).then(|| b"storm".to_vec());
                assert_eq!(world.broadcast_bytes(3, name)?, b"storm");
                Ok(world.comm_stats().of(Traffic::Control).messages)
            });
            let sent = sent.unwrap();
            assert_eq!(sent.iter().sum::<u64>(), ranks as u64 - 1);
            assert_eq!(sent.iter().max(), Some(&most));
        }
    }
}
