//! Latitudes of grids on the sphere and their quadrature weights.

use std::f64::consts::PI;

use halocline_core::{Error, Result};

/// Latitudes of a grid, from north to south. Longitudes are equidistant, starting at zero.
///
/// # Example
/// ```
/// use halocline_ops::SphereGrid;
///
/// let (cosines, weights) = SphereGrid::Lobatto.quadrature(3)?;
/// assert_eq!(cosines, [1.0, 0.0, -1.0]);
/// let simpson = [1.0 / 3.0, 4.0 / 3.0, 1.0 / 3.0];
/// assert!(weights.iter().zip(simpson).all(|(found, expected)| (found - expected).abs() < 1e-15));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SphereGrid {
    /// Gauss–Legendre points: exact for polynomials of degree `2n − 1`; excludes the poles.
    LegendreGauss,
    /// Gauss–Lobatto points: exact for degree `2n − 3`; includes the poles.
    Lobatto,
    /// Equidistant latitudes, poles included, with Clenshaw–Curtis weights: exact for degree
    /// `n − 1`.
    #[default]
    Equiangular,
}

impl SphereGrid {
    /// Returns the cosines of the colatitudes, from 1 down to −1, and the quadrature weights for an
    /// integral over the cosine, which sum to 2.
    ///
    /// # Errors
    /// Fewer points than the rule needs: 1 for Gauss–Legendre, 2 for the others.
    pub fn quadrature(self, size: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let least = match self {
            Self::LegendreGauss => 1,
            Self::Lobatto | Self::Equiangular => 2,
        };
        if size < least {
            let message = format!("{size} latitudes of {self:?}; expected {least} or more");
            return Err(Error::operator("SphereGrid", message));
        }
        let point: fn(usize, usize) -> (f64, f64) = match self {
            Self::LegendreGauss => gauss,
            Self::Lobatto => lobatto,
            Self::Equiangular => clenshaw_curtis,
        };
        // The southern half mirrors the northern one bit for bit.
        let north = (0..size.div_ceil(2)).map(|k| point(k, size));
        let north: Vec<(f64, f64)> = north.collect();
        let south = north[..size / 2].iter().rev();
        let south = south.map(|(cosine, weight)| (-cosine, *weight));
        Ok(north.iter().copied().chain(south).unzip())
    }

    /// Returns the latitudes in degrees, from north to south.
    ///
    /// # Errors
    /// The errors of [`quadrature`](Self::quadrature).
    ///
    /// # Example
    /// ```
    /// use halocline_ops::SphereGrid;
    ///
    /// assert_eq!(SphereGrid::Equiangular.latitudes(3)?, [90.0, 0.0, -90.0]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn latitudes(self, size: usize) -> Result<Vec<f64>> {
        let (cosines, _) = self.quadrature(size)?;
        let latitudes = cosines.iter().map(|cosine| cosine.asin().to_degrees());
        Ok(latitudes.collect())
    }

    /// Number of degrees that a transform resolves by default, by torch-harmonics' rule.
    pub(super) fn degrees(self, size: usize) -> usize {
        match self {
            Self::LegendreGauss => size,
            Self::Lobatto => size - 1,
            Self::Equiangular => size.div_ceil(2),
        }
    }
}

/// `P_n(x)` and `P_{n−1}(x)`.
fn legendre(n: usize, x: f64) -> (f64, f64) {
    (1..=n).fold((1.0, 0.0), |(this, before), k| {
        let k = k as f64;
        (((2.0 * k - 1.0) * x * this - (k - 1.0) * before) / k, this)
    })
}

/// Finds the root near `start` by Newton's method.
fn root(start: f64, step: impl Fn(f64) -> f64) -> f64 {
    let mut x = start;
    for _ in 0..100 {
        let correction = step(x);
        x -= correction;
        if correction.abs() < 1e-16 {
            break;
        }
    }
    x
}

