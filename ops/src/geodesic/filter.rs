//! Local kernels at every latitude of a grid: a sparse matrix that is the same for all longitudes.

use std::f64::consts::PI;
use std::ops::Range;

use super::basis::{DiscoNorm, Function};

/// Factor of an input cell in the sum of an output cell at longitude zero. `shift` counts
/// longitudes of the input; for other output cells it starts at their own longitude.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) function: usize,
    pub(super) row: usize,
    pub(super) shift: usize,
    pub(super) factor: f64,
}

/// Grids of a filter as cosines of colatitudes, with the radius of the kernels.
pub(super) struct Grids<'a> {
    pub(super) cosines: &'a [f64],
    /// Number of longitudes of the input.
    pub(super) longitudes: usize,
    pub(super) outputs: &'a [f64],
    pub(super) radius: f64,
    /// Distance within which cells belong to a kernel, slightly larger than the radius.
    pub(super) cutoff: f64,
}

/// Entries by output row; their [rows](Entry::row) are input rows. `weights` are the quadrature
/// weights of the input rows.
pub(super) fn entries(
    functions: &[Function],
    norm: DiscoNorm,
    grids: &Grids<'_>,
    weights: &[f64],
) -> Vec<Vec<Entry>> {
    let mut found = values(functions, grids);
    let areas = areas(weights, grids.longitudes);
    normalise(&mut found, functions, norm, &areas, grids.radius);
    multiply(&mut found, &areas);
    found
}

/// Entries of a transposed filter, from its output to its input, by input row; their
/// [rows](Entry::row) are output rows. `weights` are the quadrature weights of the output rows, and
/// `longitudes` is the number of cells on each.
pub(super) fn transposed_entries(
    functions: &[Function],
    norm: DiscoNorm,
    grids: &Grids<'_>,
    weights: &[f64],
    longitudes: usize,
) -> Vec<Vec<Entry>> {
    let mut found = transposed(&values(functions, grids), grids.cosines.len());
    // A row lists the entries of all its cells together, so its sums are means over its cells with
    // areas by the longitudes of the input.
    let shares = areas(weights, grids.longitudes);
    normalise(&mut found, functions, norm, &shares, grids.radius);
    multiply(&mut found, &areas(weights, longitudes));
    found
}

/// Area of one cell on each row, as a fraction of the sphere.
fn areas(weights: &[f64], longitudes: usize) -> Vec<f64> {
    let areas = weights
        .iter()
        .map(|weight| weight / (2 * longitudes) as f64);
    areas.collect()
}

fn multiply(rows: &mut [Vec<Entry>], areas: &[f64]) {
    for entry in rows.iter_mut().flatten() {
        entry.factor *= areas[entry.row];
    }
}

/// Entries by output row, whose factors are the values of the functions.
fn values(functions: &[Function], grids: &Grids<'_>) -> Vec<Vec<Entry>> {
    let row = |output: &f64| {
        let mut found = Vec::new();
        for row in rows(grids.cosines, *output, grids.cutoff) {
            for shift in 0..grids.longitudes {
                let angle = 2.0 * PI * shift as f64 / grids.longitudes as f64;
                let (radius, direction) = rotated(grids.cosines[row], angle, *output);
                if radius > grids.cutoff {
                    continue;
                }
                let values = functions.iter().enumerate().map(|(number, function)| {
                    let factor = function.value(radius / grids.cutoff, direction)?;
                    Some(Entry {
                        function: number,
                        row,
                        shift,
                        factor,
                    })
                });
                found.extend(values.flatten());
            }
        }
        found
    };
    grids.outputs.iter().map(row).collect()
}

/// Input rows that can lie within the cutoff of an output row.
pub(super) fn rows(cosines: &[f64], output: f64, cutoff: f64) -> Range<usize> {
    let near = |x: &f64| (x.acos() - output.acos()).abs() <= cutoff;
    let first = cosines.iter().position(near).unwrap_or(0);
    let last = cosines.iter().rposition(near);
    first..last.map_or(first, |last| last + 1)
}

/// Distance and direction of a point from the output cell at longitude zero.
pub(super) fn rotated(cosine: f64, longitude: f64, output: f64) -> (f64, f64) {
    // As in torch-harmonics: in f64 from the colatitudes, normalized.
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

/// Divides the factors of each function by its norm. `areas` holds the area of one cell on each
/// row that entries name.
fn normalise(
    rows: &mut [Vec<Entry>],
    functions: &[Function],
    norm: DiscoNorm,
    areas: &[f64],
    radius: f64,
) {
    /// Lower bound on norms.
    const LEAST: f64 = 1e-9;
    let sums = |entries: &[Entry], value: fn(&Entry) -> f64| {
        let mut sums = vec![0.0; functions.len()];
        for entry in entries {
            sums[entry.function] += value(entry) * areas[entry.row];
        }
        sums
    };
    let area: fn(&Entry) -> f64 = |_| 1.0;
    let magnitude: fn(&Entry) -> f64 = |entry| entry.factor.abs();
    if norm == DiscoNorm::Modal {
        for entries in &mut *rows {
            let (values, areas) = (sums(entries, |entry| entry.factor), sums(entries, area));
            for entry in entries {
                let function = entry.function;
                if !functions[function].is_isotropic() && areas[function] > LEAST {
                    entry.factor -= values[function] / areas[function];
                }
            }
        }
    }
    let norms: Vec<Vec<f64>> = match norm {
        DiscoNorm::Nodal | DiscoNorm::Modal => {
            rows.iter().map(|row| sums(row, magnitude)).collect()
        }
        DiscoNorm::Support => rows.iter().map(|row| sums(row, area)).collect(),
        DiscoNorm::Mean => {
            let mut mean = vec![0.0; functions.len()];
            for row in &*rows {
                for (mean, sum) in mean.iter_mut().zip(sums(row, magnitude)) {
                    *mean += sum / rows.len() as f64;
                }
            }
            vec![mean; rows.len()]
        }
        DiscoNorm::Geometric => {
            vec![vec![(1.0 - radius.cos()) / 4.0; functions.len()]; rows.len()]
        }
        DiscoNorm::None => return,
    };
    for (entries, norms) in rows.iter_mut().zip(norms) {
        for entry in entries {
            entry.factor /= norms[entry.function].max(LEAST);
        }
    }
}

/// The same entries by the rows that they name, of which there are `rows`; their [`Entry::row`] is
/// the row that listed them.
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
