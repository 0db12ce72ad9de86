//! Normalization as one graph node: kernels, and the sums over ranks between them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
use halocline_core::Result;
use halocline_core::comm::{Communicator, Operation};
use halocline_core::ops::{self, BackwardPass, Operator, all_gather_numbers};

use super::kernel::group::{self as norm, Extents, Sums};
use super::kernel::layer::{self as layer_norm, RowNorm};
use super::kernel::moments::{Moments, Statistic};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::Isa;

/// Normalization on one rank.
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a normalization has one, whichever it is"
)]
pub(super) enum Norm {
    Group(GroupRun),
    Rows(RowNorm),
}

#[derive(Clone, Debug)]
pub(super) struct GroupRun {
    pub extents: Extents,
    /// Number of elements of a group on all ranks.
    pub count: f64,
    pub epsilon: f64,
    pub comm: Arc<dyn Communicator>,
    /// Ranks that hold cells of the same sample, or of all samples if these share one statistic.
    pub ranks: Arc<[usize]>,
    pub operation: Operation,
    /// Statistics shared by all samples, by group; `None` if each sample has its own.
    pub together: Option<Arc<[Statistic]>>,
}

impl Norm {
    /// Normalizes the shard.
    pub(super) fn apply<const D: usize>(
        self,
        x: Tensor<D>,
        weight: Tensor<1>,
        bias: Tensor<1>,
    ) -> Tensor<D> {
        let [weight, bias] = [weight, bias].map(Tensor::into_dispatch);
        Tensor::from_dispatch(ops::apply(self, [x.into_dispatch(), weight, bias]))
    }
}

impl Operator for Norm {
    /// Statistics that normalized the result.
    type Saved = Arc<[Statistic]>;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["norm", "norm (backward)"])
    }

    /// Keeps all inputs but the bias.
    fn keeps(&self, input: usize) -> bool {
        input < 2
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Arc<[Statistic]>)> {
        let dtype = inputs[0].dtype();
        with_float!(dtype, E => self.forward_as::<E>(inputs, dtype))
    }

    fn backward(
        &self,
        pass: BackwardPass<'_, Arc<[Statistic]>>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let dtype = pass.cotangent.dtype();
        with_float!(dtype, E => self.backward_as::<E>(pass, dtype))
    }
}

impl Norm {
    fn forward_as<E: Float>(
        &self,
        inputs: Vec<DispatchTensor>,
        dtype: DType,
    ) -> Result<(DispatchTensor, Arc<[Statistic]>)> {
        let isa = Isa::chosen()?;
        let inputs = inputs.into_iter().map(flex::operand::<E>);
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let [cells, weight, bias] = [0, 1, 2].map(|input| flex::elements::<E>(&inputs[input]));
        let (y, statistics) = match self {
            Self::Group(run) => {
                let statistics = match &run.together {
                    Some(statistics) => statistics.repeat(run.extents.batch).into(),
                    None => run.statistics(norm::moments(isa, cells, run.extents))?,
                };
                let y = norm::normalize(isa, cells, run.extents, &statistics, weight, bias);
                (y, statistics)
            }
            Self::Rows(norm) => {
                let y = layer_norm::forward(isa, *norm, cells, weight, bias);
                (y, Arc::from([]))
            }
        };
        Ok((flex::result(y, &inputs[0].shape(), dtype), statistics))
    }

