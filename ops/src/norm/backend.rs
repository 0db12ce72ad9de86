//! Normalization as an operator of a backend: kernels, and the sums over ranks between them, in one node of the graph.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Tensor};
use halocline_core::ops::all_gather_numbers;
use halocline_core::{Communicator, Operation, Result, trace};

use crate::flex::{self, Float};
use crate::kernel::layer_norm;
use crate::kernel::moments::{Moments, Statistic};
use crate::kernel::norm::{self, Extents, Sums};
use crate::kernel::simd::Isa;

/// One normalization on one rank.
#[derive(Clone, Debug)]
pub(super) enum Norm {
    Group(GroupRun),
    Layer { epsilon: f64 },
}

#[derive(Clone, Debug)]
pub(super) struct GroupRun {
    pub extents: Extents,
    /// Elements of a group on all ranks.
    pub count: f64,
    pub epsilon: f64,
    pub comm: Arc<dyn Communicator>,
    /// The ranks among which a sample's cells are.
    pub ranks: Arc<[usize]>,
    pub operation: Operation,
}

impl Norm {
    /// The normalized shard.
    pub(super) fn apply<const D: usize>(
        self,
        x: Tensor<D>,
        weight: Tensor<1>,
        bias: Tensor<1>,
    ) -> Tensor<D> {
        let _span = trace::span("norm");
        let [weight, bias] = [weight, bias].map(Tensor::into_dispatch);
        let y = <Dispatch as NormBackend>::norm(x.into_dispatch(), weight, bias, self);
        Tensor::from_dispatch(y)
    }
}

/// Normalization with gradients.
#[backend_extension(Flex, Autodiff)]
trait NormBackend: Backend {
    fn norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        norm: Norm,
    ) -> FloatTensor<Self>;
}

/// The passes of a normalization, on a backend without gradients.
trait NormKernels: Backend {
    /// The result, and the statistics that it was normalized by.
    fn forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        norm: &Norm,
    ) -> Result<(FloatTensor<Self>, Arc<[Statistic]>)>;

    /// The gradients of input, weight and bias.
    fn backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        statistics: &[Statistic],
        cotangent: FloatTensor<Self>,
        norm: &Norm,
    ) -> Result<[FloatTensor<Self>; 3]>;
}

impl<B: NormKernels, C: CheckpointStrategy> NormBackend for Autodiff<B, C> {
    fn norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        norm: Norm,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: NormKernels> Backward<B, 3> for Step {
            type State = (NodeId, NodeId, Arc<[Statistic]>, Norm);

            fn backward(
                self,
                ops: Ops<Self::State, 3>,
                grads: &mut Gradients,
                checkpointer: &mut Checkpointer,
            ) {
                let _span = trace::span("norm (backward)");
                let (x, weight, statistics, norm) = ops.state;
                let x = checkpointer.retrieve_node_output(x);
                let weight = checkpointer.retrieve_node_output(weight);
                let cotangent = grads.consume::<B>(&ops.node);
                let gradients = B::backward(x, weight, &statistics, cotangent, &norm)
                    .unwrap_or_else(|error| error.raise());
                for (node, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let Some(node) = node {
                        grads.register::<B>(node.id, gradient);
                    }
                }
            }
        }

        let forward = |x, weight, bias| {
            B::forward(x, weight, bias, &norm).unwrap_or_else(|error| error.raise())
        };
        let (x_inner, x_node) = x.clone().into_parts();
        let (weight_inner, weight_node) = weight.clone().into_parts();
        let (bias, bias_node) = bias.into_parts();
        // Compute-bound: gradient checkpointing must not replay communication.
        match Step
            .prepare::<C>([x_node, weight_node, bias_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut prep) => {
                let (x, weight) = (prep.checkpoint(&x), prep.checkpoint(&weight));
                let (y, statistics) = forward(x_inner, weight_inner, bias);
                prep.finish((x, weight, statistics, norm), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward(x_inner, weight_inner, bias).0),
        }
    }
}

impl NormBackend for Flex {
    fn norm(x: FlexTensor, weight: FlexTensor, bias: FlexTensor, norm: Norm) -> FlexTensor {
        match Self::forward(x, weight, bias, &norm) {
            Ok((y, _)) => y,
            Err(error) => error.raise(),
        }
    }
}

