//! Sums of the penalties of one shard in one pass.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{Error, Result, ShardTensor, tasks};
use pulp::{Simd, WithSimd};

use super::{Penalty, Reduction, reduced};
use crate::arithmetic::channels;
use crate::field::{Field, WithDims};
use crate::kernel::flex::{self, with_float};
use crate::kernel::lanes::{Function, map, sums};
use crate::kernel::simd::{Element, Isa};
use crate::precision::{cast_shard, narrowed, wider};
use crate::reduce::of_all;

/// Number of elements summed in their own precision before sums continue in double precision.
const BLOCK: usize = 2048;

/// Reduces the penalties of `x − target` to one number.
///
/// # Errors
/// Fields that do not match, and a δ that is not positive.
pub(super) fn penalized<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    penalty: Penalty,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let (x, target) = (x.into_shard(), target.into_shard());
    let loss = Error::catch(|| {
        let dtype = x.local().dtype();
        let fields = [x.clone(), target.clone()];
        let loss = match by_kernels(fields, None, penalty, reduction)? {
            Some(loss) => loss,
            None => {
                let error = cast_shard(x - target, wider(dtype));
                reduced(penalty.of(error), reduction)
            }
        };
        Ok(narrowed(loss, dtype))
    })?;
    loss.map(Field::from_shard)
}

/// Reduces the penalties of a field and its target, times their weights, in at least f32 and
/// without storing a field of errors. `None` if the kernels do not support the device, or fields of
/// two layouts or dtypes.
///
/// # Errors
/// A δ that is not positive.
pub(super) fn by_kernels<const D: usize>(
    [x, target]: [ShardTensor<D>; 2],
    weight: Option<ShardTensor<D>>,
    penalty: Penalty,
    reduction: Reduction,
) -> Result<Option<ShardTensor<1>>> {
    penalty.check()?;
    let alike = x.layout() == target.layout()
        && x.local().dtype() == target.local().dtype()
        && x.require_resolved("loss").is_ok();
    if !alike || !flex::runs_on(&x.device()) {
        return Ok(None);
    }
    let count: usize = x.dims().iter().product();
    let scale = match reduction {
        Reduction::Mean => (count as f64).recip(),
        Reduction::Sum => 1.0,
    };
    let layout = of_all("loss", x.layout())?;
    let (mesh, shape) = (x.mesh().clone(), Shape::from(x.local().dims().to_vec()));
    let dims = weight
        .as_ref()
        .and_then(|weight| channels(x.layout(), weight.layout()));
    let sum = Sum {
        penalty,
        scale,
        row: dims.map(|[_, end]| end),
    };
    let [x, target] = [x, target].map(|shard| shard.into_local().into_dispatch());
    let sum = match weight.map(|weight| weight.into_local().into_dispatch()) {
        None => apply(sum, [x, target]),
        Some(weight) if dims.is_some() => apply(sum, [x, target, weight]),
        Some(weight) => apply(sum, [x, target, Dispatch::float_expand(weight, shape)]),
    };
    let sum = Tensor::from_dispatch(sum);
    Ok(Some(ShardTensor::from_parts(sum, layout, mesh)))
}

