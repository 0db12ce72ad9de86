//! Dense attention as an operator with an adjoint: a ring of blocks of keys and values, and
//! kernels.

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
use halocline_core::Result;
use halocline_core::ops::{self, BackwardPass, Operator, blank};
use halocline_core::tasks;
use halocline_core::trace::span;

use super::dims::{HEADS, TOKENS, WIDTH};
use super::ring::Ring;
use super::scores::Scores;
use super::travel::{Form, Travel, finish};
use crate::attention::attended::{packed, products, unpacked};
use crate::attention::engine::dense::{Backward, Bias, Dense, Dropout, LOWEST, Results, Tokens};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::CHUNK;
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;

/// Dense attention on one rank.
#[derive(Clone, Debug)]
pub(super) struct DenseRun {
    pub scores: Scores,
    pub ring: Ring,
    /// Messages between the ranks; `None` for a ring of one rank.
    pub travel: Option<Travel>,
    /// Bias of the scores of this rank's keys, `[batch, 1, heads, keys]`, which is sent with them.
    pub beside_keys: Option<Tensor<4>>,
}

/// A part of keys and values, and the bias of its scores.
#[derive(Clone, Copy)]
struct Part<'a> {
    number: usize,
    keys: [&'a FlexTensor; 2],
    bias: Option<&'a FlexTensor>,
}

/// A round of this rank: its part, and the part of the next round.
#[derive(Clone, Copy)]
struct Round<'a> {
    number: usize,
    next: Option<usize>,
    /// The part; `None` if it has no tokens.
    part: Option<Part<'a>>,
}

/// Values that the backward pass needs in addition to queries, keys and values.
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

/// Wraps a tensor for kernels to read.
fn reading<E: Float>(tensor: &FlexTensor) -> Tokens<E> {
    let first = flex::elements::<E>(tensor).as_ptr().cast_mut();
    let first = std::ptr::NonNull::new(first).expect("elements have an address");
    tokens(
        Shared::at_start(first),
        &tensor.shape(),
        tensor.shape()[WIDTH],
    )
}

/// Elements of a tensor of this shape, except for its width.
fn tokens<E>(elements: Shared<E>, shape: &[usize], width: usize) -> Tokens<E> {
    Tokens {
        elements,
        first: 0,
        tokens: shape[TOKENS],
        heads: shape[HEADS],
        width,
    }
}

/// Number of elements of a tensor of this shape with another width.
fn elements(shape: &[usize], width: usize) -> usize {
    shape[..WIDTH].iter().product::<usize>() * width
}

