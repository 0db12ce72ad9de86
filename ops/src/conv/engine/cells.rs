//! Copies cells to tiles, and joins the cells of two tiles into pairs.

use std::ops::Range;

use pulp::Simd;

use crate::kernel::products::{Products, store_parts};
use crate::kernel::simd::Element;

/// Writes pairs of the cells of two tiles. The pairs of each part begin `of_part` elements after
/// those of the part before.
///
/// # Safety
/// All pointers must be valid for `len` elements, which are whole vectors; the pairs of one part
/// may overwrite the cells.
#[inline(always)]
pub(super) unsafe fn join<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    (pairs, of_part): (*mut E, usize),
    [first, second]: [*const E; 2],
    len: usize,
) {
    for column in (0..len).step_by(E::lanes::<S>()) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (first, second) = (first.add(column), second.add(column));
            let cells = [E::load::<S>(first), E::load::<S>(second)];
            store_parts::<S, E, P>(simd, cells, pairs.add(column), of_part);
        }
    }
}

/// Clears a row outside `columns`, and possibly some of these.
#[inline(always)]
pub(super) fn clear_around<S: Simd, E: Element>(simd: S, row: &mut [E], columns: &Range<usize>) {
    let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
    let last = row.len() - lanes;
    let row = row.as_mut_ptr();
    // SAFETY: rows are whole vectors long, and each vector begins early enough to end within the
    // row.
    unsafe {
        for column in (0..columns.start).step_by(lanes) {
            E::store::<S>(row.add(column), zero);
        }
        for column in (columns.end..last + lanes).step_by(lanes) {
            E::store::<S>(row.add(column.min(last)), zero);
        }
    }
}

/// Fills a slice with consecutive elements.
///
/// # Safety
/// As many elements as the slice has must be readable from `source` on, outside the slice.
#[inline(always)]
pub(super) unsafe fn copy<S: Simd, E: Element, P: Products<E>>(
    cells: &mut [E],
    source: *const P::Number,
) {
    let lanes = E::lanes::<S>();
    // SAFETY: guaranteed by the caller; the last vector begins early enough to end within the
    // slice.
    unsafe {
        let Some(last) = cells.len().checked_sub(lanes) else {
            return copy_strided::<E, P>(cells, source, 1);
        };
        let cells = cells.as_mut_ptr();
        E::store::<S>(cells, P::load::<S>(source));
        // Starts at the next multiple of a vector's size, so that stores do not cross cache lines.
        let vector = lanes * size_of::<E>();
        let mut column = (vector - cells.addr() % vector) / size_of::<E>();
        while column < last {
            E::store::<S>(cells.add(column), P::load::<S>(source.add(column)));
            column += lanes;
        }
        E::store::<S>(cells.add(last), P::load::<S>(source.add(last)));
    }
}

/// Fills a slice with elements that are `stride` apart.
///
/// # Safety
/// As many elements as the slice has, `stride` apart, must be readable from `source` on, outside
/// the slice.
#[inline(always)]
pub(super) unsafe fn copy_strided<E: Element, P: Products<E>>(
    cells: &mut [E],
    source: *const P::Number,
    stride: isize,
) {
    for (index, cell) in cells.iter_mut().enumerate() {
        // SAFETY: guaranteed by the caller.
        *cell = P::widened(unsafe { *source.offset(index as isize * stride) });
    }
}
