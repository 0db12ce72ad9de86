//! Negative logarithms of likelihoods: binary cross-entropy, and that of a normal distribution.

use std::f64::consts::TAU;

use burn::tensor::{Tensor, TensorData, activation};
use halocline_core::ops::agree_on;
use halocline_core::{Error, OrRaise, Result, ShardTensor};

use super::weighted::mean_weight;
use super::{Reduction, reduced};
use crate::field::{Field, WithDims};
use crate::masked::{apply_mask, require_fit};
use crate::precision::{cast_shard, narrowed, wider};
use crate::rearrange::distribute_operand;

const BINARY: &str = "binary_cross_entropy_with_logits";
const GAUSSIAN: &str = "gaussian_nll_loss";
/// Dim of the classes.
const CLASSES: usize = 1;

/// Options of [`binary_cross_entropy_with_logits`].
///
/// # Example
/// ```
/// use halocline_ops::BinaryCrossEntropyOptions;
///
/// let options = BinaryCrossEntropyOptions::default().with_pos_weight(vec![9.0]);
/// assert_eq!(options.pos_weight, Some(vec![9.0]));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BinaryCrossEntropyOptions {
    /// Factor of the loss of positives, for each class (dim 1) or one for all; 1 by default.
    pub pos_weight: Option<Vec<f64>>,
}

impl BinaryCrossEntropyOptions {
    /// Sets the factor of the loss of positives; see [`pos_weight`](Self::pos_weight).
    #[must_use]
    pub fn with_pos_weight(self, weights: Vec<f64>) -> Self {
        Self {
            pos_weight: Some(weights),
        }
    }

    fn check(&self, shape: &[usize]) -> Result<()> {
        let Some(weights) = &self.pos_weight else {
            return Ok(());
        };
        let classes = shape.get(CLASSES).copied().unwrap_or(1);
        if ![1, classes].contains(&weights.len()) {
            let message = format!(
                "{} weights of positives for logits {shape:?}; expected one, or one for each of {classes} classes",
                weights.len()
            );
            return Err(Error::operator(BINARY, message));
        }
        for weight in weights {
            if !(0.0..f64::INFINITY).contains(weight) {
                let message =
                    format!("a weight of positives of {weight}; expected 0 or more, and finite");
                return Err(Error::operator(BINARY, message));
            }
        }
        Ok(())
    }
}

/// Options of [`gaussian_nll_loss`].
///
/// # Example
/// ```
/// use halocline_ops::GaussianNllOptions;
///
/// let options = GaussianNllOptions::default().with_full(true);
/// assert_eq!((options.full, options.eps), (true, 1e-6));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GaussianNllOptions {
    /// Whether the constant `½·ln 2π` is added.
    pub full: bool,
    /// Least variance: smaller ones are raised to it.
    pub eps: f64,
}

impl Default for GaussianNllOptions {
    fn default() -> Self {
        Self {
            full: false,
            eps: 1e-6,
        }
    }
}

impl GaussianNllOptions {
    /// Adds the constant `½·ln 2π`, or leaves it out.
    #[must_use]
    pub fn with_full(self, full: bool) -> Self {
        Self { full, ..self }
    }

    /// Sets the least variance.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }
}

