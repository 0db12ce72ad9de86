//! Neighborhood attention on the sphere: each cell attends to the cells within a geodesic radius.
//!
//! For each head, `y(p) = Σ_q w_q e^{s q(p)·k(q)} v(q) / Σ_q w_q e^{s q(p)·k(q)}` over the cells
//! `q` within the radius, with quadrature weights `w` and `s = 1/√width`. Semantics follow the
//! kernel of torch-harmonics' `NeighborhoodAttentionS2`, between its projections.
//!
//! # Shapes
//! Queries, keys and values are `[batch, heads · width, lat, lon]`, where `width` is the number of
//! channels per head; values may have another width. Keys and values share one grid. Queries and
//! the result share that grid or a second one, whose number of longitudes divides that of the keys.
//!
//! # Placement
//! Batch, latitude and longitude may be sharded, alike for all three tensors. An exchange makes
//! longitude whole; keys and values exchange halos in latitude. Queries on another grid travel to
//! the ranks that hold the keys at their latitudes, and results travel back. The result has the
//! layout of the queries.
//!
//! # Adjoint
//! Adjoint of the softmax, computed where the queries are; gradients of keys and values return as
//! halos and are added.

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use halocline_core::{Error, Result, ShardTensor};

use super::attention_node::Attention;
use super::filter::rotated;
use super::reach::Reach;
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
    /// the largest distance between adjacent latitudes of the queries.
    ///
    /// # Errors
    /// Errors of [`new`](Self::new); also fails if the number of longitudes of the queries does not
    /// divide that of the keys.
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
        let reach = Reach::new(NAME, sizes, grids, radius)?;
        let [size, [latitudes, _]] = sizes;
        let (cosines, weights) = grids[0].quadrature(size[0])?;
        let (outputs, _) = grids[1].quadrature(latitudes)?;
        let of = |output: usize| {
            let mut found = Vec::new();
            for row in reach.inputs(&(output..output + 1)) {
                for shift in 0..size[1] {
                    let angle = 2.0 * PI * shift as f64 / size[1] as f64;
                    let (distance, _) = rotated(cosines[row], angle, outputs[output]);
                    if distance <= reach.cutoff {
                        let weight = 2.0 * PI * weights[row] / size[1] as f64;
                        found.push(Neighbor { row, shift, weight });
                    }
                }
            }
            found
        };
        let neighbors = (0..latitudes).map(of).collect();
        Ok(Self {
            reach,
            neighbors: Arc::new(neighbors),
        })
    }
}

/// Computes the attention of each cell to the cells within a radius. See the [module](self).
///
/// # Errors
/// Fails for shapes, layouts or element types that do not match, for sharded channels and for
/// partial values.
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
    let dtype = all[0].local().dtype();
    let same_grid = reach.sizes[0] == reach.sizes[1];
    let same = |tensor: &ShardTensor<4>| {
        let alike = |other: &ShardTensor<4>, dims: &[usize]| {
            let extents =
                |dim: &usize| tensor.layout().extents(*dim) == other.layout().extents(*dim);
            dims.iter().all(extents)
        };
        tensor.local().dtype() == dtype
            && alike(&all[0], if same_grid { &[0, 2, 3] } else { &[0] })
            && (tensor.dims()[2..] != all[1].dims()[2..] || alike(&all[1], &[2, 3]))
            && tensor.placements() == all[0].placements()
    };
    if !all.iter().all(same) {
        let layouts = all.each_ref().map(|tensor| tensor.layout().to_string());
        return told(format!(
            "{}; expected the same shards and number type: redistribute them",
            layouts.join(", ")
        ));
    }
    let before = all[0].layout().clone();
    all[0].require_whole(NAME, 1)?;
    let [queries, keys, values] = all;
    let (keys, values) = (reach.pencil(keys, NAME)?, reach.pencil(values, NAME)?);
    // Queries move to the ranks that hold the keys they reach.
    let mut extents = keys.layout().all_extents().to_vec();
    extents[1] = vec![q[1]];
    extents[2] = reach.output_rows(keys.layout())?;
    extents[3] = vec![reach.sizes[1][1]];
    let beside = keys.layout().derive(keys.placements().to_vec(), extents);
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
    let heads_of = |tensor: burn::tensor::Tensor<4>| {
        let [batch, channels, rows, longitudes] = tensor.dims();
        reshape::<4, 4>(
            tensor,
            vec![batch * heads, channels / heads, rows, longitudes],
        )
    };
    let attention = Attention {
        neighbors: neighborhood.neighbors.clone(),
        inputs: reach.inputs(&outputs),
        outputs,
        scale: ((q[1] / heads) as f64).sqrt().recip(),
    };
    let [keys, values] = assembled;
    let filled = |tensor: burn::tensor::Tensor<4>| {
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
    let y = attention.run(tensors.map(heads_of), rows.unwrap_or_default());
    let mut extents = layout.all_extents().to_vec();
    extents[1] = vec![v[1]];
    let result = layout.derive(layout.placements().to_vec(), extents);
    let [batch_and_heads, width, rows, longitudes] = y.dims();
    let shape = vec![batch_and_heads / heads, width * heads, rows, longitudes];
    let mut y = reshape(y, shape);
    if !kernels {
        y = drop_empty(y, &result, position, NAME)?;
    }
    reach.restore(ShardTensor::from_parts(y, result, mesh), &before)
}