    fn backward_as<E: Float>(
        &self,
        mut pass: BackwardPass<'_, Arc<[Statistic]>>,
        dtype: DType,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let isa = Isa::chosen()?;
        let x = flex::operand::<E>(pass.take_input(0))?;
        let weight = flex::operand::<E>(pass.take_input(1))?;
        let cotangent = flex::operand::<E>(pass.cotangent)?;
        let cells = flex::elements::<E>(&x);
        let (factors, cotangent) = (flex::elements(&weight), flex::elements(&cotangent));
        let (input, parameters) = match self {
            Self::Group(run) => {
                let (extents, statistics) = (run.extents, pass.saved);
                let sums = norm::channel_sums(isa, cells, cotangent, extents, statistics);
                let groups = run.group_sums(norm::group_sums(extents, &sums, factors))?;
                let input = norm::input_gradient(
                    isa, cells, cotangent, extents, statistics, factors, &groups, run.count,
                );
                (input, norm::parameter_gradients(extents, &sums))
            }
            Self::Rows(norm) => {
                let gradient = layer_norm::backward(isa, *norm, cells, cotangent, factors);
                (gradient.input, [gradient.weight, gradient.bias])
            }
        };
        let shape = weight.shape();
        let parameters = parameters.map(|gradient| flex::small_result(gradient, &shape, dtype));
        let gradients = [flex::result(input, &x.shape(), dtype)]
            .into_iter()
            .chain(parameters);
        Ok(gradients.map(Some).collect())
    }
}

impl GroupRun {
    /// Moments of every group over all samples and ranks.
    pub(super) fn moments_together(&self, x: DispatchTensor) -> Result<Vec<Moments>> {
        let dtype = x.dtype();
        let local = with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            norm::moments(Isa::chosen()?, flex::elements::<E>(&x), self.extents)
        });
        self.combined(added_up(&local, self.extents.groups, Moments::combine))
    }

    /// Statistics of every (sample, group), from the moments of this rank's cells.
    fn statistics(&self, local: Vec<Moments>) -> Result<Arc<[Statistic]>> {
        let total = self.combined(local)?.into_iter();
        Ok(total.map(|group| group.statistic(self.epsilon)).collect())
    }

    /// Combines the moments of this rank's cells with those of other ranks.
    fn combined(&self, local: Vec<Moments>) -> Result<Vec<Moments>> {
        let numbers: Vec<f64> = local
            .iter()
            .flat_map(|group| [group.count, group.mean, group.squares])
            .collect();
        let all = all_gather_numbers(&self.comm, &self.ranks, &self.operation, &numbers)?;
        let moments = all.iter().map(|numbers| {
            let (triples, _) = numbers.as_chunks();
            triples.iter().map(|[count, mean, squares]| Moments {
                count: *count,
                mean: *mean,
                squares: *squares,
            })
        });
        let mut total = vec![Moments::default(); local.len()];
        for rank in moments {
            for (sum, more) in total.iter_mut().zip(rank) {
                *sum = sum.combine(more);
            }
        }
        Ok(total)
    }

    /// Sums of every (sample, group) over all ranks; equal for all samples that share one
    /// statistic.
    fn group_sums(&self, local: Vec<Sums>) -> Result<Vec<Sums>> {
        let Extents { batch, groups, .. } = self.extents;
        if self.together.is_some() {
            let total = self.total(added_up(&local, groups, Sums::plus))?;
            return Ok(total.repeat(batch));
        }
        self.total(local)
    }

    /// Adds the sums of other ranks to those of this rank's cells.
    fn total(&self, local: Vec<Sums>) -> Result<Vec<Sums>> {
        let numbers: Vec<f64> = local
            .iter()
            .flat_map(|group| [group.cotangent, group.product])
            .collect();
        let operation = self.operation.backward();
        let mut total = vec![Sums::default(); local.len()];
        for numbers in all_gather_numbers(&self.comm, &self.ranks, &operation, &numbers)? {
            let (pairs, _) = numbers.as_chunks();
            for (sum, [cotangent, product]) in total.iter_mut().zip(pairs) {
                *sum = sum.plus(Sums {
                    cotangent: *cotangent,
                    product: *product,
                });
            }
        }
        Ok(total)
    }
}

/// Adds up the values of each group over all samples.
fn added_up<T: Copy + Default>(all: &[T], groups: usize, plus: impl Fn(T, T) -> T) -> Vec<T> {
    let mut sum = vec![T::default(); groups];
    for (index, more) in all.iter().enumerate() {
        sum[index % groups] = plus(sum[index % groups], *more);
    }
    sum
}
