//! Dense attention as an operator with an adjoint: a ring of blocks of keys and values, and kernels.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
use halocline_core::ops::{self, BackwardPass, Operator, blank};
use halocline_core::{Communicator, Operation, Result};
use rayon::prelude::*;

use super::dims::{HEADS, TOKENS, WIDTH};
use super::ring::{Ring, finish};
use super::scores::Scores;
use crate::attention::attended::{packed, products, unpacked};
use crate::attention::engine::dense::{Backward, Bias, Dense, Dropout, LOWEST, Results, Tokens};
use crate::kernel::buffer::filled;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::CHUNK;
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;

/// Dense attention on one rank.
#[derive(Clone, Debug)]
pub(super) struct DenseRun {
    pub scores: Scores,
    pub ring: Ring,
    /// How parts travel; `None` for a ring of one rank.
    pub travel: Option<(Operation, Arc<dyn Communicator>)>,
}

/// What the backward pass needs beside queries, keys and values.
pub(super) struct Saved {
    output: DispatchTensor,
    /// The logarithm of the sum of exponentials of every query and head.
    lse: DispatchTensor,
}

/// Attention of this rank's queries.
pub(super) fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, run: DenseRun) -> Tensor<4> {
    let inputs = [q, k, v].map(Tensor::into_dispatch);
    Tensor::from_dispatch(ops::apply(run, inputs))
}

impl Operator for DenseRun {
    type Saved = Saved;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["attention", "attention (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Saved)> {
        let dtype = inputs[0].dtype();
        with_float!(dtype, E => self.forward_as::<E>(inputs, dtype))
    }

    fn backward(&self, pass: BackwardPass<'_, Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let dtype = pass.saved.output.dtype();
        with_float!(dtype, E => self.backward_as::<E>(pass, dtype))
    }
}

/// A tensor for kernels to read.
fn reading<E: Float>(tensor: &FlexTensor) -> Tokens<E> {
    let first = flex::elements::<E>(tensor).as_ptr().cast_mut();
    let first = std::ptr::NonNull::new(first).expect("elements have an address");
    tokens(
        Shared::at_start(first),
        &tensor.shape(),
        tensor.shape()[WIDTH],
    )
}

/// Elements of a tensor of this shape but for its width.
fn tokens<E>(elements: Shared<E>, shape: &[usize], width: usize) -> Tokens<E> {
    Tokens {
        elements,
        tokens: shape[TOKENS],
        heads: shape[HEADS],
        width,
    }
}

/// A shape with other tokens.
fn with_tokens(shape: &[usize], tokens: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[TOKENS] = tokens;
    shape
}

/// The elements of a tensor of this shape with another width.
fn elements(shape: &[usize], width: usize) -> usize {
    shape[..WIDTH].iter().product::<usize>() * width
}

impl DenseRun {
    /// Job of a kernel for one part of the keys; `bias` is that of all keys.
    fn job<E: Float>(
        &self,
        q: &FlexTensor,
        [k, v]: [&FlexTensor; 2],
        bias: Option<&FlexTensor>,
        part: usize,
        results: Results<E>,
    ) -> Dense<E> {
        let first_key = self.ring.parts[part].start;
        Dense {
            batch: q.shape()[0],
            shared: q.shape()[HEADS]
                .checked_div(k.shape()[HEADS])
                .unwrap_or(1)
                .max(1),
            scale: self.scores.scale,
            queries: reading(q),
            keys: reading(k),
            values: reading(v),
            causal: self.scores.causal.map(|query| [query, first_key]),
            bias: bias.map(|bias| Bias::new(flex::elements(bias), &bias.shape(), first_key)),
            dropout: self.scores.dropout.map(|dropped| {
                let [batch, query, head] = dropped.first;
                Dropout {
                    probability: dropped.probability,
                    key: dropped.key,
                    shape: dropped.shape,
                    first: [batch, query, head, first_key],
                }
            }),
            results,
        }
    }

    /// The bias in the number type of kernels.
    fn bias<E: Float>(&self) -> Result<Option<FlexTensor>> {
        let bias = self.scores.bias.clone();
        bias.map(|bias| flex::operand::<E>(bias.into_dispatch()))
            .transpose()
    }

