//! Repeat: copies of the whole field, one after the other.
//!
//! `y[i] = x[i mod n]` in every dim of `n` cells. Semantics follow PyTorch's `repeat`.
//!
//! # Placement
//! All dims may be sharded; a rank's extents are multiplied by the number of copies. Values must be
//! resolved.
//!
//! # Communication
//! The cells that move to another rank, along sharded dims.
//!
//! # Adjoint
//! The sum of the cotangents of all copies of a cell.

use burn::tensor::kind::{Basic, Kind};
use halocline_core::plan::segments;
use halocline_core::{Boundary, Error, Layout, Result, ShardTensor};

use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::placed;
use crate::golden::{Golden, output, with_dims};
use crate::kernel::taken::{Places, take};
use crate::{reshape, with_floats};

/// Repeats the field `times[dim]` times along each dim.
///
/// # Errors
/// No copies, or too many; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::repeat_all;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0]));
/// let y = repeat_all(x, [2])?;
/// y.local().to_data().assert_eq(&[1.0_f32, 2.0, 1.0, 2.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn repeat_all<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    times: [usize; D],
) -> Result<ShardTensor<D, K>> {
    const NAME: &str = "repeat_all";
    let counts = x.dims().into_iter().zip(times);
    let mut counts = counts.map(|(size, times)| size.checked_mul(times));
    let beyond = |cells: Option<usize>| cells.is_none_or(|cells| cells > isize::MAX as usize);
    if times.contains(&0) || counts.any(beyond) {
        let message = format!(
            "{times:?} copies of {:?}; expected at least one, and at most {} cells in a dim",
            x.dims(),
            isize::MAX
        );
        return Err(Error::operator(NAME, message));
    }
    x.require_resolved(NAME)?;
    let copies = |sharded: bool| {
        std::array::from_fn::<usize, D, _>(|dim| {
            if x.layout().is_sharded(dim) == sharded {
                times[dim]
            } else {
                1
            }
        })
    };
    let repeated = |layout: &Layout, times: [usize; D]| {
        let extents = layout.all_extents().iter().zip(times);
        let extents = extents.map(|(dim, times)| dim.iter().map(|extent| extent * times).collect());
        layout.derive(layout.placements().to_vec(), extents.collect())
    };
    let (exchanged, local_copies) = match K::KIND {
        Kind::Float => (copies(true), copies(false)),
        Kind::Int | Kind::Bool => (times, [1; D]),
    };
    let x = if exchanged == [1; D] {
        x
    } else {
        let (output, sizes) = (repeated(x.layout(), exchanged), x.dims());
        placed(x, NAME, (), output, 0.0, |dim, cells| {
            let range = cells.start as isize..cells.end as isize;
            segments(range, sizes[dim], Boundary::Periodic, Boundary::Periodic)
        })?
    };
    if local_copies == [1; D] {
        return Ok(x);
    }
    with_floats(x, |x| {
        let (local, layout, mesh) = x.into_parts();
        let output = repeated(&layout, local_copies);
        let mut local = fill_all(local, &layout, NAME, 0.0)?;
        // Last dims first, where a copy is smallest.
        for dim in (0..D).rev().filter(|dim| local_copies[*dim] > 1) {
            let mut shape = local.dims();
            let [outer, size] =
                [&shape[..dim], &shape[dim..]].map(|dims| dims.iter().product::<usize>());
            let one = reshape::<D, 3>(local, vec![outer, 1, size]);
            shape[dim] *= local_copies[dim];
            local = reshape(
                take(one, 1, &Places::new(vec![0; local_copies[dim]])),
                shape.to_vec(),
            );
        }
        without_fill(local, output, mesh, NAME)
    })
}

/// Registry entry of repeat.
pub(super) const GOLDEN: Golden = Golden::new("repeat", |case| {
    with_dims!(case.dims(), D => {
        output(repeat_all(case.input::<D>(0)?, case.attributes.array("repeats", 1)))
    })
})
.with_method("repeat_all")
.with_travels([
    "cells that change their rank, in sharded dims",
    "the same back",
]);

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;

    #[test]
    fn no_copies_and_too_many_are_refused() {
        for times in [0, usize::MAX] {
            let x = ShardTensor::solo(Tensor::<1>::ones([3], &Default::default()));
            let error = repeat_all(x, [times]).unwrap_err().to_string();
            assert!(error.contains("copies of [3]"), "{error}");
        }
    }
}
