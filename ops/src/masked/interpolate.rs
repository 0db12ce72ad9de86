//! Interpolation of the cells that count.

use halocline_core::{Error, Result};

use super::{apply_mask, broadcast_in_space, in_f32, reciprocal};
use crate::field::Field;
use crate::resample::{Interpolation, Mode, interpolate};

/// Interpolation of the cells that count, with the weights `w` of the rule: `Σ w·m·x / Σ w·m`; zero
/// where no cell with a weight counts. The same interpolation of the mask is positive where one
/// does.
///
/// # Shapes
/// `[batch, channels, *spatial]`, with `output_size` cells in the spatial dims of the result; the
/// mask may have size one in any dim.
///
/// # Errors
/// Fails for [`Mode::Cubic`] and [`Mode::Lanczos`], some of whose weights are negative; otherwise
/// errors of [`interpolate`](fn@interpolate) and [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::masked_interpolate;
/// use halocline_ops::resample::{Interpolation, Mode};
///
/// let x = Tensor::<3>::from([[[1.0, f32::NAN, 3.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0]]]);
/// let linear = Interpolation::new(Mode::Linear);
/// let y = masked_interpolate::<3, 1, _>(x, mask, [6], linear)?;
/// y.into_data().assert_eq(&[[[1.0_f32, 1.0, 1.0, 3.0, 3.0, 3.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_interpolate<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    mask: X,
    output_size: [usize; N],
    interpolation: Interpolation<N>,
) -> Result<X> {
    let mode = interpolation.mode;
    if matches!(mode, Mode::Cubic | Mode::Lanczos) {
        let message = format!(
            "{mode:?}, some of whose weights are negative; expected Nearest, NearestExact, Linear or Area"
        );
        return Err(Error::operator("masked_interpolate", message));
    }
    in_f32(x, mask, |x, mask| {
        let mask = broadcast_in_space(&x, mask)?;
        let x = apply_mask(x, mask.clone())?;
        let sums = interpolate(
            Error::catch(|| x * mask.clone())?,
            output_size,
            interpolation,
        )?;
        let weights = interpolate(mask, output_size, interpolation)?;
        Error::catch(|| sums * reciprocal(weights))
    })
}
