//! Agreement between the ranks of a mesh: values and errors that are the same on all of them.

use std::ops::Range;

use halocline_core::{Batch, DeviceMesh, Error, Expected, Operation, Payload, Result, Traffic};

/// Broadcasts bytes of the first rank of the mesh.
pub(crate) fn broadcast(
    mesh: &DeviceMesh,
    operation: &'static str,
    bytes: Vec<u8>,
) -> Result<Vec<u8>> {
    mesh.broadcast_bytes(operation, mesh.shape().ranks()[0], Some(bytes))
}

/// Largest mesh whose ranks all exchange messages directly, so that each names the silent one.
const MAX_DIRECT: usize = 16;

/// Gathers bytes of every rank on the ranks at the positions `readers`; on others the result is
/// empty.
fn gather(
    mesh: &DeviceMesh,
    operation: &'static str,
    readers: Range<usize>,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    let (here, ranks) = (mesh.position(), mesh.shape().ranks());
    let others = |positions: Range<usize>| positions.filter(move |&position| position != here);
    let is_reader = readers.contains(&here);
    let batch = Batch {
        operation: Operation::new(operation, Traffic::Control, None),
        sends: others(readers)
            .map(|position| (ranks[position], Payload::Bytes(bytes.to_vec())))
            .collect(),
        receives: others(0..mesh.size())
            .filter(|_| is_reader)
            .map(|position| (ranks[position], Expected::Bytes))
            .collect(),
    };
    let received = mesh.comm().clone().start(batch)?.finish()?;
    let mut all: Vec<Vec<u8>> = received.into_iter().map(into_bytes).collect();
    if is_reader {
        all.insert(here, bytes.to_vec());
    }
    Ok(all)
}

/// Returns this rank's value on every rank if all ranks have one, else an error: that of the first
/// rank that failed. Only ranks that are `fallible` report.
pub(crate) fn agree<T>(
    mesh: &DeviceMesh,
    operation: &'static str,
    fallible: Fallible,
    result: std::result::Result<T, crate::Error>,
) -> Result<T> {
    agree_at(mesh, operation, fallible, ("", ""), result)
}

/// [`agree`] on ranks that must also have equal values of a property, given after its name. A
/// difference is an error on all ranks; with [`Fallible::First`], on the ranks that differ.
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
        ((_, Some((failed, _))), Err(error)) if failed == rank => Err(error.into()),
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

/// Computes `conclude` from the bytes of all ranks, and returns its result on all of them.
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

/// Ranks that may fail where [`agree`] is called.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fallible {
    First,
    All,
}

/// A rank's report: its value of the compared property, and the rank that failed with the cause, if
/// any.
type Report = (String, Option<(usize, String)>);

fn encode(report: &Report) -> Vec<u8> {
    serde_json::to_vec(report).expect("numbers and strings are JSON")
}

fn decode(bytes: &[u8]) -> Report {
    serde_json::from_slice(bytes).expect("what encode() wrote on another rank")
}

fn into_bytes(payload: Payload) -> Vec<u8> {
    match payload {
        Payload::Bytes(bytes) => bytes,
        Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
    }
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;

    use super::*;

    /// From a number of ranks on, the first one concludes for all.
    #[test]
    fn ranks_of_a_mesh_of_any_size_agree() {
        for ranks in [2, MAX_DIRECT, MAX_DIRECT + 1, 24] {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("all", ranks)])?;
                let agreed = |value: std::result::Result<usize, crate::Error>| {
                    agree(&mesh, "test", Fallible::All, value).map_err(|error| error.to_string())
                };
                let rank = world.rank();
                let failed = match rank + 1 == ranks {
                    true => Err(crate::Error::argument("x", "1", "2")),
                    false => Ok(rank),
                };
                let alike = same(&mesh, "test", &[7])?;
                let differ = same(&mesh, "test", &[rank as u8])?;
                Ok((agreed(Ok(rank)), agreed(failed), alike, differ))
            });
            for (rank, (agreed, failed, alike, differ)) in found.unwrap().into_iter().enumerate() {
                assert_eq!(agreed, Ok(rank));
                assert!(failed.unwrap_err().contains("got 1, expected 2"));
                assert!(alike && !differ);
            }
        }
    }
}
