//! Energy score of ensembles, computed in at least f32.

use halocline_core::{Error, Result};
use halocline_ops::masked::apply_mask;
use halocline_ops::prelude::*;

use crate::ensemble::{CrpsEstimator, check_target, masked_operands, pairs, shares, together};
use crate::precision::{narrowed, wide};

/// Energy score of an ensemble, `mean ‖xᵢ − y‖ − ½ · mean ‖xᵢ − xⱼ‖` (Gneiting and Raftery 2007),
/// averaged over the batch. It is the [`crps`](crate::crps()) of whole fields: it also rewards the
/// right patterns in space and between channels. `‖x‖` is the root of the weighted mean square over
/// channels and cells, so channels should be normalized.
///
/// # Shapes
/// Same as [`crps`](crate::crps()).
///
/// # Placement
/// Any, as for [`crps`](crate::crps()). Communication is the same, plus one sum over the ranks of
/// the norms of members and pairs.
///
/// # Adjoint
/// Adjoint of the norms; the gradient of a zero norm is zero.
///
/// # Errors
/// Same as [`crps`](crate::crps()).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::{CrpsEstimator, energy_score};
///
/// let device = Device::default();
/// let member = |value: f32| Tensor::<5>::full([1, 1, 1, 2, 3], value, &device);
/// let ensemble = Tensor::cat(vec![member(1.0), member(5.0)], 0);
/// let score = energy_score(ensemble, member(2.0), &[1.0, 1.0], CrpsEstimator::Fair)?;
/// assert!((score.into_scalar::<f32>() - (2.0 - 0.5 * 4.0)).abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn energy_score<X: Field<5>>(
    ensemble: X,
    target: X,
    weights: &[f64],
    estimator: CrpsEstimator,
) -> Result<WithDims<X, 1>> {
    const NAME: &str = "energy_score";
    let weights = shares(NAME, &ensemble, weights)?;
    check_target(NAME, &ensemble, &target)?;
    let dtype = ensemble.dtype();
    let (ensemble, target) = together(ensemble, target)?;
    let (ensemble, target) = (wide(ensemble)?, wide(target)?);
    let cells = cells(&ensemble);
    let roots = weights.iter().map(|weight| (weight / cells).sqrt());
    let roots: Vec<f64> = roots.collect();
    let roots = Error::catch(|| ensemble.profile(3, &roots))?;
    let score = of_norms(ensemble, target, roots, estimator)?;
    Error::catch(|| narrowed(score, dtype))
}

/// [`energy_score`] over the cells where `mask` is one, such as `Batch::mask` for data with missing
/// values: `‖x‖` is the root of the weighted mean square over the channels and cells of a sample
/// that have a value. Values of the ensemble and the target elsewhere, NaN included, affect neither
/// the score nor a gradient. The score of a sample with an empty mask is zero.
///
/// # Shapes
/// `mask` has the shape of the target, `[1, batch, channels, lat, lon]`. Placement and
/// communication are the same as for [`energy_score`], plus one small sum of the weights.
///
/// # Errors
/// Same as [`energy_score`]; the mask and the target have different shapes.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::{CrpsEstimator, energy_score_masked};
///
/// let ensemble = Tensor::<5>::from([[[[[1.0, f32::NAN]]]], [[[[3.0, 4.0]]]]]);
/// let target = Tensor::from([[[[[2.5, f32::NAN]]]]]);
/// let mask = Tensor::from([[[[[1.0, 0.0]]]]]);
/// let score = energy_score_masked(ensemble, target, mask, &[1.0], CrpsEstimator::Biased)?;
/// let expected = (1.5 + 0.5) / 2.0 - 0.5 * 1.0;
/// assert!((score.into_scalar::<f32>() - expected).abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn energy_score_masked<X: Field<5>>(
    ensemble: X,
    target: X,
    mask: X,
    weights: &[f64],
    estimator: CrpsEstimator,
) -> Result<WithDims<X, 1>> {
    const NAME: &str = "energy_score_masked";
    let weights = shares(NAME, &ensemble, weights)?;
    let dtype = ensemble.dtype();
    let [ensemble, target, mask] = masked_operands(NAME, ensemble, target, mask)?;
    let area = Error::catch(|| ensemble.profile(3, &weights) * mask)?;
    // Means over the sample, [1, batch, 1, 1, 1].
    let means = Error::catch(|| area.clone().mean_dims(&[2, 3, 4]).resolve())?;
    // 0/0 in a sample without values.
    let fractions = apply_mask(Error::catch(|| area.clone() / means)?, area)?;
    let root = cells(&ensemble).recip().sqrt();
    let roots = Error::catch(|| fractions.sqrt() * root)?;
    let score = of_norms(ensemble, target, roots, estimator)?;
    Error::catch(|| narrowed(score, dtype))
}

