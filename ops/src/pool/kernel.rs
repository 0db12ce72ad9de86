//! Pooling of `[planes, rows, columns]` by non-overlapping 2 × 2 windows, and the adjoints.
//!
//! A last row or column outside all windows is ignored, and has a gradient of zero.

use pulp::{Simd, WithSimd};

use super::combine::{Combine, Norm, larger};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{filled_bands, load, load_pairs, store, store_pairs};
use crate::kernel::simd::{Element, Isa};

/// Shape `[planes, rows, columns]` after pooling.
pub(crate) fn pooled([planes, rows, columns]: [usize; 3]) -> [usize; 3] {
    [planes, rows / 2, columns / 2]
}

/// Computes the maximum of every window; NaN counts as larger than all numbers.
pub(crate) fn max<E: Element>(isa: Isa, x: &[E], shape: [usize; 3]) -> Buffer<E> {
    windows(isa, x, shape, Window::Max)
}

/// Computes the mean of every window.
pub(crate) fn average<E: Element>(isa: Isa, x: &[E], shape: [usize; 3]) -> Buffer<E> {
    windows(isa, x, shape, Window::Sum(0.25))
}

/// Adjoint of [`average`]: the gradient of its input, of `shape`.
pub(crate) fn average_adjoint<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
) -> Buffer<E> {
    spread(isa, cotangent, shape, 0.25)
}

/// Computes the norm of every window.
pub(super) fn norm<E: Element>(isa: Isa, x: &[E], shape: [usize; 3], norm: Norm) -> Buffer<E> {
    windows(isa, x, shape, Window::Norm(norm))
}

/// Result of a window.
#[derive(Clone, Copy)]
enum Window {
    Max,
    /// Sum of the elements, times a factor.
    Sum(f64),
    Norm(Norm),
}

/// Returns the two rows of a band of windows, without a last column outside the windows.
fn pair_of_rows<E>(x: &[E], [_, rows, columns]: [usize; 3], [plane, row]: [usize; 2]) -> [&[E]; 2] {
    let start = (plane * rows + 2 * row) * columns;
    [start, start + columns].map(|start| &x[start..start + columns / 2 * 2])
}

fn windows<E: Element>(isa: Isa, x: &[E], shape: [usize; 3], window: Window) -> Buffer<E> {
    assert_eq!(x.len(), shape.iter().product::<usize>());
    let run = |place: [usize; 2], output: &mut [E]| {
        isa.run(Windows {
            rows: pair_of_rows(x, shape, place),
            window,
            output,
        });
    };
    // SAFETY: the task writes a result for every window of its row.
    unsafe { filled_bands(pooled(shape), 1, run) }
}

/// Computes the sums of windows, times a factor.
pub(crate) fn window_sums<E: Element>(
    isa: Isa,
    x: &[E],
    shape: [usize; 3],
    factor: f64,
) -> Buffer<E> {
    windows(isa, x, shape, Window::Sum(factor))
}

struct Windows<'a, E> {
    rows: [&'a [E]; 2],
    window: Window,
    output: &'a mut [E],
}

impl<E: Element> WithSimd for Windows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows: [high, low],
            window,
            output,
        } = self;
        let lanes = E::lanes::<S>();
        let rows = high.chunks(2 * lanes).zip(low.chunks(2 * lanes));
        for ((high, low), output) in rows.zip(output.chunks_mut(lanes)) {
            let ([a, b], [c, d]) = (load_pairs(simd, high), load_pairs(simd, low));
            let result = match window {
                Window::Max => largest::<S, E>(simd, [a, b, c, d]).0,
                Window::Sum(factor) => {
                    let sum = E::plus(simd, E::plus(simd, a, b), E::plus(simd, c, d));
                    E::times(simd, sum, E::splat(simd, E::from_f64(factor)))
                }
                Window::Norm(norm) => norm_of::<S, E>(simd, norm, [a, b, c, d]),
            };
            store(simd, output, result);
        }
    }
}

/// Returns the largest of four and its index: of equal ones the first, of several NaN the last, as
/// in PyTorch.
///
/// The index is a vector of floats, so that lanes are selected with one mask type.
#[inline(always)]
fn largest<S: Simd, E: Element>(
    simd: S,
    [first, rest @ ..]: [E::Vector<S>; 4],
) -> (E::Vector<S>, E::Vector<S>) {
    let (mut best, mut index) = (first, E::splat(simd, E::default()));
    // A comparison with NaN is false: `select_less` keeps a NaN in `best`, and `select_equal` of
    // `x` with itself takes `x` where it is NaN.
    for (n, x) in rest.into_iter().enumerate() {
        let n = E::splat(simd, E::from_f64(n as f64 + 1.0));
        let place = E::select_less(simd, [best, x], n, index);
        best = larger::<S, E>(simd, best, x);
        index = E::select_equal(simd, [x, x], place, n);
    }
    (best, index)
}

