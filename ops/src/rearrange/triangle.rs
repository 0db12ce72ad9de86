//! Triangles of matrices: the cells on and below, or on and above, a diagonal.
//!
//! `y[.., i, j] = x[.., i, j]` where `j − i ≤ diagonal` (lower) or `j − i ≥ diagonal` (upper), and zero elsewhere. Semantics
//! follow PyTorch's `tril` and `triu`.
//!
//! # Placement
//! All dims may be sharded; rows and columns count in the whole matrix. Nothing is sent.
//!
//! # Adjoint
//! The same triangle of the cotangent.

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::empty::{drop_empty, fill_empty};
use crate::golden::{Case, Golden, output, with_dims};

/// Keeps the cells on and below a diagonal of the last two dims: the main one for 0. See the [module](self).
///
/// # Errors
/// A tensor of one dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::tril;
///
/// let x = ShardTensor::solo(Tensor::<2>::ones([2, 2], &Default::default()));
/// let y = tril(x, 0)?;
/// y.local().to_data().assert_eq(&[[1.0_f32, 0.0], [1.0, 1.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn tril<const D: usize>(x: ShardTensor<D>, diagonal: i64) -> Result<ShardTensor<D>> {
    triangle(x, "tril", diagonal, Tensor::tril)
}

/// Keeps the cells on and above a diagonal of the last two dims: the main one for 0. See the [module](self).
///
/// # Errors
/// A tensor of one dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::triu;
///
/// let x = ShardTensor::solo(Tensor::<2>::ones([2, 2], &Default::default()));
/// let y = triu(x, 1)?;
/// y.local().to_data().assert_eq(&[[0.0_f32, 1.0], [0.0, 0.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn triu<const D: usize>(x: ShardTensor<D>, diagonal: i64) -> Result<ShardTensor<D>> {
    triangle(x, "triu", diagonal, Tensor::triu)
}

fn triangle<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    diagonal: i64,
    part: impl FnOnce(Tensor<D>, i64) -> Tensor<D>,
) -> Result<ShardTensor<D>> {
    if D < 2 {
        let message = format!("{:?}; expected rows and columns", x.dims());
        return Err(Error::operator(operator, message));
    }
    let (local, layout, mesh) = x.into_parts();
    let held = layout.local_box(mesh.position());
    let [rows, columns] = [D - 2, D - 1].map(|dim| held.ranges()[dim].start as i64);
    let all: Vec<usize> = (0..D).collect();
    let local = fill_empty(local, &layout, &all, operator, 0.0)?;
    let local = part(local, diagonal + rows - columns);
    let local = drop_empty(local, &layout, mesh.position(), operator)?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Triangles in the registry.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("tril", |case| {
        with_dims!(case.dims(), D => {
            output(tril(case.input::<D>(0)?, diagonal(case)))
        })
    }),
    Golden::new("triu", |case| {
        with_dims!(case.dims(), D => {
            output(triu(case.input::<D>(0)?, diagonal(case)))
        })
    }),
];

fn diagonal(case: &Case) -> i64 {
    case.attributes.number("diagonal").unwrap_or(0.0) as i64
}
