//! Agreement among the ranks of a mesh: brings values and errors to the same result on every rank.

use std::ops::Range;

use halocline_core::comm::{Batch, Expected, Operation, Payload};
use halocline_core::{DeviceMesh, Error, Result, Traffic, World};

/// Returns a mesh of all ranks.
pub(crate) fn all_ranks(world: &World) -> Result<DeviceMesh> {
    world.mesh([("rank", world.size())])
}

/// Broadcasts the bytes of the mesh's first rank.
pub(crate) fn broadcast(
    mesh: &DeviceMesh,
    operation: &'static str,
    bytes: Vec<u8>,
) -> Result<Vec<u8>> {
    mesh.broadcast_bytes(operation, mesh.shape().ranks()[0], Some(bytes))
}

/// Sends bytes to the ranks at some positions of the mesh, and returns the bytes from those at
/// `receives`, in that order.
pub(crate) fn exchange(
    mesh: &DeviceMesh,
    operation: &'static str,
    traffic: Traffic,
    sends: impl IntoIterator<Item = (usize, Vec<u8>)>,
    receives: impl IntoIterator<Item = usize>,
) -> Result<Vec<Vec<u8>>> {
    let ranks = mesh.shape().ranks();
    let sends = sends.into_iter();
    let receives = receives.into_iter();
    let batch = Batch {
        operation: Operation::new(operation, traffic, None),
        sends: sends
            .map(|(position, bytes)| (ranks[position], Payload::Bytes(bytes)))
            .collect(),
        receives: receives
            .map(|position| (ranks[position], Expected::Bytes))
            .collect(),
    };
    let received = mesh.comm().clone().start(batch)?.finish()?;
    let bytes = received.into_iter().map(|payload| match payload {
        Payload::Bytes(bytes) => bytes,
        Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
    });
    Ok(bytes.collect())
}

/// Size of the largest mesh on which all ranks exchange messages directly, so that each can name a
/// rank that does not answer.
const MAX_DIRECT: usize = 16;

/// Gathers the bytes of every rank on the ranks at positions `readers`; returns an empty vector on
/// the others.
fn gather(
    mesh: &DeviceMesh,
    operation: &'static str,
    readers: Range<usize>,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    let here = mesh.position();
    let others = |positions: Range<usize>| positions.filter(move |&position| position != here);
    let is_reader = readers.contains(&here);
    let sends = others(readers).map(|position| (position, bytes.to_vec()));
    let receives = others(0..mesh.size()).filter(|_| is_reader);
    let mut all = exchange(mesh, operation, Traffic::Control, sends, receives)?;
    if is_reader {
        all.insert(here, bytes.to_vec());
    }
    Ok(all)
}

/// Calls a function on the first rank of a mesh. Returns its value there and the default elsewhere,
/// or its error on every rank.
pub(crate) fn on_first<T: Default>(
    mesh: &DeviceMesh,
    operation: &'static str,
    call: impl FnOnce() -> std::result::Result<T, crate::Error>,
) -> Result<T> {
    let result = match mesh.position() {
        0 => call(),
        _ => Ok(T::default()),
    };
    agree(mesh, operation, Fallible::First, result)
}

/// Returns each rank's own value if all ranks have one, otherwise the error of the first rank that
/// failed, on every rank; ranks that failed with the same message return it as their own. Only
/// `fallible` ranks report.
pub(crate) fn agree<T>(
    mesh: &DeviceMesh,
    operation: &'static str,
    fallible: Fallible,
    result: std::result::Result<T, crate::Error>,
) -> Result<T> {
    agree_at(mesh, operation, fallible, ("", ""), result)
}

