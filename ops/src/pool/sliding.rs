//! Pooling of planes by windows of any kernel, stride and dilation, and the adjoints.
//!
//! The rows of each window are combined first, for all columns of the input, and then the columns:
//! a window of *m* × *n* cells costs *m* + *n* vectors instead of *m* · *n*.

use pulp::{Simd, WithSimd};

use super::combine::{Combine, Largest, Norm, Pull, Slope, Total};
use super::field::{Planes, Section, Together};
use super::phases::{Phases, Tap};
use super::slide::{Slide, Slides, pooled};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{apply, filled_bands, load, replace, store, store_pairs};
use crate::kernel::lines::vectors;
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};

/// Computes the maximum of every window; padding is minus infinity.
pub(super) fn max<E: Element>(isa: Isa, x: &Planes<'_, E>, slides: Slides) -> Buffer<E> {
    windows(isa, x, slides, Largest)
}

/// Computes the mean of every window; padding is zero.
pub(super) fn average<E: Element>(isa: Isa, x: &Planes<'_, E>, slides: Slides) -> Buffer<E> {
    windows(isa, x, slides, Total(mean(slides)))
}

/// Computes the norm of every window; padding is zero.
pub(super) fn norm<E: Element>(
    isa: Isa,
    x: &Planes<'_, E>,
    slides: Slides,
    norm: Norm,
) -> Buffer<E> {
    windows(isa, x, slides, norm)
}

/// Reciprocal of the number of cells of a window.
fn mean<E: Element>([down, across]: Slides) -> E {
    E::from_f64(1.0 / (down.kernel * across.kernel) as f64)
}

fn windows<E: Element>(
    isa: Isa,
    x: &Planes<'_, E>,
    slides: Slides,
    combine: impl Combine<E>,
) -> Buffer<E> {
    let columns = x.shape[2];
    let run = |place: [usize; 2], output: &mut [E]| {
        with_scratch(Phases::<E>::room(columns, slides[1]), |scratch| {
            isa.run(Row {
                x,
                place,
                slides,
                combine,
                scratch,
                output,
            });
        });
    };
    // SAFETY: the task writes a result for every window of its row.
    unsafe { filled_bands(pooled(x.shape, slides), 1, run) }
}

/// A row of windows.
struct Row<'a, E, C> {
    x: &'a Planes<'a, E>,
    /// Plane, and index of the row of windows.
    place: [usize; 2],
    slides: Slides,
    combine: C,
    /// Scratch for [`Phases`].
    scratch: &'a mut [E],
    output: &'a mut [E],
}

impl<E: Element, C: Combine<E>> WithSimd for Row<'_, E, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            x,
            place: [plane, row],
            slides: [down, across],
            combine,
            scratch,
            output,
        } = self;
        let (line, phases) = Phases::divided(x.shape[2], scratch);
        for band in &x.bands {
            let line = &mut line[band.clone()];
            let mut rows = x.rows([plane, row * down.stride], down, band);
            let mut begun = false;
            while let Some(together) = Together::next(&mut rows) {
                match *together.rows() {
                    [(_, a)] if !begun => combined(simd, combine, [a], line),
                    [(_, a), (_, b)] if !begun => combined(simd, combine, [a, b], line),
                    [(_, a), (_, b), (_, c)] if !begun => combined(simd, combine, [a, b, c], line),
                    ref rows => {
                        for cells in vectors::<S, E>(line.len()) {
                            let mut rows = rows.iter().map(|row| &row.1[cells.clone()]);
                            let mut all = if begun {
                                load(simd, &line[cells.clone()])
                            } else {
                                combine.prepare(simd, load(simd, rows.next().expect("one or more")))
                            };
                            for row in rows {
                                let next = combine.prepare(simd, load(simd, row));
                                all = combine.combine(simd, all, next);
                            }
                            store(simd, &mut line[cells], all);
                        }
                    }
                }
                begun = true;
            }
            if !begun {
                line.fill(combine.of_nothing());
            }
        }
        let phases = Phases::of(simd, line, across, phases);
        for part in vectors::<S, E>(output.len()) {
            let mut tap = Tap::first(part.start);
            let mut all = phases.load(simd, tap);
            for _ in 1..across.kernel {
                tap = phases.after(tap);
                all = combine.combine(simd, all, phases.load(simd, tap));
            }
            store(simd, &mut output[part], combine.finish(simd, all));
        }
    }
}

