//! Gather and scatter along a whole dim by a tensor of indices.
//!
//! Along dim 1, `gather` computes `y[b, i] = x[b, index[b, i]]`; `scatter_add` computes
//! `y[b, j] = x[b, j] + Σ values[b, i]` over the `i` with `index[b, i] = j`; `scatter` sets
//! `y[b, index[b, i]] = values[b, i]`. Semantics follow PyTorch.
//!
//! # Placement
//! All other dims may be sharded, in the same way in all tensors. Nothing is sent, except that with
//! checks enabled a wrong index of one rank is an error on all ranks.
//!
//! # Adjoint
//! `gather` and `scatter_add` are adjoint to each other. `scatter` passes the cotangent of replaced
//! cells to `values`, and that of the others to `x`.

use burn::tensor::kind::{Basic, Kind};
use burn::tensor::{Int, Tensor};
use halocline_core::ops::agree_on;
use halocline_core::{Error, Layout, Result, ShardTensor};

use crate::as_integers;
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::require_dim;
use crate::golden::{Dims, Golden, output, with_dims};
use crate::kernel::{flex, gathered};

/// Takes the cell of a dim of `x` at each index in `index`. See the [module](self).
///
/// # Shapes
/// The result has the shape of `index`, whose size may differ from that of `x` in the dim.
///
/// # Errors
/// A dim that does not exist or is sharded; partial values; tensors distributed differently in
/// another dim; an index beyond the dim (checked on CPUs; on other devices the cell is undefined),
/// on all ranks with checks enabled.
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::gather;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]));
/// let index = ShardTensor::solo(Tensor::<2, Int>::from([[1, 0, 1], [0, 0, 1]]));
/// let y = gather(x, 1, index)?;
/// y.local().to_data().assert_eq(&[[2.0_f32, 1.0, 2.0], [3.0, 3.0, 4.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gather<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    index: ShardTensor<D, Int>,
) -> Result<ShardTensor<D, K>> {
    const NAME: &str = "gather";
    check_indexed(NAME, &x, dim, &index)?;
    let (index, layout, mesh) = index.into_parts();
    let (local, from, _) = x.into_parts();
    let index = places(index);
    let local = fill_all(local, &from, NAME, 0.0)?;
    let taken: Result<Tensor<D, K>> = match K::KIND {
        Kind::Float => {
            let local = Tensor::from_dispatch(local.into_dispatch());
            let taken = gathered::gather(NAME, local, dim, index);
            taken.map(|taken| Tensor::from_dispatch(taken.into_dispatch()))
        }
        Kind::Int | Kind::Bool => {
            let checked = require_within(NAME, &index, local.dims()[dim]);
            checked.map(|()| as_integers(local, |local| local.gather(dim, flex::signed(index))))
        }
    };
    let taken = agree_on(&mesh, &layout.sharded_axes(), NAME, taken)?;
    without_fill(taken, layout, mesh, NAME)
}

/// Adds `values` to the cells of a dim of `x` at the indices in `index`. See the [module](self).
///
/// # Shapes
/// `values` has the shape of `index`, whose size may differ from that of `x` in the dim.
///
/// # Errors
/// The errors of [`gather`]; `values` with another layout than `index`, or another dtype than `x`.
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::scatter_add;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 1.0]));
/// let index = ShardTensor::solo(Tensor::<1, Int>::from([1, 1, 0]));
/// let values = ShardTensor::solo(Tensor::<1>::from([10.0, 20.0, 5.0]));
/// let y = scatter_add(x, 0, index, values)?;
/// y.local().to_data().assert_eq(&[6.0_f32, 31.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn scatter_add<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    index: ShardTensor<D, Int>,
    values: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "scatter_add";
    check_scattered(NAME, &x, dim, &index, &values)?;
    scattered(NAME, x, index, values, |x, index, values| {
        gathered::scatter_add(NAME, x, dim, index, values)
    })
}

