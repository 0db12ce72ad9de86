//! Weights of pairs of tokens with their gradients, and dot products of rows, for all attention
//! kernels.

use halocline_core::tasks;
use pulp::Simd;

use crate::kernel::lanes::CHUNK;
use crate::kernel::math;
use crate::kernel::simd::Element;

/// Computes the weight of a pair in the forward pass, and the gradient of its score, from the score
/// and the product of value and cotangent, and from the query's log-sum-exp and product of output
/// and cotangent.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd, E: Element>(
    simd: S,
    pair: [*mut E; 2],
    [lse, product]: [E::Vector<S>; 2],
) -> [E::Vector<S>; 2] {
    // SAFETY: the caller guarantees two vectors.
    let [score, slope] = pair.map(|at| unsafe { E::load::<S>(at) });
    let weight = math::exp::<S, E>(simd, E::minus(simd, score, lse));
    [
        weight,
        E::times(simd, weight, E::minus(simd, slope, product)),
    ]
}

/// Dot product of every row of `width` elements with that of another tensor.
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