    /// Calls `compute` with the keys and values of every part, this rank's own first, while the next ones travel here; with none
    /// for a part without tokens.
    fn around<E: Float>(
        &self,
        backward: bool,
        [key, value]: [DispatchTensor; 2],
        mut compute: impl FnMut(usize, Option<[&FlexTensor; 2]>) -> Result<()>,
    ) -> Result<()> {
        let dtype = key.dtype();
        let shapes = [key.shape().to_vec(), value.shape().to_vec()];
        let like = key.clone();
        let mut block = vec![key, value];
        for step in 0..self.ring.parts.len() {
            let last = step + 1 == self.ring.parts.len();
            let shapes_of = |tokens| {
                shapes
                    .iter()
                    .map(|shape| with_tokens(shape, tokens))
                    .collect()
            };
            let travel = self.travel.as_ref().filter(|_| !last);
            let in_flight = match travel {
                None => None,
                Some((operation, comm)) => {
                    let operation = if backward {
                        operation.backward()
                    } else {
                        operation.clone()
                    };
                    let block = block.clone();
                    self.ring
                        .pass(comm, &operation, step, block, (dtype, &like), shapes_of)?
                }
            };
            let here = if self.ring.parts[self.ring.part(step)].is_empty() {
                Vec::new()
            } else {
                let tensors = block.iter().cloned().map(flex::operand::<E>);
                tensors.collect::<Result<Vec<_>>>()?
            };
            compute(step, here.first_chunk().map(|[key, value]| [key, value]))?;
            block = finish(in_flight)?;
        }
        Ok(())
    }

    fn forward_as<E: Float>(
        &self,
        inputs: Vec<DispatchTensor>,
        dtype: DType,
    ) -> Result<(DispatchTensor, Saved)> {
        let isa = Isa::chosen()?;
        let [q, k, v]: [DispatchTensor; 3] = inputs.try_into().expect("queries, keys and values");
        let q = flex::operand::<E>(q)?;
        let (shape, width) = (q.shape().to_vec(), v.shape()[WIDTH]);
        let mut output = filled::<E>(elements(&shape, width), 0.0);
        let mut most = filled::<E>(elements(&shape, 1), LOWEST);
        let mut sum = filled::<E>(elements(&shape, 1), 0.0);
        let results = Results::Forward {
            output: tokens(output.shared(), &shape, width),
            most: tokens(most.shared(), &shape, 1),
            sum: tokens(sum.shared(), &shape, 1),
        };
        let bias = self.bias::<E>()?;
        self.around::<E>(false, [k, v], |step, block| {
            if let Some(block) = block {
                // SAFETY: all tensors are there, and the results nowhere else.
                unsafe {
                    let part = self.ring.part(step);
                    self.job(&q, block, bias.as_ref(), part, results).run(isa);
                }
            }
            Ok(())
        })?;
        divide(output.elements_mut(), &sum, width);
        for (most, sum) in most.elements_mut().iter_mut().zip(sum.iter()) {
            // A query without keys keeps the lowest number: its weights are zero.
            if sum.to_f64() > 0.0 {
                *most = E::from_f64(most.to_f64() + sum.to_f64().ln());
            }
        }
        let with_width = |width| [&shape[..WIDTH], &[width]].concat();
        let output = flex::result(output, &with_width(width), dtype);
        let lse = flex::result(most, &with_width(1), E::dtype());
        let result = match self.scores.with_lse {
            true => packed::<E>(output.clone(), &lse),
            false => output.clone(),
        };
        Ok((result, Saved { output, lse }))
    }

