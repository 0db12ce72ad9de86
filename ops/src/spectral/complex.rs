//! Complex numbers, and the buffers of a transform.

use rustdct::DctNum;
use rustdct::rustfft::num_complex::Complex;

use super::line::Scale;

/// Buffers of a transform.
pub(super) struct Work<T> {
    pub modes: Vec<Complex<T>>,
    pub more: Vec<Complex<T>>,
    pub complex: Vec<Complex<T>>,
    pub real: Vec<T>,
}

impl<T> Default for Work<T> {
    fn default() -> Self {
        Self {
            modes: Vec::new(),
            more: Vec::new(),
            complex: Vec::new(),
            real: Vec::new(),
        }
    }
}

/// Reinterprets pairs of numbers as complex numbers.
pub(super) fn complex<T>(numbers: &[T]) -> &[Complex<T>] {
    let (pairs, rest) = numbers.as_chunks::<2>();
    assert!(rest.is_empty());
    // SAFETY: `Complex` is `repr(C)`, two numbers in order.
    unsafe { std::slice::from_raw_parts(pairs.as_ptr().cast(), pairs.len()) }
}

/// Reinterprets pairs of numbers as complex numbers.
pub(super) fn complex_mut<T>(numbers: &mut [T]) -> &mut [Complex<T>] {
    let (pairs, rest) = numbers.as_chunks_mut::<2>();
    assert!(rest.is_empty());
    // SAFETY: `Complex` is `repr(C)`, two numbers in order.
    unsafe { std::slice::from_raw_parts_mut(pairs.as_mut_ptr().cast(), pairs.len()) }
}

pub(super) fn zero<T: DctNum>() -> Complex<T> {
    Complex::new(T::zero(), T::zero())
}

impl Scale {
    /// Scales the modes of a line of this size; interior modes by a further factor `interior`.
    pub(super) fn apply<T: DctNum>(self, modes: &mut [Complex<T>], size: usize, interior: f64) {
        let interior = self.interior * interior;
        if self.edge == interior {
            return scaled(modes, interior);
        }
        let edges = [0, size / 2].map(|edge| {
            let mode = modes.get(edge).filter(|_| is_edge(edge, size));
            mode.map(|mode| *mode * number::<T>(self.edge))
        });
        scaled(modes, interior);
        for (edge, mode) in [0, size / 2].into_iter().zip(edges) {
            if let Some(mode) = mode {
                modes[edge] = mode;
            }
        }
    }
}

/// Multiplies numbers by a factor in place.
pub(super) fn scaled<T: DctNum>(numbers: &mut [Complex<T>], factor: f64) {
    if factor == 1.0 {
        return;
    }
    let factor = number::<T>(factor);
    for number in numbers {
        *number = *number * factor;
    }
}

fn is_edge(k: usize, size: usize) -> bool {
    k == 0 || 2 * k == size
}

pub(super) fn number<T: DctNum>(value: f64) -> T {
    T::from_f64(value).expect("a float")
}
