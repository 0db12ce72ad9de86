//! Sums and means over dims, sharded or not; see the submodules for [extrema](extremum) and
//! statistics.
//!
//! # Shapes
//! Reduced dims keep one cell each, as in burn's `sum_dim`; `sum` and `mean` over all cells have
//! shape `[1]`. An empty list of dims reduces nothing, whereas PyTorch reduces all dims.
//!
//! # Placement
//! A mesh axis that shards a reduced dim becomes `Partial`; other axes keep their placement.
//! Nothing is sent until the result is resolved, which in bf16 and f16 happens at once: the ranks'
//! parts are added in f32, and their sum is rounded once.
//!
//! # Adjoint
//! Every cell receives the cotangent of its sum, divided by the global count for a mean.

pub mod cumulative;
pub mod extreme;
pub mod extremum;
mod golden;
mod kernel;
mod largest;
pub mod norm;
mod peak;
mod product;
mod root;
mod scaled;
mod scan;
mod statistics;
mod sums;
pub mod variance;

pub use cumulative::{cumprod, cumsum};
pub use extreme::{argmax, argmin, topk_with_indices};
pub use extremum::extremum_dims;
pub(crate) use extremum::{holders, local_extremum};
pub(crate) use golden::OPERATORS;
pub use norm::vector_norm;
pub(crate) use root::{but_at_zero, root, root_of};
pub(crate) use scaled::scaled;
pub use statistics::StatisticsField;
pub use variance::{std_dims, var_dims};

use burn::tensor::{Element, Tensor};
use halocline_core::{Error, Layout, Partial, Placement, ReduceOp, Result, Shard, ShardTensor};

use crate::driver::place::{renumbered, require_dims};
use crate::field::{Field, WithDims, run};
use crate::precision::narrowed;
use crate::reshape;
use sums::{squares, sums};

/// Placement rule: the layout of the result of reducing `dims`.
fn rule(operator: &str, layout: &Layout, dims: &[usize], op: ReduceOp) -> Result<Layout> {
    let placements = layout
        .placements()
        .iter()
        .zip(layout.mesh().names())
        .map(|(placement, name)| match placement {
            Shard(dim) if dims.contains(dim) => Ok(Partial(op)),
            // A sum of partial sums is a partial sum; other reductions of partial values are not
            // partial values.
            Partial(held) if *held != op => Err(Error::placement(
                operator,
                format!("{placement} on axis \"{name}\""),
                "call resolve() first",
            )),
            other => Ok(*other),
        })
        .collect::<Result<Vec<Placement>>>()?;
    let extents = (0..layout.shape().len()).map(|dim| {
        if dims.contains(&dim) {
            vec![1]
        } else {
            layout.extents(dim).to_vec()
        }
    });
    Ok(layout.derive(placements, extents.collect()))
}

/// Sums over `dims`.
///
/// # Errors
/// A dim that does not exist or is repeated; values that are partial by a reduction other than a
/// sum.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Partial, ReduceOp, Shard, ShardTensor};
/// use halocline_ops::reduce::sum_dims;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     let y = sum_dims(x, &[0])?; // nothing is sent
///     assert_eq!((y.dims(), y.placements()), ([1, 3], &[Partial(ReduceOp::Sum)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sum_dims<const D: usize>(x: ShardTensor<D>, dims: &[usize]) -> Result<ShardTensor<D>> {
    over("sum_dims", x, dims, |local, dims| sums(local, dims, 1.0))
}

/// Sums squares over `dims`, times `scale`, on behalf of the operator that errors name.
pub(crate) fn sum_of_squares<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    scale: f64,
    operator: &str,
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    over(operator, x, dims, |local, dims| {
        squares(local, None, dims, scale)
    })
}

/// Sums over `dims` by a function of the shard, in at least f32, and derives the layout.
fn over<const D: usize>(
    operator: &str,
    x: ShardTensor<D>,
    dims: &[usize],
    sum: impl FnOnce(Tensor<D>, &[usize]) -> Tensor<D>,
) -> Result<ShardTensor<D>> {
    require_dims::<D>(operator, dims)?;
    let layout = rule(operator, x.layout(), dims, ReduceOp::Sum)?;
    // A dim of one cell that all ranks hold is its own sum; keeping it would split a range of dims
    // in two.
    let shape = x.dims();
    let summed = |dim: &usize| shape[*dim] != 1 || x.layout().is_sharded(*dim);
    let dims: Vec<usize> = dims.iter().copied().filter(summed).collect();
    let (local, _, mesh) = x.into_parts();
    let dtype = local.dtype();
    let sum = ShardTensor::from_parts(sum(local, &dims), layout, mesh);
    Ok(narrowed(sum, dtype))
}

/// Averages over `dims`: the local sum divided by the global count, exact for uneven shards.
///
/// # Errors
/// The errors of [`sum_dims`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::mean_dims;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0], [3.0, 6.0]]));
/// let y = mean_dims(x, &[0])?.into_local();
/// y.into_data().assert_eq(&[[2.0_f32, 4.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn mean_dims<const D: usize>(x: ShardTensor<D>, dims: &[usize]) -> Result<ShardTensor<D>> {
    require_dims::<D>("mean_dims", dims)?;
    let count: usize = dims.iter().map(|&dim| x.dims()[dim]).product();
    over("mean_dims", x, dims, |local, dims| {
        sums(local, dims, (count as f64).recip())
    })
}

