//! Graphs of nearby points.
//!
//! Points and queries are `[cells, coordinates]`, with any number of coordinates and Euclidean
//! distances. For points on a sphere pass Cartesian coordinates: the nearest by chord are the
//! nearest by angle.
//!
//! # Placement
//! Cells may be sharded, coordinates must not be.
//!
//! # Communication
//! The ranks receive one another's points one shard at a time, then gather the pairs found: every
//! rank holds the whole graph. [`distances`] communicates as [`take_cells`](super::take_cells)
//! does.
//!
//! # Determinism
//! Distances are compared in f64, ties by the number of the point: any sharding finds the same
//! pairs in the same order.

use halocline_core::comm::Operation;
use halocline_core::plan::Need;
use halocline_core::{Error, IndexBox, Result, ShardTensor, Traffic, ops, tasks};

use super::edges::{EdgeShards, Graph};
use super::tree::{Limit, Tree};
use crate::precision::in_f32;
use crate::reduce::{root, sum_dims};

/// Number of queries that is worth a thread.
const QUERIES: usize = 256;

/// Finds the `count` points nearest to each query, as edges from the points to the query, nearest
/// first.
///
/// # Errors
/// Fails for fewer points than `count`, for numbers of coordinates that differ, for sharded
/// coordinates, for coordinates that are not finite, for partial values, and if communication
/// fails.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::graph::{distances, nearest_neighbours};
///
/// let points = ShardTensor::solo(Tensor::<2>::from([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]));
/// let query = ShardTensor::solo(Tensor::<2>::from([[0.0, 0.0]]));
/// let graph = nearest_neighbours(&points, &query, 2)?;
/// assert_eq!(graph.edges(), [[0, 0], [1, 0]]);
/// let lengths = distances(&points, &query, &graph.distribute(&query, 0)?)?;
/// lengths.local().to_data().assert_eq(&[[0.0_f32], [5.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn nearest_neighbours(
    points: &ShardTensor<2>,
    queries: &ShardTensor<2>,
    count: usize,
) -> Result<Graph> {
    const NAME: &str = "nearest_neighbours";
    if count > points.dims()[0] {
        let message = format!("{count} neighbours among {} points", points.dims()[0]);
        return Err(Error::operator(NAME, message));
    }
    let limit = Limit {
        count,
        square: f64::INFINITY,
    };
    search(NAME, points, queries, limit)
}

/// Finds the points within a radius of each query, bound included, as edges from the points to the
/// query, nearest first. With `max_points`, at most so many are kept for each query: the nearest,
/// of equal distances those with the lowest numbers.
///
/// # Errors
/// Fails for a radius that is not a positive number and for `max_points` of zero; otherwise errors
/// of [`nearest_neighbours`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::graph::neighbours_within;
///
/// let points = ShardTensor::solo(Tensor::<2>::from([[0.0], [1.0], [3.0]]));
/// let graph = neighbours_within(&points, &points, 1.0, None)?;
/// assert_eq!(graph.edges(), [[0, 0], [1, 0], [1, 1], [0, 1], [2, 2]]);
/// let nearest = neighbours_within(&points, &points, 1.0, Some(1))?;
/// assert_eq!(nearest.edges(), [[0, 0], [1, 1], [2, 2]]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn neighbours_within(
    points: &ShardTensor<2>,
    queries: &ShardTensor<2>,
    radius: f64,
    max_points: Option<usize>,
) -> Result<Graph> {
    const NAME: &str = "neighbours_within";
    if !(radius.is_finite() && radius > 0.0) {
        let message = format!("a radius of {radius}; expected a positive number");
        return Err(Error::operator(NAME, message));
    }
    if max_points == Some(0) {
        let message = "max_points of 0; expected one or more";
        return Err(Error::operator(NAME, message));
    }
    let limit = Limit {
        count: max_points.unwrap_or(usize::MAX),
        square: radius * radius,
    };
    search(NAME, points, queries, limit)
}

/// Computes the length of each edge of a graph of points, `[edges, 1]`, with gradients to both
/// ends. Between equal points it is zero.
///
/// # Errors
/// Errors of [`EdgeShards::try_sources`].
pub fn distances(
    points: &ShardTensor<2>,
    queries: &ShardTensor<2>,
    edges: &EdgeShards,
) -> Result<ShardTensor<2>> {
    let (from, to) = (
        edges.try_sources(points.clone())?,
        edges.try_targets(queries.clone())?,
    );
    let offsets = Error::catch(|| from - to)?;
    in_f32(offsets, |offsets| {
        Ok(root(sum_dims(offsets.square(), &[1])?.resolve(), 2.0))
    })
}

fn search(
    operator: &'static str,
    points: &ShardTensor<2>,
    queries: &ShardTensor<2>,
    limit: Limit,
) -> Result<Graph> {
    let ([sources, width], [targets, coordinates]) = (points.dims(), queries.dims());
    if width != coordinates || width == 0 {
        let message = format!(
            "points {:?} and queries {:?}; expected the same coordinates",
            points.dims(),
            queries.dims()
        );
        return Err(Error::operator(operator, message));
    }
    for tensor in [points, queries] {
        tensor.require_resolved(operator)?;
        tensor.require_whole(operator, 1)?;
    }
    if points.layout().mesh() != queries.layout().mesh() {
        return Err(Error::operator(
            operator,
            "points and queries lie on two meshes",
        ));
    }
    let mesh = queries.mesh();
    let own = queries.layout().local_box(mesh.position()).ranges()[0].clone();
    let numbers = |data: burn::tensor::TensorData| data.iter::<f64>().collect::<Vec<f64>>();
    let asked = numbers(queries.local().clone().inner().into_data());
    let mut found = vec![Vec::new(); own.len()];
    let layout = points.layout().clone();
    let plain = points.clone().inner();
    let parts = layout.extents(0).len();
    let mut finite = asked.iter().all(|number| number.is_finite());
    for step in 0..parts {
        let turn = |position: usize| (layout.part(0, position) + step) % parts;
        let cells = |position: usize| {
            let rows = layout.part_range(0, turn(position));
            IndexBox::new(vec![rows, 0..width])
        };
        let block = plain.assemble(operator, step, |position| Need::of(cells(position)))?;
        let block = numbers(block.into_data());
        finite &= block.iter().all(|number| number.is_finite());
        let first = cells(mesh.position()).ranges()[0].start;
        let tree = Tree::new(&block, width, first);
        found = tasks::map(found.len(), QUERIES, |query| {
            let mut near = found[query].clone();
            tree.add_to(&mut near, &asked[query * width..][..width], limit);
            near
        });
    }
    // Pairs, preceded by a flag: whether this rank's coordinates are finite.
    let mut told = vec![f64::from(finite)];
    for (row, found) in found.iter().enumerate() {
        let query = (own.start + row) as f64;
        told.extend(found.iter().flat_map(|(_, point)| [*point as f64, query]));
    }
    let group = mesh.ranks_along(&queries.layout().axes_of(0));
    let operation = Operation::new(operator, Traffic::Control, Some(queries.layout()));
    let all = ops::all_gather_numbers(mesh.comm(), &group, &operation, &told)?;
    if all.iter().any(|told| told[0] == 0.0) {
        return Err(Error::operator(operator, "coordinates that are not finite"));
    }
    let pairs = all.iter().flat_map(|told| told[1..].chunks(2));
    let edges: Vec<[usize; 2]> = pairs
        .map(|pair| [pair[0] as usize, pair[1] as usize])
        .collect();
    Graph::new(sources, targets, &edges)
}
