//! Neighborhood attention on the sphere: each cell attends to the cells within a geodesic radius.
//!
//! For each head, `y(p) = Σ_q w_q e^{s q(p)·k(q)} v(q) / Σ_q w_q e^{s q(p)·k(q)}` over the cells
//! `q` within the radius, with quadrature weights `w` and `s = 1/√width`. Semantics follow the
//! kernel of torch-harmonics' `NeighborhoodAttentionS2`, between its projections.
//!
//! # Shapes
//! Queries, keys and values are `[batch, heads · width, lat, lon]`, where `width` is the number of
//! channels per head; values may have another width. Keys and values share one grid. Queries and
//! the result share that grid or a second one, which is coarser or finer: the number of longitudes
//! of one grid divides that of the other.
//!
//! # Placement
//! Batch, latitude and longitude may be sharded, alike for all three tensors, and so may channels,
//! in whole heads. An exchange makes longitude whole; keys and values exchange halos in latitude.
//! Queries on another grid travel to the ranks that hold the keys at their latitudes, and results
//! travel back. The result has the placements of the queries.
//!
//! # Adjoint
//! Adjoint of the softmax, computed where the queries are; gradients of keys and values return as
//! halos and are added.

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{Error, Layout, Result, ShardTensor};

use super::attention_node::Attention;
use super::filter::rotated;
use super::reach::{Reach, Toward};
use super::rows::Neighbor;
use crate::driver::empty::{drop_empty, fill};
use crate::kernel::flex;
use crate::reshape;
use crate::sphere::SphereGrid;

const NAME: &str = "sphere_attention";

/// Neighborhoods of the cells of a grid: the cells within a geodesic radius. Clones share the data.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{GeodesicField, GeodesicNeighborhood, SphereGrid};
///
/// let near = GeodesicNeighborhood::new([6, 12], SphereGrid::LegendreGauss, Some(0.6))?;
/// let x = Tensor::<4>::ones([1, 8, 6, 12], &Default::default());
/// let y = x.clone().sphere_attention(x.clone(), x.clone(), 2, &near).into_data();
/// y.assert_approx_eq::<f32>(&x.into_data(), Default::default());
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct GeodesicNeighborhood {
    reach: Reach,
    /// Neighbors of the first output cell of each phase of each row.
    neighbors: Arc<Vec<Vec<Neighbor>>>,
}

impl fmt::Debug for GeodesicNeighborhood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GeodesicNeighborhood({:?})", self.reach)
    }
}

impl GeodesicNeighborhood {
    /// Neighborhoods on a grid of `size = [latitudes, longitudes]`. The default radius is the
    /// largest distance between adjacent latitudes.
    ///
    /// # Errors
    /// Fails for a grid without cells and for a radius that is not positive.
    pub fn new(size: [usize; 2], grid: SphereGrid, radius: Option<f64>) -> Result<Self> {
        Self::between([size; 2], [grid; 2], radius)
    }

    /// Neighborhoods in the grid of keys for each cell of the grid of queries. `sizes` and `grids`
    /// list keys first, then queries; a size is `[latitudes, longitudes]`. The default radius is
    /// the largest distance between adjacent latitudes of the grid with fewer longitudes, or of the
    /// queries.
    ///
    /// # Errors
    /// Errors of [`new`](Self::new); also fails if neither number of longitudes divides the other.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{GeodesicField, GeodesicNeighborhood, SphereGrid};
    ///
    /// let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
    /// let near = GeodesicNeighborhood::between([[8, 12], [5, 6]], grids, Some(0.7))?;
    /// let keys = Tensor::<4>::ones([1, 4, 8, 12], &Default::default());
    /// let queries = Tensor::<4>::ones([1, 4, 5, 6], &Default::default());
    /// let y = queries.sphere_attention(keys.clone(), keys, 2, &near);
    /// assert_eq!(y.dims(), [1, 4, 5, 6]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn between(
        sizes: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        radius: Option<f64>,
    ) -> Result<Self> {
        let [size, [latitudes, longitudes]] = sizes;
        let phases = match size[1] {
            keys if keys > 0 && longitudes.is_multiple_of(keys) => longitudes / keys,
            _ => 1,
        };
        let toward = if phases > 1 {
            Toward::Finer
        } else {
            Toward::Coarser
        };
        let reach = Reach::new(NAME, sizes, grids, radius, toward)?;
        let (cosines, weights) = grids[0].quadrature(size[0])?;
        let (outputs, _) = grids[1].quadrature(latitudes)?;
        let angle = |place: usize, count: usize| 2.0 * PI * place as f64 / count as f64;
        let neighbors = |line: usize| {
            let (output, phase) = (line / phases, line % phases);
            let mut found = Vec::new();
            for row in reach.inputs(&(output..output + 1)) {
                for shift in 0..size[1] {
                    // From the coarser grid, as torch-harmonics does.
                    let (distance, _) = if phases == 1 {
                        rotated(cosines[row], angle(shift, size[1]), outputs[output])
                    } else {
                        let place = (longitudes + phase - shift * phases) % longitudes;
                        rotated(outputs[output], angle(place, longitudes), cosines[row])
                    };
                    if distance <= reach.cutoff {
                        let weight = 2.0 * PI * weights[row] / size[1] as f64;
                        found.push(Neighbor { row, shift, weight });
                    }
                }
            }
            found
        };
        let neighbors = (0..latitudes * phases).map(neighbors).collect();
        Ok(Self {
            reach,
            neighbors: Arc::new(neighbors),
        })
    }

    /// Number of longitudes of queries for each of keys, if the queries are on a finer grid;
    /// otherwise one.
    fn phases(&self) -> usize {
        let [[_, keys], [_, queries]] = self.reach.sizes;
        (queries / keys).max(1)
    }
}

