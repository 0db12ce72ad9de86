//! Pooling of `[planes, rows, columns]` by windows of any kernel, stride and dilation, and the adjoints.
//!
//! The rows of windows are combined first, for all columns of the input, then columns: a window of
//! *m* × *n* cells costs *m* + *n* vectors instead of *m* · *n*.

use pulp::{Simd, WithSimd};

use super::kernel::larger;
use super::slide::{Slide, Slides, pooled};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{filled_bands, load, load_every_second, store, store_pairs};
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};

/// Rows of an input that one task of a maximum's adjoint fills.
const BAND: usize = 16;

/// What becomes of the cells of a window.
trait Combine<E: Element>: Copy + Sync {
    fn combine<S: Simd>(self, simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S>;
    fn finish<S: Simd>(self, simd: S, a: E::Vector<S>) -> E::Vector<S>;
}

/// The largest cell; NaN counts as larger than all.
#[derive(Clone, Copy)]
struct Largest;

impl<E: Element> Combine<E> for Largest {
    #[inline(always)]
    fn combine<S: Simd>(self, simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S> {
        larger::<S, E>(simd, a, b)
    }

    #[inline(always)]
    fn finish<S: Simd>(self, _: S, a: E::Vector<S>) -> E::Vector<S> {
        a
    }
}

/// The sum of the cells, times a factor.
#[derive(Clone, Copy)]
struct Total<E>(E);

impl<E: Element> Combine<E> for Total<E> {
    #[inline(always)]
    fn combine<S: Simd>(self, simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S> {
        E::plus(simd, a, b)
    }

    #[inline(always)]
    fn finish<S: Simd>(self, simd: S, a: E::Vector<S>) -> E::Vector<S> {
        E::times(simd, a, E::splat(simd, self.0))
    }
}

/// The largest cell of every window.
pub(crate) fn max<E: Element>(isa: Isa, x: &[E], shape: [usize; 3], slides: Slides) -> Buffer<E> {
    windows(isa, x, shape, slides, Largest)
}

/// The mean of every window.
pub(crate) fn average<E: Element>(
    isa: Isa,
    x: &[E],
    shape: [usize; 3],
    slides: Slides,
) -> Buffer<E> {
    windows(isa, x, shape, slides, Total(mean(slides)))
}

/// One over the cells of a window.
fn mean<E: Element>([down, across]: Slides) -> E {
    E::from_f64(1.0 / (down.kernel * across.kernel) as f64)
}

fn windows<E: Element>(
    isa: Isa,
    x: &[E],
    shape: [usize; 3],
    slides: Slides,
    combine: impl Combine<E>,
) -> Buffer<E> {
    let [_, rows, columns] = shape;
    assert_eq!(x.len(), shape.iter().product::<usize>());
    let run = |[plane, row]: [usize; 2], output: &mut [E]| {
        let first = (plane * rows + row * slides[0].stride) * columns;
        with_scratch(2 * columns, |lines| {
            isa.run(Windows {
                x: &x[first..(plane + 1) * rows * columns],
                slides,
                combine,
                lines,
                output,
            });
        });
    };
    // SAFETY: the task writes a result for every window of its row.
    unsafe { filled_bands(pooled(shape, slides), 1, run) }
}

/// A row of windows.
struct Windows<'a, E, C> {
    /// The rows of the input, from the first of the windows on.
    x: &'a [E],
    slides: Slides,
    combine: C,
    /// Scratch for two rows of the input.
    lines: &'a mut [E],
    output: &'a mut [E],
}

impl<E: Element, C: Combine<E>> WithSimd for Windows<'_, E, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            x,
            slides: [down, across],
            combine,
            lines,
            output,
        } = self;
        let (lanes, columns) = (E::lanes::<S>(), lines.len() / 2);
        let (line, wide) = lines.split_at_mut(columns);
        for start in (0..columns).step_by(lanes) {
            let cells = start..columns.min(start + lanes);
            let mut all = load(simd, &x[cells.clone()]);
            for tap in 1..down.kernel {
                let row = tap * down.dilation * columns;
                let next = load(simd, &x[row + cells.start..row + cells.end]);
                all = combine.combine(simd, all, next);
            }
            store(simd, &mut line[cells], all);
        }
        if across.stride == 2 {
            for start in (0..output.len()).step_by(lanes) {
                let windows = start..output.len().min(start + lanes);
                let count = windows.len();
                let mut all = load_every_second(simd, &line[2 * start..], count);
                for tap in 1..across.kernel {
                    let cells = &line[2 * start + tap * across.dilation..];
                    all = combine.combine(simd, all, load_every_second(simd, cells, count));
                }
                store(simd, &mut output[windows], combine.finish(simd, all));
            }
            return;
        }
        let results = match across.stride {
            1 => &mut output[..],
            _ => &mut wide[..columns + 1 - across.reach()],
        };
        for start in (0..results.len()).step_by(lanes) {
            let cells = start..results.len().min(start + lanes);
            let mut all = load(simd, &line[cells.clone()]);
            for tap in 1..across.kernel {
                let column = tap * across.dilation;
                let next = load(simd, &line[column + cells.start..column + cells.end]);
                all = combine.combine(simd, all, next);
            }
            store(simd, &mut results[cells], combine.finish(simd, all));
        }
        if across.stride > 1 {
            let results = wide.iter().step_by(across.stride);
            for (output, result) in output.iter_mut().zip(results) {
                *output = *result;
            }
        }
    }
}

