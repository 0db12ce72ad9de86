//! Rows of elements as they lie in tensors, and as kernels want them: a vector for each element, a row in every lane.

use pulp::Simd;

use crate::kernel::lanes::{WIDEST, load, store};
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
            *vector = load(simd, unsafe { std::slice::from_raw_parts(row.add(start), count) });
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