/// Replaces the cells of a dim of `x` at the indices in `index` by `values`. See the
/// [module](self).
///
/// # Shapes
/// `values` has the shape of `index`, whose size may differ from that of `x` in the dim.
///
/// # Errors
/// The errors of [`scatter_add`]; an index that occurs twice in a line (checked on CPUs; on other
/// devices its cell is the sum of both values).
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::scatter;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0, 3.0]));
/// let index = ShardTensor::solo(Tensor::<1, Int>::from([2, 0]));
/// let values = ShardTensor::solo(Tensor::<1>::from([10.0, 20.0]));
/// let y = scatter(x, 0, index, values)?;
/// y.local().to_data().assert_eq(&[20.0_f32, 2.0, 10.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn scatter<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    index: ShardTensor<D, Int>,
    values: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "scatter";
    check_scattered(NAME, &x, dim, &index, &values)?;
    let once = require_once(NAME, index.local(), dim);
    agree_on(index.mesh(), &index.layout().sharded_axes(), NAME, once)?;
    if index.dims()[dim] == 0 {
        return Ok(x);
    }
    scattered(NAME, x, index, values, |x, index, values| {
        let add = |values| gathered::scatter_add(NAME, x.zeros_like(), dim, index.clone(), values);
        let replaced = add(values.clone().detach().ones_like())?.greater_elem(0.5);
        Ok(x.clone().mask_where(replaced, add(values)?))
    })
}

/// Checks the operands of a function that scatters values into cells of a whole dim.
fn check_scattered<const D: usize>(
    operator: &str,
    x: &ShardTensor<D>,
    dim: usize,
    index: &ShardTensor<D, Int>,
    values: &ShardTensor<D>,
) -> Result<()> {
    check_indexed(operator, x, dim, index)?;
    let dtypes = [x, values].map(|tensor| tensor.local().dtype());
    if dtypes[0] != dtypes[1] {
        let message = format!("cells of {:?} and values of {:?}", dtypes[0], dtypes[1]);
        return Err(Error::operator(operator, message));
    }
    if values.layout() != index.layout() {
        let message = format!("values {} and index {}", values.layout(), index.layout());
        return Err(Error::operator(operator, message));
    }
    Ok(())
}

/// Runs a function that scatters values into cells of a whole dim.
fn scattered<const D: usize>(
    operator: &'static str,
    x: ShardTensor<D>,
    index: ShardTensor<D, Int>,
    values: ShardTensor<D>,
    scatter: impl FnOnce(Tensor<D>, Tensor<D, Int>, Tensor<D>) -> Result<Tensor<D>>,
) -> Result<ShardTensor<D>> {
    let (local, layout, mesh) = x.into_parts();
    let index = places(index.into_local());
    let (values, held, _) = values.into_parts();
    let local = fill_all(local, &layout, operator, 0.0)?;
    let values = fill_all(values, &held, operator, 0.0)?;
    let local = scatter(local, index, values);
    let local = agree_on(&mesh, &layout.sharded_axes(), operator, local)?;
    without_fill(local, layout, mesh, operator)
}

/// Checks a tensor and the indices of cells of a dim, which must be whole.
fn check_indexed<const D: usize, K: Basic>(
    operator: &str,
    x: &ShardTensor<D, K>,
    dim: usize,
    index: &ShardTensor<D, Int>,
) -> Result<()> {
    require_dim(operator, x, dim)?;
    x.require_resolved(operator)?;
    x.require_whole(operator, dim)?;
    require_beside(operator, x.layout(), index.layout(), dim)?;
    let indices = index.dims()[dim];
    if x.dims()[dim] == 0 && indices > 0 {
        let message = format!("{indices} indices of a dim of 0 cells");
        return Err(Error::operator(operator, message));
    }
    Ok(())
}

/// Checks that indices are distributed like a tensor in all dims but one.
fn require_beside(operator: &str, x: &Layout, index: &Layout, dim: usize) -> Result<()> {
    let alike = x.mesh() == index.mesh()
        && x.placements() == index.placements()
        && *index == x.resized(dim, index.extents(dim).to_vec());
    if alike {
        return Ok(());
    }
    let message = format!("index {index} beside {x}; expected the same in all dims but {dim}");
    Err(Error::operator(operator, message))
}

