//! Split and chunk: consecutive ranges of a dim.
//!
//! # Placement
//! As for [`narrow`](fn@super::narrow): all dims may be sharded, ranks keep their cells, and
//! nothing is sent. A part of a sharded dim stays on the ranks that held its cells;
//! [`align_to`](super::align_to) and `redistribute` move it to others.
//!
//! # Adjoint
//! The concatenated cotangents of the parts, with zeros for parts that the loss does not depend on.
//! They are written to one tensor, so only one backward pass may go through the parts of a split.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply, blank, of_boxes};
use halocline_core::{Error, IndexBox, Result, ShardTensor};

use super::cat::cat;
use super::narrow::{cells, part_layout};
use crate::driver::place::{part_ranges, require_dim};
use crate::golden::{Golden, Output, output, with_dims};

/// Splits a dim into parts of these sizes.
///
/// # Errors
/// A dim that does not exist; sizes that are zero, or do not sum to that of the dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::split_with_sizes;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0, 3.0]));
/// let parts = split_with_sizes(x, &[1, 2], 0)?;
/// parts[1].local().to_data().assert_eq(&[2.0_f32, 3.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn split_with_sizes<const D: usize>(
    x: ShardTensor<D>,
    sizes: &[usize],
    dim: usize,
) -> Result<Vec<ShardTensor<D>>> {
    require_dim("split_with_sizes", &x, dim)?;
    if sizes.contains(&0) || sizes.iter().sum::<usize>() != x.dims()[dim] {
        let message = format!("parts of {sizes:?} of dim {dim} of {:?}", x.dims());
        return Err(Error::operator("split_with_sizes", message));
    }
    if sizes.len() == 1 {
        return Ok(vec![x]);
    }
    let layouts = part_ranges(sizes).map(|range| part_layout(x.layout(), dim, &range));
    let extents = layouts.map(|part| part.extents(dim).to_vec()).collect();
    Ok(parts(x, dim, extents))
}

/// Takes parts of a dim with these extents on all ranks; in the shard of every rank, each begins
/// where the one before it ends.
pub(super) fn parts<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    extents: Vec<Vec<usize>>,
) -> Vec<ShardTensor<D>> {
    let (local, layout, mesh) = x.into_parts();
    let own = layout.part(dim, mesh.position());
    let gradients = Gradients::default();
    let whole = apply(Whole(gradients.clone()), [local.into_dispatch()]);
    let shard = layout.local_shape(mesh.position());
    let mut start = 0;
    let parts = extents.into_iter().map(|extents| {
        let cells = start..start + extents[own];
        start = cells.end;
        let place = IndexBox::whole(&shard).with_range(dim, cells);
        let layout = layout.resized(dim, extents);
        let local = apply(Part(gradients.clone(), place), [whole.clone()]);
        ShardTensor::from_parts(Tensor::from_dispatch(local), layout, mesh.clone())
    });
    parts.collect()
}

/// Gradients of the parts with their boxes, collected until the gradient of the whole is assembled.
#[derive(Clone, Debug, Default)]
struct Gradients(Arc<Mutex<Vec<(IndexBox, DispatchTensor)>>>);

impl Gradients {
    /// Adds a gradient; returns whether it is the first.
    fn put(&self, place: IndexBox, gradient: DispatchTensor) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((place, gradient));
        all.len() == 1
    }

    fn take(&self) -> Vec<(IndexBox, DispatchTensor)> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Tensor that is used in parts.
#[derive(Debug)]
struct Whole(Gradients);

impl Operator for Whole {
    type Saved = Shape;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        let shape = inputs[0].shape();
        Ok((inputs.remove(0), shape))
    }

    /// The cotangent is the zeros of the first part; parts that the loss does not depend on
    /// contribute no gradient.
    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = of_boxes(&pass.cotangent, pass.saved, Some(0.0), &self.0.take());
        Ok(vec![Some(gradient)])
    }
}

/// Box of a [`Whole`].
#[derive(Debug)]
struct Part(Gradients, IndexBox);

impl Operator for Part {
    type Saved = Shape;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        let (x, Self(_, place)) = (&inputs[0], self);
        Ok((cells(x, place), x.shape()))
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let (gradient, shape) = (pass.cotangent, pass.saved);
        let zeros = if shape.contains(&0) {
            blank(&gradient, shape, Some(0.0))
        } else {
            // A view of a single number.
            let one = blank(&gradient, &vec![1; shape.len()], Some(0.0));
            Dispatch::float_expand(one, shape.clone())
        };
        let first = self.0.put(self.1.clone(), gradient);
        Ok(vec![first.then_some(zeros)])
    }
}

/// Splits a dim into at most `count` parts of equal size, the last of which may be shorter, like
/// PyTorch's `chunk`.
///
/// # Errors
/// A dim that does not exist or has no cells; a count of zero.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::chunk;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0, 3.0]));
/// let parts = chunk(x, 2, 0)?;
/// assert_eq!((parts[0].dims(), parts[1].dims()), ([2], [1]));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn chunk<const D: usize>(
    x: ShardTensor<D>,
    count: usize,
    dim: usize,
) -> Result<Vec<ShardTensor<D>>> {
    require_dim("chunk", &x, dim)?;
    let size = x.dims()[dim];
    if count == 0 || size == 0 {
        let message = format!("{count} parts of dim {dim} of {:?}", x.dims());
        return Err(Error::operator("chunk", message));
    }
    let most = size.div_ceil(count);
    let starts = (0..size).step_by(most);
    let sizes: Vec<usize> = starts.map(|start| most.min(size - start)).collect();
    split_with_sizes(x, &sizes, dim)
}

/// Registry entries of `split_with_sizes` and `chunk`; the parts are joined again in reverse order.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("split", |case| {
        let sizes = case.attributes.list("sizes");
        let dim = case.attributes.place_or("dim", case.dims(), 0);
        with_dims!(case.dims(), D => {
            joined(split_with_sizes(case.input::<D>(0)?, &sizes, dim)?, dim)
        })
    })
    .with_method("split_with_sizes"),
    Golden::new("chunk", |case| {
        let count = case.attributes.list("chunks").first().copied().unwrap_or(0);
        let dim = case.attributes.place_or("dim", case.dims(), 0);
        with_dims!(case.dims(), D => {
            joined(chunk(case.input::<D>(0)?, count, dim)?, dim)
        })
    }),
];

fn joined<const D: usize>(mut parts: Vec<ShardTensor<D>>, dim: usize) -> Result<Box<dyn Output>> {
    parts.reverse();
    output(cat(parts, dim))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    /// Uses one of three parts twice, and one never.
    struct Parts(usize);

    impl Operator<3, 3> for Parts {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            let x = inputs.remove(0);
            let size = x.dims()[self.0];
            let parts = x.split_with_sizes(&[2, 1, size - 3], self.0);
            let [first, second] = [&parts[0], &parts[1]];
            first.clone() * first.clone() + second.clone()
        }
    }

    #[test]
    fn parts_may_be_used_twice_or_never() {
        for dim in 0..3 {
            let others: Vec<usize> = (0..3).filter(|other| *other != dim).collect();
            check_op(&Parts(dim), &[[4, 5, 7]], &[], &others, 1e-6);
        }
    }
}