/// Writes the combined cells of `N` rows.
#[inline(always)]
fn combined<S: Simd, E: Element, const N: usize>(
    simd: S,
    combine: impl Combine<E>,
    rows: [&[E]; N],
    line: &mut [E],
) {
    apply(
        simd,
        rows,
        line,
        #[inline(always)]
        |rows| {
            let mut all = combine.prepare(simd, rows[0]);
            for row in &rows[1..] {
                all = combine.combine(simd, all, combine.prepare(simd, *row));
            }
            all
        },
    );
}

/// Adjoint of [`average`]: the gradient of a section of planes of `shape`.
pub(super) fn average_adjoint<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
    section: &Section,
    slides: Slides,
) -> Buffer<E> {
    spread(isa, cotangent, shape, section, slides, mean(slides))
}

/// Pulls a cotangent of [`norm`] at `x` back to the sums of powers, for [`norm_adjoint`].
pub(super) fn pulled<E: Element>(
    isa: Isa,
    x: &Planes<'_, E>,
    cotangent: &[E],
    slides: Slides,
    norm: Norm,
) -> Buffer<E> {
    let mut pulled = windows(isa, x, slides, norm);
    replace(isa, pulled.elements_mut(), [cotangent], 1, &Pull(norm));
    pulled
}

/// Adjoint of [`norm`], from the [pulled] cotangent: the gradient of a section with these cells of
/// planes of `shape`.
pub(super) fn norm_adjoint<E: Element>(
    isa: Isa,
    pulled: &[E],
    shape: [usize; 3],
    (section, cells): (&Section, &[E]),
    slides: Slides,
    norm: Norm,
) -> Buffer<E> {
    let mut gradient = spread(isa, pulled, shape, section, slides, E::from_f64(1.0));
    replace(isa, gradient.elements_mut(), [cells], 1, &Slope(norm));
    gradient
}

/// Adjoint of the sums of windows times a factor, in a section of planes of `shape`.
fn spread<E: Element>(
    isa: Isa,
    cotangent: &[E],
    shape: [usize; 3],
    section: &Section,
    slides: Slides,
    factor: E,
) -> Buffer<E> {
    let [_, outputs, all] = pooled(shape, slides);
    let [down, across] = slides;
    let margin = across.reach() - 1;
    let (near, columns) = across.around(&section.columns, shape[2]);
    let width = near.len();
    let run = |[plane, row]: [usize; 2], gradient: &mut [E]| {
        let row = section.rows.start + row;
        let rows = down.taps_at(row, outputs);
        let rows =
            rows.map(|(window, _)| &cotangent[(plane * outputs + window) * all..][near.clone()]);
        let rows: Vec<&[E]> = rows.collect();
        let stretched = columns.len().max((width * across.stride).max(1)) + 2 * margin;
        with_scratch(width + stretched, |scratch| {
            let (sum, line) = scratch.split_at_mut(width);
            line.fill(E::default());
            isa.run(Spread {
                rows: &rows,
                across,
                factor,
                sum,
                line,
                first: section.columns.start - columns.start,
                gradient,
            });
        });
    };
    // SAFETY: the task writes its row.
    unsafe { filled_bands(section.shape(shape[0]), 1, run) }
}

