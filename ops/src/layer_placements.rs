//! Placements that a plan sets for a layer's input and result, kept with the layer's first
//! parameter.

use burn::module::Param;
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use halocline_core::{
    LayerPlacements, Layout, ParamShard, PlanPlacement, Result, Shard, ShardTensor,
};

use crate::field::{Field, run};
use crate::operand::Operand;
use crate::rearrange::distribute_operand;
use crate::reshape;

/// Redistributes the input of a layer as its plan says. `first` is the layer's first parameter.
pub(crate) fn enter<const D: usize, const E: usize, K: Basic>(
    first: &Param<Tensor<E>>,
    x: ShardTensor<D, K>,
) -> Result<ShardTensor<D, K>> {
    cross(first, x, |placements| &placements.input)
}

/// Redistributes the input of a layer whose weight is sharded along a summed dim to the extents of
/// the weight, which may be uneven.
pub(crate) fn with_extents_of<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    weight: &Layout,
    summed: usize,
) -> Result<ShardTensor<D>> {
    let (held, expected) = (x.layout(), weight.extents(summed));
    let alike = held.axes_of(dim) == weight.axes_of(summed);
    if alike && held.extents(dim) != expected && held.shape()[dim] == weight.shape()[summed] {
        let layout = held.with_extents(dim, expected)?;
        x.try_redistribute(&layout)
    } else {
        Ok(x)
    }
}

/// Redistributes the result of a layer as its plan says.
pub(crate) fn leave<const D: usize, const E: usize>(
    first: &Param<Tensor<E>>,
    y: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    cross(first, y, |placements| &placements.output)
}

/// Redistributes and resolves the result of a layer that sums over sharded inputs, then adds a bias
/// along `dim`, so that the bias is added once.
pub(crate) fn leave_with_bias<const D: usize, const E: usize>(
    first: &Param<Tensor<E>>,
    y: ShardTensor<D>,
    bias: Option<Operand<1>>,
    dim: usize,
) -> Result<ShardTensor<D>> {
    let y = leave(first, y)?.resolve();
    match bias {
        Some(bias) => with_bias(y, bias, dim),
        None => Ok(y),
    }
}

/// Adds a bias along `dim` to a resolved result.
pub(crate) fn with_bias<const D: usize>(
    y: ShardTensor<D>,
    bias: Operand<1>,
    dim: usize,
) -> Result<ShardTensor<D>> {
    // The parameter itself fans out, not its reshaped copy, so that its gradient joins a bucket.
    let varies = |axis: usize| y.placements()[axis].varies();
    let (local, layout, mesh) = bias.place_on(&y)?.try_fan_out(varies)?.into_parts();
    let placements = layout.map_placements(|placement| match placement {
        Shard(0) => Shard(dim),
        other => other,
    });
    let mut extents = vec![vec![1]; D];
    extents[dim] = layout.extents(0).to_vec();
    let layout = layout.derive(placements, extents);
    let local = reshape(local, layout.local_shape(mesh.position()));
    let bias = ShardTensor::<D>::from_parts(local, layout, mesh);
    let bias = distribute_operand(&y, bias)?;
    Ok(y + bias)
}

fn cross<const D: usize, const E: usize, K: Basic>(
    first: &Param<Tensor<E>>,
    x: ShardTensor<D, K>,
    side: impl Fn(&LayerPlacements) -> &Vec<(usize, PlanPlacement)>,
) -> Result<ShardTensor<D, K>> {
    match ParamShard::of(first).and_then(ParamShard::layer_placements) {
        Some(placements) => x.redistribute_axes(side(placements)),
        None => Ok(x),
    }
}

/// Runs a layer that follows a plan: redistributes the input and the result as the plan of the
/// layer says. `first` is the layer's first parameter. burn's layers do this by themselves. A layer
/// of your own calls this function, and a plan names its type with `Plan::with_kind` or places its
/// parameters.
///
/// # Panics
/// Panics if a placement cannot be reached; [raises](halocline_core::Error::raise) a failure of
/// communication.
///
/// # Example
/// ```
/// use burn::module::{Module, Param};
/// use burn::tensor::Tensor;
/// use halocline_ops::prelude::*;
/// use halocline_ops::{with_layer_placements, matmul::linear};
///
/// /// A linear layer without a bias.
/// #[derive(Module, Debug)]
/// struct Mix {
///     weight: Param<Tensor<2>>, // [in, out]
/// }
///
/// impl<X: Field<3>> Layer<X> for Mix {
///     type Output = X;
///
///     fn forward(&self, x: X) -> X {
///         with_layer_placements(&self.weight, x, |x| {
///             x.try_op(|x| linear(x, &self.weight, None))
///                 .unwrap_or_else(|error| error.raise())
///         })
///     }
/// }
/// ```
#[track_caller]
pub fn with_layer_placements<const D: usize, const E: usize, X: Field<D>>(
    first: &Param<Tensor<E>>,
    x: X,
    layer: impl FnOnce(X) -> X,
) -> X {
    let placements = ParamShard::of(first).and_then(ParamShard::layer_placements);
    if placements.is_none() {
        return layer(x);
    }
    let y = layer(run(x, |x| enter(first, x)));
    run(y, |y| leave(first, y))
}