/// The adjoint of [`average`]: the gradient of its input, of `shape`.
pub(crate) fn average_adjoint<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
    slides: Slides,
) -> Buffer<E> {
    let [_, outputs, width] = pooled(shape, slides);
    let [down, across] = slides;
    let margin = across.reach() - 1;
    let run = |[plane, row]: [usize; 2], gradient: &mut [E]| {
        let windows = down.meeting(&(row..row + 1), outputs);
        let windows = windows.filter(|window| (row - window * down.stride) % down.dilation == 0);
        let rows = windows.map(|window| &cotangent[(plane * outputs + window) * width..][..width]);
        let rows: Vec<&[E]> = rows.collect();
        let stretched = gradient.len().max((width * across.stride).max(1)) + 2 * margin;
        with_scratch(width + stretched, |scratch| {
            let (sum, line) = scratch.split_at_mut(width);
            line.fill(E::default());
            isa.run(Spread {
                rows: &rows,
                across,
                factor: mean(slides),
                sum,
                line,
                gradient,
            });
        });
    };
    // SAFETY: the task writes its row.
    unsafe { filled_bands(shape, 1, run) }
}

/// A row of the gradient of averages.
struct Spread<'a, E> {
    /// The rows of the cotangent whose windows meet it.
    rows: &'a [&'a [E]],
    across: Slide,
    factor: E,
    /// Scratch for their sum.
    sum: &'a mut [E],
    /// Zeros for that sum at the first cells of windows, with margins of a window.
    line: &'a mut [E],
    gradient: &'a mut [E],
}

impl<E: Element> WithSimd for Spread<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows,
            across,
            factor,
            sum,
            line,
            gradient,
        } = self;
        let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
        let (factor, margin) = (E::splat(simd, factor), across.reach() - 1);
        for start in (0..sum.len()).step_by(lanes) {
            let cells = start..sum.len().min(start + lanes);
            let add = |sum, row: &&[E]| E::plus(simd, sum, load(simd, &row[cells.clone()]));
            let all = rows.iter().fold(zero, add);
            store(simd, &mut sum[cells], E::times(simd, all, factor));
        }
        if across.stride == 2 {
            for start in (0..sum.len()).step_by(lanes) {
                let sums = start..sum.len().min(start + lanes);
                let places = &mut line[margin + 2 * start..][..2 * sums.len()];
                store_pairs(simd, places, [load(simd, &sum[sums]), zero]);
            }
        } else {
            let places = line[margin..].iter_mut().step_by(across.stride);
            for (place, sum) in places.zip(sum.iter()) {
                *place = *sum;
            }
        }
        for start in (0..gradient.len()).step_by(lanes) {
            let cells = start..gradient.len().min(start + lanes);
            let mut all = zero;
            for tap in 0..across.kernel {
                let first = margin + start - tap * across.dilation;
                all = E::plus(simd, all, load(simd, &line[first..first + cells.len()]));
            }
            store(simd, &mut gradient[cells], all);
        }
    }
}

