//! Products of many rows with a matrix that is packed into panels: groups of columns, contiguous
//! along the summed dim.
//!
//! Sums of a few rows and a few vectors of columns stay in registers; each vector loaded serves all
//! of these rows. Factors are single numbers, or pairs of bf16 numbers that are adjacent along the
//! summed dim ([`Pairs`](super::products::Pairs)); matrix instructions multiply pairs of parts of
//! numbers.

mod dots;
pub(crate) mod matrices;
mod over_rows;
mod sums;
#[cfg(test)]
mod tests;

use std::any::TypeId;
use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::buffer::Buffer;
use super::lanes::WIDEST;
use super::matrices::Matrix;
use super::memory::{Shared, with_scratch};
use super::products::{self, NO_MATRICES, Products, matrices_multiply};
use super::simd::{Element, Isa};
pub(crate) use dots::{are_few, dots_to};
pub(crate) use over_rows::{product_and_sums_over_rows, product_over_rows, product_over_rows_to};
pub(crate) use sums::{Factors, Sums};
use sums::{as_they_lie, factors, pack_panel};

/// Number of columns of a panel.
const PANEL: usize = 64;
/// Number of rows of a task.
const ROWS: usize = 192;
/// Minimum number of tasks per thread to aim for.
const TASKS: usize = 2;
/// Number of multiply-adds from which a product is shared by all threads.
pub(crate) const SHARED: usize = 1 << 20;

/// Rounds a number of columns up to whole vectors.
fn whole(columns: usize) -> usize {
    columns.next_multiple_of(WIDEST)
}

/// Columns of a panel of at most `most`, and its width in whole vectors.
fn panel(number: usize, most: usize, columns: usize) -> (Range<usize>, usize) {
    let start = number * most;
    let width = most.min(whole(columns) - start);
    (start..(start + width).min(columns), width)
}

/// Maximum number of columns of a panel.
fn most_columns(by_matrices: bool) -> usize {
    if by_matrices {
        matrices::COLUMNS
    } else {
        PANEL
    }
}

/// Maximum number of elements for the packed factors of `rows` rows of `summed` numbers.
fn room<E: Element, P: Products<E>>(rows: usize, summed: usize, by_matrices: bool) -> usize {
    if by_matrices {
        matrices::room(rows, summed, P::PARTS)
    } else {
        Factors::<E>::room(rows, summed.div_ceil(P::NUMBERS))
    }
}

/// Factors of rows, possibly packed to scratch.
#[derive(Clone, Copy)]
enum Left<E> {
    Vectors(Factors<E>),
    Matrices(matrices::Rows<E>),
}

impl<E: Element> Left<E> {
    /// # Safety
    /// `scratch` must have [`room`] for the factors.
    #[inline(always)]
    unsafe fn new<S: Simd, P: Products<E>>(
        simd: S,
        a: Matrix<'_, P::Number>,
        by_matrices: bool,
        scratch: *mut E,
    ) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if const { matrices_multiply::<S, E, P>() } && by_matrices {
                Self::Matrices(matrices::Rows::new::<S, P>(simd, a, scratch))
            } else {
                Self::Vectors(factors::<E, P>(a, scratch))
            }
        }
    }

    /// Adds the products to the previous sums.
    ///
    /// # Safety
    /// All pointers must be valid for these rows, columns and steps.
    #[inline(always)]
    unsafe fn add<S: Simd, P: Products<E>>(self, simd: S, sums: Sums<E, ()>) {
        // SAFETY: guaranteed by the caller; factors are matrices only if the instruction set has
        // them.
        unsafe {
            match self {
                Self::Vectors(a) => sums.with_rows(a).run::<S, P>(simd),
                Self::Matrices(a) if const { matrices_multiply::<S, E, P>() } => {
                    sums.with_rows(a).run_by_matrices::<P>();
                }
                Self::Matrices(_) => unreachable!("{NO_MATRICES}"),
            }
        }
    }
}

