//! Flatten and unflatten: merging adjacent dims into one, and splitting a dim into several.
//!
//! # Placement
//! Only the first of the merged dims may be sharded, so that a rank's cells stay contiguous. With
//! [`flatten_cells`](crate::graph::flatten_cells), which orders the cells by rank, any may. Nothing
//! is sent.
//!
//! # Adjoint
//! The inverse operator.

use burn::tensor::kind::Basic;
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::place::renumbered;
use crate::golden::{Dims, Golden, output, with_dims};

/// Merges dims `start..=end` into one, in row-major order. The result has `E` dims.
///
/// # Errors
/// A range that does not leave `E` dims; a sharded dim in the range other than its first.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::flatten;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 5, 8, 3], &mesh, &[Shard(1)])?;
///     let tokens: ShardTensor<3> = flatten(x, 1, 2)?;
///     assert_eq!((tokens.dims(), tokens.layout().extents(1)), ([1, 40, 3], &[24, 16][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn flatten<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    start: usize,
    end: usize,
) -> Result<ShardTensor<E, K>> {
    const NAME: &str = "flatten";
    if end >= D || start > end || D - (end - start) != E {
        let message = format!(
            "dims {start} to {end} of {:?} for a result of {E} dims",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    (start + 1..=end).try_for_each(|dim| x.require_whole(NAME, dim))?;
    let inner: usize = x.dims()[start + 1..=end].iter().product();
    let mut extents = x.layout().all_extents().to_vec();
    extents.drain(start + 1..=end);
    extents[start]
        .iter_mut()
        .for_each(|extent| *extent *= inner);
    Ok(renumbered(x, extents, |dim| match dim {
        dim if dim <= start => dim,
        dim => dim - (end - start),
    }))
}

/// Splits dim `dim` into dims of these sizes, in row-major order: the inverse of [`flatten`]. The
/// result has `E` dims.
///
/// # Errors
/// Sizes whose product is not the size of the dim; a number of sizes that does not yield `E` dims;
/// a sharded dim with an extent that is not a multiple of the product of all sizes but the first.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::unflatten;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0, 3.0, 4.0]]));
/// let heads: ShardTensor<3> = unflatten(x, 1, &[2, 2])?;
/// heads.local().to_data().assert_eq(&[[[1.0_f32, 2.0], [3.0, 4.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn unflatten<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    sizes: &[usize],
) -> Result<ShardTensor<E, K>> {
    const NAME: &str = "unflatten";
    let more = sizes.len().saturating_sub(1);
    let fits = !sizes.is_empty()
        && dim < D
        && D + more == E
        && x.dims()[dim] == sizes.iter().product::<usize>();
    if !fits {
        let message = format!(
            "dim {dim} of {:?} to {sizes:?}, for a result of {E} dims",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    let inner: usize = sizes[1..].iter().product();
    let mut extents = x.layout().all_extents().to_vec();
    if extents[dim].iter().any(|extent| extent % inner.max(1) != 0) {
        let message = format!(
            "extents {:?} of dim {dim} cut through cells of {:?}; redistribute to multiples of {inner}",
            extents[dim],
            &sizes[1..],
        );
        return Err(Error::operator(NAME, message));
    }
    match inner {
        0 => {
            // Without cells the extents do not determine which rank holds which outer indices.
            x.require_whole(NAME, dim)?;
            extents[dim] = vec![sizes[0]];
        }
        _ => extents[dim].iter_mut().for_each(|extent| *extent /= inner),
    }
    let whole = sizes[1..].iter().map(|size| vec![*size]);
    extents.splice(dim + 1..dim + 1, whole);
    Ok(renumbered(x, extents, |before| match before {
        before if before <= dim => before,
        before => before + more,
    }))
}

/// Registry entry of flatten.
pub(super) const GOLDEN: Golden = Golden::new("flatten", |case| {
    let dims = case.dims();
    let [start, end] = case.attributes.flattened(dims);
    with_dims!(dims, D => {
        with_dims!((dims + start).saturating_sub(end), E => {
            output(flatten::<D, E, _>(case.input::<D>(0)?, start, end))
        })
    })
})
.with_pytorch("flatten, unflatten")
.with_sharded(Dims::Flattened);

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Rows;

    impl Operator<3, 3> for Rows {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            let rows = inputs.remove(0).flatten::<2>(1, 2);
            rows.square().unflatten::<3>(1, &[5, 6])
        }
    }

    #[test]
    fn they_are_opposites() {
        check_op(&Rows, &[[4, 5, 6]], &[], &[0, 1], 1e-6);
    }

    #[test]
    fn misuse_is_told() {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<2>::ones([5, 6], &mesh, &[Shard(1)])?;
            let error = flatten::<2, 1, _>(x.clone(), 0, 1).unwrap_err().to_string();
            assert!(error.contains("no rule for Shard(1)"), "{error}");
            unflatten::<2, 3, _>(x, 1, &[3, 2]).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("multiples of 2"), "{error}");
    }
}
