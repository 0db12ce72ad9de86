//! Transforms of many lines by rustfft and rustdct. Each line is computed independently, so its
//! result does not depend on the number of threads.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use rustdct::rustfft::num_complex::Complex;
use rustdct::rustfft::{Fft, FftDirection, FftPlanner};
use rustdct::{DctNum, DctPlanner, TransformType2And3};

use super::complex::{Work, complex, complex_mut, number, scaled, zero};
use super::line::{Frequencies, Line, Scale, Sign};
use super::real::RealFft;
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;
use halocline_core::tasks;

/// Lines copied together, so that reads of adjacent lines are contiguous.
const TOGETHER: usize = 16;
/// Least numbers per task that outweigh the cost of starting it.
const TASK: usize = 1 << 13;

/// Transforms all lines of `[outer, cells, inner]`; `inner` counts cells, and a complex cell is two
/// numbers.
///
/// # Safety
/// `y` must have room for the result; all of it is written.
pub(super) unsafe fn transform<T: DctNum>(
    isa: Isa,
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
    let lengths = [cells_x * parts_x, cells_y * parts_y];
    let blocks = inner.div_ceil(TOGETHER);
    let longest = lengths[0].max(lengths[1]);
    let least = (TASK / (longest * inner.min(TOGETHER)).max(1)).max(1);
    tasks::for_each_init(outer * blocks, least, Scratch::default, |scratch, task| {
        let (o, first) = (task / blocks, task % blocks * TOGETHER);
        let lines = TOGETHER.min(inner - first);
        let strides = lengths.map(apart);
        if inner == 1 {
            let before = &x[o * lengths[0]..][..lengths[0]];
            // SAFETY: the line of this task, which is written before it is read.
            let after = unsafe { y.slice(o * lengths[1]..(o + 1) * lengths[1]) };
            return plan.run(isa, before, after, &mut scratch.work);
        }
        let (mut before, mut after) = scratch.lines(strides.map(|stride| lines * stride));
        let rows = &x[(o * cells_x * inner + first) * parts_x..];
        match parts_x {
            2 => gather::<T, 2>(rows, inner, &mut before, strides[0], [cells_x, lines]),
            _ => gather::<T, 1>(rows, inner, &mut before, strides[0], [cells_x, lines]),
        }
        let pairs = before.chunks_exact(strides[0]);
        for (before, after) in pairs.zip(after.chunks_exact_mut(strides[1])) {
            let (before, after) = (&before[..lengths[0]], &mut after[..lengths[1]]);
            plan.run(isa, before, after, &mut scratch.work);
        }
        let start = (o * cells_y * inner + first) * parts_y;
        for k in 0..cells_y {
            let start = start + k * inner * parts_y;
            // SAFETY: within the result, and written by this task alone.
            let row = unsafe { y.slice(start..start + lines * parts_y) };
            match parts_y {
                2 => scatter::<T, 2>(row, &after, strides[1], k),
                _ => scatter::<T, 1>(row, &after, strides[1], k),
            }
        }
        scratch.lines = [before, after];
    });
}

/// Stride between the starts of lines in a buffer: not a power of two, which would map all lines to
/// the same few cache sets.
fn apart(length: usize) -> usize {
    length.next_multiple_of(16) + 16
}

/// Copies lines, whose cells are `inner` apart, to contiguous buffers.
fn gather<T: Copy, const P: usize>(
    x: &[T],
    inner: usize,
    buffer: &mut [T],
    stride: usize,
    [cells, lines]: [usize; 2],
) {
    let (buffer, _) = buffer.as_chunks_mut::<P>();
    for cell in 0..cells {
        let (row, _) = x[cell * inner * P..][..lines * P].as_chunks::<P>();
        for (line, number) in row.iter().enumerate() {
            buffer[line * (stride / P) + cell] = *number;
        }
    }
}

/// Copies one cell of each line to the row of that cell.
fn scatter<T: Copy, const P: usize>(row: &mut [T], buffer: &[T], stride: usize, cell: usize) {
    let (buffer, _) = buffer.as_chunks::<P>();
    let (row, _) = row.as_chunks_mut::<P>();
    for (line, number) in row.iter_mut().enumerate() {
        *number = buffer[line * (stride / P) + cell];
    }
}

/// Buffers of a task.
struct Scratch<T> {
    lines: [Vec<T>; 2],
    work: Work<T>,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Self {
            lines: Default::default(),
            work: Work::default(),
        }
    }
}

impl<T: DctNum> Scratch<T> {
    /// Takes the line buffers, input and output.
    fn lines(&mut self, lengths: [usize; 2]) -> (Vec<T>, Vec<T>) {
        let [mut before, mut after] = std::mem::take(&mut self.lines);
        before.resize(lengths[0], T::zero());
        after.resize(lengths[1], T::zero());
        (before, after)
    }
}

