//! Ensemble losses, computed in at least f32.

use halocline_core::{Error, Result, Shard};
use halocline_ops::masked::apply_mask;
use halocline_ops::prelude::*;
use halocline_ops::weighted_mean;

use crate::pairs::distances;
use crate::precision::{narrowed, wide};

/// Estimator of the spread term in [`crps`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CrpsEstimator {
    /// Unbiased estimate for the population that the members are sampled from, so that the score
    /// favours no ensemble size or spread ("fair", Ferro 2014).
    Fair,
    /// Mean of the fair score, with this weight α from 0 to 1, and the biased one ("almost fair",
    /// Lang et al. 2024, with α = 0.95). If all members but one equal the target, the fair score is
    /// the same wherever that one is, which training does not mend.
    AlmostFair(f64),
    /// Spread of the members themselves.
    Biased,
}

/// Continuous ranked probability score (CRPS) of an ensemble, `mean |xᵢ − y| − ½ · mean |xᵢ − xⱼ|`,
/// averaged over all cells with one weight per latitude row. For a single member it is the absolute
/// error.
///
/// With `m` members, the mean over pairs divides by `m (m − 1)` ([`CrpsEstimator::Fair`]), `m²`
/// ([`CrpsEstimator::Biased`]), or a number between them ([`CrpsEstimator::AlmostFair`]). Time is
/// quadratic in the number of members; training stores no pairwise differences.
///
/// # Shapes
/// `ensemble` `[members, batch, channels, lat, lon]`, `target` `[1, batch, channels, lat, lon]` →
/// `[1]`.
///
/// # Placement
/// Any, including a mesh axis of members. The result is `Partial(Sum)` on the axes on which the
/// ensemble is sharded, and resolved in half precision.
///
/// # Communication
/// Every rank needs all members of its cells. If members are sharded, one exchange turns them into
/// shards of longitude, so that a rank holds as many values as before; gradients return the same
/// way.
///
/// # Errors
/// The target has another shape; the number of weights differs from the number of rows, or their
/// mean is not positive; there are no members; a weight α out of range; communication fails.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::{CrpsEstimator, crps};
///
/// let device = Device::default();
/// let member = |value: f32| Tensor::<5>::full([1, 1, 1, 2, 3], value, &device);
/// let ensemble = Tensor::cat(vec![member(1.0), member(3.0)], 0);
/// let score = |estimator| {
///     let score = crps(ensemble.clone(), member(2.0), &[1.0, 1.0], estimator);
///     score.map(Tensor::into_scalar::<f32>)
/// };
/// assert_eq!(score(CrpsEstimator::Biased)?, 1.0 - 0.5 * 1.0); // |3 − 1| for two of the four pairs
/// assert_eq!(score(CrpsEstimator::Fair)?, 1.0 - 0.5 * 2.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn crps<X: Field<5>>(
    ensemble: X,
    target: X,
    weights: &[f64],
    estimator: CrpsEstimator,
) -> Result<WithDims<X, 1>> {
    let weights = shares("crps", &ensemble, weights)?;
    let dtype = ensemble.dtype();
    let cells = wide_cells(ensemble, target, estimator)?;
    Error::catch(|| {
        let weights = cells.profile(3, &weights);
        narrowed((cells * weights).mean(), dtype)
    })
}

