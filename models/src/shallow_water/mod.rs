//! Shallow-water equations on the rotating sphere, with the grid sharded over ranks.
//!
//! A state is one [`ShardTensor`] `[states, 3, rows, columns]` of depth (m), eastward and northward
//! wind (m/s) on a staggered [`Grid`]: depth at the cell centres, wind at the eastern and southern
//! faces. Each stage of a time step has one halo exchange for all fields, and any number of states
//! step together.
//!
//! The discretization is Sadourny's second-order energy-conserving scheme in space, and the
//! classical fourth-order Runge–Kutta scheme in time. Mass is conserved to round-off; without
//! filter and viscosity, energy is conserved up to the time-stepping error.
//!
//! # Placement
//! `Shard(0)` (states), `Shard(2)` (latitude) and `Shard(3)` (longitude) on any axes, with any
//! extents; with a [`PolarFilter`], longitude must not be sharded. Without a filter, results are
//! the same on any mesh, bit for bit; with one, they agree to round-off, as do diagnostics, which
//! are sums over ranks.
//!
//! # Example
//! ```
//! use halocline_core::{Launcher, Shard};
//! use halocline_models::shallow_water::{Case, DAY, Grid, ShallowWater};
//!
//! Launcher::local(2).run(|world| {
//!     let mesh = world.mesh([("lat", world.size())])?;
//!     let case = Case::RossbyHaurwitz;
//!     let model = ShallowWater::new(Grid::new(8, 16)?, &mesh, &[Shard(2)], case.config())?;
//!     let start = model.initial(case)?;
//!     let end = model.run(start.clone(), DAY / 24.0)?;
//!     let change = model.mass(&end)?[0] / model.mass(&start)?[0] - 1.0;
//!     assert!(change.abs() < 1e-6);
//!     Ok(())
//! })?;
//! # Ok::<(), halocline_core::Error>(())
//! ```

mod cases;
mod config;
mod diagnostics;
mod filter;
mod grid;
mod jets;
mod metrics;
mod scheme;
#[cfg(test)]
mod tests;

use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::{
    Boundary, DeviceMesh, Error, Halo, IndexBox, Layout, Partial, Placement, Result, Shard,
    ShardTensor,
};

pub use cases::{Bump, Case, DAY, Flow};
pub use config::{Config, Dynamics, Planet, Topography};
pub use filter::PolarFilter;
pub use grid::Grid;
pub use jets::{Jet, Vortex};
pub use scheme::CHANNELS;

use filter::Filter;
use metrics::Metrics;
use scheme::Block;

const NAME: &str = "ShallowWater";
// Dims of a state.
const STATES: usize = 0;
const CHANNEL: usize = 1;
const LATITUDE: usize = 2;
const LONGITUDE: usize = 3;

/// Solver of the shallow-water equations on one rank's part of the grid; the [module](self) has an
/// example.
#[derive(Clone, Debug)]
pub struct ShallowWater {
    grid: Grid,
    config: Config,
    mesh: DeviceMesh,
    /// Layout of a single state.
    layout: Layout,
    metrics: Metrics,
    filter: Filter,
}

impl ShallowWater {
    /// Creates a solver whose shards are as even as possible.
    ///
    /// # Errors
    /// The solver does not support a placement, see the [module](self); the configuration is out of
    /// range.
    pub fn new(
        grid: Grid,
        mesh: &DeviceMesh,
        placements: &[Placement],
        config: Config,
    ) -> Result<Self> {
        let shape = [1, CHANNELS.len(), grid.rows(), grid.columns()];
        let layout = Layout::new(mesh.shape(), &shape, placements)?;
        Self::with_layout(grid, mesh, layout, config)
    }

    /// Sets the extents of latitude (dim 2) or longitude (dim 3).
    ///
    /// # Errors
    /// The dim is another one; the extents are not one per part, or do not sum to the dim's size.
    pub fn with_extents(self, dim: usize, extents: &[usize]) -> Result<Self> {
        if dim != LATITUDE && dim != LONGITUDE {
            let message = format!("extents of dim {dim}; expected latitude (2) or longitude (3)");
            return Err(Error::operator(NAME, message));
        }
        let layout = self.layout.with_extents(dim, extents)?;
        Self::with_layout(self.grid, &self.mesh, layout, self.config)
    }

