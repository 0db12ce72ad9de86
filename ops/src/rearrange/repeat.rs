//! Repeat: copies of the whole field, one after the other.
//!
//! `y[i] = x[i mod n]` in every dim of `n` cells. Semantics follow PyTorch's `repeat`.
//!
//! # Placement
//! All dims may be sharded; a rank's extents are as many times larger. Values must be resolved.
//!
//! # Communication
//! Along sharded dims the cells that change their rank.
//!
//! # Adjoint
//! The sum of the cotangents of all copies of a cell.

use halocline_core::{Boundary, Error, Result, ShardTensor, segments};

use crate::driver::place::placed;
use crate::golden::{Golden, output, with_dims};

/// Repeats the field so many times along each dim.
///
/// # Errors
/// No copies; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::repeat;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0]));
/// let y = repeat(x, [2])?;
/// y.local().to_data().assert_eq(&[1.0_f32, 2.0, 1.0, 2.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn repeat<const D: usize>(x: ShardTensor<D>, times: [usize; D]) -> Result<ShardTensor<D>> {
    const NAME: &str = "repeat";
    if times.contains(&0) {
        return Err(Error::operator(NAME, format!("{times:?} copies")));
    }
    let extents = x.layout().all_extents().iter().zip(times);
    let extents = extents.map(|(dim, times)| dim.iter().map(|extent| extent * times).collect());
    let output = x
        .layout()
        .derive(x.placements().to_vec(), extents.collect());
    let sizes = x.dims();
    placed(x, NAME, (), output, 0.0, |dim, cells| {
        let range = cells.start as isize..cells.end as isize;
        segments(range, sizes[dim], Boundary::Periodic, Boundary::Periodic)
    })
}

/// Repeat in the registry.
pub(super) const GOLDEN: Golden = Golden::new("repeat", |case| {
    with_dims!(case.dims(), D => {
        output(repeat(case.input::<D>(0)?, case.attributes.array("repeats", 1)))
    })
})
.with_travels([
    "cells that change their rank, in sharded dims",
    "the same back",
]);
