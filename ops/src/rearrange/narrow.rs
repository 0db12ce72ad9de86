//! Narrow: a contiguous range of a dim.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{self, BackwardPass, Operator, Recompute, blank, cut, of_boxes};
use halocline_core::{Error, IndexBox, Layout, Result, ShardTensor};

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
pub fn narrow<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    start: usize,
    length: usize,
) -> Result<ShardTensor<D>> {
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
    let (layout, kept) = part(x.layout(), dim, &range, x.mesh().position());
    let (local, _, mesh) = x.into_parts();
    let local = Tensor::from_dispatch(ops::apply(Cut(kept), [local.into_dispatch()]));
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

/// Returns the layout of a range of a dim, where each rank keeps its cells, and the box of kept
/// cells in the shard at a mesh position.
pub(super) fn part(
    layout: &Layout,
    dim: usize,
    range: &Range<usize>,
    position: usize,
) -> (Layout, IndexBox) {
    let mut extents = layout.all_extents().to_vec();
    let mut first = 0;
    for extent in &mut extents[dim] {
        let cells = first..first + *extent;
        first = cells.end;
        *extent = common(&cells, range).len();
    }
    let shard = layout.local_box(position);
    let mut kept = IndexBox::whole(&shard.shape()).ranges().to_vec();
    let cells = &shard.ranges()[dim];
    let found = common(cells, range);
    kept[dim] = found.start - cells.start..found.end - cells.start;
    let layout = layout.derive(layout.placements().to_vec(), extents);
    (layout, IndexBox::new(kept))
}

/// Intersects two ranges; an empty intersection lies at one of the ends of `cells`.
fn common(cells: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let within = |cell: usize| cell.clamp(cells.start, cells.end);
    within(other.start)..within(other.end)
}
