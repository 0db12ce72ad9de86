//! Integrals over the sphere, errors, and fields derived from a state.

use burn::tensor::{DType, Tensor, TensorData};
use halocline_core::{Error, Partial, Placement, ReduceOp, Replicate, Result, Shard, ShardTensor};

use super::scheme::{Block, window};
use super::{
    Dynamics, LATITUDE, Metrics, NAME, PolarFilter, STATES, ShallowWater, device, local_cells,
    with_halo,
};

/// Safety factor on the largest stable step, as the stability bound is for a mean state at rest.
const SAFETY: f64 = 0.8;
/// Highest rate of change of a valid flow, in 1/s.
const FASTEST: f64 = 1e3;
/// Stability limit of the classical Runge–Kutta scheme on the imaginary axis.
const STABILITY: f64 = 2.828;

impl ShallowWater {
    /// Computes the volume of water of every state, in m³, summed in f64.
    ///
    /// # Errors
    /// The tensor is not a state of this solver; communication fails.
    pub fn mass(&self, state: &ShardTensor<4>) -> Result<Vec<f64>> {
        self.check_state(state)?;
        self.integral(state, depth(state) * self.exact_metrics().areas.cell)
    }

    /// Computes the energy of every state divided by the density of water, in m⁵/s²: kinetic
    /// energy, and potential energy above sea level.
    ///
    /// The scheme conserves it, up to the time-stepping error, the polar filter and viscosity.
    ///
    /// # Errors
    /// Same as [`mass`](Self::mass).
    pub fn energy(&self, state: &ShardTensor<4>) -> Result<Vec<f64>> {
        let (block, metrics) = self.exact(state)?;
        let (n, m) = (block.rows, block.columns);
        let shard = |field: &Tensor<4>| window(field, 1..n + 1, 1..m + 1);
        let square = |field: &Tensor<4>| shard(field).square();
        // ½ h̄ u² over the faces; the block holds twice the depth.
        let east = shard(&block.depth_east) * square(&block.east) * metrics.areas.east.clone();
        let north = shard(&block.depth_south) * square(&block.north) * metrics.areas.south.clone();
        let kinetic = (east + north).mul_scalar(0.25);
        let depth = shard(&block.depth);
        let mut level = depth.clone().mul_scalar(0.5);
        if let Some(ground) = &metrics.ground {
            level = level + window(ground, 0..n, 0..m);
        }
        let potential = depth * level.mul_scalar(self.config().planet.gravity);
        self.integral(state, kinetic + potential * metrics.areas.cell.clone())
    }

    /// Computes the potential enstrophy of every state, `½ ∫ (ζ + f)² / h`, in m/s², without the
    /// two pole points.
    ///
    /// # Errors
    /// Same as [`mass`](Self::mass).
    pub fn potential_enstrophy(&self, state: &ShardTensor<4>) -> Result<Vec<f64>> {
        let (block, metrics) = self.exact(state)?;
        let (n, m) = (block.rows, block.columns);
        let shard = |field: &Tensor<4>| window(field, 1..n + 1, 1..m + 1);
        let absolute = block.vorticity(&metrics) + metrics.coriolis.clone();
        let depth = shard(&block.depth_corner()).mul_scalar(0.5); // twice the depth
        self.integral(
            state,
            shard(&absolute).square() / depth * metrics.areas.corner.clone(),
        )
    }

