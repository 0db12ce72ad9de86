//! Convolution in one to three spatial dims.
//!
//! `y[b, o, i] = bias[o] + Σ_{c, k} weight[o, c, k] · x[b, c, i·stride − low + k·dilation]`, where
//! the padding's boundary defines the cells beyond the field. Semantics follow PyTorch's
//! `conv{1,2,3}d`, which is a cross-correlation.
//!
//! # Shapes
//! Global `x` is `[batch, channels_in, *spatial]`, `weight`
//! `[channels_out, channels_in / groups, *kernel]`, `y` `[batch, channels_out, *outputs]` with the
//! floor rule of [`Window::output_size`](crate::Window::output_size). An output belongs to the rank
//! that holds the middle cell of its window.
//!
//! # Placement
//! Batch and spatial dims may be sharded, in any combination; values must be resolved. Channels are
//! whole, or sharded together with the weight: a weight sharded in output channels yields a result
//! that is sharded in them, a weight and `x` sharded in input channels yield a partial result, and
//! whole groups stay on their rank, where the weight may be replicated.
//!
//! # Adjoint
//! The gradient of a halo cell is added to that of the owner's cell. Gradients of weight and bias
//! are summed over all ranks between which `x` is sharded.

mod assembled;
mod channels;
mod engine;
mod fold;
mod golden;
mod groups;
mod kernels;
mod layer;
mod node;
mod patches;
mod periodic;
mod run;
#[cfg(test)]
mod sharded;
#[cfg(test)]
mod tests;
pub mod transposed;
pub mod unfold;

pub use fold::fold;
pub use transposed::{ConvTransposeField, ConvTransposeOptions, conv_transpose};
pub use unfold::unfold;

use burn::module::Param;
use burn::tensor::Tensor;
use halocline_core::{Error, Layout, OrRaise, Result, ShardTensor};

use crate::driver::{Padding, Stencil, StencilPlan, Window};
use crate::field::{Field, run};
use crate::kernel::simd::Isa;
use crate::operand::Operand;
use crate::rearrange::{cat, joined};
use engine::geometry::{Conv, three};
use engine::method::Method;
pub(crate) use golden::OPERATORS;
use run::ConvRun;

/// Stride, dilation, padding and groups of a convolution over `N` spatial dims.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::{ConvOptions, Padding};
///
/// // The usual weather case: zeros beyond the poles, periodic in longitude.
/// let options = ConvOptions::default()
///     .with_padding([Padding::new(1, Boundary::Zeros), Padding::new(1, Boundary::Periodic)]);
/// assert_eq!(options.stride, [1, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvOptions<const N: usize> {
    /// Distance between windows, in cells.
    pub stride: [usize; N],
    /// Distance between kernel elements, in cells.
    pub dilation: [usize; N],
    /// Padding of every dim.
    pub padding: [Padding; N],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl<const N: usize> Default for ConvOptions<N> {
    /// Stride and dilation one, no padding, one group.
    fn default() -> Self {
        Self {
            stride: [1; N],
            dilation: [1; N],
            padding: [Padding::default(); N],
            groups: 1,
        }
    }
}

impl<const N: usize> ConvOptions<N> {
    /// Sets the stride.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        Self { stride, ..self }
    }

    /// Sets the dilation.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        Self { dilation, ..self }
    }

    /// Sets the padding.
    #[must_use]
    pub fn with_padding(self, padding: [Padding; N]) -> Self {
        Self { padding, ..self }
    }

    /// Sets the number of groups.
    #[must_use]
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Stencil of a weight with this shape on a field with this number of channels.
    ///
    /// # Errors
    /// A weight for another number of channels.
    pub(crate) fn stencil(&self, weight: &[usize], channels: usize) -> Result<Stencil> {
        let operator = ["conv1d", "conv2d", "conv3d"][N - 1];
        let fits = weight[1] * self.groups == channels && weight[0].is_multiple_of(self.groups);
        if !fits || weight.contains(&0) {
            let message = format!(
                "weight {weight:?} with {} groups on {channels} channels; expected [groups·n, channels / groups, *kernel]",
                self.groups
            );
            return Err(Error::operator(operator, message));
        }
        let windows = self.windows(&weight[2..]);
        Ok(Stencil::new(operator, windows).with_channels(weight[0]))
    }

    /// Windows of a kernel of this size.
    fn windows(&self, kernel: &[usize]) -> Vec<Window> {
        let window = |dim: usize| Window {
            stride: self.stride[dim],
            dilation: self.dilation[dim],
            padding: self.padding[dim],
            ..Window::new(kernel[dim])
        };
        (0..N).map(window).collect()
    }
}

