//! Products summed over rows: `xᵀ · y`.

use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::{
    Left, PANEL, Pack, ROWS, Sums, by_matrices, deal, most_columns, panel, panels_together, room,
    steps_of, whole,
};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::lanes::CHUNK;
use crate::kernel::matrices::Matrix;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::products::{self, Products};
use crate::kernel::simd::{Element, Isa};

/// Number of rows of a task by matrix instructions; larger than otherwise, since every task splits
/// its numbers into parts.
const SPLIT_ROWS: usize = 512;
/// Maximum number of shares of the rows, whose sums are then added up.
const SHARES: usize = 32;
/// Number of rows packed at a time.
const TOGETHER: usize = 256;
/// Minimum number of rows of a share, and maximum size in bytes of the sums of all shares.
const SHARE_ROWS: usize = 2048;
const SHARE_BYTES: usize = 16 << 20;

/// Adds the products of a range of columns of `x`, as rows, with a range of panels of `y`;
/// optionally also the column sums of `y`.
struct OverRows<'a, E: Element, P: Products<E>> {
    /// `[columns of x, rows]`.
    x: Matrix<'a, P::Number>,
    y: Matrix<'a, P::Number>,
    panels: Range<usize>,
    by_matrices: bool,
    /// Whether a column of ones follows the columns of `x`.
    with_ones: bool,
    /// Zeroed sums in whole vectors, for each column of `x` and for the ones.
    to: *mut E,
}

impl<E: Element, P: Products<E>> WithSimd for OverRows<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ([features, rows], [_, all]) = (self.x.size(), self.y.size());
        let pitch = whole(all);
        let by_matrices = self.by_matrices;
        let panel_room = most_columns(by_matrices) * steps_of::<E, P>(TOGETHER, by_matrices);
        let packed_room = [features, 1].map(|rows| room::<E, P>(rows, TOGETHER, by_matrices));
        let tile_room = features.max(1) * most_columns(by_matrices);
        let ones = [P::number(E::from_f64(1.0)); TOGETHER];
        with_scratch(
            panel_room + tile_room + packed_room[0] + packed_room[1],
            #[inline(always)]
            |scratch: &mut [E]| {
                let (packed_panel, rest) = scratch.split_at_mut(panel_room);
                let (tile, rest) = rest.split_at_mut(tile_room);
                let (packed, packed_ones) = rest.split_at_mut(packed_room[0]);
                let zeros = [E::default(); PANEL];
                for start in (0..rows).step_by(TOGETHER) {
                    let range = start..(start + TOGETHER).min(rows);
                    let steps = steps_of::<E, P>(range.len(), by_matrices);
                    let y = self.y.rows(range.clone());
                    let ones = Matrix::new(&ones[..range.len()], [1, range.len()]);
                    let x = self.x.transposed().rows(range).transposed();
                    // SAFETY: the sums have these elements, and the scratch has the room.
                    unsafe {
                        let of_x = Left::new::<S, P>(simd, x, by_matrices, packed.as_mut_ptr());
                        let of_ones =
                            Left::new::<S, P>(simd, ones, by_matrices, packed_ones.as_mut_ptr());
                        let lefts = [(of_x, 0, features), (of_ones, features, 1)];
                        for number in self.panels.clone() {
                            let (columns, width) = panel(number, most_columns(by_matrices), all);
                            let to = self.to.add(columns.start);
                            Pack::<E, P> {
                                b: y,
                                columns,
                                size: [steps, width],
                                by_matrices,
                                to: packed_panel.as_mut_ptr(),
                            }
                            .with_simd(simd);
                            if number + 1 < self.panels.end {
                                let (next, _) = panel(number + 1, most_columns(by_matrices), all);
                                y.prefetch(next);
                            }
                            for (left, first, rows) in
                                lefts.into_iter().take(1 + usize::from(self.with_ones))
                            {
                                // Summed from zero and added once: a running sum over many rows
                                // would lose the last bits of each.
                                let tile = tile.as_mut_ptr();
                                let sums = Sums {
                                    a: (),
                                    rows,
                                    b: packed_panel.as_ptr(),
                                    width,
                                    steps,
                                    from: (zeros.as_ptr(), 0),
                                    to: (tile, width),
                                };
                                left.add::<S, P>(simd, sums);
                                for row in 0..rows {
                                    let sums = tile.add(row * width);
                                    let to = to.add((first + row) * pitch);
                                    for column in 0..width {
                                        *to.add(column) += *sums.add(column);
                                    }
                                }
                            }
                        }
                    }
                }
            },
        );
    }
}

