//! Neighborhood attention as an operator with an adjoint: exchange and kernels in one node of the
//! graph.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::Result;
use halocline_core::ops::{self, BackwardPass, Operator};

use super::run::{NeighborhoodRun, Saved};
use crate::kernel::flex::with_float;

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
        let dtype = pass.saved.output.dtype();
        with_float!(dtype, E => self.backward_as::<E>(pass, dtype))
    }
}
