//! Kernel of the products of modes: sums of products of rows of complex numbers.

use halocline_core::tasks;

use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::Float;

/// Number of modes whose sums stay in cache.
const BLOCK: usize = 1 << 10;

/// Sizes of a product: `x` has `own · shared` modes, of which the weight has `own`.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) channels: [usize; 2],
    pub(super) own: usize,
    pub(super) shared: usize,
    /// First degree, number of degrees and first order, if the modes that share a weight are orders
    /// of harmonics. Orders above the degree are zero.
    triangle: Option<[usize; 3]>,
}

impl Sizes {
    /// Sizes of a shard, given the first degree and order if its modes are harmonics.
    pub(super) fn of(x: &[usize], weight: &[usize], harmonics: Option<[usize; 2]>) -> Self {
        let modes = |shape: &[usize]| shape[2..shape.len() - 1].to_vec();
        let (modes, held) = (modes(x), modes(weight));
        // Where sizes differ, the weight has size 1.
        let pairs = || modes.iter().zip(&held);
        let triangle = harmonics.and_then(|[degree, order]| {
            let (dim, last) = (modes.len() - 2, modes.len() - 1);
            let per_degree = held[..last] == modes[..last] && held[last] == 1;
            per_degree.then_some([degree, modes[dim], order])
        });
        Self {
            batch: x[0],
            channels: [weight[0], weight[1]],
            own: held.iter().product(),
            shared: pairs()
                .filter(|(x, own)| x != own)
                .map(|(x, _)| x)
                .product(),
            triangle,
        }
    }

    pub(super) fn modes(self) -> usize {
        self.own * self.shared
    }

    /// Number of leading modes of a weight that may differ from zero.
    fn nonzero(self, weight: usize) -> usize {
        self.triangle
            .map_or(self.shared, |[degree, degrees, order]| {
                let orders = degree + weight % degrees + 1;
                orders.saturating_sub(order).min(self.shared)
            })
    }
}

/// Kind of a product of rows.
#[derive(Clone, Copy)]
pub(super) enum Factors {
    /// Modes times the weight.
    Plain,
    /// Modes times the conjugate weight.
    Conjugate,
    /// Modes times conjugate modes, summed over those that share a weight.
    SummedConjugate,
}

/// Computes rows of modes `[rows, columns]`, each the sum of `terms` products of rows of the two
/// factors.
pub(super) fn products<E: Float>(
    [rows, columns, terms]: [usize; 3],
    sizes: Sizes,
    [left, right]: [&[E]; 2],
    factors: Factors,
    places: impl Fn(usize, usize, usize) -> [usize; 2] + Sync,
) -> Buffer<E> {
    let (own, shared) = (sizes.own, sizes.shared);
    // Numbers per weight in the result and in the right factor; the left factor has all modes.
    let [width, width_right] = match factors {
        Factors::SummedConjugate => [1, shared],
        _ => [shared, 1],
    };
    let mut y = filled(rows * columns * own * width * 2, 0.0);
    if sizes.modes() == 0 {
        return y;
    }
    let [left, right] = [left, right].map(|elements| elements.as_chunks::<2>().0);
    // Number of weights in a block, whose sums stay in cache over all terms.
    let block = (BLOCK / shared).max(1);
    tasks::for_each_part(y.elements_mut(), 2 * own * width, 1, |place, sums| {
        let (sums, _) = sums.as_chunks_mut::<2>();
        for (number, sums) in sums.chunks_mut(block * width).enumerate() {
            let first = number * block;
            for term in 0..terms {
                let [a, b] = places(place / columns, place % columns, term);
                let a = &left[(a * own + first) * shared..];
                let b = &right[(b * own + first) * width_right..];
                match factors {
                    Factors::Plain => add(sums, a, b, sizes, first, product),
                    Factors::SummedConjugate if shared > 1 => add_summed(sums, a, b, sizes, first),
                    _ => add(sums, a, b, sizes, first, product_conjugate),
                }
            }
        }
    });
    y
}

/// `a · b`.
fn product<E: Float>(a: [E; 2], b: [E; 2]) -> [E; 2] {
    [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]
}

/// `a · b*`.
fn product_conjugate<E: Float>(a: [E; 2], b: [E; 2]) -> [E; 2] {
    [a[0] * b[0] + a[1] * b[1], a[1] * b[0] - a[0] * b[1]]
}

fn add_to<E: Float>(sum: &mut [E; 2], [re, im]: [E; 2]) {
    sum[0] += re;
    sum[1] += im;
}

/// Adds products of modes `a` and weights `b`, from the weight with index `first` on.
fn add<E: Float>(
    sums: &mut [[E; 2]],
    a: &[[E; 2]],
    b: &[[E; 2]],
    sizes: Sizes,
    first: usize,
    product: impl Fn([E; 2], [E; 2]) -> [E; 2],
) {
    if sizes.shared == 1 {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            add_to(sum, product(*a, *b));
        }
        return;
    }
    let rows = sums.chunks_exact_mut(sizes.shared);
    let rows = rows.zip(a.chunks_exact(sizes.shared)).zip(b);
    for (((sums, a), &b), weight) in rows.zip(first..) {
        for (sum, a) in sums[..sizes.nonzero(weight)].iter_mut().zip(a) {
            add_to(sum, product(*a, b));
        }
    }
}

/// Adds products of modes `a` and conjugate modes `b`, each sum over the modes that share a weight,
/// from the weight with index `first` on.
fn add_summed<E: Float>(
    sums: &mut [[E; 2]],
    a: &[[E; 2]],
    b: &[[E; 2]],
    sizes: Sizes,
    first: usize,
) {
    let rows = a.chunks_exact(sizes.shared);
    let rows = sums.iter_mut().zip(rows.zip(b.chunks_exact(sizes.shared)));
    for ((sum, (a, b)), weight) in rows.zip(first..) {
        let mut total = *sum;
        for (a, b) in a[..sizes.nonzero(weight)].iter().zip(b) {
            add_to(&mut total, product_conjugate(*a, *b));
        }
        *sum = total;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A weight that several fields share has the orders of each, not one triangle.
    #[test]
    fn only_the_weight_of_a_degree_leaves_orders_out() {
        let nonzero = |x: &[usize], weight: &[usize]| {
            let sizes = Sizes::of(x, weight, Some([0, 0]));
            sizes.nonzero(0)
        };
        assert_eq!(nonzero(&[1, 1, 3, 5, 2], &[1, 1, 3, 1, 2]), 1);
        assert_eq!(nonzero(&[1, 1, 4, 1, 5, 2], &[1, 1, 1, 1, 1, 2]), 20);
    }
}
