//! Padding across the poles, where vector components change sign.

use halocline_core::{Boundary, Error, Result, ShardTensor};

use crate::driver::Padding;
use crate::rearrange::{pad, profile};

/// Dim of the rows, which are latitudes here.
pub(super) const ROWS: usize = 2;

/// Pads latitudes by rows from across the poles: mirrored, and from the opposite meridian. Channels
/// `odd`, such as wind components, change sign there, because east and north point the other way.
///
/// Use this in place of a stencil's own padding. If no channel is odd, a [`Boundary::PoleRow`] or
/// [`Boundary::PoleEdge`] of the stencil itself does the same in one exchange.
///
/// # Shapes
/// `[batch, channels, lat, lon, …]` → the same with `low + high` more rows.
///
/// # Placement
/// All dims may be sharded; values must be resolved. The rows belong to the first and the last rank
/// with cells.
///
/// # Communication
/// The rows that these ranks lack, from the ranks at the opposite meridian.
///
/// # Adjoint
/// The cotangent of a padded cell, with its sign, is added to that of the cell it copies.
///
/// # Errors
/// A boundary that is no pole; an `odd` channel that does not exist; longitudes without [opposite
/// meridians](halocline_core::plan::check_poles); the errors of [`pad`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Boundary, ShardTensor};
/// use halocline_ops::rearrange::pad_poles;
///
/// // One row of a grid without pole points, of a temperature and a wind.
/// let x = ShardTensor::solo(Tensor::<4>::from([[[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]]));
/// let y = pad_poles(x, [1, 0], Boundary::PoleEdge, &[1])?;
/// let expected = [[
///     [[3.0_f32, 4.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]],
///     [[-3.0, -4.0, -1.0, -2.0], [1.0, 2.0, 3.0, 4.0]],
/// ]];
/// y.into_local().into_data().assert_eq(&expected.into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn pad_poles<const D: usize>(
    x: ShardTensor<D>,
    [low, high]: [usize; 2],
    boundary: Boundary,
    odd: &[usize],
) -> Result<ShardTensor<D>> {
    const NAME: &str = "pad_poles";
    if D <= ROWS + 1 || !boundary.is_pole() {
        let message = format!(
            "boundary {boundary:?} of a tensor of {D} dims; expected PoleRow or PoleEdge, and [batch, channels, lat, lon]"
        );
        return Err(Error::operator(NAME, message));
    }
    let rows = x.dims()[ROWS];
    require_channels(NAME, odd, x.dims()[1])?;
    let padding = Padding {
        low,
        high,
        boundary: [boundary; 2],
    };
    let y = pad(x, &[(ROWS, padding)], 0.0)?;
    turned(y, odd, |row| row < low || row >= low + rows)
}

/// Requires that the channels `odd` exist.
pub(super) fn require_channels(operator: &str, odd: &[usize], channels: usize) -> Result<()> {
    match odd.iter().find(|channel| **channel >= channels) {
        None => Ok(()),
        Some(channel) => {
            let message = format!("odd channel {channel} of {channels}");
            Err(Error::operator(operator, message))
        }
    }
}

