//! Sums over local kernels on one shard: a node of the graph.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::filter::Entry;
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::{load, store};
use crate::kernel::lines::vectors;
use crate::kernel::simd::Isa;
use crate::reshape;

/// The entries of a filter, by output row and by input row.
pub(super) struct Entries {
    pub(super) by_output: Vec<Vec<Entry>>,
    pub(super) by_input: Vec<Vec<Entry>>,
    pub(super) functions: usize,
    /// Longitudes of inputs and outputs.
    pub(super) longitudes: [usize; 2],
}

/// The sums of some output rows, `[planes, functions, rows, longitudes]`, over cells of the input rows that they
/// reach, `[planes, rows, longitudes]`.
#[derive(Clone)]
pub(super) struct LocalSums {
    pub(super) entries: Arc<Entries>,
    pub(super) inputs: Range<usize>,
    pub(super) outputs: Range<usize>,
}

impl std::fmt::Debug for LocalSums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalSums({:?} of {:?})", self.outputs, self.inputs)
    }
}

impl LocalSums {
    pub(super) fn run(self, x: Tensor<3>) -> Tensor<4> {
        if flex::runs_on(&x.device()) {
            Tensor::from_dispatch(apply(self, [x.into_dispatch()]))
        } else {
            self.composed(x)
        }
    }

    fn forward_as<E: Float>(&self, isa: Isa, x: &[E], planes: usize) -> Buffer<E> {
        let ([wide, width], rows) = (self.entries.longitudes, self.outputs.len());
        let functions = self.entries.functions;
        let mut y = filled(planes * functions * rows * width, 0.0);
        let plane = functions * rows * width;
        if plane == 0 {
            return y;
        }
        tasks::for_each_part(y.elements_mut(), plane, 1, |number, y| {
            let x = &x[number * self.inputs.len() * wide..][..self.inputs.len() * wide];
            for row in 0..rows {
                for entry in &self.entries.by_output[self.outputs.start + row] {
                    let x = &x[(entry.row - self.inputs.start) * wide..][..wide];
                    let y = &mut y[(entry.function * rows + row) * width..][..width];
                    let factor = E::from_f64(entry.factor);
                    gather(isa, y, x, entry.shift, factor);
                }
            }
        });
        y
    }

    fn backward_as<E: Float>(&self, isa: Isa, y: &[E], planes: usize) -> Buffer<E> {
        let ([wide, width], rows) = (self.entries.longitudes, self.outputs.len());
        let functions = self.entries.functions;
        let mut x = filled(planes * self.inputs.len() * wide, 0.0);
        tasks::for_each_part(x.elements_mut(), wide, 1, |place, x| {
            let (plane, row) = (place / self.inputs.len(), place % self.inputs.len());
            for entry in &self.entries.by_input[self.inputs.start + row] {
                if !self.outputs.contains(&entry.row) {
                    continue;
                }
                let line =
                    (plane * functions + entry.function) * rows + entry.row - self.outputs.start;
                let (y, factor) = (&y[line * width..][..width], E::from_f64(entry.factor));
                scatter(isa, x, y, entry.shift, factor);
            }
        });
        x
    }

    /// The sums by burn's operators: a cell for each entry and output longitude, which are added.
    pub(super) fn composed(&self, x: Tensor<3>) -> Tensor<4> {
        let ([wide, width], rows) = (self.entries.longitudes, self.outputs.len());
        let [planes, _, _] = x.dims();
        let functions = self.entries.functions;
        let (mut cells, mut places, mut factors) = (Vec::new(), Vec::new(), Vec::new());
        for (row, output) in self.outputs.clone().enumerate() {
            for entry in &self.entries.by_output[output] {
                for k in 0..width {
                    let cell = (entry.shift + k * (wide / width)) % wide;
                    cells.push(((entry.row - self.inputs.start) * wide + cell) as i64);
                    places.push(((entry.function * rows + row) * width + k) as i64);
                    factors.push(entry.factor);
                }
            }
        }
        if cells.is_empty() {
            // The graph has the same shape on every rank.
            (cells, places, factors) = (vec![0], vec![0], vec![0.0]);
        }
        let (device, dtype, count) = (x.device().inner(), x.dtype(), cells.len());
        let index = |values| Tensor::<1, Int>::from_data(TensorData::new(values, [count]), &device);
        let factors = TensorData::new(factors, [1, count]);
        let factors = Tensor::<2>::from_data(factors, (&device, dtype));
        let sizes = [x.dims()[1] * wide, functions * rows.max(1) * width];
        let x: Tensor<2> = reshape(x, vec![planes, sizes[0]]);
        let terms = x.select(1, index(cells)) * factors;
        let sums = Tensor::<2>::zeros([planes, sizes[1]], (&device, dtype));
        let sums = sums.select_assign(1, index(places), terms, burn::tensor::IndexingUpdateOp::Add);
        reshape(sums, vec![planes, functions, rows.max(1), width])
    }
}

impl Operator for LocalSums {
    /// The number of planes.
    type Saved = usize;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["disco", "disco_backward"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, usize)> {
        let x = inputs.remove(0);
        let (dtype, planes, isa) = (x.dtype(), x.shape()[0], Isa::chosen()?);
        let shape = [
            planes,
            self.entries.functions,
            self.outputs.len(),
            self.entries.longitudes[1],
        ];
        let y = with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            flex::result(self.forward_as::<E>(isa, flex::elements(&x), planes), &shape, dtype)
        });
        Ok((y, planes))
    }

    fn backward(&self, pass: BackwardPass<'_, usize>) -> Result<Vec<Option<DispatchTensor>>> {
        let (y, planes) = (pass.cotangent, *pass.saved);
        let (dtype, isa) = (y.dtype(), Isa::chosen()?);
        let shape = [planes, self.inputs.len(), self.entries.longitudes[0]];
        let x = with_float!(dtype, E => {
            let y = flex::operand::<E>(y)?;
            flex::result(self.backward_as::<E>(isa, flex::elements(&y), planes), &shape, dtype)
        });
        Ok(vec![Some(x)])
    }
}

/// `y[k] += factor · x[shift + k · step]`, periodic.
fn gather<E: Float>(isa: Isa, y: &mut [E], x: &[E], shift: usize, factor: E) {
    let step = x.len() / y.len();
    if step > 1 {
        for (k, y) in y.iter_mut().enumerate() {
            *y += factor * x[(shift + k * step) % x.len()];
        }
        return;
    }
    let (before, after) = x.split_at(shift);
    let (first, second) = y.split_at_mut(after.len());
    for (y, x) in [(first, after), (second, before)] {
        isa.run(AddScaled { y, x, factor });
    }
}

/// The transpose: `x[shift + k · step] += factor · y[k]`.
fn scatter<E: Float>(isa: Isa, x: &mut [E], y: &[E], shift: usize, factor: E) {
    let (size, step) = (x.len(), x.len() / y.len());
    if step == 1 {
        return gather(isa, x, y, (size - shift) % size, factor);
    }
    for (k, y) in y.iter().enumerate() {
        x[(shift + k * step) % size] += factor * *y;
    }
}

/// `y += factor · x`, with the same rounding of all elements.
struct AddScaled<'a, E> {
    y: &'a mut [E],
    x: &'a [E],
    factor: E,
}

impl<E: Float> WithSimd for AddScaled<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let factor = E::splat(simd, self.factor);
        for part in vectors::<S, E>(self.x.len()) {
            let y = &mut self.y[part.clone()];
            let sum = E::mul_add(simd, factor, load(simd, &self.x[part]), load(simd, y));
            store(simd, y, sum);
        }
    }
}