/// Averages over the spatial dims of `[batch, channels, *spatial]`, which are dropped.
///
/// # Errors
/// The errors of [`mean_dims`]; a tensor of one dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::global_avg_pool;
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]));
/// let y = global_avg_pool(x)?.into_local();
/// y.into_data().assert_eq(&[[2.0_f32, 5.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn global_avg_pool<const D: usize>(x: ShardTensor<D>) -> Result<ShardTensor<2>> {
    if D < 2 {
        let message = format!("{:?}; expected [batch, channels, *spatial]", x.dims());
        return Err(Error::operator("global_avg_pool", message));
    }
    let spatial: Vec<usize> = (2..D).collect();
    let means = mean_dims(x, &spatial)?;
    let extents = means.layout().all_extents()[..2].to_vec();
    Ok(renumbered(means, extents, |dim| dim))
}

/// Sums all cells; the result has shape `[1]`.
///
/// # Errors
/// Values that are partial by a reduction other than a sum.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::sum;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0, 4.0]));
/// assert_eq!(sum(x)?.into_local().into_scalar::<f32>(), 7.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sum<const D: usize>(x: ShardTensor<D>) -> Result<ShardTensor<1>> {
    total(x, "sum", 1.0)
}

/// Averages all cells; the result has shape `[1]`.
///
/// # Errors
/// Values that are partial by a reduction other than a sum.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::mean;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 3.0]));
/// assert_eq!(mean(x)?.into_local().into_scalar::<f32>(), 2.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn mean<const D: usize>(x: ShardTensor<D>) -> Result<ShardTensor<1>> {
    let count: usize = x.dims().iter().product();
    total(x, "mean", (count as f64).recip())
}

/// Layout of the sum of all cells, of shape `[1]`.
pub(crate) fn of_all(operator: &str, layout: &Layout) -> Result<Layout> {
    let all: Vec<usize> = (0..layout.shape().len()).collect();
    let layout = rule(operator, layout, &all, ReduceOp::Sum)?;
    Ok(layout.derive(layout.placements().to_vec(), vec![vec![1]]))
}

/// Sums all cells, times `scale`.
fn total<const D: usize>(x: ShardTensor<D>, operator: &str, scale: f64) -> Result<ShardTensor<1>> {
    let all: Vec<usize> = (0..D).collect();
    let layout = of_all(operator, x.layout())?;
    let (local, _, mesh) = x.into_parts();
    let dtype = local.dtype();
    let sum = reshape(sums(local, &all, scale), vec![1]);
    Ok(narrowed(ShardTensor::from_parts(sum, layout, mesh), dtype))
}

/// Reductions as methods.
pub trait ReduceField<const D: usize>: Field<D> {
    /// Value of the only element, such as a loss, on every rank. Partial values are resolved by an
    /// all-reduce first.
    ///
    /// # Panics
    /// Panics if there is another number of elements. [Raises](halocline_core::Error::raise) a
    /// failure of communication.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    /// use halocline_ops::ReduceField;
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
    ///     assert_eq!(x.sum().into_scalar::<f64>(), 5.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    fn into_scalar<E: Element>(self) -> E {
        self.into_shard().detach().full_tensor().into_scalar()
    }

    /// Sums over dims, which keep one cell. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`sum_dims`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let y = ReduceField::sum_dims(Tensor::<2>::from([[1.0, 2.0], [3.0, 6.0]]), &[0]);
    /// y.into_data().assert_eq(&[[4.0_f32, 8.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn sum_dims(self, dims: &[usize]) -> Self {
        run(self, |x| sum_dims(x, dims))
    }

    /// Averages over dims, which keep one cell.
    ///
    /// # Panics
    /// Panics where [`mean_dims`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let y = ReduceField::mean_dims(Tensor::<2>::from([[1.0, 2.0], [3.0, 6.0]]), &[0]);
    /// y.into_data().assert_eq(&[[2.0_f32, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn mean_dims(self, dims: &[usize]) -> Self {
        run(self, |x| mean_dims(x, dims))
    }

    /// Computes the maximum over dims, which keep one cell. Cells of equal value share its
    /// gradient; see [`extremum`](mod@extremum).
    ///
    /// # Panics
    /// Panics where [`extremum_dims`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let y = ReduceField::max_dims(Tensor::<2>::from([[1.0, 2.0], [3.0, 0.0]]), &[0, 1]);
    /// y.into_data().assert_eq(&[[3.0_f32]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn max_dims(self, dims: &[usize]) -> Self {
        run(self, |x| extremum_dims(x, dims, ReduceOp::Max))
    }

    /// Computes the minimum over dims, which keep one cell. See [`extremum`](mod@extremum).
    ///
    /// # Panics
    /// Panics where [`extremum_dims`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let y = ReduceField::min_dims(Tensor::<2>::from([[1.0, 2.0], [3.0, 0.0]]), &[1]);
    /// y.into_data().assert_eq(&[[1.0_f32], [0.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn min_dims(self, dims: &[usize]) -> Self {
        run(self, |x| extremum_dims(x, dims, ReduceOp::Min))
    }

    /// Sums all cells; the result has shape `[1]`.
    ///
    /// # Panics
    /// Panics where [`sum`](fn@sum) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let total = ReduceField::sum(Tensor::<1>::from([1.0, 2.0, 4.0]));
    /// assert_eq!(total.into_scalar::<f32>(), 7.0);
    /// ```
    #[track_caller]
    fn sum(self) -> WithDims<Self, 1> {
        run(self, sum)
    }

    /// Averages all cells; the result has shape `[1]`.
    ///
    /// # Panics
    /// Panics where [`mean`](fn@mean) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let mean = ReduceField::mean(Tensor::<1>::from([1.0, 3.0]));
    /// assert_eq!(mean.into_scalar::<f32>(), 2.0);
    /// ```
    #[track_caller]
    fn mean(self) -> WithDims<Self, 1> {
        run(self, mean)
    }

    /// Averages over the spatial dims: `[batch, channels]`. The result is partial if a spatial dim
    /// is sharded: [`resolve`](Field::resolve) it before a linear layer.
    ///
    /// # Panics
    /// Panics where [`global_avg_pool`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ReduceField;
    ///
    /// let y = Tensor::<3>::from([[[1.0, 3.0], [4.0, 6.0]]]).global_avg_pool();
    /// y.into_data().assert_eq(&[[2.0_f32, 5.0]].into(), true);
    /// ```
    #[track_caller]
    fn global_avg_pool(self) -> WithDims<Self, 2> {
        run(self, global_avg_pool)
    }
}

