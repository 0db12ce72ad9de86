//! Reductions over ranks as operators with an adjoint.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use crate::comm::{Communicator, Operation, all_reduce, collectives};
use crate::dispatch::{cut, flattened, reshaped};
use crate::layout::ReduceOp;
use crate::operator::{BackwardPass, Operator, one};
use crate::{IndexBox, Result};
pub(crate) use buckets::{Leaf, aside, collect, scatter};
pub(crate) use scatter::ReduceScatter;
pub(crate) use substitutes::{Substitutes, parameter};

mod buckets;
mod scatter;
mod substitutes;

/// All-reduce as an operator, in its forward or its backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The communicator.
    pub comm: Arc<dyn Communicator>,
    /// The participating ranks of the world, the same on each of them.
    pub group: Arc<[usize]>,
    /// Whether values or gradients are reduced.
    pub pass: Pass,
    /// The parameter whose gradient is reduced, if it may be put into a bucket.
    pub leaf: Option<Arc<Leaf>>,
}

/// Pass in which a [`Reduce`] communicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Values are reduced. The gradient, equal on all ranks, passes unchanged to the terms of a
    /// sum; for other reductions, see [`ReduceScatter`].
    Forward(ReduceOp),
    /// Values pass unchanged; gradients are summed (`fan_out`).
    Backward,
}

impl Operator for Reduce {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        matches!(self.pass, Pass::Forward(op) if op != ReduceOp::Sum)
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [tensor] = one(inputs);
        Ok(match self.pass {
            Pass::Forward(op) => (self.all_reduce(tensor, &self.operation, op)?, ()),
            Pass::Backward => (tensor, ()),
        })
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        if let Pass::Forward(op) = self.pass {
            let gradient = match op {
                ReduceOp::Sum => pass.cotangent,
                op => self.gradient(op, pass.take_input(0), pass.cotangent)?,
            };
            return Ok(vec![Some(gradient)]);
        }
        let gradient = match &self.leaf {
            None => Some(pass.cotangent),
            Some(leaf) => buckets::put(leaf, &self.comm, pass.cotangent)?,
        };
        let sum = |gradient| self.all_reduce(gradient, &self.operation.backward(), ReduceOp::Sum);
        Ok(vec![gradient.map(sum).transpose()?])
    }
}

impl Reduce {
    fn all_reduce(
        &self,
        tensor: DispatchTensor,
        operation: &Operation,
        op: ReduceOp,
    ) -> Result<DispatchTensor> {
        let Self { comm, group, .. } = self;
        let shape = tensor.shape();
        let operation = operation.of(op, shape.num_elements(), tensor.dtype());
        collectives::agree(comm, group, &operation)?;
        let result = all_reduce::all_reduce(comm, group, &operation, op, flattened(tensor))?;
        Ok(reshaped(result, shape))
    }

    /// Computes the gradient of this rank's contribution. Each rank computes the gradients for a
    /// share of the elements, for which it receives all contributions, so that no rank holds the
    /// contributions to all elements.
    fn gradient(
        &self,
        op: ReduceOp,
        contribution: DispatchTensor,
        cotangent: DispatchTensor,
    ) -> Result<DispatchTensor> {
        let (shape, ranks) = (contribution.shape(), self.group.len());
        let bound = |place: usize| place * shape.num_elements() / ranks;
        let share = |place: usize| {
            let cells = bound(place)..bound(place + 1);
            IndexBox::new(Vec::from([cells]))
        };
        let shares = ReduceScatter {
            operation: self.operation.backward(),
            comm: self.comm.clone(),
            group: self.group.clone(),
            op,
            boxes: (0..ranks).map(share).collect(),
        };
        let (_, contributions) = shares.forward(vec![flattened(contribution)])?;
        let gradients = shares.backward(BackwardPass {
            inputs: Vec::new(),
            saved: &contributions,
            cotangent: cut(&flattened(cotangent), shares.own_box()),
            wanted: &[true],
        })?;
        let gradient = gradients.into_iter().flatten().next();
        Ok(reshaped(gradient.expect("one gradient"), shape))
    }
}