/// The adjoint of [`max`] at `x`, of `shape`: the cotangent of a window goes to the first of its largest cells, and to the
/// last NaN.
pub(crate) fn max_adjoint<E: Element>(
    isa: Isa,
    x: &[E],
    cotangent: &[E],
    shape: [usize; 3],
    slides: Slides,
) -> Buffer<E> {
    let [_, rows, columns] = shape;
    let [_, outputs, width] = pooled(shape, slides);
    let [down, across] = slides;
    assert_eq!(x.len(), shape.iter().product::<usize>());
    let run = |[plane, band]: [usize; 2], gradient: &mut [E]| {
        gradient.fill(E::default());
        let first = band * BAND;
        let held = first..first + gradient.len() / columns;
        with_scratch(4 * columns, |lines| {
            let windows = down.meeting(&held, outputs);
            for window in windows.filter(|_| width > 0) {
                let start = window * down.stride;
                isa.run(Places {
                    x: &x[(plane * rows + start) * columns..(plane + 1) * rows * columns],
                    slides,
                    first: down.first(window),
                    lines,
                });
                let places = lines[3 * columns..].iter().step_by(across.stride);
                let cotangent = &cotangent[(plane * outputs + window) * width..][..width];
                for (output, (place, cotangent)) in places.zip(cotangent).enumerate() {
                    let place = place.to_f64() as usize;
                    let row = start + place / across.kernel * down.dilation;
                    if held.contains(&row) {
                        let tap = place % across.kernel;
                        let column = output * across.stride + tap * across.dilation;
                        gradient[(row - first) * columns + column] += *cotangent;
                    }
                }
            }
        });
    };
    // SAFETY: the task writes its rows, and reads them after that only.
    unsafe { filled_bands(shape, BAND, run) }
}

/// The numbers, in row-major order, of the cells that windows of a row take.
struct Places<'a, E> {
    /// The rows of the input, from the first of the windows on.
    x: &'a [E],
    slides: Slides,
    /// The first row of the windows that is one of the field.
    first: usize,
    /// Scratch for largest cells of columns and their rows, largest cells of windows, and their numbers.
    lines: &'a mut [E],
}

