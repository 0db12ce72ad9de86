//! Pad: cells before the first and after the last of a dim.
//!
//! `y[i] = x[i − low]`; beyond the field a constant, or the cells that a
//! [`Boundary`](halocline_core::Boundary) defines: the other end, the mirrored field, the last
//! cell, or the field across a pole. Semantics follow PyTorch's `pad` with the modes `constant`,
//! `circular`, `reflect` and `replicate`, set separately for every dim and side.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. Padding belongs to the first and the last rank
//! with cells.
//!
//! # Communication
//! The cells that these ranks lack: those of the other end if a dim is periodic, and those of
//! neighbours if the padding is wider than the shard it mirrors.
//!
//! # Adjoint
//! The cotangent of a padded cell is added to that of the cell it copies.

use burn::tensor::kind::Basic;
use halocline_core::plan::{Need, Sides, check_poles};
use halocline_core::{Boundary, Error, IndexBox, Result, ShardTensor};

use crate::driver::Padding;
use crate::driver::place::{assembled, require_dim};
use crate::golden::{Case, Golden, Output, output, with_dims};

const NAME: &str = "pad";

/// Pads dims, each by its own padding. Cells beyond a [`Boundary::Zeros`] are set to `value`.
///
/// # Shapes
/// Each padded dim grows by `low + high`.
///
/// # Errors
/// A dim that does not exist, is repeated, or becomes too large; a boundary that copies cells from
/// an empty dim; a reflection as wide as the dim; poles of a field without [opposite
/// meridians](check_poles); partial values; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Boundary, Launcher, Shard, ShardTensor};
/// use halocline_ops::Padding;
/// use halocline_ops::rearrange::pad;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let x = ShardTensor::<2>::ones([3, 6], &mesh, &[Shard(1)])?;
///     let ring = Padding::new(1, Boundary::Periodic);
///     let y = pad(x, &[(1, ring)], 0.0)?;
///     assert_eq!((y.dims(), y.layout().extents(1)), ([3, 8], &[4, 4][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn pad<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    paddings: &[(usize, Padding)],
    value: f64,
) -> Result<ShardTensor<D, K>> {
    let mut extents = x.layout().all_extents().to_vec();
    let mut sides = vec![Sides::default(); D];
    for (i, &(dim, padding)) in paddings.iter().enumerate() {
        require_dim(NAME, &x, dim)?;
        if paddings[..i].iter().any(|(other, _)| *other == dim) {
            let message = format!("dim {dim} is padded twice: {paddings:?}");
            return Err(Error::operator(NAME, message));
        }
        check(dim, x.dims()[dim], &padding)?;
        widen(&mut extents[dim], [padding.low, padding.high]);
        sides[dim] = padding.sides();
    }
    let output = x.layout().derive(x.placements().to_vec(), extents);
    let sizes = x.dims();
    check_poles(NAME, &sizes, &sides)?;
    let boundaries: Vec<_> = sides.iter().map(|(_, boundary)| *boundary).collect();
    let need_of = |cells: &IndexBox| {
        let ranges = cells
            .ranges()
            .iter()
            .zip(&sides)
            .map(|(cells, ([low, _], _))| {
                let shifted = |cell: usize| cell as isize - *low as isize;
                shifted(cells.start)..shifted(cells.end)
            });
        Need::within(&sizes, &ranges.collect::<Vec<_>>(), &boundaries)
    };
    assembled(x, NAME, paddings.to_vec(), output, value, need_of)
}

/// Adds cells to the first and the last part that has any.
pub(super) fn widen(extents: &mut [usize], [low, high]: [usize; 2]) {
    let held = |extent: &usize| *extent > 0;
    let first = extents.iter().position(held).unwrap_or(0);
    let last = extents.iter().rposition(held).unwrap_or(0);
    extents[first] += low;
    extents[last] += high;
}

fn check(dim: usize, size: usize, padding: &Padding) -> Result<()> {
    let Padding { low, high, .. } = *padding;
    let padded = size
        .checked_add(low)
        .and_then(|cells| cells.checked_add(high));
    if padded.is_none_or(|cells| cells > isize::MAX as usize) {
        let message = format!(
            "dim {dim} of {size} cells with padding {low} and {high}; expected at most {} cells",
            isize::MAX
        );
        return Err(Error::operator(NAME, message));
    }
    for (width, boundary) in [low, high].into_iter().zip(padding.boundary) {
        let message = match boundary {
            Boundary::Reflect if width > 0 && width >= size => {
                format!("reflecting {width} cells of dim {dim} needs more than {width}, got {size}")
            }
            Boundary::Periodic | Boundary::Replicate if width > 0 && size == 0 => {
                format!("dim {dim} has no cells that {boundary:?} could repeat")
            }
            _ => continue,
        };
        return Err(Error::operator(NAME, message));
    }
    Ok(())
}

/// Registry entries of padding.
pub(super) const GOLDEN: [Golden; 3] = [
    golden("pad1d", run::<1>),
    golden("pad2d", run::<2>),
    golden("pad3d", run::<3>),
];

const fn golden(name: &'static str, run: fn(&Case) -> Result<Box<dyn Output>>) -> Golden {
    Golden::new(name, run)
        .with_pytorch("pad")
        .with_travels(["cells beyond the ends that a rank lacks", "the same back"])
}

fn run<const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let boundary = case.attributes.boundary("mode");
    let value = case.attributes.number("value").unwrap_or(0.0);
    let dims = case.dims();
    let paddings: [_; N] = std::array::from_fn(|place| {
        let [low, high] = case.attributes.array(["pad_w", "pad_h", "pad_d"][place], 0);
        let padding = Padding::zeros(low, high).with_boundary(boundary);
        (dims - 1 - place, padding)
    });
    with_dims!(dims, D => output(pad(case.input::<D>(0)?, &paddings, value)))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Pad(Vec<(usize, Padding)>);

    impl Operator<3, 3> for Pad {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).pad(&self.0, 0.5)
        }
    }

    fn padding(low: usize, high: usize, boundary: [Boundary; 2]) -> Padding {
        Padding {
            low,
            high,
            boundary,
        }
    }

    #[test]
    fn padding_may_differ_by_side_and_be_wider_than_shards() {
        use Boundary::{Periodic, Reflect, Replicate, Zeros};
        let pads = [
            vec![(2, padding(9, 4, [Periodic; 2]))],
            vec![
                (1, padding(4, 0, [Reflect; 2])),
                (2, padding(0, 3, [Replicate; 2])),
            ],
            vec![
                (0, padding(2, 1, [Zeros, Replicate])),
                (2, padding(6, 1, [Reflect, Zeros])),
            ],
        ];
        for pads in pads {
            check_op(&Pad(pads), &[[2, 5, 7]], &[], &[0, 1, 2], 1e-6);
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let wide = Padding::new(4, Boundary::Reflect);
        let error = pad(x.clone(), &[(1, wide)], 0.0).unwrap_err().to_string();
        assert!(error.contains("reflecting 4 cells of dim 1"), "{error}");
        let one = Padding::zeros(1, 1);
        let twice = pad(x.clone(), &[(1, one), (1, one)], 0.0);
        let error = twice.unwrap_err().to_string();
        assert!(error.contains("padded twice"), "{error}");
        let most = Padding::zeros(usize::MAX, 1);
        let error = pad(x, &[(1, most)], 0.0).unwrap_err().to_string();
        assert!(error.contains("expected at most"), "{error}");
    }
}
