//! Layers: functions of a tensor, with or without parameters, on one device and on shards.

use burn::nn::{PaddingConfig1d, PaddingConfig2d, PaddingConfig3d};
use burn::tensor::Tensor;
use halocline_core::{PlannedMessages, Result, ShardTensor};

use crate::driver::Padding;

/// A function of a tensor, with or without parameters.
///
/// Implemented for burn's modules over [`Tensor<D>`] and [`ShardTensor<D>`] alike, and meant to be implemented by
/// models: `impl<X: Field<4>> Layer<X> for MyModel`.
pub trait Layer<X> {
    /// The type of the result.
    type Output;

    /// Applies the layer.
    fn forward(&self, x: X) -> Self::Output;
}

/// `x.apply(&layer)`.
pub trait Apply: Sized {
    /// Applies a layer to this tensor.
    fn apply<L: Layer<Self>>(self, layer: &L) -> L::Output {
        layer.forward(self)
    }
}

impl<const D: usize> Apply for Tensor<D> {}
impl<const D: usize> Apply for ShardTensor<D> {}

/// `x.plan_of(&layer)`.
pub trait PlanOf: Sized {
    /// The communication of this rank if `layer`, or a whole model, were applied: nothing is sent. The layer computes on
    /// blank cells in the place of those of other ranks, so it takes the time and memory of a forward pass.
    ///
    /// # Errors
    /// Those of the layer.
    fn plan_of<L: Layer<Self>>(&self, layer: &L) -> Result<PlannedMessages>;
}

impl<const D: usize> PlanOf for ShardTensor<D> {
    fn plan_of<L: Layer<Self>>(&self, layer: &L) -> Result<PlannedMessages> {
        self.dry_run(|x| Ok(layer.forward(x)))
    }
}

/// Implements [`Layer`] for modules that keep the number of dims, on tensors of any number of dims, burn's and sharded.
macro_rules! layers {
    ($($module:ty: |$layer:pat_param, $x:ident| $result:expr;)*) => {
        $($crate::layer::layers! { @on burn::tensor::Tensor, $module, $layer, $x, $result }
        $crate::layer::layers! { @on halocline_core::ShardTensor, $module, $layer, $x, $result })*
    };
    (@on $tensor:ident $(:: $part:ident)+, $module:ty, $layer:pat_param, $x:ident, $result:expr) => {
        impl<const D: usize> $crate::Layer<$tensor$(::$part)+<D>> for $module {
            type Output = $tensor$(::$part)+<D>;

            fn forward(&self, $x: $tensor$(::$part)+<D>) -> Self::Output {
                let $layer = self;
                $result
            }
        }
    };
}
pub(crate) use layers;

/// burn's `Same`: as many outputs as windows begin in the field. A stride of zero is refused later.
fn same_padding(size: usize, kernel: usize, stride: usize) -> Padding {
    let outputs = size.div_ceil(stride.max(1));
    let total = (outputs.max(1) - 1) * stride + kernel;
    let total = if outputs == 0 {
        0
    } else {
        total.saturating_sub(size)
    };
    Padding::zeros(total / 2, total - total / 2)
}

/// The padding of burn's configurations for the dims of a field.
pub(crate) trait PaddingOf<const N: usize> {
    fn padding(&self, spatial: &[usize], kernel: [usize; N], stride: [usize; N]) -> [Padding; N];
}

impl PaddingOf<1> for PaddingConfig1d {
    fn padding(&self, spatial: &[usize], kernel: [usize; 1], stride: [usize; 1]) -> [Padding; 1] {
        match self {
            Self::Valid => [Padding::default()],
            Self::Same => [same_padding(spatial[0], kernel[0], stride[0])],
            Self::Explicit(low, high) => [Padding::zeros(*low, *high)],
        }
    }
}

impl PaddingOf<2> for PaddingConfig2d {
    fn padding(&self, spatial: &[usize], kernel: [usize; 2], stride: [usize; 2]) -> [Padding; 2] {
        match self {
            Self::Valid => [Padding::default(); 2],
            Self::Same => std::array::from_fn(|d| same_padding(spatial[d], kernel[d], stride[d])),
            Self::Explicit(top, left, bottom, right) => {
                [Padding::zeros(*top, *bottom), Padding::zeros(*left, *right)]
            }
        }
    }
}

impl PaddingOf<3> for PaddingConfig3d {
    fn padding(&self, spatial: &[usize], kernel: [usize; 3], stride: [usize; 3]) -> [Padding; 3] {
        match self {
            Self::Valid => [Padding::default(); 3],
            Self::Same => std::array::from_fn(|d| same_padding(spatial[d], kernel[d], stride[d])),
            Self::Explicit(depth, height, width) => {
                [depth, height, width].map(|&width| Padding::zeros(width, width))
            }
        }
    }
}
