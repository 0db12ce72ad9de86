//! Sums, means and extrema over the edges of each target.

use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use halocline_core::{ReduceOp, Result, ShardTensor};

use super::extremum::extrema;
use super::part::Part;
use crate::driver::empty::{fill_all, without_fill};
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
    let output = layout.resized(dim, held.to_vec());
    let dtype = local.dtype();
    let local = widened(fill_all(local, &layout, NAME, 0.0)?);
    let y = match aggregate {
        Aggregate::Sum => sums(local, dim, part),
        Aggregate::Mean => {
            let mut shape = [1; D];
            shape[dim] = part.len();
            let counts = part.counts(&local.device()).reshape::<D, _>(shape);
            let counts = counts.cast(FloatDType::from(local.dtype())).clamp_min(1.0);
            sums(local, dim, part) / counts
        }
        Aggregate::Max => extrema(local, dim, part, ReduceOp::Max),
        Aggregate::Min => extrema(local, dim, part, ReduceOp::Min),
    };
    without_fill(cast(y, dtype), output, mesh, NAME)
}

fn sums<const D: usize>(messages: Tensor<D>, dim: usize, part: &Part) -> Tensor<D> {
    add(messages, dim, part.of_edge(), part.len())
}
