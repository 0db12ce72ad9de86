//! Sampling within the cells of one rank, on CPUs: builds a table of cells and weights for each
//! output, then sums by it.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator};
use halocline_core::tasks;

use super::local::KEYS;
use super::options::{OutOfBounds, SampleOptions};
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::{Compiled, Isa};
use crate::resample::rules::Mode;

/// Outputs that one task computes.
const TASK: usize = 1024;

/// Sampling as a node of the graph, with the cells and the displacements of a rank as inputs.
#[derive(Debug)]
pub(super) struct Sample<const N: usize> {
    pub options: SampleOptions<N>,
    /// Global index of the shard's first cell in every dim.
    pub first: [usize; N],
}

/// Shapes of one call.
#[derive(Clone, Copy, Debug)]
struct Shapes<const N: usize> {
    channels: usize,
    held: [usize; N],
    cells: [usize; N],
}

impl<const N: usize> Shapes<N> {
    fn of(cells: &[usize], points: &[usize]) -> Self {
        Self {
            channels: cells[1],
            held: std::array::from_fn(|dim| cells[dim + 2]),
            cells: std::array::from_fn(|dim| points[dim + 2]),
        }
    }

    fn inputs(&self) -> usize {
        self.held.iter().product()
    }

    fn outputs(&self) -> usize {
        self.cells.iter().product()
    }
}

/// The `C` cells that a value depends on in one dim.
#[derive(Clone, Copy, Debug)]
struct DimTaps<const C: usize> {
    /// Index of the first cell.
    start: isize,
    weights: [f64; C],
    /// Derivatives of the weights with respect to the displacement.
    slopes: [f64; C],
}

/// Evaluates `$body` with `$cells` set to the number of cells per dim that a mode takes.
macro_rules! with_cells {
    ($mode:expr, $cells:ident => $body:expr) => {
        match $mode {
            Mode::Linear => {
                const $cells: usize = 2;
                $body
            }
            Mode::Cubic => {
                const $cells: usize = 4;
                $body
            }
            _ => {
                const $cells: usize = 1;
                $body
            }
        }
    };
}

impl<const N: usize> Sample<N> {
    /// Returns the taps of an output in one dim for a displacement.
    #[inline(always)]
    fn along<const C: usize>(&self, dim: usize, cell: usize, displacement: f64) -> DimTaps<C> {
        let bound = self.options.bound[dim] as f64;
        let clamped = self.options.beyond == OutOfBounds::Clamp;
        let point = if clamped {
            displacement.clamp(-bound, bound)
        } else {
            displacement
        };
        let whole = match C {
            1 => {
                let odd = ((self.first[dim] + cell) % 2) as f64;
                (point + odd).round_ties_even() - odd
            }
            _ => point.floor(),
        };
        let [low, _] = self.options.reach(dim);
        let center = (cell + low) as isize + whole as isize;
        let t = point - whole;
        let (start, factors): (_, [(f64, f64); 4]) = match C {
            2 => (center, [(1.0 - t, -1.0), (t, 1.0), (0.0, 0.0), (0.0, 0.0)]),
            4 => {
                let (third, last) = (near(1.0 - t), far(2.0 - t));
                let factors = [
                    far(t + 1.0),
                    near(t),
                    (third.0, -third.1),
                    (last.0, -last.1),
                ];
                (center - 1, factors)
            }
            // NaN where the displacement is NaN.
            _ => (center, [(1.0 + 0.0 * t, 0.0); 4]),
        };
        let fixed = clamped && displacement.abs() > bound;
        DimTaps {
            start,
            weights: std::array::from_fn(|place| factors[place].0),
            slopes: std::array::from_fn(|place| if fixed { 0.0 } else { factors[place].1 }),
        }
    }