impl<E: Element> WithSimd for Places<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            x,
            slides: [down, across],
            first,
            lines,
        } = self;
        let (lanes, columns) = (E::lanes::<S>(), lines.len() / 4);
        let (line, rest) = lines.split_at_mut(columns);
        let (numbers, rest) = rest.split_at_mut(columns);
        let (largest, places) = rest.split_at_mut(columns);
        let number = |number: usize| E::splat(simd, E::from_f64(number as f64));
        // `yes` where a cell is not a number.
        let if_nan = |cell, yes, no| E::select_equal(simd, [cell, cell], no, yes);
        for start in (0..columns).step_by(lanes) {
            let cells = start..columns.min(start + lanes);
            let (mut best, mut place) = (load(simd, &x[cells.clone()]), number(0));
            for tap in 1..down.kernel {
                let row = tap * down.dilation * columns;
                let cell = load(simd, &x[row + cells.start..row + cells.end]);
                let here = number(tap * across.kernel);
                let larger_place = E::select_less(simd, [best, cell], here, place);
                place = if_nan(cell, here, larger_place);
                best = larger::<S, E>(simd, best, cell);
            }
            store(simd, &mut line[cells.clone()], best);
            store(simd, &mut numbers[cells], place);
        }
        let count = columns + 1 - across.reach();
        for start in (0..count).step_by(lanes) {
            let cells = start..count.min(start + lanes);
            let mut best = load(simd, &line[cells.clone()]);
            let mut place = load(simd, &numbers[cells.clone()]);
            for tap in 1..across.kernel {
                let column = tap * across.dilation;
                let taps = column + cells.start..column + cells.end;
                let cell = load(simd, &line[taps.clone()]);
                let here = E::plus(simd, load(simd, &numbers[taps]), number(tap));
                let lower = E::select_less(simd, [here, place], here, place);
                let higher = E::select_less(simd, [place, here], here, place);
                let larger_place = E::select_less(simd, [best, cell], here, place);
                let of_numbers = E::select_equal(simd, [best, cell], lower, larger_place);
                place = if_nan(cell, if_nan(best, higher, here), of_numbers);
                best = larger::<S, E>(simd, best, cell);
            }
            store(simd, &mut largest[cells.clone()], best);
            store(simd, &mut places[cells], place);
        }
        // Padding is minus infinity, too, but is never taken.
        let lowest = E::from_f64(f64::NEG_INFINITY);
        if first > 0 || across.outside > 0 {
            let windows = largest[..count].iter().zip(&mut places[..count]);
            for (output, (largest, place)) in windows.step_by(across.stride).enumerate() {
                if *largest == lowest {
                    let tap = first * across.kernel + across.first(output);
                    *place = E::from_f64(tap as f64);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{dot, random, rounded, same_for_all_pools};

    const SLIDES: [[[usize; 3]; 2]; 5] = [
        [[3, 2, 1], [3, 2, 1]],
        [[3, 1, 1], [2, 1, 3]],
        [[1, 1, 1], [5, 3, 1]],
        [[2, 3, 2], [3, 2, 2]],
        [[4, 2, 1], [1, 1, 1]],
    ];
    const SHAPES: [[usize; 3]; 4] = [[2, 9, 37], [1, 40, 7], [3, 7, 8], [0, 9, 9]];

    /// The cells of every window, by definition.
    fn windows_of(shape: [usize; 3], slides: Slides) -> Vec<Vec<usize>> {
        let ([planes, rows, columns], [_, _, width]) = (pooled(shape, slides), shape);
        let [down, across] = slides;
        let mut windows = Vec::new();
        for window in 0..planes * rows * columns {
            let (plane, row, column) = (
                window / columns / rows,
                window / columns % rows,
                window % columns,
            );
            let cells = (0..down.kernel * across.kernel).map(|tap| {
                let (i, j) = (tap / across.kernel, tap % across.kernel);
                let row = plane * shape[1] + row * down.stride + i * down.dilation;
                row * width + column * across.stride + j * across.dilation
            });
            windows.push(cells.collect());
        }
        windows
    }

    fn check<E: Element>(outside: [usize; 2]) {
        for (shape, slides) in SHAPES
            .iter()
            .flat_map(|shape| SLIDES.map(|slides| (*shape, slides)))
        {
            let slides: Slides = std::array::from_fn(|dim| {
                let [kernel, stride, dilation] = slides[dim];
                Slide {
                    kernel,
                    stride,
                    dilation,
                    outside: outside[dim],
                }
            });
            let len = shape.iter().product();
            // Few values, so that many are equal; some are the least, and some no numbers.
            let value = |x: f64| match (4.0 * x).round() {
                x if x <= -4.0 => f64::NEG_INFINITY,
                x if x >= 4.0 => f64::NAN,
                x => x,
            };
            let x: Vec<f64> = random(len, 1).into_iter().map(value).collect();
            let (x, finite) = (rounded::<E>(&x), rounded::<E>(&random(len, 4)));
            let windows = windows_of(shape, slides);
            let cotangent = rounded::<E>(&random(windows.len(), 2));
            let [_, rows, columns] = pooled(shape, slides);
            for isa in Isa::available() {
                // As bits, because NaN is not equal to itself.
                let largest = same_for_all_pools(|| {
                    let largest = max(isa, &x, shape, slides);
                    largest
                        .iter()
                        .map(|x| x.to_f64().to_bits())
                        .collect::<Vec<u64>>()
                });
                let mean = same_for_all_pools(|| average(isa, &finite, shape, slides).to_vec());
                let from_max =
                    same_for_all_pools(|| max_adjoint(isa, &x, &cotangent, shape, slides).to_vec());
                let from_mean =
                    same_for_all_pools(|| average_adjoint(isa, &cotangent, shape, slides).to_vec());
                let mut gradient = vec![0.0; len];
                assert_eq!([largest.len(), mean.len()], [windows.len(); 2]);
                for (index, window) in windows.iter().enumerate() {
                    let values: Vec<f64> = window.iter().map(|at| x[*at].to_f64()).collect();
                    let taken = |best: usize, at: usize| match values[at] {
                        value if value.is_nan() || value > values[best] => at,
                        _ => best,
                    };
                    let mut best = (0..values.len()).fold(0, taken);
                    if values[best] == f64::NEG_INFINITY {
                        let taps = [index / columns % rows, index % columns];
                        let [row, column] = [0, 1].map(|dim| slides[dim].first(taps[dim]));
                        best = row * slides[1].kernel + column;
                    }
                    let (found, expected) = (f64::from_bits(largest[index]), values[best]);
                    assert!(found == expected || found.is_nan() && expected.is_nan());
                    let sum: f64 = window.iter().map(|at| finite[*at].to_f64()).sum();
                    assert!((mean[index].to_f64() - sum / window.len() as f64).abs() < 1e-5);
                    gradient[window[best]] += cotangent[index].to_f64();
                }
                for (found, expected) in from_max.iter().zip(&gradient) {
                    assert!(
                        (found.to_f64() - expected).abs() < 1e-5,
                        "{shape:?} {slides:?}"
                    );
                }
                let sides = [dot(&mean, &cotangent), dot(&finite, &from_mean)];
                assert!((sides[0] - sides[1]).abs() < 1e-4, "{sides:?}");
            }
        }
    }

    #[test]
    fn windows_are_pooled_and_one_cell_takes_the_gradient_of_a_maximum() {
        check::<f32>([0; 2]);
        check::<f64>([2, 1]);
    }
}
