//! Structural similarity.
//!
//! `s = (2 μx μt + c1) (2 σxt + c2) / ((μx² + μt² + c1) (σx² + σt² + c2))` for every window, with
//! Gaussian weights, for a prediction `x` and its target `t`, `c1 = (0.01 L)²` and `c2 = (0.03 L)²`
//! for values in a range `L` (Z. Wang et al., "Image quality assessment: from error visibility to
//! structural similarity", 2004). Windows that extend beyond the field are omitted, or filled by
//! the padding of their dim.
//!
//! Means of squares cancel if a field is far from zero, as temperatures are, so variances are
//! computed around the mean of the target's channel.
//!
//! # Placement
//! Batch and space may be sharded; values must be resolved.
//!
//! # Communication
//! Two sums per channel of the target, for the mean of its finite cells, and halos of the five
//! averaged fields, dim by dim.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Boundary, Error, Result, ShardTensor};

use super::{Reduction, reduced};
use crate::constant;
use crate::conv::{ConvOptions, conv};
use crate::driver::Padding;
use crate::field::{Field, WithDims};
use crate::precision::{cast, cast_shard, narrowed, wider};
use crate::rearrange::{cat, narrow, pad};
use crate::reduce::mean_dims;

const NAME: &str = "ssim";

/// Windows of [`ssim`] over `N` spatial dims, and the range of values.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::{Padding, SsimOptions};
///
/// // Kelvin, periodic in longitude.
/// let ring = Padding::new(5, Boundary::Periodic);
/// let options = SsimOptions::new(100.0).with_padding([Padding::default(), ring]);
/// assert_eq!((options.window, options.sigma), ([11, 11], 1.5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsimOptions<const N: usize> {
    /// Largest minus smallest value that the fields can take.
    pub range: f64,
    /// Cells of a window in each dim.
    pub window: [usize; N],
    /// Standard deviation of the Gaussian weights, in cells.
    pub sigma: f64,
    /// Padding of each dim.
    pub padding: [Padding; N],
}

impl<const N: usize> SsimOptions<N> {
    /// Creates options with windows of eleven cells in each dim, a standard deviation of 1.5, and
    /// no padding.
    pub fn new(range: f64) -> Self {
        Self {
            range,
            window: [11; N],
            sigma: 1.5,
            padding: [Padding::default(); N],
        }
    }

    /// Sets the windows.
    #[must_use]
    pub fn with_window(self, window: [usize; N], sigma: f64) -> Self {
        Self {
            window,
            sigma,
            ..self
        }
    }

    /// Sets the padding.
    #[must_use]
    pub fn with_padding(self, padding: [Padding; N]) -> Self {
        Self { padding, ..self }
    }

    /// Weights of a window along one dim.
    fn gaussian(&self, dim: usize) -> Vec<f64> {
        let middle = (self.window[dim] - 1) as f64 / 2.0;
        let weight = |cell: usize| (-((cell as f64 - middle) / self.sigma).powi(2) / 2.0).exp();
        let weights: Vec<f64> = (0..self.window[dim]).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum).collect()
    }
}

/// Computes the structural similarity of every window, `[batch, channels, *windows]`; 1 where both
/// fields are equal. See the [module](self).
///
/// # Errors
/// Fails for fields that differ in shape, element type or layout; for another number of dims than
/// `N + 2`; for windows without cells or larger than the field; for a range or deviation that is
/// not positive; for zero padding in one dim and pole padding in another; for a placement without a
/// rule; and if communication fails.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::SsimOptions;
/// use halocline_ops::loss::ssim;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 2, 13, 12], &mesh, &[Shard(2)])?;
///     let map = ssim(x.clone(), x, &SsimOptions::<2>::new(1.0))?;
///     assert_eq!(map.dims(), [1, 2, 3, 2]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn ssim<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    target: X,
    options: &SsimOptions<N>,
) -> Result<X> {
    x.try_op(|x| {
        let dtype = x.local().dtype();
        let map = wide_ssim(x, target.into_shard(), options)?;
        Ok(cast_shard(map, dtype))
    })
}