fn gauss(k: usize, size: usize) -> (f64, f64) {
    let n = size as f64;
    let slope = |x: f64| {
        let (this, before) = legendre(size, x);
        (this, n * (x * this - before) / (x * x - 1.0))
    };
    let start = (PI * (k as f64 + 0.75) / (n + 0.5)).cos();
    let x = if 2 * k + 1 == size {
        0.0
    } else {
        root(start, |x| {
            let (value, slope) = slope(x);
            value / slope
        })
    };
    (x, 2.0 / ((1.0 - x * x) * slope(x).1.powi(2)))
}

fn lobatto(k: usize, size: usize) -> (f64, f64) {
    let n = size as f64;
    let start = (PI * k as f64 / (n - 1.0)).cos();
    let x = match k {
        0 => 1.0,
        _ if 2 * k + 1 == size => 0.0,
        _ => root(start, |x| {
            let (this, before) = legendre(size - 1, x);
            (x * this - before) / (n * this)
        }),
    };
    (x, 2.0 / (n * (n - 1.0) * legendre(size - 1, x).0.powi(2)))
}

fn clenshaw_curtis(k: usize, size: usize) -> (f64, f64) {
    let last = size - 1;
    let terms = (1..=last / 2).map(|j| {
        let twice = if 2 * j == last { 1.0 } else { 2.0 };
        let angle = 2.0 * PI * (j * k % last) as f64 / last as f64;
        twice / (4 * j * j - 1) as f64 * angle.cos()
    });
    let share = if k == 0 || k == last { 1.0 } else { 2.0 };
    let weight = share / last as f64 * (1.0 - terms.sum::<f64>());
    let cosine = if 2 * k == last {
        0.0
    } else {
        (PI * k as f64 / last as f64).cos()
    };
    (cosine, weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [SphereGrid; 3] = [
        SphereGrid::LegendreGauss,
        SphereGrid::Lobatto,
        SphereGrid::Equiangular,
    ];

    #[test]
    fn points_and_weights_are_the_known_ones() {
        let near = |found: &[f64], expected: &[f64]| {
            let mut off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
            assert!(off.all(|off| off < 2e-15), "{found:?}");
            assert_eq!(found.len(), expected.len());
        };
        let (x, w) = SphereGrid::LegendreGauss.quadrature(3).unwrap();
        let root = 0.6_f64.sqrt();
        near(&x, &[root, 0.0, -root]);
        near(&w, &[5.0 / 9.0, 8.0 / 9.0, 5.0 / 9.0]);
        let (x, w) = SphereGrid::Lobatto.quadrature(4).unwrap();
        let root = 0.2_f64.sqrt();
        near(&x, &[1.0, root, -root, -1.0]);
        near(&w, &[1.0 / 6.0, 5.0 / 6.0, 5.0 / 6.0, 1.0 / 6.0]);
        let (x, w) = SphereGrid::Equiangular.quadrature(5).unwrap();
        let root = 0.5_f64.sqrt();
        near(&x, &[1.0, root, 0.0, -root, -1.0]);
        let (end, side, middle) = (1.0 / 15.0, 8.0 / 15.0, 4.0 / 5.0);
        near(&w, &[end, side, middle, side, end]);
    }

    #[test]
    fn polynomials_are_integrated_exactly() {
        for grid in ALL {
            for size in [2, 3, 7, 12, 181] {
                let (x, w) = grid.quadrature(size).unwrap();
                let degree = match grid {
                    SphereGrid::LegendreGauss => 2 * size - 1,
                    SphereGrid::Lobatto => 2 * size - 3,
                    SphereGrid::Equiangular => size - 1,
                };
                for power in [0, 1, 2, degree.min(40)]
                    .into_iter()
                    .filter(|p| *p <= degree)
                {
                    let terms = x.iter().zip(&w);
                    let found: f64 = terms.map(|(x, w)| w * x.powi(power as i32)).sum();
                    let expected = (1.0 + f64::from(-1_i8).powi(power as i32)) / (power + 1) as f64;
                    let off = (found - expected).abs();
                    assert!(off < 1e-13, "{grid:?} of {size}, power {power}: {off:e}");
                }
            }
        }
    }

    #[test]
    fn too_few_points_are_told() {
        let error = SphereGrid::Lobatto.quadrature(1).unwrap_err().to_string();
        assert!(
            error.contains("1 latitudes of Lobatto; expected 2 or more"),
            "{error}"
        );
    }
}
