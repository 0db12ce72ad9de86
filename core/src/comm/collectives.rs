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
    let rank = comm.rank();
    let place = group.iter().position(|&member| member == rank);
    place.unwrap_or_else(|| {
        panic!(
            "rank {rank} communicates in a group of the ranks {group:?}; expected a group with rank {rank}: make the \
             group of the ranks that call this, as World::mesh_over does"
        )
    })
}

/// Largest group in which all ranks exchange messages directly, so that each can name one that does
/// not answer.
const DIRECT: usize = 16;

/// The number of ranks in a row of a group: the smallest divisor that is not below the square root,
/// so that no column is longer than a row. A group of up to [`DIRECT`] ranks is one row.
pub(super) fn row_length(ranks: usize) -> usize {
    if ranks <= DIRECT {
        return ranks;
    }
    let divides = |length: &usize| ranks.is_multiple_of(*length);
    let square = ranks.isqrt();
    (square..=ranks)
        .find(|length| length * length >= ranks && divides(length))
        .unwrap_or(ranks)
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
///
/// Large groups gather in [rows](row_length), then in columns, so that the number of messages per
/// rank grows with the square root of the number of ranks, except for prime numbers, which form a
/// single row. A timeout may then name a rank that waits itself.
pub(crate) fn all_gather_bytes(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    let length = row_length(group.len());
    if length == group.len() {
        return gather_directly(comm, group, operation, bytes);
    }
    let place = place_in(comm, group);
    let (first, across) = (place / length * length, place % length);
    let column = group.iter().skip(across).step_by(length).copied();
    let column: Vec<usize> = column.collect();
    let row = gather_directly(comm, &group[first..first + length], operation, bytes)?;
    // Bytes that are the same on all ranks of a row, as in most checks, are sent once. A dry run,
    // which has only those of its rank, plans for bytes that differ.
    let is_same = !comm.is_dry() && row.iter().all(|bytes| *bytes == row[0]);
    let sent = with_lengths(if is_same { &row[..1] } else { &row[..] });
    let rows = gather_directly(comm, &column, operation, &sent)?;
    let mut all = Vec::with_capacity(group.len());
    for (&peer, bytes) in column.iter().zip(&rows) {
        let mut parts = by_length(bytes);
        if let [same] = &parts[..] {
            parts = vec![same.clone(); length];
        }
        if parts.len() != length {
            return Err(Error::Diverged {
                rank: comm.rank(),
                operation: format!("{operation} of {} ranks", group.len()),
                peer,
                peer_operation: format!("{operation} of another number of ranks"),
            });
        }
        all.extend(parts);
    }
    Ok(all)
}

/// [`all_gather_bytes`] by messages between all pairs of ranks.
fn gather_directly(
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

/// Joins the bytes of several ranks, those of each after their number.
fn with_lengths(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

/// Splits bytes that [`with_lengths`] joined.
fn by_length(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<8>()
        && let Some((part, rest)) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)
    {
        parts.push(part.to_vec());
        bytes = rest;
    }
    parts
}

/// The place from which a broadcast reaches a place, if that is not the source, and the places to
/// which it goes on from there. Places count from the source, whose place is 0.
///
/// In large groups they form a binomial tree, so that no rank sends, or holds copies for, more than
/// a few others.
fn broadcast_route(place: usize, size: usize) -> (Option<usize>, Vec<usize>) {
    if size <= DIRECT {
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
/// returns `None`. In groups of more than [`DIRECT`] ranks, other ranks pass the payload on,
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
    use crate::{DryMesh, Launcher, MeshShape};

    #[test]
    fn a_broadcast_reaches_every_place_by_one_way() {
        for size in [1, 2, DIRECT, DIRECT + 1, 32, 100] {
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
    fn rows_are_about_as_long_as_columns() {
        let lengths = [1, 16, 17, 18, 20, 64, 4096].map(row_length);
        assert_eq!(lengths, [1, 16, 17, 6, 5, 8, 64]);
    }

    #[test]
    fn large_groups_gather_and_agree_by_rows_and_columns() {
        let ranks = 20;
        let sent = Launcher::local(ranks).check(true).collect(|world| {
            let everyone: Vec<usize> = (0..ranks).collect();
            let operation = Operation::new("names", Traffic::Control, None);
            let name = vec![7_u8; world.rank()];
            let names = all_gather_bytes(world.comm(), &everyone, &operation, &name)?;
            assert!(names.iter().map(Vec::len).eq(0..ranks));
            agree(world.comm(), &everyone, &operation)?;
            Ok(world.comm_stats().of(Traffic::Control).messages)
        });
        // Twice to the four others of the row, then to the three others of the column.
        assert_eq!(sent.unwrap(), vec![14_u64; ranks]);
    }

    #[test]
    fn a_dry_run_plans_the_messages_of_rows_and_columns() {
        let everyone: Vec<usize> = (0..20).collect();
        let shape = MeshShape::new(&[("x", 20)], everyone.clone()).unwrap();
        let dry = DryMesh::new(shape, Default::default()).unwrap();
        let operation = Operation::new("names", Traffic::Control, None);
        let names = all_gather_bytes(dry.mesh().comm(), &everyone, &operation, b"storm");
        assert_eq!(names.unwrap(), vec![b"storm".to_vec(); 20]);
        let planned = dry.take().operations;
        let sends = |index: usize| -> Vec<_> {
            let sends = planned[index].sends.iter();
            sends.map(|(_, bytes)| *bytes).collect()
        };
        // The bytes of a row are sent after their lengths.
        assert_eq!((sends(0), sends(1)), (vec![5; 4], vec![5 * (8 + 5); 3]));
    }

    #[test]
    fn a_rank_of_a_large_group_that_diverges_is_named_on_all_ranks() {
        let errors = Launcher::local(20).check(true).collect(|world| {
            let everyone: Vec<usize> = (0..20).collect();
            let name = ["halo", "sum"][usize::from(world.rank() == 13)];
            let operation = Operation::new(name, Traffic::Control, None);
            let agreed = agree(world.comm(), &everyone, &operation);
            Ok(agreed.unwrap_err().to_string())
        });
        for error in errors.unwrap() {
            let named = error.contains("ranks diverged") && error.contains("rank 13 is in sum");
            assert!(named, "{error}");
        }
    }

    #[test]
    fn a_group_without_this_rank_is_named() {
        let run = Launcher::local(2).run(|world| {
            place_in(world.comm(), &[1 - world.rank()]);
            Ok(())
        });
        let error = run.unwrap_err().to_string();
        assert!(error.contains("expected a group with rank"), "{error}");
    }

    #[test]
    fn in_large_groups_no_rank_sends_to_all() {
        for (ranks, most) in [(DIRECT, 15), (DIRECT + 1, 5), (23, 5)] {
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