impl NormKernels for Flex {
    fn forward(
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        norm: &Norm,
    ) -> Result<(FlexTensor, Arc<[Statistic]>)> {
        match x.dtype() {
            DType::F32 => norm.forward::<f32>(x, weight, bias),
            DType::F64 => norm.forward::<f64>(x, weight, bias),
            narrow => {
                let [x, weight, bias] = [x, weight, bias].map(flex::widened);
                let (y, statistics) = norm.forward::<f32>(x, weight, bias)?;
                Ok((flex::narrowed(y, narrow), statistics))
            }
        }
    }

    fn backward(
        x: FlexTensor,
        weight: FlexTensor,
        statistics: &[Statistic],
        cotangent: FlexTensor,
        norm: &Norm,
    ) -> Result<[FlexTensor; 3]> {
        match x.dtype() {
            DType::F32 => norm.backward::<f32>(x, weight, statistics, cotangent),
            DType::F64 => norm.backward::<f64>(x, weight, statistics, cotangent),
            narrow => {
                let [x, weight, cotangent] = [x, weight, cotangent].map(flex::widened);
                let gradients = norm.backward::<f32>(x, weight, statistics, cotangent)?;
                Ok(gradients.map(|gradient| flex::narrowed(gradient, narrow)))
            }
        }
    }
}

impl Norm {
    fn forward<E: Float>(
        &self,
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
    ) -> Result<(FlexTensor, Arc<[Statistic]>)> {
        let isa = Isa::chosen()?;
        let [x, weight, bias] = [x, weight, bias].map(flex::contiguous);
        let (cells, weight, bias) = (
            flex::elements::<E>(&x),
            flex::elements(&weight),
            flex::elements(&bias),
        );
        let (y, statistics) = match self {
            Self::Group(run) => {
                let statistics = run.statistics(norm::moments(isa, cells, run.extents))?;
                let y = norm::normalize(isa, cells, run.extents, &statistics, weight, bias);
                (y, statistics)
            }
            Self::Layer { epsilon } => {
                let y = layer_norm::forward(isa, cells, weight, bias, *epsilon);
                (y, Arc::from([]))
            }
        };
        Ok((flex::tensor(y, &x.shape()), statistics))
    }

    fn backward<E: Float>(
        &self,
        x: FlexTensor,
        weight: FlexTensor,
        statistics: &[Statistic],
        cotangent: FlexTensor,
    ) -> Result<[FlexTensor; 3]> {
        let isa = Isa::chosen()?;
        let [x, weight, cotangent] = [x, weight, cotangent].map(flex::contiguous);
        let cells = flex::elements::<E>(&x);
        let (factors, cotangent) = (flex::elements(&weight), flex::elements(&cotangent));
        let (input, [weight_gradient, bias_gradient]) = match self {
            Self::Group(run) => {
                let extents = run.extents;
                let sums = norm::channel_sums(isa, cells, cotangent, extents, statistics);
                let groups = run.group_sums(norm::group_sums(extents, &sums, factors))?;
                let input = norm::input_gradient(
                    isa, cells, cotangent, extents, statistics, factors, &groups, run.count,
                );
                (input, norm::parameter_gradients(extents, &sums))
            }
            Self::Layer { epsilon } => {
                let gradient = layer_norm::backward(isa, cells, cotangent, factors, *epsilon);
                (gradient.input, [gradient.weight, gradient.bias])
            }
        };
        let parameters = weight.shape();
        Ok([
            flex::tensor(input, &x.shape()),
            flex::small_tensor(weight_gradient, &parameters),
            flex::small_tensor(bias_gradient, &parameters),
        ])
    }
}

impl GroupRun {
    /// The statistics of every (sample, group), from the moments of this rank's cells.
    fn statistics(&self, own: Vec<Moments>) -> Result<Arc<[Statistic]>> {
        let numbers: Vec<f64> = own
            .iter()
            .flat_map(|of| [of.count, of.mean, of.squares])
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
        let none = Moments {
            count: 0.0,
            mean: 0.0,
            squares: 0.0,
        };
        let mut total = vec![none; own.len()];
        for rank in moments {
            for (sum, more) in total.iter_mut().zip(rank) {
                *sum = sum.combine(more);
            }
        }
        let statistics = total.into_iter().map(|of| of.statistic(self.epsilon));
        Ok(statistics.collect())
    }

    /// The sums of every (sample, group) over all ranks.
    fn group_sums(&self, own: Vec<Sums>) -> Result<Vec<Sums>> {
        let numbers: Vec<f64> = own
            .iter()
            .flat_map(|of| [of.cotangent, of.product])
            .collect();
        let operation = self.operation.backward();
        let mut total = vec![Sums::default(); own.len()];
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
