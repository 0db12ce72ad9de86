//! Neighborhood attention on the rows of one shard: a node of the graph.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;

use crate::kernel::buffer::filled;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::Element;

/// A cell in reach of those of an output row: in this row, so many longitudes of the input further.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbor {
    pub(super) row: usize,
    pub(super) shift: usize,
    /// Its area.
    pub(super) weight: f64,
}

/// Attention of the output rows, `[heads, width, rows, longitudes]`, to the input rows that they reach.
#[derive(Clone)]
pub(super) struct Attention {
    pub(super) neighbors: Arc<Vec<Vec<Neighbor>>>,
    pub(super) inputs: Range<usize>,
    pub(super) outputs: Range<usize>,
    pub(super) scale: f64,
}

impl fmt::Debug for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attention({:?} to {:?})", self.outputs, self.inputs)
    }
}

/// `[width, rows, longitudes]` of one head.
#[derive(Clone, Copy)]
struct Head<'a, E> {
    cells: &'a [E],
    rows: usize,
    longitudes: usize,
}

impl<'a, E: Float> Head<'a, E> {
    fn width(self) -> usize {
        self.cells.len() / (self.rows * self.longitudes).max(1)
    }

    /// The longitude of the place of a neighbor of the output's longitude `p` of `outputs`.
    fn place(self, p: usize, outputs: usize, neighbor: &Neighbor) -> usize {
        (p * (self.longitudes / outputs) + neighbor.shift) % self.longitudes
    }

    fn line(self, channel: usize, row: usize) -> &'a [E] {
        &self.cells[(channel * self.rows + row) * self.longitudes..][..self.longitudes]
    }
}

impl Attention {
    pub(super) fn run(self, [queries, keys, values]: [Tensor<4>; 3]) -> Tensor<4> {
        let inputs = [queries, keys, values].map(|tensor| tensor.into_dispatch());
        Tensor::from_dispatch(apply(self, inputs))
    }

    /// The shares of the neighbors of a row, `[neighbor, longitude]`.
    fn shares<E: Float>(&self, row: usize, q: Head<'_, E>, k: Head<'_, E>) -> Vec<f64> {
        let (neighbors, size) = (&self.neighbors[self.outputs.start + row], q.longitudes);
        let mut shares = vec![0.0; neighbors.len() * size];
        for (scores, neighbor) in shares.chunks_exact_mut(size).zip(neighbors) {
            for channel in 0..q.width() {
                let line = k.line(channel, neighbor.row - self.inputs.start);
                let queries = q.line(channel, row);
                for (p, (score, q)) in scores.iter_mut().zip(queries).enumerate() {
                    *score += q.to_f64() * line[k.place(p, size, neighbor)].to_f64();
                }
            }
            scores.iter_mut().for_each(|score| *score *= self.scale);
        }
        for p in 0..size {
            let of = |neighbor: usize| neighbor * size + p;
            let all = 0..neighbors.len();
            let largest = all
                .clone()
                .map(|n| shares[of(n)])
                .fold(f64::NEG_INFINITY, f64::max);
            let mut sum = 0.0;
            for n in all.clone() {
                let share = neighbors[n].weight * (shares[of(n)] - largest).exp();
                shares[of(n)] = share;
                sum += share;
            }
            all.for_each(|n| shares[of(n)] /= sum);
        }
        shares
    }

    fn heads<'a, E: Float>(
        tensors: [&'a [E]; 3],
        shapes: &[Vec<usize>; 3],
        head: usize,
    ) -> [Head<'a, E>; 3] {
        std::array::from_fn(|place| {
            let len: usize = shapes[place][1..].iter().product();
            Head {
                cells: &tensors[place][head * len..][..len],
                rows: shapes[place][2],
                longitudes: shapes[place][3],
            }
        })
    }

    fn forward_as<E: Float>(&self, tensors: [&[E]; 3], shapes: &[Vec<usize>; 3]) -> Vec<E> {
        let (rows, size, width) = (shapes[0][2], shapes[0][3], shapes[2][1]);
        let plane = width * rows * size;
        let mut y = vec![E::default(); shapes[0][0] * plane];
        if plane == 0 {
            return y;
        }
        tasks::for_each_part(&mut y, plane, 1, |head, y| {
            let [q, k, v] = Self::heads(tensors, shapes, head);
            for row in 0..rows {
                let shares = self.shares(row, q, k);
                let neighbors = &self.neighbors[self.outputs.start + row];
                for channel in 0..width {
                    let y = &mut y[(channel * rows + row) * size..][..size];
                    for (p, y) in y.iter_mut().enumerate() {
                        let terms = neighbors.iter().zip(shares[p..].iter().step_by(size));
                        let terms = terms.map(|(neighbor, share)| {
                            let line = v.line(channel, neighbor.row - self.inputs.start);
                            share * line[v.place(p, size, neighbor)].to_f64()
                        });
                        *y = E::from_f64(terms.sum());
                    }
                }
            }
        });
        y
    }

