//! Operators on sharded tensors: each gives the result that one device would give.
//!
//! One file per operator: its definition, what it exchanges, its adjoint, its kernel. [`Field`] is what they are called
//! on, a burn tensor or a sharded one; [`Layer`] makes burn's own modules apply to both.

mod activation;
pub mod conv;
mod empty;
mod field;
mod flex;
mod kernel;
mod layer;
mod local;
mod loss;
pub mod matmul;
pub mod norm;
pub mod pool;
pub mod reduce;
pub mod resample;
pub mod reshape;
mod stencil;
pub mod testing;
mod window;

pub use activation::Activation;
pub use conv::ConvOptions;
pub use field::Field;
pub use layer::{Apply, Layer, PlanOf, Planned};
pub use loss::{Reduction, backward, huber_loss, l1_loss, loss_value, mse_loss};
pub use pool::{PaddingCount, PoolOptions};
pub use stencil::{Stencil, StencilPlan};
pub use window::{Padding, Rounding, Window};

use burn::tensor::Tensor;
use halocline_core::{Shard, ShardTensor};

/// The axes over which a tensor is sharded: those over which gradients of replicated operands are summed.
pub(crate) fn sharded_axes<const D: usize>(x: &ShardTensor<D>) -> Vec<usize> {
    x.layout()
        .axes_where(|placement| matches!(placement, Shard(_)))
}

/// A tensor under a rank that is known to be its own.
pub(crate) fn retype<const D: usize, const E: usize>(x: Tensor<D>) -> Tensor<E> {
    debug_assert_eq!(D, E);
    Tensor::from_dispatch(x.into_dispatch())
}
