//! Icosahedral mesh of a grid, and the edges of both.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, Tensor, TensorData};
use halocline_core::plan::PlanCache;
use halocline_core::sphere::sphere_point;
use halocline_core::{Error, Fan, Layout, Result, Shard, ShardTensor};
use halocline_ops::graph::{
    EdgeShards, Graph, Icosphere, cell_numbers, flat_layout, nearest_neighbours, neighbours_within,
};

/// Distance within which grid cells are near a mesh cell, as a fraction of the longest side of a
/// level of the mesh: every grid cell lies that close to a corner of its triangle.
const REACH: f64 = 0.6;
/// Number of mesh cells that are sources of a grid cell.
const NEAREST: usize = 3;
/// Sources and targets of the edges of encoder, processor and decoder: 0 for the grid, 1 for the
/// mesh.
const ENDS: [[usize; 2]; 3] = [[0, 1], [1, 1], [1, 0]];

/// Position on the unit sphere, as x, y and z.
type Point = [f64; 3];

/// Icosahedral mesh on which a [`GraphCastNet`](super::GraphCastNet) computes, and its edges to and
/// from the cells of a grid, as in GraphCast (R. Lam et al. 2023).
///
/// The grid is any list of cells with positions: global or of a region, structured or not. Each
/// mesh cell receives messages from the grid cells within 0.6 times the longest side of the finest
/// level of the mesh, and from its neighbours on all levels; each grid cell from the three nearest
/// mesh cells.
///
/// Mesh cells far from the grid are left out: those without an edge to a grid cell that have none
/// within 0.6 times the longest side of the coarsest level that they belong to. Cells of coarse
/// levels connect the others where the mesh is finer than the grid. Every rank holds all positions
/// and edges.
///
/// # Example
/// ```
/// use halocline_models::GridMesh;
///
/// // A region from the equator to 50° N and from 0 to 45° E.
/// let region: Vec<[f64; 2]> = (0..60)
///     .map(|cell| [10.0 * (cell / 10) as f64, 5.0 * (cell % 10) as f64])
///     .collect();
/// let mesh = GridMesh::new(&region, 2)?;
/// assert!((10..40).contains(&mesh.size())); // of 162 cells on the whole sphere
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct GridMesh(Arc<Inner>);

struct Inner {
    /// Positions of the cells of grid and mesh.
    positions: [Vec<Point>; 2],
    /// Grid cell nearest to each mesh cell.
    anchors: Vec<usize>,
    /// Source and target of the edges of encoder, processor and decoder.
    edges: [Vec<[usize; 2]>; 3],
    /// Length of the longest edge of each.
    longest: [f64; 3],
    plans: PlanCache,
}

impl GridMesh {
    /// Level of the finest mesh: its cells are some 15 km apart.
    pub const FINEST: usize = 9;

    /// Creates the mesh of `10 · 4^level + 2` cells, for a grid with cells at these latitudes and
    /// longitudes in degrees.
    ///
    /// # Errors
    /// No cell; a position that is not finite; a level of zero, or above [`FINEST`](Self::FINEST).
    pub fn new(positions: &[[f64; 2]], level: usize) -> Result<Self> {
        if positions.is_empty() || !(1..=Self::FINEST).contains(&level) {
            let message = format!(
                "level {level} for a grid of {} cells; expected at least 1 cell and a level from 1 to {}",
                positions.len(),
                Self::FINEST
            );
            return Err(Error::operator("GridMesh", message));
        }
        let cells: Vec<Point> = positions.iter().copied().map(sphere_point).collect();
        let icosphere = Icosphere::new(level);
        let corners = icosphere.positions();
        let (from_grid, from_mesh) = (tensor(&cells), tensor(corners));
        let reach = |level: usize| REACH * longest(icosphere.edges(level), corners, corners);
        let encoder = neighbours_within(&from_grid, &from_mesh, reach(level), None)?;
        let decoder = nearest_neighbours(&from_mesh, &from_grid, NEAREST)?;
        let nearest = nearest_neighbours(&from_grid, &from_mesh, 1)?;
        let anchors: Vec<usize> = nearest.edges().iter().map(|edge| edge[0]).collect();
        // Reach of each mesh cell on the coarsest level that it belongs to.
        let mut reaches = vec![0.0; corners.len()];
        for level in (0..=level).rev() {
            let reach = reach(level);
            for edge in icosphere.edges(level) {
                reaches[edge[0]] = reach;
            }
        }
        let is_near =
            |corner: usize| distance(cells[anchors[corner]], corners[corner]) <= reaches[corner];
        let mut is_kept: Vec<bool> = (0..corners.len()).map(is_near).collect();
        for edge in decoder.edges() {
            is_kept[edge[0]] = true;
        }
        let kept: Vec<usize> = (0..corners.len()).filter(|cell| is_kept[*cell]).collect();
        let mut numbers = vec![None; corners.len()];
        for (number, corner) in kept.iter().enumerate() {
            numbers[*corner] = Some(number);
        }
        let encoder = encoder.edges().iter();
        let encoder = encoder.filter_map(|&[cell, corner]| Some([cell, numbers[corner]?]));
        let levels = (0..=level).flat_map(|level| icosphere.edges(level));
        let processor = levels.filter_map(|&[from, to]| Some([numbers[from]?, numbers[to]?]));
        let decoder = decoder.edges().iter();
        let decoder = decoder.filter_map(|&[corner, cell]| Some([numbers[corner]?, cell]));
        let edges: [Vec<[usize; 2]>; 3] =
            [encoder.collect(), processor.collect(), decoder.collect()];
        let positions = [cells, kept.iter().map(|corner| corners[*corner]).collect()];
        let longest = [0, 1, 2].map(|kind: usize| {
            let [from, to] = ENDS[kind];
            longest(&edges[kind], &positions[from], &positions[to])
        });
        Ok(Self(Arc::new(Inner {
            positions,
            anchors: kept.iter().map(|corner| anchors[*corner]).collect(),
            edges,
            longest,
            plans: PlanCache::default(),
        })))
    }