    /// Calls `visit` with each of `outputs` of a sample and its taps in every dim; `points` are the
    /// displacements of the sample.
    #[inline(always)]
    fn each<E: Float, const C: usize>(
        &self,
        shapes: &Shapes<N>,
        points: &[E],
        outputs: Range<usize>,
        mut visit: impl FnMut(usize, &[DimTaps<C>; N]),
    ) {
        let (count, mut rest) = (shapes.outputs(), outputs.start);
        let mut place = [0; N];
        for dim in (0..N).rev() {
            place[dim] = rest % shapes.cells[dim];
            rest /= shapes.cells[dim];
        }
        for output in outputs {
            let along = std::array::from_fn(|dim| {
                self.along(dim, place[dim], points[dim * count + output].to_f64())
            });
            visit(output, &along);
            for dim in (0..N).rev() {
                place[dim] += 1;
                if place[dim] < shapes.cells[dim] {
                    break;
                }
                place[dim] = 0;
            }
        }
    }

    /// Builds the table of cells and weights of `outputs` of a sample.
    #[inline(always)]
    fn table<E: Float, const C: usize>(
        &self,
        shapes: &Shapes<N>,
        points: &[E],
        outputs: Range<usize>,
    ) -> Vec<(u32, E)> {
        let mut table = Vec::with_capacity(outputs.len() * C.pow(N as u32));
        self.each::<E, C>(
            shapes,
            points,
            outputs,
            #[inline(always)]
            |_, along| {
                each_tap(
                    shapes,
                    along,
                    #[inline(always)]
                    |cell, places| {
                        let mut weight = 1.0;
                        for dim in 0..N {
                            weight *= along[dim].weights[places[dim]];
                        }
                        table.push((cell as u32, E::from_f64(weight)));
                    },
                );
            },
        );
        table
    }

    fn sums<E: Float, const C: usize>(
        &self,
        isa: Isa,
        shapes: &Shapes<N>,
        cells: &[E],
        points: &[E],
    ) -> Buffer<E> {
        let (outputs, inputs, channels) = (shapes.outputs(), shapes.inputs(), shapes.channels);
        let samples = points.len() / N / outputs;
        // SAFETY: each task writes its outputs in all channels of its sample, and the tasks cover
        // all outputs.
        unsafe {
            Buffer::filled(samples * channels * outputs, |sums| {
                each_task(samples, outputs, |sample, part| {
                    let points = &points[sample * N * outputs..][..N * outputs];
                    isa.run(Compiled(
                        #[inline(always)]
                        || {
                            let table = self.table::<E, C>(shapes, points, part.clone());
                            for plane in sample * channels..(sample + 1) * channels {
                                let field = &cells[plane * inputs..][..inputs];
                                let start = plane * outputs + part.start;
                                let sums = sums.slice(start..start + part.len());
                                match C.pow(N as u32) {
                                    4 => weigh::<E, 4>(field, &table, sums),
                                    8 => weigh::<E, 8>(field, &table, sums),
                                    16 => weigh::<E, 16>(field, &table, sums),
                                    taps => {
                                        for (sum, taps) in sums.iter_mut().zip(table.chunks(taps)) {
                                            *sum = weighed(field, taps);
                                        }
                                    }
                                }
                            }
                        },
                    ));
                });
            })
        }
    }

