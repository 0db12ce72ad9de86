//! Products of many rows with a matrix in panels: some of its columns, which lie in one piece for all that is summed over.
//!
//! Sums of a few rows and of a few vectors of columns stay in registers; each load of a vector serves all of the rows. Factors
//! are numbers, or pairs of bf16 numbers that follow each other in the sum ([`Pairs`](super::products::Pairs)); matrices multiply
//! pairs of parts of numbers.

pub(crate) mod matrices;
mod sums;
#[cfg(test)]
mod tests;

use std::any::TypeId;
use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::buffer::{Buffer, filled};
use super::lanes::{CHUNK, WIDEST};
use super::matrices::Matrix;
use super::memory::{Shared, with_scratch};
use super::products::Products;
use super::simd::{Element, Isa};
pub(crate) use sums::{Factors, Sums};
use sums::{as_they_lie, factors, pack_panel};

/// Columns of a panel.
const PANEL: usize = 64;
/// Rows of a task.
const ROWS: usize = 192;
/// Those of a task by matrices that adds products up over rows: numbers are split into parts for each task.
const SPLIT_ROWS: usize = 512;
/// Tasks that each thread should find.
const TASKS: usize = 2;
/// Shares of rows at most whose sums are added up.
const SHARES: usize = 32;
/// Products of so many multiply-adds are shared by all threads.
const SHARED: usize = 1 << 20;
/// Rows that are packed at a time where products are added up over rows.
const TOGETHER: usize = 256;
/// Rows of a share at least, and bytes of the sums of all.
const SHARE_ROWS: usize = 2048;
const SHARE_BYTES: usize = 16 << 20;

/// Columns of the panels of so many columns, of whole vectors.
fn whole(columns: usize) -> usize {
    columns.next_multiple_of(WIDEST)
}

/// Columns of a panel of at most `most` among all `columns`, and its width in whole vectors.
fn panel(number: usize, most: usize, columns: usize) -> (Range<usize>, usize) {
    let start = number * most;
    let width = most.min(whole(columns) - start);
    (start..(start + width).min(columns), width)
}

/// Most columns of a panel.
fn most_columns(by_matrices: bool) -> usize {
    match by_matrices {
        true => matrices::COLUMNS,
        false => PANEL,
    }
}

/// The elements that the factors of so many rows and numbers take at most.
fn room<E: Element, P: Products<E>>(rows: usize, summed: usize, by_matrices: bool) -> usize {
    match by_matrices {
        true => matrices::room(rows, summed, P::PARTS),
        false => Factors::<E>::room(rows, summed.div_ceil(P::NUMBERS)),
    }
}

/// The factors of rows, which may lie in scratch.
#[derive(Clone, Copy)]
enum Left<E> {
    Vectors(Factors<E>),
    Matrices(matrices::Rows<E>),
}

impl<E: Element> Left<E> {
    /// # Safety
    /// There must be [`room`] for them.
    #[inline(always)]
    unsafe fn new<S: Simd, P: Products<E>>(
        simd: S,
        a: Matrix<'_, P::Number>,
        by_matrices: bool,
        scratch: *mut E,
    ) -> Self {
        // SAFETY: the caller's.
        unsafe {
            match by_matrices {
                true => Self::Matrices(matrices::Rows::new::<S, P>(simd, a, scratch)),
                false => Self::Vectors(factors::<E, P>(a, scratch)),
            }
        }
    }

    /// Adds the products.
    ///
    /// # Safety
    /// All pointers must be good for so many rows, columns and steps.
    #[inline(always)]
    unsafe fn add<S: Simd, P: Products<E>>(self, simd: S, sums: Sums<E, ()>) {
        // SAFETY: the caller's; factors are matrices only where the instruction set has them.
        unsafe {
            match self {
                Self::Vectors(a) => sums.with_rows(a).run::<S, P>(simd),
                Self::Matrices(a) => sums.with_rows(a).run_by_matrices::<P>(),
            }
        }
    }
}

/// Panels of a task, where so many chunks of rows are tasks besides: few chunks are dealt out by panels, too.
fn panels_together(panels: usize, chunks: usize) -> usize {
    let tasks = TASKS * rayon::current_num_threads();
    let groups = tasks.div_ceil(chunks.max(1)).clamp(1, panels.max(1));
    panels.div_ceil(groups).max(1)
}

/// Whether matrices multiply the numbers of rows with so many columns: with few of them, splitting a row's numbers into parts
/// takes longer than their products.
fn by_matrices<E: Element, P: Products<E>>(isa: Isa, columns: usize) -> bool {
    const COLUMNS: usize = 32;
    isa.has_matrices() && (P::PARTS == 1 || P::PARTS > 1 && columns >= COLUMNS)
}