/// Replaces products with weights by zero where the weight is zero, since zero times NaN is NaN.
#[inline(always)]
fn weighted<S: Simd, E: Element>(
    simd: S,
    weight: E::Vector<S>,
    product: E::Vector<S>,
) -> E::Vector<S> {
    let zero = E::splat(simd, E::default());
    E::select_equal(simd, [weight, zero], zero, product)
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

/// Graph node for the sum of the penalties of the first input minus the second, times `scale` and
/// the weights in the third input, if there is one.
#[derive(Clone, Copy, Debug)]
struct Sum {
    penalty: Penalty,
    scale: f64,
    /// First dim of the rows that have one weight each; `None` if every element has one, or none.
    row: Option<usize>,
}

impl Sum {
    /// Number of elements of a row; without weights of rows, that of all elements.
    fn row_length(&self, shape: &Shape) -> usize {
        shape[self.row.unwrap_or(0)..].iter().product()
    }
}

struct Block<'a, E> {
    penalty: Penalty,
    inputs: [&'a [E]; 2],
    /// Weights of the elements.
    weights: Option<&'a [E]>,
}

impl<E: Element> WithSimd for Block<'_, E> {
    type Output = E;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> E {
        let Self {
            penalty,
            inputs,
            weights,
        } = self;
        let zero = E::splat(simd, E::default());
        if let Some(weights) = weights {
            let [sum] = sums(
                simd,
                [inputs[0], inputs[1], weights],
                [zero; 3],
                #[inline(always)]
                |[sum], [x, target, weight]| {
                    let error = E::minus(simd, x, target);
                    let product = E::times(simd, penalty.value::<S, E>(simd, error), weight);
                    [E::plus(simd, sum, weighted::<S, E>(simd, weight, product))]
                },
            );
            return sum;
        }
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

/// Derivatives of the penalties, times a factor and the weight of the row.
struct Slope<'a, E> {
    penalty: Penalty,
    factor: f64,
    weights: Option<&'a [E]>,
}

impl<E: Element> Function<E, 2> for Slope<'_, E> {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, row: usize, [x, target]: [E::Vector<S>; 2]) -> E::Vector<S> {
        let weight = self
            .weights
            .map_or(1.0, |weights| weights[row % weights.len()].to_f64());
        if weight == 0.0 {
            return E::splat(simd, E::default());
        }
        let slope = self.penalty.slope::<S, E>(simd, E::minus(simd, x, target));
        E::times(
            simd,
            slope,
            E::splat(simd, E::from_f64(self.factor * weight)),
        )
    }
}

/// Derivatives of the penalties, times a factor and the weights in the third input.
struct WeightedSlope {
    penalty: Penalty,
    factor: f64,
}