    /// Computes the depth error of every state against one reference for all states, or one for
    /// each, in the norm `√(∫ (h − h₀)² / ∫ h₀²)`.
    ///
    /// # Errors
    /// Same as [`mass`](Self::mass); the number of references does not match.
    pub fn depth_error(
        &self,
        state: &ShardTensor<4>,
        reference: &ShardTensor<4>,
    ) -> Result<Vec<f64>> {
        self.check_state(reference)?;
        self.check_state(state)?;
        let (states, references) = (state.dims()[STATES], reference.dims()[STATES]);
        if references != 1 && references != states {
            let message = format!("{references} references for {states} states");
            return Err(Error::operator(NAME, message));
        }
        // A single reference is replicated on the axes on which states are sharded.
        let everywhere = reference
            .layout()
            .map_placements(|placement| match placement {
                Shard(STATES) if references == 1 => Replicate,
                other => other,
            });
        let reference = &reference.clone().try_redistribute(&everywhere)?;
        let area = self.exact_metrics().areas.cell;
        let (found, expected) = (depth(state), depth(reference));
        let error = (found - expected.clone()).square() * area.clone();
        let errors = self.integral(state, error)?;
        let norms = self.integral(reference, expected.square() * area)?;
        let pairs = errors.iter().zip(norms.iter().cycle());
        Ok(pairs.map(|(error, norm)| (error / norm).sqrt()).collect())
    }

    /// Computes the longest stable time step for a state, in s, from its fastest wave and the
    /// narrowest unfiltered cells. All ranks must call this together; all return the same step.
    ///
    /// # Errors
    /// Same as [`mass`](Self::mass); the state has diverged.
    pub fn stable_step(&self, state: &ShardTensor<4>) -> Result<f64> {
        self.check_state(state)?;
        let local = state.local().clone().inner().cast(DType::F64);
        // A maximum ignores NaN; a sum does not.
        let largest = |channel: usize| -> f64 {
            let field = local.clone().narrow(1, channel, 1).abs();
            match field.shape().num_elements() {
                0 => 0.0,
                _ if field.clone().sum().into_scalar::<f64>().is_finite() => {
                    field.max().into_scalar()
                }
                _ => f64::INFINITY,
            }
        };
        let extremes = [0, 1, 2].map(largest);
        let extremes = Tensor::from_data(extremes, (&device(state.mesh()), DType::F64)); // [3]
        let axes = state.placements().len();
        let layout = state
            .layout()
            .derive(vec![Partial(ReduceOp::Max); axes], vec![vec![3]]);
        let extremes = to_vec(self.sharded(extremes, &layout))?;

        let (grid, config) = (self.grid(), self.config());
        let radius = config.planet.radius;
        let cosine = match config.filter {
            PolarFilter::Off => grid.cos_centre(0),
            PolarFilter::Poleward(latitude) => latitude.to_radians().cos().max(grid.cos_centre(0)),
        };
        let [dx, dy] = [radius * grid.dlon() * cosine, radius * grid.dlat()];
        // Largest eigenvalues of the second- and fourth-order differences.
        let (gravity, steepness) = match config.dynamics {
            Dynamics::ShallowWater => ((config.planet.gravity * extremes[0]).sqrt(), 1.0),
            Dynamics::Advection => (0.0, 1.372),
        };
        // The filter limits differences over one cell; advection uses differences over two cells,
        // which may be twice as fast.
        let rate = 2.0 * gravity * (1.0 / dx).hypot(1.0 / dy)
            + 2.0 * steepness * extremes[1] / dx
            + steepness * extremes[2] / dy
            + 4.0 * config.viscosity * (1.0 / (dx * dx) + 1.0 / (dy * dy));
        // Without this bound, a run of a diverging state would never end.
        if rate.is_nan() || rate > FASTEST {
            let [depth, east, north] = [extremes[0], extremes[1], extremes[2]];
            let message = format!(
                "the state has blown up: depth {depth:.3e} m, wind {east:.3e} and {north:.3e} m/s; take shorter steps \
                 or more viscosity"
            );
            return Err(Error::operator("stable_step", message));
        }
        Ok(SAFETY * STABILITY / rate)
    }