/// [`ssim`] in at least f32.
fn wide_ssim<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    target: ShardTensor<D>,
    options: &SsimOptions<N>,
) -> Result<ShardTensor<D>> {
    check(&x, &target, options)?;
    let dtype = x.local().dtype();
    let [x, target] = [x, target].map(|field| cast_shard(field, wider(dtype)));
    let spatial: Vec<usize> = std::iter::once(0).chain(2..D).collect();
    let middle = middle(&target, &spatial)?;
    // Zeros around a field are ordinary cells: the centre is subtracted from them, too.
    let (zeros, options) = &apart(options);
    let padded = |field| {
        if zeros.is_empty() {
            Ok(field)
        } else {
            pad(field, zeros, 0.0)
        }
    };
    let [x, target] = [padded(x)?, padded(target)?].map(|field| field - middle.clone());
    let products = [
        x.clone(),
        target.clone(),
        x.clone().square(),
        target.clone().square(),
        x * target,
    ];
    let channels = products[0].dims()[1];
    let means = blurred(cat(products.into(), 1)?, options)?;
    let mean = |field: usize| narrow(means.clone(), 1, field * channels, channels);
    let (mx, mt) = (mean(0)?, mean(1)?);
    let (vx, vt) = (
        mean(2)? - mx.clone().square(),
        mean(3)? - mt.clone().square(),
    );
    let covariance = mean(4)? - mx.clone() * mt.clone();
    let [c1, c2] = [0.01, 0.03].map(|factor: f64| (factor * options.range).powi(2));
    let [mx, mt] = [mx, mt].map(|mean| mean + middle.clone());
    let above = (mx.clone() * mt.clone() * 2.0 + c1) * (covariance * 2.0 + c2);
    let below = (mx.square() + mt.square() + c1) * (vx + vt + c2);
    Ok(above / below)
}

/// Mean or sum of `1 − ssim` over all windows. For weights, reduce [`ssim`] itself:
/// `(map * weights).mean()`.
///
/// # Errors
/// Errors of [`ssim`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, SsimOptions, ssim_loss};
///
/// let x = Tensor::<3>::from([[[1.0, 3.0, 2.0, 5.0]]]);
/// let options = SsimOptions::new(4.0).with_window([3], 1.0);
/// let loss = ssim_loss(x.clone(), x.clone() + 1.0, &options, Reduction::Mean)?;
/// assert!(loss.into_scalar::<f32>() > 0.0);
/// let none = ssim_loss(x.clone(), x, &options, Reduction::Mean)?;
/// assert!(none.into_scalar::<f32>().abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn ssim_loss<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    target: X,
    options: &SsimOptions<N>,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    x.try_op(|x| {
        let dtype = x.local().dtype();
        let map = wide_ssim(x, target.into_shard(), options)?;
        // One minus the map, which may be close to one, is rounded only as a loss.
        Error::catch(|| narrowed(reduced(-map + 1.0, reduction), dtype))
    })
}

fn check<const D: usize, const N: usize>(
    x: &ShardTensor<D>,
    target: &ShardTensor<D>,
    options: &SsimOptions<N>,
) -> Result<()> {
    let fail = |message: String| Err(Error::operator(NAME, message));
    x.require_resolved(NAME)?;
    target.require_resolved(NAME)?;
    x.require_whole(NAME, 1)?;
    if D != N + 2 || !(1..=3).contains(&N) {
        let message = format!(
            "options of {N} dims for fields {:?}; expected [batch, channels, *spatial]",
            x.dims()
        );
        return fail(message);
    }
    let dtypes = [x, target].map(|field| field.local().dtype());
    if x.dims() != target.dims() || dtypes[0] != dtypes[1] {
        let dims = [x.dims(), target.dims()];
        return fail(format!(
            "fields {:?} of {:?} and {:?} of {:?}",
            dims[0], dtypes[0], dims[1], dtypes[1]
        ));
    }
    if x.layout() != target.layout() {
        return Err(Error::placement(
            NAME,
            format!("{} with {}", x.layout(), target.layout()),
            "redistribute one field to the layout of the other",
        ));
    }
    let has = |boundaries: &[Boundary]| {
        let mut sides = options.padding.iter().flat_map(|padding| {
            padding
                .boundary
                .into_iter()
                .zip([padding.low, padding.high])
        });
        sides.any(|(boundary, width)| width > 0 && boundaries.contains(&boundary))
    };
    if has(&[Boundary::Zeros]) && has(&[Boundary::PoleRow, Boundary::PoleEdge]) {
        return fail("zeros beside poles, whose other side lies half a turn away".into());
    }
    let positive = |value: f64| value.is_finite() && value > 0.0;
    let sizes = options.window.contains(&0);
    let no_weight = |dim: usize| options.gaussian(dim).iter().any(|weight| weight.is_nan());
    if sizes || !positive(options.sigma) || !positive(options.range) || (0..N).any(no_weight) {
        return fail(format!("{options:?}; expected positive numbers"));
    }
    Ok(())
}

