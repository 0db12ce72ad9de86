//! Zonal jets in balance with the depth: the steady jet of Galewsky et al., and random jets for
//! training.

use std::f64::consts::{FRAC_PI_2, FRAC_PI_4, PI, TAU};
use std::fmt;
use std::sync::Arc;

use halocline_core::{Distribution, IndexBox, RandomKey};

use super::Planet;
use super::cases::{Bump, Flow};

/// Intervals of the quadrature from pole to pole.
const INTERVALS: usize = 2048;

/// Round vortex: a hill or hollow in the depth, with the wind around it.
///
/// The depth is `height exp(−d²/width²)` with the chord `d` to the centre; the wind is geostrophic
/// with the Coriolis parameter of the centre, which must not be the equator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vortex {
    /// Fastest wind in m/s; positive around a hill.
    pub speed: f64,
    /// Latitude and longitude of the centre, in radians.
    pub centre: [f64; 2],
    /// Width in radians.
    pub width: f64,
}

impl Vortex {
    /// Returns depth in m, eastward and northward wind in m/s.
    fn at(&self, planet: &Planet, latitude: f64, longitude: f64) -> [f64; 3] {
        let (sin, cos) = latitude.sin_cos();
        let (sin_centre, cos_centre) = self.centre[0].sin_cos();
        let (sin_apart, cos_apart) = (longitude - self.centre[1]).sin_cos();
        let square = self.width * self.width;
        let chord = 2.0 * (1.0 - sin * sin_centre - cos * cos_centre * cos_apart);
        // The wind is fastest, √2 exp(−½) of its scale, where the chord is width / √2.
        let scale = self.speed / (2.0_f64.sqrt() * (-0.5_f64).exp());
        let shape = scale * (-chord / square).exp();
        let coriolis = planet.coriolis(self.centre[0], self.centre[1]);
        let slope = 2.0 * coriolis.signum() * shape / self.width;
        [
            coriolis.abs() * planet.radius * self.width / planet.gravity * shape,
            -slope * (cos * sin_centre - sin * cos_centre * cos_apart),
            -slope * cos_centre * sin_apart,
        ]
    }
}

/// Zonal wind with the depth that balances it, optionally with bumps and vortices.
#[derive(Clone)]
pub struct Jet {
    wind: Arc<dyn Fn(f64) -> f64 + Send + Sync>,
    planet: Planet,
    /// Depth minus its mean, at the bounds of the intervals from south to north, in m.
    depth: Vec<f64>,
    mean: f64,
    bumps: Vec<Bump>,
    vortices: Vec<Vortex>,
}

impl Jet {
    /// Creates a zonal wind in m/s, as a function of latitude, with a mean depth in m.
    ///
    /// The depth follows from `g ∂h/∂φ = −u (a f + u tan φ)` by quadrature. The wind must vanish at
    /// the poles.
    pub fn new(
        planet: &Planet,
        mean: f64,
        wind: impl Fn(f64) -> f64 + Send + Sync + 'static,
    ) -> Self {
        let mut jet = Self {
            wind: Arc::new(wind),
            planet: *planet,
            depth: vec![0.0],
            mean,
            bumps: Vec::new(),
            vortices: Vec::new(),
        };
        for interval in 0..INTERVALS {
            let rise = jet.rise(bound(interval), bound(interval + 1));
            jet.depth.push(jet.depth[interval] + rise);
        }
        let mean: f64 = (0..INTERVALS)
            .map(|i| {
                let share = 0.5 * (bound(i + 1).sin() - bound(i).sin());
                share * 0.5 * (jet.depth[i] + jet.depth[i + 1])
            })
            .sum();
        jet.depth.iter_mut().for_each(|depth| *depth -= mean);
        jet
    }

    /// Creates the jet of Galewsky et al. 2004: 80 m/s between 25.7° N and 64.3° N, in water of 10
    /// km mean depth.
    pub fn galewsky(planet: &Planet) -> Self {
        let (south, north) = (PI / 7.0, FRAC_PI_2 - PI / 7.0);
        let scale = (-4.0 / (north - south).powi(2)).exp();
        Self::new(planet, 10_000.0, move |latitude| {
            if latitude > south && latitude < north {
                80.0 / scale * (1.0 / ((latitude - south) * (latitude - north))).exp()
            } else {
                0.0
            }
        })
    }

