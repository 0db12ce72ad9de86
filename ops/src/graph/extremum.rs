//! Extrema over the edges of each target.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{Error, ReduceOp, Result};

use super::part::Part;
use super::peaks;
use crate::kernel::flex::{self, with_float};
use crate::kernel::lines::Lines;
use crate::kernel::taken::{add, take};
use crate::reduce::{holders, local_extremum};
use crate::reshape;

/// Maximum or minimum over the edges of each target; zero for a target without edges.
pub(super) fn extrema<const D: usize>(
    messages: Tensor<D>,
    dim: usize,
    part: &Arc<Part>,
    op: ReduceOp,
) -> Tensor<D> {
    let part = part.clone();
    Tensor::from_dispatch(apply(
        Extrema::<D> { dim, part, op },
        [messages.into_dispatch()],
    ))
}

#[derive(Debug)]
struct Extrema<const D: usize> {
    dim: usize,
    part: Arc<Part>,
    op: ReduceOp,
}

impl<const D: usize> Operator for Extrema<D> {
    /// Saved result.
    type Saved = DispatchTensor;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["extrema of edges", "extrema of edges (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, DispatchTensor)> {
        let x = Tensor::<D>::from_dispatch(inputs.remove(0));
        let y = if flex::runs_on(&x.device()) {
            self.by_kernel(x)?
        } else {
            Error::catch(|| self.of(x))?.into_dispatch()
        };
        Ok((y.clone(), y))
    }

    /// Splits the gradient evenly among edges that attain the extreme value, NaNs included.
    fn backward(
        &self,
        mut pass: BackwardPass<'_, DispatchTensor>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let x = Tensor::<D>::from_dispatch(pass.take_input(0));
        let y = Tensor::<D>::from_dispatch(pass.saved.clone());
        let cotangent = Tensor::<D>::from_dispatch(pass.cotangent);
        let gradient = if flex::runs_on(&x.device()) {
            self.gradient_by_kernel(x, [y, cotangent])?
        } else {
            Error::catch(|| self.gradient(x, [y, cotangent]))?.into_dispatch()
        };
        Ok(vec![Some(gradient)])
    }
}

impl<const D: usize> Extrema<D> {
    fn by_kernel(&self, x: Tensor<D>) -> Result<DispatchTensor> {
        let (mut shape, dtype) = (x.dims(), x.dtype());
        let lines = Lines::along(&shape, self.dim..self.dim + 1);
        shape[self.dim] = self.part.len();
        Ok(with_float!(dtype, E => {
            let x = flex::operand::<E>(x.into_dispatch())?;
            let least = self.op == ReduceOp::Min;
            let y = peaks::forward(lines, flex::elements::<E>(&x), &self.part, least);
            flex::result(y, &shape, dtype)
        }))
    }

    fn gradient_by_kernel(
        &self,
        x: Tensor<D>,
        by_target: [Tensor<D>; 2],
    ) -> Result<DispatchTensor> {
        let (shape, dtype) = (x.dims(), x.dtype());
        let lines = Lines::along(&shape, self.dim..self.dim + 1);
        Ok(with_float!(dtype, E => {
            let x = flex::operand::<E>(x.into_dispatch())?;
            let [y, cotangent] = by_target.map(|x| flex::operand::<E>(x.into_dispatch()));
            let (y, cotangent) = (y?, cotangent?);
            let by_target = [flex::elements::<E>(&y), flex::elements::<E>(&cotangent)];
            let gradient = peaks::backward(lines, flex::elements::<E>(&x), &self.part, by_target);
            flex::result(gradient, &shape, dtype)
        }))
    }

    fn gradient(&self, x: Tensor<D>, [y, cotangent]: [Tensor<D>; 2]) -> Tensor<D> {
        let (dim, of_edge) = (self.dim, self.part.of_edge());
        let is_holder = holders(&x, take(y, dim, of_edge));
        let counted = x.zeros_like().mask_fill(is_holder.clone(), 1.0);
        let counts = add(counted, dim, of_edge, self.part.len()).clamp_min(1.0);
        take(cotangent / counts, dim, of_edge).mask_fill(is_holder.bool_not(), 0.0)
    }

    /// Reduces blocks of each target's edges, then blocks of the results, until one is left.
    fn of(&self, mut x: Tensor<D>) -> Tensor<D> {
        let (dim, blocks) = (self.dim, self.part.blocks());
        let mut shape = x.dims();
        for places in &blocks.levels {
            shape[dim] = places.cells().len() / blocks.width;
            let [outer, inner] =
                [&shape[..dim], &shape[dim + 1..]].map(|dims| dims.iter().product::<usize>());
            let all = take(x, dim, places);
            let all = reshape::<D, 4>(all, vec![outer, shape[dim], blocks.width, inner]);
            x = reshape(local_extremum(all, &[2], self.op), shape.to_vec());
        }
        let x = take(x, dim, &blocks.left);
        let mut flags = [1; D];
        flags[dim] = self.part.len();
        let counts = self.part.counts(&x.device()).reshape::<D, _>(flags);
        let alone = counts.equal_elem(0);
        let shape = x.dims();
        x.mask_fill(alone.expand(shape), 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{compare, random};

    /// Targets with any numbers of edges, among them edges of equal value.
    #[test]
    fn kernels_and_burns_operators_agree() {
        let part = Arc::new(Part::new(vec![0..3, 3..3, 3..4, 4..30, 30..31]));
        for (dim, shape) in [(0, [31, 7, 2]), (1, [3, 31, 5]), (2, [2, 3, 31])] {
            let x = random::<3>(shape, "x", 0).inner().clamp(-0.8, 0.8);
            let mut of_targets = shape;
            of_targets[dim] = part.len();
            let cotangent = random::<3>(of_targets, "y", 0).inner();
            for op in [ReduceOp::Max, ReduceOp::Min] {
                let part = part.clone();
                let extrema = Extrema::<3> { dim, part, op };
                let y = extrema.of(x.clone());
                let by_target = [y.clone(), cotangent.clone()];
                let ours = extrema.gradient_by_kernel(x.clone(), by_target.clone());
                let found = [extrema.by_kernel(x.clone()), ours];
                let found = found.map(|x| Tensor::<3>::from_dispatch(x.unwrap()).into_data());
                let expected = [y, extrema.gradient(x.clone(), by_target)].map(Tensor::into_data);
                compare(&found, &expected, 1e-6, &format!("{op:?} along dim {dim}"));
            }
        }
    }
}
