//! Batch normalization.
//!
//! `y = (x − mean) / √(variance + epsilon) · weight + bias`, with mean and variance per channel: of
//! the batch and the field in training, given ones otherwise. Semantics follow PyTorch's
//! `batch_norm`.
//!
//! # Placement
//! All dims may be sharded; values must be resolved.
//!
//! # Communication
//! In training, count, mean and sum of squared deviations of each channel are gathered in one
//! message per rank among the ranks over which batch and field are sharded; two sums in the
//! backward pass. With given statistics nothing is sent. burn's module also gathers the statistics
//! of sharded channels, because every rank keeps all of them.
//!
//! # Adjoint
//! Adjoint of the formula, in training through mean and variance. Gradients of weight and bias are
//! summed over all ranks over which `x` is sharded.

use burn::module::RunningState;
use burn::nn::BatchNorm;
use burn::tensor::{Tensor, TensorData};
use halocline_core::comm::Operation;
use halocline_core::{
    Error, Layout, Replicate, Result, Shard, ShardTensor, Traffic, is_recomputing,
};

use super::kernel::group::Extents;
use super::kernel::moments::Moments;
use super::node::{GroupRun, Norm};
use super::parameter::{affine, along, both_along, factors};
use super::require_epsilon;
use crate::field::{Field, run};
use crate::golden::{Golden, output, with_dims};
use crate::kernel::flex;
use crate::operand::Operand;
use crate::precision::{cast, cast_shard, wider};
use crate::reduce::mean_dims;

const NAME: &str = "batch_norm";

/// Mean and population variance of each channel, `[1, channels, 1, ..]`, in at least f32, without
/// gradients. Every rank holds those of its channels; ranks with the same channels hold the same
/// values.
#[derive(Clone, Debug)]
pub struct BatchStatistics<const D: usize> {
    /// Means.
    pub mean: ShardTensor<D>,
    /// Variances.
    pub variance: ShardTensor<D>,
}

/// Normalizes each channel by its mean and variance, and returns these too. See the [module](self).
///
/// # Errors
/// Fails for a tensor with fewer than two dims, without cells, or with one value per channel, for
/// parameters of another size, for a negative ε, for partial values, and if communication fails.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::norm::batch_norm_train;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("data", 2)])?;
///     let x = ShardTensor::<3>::full([4, 3, 5], 7.0, &mesh, &[Shard(0)])?;
///     let (y, statistics) = batch_norm_train(x, None, None, 1e-5)?;
///     assert_eq!((y.dims(), statistics.mean.dims()), ([4, 3, 5], [1, 3, 1]));
///     assert_eq!(statistics.mean.local().to_data().iter::<f32>().next(), Some(7.0));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn batch_norm_train<const D: usize>(
    x: ShardTensor<D>,
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<(ShardTensor<D>, BatchStatistics<D>)> {
    check(&x, epsilon)?;
    let dims = x.dims();
    if dims[0] * dims[2..].iter().product::<usize>() == 1 {
        let message =
            format!("{dims:?}; expected more than one value for each channel in training");
        return Err(Error::operator(NAME, message));
    }
    if flex::runs_on(&x.device()) {
        return by_kernels(x, [weight, bias], epsilon);
    }
    let dtype = x.local().dtype();
    let parameters = both_along(&x, 1, [weight, bias], NAME)?;
    let others: Vec<usize> = (0..D).filter(|dim| *dim != 1).collect();
    let x = cast_shard(x, wider(dtype));
    let mean = mean_dims(x.clone(), &others)?.resolve();
    let centred = x - mean.clone();
    let variance = mean_dims(centred.clone().square(), &others)?.resolve();
    let y = centred / (variance.clone() + epsilon).sqrt();
    let [mean, variance] = [mean, variance].map(ShardTensor::detach);
    let y = affine(cast_shard(y, dtype), parameters);
    Ok((y, BatchStatistics { mean, variance }))
}

