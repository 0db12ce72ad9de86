//! Sums of the penalties of one shard in one pass.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{Error, OrRaise, Result, ShardTensor, tasks};
use pulp::{Simd, WithSimd};

use super::{Penalty, Reduction, reduced};
use crate::field::{Field, WithDims};
use crate::kernel::flex::{self, with_float};
use crate::kernel::lanes::{Function, map, sums};
use crate::kernel::simd::{Element, Isa};
use crate::precision::{narrowed, wider};
use crate::reduce::of_all;

/// Number of elements summed in their own precision before sums continue in double precision.
const BLOCK: usize = 2048;

/// Reduces the penalties of `x − target` to one number. If both have the same layout and our
/// kernels run, no field of errors is stored.
#[track_caller]
pub(super) fn penalized<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    penalty: Penalty,
    reduction: Reduction,
) -> WithDims<X, 1> {
    penalty.check().or_raise();
    let (shard, other) = (x.clone().into_shard(), target.clone().into_shard());
    let alike = shard.layout() == other.layout()
        && shard.local().dtype() == other.local().dtype()
        && shard.require_resolved("loss").is_ok();
    if !alike || !flex::runs_on(&shard.device()) {
        return reduced(penalty.of(x - target), reduction);
    }
    let count: usize = shard.dims().iter().product();
    let scale = match reduction {
        Reduction::Mean => (count as f64).recip(),
        Reduction::Sum => 1.0,
    };
    let layout = of_all("loss", shard.layout()).or_raise();
    let (mesh, dtype) = (shard.mesh().clone(), shard.local().dtype());
    let inputs = [shard, other].map(|shard| shard.into_local().into_dispatch());
    let sum = Tensor::<1>::from_dispatch(apply(Sum { penalty, scale }, inputs));
    let sum = ShardTensor::from_parts(sum, layout, mesh);
    Field::from_shard(narrowed(sum, dtype))
}

impl Penalty {
    /// Requires a positive δ.
    pub(super) fn check(self) -> Result<()> {
        match self {
            Self::Huber(delta) if delta <= 0.0 || delta.is_nan() => {
                let message = format!("delta {delta}; expected a positive number");
                Err(Error::operator("huber_loss", message))
            }
            _ => Ok(()),
        }
    }

    /// Penalties of a vector of errors.
    #[inline(always)]
    fn value<S: Simd, E: Element>(self, simd: S, error: E::Vector<S>) -> E::Vector<S> {
        match self {
            Self::Squared => E::times(simd, error, error),
            Self::Absolute => E::abs(simd, error),
            Self::Huber(delta) => {
                // An infinite δ times a rest of zero would be NaN.
                let delta = delta.min(E::HIGHEST.to_f64());
                let [delta, half] = [delta, 0.5].map(|value| E::splat(simd, E::from_f64(value)));
                let size = E::abs(simd, error);
                // The quadratic part of an error, and the linear rest.
                let quadratic = E::select_less(simd, [delta, size], delta, size);
                let linear = E::times(simd, E::minus(simd, size, quadratic), delta);
                E::mul_add(simd, E::times(simd, quadratic, half), quadratic, linear)
            }
        }
    }

    /// Derivatives of the penalties.
    #[inline(always)]
    fn slope<S: Simd, E: Element>(self, simd: S, error: E::Vector<S>) -> E::Vector<S> {
        let splat = |value| E::splat(simd, E::from_f64(value));
        match self {
            Self::Squared => E::plus(simd, error, error),
            Self::Absolute => {
                // Zero for zero, NaN for NaN.
                let zero = splat(0.0);
                let rest = E::times(simd, error, zero);
                let above = E::select_less(simd, [zero, error], splat(1.0), rest);
                E::select_less(simd, [error, zero], splat(-1.0), above)
            }
            Self::Huber(delta) => {
                let (low, high) = (splat(-delta), splat(delta));
                let below = E::select_less(simd, [error, low], low, error);
                E::select_less(simd, [high, below], high, below)
            }
        }
    }
}

/// Graph node for the sum of the penalties of the first input minus the second, times `scale`.
#[derive(Clone, Copy, Debug)]
struct Sum {
    penalty: Penalty,
    scale: f64,
}

struct Block<'a, E> {
    penalty: Penalty,
    inputs: [&'a [E]; 2],
}