    /// Adds the bump of Galewsky et al., which makes the jet roll up.
    #[must_use]
    pub fn with_galewsky_bump(self) -> Self {
        self.with_bump(Bump {
            height: 120.0,
            centre: [FRAC_PI_4, 0.0],
            widths: [1.0 / 15.0, 1.0 / 3.0],
        })
    }

    /// Adds a bump in the depth.
    #[must_use]
    pub fn with_bump(mut self, bump: Bump) -> Self {
        self.bumps.push(bump);
        self
    }

    /// Adds a vortex.
    #[must_use]
    pub fn with_vortex(mut self, vortex: Vortex) -> Self {
        self.vortices.push(vortex);
        self
    }

    /// Creates random states for training: each hemisphere has a jet of 20 to 60 m/s at 30° to 55°
    /// and five vortices of up to 30 m/s, in water of 8 to 10 km mean depth.
    ///
    /// States depend only on the key, and so are the same on any mesh.
    pub fn random(key: RandomKey, states: usize, planet: &Planet) -> Vec<Self> {
        const VORTICES: usize = 5;
        const NUMBERS: usize = 1 + 2 * (3 + 4 * VORTICES);
        let shape = [states, NUMBERS];
        let unit = Distribution::Uniform(0.0, 1.0);
        let numbers = key.fill(unit, &shape, &IndexBox::whole(&shape));
        let jet = |numbers: &[f32]| {
            let mut numbers = numbers.iter().map(|&number| f64::from(number));
            let mut between = |low: f64, high: f64| {
                low + (high - low) * numbers.next().expect("as many numbers as are drawn")
            };
            let mean = between(8_000.0, 10_000.0);
            let hemispheres = [1.0, -1.0];
            let streams = hemispheres.map(|hemisphere: f64| {
                let speed = between(20.0, 60.0);
                let latitude = hemisphere * between(30.0, 55.0).to_radians();
                (speed, latitude, between(6.0, 12.0).to_radians())
            });
            let wind = move |point: f64| {
                let stream = |(speed, latitude, width): (f64, f64, f64)| {
                    let offset = (point - latitude) / width;
                    speed * point.cos() / latitude.cos() * (-0.5 * offset * offset).exp()
                };
                streams.into_iter().map(stream).sum::<f64>()
            };
            let places = hemispheres
                .into_iter()
                .flat_map(|hemisphere| [hemisphere; VORTICES]);
            places.fold(Self::new(planet, mean, wind), |jet, hemisphere| {
                let latitude = hemisphere * between(25.0, 70.0).to_radians();
                jet.with_vortex(Vortex {
                    speed: between(-30.0, 30.0),
                    centre: [latitude, between(0.0, TAU)],
                    width: between(0.12, 0.3),
                })
            })
        };
        numbers.chunks_exact(NUMBERS).map(jet).collect()
    }

    /// Computes the rise of the depth from `south` to `north`, by three-point Gauss quadrature.
    fn rise(&self, south: f64, north: f64) -> f64 {
        let Planet {
            radius, gravity, ..
        } = self.planet;
        let (middle, half) = (0.5 * (south + north), 0.5 * (north - south));
        let slope = |offset: f64| {
            let latitude = middle + half * offset;
            let wind = (self.wind)(latitude);
            let coriolis = 2.0 * self.planet.rotation * latitude.sin();
            -wind * (radius * coriolis + wind * latitude.tan()) / gravity
        };
        let node = 0.6_f64.sqrt();
        half * (5.0 * (slope(-node) + slope(node)) + 8.0 * slope(0.0)) / 9.0
    }

    /// Returns depth and wind of each vortex.
    fn vortices_at(&self, latitude: f64, longitude: f64) -> impl Iterator<Item = [f64; 3]> {
        let vortices = self.vortices.iter();
        vortices.map(move |vortex| vortex.at(&self.planet, latitude, longitude))
    }
}

/// Southern bound of an interval.
fn bound(interval: usize) -> f64 {
    PI * interval as f64 / INTERVALS as f64 - FRAC_PI_2
}