impl DenseRun {
    /// Job of a kernel for one part of the keys; `bias` is that of all keys, and `dtype` the number
    /// type of the operands.
    fn job<E: Float>(
        &self,
        (q, dtype): (&FlexTensor, DType),
        part: Part<'_>,
        bias: Option<&FlexTensor>,
        results: Results<E>,
    ) -> Dense<E> {
        let first_key = self.ring.parts[part.number].start;
        let [k, v] = part.keys;
        let bias = match part.bias {
            Some(bias) => Some((bias, 0)),
            None => bias.map(|bias| (bias, first_key)),
        };
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
            bias: bias.map(|(bias, first)| Bias::new(flex::elements(bias), &bias.shape(), first)),
            dropout: self.scores.dropout.map(|dropped| {
                let [batch, query, head] = dropped.first;
                Dropout {
                    probability: dropped.probability,
                    key: dropped.key,
                    shape: dropped.shape,
                    first: [batch, query, head, first_key],
                }
            }),
            // The gradient of the logarithms arrives together with that of the results, in full
            // precision.
            halves: dtype == DType::BF16 && !self.scores.with_lse,
            results,
        }
    }

    /// The bias in the dtype of kernels.
    fn bias<E: Float>(&self) -> Result<Option<FlexTensor>> {
        let bias = self.scores.bias.clone();
        bias.map(|bias| flex::operand::<E>(bias.into_dispatch()))
            .transpose()
    }

    /// Calls `compute` in every round, while the part of the next round is in flight. A part is
    /// passed on as soon as it has arrived, before it is computed with.
    fn around<E: Float>(
        &self,
        travel: Option<&Travel>,
        [key, value]: [DispatchTensor; 2],
        mut compute: impl FnMut(Round<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut forms = [&key, &value]
            .map(|tensor| Form::of(tensor, TOKENS))
            .to_vec();
        let mut tensors = vec![key, value];
        if let Some(bias) = self.beside_keys.clone() {
            tensors.push(bias.into_dispatch());
            forms.push(Form::of(&tensors[2], WIDTH));
        }
        for (number, next) in self.ring.rounds() {
            let way = self.ring.keys(number, next);
            let in_flight = match travel {
                Some(travel) => travel.start(&self.ring, way, &tensors, &forms)?,
                None => None,
            };
            let here = if self.ring.parts[number].is_empty() {
                Vec::new()
            } else {
                let tensors = tensors.iter().cloned().map(flex::operand::<E>);
                tensors.collect::<Result<Vec<_>>>()?
            };
            let part = here.first_chunk().map(|[key, value]| Part {
                number,
                keys: [key, value],
                bias: here.get(2),
            });
            compute(Round { number, next, part })?;
            tensors = finish(in_flight)?;
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
        self.around::<E>(self.travel.as_ref(), [k, v], |round| {
            if let Some(part) = round.part {
                let _work = span("attention to a block");
                // SAFETY: all tensors are present, and nothing else uses the results.
                unsafe { self.job((&q, dtype), part, bias.as_ref(), results).run(isa) };
            }
            Ok(())
        })?;
        divide(output.elements_mut(), &sum, width);
        for (most, sum) in most.elements_mut().iter_mut().zip(sum.iter()) {
            // A query without keys keeps the lowest number, and its weights are zero. NaN stays
            // NaN.
            if sum.to_f64() != 0.0 {
                *most = E::from_f64(most.to_f64() + sum.to_f64().ln());
            }
        }
        let with_width = |width| [&shape[..WIDTH], &[width]].concat();
        let output = flex::result(output, &with_width(width), dtype);
        let lse = flex::result(most, &with_width(1), E::dtype());
        let result = packed(&output, &lse, self.scores.with_lse);
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
        let wanted = pass.wanted;
        let mut query = wanted[0].then(|| filled::<E>(elements(&shape, shape[WIDTH]), 0.0));
        let gradient = query
            .as_mut()
            .map(|query| tokens(query.shared(), &shape, shape[WIDTH]));
        // Gradients of keys and of values, if they are requested, and their forms.
        let of_keys = [(1, &key), (2, &value)].into_iter();
        let of_keys: Vec<_> = of_keys
            .filter(|(input, _)| wanted[*input])
            .map(|(input, tensor)| (input, tensor.clone()))
            .collect();
        let forms = of_keys.iter();
        let forms: Vec<Form> = forms
            .map(|(_, tensor)| Form::of(tensor, TOKENS).cast(E::dtype()))
            .collect();
        let travel = self.travel.as_ref().map(Travel::backward);
        // Gradients of the next part, from the ranks that had it before, and finally those of this
        // rank's own part.
        let (mut coming, mut own) = (None, Vec::new());
        self.around::<E>(travel.as_ref(), [key, value], |round| {
            let mut sums = Vec::new();
            if let Some(part) = round.part {
                let _work = span("attention to a block (backward)");
                let mut of_part = [0, 1].map(|tensor| {
                    let cells = part.keys[tensor].shape().iter().product();
                    wanted[1 + tensor].then(|| filled::<E>(cells, 0.0))
                });
                let [key, value] = of_part.each_mut().map(Option::as_mut);
                let of = |sum: Option<&mut Buffer<E>>, tensor: &FlexTensor| {
                    let shape = tensor.shape();
                    sum.map(|sum| tokens(sum.shared(), &shape, shape[WIDTH]))
                };
                let results = Results::Gradients {
                    from,
                    wanted: [gradient, of(key, part.keys[0]), of(value, part.keys[1])],
                };
                // SAFETY: all tensors are present, and nothing else uses the results.
                unsafe { self.job((&q, dtype), part, bias.as_ref(), results).run(isa) };
                let of_part = of_part.into_iter().zip(part.keys);
                sums = of_part
                    .filter_map(|(sum, like)| Some(flex::result(sum?, &like.shape(), E::dtype())))
                    .collect();
            }
            let before = finish(coming.take())?;
            if !before.is_empty() {
                let pairs = before.into_iter().zip(sums);
                sums = pairs
                    .map(|(before, sum)| Dispatch::float_add(before, sum))
                    .collect();
            }
            let way = self.ring.gradients(round.number, round.next);
            if let Some(travel) = &travel {
                coming = travel.start(&self.ring, way, &sums, &forms)?;
            }
            if way.to.is_none() {
                own = sums;
            }
            Ok(())
        })?;
        let last = finish(coming)?;
        let own = if last.is_empty() { own } else { last };
        let query = query.map(|query| flex::result(query, &shape, dtype));
        let mut gradients = vec![query, None, None];
        for (position, (input, like)) in of_keys.iter().enumerate() {
            let sum = own.get(position).cloned();
            let sum = sum.unwrap_or_else(|| blank(like, &like.shape(), Some(0.0)));
            gradients[*input] = Some(flex::in_dtype(sum, dtype));
        }
        Ok(gradients)
    }
}

/// Divides every row by a number; rows of zero stay zero.
fn divide<E: Float>(rows: &mut [E], numbers: &[E], width: usize) {
    let width = width.max(1);
    tasks::for_each_part(rows, width, CHUNK / width, |row, elements| {
        let factor = match numbers[row].to_f64() {
            0.0 => E::default(),
            number => E::from_f64(1.0 / number),
        };
        elements
            .iter_mut()
            .for_each(|element| *element = *element * factor);
    });
}
