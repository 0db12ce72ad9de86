//! Cells and weights of interpolation in one dim, as pure functions.

use std::f64::consts::PI;
use std::ops::Range;

use halocline_core::Boundary;

use crate::driver::sampling::{DimMap, TapsAround, areas};

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
    /// The six nearest cells in every dim, weighted by Lanczos' kernel and scaled to a sum of one:
    /// burn's `Lanczos`. Cells beyond an end do not count.
    Lanczos,
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

impl Corners {
    /// The alignment for PyTorch's `align_corners`.
    pub(super) fn aligned(align_corners: bool) -> Self {
        if align_corners {
            Self::Centers
        } else {
            Self::Edges
        }
    }
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

/// Rule of interpolation from one grid to another, over `N` spatial dims.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::resample::{Antialias, Interpolation, Mode};
///
/// // Longitude is periodic.
/// let interpolation = Interpolation::new(Mode::Linear)
///     .with_boundary([Boundary::Replicate, Boundary::Periodic]);
/// assert_eq!(interpolation.antialias, Antialias::Off);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Interpolation<const N: usize> {
    /// Kernel of the interpolation.
    pub mode: Mode,
    /// Alignment of the grids, for linear, cubic and Lanczos interpolation.
    pub corners: Corners,
    /// Antialiasing, for linear and cubic interpolation.
    pub antialias: Antialias,
    /// Values beyond the field, per dim: [`Replicate`](Boundary::Replicate) as in PyTorch, where
    /// the last cell counts for those beyond it, and with antialiasing the cells of the field count
    /// alone; or [`Periodic`](Boundary::Periodic).
    pub boundary: [Boundary; N],
}

impl<const N: usize> Interpolation<N> {
    /// Creates an interpolation between cells that are areas, without antialiasing and without
    /// periodic dims.
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            corners: Corners::default(),
            antialias: Antialias::default(),
            boundary: [Boundary::Replicate; N],
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

    /// Sets the values beyond the field.
    #[must_use]
    pub fn with_boundary(self, boundary: [Boundary; N]) -> Self {
        Self { boundary, ..self }
    }

    /// Returns the map from a spatial dim of `size` cells to `outputs` cells.
    pub(super) fn map(&self, spatial: usize, size: usize, outputs: usize) -> DimMap {
        let dim = spatial + 2;
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
        // Cells that count; a periodic dim continues beyond its ends.
        let field = match self.boundary[spatial] {
            Boundary::Periodic => isize::MIN..isize::MAX,
            _ => 0..size as isize,
        };
        let single = |cell: usize| vec![(cell.min(size - 1) as isize, 1.0)];
        let each = |taps: &dyn Fn(usize) -> TapsAround| {
            DimMap::around(dim, (0..outputs).map(taps).collect())
        };
        match (self.mode, self.antialias) {
            (Mode::Area, _) => DimMap::new(dim, areas(size, outputs)),
            (Mode::Nearest, _) => each(&|output| single(output * size / outputs)),
            (Mode::NearestExact, _) => {
                each(&|output| single((2 * output + 1) * size / (2 * outputs)))
            }
            (Mode::Linear, Antialias::On) => {
                each(&|output| smooth(output, &field, scale, 1.0, triangle))
            }
            (Mode::Cubic, Antialias::On) => {
                each(&|output| smooth(output, &field, scale, 2.0, |x| keys(x, -0.5)))
            }
            (Mode::Linear, Antialias::Off) => each(&|output| {
                let place = place(output).max(field.start as f64);
                nearest(place, &field, 1, triangle)
            }),
            (Mode::Cubic, Antialias::Off) => {
                each(&|output| nearest(place(output), &field, 2, |x| keys(x, -0.75)))
            }
            (Mode::Lanczos, _) => each(&|output| lanczos_taps(place(output), &field)),
        }
    }
}

/// Weights of the `2·reach` nearest cells; those beyond an end of the field count for its last
/// cell.
fn nearest(
    place: f64,
    field: &Range<isize>,
    reach: isize,
    kernel: impl Fn(f64) -> f64,
) -> TapsAround {
    let before = place.floor() as isize;
    let mut taps = TapsAround::new();
    for cell in before + 1 - reach..before + 1 + reach {
        let weight = kernel(place - cell as f64);
        let cell = cell.clamp(field.start, field.end - 1);
        match taps.last_mut().filter(|(last, _)| *last == cell) {
            Some((_, sum)) => *sum += weight,
            None => taps.push((cell, weight)),
        }
    }
    reaching(taps)
}

