//! Losses of ensembles.

use halocline_core::{Error, Result};
use halocline_ops::prelude::*;

/// The estimator of an ensemble's spread in [`crps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// That of a population of which the members are a sample: unbiased, so that the score does not favour
    /// ensembles of another size or spread ("fair", Ferro 2014).
    Fair,
    /// That of the members alone.
    Members,
}

/// The continuous ranked probability score of an ensemble, `mean |xᵢ − y| − ½ · mean |xᵢ − xⱼ|`, as the mean
/// over all cells with a weight for each latitude row. For one member it is the absolute error.
///
/// The mean over pairs is over `m (m − 1)` of them ([`Spread::Fair`]) or `m²`
/// ([`Spread::Members`]), for `m` members. Its time grows with the square of the members, and so
/// does its memory in training.
///
/// # Shapes
/// `ensemble` `[members, batch, channels, lat, lon]`, `target` `[1, batch, channels, lat, lon]` → `[1]`.
///
/// # Placement
/// Any but shards of the members, of which every rank needs all for its cells: redistribute them to
/// shards of batch or space, by one exchange (`x.redistribute(...)`). The result is `Partial(Sum)` on axes on which
/// the ensemble is sharded.
///
/// # Errors
/// Shards of the members; a target of another shape; weights of another number than rows; no members.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::{Spread, crps};
///
/// let device = Device::default();
/// let member = |value: f32| Tensor::<5>::full([1, 1, 1, 2, 3], value, &device);
/// let ensemble = Tensor::cat(vec![member(1.0), member(3.0)], 0);
/// let score = |spread| {
///     crps(ensemble.clone(), member(2.0), &[1.0, 1.0], spread).map(|score| score.into_scalar::<f32>())
/// };
/// assert_eq!(score(Spread::Members)?, 1.0 - 0.5 * 1.0); // |3 − 1| for two of four pairs
/// assert_eq!(score(Spread::Fair)?, 1.0 - 0.5 * 2.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn crps<X: Field<5>>(
    ensemble: X,
    target: X,
    weights: &[f64],
    spread: Spread,
) -> Result<Rank<X, 1>> {
    const NAME: &str = "crps";
    let dims = ensemble.global_dims();
    let [members, _, _, rows, _] = dims;
    let mut expected = dims;
    expected[0] = 1;
    if target.global_dims() != expected || members == 0 || weights.len() != rows {
        let message = format!(
            "an ensemble {dims:?}, a target {:?} and {} weights of rows; expected a target {expected:?}, and members",
            target.global_dims(),
            weights.len()
        );
        return Err(Error::operator(NAME, message));
    }
    let layout = ensemble.clone().into_shard().layout().clone();
    if let Some(axis) = layout.axes_of(0).first() {
        return Err(Error::Placement {
            operator: NAME.into(),
            placement: format!("Shard(0) on axis \"{}\"", layout.mesh().names()[*axis]),
            help: "every rank needs all members of its cells; redistribute them to shards of batch or space".into(),
        });
    }
    let pairs = match spread {
        _ if members == 1 => 1,
        Spread::Fair => members * (members - 1),
        Spread::Members => members * members,
    };
    Error::catch(|| {
        let weights = ensemble.profile(3, weights);
        let error = (ensemble.clone() - target).abs() * weights.clone();
        let mut score = error.mean();
        // Each pair once, those of one distance together.
        for distance in 1..members {
            let count = members - distance;
            let later = ensemble.clone().narrow(0, distance, count);
            let differences = (later - ensemble.clone().narrow(0, 0, count)).abs();
            let mean = (differences * weights.clone()).mean();
            score = score - mean * (count as f64 / pairs as f64);
        }
        score
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, LocalGradient, Placement, Replicate, Shard, ShardTensor};

    use super::*;

    const SHAPE: [usize; 5] = [4, 2, 1, 3, 5];
    const WEIGHTS: [f64; 3] = [0.5, 1.5, 1.0];

    fn data(members: usize, step: usize) -> TensorData {
        let shape = [members, SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4]];
        let count: usize = shape.iter().product();
        let values = (0..count).map(|i| ((i * step) % 37) as f32 / 9.0);
        TensorData::new(values.collect(), shape)
    }

    /// The definition, in f64.
    fn expected(spread: Spread) -> f64 {
        let [x, y] = [data(4, 29), data(1, 17)].map(|data| data.iter::<f64>().collect::<Vec<_>>());
        let cells = y.len();
        let members = 0..4;
        let pairs = if spread == Spread::Fair { 12.0 } else { 16.0 };
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
        for spread in [Spread::Fair, Spread::Members] {
            let expected = expected(spread);
            let run = |placements: [Placement; 2]| {
                let found = Launcher::local(4).collect(|world| {
                    let mesh = world.mesh([("a", 2), ("b", 2)])?;
                    let place = |data: TensorData| {
                        let whole = Tensor::<5>::from_data(data, &world.device().clone().inner());
                        ShardTensor::distribute(whole, &mesh, &placements)
                    };
                    let ensemble = place(data(4, 29))?.require_grad();
                    let score = crps(ensemble.clone(), place(data(1, 17))?, &WEIGHTS, spread)?;
                    let value = score.clone().resolve().local().clone().into_scalar::<f64>();
                    let gradient = ensemble.grad(&score.backward()).expect("a gradient");
                    let gradient = gradient.full_tensor(LocalGradient::Replicated);
                    Ok((value, gradient.into_data()))
                });
                found.unwrap().remove(0)
            };
            let (_, gradient) = run([Replicate, Replicate]);
            for placements in [[Shard(1), Shard(3)], [Shard(3), Shard(4)]] {
                let (value, found) = run(placements);
                assert!((value - expected).abs() < 1e-6, "{value} for {expected}");
                found.assert_approx_eq::<f32>(&gradient, burn::tensor::Tolerance::absolute(1e-6));
            }
        }
    }

    #[test]
    fn shards_of_members_are_told_where_to_go() {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("member", 2)])?;
            let ensemble = ShardTensor::<5>::ones(SHAPE, &mesh, &[Shard(0)])?;
            let target = ShardTensor::<5>::ones([1, 2, 1, 3, 5], &mesh, &[Replicate])?;
            let error = crps(ensemble.clone(), target.clone(), &WEIGHTS, Spread::Fair).unwrap_err();
            assert!(error.to_string().contains("axis \"member\""), "{error}");
            let (ensemble, target) = (
                ensemble.redistribute(&[Shard(4)]),
                target.redistribute(&[Shard(4)]),
            );
            let score = crps(ensemble, target, &WEIGHTS, Spread::Fair)?.resolve();
            assert_eq!(score.local().clone().into_scalar::<f32>(), 0.0);
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn one_member_has_the_absolute_error() {
        let device = Default::default();
        let [x, y] = [2.0, 5.0].map(|value| Tensor::<5>::full([1, 1, 1, 1, 2], value, &device));
        let score = crps(x.clone(), y, &[1.0], Spread::Fair).unwrap();
        assert_eq!(score.into_scalar::<f32>(), 3.0);
        let error = crps(x.clone(), x, &[1.0, 1.0], Spread::Fair).unwrap_err();
        assert!(error.to_string().contains("2 weights of rows"), "{error}");
    }
}
