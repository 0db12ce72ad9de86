//! Loss on the amplitudes of Fourier modes.

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};
use pulp::{Simd, WithSimd};

use super::fused::penalized;
use super::{Penalty, Reduction};
use crate::field::{Field, WithDims};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::lanes::{CHUNK, filled_bands, load, load_pairs, store, store_pairs};
use crate::kernel::lines::vectors;
use crate::kernel::local::LocalOperator;
use crate::kernel::simd::{Element, Isa};
use crate::precision::{cast_shard, narrowed, wider};
use crate::spectral::{FftNorm, rfft};

const NAME: &str = "spectral_loss";

/// Added to squared amplitudes, so that the gradient at an amplitude of zero is zero.
const TINY: f64 = 1e-24;

/// Squared error of the amplitudes of Fourier modes, `(|x̂| − |t̂|)²`, over the modes of `dims`
/// (those of [`rfft`](fn@crate::spectral::rfft), orthonormal) and all other cells.
///
/// Unlike [`mse_loss`](super::mse_loss) it does not reward blurred predictions, since phases do not
/// matter. The const parameter `E` must be `D + 1`.
///
/// # Errors
/// Fails for partial values and for fields that do not match; otherwise errors of
/// [`rfft`](fn@crate::spectral::rfft).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, spectral_loss};
///
/// let x = Tensor::<2>::from([[1.0, 0.0, 0.0, 0.0]]);
/// let shifted = Tensor::<2>::from([[0.0, 1.0, 0.0, 0.0]]);
/// let loss = spectral_loss::<3, _, _>(x, shifted, &[1], Reduction::Mean)?;
/// assert!(loss.into_scalar::<f32>() < 1e-12);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn spectral_loss<const E: usize, const D: usize, X: Field<D>>(
    x: X,
    target: X,
    dims: &[usize],
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let (x, target) = (x.into_shard(), target.into_shard());
    for x in [&x, &target] {
        x.require_resolved(NAME)?;
    }
    let (found, expected) = (target.dims(), x.dims());
    // Fields of 8 and 9 cells have as many modes.
    if dims.iter().any(|&dim| found.get(dim) != expected.get(dim)) {
        let message = format!(
            "a target {found:?} for a field {expected:?}; expected the same sizes of dims {dims:?}"
        );
        return Err(Error::operator(NAME, message));
    }
    let dtype = x.local().dtype();
    let amplitude = |x: ShardTensor<D>| -> Result<ShardTensor<E>> {
        let x = Error::catch(|| cast_shard(x, wider(dtype)))?;
        let (local, layout, mesh) = rfft::<D, E>(x, dims, FftNorm::Ortho)?.into_parts();
        let layout = layout.resized(E - 1, vec![1]);
        Ok(ShardTensor::from_parts(Amplitude.run(local), layout, mesh))
    };
    let (x, target) = (amplitude(x)?, amplitude(target)?);
    let loss = penalized(x, target, Penalty::Squared, reduction)?;
    Error::catch(|| narrowed(loss, dtype)).map(Field::from_shard)
}

/// Amplitudes of complex numbers, whose dim keeps size one.
#[derive(Clone, Copy, Debug)]
struct Amplitude;

impl LocalOperator for Amplitude {
    const NAMES: [&'static str; 2] = ["amplitude", "amplitude (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let run = |[_, band]: [usize; 2], y: &mut [E]| {
            let x = &x[2 * band * CHUNK..][..2 * y.len()];
            isa.run(Forward { x, y });
        };
        let mut shape = shape.to_vec();
        *shape.last_mut().expect("a dim of two parts") = 1;
        // SAFETY: all amplitudes of a band are written.
        let y = unsafe { filled_bands([1, x.len() / 2, 1], CHUNK, run) };
        (y, shape)
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], _: &[usize], cotangent: &[E]) -> Buffer<E> {
        let run = |[_, band]: [usize; 2], gradient: &mut [E]| {
            let (start, cells) = (band * CHUNK, gradient.len() / 2);
            isa.run(Backward {
                x: &x[2 * start..][..2 * cells],
                cotangent: &cotangent[start..][..cells],
                gradient,
            });
        };
        // SAFETY: all gradients of a band are written.
        unsafe { filled_bands([1, x.len() / 2, 2], CHUNK, run) }
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        (x.square().sum_dim(D - 1) + TINY).sqrt()
    }
}

struct Forward<'a, E> {
    x: &'a [E],
    y: &'a mut [E],
}

impl<E: Element> WithSimd for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for part in vectors::<S, E>(self.y.len()) {
            let (_, amplitude) = amplitudes(simd, &self.x[2 * part.start..2 * part.end]);
            store(simd, &mut self.y[part], amplitude);
        }
    }
}

struct Backward<'a, E> {
    x: &'a [E],
    cotangent: &'a [E],
    gradient: &'a mut [E],
}

impl<E: Element> WithSimd for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for part in vectors::<S, E>(self.cotangent.len()) {
            let both = 2 * part.start..2 * part.end;
            let (x, amplitude) = amplitudes(simd, &self.x[both.clone()]);
            let factor = E::over(simd, load(simd, &self.cotangent[part]), amplitude);
            let gradient = x.map(
                #[inline(always)]
                |x| E::times(simd, x, factor),
            );
            store_pairs(simd, &mut self.gradient[both], gradient);
        }
    }
}

/// Loads interleaved complex numbers as vectors of both parts, and computes their amplitudes.
#[inline(always)]
fn amplitudes<S: Simd, E: Element>(simd: S, x: &[E]) -> ([E::Vector<S>; 2], E::Vector<S>) {
    let [re, im] = load_pairs(simd, x);
    let tiny = E::splat(simd, E::from_f64(TINY));
    let square = E::mul_add(simd, im, im, E::mul_add(simd, re, re, tiny));
    ([re, im], E::root(simd, square))
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::kernel::local::check_composed_of;
    use crate::reduce::sum_dims;

    #[test]
    fn kernels_and_burns_operators_agree() {
        check_composed_of([2, 3, 90, 2], Amplitude);
        check_composed_of([2, 2, 9000, 2], Amplitude);
    }

    #[test]
    fn fields_of_other_sizes_with_as_many_modes_are_refused() {
        let [x, target] = [8, 9].map(|size| Tensor::<1>::ones([size], &Default::default()));
        let loss = spectral_loss::<2, _, _>(x, target, &[0], Reduction::Mean);
        let error = loss.unwrap_err().to_string();
        assert!(error.contains("a target [9] for a field [8]"), "{error}");
    }

    /// Nothing is sent for the field before its target is refused.
    #[test]
    fn a_partial_target_is_refused_before_anything_is_sent() {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let field = |dim| ShardTensor::<2>::ones([4, 6], &mesh, &[Shard(dim)]);
            let target = sum_dims(field(0)?, &[0])?;
            let before = world.comm_stats();
            let loss = spectral_loss::<3, _, _>(field(1)?, target, &[1], Reduction::Mean);
            assert!(loss.unwrap_err().to_string().contains("spectral_loss"));
            assert_eq!(world.comm_stats(), before);
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn the_gradient_of_an_amplitude_of_zero_is_zero() {
        let x = Tensor::<2>::from([[0.0, 0.0], [3.0, 4.0]])
            .autodiff()
            .require_grad();
        let gradient = x.grad(&Amplitude.run(x.clone()).sum().backward()).unwrap();
        gradient
            .into_data()
            .assert_eq(&[[0.0_f32, 0.0], [0.6, 0.8]].into(), true);
    }
}
