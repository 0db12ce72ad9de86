//! Shared code of benches that exchange cells of two ranks.

use burn::backend::{DispatchTensor, TensorMetadata};
use halocline::core::Traffic;
use halocline::core::comm::{Batch, Expected, Operation, Payload};
use halocline::prelude::{Result, World};

/// Sends cells to another rank, and returns as many that it sends.
///
/// # Errors
/// Communication fails.
pub(crate) fn swap(world: &World, peer: usize, cells: DispatchTensor) -> Result<DispatchTensor> {
    let expected = Expected::Tensors {
        shapes: vec![cells.shape()],
        dtype: cells.dtype(),
        device: cells.device(),
    };
    let batch = Batch {
        operation: Operation::new("halo", Traffic::Exchange, None),
        sends: vec![(peer, Payload::Tensors(vec![cells]))],
        receives: vec![(peer, expected)],
    };
    let received = world.comm().clone().start(batch)?.finish()?;
    let Some(Payload::Tensors(mut cells)) = received.into_iter().next() else {
        unreachable!("tensors were asked for");
    };
    Ok(cells.remove(0))
}
