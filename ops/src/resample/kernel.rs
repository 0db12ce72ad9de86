//! Upsampling of the last two dims of `[planes, rows, columns]` by a factor of two, and the
//! adjoints.
//!
//! Bilinear upsampling replaces each cell by two, at a quarter of its width from its edges, as in
//! PyTorch with `align_corners = False`: along a dim, cells `2k` and `2k + 1` are
//! `¼ x[k-1] + ¾ x[k]` and `¾ x[k] + ¼ x[k+1]`.

use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{WIDEST, apply, filled_bands, load, load_pairs, store, store_pairs};
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};
use crate::pool::kernel::{spread, window_sums};

/// Shape of a field of `shape` with a halo of one cell on every side.
pub(crate) fn haloed([planes, rows, columns]: [usize; 3]) -> [usize; 3] {
    [planes, rows + 2, columns + 2]
}

/// Shape after upsampling.
pub(crate) fn doubled([planes, rows, columns]: [usize; 3]) -> [usize; 3] {
    [planes, 2 * rows, 2 * columns]
}

/// Repeats every cell in both dims.
pub(crate) fn nearest<E: Element>(isa: Isa, x: &[E], shape: [usize; 3]) -> Buffer<E> {
    spread(isa, x, doubled(shape), 1.0)
}

/// Adjoint of [`nearest`]: the gradient of its input, of `shape`.
pub(crate) fn nearest_adjoint<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
) -> Buffer<E> {
    window_sums(isa, cotangent, doubled(shape), 1.0)
}

/// Bilinear upsampling of a field with a halo of one cell; `shape` excludes the halo.
pub(crate) fn bilinear<E: Element>(isa: Isa, x: &[E], shape: [usize; 3]) -> Buffer<E> {
    let [_, rows, columns] = haloed(shape);
    assert_eq!(x.len(), haloed(shape).iter().product::<usize>());
    let run = |[plane, row]: [usize; 2], output: &mut [E]| {
        if output.is_empty() {
            return;
        }
        let rows = [0, 1, 2].map(|below| &x[(plane * rows + row + below) * columns..][..columns]);
        with_scratch(output.len() / 4 + 2 + WIDEST, |line| {
            isa.run(Bilinear { rows, line, output });
        });
    };
    // SAFETY: the task writes both rows of its band.
    unsafe { filled_bands(doubled(shape), 2, run) }
}

struct Bilinear<'a, E> {
    rows: [&'a [E]; 3],
    /// Scratch for an interpolated row, with its neighbours on both sides.
    line: &'a mut [E],
    /// Two rows of the result.
    output: &'a mut [E],
}

impl<E: Element> WithSimd for Bilinear<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows: [above, here, below],
            line,
            output,
        } = self;
        let (lanes, columns) = (E::lanes::<S>(), output.len() / 4);
        let (high, low) = output.split_at_mut(2 * columns);
        for (near, output) in [(above, high), (below, low)] {
            apply(
                simd,
                [near, here],
                &mut line[..here.len()],
                #[inline(always)]
                |[near, here]| blend::<S, E>(simd, near, here),
            );
            for (output, column) in output.chunks_mut(2 * lanes).zip((0..).step_by(lanes)) {
                let low = load(simd, &line[column..column + lanes]);
                let here = load(simd, &line[column + 1..column + 1 + lanes]);
                let high = load(simd, &line[column + 2..column + 2 + lanes]);
                let even = blend::<S, E>(simd, low, here);
                let odd = blend::<S, E>(simd, high, here);
                store_pairs(simd, output, [even, odd]);
            }
        }
    }
}

/// `¼ far + ¾ near`.
#[inline(always)]
fn blend<S: Simd, E: Element>(simd: S, far: E::Vector<S>, near: E::Vector<S>) -> E::Vector<S> {
    let [quarter, rest] = [
        E::splat(simd, E::from_f64(0.25)),
        E::splat(simd, E::from_f64(0.75)),
    ];
    E::mul_add(simd, near, rest, E::times(simd, far, quarter))
}

/// Adjoint of [`bilinear`] for a field of `shape`: the gradient of its input, halo included.
pub(crate) fn bilinear_adjoint<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
) -> Buffer<E> {
    let [_, rows, columns] = doubled(shape);
    assert_eq!(cotangent.len(), doubled(shape).iter().product::<usize>());
    let run = |[plane, row]: [usize; 2], output: &mut [E]| {
        let cells = |neighbour: usize| {
            // Rows `2k - 1 … 2k + 2` of the cotangent contribute to row `k` of the field, which is
            // row `k + 1` with the halo.
            let row = (2 * row + neighbour).checked_sub(3);
            match row.filter(|row| *row < rows) {
                Some(row) => &cotangent[(plane * rows + row) * columns..][..columns],
                None => &[][..],
            }
        };
        if output.is_empty() {
            return;
        }
        let rows = [cells(0), cells(1), cells(2), cells(3)];
        with_scratch(2 * columns + 2 * MARGIN + 4 * WIDEST, |scratch| {
            let (zeros, line) = scratch.split_at_mut(columns);
            isa.run(Adjoint {
                rows,
                zeros,
                line,
                output,
            });
        });
    };
    // SAFETY: the task writes its row.
    unsafe { filled_bands(haloed(shape), 1, run) }
}

struct Adjoint<'a, E> {
    /// Rows of the cotangent; an empty slice stands for zeros.
    rows: [&'a [E]; 4],
    /// Scratch for a row of zeros.
    zeros: &'a mut [E],
    /// Scratch for a sum of rows, with margins.
    line: &'a mut [E],
    output: &'a mut [E],
}

