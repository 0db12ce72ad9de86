//! Graph node of the sums over local kernels on one shard.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;

use super::filter::Entry;
use super::rows::Around;
use super::sums::{Sums, Term};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lines::slice;
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
                terms[entry.function].push(Term {
                    start: around.start(entry.row - self.inputs.start, entry.shift),
                    factor: E::from_f64(entry.factor),
                });
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
                            to: slice(y, start..start + width),
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
                    let x = slice(x, task * wide..(task + 1) * wide);
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

    /// Computes the sums with burn's operators: gathers one cell per entry and output longitude,
    /// then adds them up.
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
    /// Number of planes.
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
