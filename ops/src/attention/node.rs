//! Neighborhood attention as an operator with an adjoint: exchange and kernels in one node of the graph.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::ops::{self, BackwardPass, Operator};
use halocline_core::{Exchange, Result};

use super::engine::tiles::Dim;
use crate::kernel::flex::with_float;

/// Neighborhood attention on one rank.
#[derive(Clone, Debug)]
pub(crate) struct NeighborhoodRun {
    pub dims: [Dim; 3],
    /// How keys and values that queries reach come here; `None` if they are the shard.
    pub exchange: Option<Exchange>,
    /// Elements of a head of queries and keys, and of values.
    pub widths: [usize; 2],
    pub scale: f64,
}

/// What the backward pass needs beside queries, keys and values.
pub(crate) struct Saved {
    /// Boxes of keys and values that came from other ranks, in the plan's order.
    pub received: Vec<DispatchTensor>,
    pub output: DispatchTensor,
    /// The logarithm of the sum of exponentials of every query and head.
    pub lse: DispatchTensor,
}

/// Attention of this rank's queries.
pub(crate) fn attention<const D: usize>(
    q: Tensor<D>,
    k: Tensor<D>,
    v: Tensor<D>,
    run: NeighborhoodRun,
) -> Tensor<D> {
    let inputs = [q, k, v].map(Tensor::into_dispatch);
    Tensor::from_dispatch(ops::apply(run, inputs))
}

impl Operator for NeighborhoodRun {
    type Saved = Saved;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["attention", "attention (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Saved)> {
        let dtype = inputs[0].dtype();
        with_float!(dtype, E => self.forward_as::<E>(inputs, dtype))
    }

    fn backward(&self, pass: BackwardPass<'_, Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let dtype = pass.cotangent.dtype();
        with_float!(dtype, E => self.backward_as::<E>(pass, dtype))
    }
}
