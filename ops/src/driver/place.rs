//! Moves cells to their positions in a result, dim by dim, and derives the layouts of results.

use std::hash::Hash;
use std::ops::Range;

use burn::tensor::kind::Basic;
use halocline_core::plan::{Need, Segment, Source, segments};
use halocline_core::{Boundary, Error, IndexBox, Layout, Result, Shard, ShardTensor};

use crate::reshape_any;

/// Moves cells of `x` to their positions in a result of layout `output`. For a dim and a range of
/// the result's cells in it, `runs` returns the runs of cells of `x`. Cells of the result that no
/// run covers are `fill`.
///
/// `runs` must be the same function on all ranks. `key` holds everything that it depends on apart
/// from the two layouts, and must be equal on all ranks.
///
/// # Errors
/// Partial values; a failure of communication.
pub(crate) fn placed<const D: usize, K: Basic, Key>(
    x: ShardTensor<D, K>,
    operator: &'static str,
    key: Key,
    output: Layout,
    fill: f64,
    runs: impl Fn(usize, &Range<usize>) -> Vec<Segment>,
) -> Result<ShardTensor<D, K>>
where
    Key: Hash + Eq + Send + 'static,
{
    let need_of = |cells: &IndexBox| {
        let dims = cells.ranges().iter().enumerate();
        let dims: Vec<_> = dims.map(|(dim, cells)| runs(dim, cells)).collect();
        Need::product(cells.shape(), &dims)
    };
    assembled(x, operator, key, output, fill, need_of)
}

/// [`placed`] with the need of a box of the result instead of runs per dim.
///
/// # Errors
/// The errors of [`placed`].
pub(crate) fn assembled<const D: usize, K: Basic, Key>(
    x: ShardTensor<D, K>,
    operator: &'static str,
    key: Key,
    output: Layout,
    fill: f64,
    need_of: impl Fn(&IndexBox) -> Need,
) -> Result<ShardTensor<D, K>>
where
    Key: Hash + Eq + Send + 'static,
{
    x.require_resolved(operator)?;
    let mesh = x.mesh();
    let key = (
        operator,
        x.layout().clone(),
        output.clone(),
        key,
        fill.to_bits(),
    );
    let plan = mesh.cache().get_or_make(key, |key| {
        let (_, layout, output, ..) = key;
        let need_of = |position| need_of(&output.local_box(position));
        let plan = mesh.exchange_plan(Source::Layout(layout), need_of);
        Ok(plan.with_fill(fill).with_arguments(key))
    })?;
    let local = x.run_plan(operator, &plan)?;
    let (_, _, mesh) = x.into_parts();
    Ok(ShardTensor::from_parts(local, output, mesh))
}

/// Segments of a range whose cells keep their positions.
pub(crate) fn in_place(cells: &Range<usize>, size: usize) -> Vec<Segment> {
    let range = cells.start as isize..cells.end as isize;
    segments(range, size, Boundary::Zeros, Boundary::Zeros)
}

/// Groups a list of cells into runs of consecutive cells.
pub(crate) fn runs(indices: &[usize]) -> Vec<Segment> {
    let mut runs: Vec<Segment> = Vec::new();
    for (dst, &cell) in indices.iter().enumerate() {
        match runs.last_mut().filter(|run| run.src.end == cell) {
            Some(run) => run.src.end += 1,
            None => runs.push(Segment {
                dst,
                src: cell..cell + 1,
                flip: false,
            }),
        }
    }
    runs
}

/// Requires that a dim exists.
pub(crate) fn require_dim<const D: usize, K: Basic>(
    operator: &str,
    x: &ShardTensor<D, K>,
    dim: usize,
) -> Result<()> {
    if dim < D {
        return Ok(());
    }
    let message = format!("dim {dim} of {:?}", x.dims());
    Err(Error::operator(operator, message))
}

/// Requires that dims exist and are not repeated.
pub(crate) fn require_dims<const D: usize>(operator: &str, dims: &[usize]) -> Result<()> {
    let is_wrong = |(i, dim): (usize, &usize)| *dim >= D || dims[..i].contains(dim);
    if !dims.iter().enumerate().any(is_wrong) {
        return Ok(());
    }
    let message = format!("dims {dims:?} of a tensor of {D} dims; each at most once");
    Err(Error::operator(operator, message))
}

/// Ranges of parts with these extents, one after the other.
pub(crate) fn part_ranges(extents: &[usize]) -> impl Iterator<Item = Range<usize>> {
    extents.iter().scan(0_usize, |end, extent| {
        *end += extent;
        Some(*end - extent..*end)
    })
}

/// Extents of a result that follows the parts of a dim; `before` returns the number of cells of the
/// result before a cell of the dim.
pub(crate) fn extents_by(extents: &[usize], before: impl Fn(usize) -> usize) -> Vec<usize> {
    part_ranges(extents)
        .map(|cells| before(cells.end) - before(cells.start))
        .collect()
}

/// Reshapes a tensor to dims of these extents, with the same cells on every rank; `moved` maps a
/// sharded dim to its number in the result.
pub(crate) fn renumbered<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    extents: Vec<Vec<usize>>,
    moved: impl Fn(usize) -> usize,
) -> ShardTensor<E, K> {
    let (local, layout, mesh) = x.into_parts();
    let placements = layout.map_placements(|placement| match placement {
        Shard(dim) => Shard(moved(dim)),
        other => other,
    });
    let layout = layout.derive(placements, extents);
    let local = reshape_any(local, layout.local_shape(mesh.position()));
    ShardTensor::from_parts(local, layout, mesh)
}