    /// Returns the number of mesh cells, without those that are left out.
    pub fn size(&self) -> usize {
        self.0.positions[1].len()
    }

    /// Returns the numbers of cells of grid and mesh, and of edges of encoder, processor and
    /// decoder.
    pub(super) fn counts(&self) -> ([usize; 2], [usize; 3]) {
        let Inner {
            positions, edges, ..
        } = &*self.0;
        (
            positions.each_ref().map(Vec::len),
            edges.each_ref().map(Vec::len),
        )
    }

    /// Returns the mesh and the edges distributed to the ranks of a field
    /// `[batch, channels, lat, lon]`.
    ///
    /// # Errors
    /// Another number of cells; shards of channels; partial values.
    pub(super) fn distributed(&self, x: &ShardTensor<4>) -> Result<Arc<DistributedGraph>> {
        const NAME: &str = "GraphCastNet";
        x.require_resolved(NAME)?;
        x.require_whole(NAME, 1)?;
        let ([_, _, lat, lon], cells) = (x.dims(), self.0.positions[0].len());
        if lat * lon != cells {
            let message = format!("a field of {lat} x {lon} cells; expected {cells}");
            return Err(Error::operator(NAME, message));
        }
        let layout = x.layout();
        // Positions are the same for all samples. Ranks that hold different samples use them
        // together with those, so they fan out there.
        let placements = layout.map_placements(|placement| match placement {
            Shard(0) => Fan,
            Shard(dim) => Shard(dim - 1),
            other => other,
        });
        let [rows, columns] = [2, 3].map(|dim| layout.extents(dim).to_vec());
        let grid = layout.derive(placements, vec![vec![1], rows, columns]);
        let key = (grid, x.mesh().position());
        self.0
            .plans
            .get_or_make(key, |(grid, _)| self.0.distributed(grid, x))
    }
}

impl fmt::Debug for GridMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [cells, corners] = self.0.positions.each_ref().map(Vec::len);
        write!(f, "GridMesh({cells} cells, {corners} mesh cells)")
    }
}

impl Inner {
    /// Distributes the mesh and the edges to the ranks of a grid `[1, lat, lon]`.
    fn distributed(&self, grid: &Layout, x: &ShardTensor<4>) -> Result<DistributedGraph> {
        let position = x.mesh().position();
        let cells = cell_numbers(grid, 1..3);
        let place = inverse(&cells);
        // Parts of the mesh have equal sizes, and lie near the same parts of the grid.
        let mut corners: Vec<usize> = (0..self.anchors.len()).collect();
        corners.sort_by_key(|corner| place[self.anchors[*corner]]);
        let places = [place, inverse(&corners)];
        let orders = [cells, corners];
        let point = |end: usize, place: usize| self.positions[end][orders[end][place]];
        let flat = flat_layout(grid, 1..3); // [1, cells]
        let even = Layout::new(flat.mesh(), &[1, self.anchors.len()], flat.placements())?;
        let nodes = [(0, &flat), (1, &even)].map(|(end, layout)| {
            let extents = layout.extents(1).to_vec();
            Constant::new(layout, extents, position, |place| {
                cell_features(point(end, place))
            })
        });
        let edges = (0..3).map(|kind| -> Result<DistributedEdges> {
            let [from, to] = ENDS[kind];
            let number =
                |&[source, target]: &[usize; 2]| [places[from][source], places[to][target]];
            let edges: Vec<[usize; 2]> = self.edges[kind].iter().map(number).collect();
            let graph = Graph::new(places[from].len(), places[to].len(), &edges)?;
            let targets = &nodes[to].layout;
            let first = |cell: usize| graph.edges().partition_point(|edge| edge[1] < cell);
            let extents = (0..targets.extents(1).len()).map(|part| {
                let held = targets.part_range(1, part);
                first(held.end) - first(held.start)
            });
            let features = Constant::new(targets, extents.collect(), position, |edge| {
                let [source, target] = graph.edges()[edge];
                edge_features(point(from, source), point(to, target), self.longest[kind])
            });
            let shards = graph.distribute(&nodes[to].beside(x), 1)?;
            Ok(DistributedEdges { shards, features })
        });
        let edges = edges.collect::<Result<Vec<_>>>()?;
        Ok(DistributedGraph { nodes, edges })
    }
}