/// Number of heads that each part of the channels holds; `None` if a part cuts a head or holds
/// none.
fn heads_of(layout: &Layout, heads: usize) -> Option<Vec<usize>> {
    let extents = layout.extents(1);
    if extents.len() == 1 {
        return Some(vec![heads]);
    }
    let width = layout.shape()[1] / heads;
    let held = extents.iter().map(|extent| {
        let is_whole = *extent > 0 && extent.is_multiple_of(width);
        is_whole.then(|| extent / width)
    });
    held.collect()
}

/// Splits each row of queries into one row per phase, with the longitudes of the keys.
fn by_phase(queries: Tensor<4>, phases: usize) -> Tensor<4> {
    if phases == 1 {
        return queries;
    }
    let [heads, width, rows, longitudes] = queries.dims();
    let keys = longitudes / phases;
    let cells: Tensor<5> = reshape(queries, vec![heads, width, rows, keys, phases]);
    reshape(
        cells.swap_dims(3, 4),
        vec![heads, width, rows * phases, keys],
    )
}

/// Inverse of [`by_phase`].
fn from_phases(y: Tensor<4>, phases: usize) -> Tensor<4> {
    if phases == 1 {
        return y;
    }
    let [heads, width, lines, keys] = y.dims();
    let rows = lines / phases;
    let cells: Tensor<5> = reshape(y, vec![heads, width, rows, phases, keys]);
    reshape(
        cells.swap_dims(3, 4),
        vec![heads, width, rows, keys * phases],
    )
}

