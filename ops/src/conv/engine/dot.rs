//! Innermost kernel of weight gradients: a block of outputs × terms in registers, over the cells of
//! a tile.

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use super::tile::TileLayout;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Arguments of the innermost kernel, outputs × terms.
pub(super) struct Dot<'a, E> {
    /// Cotangent tile of the first output.
    pub cotangent: *const E,
    /// Elements between outputs of the cotangent's tile.
    pub channel: usize,
    /// Tile of the source.
    pub tile: *const E,
    /// Offset of every term in the tile.
    pub offsets: *const u32,
    /// Layout of the tile.
    pub layout: &'a TileLayout,
    /// Number of planes of the tile.
    pub planes: usize,
    /// Number of rows of a plane.
    pub rows: usize,
    /// First row in the tile, and the number of tile rows from one row to the next.
    pub every: [usize; 2],
    /// Number of columns of a row.
    pub columns: usize,
    /// Elements between rows of the cotangent's tile.
    pub row: usize,
    /// Sum of the first output and term.
    pub sums: *mut E,
    /// Elements between outputs of the sums.
    pub output: usize,
}

/// [`Dot`] with its block of `M` outputs × `K` terms.
struct Block<'a, E, P, const M: usize, const K: usize>(Dot<'a, E>, PhantomData<P>);

impl<E: Element> Dot<'_, E> {
    /// Runs the block with this number of outputs and terms.
    ///
    /// # Safety
    /// The pointers must be valid for the block, and nothing else may use the sums.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd, P: Products<E>>(self, simd: S, height: usize, width: usize) {
        macro_rules! block {
            ($m:literal, $k:literal) => {
                simd.vectorize(Block::<E, P, $m, $k>(self, PhantomData))
            };
        }
        // Compiled only where `plan::block` selects this size.
        if const { S::REGISTER_COUNT >= 32 } && height == 4 {
            return match width {
                6 => block!(4, 6),
                3 => block!(4, 3),
                2 => block!(4, 2),
                _ => block!(4, 1),
            };
        }
        match (height, width) {
            (2, 6) => block!(2, 6),
            (2, 3) => block!(2, 3),
            (2, 2) => block!(2, 2),
            (2, _) => block!(2, 1),
            (_, 6) => block!(1, 6),
            (_, 3) => block!(1, 3),
            (_, 2) => block!(1, 2),
            _ => block!(1, 1),
        }
    }
}

impl<E: Element, P: Products<E>, const M: usize, const K: usize> WithSimd
    for Block<'_, E, P, M, K>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Dot {
            cotangent,
            channel,
            tile,
            offsets,
            layout,
            planes,
            rows,
            every: [first, every],
            columns,
            row: room,
            sums,
            output,
        } = self.0;
        let (zero, lanes) = (E::splat(simd, E::default()), E::lanes::<S>());
        let mut products = [[zero; K]; M];
        let whole = columns / lanes * lanes;
        // SAFETY: the caller of `run` promises that the pointers are valid.
        unsafe {
            let mut taps = [0; K];
            for (k, tap) in taps.iter_mut().enumerate() {
                *tap = *offsets.add(k) as usize;
            }
            // The loop over cells is inside: sums stay in registers, and their lanes are summed
            // once, at the end.
            for plane in 0..planes {
                for row in 0..rows {
                    let cells = cotangent.add(((plane * rows + row) * every + first) * room);
                    let source = tile.add(layout.row(plane, row * every + first));
                    for column in (0..whole).step_by(lanes) {
                        let from = source.add(column);
                        step::<S, E, P, M, K>(
                            simd,
                            cells.add(column),
                            channel,
                            from,
                            &taps,
                            lanes,
                            &mut products,
                        );
                    }
                    if whole < columns {
                        let (cells, from) = (cells.add(whole), source.add(whole));
                        let rest = columns - whole;
                        step::<S, E, P, M, K>(
                            simd,
                            cells,
                            channel,
                            from,
                            &taps,
                            rest,
                            &mut products,
                        );
                    }
                }
            }
            for (m, products) in products.iter().enumerate() {
                for (k, product) in products.iter().enumerate() {
                    *sums.add(m * output + k) += E::sum(simd, *product);
                }
            }
        }
    }
}

/// Adds the products of a vector of cells, the first `present` of which belong to the row. The
/// cells after these are not loaded: they are in no window, and a value that is not finite would
/// reach the sum.
///
/// # Safety
/// A vector must be readable from every cotangent, and `present` elements from every position of
/// the source.
#[inline(always)]
unsafe fn step<S: Simd, E: Element, P: Products<E>, const M: usize, const K: usize>(
    simd: S,
    cotangent: *const E,
    channel: usize,
    source: *const E,
    taps: &[usize; K],
    present: usize,
    products: &mut [[E::Vector<S>; K]; M],
) {
    let zero = E::splat(simd, E::default());
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut cotangents = [zero; M];
        for (m, value) in cotangents.iter_mut().enumerate() {
            *value = E::load::<S>(cotangent.add(m * channel));
        }
        for (k, tap) in taps.iter().enumerate() {
            let from = source.add(*tap);
            let value = if present == E::lanes::<S>() {
                E::load::<S>(from)
            } else {
                E::load_part(simd, std::slice::from_raw_parts(from, present), zero)
            };
            for m in 0..M {
                products[m][k] = P::mul_add(simd, cotangents[m], value, products[m][k]);
            }
        }
    }
}
