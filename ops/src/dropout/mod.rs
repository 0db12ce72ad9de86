//! Dropout: sets random elements to zero and scales the others up, so that the mean is preserved.
//!
//! The elements are chosen by a key and their index in the global tensor, independently of ranks:
//! any sharding returns the result of one device.
//!
//! [`drop_path`] does the same with whole samples, the cells of the first dim: some of them skip
//! the branch of a residual block (stochastic depth, Huang et al. 2016), chosen by the key and the
//! sample's index in the global batch.
//!
//! [`gaussian_noise`] adds noise to all elements.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. Nothing is sent.
//!
//! # Adjoint
//! The cotangent with the same mask and scale as the elements.

mod noise;

use burn::nn::Dropout;
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::{Distribution, Error, IndexBox, LayerKeys, RandomKey, Result, ShardTensor};

use crate::field::{Field, run};
use crate::layers::layers;
use crate::precision::{cast, wider};
pub use noise::gaussian_noise;

/// Sets elements to zero with the given probability, and divides the others by the probability of
/// being kept.
///
/// # Errors
/// A probability outside `[0, 1)`; partial values.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, RandomKey, Replicate, Shard, ShardTensor};
/// use halocline_ops::dropout::dropout;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let key = RandomKey::new(world.seed(), "dropout");
///     let drop = |placement| {
///         let x = ShardTensor::<2>::ones([5, 40], &mesh, &[placement])?;
///         Ok::<_, halocline_core::Error>(dropout(x, 0.5, key)?.full_tensor())
///     };
///     let (sharded, whole) = (drop(Shard(0))?, drop(Replicate)?);
///     sharded.into_data().assert_eq(&whole.into_data(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn dropout<const D: usize>(
    x: ShardTensor<D>,
    probability: f64,
    key: RandomKey,
) -> Result<ShardTensor<D>> {
    dropped("dropout", x, probability, key, |shape| shape)
}

/// Sets whole samples to zero with the given probability, and divides the others by the probability
/// of being kept. See the [module](self).
///
/// # Errors
/// The errors of [`dropout`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{RandomKey, ShardTensor};
/// use halocline_ops::dropout::drop_path;
///
/// let x = ShardTensor::solo(Tensor::<2>::ones([6, 3], &Default::default()));
/// let y = drop_path(x, 0.5, RandomKey::new(1, "path"))?.into_local().into_data();
/// let samples: Vec<f32> = y.iter().collect();
/// assert!(samples.chunks(3).all(|sample| sample == [0.0; 3] || sample == [2.0; 3]));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn drop_path<const D: usize>(
    x: ShardTensor<D>,
    probability: f64,
    key: RandomKey,
) -> Result<ShardTensor<D>> {
    dropped("drop_path", x, probability, key, |mut shape| {
        shape[1..].fill(1);
        shape
    })
}

