//! Backward passes from a given cotangent, for benches of single operators.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use halocline::prelude::Tensor;

/// Returns a number whose gradient in `y` is the cotangent, as burn's backward pass starts from
/// ones only.
pub(crate) fn pair<const D: usize>(y: Tensor<D>, cotangent: Tensor<D>) -> Tensor<1> {
    let (y, cotangent) = (y.into_dispatch(), cotangent.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Pairing>::pair(y, cotangent))
}

#[backend_extension(Flex, Autodiff)]
trait Pairing: Backend {
    fn pair(y: FloatTensor<Self>, cotangent: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Pairing for Flex {
    fn pair(y: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        // The number itself is never read.
        <Self as FloatTensorOps<Self>>::float_zeros([1].into(), &y.device(), y.dtype().into())
    }
}

impl<B: Pairing, C: CheckpointStrategy> Pairing for Autodiff<B, C> {
    fn pair(y: FloatTensor<Self>, cotangent: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: Backend> Backward<B, 1> for Step {
            type State = FloatTensor<B>;

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                unary::<B, _>(ops.parents, ops.node, grads, |_| ops.state);
            }
        }

        let ((y, node), (cotangent, _)) = (y.into_parts(), cotangent.into_parts());
        match Step.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(cotangent.clone(), B::pair(y, cotangent)),
            OpsKind::UnTracked(prep) => prep.finish(B::pair(y, cotangent)),
        }
    }
}