/// Convolves a sharded field with weights that are whole on every rank, or sharded in channels. See
/// the [module](self).
///
/// # Errors
/// A placement without a rule, shapes that do not fit, a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Boundary, Launcher, Shard, ShardTensor};
/// use halocline_ops::conv::conv;
/// use halocline_ops::{ConvOptions, Padding};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let x = ShardTensor::<3>::ones([1, 1, 5], &mesh, &[Shard(2)])?;
///     let weight = Tensor::<3>::ones([1, 1, 3], world.device());
///     let options = ConvOptions::default().with_padding([Padding::new(1, Boundary::Periodic)]);
///     let y = conv(x, weight, None, &options)?.full_tensor();
///     y.into_data().assert_eq(&[[[3.0_f32; 5]]].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn conv<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<D>>,
    bias: Option<Operand<1>>,
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    conv_cat(vec![x], weight, bias, options)
}

/// Convolves the [concatenation](fn@crate::rearrange::cat) of fields along channels. On the CPU two
/// fields with whole channels are read in place, without building the concatenation. Of more
/// fields, all but the last are concatenated first.
///
/// # Errors
/// The errors of [`conv`]; no fields; layouts that differ in a dim other than channels.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::ConvOptions;
/// use halocline_ops::conv::conv_cat;
///
/// let field = |value| ShardTensor::solo(Tensor::<3>::from([[[value, value]]]));
/// let weight = Tensor::<3>::from([[[1.0], [10.0]]]);
/// let fields = vec![field(1.0), field(2.0)];
/// let y = conv_cat(fields, weight, None, &ConvOptions::<1>::default())?.into_local();
/// y.into_data().assert_eq(&[[[21.0_f32, 21.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn conv_cat<const D: usize, const N: usize>(
    mut fields: Vec<ShardTensor<D>>,
    weight: impl Into<Operand<D>>,
    bias: Option<Operand<1>>,
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    let weight = weight.into();
    let shape = weight.dims();
    let Some(first) = fields.first() else {
        return Err(Error::operator("conv", "no fields"));
    };
    if D != N + 2 || !(1..=3).contains(&N) {
        let message = format!(
            "options of {N} dims for a tensor {:?}; expected [batch, channels, *spatial]",
            first.dims()
        );
        return Err(Error::operator("conv", message));
    }
    let layout = joined("conv_cat", &fields, 1)?;
    let stencil = options.stencil(&shape, layout.shape()[1])?;
    check(stencil.operator(), bias.as_ref(), shape[0])?;
    if weight.is_sharded() || (options.groups > 1 && layout.is_sharded(1)) {
        return channels::conv(cat(fields, 1)?, weight, bias, options);
    }
    let operator = stencil.operator();
    let plan = stencil.plan_on(first, &layout)?;
    let tracked = fields.iter().find(|field| field.local().is_tracked());
    let beside = tracked.unwrap_or(first);
    let weight = weight.replicated_for(beside, operator)?;
    let bias = bias.map(|bias| bias.replicated_for(beside, operator));
    let bias = bias.transpose()?;
    if fields.len() > 2 {
        let last = fields.pop().expect("more than two");
        fields = vec![cat(fields, 1)?, last];
    }
    run_conv(
        (fields, layout),
        weight,
        bias,
        options,
        options.groups,
        operator,
        &plan,
    )
}

/// Checks the bias of a convolution with this number of output channels, and the settings of
/// kernels: an unknown one is an error before anything is sent.
fn check(operator: &str, bias: Option<&Operand<1>>, channels: usize) -> Result<()> {
    if let Some(bias) = bias
        && bias.dims() != [channels]
    {
        let message = format!("bias {:?} for {channels} channels", bias.dims());
        return Err(Error::operator(operator, message));
    }
    Isa::chosen()?;
    Method::chosen()?;
    Ok(())
}

/// Checks the shards of parameters for a field of this layout, before the field is made and
/// anything is sent.
pub(crate) fn check_channels(
    operator: &str,
    field: &Layout,
    weight: &Layout,
    bias: Option<&Layout>,
    groups: usize,
) -> Result<()> {
    let kind = channels::Weight::Direct;
    channels::checked_rule(operator, field, weight, bias, groups, kind).map(drop)
}

/// Convolves one field, or the concatenation of two along channels, with this rank's weights of
/// `groups` groups. `layout` is that of the concatenation.
fn run_conv<const D: usize, const N: usize>(
    (fields, layout): (Vec<ShardTensor<D>>, Layout),
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    options: &ConvOptions<N>,
    groups: usize,
    operator: &'static str,
    plan: &StencilPlan,
) -> Result<ShardTensor<D>> {
    let shape = weight.dims();
    let mesh = fields[0].mesh().clone();
    let locals: Vec<_> = fields.into_iter().map(ShardTensor::into_local).collect();
    let run = ConvRun {
        conv: Conv {
            groups,
            inputs: shape[1],
            outputs: shape[0] / groups,
            kernel: three(&shape[2..]),
            stride: three(&options.stride),
            dilation: three(&options.dilation),
        },
        fields: locals.len(),
        exchange: plan.exchange(operator, &layout, &mesh),
        output: plan.output.local_shape(mesh.position()),
    };
    let y = Error::catch(|| node::conv(locals, weight, bias, run))?;
    Ok(ShardTensor::from_parts(y, plan.output.clone(), mesh))
}

