//! Graph node of neighborhood attention on the rows of one shard.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;

use super::rows::{Around, Backward, Forward, Neighbor, Row};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::Isa;
use crate::precision::{cast, widened};
use crate::reshape;

/// Attention of the output rows, `[heads, width, rows, longitudes]`, to the input rows within
/// reach.
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

/// Queries, keys and values of all heads; keys and values as [lines](Around::lines).
struct Operands<'a, E> {
    attention: &'a Attention,
    around: Around,
    queries: &'a [E],
    keys: Buffer<E>,
    values: Buffer<E>,
    heads: usize,
    /// Number of output rows.
    rows: usize,
    /// Numbers of channels of keys and values.
    widths: [usize; 2],
}

impl Attention {
    /// Runs our kernels or, on a device without them, burn's operators. `rows` is the largest
    /// number of output rows on any rank.
    pub(super) fn run(self, inputs: [Tensor<4>; 3], rows: usize) -> Tensor<4> {
        if !flex::runs_on(&inputs[0].device()) {
            return self.composed(inputs, rows);
        }
        let inputs = inputs.map(|tensor| tensor.into_dispatch());
        Tensor::from_dispatch(apply(self, inputs))
    }

    /// Computes one row at a time. Each rank computes `rows` rows, the number on the rank with the
    /// most, so that the graph is the same on all ranks.
    fn composed(&self, inputs: [Tensor<4>; 3], rows: usize) -> Tensor<4> {
        let dtype = inputs[0].dtype();
        let [queries, keys, values] = inputs.map(widened);
        let ([_, _, held, size], [_, _, _, longitudes]) = (queries.dims(), keys.dims());
        let device = queries.device().inner();
        let [keys, values] = [keys, values].map(|cells| {
            let [heads, width, rows, longitudes] = cells.dims();
            reshape::<4, 3>(cells, vec![heads, width, rows * longitudes])
        });
        let row = |row: usize| {
            let neighbors = if row < self.outputs.len() {
                &self.neighbors[self.outputs.start + row][..]
            } else {
                &[]
            };
            let mut cells: Vec<i64> = Vec::new();
            let mut weights: Vec<f64> = Vec::new();
            for neighbor in neighbors {
                let place = |output| (output * (longitudes / size) + neighbor.shift) % longitudes;
                let first = (neighbor.row - self.inputs.start) * longitudes;
                cells.extend((0..size).map(|output| (first + place(output)) as i64));
                weights.push(neighbor.weight);
            }
            if neighbors.is_empty() {
                (cells, weights) = (vec![0; size], vec![1.0]);
            }
            let count = weights.len();
            let index = Tensor::<1, Int>::from_data(&cells[..], &device);
            let taken = |cells: &Tensor<3>| {
                let [heads, width, _] = cells.dims();
                let taken = cells.clone().select(2, index.clone());
                reshape::<3, 4>(taken, vec![heads, width, count, size])
            };
            let logarithms = weights.iter().map(|weight| weight.ln());
            let logarithms = TensorData::new(logarithms.collect::<Vec<f64>>(), [1, 1, count, 1]);
            let logarithms = Tensor::<4>::from_data(logarithms, (&device, queries.dtype()));
            let queries = queries.clone().narrow(2, row.min(held - 1), 1);
            let scores = (queries * taken(&keys)).sum_dim(1) * self.scale + logarithms;
            let y = (softmax(scores, 2) * taken(&values)).sum_dim(2);
            // An empty neighborhood sums to zero; the cell that stands in for it must not show.
            let none = Tensor::<4, Bool>::from_data([[[[neighbors.is_empty()]]]], &device);
            let none = none.expand(y.dims());
            y.mask_fill(none, 0.0)
        };
        let y = Tensor::cat((0..rows.max(1)).map(row).collect(), 2);
        cast(y.narrow(2, 0, held), dtype)
    }

    fn operands<'a, E: Float>(
        &'a self,
        [queries, keys, values]: [&'a [E]; 3],
        shapes: &[Vec<usize>; 3],
    ) -> Operands<'a, E> {
        let [heads, _, rows, size] = shapes[0][..] else {
            panic!("{shapes:?}; expected four dims");
        };
        let around = Around {
            size,
            phases: shapes[1][3] / size.max(1),
            rows: shapes[1][2],
        };
        Operands {
            attention: self,
            around,
            queries,
            keys: around.lines(keys),
            values: around.lines(values),
            heads,
            rows,
            widths: [shapes[1][1], shapes[2][1]],
        }
    }
}