/// Changes the sign of the channels `odd` in the rows `across` a pole or a fold.
pub(super) fn turned<const D: usize>(
    y: ShardTensor<D>,
    odd: &[usize],
    across: impl Fn(usize) -> bool,
) -> Result<ShardTensor<D>> {
    if odd.is_empty() {
        return Ok(y);
    }
    let is_odd = (0..y.dims()[1]).map(|channel| f64::from(odd.contains(&channel)));
    let is_odd = profile(&y, 1, &is_odd.collect::<Vec<_>>())?;
    let across = (0..y.dims()[ROWS]).map(|row| f64::from(across(row)));
    let across = profile(&y, ROWS, &across.collect::<Vec<_>>())?;
    Ok(y * (is_odd * across * -2.0 + 1.0))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, compare, on_one_device, random};

    const BOUNDARIES: [Boundary; 2] = [Boundary::PoleRow, Boundary::PoleEdge];

    fn options(boundary: Boundary) -> ConvOptions<2> {
        let padding = [
            Padding::new(2, boundary),
            Padding::new(1, Boundary::Periodic),
        ];
        ConvOptions::default().with_padding(padding)
    }

    /// A convolution, followed by strided average and maximum pooling.
    struct Stencils(Boundary);

    impl Operator<4, 4> for Stencils {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut weights: Vec<Tensor<4>>) -> X {
            let y = inputs
                .remove(0)
                .conv(weights.remove(0), None, &options(self.0));
            let padding = [Padding::new(1, self.0), Padding::new(1, Boundary::Periodic)];
            let options = PoolOptions::new([3, 3])
                .with_stride([2, 1])
                .with_padding(padding);
            y.clone().avg_pool(&options) + y.max_pool(&options)
        }
    }

    /// The same, with padding by flipped, rolled and concatenated rows.
    struct ByHand(Boundary);

    impl ByHand {
        fn padded<X: Field<4>>(&self, x: X, width: usize) -> X {
            let [.., rows, columns] = x.dims();
            let first = usize::from(self.0 == Boundary::PoleRow);
            let across = |start: usize| {
                let rows = x.clone().narrow(2, start, width).flip(&[2]);
                rows.roll(&[(columns / 2) as isize], &[3])
            };
            let (low, high) = (across(first), across(rows - first - width));
            X::cat(vec![low, x.clone(), high], 2)
        }
    }

    impl Operator<4, 4> for ByHand {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut weights: Vec<Tensor<4>>) -> X {
            let ring = [Padding::zeros(0, 0), Padding::new(1, Boundary::Periodic)];
            let conv = ConvOptions::default().with_padding(ring);
            let x = self.padded(inputs.remove(0), 2);
            let y = self.padded(x.conv(weights.remove(0), None, &conv), 1);
            let options = PoolOptions::new([3, 3])
                .with_stride([2, 1])
                .with_padding(ring);
            y.clone().avg_pool(&options) + y.max_pool(&options)
        }
    }

    #[test]
    fn stencils_cross_the_poles_as_padding_by_hand_does() {
        for boundary in BOUNDARIES {
            let inputs = [random([2, 2, 5, 8], "x", 0)];
            let weights = [random([3, 2, 5, 3], "weight", 0)];
            let found = on_one_device(&Stencils(boundary), &inputs, &weights);
            let expected = on_one_device(&ByHand(boundary), &inputs, &weights);
            compare(&found, &expected, 1e-5, "by hand");
        }
    }

    #[test]
    fn stencils_cross_the_poles_on_any_mesh() {
        for boundary in BOUNDARIES {
            let operator = Stencils(boundary);
            check_op(
                &operator,
                &[[2, 2, 5, 8]],
                &[[3, 2, 5, 3]],
                &[0, 2, 3],
                1e-5,
            );
        }
    }

    /// Mean of both neighbours in latitude, by a user-defined stencil.
    struct Sides(Boundary);

    impl Operator<4, 4> for Sides {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            let window = Window::new(3).with_padding(Padding::new(1, self.0));
            let stencil = Stencil::new("sides", vec![window, Window::new(1)]);
            let run = |x| {
                stencil.run(x, |x: Tensor<4>, _| {
                    let rows = x.dims()[2] - 2;
                    (x.clone().narrow(2, 0, rows) + x.narrow(2, 2, rows)) * 0.5
                })
            };
            inputs.remove(0).try_op(run).expect("a stencil has a rule")
        }
    }

    struct Pad(Boundary);

    impl Operator<4, 4> for Pad {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            inputs.remove(0).pad_poles([3, 2], self.0, &[0, 2])
        }
    }

    #[test]
    fn own_stencils_and_odd_channels_on_any_mesh() {
        for boundary in BOUNDARIES {
            check_op(&Sides(boundary), &[[1, 2, 5, 6]], &[], &[0, 1, 2, 3], 1e-6);
            check_op(&Pad(boundary), &[[1, 3, 4, 6]], &[], &[0, 1, 2, 3], 1e-6);
        }
    }

    /// A uniform flow over the pole remains uniform across it.
    #[test]
    fn winds_keep_their_direction_across_the_pole() {
        let columns = 8;
        let angle = |column: usize| std::f64::consts::TAU * column as f64 / columns as f64;
        // Towards the zero meridian: east and north components, the same at all latitudes near a
        // pole.
        let east: Vec<f32> = (0..columns).map(|j| -angle(j).sin() as f32).collect();
        let north: Vec<f32> = (0..columns).map(|j| -angle(j).cos() as f32).collect();
        let rows = [east, north]
            .map(|row| [row.clone(), row].concat())
            .concat();
        let x = Tensor::<1>::from_floats(rows.as_slice(), &Default::default());
        let x = ShardTensor::solo(x.reshape([1, 2, 2, columns]));
        let y = pad_poles(x, [1, 0], Boundary::PoleEdge, &[0, 1]).unwrap();
        let y = y.into_local();
        let (across, first) = (y.clone().narrow(2, 0, 1), y.narrow(2, 1, 1));
        let off: f32 = (across - first).abs().max().into_scalar();
        assert!(off < 1e-6, "{off}");
    }

    #[test]
    fn fields_without_opposite_meridians_are_refused_before_anything_is_sent() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("lon", 2)])?;
                let x = ShardTensor::<4>::ones([1, 2, 4, 7], &mesh, &[Shard(3)])?;
                let before = world.comm_stats();
                let weight = Tensor::<4>::ones([2, 2, 5, 3], world.device());
                let edge = Boundary::PoleEdge;
                let error = crate::conv::conv(x.clone(), weight, None, &options(edge)).unwrap_err();
                let told = "conv2d: poles in dim 2, but 7 cells have no opposite meridians";
                assert!(error.to_string().starts_with(told), "{error}");
                for (boundary, odd, told) in [
                    (edge, vec![], "no opposite meridians"),
                    (edge, vec![2], "odd channel 2 of 2"),
                    (Boundary::Reflect, vec![], "expected PoleRow or PoleEdge"),
                ] {
                    let error = pad_poles(x.clone(), [1, 1], boundary, &odd).unwrap_err();
                    assert!(error.to_string().contains(told), "{error}");
                }
                assert_eq!(world.comm_stats(), before);
                Ok(())
            })
            .unwrap();
    }
}
