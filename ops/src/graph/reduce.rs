//! Sums, means and extrema of the edges of each target.

use std::ops::Range;

use burn::tensor::{Bool, Tensor, TensorData};
use halocline_core::{ReduceOp, Result, ShardTensor};

use crate::driver::empty::{drop_empty, fill_empty};
use crate::kernel::taken::{Places, add, take};
use crate::precision::{cast, widened};
use crate::reduce::local_extremum;
use crate::reshape;

const NAME: &str = "aggregate";

/// What the values of the edges of a target become; zero for a target without edges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Aggregate {
    /// Their sum.
    #[default]
    Sum,
    /// Their mean.
    Mean,
    /// Their maximum; its gradient goes to the edges that have it, in equal parts.
    Max,
    /// Their minimum, with a gradient as that of the maximum.
    Min,
}

/// Reduces the edges of each target of this rank. `held` are the extents of targets.
pub(super) fn reduced<const D: usize>(
    messages: ShardTensor<D>,
    dim: usize,
    held: &[usize],
    targets: &[Range<usize>],
    aggregate: Aggregate,
) -> Result<ShardTensor<D>> {
    let (local, layout, mesh) = messages.into_parts();
    let mut extents = layout.all_extents().to_vec();
    extents[dim] = held.to_vec();
    let output = layout.derive(layout.placements().to_vec(), extents);
    let all: Vec<usize> = (0..D).collect();
    let dtype = local.dtype();
    let local = widened(fill_empty(local, &layout, &all, NAME, 0.0)?);
    let y = match aggregate {
        Aggregate::Sum => sums(local, dim, targets),
        Aggregate::Mean => {
            let mut shape = [1; D];
            shape[dim] = targets.len().max(1);
            let counts = targets.iter().map(|edges| edges.len().max(1) as f32);
            let mut counts: Vec<f32> = counts.collect();
            counts.resize(shape[dim], 1.0);
            let counts = TensorData::new(counts, shape);
            let counts = Tensor::<D>::from_data(counts, (&local.device(), local.dtype()));
            sums(local, dim, targets) / counts
        }
        Aggregate::Max => extrema(local, dim, targets, ReduceOp::Max),
        Aggregate::Min => extrema(local, dim, targets, ReduceOp::Min),
    };
    let y = drop_empty(cast(y, dtype), &output, mesh.position(), NAME)?;
    Ok(ShardTensor::from_parts(y, output, mesh))
}

fn sums<const D: usize>(messages: Tensor<D>, dim: usize, targets: &[Range<usize>]) -> Tensor<D> {
    let of_edge = targets.iter().enumerate();
    let of_edge = of_edge.flat_map(|(target, edges)| std::iter::repeat_n(target, edges.len()));
    let mut of_edge: Vec<usize> = of_edge.collect();
    // Zeros that stand for no edges are added somewhere.
    of_edge.resize(messages.dims()[dim], 0);
    add(messages, dim, &Places::new(of_edge), targets.len().max(1))
}

/// Every target has as many places as the one with the most edges; those without an edge hold what no edge is beyond.
fn extrema<const D: usize>(
    messages: Tensor<D>,
    dim: usize,
    targets: &[Range<usize>],
    op: ReduceOp,
) -> Tensor<D> {
    let mut shape = messages.dims();
    let (edges, count) = (shape[dim], targets.len().max(1));
    let most = targets.iter().map(Range::len).max().unwrap_or(0).max(1);
    let place = |(target, place): (usize, usize)| match targets.get(target) {
        Some(own) if place < own.len() => own.start + place,
        _ => edges,
    };
    let places = (0..count).flat_map(|target| (0..most).map(move |place| (target, place)));
    let places: Vec<usize> = places.map(place).collect();
    let [outer, inner] =
        [&shape[..dim], &shape[dim + 1..]].map(|dims| dims.iter().product::<usize>());
    shape[dim] = 1;
    let beyond = match op {
        ReduceOp::Min => f64::INFINITY,
        _ => f64::NEG_INFINITY,
    };
    let none = Tensor::full(shape, beyond, (&messages.device(), messages.dtype()));
    let all = take(
        Tensor::cat(vec![messages, none], dim),
        dim,
        &Places::new(places),
    );
    let all = reshape::<D, 4>(all, vec![outer, count, most, inner]);
    let found = local_extremum(all, &[2], op);
    let alone = (0..count).map(|target| targets.get(target).is_none_or(Range::is_empty));
    let alone = TensorData::new(alone.collect::<Vec<bool>>(), [1, count, 1, 1]);
    let alone = Tensor::<4, Bool>::from_data(alone, &found.device());
    let found = found.mask_fill(alone.expand([outer, count, 1, inner]), 0.0);
    shape[dim] = count;
    reshape(found, shape.to_vec())
}
