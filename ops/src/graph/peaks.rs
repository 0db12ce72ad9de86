//! Kernels for the extrema over the edges of each target. NaN is the extremum where it occurs.
//!
//! A task computes a range of rows, so results have the same bits for any number of threads.

use super::part::Part;
use crate::kernel::buffer::Buffer;
use crate::kernel::lines::Lines;
use crate::kernel::simd::Element;
use crate::kernel::taken::rows;

/// Computes the largest edge of each target, or the smallest; zero for a target without edges.
pub(super) fn forward<E: Element>(lines: Lines, x: &[E], part: &Part, least: bool) -> Buffer<E> {
    let Lines { outer, inner, .. } = lines;
    let targets = part.targets();
    rows(
        [outer, targets.len(), inner],
        |outer, chosen, columns, y| {
            for (y, edges) in y.chunks_exact_mut(columns.len()).zip(&targets[chosen]) {
                y.fill(E::default());
                for edge in edges.clone() {
                    let x = &x[lines.row(outer, edge)][columns.clone()];
                    if edge == edges.start {
                        y.copy_from_slice(x);
                        continue;
                    }
                    for (y, x) in y.iter_mut().zip(x) {
                        let beyond = if least { *x < *y } else { *x > *y };
                        *y = if beyond || is_nan(*x) { *x } else { *y };
                    }
                }
            }
        },
    )
}

/// Computes the gradient of the edges: those that hold the extremum of a target share its cotangent
/// equally.
pub(super) fn backward<E: Element>(
    lines: Lines,
    x: &[E],
    part: &Part,
    [extrema, cotangent]: [&[E]; 2],
) -> Buffer<E> {
    let Lines {
        outer,
        cells,
        inner,
    } = lines;
    let targets = part.targets();
    let by_target = Lines {
        outer,
        cells: targets.len(),
        inner,
    };
    let shares = rows(
        [outer, targets.len(), inner],
        |outer, chosen, columns, y| {
            for (shares, target) in y.chunks_exact_mut(columns.len()).zip(chosen) {
                let held = by_target.row(outer, target);
                let extrema = &extrema[held.clone()][columns.clone()];
                shares.fill(E::default());
                for edge in targets[target].clone() {
                    let x = &x[lines.row(outer, edge)][columns.clone()];
                    for ((count, x), extremum) in shares.iter_mut().zip(x).zip(extrema) {
                        *count += E::from_f64(f64::from(holds(*x, *extremum)));
                    }
                }
                for (share, cotangent) in shares.iter_mut().zip(&cotangent[held][columns.clone()]) {
                    // A placeholder for an empty list of edges belongs to a target without edges.
                    *share = E::from_f64(cotangent.to_f64() / share.to_f64().max(1.0));
                }
            }
        },
    );
    let shares: &[E] = &shares;
    let of_edge = part.of_edge().cells();
    rows([outer, cells, inner], |outer, chosen, columns, gradient| {
        for (gradient, edge) in gradient.chunks_exact_mut(columns.len()).zip(chosen) {
            let held = by_target.row(outer, of_edge[edge]);
            let x = &x[lines.row(outer, edge)][columns.clone()];
            let extrema = &extrema[held.clone()][columns.clone()];
            let shares = &shares[held][columns.clone()];
            let numbers = x.iter().zip(extrema).zip(shares);
            for (gradient, ((x, extremum), share)) in gradient.iter_mut().zip(numbers) {
                *gradient = if holds(*x, *extremum) {
                    *share
                } else {
                    E::default()
                };
            }
        }
    })
}

/// Whether an edge holds the extremum of its target.
fn holds<E: Element>(x: E, extremum: E) -> bool {
    x == extremum || is_nan(x)
}

fn is_nan<E: Element>(x: E) -> bool {
    x.partial_cmp(&x).is_none()
}
