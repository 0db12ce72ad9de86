//! Transforms of many lines, by rustfft, realfft and rustdct. Each line is computed alone, so that
//! its result does not depend on the number of threads.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use rayon::prelude::*;
use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};
use rustdct::rustfft::{Fft, FftPlanner};
use rustdct::{DctNum, DctPlanner, TransformType2And3};

use super::line::{Frequencies, Line, Scale, Sign};
use crate::kernel::memory::Shared;

/// Lines that are copied together, so that reads of the cells between them are contiguous.
const TOGETHER: usize = 16;
/// Numbers for which a task is worth its start.
const TASK: usize = 1 << 13;

/// Transforms all lines of `[outer, cells, inner]`; `inner` counts cells, of which complex ones are
/// two numbers.
///
/// # Safety
/// `y` must have room for the result, all of which is written.
pub(super) unsafe fn transform<T: DctNum>(
    line: Line,
    x: &[T],
    y: Shared<T>,
    [outer, inner]: [usize; 2],
) {
    let ([cells_x, cells_y], [parts_x, parts_y]) = (line.cells(), line.parts());
    assert_eq!(x.len(), outer * cells_x * inner * parts_x);
    if outer * inner == 0 {
        return;
    }
    let plan = Plan::of(line);
    let blocks = inner.div_ceil(TOGETHER);
    let length = (cells_x * parts_x).max(cells_y * parts_y);
    let least = (TASK / (length * inner.min(TOGETHER))).max(1);
    let tasks = (0..outer * blocks).into_par_iter().with_min_len(least);
    tasks.for_each_init(Scratch::default, |scratch, task| {
        let (o, first) = (task / blocks, task % blocks * TOGETHER);
        let lines = TOGETHER.min(inner - first);
        let (length_x, length_y) = (cells_x * parts_x, cells_y * parts_y);
        scratch.before.resize(lines * length_x, T::zero());
        scratch.after.resize(lines * length_y, T::zero());
        for j in 0..cells_x {
            let cells = &x[((o * cells_x + j) * inner + first) * parts_x..][..lines * parts_x];
            for (i, cell) in cells.chunks_exact(parts_x).enumerate() {
                scratch.before[i * length_x + j * parts_x..][..parts_x].copy_from_slice(cell);
            }
        }
        let Scratch {
            before,
            after,
            modes,
            work,
            real_work,
        } = scratch;
        let pairs = before.chunks_exact_mut(length_x);
        for (before, after) in pairs.zip(after.chunks_exact_mut(length_y)) {
            plan.run(before, after, modes, work, real_work);
        }
        for k in 0..cells_y {
            let start = ((o * cells_y + k) * inner + first) * parts_y;
            for i in 0..lines {
                for part in 0..parts_y {
                    // SAFETY: within the result, and of this task alone.
                    unsafe {
                        *y.at(start + i * parts_y + part) =
                            after[i * length_y + k * parts_y + part];
                    }
                }
            }
        }
    });
}

/// Buffers of a task.
struct Scratch<T> {
    before: Vec<T>,
    after: Vec<T>,
    modes: Vec<Complex<T>>,
    work: Vec<Complex<T>>,
    real_work: Vec<T>,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Self {
            before: Vec::new(),
            after: Vec::new(),
            modes: Vec::new(),
            work: Vec::new(),
            real_work: Vec::new(),
        }
    }
}

/// A transform of one line, ready to run.
enum Plan<T: DctNum> {
    ToModes(Arc<dyn RealToComplex<T>>, Scale),
    FromModes(Arc<dyn ComplexToReal<T>>, Scale),
    ToFrequencies(Arc<dyn Fft<T>>, Frequencies),
    FromFrequencies(Arc<dyn Fft<T>>, Frequencies),
    ToCosines(Arc<dyn TransformType2And3<T>>, Scale),
    FromCosines(Arc<dyn TransformType2And3<T>>, Scale),
}

impl<T: DctNum> Plan<T> {
    fn of(line: Line) -> Self {
        with_planners(|planners: &mut Planners<T>| match line {
            Line::ToModes { size, scale, .. } => {
                Self::ToModes(planners.real.plan_fft_forward(size), scale)
            }
            Line::FromModes { size, scale, .. } => {
                Self::FromModes(planners.real.plan_fft_inverse(size), scale)
            }
            Line::ToFrequencies(kept) => Self::ToFrequencies(planners.complex(kept), kept),
            Line::FromFrequencies(kept) => Self::FromFrequencies(planners.complex(kept), kept),
            Line::ToCosines { size, scale } => {
                Self::ToCosines(planners.cosine.plan_dct2(size), scale)
            }
            Line::FromCosines { size, scale } => {
                Self::FromCosines(planners.cosine.plan_dct3(size), scale)
            }
        })
    }