/// Cells of grid and mesh, and edges of encoder, processor and decoder, on one rank.
pub(super) struct DistributedGraph {
    /// Features of the cells of grid and mesh, `[1, cells, 3]`.
    pub(super) nodes: [Constant; 2],
    pub(super) edges: Vec<DistributedEdges>,
}

pub(super) struct DistributedEdges {
    pub(super) shards: EdgeShards,
    /// `[1, edges, 4]`.
    pub(super) features: Constant,
}

/// Shard of a tensor that does not depend on the field.
pub(super) struct Constant {
    layout: Layout,
    values: Vec<f32>,
    /// Tensor on the device and in the dtype of the last field.
    last: Mutex<Option<Tensor<3>>>,
}

impl Constant {
    /// Creates the shard of a tensor `[1, cells, N]`, placed as `[1, cells]` with these extents.
    fn new<const N: usize>(
        placed: &Layout,
        extents: Vec<usize>,
        position: usize,
        values: impl Fn(usize) -> [f64; N],
    ) -> Self {
        let extents = vec![vec![1], extents, vec![N]];
        let layout = placed.derive(placed.placements().to_vec(), extents);
        let held = layout.part_range(1, layout.part(1, position));
        let values = held.flat_map(values).map(|value| value as f32).collect();
        Self {
            layout,
            values,
            last: Mutex::default(),
        }
    }

    /// Returns the tensor on the mesh and in the dtype of a field.
    pub(super) fn beside<const D: usize>(&self, x: &ShardTensor<D>) -> ShardTensor<3> {
        let (device, dtype) = (x.device().inner(), x.local().dtype());
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |local: &Tensor<3>| local.device() == device && local.dtype() == dtype;
        let local = last.take().filter(fits).unwrap_or_else(|| {
            let shape = self.layout.local_shape(x.mesh().position());
            let data = TensorData::new(self.values.clone(), shape);
            Tensor::from_data(data, (&device, dtype))
        });
        *last = Some(local.clone());
        ShardTensor::from_parts(local, self.layout.clone(), x.mesh().clone())
    }
}

/// Inverse of a permutation.
fn inverse(order: &[usize]) -> Vec<usize> {
    let mut places = vec![0; order.len()];
    for (place, number) in order.iter().enumerate() {
        places[*number] = place;
    }
    places
}

fn tensor(points: &[Point]) -> ShardTensor<2> {
    let data = TensorData::new(points.as_flattened().to_vec(), [points.len(), 3]);
    ShardTensor::solo(Tensor::from_data(data, (&Device::flex(), DType::F64)))
}

fn offset(from: Point, to: Point) -> Point {
    [0, 1, 2].map(|axis: usize| from[axis] - to[axis])
}

fn product(a: Point, b: Point) -> f64 {
    (0..3).map(|axis| a[axis] * b[axis]).sum()
}

fn distance(from: Point, to: Point) -> f64 {
    let offset = offset(from, to);
    product(offset, offset).sqrt()
}

/// Length of the longest edge; a positive number if there is none.
fn longest(edges: &[[usize; 2]], from: &[Point], to: &[Point]) -> f64 {
    let lengths = edges
        .iter()
        .map(|&[source, target]| distance(from[source], to[target]));
    lengths.fold(f64::MIN_POSITIVE, f64::max)
}

/// Cosine and sine of the longitude. Grid cells at a pole have one, since the cosine of 90° is not
/// zero in floating point; a mesh cell there has longitude 0.
fn meridian([x, y, _]: Point) -> [f64; 2] {
    let radius = x.hypot(y);
    if radius > 0.0 {
        [x / radius, y / radius]
    } else {
        [1.0, 0.0]
    }
}

/// Features of a cell: the sine of its latitude, and the cosine and sine of its longitude, along
/// which the components of vectors are directed.
fn cell_features(point: Point) -> [f64; 3] {
    let [cos, sin] = meridian(point);
    [point[2], cos, sin]
}