/// [`batch_norm_train`] with our kernels: one group per channel, with one statistic for all
/// samples.
fn by_kernels<const D: usize>(
    x: ShardTensor<D>,
    parameters: [Option<Operand<1>>; 2],
    epsilon: f64,
) -> Result<(ShardTensor<D>, BatchStatistics<D>)> {
    let axes = x
        .layout()
        .axes_where(|placement| matches!(placement, Shard(dim) if dim != 1));
    let (held, sizes) = (x.local_dims(), x.dims());
    let (device, dtype) = (x.device(), x.local().dtype());
    let [weight, bias] = factors(&x, 1, parameters, NAME)?;
    let (local, layout, mesh) = x.into_parts();
    let mut run = GroupRun {
        extents: Extents {
            batch: held[0],
            channels: held[1],
            cells: held[2..].iter().product(),
            groups: held[1],
        },
        count: (sizes.iter().product::<usize>() / sizes[1]) as f64,
        epsilon,
        comm: mesh.comm().clone(),
        ranks: mesh.ranks_along(&axes),
        operation: Operation::new(NAME, Traffic::Reduce, Some(&layout)),
        together: None,
    };
    let moments = run.moments_together(local.clone().inner().into_dispatch())?;
    run.together = Some(
        moments
            .iter()
            .map(|channel| channel.statistic(epsilon))
            .collect(),
    );
    let channels = channel_layout(&layout);
    let mut shape = [1; D];
    shape[1] = held[1];
    let statistic = |value: fn(&Moments) -> f64| {
        let values: Vec<f64> = moments.iter().map(value).collect();
        let values = TensorData::new(values, shape);
        let values = Tensor::<D>::from_data(values, (&device, wider(dtype)));
        ShardTensor::from_parts(values, channels.clone(), mesh.clone())
    };
    let statistics = BatchStatistics {
        mean: statistic(|channel| channel.mean),
        variance: statistic(|channel| channel.squares / channel.count),
    };
    let y = Error::catch(|| Norm::Group(run).apply(local, weight, bias))?;
    Ok((ShardTensor::from_parts(y, layout, mesh), statistics))
}

/// Layout of one value per channel, `[1, channels, 1, ..]`, distributed as the channels of a field
/// are.
pub(crate) fn channel_layout(field: &Layout) -> Layout {
    let placements = field.map_placements(|placement| match placement {
        Shard(dim) if dim != 1 => Replicate,
        other => other,
    });
    let mut extents = vec![vec![1]; field.shape().len()];
    extents[1] = field.extents(1).to_vec();
    field.derive(placements, extents)
}

/// Normalizes each channel by a given mean and variance. See the [module](self).
///
/// # Errors
/// Errors of [`batch_norm_train`], except that one value per channel is allowed; also fails for
/// statistics of another size.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::norm::batch_norm;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 30.0], [3.0, 10.0]]));
/// let statistics = [Tensor::<1>::from([2.0, 20.0]), Tensor::<1>::from([1.0, 100.0])];
/// let y = batch_norm(x, statistics.map(Into::into), None, None, 0.0)?;
/// y.local().to_data().assert_eq(&[[-1.0_f32, 1.0], [1.0, -1.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn batch_norm<const D: usize>(
    x: ShardTensor<D>,
    [mean, variance]: [Operand<1>; 2],
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    check(&x, epsilon)?;
    let dtype = x.local().dtype();
    let parameters = both_along(&x, 1, [weight, bias], NAME)?;
    let x = cast_shard(x, wider(dtype));
    let beside = |moments: Operand<1>| -> Result<ShardTensor<D>> {
        // Either element type is accepted: statistics of a field in half precision are f32.
        let moments = match moments {
            Operand::Replicated(moments) => Operand::Replicated(cast(moments, wider(dtype))),
            laid => Operand::Sharded(cast_shard(laid.place_on(&x)?, wider(dtype))),
        };
        along(&x, 1, moments, NAME)
    };
    let (mean, variance) = (beside(mean)?, beside(variance)?);
    let y = (x - mean) / (variance + epsilon).sqrt();
    Ok(affine(cast_shard(y, dtype), parameters))
}

fn check<const D: usize>(x: &ShardTensor<D>, epsilon: f64) -> Result<()> {
    x.require_resolved(NAME)?;
    require_epsilon(NAME, epsilon)?;
    if D < 2 || x.dims().contains(&0) {
        let message = format!("{:?}; expected [batch, channels, ..] with cells", x.dims());
        return Err(Error::operator(NAME, message));
    }
    Ok(())
}

/// Applies burn's layer to either kind of tensor. In training it updates the running statistics,
/// with the population variance as burn does: every rank updates its own module with the same
/// values.
#[track_caller]
pub(super) fn batch_norm_of<const D: usize, X: Field<D>>(norm: &BatchNorm, x: X) -> X {
    run(x, |x| {
        let [weight, bias] =
            [&norm.gamma, &norm.beta].map(|parameter| Some(Operand::from(parameter)));
        if !x.device().is_autodiff() || !norm.training.is_enabled() {
            let running = [&norm.running_mean, &norm.running_var];
            let running = running.map(|state| Operand::from(state.value().to_device(&x.device())));
            return batch_norm(x, running, weight, bias, norm.epsilon);
        }
        let (y, BatchStatistics { mean, variance }) =
            batch_norm_train(x, weight, bias, norm.epsilon)?;
        update_running(&norm.running_mean, mean, norm.momentum, |new, _| new)?;
        update_running(&norm.running_var, variance, norm.momentum, |new, _| new)?;
        Ok(y)
    })
}

