//! Maximum and minimum over dims.
//!
//! Semantics follow PyTorch's `amax` and `amin`.
//!
//! # Shapes
//! Reduced dims keep one cell each.
//!
//! # Placement
//! All dims may be sharded; values must be resolved, and the result is resolved.
//!
//! # Communication
//! If a reduced dim is sharded, the extremum is reduced over the ranks that share it, and in the
//! backward pass the number of cells that hold it.
//!
//! # Adjoint
//! The cells that hold the extremum share the cotangent equally, on whichever ranks they are.

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Tensor};
use halocline_core::comm::Operation;
use halocline_core::ops::{self, BackwardPass, Operator, apply, blank};
use halocline_core::{
    DeviceMesh, Error, Partial, ReduceOp, Replicate, Result, ShardTensor, Traffic,
};

use super::sums::ranges;
use super::{peak, rule};
use crate::driver::place::require_dims;
use crate::kernel::flex::{self, with_float};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::precision::{cast, wider};

/// Computes the maximum or minimum over `dims`. See the [module](self).
///
/// # Errors
/// A dim that does not exist, is repeated or has no cells; partial values; a reduction other than
/// these two; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{ReduceOp, ShardTensor};
/// use halocline_ops::reduce::extremum_dims;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0], [3.0, 0.0]]));
/// let y = extremum_dims(x, &[1], ReduceOp::Max)?.into_local();
/// y.into_data().assert_eq(&[[2.0_f32], [3.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn extremum_dims<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    op: ReduceOp,
) -> Result<ShardTensor<D>> {
    let operator = match op {
        ReduceOp::Min => "min_dims",
        ReduceOp::Max => "max_dims",
        ReduceOp::Sum | ReduceOp::Product => {
            let message = format!("{op:?} is no extremum; expected Max or Min");
            return Err(Error::operator("extremum_dims", message));
        }
    };
    require_dims::<D>(operator, dims)?;
    x.require_resolved(operator)?;
    if let Some(dim) = dims.iter().find(|&&dim| x.dims()[dim] == 0) {
        return Err(Error::operator(operator, format!("dim {dim} has no cells")));
    }
    let partial = rule(operator, x.layout(), dims, op)?;
    let axes = partial.axes_where(|placement| matches!(placement, Partial(_)));
    let placements = partial.map_placements(|placement| match placement {
        Partial(_) => Replicate,
        other => other,
    });
    let layout = partial.derive(placements, partial.all_extents().to_vec());
    let (local, from, mesh) = x.into_parts();
    let over_ranks = OverRanks {
        mesh: mesh.clone(),
        axes,
        operation: Operation::new(operator, Traffic::Reduce, Some(&from)),
    };
    let extremum = Extremum::<D> {
        op,
        dims: dims.to_vec(),
        over_ranks: (!over_ranks.axes.is_empty()).then_some(over_ranks),
    };
    let y = Error::catch(|| extremum.of(local))?;
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Marks the cells that hold the extremum, given for each of them; NaN cells count as holders.
pub(crate) fn holders<const D: usize>(x: &Tensor<D>, extremum: Tensor<D>) -> Tensor<D, Bool> {
    x.clone().equal(extremum).bool_or(x.clone().is_nan())
}

/// Computes the extremum over dims of one shard; cells of equal value share its gradient.
pub(crate) fn local_extremum<const D: usize>(
    x: Tensor<D>,
    dims: &[usize],
    op: ReduceOp,
) -> Tensor<D> {
    let extremum = Extremum {
        op,
        dims: dims.to_vec(),
        over_ranks: None,
    };
    extremum.of(x)
}

/// Extremum as one node of the graph: over this rank's cells, then over ranks.
#[derive(Clone, Debug)]
struct Extremum<const D: usize> {
    op: ReduceOp,
    dims: Vec<usize>,
    over_ranks: Option<OverRanks>,
}

/// Mesh axes that shard the reduced dims.
#[derive(Clone, Debug)]
struct OverRanks {
    mesh: DeviceMesh,
    axes: Vec<usize>,
    operation: Operation,
}

impl<const D: usize> Extremum<D> {
    fn of(self, x: Tensor<D>) -> Tensor<D> {
        Tensor::from_dispatch(apply(self, [x.into_dispatch()]))
    }

    /// Reduces the dims of this rank's cells; an empty shard yields `nothing`.
    fn reduced(
        &self,
        x: Tensor<D>,
        nothing: f64,
        reduce: impl Fn(Tensor<D>, usize) -> Tensor<D>,
    ) -> Tensor<D> {
        let shape = self.shape_of_result(x.dims());
        if x.dims().contains(&0) {
            Tensor::from_dispatch(blank(&x.into_dispatch(), &shape, Some(nothing)))
        } else {
            self.dims.iter().fold(x, |x, &dim| reduce(x, dim))
        }
    }

    fn over_ranks(&self, x: Tensor<D>, op: ReduceOp, backward: bool) -> Tensor<D> {
        let Some(OverRanks {
            mesh,
            axes,
            operation,
        }) = &self.over_ranks
        else {
            return x;
        };
        let operation = if backward {
            operation.backward()
        } else {
            operation.clone()
        };
        ops::all_reduce(x, mesh, axes, op, operation)
    }
}

impl<const D: usize> Operator for Extremum<D> {
    /// The result.
    type Saved = DispatchTensor;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["extremum", "extremum (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, DispatchTensor)> {
        let x = Tensor::<D>::from_dispatch(inputs.remove(0));
        let y = match (self.lines(&x), self.op) {
            (Some(lines), op) => self.by_kernel(x, lines, op == ReduceOp::Min)?,
            (None, ReduceOp::Min) => self.reduced(x, f64::INFINITY, Tensor::min_dim),
            (None, _) => self.reduced(x, f64::NEG_INFINITY, Tensor::max_dim),
        };
        let y = Error::catch(|| self.over_ranks(y, self.op, false))?.into_dispatch();
        Ok((y.clone(), y))
    }

    fn backward(
        &self,
        mut pass: BackwardPass<'_, DispatchTensor>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let x = Tensor::<D>::from_dispatch(pass.take_input(0));
        let y = Tensor::<D>::from_dispatch(pass.saved.clone());
        let cotangent = Tensor::<D>::from_dispatch(pass.cotangent);
        let (shape, dtype) = (x.dims(), x.dtype());
        let shares = |count: Tensor<D>| -> Result<Tensor<D>> {
            let count = Error::catch(|| self.over_ranks(count, ReduceOp::Sum, true))?;
            Ok(cast(cotangent, wider(dtype)) / count)
        };
        if let Some(lines) = self.lines(&x) {
            let gradient = with_float!(dtype, E => {
                let isa = Isa::chosen()?;
                let [x, y] = [x, y].map(|x| flex::operand::<E>(x.into_dispatch()));
                let (x, y) = (x?, y?);
                let (x, y) = (flex::elements::<E>(&x), flex::elements::<E>(&y));
                let count = peak::holders(isa, lines, x, y);
                let count = flex::small_result(count, &self.shape_of_result(shape), wider(dtype));
                let shares = shares(Tensor::from_dispatch(count))?;
                let shares = flex::operand::<E>(shares.into_dispatch())?;
                let gradient = peak::shared_out(isa, lines, x, [y, flex::elements(&shares)]);
                flex::result(gradient, &shape, dtype)
            });
            return Ok(vec![Some(gradient)]);
        }
        let holders = (!shape.contains(&0)).then(|| holders(&x, y.expand(shape)));
        // Cells are counted in at least f32.
        let counted = match &holders {
            None => x.clone(),
            Some(holders) => holders.clone().float(),
        };
        let counted = cast(counted, wider(dtype));
        let shares = shares(self.reduced(counted, 0.0, Tensor::sum_dim))?;
        let gradient = match holders {
            None => x,
            Some(holders) => {
                let shares = cast(shares, dtype).expand(shape);
                shares.mask_fill(holders.bool_not(), 0.0)
            }
        };
        Ok(vec![Some(gradient.into_dispatch())])
    }
}

impl<const D: usize> Extremum<D> {
    /// Returns the lines that the kernels reduce; `None` on devices without kernels, for
    /// non-adjacent dims, and for empty shards.
    fn lines(&self, x: &Tensor<D>) -> Option<Lines> {
        let ranges = ranges(&self.dims);
        let ([dims], shape) = (&ranges[..], x.dims()) else {
            return None;
        };
        let has_cells = !shape.contains(&0);
        (has_cells && flex::runs_on(&x.device())).then(|| Lines::along(&shape, dims.clone()))
    }

    fn shape_of_result(&self, mut shape: [usize; D]) -> [usize; D] {
        self.dims.iter().for_each(|&dim| shape[dim] = 1);
        shape
    }

    fn by_kernel(&self, x: Tensor<D>, lines: Lines, least: bool) -> Result<Tensor<D>> {
        let (shape, dtype) = (self.shape_of_result(x.dims()), x.dtype());
        Ok(Tensor::from_dispatch(with_float!(dtype, E => {
            let x = flex::operand::<E>(x.into_dispatch())?;
            let y = peak::forward(Isa::chosen()?, lines, flex::elements::<E>(&x), least);
            flex::small_result(y, &shape, dtype)
        })))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, TensorData};
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator as Tested, check_op, difference};

    struct Largest(&'static [usize]);

    impl Tested<4, 4> for Largest {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            inputs.remove(0).max_dims(self.0)
        }
    }

    #[test]
    fn extrema_of_shards_without_cells_have_those_of_one_device() {
        check_op(&Largest(&[3]), &[[1, 2, 1, 7]], &[], &[2, 3], 1e-6);
    }

    /// Cells of few distinct values, several of them extreme.
    struct Ties;

    impl Tested<4, 4> for Ties {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            let x = inputs.remove(0).clamp(-0.2, 0.2);
            x.clone().max_dims(&[1, 2]) * x.min_dims(&[3])
        }
    }

    #[test]
    fn cells_that_are_alike_share_the_gradient_on_any_mesh() {
        check_op(&Ties, &[[2, 5, 4, 7]], &[], &[0, 1, 2, 3], 1e-6);
    }

    /// Covers contiguous and strided lines, lines longer than a block, and NaN cells.
    #[test]
    fn kernels_and_burns_operators_agree() {
        let device = Device::flex();
        for (shape, dims) in [
            ([3, 2, 67, 71], &[2, 3][..]),
            ([2, 300, 5, 7], &[1]),
            ([1, 1, 1, 1], &[0]),
        ] {
            let x = Tensor::<4>::random(shape, Distribution::Uniform(-3.0, 3.0), &device).round();
            let missing = Tensor::<4>::random(shape, Distribution::Uniform(0.0, 1.0), &device);
            let x = x
                .mask_fill(missing.lower_elem(1e-4), f32::NAN)
                .autodiff()
                .require_grad();
            for op in [ReduceOp::Max, ReduceOp::Min] {
                let y = local_extremum(x.clone(), dims, op);
                let reduce = |x: Tensor<4>, &dim: &usize| match op {
                    ReduceOp::Min => x.min_dim(dim),
                    _ => x.max_dim(dim),
                };
                let expected = dims.iter().fold(x.clone().inner(), reduce);
                let plain = y.clone().inner();
                // NaN is not equal to itself.
                let [found, expected] = [plain.clone(), expected].map(|y| {
                    let missing = y.clone().is_nan();
                    y.mask_fill(missing, 100.0).into_data()
                });
                found.assert_eq(&expected, true);
                let gradient = x.grad(&y.sum().backward()).unwrap();
                let held = x
                    .clone()
                    .inner()
                    .equal(plain.expand(shape))
                    .bool_or(x.clone().inner().is_nan());
                let count = held.clone().float().sum_dims(dims);
                let expected = held.float() / count;
                assert!(difference(&gradient.into_data(), &expected.into_data()) < 1e-6);
            }
        }
    }

    #[test]
    fn many_cells_of_half_precision_share_exactly() {
        let found = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let ones = Tensor::<1>::ones([1024], (world.device(), DType::BF16));
            let x = ShardTensor::distribute(ones, &mesh, &[Shard(0)])?.require_grad();
            let y = extremum_dims(x.clone(), &[0], ReduceOp::Max)?;
            let gradient = x.grad(&y.backward()).expect("a gradient");
            Ok(gradient.full_tensor().into_data())
        });
        let expected = TensorData::new(vec![1.0_f32 / 1024.0; 1024], [1024]);
        for found in found.unwrap() {
            assert!(difference(&found, &expected) < 1e-6);
        }
    }
}