/// Computes the attention of each cell to the cells within a radius. See the [module](self).
///
/// # Errors
/// Fails for shapes, layouts or element types that do not match, for channels that are not sharded
/// in whole heads, and for partial values.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::SphereGrid;
/// use halocline_ops::geodesic::{GeodesicNeighborhood, sphere_attention};
///
/// let near = GeodesicNeighborhood::new([6, 12], SphereGrid::Lobatto, None)?;
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 8, 6, 12], &mesh, &[Shard(2)])?;
///     let y = sphere_attention(x.clone(), x.clone(), x.clone(), 2, &near)?;
///     assert_eq!(y.layout(), x.layout());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sphere_attention(
    queries: ShardTensor<4>,
    keys: ShardTensor<4>,
    values: ShardTensor<4>,
    heads: usize,
    neighborhood: &GeodesicNeighborhood,
) -> Result<ShardTensor<4>> {
    let reach = &neighborhood.reach;
    let shapes = [&queries, &keys, &values].map(|tensor| tensor.dims());
    reach.check_output(NAME, &shapes[0])?;
    shapes[1..]
        .iter()
        .try_for_each(|shape| reach.check(NAME, shape))?;
    let told = |message| Err(Error::operator(NAME, message));
    let [q, k, v] = shapes;
    if heads == 0
        || q[..2] != k[..2]
        || k[0] != v[0]
        || !q[1].is_multiple_of(heads)
        || !v[1].is_multiple_of(heads)
    {
        return told(format!(
            "queries {q:?}, keys {k:?} and values {v:?} with {heads} heads; expected the same batch, queries and \
             keys with the same channels, and multiples of heads"
        ));
    }
    let all = [queries, keys, values];
    let same_grid = reach.sizes[0] == reach.sizes[1];
    let same = |tensor: &ShardTensor<4>| {
        let alike = |other: &ShardTensor<4>, dims: &[usize]| {
            let extents =
                |dim: &usize| tensor.layout().extents(*dim) == other.layout().extents(*dim);
            dims.iter().all(extents)
        };
        alike(&all[0], if same_grid { &[0, 2, 3] } else { &[0] })
            && (tensor.dims()[2..] != all[1].dims()[2..] || alike(&all[1], &[2, 3]))
            && tensor.placements() == all[0].placements()
    };
    let types = all.each_ref().map(|tensor| tensor.local().dtype());
    if types != [types[0]; 3] {
        return told(format!(
            "queries, keys and values of {types:?}; expected one number type"
        ));
    }
    if !all.iter().all(same) {
        let layouts = all.each_ref().map(|tensor| tensor.layout().to_string());
        return Err(Error::placement(
            NAME,
            layouts.join(" with "),
            "redistribute them to the same shards",
        ));
    }
    let before = all[0].layout().clone();
    let held = heads_of(all[0].layout(), heads);
    let alike = |tensor: &ShardTensor<4>| heads_of(tensor.layout(), heads) == held;
    let Some(held) = held.clone().filter(|_| all.iter().all(alike)) else {
        let layouts = all.each_ref().map(|tensor| tensor.layout().to_string());
        let help =
            format!("redistribute them: each rank needs the same whole ones of {heads} heads");
        return Err(Error::placement(NAME, layouts.join(" with "), help));
    };
    let [channels, _, channels_out] = all
        .each_ref()
        .map(|tensor| tensor.layout().extents(1).to_vec());
    let [queries, keys, values] = all;
    let (keys, values) = (reach.pencil(keys, NAME)?, reach.pencil(values, NAME)?);
    // Queries move to the ranks that hold the keys they reach.
    let beside = keys
        .layout()
        .resized(1, channels)
        .resized(2, reach.output_rows(keys.layout())?)
        .resized(3, vec![reach.sizes[1][1]]);
    let queries = if same_grid {
        reach.pencil(queries, NAME)?
    } else {
        queries.try_redistribute(&beside)?
    };
    let position = queries.mesh().position();
    let outputs = reach.outputs(keys.layout(), position)?;
    let rows = reach.output_rows(keys.layout())?.into_iter().max();
    let kernels = flex::runs_on(&queries.device());
    let full =
        kernels || (!queries.layout().has_empty_shard() && reach.reaches_all(keys.layout())?);
    let assembled = [&keys, &values].map(|tensor| reach.assemble(tensor, NAME));
    let (layout, mesh) = (queries.layout().clone(), queries.mesh().clone());
    let heads_here = held[layout.part(1, position)];
    let by_head = |tensor: Tensor<4>| {
        let [batch, channels, rows, longitudes] = tensor.dims();
        let shape = vec![batch * heads_here, channels / heads_here, rows, longitudes];
        reshape::<4, 4>(tensor, shape)
    };
    let phases = neighborhood.phases();
    let attention = Attention {
        neighbors: neighborhood.neighbors.clone(),
        inputs: reach.inputs(&outputs),
        outputs: outputs.start * phases..outputs.end * phases,
        scale: ((q[1] / heads) as f64).sqrt().recip(),
    };
    let [keys, values] = assembled;
    let filled = |tensor: Tensor<4>| {
        if full {
            Ok(tensor)
        } else {
            fill(1, tensor, &[0, 1, 2, 3], NAME, 0.0)
        }
    };
    let tensors = [
        filled(queries.into_local())?,
        filled(keys?)?,
        filled(values?)?,
    ];
    let [queries, keys, values] = tensors.map(by_head);
    let inputs = [by_phase(queries, phases), keys, values];
    let y = attention.run(inputs, rows.unwrap_or_default() * phases);
    let y = from_phases(y, phases);
    let result = layout.resized(1, channels_out);
    let [batch_and_heads, width, rows, longitudes] = y.dims();
    let batch = batch_and_heads / heads_here;
    let shape = vec![batch, width * heads_here, rows, longitudes];
    let mut y = reshape(y, shape);
    if !kernels {
        y = drop_empty(y, &result, position, NAME)?;
    }
    reach.restore(ShardTensor::from_parts(y, result, mesh), &before)
}