/// [`crps`] averaged over the cells where `mask` is one, such as `Batch::mask` for data with
/// missing values. Values of the ensemble and the target elsewhere, NaN included, affect neither
/// the score nor a gradient. With an empty mask the score is zero.
///
/// # Shapes
/// `mask` has the shape of the target, `[1, batch, channels, lat, lon]`. Placement and
/// communication are the same as for [`crps`], plus one small sum of the weights.
///
/// # Errors
/// Same as [`crps`]; the mask and the target have different shapes.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::{CrpsEstimator, crps_masked};
///
/// let ensemble = Tensor::<5>::from([[[[[1.0, f32::NAN]]]], [[[[3.0, 4.0]]]]]);
/// let target = Tensor::from([[[[[2.5, f32::NAN]]]]]);
/// let mask = Tensor::from([[[[[1.0, 0.0]]]]]);
/// let score = crps_masked(ensemble, target, mask, &[1.0], CrpsEstimator::Biased)?;
/// assert_eq!(score.into_scalar::<f32>(), (1.5 + 0.5) / 2.0 - 0.5 * 1.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn crps_masked<X: Field<5>>(
    ensemble: X,
    target: X,
    mask: X,
    weights: &[f64],
    estimator: CrpsEstimator,
) -> Result<WithDims<X, 1>> {
    const NAME: &str = "crps_masked";
    check_weights(NAME, &ensemble, weights)?;
    let dtype = ensemble.dtype();
    let [ensemble, target, mask] = masked_operands(NAME, ensemble, target, mask)?;
    let cells = wide_cells(ensemble, target, estimator)?;
    let weights = Error::catch(|| cells.profile(3, weights) * mask)?;
    let mean = weighted_mean(cells, weights)?;
    Error::catch(|| narrowed(mean, dtype))
}

/// [`crps`] of every cell, unweighted. Definition and placement are the same.
///
/// # Shapes
/// `ensemble` `[members, batch, channels, lat, lon]`, `target` `[1, batch, channels, lat, lon]` →
/// `[1, batch, channels, lat, lon]`.
///
/// # Errors
/// Same as [`crps`], except for weights.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::{CrpsEstimator, crps_cells};
///
/// let ensemble = Tensor::<5>::from([[[[[1.0, 4.0]]]], [[[[3.0, 4.0]]]]]);
/// let cells = crps_cells(ensemble, Tensor::from([[[[[2.0, 4.5]]]]]), CrpsEstimator::Fair)?;
/// cells.into_data().assert_eq(&[[[[[0.0_f32, 0.5]]]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn crps_cells<X: Field<5>>(ensemble: X, target: X, estimator: CrpsEstimator) -> Result<X> {
    let dtype = ensemble.dtype();
    let cells = wide_cells(ensemble, target, estimator)?;
    Error::catch(|| narrowed(cells, dtype))
}

/// [`crps_cells`] in at least f32.
fn wide_cells<X: Field<5>>(ensemble: X, target: X, estimator: CrpsEstimator) -> Result<X> {
    check_target("crps", &ensemble, &target)?;
    let [members, ..] = ensemble.dims();
    let (ensemble, target) = together(ensemble, target)?;
    let (ensemble, target) = (wide(ensemble)?, wide(target)?);
    let pairs = pairs("crps", members, estimator)?;
    let spread = ensemble.clone().try_op(|x| distances(x, pairs))?;
    Error::catch(|| (ensemble - target).abs().mean_dims(&[0]) - spread)
}

/// Divisor of the sum over unordered pairs of members.
///
/// # Errors
/// A weight of the fair score that is not from 0 to 1.
pub(crate) fn pairs(name: &str, members: usize, estimator: CrpsEstimator) -> Result<f64> {
    let m = members as f64;
    let fair = m * (m - 1.0);
    Ok(match estimator {
        _ if members == 1 => 1.0,
        CrpsEstimator::Fair => fair,
        CrpsEstimator::AlmostFair(alpha) if (0.0..=1.0).contains(&alpha) => {
            fair / (1.0 - (1.0 - alpha) / m)
        }
        CrpsEstimator::AlmostFair(alpha) => {
            let message = format!("a weight of the fair score of {alpha}; expected 0 to 1");
            return Err(Error::operator(name, message));
        }
        CrpsEstimator::Biased => m * m,
    })
}

fn check_weights<X: Field<5>>(name: &str, ensemble: &X, weights: &[f64]) -> Result<()> {
    let rows = ensemble.dims()[3];
    if weights.len() == rows {
        return Ok(());
    }
    let message = format!("{} weights of rows for {rows} rows", weights.len());
    Err(Error::operator(name, message))
}

