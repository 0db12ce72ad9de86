//! Rows of elements as they lie in tensors, and as kernels want them: a vector for each element, a row in every lane.

use halocline_core::tasks;
use pulp::Simd;

use crate::kernel::lanes::{CHUNK, WIDEST};
use crate::kernel::math;
use crate::kernel::simd::{Element, has_shuffles};
use crate::kernel::transpose::transpose;

/// Writes rows of `width` elements as vectors, one for each element and `pitch` elements from one to the next, times a
/// factor. Lanes without a row hold zeros.
///
/// # Safety
/// The rows must have `width` elements, and `to` room for as many vectors.
#[inline(always)]
pub(super) unsafe fn pack<S: Simd, E: Element>(
    simd: S,
    rows: &[*const E],
    width: usize,
    factor: E,
    (to, pitch): (*mut E, usize),
) {
    let lanes = E::lanes::<S>();
    let mut start = 0;
    if has_shuffles::<S, E>() {
        let nothing = [E::default(); WIDEST];
        let mut from = [nothing.as_ptr(); WIDEST];
        from[..rows.len()].copy_from_slice(rows);
        while start + lanes <= width {
            let vector = |element: usize| to.wrapping_add((start + element) * pitch);
            // SAFETY: so many elements of each row, and room for as many vectors.
            unsafe {
                transpose::<S, E>(|lane| from[lane], Some(E::splat(simd, factor)), vector);
            }
            for row in &mut from[..rows.len()] {
                *row = row.wrapping_add(lanes);
            }
            start += lanes;
        }
    }
    for lane in 0..lanes {
        for element in start..width {
            let value = match rows.get(lane) {
                // SAFETY: the row has `width` elements.
                Some(row) => unsafe { *row.add(element) * factor },
                None => E::default(),
            };
            // SAFETY: there is room for `width` vectors.
            unsafe { *to.add(element * pitch + lane) = value };
        }
    }
}

/// Writes vectors, one for each element, as rows of `width` elements, times a factor, which the vectors are scaled by.
///
/// # Safety
/// There must be `width` vectors, and room for as many elements in each row, which nothing else uses meanwhile.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, E: Element>(
    simd: S,
    from: *mut E,
    width: usize,
    factor: E::Vector<S>,
    rows: &[*mut E],
) {
    let lanes = E::lanes::<S>();
    let mut start = 0;
    if has_shuffles::<S, E>() {
        let mut nowhere = [E::default(); WIDEST];
        let mut to = [nowhere.as_mut_ptr(); WIDEST];
        to[..rows.len()].copy_from_slice(rows);
        while start + lanes <= width {
            let vector = |element: usize| from.wrapping_add((start + element) * lanes).cast_const();
            // SAFETY: so many vectors, and room for as many elements in each row.
            unsafe { transpose::<S, E>(vector, Some(factor), |lane| to[lane]) };
            for row in &mut to[..rows.len()] {
                *row = row.wrapping_add(lanes);
            }
            start += lanes;
        }
    }
    // SAFETY: there are `width` vectors, and as many elements in each row, which nothing else uses.
    unsafe {
        for element in start..width {
            let vector = from.add(element * lanes);
            E::store::<S>(vector, E::times(simd, E::load::<S>(vector), factor));
        }
        for (lane, row) in rows.iter().enumerate() {
            for element in start..width {
                *row.add(element) = *from.add(element * lanes + lane);
            }
        }
    }
}

/// The weight of a pair in the forward pass, and the gradient of its score, from the score and the product of value and
/// cotangent, and of the query the logarithm of its sum and the product of output and cotangent.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd, E: Element>(
    simd: S,
    pair: [*mut E; 2],
    [lse, product]: [E::Vector<S>; 2],
) -> [E::Vector<S>; 2] {
    // SAFETY: the caller's: two vectors.
    let [score, slope] = pair.map(|at| unsafe { E::load::<S>(at) });
    let weight = math::exp::<S, E>(simd, E::minus(simd, score, lse));
    [
        weight,
        E::times(simd, weight, E::minus(simd, slope, product)),
    ]
}

/// The dot product of every row of `width` elements with that of another tensor.
pub(crate) fn row_products<E: Element>(one: &[E], other: &[E], width: usize) -> Vec<E> {
    assert_eq!(one.len(), other.len());
    let width = width.max(1);
    let product = |row: usize| {
        let [one, other] = [one, other].map(|rows| &rows[row * width..][..width]);
        let mut sums = [E::default(); 8];
        for (one, other) in one.chunks(8).zip(other.chunks(8)) {
            for (sum, (a, b)) in sums.iter_mut().zip(one.iter().zip(other)) {
                *sum += *a * *b;
            }
        }
        sums.into_iter().fold(E::default(), |sum, part| sum + part)
    };
    tasks::map(one.len() / width, CHUNK / width, product)
}