/// Factors of so many numbers that are summed over.
fn steps_of<E: Element, P: Products<E>>(summed: usize, by_matrices: bool) -> usize {
    match by_matrices {
        true => matrices::factors(summed, P::PARTS),
        false => summed.div_ceil(P::NUMBERS),
    }
}

/// Runs tasks, on one thread if there are few multiply-adds in all.
fn deal(tasks: usize, products: usize, run: impl Fn(usize) + Sync) {
    match products {
        ..SHARED => (0..tasks).for_each(run),
        _ => tasks::for_each(tasks, 1, run),
    }
}

/// Products of some rows with some panels.
struct OfRows<'a, E: Element, P: Products<E>> {
    a: Matrix<'a, P::Number>,
    /// All panels, the columns of all, and those of this task.
    panels: &'a [E],
    columns: usize,
    numbers: Range<usize>,
    /// A number for each column.
    bias: &'a [E],
    by_matrices: bool,
    /// The first of the rows.
    y: *mut P::Number,
}

impl<E: Element, P: Products<E>> WithSimd for OfRows<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ([rows, summed], by_matrices) = (self.a.size(), self.by_matrices);
        let steps = steps_of::<E, P>(summed, by_matrices);
        let packed = match as_they_lie::<E, P>(self.a) && !by_matrices {
            true => 0,
            false => room::<E, P>(rows, summed, by_matrices),
        };
        let tile_room = rows * most_columns(by_matrices);
        with_scratch(
            tile_room + packed,
            #[inline(always)]
            |scratch: &mut [E]| {
                let (tile, packed) = scratch.split_at_mut(tile_room);
                // SAFETY: rows, panels and bias have so many numbers, and the scratch so much room.
                unsafe {
                    let a = Left::new::<S, P>(simd, self.a, by_matrices, packed.as_mut_ptr());
                    for number in self.numbers.clone() {
                        let (columns, width) =
                            panel(number, most_columns(by_matrices), self.columns);
                        let y = self.y.add(columns.start);
                        // Numbers are written where they belong.
                        let direct = TypeId::of::<P::Number>() == TypeId::of::<E>()
                            && columns.len() == width;
                        let tile = tile.as_mut_ptr();
                        let to = match direct {
                            true => (y.cast(), self.columns),
                            false => (tile, width),
                        };
                        let sums = Sums {
                            a: (),
                            rows,
                            b: self.panels.as_ptr().add(columns.start * steps),
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
                            let y = y.add(row * self.columns);
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

/// Writes a panel of a matrix.
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
        // SAFETY: a panel's own place.
        unsafe {
            match self.by_matrices {
                true => matrices::pack_panel::<S, E, P>(simd, b, columns, self.size[1], to),
                false => pack_panel::<S, E, P>(simd, b, columns, self.size, to),
            }
        };
    }
}

/// `a · b`, with `bias` added to every row.
pub(crate) fn product<E: Element, P: Products<E>>(
    isa: Isa,
    a: Matrix<'_, P::Number>,
    b: Matrix<'_, P::Number>,
    bias: Option<&[P::Number]>,
) -> Buffer<P::Number> {
    const { assert!(P::NUMBERS * size_of::<P::Number>() == size_of::<E>()) };
    let ([rows, summed], [_, columns]) = (a.size(), b.size());
    let by_matrices = by_matrices::<E, P>(isa, columns);
    let steps = steps_of::<E, P>(summed, by_matrices);
    let most = most_columns(by_matrices);
    let (count, products) = (columns.div_ceil(most), rows * summed * columns);
    let fill = |panels: Shared<E>| {
        deal(count, products, |number| {
            let (columns, width) = panel(number, most, columns);
            isa.run(Pack::<E, P> {
                // SAFETY: the place of a panel.
                to: unsafe { panels.at(columns.start * steps) },
                b,
                columns,
                size: [steps, width],
                by_matrices,
            });
        });
    };
    // SAFETY: all panels are packed.
    let panels = unsafe { Buffer::filled(whole(columns) * steps, fill) };
    let mut added = vec![E::default(); whole(columns)];
    for (added, bias) in added.iter_mut().zip(bias.unwrap_or_default()) {
        *added = P::widened(*bias);
    }
    let chunks = rows.div_ceil(ROWS);
    let together = panels_together(count, chunks);
    let groups = count.div_ceil(together);
    let fill = |y: Shared<P::Number>| {
        deal(chunks * groups, products, |task| {
            let (chunk, group) = (task / groups, task % groups);
            let range = chunk * ROWS..((chunk + 1) * ROWS).min(rows);
            isa.run(OfRows::<E, P> {
                // SAFETY: rows of the result.
                y: unsafe { y.at(range.start * columns) },
                a: a.rows(range),
                panels: &panels,
                columns,
                numbers: group * together..((group + 1) * together).min(count),
                bias: &added,
                by_matrices,
            });
        });
    };
    // SAFETY: the tasks write all elements, each its own.
    unsafe { Buffer::filled(rows * columns, fill) }
}

/// Adds the products of some columns of `x`, as rows, with some panels of `y`.
struct OverRows<'a, E: Element, P: Products<E>> {
    /// `[columns of x, rows]`.
    x: Matrix<'a, P::Number>,
    y: Matrix<'a, P::Number>,
    panels: Range<usize>,
    by_matrices: bool,
    /// Zeros, of whole vectors for each column of `x`.
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
        let packed_room = room::<E, P>(features, TOGETHER, by_matrices);
        let tile_room = features * most_columns(by_matrices);
        with_scratch(
            panel_room + tile_room + packed_room,
            #[inline(always)]
            |scratch: &mut [E]| {
                let (packed_panel, rest) = scratch.split_at_mut(panel_room);
                let (tile, packed) = rest.split_at_mut(tile_room);
                let zeros = [E::default(); PANEL];
                for start in (0..rows).step_by(TOGETHER) {
                    let range = start..(start + TOGETHER).min(rows);
                    let steps = steps_of::<E, P>(range.len(), by_matrices);
                    let y = self.y.rows(range.clone());
                    let x = self.x.transposed().rows(range).transposed();
                    // SAFETY: sums have so many numbers, and the scratch so much room.
                    unsafe {
                        let a = Left::new::<S, P>(simd, x, by_matrices, packed.as_mut_ptr());
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
                            // From zero, and added once: a sum of many rows would lose the last bits of each.
                            let tile = tile.as_mut_ptr();
                            let sums = Sums {
                                a: (),
                                rows: features,
                                b: packed_panel.as_ptr(),
                                width,
                                steps,
                                from: (zeros.as_ptr(), 0),
                                to: (tile, width),
                            };
                            a.add::<S, P>(simd, sums);
                            for feature in 0..features {
                                let sums = tile.add(feature * width);
                                let to = to.add(feature * pitch);
                                for column in 0..width {
                                    *to.add(column) += *sums.add(column);
                                }
                            }
                        }
                    }
                }
            },
        );
    }
}

