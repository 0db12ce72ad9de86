//! Shift: moves the values of a dim by a number of cells, like xarray's `shift`.
//!
//! `y[i] = x[i − offset]`; beyond the field a [`Boundary`] applies. `shift(−1) − x` is the
//! difference of neighbours, and a periodic shift is a roll.
//!
//! # Placement
//! All dims may be sharded, and the result has the layout of `x`; values must be resolved.
//!
//! # Communication
//! The cells that move to another rank.
//!
//! # Adjoint
//! The cotangent of a cell is added to that of the cell it copies.

use burn::tensor::kind::Basic;
use halocline_core::plan::segments;
use halocline_core::{Boundary, Error, Result, ShardTensor};

use crate::driver::place::{in_place, placed, require_dim};
use crate::golden::{Golden, output, with_dims};

const NAME: &str = "shift";

/// Moves the values of a dim by `offset` cells, towards higher indices if positive. See the
/// [module](self).
///
/// # Errors
/// A dim that does not exist; a negative offset so large that indices overflow `isize`; a pole
/// boundary; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Boundary, ShardTensor};
/// use halocline_ops::rearrange::shift;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 4.0, 9.0]));
/// let differences = shift(x.clone(), 0, -1, Boundary::Replicate)? - x;
/// differences.local().to_data().assert_eq(&[3.0_f32, 5.0, 0.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn shift<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    offset: isize,
    boundary: Boundary,
) -> Result<ShardTensor<D, K>> {
    require_dim(NAME, &x, dim)?;
    if boundary.is_pole() {
        let message = format!("{boundary:?} moves cells along longitude, too; use pad_poles");
        return Err(Error::operator(NAME, message));
    }
    let sizes = x.dims();
    let lowest = sizes[dim] as isize - isize::MAX;
    if offset < lowest {
        let message =
            format!("offset {offset} of dim {dim} of {sizes:?}; expected {lowest} at least");
        return Err(Error::operator(NAME, message));
    }
    let output = x.layout().clone();
    let key = (dim, offset, boundary);
    placed(x, NAME, key, output, 0.0, move |other, cells| {
        if other != dim {
            return in_place(cells, sizes[other]);
        }
        let shifted = |cell: usize| cell as isize - offset;
        let range = shifted(cells.start)..shifted(cells.end);
        segments(range, sizes[dim], boundary, boundary)
    })
}

/// Registry entry of shift.
pub(super) const GOLDEN: Golden = Golden::new(NAME, |case| {
    let dim = case.attributes.dim("dim", case.dims());
    let offset = case.attributes.number("offset").unwrap_or(1.0) as isize;
    let boundary = case.attributes.boundary("mode");
    with_dims!(case.dims(), D => {
        output(shift(case.input::<D>(0)?, dim, -offset, boundary))
    })
})
.with_pytorch("pad, narrow")
.with_travels(["cells that change their rank", "the same back"]);

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    #[test]
    fn offsets_of_any_size_are_zeros_or_refused() {
        let x = || ShardTensor::solo(Tensor::<1>::ones([3], &Default::default()));
        let y = shift(x(), 0, isize::MAX, Boundary::Zeros).unwrap();
        y.into_local()
            .into_data()
            .assert_eq(&[0.0_f32; 3].into(), true);
        let error = shift(x(), 0, isize::MIN, Boundary::Zeros).unwrap_err();
        assert!(error.to_string().contains("dim 0 of [3]"), "{error}");
    }

    struct Shift(isize, Boundary);

    impl Operator<3, 3> for Shift {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).shift(1, self.0, self.1)
        }
    }

    #[test]
    fn cells_come_from_any_distance_and_beyond_both_ends() {
        use Boundary::{Periodic, Reflect, Replicate, Zeros};
        for (offset, boundary) in [(1, Replicate), (-4, Zeros), (9, Periodic), (-2, Reflect)] {
            check_op(
                &Shift(offset, boundary),
                &[[2, 5, 3]],
                &[],
                &[0, 1, 2],
                1e-6,
            );
        }
    }
}
