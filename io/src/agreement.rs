//! What one rank of a mesh knows, on all its ranks.

use std::ops::Range;

use halocline_core::{Batch, DeviceMesh, Error, Expected, Operation, Payload, Result, Traffic};

/// Bytes that the first rank of the mesh has.
pub(crate) fn broadcast(
    mesh: &DeviceMesh,
    operation: &'static str,
    bytes: Vec<u8>,
) -> Result<Vec<u8>> {
    mesh.broadcast_bytes(operation, mesh.shape().ranks()[0], Some(bytes))
}

/// Up to so many ranks tell each other directly, so that every rank names the one that is silent.
const FEW: usize = 16;

/// Bytes of every rank of the mesh, on the ranks at the positions `readers`; nothing on the others.
fn gather(
    mesh: &DeviceMesh,
    operation: &'static str,
    readers: Range<usize>,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    let (own, ranks) = (mesh.position(), mesh.shape().ranks());
    let others = |positions: Range<usize>| positions.filter(move |&position| position != own);
    let reads = readers.contains(&own);
    let batch = Batch {
        operation: Operation::new(operation, Traffic::Control, None),
        sends: others(readers)
            .map(|position| (ranks[position], Payload::Bytes(bytes.to_vec())))
            .collect(),
        receives: others(0..mesh.size())
            .filter(|_| reads)
            .map(|position| (ranks[position], Expected::Bytes))
            .collect(),
    };
    let received = mesh.comm().clone().start(batch)?.finish()?;
    let mut all: Vec<Vec<u8>> = received.into_iter().map(into_bytes).collect();
    if reads {
        all.insert(own, bytes.to_vec());
    }
    Ok(all)
}

/// Gives all ranks of a mesh the same end: this rank's value if every rank has one, else the error of the first rank
/// that failed. A rank that cannot fail says so, and nothing is asked of it.
pub(crate) fn agree<T>(
    mesh: &DeviceMesh,
    operation: &'static str,
    who: Fallible,
    own: std::result::Result<T, crate::Error>,
) -> Result<T> {
    agree_at(mesh, operation, who, ("", ""), own)
}

/// [`agree`], where all ranks must have the same value of a property, its name first: the one that has another is the
/// error of all, or its own where only the first rank is asked.
pub(crate) fn agree_at<T>(
    mesh: &DeviceMesh,
    operation: &'static str,
    who: Fallible,
    (name, value): (&'static str, &str),
    own: std::result::Result<T, crate::Error>,
) -> Result<T> {
    let rank = mesh.comm().rank();
    let failed = own.as_ref().err().map(|error| (rank, error.to_string()));
    let told = encode(&(value.into(), failed));
    let differs = |found: &str, first: &str| {
        let expected = format!("{first}, as on the first rank");
        crate::Error::argument(name, found, expected)
    };
    let conclude = |all: &[Vec<u8>]| {
        let all: Vec<Told> = all.iter().map(|bytes| decode(bytes)).collect();
        let first = &all[0].0;
        let failed = all.iter().find_map(|(_, failed)| failed.clone());
        let failed = failed.or_else(|| {
            let position = all.iter().position(|(value, _)| value != first)?;
            let cause = differs(&all[position].0, first).to_string();
            Some((mesh.shape().ranks()[position], cause))
        });
        encode(&(first.clone(), failed))
    };
    let verdict = match who {
        Fallible::All => everywhere(mesh, operation, told, conclude)?,
        Fallible::First => broadcast(mesh, operation, told)?,
    };
    match (decode(&verdict), own) {
        ((first, None), _) if matches!(who, Fallible::First) && first != value => {
            Err(differs(value, &first).into())
        }
        ((_, None), own) => Ok(own?),
        ((_, Some((failed, _))), Err(error)) if failed == rank => Err(error.into()),
        ((_, Some((rank, cause))), _) => Err(Error::Rank { rank, cause }),
    }
}

/// Whether all ranks of a mesh say so.
pub(crate) fn all(mesh: &DeviceMesh, operation: &'static str, own: bool) -> Result<bool> {
    let every = |told: &[Vec<u8>]| vec![u8::from(told.iter().all(|bytes| bytes == &[1]))];
    Ok(everywhere(mesh, operation, vec![u8::from(own)], every)? == [1])
}

/// Whether all ranks of a mesh have the same bytes.
pub(crate) fn same(mesh: &DeviceMesh, operation: &'static str, own: &[u8]) -> Result<bool> {
    let same = |told: &[Vec<u8>]| vec![u8::from(told.iter().all(|bytes| *bytes == told[0]))];
    Ok(everywhere(mesh, operation, own.to_vec(), same)? == [1])
}

/// What follows from the bytes of all ranks, on all of them.
fn everywhere(
    mesh: &DeviceMesh,
    operation: &'static str,
    own: Vec<u8>,
    conclude: impl Fn(&[Vec<u8>]) -> Vec<u8>,
) -> Result<Vec<u8>> {
    if mesh.size() <= FEW {
        let all = gather(mesh, operation, 0..mesh.size(), &own)?;
        return Ok(conclude(&all));
    }
    let all = gather(mesh, operation, 0..1, &own)?;
    broadcast(mesh, operation, conclude(&all))
}

/// Which ranks may fail where [`agree`] is called.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fallible {
    First,
    All,
}

/// The value of the property that is compared; the rank that failed and why, or nothing.
type Told = (String, Option<(usize, String)>);

fn encode(told: &Told) -> Vec<u8> {
    serde_json::to_vec(told).expect("numbers and texts are JSON")
}

fn decode(bytes: &[u8]) -> Told {
    serde_json::from_slice(bytes).expect("what encode() wrote on another rank")
}

fn into_bytes(payload: Payload) -> Vec<u8> {
    match payload {
        Payload::Bytes(bytes) => bytes,
        Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
    }
}
