//! Batch normalization by mean and variance of the cells that count.

use burn::backend::DispatchTensor;
use burn::nn::BatchNorm;
use burn::tensor::{Tensor, TensorData};
use halocline_core::comm::Operation;
use halocline_core::ops::{BackwardPass, Operator, all_gather_numbers, all_reduce, apply};
use halocline_core::{DeviceMesh, Error, ReduceOp, Result, Shard, ShardTensor, Traffic};

use super::norm::{Parameters, beside, check, scaled};
use super::{apply_mask, broadcast, in_f32};
use crate::driver::empty::{fill_all, without_fill};
use crate::field::Field;
use crate::norm::batch::{channel_layout, update_running};
use crate::norm::{BatchStatistics, Moments};
use crate::operand::Operand;
use crate::reduce::sum_dims;

const NAME: &str = "masked_batch_norm";

/// Batch normalization by burn's module, with mean and variance of the cells that count. Cells that
/// do not count become zero.
///
/// In training it normalizes as [`masked_batch_norm_train`] and updates the running statistics,
/// except those of a channel of which no cell counts; otherwise it normalizes by them.
///
/// # Shapes
/// `x` is `[batch, channels, *spatial]`.
///
/// # Placement
/// All dims may be sharded.
///
/// # Communication
/// That of [`masked_batch_norm_train`] in training, and the statistics of sharded channels; none
/// otherwise.
///
/// # Errors
/// Errors of [`masked_batch_norm_train`].
///
/// # Example
/// ```
/// use burn::nn::BatchNormConfig;
/// use burn::tensor::{Device, Tensor};
/// use halocline_ops::masked::masked_batch_norm;
///
/// let device = Device::default().autodiff();
/// let norm = BatchNormConfig::new(1).with_momentum(0.5).init(&device);
/// let x = Tensor::<3>::from_data([[[1.0, f32::NAN, 3.0]]], &device);
/// let mask = Tensor::<3>::from_data([[[1.0, 0.0, 1.0]]], &device);
/// masked_batch_norm(x, mask, &norm)?;
/// let mean = norm.running_mean.value().into_data();
/// mean.assert_eq(&[1.0_f32].into(), true); // half of 2, the mean of 1 and 3
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_batch_norm<const D: usize, X: Field<D>>(
    x: X,
    mask: X,
    norm: &BatchNorm,
) -> Result<X> {
    let [weight, bias] = [&norm.gamma, &norm.beta].map(|parameter| Some(Operand::from(parameter)));
    let is_autodiff = x.clone().into_shard().device().is_autodiff();
    if is_autodiff && norm.training.is_enabled() {
        let (y, statistics) = masked_batch_norm_train(x, mask, weight, bias, norm.epsilon)?;
        let BatchStatistics { mean, variance } = statistics;
        update_running(&norm.running_mean, mean, norm.momentum, known)?;
        update_running(&norm.running_var, variance, norm.momentum, known)?;
        return Ok(y);
    }
    let shape = channels(&x.dims())?;
    let parameters = [(weight, shape), (bias, shape)];
    check(NAME, &x.dims(), &parameters, norm.epsilon)?;
    in_f32(x, mask, |x, mask| {
        let x = apply_mask(x, mask.clone())?;
        let [mean, variance] = [&norm.running_mean, &norm.running_var].map(|state| {
            let value = state.value().to_device(&x.device());
            beside(&x, Operand::Replicated(value), shape)
        });
        let (mean, variance) = (mean?, variance?);
        let y = Error::catch(|| (x - mean) / (variance + norm.epsilon).sqrt())?;
        scaled(y, mask, parameters)
    })
}

/// Replaces the statistics of channels of which no cell counts by the previous ones.
fn known(new: Tensor<1>, held: &Tensor<1>) -> Tensor<1> {
    let none = new.clone().is_nan();
    new.mask_where(none, held.clone())
}

