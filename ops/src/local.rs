//! Operators of one shard that run our own kernels, with their adjoints.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Tensor};
use halocline_core::{Error, Result};

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
    /// The operator's value.
    pub(crate) fn apply<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        Tensor::from_dispatch(<Dispatch as LocalBackend>::local(x.into_dispatch(), self))
    }
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
    let x = x.to_contiguous();
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
    let (x, cotangent) = (x.to_contiguous(), cotangent.to_contiguous());
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
