//! Reductions of the cells of a window: maximum, sum and norm.

use pulp::Simd;

use crate::kernel::lanes::Function;
use crate::kernel::lines::by_lane;
use crate::kernel::simd::Element;

/// A reduction, by default the sum: cells are prepared, combined one after the other, and the
/// result finished.
pub(super) trait Combine<E: Element>: Copy + Sync {
    /// Neutral element: combining it with a prepared cell yields that cell.
    #[inline(always)]
    fn of_nothing(self) -> E {
        E::default()
    }

    #[inline(always)]
    fn prepare<S: Simd>(self, _: S, cell: E::Vector<S>) -> E::Vector<S> {
        cell
    }

    #[inline(always)]
    fn combine<S: Simd>(self, simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S> {
        E::plus(simd, a, b)
    }

    #[inline(always)]
    fn finish<S: Simd>(self, _: S, a: E::Vector<S>) -> E::Vector<S> {
        a
    }
}

/// Maximum; NaN counts as larger than all numbers.
#[derive(Clone, Copy)]
pub(super) struct Largest;

impl<E: Element> Combine<E> for Largest {
    #[inline(always)]
    fn of_nothing(self) -> E {
        E::from_f64(f64::NEG_INFINITY)
    }

    #[inline(always)]
    fn combine<S: Simd>(self, simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S> {
        larger::<S, E>(simd, a, b)
    }
}

/// Returns the larger of two values; NaN counts as larger than all numbers.
#[inline(always)]
pub(super) fn larger<S: Simd, E: Element>(
    simd: S,
    a: E::Vector<S>,
    b: E::Vector<S>,
) -> E::Vector<S> {
    let larger = E::select_less(simd, [a, b], b, a);
    E::select_equal(simd, [b, b], larger, b)
}

/// Sum of the cells, times a factor.
#[derive(Clone, Copy)]
pub(super) struct Total<E>(pub(super) E);

impl<E: Element> Combine<E> for Total<E> {
    #[inline(always)]
    fn finish<S: Simd>(self, simd: S, a: E::Vector<S>) -> E::Vector<S> {
        E::times(simd, a, E::splat(simd, self.0))
    }
}

/// Norm of the cells for an order `p` of at least one: `y = (Σ |x|^p)^(1/p)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm(pub(super) f64);

impl<E: Element> Combine<E> for Norm {
    #[inline(always)]
    fn prepare<S: Simd>(self, simd: S, cell: E::Vector<S>) -> E::Vector<S> {
        match self.0 {
            1.0 => E::abs(simd, cell),
            2.0 => E::times(simd, cell, cell),
            order => powers::<S, E>(simd, E::abs(simd, cell), order),
        }
    }

    #[inline(always)]
    fn finish<S: Simd>(self, simd: S, a: E::Vector<S>) -> E::Vector<S> {
        match self.0 {
            1.0 => a,
            2.0 => E::root(simd, a),
            order => powers::<S, E>(simd, a, 1.0 / order),
        }
    }
}

impl Norm {
    /// Computes the cotangent times `y^(1 − p)`, which times [`slopes`](Self::slopes) is the
    /// gradient of a cell. Zero for a norm of zero.
    #[inline(always)]
    pub(super) fn pull<S: Simd, E: Element>(
        self,
        simd: S,
        norm: E::Vector<S>,
        cotangent: E::Vector<S>,
    ) -> E::Vector<S> {
        let pulled = match self.0 {
            1.0 => cotangent,
            2.0 => E::over(simd, cotangent, norm),
            order => E::times(simd, cotangent, powers::<S, E>(simd, norm, 1.0 - order)),
        };
        let zero = E::splat(simd, E::default());
        E::select_equal(simd, [norm, zero], zero, pulled)
    }

    /// `sign(x) · |x|^(p − 1)`.
    #[inline(always)]
    pub(super) fn slopes<S: Simd, E: Element>(self, simd: S, cell: E::Vector<S>) -> E::Vector<S> {
        let zero = E::splat(simd, E::default());
        let one = E::splat(simd, E::from_f64(1.0));
        let size = E::abs(simd, cell);
        let size = match self.0 {
            1.0 => E::select_equal(simd, [cell, zero], zero, one),
            2.0 => return cell,
            order => powers::<S, E>(simd, size, order - 1.0),
        };
        E::select_less(simd, [cell, zero], E::minus(simd, zero, size), size)
    }
}

/// Powers of non-negative values.
#[inline(always)]
fn powers<S: Simd, E: Element>(simd: S, base: E::Vector<S>, exponent: f64) -> E::Vector<S> {
    by_lane::<S, E>(
        simd,
        base,
        #[inline(always)]
        |base| E::from_f64(base.to_f64().powf(exponent)),
    )
}

/// [`Norm::pull`] of a cotangent and a norm.
pub(super) struct Pull(pub(super) Norm);

impl<E: Element> Function<E, 2> for Pull {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, _: usize, [norm, cotangent]: [E::Vector<S>; 2]) -> E::Vector<S> {
        self.0.pull::<S, E>(simd, norm, cotangent)
    }
}

/// [Slopes](Norm::slopes) of cells times the values pulled back to them.
pub(super) struct Slope(pub(super) Norm);

impl<E: Element> Function<E, 2> for Slope {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, _: usize, [pulled, cell]: [E::Vector<S>; 2]) -> E::Vector<S> {
        E::times(simd, pulled, self.0.slopes::<S, E>(simd, cell))
    }
}