    /// Computes the gradient of the cells: each plane sums its outputs in order.
    fn of_cells<E: Float, const C: usize>(
        &self,
        isa: Isa,
        shapes: &Shapes<N>,
        points: &[E],
        cotangent: &[E],
    ) -> Buffer<E> {
        let (outputs, inputs, channels) = (shapes.outputs(), shapes.inputs(), shapes.channels);
        let planes = cotangent.len() / outputs;
        let mut gradient = buffer::filled::<E>(planes * inputs, 0.0);
        // Each group of channels builds the table once; the sums of a plane do not depend on the
        // grouping.
        let together = channels.div_ceil(rayon::current_num_threads());
        let elements = gradient.elements_mut();
        tasks::for_each_part(elements, channels * inputs, 1, |sample, gradient| {
            let points = &points[sample * N * outputs..][..N * outputs];
            let cotangent = &cotangent[sample * channels * outputs..][..channels * outputs];
            tasks::for_each_part(gradient, together * inputs, 1, |group, gradient| {
                let cotangent = &cotangent[group * together * outputs..];
                for start in (0..outputs).step_by(TASK) {
                    let part = start..outputs.min(start + TASK);
                    isa.run(Compiled(
                        #[inline(always)]
                        || {
                            let table = self.table::<E, C>(shapes, points, part.clone());
                            let planes = gradient.chunks_mut(inputs).zip(cotangent.chunks(outputs));
                            for (gradient, cotangent) in planes {
                                let taps = table.chunks_exact(C.pow(N as u32));
                                for (cotangent, taps) in cotangent[part.clone()].iter().zip(taps) {
                                    for (cell, weight) in taps {
                                        gradient[*cell as usize] += *weight * *cotangent;
                                    }
                                }
                            }
                        },
                    ));
                }
            });
        });
        gradient
    }

    /// Computes the gradient of the displacements: the slopes between the cells of an output.
    fn of_points<E: Float, const C: usize>(
        &self,
        isa: Isa,
        shapes: &Shapes<N>,
        cells: &[E],
        points: &[E],
        cotangent: &[E],
    ) -> Buffer<E> {
        let (outputs, inputs, channels) = (shapes.outputs(), shapes.inputs(), shapes.channels);
        let samples = points.len() / N / outputs;
        // SAFETY: each task writes the gradients of its outputs, and the tasks cover all outputs.
        unsafe {
            Buffer::filled(points.len(), |gradient| {
                each_task(samples, outputs, |sample, part| {
                    let points = &points[sample * N * outputs..][..N * outputs];
                    let planes = sample * channels..(sample + 1) * channels;
                    isa.run(Compiled(
                        #[inline(always)]
                        || {
                            self.each::<E, C>(
                                shapes,
                                points,
                                part.clone(),
                                #[inline(always)]
                                |output, along| {
                                    let slopes = slopes(
                                        shapes,
                                        along,
                                        #[inline(always)]
                                        |cell| {
                                            let mut sum = 0.0;
                                            for plane in planes.clone() {
                                                let value = cells[plane * inputs + cell].to_f64();
                                                let cotangent = cotangent[plane * outputs + output];
                                                sum += value * cotangent.to_f64();
                                            }
                                            sum
                                        },
                                    );
                                    for (dim, slope) in slopes.into_iter().enumerate() {
                                        let place = (sample * N + dim) * outputs + output;
                                        *gradient.at(place) = E::from_f64(slope);
                                    }
                                },
                            );
                        },
                    ));
                });
            })
        }
    }
}

/// Runs a task for parts of the outputs of each sample.
fn each_task(samples: usize, outputs: usize, run: impl Fn(usize, Range<usize>) + Sync) {
    let parts = outputs.div_ceil(TASK);
    tasks::for_each(samples * parts, 1, |task| {
        let start = task % parts * TASK;
        run(task / parts, start..outputs.min(start + TASK));
    });
}

/// Weighted sum of cells.
#[inline(always)]
fn weighed<E: Float>(field: &[E], taps: &[(u32, E)]) -> E {
    let mut sum = E::default();
    for (cell, weight) in taps {
        sum += *weight * field[*cell as usize];
    }
    sum
}

/// Weighted sums of `T` cells each.
#[inline(always)]
fn weigh<E: Float, const T: usize>(field: &[E], table: &[(u32, E)], sums: &mut [E]) {
    let (table, _) = table.as_chunks::<T>();
    for (sum, taps) in sums.iter_mut().zip(table) {
        *sum = weighed(field, taps);
    }
}

