//! Distribution of a replicated tensor to the shards of another tensor.

use halocline_core::{Error, Fan, Placement, Replicate, Result, Shard, ShardTensor};

use crate::operand::Operand;

/// Cuts a tensor that all ranks hold in full to the shards of `x`. Dims whose size differs from
/// that in `x` stay whole: those of one cell, and any that is whole in `x`. Nothing is sent.
///
/// # Adjoint
/// Gradients of the shards are gathered, so every rank has the full gradient.
///
/// # Errors
/// Sizes other than those of `x`, or 1, in its sharded dims; partial values of `x`.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::distribute_operand;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([2, 5, 4], &mesh, &[Shard(1)])?;
///     let position = Tensor::<3>::ones([1, 5, 4], world.device());
///     let position = distribute_operand(&x, position)?;
///     assert_eq!((position.dims(), position.placements()), ([1, 5, 4], &[Shard(1)][..]));
///     assert_eq!((x + position).dims(), [2, 5, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn distribute_operand<const D: usize>(
    x: &ShardTensor<D>,
    tensor: impl Into<Operand<D>>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "distribute_operand";
    x.require_resolved(NAME)?;
    let tensor = tensor.into();
    let (shape, dims) = (tensor.dims(), x.dims());
    let same = |dim: usize| shape[dim] == dims[dim];
    let fits = |dim: usize| same(dim) || shape[dim] == 1 || !x.layout().is_sharded(dim);
    if !(0..D).all(fits) {
        let message = format!(
            "a tensor {shape:?} beside {}; expected the same sizes, or 1, in sharded dims",
            x.layout()
        );
        return Err(Error::operator(NAME, message));
    }
    // Detached, because a loss may depend on the operand alone.
    let tensor = tensor.place_on(&x.clone().inner())?;
    let placements = placements_beside(x, &tensor, |dim| same(dim).then_some(dim));
    let extents = (0..D).map(|dim| {
        if same(dim) {
            x.layout().extents(dim).to_vec()
        } else {
            vec![shape[dim]]
        }
    });
    let layout = x.layout().derive(placements, extents.collect());
    tensor.try_redistribute(&layout)
}

/// Returns the placements of a tensor distributed like `x`; `place` maps dims of `x` to those of
/// the tensor.
pub(crate) fn placements_beside<const D: usize, const E: usize>(
    x: &ShardTensor<D>,
    tensor: &ShardTensor<E>,
    place: impl Fn(usize) -> Option<usize>,
) -> Vec<Placement> {
    let pairs = x.placements().iter().zip(tensor.placements());
    let placements = pairs.map(|(field, held)| match *field {
        Shard(dim) => match (place(dim), held) {
            (Some(dim), _) => Shard(dim),
            // An operand that already fans out over the axis keeps doing so.
            (None, Fan) => Fan,
            _ => Replicate,
        },
        other => other,
    });
    placements.collect()
}