impl<const D: usize, X: Field<D>> ReduceField<D> for X {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};
    use burn::tensor::{DType, Device, Distribution, Tensor};
    use halocline_core::Launcher;

    #[test]
    fn sums_of_large_fields_have_the_same_bits_with_any_number_of_threads() {
        // Both signs, so that every rounding shows.
        let normal = Distribution::Normal(0.0, 1.0);
        let x = Tensor::<3>::random([5, 1023, 1025], normal, &Device::flex());
        let sum = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let sum = || sum(ShardTensor::solo(x.clone()));
            let sum = pool.unwrap().install(sum).unwrap();
            sum.local().clone().into_scalar::<f32>()
        };
        let one = sum(1);
        assert!((2..9).all(|threads| sum(threads).to_bits() == one.to_bits()));
    }

    #[test]
    fn tall_tensors_and_half_precision_are_summed_exactly() {
        let device = Device::flex();
        let tall = Tensor::<2>::ones([20_000_000, 1], &device);
        let mean = mean(ShardTensor::solo(tall)).unwrap();
        assert_eq!(mean.local().clone().into_scalar::<f32>(), 1.0);
        let large = [[40_000.0, 40_000.0], [-40_000.0, -40_000.0]];
        let large = Tensor::<2>::from_data(large, (&device, DType::F16));
        let sum = sum(ShardTensor::solo(large)).unwrap();
        assert_eq!(sum.local().clone().into_scalar::<f32>(), 0.0);
    }

    #[test]
    fn means_of_half_precision_do_not_overflow_on_shards() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let ones = Tensor::<2>::ones([512, 512], (world.device(), DType::F16));
                let x = ShardTensor::distribute(ones, &mesh, &[Shard(0)])?;
                for mean in [mean(x.clone())?, mean(mean_dims(x, &[0, 1])?)?] {
                    let mean = mean.resolve().to_local();
                    assert_eq!(mean.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0]);
                }
                Ok(())
            })
            .unwrap();
    }

    /// A partial sum of 257 would round to 256 in bf16, and one of 80,000 to infinity in f16.
    #[test]
    fn sums_of_ranks_are_rounded_once() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                for (dtype, cells) in [
                    (DType::BF16, [256.0, 1.0, -256.0, 0.0]),
                    (DType::F16, [40_000.0, 40_000.0, -40_000.0, -39_968.0]),
                ] {
                    let expected = cells.iter().sum::<f64>();
                    let cells = Tensor::<1>::from_data(cells, (world.device(), dtype));
                    let expected = Tensor::<1>::from_data([expected], (world.device(), dtype));
                    let x = ShardTensor::distribute(cells, &mesh, &[Shard(0)])?;
                    for sum in [sum(x.clone())?, sum_dims(x, &[0])?] {
                        let sum = sum.resolve().to_local();
                        sum.into_data().assert_eq(&expected.to_data(), true);
                    }
                }
                Ok(())
            })
            .unwrap();
    }

    struct Head;

    impl Operator<4, 2> for Head {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 2> {
            inputs.remove(0).gelu().global_avg_pool()
        }
    }

    #[test]
    fn a_global_average_for_a_head() {
        for shape in [[2, 3, 5, 4], [2, 3, 1, 1]] {
            check_op(&Head, &[shape], &[], &[0, 2, 3], 1e-6);
        }
    }
}