    fn with_layout(grid: Grid, mesh: &DeviceMesh, layout: Layout, config: Config) -> Result<Self> {
        check_placements(&layout, &config)?;
        check_config(&config)?;
        let cells = local_cells(&layout, mesh);
        let rows = &cells.ranges()[0];
        let device = device(mesh);
        Ok(Self {
            metrics: Metrics::new(&grid, &config, &cells, config.dtype, &device),
            filter: Filter::new(&grid, config.filter, rows, config.dtype, &device),
            mesh: mesh.clone(),
            grid,
            config,
            layout,
        })
    }

    /// Returns the grid.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Samples the initial state of a standard test case, `[1, 3, rows, columns]`, without
    /// communication.
    ///
    /// # Errors
    /// Same as [`states`](Self::states).
    pub fn initial(&self, case: Case) -> Result<ShardTensor<4>> {
        self.states(&[case.flow(&self.config.planet)])
    }

    /// Samples states from functions of position, `[flows, 3, rows, columns]`; each rank samples
    /// its own cells.
    ///
    /// # Errors
    /// There are no flows.
    pub fn states<F: Flow>(&self, flows: &[F]) -> Result<ShardTensor<4>> {
        if flows.is_empty() {
            return Err(Error::operator(NAME, "0 flows; expected at least one"));
        }
        let layout = self.layout_of(flows.len())?;
        let cells = layout.local_box(self.mesh.position());
        let [states, _, rows, columns] = [0, 1, 2, 3].map(|dim| cells.ranges()[dim].clone());
        let grid = &self.grid;
        let mut values = Vec::with_capacity(cells.volume());
        for flow in &flows[states] {
            let mut fill = |value: &dyn Fn(usize, usize) -> f64| {
                for row in rows.clone() {
                    values.extend(columns.clone().map(|column| value(row, column)));
                }
            };
            let centre = |row: usize| grid.centre(row as isize);
            let longitude = |column: usize| grid.longitude(column as f64);
            fill(&|row, column| flow.depth(centre(row), longitude(column)));
            fill(&|row, column| flow.wind(centre(row), grid.longitude(column as f64 + 0.5))[0]);
            fill(&|row, column| {
                let south = row as isize + 1;
                if south == grid.rows() as isize {
                    return 0.0; // the pole
                }
                flow.wind(grid.face(south), longitude(column))[1]
            });
        }
        let data = TensorData::new(values, cells.shape());
        let local = Tensor::from_data(data, (&device(&self.mesh), self.config.dtype));
        Ok(ShardTensor::from_parts(local, layout, self.mesh.clone()))
    }

    /// Computes the state after one time step of `seconds`.
    ///
    /// # Errors
    /// The tensor is not a state of this solver; communication fails.
    pub fn step(&self, state: &ShardTensor<4>, seconds: f64) -> Result<ShardTensor<4>> {
        self.check_state(state)?;
        let state = state.clone().inner();
        let start = state.local().clone();
        let stage = |slope: &Tensor<4>, seconds: f64| {
            let local = slope.clone().mul_scalar(seconds) + start.clone();
            self.sharded(local, state.layout())
        };
        let first = self.tendency(&state)?;
        let second = self.tendency(&stage(&first, 0.5 * seconds))?;
        let third = self.tendency(&stage(&second, 0.5 * seconds))?;
        let fourth = self.tendency(&stage(&third, seconds))?;
        let slope = (second + third).mul_scalar(2.0) + first + fourth;
        Ok(stage(&slope, seconds / 6.0))
    }

    /// Computes the state after `seconds`, in equal steps no longer than the
    /// [`stable_step`](Self::stable_step) of the initial state.
    ///
    /// # Errors
    /// [`step`](Self::step) or [`stable_step`](Self::stable_step) fails.
    pub fn run(&self, state: ShardTensor<4>, seconds: f64) -> Result<ShardTensor<4>> {
        if !(seconds.is_finite() && seconds >= 0.0) {
            return Err(Error::operator(
                NAME,
                format!("a run of {seconds} s; expected zero or more"),
            ));
        }
        let steps = (seconds / self.stable_step(&state)?).ceil().max(1.0);
        (0..steps as usize).try_fold(state, |state, _| self.step(&state, seconds / steps))
    }

