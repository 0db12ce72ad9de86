//! Kernels of activations and of their gradients.

use pulp::Simd;

use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{Function, map, replace};
use crate::kernel::math::{Distribution, gated, gated_slope, relu};
use crate::kernel::simd::{Element, Isa};

/// Elementwise nonlinearities of layers.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{Activation, activation::activation};
///
/// let x = ShardTensor::solo(Tensor::<1>::from([0.0]));
/// let y = activation("silu", Activation::Silu, x)?.into_local();
/// assert_eq!(y.into_scalar::<f32>(), 0.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x · Φ(x)`, exact; `Φ` is the normal distribution function.
    Gelu,
    /// `x · σ(x)`; `σ` is the sigmoid.
    Silu,
}

impl Activation {
    /// Values for a vector of elements. NaN stays NaN.
    #[inline(always)]
    pub(crate) fn apply<S: Simd, E: Element>(self, simd: S, x: E::Vector<S>) -> E::Vector<S> {
        match self {
            Self::Relu => relu::<S, E>(simd, x),
            Self::Gelu => gated::<S, E>(simd, Distribution::Normal, x),
            Self::Silu => gated::<S, E>(simd, Distribution::Logistic, x),
        }
    }

    /// Gradient of `x`: the cotangent times the derivative. Where a rectifier is zero, the gradient
    /// is zero for any cotangent, NaN included.
    #[inline(always)]
    pub(crate) fn pull<S: Simd, E: Element>(
        self,
        simd: S,
        x: E::Vector<S>,
        cotangent: E::Vector<S>,
    ) -> E::Vector<S> {
        let distribution = match self {
            Self::Relu => {
                let zero = E::splat(simd, E::default());
                let rest = E::select_equal(simd, [x, zero], zero, cotangent);
                return E::select_less(simd, [x, zero], zero, rest);
            }
            Self::Gelu => Distribution::Normal,
            Self::Silu => Distribution::Logistic,
        };
        E::times(simd, gated_slope::<S, E>(simd, distribution, x), cotangent)
    }
}

/// Applies the activation to every element.
pub(crate) fn forward<E: Element>(isa: Isa, activation: Activation, x: &[E]) -> Buffer<E> {
    map(isa, [x], 1, &Forward(activation))
}

/// Computes the gradient of the input: the cotangent times the derivative.
pub(crate) fn backward<E: Element>(
    isa: Isa,
    activation: Activation,
    x: &[E],
    cotangent: &[E],
) -> Buffer<E> {
    map(isa, [cotangent, x], 1, &Backward(activation))
}

/// Replaces every element by its activation.
pub(crate) fn forward_in_place<E: Element>(isa: Isa, activation: Activation, x: &mut [E]) {
    replace(isa, x, [], 1, &Forward(activation));
}

/// Replaces the cotangent by the gradient of the input.
pub(crate) fn backward_in_place<E: Element>(
    isa: Isa,
    activation: Activation,
    x: &[E],
    cotangent: &mut [E],
) {
    replace(isa, cotangent, [x], 1, &Backward(activation));
}

struct Forward(Activation);

impl<E: Element> Function<E, 1> for Forward {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, _: usize, [x]: [E::Vector<S>; 1]) -> E::Vector<S> {
        self.0.apply::<S, E>(simd, x)
    }
}

struct Backward(Activation);

impl<E: Element> Function<E, 2> for Backward {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, _: usize, [cotangent, x]: [E::Vector<S>; 2]) -> E::Vector<S> {
        self.0.pull::<S, E>(simd, x, cotangent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{random, same_for_all_pools};

    const ALL: [Activation; 3] = [Activation::Relu, Activation::Gelu, Activation::Silu];

    #[test]
    fn an_element_does_not_depend_on_its_place_or_on_threads() {
        let x = random(40_003, 1);
        for isa in Isa::available() {
            for activation in ALL {
                let y = same_for_all_pools(|| forward(isa, activation, &x).to_vec());
                for range in [0..0, 0..1, 5..6, 17..50, 16_000..40_003] {
                    assert_eq!(*forward(isa, activation, &x[range.clone()]), y[range]);
                }
            }
        }
    }

    #[test]
    fn elements_may_be_replaced() {
        let (x, cotangent) = (random(40_003, 1), random(40_003, 2));
        for isa in Isa::available() {
            for activation in ALL {
                let (mut y, mut gradient) = (x.clone(), cotangent.clone());
                forward_in_place(isa, activation, &mut y);
                backward_in_place(isa, activation, &x, &mut gradient);
                assert_eq!(y, *forward(isa, activation, &x));
                assert_eq!(gradient, *backward(isa, activation, &x, &cotangent));
            }
        }
    }

    #[test]
    fn a_rectifier_stops_any_cotangent_where_it_is_zero() {
        let (x, cotangent) = (
            [-1.0_f32, 0.0, 2.0, f32::NAN],
            [f32::INFINITY, f32::NAN, 3.0, 4.0],
        );
        for isa in Isa::available() {
            let gradient = backward(isa, Activation::Relu, &x, &cotangent);
            assert_eq!(*gradient, [0.0, 0.0, 3.0, 4.0]);
        }
    }

    #[test]
    fn the_gradient_is_the_limit_of_differences() {
        let (x, cotangent) = (random(1_003, 2), random(1_003, 3));
        let step = 1e-5;
        for isa in Isa::available() {
            for activation in ALL {
                let moved = |step: f64| {
                    let x: Vec<f64> = x.iter().map(|x| 3.0 * x + step).collect();
                    forward(isa, activation, &x)
                };
                let (high, low) = (moved(step), moved(-step));
                let x: Vec<f64> = x.iter().map(|x| 3.0 * x).collect();
                let gradient =
                    same_for_all_pools(|| backward(isa, activation, &x, &cotangent).to_vec());
                for index in 0..x.len() {
                    if activation == Activation::Relu && x[index].abs() <= step {
                        continue;
                    }
                    let slope = (high[index] - low[index]) / (2.0 * step);
                    assert!((gradient[index] - slope * cotangent[index]).abs() < 1e-9);
                }
            }
        }
    }
}