/// Row weights divided by their mean.
pub(crate) fn shares<X: Field<5>>(name: &str, ensemble: &X, weights: &[f64]) -> Result<Vec<f64>> {
    check_weights(name, ensemble, weights)?;
    let mean = weights.iter().sum::<f64>() / weights.len() as f64;
    if mean > 0.0 {
        return Ok(weights.iter().map(|weight| weight / mean).collect());
    }
    let message = format!("weights of rows with a mean of {mean}; expected one above 0");
    Err(Error::operator(name, message))
}

pub(crate) fn check_target<X: Field<5>>(name: &str, ensemble: &X, target: &X) -> Result<()> {
    let dims = ensemble.dims();
    let mut expected = dims;
    expected[0] = 1;
    if target.dims() == expected && dims[0] > 0 {
        return Ok(());
    }
    let message = format!(
        "an ensemble {dims:?} and a target {:?}; expected a target {expected:?}, and members",
        target.dims()
    );
    Err(Error::operator(name, message))
}

/// Redistributes ensemble and target so that each rank holds all members of its cells: sharded
/// members become shards of longitude.
pub(crate) fn together<X: Field<5>>(ensemble: X, target: X) -> Result<(X, X)> {
    let ensemble = ensemble.try_op(|x| {
        if !x.layout().is_sharded(0) {
            return Ok(x);
        }
        let placements = x.layout().map_placements(|placement| match placement {
            Shard(0) => Shard(4),
            other => other,
        });
        x.try_redistribute(&placements)
    })?;
    let target = beside(target, &ensemble)?;
    Ok((ensemble, target))
}

/// Checks and redistributes ensemble, target and mask of a masked score, as [`together`] does, with
/// zeros in the cells that do not count.
pub(crate) fn masked_operands<X: Field<5>>(
    name: &str,
    ensemble: X,
    target: X,
    mask: X,
) -> Result<[X; 3]> {
    check_target(name, &ensemble, &target)?;
    check_target(name, &ensemble, &mask)?;
    let (ensemble, target) = together(ensemble, target)?;
    let mask = wide(beside(mask, &ensemble)?)?;
    let ensemble = apply_mask(wide(ensemble)?, mask.clone())?;
    let target = apply_mask(wide(target)?, mask.clone())?;
    Ok([ensemble, target, mask])
}