/// Weights of the six nearest cells under Lanczos' kernel, of which those of the field count.
fn lanczos_taps(place: f64, field: &Range<isize>) -> TapsAround {
    let before = place.floor() as isize;
    let cells = (before - 2..before + 4).filter(|cell| field.contains(cell));
    let weight = |cell: isize| lanczos(place - cell as f64);
    let total: f64 = cells.clone().map(weight).sum();
    reaching(cells.map(|cell| (cell, weight(cell) / total)).collect())
}

/// Weights under a kernel stretched to the size of a new cell, if that is larger.
fn smooth(
    output: usize,
    field: &Range<isize>,
    scale: f64,
    reach: f64,
    kernel: impl Fn(f64) -> f64,
) -> TapsAround {
    let stretch = scale.max(1.0);
    let center = scale * (output as f64 + 0.5);
    let bound = |edge: f64| ((edge + 0.5).floor() as isize).clamp(field.start, field.end);
    let first = bound(center - reach * stretch);
    let end = bound(center + reach * stretch);
    let end = end.max(first + 1).min(field.end);
    let first = first.min(end - 1);
    let weight = |cell: isize| kernel((cell as f64 - center + 0.5) / stretch);
    let total: f64 = (first..end).map(weight).sum();
    reaching(
        (first..end)
            .map(|cell| (cell, weight(cell) / total))
            .collect(),
    )
}

/// Drops taps of weight zero, keeping at least one tap.
fn reaching(mut taps: TapsAround) -> TapsAround {
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

/// Lanczos' kernel: a sinc function, in the window of a sinc function three times as wide.
fn lanczos(x: f64) -> f64 {
    let sinc = |x: f64| {
        if x == 0.0 {
            1.0
        } else {
            (PI * x).sin() / (PI * x)
        }
    };
    if x.abs() < 3.0 {
        sinc(x) * sinc(x / 3.0)
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sampling::Taps;

    const MODES: [Mode; 6] = [
        Mode::Nearest,
        Mode::NearestExact,
        Mode::Linear,
        Mode::Cubic,
        Mode::Lanczos,
        Mode::Area,
    ];

    /// Weights of all cells in each output.
    fn weights(rule: Interpolation<1>, size: usize, outputs: usize) -> Vec<Vec<f64>> {
        let map = rule.map(0, size, outputs).wrapped(size);
        let dense = |taps: &Taps| {
            let mut weights = vec![0.0; size];
            for (cell, weight) in taps {
                weights[*cell] += weight;
            }
            weights
        };
        map.iter().map(dense).collect()
    }

    fn rules() -> impl Iterator<Item = Interpolation<1>> {
        let each = |mode: Mode| {
            let rule = Interpolation::<1>::new(mode);
            [Antialias::Off, Antialias::On].map(|antialias| rule.with_antialias(antialias))
        };
        MODES.into_iter().flat_map(each)
    }

    #[test]
    fn weights_sum_to_one() {
        for rule in rules() {
            let rules = [
                rule,
                rule.with_corners(Corners::Centers),
                rule.with_boundary([Boundary::Periodic]),
            ];
            for rule in rules {
                for (size, outputs) in [(1, 1), (1, 5), (5, 1), (7, 13), (13, 7), (4, 4)] {
                    let all = weights(rule, size, outputs);
                    assert_eq!(all.len(), outputs);
                    for weights in all {
                        let sum: f64 = weights.iter().sum();
                        assert!(
                            (sum - 1.0).abs() < 1e-12,
                            "{rule:?} {size} {outputs}: {weights:?}"
                        );
                    }
                }
            }
        }
    }

    /// A field that is moved along a periodic dim has outputs that are moved as far.
    #[test]
    fn a_periodic_dim_has_no_seam() {
        for rule in rules() {
            let rule = rule.with_boundary([Boundary::Periodic]);
            for ([size, outputs], [cells, by]) in [
                ([6, 9], [2, 3]),
                ([9, 6], [3, 2]),
                ([8, 2], [4, 1]),
                ([2, 8], [1, 4]),
            ] {
                let all = weights(rule, size, outputs);
                for (output, found) in all.iter().enumerate() {
                    let moved = &all[(output + by) % outputs];
                    for (cell, weight) in found.iter().enumerate() {
                        let off = moved[(cell + cells) % size] - weight;
                        assert!(off.abs() < 1e-12, "{rule:?} {size} {outputs}: {off}");
                    }
                }
            }
        }
    }
}
