//! Penalty on blur for the squared error, by spherical harmonics.

use halocline_core::{Error, Result, ShardTensor};
use halocline_ops::prelude::*;
use halocline_ops::sphere::sht;

use crate::precision::{narrowed, wide};

/// Added to powers, so that the gradient at a power of zero is zero.
const TINY: f64 = 1e-24;

/// Difference of the adjusted mean squared error (AMSE, Subich et al. 2025) from the mean squared
/// error of `[batch, channels, lat, lon]`: add it to [`weighted_mse`](crate::weighted_mse), with
/// the areas of the rows as weights, for the AMSE.
///
/// The squared error rewards a forecast that damps waves whose phase is uncertain. For each degree
/// of the spherical harmonics, with the roots `a` and `b` of the powers of field and target and
/// their coherence `c`, the penalty is `2 (1 − c) · max(a, b) · |a − b|`, so that a smaller
/// amplitude does not decrease the sum. The penalty is summed over degrees, divided by 4π, and
/// averaged over batch and channels. Degrees that the transform does not resolve have the squared
/// error alone.
///
/// # Placement
/// Any. The result is `Partial(Sum)` on the axes on which the harmonics are sharded, and resolved
/// in half precision, which is computed in f32.
///
/// # Communication
/// That of the transform ([`sht`](fn@halocline_ops::sphere::sht)), and three sums of the powers of
/// degrees.
///
/// # Errors
/// `x` and `target` have different shapes; the transform is of another grid; partial values; a
/// failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use halocline_models::amse_penalty;
/// use halocline_ops::{Sht, SphereGrid};
///
/// let transform = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// let noise = Distribution::Normal(0.0, 1.0);
/// let field = || Tensor::<4>::random([1, 1, 6, 12], noise, &Device::default());
/// let (x, target) = (field(), field());
/// let penalty = |x: &Tensor<4>| {
///     amse_penalty(x.clone(), target.clone(), &transform).map(Tensor::into_scalar::<f32>)
/// };
/// assert!(penalty(&target)? < 1e-6);
/// assert!(penalty(&(x.clone() * 0.01))? > 0.0); // damped noise
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn amse_penalty<X: Field<4>>(x: X, target: X, transform: &Sht) -> Result<WithDims<X, 1>> {
    let (dtype, dims) = (x.dtype(), x.dims());
    if target.dims() != dims {
        let message = format!("a target {:?} for a field {dims:?}", target.dims());
        return Err(Error::operator("amse_penalty", message));
    }
    let x: ShardTensor<5> = sht(wide(x)?.into_shard(), transform)?;
    let target: ShardTensor<5> = sht(wide(target)?.into_shard(), transform)?;
    let penalty = Error::catch(|| {
        // Orders above zero stand for the negative ones, too.
        let mut counts = vec![2.0; x.dims()[3]];
        counts.iter_mut().take(1).for_each(|count| *count = 1.0);
        let counts = x.profile(3, &counts);
        let power = |one: &ShardTensor<5>, other: &ShardTensor<5>| {
            let products = one.clone() * other.clone() * counts.clone();
            products.sum_dims(&[3, 4]).resolve()
        };
        let [a, b] = [&x, &target].map(|x| (power(x, x) + TINY).sqrt());
        let coherence = power(&x, &target) / (a.clone() * b.clone());
        let apart = (a.clone() - b.clone()).abs();
        // Twice the larger of the two is their sum and their distance.
        let penalties = (coherence * -1.0 + 1.0) * (a + b + apart.clone()) * apart;
        let samples = (dims[0] * dims[1]) as f64;
        penalties.sum() / (4.0 * std::f64::consts::PI * samples)
    })?;
    Error::catch(|| narrowed(penalty, dtype)).map(Field::from_shard)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Replicate, Shard};

    use super::*;
    use crate::testing::{check_gradients, distributed};
    use crate::weighted_mse;

    const SHAPE: [usize; 4] = [2, 2, 6, 12];

    fn data(step: usize) -> TensorData {
        let count: usize = SHAPE.iter().product();
        let values = (0..count).map(|i| ((i * i * step + 7 * i) % 101) as f32 / 25.0 - 2.0);
        TensorData::new(values.collect(), SHAPE)
    }

    fn transform() -> Sht {
        Sht::new([SHAPE[2], SHAPE[3]], SphereGrid::LegendreGauss).unwrap()
    }

    /// Penalty by the definition of the AMSE, less the squared error, of harmonics in f64.
    fn expected(x: &TensorData, y: &TensorData) -> f64 {
        let harmonics = |data: &TensorData| {
            let device = Default::default();
            let field = Tensor::<4>::from_data(data.clone(), (&device, burn::tensor::DType::F64));
            let harmonics: Tensor<5> = field.sht(&transform());
            let values: Vec<f64> = harmonics.clone().into_data().iter().collect();
            (harmonics.dims(), values)
        };
        let ([.., degrees, orders, _], x) = harmonics(x);
        let (_, y) = harmonics(y);
        let mut sum = 0.0;
        for (x, y) in x.chunks(2 * orders).zip(y.chunks(2 * orders)) {
            let power = |one: &[f64], other: &[f64]| {
                let products = one.iter().zip(other).enumerate();
                let products = products.map(|(i, (a, b))| if i < 2 { a * b } else { 2.0 * a * b });
                products.sum::<f64>()
            };
            let [px, py, both] = [power(x, x), power(y, y), power(x, y)];
            let coherence = both / (px * py).sqrt();
            let adjusted = (px.sqrt() - py.sqrt()).powi(2) + 2.0 * px.max(py) * (1.0 - coherence);
            sum += adjusted - (px + py - 2.0 * both);
        }
        assert_eq!(degrees, 6);
        sum / (4.0 * std::f64::consts::PI * (SHAPE[0] * SHAPE[1]) as f64)
    }

    #[test]
    fn penalties_are_those_of_the_definition_on_any_mesh() {
        let expected = expected(&data(29), &data(17));
        let run = |placements: [Placement; 2]| {
            let found = Launcher::local(4).collect(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let x = distributed::<4>(data(29), &mesh, &placements)?.require_grad();
                let target = distributed::<4>(data(17), &mesh, &placements)?;
                let penalty = amse_penalty(x.clone(), target, &transform())?;
                let value = penalty.clone().into_scalar::<f64>();
                let gradient = x.grad(&penalty.backward()).expect("a gradient");
                Ok((value, gradient.full_tensor().into_data()))
            });
            found.unwrap()
        };
        let (_, gradient) = run([Replicate, Replicate]).remove(0);
        for placements in [
            [Replicate, Replicate],
            [Shard(0), Shard(2)],
            [Shard(2), Shard(3)],
            [Shard(1), Shard(3)],
        ] {
            for (value, found) in run(placements) {
                assert!(
                    (value / expected - 1.0).abs() < 1e-4,
                    "{value} for {expected}"
                );
                let tolerance = burn::tensor::Tolerance::absolute(1e-5);
                found.assert_approx_eq::<f32>(&gradient, tolerance);
            }
        }
    }

    /// The best amplitude of a field that is half coherent is damped by the squared error, and not
    /// by the adjusted one.
    #[test]
    fn damping_does_not_pay() {
        let device = Default::default();
        // Fields that harmonics resolve.
        let [one, other] = [13, 29].map(|step| {
            let field = Tensor::<4>::from_data(data(step), &device);
            let harmonics: Tensor<5> = field.sht(&transform());
            let field: Tensor<4> = harmonics.isht(&transform());
            field
        });
        let target = one.clone() + other;
        let losses = |factor: f64| {
            let x = one.clone() * (2.0_f64.sqrt() * factor);
            let areas = transform().weights().to_vec();
            let mse = weighted_mse(x.clone(), target.clone(), &areas).unwrap();
            let penalty = amse_penalty(x, target.clone(), &transform()).unwrap();
            let penalty = penalty.into_scalar::<f64>();
            [mse.into_scalar::<f64>(), penalty]
        };
        let [full, damped] = [1.0, 0.6].map(losses);
        assert!(damped[0] < full[0], "{damped:?} {full:?}");
        assert!(
            damped[0] + damped[1] > full[0] + full[1],
            "{damped:?} {full:?}"
        );
    }

    #[test]
    fn gradients_are_central_differences() {
        let shape = [1, SHAPE[1], SHAPE[2], SHAPE[3]];
        let inputs = [29, 17].map(|step| {
            let values = data(step);
            let values = values.iter::<f64>().take(shape.iter().product());
            TensorData::new(values.collect::<Vec<f64>>(), shape)
        });
        check_gradients::<4, 2>(inputs, 1e-5, |[x, target]| {
            amse_penalty(x, target, &transform()).unwrap()
        });
    }

    #[test]
    fn fields_of_other_shapes_are_refused() {
        let field = |rows| Tensor::<4>::ones([1, 1, rows, 12], &Default::default());
        let error = amse_penalty(field(6), field(5), &transform())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("a target [1, 1, 5, 12] for a field [1, 1, 6, 12]"),
            "{error}"
        );
        assert!(amse_penalty(field(5), field(5), &transform()).is_err());
    }
}
