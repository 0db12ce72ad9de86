//! Pencils: layouts in which a dim is whole, so that its lines can be transformed locally.

use halocline_core::{
    IntoLayout, Layout, Partial, Placement, ReduceOp, Result, Shard, ShardTensor,
};

/// Returns placements in which `dim` is whole. Each axis that sharded it moves to another dim:
/// preferably one that still has a cell for every rank and is not in `pending` (dims that must be
/// whole next), and among those the dim with the most cells per rank. Returns `None` if all other
/// dims are `fixed`.
pub(crate) fn pencil(
    layout: &Layout,
    dim: usize,
    fixed: &[usize],
    pending: &[usize],
) -> Option<Vec<Placement>> {
    let (shape, sizes) = (layout.shape(), layout.mesh().sizes());
    let mut placements = layout.placements().to_vec();
    for axis in layout.axes_of(dim) {
        let others = (0..shape.len()).filter(|other| *other != dim && !fixed.contains(other));
        let best = others.rev().max_by_key(|other| {
            let held = placements.iter().zip(sizes);
            let held = held.filter(|(placement, _)| **placement == Shard(*other));
            let parts = held.map(|(_, size)| size).product::<usize>() * sizes[axis];
            let fills = shape[*other] >= parts && !pending.contains(other);
            (fills, shape[*other] / parts)
        })?;
        placements[axis] = Shard(best);
    }
    Some(placements)
}

/// Returns the layout to which [`whole`] redistributes.
pub(crate) fn whole_layout(
    layout: &Layout,
    dim: usize,
    fixed: &[usize],
    pending: &[usize],
    operator: &str,
) -> Result<Layout> {
    if !layout.is_sharded(dim) {
        return Ok(layout.clone());
    }
    match pencil(layout, dim, fixed, pending) {
        Some(placements) => (&placements).layout_like(layout),
        None => layout.require_whole(operator, dim).map(|()| layout.clone()),
    }
}

/// Makes a dim whole by an exchange to the placements of [`pencil`]. `Partial(Sum)` is accepted,
/// because the operators are linear.
pub(crate) fn whole<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    fixed: &[usize],
    pending: &[usize],
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let is_linear = |placement: &Placement| match placement {
        Partial(op) => *op == ReduceOp::Sum,
        _ => true,
    };
    if !x.placements().iter().all(is_linear) {
        x.require_resolved(operator)?;
    }
    if !x.layout().is_sharded(dim) {
        return Ok(x);
    }
    let layout = whole_layout(x.layout(), dim, fixed, pending, operator)?;
    x.try_redistribute(&layout)
}

/// Redistributes the result of a convolution to the placements of its input, `before`, and those
/// that the `product` of modes has given to channels, the second dim.
pub(crate) fn return_to<const D: usize>(
    before: &Layout,
    product: &Layout,
    y: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    let pairs = before.placements().iter().zip(product.placements());
    let placements = pairs.map(|(before, found)| match (before, found) {
        (_, Partial(_) | Shard(1)) => *found,
        _ => *before,
    });
    let placements = placements.collect();
    let mut extents = before.all_extents().to_vec();
    extents[1] = product.extents(1).to_vec();
    y.try_redistribute(&before.derive(placements, extents))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use halocline_core::{MeshShape, Replicate};

    fn placements(
        shape: &[usize],
        held: &[Placement],
        dim: usize,
        pending: &[usize],
    ) -> Option<Vec<Placement>> {
        let axes = &[("a", 2), ("b", 2), ("c", 2)][..held.len()];
        let mesh = Arc::new(MeshShape::new(axes, (0..1 << held.len()).collect()).unwrap());
        let layout = Layout::new(&mesh, shape, held).unwrap();
        pencil(&layout, dim, &[shape.len() - 1], pending)
    }

    #[test]
    fn an_axis_takes_the_dim_with_most_cells() {
        let field = [1, 3, 8, 9, 2];
        let found = placements(&field, &[Shard(2)], 2, &[]).unwrap();
        assert_eq!(found, [Shard(3)]);
        let both = placements(&field, &[Shard(2), Shard(2)], 2, &[]).unwrap();
        assert_eq!(both, [Shard(3), Shard(3)]);
        let beside = placements(&field, &[Shard(2), Replicate], 2, &[]).unwrap();
        assert_eq!(beside, [Shard(3), Replicate]);
    }

    #[test]
    fn dims_that_are_next_come_last() {
        let held = [Shard(2), Shard(3)];
        // Channels, although latitude has more cells: latitude is pending.
        let found = placements(&[1, 3, 8, 9, 2], &held, 3, &[2]).unwrap();
        assert_eq!(found, [Shard(2), Shard(1)]);
        // Only latitude has a cell for every rank.
        let found = placements(&[1, 1, 8, 9, 2], &held, 3, &[2]).unwrap();
        assert_eq!(found, [Shard(2), Shard(2)]);
    }

    #[test]
    fn a_dim_without_others_has_no_pencil() {
        assert_eq!(placements(&[9, 2], &[Shard(0)], 0, &[]), None);
    }
}
