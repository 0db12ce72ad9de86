//! Pure plans for gathering cells by number: the cells that each rank packs, sends and unpacks.

use std::sync::Arc;

use halocline_core::plan::{ExchangePlan, Transfer};
use halocline_core::{DeviceMesh, IndexBox, Layout};

use crate::driver::place::part_ranges;
use crate::kernel::taken::Places;

/// Route of cells to the ranks that take them: picked from a shard, exchanged as boxes, picked from
/// the received cells.
#[derive(Debug)]
pub(super) struct TakePlan {
    /// Cells of the shard to exchange, for each part in turn; one cell if there are none.
    pub(super) packed: Arc<Places>,
    pub(super) exchange: Arc<ExchangePlan>,
    /// Cells to take from those received; one cell if there are none.
    pub(super) taken: Arc<Places>,
}

impl TakePlan {
    /// Plans for one position of a mesh. Part `p` of the dim takes the next `extents[p]` of the
    /// cells.
    pub(super) fn new(
        layout: &Layout,
        mesh: &DeviceMesh,
        dim: usize,
        cells: &[usize],
        extents: &[usize],
    ) -> Self {
        let own = layout.part(dim, mesh.position());
        let owned = |part: usize| layout.part_range(dim, part);
        let lists = part_ranges(extents).map(|range| &cells[range]);
        let lists: Vec<&[usize]> = lists.collect();
        // Each cell travels once, in order of number and hence of owner.
        let wanted: Vec<Vec<usize>> = lists
            .iter()
            .map(|list| {
                let mut wanted = list.to_vec();
                wanted.sort_unstable();
                wanted.dedup();
                wanted
            })
            .collect();
        // Range of an owner's cells among those that a part wants.
        let share = |part: usize, owner: usize| {
            let (cells, wanted) = (owned(owner), &wanted[part]);
            let place = |bound: usize| wanted.partition_point(|cell| *cell < bound);
            place(cells.start)..place(cells.end)
        };
        // Range of a part's cells among those that an owner packs.
        let pack = |part: usize, owner: usize| {
            let before: usize = (0..part).map(|part| share(part, owner).len()).sum();
            before..before + share(part, owner).len()
        };
        let parts = extents.len();
        let position = |part: usize| at_part(layout, mesh, dim, part);
        let shape = |cells: usize| {
            let mut shape = layout.local_shape(mesh.position());
            shape.iter_mut().for_each(|size| *size = (*size).max(1));
            shape[dim] = cells.max(1);
            shape
        };
        let transfer = |part: usize, owner: usize| {
            let cut = |range: std::ops::Range<usize>| {
                let mut ranges = IndexBox::whole(&shape(0)).ranges().to_vec();
                ranges[dim] = range;
                IndexBox::new(ranges)
            };
            Transfer {
                src: cut(pack(part, owner)),
                dst: cut(share(part, owner)),
                flip: vec![false; layout.shape().len()],
            }
        };
        let others = || (0..parts).filter(|part| *part != own);
        let mut sends: Vec<_> = others()
            .filter(|part| !share(*part, own).is_empty())
            .map(|part| (position(part), vec![transfer(part, own)]))
            .collect();
        let mut receives: Vec<_> = others()
            .filter(|owner| !share(own, *owner).is_empty())
            .map(|owner| (position(owner), vec![transfer(own, owner)]))
            .collect();
        sends.sort_by_key(|(peer, _)| *peer);
        receives.sort_by_key(|(peer, _)| *peer);
        let first = owned(own).start;
        let packed: Vec<usize> = (0..parts)
            .flat_map(|part| {
                wanted[part][share(part, own)]
                    .iter()
                    .map(move |cell| cell - first)
            })
            .collect();
        let place = |cell: &usize| wanted[own].partition_point(|held| held < cell);
        let taken: Vec<usize> = lists[own].iter().map(place).collect();
        let exchange = ExchangePlan {
            source_shape: shape(packed.len()),
            output_shape: shape(wanted[own].len()),
            fill: 0.0,
            arguments: 0,
            copies: (!share(own, own).is_empty())
                .then(|| transfer(own, own))
                .into_iter()
                .collect(),
            sends,
            receives,
        };
        let or_first = |list: Vec<usize>| Places::new(if list.is_empty() { vec![0] } else { list });
        Self {
            packed: or_first(packed),
            exchange: exchange.with_arguments(&(dim, cells, extents)).into(),
            taken: or_first(taken),
        }
    }
}

/// Position that holds a part of a dim and, in all other dims, the same cells as this position.
fn at_part(layout: &Layout, mesh: &DeviceMesh, dim: usize, mut part: usize) -> usize {
    let mut coords = mesh.coords();
    // Parts are numbered with the leftmost axis outermost.
    for axis in layout.axes_of(dim).into_iter().rev() {
        let size = mesh.shape().sizes()[axis];
        coords[axis] = part % size;
        part /= size;
    }
    mesh.shape().position(&coords)
}