/// Mean of the finite cells of each channel, so that a missing value only affects its own windows.
fn middle<const D: usize>(field: &ShardTensor<D>, dims: &[usize]) -> Result<ShardTensor<D>> {
    let (local, layout, mesh) = constant(field).into_parts();
    let hole = local.clone().is_nan().bool_or(local.clone().is_inf());
    let present = hole.clone().bool_not().float();
    let present = cast(present, local.dtype());
    let both = [local.mask_fill(hole, 0.0), present];
    let both = both.map(|local| ShardTensor::from_parts(local, layout.clone(), mesh.clone()));
    let channels = field.dims()[1];
    let means = Error::catch(|| mean_dims(cat(both.into(), 1)?, dims).map(ShardTensor::resolve))??;
    let [sum, present] = [0, channels].map(|first| narrow(means.clone(), 1, first, channels));
    let (present, none) = (present?, f64::from(f32::MIN_POSITIVE));
    Error::catch(|| sum.map(|sum| sum / present.clamp_min(none)))?
}

/// Splits off the zero paddings, with their dims, from the options.
fn apart<const N: usize>(options: &SsimOptions<N>) -> (Vec<(usize, Padding)>, SsimOptions<N>) {
    let (mut zeros, mut rest) = (Vec::new(), *options);
    for (dim, padding) in rest.padding.iter_mut().enumerate() {
        let mut sides = [padding.low, padding.high]
            .into_iter()
            .zip(padding.boundary);
        if sides.any(|(width, boundary)| width > 0 && boundary == Boundary::Zeros) {
            zeros.push((dim + 2, std::mem::take(padding)));
        }
    }
    (zeros, rest)
}

