//! Slice: a range of a dim with a step.
//!
//! `y[i] = x[start + i · step]`. Semantics follow PyTorch's `x[start:end:step]`.
//!
//! # Placement
//! All dims may be sharded; each rank keeps its own cells, and nothing is sent.
//!
//! # Adjoint
//! The cotangent at the cells of the slice, zero elsewhere.

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::kind::{Basic, Kind};
use burn::tensor::{Device, Shape, Slice, Tensor};
use halocline_core::ops::{self, BackwardPass, Operator, Recompute, blank};
use halocline_core::{Error, Result, ShardTensor};

use super::narrow::narrow;
use crate::driver::place::{extents_by, require_dim};
use crate::driver::strides::row_major;
use crate::golden::{Golden, output, with_dims};
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lines::Lines;

const NAME: &str = "slice_dim";

/// Takes every `step`-th cell of a range of a dim.
///
/// # Errors
/// A dim that does not exist; a step of zero; a range that is empty or exceeds the dim.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::slice_dim;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([7], &mesh, &[Shard(0)])?; // cells 0 to 3 and 4 to 6
///     let y = slice_dim(x, 0, 1..7, 2)?; // cells 1, 3 and 5
///     assert_eq!(y.layout().extents(0), [2, 1]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn slice_dim<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    range: Range<usize>,
    step: usize,
) -> Result<ShardTensor<D, K>> {
    require_dim(NAME, &x, dim)?;
    if step == 0 || range.is_empty() || range.end > x.dims()[dim] {
        let message = format!(
            "{range:?} in steps of {step} of dim {dim} of {:?}",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    if step == 1 {
        return narrow(x, dim, range.start, range.len());
    }
    let (local, layout, mesh) = x.into_parts();
    // Number of cells of the slice before a cell of the dim.
    let before = |cell: usize| (cell.clamp(range.start, range.end) - range.start).div_ceil(step);
    let output = layout.resized(dim, extents_by(layout.extents(dim), before));
    let cells = layout.local_box(mesh.position()).ranges()[dim].clone();
    let cut = Strided {
        dim,
        first: (range.start + before(cells.start) * step).saturating_sub(cells.start),
        step,
        shape: output.local_shape(mesh.position()),
    };
    let local: Tensor<D, K> = match K::KIND {
        Kind::Float => Tensor::from_dispatch(ops::apply(cut, [local.into_dispatch()])),
        _ if cut.shape.contains(&0) => Tensor::empty(cut.shape, (&local.device(), local.dtype())),
        _ => local.slice(&cut.slices()),
    };
    Ok(ShardTensor::from_parts(local, output, mesh))
}

/// Equidistant cells of a shard along one dim. burn's slice would drop out of the graph on a rank
/// without cells.
#[derive(Debug)]
struct Strided {
    dim: usize,
    first: usize,
    step: usize,
    /// Shape of the result.
    shape: Vec<usize>,
}

impl Strided {
    fn slices(&self) -> Vec<Slice> {
        let along = |(dim, &size): (usize, &usize)| {
            if dim == self.dim {
                let end = self.first + (size - 1) * self.step + 1;
                Slice::new(self.first as isize, Some(end as isize), self.step as isize)
            } else {
                Slice::from(0..size)
            }
        };
        self.shape.iter().enumerate().map(along).collect()
    }

    /// Computes the gradient: the cotangent at the cells of the slice of a shard of `shape`, zero
    /// elsewhere.
    fn spread<E: Float>(&self, shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        let Lines { cells, inner, .. } = Lines::along(shape, self.dim..self.dim + 1);
        let taken = self.shape[self.dim];
        let len = shape.iter().product();
        buffer::scattered(len, cells * inner, |outer, gradient: &mut [E]| {
            let cotangent = &cotangent[outer * taken * inner..][..taken * inner];
            if inner == 1 {
                let places = gradient[self.first..].iter_mut().step_by(self.step);
                places
                    .zip(cotangent)
                    .for_each(|(place, cell)| *place = *cell);
                return;
            }
            let places = gradient[self.first * inner..].chunks_mut(inner);
            let rows = places.step_by(self.step).zip(cotangent.chunks_exact(inner));
            for (place, row) in rows {
                place.copy_from_slice(row);
            }
        })
    }
}

impl Operator for Strided {
    /// Shape of the input.
    type Saved = Shape;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        let x = inputs.remove(0);
        let shape = x.shape();
        Ok(if self.shape.contains(&0) {
            (blank(&x, &self.shape, None), shape)
        } else {
            let cells = Dispatch::float_slice(x, &self.slices());
            (row_major(cells), shape)
        })
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let (cotangent, shape) = (pass.cotangent, pass.saved);
        if self.shape.contains(&0) {
            return Ok(vec![Some(blank(&cotangent, shape, Some(0.0)))]);
        }
        if !flex::runs_on(&Device::new(cotangent.device())) {
            let zeros = blank(&cotangent, shape, Some(0.0));
            let gradient = Dispatch::float_slice_assign(zeros, &self.slices(), cotangent);
            return Ok(vec![Some(gradient)]);
        }
        let dtype = cotangent.dtype();
        Ok(vec![Some(with_float!(dtype, E => {
            let cotangent = flex::operand::<E>(cotangent)?;
            let gradient = self.spread::<E>(shape, flex::elements(&cotangent));
            flex::result(gradient, shape, dtype)
        }))])
    }
}

/// Registry entry of slice.
pub(super) const GOLDEN: Golden = Golden::new("slice", |case| {
    let attributes = &case.attributes;
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        let dim = attributes.dim("dim", D);
        let size = x.dims().get(dim).copied().unwrap_or(0);
        let bound = |key, default| attributes.bound_or(key, size, default);
        let cells = bound("start", 0)..bound("end", size);
        output(slice_dim(x, dim, cells, attributes.array_or::<1>("step", [1])[0]))
    })
})
.with_method("slice_dim")
.with_pytorch("x[start:end:step]");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Steps;

    impl Operator<3, 3> for Steps {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).slice_dim(2, 1..7, 4).slice_dim(1, 0..5, 2)
        }
    }

    #[test]
    fn steps_of_sharded_dims() {
        check_op(&Steps, &[[2, 5, 7]], &[], &[0, 1, 2], 1e-6);
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let error = slice_dim(x, 1, 1..5, 2).unwrap_err().to_string();
        assert!(
            error.contains("1..5 in steps of 2 of dim 1 of [3, 4]"),
            "{error}"
        );
    }
}