    /// Transforms a line, whose cells before are overwritten.
    fn run(
        &self,
        before: &mut [T],
        after: &mut [T],
        modes: &mut Vec<Complex<T>>,
        work: &mut Vec<Complex<T>>,
        real_work: &mut Vec<T>,
    ) {
        let zero = Complex::new(T::zero(), T::zero());
        match self {
            Self::ToModes(fft, scale) => {
                modes.resize(fft.complex_len(), zero);
                work.resize(fft.get_scratch_len(), zero);
                let done = fft.process_with_scratch(before, modes, work);
                done.expect("buffers of the plan's lengths");
                let scale = scale.at::<T>(fft.len());
                for (k, (pair, mode)) in after.chunks_exact_mut(2).zip(&*modes).enumerate() {
                    pair.copy_from_slice(&[mode.re * scale(k), mode.im * scale(k)]);
                }
            }
            Self::FromModes(fft, scale) => {
                modes.clear();
                modes.resize(fft.complex_len(), zero);
                work.resize(fft.get_scratch_len(), zero);
                let (size, scale) = (fft.len(), scale.at::<T>(fft.len()));
                let half = number::<T>(0.5);
                for (k, (pair, mode)) in before.chunks_exact(2).zip(&mut *modes).enumerate() {
                    // The transform adds each interior mode and its conjugate.
                    *mode = match is_edge(k, size) {
                        true => Complex::new(pair[0] * scale(k), T::zero()),
                        false => Complex::new(pair[0], pair[1]) * (scale(k) * half),
                    };
                }
                let done = fft.process_with_scratch(modes, after, work);
                done.expect("buffers of the plan's lengths, and real edges");
            }
            Self::ToFrequencies(fft, kept) => {
                modes.clear();
                modes.extend(
                    before
                        .chunks_exact(2)
                        .map(|pair| Complex::new(pair[0], pair[1])),
                );
                work.resize(fft.get_inplace_scratch_len(), zero);
                fft.process_with_scratch(modes, work);
                let scale = number::<T>(kept.scale);
                for (k, pair) in after.chunks_exact_mut(2).enumerate() {
                    let mode = modes[kept.place(k)] * scale;
                    pair.copy_from_slice(&[mode.re, mode.im]);
                }
            }
            Self::FromFrequencies(fft, kept) => {
                modes.clear();
                modes.resize(kept.size, zero);
                let scale = number::<T>(kept.scale);
                for (k, pair) in before.chunks_exact(2).enumerate() {
                    modes[kept.place(k)] = Complex::new(pair[0], pair[1]) * scale;
                }
                work.resize(fft.get_inplace_scratch_len(), zero);
                fft.process_with_scratch(modes, work);
                for (pair, mode) in after.chunks_exact_mut(2).zip(&*modes) {
                    pair.copy_from_slice(&[mode.re, mode.im]);
                }
            }
            Self::ToCosines(dct, scale) => {
                after.copy_from_slice(before);
                real_work.resize(dct.get_scratch_len(), T::zero());
                dct.process_dct2_with_scratch(after, real_work);
                let [edge, interior] = [scale.edge, scale.interior].map(number::<T>);
                after[0] = after[0] * edge;
                after[1..]
                    .iter_mut()
                    .for_each(|cell| *cell = *cell * interior);
            }
            Self::FromCosines(dct, scale) => {
                let [edge, interior] = [scale.edge, scale.interior].map(number::<T>);
                for (after, before) in after.iter_mut().zip(&*before) {
                    *after = *before * interior;
                }
                // The transform halves the first.
                after[0] = before[0] * edge * number(2.0);
                real_work.resize(dct.get_scratch_len(), T::zero());
                dct.process_dct3_with_scratch(after, real_work);
            }
        }
    }
}

impl Scale {
    /// The factor of each mode of a line of this size.
    fn at<T: DctNum>(self, size: usize) -> impl Fn(usize) -> T {
        let [edge, interior] = [self.edge, self.interior].map(number::<T>);
        move |k| match is_edge(k, size) {
            true => edge,
            false => interior,
        }
    }
}

fn is_edge(k: usize, size: usize) -> bool {
    k == 0 || 2 * k == size
}

fn number<T: DctNum>(value: f64) -> T {
    T::from_f64(value).expect("a float")
}

/// The plans made so far.
struct Planners<T: DctNum> {
    real: RealFftPlanner<T>,
    complex: FftPlanner<T>,
    cosine: DctPlanner<T>,
}

impl<T: DctNum> Planners<T> {
    fn complex(&mut self, kept: Frequencies) -> Arc<dyn Fft<T>> {
        match kept.sign {
            Sign::Minus => self.complex.plan_fft_forward(kept.size),
            Sign::Plus => self.complex.plan_fft_inverse(kept.size),
        }
    }
}

fn with_planners<T: DctNum, R>(f: impl FnOnce(&mut Planners<T>) -> R) -> R {
    static PLANNERS: LazyLock<Mutex<HashMap<TypeId, Box<dyn Any + Send>>>> =
        LazyLock::new(Default::default);
    let mut all = PLANNERS.lock().expect("plans are made without a panic");
    let planners = all.entry(TypeId::of::<T>()).or_insert_with(|| {
        Box::new(Planners::<T> {
            real: RealFftPlanner::new(),
            complex: FftPlanner::new(),
            cosine: DctPlanner::new(),
        })
    });
    f(planners.downcast_mut().expect("planners of this type"))
}