/// Norm of four cells.
#[inline(always)]
fn norm_of<S: Simd, E: Element>(simd: S, norm: Norm, cells: [E::Vector<S>; 4]) -> E::Vector<S> {
    // A loop rather than `map`, whose closure may be compiled without the instructions of `S`.
    let mut powers = cells;
    for power in &mut powers {
        *power = Combine::<E>::prepare(norm, simd, *power);
    }
    let [a, b, c, d] = powers;
    let sum = E::plus(simd, E::plus(simd, a, b), E::plus(simd, c, d));
    Combine::<E>::finish(norm, simd, sum)
}

/// Adjoint of [`max`] at `x`, of `shape`: the cotangent of a window goes to the element that
/// [`max`] takes.
pub(crate) fn max_adjoint<E: Element>(
    isa: Isa,
    x: &[E],
    cotangent: &[E],
    shape: [usize; 3],
) -> Buffer<E> {
    adjoint(isa, x, cotangent, shape, None)
}

/// Adjoint of [`norm`] at `x`, of `shape`.
pub(super) fn norm_adjoint<E: Element>(
    isa: Isa,
    x: &[E],
    cotangent: &[E],
    shape: [usize; 3],
    norm: Norm,
) -> Buffer<E> {
    adjoint(isa, x, cotangent, shape, Some(norm))
}

/// Adjoint of a norm, or of the maximum, at `x`, of `shape`.
fn adjoint<E: Element>(
    isa: Isa,
    x: &[E],
    cotangent: &[E],
    shape: [usize; 3],
    norm: Option<Norm>,
) -> Buffer<E> {
    let [_, rows, columns] = pooled(shape);
    assert_eq!(x.len(), shape.iter().product::<usize>());
    bands(shape, |[plane, row], band| {
        let cotangent = &cotangent[(plane * rows + row) * columns..][..columns];
        isa.run(Adjoint {
            rows: pair_of_rows(x, shape, [plane, row]),
            cotangent,
            norm,
            band,
        });
    })
}

/// Adjoint of the sums of windows times a factor, of `shape`.
pub(crate) fn spread<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
    factor: f64,
) -> Buffer<E> {
    let [_, rows, columns] = pooled(shape);
    bands(shape, |[plane, row], band| {
        let cotangent = &cotangent[(plane * rows + row) * columns..][..columns];
        isa.run(Spread {
            cotangent,
            factor,
            band,
        });
    })
}

/// Creates a buffer of `shape` that is zero outside windows; `run` fills those of a band, given its
/// plane and row, and both rows of its cells.
fn bands<E: Element>(
    shape: [usize; 3],
    run: impl Fn([usize; 2], [&mut [E]; 2]) + Sync,
) -> Buffer<E> {
    let [_, rows, columns] = shape;
    let pairs = columns / 2 * 2;
    let fill = |place: [usize; 2], elements: &mut [E]| {
        let (windows, rest) = elements.split_at_mut(if rows < 2 { 0 } else { 2 * columns });
        rest.fill(E::default());
        if pairs < columns {
            for row in windows.chunks_mut(columns) {
                row[pairs] = E::default();
            }
        }
        if pairs > 0 && rows > 1 {
            let (high, low) = windows.split_at_mut(columns);
            run(place, [&mut high[..pairs], &mut low[..pairs]]);
        }
    };
    // SAFETY: `run` writes all windows, and the rest is zeroed here.
    unsafe { filled_bands(shape, 2, fill) }
}

struct Spread<'a, E> {
    cotangent: &'a [E],
    factor: f64,
    band: [&'a mut [E]; 2],
}

impl<E: Element> WithSimd for Spread<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            cotangent,
            factor,
            band: [high, low],
        } = self;
        let (lanes, factor) = (E::lanes::<S>(), E::splat(simd, E::from_f64(factor)));
        let rows = high.chunks_mut(2 * lanes).zip(low.chunks_mut(2 * lanes));
        for ((high, low), cotangent) in rows.zip(cotangent.chunks(lanes)) {
            let value = E::times(simd, load(simd, cotangent), factor);
            store_pairs(simd, high, [value; 2]);
            store_pairs(simd, low, [value; 2]);
        }
    }
}

