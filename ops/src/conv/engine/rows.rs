//! Innermost kernel for channels that do not mix: rows of one channel, in registers, share the
//! cells that they read.

use pulp::{Simd, WithSimd};

use super::ahead::{Fetcher, Stretch};
use super::geometry::Correlation;
use super::tile::TileLayout;
use crate::kernel::memory::prefetch_to_write;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Rows of results that are computed together.
pub(crate) const ROWS: usize = 4;

/// Consecutive reads for the same rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    reads: usize,
    /// First row, and one past the last.
    rows: [usize; 2],
}

/// Order of reads and weights in which the rows of a channel are computed.
#[derive(Debug)]
pub(crate) struct Recipe {
    runs: Vec<Run>,
    /// Positions of the reads in the tile.
    offsets: Vec<usize>,
    /// Elements of the kernel, by read, then by row.
    pub(crate) elements: Vec<usize>,
}

impl Recipe {
    /// Creates the recipe of a correlation; `None` if adjacent rows do not share reads because rows
    /// or columns of results are apart.
    pub(crate) fn new(correlation: &Correlation, layout: &TileLayout) -> Option<Self> {
        let taps = &correlation.taps;
        if correlation.step[1] != 1 || correlation.out_step[2] != 1 || correlation.count[1] < ROWS {
            return None;
        }
        let mut recipe = Self {
            runs: Vec::new(),
            offsets: Vec::new(),
            elements: Vec::new(),
        };
        // In the order of the taps, so that a result has the same bits if it is computed alone, by
        // a strip.
        let [planes, lines, columns] = &correlation.places();
        let reach = correlation.reach(1);
        let mut reached: Vec<isize> = (reach.start..reach.end + ROWS as isize - 1).collect();
        if lines.first() > lines.last() {
            reached.reverse();
        }
        for (front, &plane) in planes.iter().enumerate() {
            for &line in &reached {
                // The rows that use this line of cells, each with the index of the kernel's line
                // that meets it.
                let users = (0..ROWS).filter_map(|row| {
                    let met = lines
                        .iter()
                        .position(|&offset| offset == line - row as isize)?;
                    Some((row, met))
                });
                let users: Vec<(usize, usize)> = users.collect();
                let (&[(first, _), ..], &[.., (last, _)]) = (&users[..], &users[..]) else {
                    continue;
                };
                if last - first + 1 != users.len() {
                    return None;
                }
                let rows = [first, last + 1];
                match recipe.runs.last_mut().filter(|run| run.rows == rows) {
                    Some(run) => run.reads += columns.len(),
                    None => recipe.runs.push(Run {
                        reads: columns.len(),
                        rows,
                    }),
                }
                let before = front * lines.len();
                for (across, &column) in columns.iter().enumerate() {
                    recipe.offsets.push(layout.offset([plane, line, column]));
                    for (_, down) in &users {
                        let tap = &taps[(before + down) * columns.len() + across];
                        recipe.elements.push(tap.element);
                    }
                }
            }
        }
        Some(recipe)
    }
}

/// Arguments of one call of the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStrip<'a, E: Element, P: Products<E>> {
    /// The first column of the tile's row.
    pub tile: *const E,
    pub recipe: &'a Recipe,
    /// The weights of the channel, in the order of the recipe's elements.
    pub weights: *const E,
    /// The bias.
    pub bias: E,
    /// The first result.
    pub output: *mut P::Number,
    /// Elements between rows of the output.
    pub row: usize,
    /// The number of columns of the output, from the first result on.
    pub columns: usize,
    /// Cells of a later tile, to be prefetched.
    pub ahead: &'a [Stretch],
}

/// [`RowStrip`] with its number of vectors.
struct Block<'a, E: Element, P: Products<E>, const N: usize>(RowStrip<'a, E, P>);

/// Number of vectors of the widest block.
pub(crate) fn width<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 6 } else { 2 }
}

