//! Sums, means and extrema over the edges of each target.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use halocline_core::{ReduceOp, Result, ShardTensor};

use super::extremum::extrema;
use super::part::Part;
use crate::driver::empty::{drop_empty, fill_empty};
use crate::kernel::taken::add;
use crate::precision::{cast, widened};

const NAME: &str = "aggregate";

/// Reduction over the edges of a target; zero for a target without edges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Aggregate {
    /// Sum.
    #[default]
    Sum,
    /// Mean.
    Mean,
    /// Maximum; its gradient is divided evenly among the edges that attain it.
    Max,
    /// Minimum, with its gradient divided as for the maximum.
    Min,
}

/// Reduces the edges of each target on this rank. `held` lists the extents of the targets.
pub(super) fn reduced<const D: usize>(
    messages: ShardTensor<D>,
    dim: usize,
    held: &[usize],
    part: &Arc<Part>,
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
        Aggregate::Sum => sums(local, dim, part),
        Aggregate::Mean => {
            let mut shape = [1; D];
            shape[dim] = part.len();
            let counts = part.counts().map(|count| count.max(1) as f32);
            let counts = TensorData::new(counts.collect::<Vec<f32>>(), shape);
            let counts = Tensor::<D>::from_data(counts, (&local.device(), local.dtype()));
            sums(local, dim, part) / counts
        }
        Aggregate::Max => extrema(local, dim, part, ReduceOp::Max),
        Aggregate::Min => extrema(local, dim, part, ReduceOp::Min),
    };
    let y = drop_empty(cast(y, dtype), &output, mesh.position(), NAME)?;
    Ok(ShardTensor::from_parts(y, output, mesh))
}

fn sums<const D: usize>(messages: Tensor<D>, dim: usize, part: &Part) -> Tensor<D> {
    add(messages, dim, part.of_edge(), part.len())
}