/// Features of an edge: the offset of its source eastward, northward and upward of its target, and
/// its length, relative to the longest.
fn edge_features(source: Point, target: Point, longest: f64) -> [f64; 4] {
    let offset = offset(source, target).map(|length| length / longest);
    let ([x, y, z], [cos, sin]) = (target, meridian(target));
    let east = [-sin, cos, 0.0];
    let north = [-z * cos, -z * sin, x * cos + y * sin];
    let [east, north, up] = [east, north, target].map(|axis| product(axis, offset));
    [east, north, up, product(offset, offset).sqrt()]
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;

    use super::*;

    #[test]
    fn constants_have_the_dtype_of_each_field() {
        let x = ShardTensor::solo(Tensor::<2>::zeros([1, 3], &Device::flex()));
        let constant = Constant::new(x.layout(), vec![3], 0, |cell| [cell as f64]);
        for dtype in [DType::F32, DType::F64, DType::F32] {
            let field = x.clone().cast(FloatDType::from(dtype));
            let local = constant.beside(&field).into_local();
            assert_eq!((local.dtype(), local.dims()), (dtype, [1, 3, 1]));
            assert!(local.into_data().iter::<f64>().eq([0.0, 1.0, 2.0]));
        }
    }

    #[test]
    fn offsets_of_edges_are_local_to_their_targets() {
        let near = |a: [f64; 4], b: [f64; 4]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
        let at = |lat: f64, lon: f64| sphere_point([lat, lon]);
        let (sin, cos) = 80_f64.to_radians().sin_cos();
        for (source, target, expected) in [
            (at(0.0, 31.0), at(0.0, 30.0), [1.0, 0.0, 0.0, 1.0]),
            (at(-20.0, 200.0), at(-21.0, 200.0), [0.0, 1.0, 0.0, 1.0]),
            (at(89.0, 90.0), at(90.0, 10.0), [sin, -cos, 0.0, 1.0]),
            (at(89.0, 90.0), [0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]),
        ] {
            let features = edge_features(source, target, 1.0);
            let degrees = features.map(f64::to_degrees);
            let level = [degrees[0], degrees[1], 0.0, degrees[3]];
            assert!(near(level, expected), "{source:?}: {degrees:?}");
        }
    }

    #[test]
    fn cells_at_a_pole_have_longitudes() {
        let near = |a: [f64; 3], b: [f64; 3]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
        for (cell, expected) in [
            ([90.0, 270.0], [1.0, 0.0, -1.0]),
            ([-90.0, 180.0], [-1.0, -1.0, 0.0]),
        ] {
            let features = cell_features(sphere_point(cell));
            assert!(near(features, expected), "{cell:?}: {features:?}");
        }
        assert_eq!(cell_features([0.0, 0.0, 1.0]), [1.0, 1.0, 0.0]);
    }

    fn scattered() -> Vec<[f64; 2]> {
        let position = |cell: u32| [89.0 - 4.5 * f64::from(cell), 137.5 * f64::from(cell)];
        (0..40).map(position).collect()
    }

    #[test]
    fn a_mesh_finer_than_the_grid_is_connected() {
        let mesh = GridMesh::new(&scattered(), 4).unwrap();
        assert!(mesh.size() < 300, "{} of 2562 cells", mesh.size());
        let mut reached = vec![false; mesh.size()];
        let (mut next, mut count) = (vec![0], 0);
        while let Some(cell) = next.pop() {
            if !std::mem::replace(&mut reached[cell], true) {
                count += 1;
                let edges = mesh.0.edges[1].iter().filter(|edge| edge[0] == cell);
                next.extend(edges.map(|edge| edge[1]));
            }
        }
        assert_eq!(count, mesh.size());
    }

    #[test]
    fn every_grid_cell_sends_and_receives() {
        let grid = scattered();
        for level in [1, 2] {
            let mesh = GridMesh::new(&grid, level).unwrap();
            let [encoder, processor, decoder] = &mesh.0.edges;
            for cell in 0..grid.len() {
                assert!(encoder.iter().any(|edge| edge[0] == cell), "{level} {cell}");
                assert_eq!(decoder.iter().filter(|edge| edge[1] == cell).count(), 3);
            }
            let both_ways = |&[from, to]: &[usize; 2]| processor.contains(&[to, from]);
            assert!(processor.iter().all(both_ways));
        }
        let error = GridMesh::new(&grid, 10).unwrap_err().to_string();
        assert!(error.contains("level 10"), "{error}");
        let error = GridMesh::new(&[], 1).unwrap_err().to_string();
        assert!(error.contains("a grid of 0 cells"), "{error}");
    }
}