/// Updates the statistics of all channels on every rank at once: burn's module would otherwise
/// visit those of its last `value_sync`. `fill` replaces new values that are not known, given the
/// previous ones.
pub(crate) fn update_running<const D: usize>(
    state: &RunningState<Tensor<1>>,
    new: ShardTensor<D>,
    momentum: f64,
    fill: impl FnOnce(Tensor<1>, &Tensor<1>) -> Tensor<1>,
) -> Result<()> {
    let channels = new.dims()[1];
    let whole = Layout::replicated(new.layout().mesh(), &new.dims());
    let new = if new.layout().is_sharded(1) {
        new.try_redistribute(&whole)?
    } else {
        new
    };
    let new = new.into_local().reshape([channels]);
    // Only now: a recomputed block must repeat its communication.
    if is_recomputing() {
        return Ok(());
    }
    let held = state.value_sync().to_device(&new.device());
    let new = fill(cast(new, held.dtype()), &held);
    let mixed = held.mul_scalar(1.0 - momentum) + new.mul_scalar(momentum);
    state.update(mixed.detach());
    state.value_sync();
    Ok(())
}

/// Registry entry of batch normalization.
pub(super) const GOLDEN: Golden = Golden::new("batch_norm", |case| {
    let epsilon = case.attributes.number("eps").unwrap_or(1e-5);
    let (weight, bias) = (case.operand("weight"), case.operand("bias"));
    let trains = case.attributes.number("training").unwrap_or(1.0) == 1.0;
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        output(if trains {
            batch_norm_train(x, weight, bias, epsilon).map(|(y, _)| y)
        } else {
            let mean = case.needed("running_mean")?.detach().into();
            let variance = case.needed("running_var")?.detach().into();
            batch_norm(x, [mean, variance], weight, bias, epsilon)
        })
    })
})
.with_travels([
    "three numbers per channel",
    "two sums per channel; sums of parameters' gradients",
])
.with_modules("`BatchNorm`");

#[cfg(test)]
mod tests {
    use burn::nn::BatchNormConfig;
    use burn::tensor::Device;
    use halocline_core::{Halos, Launcher};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{compare, random};

    /// Results of two training steps and the running statistics, from burn's module or, with a
    /// sharded dim, from ours.
    fn run(ranks: usize, sharded: Option<usize>) -> Vec<Vec<burn::tensor::TensorData>> {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("data", ranks)])?;
            let norm = world.init(|device| BatchNormConfig::new(3).init(device))?;
            let mut found = Vec::new();
            for step in 0..2 {
                let x = random([5, 3, 4], "x", step);
                found.push(match sharded {
                    None => norm.forward(x).into_data(),
                    Some(dim) => {
                        let x = ShardTensor::distribute(x, &mesh, &[Shard(dim)])?;
                        let y = x.apply(&norm);
                        y.full_tensor().into_data()
                    }
                });
            }
            if sharded.is_none() {
                norm.running_mean.value_sync();
                norm.running_var.value_sync();
            }
            // As checkpoints read them.
            found.push(norm.running_mean.value().into_data());
            found.push(norm.running_var.value().into_data());
            Ok(found)
        });
        found.unwrap()
    }

    #[test]
    fn running_statistics_are_those_of_one_device_on_every_rank() {
        let expected = run(1, None).remove(0);
        for (ranks, dim) in [(1, 0), (2, 0), (4, 0), (2, 1), (4, 1), (2, 2)] {
            let all = run(ranks, Some(dim));
            for found in &all {
                compare(found, &expected, 1e-5, &format!("{ranks} ranks, {dim}"));
                assert!(found[2..] == all[0][2..], "ranks differ");
            }
        }
    }

    #[test]
    fn blocks_that_are_recomputed_count_a_batch_once() {
        let statistics = |halos: Option<Halos>| {
            let device = Device::default().autodiff();
            let norm = BatchNormConfig::new(3).init(&device);
            let x = ShardTensor::solo(random::<3>([5, 3, 4], "x", 0));
            let y = match halos {
                None => x.apply(&norm),
                Some(halos) => x.recompute(&norm, halos, |norm, x| x.apply(norm)),
            };
            y.square().sum().backward();
            [&norm.running_mean, &norm.running_var].map(|state| state.value().into_data())
        };
        let expected = statistics(None);
        for halos in [Halos::Keep, Halos::Resend] {
            assert!(statistics(Some(halos)) == expected, "{halos:?}");
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let weight = Tensor::<1>::ones([3], &Default::default());
        let error = batch_norm_train(x, Some(weight.into()), None, 1e-5)
            .unwrap_err()
            .to_string();
        assert!(error.contains("a parameter [3]"), "{error}");
    }
}