/// Number of panels per task, given the number of chunks of rows: if chunks are few, panels are
/// divided among tasks too.
fn panels_together(panels: usize, chunks: usize) -> usize {
    let tasks = TASKS * rayon::current_num_threads();
    let groups = tasks.div_ceil(chunks.max(1)).clamp(1, panels.max(1));
    panels.div_ceil(groups).max(1)
}

/// Whether to use matrix instructions: for few summed numbers or columns, splitting numbers into
/// parts takes longer than multiplying them.
fn by_matrices<E: Element, P: Products<E>>(isa: Isa, summed: usize, columns: usize) -> bool {
    const COLUMNS: usize = 32;
    let pays = summed >= matrices::COLUMNS / 2 && columns >= COLUMNS;
    isa.has_matrices() && (P::PARTS == 1 || P::PARTS > 1 && pays)
}

/// Number of factors along a summed dim of `summed` numbers.
fn steps_of<E: Element, P: Products<E>>(summed: usize, by_matrices: bool) -> usize {
    if by_matrices {
        matrices::factors(summed, P::PARTS)
    } else {
        summed.div_ceil(P::NUMBERS)
    }
}

/// Runs tasks, on one thread if they do few multiply-adds in total.
fn deal(tasks: usize, products: usize, run: impl Fn(usize) + Sync) {
    match products {
        ..SHARED => (0..tasks).for_each(run),
        _ => tasks::for_each(tasks, 1, run),
    }
}

/// Product of a range of rows with a range of panels.
struct OfRows<'a, E: Element, P: Products<E>> {
    a: Matrix<'a, P::Number>,
    b: Matrix<'a, P::Number>,
    /// All panels, if shared with other tasks, and the range of this task.
    panels: Option<&'a [E]>,
    numbers: Range<usize>,
    /// One value per column.
    bias: &'a [E],
    by_matrices: bool,
    /// First of the rows.
    y: *mut P::Number,
}

impl<E: Element, P: Products<E>> WithSimd for OfRows<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ([rows, summed], [_, all]) = (self.a.size(), self.b.size());
        let by_matrices = self.by_matrices;
        let steps = steps_of::<E, P>(summed, by_matrices);
        let packed = match as_they_lie::<E, P>(self.a) && !by_matrices {
            true => 0,
            false => room::<E, P>(rows, summed, by_matrices),
        };
        let tile_room = rows * most_columns(by_matrices);
        let panel_room = match self.panels {
            Some(_) => 0,
            None => most_columns(by_matrices).min(whole(all)) * steps,
        };
        with_scratch(
            tile_room + panel_room + packed,
            #[inline(always)]
            |scratch: &mut [E]| {
                let (tile, rest) = scratch.split_at_mut(tile_room);
                let (columns_of_b, packed) = rest.split_at_mut(panel_room);
                // SAFETY: rows, panels and bias have these elements, and the scratch has the room.
                unsafe {
                    let a = Left::new::<S, P>(simd, self.a, by_matrices, packed.as_mut_ptr());
                    for number in self.numbers.clone() {
                        let (columns, width) = panel(number, most_columns(by_matrices), all);
                        let y = self.y.add(columns.start);
                        let packed_panel = match self.panels {
                            Some(panels) => panels.as_ptr().add(columns.start * steps),
                            None => {
                                Pack::<E, P> {
                                    b: self.b,
                                    columns: columns.clone(),
                                    size: [steps, width],
                                    by_matrices,
                                    to: columns_of_b.as_mut_ptr(),
                                }
                                .with_simd(simd);
                                columns_of_b.as_ptr()
                            }
                        };
                        // Sums are written to the result directly.
                        let direct = TypeId::of::<P::Number>() == TypeId::of::<E>()
                            && columns.len() == width;
                        let tile = tile.as_mut_ptr();
                        let to = if direct {
                            (y.cast(), all)
                        } else {
                            (tile, width)
                        };
                        let sums = Sums {
                            a: (),
                            rows,
                            b: packed_panel,
                            width,
                            steps,
                            from: (self.bias.as_ptr().add(columns.start), 0),
                            to,
                        };
                        a.add::<S, P>(simd, sums);
                        if direct {
                            continue;
                        }
                        for row in 0..rows {
                            let sums = tile.add(row * width);
                            let y = y.add(row * all);
                            let lanes = E::lanes::<S>();
                            let whole = columns.len() / lanes * lanes;
                            for column in (0..whole).step_by(lanes) {
                                P::store::<S>(y.add(column), E::load::<S>(sums.add(column)));
                            }
                            for column in whole..columns.len() {
                                *y.add(column) = P::number(*sums.add(column));
                            }
                        }
                    }
                }
            },
        );
    }
}