/// Normalizes each channel by mean and variance of its cells that count, and returns these too: NaN
/// for a channel of which none counts. Cells that do not count become zero.
///
/// # Shapes
/// `x` is `[batch, channels, *spatial]`; weight and bias are `[channels]`.
///
/// # Placement
/// All dims may be sharded.
///
/// # Communication
/// Count, mean and sum of squared deviations of each channel are gathered in one message per rank;
/// two sums in the backward pass, in one message.
///
/// # Errors
/// Fails for a field with fewer than two dims or without cells, for parameters of another size, and
/// for a negative ε; otherwise errors of [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::masked_batch_norm_train;
///
/// let x = Tensor::<3>::from([[[1.0, f32::NAN, 3.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0]]]);
/// let (y, statistics) = masked_batch_norm_train(x, mask, None, None, 0.0)?;
/// y.into_data().assert_eq(&[[[-1.0_f32, 0.0, 1.0]]].into(), true);
/// statistics.mean.into_local().into_data().assert_eq(&[[[2.0_f32]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_batch_norm_train<const D: usize, X: Field<D>>(
    x: X,
    mask: X,
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<(X, BatchStatistics<D>)> {
    let shape = channels(&x.dims())?;
    let parameters: Parameters<D, 1> = [(weight, shape), (bias, shape)];
    check(NAME, &x.dims(), &parameters, epsilon)?;
    let mut statistics = None;
    let y = in_f32(x, mask, |x, mask| {
        let x = apply_mask(x, mask.clone())?;
        let (y, found) = normalized(x, &mask, epsilon)?;
        statistics = Some(found);
        scaled(y, mask, parameters)
    })?;
    Ok((y, statistics.expect("those of the field")))
}

/// Returns the shape of one value per channel.
fn channels<const D: usize>(shape: &[usize; D]) -> Result<[usize; D]> {
    if D < 2 || shape.contains(&0) {
        let message = format!("{shape:?}; expected [batch, channels, ..] with cells");
        return Err(Error::operator(NAME, message));
    }
    Ok(std::array::from_fn(
        |dim| if dim == 1 { shape[1] } else { 1 },
    ))
}

/// Normalizes a field without NaN in cells that do not count, which get other values.
fn normalized<const D: usize>(
    x: ShardTensor<D>,
    mask: &ShardTensor<D>,
    epsilon: f64,
) -> Result<(ShardTensor<D>, BatchStatistics<D>)> {
    let weights = broadcast(&x, mask.clone())?.into_local();
    let (local, layout, mesh) = x.into_parts();
    let filled = |local: Tensor<D>| fill_all(local, &layout, NAME, 0.0);
    let (local, weights) = (filled(local)?, filled(weights)?);
    let axes = layout.axes_where(|placement| matches!(placement, Shard(dim) if dim != 1));
    let operation = Operation::new(NAME, Traffic::Reduce, Some(&layout));
    let numbers = moments(local.clone().inner(), weights)?;
    let group = mesh.ranks_along(&axes);
    let numbers = all_gather_numbers(mesh.comm(), &group, &operation, &numbers)?;
    let count = local.dims()[1];
    let total = (0..count).map(|channel| {
        let moments = numbers.iter().map(|numbers| Moments {
            count: numbers[channel],
            mean: numbers[count + channel],
            squares: numbers[2 * count + channel],
        });
        moments.fold(Moments::default(), Moments::combine)
    });
    let total: Vec<Moments> = total.collect();
    let (device, dtype) = (local.device(), local.dtype());
    let tensor = |channels: &[Moments], value: &dyn Fn(&Moments) -> f64| {
        let values: Vec<f64> = channels.iter().map(value).collect();
        let shape: [usize; D] = std::array::from_fn(|dim| if dim == 1 { values.len() } else { 1 });
        Tensor::<D>::from_data(TensorData::new(values, shape), (&device, dtype))
    };
    let if_any = |channel: &Moments, value: f64| if channel.count > 0.0 { value } else { 0.0 };
    let constant = |value: &dyn Fn(&Moments) -> f64| tensor(&total[..], value).inner();
    let run = Normalize {
        mask: fill_all(mask.local().clone(), mask.layout(), NAME, 0.0)?,
        mean: constant(&|channel| channel.mean),
        scale: constant(&|channel| if_any(channel, channel.statistic(epsilon).scale)),
        inverse: constant(&|channel| if_any(channel, channel.count.recip())),
        axes,
        operation,
        mesh: mesh.clone(),
    };
    let channels = channel_layout(&layout);
    // Without the channel that fills an empty shard.
    let held = &total[..channels.local_shape(mesh.position())[1]];
    let statistic = |value: &dyn Fn(&Moments) -> f64| {
        ShardTensor::from_parts(tensor(held, value), channels.clone(), mesh.clone())
    };
    let statistics = BatchStatistics {
        mean: statistic(&|channel| {
            if channel.count > 0.0 {
                channel.mean
            } else {
                f64::NAN
            }
        }),
        variance: statistic(&|channel| channel.squares / channel.count),
    };
    let y = Error::catch(|| Tensor::<D>::from_dispatch(apply(run, [local.into_dispatch()])))?;
    Ok((without_fill(y, layout, mesh, NAME)?, statistics))
}