/// Computes the means of windows, dim by dim.
fn blurred<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    options: &SsimOptions<N>,
) -> Result<ShardTensor<D>> {
    let channels = x.dims()[1];
    let along = |x: ShardTensor<D>, dim: usize| {
        let weights = options.gaussian(dim).repeat(channels);
        let mut shape = [1; D];
        shape[0] = channels;
        shape[dim + 2] = options.window[dim];
        let device = (&x.device(), x.local().dtype());
        let weights = Tensor::<D>::from_data(TensorData::new(weights, shape), device);
        let mut padding = [Padding::default(); N];
        padding[dim] = options.padding[dim];
        let options = ConvOptions::default()
            .with_padding(padding)
            .with_groups(channels);
        conv(x, weights, None, &options)
    };
    (0..N).try_fold(x, along)
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;

    use super::*;
    use crate::testing::{Operator, check_op, random};

    /// Loss with this padding of the first spatial dim.
    struct Loss(Padding);

    impl Operator<4, 1> for Loss {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 1> {
            let target = inputs.remove(1);
            let padding = [self.0, Padding::new(2, Boundary::Periodic)];
            let options = SsimOptions::new(3.0).with_window([3, 5], 1.2);
            let options = options.with_padding(padding);
            ssim_loss(inputs.remove(0), target, &options, Reduction::Mean).unwrap()
        }
    }

    #[test]
    fn windows_cross_shards() {
        for padding in [Padding::default(), Padding::zeros(1, 2)] {
            let fields = [[2, 2, 7, 9]; 2];
            check_op(&Loss(padding), &fields, &[], &[0, 2, 3], 1e-4);
        }
    }

    #[test]
    fn zeros_lie_around_the_field_and_not_around_its_deviations() {
        let [x, target] = [[11.0, 10.0, 10.0], [10.0; 3]];
        let options = SsimOptions::<1>::new(10.0).with_window([3], 0.8);
        let weights = options.gaussian(0);
        let around = |field: [f64; 3]| [0.0, field[0], field[1], field[2], 0.0];
        let (of_x, of_target) = (around(x), around(target));
        let expected = (0..3).map(|window| {
            let mean = |value: &dyn Fn(usize) -> f64| -> f64 {
                (0..3).map(|tap| weights[tap] * value(window + tap)).sum()
            };
            let (mx, mt) = (mean(&|cell| of_x[cell]), mean(&|cell| of_target[cell]));
            let vx = mean(&|cell| of_x[cell].powi(2)) - mx * mx;
            let vt = mean(&|cell| of_target[cell].powi(2)) - mt * mt;
            let both = mean(&|cell| of_x[cell] * of_target[cell]) - mx * mt;
            let [c1, c2] = [0.01, 0.09];
            (2.0 * mx * mt + c1) * (2.0 * both + c2) / ((mx * mx + mt * mt + c1) * (vx + vt + c2))
        });
        let field = |cells: [f64; 3]| {
            ShardTensor::solo(Tensor::<3>::from_data([[cells]], &Default::default()))
        };
        let options = options.with_padding([Padding::zeros(1, 1)]);
        let map = ssim(field(x), field(target), &options).unwrap();
        for (found, expected) in map.local().to_data().iter::<f64>().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
    }

    #[test]
    fn a_cell_without_a_value_counts_in_its_windows_only() {
        let [x, target] = [0, 1].map(|index| random::<3>([1, 2, 30], "x", index).inner() + 280.0);
        let options = SsimOptions::<1>::new(4.0).with_window([5], 1.0);
        let map = |hole: bool| {
            let mut values: Vec<f32> = target.to_data().iter().collect();
            if hole {
                (values[12], values[13]) = (f32::NAN, f32::INFINITY);
            }
            let target = Tensor::<3>::from_data(TensorData::new(values, [1, 2, 30]), &x.device());
            let map = ssim(
                ShardTensor::solo(x.clone()),
                ShardTensor::solo(target),
                &options,
            );
            map.unwrap()
                .local()
                .to_data()
                .iter::<f32>()
                .collect::<Vec<_>>()
        };
        for (index, (found, expected)) in map(true).iter().zip(map(false)).enumerate() {
            if (8..=13).contains(&index) {
                assert!(found.is_nan(), "window {index}: {found}")
            } else {
                assert!((found - expected).abs() < 1e-3, "window {index}: {found}")
            }
        }
        let narrow = SsimOptions::<1>::new(4.0).with_window([4], 0.001);
        let x = ShardTensor::solo(x);
        assert!(ssim(x.clone(), x, &narrow).is_err());
    }

    /// In bf16 most of the map would be one.
    #[test]
    fn a_small_loss_is_not_lost_in_half_precision() {
        let field = |scale: f64| {
            let x = random::<3>([1, 1, 40], "x", 0).inner() * scale;
            x.cast(FloatDType::BF16)
        };
        let options = SsimOptions::<1>::new(4.0);
        let loss = |x: Tensor<3>, y: Tensor<3>| -> f32 {
            let loss = ssim_loss(x, y, &options, Reduction::Mean);
            loss.unwrap().into_scalar()
        };
        let (x, y) = (field(1.0), field(1.03));
        let wide = |x: &Tensor<3>| x.clone().cast(FloatDType::F32);
        let expected = loss(wide(&x), wide(&y));
        assert!((1e-4..2e-3).contains(&expected), "{expected}");
        assert!((loss(x, y) / expected - 1.0).abs() < 0.01);
    }

    /// Naive `E[x²] − E[x]²` cancels here.
    #[test]
    fn a_large_mean_costs_no_digits() {
        let [x, target] = [0, 1].map(|index| random::<3>([1, 1, 40], "x", index).inner());
        let options = SsimOptions::<1>::new(4.0);
        let map = |offset: f64| {
            let fields = [&x, &target].map(|field| field.clone() + offset);
            let [x, target] = fields.map(ShardTensor::solo);
            ssim(x, target, &options).unwrap().into_local()
        };
        // Far from zero the factor of the means is one, so only the other remains.
        let (near, far) = (map(1000.0), map(3000.0));
        assert!((near - far).abs().max().into_scalar::<f32>() < 1e-3);
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<3>::ones([1, 1, 8], &Default::default()));
        let error = ssim(x.clone(), x.clone(), &SsimOptions::<1>::new(0.0)).unwrap_err();
        assert!(
            error.to_string().contains("expected positive numbers"),
            "{error}"
        );
        let error = ssim(x.clone(), x, &SsimOptions::<2>::new(1.0)).unwrap_err();
        assert!(error.to_string().contains("options of 2 dims"), "{error}");
    }
}