/// Derivative with respect to each displacement component of the sum of `weight · term(cell)`.
#[inline(always)]
fn slopes<const N: usize, const C: usize>(
    shapes: &Shapes<N>,
    along: &[DimTaps<C>; N],
    term: impl Fn(usize) -> f64,
) -> [f64; N] {
    let mut slopes = [0.0; N];
    each_tap(
        shapes,
        along,
        #[inline(always)]
        |cell, places| {
            let term = term(cell);
            for (dim, slope) in slopes.iter_mut().enumerate() {
                let mut factor = 1.0;
                for other in 0..N {
                    factor *= if other == dim {
                        along[other].slopes[places[other]]
                    } else {
                        along[other].weights[places[other]]
                    };
                }
                *slope += term * factor;
            }
        },
    );
    slopes
}

/// Calls `visit` with each cell that an output depends on, and its tap index in every dim.
#[inline(always)]
fn each_tap<const N: usize, const C: usize>(
    shapes: &Shapes<N>,
    along: &[DimTaps<C>; N],
    mut visit: impl FnMut(usize, [usize; N]),
) {
    let (mut strides, mut stride, mut cell) = ([0; N], 1, 0);
    for dim in (0..N).rev() {
        strides[dim] = stride;
        cell += along[dim].start as usize * stride;
        stride *= shapes.held[dim];
    }
    let mut places = [0; N];
    for _ in 0..C.pow(N as u32) {
        visit(cell, places);
        // Advances to the next tap, last dim first.
        for dim in (0..N).rev() {
            places[dim] += 1;
            cell += strides[dim];
            if places[dim] < C {
                break;
            }
            cell -= places[dim] * strides[dim];
            places[dim] = 0;
        }
    }
}

/// Keys' kernel and its derivative at a distance below 1.
#[inline(always)]
fn near(t: f64) -> (f64, f64) {
    let [a, b] = [KEYS + 2.0, KEYS + 3.0];
    ((a * t - b) * t * t + 1.0, (3.0 * a * t - 2.0 * b) * t)
}

/// Keys' kernel and its derivative at a distance from 1 to 2.
#[inline(always)]
fn far(t: f64) -> (f64, f64) {
    let value = ((t - 5.0) * t + 8.0) * t - 4.0;
    (KEYS * value, KEYS * ((3.0 * t - 10.0) * t + 8.0))
}

impl<const N: usize> Operator for Sample<N> {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["displace", "displace (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let (points, cells) = (inputs.remove(1), inputs.remove(0));
        let dtype = cells.dtype();
        let mut shape = points.shape().to_vec();
        let shapes = Shapes::of(&cells.shape(), &shape);
        shape[1] = shapes.channels;
        let y = with_float!(dtype, E => {
            let (cells, points) = (flex::operand::<E>(cells)?, flex::operand::<E>(points)?);
            let (cells, points) = (flex::elements::<E>(&cells), flex::elements::<E>(&points));
            let isa = Isa::chosen()?;
            let y = with_cells!(self.options.mode, C => self.sums::<E, C>(isa, &shapes, cells, points));
            flex::result(y, &shape, dtype)
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let (cells, points) = (pass.take_input(0), pass.take_input(1));
        let (dtype, wanted) = (cells.dtype(), pass.wanted);
        let (of_cells, of_points) = (cells.shape().to_vec(), points.shape().to_vec());
        let shapes = Shapes::of(&of_cells, &of_points);
        Ok(with_float!(dtype, E => {
            let (cells, points) = (flex::operand::<E>(cells)?, flex::operand::<E>(points)?);
            let cotangent = flex::operand::<E>(pass.cotangent)?;
            let (cells, points) = (flex::elements::<E>(&cells), flex::elements::<E>(&points));
            let cotangent = flex::elements::<E>(&cotangent);
            let isa = Isa::chosen()?;
            let (first, second) = with_cells!(self.options.mode, C => (
                wanted[0].then(|| self.of_cells::<E, C>(isa, &shapes, points, cotangent)),
                wanted[1].then(|| self.of_points::<E, C>(isa, &shapes, cells, points, cotangent)),
            ));
            vec![
                first.map(|gradient| flex::result(gradient, &of_cells, dtype)),
                second.map(|gradient| flex::result(gradient, &of_points, dtype)),
            ]
        }))
    }
}
