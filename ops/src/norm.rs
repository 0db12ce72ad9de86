//! Group, instance and layer normalization.
//!
//! `y = (x − mean) / √(variance + epsilon) · weight + bias`, with the variance of the population. Semantics follow
//! PyTorch.
//!
//! - [`group_norm`]: mean and variance over the cells of the field and the channels of a group, per sample. With as many
//!   groups as channels it is instance normalization.
//! - [`layer_norm`]: mean and variance over the last dim.
//!
//! # Placement
//! Batch and spatial dims may be sharded in `group_norm`, all dims but the last in `layer_norm`; channels, and the last
//! dim, must be whole; values resolved.
//!
//! # Communication
//! `group_norm` gathers count, mean and sum of squared deviations per sample and group from the ranks among which the
//! cells are, three numbers each, and combines them in the order of ranks; two numbers in the backward pass.
//! `layer_norm` sends nothing.
//!
//! # Adjoint
//! Gradients of weight and bias are summed over all ranks between which `x` is sharded.

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
use halocline_core::ops::{all_gather_numbers, fan_out};
use halocline_core::{Communicator, Error, Operation, Result, Shard, ShardTensor, Traffic};

use crate::flex::{self, Float};
use crate::kernel::layer_norm;
use crate::kernel::moments::{Moments, Statistic};
use crate::kernel::norm::{self, Extents, Sums};
use crate::kernel::simd::Isa;
use crate::sharded_axes;

