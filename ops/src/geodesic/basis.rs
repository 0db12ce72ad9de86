//! Basis functions on a disc, whose weighted sums form the local kernels.

use std::f64::consts::PI;

use super::disc::{Bessel, Waves, Zernike};

/// Basis functions on a disc for the kernels of a [`Disco`](super::Disco), as in torch-harmonics
/// 0.9. A kernel is their weighted sum.
///
/// # Example
/// ```
/// use halocline_ops::{Disco, DiscoBasis, DiscoNorm, SphereGrid};
///
/// let waves = DiscoBasis::Harmonic([3, 3]).with_norm(DiscoNorm::Mean);
/// let kernels = Disco::new([8, 16], [8, 16], waves, SphereGrid::Equiangular, Some(0.8))?;
/// assert_eq!(kernels.functions(), 9);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiscoBasis {
    /// Hat functions around collocation points: `[rings, angles]`, with rings counted along a
    /// diameter and angles around the centre.
    PiecewiseLinear([usize; 2]),
    /// Products of cosines and sines along two axes under a Hann window, with unit norm; the
    /// numbers of functions of both axes.
    Harmonic([usize; 2]),
    /// [`Harmonic`](Self::Harmonic) without normalization, named `morlet` in torch-harmonics before
    /// 0.9.
    Morlet([usize; 2]),
    /// Zernike polynomials of all degrees below this one, with unit norm.
    Zernike(usize),
    /// Bessel functions that vanish at the radius, times cosines and sines of the angle, with unit
    /// norm and sorted by frequency. For `[zeros, orders]`: the orders `0..=orders`, up to the
    /// frequency of the zero of order zero numbered `zeros`.
    FourierBessel([usize; 2]),
}

impl DiscoBasis {
    /// Combines the basis with a normalization other than [`DiscoNorm::Nodal`].
    #[must_use]
    pub fn with_norm(self, norm: DiscoNorm) -> DiscoKernel {
        DiscoKernel { basis: self, norm }
    }

    /// Lists the functions, or returns the expectation that the numbers violate.
    pub(super) fn functions(self) -> Result<Vec<Function>, &'static str> {
        match self {
            Self::PiecewiseLinear([0, _] | [_, 0]) => Err("one or more rings and angles"),
            Self::PiecewiseLinear([rings, angles]) => Ok((0..rings / 2 * angles + rings % 2)
                .map(|index| Function::Hat(Hat::new(rings, angles, index)))
                .collect()),
            Self::Harmonic([0, _] | [_, 0]) | Self::Morlet([0, _] | [_, 0]) => {
                Err("one or more functions of both axes")
            }
            Self::Harmonic(counts) => Ok(waves(counts, Waves::normalised)),
            Self::Morlet(counts) => Ok(waves(counts, |waves| waves)),
            Self::Zernike(0) => Err("one or more degrees"),
            Self::Zernike(degrees) => Ok(Zernike::below(degrees).map(Function::Zernike).collect()),
            Self::FourierBessel([0, _]) => Err("one or more zeros"),
            Self::FourierBessel([zeros, orders]) => Ok(Bessel::up_to(zeros, orders)
                .into_iter()
                .map(Function::Bessel)
                .collect()),
        }
    }
}

fn waves([down, across]: [usize; 2], norm: impl Fn(Waves) -> Waves) -> Vec<Function> {
    let counts = (0..down).flat_map(|down| (0..across).map(move |across| [down, across]));
    counts
        .map(|counts| Function::Waves(norm(Waves::new(counts))))
        .collect()
}

/// Divisor that normalizes the functions of a [`DiscoBasis`], with the names of torch-harmonics.
/// Sums use the quadrature of the input grid, over the cells that a function reaches from a row of
/// outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DiscoNorm {
    /// Sum of magnitudes, per row.
    #[default]
    Nodal,
    /// Same as `Nodal`, after subtracting the mean from functions that depend on the direction.
    Modal,
    /// Mean over all rows of the sums of magnitudes.
    Mean,
    /// Area of the cells, per row.
    Support,
    /// Half of the fraction of the sphere that the disc covers.
    Geometric,
    /// One: no normalization.
    None,
}

/// Basis functions and normalization of a [`Disco`](super::Disco). Converts from a basis, and from
/// two numbers: rings and angles of [`PiecewiseLinear`](DiscoBasis::PiecewiseLinear).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiscoKernel {
    /// Basis functions.
    pub basis: DiscoBasis,
    /// Normalization of the functions.
    pub norm: DiscoNorm,
}

impl From<[usize; 2]> for DiscoKernel {
    fn from(kernel: [usize; 2]) -> Self {
        DiscoBasis::PiecewiseLinear(kernel).into()
    }
}

impl From<DiscoBasis> for DiscoKernel {
    fn from(basis: DiscoBasis) -> Self {
        basis.with_norm(DiscoNorm::default())
    }
}