/// Computes sum of weights, mean and sum of squared deviations of this rank's cells: the first of
/// all channels, then the second, then the third.
fn moments<const D: usize>(x: Tensor<D>, weights: Tensor<D>) -> Result<Vec<f64>> {
    let counts = channel_sums(weights.clone())?;
    let none = counts.clone().equal_elem(0.0);
    let inverse = counts.clone().recip().mask_fill(none, 0.0);
    let means = channel_sums(x.clone() * weights.clone())? * inverse;
    let squares = channel_sums((x - means.clone()).square() * weights)?;
    let all = Tensor::cat(vec![counts, means, squares], 1).into_data();
    Ok(all.iter::<f64>().collect())
}

/// Sums the cells of each channel on this rank.
fn channel_sums<const D: usize>(x: Tensor<D>) -> Result<Tensor<D>> {
    let others: Vec<usize> = (0..D).filter(|dim| *dim != 1).collect();
    Ok(sum_dims(ShardTensor::solo(x), &others)?.into_local())
}

/// Normalization by mean and variance of the input, as a node of the graph.
#[derive(Debug)]
struct Normalize<const D: usize> {
    mask: Tensor<D>,
    /// Mean, `1 / √(variance + epsilon)`, and `1 / Σ mask` of each channel.
    mean: Tensor<D>,
    scale: Tensor<D>,
    inverse: Tensor<D>,
    /// Mesh axes over which the cells of a channel are sharded.
    axes: Vec<usize>,
    operation: Operation,
    mesh: DeviceMesh,
}

impl<const D: usize> Normalize<D> {
    fn run(&self, x: DispatchTensor) -> Tensor<D> {
        (Tensor::from_dispatch(x) - self.mean.clone()) * self.scale.clone()
    }
}

impl<const D: usize> Operator for Normalize<D> {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((self.run(inputs.remove(0)).into_dispatch(), ()))
    }

    /// `x̄ = (ȳ − m / Σ m · (Σ ȳ + y · Σ ȳ·y)) · scale`; cells that do not count have `ȳ = 0`.
    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let y = self.run(pass.take_input(0));
        let gradient = Tensor::<D>::from_dispatch(pass.cotangent);
        let channels = gradient.dims()[1];
        let sums = channel_sums(gradient.clone())?;
        let products = channel_sums(gradient.clone() * y.clone())?;
        let sums = Tensor::cat(vec![sums, products], 1);
        let operation = self.operation.backward();
        let sums =
            Error::catch(|| all_reduce(sums, &self.mesh, &self.axes, ReduceOp::Sum, operation))?;
        let products = sums.clone().narrow(1, channels, channels);
        let common = sums.narrow(1, 0, channels) + y * products;
        let shares = self.mask.clone() * self.inverse.clone();
        let slope = (gradient - common * shares) * self.scale.clone();
        Ok(vec![Some(slope.into_dispatch())])
    }
}
