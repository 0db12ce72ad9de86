//! Basis of local kernels on a disc: piecewise linear functions of radius and angle.

use std::f64::consts::PI;

/// Collocation points of a kernel: `rings` along a diameter, and `angles` around the centre.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Basis {
    pub(super) rings: usize,
    pub(super) angles: usize,
}

impl Basis {
    /// The number of functions.
    pub(super) fn size(self) -> usize {
        self.rings / 2 * self.angles + self.rings % 2
    }

    /// The values of the functions that are not zero outside of their support, at a radius and an angle in
    /// `[0, 2π)`: hats around their collocation points.
    pub(super) fn values(self, radius: f64, angle: f64, cutoff: f64) -> Vec<(usize, f64)> {
        let values = (0..self.size())
            .map(|function| (function, self.value(function, radius, angle, cutoff)));
        values
            .filter_map(|(function, value)| Some((function, value?)))
            .collect()
    }

    fn value(self, function: usize, radius: f64, angle: f64, cutoff: f64) -> Option<f64> {
        if radius > cutoff {
            return None;
        }
        let step = 2.0 * cutoff / (self.rings + 1) as f64;
        let odd = self.rings % 2 == 1;
        if self.angles == 1 {
            let ring = function as f64 + if odd { 0.0 } else { 0.5 };
            return hat(radius - ring * step, step);
        }
        let turn = 2.0 * PI / self.angles as f64;
        if odd {
            let Some(outer) = function.checked_sub(1) else {
                return hat(radius, step);
            };
            let ring = (outer / self.angles + 1) as f64;
            let place = (outer % self.angles) as f64 * turn - PI;
            let radial = hat(radius - ring * step, step)?;
            return Some(radial * hat(distance(angle, place), turn)?);
        }
        // Functions of the innermost ring reach beyond the centre.
        let ring = ((function / self.angles) as f64 + 0.5) * step;
        let place = (function % self.angles) as f64 * turn - PI;
        let opposite = if angle >= 0.0 { angle - PI } else { angle + PI };
        let sides = [(radius, angle), (-radius, opposite)].map(|(radius, angle)| {
            let (radial, angular) = (hat(radius - ring, step), hat(distance(angle, place), turn));
            Some(radial? * angular?)
        });
        match sides {
            [None, None] => None,
            [a, b] => Some(a.unwrap_or(0.0) + b.unwrap_or(0.0)),
        }
    }
}

/// `1 − |x|/width` within the width.
fn hat(x: f64, width: f64) -> Option<f64> {
    (x.abs() <= width).then(|| 1.0 - x.abs() / width)
}

/// The distance of two angles.
fn distance(a: f64, b: f64) -> f64 {
    let between = (a - b).abs();
    between.min((2.0 * PI - between).abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_sum_to_one_inside_the_last_collocation_points() {
        for (rings, angles) in [(3, 1), (5, 1), (3, 4), (5, 6), (4, 5)] {
            let basis = Basis { rings, angles };
            let last = 1.0 - 2.0 / (rings + 1) as f64;
            for (part, angle) in [(0.1, 0.2), (0.6, 3.0), (0.99, 5.9)] {
                let values = basis.values(part * last, angle, 1.0);
                let sum: f64 = values.iter().map(|(_, value)| value).sum();
                assert!((sum - 1.0).abs() < 1e-12, "{basis:?} at {part}: {sum}");
            }
            assert!(basis.values(1.1, 0.0, 1.0).is_empty());
        }
    }
}
