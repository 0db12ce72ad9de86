//! Factors of rows and panels, and sums of their products in registers.

use std::ops::Range;

use pulp::Simd;

use crate::kernel::matrices::Matrix;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Factors of rows: the address of the first, and the distances to that of the next row and to the next of the same row.
#[derive(Clone, Copy)]
pub(crate) struct Factors<E> {
    pub first: *const E,
    pub row: usize,
    pub step: usize,
}

/// Writes the factors of columns, `width` for each of so many steps.
///
/// # Safety
/// There must be room for them.
#[inline(always)]
pub(super) unsafe fn pack_panel<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    b: Matrix<'_, P::Number>,
    columns: Range<usize>,
    [steps, width]: [usize; 2],
    to: *mut E,
) {
    let ([summed, _], [row, column]) = (b.size(), b.strides());
    let vectors = match column {
        1 => columns.len() / E::lanes::<S>(),
        _ => 0,
    };
    let packed = vectors * E::lanes::<S>();
    // SAFETY: the caller's; numbers of the matrix.
    unsafe {
        for step in 0..steps {
            let numbers = [step * P::NUMBERS, (step + 1) * P::NUMBERS - 1];
            let rows = numbers.map(|number| b.first().wrapping_add(number * row + columns.start));
            for vector in (0..packed).step_by(E::lanes::<S>()) {
                let mut vectors = [E::splat(simd, E::default()); 2];
                for (index, vector_of) in vectors.iter_mut().enumerate() {
                    if numbers[index] < summed {
                        *vector_of = P::load::<S>(rows[index].add(vector));
                    }
                }
                E::store::<S>(to.add(step * width + vector), P::join(simd, vectors));
            }
        }
        if packed < width {
            match column {
                1 => pack_columns::<E, P>(b, 1, columns, packed, [steps, width], to),
                _ => pack_columns::<E, P>(b, column, columns, packed, [steps, width], to),
            }
        }
    }
}

/// [`pack_panel`] of the columns from `packed` on of a matrix with this step from column to column, which may be a constant.
#[inline(always)]
unsafe fn pack_columns<E: Element, P: Products<E>>(
    b: Matrix<'_, P::Number>,
    column: usize,
    columns: Range<usize>,
    packed: usize,
    [steps, width]: [usize; 2],
    to: *mut E,
) {
    let ([summed, _], [row, _]) = (b.size(), b.strides());
    for step in 0..steps {
        let rows = [step * P::NUMBERS, (step + 1) * P::NUMBERS - 1];
        for lane in packed..width {
            let numbers = rows.map(|number| {
                let there = number < summed && lane < columns.len();
                let offset = number * row + (columns.start + lane) * column;
                match there {
                    // SAFETY: a number of the matrix.
                    true => unsafe { b.at(offset) },
                    false => P::Number::default(),
                }
            });
            // SAFETY: the caller's.
            unsafe { *to.add(step * width + lane) = P::factor(numbers) };
        }
    }
}

/// The factors of rows, packed to scratch if they do not lie in memory as they are.
///
/// # Safety
/// There must be room for one of each row and step.
#[inline(always)]
pub(super) unsafe fn factors<E: Element, P: Products<E>>(
    a: Matrix<'_, P::Number>,
    scratch: *mut E,
) -> Factors<E> {
    let ([rows, summed], [row, column]) = (a.size(), a.strides());
    let pairs = summed.is_multiple_of(P::NUMBERS) && row.is_multiple_of(P::NUMBERS) && column == 1;
    if P::NUMBERS == 1 || pairs {
        return Factors {
            first: a.first().cast(),
            row: row / P::NUMBERS,
            step: column,
        };
    }
    let steps = summed.div_ceil(P::NUMBERS);
    // Rows lie one after the other, or steps do, as in memory.
    let (to_row, to_step) = if column == 1 { (steps, 1) } else { (1, rows) };
    let write = |place: usize, step: usize| {
        let numbers = [0, 1].map(|number| step * P::NUMBERS + number);
        let numbers = numbers.map(|number| match number < summed {
            // SAFETY: a number of the matrix.
            true => unsafe { a.at(place * row + number * column) },
            false => P::Number::default(),
        });
        // SAFETY: the caller's.
        unsafe { *scratch.add(place * to_row + step * to_step) = P::factor(numbers) };
    };
    if column == 1 {
        (0..rows).for_each(|place| (0..steps).for_each(|step| write(place, step)));
    } else {
        (0..steps).for_each(|step| (0..rows).for_each(|place| write(place, step)));
    }
    Factors {
        first: scratch,
        row: to_row,
        step: to_step,
    }
}

