//! Standard test cases: D. Williamson et al., *A standard test set for numerical approximations to
//! the shallow water equations in spherical geometry*, J. Comput. Phys. 102 (1992) 211; J.
//! Galewsky, R. Scott, L. Polvani, *An initial-value problem for testing numerical models of the
//! global shallow-water equations*, Tellus 56A (2004) 429.

use std::f64::consts::{PI, TAU};

use super::config::sine_from_axis;
use super::{Config, Dynamics, Jet, Planet, Topography};

/// Seconds in a day.
pub const DAY: f64 = 86_400.0;

/// Depth and wind as functions of position, from which states are sampled. Angles are in radians.
pub trait Flow: Send + Sync {
    /// Returns the depth of the water in m.
    fn depth(&self, latitude: f64, longitude: f64) -> f64;

    /// Returns the eastward and northward wind in m/s.
    fn wind(&self, latitude: f64, longitude: f64) -> [f64; 2];
}

impl Flow for Box<dyn Flow> {
    fn depth(&self, latitude: f64, longitude: f64) -> f64 {
        (**self).depth(latitude, longitude)
    }

    fn wind(&self, latitude: f64, longitude: f64) -> [f64; 2] {
        (**self).wind(latitude, longitude)
    }
}

/// Standard test case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Case {
    /// Williamson 1: a cosine bell carried once around the sphere in 12 days, at an angle to the
    /// equator in radians.
    CosineBell(f64),
    /// Williamson 2: a steady flow about an axis tilted against the grid's, by an angle in radians;
    /// the planet rotates about the tilted axis.
    SteadyFlow(f64),
    /// Williamson 5: zonal flow over a mountain.
    Mountain,
    /// Williamson 6: Rossby–Haurwitz wave of wavenumber 4.
    RossbyHaurwitz,
    /// Steady jet of Galewsky et al.
    SteadyJet,
    /// Jet of Galewsky et al. with a bump in the depth, which makes it roll up within six days.
    PerturbedJet,
}

impl Case {
    /// Returns the configuration that the case requires.
    pub fn config(self) -> Config {
        let mut config = Config::default();
        match self {
            Self::CosineBell(_) => config.dynamics = Dynamics::Advection,
            Self::SteadyFlow(angle) => config.planet.tilt = angle,
            Self::Mountain => config.topography = Some(Topography::Mountain),
            Self::RossbyHaurwitz | Self::SteadyJet | Self::PerturbedJet => {}
        }
        config
    }

    /// Returns the initial state on a planet.
    pub fn flow(self, planet: &Planet) -> Box<dyn Flow> {
        let turn_in_12_days = TAU * planet.radius / (12.0 * DAY);
        match self {
            Self::CosineBell(angle) => Box::new(SolidBody {
                planet: *planet,
                speed: turn_in_12_days,
                angle,
                profile: Profile::Bell,
            }),
            Self::SteadyFlow(angle) => Box::new(SolidBody {
                planet: *planet,
                speed: turn_in_12_days,
                angle,
                profile: Profile::Balanced {
                    depth: 2.94e4 / planet.gravity,
                    over: None,
                },
            }),
            Self::Mountain => Box::new(SolidBody {
                planet: *planet,
                speed: 20.0,
                angle: 0.0,
                profile: Profile::Balanced {
                    depth: 5960.0,
                    over: Some(Topography::Mountain),
                },
            }),
            Self::RossbyHaurwitz => Box::new(RossbyHaurwitz { planet: *planet }),
            Self::SteadyJet => Box::new(Jet::galewsky(planet)),
            Self::PerturbedJet => Box::new(Jet::galewsky(planet).with_galewsky_bump()),
        }
    }
}

/// Depth profile for a solid-body wind.
enum Profile {
    /// Cosine bell at 0° N 270° E.
    Bell,
    /// Depth in balance with the wind, over the ground.
    Balanced {
        depth: f64,
        over: Option<Topography>,
    },
}

/// Wind of solid-body rotation.
struct SolidBody {
    planet: Planet,
    speed: f64,
    angle: f64,
    profile: Profile,
}