impl<E: Element> WithSimd for Block<'_, E> {
    type Output = E;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> E {
        let Self { penalty, inputs } = self;
        let zero = E::splat(simd, E::default());
        let [sum] = sums(
            simd,
            inputs,
            [zero, zero],
            #[inline(always)]
            |[sum], [x, target]| {
                let error = E::minus(simd, x, target);
                [E::plus(simd, sum, penalty.value::<S, E>(simd, error))]
            },
        );
        sum
    }
}

/// Derivatives of the penalties, times a factor.
struct Slope {
    penalty: Penalty,
    factor: f64,
}

impl<E: Element> Function<E, 2> for Slope {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, _: usize, [x, target]: [E::Vector<S>; 2]) -> E::Vector<S> {
        let slope = self.penalty.slope::<S, E>(simd, E::minus(simd, x, target));
        E::times(simd, slope, E::splat(simd, E::from_f64(self.factor)))
    }
}

impl Operator for Sum {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["loss", "loss (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let dtype = inputs[0].dtype();
        let isa = Isa::chosen()?;
        let y = with_float!(dtype, E => {
            let inputs = inputs.into_iter().map(flex::operand::<E>).collect::<Result<Vec<_>>>()?;
            let [x, target] = [0, 1].map(|input| flex::elements::<E>(&inputs[input]));
            let penalty = self.penalty;
            let blocks: Vec<E> = tasks::map(x.len().div_ceil(BLOCK), 8, |block| {
                let range = block * BLOCK..x.len().min((block + 1) * BLOCK);
                isa.run(Block { penalty, inputs: [&x[range.clone()], &target[range]] })
            });
            let sum: f64 = blocks.into_iter().map(E::to_f64).sum();
            flex::small_result(vec![E::from_f64(sum * self.scale)], &[1], wider(dtype))
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let inputs = [0, 1].map(|input| pass.take_input(input));
        let (dtype, shape) = (inputs[0].dtype(), inputs[0].shape());
        let (isa, cotangent) = (Isa::chosen()?, Tensor::<1>::from_dispatch(pass.cotangent));
        let factor = self.scale * cotangent.into_scalar::<f64>();
        Ok(with_float!(dtype, E => {
            let [x, target] = inputs.map(flex::operand::<E>);
            let (x, target) = (x?, target?);
            let inputs = [&x, &target].map(flex::elements::<E>);
            let gradient = |wanted: bool, factor| {
                let slope = Slope { penalty: self.penalty, factor };
                wanted.then(|| flex::result(map(isa, inputs, 1, &slope), &shape, dtype))
            };
            vec![gradient(pass.wanted[0], factor), gradient(pass.wanted[1], -factor)]
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{difference, random};

    #[test]
    fn kernels_and_burns_operators_agree() {
        for penalty in [Penalty::Squared, Penalty::Absolute, Penalty::Huber(0.7)] {
            let run = |fused: bool| {
                let [x, target] = ["x", "target"]
                    .map(|name| random::<2>([50, 101], name, 0).detach().require_grad());
                let loss: Tensor<1> = if fused {
                    penalized(x.clone(), target.clone(), penalty, Reduction::Mean)
                } else {
                    reduced(penalty.of(x.clone() - target.clone()), Reduction::Mean)
                };
                let gradients = (loss.clone() * 3.0).backward();
                let gradient = |leaf: &Tensor<2>| leaf.grad(&gradients).unwrap().into_data();
                [loss.inner().into_data(), gradient(&x), gradient(&target)]
            };
            for (ours, burns) in run(true).iter().zip(&run(false)) {
                assert!(difference(ours, burns) < 1e-6, "{penalty:?}");
            }
        }
    }

    #[test]
    fn errors_of_zero_have_no_slope_and_of_nan_nan() {
        let x = Tensor::<1>::from([1.0, f32::NAN, 3.0])
            .autodiff()
            .require_grad();
        let target = Tensor::<1>::from([1.0, 0.0, 5.0]).autodiff();
        let loss: Tensor<1> = penalized(x.clone(), target, Penalty::Absolute, Reduction::Sum);
        let gradient = x.grad(&loss.backward()).unwrap().into_data();
        let found: Vec<f32> = gradient.iter().collect();
        assert!(
            found[0] == 0.0 && found[1].is_nan() && found[2] == -1.0,
            "{found:?}"
        );
    }
}