/// [`agree`], which also requires a property, given as name and value, to be equal on all ranks. A
/// difference is an error on all ranks or, with [`Fallible::First`], on the ranks that differ.
pub(crate) fn agree_at<T>(
    mesh: &DeviceMesh,
    operation: &'static str,
    fallible: Fallible,
    (name, value): (&'static str, &str),
    result: std::result::Result<T, crate::Error>,
) -> Result<T> {
    let rank = mesh.comm().rank();
    let failure = result.as_ref().err().map(|error| (rank, error.to_string()));
    let report = encode(&(value.into(), failure));
    let differs = |found: &str, first: &str| {
        let expected = format!("{first}, as on the first rank");
        crate::Error::argument(name, found, expected)
    };
    let conclude = |all: &[Vec<u8>]| {
        let reports: Vec<Report> = all.iter().map(|bytes| decode(bytes)).collect();
        let first = &reports[0].0;
        let difference = || {
            let position = reports.iter().position(|(value, _)| value != first)?;
            let cause = differs(&reports[position].0, first).to_string();
            Some((mesh.shape().ranks()[position], cause))
        };
        let failure = reports
            .iter()
            .find_map(|(_, failure)| failure.clone())
            .or_else(difference);
        encode(&(first.clone(), failure))
    };
    let verdict = match fallible {
        Fallible::All => everywhere(mesh, operation, report, conclude)?,
        Fallible::First => broadcast(mesh, operation, report)?,
    };
    match (decode(&verdict), result) {
        ((first, None), _) if matches!(fallible, Fallible::First) && first != value => {
            Err(differs(value, &first).into())
        }
        ((_, None), result) => Ok(result?),
        ((_, Some((failed, cause))), Err(error))
            if failed == rank || error.to_string() == cause =>
        {
            Err(error.into())
        }
        ((_, Some((rank, cause))), _) => Err(Error::Rank { rank, cause }),
    }
}

/// Whether `value` is true on all ranks of a mesh.
pub(crate) fn all(mesh: &DeviceMesh, operation: &'static str, value: bool) -> Result<bool> {
    let every = |all: &[Vec<u8>]| vec![u8::from(all.iter().all(|bytes| bytes == &[1]))];
    Ok(everywhere(mesh, operation, vec![u8::from(value)], every)? == [1])
}

/// Whether all ranks of a mesh have the same bytes.
pub(crate) fn same(mesh: &DeviceMesh, operation: &'static str, bytes: &[u8]) -> Result<bool> {
    let same = |all: &[Vec<u8>]| vec![u8::from(all.iter().all(|bytes| *bytes == all[0]))];
    Ok(everywhere(mesh, operation, bytes.to_vec(), same)? == [1])
}

/// Applies `conclude` to the bytes of all ranks and returns its result on every rank.
fn everywhere(
    mesh: &DeviceMesh,
    operation: &'static str,
    bytes: Vec<u8>,
    conclude: impl Fn(&[Vec<u8>]) -> Vec<u8>,
) -> Result<Vec<u8>> {
    if mesh.size() <= MAX_DIRECT {
        let all = gather(mesh, operation, 0..mesh.size(), &bytes)?;
        return Ok(conclude(&all));
    }
    let all = gather(mesh, operation, 0..1, &bytes)?;
    let concluded = match mesh.position() {
        0 => conclude(&all),
        _ => Vec::new(),
    };
    broadcast(mesh, operation, concluded)
}

/// Ranks that can fail in a call of [`agree`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fallible {
    First,
    All,
}

/// Report of a rank: its value of the compared property and, if a rank failed, the number of that
/// rank and the cause.
type Report = (String, Option<(usize, String)>);

fn encode(report: &Report) -> Vec<u8> {
    serde_json::to_vec(report).expect("numbers and strings are JSON")
}

fn decode(bytes: &[u8]) -> Report {
    serde_json::from_slice(bytes).expect("what encode() wrote on another rank")
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;

    use super::*;

    /// Covers both sides of [`MAX_DIRECT`]: on larger meshes the first rank concludes for all.
    #[test]
    fn ranks_of_a_mesh_of_any_size_agree() {
        for ranks in [2, MAX_DIRECT, MAX_DIRECT + 1, 24] {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("all", ranks)])?;
                let agreed = |value: std::result::Result<usize, crate::Error>| {
                    agree(&mesh, "test", Fallible::All, value).map_err(|error| error.to_string())
                };
                let rank = world.rank();
                let wrong = || Err(crate::Error::argument("x", "1", "2"));
                let failed = if rank + 1 == ranks { wrong() } else { Ok(rank) };
                let alike = same(&mesh, "test", &[7])?;
                let differ = same(&mesh, "test", &[rank as u8])?;
                let every = agreed(wrong());
                Ok((agreed(Ok(rank)), agreed(failed), every, [alike, differ]))
            });
            for (rank, found) in found.unwrap().into_iter().enumerate() {
                let (agreed, failed, every, [alike, differ]) = found;
                assert_eq!(agreed, Ok(rank));
                // A mistake of all ranks is not that of the first.
                assert_eq!(every.unwrap_err(), "x: got 1, expected 2");
                assert!(failed.unwrap_err().contains("got 1, expected 2"));
                assert!(alike && !differ);
            }
        }
    }
}