/// Convolution as a method.
pub trait ConvField<const D: usize>: Field<D> {
    /// Convolution. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`conv`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{ConvField, ConvOptions};
    ///
    /// let x = Tensor::<3>::from([[[1.0, 2.0, 4.0]]]);
    /// let weight = Tensor::<3>::from([[[-1.0, 1.0]]]);
    /// let y = x.conv(weight, None, &ConvOptions::<1>::default());
    /// y.into_data().assert_eq(&[[[1.0_f32, 2.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn conv<const N: usize>(
        self,
        weight: impl Into<Operand<D>>,
        bias: Option<Operand<1>>,
        options: &ConvOptions<N>,
    ) -> Self {
        run(self, |x| conv(x, weight, bias, options))
    }

    /// Gathers the cells of windows as channels. See [`unfold`](fn@unfold).
    ///
    /// # Panics
    /// Panics where [`unfold`](fn@unfold) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{ConvField, ConvOptions};
    ///
    /// let y = Tensor::<3>::from([[[1.0, 2.0, 3.0]]]).unfold_windows([2], &ConvOptions::default());
    /// y.into_data().assert_eq(&[[[1.0_f32, 2.0], [2.0, 3.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn unfold_windows<const N: usize>(self, kernel: [usize; N], options: &ConvOptions<N>) -> Self {
        run(self, |x| unfold(x, kernel, options))
    }

    /// Adds up windows of cells. See [`fold`](fn@fold).
    ///
    /// # Panics
    /// Panics where [`fold`](fn@fold) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{ConvField, ConvOptions};
    ///
    /// let x = Tensor::<3>::from([[[1.0, 2.0], [2.0, 3.0]]]);
    /// let y = x.fold_windows([3], [2], &ConvOptions::default());
    /// y.into_data().assert_eq(&[[[1.0_f32, 4.0, 3.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn fold_windows<const N: usize>(
        self,
        output_size: [usize; N],
        kernel: [usize; N],
        options: &ConvOptions<N>,
    ) -> Self {
        run(self, |x| fold(x, output_size, kernel, options))
    }

    /// Convolution with the parameters of a module, as its plan places them: for layers of models.
    /// If it sums over sharded input channels, the result is resolved and the bias added once.
    ///
    /// # Panics
    /// Panics where [`conv`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::nn::conv::Conv1dConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{ConvField, ConvOptions};
    ///
    /// let layer = Conv1dConfig::new(1, 2, 3).init(&Default::default());
    /// let x = Tensor::<3>::ones([1, 1, 5], &Default::default());
    /// let y = x.apply_conv(&layer.weight, &layer.bias, &ConvOptions::<1>::default());
    /// assert_eq!(y.dims(), [1, 2, 3]);
    /// ```
    #[must_use]
    #[track_caller]
    fn apply_conv<const N: usize>(
        self,
        weight: &Param<Tensor<D>>,
        bias: &Option<Param<Tensor<1>>>,
        options: &ConvOptions<N>,
    ) -> Self {
        run(self, |x| channels::apply(x, weight, bias, options))
    }

    /// [`apply_conv`](Self::apply_conv) on the concatenation of fields along channels. See
    /// [`conv_cat`].
    ///
    /// # Panics
    /// Panics where [`conv_cat`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::nn::conv::Conv1dConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{ConvField, ConvOptions};
    ///
    /// let layer = Conv1dConfig::new(3, 2, 3).init(&Default::default());
    /// let [skip, x] = [1, 2].map(|channels| Tensor::<3>::ones([1, channels, 5], &Default::default()));
    /// let options = ConvOptions::<1>::default();
    /// let y = ConvField::apply_conv_cat(vec![skip, x], &layer.weight, &layer.bias, &options);
    /// assert_eq!(y.dims(), [1, 2, 3]);
    /// ```
    #[must_use]
    #[track_caller]
    fn apply_conv_cat<const N: usize>(
        fields: Vec<Self>,
        weight: &Param<Tensor<D>>,
        bias: &Option<Param<Tensor<1>>>,
        options: &ConvOptions<N>,
    ) -> Self {
        let fields = fields.into_iter().map(Self::into_shard).collect();
        let y = channels::apply_cat(fields, weight, bias, options);
        Self::from_shard(y.or_raise())
    }
}

impl<const D: usize, X: Field<D>> ConvField<D> for X {}
