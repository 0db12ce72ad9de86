//! Normalization with burn's operators, for devices without our kernels.

use burn::tensor::Tensor;

use super::kernel::group::Extents;
use super::kernel::layer::RowNorm;
use crate::precision::widened;

/// [`group_norm`](super::group_norm) on a shard. `sum` adds over the ranks that hold cells of the
/// same sample, `count` is the number of a group's elements on all of them, and `present` is false
/// if the shard has only filler cells.
pub(super) fn group_norm<const D: usize>(
    x: Tensor<D>,
    [weight, bias]: [Tensor<1>; 2],
    extents: Extents,
    count: f64,
    epsilon: f64,
    present: bool,
    sum: impl Fn(Tensor<2>) -> Tensor<2>,
) -> Tensor<D> {
    let Extents {
        batch,
        channels,
        cells,
        groups,
    } = extents;
    let (shape, dtype) = (x.dims(), x.dtype());
    let [weight, bias] = [weight, bias].map(|factors| widened(factors).reshape([1, channels, 1]));
    let x = widened(x).reshape([batch * groups, channels / groups * cells]);
    let mean = sum(x.clone().sum_dim(1)) / count;
    let centred = x - mean;
    // A factor instead of a branch: the graph is the same on all ranks.
    let squares = centred.clone().square().sum_dim(1) * f64::from(present);
    let deviation = (sum(squares) / count + epsilon).sqrt();
    let y = (centred / deviation).reshape([batch, channels, cells]);
    (y * weight + bias).reshape(shape).cast(dtype)
}

/// [`layer_norm`](super::layer_norm) or [`rms_norm`](super::rms_norm) on a shard.
pub(super) fn rows<const D: usize>(
    norm: RowNorm,
    x: Tensor<D>,
    [weight, bias]: [Tensor<1>; 2],
) -> Tensor<D> {
    let dtype = x.dtype();
    let [weight, bias] = [weight, bias].map(|factors| widened(factors).unsqueeze());
    let x = widened(x);
    let (x, epsilon) = match norm {
        RowNorm::Layer { epsilon } => (x.clone() - x.mean_dim(D - 1), epsilon),
        RowNorm::Rms { epsilon } => (x, epsilon),
    };
    let deviation = (x.clone().square().mean_dim(D - 1) + epsilon).sqrt();
    (x / deviation * weight + bias).cast(dtype)
}
