//! Neighborhood attention of assembled keys and values: with kernels for GPUs, and on other devices
//! with burn's operators, for which keys are gathered for every query.

use burn::tensor::{Int, Tensor, TensorData};
#[cfg(feature = "cube")]
use halocline_core::ops::is_on_gpu;
use halocline_core::{Result, ShardTensor};

#[cfg(feature = "cube")]
use super::places::spatial;
use super::prepared::Prepared;
use super::run::NeighborhoodRun;
use crate::attention::composed::{result, weights};
#[cfg(feature = "cube")]
use crate::attention::cube;
use crate::attention::engine::tiles::Dim;
use crate::driver::empty::{drop_empty, fill_all};
use crate::precision::widened;

/// Attention of this rank's queries.
pub(super) fn attention<const D: usize>(
    q: ShardTensor<D>,
    k: ShardTensor<D>,
    v: ShardTensor<D>,
    prepared: &Prepared,
) -> Result<Tensor<D>> {
    let Prepared {
        operator,
        run,
        pairs,
        output,
    } = prepared;
    let (q, queries, mesh) = q.into_parts();
    let both = Tensor::cat(vec![k.into_local(), v.into_local()], D - 1);
    let both = match &run.exchange {
        None => both,
        Some(exchange) => {
            let both = ShardTensor::from_parts(both, pairs.clone(), mesh.clone());
            both.run_plan(operator, &exchange.forward.plan)?
        }
    };
    let q = fill_all(q, &queries, operator, 0.0)?;
    let both = fill_all(both, output, operator, 0.0)?;
    let y = attend(q, both, run);
    let kept = output.resized(D - 1, vec![y.dims()[D - 1]]);
    drop_empty(y, &kept, mesh.position(), operator)
}

/// Attention of queries to keys and values concatenated, none of whose dims is empty.
fn attend<const D: usize>(q: Tensor<D>, both: Tensor<D>, run: &NeighborhoodRun) -> Tensor<D> {
    let ([key_width, value_width], dtype) = (run.widths, q.dtype());
    #[cfg(feature = "cube")]
    if is_on_gpu(&q.device()) {
        let [queries, keys] = [q.dims(), both.dims()].map(|shape| spatial(&shape));
        let windows = cube::Windows::near(&run.dims, queries, keys);
        let (q, both) = (widened(q) * run.scale, widened(both));
        return cube::attention(q, both, windows, run.with_lse, dtype);
    }
    let (shape, [batch, heads]) = (q.dims(), [q.dims()[0], q.dims()[D - 2]]);
    let cells = |shape: &[usize; D]| -> usize { shape[1..D - 2].iter().product() };
    let (count, key_heads) = (cells(&shape), both.dims()[D - 2]);
    let (reached, mask) = reached(&run.dims, count);
    let most = reached.len() / count;
    let device = q.device();
    let reached = Tensor::<1, Int>::from_data(TensorData::new(reached, [count * most]), &device);
    let mask = Tensor::<1>::from_data(TensorData::new(mask, [count * most]), (&device, q.dtype()));
    let mask = mask.reshape([1, count, most, 1, 1, 1]);
    let keys = cells(&both.dims());
    let both = both.reshape([batch, keys, key_heads, key_width + value_width]);
    let both = both.select(1, reached);
    let both = both.reshape([batch, count, most, key_heads, 1, key_width + value_width]);
    let q = q.reshape([batch, count, 1, key_heads, heads / key_heads, key_width]);
    let k = both.clone().narrow(5, 0, key_width);
    let v = both.narrow(5, key_width, value_width);
    // [batch, queries, keys, key heads, heads that share one, 1]
    let scores = (widened(q) * run.scale * widened(k)).sum_dim(5) + widened(mask);
    let [weights, lse] = weights(scores, 2);
    let y = (weights * widened(v)).sum_dim(2);
    let of_width = |width| {
        let mut shape = shape;
        shape[D - 1] = width;
        shape
    };
    let (y, lse) = (y.reshape(of_width(value_width)), lse.reshape(of_width(1)));
    result(y, lse, run.with_lse, dtype)
}

/// Lists the same number of keys for every query, by their indices among those that are present,
/// and the bias of their scores: minus infinity for the last keys of a query that reaches fewer.
fn reached(dims: &[Dim; 3], count: usize) -> (Vec<i32>, Vec<f32>) {
    let most: usize = dims.iter().map(|dim| dim.neighborhood.kernel).product();
    let (mut keys, mut mask) = (Vec::new(), Vec::new());
    let reach = |dim: &Dim| -> Vec<Vec<usize>> {
        let step = dim.neighborhood.dilation;
        let keys = dim.queries.clone().map(|query| {
            let window = dim
                .neighborhood
                .keys(query / step, dim.neighborhood.class_size(query, dim.size));
            let first = (query % step) as isize - dim.first_key;
            window
                .map(|key| (first + key * step as isize) as usize)
                .collect()
        });
        keys.collect()
    };
    let [planes, rows, columns] = dims.each_ref().map(reach);
    for plane in &planes {
        for row in &rows {
            for column in &columns {
                let start = keys.len();
                for plane in plane {
                    for row in row {
                        let first = (plane * dims[1].keys + row) * dims[2].keys;
                        keys.extend(column.iter().map(|key| (first + key) as i32));
                    }
                }
                mask.resize(keys.len(), 0.0);
                keys.resize(start + most, 0);
                mask.resize(start + most, f32::NEG_INFINITY);
            }
        }
    }
    // A rank without queries has one of fill.
    if keys.is_empty() {
        return (vec![0; count * most], vec![0.0; count * most]);
    }
    (keys, mask)
}