/// Computes `xᵀ · y`, summed over shares of the rows of both. The number of shares and the order of
/// the sum follow from sizes alone.
pub(crate) fn product_over_rows<E: Element, P: Products<E>>(
    isa: Isa,
    x: Matrix<'_, P::Number>,
    y: Matrix<'_, P::Number>,
) -> Buffer<P::Number> {
    let elements = x.size()[1] * y.size()[1];
    // SAFETY: all elements are written.
    unsafe {
        Buffer::filled(elements, |to| {
            product_over_rows_to::<E, P>(isa, [x, y], to, None)
        })
    }
}

/// Computes [`product_over_rows`] and the sum of the rows of `y` in one pass over it. With matrix
/// instructions on split numbers, an infinite number becomes NaN in both.
pub(crate) fn product_and_sums_over_rows<E: Element, P: Products<E>>(
    isa: Isa,
    x: Matrix<'_, P::Number>,
    y: Matrix<'_, P::Number>,
) -> [Buffer<P::Number>; 2] {
    let (features, columns) = (x.size()[1], y.size()[1]);
    let mut product = None;
    // SAFETY: all elements are written.
    let sums = unsafe {
        Buffer::filled(columns, |to_sums| {
            let fill = |to| product_over_rows_to::<E, P>(isa, [x, y], to, Some(to_sums));
            product = Some(Buffer::filled(features * columns, fill));
        })
    };
    [product.expect("the sums are filled with it"), sums]
}

/// Writes [`product_over_rows`] and, optionally, the sum of the rows of `y`.
///
/// # Safety
/// `to` and `to_sums` must have room for both.
pub(crate) unsafe fn product_over_rows_to<E: Element, P: Products<E>>(
    isa: Isa,
    [x, y]: [Matrix<'_, P::Number>; 2],
    to: Shared<P::Number>,
    to_sums: Option<Shared<P::Number>>,
) {
    const { assert!(P::NUMBERS * size_of::<P::Number>() == size_of::<E>()) };
    let ([rows, features], [_, columns]) = (x.size(), y.size());
    let results = features + usize::from(to_sums.is_some());
    let elements = results * whole(columns);
    let shares = (SHARE_BYTES / size_of::<E>() / elements.max(1)).min(SHARES);
    let shares = (rows / SHARE_ROWS).min(shares).max(1);
    let by_matrices = by_matrices::<E, P>(isa, rows, columns);
    let chunk = if by_matrices { SPLIT_ROWS } else { ROWS };
    let (share_rows, chunks) = (rows.div_ceil(shares), features.div_ceil(chunk).max(1));
    let panels = columns.div_ceil(most_columns(by_matrices));
    let together = panels_together(panels, shares * chunks);
    let groups = panels.div_ceil(together);
    let mut sums = filled::<E>(shares * elements, 0.0);
    let all = sums.shared();
    deal(shares * chunks * groups, rows * results * columns, |task| {
        let (share, of_chunk, group) = (
            task / groups / chunks,
            task / groups % chunks,
            task % groups,
        );
        let range = (share * share_rows).min(rows)..((share + 1) * share_rows).min(rows);
        let of_task = of_chunk * chunk..((of_chunk + 1) * chunk).min(features);
        products::run::<E, P, _>(
            isa,
            OverRows::<E, P> {
                // SAFETY: the sums of this task.
                to: unsafe { all.at(share * elements + of_task.start * whole(columns)) },
                with_ones: to_sums.is_some() && of_task.end == features,
                x: x.rows(range.clone()).transposed().rows(of_task),
                y: y.rows(range),
                panels: group * together..((group + 1) * together).min(panels),
                by_matrices,
            },
        );
    });
    let together = (CHUNK / columns.max(1)).max(1);
    tasks::for_each(results, together, |row| {
        let to = match to_sums {
            Some(to_sums) if row == features => to_sums,
            _ => to.starting_at(row * columns),
        };
        for column in 0..columns {
            let shares = (0..shares).map(|share| share * elements + row * whole(columns) + column);
            let sum = shares.fold(E::default(), |sum, place| sum + sums[place]);
            // SAFETY: an element of this task.
            unsafe { *to.at(column) = P::number(sum) };
        }
    });
}
