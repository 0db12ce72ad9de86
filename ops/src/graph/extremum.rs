//! Extrema over the edges of each target.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Tensor, TensorData};
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{Error, ReduceOp, Result};

use super::part::Part;
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
        let y = Error::catch(|| self.of(x))?.into_dispatch();
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
        let gradient = Error::catch(|| {
            let (dim, of_edge, targets) = (self.dim, self.part.of_edge(), y.dims()[self.dim]);
            let is_holder = holders(&x, take(y, dim, of_edge));
            let counted = x.zeros_like().mask_fill(is_holder.clone(), 1.0);
            let counts = add(counted, dim, of_edge, targets).clamp_min(1.0);
            take(cotangent / counts, dim, of_edge).mask_fill(is_holder.bool_not(), 0.0)
        })?;
        Ok(vec![Some(gradient.into_dispatch())])
    }
}

impl<const D: usize> Extrema<D> {
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
        flags[dim] = blocks.alone.len();
        let alone = TensorData::new(blocks.alone.clone(), flags);
        let alone = Tensor::<D, Bool>::from_data(alone, &x.device());
        let shape = x.dims();
        x.mask_fill(alone.expand(shape), 0.0)
    }
}
