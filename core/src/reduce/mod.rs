//! Sums over ranks as an operator with an adjoint.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use crate::Result;
use crate::comm::{Communicator, Operation, collectives, sums};
use crate::dispatch::reshaped;
use crate::operator::{BackwardPass, Operator, one};
pub(crate) use buckets::{Leaf, collect};

mod buckets;

/// A reduction as an operator: what is reduced forward, and what backward.
#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The way to the other ranks.
    pub comm: Arc<dyn Communicator>,
    /// The ranks of the world that take part, the same on each of them.
    pub group: Arc<[usize]>,
    /// Whether the values, or the gradients, are summed.
    pub pass: Pass,
    /// The parameter that is reduced, if its gradient may be put into a bucket.
    pub leaf: Option<Arc<Leaf>>,
}

/// In which pass a [`Reduce`] sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Values are summed; the gradient, equal on all ranks, passes as it is.
    Forward,
    /// Values pass as they are; gradients are summed (`fan_out`).
    Backward,
}

impl Operator for Reduce {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [tensor] = one(inputs);
        Ok(match self.pass {
            Pass::Forward => (self.all_reduce(tensor, &self.operation)?, ()),
            Pass::Backward => (tensor, ()),
        })
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = match &self.leaf {
            None => Some(pass.cotangent),
            Some(leaf) => buckets::put(leaf, &self.comm, pass.cotangent)?,
        };
        let Some(gradient) = gradient else {
            return Ok(vec![None]);
        };
        Ok(vec![Some(match self.pass {
            Pass::Forward => gradient,
            Pass::Backward => self.all_reduce(gradient, &self.operation.backward())?,
        })])
    }
}

impl Reduce {
    fn all_reduce(&self, tensor: DispatchTensor, operation: &Operation) -> Result<DispatchTensor> {
        let Self { comm, group, .. } = self;
        let shape = tensor.shape();
        let elements = shape.num_elements();
        let operation = operation.of(elements, tensor.dtype());
        collectives::agree(comm, group, &operation)?;
        let flat = reshaped(tensor, Shape::from([elements]));
        let sum = sums::all_reduce_sum(comm, group, &operation, flat)?;
        Ok(reshaped(sum, shape))
    }
}
