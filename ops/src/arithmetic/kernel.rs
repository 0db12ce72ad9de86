//! Kernels that add scaled fields.

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{CHUNK, Function, apply, map, replace, sums};
use crate::kernel::simd::{Element, Isa};

/// A field as `outer · channels` rows of `inner` elements, with one factor per channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub outer: usize,
    pub channels: usize,
    pub inner: usize,
}

impl Rows {
    fn count(self) -> usize {
        self.outer * self.channels
    }

    fn len(self) -> usize {
        self.count() * self.inner
    }
}

/// Computes `x + y · scale`.
pub(crate) fn forward<E: Element>(
    isa: Isa,
    rows: Rows,
    [x, y]: [&[E]; 2],
    scale: &[E],
) -> Buffer<E> {
    assert_eq!([x.len(), scale.len()], [rows.len(), rows.channels]);
    map(isa, [y, x], rows.count(), &Scaled(scale))
}

/// Replaces `y` by `x + y · scale`.
pub(crate) fn forward_in_place<E: Element>(
    isa: Isa,
    rows: Rows,
    x: &[E],
    y: &mut [E],
    scale: &[E],
) {
    assert_eq!([x.len(), scale.len()], [rows.len(), rows.channels]);
    replace(isa, y, [x], rows.count(), &Scaled(scale));
}

struct Scaled<'a, E>(&'a [E]);

impl<E: Element> Function<E, 2> for Scaled<'_, E> {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, row: usize, [y, x]: [E::Vector<S>; 2]) -> E::Vector<S> {
        let scale = E::splat(simd, self.0[row % self.0.len()]);
        E::mul_add(simd, y, scale, x)
    }
}

/// Computes the gradients of `y` (the cotangent times `scale`) and of `scale` (sums of the
/// cotangent times `y`).
pub(crate) fn backward<E: Element>(
    isa: Isa,
    rows: Rows,
    y: &[E],
    scale: &[E],
    cotangent: &[E],
) -> (Buffer<E>, Vec<E>) {
    struct Task<'a, E> {
        y: &'a [E],
        scale: E,
        cotangent: &'a [E],
        gradient: &'a mut [E],
    }
    impl<E: Element> WithSimd for Task<'_, E> {
        type Output = E;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> E {
            let (scale, zero) = (E::splat(simd, self.scale), E::splat(simd, E::default()));
            apply(
                simd,
                [self.cotangent],
                self.gradient,
                #[inline(always)]
                |[cotangent]| E::times(simd, cotangent, scale),
            );
            let [sum] = sums(
                simd,
                [self.cotangent, self.y],
                [zero; 2],
                #[inline(always)]
                |[sum], [cotangent, y]| [E::mul_add(simd, cotangent, y, sum)],
            );
            sum
        }
    }
    assert_eq!([y.len(), cotangent.len()], [rows.len(); 2]);
    assert_eq!(scale.len(), rows.channels);
    let pieces = rows.inner.div_ceil(CHUNK);
    let mut parts = vec![E::default(); rows.count() * pieces];
    // SAFETY: together, the pieces of all rows cover all elements.
    let gradient = unsafe {
        Buffer::filled(rows.len(), |gradient| {
            let together = (CHUNK / rows.inner.max(1)).max(1);
            tasks::for_each_part(&mut parts, 1, together, |task, part| {
                let (row, start) = (task / pieces, task % pieces * CHUNK);
                let len = CHUNK.min(rows.inner - start);
                let range = row * rows.inner + start..row * rows.inner + start + len;
                part[0] = isa.run(Task {
                    y: &y[range.clone()],
                    scale: scale[row % rows.channels],
                    cotangent: &cotangent[range.clone()],
                    gradient: gradient.slice(range),
                });
            });
        })
    };
    let sum = |channel: usize| {
        let rows = (0..rows.outer).map(|outer| outer * rows.channels + channel);
        let parts = rows.flat_map(|row| &parts[row * pieces..][..pieces]);
        E::from_f64(parts.map(|part| part.to_f64()).sum())
    };
    (gradient, (0..rows.channels).map(sum).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{random, same_for_all_pools};

    #[test]
    fn rows_are_those_of_a_loop() {
        for (outer, channels, inner) in [
            (2, 3, 17),
            (1, 5, 40_003),
            (3, 1, 1),
            (0, 2, 5),
            (2, 0, 5),
            (2, 2, 0),
        ] {
            let rows = Rows {
                outer,
                channels,
                inner,
            };
            let fields = [1, 2, 3].map(|seed| random(rows.len(), seed));
            let [x, y, cotangent] = fields.each_ref().map(Vec::as_slice);
            let scale = random(channels, 4);
            let factor = |index: usize| scale[index / inner % channels];
            for isa in Isa::available() {
                let value = same_for_all_pools(|| forward(isa, rows, [x, y], &scale).to_vec());
                let mut replaced = y.to_vec();
                forward_in_place(isa, rows, x, &mut replaced, &scale);
                assert_eq!(value, replaced);
                let (gradient, of_scale) = same_for_all_pools(|| {
                    let (gradient, of_scale) = backward(isa, rows, y, &scale, cotangent);
                    (gradient.to_vec(), of_scale)
                });
                let mut expected = vec![0.0; channels];
                for index in 0..rows.len() {
                    assert!((value[index] - (x[index] + y[index] * factor(index))).abs() < 1e-6);
                    assert_eq!(gradient[index], cotangent[index] * factor(index));
                    expected[index / inner % channels] += y[index] * cotangent[index];
                }
                for (found, expected) in of_scale.iter().zip(expected) {
                    assert!((found - expected).abs() < 1e-9 * (rows.len() + 1) as f64);
                }
            }
        }
    }
}
