//! Graph node of the sums over local kernels on one shard.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;

use super::filter::Entry;
use super::rows::Around;
use super::sums::{Sums, Term};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::Isa;
use crate::reshape;

/// Entries of a filter, by output row and by input row.
pub(super) struct Entries {
    pub(super) by_output: Vec<Vec<Entry>>,
    pub(super) by_input: Vec<Vec<Entry>>,
    pub(super) functions: usize,
    /// Numbers of longitudes of inputs and outputs.
    pub(super) longitudes: [usize; 2],
}

/// Sums for a range of output rows, `[planes, functions, rows, longitudes]`, over the cells of the
/// input rows within reach, `[planes, rows, longitudes]`.
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
        let around = Around {
            size: width,
            phases: wide / width,
            rows: self.inputs.len(),
        };
        let terms = tasks::map(rows, 1, |row| {
            let mut terms = vec![Vec::new(); functions];
            for entry in &self.entries.by_output[self.outputs.start + row] {
                if self.inputs.contains(&entry.row) {
                    terms[entry.function].push(Term {
                        start: around.start(entry.row - self.inputs.start, entry.shift),
                        factor: E::from_f64(entry.factor),
                    });
                }
            }
            terms
        });
        let (lines, channel) = (around.lines(x), around.channel());
        // SAFETY: the tasks write all lines, each task its own.
        unsafe {
            Buffer::filled(planes * functions * rows * width, |y| {
                tasks::for_each(planes * rows, 1, |task| {
                    let (plane, row) = (task / rows, task % rows);
                    for (function, terms) in terms[row].iter().enumerate() {
                        let start = ((plane * functions + function) * rows + row) * width;
                        isa.run(Sums {
                            lines: &lines[plane * channel..][..channel],
                            terms,
                            to: y.slice(start..start + width),
                        });
                    }
                });
            })
        }
    }

    fn backward_as<E: Float>(&self, isa: Isa, y: &[E], planes: usize) -> Buffer<E> {
        let ([wide, width], rows) = (self.entries.longitudes, self.outputs.len());
        let (inputs, functions) = (self.inputs.len(), self.entries.functions);
        let phases = wide / width;
        let around = Around {
            size: width,
            phases: 1,
            rows: functions * rows,
        };
        // The cells of one phase are sums over longitudes of the cotangent.
        let terms = tasks::map(inputs, 1, |row| {
            let mut terms = vec![Vec::new(); phases];
            for entry in &self.entries.by_input[self.inputs.start + row] {
                if self.outputs.contains(&entry.row) {
                    let line = entry.function * rows + entry.row - self.outputs.start;
                    terms[entry.shift % phases].push(Term {
                        start: around.start(line, (width - entry.shift / phases) % width),
                        factor: E::from_f64(entry.factor),
                    });
                }
            }
            terms
        });
        let (lines, channel) = (around.lines(y), around.channel());
        let scratch = || vec![E::default(); width];
        // SAFETY: the tasks write all rows, each task its own.
        unsafe {
            Buffer::filled(planes * inputs * wide, |x| {
                tasks::for_each_init(planes * inputs, 1, scratch, |sums, task| {
                    let (plane, row) = (task / inputs, task % inputs);
                    let lines = &lines[plane * channel..][..channel];
                    let x = x.slice(task * wide..(task + 1) * wide);
                    for (phase, terms) in terms[row].iter().enumerate() {
                        isa.run(Sums {
                            lines,
                            terms,
                            to: sums,
                        });
                        let cells = x[phase..].iter_mut().step_by(phases);
                        cells.zip(&*sums).for_each(|(x, sum)| *x = *sum);
                    }
                });
            })
        }
    }

    /// Sums of the cells of the input rows.
    fn sums(&self, x: DispatchTensor) -> Result<DispatchTensor> {
        let (dtype, planes, isa) = (x.dtype(), x.shape()[0], Isa::chosen()?);
        let [functions, width] = [self.entries.functions, self.entries.longitudes[1]];
        let shape = [planes, functions, self.outputs.len(), width];
        Ok(with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            flex::result(self.forward_as::<E>(isa, flex::elements(&x), planes), &shape, dtype)
        }))
    }

    /// Transposed sums of the output rows.
    fn transposed(&self, y: DispatchTensor) -> Result<DispatchTensor> {
        let (dtype, planes, isa) = (y.dtype(), y.shape()[0], Isa::chosen()?);
        let shape = [planes, self.inputs.len(), self.entries.longitudes[0]];
        Ok(with_float!(dtype, E => {
            let y = flex::operand::<E>(y)?;
            flex::result(self.backward_as::<E>(isa, flex::elements(&y), planes), &shape, dtype)
        }))
    }

    /// Computes the sums with burn's operators: gathers one cell per entry and output longitude,
    /// then adds them up.
    pub(super) fn composed(&self, x: Tensor<3>) -> Tensor<4> {
        let ([wide, width], rows) = (self.entries.longitudes, self.outputs.len().max(1));
        let ([planes, held, _], functions) = (x.dims(), self.entries.functions);
        let [cells, places] = self.places();
        let x = reshape(x, vec![planes, held * wide]);
        let sums = self.added(x, [cells, places], functions * rows * width);
        reshape(sums, vec![planes, functions, rows, width])
    }

    /// Computes the transposed sums with burn's operators.
    pub(super) fn composed_transposed(&self, y: Tensor<4>) -> Tensor<3> {
        let ([wide, width], rows) = (self.entries.longitudes, self.inputs.len().max(1));
        let [planes, functions, held, _] = y.dims();
        let [cells, places] = self.places();
        let y = reshape(y, vec![planes, functions * held * width]);
        let sums = self.added(y, [places, cells], rows * wide);
        reshape(sums, vec![planes, rows, wide])
    }

    /// Entries whose rows are both held, with their output rows.
    fn held(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.outputs
            .clone()
            .enumerate()
            .flat_map(move |(row, output)| {
                let entries = self.entries.by_output[output].iter();
                let entries = entries.filter(move |entry| self.inputs.contains(&entry.row));
                entries.map(move |entry| (row, entry))
            })
    }

    /// Cells of the input rows and places among the sums, for each entry and output longitude.
    fn places(&self) -> [Vec<i64>; 2] {
        let ([wide, width], rows) = (self.entries.longitudes, self.outputs.len());
        let [mut cells, mut places] = [Vec::new(), Vec::new()];
        for (row, entry) in self.held() {
            for k in 0..width {
                let cell = (entry.shift + k * (wide / width)) % wide;
                cells.push(((entry.row - self.inputs.start) * wide + cell) as i64);
                places.push(((entry.function * rows + row) * width + k) as i64);
            }
        }
        if cells.is_empty() {
            // The graph has the same shape on every rank.
            (cells, places) = (vec![0], vec![0]);
        }
        [cells, places]
    }

    /// Adds cells of each plane, multiplied by their factors, to `count` sums.
    fn added(&self, x: Tensor<2>, [from, to]: [Vec<i64>; 2], count: usize) -> Tensor<2> {
        let (device, dtype, terms) = (x.device().inner(), x.dtype(), from.len());
        let width = self.entries.longitudes[1];
        let factors = self.held().map(|(_, entry)| entry.factor);
        let factors = factors.flat_map(|factor| std::iter::repeat_n(factor, width));
        let mut factors: Vec<f64> = factors.collect();
        factors.resize(terms, 0.0);
        let factors =
            Tensor::<2>::from_data(TensorData::new(factors, [1, terms]), (&device, dtype));
        let index = |values| Tensor::<1, Int>::from_data(TensorData::new(values, [terms]), &device);
        let sums = Tensor::<2>::zeros([x.dims()[0], count], (&device, dtype));
        let terms = x.select(1, index(from)) * factors;
        sums.select_assign(1, index(to), terms, IndexingUpdateOp::Add)
    }
}

impl Operator for LocalSums {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["disco", "disco_backward"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((self.sums(inputs.remove(0))?, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(self.transposed(pass.cotangent)?)])
    }
}

/// Transpose of [`LocalSums`] as a map of its own: sums for the input rows,
/// `[planes, rows, longitudes]`, over `[planes, functions, rows, longitudes]` of the output rows.
#[derive(Clone, Debug)]
pub(super) struct TransposedSums(pub(super) LocalSums);

impl TransposedSums {
    pub(super) fn run(self, y: Tensor<4>) -> Tensor<3> {
        if flex::runs_on(&y.device()) {
            Tensor::from_dispatch(apply(self, [y.into_dispatch()]))
        } else {
            self.0.composed_transposed(y)
        }
    }
}

impl Operator for TransposedSums {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["disco_transpose", "disco_transpose_backward"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((self.0.transposed(inputs.remove(0))?, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(self.0.sums(pass.cotangent)?)])
    }
}
