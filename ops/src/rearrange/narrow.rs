//! Narrow: a contiguous range of a dim.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{self, BackwardPass, Operator, Recompute, blank, cut, of_boxes};
use halocline_core::{Error, IndexBox, Layout, Result, ShardTensor};

use crate::driver::place::part_ranges;

/// Takes `length` cells of a dim, from `start` on. In a sharded dim each rank keeps its cells of
/// the range; nothing is sent.
///
/// # Adjoint
/// The cotangent inside the range, zero elsewhere.
///
/// # Errors
/// A dim that does not exist; a range that is empty or exceeds the dim.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::narrow;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([6], &mesh, &[Shard(0)])?;
///     let y = narrow(x, 0, 1, 4)?;
///     assert_eq!((y.dims(), y.local_dims()), ([4], [2]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn narrow<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    start: usize,
    length: usize,
) -> Result<ShardTensor<D, K>> {
    const NAME: &str = "narrow";
    let range = start..start.saturating_add(length);
    if dim >= D || range.end > x.dims()[dim] || range.is_empty() {
        return Err(Error::operator(
            NAME,
            format!("{range:?} of dim {dim} of {:?}", x.dims()),
        ));
    }
    if range == (0..x.dims()[dim]) {
        return Ok(x);
    }
    let (local, layout, mesh) = x.into_parts();
    let shard = layout.local_box(mesh.position());
    let held = &shard.ranges()[dim];
    let found = common(held, &range);
    let kept = found.start - held.start..found.end - held.start;
    let cut = Cut(IndexBox::whole(&shard.shape()).with_range(dim, kept));
    let local = Tensor::from_dispatch(ops::apply(cut, [local.into_dispatch()]));
    let layout = part_layout(&layout, dim, &range);
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Box of a shard. burn's slice would drop out of the graph on a rank without cells, and writes its
/// gradient on one thread.
#[derive(Debug)]
struct Cut(IndexBox);

impl Operator for Cut {
    /// Shape of the input.
    type Saved = Shape;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        Ok((cells(&inputs[0], &self.0), inputs[0].shape()))
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let part = [(self.0.clone(), pass.cotangent)];
        let gradient = of_boxes(&part[0].1, pass.saved, Some(0.0), &part);
        Ok(vec![Some(gradient)])
    }
}

/// Returns a view of a box of a tensor; an empty box gets memory of its own, because its start may
/// lie outside the tensor's.
pub(super) fn cells(x: &DispatchTensor, place: &IndexBox) -> DispatchTensor {
    match place.volume() {
        0 => blank(x, &place.shape(), None),
        _ => cut(x, place),
    }
}

/// Layout of a range of a dim, where each rank keeps its cells.
pub(super) fn part_layout(layout: &Layout, dim: usize, range: &Range<usize>) -> Layout {
    let kept = part_ranges(layout.extents(dim)).map(|cells| common(&cells, range).len());
    layout.resized(dim, kept.collect())
}

/// Intersects two ranges; an empty intersection lies at one of the ends of `cells`.
fn common(cells: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let within = |cell: usize| cell.clamp(cells.start, cells.end);
    within(other.start)..within(other.end)
}
