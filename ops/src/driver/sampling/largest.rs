//! Kernel of maxima along lines.

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::Map;
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::Float;
use crate::kernel::lanes::{CHUNK, WIDEST};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;

/// Computes the maxima of lines, one for each output of a map, and the cells that they come from.
///
/// NaN is larger than all numbers. Of equal cells the first is taken, of several NaN the last; if
/// `places` lists positions of the cells, these determine the order.
pub(super) fn maxima<E: Float>(
    lines: Lines,
    x: &[E],
    map: &Map,
    places: Option<&[u32]>,
    isa: Isa,
) -> (Buffer<E>, Vec<u32>) {
    let Lines {
        outer,
        cells,
        inner,
    } = lines;
    let mut chosen = vec![0; outer * map.len() * inner];
    let mut y = buffer::filled::<E>(chosen.len(), 0.0);
    let each = map.iter().map(Vec::len).sum::<usize>() * inner / map.len();
    let together = CHUNK / each.max(1);
    let y_rows = y.shared();
    tasks::for_each_part(&mut chosen, inner, together, |row, chosen| {
        // SAFETY: only this task accesses this row.
        let y = unsafe { y_rows.slice(row * inner..(row + 1) * inner) };
        let start = row / map.len() * cells * inner;
        isa.run(Row {
            x: &x[start..][..cells * inner],
            places: places.map(|places| &places[start..][..cells * inner]),
            taps: &map[row % map.len()],
            y,
            chosen,
        });
    });
    (y, chosen)
}

/// Maxima of one output along a dim.
struct Row<'a, E> {
    /// `[cells, inner]`; only the cells of the taps are read.
    x: &'a [E],
    places: Option<&'a [u32]>,
    taps: &'a [(usize, f64)],
    y: &'a mut [E],
    chosen: &'a mut [u32],
}

impl<E: Float> WithSimd for Row<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            x,
            places,
            taps,
            y,
            chosen,
        } = self;
        let (inner, first) = (y.len(), taps[0].0);
        let in_one_piece = inner == 1 && taps[taps.len() - 1].0 + 1 == first + taps.len();
        if in_one_piece {
            let cells = &x[first..][..taps.len()];
            let mut found = place_of_largest(cells);
            if let Some(places) = places {
                let places = &places[first..][..taps.len()];
                let largest = cells[found];
                for (cell, x) in cells.iter().enumerate() {
                    if is_taken((*x, places[cell]), (largest, places[found])) {
                        found = cell;
                    }
                }
            }
            y[0] = cells[found];
            chosen[0] = (first + found) as u32;
            return;
        }
        y.copy_from_slice(&x[first * inner..][..inner]);
        chosen.fill(first as u32);
        let Some(places) = places else {
            for (cell, _) in &taps[1..] {
                let row = &x[cell * inner..][..inner];
                for ((y, chosen), x) in y.iter_mut().zip(&mut *chosen).zip(row) {
                    (*y, *chosen) = if is_larger(*x, *y) {
                        (*x, *cell as u32)
                    } else {
                        (*y, *chosen)
                    };
                }
            }
            return;
        };
        // Some columns at a time, together with the positions of the chosen cells.
        for start in (0..inner).step_by(WIDEST) {
            let columns = start..inner.min(start + WIDEST);
            let (y, chosen) = (&mut y[columns.clone()], &mut chosen[columns.clone()]);
            let mut best = [0; WIDEST];
            best[..y.len()].copy_from_slice(&places[first * inner..][columns.clone()]);
            for (cell, _) in &taps[1..] {
                let row = &x[cell * inner..][columns.clone()];
                let places = &places[cell * inner..][columns.clone()];
                for (column, (x, place)) in row.iter().zip(places).enumerate() {
                    let (y, best) = (&mut y[column], &mut best[column]);
                    if is_taken((*x, *place), (*y, *best)) {
                        (*y, *best, chosen[column]) = (*x, *place, *cell as u32);
                    }
                }
            }
        }
    }
}

/// Whether `x` is taken rather than `y`, a cell before it.
#[inline(always)]
pub(super) fn is_larger<E: Float>(x: E, y: E) -> bool {
    (x > y) | is_nan(x)
}

/// Whether a cell is taken rather than another one, in any order; both have a position.
#[inline(always)]
fn is_taken<E: Float>((x, place): (E, u32), (y, other): (E, u32)) -> bool {
    let of_numbers = (x > y) | ((x == y) & (place < other));
    of_numbers | (is_nan(x) & (!is_nan(y) | (place > other)))
}

/// Position of the largest cell: of equal ones the first, of several NaN the last.
#[inline(always)]
fn place_of_largest<E: Float>(cells: &[E]) -> usize {
    const LANES: usize = 8;
    let (parts, rest) = cells.as_chunks::<LANES>();
    // Finds the maximum in vectors, then its position.
    let mut most = [cells[0]; LANES];
    let mut missing = false;
    for part in parts {
        for (most, cell) in most.iter_mut().zip(part) {
            *most = if *cell > *most { *cell } else { *most };
            missing |= is_nan(*cell);
        }
    }
    let most = most.iter().chain(rest).copied();
    let most = most.reduce(|a, b| if b > a { b } else { a });
    missing |= rest.iter().any(|cell| is_nan(*cell));
    let found = if missing {
        cells.iter().rposition(|cell| is_nan(*cell))
    } else {
        cells.iter().position(|cell| Some(*cell) == most)
    };
    found.expect("one of the cells")
}

#[expect(clippy::eq_op, reason = "what floats of both widths have")]
#[inline(always)]
fn is_nan<E: Float>(x: E) -> bool {
    x != x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_larger_than_all() {
        let lines = Lines::along(&[4], 0..1);
        let map: Map = vec![[0, 1, 2, 3].map(|cell| (cell, 1.0)).to_vec()];
        let isa = Isa::chosen().unwrap();
        let (y, cells) = maxima(
            lines,
            &[1.0, f32::NAN, f32::INFINITY, f32::NAN],
            &map,
            None,
            isa,
        );
        assert!(y[0].is_nan() && cells == [3]);
        assert_eq!(
            *lines.added(None, &cells, &[2.0]).unwrap(),
            [0.0, 0.0, 0.0, 2.0]
        );
        for count in 1..20 {
            let mut cells: Vec<f32> = (0..count).map(|cell| ((cell * 7) % 5) as f32).collect();
            let most = cells.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = cells.iter().position(|cell| *cell == most);
            assert_eq!(Some(place_of_largest(&cells)), first);
            cells[count - 1] = f32::NAN;
            assert_eq!(place_of_largest(&cells), count - 1);
        }
    }
}
