//! Softmax over the edges of each target.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{ReduceOp, Result};

use super::extremum::extrema;
use super::part::Part;
use crate::kernel::flex::{self, with_float};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::kernel::taken::{add, take};
use crate::softmax::{backward_of_ranges, forward_of_ranges};

/// Computes the softmax over the edges of each target, in the dtype of the scores.
pub(super) fn softmax<const D: usize>(
    scores: Tensor<D>,
    dim: usize,
    part: &Arc<Part>,
) -> Tensor<D> {
    if !flex::runs_on(&scores.device()) {
        return composed(scores, dim, part);
    }
    let part = part.clone();
    Tensor::from_dispatch(apply(Softmax { dim, part }, [scores.into_dispatch()]))
}

fn composed<const D: usize>(scores: Tensor<D>, dim: usize, part: &Arc<Part>) -> Tensor<D> {
    let of_edge = part.of_edge();
    let largest = extrema(scores.clone().inner(), dim, part, ReduceOp::Max);
    let shares = (scores - take(largest, dim, of_edge)).exp();
    let sums = add(shares.clone(), dim, of_edge, part.len());
    shares / take(sums, dim, of_edge)
}

#[derive(Debug)]
struct Softmax {
    dim: usize,
    part: Arc<Part>,
}

impl Operator for Softmax {
    /// Saved result.
    type Saved = DispatchTensor;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["softmax of edges", "softmax of edges (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, DispatchTensor)> {
        let x = inputs.remove(0);
        let (dtype, shape) = (x.dtype(), x.shape().to_vec());
        let lines = Lines::along(&shape, self.dim..self.dim + 1);
        let y = with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let x = flex::elements::<E>(&x);
            let y = forward_of_ranges(Isa::chosen()?, lines, self.part.ranges(), x);
            flex::result(y, &shape, dtype)
        });
        Ok((y.clone(), y))
    }

    fn backward(
        &self,
        pass: BackwardPass<'_, DispatchTensor>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let (y, cotangent) = (pass.saved.clone(), pass.cotangent);
        let (dtype, shape) = (y.dtype(), y.shape().to_vec());
        let lines = Lines::along(&shape, self.dim..self.dim + 1);
        let gradient = with_float!(dtype, E => {
            let (y, cotangent) = (flex::operand::<E>(y)?, flex::operand::<E>(cotangent)?);
            let both = [flex::elements::<E>(&y), flex::elements::<E>(&cotangent)];
            let gradient = backward_of_ranges(Isa::chosen()?, lines, self.part.ranges(), both);
            flex::result(gradient, &shape, dtype)
        });
        Ok(vec![Some(gradient)])
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::testing::{compare, random};

    /// Targets with any numbers of edges.
    #[test]
    fn kernels_and_burns_operators_agree() {
        let part = Arc::new(Part::new(vec![0..3, 3..3, 3..4, 4..30, 30..31]));
        for (dim, shape) in [(0, [31, 7, 2]), (1, [3, 31, 70]), (2, [2, 3, 31])] {
            let run = |softmax: fn(Tensor<3>, usize, &Arc<Part>) -> Tensor<3>| -> Vec<TensorData> {
                let x = random::<3>(shape, "x", 0).detach().require_grad();
                let y = softmax(x.clone() * 5.0, dim, &part);
                let weight = random::<3>(shape, "y", 0).detach();
                let gradients = (y.clone() * weight).sum().backward();
                [y.inner(), x.grad(&gradients).expect("a gradient")]
                    .map(Tensor::into_data)
                    .into()
            };
            let place = format!("dim {dim}");
            compare(&run(softmax::<3>), &run(composed::<3>), 5e-6, &place);
        }
    }
}