    /// The gradients of queries, keys and values of one head.
    fn backward_head<E: Float>(
        &self,
        [q, k, v]: [Head<'_, E>; 3],
        y: Head<'_, E>,
    ) -> [Vec<f64>; 3] {
        let size = q.longitudes;
        let mut found = [q, k, v].map(|head| vec![0.0; head.cells.len()]);
        for row in 0..q.rows {
            let shares = self.shares(row, q, k);
            let neighbors = &self.neighbors[self.outputs.start + row];
            for p in 0..size {
                // The gradients of shares, and their mean.
                let mut of_shares = vec![0.0; neighbors.len()];
                let mut mean = 0.0;
                for (n, neighbor) in neighbors.iter().enumerate() {
                    let (cell, share) = (v.place(p, size, neighbor), shares[n * size + p]);
                    let input = neighbor.row - self.inputs.start;
                    for channel in 0..v.width() {
                        let y = y.line(channel, row)[p].to_f64();
                        of_shares[n] += y * v.line(channel, input)[cell].to_f64();
                        found[2][(channel * v.rows + input) * v.longitudes + cell] += share * y;
                    }
                    mean += share * of_shares[n];
                }
                for (n, neighbor) in neighbors.iter().enumerate() {
                    let (cell, share) = (k.place(p, size, neighbor), shares[n * size + p]);
                    let input = neighbor.row - self.inputs.start;
                    let of_score = self.scale * share * (of_shares[n] - mean);
                    for channel in 0..q.width() {
                        let place = (channel * k.rows + input) * k.longitudes + cell;
                        found[1][place] += of_score * q.line(channel, row)[p].to_f64();
                        let key = k.line(channel, input)[cell].to_f64();
                        found[0][(channel * q.rows + row) * size + p] += of_score * key;
                    }
                }
            }
        }
        found
    }
}

impl Operator for Attention {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["sphere_attention", "sphere_attention_backward"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let dtype = inputs[0].dtype();
        let shapes: [Vec<usize>; 3] = std::array::from_fn(|place| inputs[place].shape().to_vec());
        let mut shape = shapes[0].clone();
        shape[1] = shapes[2][1];
        let y = with_float!(dtype, E => {
            let held: Vec<_> = inputs.into_iter().map(flex::operand::<E>).collect::<Result<_>>()?;
            let tensors = std::array::from_fn(|place| flex::elements::<E>(&held[place]));
            flex::small_result(self.forward_as(tensors, &shapes), &shape, dtype)
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let inputs = [0, 1, 2].map(|input| pass.take_input(input));
        let (cotangent, dtype) = (pass.cotangent, inputs[0].dtype());
        let shapes: [Vec<usize>; 3] = std::array::from_fn(|place| inputs[place].shape().to_vec());
        Ok(with_float!(dtype, E => {
            let held: Vec<_> = inputs.into_iter().map(flex::operand::<E>).collect::<Result<_>>()?;
            let tensors: [&[E]; 3] = std::array::from_fn(|place| flex::elements::<E>(&held[place]));
            let y = flex::operand::<E>(cotangent)?;
            let y = flex::elements::<E>(&y);
            let (rows, longitudes) = (shapes[0][2], shapes[0][3]);
            let plane = shapes[2][1] * rows * longitudes;
            let heads: Vec<[Vec<f64>; 3]> = tasks::map(shapes[0][0], 1, |head| {
                let y = Head { cells: &y[head * plane..][..plane], rows, longitudes };
                self.backward_head(Self::heads(tensors, &shapes, head), y)
            });
            let gradient = |place: usize| {
                let mut found = filled::<E>(shapes[place].iter().product(), 0.0);
                let values = heads.iter().flat_map(|head| &head[place]);
                let pairs = found.elements_mut().iter_mut().zip(values);
                pairs.for_each(|(cell, value)| *cell = E::from_f64(*value));
                Some(flex::result(found, &shapes[place], dtype))
            };
            (0..3).map(gradient).collect()
        }))
    }
}
