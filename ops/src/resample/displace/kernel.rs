//! Sampling within the cells of one rank, on CPUs: a table of cells and weights for each output, then sums by it.

use burn::backend::{DispatchTensor, TensorMetadata};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator};
use rayon::prelude::*;

use super::local::KEYS;
use super::options::{Beyond, SampleOptions};
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::{self, Float, with_float};
use crate::resample::rules::Mode;

/// Outputs that one task computes.
const TASK: usize = 4096;

/// Sampling as a node of the graph, of the cells and the displacements of a rank.
#[derive(Debug)]
pub(super) struct Sample<const N: usize> {
    pub options: SampleOptions<N>,
    /// The number of the shard's first cell in every dim.
    pub first: [usize; N],
}

/// The shapes of one run.
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

/// The cells that a value is made of in one dim.
#[derive(Clone, Copy, Debug, Default)]
struct Along {
    /// The first of them.
    start: isize,
    count: usize,
    weights: [f64; 4],
    /// The derivatives of the weights by the displacement.
    slopes: [f64; 4],
}

impl<const N: usize> Sample<N> {
    /// The cells of an output in one dim, for a displacement.
    fn along(&self, dim: usize, cell: usize, displacement: f64) -> Along {
        let bound = self.options.bound[dim] as f64;
        let beyond = displacement.abs() > bound;
        let point = match self.options.beyond {
            Beyond::Fail => displacement,
            Beyond::Clamp => displacement.clamp(-bound, bound),
        };
        let [low, _] = self.options.reach(dim);
        let odd = ((self.first[dim] + cell) % 2) as f64;
        let whole = match self.options.mode {
            Mode::Nearest => (point + odd).round_ties_even() - odd,
            _ => point.floor(),
        };
        let own = (cell + low) as isize + whole as isize;
        let t = point - whole;
        let mut along = match self.options.mode {
            Mode::Linear => Along {
                start: own,
                count: 2,
                weights: [1.0 - t, t, 0.0, 0.0],
                slopes: [-1.0, 1.0, 0.0, 0.0],
            },
            Mode::Cubic => Along {
                start: own - 1,
                count: 4,
                weights: [far(t + 1.0).0, near(t).0, near(1.0 - t).0, far(2.0 - t).0],
                slopes: [far(t + 1.0).1, near(t).1, -near(1.0 - t).1, -far(2.0 - t).1],
            },
            // NaN where the displacement is.
            _ => Along {
                start: own,
                count: 1,
                weights: [1.0 + 0.0 * t, 0.0, 0.0, 0.0],
                slopes: [0.0; 4],
            },
        };
        if beyond && self.options.beyond == Beyond::Clamp {
            along.slopes = [0.0; 4];
        }
        along
    }

    /// The cells of an output in every dim; `points` are the displacements of its sample.
    fn place<E: Float>(&self, shapes: &Shapes<N>, points: &[E], output: usize) -> [Along; N] {
        let (outputs, mut rest) = (shapes.outputs(), output);
        let mut along = [Along::default(); N];
        for dim in (0..N).rev() {
            let displacement = points[dim * outputs + output].to_f64();
            along[dim] = self.along(dim, rest % shapes.cells[dim], displacement);
            rest /= shapes.cells[dim];
        }
        along
    }

    fn taps(&self) -> usize {
        let count: usize = match self.options.mode {
            Mode::Linear => 2,
            Mode::Cubic => 4,
            _ => 1,
        };
        count.pow(N as u32)
    }

    /// The cells and weights of all outputs of all samples.
    fn table<E: Float>(&self, shapes: &Shapes<N>, points: &[E]) -> Vec<(u32, E)> {
        let (taps, outputs) = (self.taps(), shapes.outputs());
        let mut table = vec![(0, E::default()); points.len() / N * taps];
        table
            .par_chunks_mut(taps * TASK)
            .enumerate()
            .for_each(|(task, table)| {
                for (index, table) in table.chunks_exact_mut(taps).enumerate() {
                    let (sample, output) = split(task * TASK + index, outputs);
                    let points = &points[sample * N * outputs..][..N * outputs];
                    let along = self.place(shapes, points, output);
                    each_tap(shapes, &along, |tap, cell, places| {
                        let weight = (0..N).map(|dim| along[dim].weights[places[dim]]);
                        table[tap] = (cell as u32, E::from_f64(weight.product()));
                    });
                }
            });
        table
    }

    fn sums<E: Float>(&self, shapes: &Shapes<N>, cells: &[E], points: &[E]) -> Buffer<E> {
        let (taps, outputs, inputs) = (self.taps(), shapes.outputs(), shapes.inputs());
        let table = self.table(shapes, points);
        let planes = points.len() / N / outputs * shapes.channels;
        let mut sums = buffer::filled::<E>(planes * outputs, 0.0);
        let all = sums.elements_mut();
        all.par_chunks_mut(TASK)
            .enumerate()
            .for_each(|(task, sums)| {
                for (index, sum) in sums.iter_mut().enumerate() {
                    let (plane, output) = split(task * TASK + index, outputs);
                    let field = &cells[plane * inputs..][..inputs];
                    let row = plane / shapes.channels * outputs + output;
                    for (cell, weight) in &table[row * taps..][..taps] {
                        *sum += *weight * field[*cell as usize];
                    }
                }
            });
        sums
    }