/// Elements of one head.
fn part<E>(elements: &[E], heads: usize, head: usize) -> &[E] {
    let len = elements.len() / heads;
    &elements[head * len..][..len]
}

impl<E: Float> Operands<'_, E> {
    fn row(&self, head: usize, row: usize) -> Row<'_, E> {
        let of_head = |elements| part(elements, self.heads, head);
        let attention = self.attention;
        Row {
            around: self.around,
            neighbors: &attention.neighbors[attention.outputs.start + row],
            first: attention.inputs.start,
            scale: attention.scale,
            queries: of_head(self.queries),
            row,
            rows: self.rows,
            keys: of_head(&self.keys),
            values: of_head(&self.values),
            widths: self.widths,
        }
    }

    fn forward(&self, isa: Isa) -> Buffer<E> {
        let head = self.widths[1] * self.rows * self.around.size;
        // SAFETY: every row is written, each by its own task.
        unsafe {
            Buffer::filled(self.heads * head, |y| {
                tasks::for_each(self.heads * self.rows, 1, |task| {
                    let (number, row) = (task / self.rows, task % self.rows);
                    isa.run(Forward {
                        row: self.row(number, row),
                        y: y.starting_at(number * head),
                    });
                });
            })
        }
    }

    /// Gradients of queries, keys and values.
    fn backward(&self, isa: Isa, cotangent: &[E]) -> [Buffer<E>; 3] {
        let mut queries = filled(self.queries.len(), 0.0);
        let [mut keys, mut values] =
            [&self.keys, &self.values].map(|lines| filled(lines.len(), 0.0));
        let all = [&mut queries, &mut keys, &mut values];
        let all = all.map(|gradient| (gradient.shared(), gradient.len() / self.heads.max(1)));
        tasks::for_each(self.heads, 1, |head| {
            let [queries, keys, values] = all.map(|(all, len)| {
                // SAFETY: each task takes only the elements of its own head.
                unsafe { all.slice(head * len..(head + 1) * len) }
            });
            for row in 0..self.rows {
                isa.run(Backward {
                    row: self.row(head, row),
                    cotangent: part(cotangent, self.heads, head),
                    queries,
                    keys,
                    values,
                });
            }
        });
        [
            queries,
            self.around.cells(&keys),
            self.around.cells(&values),
        ]
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
            let y = self.operands(tensors, &shapes).forward(Isa::chosen()?);
            flex::result(y, &shape, dtype)
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
            let found = self.operands(tensors, &shapes).backward(Isa::chosen()?, y);
            let found = found.into_iter().zip(&shapes);
            found.map(|(found, shape)| Some(flex::result(found, shape, dtype))).collect()
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{difference, random};

    /// Output grids with as many longitudes as the inputs, and with half as many.
    #[test]
    fn kernels_and_burns_operators_agree() {
        for (size, width) in [(12, 3), (6, 5)] {
            let neighbors = |row: usize| {
                let near = (0..5 * row).map(|number| Neighbor {
                    row: 1 + number % 3,
                    shift: number * 7 % 12,
                    weight: 0.1 + number as f64,
                });
                near.collect::<Vec<_>>()
            };
            let attention = Attention {
                neighbors: Arc::new((0..4).map(neighbors).collect()),
                inputs: 1..4,
                outputs: 0..4,
                scale: 0.7,
            };
            let run = |ours: bool| {
                let inputs = [
                    ("q", [2, 3, 4, size]),
                    ("k", [2, 3, 3, 12]),
                    ("v", [2, width, 3, 12]),
                ];
                let inputs = inputs.map(|(name, shape)| random::<4>(shape, name, 0).detach());
                let inputs = inputs.map(Tensor::require_grad);
                let y = if ours {
                    attention.clone().run(inputs.clone(), 4)
                } else {
                    // One row more than held, as if another rank had more rows.
                    attention.composed(inputs.clone(), 5)
                };
                let gradients = (y.clone() * y.clone().detach().cos()).sum().backward();
                let gradients = inputs.map(|input| input.grad(&gradients).unwrap().into_data());
                [vec![y.inner().into_data()], gradients.to_vec()].concat()
            };
            for (ours, burns) in run(true).iter().zip(&run(false)) {
                assert!(difference(ours, burns) < 1e-5, "{size} longitudes");
            }
        }
    }
}