impl<E: Element, P: Products<E>> RowStrip<'_, E, P> {
    /// Computes [`ROWS`] rows of at most [`width`] vectors.
    ///
    /// # Safety
    /// The tile must be valid for all reads of `vectors` vectors, the weights for the recipe, and
    /// the output, which nothing else may use, for the columns of every row.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd>(self, simd: S, vectors: usize) {
        // Compiled only where `width` selects them.
        if const { S::REGISTER_COUNT >= 32 } {
            match vectors {
                3 => return simd.vectorize(Block::<E, P, 3>(self)),
                4 => return simd.vectorize(Block::<E, P, 4>(self)),
                5 => return simd.vectorize(Block::<E, P, 5>(self)),
                6.. => return simd.vectorize(Block::<E, P, 6>(self)),
                _ => {}
            }
        }
        match vectors {
            1 => simd.vectorize(Block::<E, P, 1>(self)),
            _ => simd.vectorize(Block::<E, P, 2>(self)),
        }
    }
}

impl<E: Element, P: Products<E>, const N: usize> WithSimd for Block<'_, E, P, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `run` promises that the pointers are valid.
        unsafe {
            let columns = N * E::lanes::<S>();
            prefetch_to_write(self.0.output, [ROWS, columns], self.0.row);
            let sums = self.products(simd);
            self.store(simd, sums);
        }
    }
}

impl<E: Element, P: Products<E>, const N: usize> Block<'_, E, P, N> {
    /// Sums over all reads.
    #[inline(always)]
    unsafe fn products<S: Simd>(&self, simd: S) -> [[E::Vector<S>; N]; ROWS] {
        let RowStrip {
            tile,
            recipe,
            mut weights,
            ahead,
            ..
        } = self.0;
        let mut fetcher = Fetcher::new(ahead, recipe.offsets.len());
        let mut sums = [[E::splat(simd, E::default()); N]; ROWS];
        let mut offsets = recipe.offsets.as_slice();
        for run in &recipe.runs {
            let (reads, rest) = offsets.split_at(run.reads);
            offsets = rest;
            macro_rules! rows {
                ($($first:literal..$last:literal)*) => {
                    match run.rows {
                        $([$first, $last] => {
                            for read in reads {
                                fetcher.step();
                                // SAFETY: the caller of `run` promises that the pointers are valid.
                                unsafe {
                                    let from = tile.add(*read);
                                    multiply::<S, E, N, $first, $last>(simd, from, weights, &mut sums);
                                    weights = weights.add($last - $first);
                                }
                            }
                        })*
                        _ => unreachable!("rows of a block"),
                    }
                };
            }
            rows!(0..1 0..2 0..3 0..4 1..2 1..3 1..4 2..3 2..4 3..4);
        }
        sums
    }

    /// Adds the bias and writes the columns of the output.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, simd: S, sums: [[E::Vector<S>; N]; ROWS]) {
        let RowStrip {
            bias,
            output,
            row,
            columns,
            ..
        } = self.0;
        let (lanes, bias) = (E::lanes::<S>(), E::splat(simd, bias));
        for (index, mut sums) in sums.into_iter().enumerate() {
            for sum in &mut sums {
                *sum = E::plus(simd, *sum, bias);
            }
            // SAFETY: the caller of `run` promises that the pointers are valid.
            unsafe {
                let output = output.add(index * row);
                if columns >= N * lanes {
                    for (n, sum) in sums.iter().enumerate() {
                        P::store::<S>(output.add(n * lanes), *sum);
                    }
                } else {
                    let sums = sums.as_ptr().cast::<E>();
                    for column in 0..columns {
                        *output.add(column) = P::number(*sums.add(column));
                    }
                }
            }
        }
    }
}

/// Adds the products of a read to rows `FIRST..LAST`.
///
/// # Safety
/// `N` vectors must be readable from `from`, and `LAST - FIRST` weights.
#[inline(always)]
unsafe fn multiply<S: Simd, E: Element, const N: usize, const FIRST: usize, const LAST: usize>(
    simd: S,
    from: *const E,
    weights: *const E,
    sums: &mut [[E::Vector<S>; N]; ROWS],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut factors = [E::splat(simd, E::default()); ROWS];
        let factors = &mut factors[FIRST..LAST];
        for (index, factor) in factors.iter_mut().enumerate() {
            *factor = E::splat(simd, *weights.add(index));
        }
        for n in 0..N {
            let cell = E::load::<S>(from.add(n * E::lanes::<S>()));
            for (sums, factor) in sums[FIRST..LAST].iter_mut().zip(&*factors) {
                sums[n] = E::mul_add(simd, *factor, cell, sums[n]);
            }
        }
    }
}