    /// The gradient of cells: each plane is the sum of its outputs, in their order.
    fn of_cells<E: Float>(&self, shapes: &Shapes<N>, points: &[E], cotangent: &[E]) -> Buffer<E> {
        let (taps, outputs, inputs) = (self.taps(), shapes.outputs(), shapes.inputs());
        let table = self.table(shapes, points);
        let planes = cotangent.len() / outputs;
        let mut gradient = buffer::filled::<E>(planes * inputs, 0.0);
        let all = gradient.elements_mut();
        all.par_chunks_mut(inputs)
            .enumerate()
            .for_each(|(plane, gradient)| {
                let sample = plane / shapes.channels;
                let table = &table[sample * outputs * taps..][..outputs * taps];
                let cotangent = &cotangent[plane * outputs..][..outputs];
                for (cotangent, table) in cotangent.iter().zip(table.chunks_exact(taps)) {
                    for (cell, weight) in table {
                        gradient[*cell as usize] += *weight * *cotangent;
                    }
                }
            });
        gradient
    }

    /// The gradient of displacements: the slopes between the cells of an output.
    fn of_points<E: Float>(
        &self,
        shapes: &Shapes<N>,
        cells: &[E],
        points: &[E],
        cotangent: &[E],
    ) -> Buffer<E> {
        let (outputs, inputs, channels) = (shapes.outputs(), shapes.inputs(), shapes.channels);
        let slopes: Vec<[f64; N]> = (0..points.len() / N)
            .into_par_iter()
            .map(|index| {
                let (sample, output) = split(index, outputs);
                let points = &points[sample * N * outputs..][..N * outputs];
                let along = self.place(shapes, points, output);
                let mut slopes = [0.0; N];
                each_tap(shapes, &along, |_, cell, places| {
                    let product = |plane: usize| {
                        let value = cells[plane * inputs + cell].to_f64();
                        value * cotangent[plane * outputs + output].to_f64()
                    };
                    let planes = sample * channels..(sample + 1) * channels;
                    let sum: f64 = planes.map(product).sum();
                    for (dim, slope) in slopes.iter_mut().enumerate() {
                        let factors = (0..N).map(|other| match other == dim {
                            true => along[other].slopes[places[other]],
                            false => along[other].weights[places[other]],
                        });
                        *slope += sum * factors.product::<f64>();
                    }
                });
                slopes
            })
            .collect();
        let mut gradient = buffer::filled::<E>(points.len(), 0.0);
        for (index, slopes) in slopes.iter().enumerate() {
            let (sample, output) = split(index, outputs);
            for (dim, slope) in slopes.iter().enumerate() {
                let place = (sample * N + dim) * outputs + output;
                gradient.elements_mut()[place] = E::from_f64(*slope);
            }
        }
        gradient
    }
}

/// Quotient and remainder.
fn split(index: usize, size: usize) -> (usize, usize) {
    (index / size, index % size)
}

/// Calls `visit` with the number of each cell that an output is made of, the cell, and its place in every dim.
fn each_tap<const N: usize>(
    shapes: &Shapes<N>,
    along: &[Along; N],
    mut visit: impl FnMut(usize, usize, [usize; N]),
) {
    let taps: usize = along.iter().map(|along| along.count).product();
    for tap in 0..taps {
        let (mut rest, mut cell, mut stride) = (tap, 0, 1);
        let mut places = [0; N];
        for dim in (0..N).rev() {
            places[dim] = rest % along[dim].count;
            rest /= along[dim].count;
            cell += (along[dim].start + places[dim] as isize) as usize * stride;
            stride *= shapes.held[dim];
        }
        visit(tap, cell, places);
    }
}

/// Keys' kernel and its derivative at a distance below 1.
fn near(t: f64) -> (f64, f64) {
    let [a, b] = [KEYS + 2.0, KEYS + 3.0];
    ((a * t - b) * t * t + 1.0, (3.0 * a * t - 2.0 * b) * t)
}

/// Keys' kernel and its derivative at a distance from 1 to 2.
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
            let y = self.sums::<E>(&shapes, flex::elements(&cells), flex::elements(&points));
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
            let first = wanted[0].then(|| self.of_cells(&shapes, points, cotangent));
            let second = wanted[1].then(|| self.of_points(&shapes, cells, points, cotangent));
            vec![
                first.map(|gradient| flex::result(gradient, &of_cells, dtype)),
                second.map(|gradient| flex::result(gradient, &of_points, dtype)),
            ]
        }))
    }
}
