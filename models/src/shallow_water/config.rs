//! Configuration of the solver.

use burn::tensor::DType;

use super::PolarFilter;

/// Planet, in SI units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planet {
    /// Radius in m.
    pub radius: f64,
    /// Angular velocity in 1/s.
    pub rotation: f64,
    /// Gravity in m/s².
    pub gravity: f64,
    /// Angle between the axis of rotation and the axis of the grid, in radians.
    pub tilt: f64,
}

impl Planet {
    /// Earth, with the constants of Williamson et al. 1992.
    pub const EARTH: Self = Self {
        radius: 6.371_22e6,
        rotation: 7.292e-5,
        gravity: 9.806_16,
        tilt: 0.0,
    };

    /// Returns the Coriolis parameter, in 1/s, at a latitude and a longitude in radians.
    pub fn coriolis(&self, latitude: f64, longitude: f64) -> f64 {
        2.0 * self.rotation * sine_from_axis(self.tilt, latitude, longitude)
    }
}

/// Sine of the latitude about an axis tilted against the grid's.
pub(super) fn sine_from_axis(tilt: f64, latitude: f64, longitude: f64) -> f64 {
    latitude.sin() * tilt.cos() - longitude.cos() * latitude.cos() * tilt.sin()
}

/// Fields that evolve in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dynamics {
    /// Depth and wind, by the shallow-water equations.
    ShallowWater,
    /// Depth only, advected by the wind of the initial state.
    Advection,
}

/// Shape of the ground.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Topography {
    /// Cone of Williamson's case 5: 2000 m high, 20° in radius, at 30° N 270° E.
    Mountain,
}

impl Topography {
    /// Returns the height of the ground, in m, at a latitude and a longitude in radians.
    pub fn height(self, latitude: f64, longitude: f64) -> f64 {
        use std::f64::consts::{PI, TAU};
        let Self::Mountain = self;
        let east = longitude.rem_euclid(TAU) - 1.5 * PI;
        let north = latitude - PI / 6.0;
        let radius = PI / 9.0;
        let distance = east.hypot(north).min(radius);
        2000.0 * (1.0 - distance / radius)
    }
}

/// Configuration of a [`ShallowWater`](super::ShallowWater) solver.
///
/// # Example
/// ```
/// use burn::tensor::DType;
/// use halocline_models::shallow_water::{Case, Config, PolarFilter};
///
/// let config = Config {
///     filter: PolarFilter::Off,
///     dtype: DType::F64,
///     ..Case::Mountain.config()
/// };
/// assert!(config.topography.is_some());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Planet. Default Earth.
    pub planet: Planet,
    /// Fields that evolve in time. Default both depth and wind.
    pub dynamics: Dynamics,
    /// Shape of the ground. Default flat.
    pub topography: Option<Topography>,
    /// Polar filter. Default poleward of 60°.
    pub filter: PolarFilter,
    /// Viscosity of the wind in m²/s. Default none. Weeks of turbulent flow need some against the
    /// enstrophy that collects at the grid scale, about 1e5 on 32 × 64 cells.
    pub viscosity: f64,
    /// Dtype of states and of all arithmetic. Default f32.
    pub dtype: DType,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            planet: Planet::EARTH,
            dynamics: Dynamics::ShallowWater,
            topography: None,
            filter: PolarFilter::Poleward(60.0),
            viscosity: 0.0,
            dtype: DType::F32,
        }
    }
}