/// Binary cross-entropy of logits `x` and targets `t`, probabilities from 0 to 1:
/// `−p·t·ln σ(x) − (1 − t)·ln(1 − σ(x))`, for weights of positives `p` and the logistic function σ.
/// Semantics follow PyTorch, except that the mean with weights is `Σ wᵢ·ℓᵢ / Σ wᵢ`.
///
/// # Shapes
/// `target` has the shape of the logits. `weight`, such as a mask, is as for
/// [`weighted_loss`](super::weighted_loss): elements of weight zero have no effect, whatever the
/// fields hold there.
///
/// # Placement
/// As for the [module](super). A mean with weights sums them over all ranks in one small message.
///
/// # Adjoint
/// `(1 − t)·σ(x) − p·t·(1 − σ(x))` for the logits. Weights have no gradient.
///
/// # Errors
/// Fails for fields that do not match, for partial values, for weights with another shape or other
/// shards, for weights of positives that are negative, infinite, or not one or one for each class,
/// and if communication fails.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{BinaryCrossEntropyOptions, Reduction, binary_cross_entropy_with_logits};
///
/// let (logits, target) = (Tensor::<1>::from([0.0, 0.0]), Tensor::from([1.0, 0.0]));
/// let options = BinaryCrossEntropyOptions::default().with_pos_weight(vec![3.0]);
/// let loss = binary_cross_entropy_with_logits(logits, target, None, &options, Reduction::Sum)?;
/// assert!((loss.into_scalar::<f32>() - 4.0 * 2.0_f32.ln()).abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn binary_cross_entropy_with_logits<const D: usize, X: Field<D>>(
    logits: X,
    target: X,
    weight: Option<X>,
    options: &BinaryCrossEntropyOptions,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let fields = [logits, target].map(X::into_shard);
    options.check(&fields[0].dims())?;
    let weight = weight.map(X::into_shard);
    let loss = likelihood(BINARY, fields, weight, reduction, |[x, target]| {
        let log = x.clone().map_local(activation::log_sigmoid);
        let log = match &options.pos_weight {
            None => log,
            Some(weights) => {
                let mut shape = [1; D];
                if weights.len() != 1 {
                    shape[CLASSES] = weights.len();
                }
                let more = weights.iter().map(|weight| weight - 1.0);
                let more = TensorData::new(more.collect::<Vec<_>>(), shape);
                let device = x.device().inner();
                let more = Tensor::<D>::from_data(more, (&device, x.local().dtype()));
                let more = distribute_operand(&x, more).or_raise();
                log * (target.clone() * more + 1.0)
            }
        };
        x * (-target + 1.0) - log
    })?;
    Ok(Field::from_shard(loss))
}

/// Negative log-likelihood of targets under normal distributions with means `x` and variances `v`:
/// `½·(ln v + (x − target)² / v)`. Semantics follow PyTorch, whose loss has no weights: the mean with
/// weights is `Σ wᵢ·ℓᵢ / Σ wᵢ`.
///
/// # Shapes
/// `target` and `variance` have the shape of `x`; without weights, the variance may have size one
/// in dims over which it is broadcast. `weight`, such as a mask, is as for
/// [`weighted_loss`](super::weighted_loss): elements of weight zero have no effect, whatever the
/// fields hold there.
///
/// # Placement
/// As for the [module](super). A mean with weights sums them over all ranks in one small message.
///
/// # Adjoint
/// The derivatives of the formula. For a variance below [`eps`](GaussianNllOptions::eps) it is that
/// at `eps`, as in PyTorch. Weights have no gradient.
///
/// # Errors
/// Fails for fields that do not match, for partial values, for weights with another shape or other
/// shards, for an `eps` whose square underflows in f32, and if communication fails. A negative
/// variance is an error on the ranks that hold it; with checks enabled, on all.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{GaussianNllOptions, Reduction, gaussian_nll_loss};
///
/// let (x, target) = (Tensor::<1>::from([1.0, 5.0]), Tensor::from([1.0, 3.0]));
/// let variance = Tensor::from([1.0, 4.0]);
/// let options = GaussianNllOptions::default();
/// let loss = gaussian_nll_loss(x, target, variance, None, &options, Reduction::Sum)?;
/// assert!((loss.into_scalar::<f32>() - 0.5 * (4.0_f32.ln() + 1.0)).abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gaussian_nll_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    variance: X,
    weight: Option<X>,
    options: &GaussianNllOptions,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let GaussianNllOptions { full, eps } = *options;
    // Gradients divide by the square of the variance, which must not underflow in f32.
    let least = f64::from(f32::MIN_POSITIVE).sqrt();
    if !(least..f64::INFINITY).contains(&eps) {
        let message =
            format!("eps {eps}; expected a positive number of at least {least:e}, and finite");
        return Err(Error::operator(GAUSSIAN, message));
    }
    let fields = [x, target, variance].map(X::into_shard);
    let weight = weight.map(X::into_shard);
    let cells = |[x, target, variance]: [ShardTensor<D>; 3]| {
        check_variance(&variance).or_raise();
        // Added as a constant, so that variances that are raised keep their gradients.
        let held = variance.clone().inner();
        let variance = variance + (held.clone().clamp_min(eps) - held);
        let error = x - target;
        let losses = (error.clone() * error / variance.clone() + variance.log()) * 0.5;
        if full {
            losses + 0.5 * TAU.ln()
        } else {
            losses
        }
    };
    let loss = likelihood(GAUSSIAN, fields, weight, reduction, cells)?;
    Ok(Field::from_shard(loss))
}

