//! Kernels of softmax, log-softmax and log-sum-exp along lines.

use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{WIDEST, load, store, sums};
use crate::kernel::lines::{Columns, Lines, by_lane, vectors};
use crate::kernel::math::exp;
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Function of the exponentials of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Each exponential over their sum.
    Softmax,
    /// Logarithm of the softmax.
    LogSoftmax,
    /// Logarithm of the sum of exponentials.
    LogSumExp,
}

/// Computes the result, of the lines' shape or with one cell per line.
pub(super) fn forward<E: Element>(isa: Isa, kind: Kind, lines: Lines, x: &[E]) -> Buffer<E> {
    assert_eq!(x.len(), lines.len());
    let len = match kind {
        Kind::LogSumExp => lines.count(),
        _ => lines.len(),
    };
    let run = |place, y| {
        isa.run(Forward {
            kind,
            lines,
            place,
            x,
            y,
        })
    };
    // SAFETY: a task writes its lines, or their results, and no others.
    unsafe { lines.filled(len, run) }
}

/// Computes the gradient of the input from the result; `x` is used for log-sum-exp only, and empty
/// otherwise.
pub(super) fn backward<E: Element>(
    isa: Isa,
    kind: Kind,
    lines: Lines,
    [x, y, cotangent]: [&[E]; 3],
) -> Buffer<E> {
    let run = |place, gradient| {
        isa.run(Backward {
            kind,
            lines,
            place,
            x,
            y,
            cotangent,
            gradient,
        });
    };
    // SAFETY: a task writes its lines and no others.
    unsafe { lines.filled(lines.len(), run) }
}

pub(super) struct Forward<'a, E> {
    pub(super) kind: Kind,
    pub(super) lines: Lines,
    pub(super) place: Columns,
    pub(super) x: &'a [E],
    pub(super) y: Shared<E>,
}

/// Argument of the exponential function: a cell minus the maximum of its line. For log-sum-exp an
/// infinite maximum is replaced by the largest finite number, so that the difference is not NaN.
#[inline(always)]
fn away<S: Simd, E: Element>(
    simd: S,
    kind: Kind,
    x: E::Vector<S>,
    most: E::Vector<S>,
) -> E::Vector<S> {
    if kind != Kind::LogSumExp {
        return E::minus(simd, x, most);
    }
    let zero = E::splat(simd, E::default());
    let [low, high] = [E::default() - E::HIGHEST, E::HIGHEST].map(|value| E::splat(simd, value));
    let most = E::select_less(simd, [high, most], high, most);
    let most = E::select_less(simd, [most, low], low, most);
    let away = E::minus(simd, x, most);
    E::select_less(simd, [zero, away], zero, away)
}

/// Returns the larger of two values; the first where the second is NaN.
#[inline(always)]
fn larger<S: Simd, E: Element>(simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S> {
    E::select_less(simd, [a, b], b, a)
}

impl<E: Element> WithSimd for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if self.lines.inner == 1 {
            self.row(simd);
        } else {
            self.columns(simd);
        }
    }
}