impl<E: Element> Function<E, 3> for WeightedSlope {
    #[inline(always)]
    fn at<S: Simd>(
        &self,
        simd: S,
        _: usize,
        [x, target, weight]: [E::Vector<S>; 3],
    ) -> E::Vector<S> {
        let slope = self.penalty.slope::<S, E>(simd, E::minus(simd, x, target));
        let factor = E::times(simd, weight, E::splat(simd, E::from_f64(self.factor)));
        weighted::<S, E>(simd, weight, E::times(simd, slope, factor))
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
        let (dtype, length) = (inputs[0].dtype(), self.row_length(&inputs[0].shape()));
        let isa = Isa::chosen()?;
        let y = with_float!(dtype, E => {
            let inputs = inputs.into_iter().map(flex::operand::<E>).collect::<Result<Vec<_>>>()?;
            let [x, target] = [0, 1].map(|input| flex::elements::<E>(&inputs[input]));
            let weights = inputs.get(2).map(flex::elements::<E>);
            let (of_rows, of_elements) = match self.row {
                Some(_) => (weights, None),
                None => (None, weights),
            };
            let (penalty, pieces) = (self.penalty, length.div_ceil(BLOCK));
            let count = x.len() / length.max(1) * pieces;
            let blocks: Vec<f64> = tasks::map(count, 8, |block| {
                let (row, start) = (block / pieces, block % pieces * BLOCK);
                let weight = of_rows.map_or(1.0, |weights| weights[row % weights.len()].to_f64());
                if weight == 0.0 {
                    return 0.0;
                }
                let range = row * length + start..row * length + length.min(start + BLOCK);
                let sum: E = isa.run(Block {
                    penalty,
                    inputs: [&x[range.clone()], &target[range.clone()]],
                    weights: of_elements.map(|weights| &weights[range]),
                });
                weight * sum.to_f64()
            });
            let sum: f64 = blocks.into_iter().sum();
            flex::small_result(vec![E::from_f64(sum * self.scale)], &[1], wider(dtype))
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let inputs = [0, 1].map(|input| pass.take_input(input));
        let (dtype, shape) = (inputs[0].dtype(), inputs[0].shape());
        let weights = (pass.inputs.len() > 2).then(|| pass.take_input(2));
        let (isa, cotangent) = (Isa::chosen()?, Tensor::<1>::from_dispatch(pass.cotangent));
        let factor = self.scale * cotangent.into_scalar::<f64>();
        let (penalty, length) = (self.penalty, self.row_length(&shape));
        Ok(with_float!(dtype, E => {
            let [x, target] = inputs.map(flex::operand::<E>);
            let (x, target) = (x?, target?);
            let [x, target] = [&x, &target].map(flex::elements::<E>);
            let weights = weights.map(flex::operand::<E>).transpose()?;
            let weights = weights.as_ref().map(flex::elements::<E>);
            let rows = x.len() / length.max(1);
            let slopes = |factor: f64| match weights {
                Some(weights) if self.row.is_none() => {
                    map(isa, [x, target, weights], 1, &WeightedSlope { penalty, factor })
                }
                weights => map(isa, [x, target], rows, &Slope { penalty, factor, weights }),
            };
            let gradient = |wanted: bool, factor: f64| {
                wanted.then(|| flex::result(slopes(factor), &shape, dtype))
            };
            vec![gradient(pass.wanted[0], factor), gradient(pass.wanted[1], -factor)]
        }))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::testing::{difference, normal, random};

    #[test]
    fn kernels_and_burns_operators_agree() {
        for penalty in [Penalty::Squared, Penalty::Absolute, Penalty::Huber(0.7)] {
            let run = |fused: bool| {
                let [x, target] = ["x", "target"]
                    .map(|name| random::<2>([50, 101], name, 0).detach().require_grad());
                let loss: Tensor<1> = if fused {
                    penalized(x.clone(), target.clone(), penalty, Reduction::Mean).unwrap()
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

    /// Weights of elements, of rows and of columns. The first weight is zero, and the field has NaN
    /// there.
    #[test]
    fn cells_of_weight_zero_have_no_loss_and_no_gradient() {
        let field = |name, shape: [usize; 2], cell: f32| {
            let numbers = Tensor::<2>::from_data(normal(&shape, name, 0), &Device::flex());
            numbers.slice_fill([0..1, 0..1], cell)
        };
        for penalty in [Penalty::Squared, Penalty::Absolute, Penalty::Huber(0.7)] {
            for shape in [[50, 101], [50, 1], [1, 101]] {
                let weight = field("weight", shape, 0.0).abs();
                let none = weight.clone().expand([50, 101]).equal_elem(0.0);
                let run = |fused: bool| {
                    let hole = if fused { f32::NAN } else { 0.0 };
                    let x = field("x", [50, 101], 0.0).mask_fill(none.clone(), hole);
                    let x = x.autodiff().require_grad();
                    let target = field("target", [50, 101], 0.0).autodiff();
                    let loss: Tensor<1> = if fused {
                        let fields = [x.clone(), target].map(ShardTensor::solo);
                        let weight = Some(ShardTensor::solo(weight.clone()));
                        let loss = by_kernels(fields, weight, penalty, Reduction::Mean).unwrap();
                        loss.expect("the kernels run").into_local()
                    } else {
                        let losses = penalty.of(x.clone() - target) * weight.clone().autodiff();
                        losses.mean()
                    };
                    let gradients = (loss.clone() * 3.0).backward();
                    let gradient = x.grad(&gradients).unwrap().into_data();
                    [loss.inner().into_data(), gradient]
                };
                for (ours, burns) in run(true).iter().zip(&run(false)) {
                    assert!(difference(ours, burns) < 1e-6, "{penalty:?}, {shape:?}");
                }
            }
        }
    }

    #[test]
    fn errors_of_zero_have_no_slope_and_of_nan_nan() {
        let x = Tensor::<1>::from([1.0, f32::NAN, 3.0])
            .autodiff()
            .require_grad();
        let target = Tensor::<1>::from([1.0, 0.0, 5.0]).autodiff();
        let loss = penalized(x.clone(), target, Penalty::Absolute, Reduction::Sum).unwrap();
        let gradient = x.grad(&loss.backward()).unwrap().into_data();
        let found: Vec<f32> = gradient.iter().collect();
        assert!(
            found[0] == 0.0 && found[1].is_nan() && found[2] == -1.0,
            "{found:?}"
        );
    }
}
