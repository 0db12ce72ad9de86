//! A local kernel on every latitude of a grid: a sparse matrix that is the same for all longitudes.

use std::f64::consts::PI;
use std::ops::Range;

use super::basis::Basis;

/// A factor of an input cell in an output cell, which stand at longitudes that differ by `shift`
/// input cells, or more by the output's place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) function: usize,
    pub(super) row: usize,
    pub(super) shift: usize,
    pub(super) factor: f64,
}

/// The grids of a filter: cosines of colatitudes, and weights of the input's.
pub(super) struct Grids<'a> {
    pub(super) cosines: &'a [f64],
    pub(super) weights: &'a [f64],
    pub(super) longitudes: usize,
    pub(super) outputs: &'a [f64],
}

/// The entries of all output rows, by [`Entry::row`] the input row.
pub(super) fn entries(basis: Basis, grids: &Grids<'_>, cutoff: f64) -> Vec<Vec<Entry>> {
    let row = |output: &f64| {
        let mut found = Vec::new();
        let rows = rows(grids.cosines, *output, cutoff);
        for row in rows {
            let quadrature = grids.weights[row] / (2 * grids.longitudes) as f64;
            for shift in 0..grids.longitudes {
                let angle = 2.0 * PI * shift as f64 / grids.longitudes as f64;
                let (radius, direction) = rotated(grids.cosines[row], angle, *output);
                let values = basis.values(radius, direction, cutoff).into_iter();
                found.extend(values.map(|(function, value)| Entry {
                    function,
                    row,
                    shift,
                    factor: value * quadrature,
                }));
            }
        }
        normalised(found, basis.size())
    };
    grids.outputs.iter().map(row).collect()
}

/// The input rows that can lie within the cutoff of an output's.
pub(super) fn rows(cosines: &[f64], output: f64, cutoff: f64) -> Range<usize> {
    let near = |x: &f64| (x.acos() - output.acos()).abs() <= cutoff;
    let first = cosines.iter().position(near).unwrap_or(0);
    let last = cosines.iter().rposition(near);
    first..last.map_or(first, |last| last + 1)
}

/// The distance and direction of a point from the output at longitude zero.
pub(super) fn rotated(cosine: f64, longitude: f64, output: f64) -> (f64, f64) {
    // As in torch-harmonics: in f64 from the colatitudes, normalised.
    let (sine, output_sine) = (cosine.acos().sin(), output.acos().sin());
    let [x, y, z] = [
        output * longitude.cos() * sine - cosine * output_sine,
        longitude.sin() * sine,
        longitude.cos() * output_sine * sine + output * cosine,
    ];
    let length = (x * x + y * y + z * z).sqrt();
    let (x, y, z) = (x / length, y / length, z / length);
    let direction = y.atan2(x);
    let direction = if direction < 0.0 {
        direction + 2.0 * PI
    } else {
        direction
    };
    (z.clamp(-1.0, 1.0).acos(), direction)
}

/// Factors of each function whose magnitudes sum to one.
fn normalised(mut entries: Vec<Entry>, functions: usize) -> Vec<Entry> {
    let mut sums = vec![0.0; functions];
    for entry in &entries {
        sums[entry.function] += entry.factor.abs();
    }
    for entry in &mut entries {
        entry.factor /= sums[entry.function].max(1e-9);
    }
    entries
}

/// The same entries by input row, whose [`Entry::row`] is the output row.
pub(super) fn transposed(entries: &[Vec<Entry>], rows: usize) -> Vec<Vec<Entry>> {
    let mut found = vec![Vec::new(); rows];
    for (output, entries) in entries.iter().enumerate() {
        for entry in entries {
            found[entry.row].push(Entry {
                row: output,
                ..*entry
            });
        }
    }
    found
}