/// Number of zeros before and after a sum of rows.
const MARGIN: usize = 3;

impl<E: Element> WithSimd for Adjoint<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows,
            zeros,
            line,
            output,
        } = self;
        let lanes = E::lanes::<S>();
        let row = MARGIN..MARGIN + zeros.len();
        if rows.iter().any(|row| row.is_empty()) {
            zeros.fill(E::default());
        }
        apply(
            simd,
            rows.map(|row| if row.is_empty() { &*zeros } else { row }),
            &mut line[row.clone()],
            #[inline(always)]
            |rows| gather::<S, E>(simd, rows),
        );
        line[..row.start].fill(E::default());
        line[row.end..row.end + MARGIN].fill(E::default());
        for (output, column) in output.chunks_mut(lanes).zip((0..).step_by(lanes)) {
            let start = 2 * column;
            let [far_low, low] = load_pairs(simd, &line[start..start + 2 * lanes]);
            let [high, far_high] = load_pairs(simd, &line[start + 2..start + 2 + 2 * lanes]);
            store(
                simd,
                output,
                gather::<S, E>(simd, [far_low, low, high, far_high]),
            );
        }
    }
}

/// `¼ (a + d) + ¾ (b + c)`.
#[inline(always)]
fn gather<S: Simd, E: Element>(simd: S, [a, b, c, d]: [E::Vector<S>; 4]) -> E::Vector<S> {
    blend::<S, E>(simd, E::plus(simd, a, d), E::plus(simd, b, c))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{assert_close, dot, random, rounded, same_for_all_pools};

    const SHAPES: [[usize; 3]; 8] = [
        [2, 3, 37],
        [1, 1, 1],
        [3, 4, 1],
        [2, 1, 9],
        [0, 3, 3],
        [2, 0, 3],
        [2, 3, 0],
        [3, 40, 129],
    ];

    /// Reference interpolation of a field with a halo.
    fn naive(x: &[f64], [planes, rows, columns]: [usize; 3]) -> Vec<f64> {
        // The nearest cell of the haloed input, and the one on the other side.
        let pair = |cell: usize| {
            [
                cell / 2 + 1,
                if cell.is_multiple_of(2) {
                    cell / 2
                } else {
                    cell / 2 + 2
                },
            ]
        };
        let mut y = Vec::new();
        for plane in 0..planes {
            for row in 0..2 * rows {
                for column in 0..2 * columns {
                    let mut sum = 0.0;
                    for (row, high) in pair(row).into_iter().zip([0.75, 0.25]) {
                        for (column, wide) in pair(column).into_iter().zip([0.75, 0.25]) {
                            let cell = (plane * (rows + 2) + row) * (columns + 2) + column;
                            sum += high * wide * x[cell];
                        }
                    }
                    y.push(sum);
                }
            }
        }
        y
    }

    fn len(shape: [usize; 3]) -> usize {
        shape.iter().product()
    }

    fn check<E: Element>(tolerance: f64) {
        for shape in SHAPES {
            let field = random(len(shape), 1);
            let padded = random(len(haloed(shape)), 2);
            let (halos, expected) = (rounded::<E>(&padded), naive(&padded, shape));
            let cotangent = rounded::<E>(&random(len(doubled(shape)), 3));
            for isa in Isa::available() {
                let y = same_for_all_pools(|| bilinear(isa, &halos, shape).to_vec());
                assert_close(&y, &expected, tolerance);
                let gradient =
                    same_for_all_pools(|| bilinear_adjoint(isa, &cotangent, shape).to_vec());
                let sides = [dot(&y, &cotangent), dot(&halos, &gradient)];
                assert!((sides[0] - sides[1]).abs() < 1e4 * tolerance, "{sides:?}");
                let x = rounded::<E>(&field);
                let y = same_for_all_pools(|| nearest(isa, &x, shape).to_vec());
                let sums = same_for_all_pools(|| nearest_adjoint(isa, &cotangent, shape).to_vec());
                let sides = [dot(&y, &cotangent), dot(&x, &sums)];
                assert!((sides[0] - sides[1]).abs() < 1e4 * tolerance, "{sides:?}");
                let [_, rows, columns] = doubled(shape);
                for (index, value) in y.iter().enumerate() {
                    let (row, column) = (index / columns, index % columns);
                    let [plane, row] = [row / rows, row % rows];
                    let from = (plane * shape[1] + row / 2) * shape[2] + column / 2;
                    assert_eq!(*value, x[from]);
                }
            }
        }
    }

    #[test]
    fn fields_are_interpolated_and_adjoints_match() {
        check::<f32>(3e-7);
        check::<f64>(1e-15);
    }

    /// A cell has the same bits wherever it lies in the field.
    #[test]
    fn a_part_of_a_field_has_the_bits_of_the_whole() {
        let (shape, columns) = ([2, 6, 50], 50);
        let halos = random(len(haloed(shape)), 4);
        for isa in Isa::available() {
            let whole = bilinear(isa, &halos, shape);
            // The right part of the first plane, from column 13 on.
            let part: Vec<f64> = halos[..8 * (columns + 2)]
                .chunks(columns + 2)
                .flat_map(|row| row[13..].to_vec())
                .collect();
            let part = bilinear(isa, &part, [1, 6, columns - 13]);
            let rows = part.chunks(2 * (columns - 13));
            for (found, row) in rows.zip(whole.chunks(2 * columns)) {
                assert_eq!(*found, row[26..]);
            }
        }
    }
}
