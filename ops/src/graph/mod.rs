//! Unstructured grids: numbered cells, graphs and neighbours.
//!
//! The cells of an icosahedral, HEALPix or other unstructured grid form one dim, in an order that
//! keeps neighbours close together. Each part of the dim is a range of cell numbers;
//! [`Balance`](halocline_core::Balance) computes parts of equal work.
//!
//! - [`take_cells`]: gathers cells by number from any ranks. Such lists of cells ([`CellMap`]) also
//!   describe halos, among them [`healpix_padding`] and [`tripolar_fold`].
//! - [`flatten_cells`], [`unflatten_cells`]: cells of rows and columns as one dim, and back;
//!   [`cell_numbers`] and [`flat_layout`] are their order and layout.
//! - [`Icosphere`]: icosahedral grids, and their neighbour graphs on all levels.
//! - [`pad_healpix`]: halo of HEALPix faces that form their own dim; [`healpix_from_file`],
//!   [`healpix_to_file`] and [`healpix_centers`]: ring and nested numbering of files, and the positions
//!   of cells.
//! - [`Graph`], [`EdgeShards`]: messages along edges, and their sums, means or extrema at the
//!   targets.
//! - [`nearest_neighbours`], [`neighbours_within`]: graphs of nearby points; [`distances`]: lengths
//!   of their edges.
//!
//! # Placement
//! The dim of cells may be sharded, with any extents, and so may other dims. Each edge lies on the
//! rank of its target.

mod cells;
mod edges;
mod extremum;
mod flatten;
pub mod healpix;
mod icosphere;
mod maps;
pub mod neighbours;
mod numbering;
mod part;
mod peaks;
mod plan;
mod reduce;
mod softmax;
mod tree;

pub(crate) use cells::take_named;
pub use cells::{CellMap, take_cells};
pub use edges::{EdgeShards, Graph};
pub(crate) use flatten::merged;
pub use flatten::{cell_numbers, flat_layout, flatten_cells, unflatten_cells};
pub use halocline_core::sphere::{HealpixOrder, healpix_centers};
pub use healpix::pad_healpix;
pub use icosphere::Icosphere;
pub use maps::{Fold, healpix_padding, tripolar_fold};
pub use neighbours::{distances, nearest_neighbours, neighbours_within};
pub use numbering::{healpix_from_file, healpix_to_file};
pub use reduce::Aggregate;

use crate::golden::{Case, Golden, Output, output};
use halocline_core::{Error, Result};

/// Registry entry of message passing.
pub(crate) const OPERATORS: &[Golden] =
    &[Golden::new("message_passing", |case| match case.dims() {
        2 => run::<2>(case),
        3 => run::<3>(case),
        dims => Err(Error::other(format!("cells in {dims} dims"))),
    })
    .with_method("EdgeShards::reduce")
    .with_pytorch("index_select, scatter_reduce")
    .with_travels([
        "sources of edges that lie on other ranks, once each",
        "their gradients",
    ])];

/// Reduces the sources of each target to a sum, mean or extremum, for a graph on the cells of the
/// first dim.
fn run<const D: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let x = case.input::<D>(0)?;
    let [sources, targets] = ["sources", "targets"].map(|key| case.attributes.list(key));
    let edges: Vec<[usize; 2]> = sources
        .into_iter()
        .zip(targets)
        .map(<[usize; 2]>::from)
        .collect();
    let cells = x.dims()[0];
    let edges = Graph::new(cells, cells, &edges)?.distribute(&x, 0)?;
    let aggregates = [
        ("sum", Aggregate::Sum),
        ("mean", Aggregate::Mean),
        ("amax", Aggregate::Max),
        ("amin", Aggregate::Min),
    ];
    let aggregate = case.attributes.choice("reduce", &aggregates);
    output(edges.try_reduce(edges.try_sources(x)?, aggregate))
}

#[cfg(test)]
mod tests;