/// Redistributes a field `[1, batch, channels, lat, lon]` to the shards of an ensemble whose
/// members are not sharded.
pub(crate) fn beside<X: Field<5>>(target: X, ensemble: &X) -> Result<X> {
    let ensemble = ensemble.clone().into_shard();
    target.try_op(|target| {
        if target.placements() == ensemble.placements() {
            return Ok(target);
        }
        target.try_redistribute(&ensemble.layout().resized(0, vec![1]))
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Replicate, ShardTensor, Traffic};

    use super::*;
    use crate::energy_score_masked;
    use crate::testing::{check_gradients, distributed};

    const SHAPE: [usize; 5] = [4, 2, 1, 3, 5];
    const WEIGHTS: [f64; 3] = [0.5, 1.5, 1.0];

    fn data(members: usize, step: usize) -> TensorData {
        let shape = [members, SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4]];
        let count: usize = shape.iter().product();
        let values = (0..count).map(|i| ((i * step) % 37) as f32 / 9.0);
        TensorData::new(values.collect(), shape)
    }

    /// Definition of the score, in f64.
    fn expected(estimator: CrpsEstimator) -> f64 {
        let [x, y] = [data(4, 29), data(1, 17)].map(|data| data.iter::<f64>().collect::<Vec<_>>());
        let cells = y.len();
        let members = 0..4;
        let pairs = match estimator {
            CrpsEstimator::Fair => 12.0,
            CrpsEstimator::AlmostFair(alpha) => 1.0 / (alpha / 12.0 + (1.0 - alpha) / 16.0),
            CrpsEstimator::Biased => 16.0,
        };
        let score = |cell: usize| {
            let value = |member: usize| x[member * cells + cell];
            let error: f64 = members.clone().map(|i| (value(i) - y[cell]).abs()).sum();
            let spread: f64 = members
                .clone()
                .flat_map(|i| members.clone().map(move |j| (i, j)))
                .map(|(i, j)| (value(i) - value(j)).abs())
                .sum();
            (error / 4.0 - 0.5 * spread / pairs) * WEIGHTS[cell / 5 % 3]
        };
        (0..cells).map(score).sum::<f64>() / cells as f64
    }

    #[test]
    fn scores_are_those_of_the_definition_on_any_mesh() {
        let run = |placements: [Placement; 2], estimator| {
            let found = Launcher::local(4).collect(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let place = |data: TensorData| distributed::<5>(data, &mesh, &placements);
                let ensemble = place(data(4, 29))?.require_grad();
                let score = crps(ensemble.clone(), place(data(1, 17))?, &WEIGHTS, estimator)?;
                let value = score.clone().into_scalar::<f64>();
                let gradient = ensemble.grad(&score.backward()).expect("a gradient");
                assert_eq!(gradient.layout(), ensemble.layout());
                let gradient = gradient.full_tensor();
                Ok((value, gradient.into_data()))
            });
            found.unwrap()
        };
        let meshes = [
            [Shard(1), Shard(3)],
            [Shard(3), Shard(4)],
            // Members over one axis or two, and together with latitudes or longitudes.
            [Shard(0), Shard(3)],
            [Shard(0), Shard(4)],
            [Shard(0), Shard(0)],
        ];
        let estimators = [
            CrpsEstimator::Fair,
            CrpsEstimator::AlmostFair(0.95),
            CrpsEstimator::Biased,
        ];
        for estimator in estimators {
            let expected = expected(estimator);
            let (_, gradient) = run([Replicate, Replicate], estimator).remove(0);
            for placements in meshes {
                for (value, found) in run(placements, estimator) {
                    assert!((value - expected).abs() < 1e-6, "{value} for {expected}");
                    let tolerance = burn::tensor::Tolerance::absolute(1e-6);
                    found.assert_approx_eq::<f32>(&gradient, tolerance);
                }
            }
        }
    }

    /// Members and target are at least one apart in each cell, so that the score is linear within
    /// the steps.
    #[test]
    fn gradients_are_central_differences() {
        let inputs = [0..4, 4..5].map(|members: std::ops::Range<usize>| {
            let shape = [members.len(), SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4]];
            let cells: usize = shape[1..].iter().product();
            let values = members.flat_map(|member| {
                (0..cells).map(move |cell| ((2 * member + cell) % 5) as f64 + cell as f64 / 7.0)
            });
            TensorData::new(values.collect::<Vec<f64>>(), shape)
        });
        for alpha in [0.0, 0.95, 1.0] {
            let estimator = CrpsEstimator::AlmostFair(alpha);
            check_gradients::<5, 2>(inputs.clone(), 0.1, |[ensemble, target]| {
                crps(ensemble, target, &WEIGHTS, estimator).unwrap()
            });
        }
    }

    #[test]
    fn cells_without_a_mask_reach_neither_score_nor_gradient() {
        // Odd rows are missing.
        let is_masked = |cell: usize| cell / 5 % 3 == 1;
        let holed = |data: TensorData, hole: f32| {
            let values = data.iter::<f32>().enumerate();
            let values = values.map(|(cell, value)| if is_masked(cell) { hole } else { value });
            TensorData::new(values.collect::<Vec<f32>>(), data.shape())
        };
        let ones = TensorData::ones::<f32, _>(data(1, 17).shape());
        let run = |placements: [Placement; 2], hole: f32| {
            let found = Launcher::local(4).collect(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let place = |data: TensorData| distributed::<5>(data, &mesh, &placements);
                let ensemble = place(holed(data(4, 29), hole))?.require_grad();
                let target = place(holed(data(1, 17), hole))?;
                let mask = place(holed(ones.clone(), 0.0))?;
                let fair = CrpsEstimator::Fair;
                let score = crps_masked(ensemble.clone() * 1.0, target, mask, &WEIGHTS, fair)?;
                let value = score.clone().into_scalar::<f64>();
                let gradient = ensemble.grad(&score.backward()).expect("a gradient");
                let gradient = gradient.full_tensor();
                Ok((value, gradient.into_data()))
            });
            found.unwrap()
        };
        // Mean over all cells, with the masked ones set to zero, divided by the share of unmasked
        // weights.
        let scores = Launcher::local(1).collect(|world| {
            let mesh = world.mesh([("a", 1)])?;
            let place = |data: TensorData| distributed::<5>(data, &mesh, &[Replicate]);
            let ensemble = place(holed(data(4, 29), 0.0))?;
            let target = place(holed(data(1, 17), 0.0))?;
            let score = crps(ensemble, target, &WEIGHTS, CrpsEstimator::Fair)?;
            Ok(score.into_scalar::<f64>())
        });
        let expected = scores.unwrap()[0] * 3.0 / (0.5 + 1.0);
        let (_, gradient) = run([Replicate, Replicate], 0.0).remove(0);
        for placements in [
            [Shard(1), Shard(3)],
            [Shard(0), Shard(3)],
            [Shard(0), Shard(4)],
        ] {
            for (value, found) in run(placements, f32::NAN) {
                assert!((value - expected).abs() < 1e-6, "{value} for {expected}");
                let tolerance = burn::tensor::Tolerance::absolute(1e-6);
                found.assert_approx_eq::<f32>(&gradient, tolerance);
                let mut cells = found.iter::<f32>().enumerate();
                assert!(cells.all(|(cell, gradient)| !is_masked(cell) || gradient == 0.0));
            }
        }
    }

    #[test]
    fn members_are_exchanged_and_not_gathered() {
        let received = Launcher::local(4).check(false).collect(|world| {
            let mesh = world.mesh([("member", 4)])?;
            let ensemble = ShardTensor::<5>::ones([4, 1, 2, 3, 8], &mesh, &[Shard(0)])?;
            let target = ShardTensor::<5>::ones([1, 1, 2, 3, 8], &mesh, &[Replicate])?;
            let before = world.comm_stats();
            crps(ensemble, target, &WEIGHTS, CrpsEstimator::Fair)?;
            let sent = world.comm_stats().since(&before);
            Ok(sent.of(Traffic::Redistribute).bytes)
        });
        // Each rank keeps a quarter of its member and sends the rest.
        assert_eq!(received.unwrap(), [3 * 2 * 3 * 2 * 4; 4]);
    }

    #[test]
    fn one_member_has_the_absolute_error() {
        let device = Default::default();
        let [x, y] = [2.0, 5.0].map(|value| Tensor::<5>::full([1, 1, 1, 1, 2], value, &device));
        let score = crps(x.clone(), y, &[1.0], CrpsEstimator::Fair).unwrap();
        assert_eq!(score.into_scalar::<f32>(), 3.0);
        // Only relative weights count.
        let twice = crps(x.clone(), x.clone() + 3.0, &[2.0], CrpsEstimator::Fair).unwrap();
        assert_eq!(twice.into_scalar::<f32>(), 3.0);
        let error = crps(x.clone(), x.clone(), &[1.0, 1.0], CrpsEstimator::Fair).unwrap_err();
        assert!(error.to_string().contains("2 weights of rows"), "{error}");
        let two = Tensor::cat(vec![x.clone(), x.clone()], 0);
        let error = crps(two, x, &[1.0], CrpsEstimator::AlmostFair(1.5)).unwrap_err();
        assert!(
            error.to_string().contains("of 1.5; expected 0 to 1"),
            "{error}"
        );
    }

    #[test]
    fn scores_have_the_dtype_of_the_ensemble() {
        let options = (&Default::default(), DType::BF16);
        let field = |value: f64| Tensor::<5>::full([1, 1, 1, 2, 2], value, options);
        let (x, y, mask) = (field(2.0), field(5.0), field(1.0));
        let (weights, fair) = ([1.0; 2], CrpsEstimator::Fair);
        for score in [
            crps(x.clone(), y.clone(), &weights, fair),
            crps_masked(x.clone(), y.clone(), mask.clone(), &weights, fair),
            energy_score_masked(x, y, mask, &weights, fair),
        ] {
            let score = score.unwrap();
            assert_eq!(score.dtype(), DType::BF16);
            assert_eq!(score.into_scalar::<f32>(), 3.0);
        }
    }
}