/// Normalizes every group of channels of every sample.
///
/// # Errors
/// Groups that do not divide the channels, parameters of another size, a placement without a rule, a failure of
/// communication.
pub fn group_norm<const D: usize>(
    x: ShardTensor<D>,
    groups: usize,
    weight: Option<Tensor<1>>,
    bias: Option<Tensor<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "group_norm";
    x.require_resolved(NAME)?;
    if D < 2 || groups == 0 || !x.dims()[1].is_multiple_of(groups) {
        let message = format!(
            "{groups} groups of {:?}; expected [batch, groups·n, ..]",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    x.require_whole(NAME, 1)?;
    Isa::chosen()?;
    let [weight, bias] = parameters(&x, 1, weight, bias, NAME)?;
    let axes = x
        .layout()
        .axes_where(|placement| matches!(placement, Shard(dim) if dim >= 2));
    let global: usize = x.dims()[2..].iter().product();
    let (local, layout, mesh) = x.into_parts();
    let held = local.dims();
    let extents = Extents {
        batch: held[0],
        channels: held[1],
        cells: held[2..].iter().product(),
        groups,
    };
    let run = Norm::Group(GroupRun {
        extents,
        count: (global * held[1] / groups) as f64,
        epsilon,
        comm: mesh.comm().clone(),
        ranks: mesh.ranks_along(&axes).into(),
        operation: Operation::new(NAME, Traffic::Reduce, Some(&layout)),
    });
    let y = Error::catch(|| run.apply(local, weight, bias))?;
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Normalizes the last dim.
///
/// # Errors
/// Parameters of another size, a placement without a rule.
pub fn layer_norm<const D: usize>(
    x: ShardTensor<D>,
    weight: Option<Tensor<1>>,
    bias: Option<Tensor<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "layer_norm";
    x.require_resolved(NAME)?;
    x.require_whole(NAME, D - 1)?;
    Isa::chosen()?;
    let [weight, bias] = parameters(&x, D - 1, weight, bias, NAME)?;
    let (local, layout, mesh) = x.into_parts();
    let y = Norm::Layer { epsilon }.apply(local, weight, bias);
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Weight and bias of the size of a dim, with gradients that are complete on every rank; ones and zeros if none.
fn parameters<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    weight: Option<Tensor<1>>,
    bias: Option<Tensor<1>>,
    operator: &'static str,
) -> Result<[Tensor<1>; 2]> {
    let size = x.dims()[dim];
    let constant = |value: f64| Tensor::full([size], value, (&x.device(), x.local().dtype()));
    let axes = sharded_axes(x);
    let dtype = x.local().dtype();
    let parameter = |parameter: Option<Tensor<1>>, default: f64| match parameter {
        None => Ok(constant(default)),
        Some(parameter) if parameter.dtype() != dtype => Err(Error::operator(
            operator,
            format!(
                "a parameter of {:?} for a tensor of {dtype:?}",
                parameter.dtype()
            ),
        )),
        Some(parameter) if parameter.dims() == [size] => {
            Ok(fan_out(parameter, x.mesh(), &axes, operator))
        }
        Some(parameter) => Err(Error::operator(
            operator,
            format!("a parameter {:?} for {size} elements", parameter.dims()),
        )),
    };
    Ok([parameter(weight, 1.0)?, parameter(bias, 0.0)?])
}

/// One normalization on one rank.
#[derive(Clone, Debug)]
enum Norm {
    Group(GroupRun),
    Layer { epsilon: f64 },
}

#[derive(Clone, Debug)]
struct GroupRun {
    extents: Extents,
    /// Elements of a group on all ranks.
    count: f64,
    epsilon: f64,
    comm: Arc<dyn Communicator>,
    /// The ranks among which a sample's cells are.
    ranks: Arc<[usize]>,
    operation: Operation,
}

impl Norm {
    fn apply<const D: usize>(self, x: Tensor<D>, weight: Tensor<1>, bias: Tensor<1>) -> Tensor<D> {
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
        let [x, weight, bias] = [x, weight, bias].map(|tensor| tensor.to_contiguous());
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
        let [x, weight, cotangent] = [x, weight, cotangent].map(|tensor| tensor.to_contiguous());
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
        let all = all_gather_numbers(&*self.comm, &self.ranks, &self.operation, &numbers)?;
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
        for numbers in all_gather_numbers(&*self.comm, &self.ranks, &operation, &numbers)? {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Operator, check_op, difference};
    use crate::{Apply, Field};
    use burn::nn::{GroupNormConfig, InstanceNormConfig};
    use halocline_core::Launcher;

    struct Group(usize);

    impl<const D: usize> Operator<D, D> for Group {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X::Rank<D> {
            let [weight, bias] = [0, 1].map(|i| Some(parameters[i].clone().flatten(0, D - 1)));
            let y = inputs.remove(0).group_norm(self.0, weight, bias, 1e-5);
            X::from_shard(y.into_shard())
        }
    }

    struct Layer;

    impl<const D: usize> Operator<D, D> for Layer {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X::Rank<D> {
            let [weight, bias] = [0, 1].map(|i| Some(parameters[i].clone().flatten(0, D - 1)));
            let y = inputs.remove(0).layer_norm(weight, bias, 1e-5);
            X::from_shard(y.into_shard())
        }
    }

    #[test]
    fn groups_span_the_shards() {
        let parameters = [[1, 6, 1, 1]; 2];
        for groups in [1, 3, 6] {
            check_op(
                &Group(groups),
                &[[2, 6, 5, 7]],
                &parameters,
                &[0, 2, 3],
                2e-5,
            );
        }
        check_op(&Group(2), &[[2, 4, 11]], &[[1, 4, 1]; 2], &[0, 2], 2e-5);
    }

    #[test]
    fn the_last_dim_is_normalized_without_a_message() {
        check_op(
            &Layer,
            &[[2, 5, 7, 6]],
            &[[1, 1, 1, 6]; 2],
            &[0, 1, 2],
            2e-5,
        );
    }

    #[test]
    fn modules_of_burn_give_what_they_give_there() {
        let device = Default::default();
        let normal = burn::tensor::Distribution::Normal(3.0, 2.0);
        let x = Tensor::<4>::random([2, 6, 9, 11], normal, &device);
        let group = GroupNormConfig::new(3, 6).init(&device);
        let instance = InstanceNormConfig::new(6).init(&device);
        let pairs = [
            (x.clone().apply(&group), group.forward(x.clone())),
            (x.clone().apply(&instance), instance.forward(x.clone())),
        ];
        for (ours, burns) in pairs {
            assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-5);
        }
    }

    #[test]
    fn a_large_mean_costs_no_digits() {
        let wave = |offset: f64| {
            let x = Tensor::<1>::ones([4096], &Default::default()).cumsum(0);
            let x = (x * 0.37).sin() + offset;
            x.reshape([1, 2, 32, 64]).group_norm(1, None, None, 0.0)
        };
        // Cells of a thousand have a rounding error of 3e-5 themselves.
        let difference = difference(&wave(1000.0).into_data(), &wave(0.0).into_data());
        assert!(difference < 1e-4, "{difference}");
    }

    #[test]
    fn misuse_is_told() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("model", 2)])?;
                let x = ShardTensor::<4>::ones([1, 4, 6, 6], &mesh, &[Shard(1)])?;
                let error = group_norm(x.clone(), 2, None, None, 1e-5).unwrap_err();
                assert!(
                    error.to_string().contains("no rule for Shard(1)"),
                    "{error}"
                );
                let error = group_norm(x.clone(), 3, None, None, 1e-5).unwrap_err();
                assert!(
                    error.to_string().contains("3 groups of [1, 4, 6, 6]"),
                    "{error}"
                );
                let bias = Some(Tensor::ones([5], world.device()));
                let error = layer_norm(x.clone(), None, bias, 1e-5).unwrap_err();
                assert!(
                    error.to_string().contains("a parameter [5] for 6 elements"),
                    "{error}"
                );
                let options = (world.device(), DType::F64);
                let weight = Some(Tensor::ones([6], options));
                let error = layer_norm(x, weight, None, 1e-5).unwrap_err().to_string();
                assert!(
                    error.contains("a parameter of F64 for a tensor of F32"),
                    "{error}"
                );
                Ok(())
            })
            .unwrap();
    }
}