impl Flow for SolidBody {
    fn depth(&self, latitude: f64, longitude: f64) -> f64 {
        match self.profile {
            Profile::Bell => {
                let distance = (latitude.cos() * (longitude - 1.5 * PI).cos())
                    .clamp(-1.0, 1.0)
                    .acos();
                let radius = 1.0 / 3.0;
                if distance < radius {
                    500.0 * (1.0 + (PI * distance / radius).cos())
                } else {
                    0.0
                }
            }
            Profile::Balanced { depth, over } => {
                let Planet {
                    radius,
                    rotation,
                    gravity,
                    ..
                } = self.planet;
                let head = self.speed * (radius * rotation + 0.5 * self.speed) / gravity;
                let sine = sine_from_axis(self.angle, latitude, longitude);
                let ground = over.map_or(0.0, |ground| ground.height(latitude, longitude));
                depth - head * sine * sine - ground
            }
        }
    }

    fn wind(&self, latitude: f64, longitude: f64) -> [f64; 2] {
        let (sin, cos) = self.angle.sin_cos();
        let east = latitude.cos() * cos + latitude.sin() * longitude.cos() * sin;
        [self.speed * east, -self.speed * longitude.sin() * sin]
    }
}

struct RossbyHaurwitz {
    planet: Planet,
}

impl RossbyHaurwitz {
    /// Angular velocity of the zonal flow and amplitude of the wave, both in 1/s.
    const SPEED: f64 = 7.848e-6;
    const WAVENUMBER: f64 = 4.0;
    const DEPTH: f64 = 8000.0;
}

impl Flow for RossbyHaurwitz {
    fn depth(&self, latitude: f64, longitude: f64) -> f64 {
        let Planet {
            radius,
            rotation,
            gravity,
            ..
        } = self.planet;
        let (w, k, r) = (Self::SPEED, Self::SPEED, Self::WAVENUMBER);
        let cos = latitude.cos();
        let square = cos * cos;
        let even = 0.5 * w * (2.0 * rotation + w) * square
            + 0.25
                * k
                * k
                * cos.powf(2.0 * r - 2.0)
                * ((r + 1.0) * square * square + (2.0 * r * r - r - 2.0) * square - 2.0 * r * r);
        let single = 2.0 * (rotation + w) * k / ((r + 1.0) * (r + 2.0))
            * cos.powf(r)
            * ((r * r + 2.0 * r + 2.0) - (r + 1.0).powi(2) * square);
        let double = 0.25 * k * k * cos.powf(2.0 * r) * ((r + 1.0) * square - (r + 2.0));
        let wave = even + single * (r * longitude).cos() + double * (2.0 * r * longitude).cos();
        Self::DEPTH + radius * radius / gravity * wave
    }

    fn wind(&self, latitude: f64, longitude: f64) -> [f64; 2] {
        let (speed, r) = (self.planet.radius * Self::SPEED, Self::WAVENUMBER);
        let (sin, cos) = latitude.sin_cos();
        let power = speed * cos.powf(r - 1.0);
        [
            speed * cos + power * (r * sin * sin - cos * cos) * (r * longitude).cos(),
            -power * r * sin * (r * longitude).sin(),
        ]
    }
}

/// Bump in the depth: `height cos φ exp(−(λ − λ₀)²/α²) exp(−(φ − φ₀)²/β²)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bump {
    /// Height in m.
    pub height: f64,
    /// Latitude φ₀ and longitude λ₀ of the centre, in radians.
    pub centre: [f64; 2],
    /// Widths β and α in latitude and longitude, in radians.
    pub widths: [f64; 2],
}

impl Bump {
    pub(super) fn at(&self, latitude: f64, longitude: f64) -> f64 {
        let north = (latitude - self.centre[0]) / self.widths[0];
        let apart = (longitude - self.centre[1] + PI).rem_euclid(TAU) - PI;
        let east = apart / self.widths[1];
        self.height * latitude.cos() * (-north * north - east * east).exp()
    }
}
