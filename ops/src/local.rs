//! Operators of one shard that run our own kernels, with their adjoints.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{self, DType, Shape, Tensor};
use halocline_core::{Error, Result, trace};

use crate::flex::{self, Float};
use crate::kernel::activation::{self, Activation};
use crate::kernel::resample::Edge;
use crate::kernel::simd::Isa;
use crate::kernel::{pooling, resample};

/// An operator of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LocalOperator {
    /// An elementwise nonlinearity.
    Activation(Activation),
    /// Every cell of the last two dims four times.
    NearestDouble,
    /// The last two dims at twice the resolution, from a field with a halo of one cell.
    BilinearDouble,
    /// The maximum over windows of 2 × 2 cells of the last two dims.
    MaxPairs,
    /// The mean over such windows.
    AveragePairs,
}

impl LocalOperator {
    /// The operator's value: by our kernels, or by burn's operators on a device that they do not run on.
    pub(crate) fn apply<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        let _span = trace::span(self.names()[0]);
        if flex::runs_on(&x.device()) {
            return Tensor::from_dispatch(<Dispatch as LocalBackend>::local(
                x.into_dispatch(),
                self,
            ));
        }
        self.composed(x)
    }

    /// Its name on the timeline, forward and backward.
    const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Activation(_) => ["activation", "activation (backward)"],
            Self::NearestDouble => ["upsample_nearest", "upsample_nearest (backward)"],
            Self::BilinearDouble => ["upsample_bilinear", "upsample_bilinear (backward)"],
            Self::MaxPairs => ["max_pool", "max_pool (backward)"],
            Self::AveragePairs => ["avg_pool", "avg_pool (backward)"],
        }
    }

    /// The operator's value by burn's operators.
    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        let shape = x.dims();
        let planes = |x: Tensor<D>| {
            let [planes, rows, columns] = planes(&shape).unwrap_or_else(|error| error.raise());
            x.reshape([1, planes, rows, columns])
        };
        let back = |y: Tensor<4>| {
            let [_, planes, rows, columns] = y.dims();
            y.reshape(Shape::from(with_planes(&shape, [planes, rows, columns])))
        };
        match self {
            Self::Activation(Activation::Relu) => tensor::activation::relu(x),
            Self::Activation(Activation::Gelu) => tensor::activation::gelu(x),
            Self::Activation(Activation::Silu) => tensor::activation::silu(x),
            Self::NearestDouble => {
                let x = planes(x);
                let [_, planes, rows, columns] = x.dims();
                let copies = x.reshape([planes, rows, 1, columns, 1]);
                let copies = copies.expand([planes, rows, 2, columns, 2]);
                back(copies.reshape([1, planes, 2 * rows, 2 * columns]))
            }
            Self::BilinearDouble => back(doubled_linearly(doubled_linearly(planes(x), 2), 3)),
            Self::MaxPairs => {
                let options = MaxPoolOptions::new([2, 2]).with_stride([2, 2]);
                back(tensor::module::max_pool2d(planes(x), options))
            }
            Self::AveragePairs => {
                let options = AvgPoolOptions::new([2, 2]).with_stride([2, 2]);
                back(tensor::module::avg_pool2d(planes(x), options))
            }
        }
    }
}

/// A dim at twice the resolution, by linear interpolation, without its halo of one cell.
fn doubled_linearly(x: Tensor<4>, dim: usize) -> Tensor<4> {
    let mut shape = x.dims();
    let cells = shape[dim] - 2;
    let from = |start| x.clone().narrow(dim, start, cells);
    let near = from(1) * 0.75;
    let halves = [near.clone() + from(0) * 0.25, near + from(2) * 0.25];
    let pairs: Tensor<5> = Tensor::stack(halves.into(), dim + 1);
    shape[dim] = 2 * cells;
    pairs.reshape(shape)
}

/// Operators of one tensor, with gradients.
#[backend_extension(Flex, Autodiff)]
pub(crate) trait LocalBackend: Backend {
    /// The operator's value.
    fn local(x: FloatTensor<Self>, operator: LocalOperator) -> FloatTensor<Self>;
}

/// The passes of such operators, on a backend without gradients.
pub(crate) trait LocalKernels: Backend {
    /// The operator's value.
    fn forward(x: FloatTensor<Self>, operator: LocalOperator) -> Result<FloatTensor<Self>>;

    /// The gradient of `x`.
    fn backward(
        x: FloatTensor<Self>,
        cotangent: FloatTensor<Self>,
        operator: LocalOperator,
    ) -> Result<FloatTensor<Self>>;
}

impl<B: LocalKernels, C: CheckpointStrategy> LocalBackend for Autodiff<B, C> {
    fn local(x: FloatTensor<Self>, operator: LocalOperator) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: LocalKernels> Backward<B, 1> for Step {
            type State = (NodeId, LocalOperator);

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                checkpointer: &mut Checkpointer,
            ) {
                let (x, operator) = ops.state;
                let _span = trace::span(operator.names()[1]);
                let x = checkpointer.retrieve_node_output(x);
                unary::<B, _>(ops.parents, ops.node, grads, |cotangent| {
                    B::backward(x, cotangent, operator).unwrap_or_else(|error| error.raise())
                });
            }
        }

        let forward = |x| B::forward(x, operator).unwrap_or_else(|error| error.raise());
        let (inner, node) = x.clone().into_parts();
        match Step.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let x = prep.checkpoint(&x);
                prep.finish((x, operator), forward(inner))
            }
            OpsKind::UnTracked(prep) => prep.finish(forward(inner)),
        }
    }
}