/// Drops elements by a random mask. `coins` maps the shape of the tensor to that of the mask, in
/// which each dim keeps its size or has size one.
fn dropped<const D: usize>(
    operator: &str,
    x: ShardTensor<D>,
    probability: f64,
    key: RandomKey,
    coins: impl Fn([usize; D]) -> [usize; D],
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    if !(0.0..1.0).contains(&probability) {
        let message = format!("probability {probability}; expected 0 or more and less than 1");
        return Err(Error::operator(operator, message));
    }
    let stay = 1.0 - probability;
    let coin = Distribution::Bernoulli(stay);
    let shape = coins(x.dims());
    let (local, layout, mesh) = x.into_parts();
    let held = layout.local_box(mesh.position());
    let ranges = held.ranges().iter().zip(shape);
    let ranges = ranges.zip(layout.shape()).map(|((held, coins), size)| {
        if coins == *size {
            held.clone()
        } else {
            0..coins
        }
    });
    let cells = IndexBox::new(ranges.collect());
    let mask = key.fill(coin, &shape, &cells);
    let mask = TensorData::new(mask, cells.shape());
    // In half precision, a rounded factor would change the mean.
    let dtype = local.dtype();
    let mask = Tensor::<D>::from_data(mask, (&local.device(), wider(dtype))) / stay;
    let local = cast(cast(local, wider(dtype)) * mask, dtype);
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Dropout as methods.
pub trait DropoutField<const D: usize>: Field<D> {
    /// Dropout with a key. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`dropout`](fn@dropout) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::RandomKey;
    /// use halocline_ops::DropoutField;
    ///
    /// let x = Tensor::<1>::ones([8], &Default::default());
    /// let y = x.dropout(0.75, RandomKey::new(1, "dropout")).into_data();
    /// assert!(y.iter::<f32>().all(|element| element == 0.0 || element == 4.0));
    /// ```
    #[must_use]
    #[track_caller]
    fn dropout(self, probability: f64, key: RandomKey) -> Self {
        run(self, |x| dropout(x, probability, key))
    }

    /// Dropout of whole samples with a key. See [`drop_path`](fn@drop_path), which has an example.
    ///
    /// # Panics
    /// Panics where [`drop_path`](fn@drop_path) returns an error.
    #[must_use]
    #[track_caller]
    fn drop_path(self, probability: f64, key: RandomKey) -> Self {
        run(self, |x| drop_path(x, probability, key))
    }

    /// Adds normal noise drawn with a key. See [`gaussian_noise`](fn@gaussian_noise), which has an
    /// example.
    ///
    /// # Panics
    /// Panics where [`gaussian_noise`](fn@gaussian_noise) returns an error.
    #[must_use]
    #[track_caller]
    fn gaussian_noise(self, deviation: f64, key: RandomKey) -> Self {
        run(self, |x| gaussian_noise(x, deviation, key))
    }
}

impl<const D: usize, X: Field<D>> DropoutField<D> for X {}

layers! {
    Dropout: |layer, x| dropout_of(layer, x);
}

/// Applies burn's layer to either kind of tensor.
pub(crate) fn dropout_of<const D: usize, X: Field<D>>(layer: &Dropout, x: X) -> X {
    let shard = x.into_shard();
    X::from_shard(match training_key(layer, &shard.device()) {
        None => shard,
        Some((probability, key)) => DropoutField::dropout(shard, probability, key),
    })
}

/// Returns the probability of a layer and the next key in training, that is, with autodiff.
/// Otherwise the layer does nothing, as in burn.
pub(crate) fn training_key(layer: &Dropout, device: &Device) -> Option<(f64, RandomKey)> {
    let training = layer.training.is_enabled() && device.is_autodiff() && layer.prob > 0.0;
    training.then(|| (layer.prob, LayerKeys::draw()))
}

#[cfg(test)]
mod tests {
    use burn::nn::DropoutConfig;
    use burn::tensor::FloatDType;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Half;

    impl Operator<3, 3> for Half {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).dropout(0.5, RandomKey::new(3, "x"))
        }
    }

    #[test]
    fn any_sharding_drops_the_same_elements() {
        check_op(&Half, &[[3, 5, 7]], &[], &[0, 1, 2], 0.0);
    }

    struct Path;

    impl Operator<3, 3> for Path {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).drop_path(0.5, RandomKey::new(3, "x"))
        }
    }

    #[test]
    fn any_sharding_drops_the_same_samples() {
        check_op(&Path, &[[6, 3, 2]], &[], &[0, 1, 2], 0.0);
        let whole =
            Tensor::<3>::ones([6, 1, 1], &Device::default()).drop_path(0.5, RandomKey::new(3, "x"));
        let kept = whole
            .into_data()
            .iter::<f32>()
            .filter(|sample| *sample > 0.0)
            .count();
        assert!((1..6).contains(&kept), "{kept} of 6 samples");
    }

    #[test]
    fn the_mean_stays_and_layers_draw_anew() {
        let layer = DropoutConfig::new(0.3).init();
        let x = Tensor::<1>::ones([100_000], &Device::default());
        let training = x.clone().autodiff();
        let [one, other] = [0, 1].map(|_| training.clone().apply(&layer));
        let mean = one.clone().mean().into_scalar::<f32>();
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
        assert_ne!(one.into_data(), other.into_data());
        x.clone()
            .apply(&layer)
            .into_data()
            .assert_eq(&x.into_data(), true);
    }

    /// Rounded to bf16, the factor of 1/0.9 would be smaller by a 640th.
    #[test]
    fn the_mean_stays_in_half_precision() {
        let x = Tensor::<1>::random([10_000], Distribution::Default, &Device::default());
        let x = x.cast(FloatDType::BF16);
        let y = x.clone().dropout(0.1, RandomKey::new(3, "x"));
        let numbers = |values: Tensor<1>| values.into_data().iter::<f64>().collect::<Vec<f64>>();
        let (x, y) = (numbers(x), numbers(y));
        let kept = x.iter().zip(&y).filter(|(_, y)| **y > 0.0);
        let sums = kept.fold([0.0; 2], |[of_x, of_y], (x, y)| [of_x + x, of_y + y]);
        let factor = 0.9 * sums[1] / sums[0];
        assert!((factor - 1.0).abs() < 5e-4, "{factor}");
    }

    #[test]
    fn a_probability_of_one_is_an_error() {
        let x = ShardTensor::solo(Tensor::<1>::ones([3], &Default::default()));
        let error = dropout(x, 1.0, RandomKey::new(0, "x"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("less than 1"), "{error}");
    }
}
