//! burn's own modules on either kind of tensor.

use std::sync::Arc;

use burn::module::Param;
use burn::nn::activation::SiLU;
use burn::nn::conv::{Conv1d, Conv2d, Conv3d};
use burn::nn::pool::{AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d};
use burn::nn::{
    Gelu, GroupNorm, InstanceNorm, LeakyRelu, Linear, PaddingConfig1d, PaddingConfig2d,
    PaddingConfig3d, Relu, Sigmoid, Tanh,
};
use burn::tensor::Tensor;
use halocline_core::{ExchangePlan, Result, ShardTensor};

use crate::conv::ConvOptions;
use crate::field::Field;
use crate::pool::{PaddingCount, PoolOptions};
use crate::stencil::Stencil;
use crate::window::{Padding, Rounding};

/// A function of a tensor, with or without parameters.
///
/// Implemented for burn's modules over [`Tensor<D>`] and [`ShardTensor<D>`] alike, and meant to be implemented by
/// models: `impl<X: Field<4>> Layer<X> for MyModel`.
pub trait Layer<X> {
    /// What comes out.
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

/// Layers whose exchange of halos can be seen before it happens: burn's convolution and pooling modules.
pub trait Planned<const D: usize> {
    /// What would travel if the layer were applied: this rank's plan, or `None` if nothing would.
    ///
    /// # Errors
    /// A placement without a rule, shapes that do not fit.
    fn exchange_plan(&self, x: &ShardTensor<D>) -> Result<Option<Arc<ExchangePlan>>>;
}

/// `x.plan_of(&layer)`.
pub trait PlanOf<const D: usize> {
    /// What would travel if `layer` were applied, in boxes and bytes; `None` if nothing would.
    ///
    /// # Errors
    /// A placement without a rule, shapes that do not fit.
    fn plan_of(&self, layer: &impl Planned<D>) -> Result<Option<Arc<ExchangePlan>>>;
}

impl<const D: usize> PlanOf<D> for ShardTensor<D> {
    fn plan_of(&self, layer: &impl Planned<D>) -> Result<Option<Arc<ExchangePlan>>> {
        layer.exchange_plan(self)
    }
}

fn plan<const D: usize>(
    stencil: &Stencil,
    x: &ShardTensor<D>,
) -> Result<Option<Arc<ExchangePlan>>> {
    let plan = stencil.plan(x)?.exchange.clone();
    Ok(plan.filter(|plan| !(plan.sends.is_empty() && plan.receives.is_empty())))
}

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
trait PaddingOf<const N: usize> {
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

macro_rules! conv_layer {
    ($module:ident, $d:literal, $n:literal, $array:expr) => {
        impl Options<$d, $n> for $module {
            type Of = ConvOptions<$n>;

            fn options(&self, dims: [usize; $d]) -> ConvOptions<$n> {
                let (stride, dilation) = ($array(self.stride), $array(self.dilation));
                let padding = self
                    .padding
                    .padding(&dims[2..], $array(self.kernel_size), stride);
                ConvOptions {
                    stride,
                    dilation,
                    padding,
                    groups: self.groups,
                    activation: None,
                }
            }
        }

        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            fn forward(&self, x: X) -> X {
                let options = self.options(x.global_dims());
                x.conv(
                    self.weight.val(),
                    self.bias.as_ref().map(Param::val),
                    &options,
                )
            }
        }

        impl Planned<$d> for $module {
            fn exchange_plan(&self, x: &ShardTensor<$d>) -> Result<Option<Arc<ExchangePlan>>> {
                let options = self.options(x.dims());
                plan(&options.stencil(&self.weight.dims(), x.dims()[1])?, x)
            }
        }
    };
}

/// The options of a module, which may depend on the field's size.
trait Options<const D: usize, const N: usize> {
    type Of;

    fn options(&self, dims: [usize; D]) -> Self::Of;
}

conv_layer!(Conv1d, 3, 1, |x| [x]);
conv_layer!(Conv2d, 4, 2, |x| x);
conv_layer!(Conv3d, 5, 3, |x| x);

macro_rules! pool_layer {
    ($module:ident, $d:literal, $n:literal, $array:expr, $method:ident, $name:literal, $fill:expr, $finish:expr) => {
        impl Options<$d, $n> for $module {
            type Of = PoolOptions<$n>;

            fn options(&self, dims: [usize; $d]) -> PoolOptions<$n> {
                let (kernel, stride) = ($array(self.kernel_size), $array(self.stride));
                let rounding = if self.ceil_mode {
                    Rounding::Ceil
                } else {
                    Rounding::Floor
                };
                let options = PoolOptions::new(kernel)
                    .with_stride(stride)
                    .with_padding(self.padding.padding(&dims[2..], kernel, stride))
                    .with_rounding(rounding);
                $finish(self, options)
            }
        }

        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            fn forward(&self, x: X) -> X {
                let options = self.options(x.global_dims());
                x.$method(&options)
            }
        }

        impl Planned<$d> for $module {
            fn exchange_plan(&self, x: &ShardTensor<$d>) -> Result<Option<Arc<ExchangePlan>>> {
                plan(&self.options(x.dims()).stencil($name, $fill), x)
            }
        }
    };
}