/// Planned transform of one line.
enum Plan<T: DctNum> {
    ToModes(Arc<RealFft<T>>, Scale),
    FromModes(Arc<RealFft<T>>, Scale),
    ToFrequencies(Arc<dyn Fft<T>>, Frequencies),
    FromFrequencies(Arc<dyn Fft<T>>, Frequencies),
    ToCosines(Arc<dyn TransformType2And3<T>>, Scale),
    FromCosines(Arc<dyn TransformType2And3<T>>, Scale),
}

impl<T: DctNum> Plan<T> {
    fn of(line: Line) -> Self {
        with_planners(|planners: &mut Planners<T>| match line {
            Line::ToModes { size, scale, .. } => {
                Self::ToModes(planners.real(size, FftDirection::Forward), scale)
            }
            Line::FromModes { size, scale, .. } => {
                Self::FromModes(planners.real(size, FftDirection::Inverse), scale)
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

    /// Transforms a line.
    fn run(&self, isa: Isa, before: &[T], after: &mut [T], work: &mut Work<T>) {
        match self {
            Self::ToModes(fft, scale) => fft.modes(isa, before, complex_mut(after), *scale, work),
            Self::FromModes(fft, scale) => fft.cells(isa, complex(before), after, *scale, work),
            Self::ToFrequencies(fft, kept) => {
                let (before, after) = (complex(before), complex_mut(after));
                if kept.is_all() {
                    whole(&**fft, before, after, work);
                } else {
                    work.modes.clear();
                    work.modes.extend_from_slice(before);
                    work.complex.resize(fft.get_inplace_scratch_len(), zero());
                    fft.process_with_scratch(&mut work.modes, &mut work.complex);
                    let (low, high) = after.split_at_mut(kept.low);
                    low.copy_from_slice(&work.modes[..kept.low]);
                    high.copy_from_slice(&work.modes[kept.size - kept.high..]);
                }
                scaled(after, kept.scale);
            }
            Self::FromFrequencies(fft, kept) => {
                let (before, after) = (complex(before), complex_mut(after));
                if kept.is_all() {
                    whole(&**fft, before, after, work);
                } else {
                    let (low, high) = before.split_at(kept.low);
                    after.fill(zero());
                    after[..kept.low].copy_from_slice(low);
                    after[kept.size - kept.high..].copy_from_slice(high);
                    work.complex.resize(fft.get_inplace_scratch_len(), zero());
                    fft.process_with_scratch(after, &mut work.complex);
                }
                scaled(after, kept.scale);
            }
            Self::ToCosines(dct, scale) => {
                after.copy_from_slice(before);
                work.real.resize(dct.get_scratch_len(), T::zero());
                dct.process_dct2_with_scratch(after, &mut work.real);
                let [edge, interior] = [scale.edge, scale.interior].map(number::<T>);
                after[0] = after[0] * edge;
                after[1..]
                    .iter_mut()
                    .for_each(|cell| *cell = *cell * interior);
            }
            Self::FromCosines(dct, scale) => {
                let [edge, interior] = [scale.edge, scale.interior].map(number::<T>);
                for (after, before) in after.iter_mut().zip(before) {
                    *after = *before * interior;
                }
                // The transform halves the first number.
                after[0] = before[0] * edge * number(2.0);
                work.real.resize(dct.get_scratch_len(), T::zero());
                dct.process_dct3_with_scratch(after, &mut work.real);
            }
        }
    }
}

/// Transforms a line with all frequencies kept.
fn whole<T: DctNum>(
    fft: &dyn Fft<T>,
    before: &[Complex<T>],
    after: &mut [Complex<T>],
    work: &mut Work<T>,
) {
    work.complex.resize(fft.get_immutable_scratch_len(), zero());
    fft.process_immutable_with_scratch(before, after, &mut work.complex);
}

/// Cache of plans.
struct Planners<T: DctNum> {
    /// Keyed by size, and whether the transform is to modes.
    real: HashMap<(usize, bool), Arc<RealFft<T>>>,
    complex: FftPlanner<T>,
    cosine: DctPlanner<T>,
}

impl<T: DctNum> Planners<T> {
    fn real(&mut self, size: usize, direction: FftDirection) -> Arc<RealFft<T>> {
        let plan = self.real.entry((size, direction == FftDirection::Forward));
        plan.or_insert_with(|| RealFft::new(&mut self.complex, size, direction))
            .clone()
    }

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
            real: HashMap::new(),
            complex: FftPlanner::new(),
            cosine: DctPlanner::new(),
        })
    });
    f(planners.downcast_mut().expect("planners of this type"))
}
