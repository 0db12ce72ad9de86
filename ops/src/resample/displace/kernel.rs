//! Sampling within the cells of one rank, on CPUs: builds a table of cells and weights for each
//! output, then sums by it.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use halocline_core::ops::{BackwardPass, Operator};
use halocline_core::{Result, tasks};

use super::local::KEYS;
use super::options::{OutOfBounds, SampleOptions};
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::{Compiled, Isa};
use crate::resample::rules::Mode;

/// Outputs that one task computes.
const TASK: usize = 1024;

/// Sampling as a node of the graph, with the cells and the displacements of a rank as inputs. There
/// are at most `i32::MAX` cells of a channel.
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

    /// Distances between neighbouring cells, in every dim.
    fn strides(&self) -> [usize; N] {
        std::array::from_fn(|dim| self.held[dim + 1..].iter().product())
    }

    /// Distances of the cells of an output from the first.
    fn taps<const C: usize>(&self) -> Vec<usize> {
        let strides = self.strides();
        let distance = |tap: usize| {
            let steps = place::<N, C>(tap).into_iter().zip(strides);
            steps.map(|(step, stride)| step * stride).sum()
        };
        (0..C.pow(N as u32)).map(distance).collect()
    }

    /// Divides a range of outputs into parts of rows, each with the cell of its first output.
    fn rows(&self, outputs: Range<usize>) -> impl Iterator<Item = (Range<usize>, [usize; N])> {
        let columns = self.cells[N - 1];
        let end = move |start: usize| outputs.end.min((start / columns + 1) * columns);
        let starts = std::iter::successors(Some(outputs.start), move |start| Some(end(*start)));
        let starts = starts.take_while(move |start| *start < outputs.end);
        starts.map(move |start| {
            let (mut cell, mut rest) = ([0; N], start);
            for dim in (0..N).rev() {
                cell[dim] = rest % self.cells[dim];
                rest /= self.cells[dim];
            }
            (start..end(start), cell)
        })
    }
}

/// Places at which some outputs of a sample are sampled.
struct Locations<const N: usize> {
    /// First cell that each output depends on.
    first: Vec<i32>,
    /// Distance of each output from the cell below, in every dim.
    fractions: [Vec<f64>; N],
    /// Derivatives of the fractions with respect to the displacements: zero where these are
    /// clamped, else one.
    free: [Vec<f64>; N],
}

/// Weights of the cells of some outputs, one tap after the other.
struct Table<E> {
    first: Vec<i32>,
    /// Distance from the first cell to that of each tap.
    taps: Vec<usize>,
    weights: Vec<E>,
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
    /// Finds where `outputs` of a sample are sampled; `points` are the displacements of the sample.
    #[inline(always)]
    fn locations<E: Float, const C: usize>(
        &self,
        shapes: &Shapes<N>,
        points: &[E],
        outputs: Range<usize>,
    ) -> Locations<N> {
        let count = outputs.len();
        let mut found = Locations {
            first: vec![0; count],
            fractions: [(); N].map(|()| vec![0.0; count]),
            free: [(); N].map(|()| vec![0.0; count]),
        };
        let strides = shapes.strides().map(|stride| stride as i32);
        let clamped = self.options.beyond == OutOfBounds::Clamp;
        for (row, place) in shapes.rows(outputs.clone()) {
            let here = row.start - outputs.start..row.end - outputs.start;
            for dim in 0..N {
                let points = &points[dim * shapes.outputs()..][row.clone()];
                let first = &mut found.first[here.clone()];
                let fractions = &mut found.fractions[dim][here.clone()];
                let free = &mut found.free[dim][here.clone()];
                let bound = self.options.bound[dim] as f64;
                let odd_start = ((self.first[dim] + place[dim]) % 2) as i32;
                let (step, stride) = (i32::from(dim + 1 == N), strides[dim]);
                let [low, _] = self.options.reach(dim);
                let before = if C == 4 { 1 } else { 0 };
                let start = (place[dim] + low) as i32 - before;
                for (index, point) in points.iter().enumerate() {
                    let displacement = point.to_f64();
                    let point = if clamped {
                        displacement.clamp(-bound, bound)
                    } else {
                        displacement
                    };
                    let along = step * index as i32;
                    let whole = match C {
                        1 => {
                            let odd = f64::from((odd_start + along) & 1);
                            (point + odd).round_ties_even() - odd
                        }
                        _ => point.floor(),
                    };
                    first[index] += (start + along + whole as i32) * stride;
                    fractions[index] = point - whole;
                    let fixed = clamped & (displacement.abs() > bound);
                    free[index] = if fixed { 0.0 } else { 1.0 };
                }
            }
        }
        found
    }

