//! Extrema of the edges of each target.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Tensor, TensorData};
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{Error, ReduceOp, Result};

use crate::kernel::taken::{Places, add, take};
use crate::reduce::{holders, local_extremum};
use crate::reshape;

/// The largest or least value of the edges of each target; zero for a target without edges.
pub(super) fn extrema<const D: usize>(
    messages: Tensor<D>,
    dim: usize,
    targets: &[Range<usize>],
    op: ReduceOp,
) -> Tensor<D> {
    let extrema = Extrema::<D> {
        dim,
        of_edge: targets_of_edges(&messages, dim, targets),
        targets: targets.to_vec(),
        op,
    };
    Tensor::from_dispatch(apply(extrema, [messages.into_dispatch()]))
}

/// The target of each edge. A cell that stands for no edges belongs to the first.
pub(super) fn targets_of_edges<const D: usize>(
    messages: &Tensor<D>,
    dim: usize,
    targets: &[Range<usize>],
) -> Arc<Places> {
    let of_edge = targets.iter().enumerate();
    let of_edge = of_edge.flat_map(|(target, edges)| std::iter::repeat_n(target, edges.len()));
    let mut of_edge: Vec<usize> = of_edge.collect();
    of_edge.resize(messages.dims()[dim], 0);
    Places::new(of_edge)
}

#[derive(Debug)]
struct Extrema<const D: usize> {
    dim: usize,
    targets: Vec<Range<usize>>,
    of_edge: Arc<Places>,
    op: ReduceOp,
}

impl<const D: usize> Operator for Extrema<D> {
    /// The result.
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

    /// Edges with the same extreme value, and those that are not numbers, share the gradient.
    fn backward(
        &self,
        mut pass: BackwardPass<'_, DispatchTensor>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let x = Tensor::<D>::from_dispatch(pass.take_input(0));
        let y = Tensor::<D>::from_dispatch(pass.saved.clone());
        let cotangent = Tensor::<D>::from_dispatch(pass.cotangent);
        let gradient = Error::catch(|| {
            let (dim, of_edge, targets) = (self.dim, &self.of_edge, y.dims()[self.dim]);
            let is_holder = holders(&x, take(y, dim, of_edge));
            let counted = x.zeros_like().mask_fill(is_holder.clone(), 1.0);
            let counts = add(counted, dim, of_edge, targets).clamp_min(1.0);
            take(cotangent / counts, dim, of_edge).mask_fill(is_holder.bool_not(), 0.0)
        })?;
        Ok(vec![Some(gradient.into_dispatch())])
    }
}

impl<const D: usize> Extrema<D> {
    /// Takes the extrema of blocks of each target's edges, then of blocks of those, until one is left. Blocks are as wide as
    /// targets have edges on average, so that all of a level are at most twice as many cells as the edges.
    fn of(&self, mut x: Tensor<D>) -> Tensor<D> {
        let (dim, targets) = (self.dim, &self.targets);
        let mut shape = x.dims();
        let with_edges = targets.iter().filter(|edges| !edges.is_empty()).count();
        let width = shape[dim].div_ceil(with_edges.max(1)).max(2);
        let mut left = targets.clone();
        while left.iter().any(|cells| cells.len() > 1) {
            let starts = left.iter().flat_map(|cells| {
                cells
                    .clone()
                    .step_by(width)
                    .map(|start| (start, cells.end - 1))
            });
            // The last cell once more where a block is longer than what is left.
            let places = starts
                .flat_map(|(start, last)| (start..start + width).map(move |cell| cell.min(last)));
            let places: Vec<usize> = places.collect();
            let blocks = places.len() / width;
            let [outer, inner] =
                [&shape[..dim], &shape[dim + 1..]].map(|dims| dims.iter().product::<usize>());
            let all = take(x, dim, &Places::new(places));
            let all = reshape::<D, 4>(all, vec![outer, blocks, width, inner]);
            shape[dim] = blocks;
            x = reshape(local_extremum(all, &[2], self.op), shape.to_vec());
            let mut end = 0;
            for cells in &mut left {
                let start = end;
                end += cells.len().div_ceil(width);
                *cells = start..end;
            }
        }
        // Any cell for a target without edges, and for no targets.
        let last = shape[dim] - 1;
        let mut cells: Vec<usize> = left.iter().map(|cells| cells.start.min(last)).collect();
        let mut alone: Vec<bool> = left.iter().map(Range::is_empty).collect();
        let count = targets.len().max(1);
        cells.resize(count, 0);
        alone.resize(count, true);
        let x = take(x, dim, &Places::new(cells));
        let mut flags = [1; D];
        flags[dim] = count;
        let alone = Tensor::<D, Bool>::from_data(TensorData::new(alone, flags), &x.device());
        let shape = x.dims();
        x.mask_fill(alone.expand(shape), 0.0)
    }
}
