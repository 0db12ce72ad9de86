//! What one rank of a mesh knows, on all its ranks.

use halocline_core::{Batch, DeviceMesh, Error, Expected, Operation, Payload, Result, Traffic};

/// Bytes that the first rank of the mesh has.
pub(crate) fn broadcast(
    mesh: &DeviceMesh,
    operation: &'static str,
    bytes: Vec<u8>,
) -> Result<Vec<u8>> {
    mesh.broadcast_bytes(operation, mesh.shape().ranks()[0], Some(bytes))
}

/// Bytes of every rank of the mesh, on the first one; nothing on the others.
fn gather(mesh: &DeviceMesh, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let comm = mesh.comm();
    let (root, others) = mesh
        .shape()
        .ranks()
        .split_first()
        .expect("a mesh has a rank");
    let is_root = comm.rank() == *root;
    let received = comm
        .clone()
        .start(Batch {
            operation: Operation::new(operation, Traffic::Control, None),
            sends: if is_root {
                Vec::new()
            } else {
                vec![(*root, Payload::Bytes(bytes.clone()))]
            },
            receives: others
                .iter()
                .filter(|_| is_root)
                .map(|&rank| (rank, Expected::Bytes))
                .collect(),
        })?
        .finish()?;
    let own = is_root.then_some(bytes);
    Ok(own
        .into_iter()
        .chain(received.into_iter().map(into_bytes))
        .collect())
}

/// Gives all ranks of a mesh the same end: this rank's value if every rank has one, else the error of the first rank
/// that failed. A rank that cannot fail says so, and nothing is asked of it.
pub(crate) fn agree<T>(
    mesh: &DeviceMesh,
    operation: &'static str,
    who: Fallible,
    own: std::result::Result<T, crate::Error>,
) -> Result<T> {
    let rank = mesh.comm().rank();
    let verdict: Verdict = own.as_ref().err().map(|error| (rank, error.to_string()));
    let verdict = match who {
        Fallible::First => verdict,
        Fallible::All => gather(mesh, operation, encode(&verdict))?
            .iter()
            .find_map(|bytes| decode(bytes)),
    };
    match (decode(&broadcast(mesh, operation, encode(&verdict))?), own) {
        (None, own) => Ok(own?),
        (Some((failed, _)), Err(error)) if failed == rank => Err(error.into()),
        (Some((rank, cause)), _) => Err(Error::Rank { rank, cause }),
    }
}

/// Which ranks may fail where [`agree`] is called.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fallible {
    First,
    All,
}

/// The rank that failed and why, or nothing.
type Verdict = Option<(usize, String)>;

fn encode(verdict: &Verdict) -> Vec<u8> {
    serde_json::to_vec(verdict).expect("a number and a text are JSON")
}

fn decode(bytes: &[u8]) -> Verdict {
    serde_json::from_slice(bytes).expect("what encode() wrote on another rank")
}

fn into_bytes(payload: Payload) -> Vec<u8> {
    match payload {
        Payload::Bytes(bytes) => bytes,
        Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
    }
}