/// Function on the unit disc.
#[derive(Clone, Copy, Debug)]
pub(super) enum Function {
    Hat(Hat),
    Waves(Waves),
    Zernike(Zernike),
    Bessel(Bessel),
}

impl Function {
    /// Value at a radius in `[0, 1]` and an angle in `[0, 2π)`; `None` outside the support.
    pub(super) fn value(&self, radius: f64, angle: f64) -> Option<f64> {
        match self {
            Self::Hat(hat) => hat.value(radius, angle),
            Self::Waves(waves) => Some(waves.value(radius, angle)),
            Self::Zernike(polynomial) => Some(polynomial.value(radius, angle)),
            Self::Bessel(function) => Some(function.value(radius, angle)),
        }
    }

    /// Whether the function depends on the radius alone.
    pub(super) fn is_isotropic(&self) -> bool {
        match self {
            Self::Hat(hat) => matches!(hat.angles, Angles::All),
            Self::Waves(waves) => waves.is_isotropic(),
            Self::Zernike(polynomial) => polynomial.order == 0,
            Self::Bessel(function) => function.order == 0,
        }
    }
}

/// Hat function around a ring, or around a point on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hat {
    ring: f64,
    /// Distance between rings.
    step: f64,
    angles: Angles,
}

#[derive(Clone, Copy, Debug)]
enum Angles {
    All,
    /// Angle of the point, and the distance between points.
    Around(f64, f64),
    /// Same for an even number of rings along a diameter, where the innermost hats reach beyond the
    /// centre.
    Across(f64, f64),
}

impl Hat {
    fn new(rings: usize, angles: usize, index: usize) -> Self {
        let step = 2.0 / (rings + 1) as f64;
        let odd = rings % 2 == 1;
        let turn = 2.0 * PI / angles as f64;
        let angle = |place: usize| (place % angles) as f64 * turn - PI;
        let (ring, angles) = match (odd, angles) {
            (true, 1) => (index as f64, Angles::All),
            (false, 1) => (index as f64 + 0.5, Angles::All),
            (true, _) if index == 0 => (0.0, Angles::All),
            (true, _) => (
                ((index - 1) / angles + 1) as f64,
                Angles::Around(angle(index - 1), turn),
            ),
            (false, _) => (
                (index / angles) as f64 + 0.5,
                Angles::Across(angle(index), turn),
            ),
        };
        Self {
            ring: ring * step,
            step,
            angles,
        }
    }

    fn value(&self, radius: f64, angle: f64) -> Option<f64> {
        let radial = |radius: f64| hat(radius - self.ring, self.step);
        match self.angles {
            Angles::All => radial(radius),
            Angles::Around(place, turn) => {
                Some(radial(radius)? * hat(distance(angle, place), turn)?)
            }
            Angles::Across(place, turn) => {
                let opposite = if angle >= 0.0 { angle - PI } else { angle + PI };
                let sides = [(radius, angle), (-radius, opposite)].map(|(radius, angle)| {
                    Some(radial(radius)? * hat(distance(angle, place), turn)?)
                });
                match sides {
                    [None, None] => None,
                    [a, b] => Some(a.unwrap_or(0.0) + b.unwrap_or(0.0)),
                }
            }
        }
    }
}

/// `1 − |x|/width` within the width, `None` outside.
fn hat(x: f64, width: f64) -> Option<f64> {
    (x.abs() <= width).then(|| 1.0 - x.abs() / width)
}

/// Distance between two angles.
fn distance(a: f64, b: f64) -> f64 {
    let between = (a - b).abs();
    between.min((2.0 * PI - between).abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hats_sum_to_one_inside_the_last_collocation_points() {
        for kernel in [[3, 1], [5, 1], [3, 4], [5, 6], [4, 5]] {
            let hats = DiscoBasis::PiecewiseLinear(kernel).functions().unwrap();
            let last = 1.0 - 2.0 / (kernel[0] + 1) as f64;
            for (part, angle) in [(0.1, 0.2), (0.6, 3.0), (0.99, 5.9)] {
                let values = hats.iter().filter_map(|hat| hat.value(part * last, angle));
                let sum: f64 = values.sum();
                assert!((sum - 1.0).abs() < 1e-12, "{kernel:?} at {part}: {sum}");
            }
        }
    }

    #[test]
    fn functions_that_depend_on_the_radius_alone_are_told() {
        let bases = [
            DiscoBasis::PiecewiseLinear([3, 1]),
            DiscoBasis::PiecewiseLinear([5, 4]),
            DiscoBasis::PiecewiseLinear([4, 3]),
            DiscoBasis::Zernike(5),
            DiscoBasis::FourierBessel([3, 4]),
        ];
        for function in bases.iter().flat_map(|basis| basis.functions().unwrap()) {
            let values = [0.3, 1.7, 2.9, 4.4].map(|angle| function.value(0.4, angle));
            let same = values.iter().all(|value| *value == values[0]);
            let reached = values.iter().any(Option::is_some);
            assert!(!reached || same == function.is_isotropic(), "{function:?}");
        }
    }
}