/// Returns the indices of a shard; an empty shard gets a single index, that of the first cell.
fn places<const D: usize>(index: Tensor<D, Int>) -> Tensor<D, Int> {
    if index.dims().contains(&0) {
        let shape = index.dims().map(|size| size.max(1));
        return Tensor::zeros(shape, (&index.device(), index.dtype()));
    }
    index
}

/// Checks on CPUs that indices lie below the size of a dim.
fn require_within<const D: usize>(
    operator: &str,
    index: &Tensor<D, Int>,
    size: usize,
) -> Result<()> {
    if !flex::runs_on(&index.device()) {
        return Ok(());
    }
    let indices = index.clone().into_data();
    let beyond = |index: &i64| *index < 0 || *index as usize >= size;
    if let Some(index) = indices.iter::<i64>().find(beyond) {
        let message = format!("index {index} of a dim of {size} cells");
        return Err(Error::operator(operator, message));
    }
    Ok(())
}

/// Checks on CPUs that no index occurs twice along a dim.
fn require_once<const D: usize>(operator: &str, index: &Tensor<D, Int>, dim: usize) -> Result<()> {
    if !flex::runs_on(&index.device()) {
        return Ok(());
    }
    let count = index.dims()[dim];
    let lines = index.clone().swap_dims(dim, D - 1).into_data();
    let mut all: Vec<i64> = lines.iter().collect();
    for line in all.chunks_mut(count.max(1)) {
        line.sort_unstable();
        if let Some(pair) = line.windows(2).find(|pair| pair[0] == pair[1]) {
            let message = format!(
                "index {} occurs twice along dim {dim}; expected each once, or scatter_add",
                pair[0]
            );
            return Err(Error::operator(operator, message));
        }
    }
    Ok(())
}