impl Flow for Jet {
    fn depth(&self, latitude: f64, longitude: f64) -> f64 {
        let interval = ((latitude + FRAC_PI_2) / PI * INTERVALS as f64) as usize;
        let interval = interval.min(INTERVALS - 1);
        let balanced = self.depth[interval] + self.rise(bound(interval), latitude);
        let bumps = self.bumps.iter().map(|bump| bump.at(latitude, longitude));
        let vortices = self.vortices_at(latitude, longitude);
        let vortices = vortices.map(|[depth, ..]| depth);
        self.mean + balanced + bumps.sum::<f64>() + vortices.sum::<f64>()
    }

    fn wind(&self, latitude: f64, longitude: f64) -> [f64; 2] {
        let zonal = [(self.wind)(latitude), 0.0];
        let vortices = self.vortices_at(latitude, longitude);
        vortices.fold(zonal, |[east, north], [_, u, v]| [east + u, north + v])
    }
}

impl fmt::Debug for Jet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jet")
            .field("planet", &self.planet)
            .field("mean", &self.mean)
            .field("bumps", &self.bumps)
            .field("vortices", &self.vortices)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_depth_balances_a_solid_body_wind() {
        // The balance is known: −(a Ω u₀ + u₀²/2) sin²φ / g.
        let planet = Planet::EARTH;
        let jet = Jet::new(&planet, 5000.0, |latitude| 40.0 * latitude.cos());
        let head = 40.0 * (planet.radius * planet.rotation + 20.0) / planet.gravity;
        for latitude in [-1.5, -0.4, 0.0, 0.7, 1.57_f64] {
            let expected = 5000.0 + head * (1.0 / 3.0 - latitude.sin().powi(2));
            let depth = jet.depth(latitude, 1.0);
            assert!(
                (depth - expected).abs() < 1e-3,
                "{latitude}: {depth}, expected {expected}"
            );
        }
    }

    #[test]
    fn the_jet_is_80_metres_per_second_at_45_degrees() {
        let jet = Jet::galewsky(&Planet::EARTH);
        assert!((jet.wind(FRAC_PI_4, 0.0)[0] - 80.0).abs() < 1e-10);
        assert_eq!(jet.wind(0.4, 0.0), [0.0, 0.0]);
        let bump =
            jet.clone().with_galewsky_bump().depth(FRAC_PI_4, TAU) - jet.depth(FRAC_PI_4, 0.0);
        assert!((bump - 120.0 * FRAC_PI_4.cos()).abs() < 1e-9, "{bump}");
    }

    #[test]
    fn the_wind_of_a_vortex_is_geostrophic() {
        let planet = Planet::EARTH;
        let (width, centre) = (0.2, [-0.8, 3.0]);
        let vortex = Vortex {
            speed: 20.0,
            centre,
            width,
        };
        let factor = planet.gravity / planet.coriolis(centre[0], centre[1]) / planet.radius;
        let mut fastest: f64 = 0.0;
        for (north, east) in [
            (0.0, 0.14),
            (0.0, -0.2),
            (0.1, 0.1),
            (-0.3, 0.0),
            (-0.14142, 0.0),
        ] {
            let (latitude, longitude) = (centre[0] + north, centre[1] + east);
            let depth = |north, east| vortex.at(&planet, latitude + north, longitude + east)[0];
            let step = 1e-5;
            let slope_north = (depth(step, 0.0) - depth(-step, 0.0)) / (2.0 * step);
            let slope_east = (depth(0.0, step) - depth(0.0, -step)) / (2.0 * step * latitude.cos());
            let [_, u, v] = vortex.at(&planet, latitude, longitude);
            assert!((u + factor * slope_north).abs() < 1e-6, "{u}");
            assert!((v - factor * slope_east).abs() < 1e-6, "{v}");
            fastest = fastest.max(u.hypot(v));
        }
        assert!((fastest - 20.0).abs() < 0.2, "{fastest}");
    }

    #[test]
    fn random_states_differ_and_depend_on_the_key_only() {
        let planet = Planet::EARTH;
        let depths = |seed| -> Vec<f64> {
            let jets = Jet::random(RandomKey::new(seed, "states"), 3, &planet);
            jets.iter().map(|jet| jet.depth(0.3, 2.0)).collect()
        };
        assert_eq!(depths(1), depths(1));
        assert_ne!(depths(1), depths(2));
        assert_ne!(depths(1)[0], depths(1)[1]);
        assert!(
            depths(1)
                .iter()
                .all(|depth| (5_000.0..12_000.0).contains(depth))
        );
    }
}
