//! Roll: periodic shift of cells along dims.
//!
//! `y[i] = x[(i − shift) mod n]` in each of the dims. Semantics follow PyTorch's `torch.roll`.
//!
//! # Placement
//! All dims may be sharded; the result has the layout of `x`.
//!
//! # Adjoint
//! The roll by the opposite shift.

use burn::tensor::kind::Basic;
use halocline_core::plan::{Segment, segments};
use halocline_core::{Boundary, Error, Result, ShardTensor};

use crate::driver::place::{in_place, placed, require_dims};
use crate::golden::{Golden, output, with_dims};

/// Shifts the cells of `dims[i]` by `shifts[i]`, periodically.
///
/// # Errors
/// Different numbers of shifts and dims; a dim that does not exist or is repeated; partial values;
/// a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::RearrangeField;
///
/// let x = Tensor::<1>::from([1.0, 2.0, 3.0, 4.0]);
/// let y = RearrangeField::roll(x, &[1], &[0]);
/// y.into_data().assert_eq(&[4.0_f32, 1.0, 2.0, 3.0].into(), true);
/// ```
pub fn roll<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    shifts: &[isize],
    dims: &[usize],
) -> Result<ShardTensor<D, K>> {
    if shifts.len() != dims.len() {
        let message = format!("shifts {shifts:?} for dims {dims:?}; expected one for each");
        return Err(Error::operator("roll", message));
    }
    moved(x, "roll", shifts, dims, |cells, size, shift| {
        let shift = shift.rem_euclid(size.max(1) as isize);
        let from = cells.start as isize - shift..cells.end as isize - shift;
        segments(from, size, Boundary::Periodic, Boundary::Periodic)
    })
}

/// Moves cells within their dims; `from` returns the source cells of `x` for a range of a dim of
/// the result.
pub(super) fn moved<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    operator: &'static str,
    arguments: &[isize],
    dims: &[usize],
    from: impl Fn(&std::ops::Range<usize>, usize, isize) -> Vec<Segment>,
) -> Result<ShardTensor<D, K>> {
    require_dims::<D>(operator, dims)?;
    let (layout, sizes) = (x.layout().clone(), x.dims());
    let key = (arguments.to_vec(), dims.to_vec());
    placed(x, operator, key, layout, 0.0, |dim, cells| {
        match dims.iter().position(|moved| *moved == dim) {
            Some(place) => from(cells, sizes[dim], arguments[place]),
            None => in_place(cells, sizes[dim]),
        }
    })
}

/// Registry entry of roll.
pub(super) const GOLDEN: Golden = Golden::new("roll2d", |case| {
    let shifts = case.attributes.numbers("shifts").iter();
    let shifts: Vec<isize> = shifts.map(|shift| *shift as isize).collect();
    with_dims!(case.dims(), D => {
        output(roll(case.input::<D>(0)?, &shifts, &case.attributes.dims("dims", D)))
    })
})
.with_pytorch("roll")
.with_travels(["cells that change their rank", "the same back"]);

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Roll([isize; 2]);

    impl Operator<3, 3> for Roll {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).roll(&self.0, &[2, 1])
        }
    }

    #[test]
    fn cells_come_in_at_the_other_end() {
        for shifts in [[1, 0], [-3, 2], [17, -5]] {
            check_op(&Roll(shifts), &[[2, 5, 7]], &[], &[0, 1, 2], 1e-6);
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = halocline_core::ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let error = super::roll(x.clone(), &[1], &[0, 1])
            .unwrap_err()
            .to_string();
        assert!(error.contains("shifts [1] for dims [0, 1]"), "{error}");
        let error = super::roll(x, &[1, 1], &[1, 1]).unwrap_err().to_string();
        assert!(error.contains("each at most once"), "{error}");
    }
}