/// Packs a panel of a matrix.
struct Pack<'a, E: Element, P: Products<E>> {
    b: Matrix<'a, P::Number>,
    columns: Range<usize>,
    /// Steps and columns of the panel.
    size: [usize; 2],
    by_matrices: bool,
    to: *mut E,
}

impl<E: Element, P: Products<E>> WithSimd for Pack<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (b, columns, to) = (self.b, self.columns, self.to);
        // SAFETY: the room of this panel.
        unsafe {
            if const { matrices_multiply::<S, E, P>() } && self.by_matrices {
                matrices::pack_panel::<S, E, P>(simd, b, columns, self.size[1], to);
            } else {
                pack_panel::<S, E, P>(simd, b, columns, self.size, to);
            }
        };
    }
}

/// Computes `a · b`, with `bias` added to every row.
pub(crate) fn product<E: Element, P: Products<E>>(
    isa: Isa,
    a: Matrix<'_, P::Number>,
    b: Matrix<'_, P::Number>,
    bias: Option<&[P::Number]>,
) -> Buffer<P::Number> {
    let elements = a.size()[0] * b.size()[1];
    // SAFETY: all elements are written.
    unsafe { Buffer::filled(elements, |y| product_to::<E, P>(isa, [a, b], bias, y)) }
}

/// Writes a [`product`].
///
/// # Safety
/// `y` must have room for it.
pub(crate) unsafe fn product_to<E: Element, P: Products<E>>(
    isa: Isa,
    [a, b]: [Matrix<'_, P::Number>; 2],
    bias: Option<&[P::Number]>,
    y: Shared<P::Number>,
) {
    const { assert!(P::NUMBERS * size_of::<P::Number>() == size_of::<E>()) };
    let ([rows, summed], [_, columns]) = (a.size(), b.size());
    let by_matrices = by_matrices::<E, P>(isa, summed, columns);
    let steps = steps_of::<E, P>(summed, by_matrices);
    let most = most_columns(by_matrices);
    let (count, products) = (columns.div_ceil(most), rows * summed * columns);
    let chunks = rows.div_ceil(ROWS);
    let fill = |panels: Shared<E>| {
        deal(count, products, |number| {
            let (columns, width) = panel(number, most, columns);
            products::run::<E, P, _>(
                isa,
                Pack::<E, P> {
                    // SAFETY: the room of this panel.
                    to: unsafe { panels.at(columns.start * steps) },
                    b,
                    columns,
                    size: [steps, width],
                    by_matrices,
                },
            );
        });
    };
    // SAFETY: all panels are packed.
    let packed = || unsafe { Buffer::filled(whole(columns) * steps, fill) };
    // With one chunk, each task packs its own panels.
    let panels = (chunks > 1).then(packed);
    let mut added = vec![E::default(); whole(columns)];
    for (added, bias) in added.iter_mut().zip(bias.unwrap_or_default()) {
        *added = P::widened(*bias);
    }
    let together = panels_together(count, chunks);
    let groups = count.div_ceil(together);
    deal(chunks * groups, products, |task| {
        let (chunk, group) = (task / groups, task % groups);
        let range = chunk * ROWS..((chunk + 1) * ROWS).min(rows);
        products::run::<E, P, _>(
            isa,
            OfRows::<E, P> {
                // SAFETY: rows of the result.
                y: unsafe { y.at(range.start * columns) },
                a: a.rows(range),
                b,
                panels: panels.as_deref(),
                numbers: group * together..((group + 1) * together).min(count),
                bias: &added,
                by_matrices,
            },
        );
    });
}