impl LocalBackend for Flex {
    fn local(x: FlexTensor, operator: LocalOperator) -> FlexTensor {
        <Self as LocalKernels>::forward(x, operator).unwrap_or_else(|error| error.raise())
    }
}

impl LocalKernels for Flex {
    fn forward(x: FlexTensor, operator: LocalOperator) -> Result<FlexTensor> {
        match x.dtype() {
            DType::F32 => forward::<f32>(x, operator),
            DType::F64 => forward::<f64>(x, operator),
            narrow => Ok(flex::narrowed(
                forward::<f32>(flex::widened(x), operator)?,
                narrow,
            )),
        }
    }

    fn backward(
        x: FlexTensor,
        cotangent: FlexTensor,
        operator: LocalOperator,
    ) -> Result<FlexTensor> {
        match x.dtype() {
            DType::F32 => backward::<f32>(x, cotangent, operator),
            DType::F64 => backward::<f64>(x, cotangent, operator),
            narrow => {
                let [x, cotangent] = [x, cotangent].map(flex::widened);
                let gradient = backward::<f32>(x, cotangent, operator)?;
                Ok(flex::narrowed(gradient, narrow))
            }
        }
    }
}

/// `[planes, rows, columns]` of a shape, all but the last two dims being planes.
fn planes(shape: &[usize]) -> Result<[usize; 3]> {
    match shape {
        [outer @ .., rows, columns] => Ok([outer.iter().product(), *rows, *columns]),
        _ => Err(Error::operator(
            "local",
            format!("{shape:?}; expected two spatial dims"),
        )),
    }
}

/// A shape with other last two dims.
fn with_planes(shape: &[usize], [_, rows, columns]: [usize; 3]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    let dims = shape.len();
    shape[dims - 2..].copy_from_slice(&[rows, columns]);
    shape
}

/// A field's extents without its halo of one cell.
fn without_halo([planes, rows, columns]: [usize; 3]) -> [usize; 3] {
    [planes, rows - 2, columns - 2]
}

fn forward<E: Float>(x: FlexTensor, operator: LocalOperator) -> Result<FlexTensor> {
    let isa = Isa::chosen()?;
    let x = flex::contiguous(x);
    let (shape, cells) = (x.shape(), flex::elements::<E>(&x));
    let (y, shape) = match operator {
        LocalOperator::Activation(activation) => {
            (activation::forward(isa, activation, cells), shape.to_vec())
        }
        LocalOperator::NearestDouble => {
            let from = planes(&shape)?;
            let to = with_planes(&shape, resample::doubled(from));
            (resample::nearest(isa, cells, from), to)
        }
        LocalOperator::BilinearDouble => {
            let from = without_halo(planes(&shape)?);
            let to = with_planes(&shape, resample::doubled(from));
            (resample::bilinear(isa, cells, from, Edge::Halo), to)
        }
        LocalOperator::MaxPairs => {
            let from = planes(&shape)?;
            let to = with_planes(&shape, pooling::pooled(from));
            (pooling::max(isa, cells, from), to)
        }
        LocalOperator::AveragePairs => {
            let from = planes(&shape)?;
            let to = with_planes(&shape, pooling::pooled(from));
            (pooling::average(isa, cells, from), to)
        }
    };
    Ok(flex::tensor(y, &shape))
}

fn backward<E: Float>(
    x: FlexTensor,
    cotangent: FlexTensor,
    operator: LocalOperator,
) -> Result<FlexTensor> {
    let isa = Isa::chosen()?;
    let (x, cotangent) = (flex::contiguous(x), flex::contiguous(cotangent));
    let shape = x.shape();
    let (cells, cotangent) = (flex::elements::<E>(&x), flex::elements(&cotangent));
    let gradient = match operator {
        LocalOperator::Activation(activation) => {
            activation::backward(isa, activation, cells, cotangent)
        }
        LocalOperator::NearestDouble => resample::nearest_adjoint(isa, cotangent, planes(&shape)?),
        LocalOperator::BilinearDouble => {
            let field = without_halo(planes(&shape)?);
            resample::bilinear_adjoint(isa, cotangent, field, Edge::Halo)
        }
        LocalOperator::MaxPairs => pooling::max_adjoint(isa, cells, cotangent, planes(&shape)?),
        LocalOperator::AveragePairs => pooling::average_adjoint(isa, cotangent, planes(&shape)?),
    };
    Ok(flex::tensor(gradient, &shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::difference;
    use burn::tensor::{Device, Distribution};

    #[test]
    fn kernels_and_burns_operators_agree() {
        let device = Device::flex().autodiff();
        let operators = [Activation::Relu, Activation::Gelu, Activation::Silu]
            .map(LocalOperator::Activation)
            .into_iter()
            .chain([
                LocalOperator::NearestDouble,
                LocalOperator::BilinearDouble,
                LocalOperator::MaxPairs,
                LocalOperator::AveragePairs,
            ]);
        for operator in operators {
            let x = Tensor::<4>::random([2, 3, 8, 6], Distribution::Uniform(-3.0, 3.0), &device);
            let run = |f: fn(LocalOperator, Tensor<4>) -> Tensor<4>| {
                let x = x.clone().detach().require_grad();
                let y = f(operator, x.clone());
                let weight = y.clone().detach().cos();
                let gradients = (y.clone() * weight).sum().backward();
                [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
            };
            let (ours, burns) = (run(LocalOperator::apply), run(LocalOperator::composed));
            for (ours, burns) in ours.iter().zip(&burns) {
                assert!(difference(ours, burns) < 1e-5, "{operator:?}");
            }
        }
    }
}
