//! Rows of elements as they lie in tensors, and as kernels want them: a vector for each element, a row in every lane.

use pulp::Simd;
use rayon::prelude::*;

use crate::kernel::lanes::{CHUNK, WIDEST, load, store};
use crate::kernel::math;
use crate::kernel::simd::Element;

/// Swaps the lanes of as many vectors as a vector has lanes with their numbers.
#[inline(always)]
fn transposed<S: Simd, E: Element>(mut rows: [E::Vector<S>; WIDEST]) -> [E::Vector<S>; WIDEST] {
    let lanes = E::lanes::<S>();
    // With the bits of a vector's number before those of the lane's, each turn rotates them to the left by one.
    let mut turn = 1;
    while turn < lanes {
        let before = rows;
        for pair in 0..lanes / 2 {
            let [low, high] = E::interleave::<S>([before[pair], before[pair + lanes / 2]]);
            rows[2 * pair] = low;
            rows[2 * pair + 1] = high;
        }
        turn *= 2;
    }
    rows
}

/// Writes rows of `width` elements as vectors, one for each element, times a factor. Lanes without a row hold zeros.
///
/// # Safety
/// The rows must have `width` elements, and `to` room for as many vectors.
#[inline(always)]
pub(super) unsafe fn pack<S: Simd, E: Element>(
    simd: S,
    rows: &[*const E],
    width: usize,
    factor: E::Vector<S>,
    to: *mut E,
) {
    let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
    for start in (0..width).step_by(lanes) {
        let count = lanes.min(width - start);
        let mut block = [zero; WIDEST];
        for (vector, row) in block.iter_mut().zip(rows) {
            // SAFETY: the row has `width` elements.
            *vector = load(simd, unsafe {
                std::slice::from_raw_parts(row.add(start), count)
            });
        }
        let block = transposed::<S, E>(block);
        for (element, vector) in block[..count].iter().enumerate() {
            // SAFETY: there is room for `width` vectors.
            unsafe {
                let to = to.add((start + element) * lanes);
                E::store::<S>(to, E::times(simd, *vector, factor));
            }
        }
    }
}

/// Writes vectors, one for each element, as rows of `width` elements, times a factor.
///
/// # Safety
/// There must be `width` vectors, and room for as many elements in each row, which nothing else uses meanwhile.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, E: Element>(
    simd: S,
    from: *const E,
    width: usize,
    factor: E::Vector<S>,
    rows: &[*mut E],
) {
    let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
    for start in (0..width).step_by(lanes) {
        let count = lanes.min(width - start);
        let mut block = [zero; WIDEST];
        for (element, vector) in block[..count].iter_mut().enumerate() {
            // SAFETY: there are `width` vectors.
            let loaded = unsafe { E::load::<S>(from.add((start + element) * lanes)) };
            *vector = E::times(simd, loaded, factor);
        }
        let block = transposed::<S, E>(block);
        for (vector, row) in block.iter().zip(rows) {
            // SAFETY: the row has `width` elements, which nothing else uses.
            let row = unsafe { std::slice::from_raw_parts_mut(row.add(start), count) };
            store(simd, row, *vector);
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
    let rows = one
        .par_chunks(width.max(1))
        .zip(other.par_chunks(width.max(1)));
    let product = |(one, other): (&[E], &[E])| {
        let mut sums = [E::default(); 8];
        for (one, other) in one.chunks(8).zip(other.chunks(8)) {
            for (sum, (a, b)) in sums.iter_mut().zip(one.iter().zip(other)) {
                *sum += *a * *b;
            }
        }
        sums.into_iter().fold(E::default(), |sum, part| sum + part)
    };
    rows.with_min_len(CHUNK / width.max(1))
        .map(product)
        .collect()
}