impl<E: Element> Forward<'_, E> {
    /// Processes a line with contiguous cells.
    #[inline(always)]
    fn row<S: Simd>(self, simd: S) {
        let Self {
            kind,
            lines,
            place,
            x,
            y,
        } = self;
        let cells = lines.cells;
        let x = &x[place.outer * cells..][..cells];
        let lowest = E::splat(simd, E::from_f64(f64::NEG_INFINITY));
        let mut most = lowest;
        for part in vectors::<S, E>(cells) {
            most = larger::<S, E>(simd, most, E::load_part(simd, &x[part], lowest));
        }
        let mut lanes = [E::default(); WIDEST];
        let lanes = &mut lanes[..E::lanes::<S>()];
        store(simd, lanes, most);
        let most = lanes.iter().map(|lane| lane.to_f64());
        let most = E::from_f64(most.fold(f64::NEG_INFINITY, f64::max));
        let top = E::splat(simd, most);
        if kind == Kind::Softmax {
            // SAFETY: the line of this task.
            let y = unsafe { y.slice(place.outer * cells..(place.outer + 1) * cells) };
            for part in vectors::<S, E>(cells) {
                let away = away::<S, E>(simd, kind, load(simd, &x[part.clone()]), top);
                store(simd, &mut y[part], exp::<S, E>(simd, away));
            }
            let [sum] = sums(
                simd,
                [&*y],
                [E::splat(simd, E::default())],
                #[inline(always)]
                |[sum], [y]| [E::plus(simd, sum, y)],
            );
            let factor = E::splat(simd, E::from_f64(sum.to_f64().recip()));
            for part in vectors::<S, E>(cells) {
                let scaled = E::times(simd, load(simd, &y[part.clone()]), factor);
                store(simd, &mut y[part], scaled);
            }
            return;
        }
        let [sum] = sums(
            simd,
            [x],
            [lowest],
            #[inline(always)]
            |[sum], [x]| {
                [E::plus(
                    simd,
                    sum,
                    exp::<S, E>(simd, away::<S, E>(simd, kind, x, top)),
                )]
            },
        );
        let logarithm = sum.ln();
        if kind == Kind::LogSumExp {
            // SAFETY: the result of this task's line.
            unsafe { *y.at(place.outer) = logarithm + most };
            return;
        }
        // SAFETY: the line of this task.
        let y = unsafe { y.slice(place.outer * cells..(place.outer + 1) * cells) };
        let logarithm = E::splat(simd, logarithm);
        for part in vectors::<S, E>(cells) {
            let away = E::minus(simd, load(simd, &x[part.clone()]), top);
            store(simd, &mut y[part], E::minus(simd, away, logarithm));
        }
    }

    /// Processes adjacent lines, up to [`TOGETHER`] vectors at a time.
    #[inline(always)]
    fn columns<S: Simd>(self, simd: S) {
        let Self {
            kind,
            lines,
            place,
            x,
            y,
        } = self;
        for place in together::<S, E>(&place) {
            let count = place.columns.len();
            let parts = || vectors::<S, E>(count).enumerate();
            let cells = |cell: usize| &x[lines.part(&place, cell)];
            // SAFETY: within the lines of this task.
            let row = |cell: usize| unsafe { y.slice(lines.part(&place, cell)) };
            let zero = E::splat(simd, E::default());
            let mut most = [E::splat(simd, E::from_f64(f64::NEG_INFINITY)); TOGETHER];
            for cell in 0..lines.cells {
                let x = cells(cell);
                for (vector, part) in parts() {
                    most[vector] = larger::<S, E>(simd, most[vector], load(simd, &x[part]));
                }
            }
            let mut sum = [zero; TOGETHER];
            for cell in 0..lines.cells {
                let x = cells(cell);
                for (vector, part) in parts() {
                    let x = load(simd, &x[part.clone()]);
                    let power = exp::<S, E>(simd, away::<S, E>(simd, kind, x, most[vector]));
                    if kind == Kind::Softmax {
                        store(simd, &mut row(cell)[part], power);
                    }
                    sum[vector] = E::plus(simd, sum[vector], power);
                }
            }
            if kind == Kind::Softmax {
                for (vector, _) in parts() {
                    sum[vector] = E::over(simd, E::splat(simd, E::from_f64(1.0)), sum[vector]);
                }
                for cell in 0..lines.cells {
                    let row = row(cell);
                    for (vector, part) in parts() {
                        let scaled = E::times(simd, load(simd, &row[part.clone()]), sum[vector]);
                        store(simd, &mut row[part], scaled);
                    }
                }
                continue;
            }
            for (vector, _) in parts() {
                sum[vector] = by_lane::<S, E>(simd, sum[vector], E::ln);
            }
            if kind == Kind::LogSumExp {
                // SAFETY: the results of this task's lines.
                let results = unsafe { y.slice(lines.of_columns(&place)) };
                for (vector, part) in parts() {
                    store(
                        simd,
                        &mut results[part],
                        E::plus(simd, sum[vector], most[vector]),
                    );
                }
                continue;
            }
            for cell in 0..lines.cells {
                let (x, row) = (cells(cell), row(cell));
                for (vector, part) in parts() {
                    let away = E::minus(simd, load(simd, &x[part.clone()]), most[vector]);
                    store(simd, &mut row[part], E::minus(simd, away, sum[vector]));
                }
            }
        }
    }
}

/// Vectors of columns processed together, reading whole rows of them one after the other.
const TOGETHER: usize = 8;

/// Splits columns into parts of at most [`TOGETHER`] vectors.
#[inline(always)]
fn together<S: Simd, E: Element>(place: &Columns) -> impl Iterator<Item = Columns> {
    let (outer, columns) = (place.outer, place.columns.clone());
    let width = TOGETHER * E::lanes::<S>();
    columns.clone().step_by(width).map(move |start| Columns {
        outer,
        columns: start..columns.end.min(start + width),
    })
}

pub(super) struct Backward<'a, E> {
    pub(super) kind: Kind,
    pub(super) lines: Lines,
    pub(super) place: Columns,
    pub(super) x: &'a [E],
    pub(super) y: &'a [E],
    pub(super) cotangent: &'a [E],
    pub(super) gradient: Shared<E>,
}

/// Computes the gradient of a cell of the input.
///
/// - softmax: `y · (ȳ − Σ ȳ·y)`
/// - log-softmax: `ȳ − e^y · Σ ȳ`
/// - log-sum-exp: `ȳ · e^(x − y)`, as in PyTorch: NaN for a cell of plus infinity, zero for the
///   others of its line. A line of minus infinity has a zero gradient, where PyTorch's is NaN.
#[inline(always)]
fn pull<S: Simd, E: Element>(
    simd: S,
    kind: Kind,
    [value, cotangent, sum]: [E::Vector<S>; 3],
) -> E::Vector<S> {
    match kind {
        Kind::Softmax => E::times(simd, value, E::minus(simd, cotangent, sum)),
        Kind::LogSoftmax => {
            let power = exp::<S, E>(simd, value);
            E::minus(simd, cotangent, E::times(simd, power, sum))
        }
        Kind::LogSumExp => E::times(simd, exp::<S, E>(simd, value), cotangent),
    }
}