/// Registry entries of gather and scatter.
pub(super) const GOLDEN: [Golden; 3] = [
    Golden::new("gather", |case| {
        with_dims!(case.dims(), D => {
            output(gather(case.input::<D>(0)?, case.attributes.dim("dim", D), case.indices(1)?))
        })
    })
    .with_sharded(Dims::AllButDim),
    Golden::new("scatter_add", |case| {
        with_dims!(case.dims(), D => {
            output(scatter_add(case.input::<D>(0)?, case.attributes.dim("dim", D), case.indices(1)?, case.input(2)?))
        })
    })
    .with_sharded(Dims::AllButDim),
    Golden::new("scatter", |case| {
        with_dims!(case.dims(), D => {
            output(scatter(case.input::<D>(0)?, case.attributes.dim("dim", D), case.indices(1)?, case.input(2)?))
        })
    })
    .with_sharded(Dims::AllButDim),
];

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, FloatDType};
    use halocline_core::{Launcher, Partial, ReduceOp, Shard};

    use super::*;
    use crate::testing::{compare, random};

    /// One of three ranks has no rows, and 300 is no number of eight bits.
    #[test]
    fn indices_may_be_of_a_narrow_type() {
        let run = |ranks: usize, dtype: DType| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let [x, values] = [300, 4].map(|size| random::<2>([2, size], "x", size).inner());
                let index = [[0, 127, 128, 255], [255, 3, 200, 1]];
                let index = Tensor::<2, Int>::from_data(index, (&x.device(), dtype));
                let index = ShardTensor::distribute(index, &mesh, &[Shard(0)])?;
                let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
                let values = ShardTensor::distribute(values, &mesh, &[Shard(0)])?;
                let results = [
                    gather(x.clone(), 1, index.clone())?,
                    scatter_add(x.clone(), 1, index.clone(), values.clone())?,
                    scatter(x, 1, index, values)?,
                ];
                Ok(results.map(|y| y.full_tensor().into_data()))
            });
            found.unwrap().remove(0)
        };
        let expected = run(1, DType::I64);
        for ranks in [1, 3] {
            compare(
                &run(ranks, DType::U8),
                &expected,
                0.0,
                &format!("{ranks} ranks"),
            );
        }
    }

    /// In bf16 a sum of ones would stop at 256.
    #[test]
    fn sums_in_half_precision_add_up_in_f32() {
        let device = burn::tensor::Device::flex().autodiff();
        let ones = |cells: usize| Tensor::<1>::ones([cells], (&device, DType::BF16));
        let index = Tensor::<1, Int>::ones([1000], &device.clone().inner());
        let solo = |x: &Tensor<1>| ShardTensor::solo(x.clone());
        let x = ones(2).require_grad();
        let y = gather(solo(&x), 0, ShardTensor::solo(index.clone())).unwrap();
        assert_eq!(y.local().dtype(), DType::BF16);
        let gradients = y.into_local().sum().backward();
        let gradient = x.grad(&gradients).expect("a gradient");
        let sum = scatter_add(
            solo(&(x.clone() * 0.0)),
            0,
            ShardTensor::solo(index),
            solo(&ones(1000)),
        );
        for found in [gradient, sum.unwrap().into_local().inner()] {
            let found = found.cast(FloatDType::F32).into_data();
            found.assert_eq(&[0.0_f32, 1000.0].into(), true);
        }
    }

    #[test]
    fn a_scatter_of_nothing_is_checked() {
        let device = burn::tensor::Device::flex();
        let ones = |cells: usize| ShardTensor::solo(Tensor::<1>::ones([cells], &device));
        let index = || ShardTensor::solo(Tensor::<1, Int>::zeros([0], &device));
        let error = scatter(ones(3), 0, index(), ones(1)).unwrap_err();
        assert!(error.to_string().contains("values [1]"), "{error}");
        let y = scatter(ones(3), 0, index(), ones(0)).unwrap();
        y.into_local()
            .into_data()
            .assert_eq(&[1.0_f32; 3].into(), true);
    }

    #[test]
    fn a_wrong_index_of_one_rank_is_an_error_on_all() {
        let run = Launcher::local(2).check(true).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let [x, values] =
                [6, 2].map(|size| ShardTensor::<2>::ones([2, size], &mesh, &[Shard(0)]));
            let (x, values) = (x?, values?);
            let index = |last: i64| {
                let rows = Tensor::<2, Int>::from_data([[0, 1], [3, last]], world.device());
                ShardTensor::distribute(rows, &mesh, &[Shard(0)])
            };
            let (beyond, twice) = (index(6)?, index(3)?);
            for (refused, told) in [
                (gather(x.clone(), 1, beyond.clone()), "index 6 of a dim"),
                (
                    scatter_add(x.clone(), 1, beyond, values.clone()),
                    "index 6 of a dim",
                ),
                (scatter(x, 1, twice, values), "index 3 occurs twice"),
            ] {
                let error = refused.unwrap_err().to_string();
                assert!(error.contains(told), "{error}");
            }
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn misuse_is_told() {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<2>::ones([4, 6], &mesh, &[Shard(0)])?;
            let index = ShardTensor::<2, Int>::full([4, 2], 6, &mesh, &[Shard(0)])?;
            let error = gather(x.clone(), 1, index.clone()).unwrap_err().to_string();
            assert!(error.contains("index 6 of a dim of 6 cells"), "{error}");
            let columns = ShardTensor::<2, Int>::full([4, 2], 0, &mesh, &[Shard(1)])?;
            let error = gather(x.clone(), 1, columns).unwrap_err().to_string();
            assert!(error.contains("in all dims but 1"), "{error}");
            let twice = ShardTensor::<2, Int>::full([4, 2], 1, &mesh, &[Shard(0)])?;
            let values = ShardTensor::<2>::ones([4, 2], &mesh, &[Shard(0)])?;
            let error = scatter(x.clone(), 1, twice, values)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("index 1 occurs twice along dim 1"),
                "{error}"
            );
            let layout = Layout::new(mesh.shape(), &[4, 6], &[Partial(ReduceOp::Sum)])?;
            let terms = Tensor::<2>::ones([4, 6], world.device());
            let places = ShardTensor::from_parts(terms.clone().int(), layout.clone(), mesh.clone());
            let terms = ShardTensor::from_parts(terms, layout, mesh.clone());
            let error = gather(terms, 1, places).unwrap_err().to_string();
            assert!(error.contains("call resolve() first"), "{error}");
            gather(x, 0, index).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("redistribute(&[Replicate]) first"),
            "{error}"
        );
    }
}
