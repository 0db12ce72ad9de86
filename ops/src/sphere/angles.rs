//! Interpolation of angles in radians, which are the same a turn apart.

use std::f64::consts::{PI, TAU};

use halocline_core::{Result, ShardTensor};

use crate::constant;
use crate::reduce::mean_dims;

/// Angle at a share of the shorter arc from `start` to `end`, in the turn of `start`.
pub(super) fn on_arc<const D: usize>(
    start: ShardTensor<D>,
    end: ShardTensor<D>,
    share: ShardTensor<D>,
) -> ShardTensor<D> {
    let arc = end - start.clone();
    let turns = ((constant(&arc) + PI) / TAU).floor();
    start + (arc - turns * TAU) * share
}

/// Mean direction of the last two dims, which keep one cell each.
pub(super) fn mean_direction<const D: usize>(x: ShardTensor<D>) -> Result<ShardTensor<D>> {
    let dims = [D - 2, D - 1];
    let sine = mean_dims(x.clone().sin(), &dims)?.resolve();
    let cosine = mean_dims(x.cos(), &dims)?.resolve();
    Ok(sine.zip_local(cosine, |sine, cosine| sine.atan2(cosine)))
}