/// A row of the gradient of averages.
struct Spread<'a, E> {
    /// Rows of the cotangent whose windows meet the row.
    rows: &'a [&'a [E]],
    across: Slide,
    factor: E,
    /// Scratch for the sum of `rows`.
    sum: &'a mut [E],
    /// Zeros to hold that sum at the first cells of windows, with margins of a window.
    line: &'a mut [E],
    /// Offset of the gradient's first column from the first window.
    first: usize,
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
            first,
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
                let place = margin + first + start - tap * across.dilation;
                all = E::plus(simd, all, load(simd, &line[place..place + cells.len()]));
            }
            store(simd, &mut gradient[cells], all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel;
    use super::super::maximum::{max_adjoint, max_and_places};
    use super::*;
    use crate::kernel::testing::{dot, random, rounded, same_for_all_pools};

    const SLIDES: [[[usize; 3]; 2]; 5] = [
        [[3, 2, 1], [3, 2, 1]],
        [[3, 1, 1], [2, 1, 3]],
        [[1, 1, 1], [5, 3, 1]],
        [[2, 3, 2], [3, 2, 2]],
        [[4, 2, 1], [1, 1, 1]],
    ];
    const SHAPES: [[usize; 3]; 5] = [[2, 9, 37], [1, 40, 7], [3, 7, 8], [0, 9, 9], [1, 9, 2]];

    /// Cells of every window, by definition.
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
            // Few distinct values, so that many are equal; some are minus infinity, some NaN.
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
                // Compared as bits, because NaN is not equal to itself.
                let largest = same_for_all_pools(|| {
                    let largest = max(isa, &Planes::whole(&x, shape), slides);
                    largest
                        .iter()
                        .map(|x| x.to_f64().to_bits())
                        .collect::<Vec<u64>>()
                });
                let mean = same_for_all_pools(|| {
                    average(isa, &Planes::whole(&finite, shape), slides).to_vec()
                });
                let from_max = same_for_all_pools(|| {
                    let [again, places] = max_and_places(isa, &Planes::whole(&x, shape), slides);
                    assert!(
                        again
                            .iter()
                            .map(|x| x.to_f64().to_bits())
                            .eq(largest.iter().copied())
                    );
                    let sides = [&places[..], &cotangent];
                    max_adjoint(isa, sides, shape, &Section::whole(shape), slides).to_vec()
                });
                let from_mean = same_for_all_pools(|| {
                    average_adjoint(isa, &cotangent, shape, &Section::whole(shape), slides).to_vec()
                });
                let mut gradient = vec![0.0; len];
                assert_eq!([largest.len(), mean.len()], [windows.len(); 2]);
                for (index, window) in windows.iter().enumerate() {
                    let values: Vec<f64> = window.iter().map(|cell| x[*cell].to_f64()).collect();
                    let taken = |best: usize, cell: usize| match values[cell] {
                        value if value.is_nan() || value > values[best] => cell,
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
                    let sum: f64 = window.iter().map(|cell| finite[*cell].to_f64()).sum();
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

    fn check_norms<E: Element>() {
        let shapes = SHAPES
            .iter()
            .flat_map(|shape| SLIDES.map(|slides| (*shape, slides)));
        let pairs = [(([2, 7, 41]), [[2, 2, 1]; 2]), ([1, 4, 6], [[2, 2, 1]; 2])];
        for (shape, slides) in shapes.chain(pairs) {
            let slides = slides.map(|[kernel, stride, dilation]| Slide {
                dilation,
                ..Slide::new(kernel, stride)
            });
            // Some windows are all zeros.
            let value = |x: f64| if x > 0.0 { x } else { (4.0 * x).ceil() };
            let x: Vec<f64> = random(shape.iter().product(), 1)
                .into_iter()
                .map(value)
                .collect();
            let x = rounded::<E>(&x);
            let windows = windows_of(shape, slides);
            let cotangent = rounded::<E>(&random(windows.len(), 2));
            for order in [1.0, 1.5, 2.0, 3.0] {
                let mut norms = Vec::new();
                let mut gradient = vec![0.0; x.len()];
                for (window, cotangent) in windows.iter().zip(&cotangent) {
                    let cells = || window.iter().map(|cell| (*cell, x[*cell].to_f64()));
                    let sum: f64 = cells().map(|(_, x)| x.abs().powf(order)).sum();
                    let norm = sum.powf(1.0 / order);
                    for (cell, x) in cells().filter(|(_, x)| *x != 0.0) {
                        let slope = x.signum() * (x.abs() / norm).powf(order - 1.0);
                        gradient[cell] += slope * cotangent.to_f64();
                    }
                    norms.push(norm);
                }
                let order = Norm(order);
                let (planes, whole) = (Planes::whole(&x, shape), Section::whole(shape));
                let section = (&whole, &x[..]);
                let adjoint = |isa| {
                    let pulled = pulled(isa, &planes, &cotangent, slides, order);
                    norm_adjoint(isa, &pulled, shape, section, slides, order).to_vec()
                };
                for isa in Isa::available() {
                    let mut found = vec![[
                        same_for_all_pools(|| norm(isa, &planes, slides, order).to_vec()),
                        same_for_all_pools(|| adjoint(isa)),
                    ]];
                    if slides
                        .into_iter()
                        .all(|slide| (slide.kernel, slide.stride) == (2, 2) && slide.dilation == 1)
                    {
                        found.push([
                            kernel::norm(isa, &x, shape, order).to_vec(),
                            kernel::norm_adjoint(isa, &x, &cotangent, shape, order).to_vec(),
                        ]);
                    }
                    for (found, expected) in found
                        .iter()
                        .flat_map(|both| both.iter().zip([&norms, &gradient]))
                    {
                        assert_eq!(found.len(), expected.len());
                        for (found, expected) in found.iter().zip(expected) {
                            let off = (found.to_f64() - expected).abs();
                            assert!(off < 1e-4, "{shape:?} {slides:?} {order:?}: {off}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn norms_and_their_gradients_are_those_of_the_definition() {
        check_norms::<f32>();
        check_norms::<f64>();
    }

    #[test]
    fn windows_are_pooled_and_one_cell_takes_the_gradient_of_a_maximum() {
        check::<f32>([0; 2]);
        check::<f64>([2, 1]);
    }
}
