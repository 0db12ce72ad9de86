//! Cells and weights of interpolation in one dim, as pure functions.

use crate::driver::sampling::{Map, Taps, areas};

/// Kernel that computes a value from the cells around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The cell in which a new cell begins: PyTorch's `nearest`.
    Nearest,
    /// The cell that contains the centre of a new cell: PyTorch's `nearest-exact`.
    NearestExact,
    /// The two nearest cells in every dim: PyTorch's `linear`, `bilinear` and `trilinear`.
    Linear,
    /// The four nearest cells in every dim, weighted by Keys' kernel with `a = −0.75`: PyTorch's
    /// `bicubic`.
    Cubic,
    /// The mean over the area of a new cell: PyTorch's `area`.
    Area,
}

/// Alignment of the two grids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Corners {
    /// The outer edges of the first and last cells coincide; cells are areas:
    /// `align_corners=False`.
    #[default]
    Edges,
    /// The centres of the first and last cells coincide; cells are points: `align_corners=True`.
    Centers,
}

/// Antialiasing when a grid becomes coarser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Antialias {
    /// None: only the nearest cells count.
    #[default]
    Off,
    /// The kernel is widened to the size of a new cell, so all cells in it count. Keys' kernel then
    /// has `a = −0.5`, as in PyTorch.
    On,
}

/// Rule of interpolation from one grid to another.
///
/// # Example
/// ```
/// use halocline_ops::resample::{Antialias, Corners, Interpolation, Mode};
///
/// let interpolation = Interpolation::new(Mode::Linear).with_corners(Corners::Centers);
/// assert_eq!(interpolation.antialias, Antialias::Off);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Interpolation {
    /// Kernel of the interpolation.
    pub mode: Mode,
    /// Alignment of the grids, for linear and cubic interpolation.
    pub corners: Corners,
    /// Antialiasing, for linear and cubic interpolation.
    pub antialias: Antialias,
}

impl Interpolation {
    /// Creates an interpolation between cells that are areas, without antialiasing.
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            corners: Corners::default(),
            antialias: Antialias::default(),
        }
    }

    /// Sets the alignment of the grids.
    #[must_use]
    pub fn with_corners(self, corners: Corners) -> Self {
        Self { corners, ..self }
    }

    /// Sets the antialiasing.
    #[must_use]
    pub fn with_antialias(self, antialias: Antialias) -> Self {
        Self { antialias, ..self }
    }

    /// Returns the map from a dim of `size` cells to one of `outputs` cells.
    pub(super) fn map(&self, size: usize, outputs: usize) -> Map {
        let scale = match self.corners {
            Corners::Edges => size as f64 / outputs as f64,
            Corners::Centers if outputs > 1 => (size - 1) as f64 / (outputs - 1) as f64,
            Corners::Centers => 0.0,
        };
        // Cell centres are at integers.
        let place = |output: usize| match self.corners {
            Corners::Edges => (output as f64 + 0.5) * scale - 0.5,
            Corners::Centers => output as f64 * scale,
        };
        let single = |cell: usize| vec![(cell.min(size - 1), 1.0)];
        let each = |taps: &dyn Fn(usize) -> Taps| -> Map { (0..outputs).map(taps).collect() };
        match (self.mode, self.antialias) {
            (Mode::Area, _) => areas(size, outputs),
            (Mode::Nearest, _) => each(&|output| single(output * size / outputs)),
            (Mode::NearestExact, _) => {
                each(&|output| single((2 * output + 1) * size / (2 * outputs)))
            }
            (Mode::Linear, Antialias::On) => {
                each(&|output| smooth(output, size, scale, 1.0, triangle))
            }
            (Mode::Cubic, Antialias::On) => {
                each(&|output| smooth(output, size, scale, 2.0, |x| keys(x, -0.5)))
            }
            (Mode::Linear, Antialias::Off) => {
                each(&|output| nearest(place(output).max(0.0), size, 1, triangle))
            }
            (Mode::Cubic, Antialias::Off) => {
                each(&|output| nearest(place(output), size, 2, |x| keys(x, -0.75)))
            }
        }
    }
}

/// Weights of the `2·reach` nearest cells; those beyond an end count for the last cell.
fn nearest(place: f64, size: usize, reach: isize, kernel: impl Fn(f64) -> f64) -> Taps {
    let before = place.floor() as isize;
    let mut taps = Taps::new();
    for cell in before + 1 - reach..before + 1 + reach {
        let weight = kernel(place - cell as f64);
        let cell = cell.clamp(0, size as isize - 1) as usize;
        match taps.last_mut().filter(|(last, _)| *last == cell) {
            Some((_, sum)) => *sum += weight,
            None => taps.push((cell, weight)),
        }
    }
    reaching(taps)
}

/// Weights under a kernel stretched to the size of a new cell, if that is larger.
fn smooth(output: usize, size: usize, scale: f64, reach: f64, kernel: impl Fn(f64) -> f64) -> Taps {
    let stretch = scale.max(1.0);
    let center = scale * (output as f64 + 0.5);
    let bound = |edge: f64| ((edge + 0.5) as isize).clamp(0, size as isize) as usize;
    let first = bound(center - reach * stretch);
    let end = bound(center + reach * stretch).max(first + 1).min(size);
    let first = first.min(end - 1);
    let weight = |cell: usize| kernel((cell as f64 - center + 0.5) / stretch);
    let total: f64 = (first..end).map(weight).sum();
    reaching(
        (first..end)
            .map(|cell| (cell, weight(cell) / total))
            .collect(),
    )
}

/// Drops taps of weight zero, keeping at least one tap.
fn reaching(mut taps: Taps) -> Taps {
    if taps.iter().any(|(_, weight)| *weight != 0.0) {
        taps.retain(|(_, weight)| *weight != 0.0);
    }
    taps
}

fn triangle(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// Keys' cubic kernel (R. Keys, "Cubic convolution interpolation for digital image processing",
/// 1981).
fn keys(x: f64, a: f64) -> f64 {
    let x = x.abs();
    match x {
        x if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((x - 5.0) * x + 8.0) * a * x - 4.0 * a,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [Mode; 5] = [
        Mode::Nearest,
        Mode::NearestExact,
        Mode::Linear,
        Mode::Cubic,
        Mode::Area,
    ];

    #[test]
    fn weights_sum_to_one_and_cells_lie_in_the_field() {
        for mode in MODES {
            for corners in [Corners::Edges, Corners::Centers] {
                for antialias in [Antialias::Off, Antialias::On] {
                    let interpolation = Interpolation {
                        mode,
                        corners,
                        antialias,
                    };
                    for (size, outputs) in [(1, 1), (1, 5), (5, 1), (7, 13), (13, 7), (4, 4)] {
                        for taps in interpolation.map(size, outputs) {
                            let sum: f64 = taps.iter().map(|(_, weight)| weight).sum();
                            assert!(
                                (sum - 1.0).abs() < 1e-12,
                                "{interpolation:?} {size} {outputs}: {taps:?}"
                            );
                            assert!(taps.iter().all(|(cell, _)| *cell < size));
                        }
                    }
                }
            }
        }
    }
}