    /// Interpolates depth, eastward and northward wind to the cell centres,
    /// `[states, 3, rows, columns]`, for output and training.
    ///
    /// # Errors
    /// Same as [`mass`](Self::mass).
    pub fn to_centers(&self, state: &ShardTensor<4>) -> Result<ShardTensor<4>> {
        self.check_state(state)?;
        let haloed = with_halo(&state.clone().inner(), 1)?;
        let [_, _, high, wide] = haloed.dims();
        let (n, m) = (high - 2, wide - 2);
        let channel = |channel: usize| haloed.clone().narrow(1, channel, 1);
        let (east, north) = (channel(1), channel(2));
        let east = window(&east, 1..n + 1, 0..m) + window(&east, 1..n + 1, 1..m + 1);
        let north = window(&north, 0..n, 1..m + 1) + window(&north, 1..n + 1, 1..m + 1);
        let depth = window(&channel(0), 1..n + 1, 1..m + 1);
        // A polar row has no wind at its face on the pole, so its other face stands for both.
        let last = self.grid().rows() - 1;
        let rows = self.layout.local_box(self.mesh.position()).ranges()[LATITUDE].clone();
        let shares = rows.map(|row| if [0, last].contains(&row) { 1.0 } else { 0.5 });
        let shares = TensorData::new(shares.collect::<Vec<f64>>(), [1, 1, n, 1]);
        let shares = Tensor::<4>::from_data(shares, (&north.device(), north.dtype()));
        let fields = vec![depth, east.mul_scalar(0.5), north * shares];
        Ok(self.sharded(Tensor::cat(fields, 1), state.layout()))
    }

    /// Computes the relative vorticity in 1/s at the south-eastern corners of the cells,
    /// `[states, 1, rows, columns]`; zero at the pole.
    ///
    /// # Errors
    /// Same as [`mass`](Self::mass).
    pub fn vorticity(&self, state: &ShardTensor<4>) -> Result<ShardTensor<4>> {
        self.check_state(state)?;
        let block = Block::new(&with_halo(&state.clone().inner(), 1)?, &self.metrics);
        let vorticity = block.vorticity(&self.metrics);
        let corners = window(&vorticity, 1..block.rows + 1, 1..block.columns + 1);
        let layout = state.layout().resized(1, vec![1]);
        Ok(self.sharded(corners, &layout))
    }

    /// Returns a state with its halo, and the metrics, in f64.
    fn exact(&self, state: &ShardTensor<4>) -> Result<(Block, Metrics)> {
        self.check_state(state)?;
        let haloed = with_halo(&state.clone().inner(), 1)?.cast(DType::F64);
        let metrics = self.exact_metrics();
        Ok((Block::new(&haloed, &metrics), metrics))
    }

    fn exact_metrics(&self) -> Metrics {
        if self.metrics.dtype == DType::F64 {
            return self.metrics.clone();
        }
        let cells = local_cells(&self.layout, &self.mesh);
        let device = device(&self.mesh);
        Metrics::new(&self.grid, &self.config, &cells, DType::F64, &device)
    }

    /// Sums `[states, 1, rows, columns]` over all cells of all ranks, for every state.
    fn integral(&self, state: &ShardTensor<4>, integrand: Tensor<4>) -> Result<Vec<f64>> {
        let [states, ..] = integrand.dims();
        let local = integrand.sum_dims(&[1, 2, 3]).reshape([states]);
        let placements = state.layout().map_placements(|placement| match placement {
            Shard(STATES) => placement,
            Shard(_) => Partial(ReduceOp::Sum),
            _ => Replicate,
        });
        let extents = vec![state.layout().extents(STATES).to_vec()];
        let layout = state.layout().derive(placements, extents);
        to_vec(self.sharded(local, &layout))
    }
}

/// Returns the depth of this rank's cells, in f64.
fn depth(state: &ShardTensor<4>) -> Tensor<4> {
    let depth = state.local().clone().inner().narrow(1, 0, 1);
    depth.cast(DType::F64)
}

/// Gathers the values of all ranks on every rank.
fn to_vec(values: ShardTensor<1>) -> Result<Vec<f64>> {
    let everywhere: Vec<Placement> = vec![Replicate; values.placements().len()];
    let values = values.try_redistribute(&everywhere)?;
    let data = values.into_local().into_data();
    data.try_to_vec()
        .map_err(|error| Error::other(format!("{error:?}")))
}
