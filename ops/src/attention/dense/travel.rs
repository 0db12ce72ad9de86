//! Messages of parts of keys and values, and of their gradients, round the ring.

use std::sync::Arc;

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};
use halocline_core::Result;
use halocline_core::comm::{Batch, Communicator, Expected, InFlight, Operation, Payload};

use super::ring::{Ring, Way};

/// Messages of one pass.
#[derive(Clone, Debug)]
pub(super) struct Travel {
    pub operation: Operation,
    pub comm: Arc<dyn Communicator>,
}

/// Shape of the tensors of a part, except for the number of its tokens.
#[derive(Clone, Debug)]
pub(super) struct Form {
    shape: Shape,
    /// The dim of tokens.
    dim: usize,
    dtype: DType,
    device: DispatchDevice,
}

impl Form {
    /// Form of the tensors that correspond to this one in other parts.
    pub(super) fn of(tensor: &DispatchTensor, dim: usize) -> Self {
        Self {
            shape: tensor.shape(),
            dim,
            dtype: tensor.dtype(),
            device: tensor.device(),
        }
    }

    /// The same form with another dtype.
    pub(super) fn cast(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    fn shape(&self, tokens: usize) -> Shape {
        let mut shape = self.shape.to_vec();
        shape[self.dim] = tokens;
        shape.into()
    }
}

impl Travel {
    /// Messages of the backward pass.
    pub(super) fn backward(&self) -> Self {
        Self {
            operation: self.operation.backward(),
            comm: self.comm.clone(),
        }
    }

    /// Sends the tensors of one part and receives those of another. Tensors of the same dtype
    /// share a message.
    pub(super) fn start(
        &self,
        ring: &Ring,
        way: Way,
        tensors: &[DispatchTensor],
        forms: &[Form],
    ) -> Result<Option<InFlight>> {
        let sends = way.to.map(|to| {
            let alike = tensors.chunk_by(|one, other| one.dtype() == other.dtype());
            alike.map(move |alike| (ring.ranks[to], Payload::Tensors(alike.to_vec())))
        });
        let tokens = ring.parts[way.part].len();
        let receives = way.from.map(|from| {
            let alike = forms.chunk_by(|one, other| one.dtype == other.dtype);
            alike.map(move |alike| {
                let expected = Expected::Tensors {
                    shapes: alike.iter().map(|form| form.shape(tokens)).collect(),
                    dtype: alike[0].dtype,
                    device: alike[0].device.clone(),
                };
                (ring.ranks[from], expected)
            })
        });
        let batch = Batch {
            operation: self.operation.clone(),
            sends: sends.into_iter().flatten().collect(),
            receives: receives.into_iter().flatten().collect(),
        };
        if batch.sends.is_empty() && batch.receives.is_empty() {
            return Ok(None);
        }
        let in_flight = self.comm.clone().start(batch)?;
        in_flight.in_background();
        Ok(Some(in_flight))
    }
}

/// Tensors of a batch that has arrived; none if it had none.
pub(super) fn finish(in_flight: Option<InFlight>) -> Result<Vec<DispatchTensor>> {
    let payloads = in_flight.map_or(Ok(Vec::new()), InFlight::finish)?;
    let tensors = payloads.into_iter().flat_map(|payload| match payload {
        Payload::Tensors(tensors) => tensors,
        Payload::Bytes(_) => unreachable!("an engine gives what was expected"),
    });
    Ok(tensors.collect())
}
