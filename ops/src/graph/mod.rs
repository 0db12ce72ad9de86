//! Unstructured grids: cells by their numbers, graphs, neighbours.
//!
//! The cells of an icosahedral, a HEALPix or any other unstructured grid are one dim, in an order in which neighbours lie
//! close together. Each part of the dim is a range of numbers; [`Balance`](halocline_core::Balance) gives parts of equal work.
//!
//! - [`take_cells`]: the cells with these numbers, from any ranks: halos by lists of cells ([`CellMap`]), among them
//!   [`healpix_padding`] and [`tripolar_fold`].
//! - [`Icosphere`]: icosahedral grids, and graphs of their neighbours on all levels.
//! - [`pad_healpix`]: the halo of HEALPix faces that are a dim of their own; [`healpix_from`], [`healpix_to`] and
//!   [`healpix_centers`]: how files number their cells, by rings or nested, and where these lie.
//! - [`Graph`], [`EdgeShards`]: messages along edges, and their sums, means or extrema at the targets.
//! - [`nearest_neighbours`], [`neighbours_within`]: graphs of points that are close to each other, and [`distances`].
//!
//! # Placement
//! The dim of cells may be sharded, with any extents, and so may other dims. Edges lie with their targets.

mod cells;
mod edges;
mod extremum;
pub mod healpix;
mod icosphere;
mod maps;
pub mod neighbours;
mod numbering;
mod part;
mod plan;
mod reduce;
mod tree;

pub(crate) use cells::take_named;
pub use cells::{CellMap, take_cells};
pub use edges::{EdgeShards, Graph};
pub use healpix::pad_healpix;
pub use icosphere::Icosphere;
pub use maps::{Fold, healpix_padding, tripolar_fold};
pub use neighbours::{distances, nearest_neighbours, neighbours_within};
pub use numbering::{HealpixOrder, healpix_centers, healpix_from, healpix_to};
pub use reduce::Aggregate;

use crate::golden::{Case, Golden, Output, output};
use halocline_core::{Error, Result};

/// Message passing in the registry.
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

/// The sum, mean or extremum of the sources of each target, in the first dim, of a graph within the cells.
fn run<const D: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let x = case.input::<D>(0)?;
    let [sources, targets] = ["sources", "targets"].map(|key| case.attributes.list(key));
    let edges: Vec<[usize; 2]> = sources
        .into_iter()
        .zip(targets)
        .map(<[usize; 2]>::from)
        .collect();
    let cells = x.dims()[0];
    let edges = Graph::new(cells, cells, &edges)?.beside(&x, 0)?;
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
