//! Operators on sharded tensors. Results equal those of a single device.
//!
//! Each family of operators has a folder with its definition, exchange, adjoint and kernels, and
//! with methods on a [`Field`], which is either a burn tensor or a sharded tensor. [`Layer`]
//! applies burn's own modules to both.

pub mod activation;
pub mod arithmetic;
mod around;
pub mod attention;
pub mod conv;
mod driver;
pub mod dropout;
pub mod embedding;
mod field;
pub mod geodesic;
pub mod golden;
pub mod graph;
mod kernel;
mod layer;
mod layer_placements;
mod layers;
pub mod loss;
pub mod masked;
pub mod matmul;
pub mod norm;
mod operand;
pub mod optim;
#[cfg(test)]
mod placements;
pub mod pool;
mod precision;
pub mod rearrange;
pub mod recurrent;
pub mod reduce;
mod registry;
pub mod resample;
mod reshard;
mod sharding;
pub mod softmax;
pub mod spectral;
pub mod sphere;
pub mod testing;

pub use activation::{Activation, ActivationField};
pub use arithmetic::ArithmeticField;
pub use around::Around;
pub use attention::{AttentionField, AttentionOptions, DenseAttentionField, NeighborhoodOptions};
pub use conv::{ConvField, ConvOptions, ConvTransposeField, ConvTransposeOptions};
pub use driver::{Neighborhood, Padding, Rounding, Stencil, Window};
pub use dropout::DropoutField;
pub use embedding::EmbeddingField;
pub use field::{AnyDims, DimGeneric, Field, OneDevice, Sharded, TensorFamily, WithDims};
pub use geodesic::{
    Disco, DiscoBasis, DiscoKernel, DiscoNorm, DiscoTranspose, GeodesicField, GeodesicNeighborhood,
};
pub use layer::{Apply, Layer, PlanOf};
pub use layer_placements::with_layer_placements;
pub use loss::{
    BinaryCrossEntropyOptions, CrossEntropyOptions, GaussianNllOptions, Penalty, Reduction,
    SsimOptions, backward, binary_cross_entropy_with_logits, cross_entropy, cross_entropy_cells,
    gaussian_nll_loss, gradient_loss, huber_loss, l1_loss, mse_loss, spectral_loss, ssim_loss,
    total_variation, weighted_difference_loss, weighted_loss, weighted_mean,
};
pub use matmul::MatmulField;
pub use norm::NormField;
pub use operand::Operand;
pub use pool::{PaddingCount, PoolField, PoolOptions};
pub use precision::widened;
pub use rearrange::{RearrangeField, ShapeField};
pub use reduce::{ReduceField, StatisticsField};
pub use registry::operators;
pub use resample::ResampleField;
pub use reshard::{Reshard, Resharded, set_reshards};
pub use softmax::SoftmaxField;
pub use spectral::{FftNorm, SpectralField};
pub use sphere::{Regrid, RegridMode, Sht, ShtNorm, ShtPhase, SphereField, SphereGrid};

/// Imports for model code: fields, layers, and the methods of all operator families.
pub mod prelude {
    pub use crate::{
        ActivationField, Apply, ArithmeticField, AttentionField, AttentionOptions,
        BinaryCrossEntropyOptions, ConvField, ConvOptions, ConvTransposeField,
        ConvTransposeOptions, CrossEntropyOptions, DenseAttentionField, Disco, DiscoBasis,
        DiscoNorm, DiscoTranspose, DropoutField, FftNorm, Field, GaussianNllOptions, GeodesicField,
        GeodesicNeighborhood, Layer, MatmulField, NeighborhoodOptions, NormField, Operand, Padding,
        Penalty, PlanOf, PoolField, PoolOptions, RearrangeField, ReduceField, Reduction, Regrid,
        RegridMode, ResampleField, Reshard, ShapeField, Sht, ShtNorm, ShtPhase, SoftmaxField,
        SpectralField, SphereField, SphereGrid, SsimOptions, StatisticsField, Stencil, Window,
        WithDims, backward, binary_cross_entropy_with_logits, cross_entropy, gaussian_nll_loss,
        gradient_loss, huber_loss, l1_loss, mse_loss, spectral_loss, ssim_loss, total_variation,
        weighted_difference_loss, weighted_loss,
    };
}

use burn::backend::Dispatch;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::tensor::kind::{Basic, Kind};
use burn::tensor::{Bool, Int, Shape, Tensor};
use halocline_core::{Result, ShardTensor};

/// Converts the type of a tensor from `D` dims to `E` dims, where `E` equals `D`.
pub(crate) fn retype<const D: usize, const E: usize>(x: Tensor<D>) -> Tensor<E> {
    debug_assert_eq!(D, E);
    Tensor::from_dispatch(x.into_dispatch())
}

/// Copies a tensor without its gradient. burn's `detach` differs: it keeps a leaf a leaf, whose
/// gradient is still computed.
pub(crate) fn constant<const D: usize>(x: &ShardTensor<D>) -> ShardTensor<D> {
    let local = if x.local().is_autodiff() {
        x.local().clone().inner().autodiff()
    } else {
        x.local().clone()
    };
    ShardTensor::from_parts(local, x.layout().clone(), x.mesh().clone())
}

/// Applies a function of floats to a tensor whose kind is known to be that.
pub(crate) fn with_floats<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    f: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<D>>,
) -> Result<ShardTensor<D, K>> {
    let (local, layout, mesh) = x.into_parts();
    let local = Tensor::from_dispatch(local.into_dispatch());
    let (local, layout, mesh) = f(ShardTensor::from_parts(local, layout, mesh))?.into_parts();
    let local = Tensor::from_dispatch(local.into_dispatch());
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Applies a function to integers, and to booleans as integers: flex gives the selected elements of a
/// boolean tensor the type `u8`.
pub(crate) fn as_integers<const D: usize, K: Basic>(
    x: Tensor<D, K>,
    f: impl FnOnce(Tensor<D, Int>) -> Tensor<D, Int>,
) -> Tensor<D, K> {
    let x = x.into_dispatch();
    Tensor::from_dispatch(match K::KIND {
        Kind::Bool => {
            let x = Tensor::<D, Bool>::from_dispatch(x).int();
            f(x).bool().into_dispatch()
        }
        _ => f(Tensor::from_dispatch(x)).into_dispatch(),
    })
}

/// Reshapes a tensor. `Tensor::reshape` would read a size of zero as "keep the size".
pub(crate) fn reshape<const D: usize, const E: usize>(
    x: Tensor<D>,
    shape: Vec<usize>,
) -> Tensor<E> {
    reshape_any(x, shape)
}

/// [`reshape`] for elements of any kind.
pub(crate) fn reshape_any<const D: usize, const E: usize, K: Basic>(
    x: Tensor<D, K>,
    shape: Vec<usize>,
) -> Tensor<E, K> {
    let (x, shape) = (x.into_dispatch(), Shape::from(shape));
    Tensor::from_dispatch(match K::KIND {
        Kind::Float => Dispatch::float_reshape(x, shape),
        Kind::Int => Dispatch::int_reshape(x, shape),
        Kind::Bool => Dispatch::bool_reshape(x, shape),
    })
}