impl<E: Element> WithSimd for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            kind, lines, place, ..
        } = &self;
        if lines.inner == 1 && *kind != Kind::LogSumExp {
            self.row(simd);
        } else if lines.inner == 1 {
            self.row_of_sum(simd);
        } else {
            for place in together::<S, E>(place) {
                self.columns(simd, &place);
            }
        }
    }
}

impl<E: Element> Backward<'_, E> {
    #[inline(always)]
    fn row<S: Simd>(&self, simd: S) {
        let cells = self.lines.cells;
        let range = self.place.outer * cells..(self.place.outer + 1) * cells;
        let (y, cotangent) = (&self.y[range.clone()], &self.cotangent[range.clone()]);
        // SAFETY: the line of this task.
        let gradient = unsafe { self.gradient.slice(range) };
        let zero = E::splat(simd, E::default());
        let [products, plain] = sums(
            simd,
            [y, cotangent],
            [zero, zero],
            #[inline(always)]
            |[products, plain], [y, cotangent]| {
                [
                    E::mul_add(simd, y, cotangent, products),
                    E::plus(simd, plain, cotangent),
                ]
            },
        );
        let sum = match self.kind {
            Kind::Softmax => products,
            _ => plain,
        };
        let sum = E::splat(simd, sum);
        for part in vectors::<S, E>(cells) {
            let [y, cotangent] = [y, cotangent].map(|row| load(simd, &row[part.clone()]));
            store(
                simd,
                &mut gradient[part],
                pull::<S, E>(simd, self.kind, [y, cotangent, sum]),
            );
        }
    }

    #[inline(always)]
    fn row_of_sum<S: Simd>(&self, simd: S) {
        let (cells, outer) = (self.lines.cells, self.place.outer);
        let range = outer * cells..(outer + 1) * cells;
        let x = &self.x[range.clone()];
        // SAFETY: the line of this task.
        let gradient = unsafe { self.gradient.slice(range) };
        let y = E::splat(simd, shift(self.y[outer]));
        let cotangent = E::splat(simd, self.cotangent[outer]);
        for part in vectors::<S, E>(cells) {
            let away = E::minus(simd, load(simd, &x[part.clone()]), y);
            store(
                simd,
                &mut gradient[part],
                pull::<S, E>(simd, self.kind, [away, cotangent, y]),
            );
        }
    }

    #[inline(always)]
    fn columns<S: Simd>(&self, simd: S, place: &Columns) {
        let (lines, count) = (self.lines, place.columns.len());
        let parts = || vectors::<S, E>(count).enumerate();
        // SAFETY: within the lines of this task.
        let row = |cell: usize| unsafe { self.gradient.slice(lines.part(place, cell)) };
        let zero = E::splat(simd, E::default());
        if self.kind == Kind::LogSumExp {
            let of_columns = lines.of_columns(place);
            let (y, cotangent) = (&self.y[of_columns.clone()], &self.cotangent[of_columns]);
            let mut of_lines = [[zero; 2]; TOGETHER];
            for (vector, part) in parts() {
                let y = by_lane::<S, E>(simd, load(simd, &y[part.clone()]), shift);
                of_lines[vector] = [y, load(simd, &cotangent[part])];
            }
            for cell in 0..lines.cells {
                let (x, row) = (&self.x[lines.part(place, cell)], row(cell));
                for (vector, part) in parts() {
                    let [y, cotangent] = of_lines[vector];
                    let away = E::minus(simd, load(simd, &x[part.clone()]), y);
                    let found = pull::<S, E>(simd, self.kind, [away, cotangent, y]);
                    store(simd, &mut row[part], found);
                }
            }
            return;
        }
        let cells = |cell: usize| {
            let part = lines.part(place, cell);
            (&self.y[part.clone()], &self.cotangent[part])
        };
        let mut sum = [zero; TOGETHER];
        for cell in 0..lines.cells {
            let (y, cotangent) = cells(cell);
            for (vector, part) in parts() {
                let cotangent = load(simd, &cotangent[part.clone()]);
                sum[vector] = match self.kind {
                    Kind::Softmax => E::mul_add(simd, load(simd, &y[part]), cotangent, sum[vector]),
                    _ => E::plus(simd, sum[vector], cotangent),
                };
            }
        }
        for cell in 0..lines.cells {
            let ((y, cotangent), row) = (cells(cell), row(cell));
            for (vector, part) in parts() {
                let [y, cotangent] = [y, cotangent].map(|from| load(simd, &from[part.clone()]));
                let found = pull::<S, E>(simd, self.kind, [y, cotangent, sum[vector]]);
                store(simd, &mut row[part], found);
            }
        }
    }
}

/// Shift subtracted from the cells of a line: its result, or zero for minus infinity.
#[inline(always)]
fn shift<E: Element>(result: E) -> E {
    if result.to_f64() == f64::NEG_INFINITY {
        E::default()
    } else {
        result
    }
}