fn count(included: bool) -> PaddingCount {
    if included {
        PaddingCount::Included
    } else {
        PaddingCount::Excluded
    }
}

pool_layer!(
    MaxPool1d,
    3,
    1,
    |x| [x],
    max_pool,
    "max_pool1d",
    f64::NEG_INFINITY,
    |pool: &MaxPool1d, o: PoolOptions<1>| o.with_dilation([pool.dilation])
);
pool_layer!(
    MaxPool2d,
    4,
    2,
    |x| x,
    max_pool,
    "max_pool2d",
    f64::NEG_INFINITY,
    |pool: &MaxPool2d, o: PoolOptions<2>| o.with_dilation(pool.dilation)
);
pool_layer!(
    AvgPool1d,
    3,
    1,
    |x| [x],
    avg_pool,
    "avg_pool1d",
    0.0,
    |pool: &AvgPool1d, o: PoolOptions<1>| o.with_count(count(pool.count_include_pad))
);
pool_layer!(
    AvgPool2d,
    4,
    2,
    |x| x,
    avg_pool,
    "avg_pool2d",
    0.0,
    |pool: &AvgPool2d, o: PoolOptions<2>| o.with_count(count(pool.count_include_pad))
);

macro_rules! linear_layer {
    ($($d:literal)*) => {$(
        impl Layer<ShardTensor<$d>> for Linear {
            type Output = ShardTensor<$d>;

            fn forward(&self, x: ShardTensor<$d>) -> ShardTensor<$d> {
                x.linear(self.weight.val(), self.bias.as_ref().map(Param::val))
            }
        }

        impl Layer<Tensor<$d>> for Linear {
            type Output = Tensor<$d>;

            fn forward(&self, x: Tensor<$d>) -> Tensor<$d> {
                Field::linear(x, self.weight.val(), self.bias.as_ref().map(Param::val))
            }
        }
    )*};
}

linear_layer!(1 2 3 4 5);

macro_rules! activation_layer {
    ($($module:ty: $f:expr;)*) => {$(
        impl<const D: usize> Layer<Tensor<D>> for $module {
            type Output = Tensor<D>;

            fn forward(&self, x: Tensor<D>) -> Tensor<D> {
                $f(self, x)
            }
        }

        impl<const D: usize> Layer<ShardTensor<D>> for $module {
            type Output = ShardTensor<D>;

            fn forward(&self, x: ShardTensor<D>) -> ShardTensor<D> {
                $f(self, x)
            }
        }
    )*};
}

activation_layer! {
    Relu: |_, x| Field::relu(x);
    Gelu: |gelu: &Gelu, x| if gelu.approximate { Field::gelu_approximate(x) } else { Field::gelu(x) };
    SiLU: |_, x| Field::silu(x);
    Sigmoid: |_, x| Field::sigmoid(x);
    Tanh: |_, x| Field::tanh(x);
    LeakyRelu: |leaky: &LeakyRelu, x| Field::leaky_relu(x, leaky.negative_slope);
}

macro_rules! norm_layer {
    ($($module:ident: $groups:ident, $tensor:ident;)*) => {$(
        impl<const D: usize> Layer<$tensor<D>> for $module {
            type Output = $tensor<D>;

            fn forward(&self, x: $tensor<D>) -> $tensor<D> {
                let channels = x.global_dims()[1];
                assert_eq!(channels, self.num_channels, "channels of a tensor {:?}", x.global_dims());
                let parameter = |of: &Option<Param<Tensor<1>>>| of.as_ref().map(Param::val);
                let (weight, bias) = (parameter(&self.gamma), parameter(&self.beta));
                x.group_norm(self.$groups, weight, bias, self.epsilon)
            }
        }
    )*};
}

norm_layer! {
    GroupNorm: num_groups, Tensor;
    GroupNorm: num_groups, ShardTensor;
    InstanceNorm: num_channels, Tensor;
    InstanceNorm: num_channels, ShardTensor;
}