/// Checks that no variance of this rank, or with checks enabled of any rank, is negative.
fn check_variance<const D: usize>(variance: &ShardTensor<D>) -> Result<()> {
    let local = variance.local().clone().inner();
    let least = (!local.dims().contains(&0)).then(|| local.min().into_scalar::<f64>());
    let found = match least {
        Some(least) if least < 0.0 => {
            let message = format!("a variance of {least}; expected 0 or more");
            Err(Error::operator(GAUSSIAN, message))
        }
        _ => Ok(()),
    };
    let axes = variance.layout().sharded_axes();
    agree_on(variance.mesh(), &axes, GAUSSIAN, found)
}

/// Reduces the losses of elements, times their weights, in at least f32. Where the weight is zero
/// `loss` receives zeros.
fn likelihood<const D: usize, const N: usize>(
    name: &str,
    fields: [ShardTensor<D>; N],
    weight: Option<ShardTensor<D>>,
    reduction: Reduction,
    loss: impl FnOnce([ShardTensor<D>; N]) -> ShardTensor<D>,
) -> Result<ShardTensor<1>> {
    let dtype = fields[0].local().dtype();
    for field in &fields {
        field.require_resolved(name)?;
        if let Some(weight) = &weight {
            require_fit(name, weight, field)?;
        }
    }
    Error::catch(|| {
        let weight = weight.map(|weight| cast_shard(weight.inner(), wider(dtype)));
        let fields = fields.map(|field| {
            let field = cast_shard(field, wider(dtype));
            match &weight {
                None => field,
                Some(weight) => apply_mask(field, weight.clone()).or_raise(),
            }
        });
        let losses = loss(fields);
        let loss = match weight {
            None => reduced(losses, reduction),
            Some(weight) => {
                let loss = reduced(losses * weight.clone(), reduction);
                match reduction {
                    Reduction::Sum => loss,
                    Reduction::Mean => loss / mean_weight(weight),
                }
            }
        };
        narrowed(loss, dtype)
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::rearrange::RearrangeField;
    use crate::testing::{Operator, check_op};

    const SHAPE: [usize; 4] = [2, 3, 5, 7];

    /// A kind of loss.
    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Binary,
        Gaussian,
    }

    /// A loss, with weights of this shape if there is one.
    struct Loss(Kind, Option<[usize; 4]>, Reduction);

    impl Operator<4, 1> for Loss {
        fn apply<X: Field<4>>(&self, inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 1> {
            let Self(kind, shape, reduction) = *self;
            let [x, target, other] = [0, 1, 2].map(|input: usize| inputs[input].clone());
            let weight = shape.map(|shape| {
                let count: usize = shape.iter().product();
                let values = (0..count).map(|i| (i * 5 % 7 % 3) as f32);
                let values = TensorData::new(values.collect::<Vec<_>>(), shape);
                let device = x.clone().into_shard().device().inner();
                x.distribute_operand(Tensor::<4>::from_data(values, &device))
            });
            let loss = match kind {
                Kind::Binary => {
                    let options = BinaryCrossEntropyOptions::default();
                    let options = options.with_pos_weight(vec![0.0, 1.0, 4.0]);
                    let target = (target * other).sigmoid();
                    binary_cross_entropy_with_logits(x, target, weight, &options, reduction)
                }
                Kind::Gaussian => {
                    let options = GaussianNllOptions::default().with_full(true);
                    gaussian_nll_loss(x, target, other.exp(), weight, &options, reduction)
                }
            };
            loss.unwrap()
        }
    }

    #[test]
    fn likelihoods_with_and_without_weights_on_any_mesh() {
        for kind in [Kind::Binary, Kind::Gaussian] {
            for shape in [None, Some(SHAPE), Some([1, 3, 1, 1])] {
                for reduction in [Reduction::Mean, Reduction::Sum] {
                    let operator = Loss(kind, shape, reduction);
                    check_op(&operator, &[SHAPE; 3], &[], &[0, 1, 2, 3], 1e-5);
                }
            }
        }
    }

    fn leaf<const N: usize>(values: [f64; N]) -> Tensor<1> {
        let device = Device::flex().autodiff();
        Tensor::<1>::from_data(values, (&device, DType::F64)).require_grad()
    }

    /// Requires a loss, and gradients of leaves.
    fn assert_close(loss: Tensor<1>, expected: f64, leaves: &[(&Tensor<1>, Vec<f64>)]) {
        let gradients = loss.backward();
        let found = loss.into_scalar::<f64>();
        assert!((found - expected).abs() < 1e-9 * expected.abs(), "{found}");
        for (leaf, expected) in leaves {
            let found = leaf.grad(&gradients).expect("a gradient").into_data();
            for (found, expected) in found.iter::<f64>().zip(expected) {
                let bound = 1e-9 * expected.abs().max(1.0);
                assert!((found - expected).abs() < bound, "{found} for {expected}");
            }
        }
    }

    #[test]
    fn binary_cross_entropy_and_its_gradient_are_those_of_the_formula() {
        let (logits, targets) = ([-60.0, -1.5, 0.0, 0.0, 2.0], [0.0, 0.3, 1.0, 0.0, 1.0]);
        let x = leaf(logits);
        let options = BinaryCrossEntropyOptions::default().with_pos_weight(vec![3.0]);
        let target = leaf(targets).detach();
        let sum = Reduction::Sum;
        let loss = binary_cross_entropy_with_logits(x.clone(), target, None, &options, sum);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let pairs = || logits.into_iter().zip(targets);
        let expected: f64 = pairs()
            .map(|(x, t)| -3.0 * t * sigmoid(x).ln() - (1.0 - t) * (1.0 - sigmoid(x)).ln())
            .sum();
        let gradient = pairs().map(|(x, t)| (1.0 - t) * sigmoid(x) - 3.0 * t * sigmoid(-x));
        assert_close(loss.unwrap(), expected, &[(&x, gradient.collect())]);
    }

    /// A variance below `eps` has the gradient of `eps`.
    #[test]
    fn gaussian_likelihood_and_its_gradients_are_those_of_the_formula() {
        let (errors, variances) = ([0.5, -2.0, 0.3], [1.0, 4.0, 0.0]);
        let (x, variance) = (leaf(errors), leaf(variances));
        let options = GaussianNllOptions::default().with_full(true).with_eps(0.25);
        let loss = gaussian_nll_loss(
            x.clone(),
            leaf([0.0; 3]).detach(),
            variance.clone(),
            None,
            &options,
            Reduction::Mean,
        );
        let pairs = || errors.into_iter().zip(variances.map(|v: f64| v.max(0.25)));
        let expected: f64 = pairs().map(|(e, v)| (v * TAU).ln() + e * e / v).sum();
        let of_x: Vec<f64> = pairs().map(|(e, v)| e / v / 3.0).collect();
        let of_variance = pairs().map(|(e, v)| (1.0 / v - e * e / v / v) / 6.0);
        let leaves = [(&x, of_x), (&variance, of_variance.collect())];
        assert_close(loss.unwrap(), expected / 6.0, &leaves);
    }

    /// NaN, and a negative variance, in the second cell.
    #[test]
    fn cells_of_weight_zero_reach_neither_loss_nor_gradient() {
        let (x, hole) = (leaf([0.4, f64::NAN]), leaf([1.0, f64::NAN]).detach());
        let (mask, mean) = (Some(leaf([2.0, 0.0]).detach()), Reduction::Mean);
        let sigmoid = 1.0 / (1.0 + (-0.4_f64).exp());
        let options = BinaryCrossEntropyOptions::default();
        let (logits, target) = (x.clone(), hole.clone());
        let loss = binary_cross_entropy_with_logits(logits, target, mask.clone(), &options, mean);
        let expected = vec![sigmoid - 1.0, 0.0];
        assert_close(loss.unwrap(), -sigmoid.ln(), &[(&x, expected)]);
        let variance = leaf([1.0, -3.0]);
        let options = GaussianNllOptions::default();
        let loss = gaussian_nll_loss(x.clone(), hole, variance.clone(), mask, &options, mean);
        let leaves = [(&x, vec![-0.6, 0.0]), (&variance, vec![0.32, 0.0])];
        assert_close(loss.unwrap(), 0.18, &leaves);
    }

    /// The sums of these losses overflow f16, and `eps` is less than its smallest number.
    #[test]
    fn half_precision_is_computed_in_f32() {
        let field = |value| {
            let options = (&Default::default(), DType::F16);
            Tensor::<1>::full([200_000], value, options)
        };
        let (options, mean) = (BinaryCrossEntropyOptions::default(), Reduction::Mean);
        let loss = binary_cross_entropy_with_logits(field(0.0), field(1.0), None, &options, mean);
        let found = loss.unwrap().into_scalar::<f32>();
        assert!((found - 2.0_f32.ln()).abs() < 1e-3, "{found}");
        let options = GaussianNllOptions::default().with_eps(1e-9);
        let [x, target, variance] = [field(1.0), field(1.0), field(0.0)];
        let loss = gaussian_nll_loss(x, target, variance, None, &options, mean);
        let found = loss.unwrap().into_scalar::<f32>();
        assert!((found - 0.5 * 1e-9_f32.ln()).abs() < 1e-2, "{found}");
    }

    #[test]
    fn bad_options_and_variances_are_told() {
        let x = || leaf([1.0, -1.0]);
        for (weights, message) in [
            (vec![], "0 weights of positives for logits [2]"),
            (vec![1.0; 3], "3 weights of positives for logits [2]"),
            (vec![-1.0], "-1; expected 0 or more"),
            (vec![f64::NAN], "NaN; expected 0 or more"),
        ] {
            let options = BinaryCrossEntropyOptions::default().with_pos_weight(weights);
            let mean = Reduction::Mean;
            let loss = binary_cross_entropy_with_logits(x(), x(), None, &options, mean);
            let error = loss.unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        for (eps, message) in [
            (0.0, "eps 0; expected a positive number"),
            (1e-30, "of at least 1.08"),
            (f64::NAN, "eps NaN"),
            (1e-6, "a variance of -1"),
        ] {
            let options = GaussianNllOptions::default().with_eps(eps);
            let loss = gaussian_nll_loss(x(), x(), x(), None, &options, Reduction::Mean);
            let error = loss.unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    /// One rank holds it; the other learns of it by a check.
    #[test]
    fn a_negative_variance_is_an_error_on_every_rank() {
        let errors = Launcher::local(2).check(true).collect(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let whole = Tensor::<1>::from_data([1.0_f32, -1.0], &world.device().clone().inner());
            let x = ShardTensor::distribute(whole, &mesh, &[Shard(0)])?;
            let (options, mean) = (GaussianNllOptions::default(), Reduction::Mean);
            let loss = gaussian_nll_loss(x.clone(), x.clone(), x, None, &options, mean);
            Ok(loss.unwrap_err().to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains("a variance of -1"), "{error}");
        }
    }
}