struct Adjoint<'a, E> {
    rows: [&'a [E]; 2],
    cotangent: &'a [E],
    /// Norm; `None` for the maximum.
    norm: Option<Norm>,
    band: [&'a mut [E]; 2],
}

impl<E: Element> WithSimd for Adjoint<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows: [high, low],
            cotangent,
            norm,
            band: [out_high, out_low],
        } = self;
        let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
        let inputs = high.chunks(2 * lanes).zip(low.chunks(2 * lanes));
        let outputs = out_high
            .chunks_mut(2 * lanes)
            .zip(out_low.chunks_mut(2 * lanes));
        for (((high, low), (out_high, out_low)), cotangent) in
            inputs.zip(outputs).zip(cotangent.chunks(lanes))
        {
            let ([a, b], [c, d]) = (load_pairs(simd, high), load_pairs(simd, low));
            let (cells, cotangent) = ([a, b, c, d], load(simd, cotangent));
            let parts = match norm {
                None => {
                    // Recomputed from the input: the forward pass saves no indices.
                    let (_, index) = largest::<S, E>(simd, cells);
                    let mut parts = [zero; 4];
                    for (n, part) in parts.iter_mut().enumerate() {
                        let n = E::splat(simd, E::from_f64(n as f64));
                        *part = E::select_equal(simd, [index, n], cotangent, zero);
                    }
                    parts
                }
                Some(norm) => {
                    let of_cells = norm_of::<S, E>(simd, norm, cells);
                    let pulled = norm.pull::<S, E>(simd, of_cells, cotangent);
                    let mut parts = cells;
                    for part in &mut parts {
                        *part = E::times(simd, norm.slopes::<S, E>(simd, *part), pulled);
                    }
                    parts
                }
            };
            let [a, b, c, d] = parts;
            store_pairs(simd, out_high, [a, b]);
            store_pairs(simd, out_low, [c, d]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{dot, random, rounded, same_for_all_pools};

    const SHAPES: [[usize; 3]; 9] = [
        [2, 6, 70],
        [3, 7, 33],
        [1, 2, 2],
        [2, 1, 5],
        [2, 5, 1],
        [0, 4, 4],
        [2, 0, 4],
        [1, 4, 0],
        [5, 64, 131],
    ];

    /// Windows of a shape, as the indices of their elements.
    fn windows_of(shape: [usize; 3]) -> Vec<[usize; 4]> {
        let [planes, rows, columns] = pooled(shape);
        let mut windows = Vec::new();
        for plane in 0..planes {
            for row in 0..rows {
                for column in 0..columns {
                    let first = (plane * shape[1] + 2 * row) * shape[2] + 2 * column;
                    windows.push([first, first + 1, first + shape[2], first + shape[2] + 1]);
                }
            }
        }
        windows
    }

    fn check<E: Element>() {
        for shape in SHAPES {
            let len = shape.iter().product();
            // Few values, so that many are equal.
            let x: Vec<f64> = random(len, 1).iter().map(|x| (4.0 * x).round()).collect();
            let x = rounded::<E>(&x);
            let windows = windows_of(shape);
            let cotangent = rounded::<E>(&random(windows.len(), 2));
            for isa in Isa::available() {
                let largest = same_for_all_pools(|| max(isa, &x, shape).to_vec());
                let mean = same_for_all_pools(|| average(isa, &x, shape).to_vec());
                let from_max =
                    same_for_all_pools(|| max_adjoint(isa, &x, &cotangent, shape).to_vec());
                let from_mean =
                    same_for_all_pools(|| average_adjoint(isa, &cotangent, shape).to_vec());
                let mut gradient = vec![E::default(); len];
                assert_eq!([largest.len(), mean.len()], [windows.len(); 2]);
                for (index, window) in windows.iter().enumerate() {
                    let values = window.map(|cell| x[cell].to_f64());
                    let first = (0..4).fold(
                        0,
                        |best, at| if values[at] > values[best] { at } else { best },
                    );
                    assert_eq!(largest[index].to_f64(), values[first]);
                    assert_eq!(mean[index].to_f64(), values.iter().sum::<f64>() / 4.0);
                    gradient[window[first]] = cotangent[index];
                }
                assert_eq!(from_max, gradient);
                let sides = [dot(&mean, &cotangent), dot(&x, &from_mean)];
                assert!((sides[0] - sides[1]).abs() < 1e-4, "{sides:?}");
            }
        }
    }

    #[test]
    fn windows_are_pooled_and_the_first_maximum_takes_the_gradient() {
        check::<f32>();
        check::<f64>();
    }

    #[test]
    fn nan_is_the_largest_and_the_last_of_several_takes_the_gradient() {
        let (nan, infinity) = (f32::NAN, f32::INFINITY);
        let rows = [
            [1.0, nan, nan, 2.0, infinity, 9.0],
            [nan, 5.0, 7.0, 3.0, nan, nan],
        ];
        let (x, shape) = (rows.concat(), [1, 2, 6]);
        for isa in Isa::available() {
            assert!(max(isa, &x, shape).iter().all(|value| value.is_nan()));
            let gradient = max_adjoint(isa, &x, &[1.0, 2.0, 3.0], shape);
            let taken: Vec<usize> = (0..12).filter(|&cell| gradient[cell] != 0.0).collect();
            assert_eq!(taken, [2, 6, 11]);
        }
    }
}
