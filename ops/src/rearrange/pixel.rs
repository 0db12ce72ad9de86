//! Pixel shuffle and unshuffle: rearranges channels into cells of a finer grid, and back.
//!
//! `y[b, c, h·r + i, w·r + j] = x[b, c·r² + i·r + j, h, w]` for a factor `r`, and the inverse.
//! Semantics follow PyTorch.
//!
//! # Placement
//! All dims may be sharded.
//!
//! # Communication
//! None where shards consist of whole blocks: of `r²` channels, or of `r` rows and columns for the
//! inverse. Otherwise each block that several ranks share is moved to one of them.
//!
//! # Adjoint
//! The inverse.

use burn::nn::{PixelShuffle, PixelUnshuffle};
use halocline_core::{Error, Result, ShardTensor};

use super::flatten::{flatten, unflatten};
use super::permute::permute;
use crate::driver::place::extents_by;
use crate::field::{Field, run};
use crate::golden::{Golden, output, with_dims};
use crate::layer::Layer;

/// Rearranges groups of `factor²` channels of `[batch, channels · factor², rows, columns]` into
/// blocks of `factor × factor` cells. See the [module](self).
///
/// # Shapes
/// The result is `[batch, channels, rows · factor, columns · factor]`.
///
/// # Errors
/// A factor of zero, or whose square does not divide the channels; another number of dims; a
/// failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::pixel_shuffle;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0, 3.0, 4.0]]).reshape([1, 4, 1, 1]));
/// let y = pixel_shuffle(x, 2)?;
/// y.local().to_data().assert_eq(&[[[[1.0_f32, 2.0], [3.0, 4.0]]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn pixel_shuffle<const D: usize>(x: ShardTensor<D>, factor: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "pixel_shuffle";
    let Some(block) = factor.checked_mul(factor) else {
        let message = format!(
            "dim 1 of {:?}; expected a multiple of the square of {factor}",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    };
    let x = in_blocks(x, NAME, &[(1, block)])?;
    let channels = x.dims()[1] / block;
    // [batch, channels, factor, factor, rows, columns]
    let x: ShardTensor<6> = unflatten(x, 1, &[channels, factor, factor])?;
    let x = permute(x, [0, 1, 4, 2, 5, 3])?;
    let x: ShardTensor<5> = flatten(x, 4, 5)?;
    flatten(x, 2, 3)
}

/// Rearranges blocks of `factor × factor` cells into channels: the inverse of [`pixel_shuffle`].
/// See the [module](self).
///
/// # Shapes
/// `[batch, channels, rows, columns]` →
/// `[batch, channels · factor², rows / factor, columns / factor]`.
///
/// # Errors
/// A factor that is zero or does not divide rows and columns; another number of dims; a failure of
/// communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::pixel_unshuffle;
///
/// let x = ShardTensor::solo(Tensor::<4>::from([[[[1.0, 2.0], [3.0, 4.0]]]]));
/// let y = pixel_unshuffle(x, 2)?;
/// assert_eq!(y.dims(), [1, 4, 1, 1]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn pixel_unshuffle<const D: usize>(x: ShardTensor<D>, factor: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "pixel_unshuffle";
    let x = in_blocks(x, NAME, &[(2, factor), (3, factor)])?;
    let [rows, columns] = [2, 3].map(|dim| x.dims()[dim] / factor);
    let x: ShardTensor<5> = unflatten(x, 3, &[columns, factor])?;
    let x: ShardTensor<6> = unflatten(x, 2, &[rows, factor])?;
    // [batch, channels, factor, factor, rows, columns]
    let x = permute(x, [0, 1, 3, 5, 2, 4])?;
    flatten(x, 1, 3)
}

/// Redistributes to shards of whole blocks; `blocks` pairs dims with the number of cells that stay
/// together.
fn in_blocks<const D: usize>(
    x: ShardTensor<D>,
    operator: &str,
    blocks: &[(usize, usize)],
) -> Result<ShardTensor<D>> {
    if D != 4 {
        let message = format!("{:?}; expected [batch, channels, rows, columns]", x.dims());
        return Err(Error::operator(operator, message));
    }
    let mut extents = x.layout().all_extents().to_vec();
    for &(dim, block) in blocks {
        let size = x.dims()[dim];
        if block == 0 || !size.is_multiple_of(block) {
            let message = format!(
                "dim {dim} of {:?}; expected a multiple of {block}",
                x.dims()
            );
            return Err(Error::operator(operator, message));
        }
        // A block belongs to the rank that holds its middle.
        extents[dim] = extents_by(&extents[dim], |cell| {
            ((cell + block / 2) / block).min(size / block) * block
        });
    }
    let layout = x.layout().derive(x.placements().to_vec(), extents);
    x.try_redistribute(&layout)
}

macro_rules! layer {
    ($module:ident, $function:ident, $factor:ident) => {
        impl<X: Field<4>> Layer<X> for $module {
            type Output = X;

            #[track_caller]
            fn forward(&self, x: X) -> X {
                run(x, |x| $function(x, self.$factor))
            }
        }
    };
}

layer!(PixelShuffle, pixel_shuffle, upscale_factor);
layer!(PixelUnshuffle, pixel_unshuffle, downscale_factor);

/// Registry entries of pixel shuffle.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("pixel_shuffle", |case| {
        let factor = case.attributes.list("upscale_factor")[0];
        with_dims!(case.dims(), D => {
            output(pixel_shuffle(case.input::<D>(0)?, factor))
        })
    })
    .with_travels(TRAVELS)
    .with_modules("`PixelShuffle`"),
    Golden::new("pixel_unshuffle", |case| {
        let factor = case.attributes.list("downscale_factor")[0];
        with_dims!(case.dims(), D => {
            output(pixel_unshuffle(case.input::<D>(0)?, factor))
        })
    })
    .with_travels(TRAVELS)
    .with_modules("`PixelUnshuffle`"),
];

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = ["cells of blocks that ranks share", "the same back"];

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Blocks;

    impl Operator<4, 4> for Blocks {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            inputs
                .remove(0)
                .pixel_unshuffle(3)
                .square()
                .pixel_shuffle(3)
        }
    }

    #[test]
    fn factors_that_do_not_divide_the_channels_are_refused() {
        for factor in [0, 2, 1 << 40] {
            let x = ShardTensor::solo(Tensor::<4>::ones([1, 6, 2, 2], &Default::default()));
            let error = pixel_shuffle(x, factor).unwrap_err().to_string();
            assert!(error.contains("expected a multiple of"), "{error}");
        }
    }

    #[test]
    fn shards_may_cut_through_blocks() {
        check_op(&Blocks, &[[1, 2, 6, 9]], &[], &[0, 1, 2, 3], 1e-6);
    }
}
