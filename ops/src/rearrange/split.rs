//! Split and chunk: ranges of a dim, one after the other.
//!
//! # Placement
//! Those of [`narrow`]: all dims may be sharded, ranks keep their cells, and nothing is sent. A part of a sharded dim lies on
//! the ranks that held its cells; [`align`](super::align) and `redistribute` move it to others.
//!
//! # Adjoint
//! That of [`narrow`], added up.

use halocline_core::{Error, Result, ShardTensor};

use super::cat::cat;
use super::narrow::narrow;
use crate::driver::place::require_dim;
use crate::golden::{Golden, Output, output, with_dims};

/// Splits a dim into parts of these sizes.
///
/// # Errors
/// A dim that does not exist; sizes that are zero, or do not sum to the dim's.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::split;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0, 3.0]));
/// let parts = split(x, &[1, 2], 0)?;
/// parts[1].local().to_data().assert_eq(&[2.0_f32, 3.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn split<const D: usize>(
    x: ShardTensor<D>,
    sizes: &[usize],
    dim: usize,
) -> Result<Vec<ShardTensor<D>>> {
    require_dim("split", &x, dim)?;
    if sizes.contains(&0) || sizes.iter().sum::<usize>() != x.dims()[dim] {
        let message = format!("parts of {sizes:?} of dim {dim} of {:?}", x.dims());
        return Err(Error::operator("split", message));
    }
    let mut start = 0;
    let parts = sizes.iter().map(|size| {
        start += size;
        narrow(x.clone(), dim, start - size, *size)
    });
    parts.collect()
}

/// Splits a dim into `count` parts of the same size, or fewer, of which the last is shorter, as PyTorch's `chunk` does.
///
/// # Errors
/// A dim that does not exist or has no cells; no parts.
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
    split(x, &sizes, dim)
}

/// Split and chunk in the registry: the parts are joined again in the opposite order.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("split", |case| {
        let (sizes, dim) = (
            case.attributes.list("sizes"),
            case.attributes.dim("dim", case.dims()),
        );
        with_dims!(case.dims(), D => {
            joined(split(case.input::<D>(0)?, &sizes, dim)?, dim)
        })
    }),
    Golden::new("chunk", |case| {
        let [count, dim] = ["chunks", "dim"].map(|key| case.attributes.list(key)[0]);
        with_dims!(case.dims(), D => {
            joined(chunk(case.input::<D>(0)?, count, dim)?, dim)
        })
    }),
];

fn joined<const D: usize>(mut parts: Vec<ShardTensor<D>>, dim: usize) -> Result<Box<dyn Output>> {
    parts.reverse();
    output(cat(parts, dim))
}