/// Number of cells of a sample.
fn cells<X: Field<5>>(ensemble: &X) -> f64 {
    ensemble.dims()[2..].iter().product::<usize>() as f64
}

/// Energy score with norms `√Σ (root · x)²` over channels and cells.
fn of_norms<X: Field<5>>(
    ensemble: X,
    target: X,
    roots: X,
    estimator: CrpsEstimator,
) -> Result<WithDims<X, 1>> {
    let members = ensemble.dims()[0];
    let pairs = pairs("energy_score", members, estimator)?;
    Error::catch(|| {
        let norm = |x: X| (x * roots.clone()).vector_norm(2.0, &[2, 3, 4]);
        let mut score = norm(ensemble.clone() - target).mean();
        for distance in 1..members {
            let count = members - distance;
            let part = |first: usize| ensemble.clone().narrow(0, first, count);
            let norms = norm(part(distance) - part(0));
            score = score - norms.mean() * (count as f64 / pairs);
        }
        score
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Tensor, TensorData, Tolerance};
    use halocline_core::{Launcher, Placement, Replicate, Shard};

    use super::*;
    use crate::testing::distributed;

    const WEIGHTS: [f64; 3] = [0.5, 1.5, 1.0];

    /// Returns values `[members, 2, 1, 3, 5]`, with `hole` where there is no value.
    fn data(members: usize, step: usize, hole: f32) -> TensorData {
        let values = (0..members * 30).map(|cell| {
            if is_masked(cell % 30) {
                hole
            } else {
                ((cell * step) % 37) as f32 / 9.0
            }
        });
        TensorData::new(values.collect::<Vec<f32>>(), [members, 2, 1, 3, 5])
    }

    /// Whether a cell of a sample of the batch has no value: more in the first sample.
    fn is_masked(cell: usize) -> bool {
        cell < 5 || cell.is_multiple_of(7)
    }

    /// Definition of the score of members `x`, in f64, over the cells with these weights.
    fn definition(x: &[f64], estimator: CrpsEstimator, weight: impl Fn(usize) -> f64) -> f64 {
        let y: Vec<f64> = data(1, 17, 0.0).iter().collect();
        let pairs = match estimator {
            CrpsEstimator::Fair => 12.0,
            CrpsEstimator::AlmostFair(alpha) => 1.0 / (alpha / 12.0 + (1.0 - alpha) / 16.0),
            CrpsEstimator::Biased => 16.0,
        };
        let norm = |sample: usize, difference: &dyn Fn(usize) -> f64| {
            let cells = || 15 * sample..15 * sample + 15;
            let squares = cells().map(|cell| weight(cell) * difference(cell).powi(2));
            (squares.sum::<f64>() / cells().map(&weight).sum::<f64>()).sqrt()
        };
        let score = |sample: usize| {
            let value = |member: usize, cell: usize| x[30 * member + cell];
            let error = |i: usize| norm(sample, &|cell| value(i, cell) - y[cell]);
            let pair = |i: usize, j: usize| norm(sample, &|cell| value(i, cell) - value(j, cell));
            let errors: f64 = (0..4).map(error).sum();
            let spread: f64 = (0..16).map(|both| pair(both / 4, both % 4)).sum();
            errors / 4.0 - 0.5 * spread / pairs
        };
        f64::midpoint(score(0), score(1))
    }

    /// Returns the score and its gradient on each rank, over all cells, which are zero in holes, or
    /// masked with these values in holes.
    fn run(
        placements: [Placement; 2],
        estimator: CrpsEstimator,
        hole: Option<f32>,
    ) -> Vec<(f64, TensorData)> {
        let found = Launcher::local(4).collect(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let place = |data: TensorData| distributed::<5>(data, &mesh, &placements);
            let filled = hole.unwrap_or(0.0);
            let ensemble = place(data(4, 29, filled))?.require_grad();
            let (members, target) = (ensemble.clone() * 1.0, place(data(1, 17, filled))?);
            let score = match hole {
                None => energy_score(members, target, &WEIGHTS, estimator)?,
                Some(_) => {
                    let mask = (0..30).map(|cell| f32::from(!is_masked(cell)));
                    let mask = TensorData::new(mask.collect::<Vec<f32>>(), [1, 2, 1, 3, 5]);
                    energy_score_masked(members, target, place(mask)?, &WEIGHTS, estimator)?
                }
            };
            let value = score.clone().into_scalar::<f64>();
            let gradient = ensemble.grad(&score.backward()).expect("a gradient");
            Ok((value, gradient.full_tensor().into_data()))
        });
        found.unwrap()
    }

    #[test]
    fn scores_and_gradients_are_those_of_the_definition_with_and_without_a_mask_on_any_mesh() {
        let weight = |cell: usize| WEIGHTS[cell / 5 % 3];
        let x: Vec<f64> = data(4, 29, 0.0).iter().collect();
        for estimator in [CrpsEstimator::AlmostFair(0.5), CrpsEstimator::Biased] {
            for holes in [[None, None], [Some(0.0), Some(f32::NAN)]] {
                let score = |x: &[f64]| {
                    definition(x, estimator, |cell| match holes[0] {
                        Some(_) if is_masked(cell) => 0.0,
                        _ => weight(cell),
                    })
                };
                let expected = score(&x);
                let slope = |cell: usize| {
                    let moved = |step: f64| {
                        let mut x = x.clone();
                        x[cell] += step;
                        score(&x)
                    };
                    ((moved(1e-4) - moved(-1e-4)) / 2e-4) as f32
                };
                let slopes: Vec<f32> = (0..x.len()).map(slope).collect();
                let slopes = TensorData::new(slopes, [4, 2, 1, 3, 5]);
                let (_, gradient) = run([Replicate, Replicate], estimator, holes[0]).remove(0);
                gradient.assert_approx_eq::<f32>(&slopes, Tolerance::absolute(2e-6));
                for placements in [
                    [Shard(1), Shard(3)],
                    [Shard(3), Shard(4)],
                    [Shard(0), Shard(3)],
                    [Shard(0), Shard(4)],
                    [Shard(0), Shard(0)],
                ] {
                    for (value, found) in run(placements, estimator, holes[1]) {
                        assert!((value - expected).abs() < 1e-6, "{value} for {expected}");
                        found.assert_approx_eq::<f32>(&gradient, Tolerance::absolute(1e-6));
                    }
                }
            }
        }
    }

    #[test]
    fn a_sample_without_values_has_a_score_of_zero() {
        let field = |members: usize| {
            Tensor::<5>::full([members, 1, 1, 1, 2], f32::NAN, &Default::default())
        };
        let mask = Tensor::zeros([1, 1, 1, 1, 2], &Default::default());
        let fair = CrpsEstimator::Fair;
        let score = energy_score_masked(field(2), field(1), mask, &[1.0], fair).unwrap();
        assert_eq!(score.into_scalar::<f32>(), 0.0);
    }

    /// The terms of this norm are zero in f16.
    #[test]
    fn small_differences_count_in_half_precision() {
        let small = 2.0_f64.powi(-19);
        let options = (&Default::default(), DType::F16);
        let field = |value: f64| Tensor::<5>::full([1, 1, 1, 64, 64], value, options);
        let score = energy_score(field(small), field(0.0), &[1.0; 64], CrpsEstimator::Fair);
        assert_eq!(score.unwrap().into_scalar::<f64>(), small);
    }
}