/// Sums of products of some rows with a panel.
#[derive(Clone, Copy)]
pub(crate) struct Sums<E> {
    pub a: Factors<E>,
    pub rows: usize,
    /// A panel of `width` columns.
    pub b: *const E,
    pub width: usize,
    pub steps: usize,
    /// Sums so far, and sums with the products, each with the distance from a row to the next.
    pub from: (*const E, usize),
    pub to: (*mut E, usize),
}

impl<E: Element> Sums<E> {
    /// Adds the products.
    ///
    /// # Safety
    /// All pointers must be good for so many rows, columns and steps.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd, P: Products<E>>(&self, simd: S) {
        let vectors = self.width / E::lanes::<S>();
        // As many as 32 registers permit, and 16.
        let most = if size_of::<E::Vector<S>>() >= 64 {
            4
        } else {
            2
        };
        let mut first = 0;
        while first < vectors {
            let count = most.min(vectors - first);
            // SAFETY: the caller's.
            unsafe {
                match count {
                    4 => self.columns::<S, P, 4>(simd, first),
                    2 | 3 => self.columns::<S, P, 2>(simd, first),
                    _ => self.columns::<S, P, 1>(simd, first),
                }
            }
            first += if count == 3 { 2 } else { count };
        }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd, P: Products<E>, const C: usize>(&self, simd: S, first: usize) {
        let mut row = 0;
        // SAFETY: the caller's.
        unsafe {
            while row + 6 <= self.rows {
                self.block::<S, P, 6, C>(simd, row, first);
                row += 6;
            }
            while row + 3 <= self.rows {
                self.block::<S, P, 3, C>(simd, row, first);
                row += 3;
            }
            while row < self.rows {
                self.block::<S, P, 1, C>(simd, row, first);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, P: Products<E>, const R: usize, const C: usize>(
        &self,
        simd: S,
        row: usize,
        first: usize,
    ) {
        let lanes = E::lanes::<S>();
        let at = |row: usize, pitch: usize, vector: usize| row * pitch + (first + vector) * lanes;
        // SAFETY: the caller's.
        unsafe {
            let mut sums: [[E::Vector<S>; C]; R] = std::array::from_fn(
                #[inline(always)]
                |member| {
                    std::array::from_fn(
                        #[inline(always)]
                        |vector| {
                            E::load::<S>(self.from.0.add(at(row + member, self.from.1, vector)))
                        },
                    )
                },
            );
            let a: [*const E; R] = std::array::from_fn(
                #[inline(always)]
                |member| self.a.first.wrapping_add((row + member) * self.a.row),
            );
            for step in 0..self.steps {
                let b = self.b.add(step * self.width + first * lanes);
                let b: [E::Vector<S>; C] = std::array::from_fn(
                    #[inline(always)]
                    |vector| E::load::<S>(b.add(vector * lanes)),
                );
                for (sums, a) in sums.iter_mut().zip(&a) {
                    // Pairs may begin at any number.
                    let a = E::splat(simd, a.add(step * self.a.step).read_unaligned());
                    for (sum, b) in sums.iter_mut().zip(&b) {
                        *sum = P::mul_add(simd, a, *b, *sum);
                    }
                }
            }
            for (member, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    E::store::<S>(self.to.0.add(at(row + member, self.to.1, vector)), *sum);
                }
            }
        }
    }
}