    /// Builds the table of cells and weights of `outputs` of a sample.
    #[inline(always)]
    fn table<E: Float, const C: usize>(
        &self,
        shapes: &Shapes<N>,
        points: &[E],
        outputs: Range<usize>,
    ) -> Table<E> {
        let count = outputs.len();
        let locations = self.locations::<E, C>(shapes, points, outputs);
        let mut weights = vec![E::default(); count * C.pow(N as u32)];
        for (tap, weights) in weights.chunks_mut(count).enumerate() {
            let place = place::<N, C>(tap);
            let fractions = locations.fractions.each_ref().map(|all| &all[..count]);
            for (index, weight) in weights.iter_mut().enumerate() {
                let mut product = 1.0;
                for dim in 0..N {
                    product *= tap_weight::<C>(place[dim], fractions[dim][index]).0;
                }
                *weight = E::from_f64(product);
            }
        }
        Table {
            first: locations.first,
            taps: shapes.taps::<C>(),
            weights,
        }
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
                                table.weigh(field, sums);
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
                                table.scatter(&cotangent[part.clone()], gradient);
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
                            let locations = self.locations::<E, C>(shapes, points, part.clone());
                            let slopes = locations.slopes::<C>(shapes, |first, tap, terms| {
                                for plane in planes.clone() {
                                    let field = &cells[plane * inputs + tap..(plane + 1) * inputs];
                                    let cotangent = &cotangent[plane * outputs..][part.clone()];
                                    let pairs = cotangent.iter().zip(first);
                                    for (term, (cotangent, first)) in terms.iter_mut().zip(pairs) {
                                        let value = field[*first as usize].to_f64();
                                        *term += value * cotangent.to_f64();
                                    }
                                }
                            });
                            for (dim, slopes) in slopes.into_iter().enumerate() {
                                let start = (sample * N + dim) * outputs + part.start;
                                let gradient = gradient.slice(start..start + part.len());
                                for (gradient, slope) in gradient.iter_mut().zip(slopes) {
                                    *gradient = E::from_f64(slope);
                                }
                            }
                        },
                    ));
                });
            })
        }
    }
}

impl<const N: usize> Locations<N> {
    /// Derivatives with respect to each displacement component of the sum of `weight · term(cell)`;
    /// `add` adds the terms of the cells at a distance from the first ones.
    #[inline(always)]
    fn slopes<const C: usize>(
        &self,
        shapes: &Shapes<N>,
        add: impl Fn(&[i32], usize, &mut [f64]),
    ) -> [Vec<f64>; N] {
        let count = self.first.len();
        let mut slopes = [(); N].map(|()| vec![0.0; count]);
        let fractions = self.fractions.each_ref().map(|all| &all[..count]);
        let mut terms = vec![0.0; count];
        for (tap, distance) in shapes.taps::<C>().into_iter().enumerate() {
            let place = place::<N, C>(tap);
            terms.fill(0.0);
            add(&self.first, distance, &mut terms);
            for dim in 0..N {
                let slopes = slopes[dim].iter_mut().zip(&terms).zip(&self.free[dim]);
                for (index, ((slope, term), free)) in slopes.enumerate() {
                    let mut product = 1.0;
                    for other in 0..N {
                        let (weight, slope) =
                            tap_weight::<C>(place[other], fractions[other][index]);
                        product *= if other == dim { slope * free } else { weight };
                    }
                    *slope += term * product;
                }
            }
        }
        slopes
    }
}

impl<E: Float> Table<E> {
    /// Computes the weighted sums of the cells of a field.
    #[inline(always)]
    fn weigh(&self, field: &[E], sums: &mut [E]) {
        sums.fill(E::default());
        let count = self.first.len();
        for (tap, weights) in self.taps.iter().zip(self.weights.chunks_exact(count)) {
            let field = &field[*tap..];
            for ((sum, weight), first) in sums.iter_mut().zip(weights).zip(&self.first) {
                *sum += *weight * field[*first as usize];
            }
        }
    }

    /// Adds the weighted cotangents of the outputs to the gradient of the field, in order.
    #[inline(always)]
    fn scatter(&self, cotangent: &[E], gradient: &mut [E]) {
        let count = self.first.len();
        for (index, (cotangent, first)) in cotangent.iter().zip(&self.first).enumerate() {
            for (tap, distance) in self.taps.iter().enumerate() {
                let weight = self.weights[tap * count + index];
                gradient[*first as usize + distance] += weight * *cotangent;
            }
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

/// Steps of a tap from the first cell in every dim, last dim first.
fn place<const N: usize, const C: usize>(tap: usize) -> [usize; N] {
    std::array::from_fn(|dim| tap / C.pow((N - 1 - dim) as u32) % C)
}

/// Weight of a tap in one dim at a fraction, and its derivative.
#[inline(always)]
fn tap_weight<const C: usize>(tap: usize, t: f64) -> (f64, f64) {
    let mirrored = |(value, slope): (f64, f64)| (value, -slope);
    match (C, tap) {
        (2, 0) => (1.0 - t, -1.0),
        (2, _) => (t, 1.0),
        (4, 0) => far(t + 1.0),
        (4, 1) => near(t),
        (4, 2) => mirrored(near(1.0 - t)),
        (4, _) => mirrored(far(2.0 - t)),
        // NaN where the displacement is NaN.
        _ => (1.0 + 0.0 * t, 0.0),
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
