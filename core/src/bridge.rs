//! Exchange and reduction as operators with adjoints.
//!
//! All communication that gradients flow through is one of these two, or part of an operator whose kernels need it in
//! between.

use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use crate::Result;
use crate::buckets::{self, Leaf};
use crate::comm::{Communicator, Operation, collectives, sums};
use crate::node::{BackwardPass, Operator};
use crate::plan::ExchangePlan;

/// Which way a plan is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Owners' cells go where they are needed.
    Forward,
    /// What lies where cells are needed goes back to the owners, who add: the adjoint.
    Reverse,
}

/// One run of a plan.
#[derive(Clone, Debug)]
pub struct Move {
    /// The plan of this rank.
    pub plan: Arc<ExchangePlan>,
    /// Which way it is run.
    pub direction: Direction,
}

/// An exchange as an operator: what moves forward, and what moves backward.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The way to the other ranks.
    pub comm: Arc<dyn Communicator>,
    /// The ranks of the world, by mesh position.
    pub ranks: Arc<[usize]>,
    /// The forward pass.
    pub forward: Move,
    /// The backward pass.
    pub backward: Move,
}

impl Exchange {
    /// An exchange whose backward pass is the adjoint of its forward pass.
    pub fn with_adjoint(
        operation: Operation,
        comm: Arc<dyn Communicator>,
        ranks: Arc<[usize]>,
        plan: Arc<ExchangePlan>,
    ) -> Self {
        let to = |direction| Move {
            plan: plan.clone(),
            direction,
        };
        Self {
            operation,
            comm,
            ranks,
            forward: to(Direction::Forward),
            backward: to(Direction::Reverse),
        }
    }

    /// The exchange that is this one's gradient.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            operation: self.operation.backward(),
            forward: self.backward,
            backward: self.forward,
            ..self
        }
    }
}

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

impl Operator for Exchange {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [tensor] = one(inputs);
        let received = self.send_all(&tensor)?.finish()?;
        Ok((self.assemble(tensor, received), ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let (gradient, ()) = self.clone().reversed().forward(vec![pass.cotangent])?;
        Ok(vec![Some(gradient)])
    }
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
        let Some(gradient) = buckets::put(self, pass.cotangent)? else {
            return Ok(vec![None]);
        };
        Ok(vec![Some(match self.pass {
            Pass::Forward => gradient,
            Pass::Backward => self.all_reduce(gradient, &self.operation.backward())?,
        })])
    }
}

/// The input of an operator that has one.
fn one(inputs: Vec<DispatchTensor>) -> [DispatchTensor; 1] {
    inputs.try_into().expect("an operator of one input")
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

/// A tensor of any backend in another shape.
pub(crate) fn reshaped(tensor: DispatchTensor, shape: Shape) -> DispatchTensor {
    if tensor.shape() == shape {
        return tensor;
    }
    Dispatch::float_reshape(tensor, shape)
}
