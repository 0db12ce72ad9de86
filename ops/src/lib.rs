//! Operators on sharded tensors: each gives the result that one device would give.
//!
//! One folder per family of operators: definition, exchange, adjoint, kernels, and the methods by which they are called
//! on a [`Field`], a burn tensor or a sharded one. [`Layer`] makes burn's own modules apply to both.

pub mod activation;
pub mod attention;
pub mod conv;
mod driver;
mod field;
pub mod golden;
mod kernel;
mod layer;
mod loss;
pub mod matmul;
pub mod norm;
mod operand;
pub mod pool;
pub mod rearrange;
pub mod reduce;
mod registry;
pub mod resample;
mod sharding;
pub mod testing;

pub use activation::{Activation, ActivationField};
pub use attention::{
    AttentionField, AttentionOptions, DenseAttentionField, NeighborhoodOptions,
};
pub use conv::{ConvField, ConvOptions};
pub use driver::{Neighborhood, Padding, Rounding, Stencil, StencilPlan, Window};
pub use field::{Carried, Carrier, Field, OneDevice, Rank, Sharded};
pub use layer::{Apply, Layer, PlanOf};
pub use loss::{Reduction, backward, huber_loss, l1_loss, loss_value, mse_loss};
pub use matmul::MatmulField;
pub use norm::NormField;
pub use operand::Operand;
pub use pool::{PaddingCount, PoolField, PoolOptions};
pub use rearrange::RearrangeField;
pub use reduce::ReduceField;
pub use registry::operators;
pub use resample::ResampleField;

/// Everything that model code calls: tensors and layers, and the methods of all families of operators.
pub mod prelude {
    pub use crate::{
        ActivationField, Apply, AttentionField, AttentionOptions, ConvField, ConvOptions, DenseAttentionField, Field, Layer, MatmulField, NeighborhoodOptions, NormField,
        Operand, Padding, PlanOf, PoolField, PoolOptions, Rank, RearrangeField, ReduceField,
        Reduction, ResampleField, Stencil, Window, huber_loss, l1_loss, mse_loss,
    };
}

use burn::tensor::Tensor;

/// A tensor under a rank that is known to be its own.
pub(crate) fn retype<const D: usize, const E: usize>(x: Tensor<D>) -> Tensor<E> {
    debug_assert_eq!(D, E);
    Tensor::from_dispatch(x.into_dispatch())
}