    fn backward_as<E: Float>(
        &self,
        mut pass: BackwardPass<'_, Saved>,
        dtype: DType,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let isa = Isa::chosen()?;
        let q = flex::operand::<E>(pass.take_input(0))?;
        let [key, value] = [1, 2].map(|input| pass.take_input(input));
        let (cotangent, of_lse) = unpacked(pass.cotangent, self.scores.with_lse);
        let cotangent = flex::operand::<E>(cotangent)?;
        let bias = self.bias::<E>()?;
        let output = flex::operand::<E>(pass.saved.output.clone())?;
        let lse = flex::operand::<E>(pass.saved.lse.clone())?;
        let shape = q.shape().to_vec();
        let mut products = products::<E>(
            flex::elements(&output),
            flex::elements(&cotangent),
            output.shape()[WIDTH],
            of_lse,
        )?;
        let from = Backward {
            cotangent: reading::<E>(&cotangent),
            lse: reading(&lse),
            products: tokens(Shared::new(&mut products), &shape, 1),
        };
        let mut query = filled::<E>(elements(&shape, shape[WIDTH]), 0.0);
        let gradient = tokens(query.shared(), &shape, shape[WIDTH]);
        let (like, shapes) = (key.clone(), [key.shape().to_vec(), value.shape().to_vec()]);
        let shapes_of = |tokens| {
            shapes
                .iter()
                .map(|shape| with_tokens(shape, tokens))
                .collect()
        };
        // Gradients of the part that is here, from the ranks that it was at before.
        let (mut coming, mut sums) = (None, Vec::new());
        self.around::<E>(true, [key, value], |step, block| {
            sums = match block {
                Some(block) => {
                    let bias = bias.as_ref();
                    self.key_gradients::<E>(isa, (&q, block, bias), step, from, gradient)
                }
                None => Vec::new(),
            };
            let before = finish(coming.take())?;
            if !before.is_empty() {
                let pairs = before.into_iter().zip(std::mem::take(&mut sums));
                sums = pairs
                    .map(|(before, own)| Dispatch::float_add(before, own))
                    .collect();
            }
            if let Some((operation, comm)) = &self.travel {
                let sums = std::mem::take(&mut sums);
                let (operation, like) = (operation.backward(), (E::dtype(), &like));
                coming = self
                    .ring
                    .pass(comm, &operation, step, sums, like, shapes_of)?;
            }
            Ok(())
        })?;
        if self.travel.is_some() {
            sums = finish(coming)?;
        }
        let nothing = || {
            shapes
                .iter()
                .map(|shape| blank(&like, shape, Some(0.0)))
                .collect()
        };
        let sums: Vec<DispatchTensor> = if sums.is_empty() { nothing() } else { sums };
        let mut gradients = vec![Some(flex::result(query, &shape, dtype))];
        gradients.extend(sums.into_iter().map(|sum| Some(flex::in_dtype(sum, dtype))));
        Ok(gradients)
    }

    /// What this rank's queries add to the gradients of a part's keys and values. Adds to those of queries what the part gives.
    fn key_gradients<E: Float>(
        &self,
        isa: Isa,
        (q, block, bias): (&FlexTensor, [&FlexTensor; 2], Option<&FlexTensor>),
        step: usize,
        from: Backward<E>,
        gradient: Tokens<E>,
    ) -> Vec<DispatchTensor> {
        let mut sums = block.map(|tensor| filled::<E>(tensor.shape().iter().product(), 0.0));
        let [key, value] = &mut sums;
        let [key_shape, value_shape] = block.map(|tensor| tensor.shape());
        let keys = Results::Keys {
            from,
            key: tokens(key.shared(), &key_shape, key_shape[WIDTH]),
            value: tokens(value.shared(), &value_shape, value_shape[WIDTH]),
        };
        for results in [keys, Results::Queries { from, gradient }] {
            // SAFETY: all tensors are there, and the results nowhere else.
            unsafe {
                let part = self.ring.part(step);
                self.job(q, block, bias, part, results).run(isa);
            }
        }
        let tensors = sums.into_iter().zip(block);
        tensors
            .map(|(sum, tensor)| flex::result(sum, &tensor.shape(), E::dtype()))
            .collect()
    }
}

/// Divides every row by a number; rows of zero stay zero.
fn divide<E: Float>(rows: &mut [E], numbers: &[E], width: usize) {
    let rows = rows.par_chunks_mut(width.max(1)).zip(numbers);
    rows.with_min_len(CHUNK / width.max(1))
        .for_each(|(row, number)| {
            let factor = match number.to_f64() {
                0.0 => E::default(),
                number => E::from_f64(1.0 / number),
            };
            row.iter_mut()
                .for_each(|element| *element = *element * factor);
        });
}