    /// Computes the tendency of a state, `[states, 3, rows, columns]` on this rank.
    fn tendency(&self, state: &ShardTensor<4>) -> Result<Tensor<4>> {
        let metrics = &self.metrics;
        let tendency = match self.config.dynamics {
            Dynamics::Advection => scheme::advection(&with_halo(state, 2)?, metrics),
            Dynamics::ShallowWater => {
                let block = Block::new(&with_halo(state, 1)?, metrics);
                let vorticity = block.vorticity(metrics);
                let tendency = scheme::shallow_water(&block, vorticity.clone(), metrics);
                match self.config.viscosity {
                    0.0 => tendency,
                    viscosity => scheme::diffuse(tendency, &block, vorticity, viscosity, metrics),
                }
            }
        };
        Ok(self.filter.apply(tendency))
    }

    /// Returns the layout of `states` states.
    fn layout_of(&self, states: usize) -> Result<Layout> {
        let mut shape = self.layout.shape().to_vec();
        shape[STATES] = states;
        let layout = Layout::new(self.layout.mesh(), &shape, self.layout.placements())?;
        let layout = layout.with_extents(LATITUDE, self.layout.extents(LATITUDE))?;
        layout.with_extents(LONGITUDE, self.layout.extents(LONGITUDE))
    }

    fn check_state(&self, state: &ShardTensor<4>) -> Result<()> {
        let expected = self.layout_of(state.dims()[STATES])?;
        if *state.layout() != expected || state.local().dtype() != self.config.dtype {
            let (found, dtype) = (state.layout(), state.local().dtype());
            let wanted = self.config.dtype;
            let message =
                format!("a state {found} of {dtype:?}; expected {expected} of {wanted:?}");
            return Err(Error::operator(NAME, message));
        }
        Ok(())
    }

    fn sharded<const D: usize>(&self, local: Tensor<D>, layout: &Layout) -> ShardTensor<D> {
        ShardTensor::from_parts(local, layout.clone(), self.mesh.clone())
    }
}

/// Returns this rank's state with its halo; cells beyond a pole are zero.
fn with_halo(state: &ShardTensor<4>, width: usize) -> Result<Tensor<4>> {
    state.with_halo(&[
        Halo::new(LATITUDE, width, Boundary::Zeros),
        Halo::new(LONGITUDE, width, Boundary::Periodic),
    ])
}

/// Returns this rank's rows and columns.
fn local_cells(layout: &Layout, mesh: &DeviceMesh) -> IndexBox {
    let cells = layout.local_box(mesh.position());
    IndexBox::new(cells.ranges()[LATITUDE..].to_vec())
}

/// Returns this rank's device, without autodiff.
fn device(mesh: &DeviceMesh) -> Device {
    mesh.device().clone().inner()
}

fn check_placements(layout: &Layout, config: &Config) -> Result<()> {
    for (axis, placement) in layout.placements().iter().enumerate() {
        let help = match *placement {
            Shard(CHANNEL) | Partial(_) => "shard states, latitude (dim 2) or longitude (dim 3)",
            Shard(LONGITUDE)
                if config.filter != PolarFilter::Off && layout.extents(LONGITUDE).len() > 1 =>
            {
                "the polar filter needs whole rows: shard latitude (dim 2), or set PolarFilter::Off"
            }
            _ => continue,
        };
        let placement = format!("{placement} on axis \"{}\"", layout.mesh().names()[axis]);
        return Err(Error::placement(NAME, placement, help));
    }
    Ok(())
}

fn check_config(config: &Config) -> Result<()> {
    let message = match config.filter {
        PolarFilter::Poleward(latitude) if !(0.0..90.0).contains(&latitude) => {
            format!("a polar filter from {latitude}°; expected 0° to below 90°")
        }
        _ if config.viscosity.is_nan() || config.viscosity < 0.0 => {
            format!(
                "a viscosity of {} m²/s; expected none or more",
                config.viscosity
            )
        }
        _ => return Ok(()),
    };
    Err(Error::operator(NAME, message))
}
