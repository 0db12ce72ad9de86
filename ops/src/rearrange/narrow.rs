//! Ranges of a dim.

use std::ops::Range;

use halocline_core::{Error, IndexBox, Result, ShardTensor};

use crate::driver::empty::{drop_empty, fill_empty, keep};

/// `length` cells of a dim, from `start`. Where the dim is sharded, each rank keeps what it has of the range: nothing travels.
///
/// # Adjoint
/// The cotangent in the range, zero elsewhere.
///
/// # Errors
/// A dim that is not there, a range without cells or beyond its end.
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
    let mut extents = x.layout().all_extents().to_vec();
    let mut first = 0;
    for extent in &mut extents[dim] {
        let cells = first..first + *extent;
        first = cells.end;
        *extent = common(&cells, &range).len();
    }
    let layout = x.layout().derive(x.placements().to_vec(), extents);
    let all: Vec<usize> = (0..D).collect();
    let (local, from, mesh) = x.into_parts();
    if from.extents(dim).len() > 1 {
        let own = from.local_box(mesh.position());
        let mut kept = IndexBox::whole(&own.shape()).ranges().to_vec();
        let cells = &own.ranges()[dim];
        let found = common(cells, &range);
        kept[dim] = found.start - cells.start..found.end - cells.start;
        let local = keep(local, &IndexBox::new(kept), NAME)?;
        return Ok(ShardTensor::from_parts(local, layout, mesh));
    }
    // burn cuts a slice without cells off from the graph, on that rank alone.
    let local = fill_empty(local, &from, &all, NAME, 0.0)?.narrow(dim, start, length);
    let local = drop_empty(local, &layout, mesh.position(), NAME)?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// The cells of a range that are in another one, or nothing at one of its ends.
fn common(cells: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let within = |cell: usize| cell.clamp(cells.start, cells.end);
    within(other.start)..within(other.end)
}