/// `xᵀ · y`, added up over shares of the rows of both. How many there are follows from sizes, as does the order of the sum.
pub(crate) fn product_over_rows<E: Element, P: Products<E>>(
    isa: Isa,
    x: Matrix<'_, P::Number>,
    y: Matrix<'_, P::Number>,
) -> Buffer<P::Number> {
    const { assert!(P::NUMBERS * size_of::<P::Number>() == size_of::<E>()) };
    let ([rows, features], [_, columns]) = (x.size(), y.size());
    let elements = features * whole(columns);
    let shares = (SHARE_BYTES / size_of::<E>() / elements.max(1)).min(SHARES);
    let shares = (rows / SHARE_ROWS).min(shares).max(1);
    let by_matrices = by_matrices::<E, P>(isa, columns);
    let chunk = if by_matrices { SPLIT_ROWS } else { ROWS };
    let (share_rows, chunks) = (rows.div_ceil(shares), features.div_ceil(chunk));
    let panels = columns.div_ceil(most_columns(by_matrices));
    let together = panels_together(panels, shares * chunks);
    let groups = panels.div_ceil(together);
    let mut sums = filled::<E>(shares * elements, 0.0);
    let all = sums.shared();
    deal(
        shares * chunks * groups,
        rows * features * columns,
        |task| {
            let (share, of_chunk, group) = (
                task / groups / chunks,
                task / groups % chunks,
                task % groups,
            );
            let range = (share * share_rows).min(rows)..((share + 1) * share_rows).min(rows);
            let features = of_chunk * chunk..((of_chunk + 1) * chunk).min(features);
            isa.run(OverRows::<E, P> {
                // SAFETY: sums of this task.
                to: unsafe { all.at(share * elements + features.start * whole(columns)) },
                x: x.rows(range.clone()).transposed().rows(features),
                y: y.rows(range),
                panels: group * together..((group + 1) * together).min(panels),
                by_matrices,
            });
        },
    );
    let fill = |to: Shared<P::Number>| {
        let together = (CHUNK / columns.max(1)).max(1);
        tasks::for_each(features, together, |feature| {
            for column in 0..columns {
                let shares =
                    (0..shares).map(|share| share * elements + feature * whole(columns) + column);
                let sum = shares.fold(E::default(), |sum, place| sum + sums[place]);
                // SAFETY: an element of this task.
                unsafe { *to.at(feature * columns + column) = P::number(sum) };
            }
        });
    };
    // SAFETY: all elements are written.
    unsafe { Buffer::filled(features * columns, fill) }
}
