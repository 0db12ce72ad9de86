//! Transforms between real lines and their modes, by way of complex transforms; lines of even size
//! use one of half the size, whose complex numbers are pairs of cells.

use std::sync::Arc;

use rustdct::DctNum;
use rustdct::rustfft::num_complex::Complex;
use rustdct::rustfft::{Fft, FftDirection, FftPlanner};

use super::complex::{Work, complex, complex_mut, number, zero};
use super::line::Scale;
use crate::kernel::simd::{Compiled, Isa};

/// Real-to-modes transform, or its inverse.
pub(super) struct RealFft<T: DctNum> {
    size: usize,
    fft: Arc<dyn Fft<T>>,
    /// For even sizes: cosine and sine of each mode's angle, with the cosine negated for transforms
    /// to modes.
    turns: Vec<Complex<T>>,
}

impl<T: DctNum> RealFft<T> {
    pub(super) fn new(
        planner: &mut FftPlanner<T>,
        size: usize,
        direction: FftDirection,
    ) -> Arc<Self> {
        let half = size / 2;
        let is_even = size.is_multiple_of(2);
        let turn = |mode: usize| {
            let (sin, cos) = (std::f64::consts::PI * mode as f64 / half as f64).sin_cos();
            let (sin, cos) = match 2 * mode {
                _ if mode == half => (0.0, -1.0),
                double if double == half => (1.0, 0.0),
                _ => (sin, cos),
            };
            let cos = match direction {
                FftDirection::Forward => -cos,
                FftDirection::Inverse => cos,
            };
            Complex::new(number(cos), number(sin))
        };
        Arc::new(Self {
            size,
            fft: planner.plan_fft(if is_even { half } else { size }, direction),
            turns: (0..=half).filter(|_| is_even).map(turn).collect(),
        })
    }

    /// Computes the first modes of a line.
    pub(super) fn modes(
        &self,
        isa: Isa,
        x: &[T],
        y: &mut [Complex<T>],
        scale: Scale,
        Work {
            modes,
            complex: work,
            ..
        }: &mut Work<T>,
    ) {
        if self.turns.is_empty() {
            modes.clear();
            modes.extend(x.iter().map(|x| Complex::new(*x, T::zero())));
            work.resize(self.fft.get_inplace_scratch_len(), zero());
            self.fft.process_with_scratch(modes, work);
            y.copy_from_slice(&modes[..y.len()]);
            return scale.apply(y, self.size, 1.0);
        }
        let half = self.size / 2;
        modes.resize(half + 1, zero());
        work.resize(self.fft.get_immutable_scratch_len(), zero());
        let whole = &mut modes[..half];
        self.fft
            .process_immutable_with_scratch(complex(x), whole, work);
        modes[half] = modes[0];
        self.fold(isa, modes, y, 0.5 * scale.interior);
        if scale.edge != scale.interior {
            let Complex { re, im } = modes[0];
            let edge = |value| Complex::new(value * number(scale.edge), T::zero());
            y[0] = edge(re + im);
            if let Some(y) = y.get_mut(half) {
                *y = edge(re - im);
            }
        }
    }

    /// Computes the real part of the line with these first modes.
    pub(super) fn cells(
        &self,
        isa: Isa,
        x: &[Complex<T>],
        y: &mut [T],
        scale: Scale,
        Work {
            modes,
            complex: work,
            more,
            ..
        }: &mut Work<T>,
    ) {
        let (size, half) = (self.size, self.size / 2);
        modes.clear();
        modes.extend_from_slice(x);
        modes.resize(half + 1, zero());
        // Halves interior modes, because each is added to its conjugate below.
        scale.apply(modes, size, 0.5);
        modes[0].im = T::zero();
        if self.turns.is_empty() {
            for mode in (1..=half).rev() {
                modes.push(modes[mode].conj());
            }
            work.resize(self.fft.get_inplace_scratch_len(), zero());
            self.fft.process_with_scratch(modes, work);
            return y.iter_mut().zip(&*modes).for_each(|(y, x)| *y = x.re);
        }
        modes[half].im = T::zero();
        more.resize(half, zero());
        self.fold(isa, modes, more, 1.0);
        work.resize(self.fft.get_outofplace_scratch_len(), zero());
        self.fft
            .process_outofplace_with_scratch(more, complex_mut(y), work);
    }

    /// Turns the transform of cell pairs into the modes of the cells, or the reverse.
    fn fold(&self, isa: Isa, x: &[Complex<T>], y: &mut [Complex<T>], scale: f64) {
        let (count, scale) = (y.len(), number::<T>(scale));
        isa.run(Compiled(
            #[inline(always)]
            || {
                let opposite = x[x.len() - count..].iter().rev();
                let pairs = x[..count].iter().zip(opposite).zip(&self.turns[..count]);
                for (y, ((x, opposite), turn)) in y.iter_mut().zip(pairs) {
                    let (sum, difference) = (x.re + opposite.re, x.re - opposite.re);
                    let (im_sum, im_difference) = (x.im + opposite.im, x.im - opposite.im);
                    let re = sum - turn.im * difference - turn.re * im_sum;
                    let im = im_difference + turn.re * difference - turn.im * im_sum;
                    *y = Complex::new(scale * re, scale * im);
                }
            },
        ));
    }
}
