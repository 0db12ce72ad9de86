//! Transposed convolution in one to three spatial dims: the adjoint of a convolution, as a map of
//! its own.
//!
//! `y[b, o, j] = bias[o] + Σ_{c, k, i} weight[c, o, k] · x[b, c,
//! i]` over the `i`, `k` with `i·stride − padding + k·dilation =
//! j`. Semantics follow PyTorch's `conv_transpose{1,2,3}d`. In addition, dims may be periodic: there
//! `n` cells become `n·stride` outputs, the equation holds modulo their number, and the operator is
//! the adjoint of the convolution with the same stride, dilation and periodic padding.
//!
//! # Shapes
//! Global `x` is `[batch, channels_in, *spatial]`, `weight`
//! `[channels_in, channels_out / groups, *kernel]`; a dim of `n` cells becomes one of `(n −
//! 1)·stride − 2·padding + (kernel − 1)·dilation + output_padding + 1`, or, if it is periodic, of
//! `n·stride`. An output belongs to the rank that holds the input cell whose window has that output
//! in its middle.
//!
//! # Placement
//! Batch and spatial dims may be sharded, in any combination; values must be resolved. Channels are
//! whole, or sharded together with the weight: a weight sharded in output channels yields a result
//! that is sharded in them, a weight and `x` sharded in input channels yield a partial result, and
//! whole groups stay on their rank, where the weight may be replicated.
//!
//! # Communication
//! Where windows cross shards, each rank sends its contributions to outputs of other ranks; the
//! backward pass sends the cotangents of these outputs. The node runs the passes of a convolution
//! in the opposite order, with its kernels, and its exchange in reverse.
//!
//! # Adjoint
//! The convolution of the cotangent. The gradients of weight and bias are summed over all ranks
//! between which `x` is sharded.

mod layer;
mod node;

use std::sync::Arc;

use halocline_core::ops::{Exchange, fan_out};
use halocline_core::{Boundary, DeviceMesh, Error, Layout, Result, ShardTensor};

use super::channels::{Weight, held_groups, parameters};
use super::check;
use super::engine::geometry::{Conv, three};
use super::run::ConvRun;
use crate::driver::place::extents_by;
use crate::driver::{Padding, Reach, Reaches, StencilPlan, Window};
use crate::field::{Field, run};
use crate::golden::{Case, Dims, Golden, Output, output};
use crate::operand::Operand;
use node::Transposed;

/// Stride, dilation, padding and groups of a transposed convolution over `N` spatial dims, defined
/// as those of the convolution whose adjoint it is.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::ConvTransposeOptions;
///
/// // Twice the resolution, exactly.
/// let options = ConvTransposeOptions::default().with_stride([2, 2]).with_padding([1, 1]);
/// assert_eq!(options.output_padding, [0, 0]);
/// // The same without a seam in longitude: the adjoint of a convolution with periodic padding.
/// let options = options.with_boundary([Boundary::Zeros, Boundary::Periodic]);
/// assert_eq!(options.boundary[1], Boundary::Periodic);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvTransposeOptions<const N: usize> {
    /// Distance between windows, in cells.
    pub stride: [usize; N],
    /// Distance between kernel elements, in cells.
    pub dilation: [usize; N],
    /// Number of outputs dropped on each side; in a periodic dim, where none is dropped, distance of
    /// the first window from the first output.
    pub padding: [usize; N],
    /// Number of additional outputs after the last window; zero in a periodic dim.
    pub output_padding: [usize; N],
    /// Boundary per dim: [`Zeros`](Boundary::Zeros) drops the parts of windows beyond an end,
    /// [`Periodic`](Boundary::Periodic) adds them at the other end.
    pub boundary: [Boundary; N],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl<const N: usize> Default for ConvTransposeOptions<N> {
    /// Stride and dilation one, no padding, no periodic dims, one group.
    fn default() -> Self {
        Self {
            stride: [1; N],
            dilation: [1; N],
            padding: [0; N],
            output_padding: [0; N],
            boundary: [Boundary::Zeros; N],
            groups: 1,
        }
    }
}

impl<const N: usize> ConvTransposeOptions<N> {
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
    pub fn with_padding(self, padding: [usize; N]) -> Self {
        Self { padding, ..self }
    }

    /// Sets the number of additional outputs after the last window.
    #[must_use]
    pub fn with_output_padding(self, output_padding: [usize; N]) -> Self {
        Self {
            output_padding,
            ..self
        }
    }

    /// Sets the boundaries.
    #[must_use]
    pub fn with_boundary(self, boundary: [Boundary; N]) -> Self {
        Self { boundary, ..self }
    }

    /// Sets the number of groups.
    #[must_use]
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Windows of the convolution whose adjoint it is, for options with an
    /// [output size](Self::output_size).
    fn windows(&self, kernel: &[usize]) -> Vec<Window> {
        let window = |dim: usize| {
            let (low, boundary) = (self.padding[dim], self.boundary[dim]);
            let window = Window {
                stride: self.stride[dim],
                dilation: self.dilation[dim],
                ..Window::new(kernel[dim])
            };
            let high = match boundary {
                // As far as the last window reaches.
                Boundary::Periodic => window.span().saturating_sub(window.stride + low),
                _ => low,
            };
            window.with_padding(Padding::zeros(low, high).with_boundary(boundary))
        };
        (0..N).map(window).collect()
    }

    /// Number of outputs of a dim of `size` cells.
    fn output_size(
        &self,
        operator: &str,
        spatial: usize,
        size: usize,
        kernel: usize,
    ) -> Result<usize> {
        let [stride, dilation] = [self.stride[spatial], self.dilation[spatial]];
        let [padding, more] = [self.padding[spatial], self.output_padding[spatial]];
        let fail = |message: String| {
            let message = format!("dim {}: {message}", spatial + 2);
            Err(Error::operator(operator, message))
        };
        if stride == 0 || dilation == 0 || kernel == 0 || size == 0 {
            return fail(format!(
                "{size} cells, kernel {kernel}, stride {stride}, dilation {dilation}; expected none to be zero"
            ));
        }
        let boundary = self.boundary[spatial];
        if !matches!(boundary, Boundary::Zeros | Boundary::Periodic) {
            return fail(format!("boundary {boundary:?}; expected Zeros or Periodic"));
        }
        let around = boundary == Boundary::Periodic;
        if around && more > 0 {
            return fail(format!(
                "output padding {more} of a periodic dim; expected zero, because {size} cells become {size} · {stride} outputs"
            ));
        }
        if more >= stride.max(dilation) {
            return fail(format!(
                "output padding {more}; expected less than the stride {stride} or the dilation {dilation}"
            ));
        }
        let count = |number: usize| number as u128;
        let along = |cells: usize, step: usize| (count(cells) - 1) * count(step);
        let reach = along(size, stride).saturating_add(along(kernel, dilation));
        let ring = if around {
            count(size).saturating_mul(count(stride))
        } else {
            0
        };
        let most = reach.saturating_add(count(more) + 1).max(ring);
        let all = match isize::try_from(most) {
            Ok(all) if padding <= isize::MAX as usize / 2 => all.unsigned_abs(),
            _ => {
                return fail(format!(
                    "{most} outputs, padding {padding}, more than {} cells",
                    isize::MAX
                ));
            }
        };
        if around {
            return Ok(size * stride);
        }
        match all.checked_sub(2 * padding) {
            Some(outputs) if outputs > 0 => Ok(outputs),
            _ => fail(format!(
                "padding {padding} on both sides leaves nothing of {all} outputs"
            )),
        }
    }
}

/// Exchange of the convolution, which is the backward pass of an operator on this layout.
pub(super) fn exchange(
    plan: &StencilPlan,
    operator: &'static str,
    layout: &Layout,
    mesh: &DeviceMesh,
) -> Option<Exchange> {
    let exchange = plan.exchange(operator, layout, mesh)?;
    Some(Exchange {
        operation: exchange.operation.backward(),
        ..exchange
    })
}

/// Convolves a sharded field with the transpose of a kernel. See the [module](self).
///
/// # Errors
/// A placement without a rule, shapes that do not fit, a boundary other than zeros and periodic, a
/// failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::ConvTransposeOptions;
/// use halocline_ops::conv::conv_transpose;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let x = ShardTensor::<3>::ones([1, 1, 3], &mesh, &[Shard(2)])?;
///     let weight = Tensor::<3>::ones([1, 1, 3], world.device());
///     let options = ConvTransposeOptions::default().with_stride([2]);
///     let y = conv_transpose(x, weight, None, &options)?.full_tensor();
///     y.into_data().assert_eq(&[[[1.0_f32, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0]]].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn conv_transpose<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<D>>,
    bias: Option<Operand<1>>,
    options: &ConvTransposeOptions<N>,
) -> Result<ShardTensor<D>> {
    let weight = weight.into();
    let shape = weight.dims();
    if D != N + 2 || !(1..=3).contains(&N) {
        let message = format!(
            "options of {N} dims for a tensor {:?}; expected [batch, channels, *spatial]",
            x.dims()
        );
        return Err(Error::operator("conv_transpose", message));
    }
    let operator = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"][N - 1];
    let (groups, inputs) = (options.groups, x.dims()[1]);
    if shape[0] != inputs || groups == 0 || !inputs.is_multiple_of(groups) || shape.contains(&0) {
        let message = format!(
            "weight {shape:?} with {groups} groups on {inputs} channels; expected [channels, n / groups, *kernel]"
        );
        return Err(Error::operator(operator, message));
    }
    let outputs = shape[1] * groups;
    check(operator, bias.as_ref(), outputs)?;
    x.require_resolved(operator)?;
    let (weight, bias, channels) =
        parameters(operator, &x, weight, bias, groups, Weight::Transposed)?;
    let plan = plan(operator, options, &shape[2..], channels.layout.clone(), &x)?;
    let groups = held_groups(&x, groups);
    let (weight, bias) = channels.fanned_out(weight, bias, &x, operator)?;
    let mesh = x.mesh().clone();
    let held = x.local_dims().to_vec();
    let (local, layout, _) = x.into_parts();
    let axes = channels.pairing.fan_out(0);
    let local = Error::catch(|| fan_out(local, &mesh, axes, operator))?;
    let [of_inputs, of_outputs] = [weight.dims()[0], weight.dims()[1]];
    let conv = ConvRun {
        conv: Conv {
            groups,
            inputs: of_outputs,
            outputs: of_inputs / groups,
            kernel: three(&shape[2..]),
            stride: three(&options.stride),
            dilation: three(&options.dilation),
        },
        fields: 1,
        exchange: exchange(&plan, operator, &layout, &mesh),
        output: held,
    };
    let node = Transposed {
        conv,
        result: plan.output.local_shape(mesh.position()),
    };
    let y = Error::catch(|| node.apply(local, weight, bias))?;
    Ok(ShardTensor::from_parts(y, plan.output.clone(), mesh))
}

/// Plan for this rank's position, for a result with the placements and channels of `like`. Its
/// exchange is that of the convolution, from the outputs.
pub(super) fn plan<const D: usize, const N: usize>(
    operator: &'static str,
    options: &ConvTransposeOptions<N>,
    kernel: &[usize],
    like: Layout,
    x: &ShardTensor<D>,
) -> Result<Arc<StencilPlan>> {
    let (mesh, layout) = (x.mesh(), x.layout().clone());
    let key = (operator, *options, kernel.to_vec(), like, layout);
    mesh.cache().get_or_make(key, |key| {
        let (operator, options, kernel, like, layout) = key;
        make(operator, options, kernel, like, layout, mesh)
    })
}

fn make<const N: usize>(
    operator: &'static str,
    options: &ConvTransposeOptions<N>,
    kernel: &[usize],
    like: &Layout,
    layout: &Layout,
    mesh: &DeviceMesh,
) -> Result<StencilPlan> {
    let sizes = kernel.iter().zip(&layout.shape()[2..]).enumerate();
    let sizes = sizes
        .map(|(spatial, (kernel, size))| options.output_size(operator, spatial, *size, *kernel));
    let sizes: Vec<usize> = sizes.collect::<Result<_>>()?;
    let windows = options.windows(kernel);
    let mut extents = like.all_extents().to_vec();
    for ((dim, window), outputs) in (2..).zip(&windows).zip(sizes) {
        extents[dim] = output_extents(window, layout.extents(dim), outputs);
    }
    let output = like.derive(like.placements().to_vec(), extents);
    let reaches: Vec<Reach> = windows.into_iter().map(Reach::from).collect();
    let reaches = Reaches {
        operator,
        first: 2,
        dims: &reaches,
    };
    // Both sides have the channels of the outputs.
    let exchange = reaches.between(&output, like, mesh, 0.0);
    Ok(StencilPlan { output, exchange })
}

/// Extents of the outputs: an output belongs to the part of the window that has it in its middle.
fn output_extents(window: &Window, extents: &[usize], outputs: usize) -> Vec<usize> {
    let size: usize = extents.iter().sum();
    let middle = (window.span() - 1) / 2;
    extents_by(extents, |cell| match cell {
        0 => 0,
        cell if cell == size => outputs,
        cell => (cell * window.stride + middle)
            .saturating_sub(window.padding.low)
            .min(outputs),
    })
}

/// Transposed convolution as a method.
pub trait ConvTransposeField<const D: usize>: Field<D> {
    /// Transposed convolution. See [`conv_transpose`](fn@conv_transpose).
    ///
    /// # Panics
    /// Panics where [`conv_transpose`](fn@conv_transpose) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{ConvTransposeField, ConvTransposeOptions};
    ///
    /// let x = Tensor::<3>::from([[[1.0, 2.0]]]);
    /// let weight = Tensor::<3>::from([[[1.0, 10.0]]]);
    /// let y = x.conv_transpose(weight, None, &ConvTransposeOptions::<1>::default().with_stride([2]));
    /// y.into_data().assert_eq(&[[[1.0_f32, 10.0, 2.0, 20.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn conv_transpose<const N: usize>(
        self,
        weight: impl Into<Operand<D>>,
        bias: Option<Operand<1>>,
        options: &ConvTransposeOptions<N>,
    ) -> Self {
        run(self, |x| conv_transpose(x, weight, bias, options))
    }
}

impl<const D: usize, X: Field<D>> ConvTransposeField<D> for X {}

/// Registry entries of the transposed convolutions.
pub(super) const GOLDEN: [Golden; 3] = [
    Golden::new("conv_transpose1d", run_case::<3, 1>)
        .with_sharded(Dims::AllButChannels)
        .with_travels(TRAVELS)
        .with_modules("`ConvTranspose1d`"),
    Golden::new("conv_transpose2d", run_case::<4, 2>)
        .with_sharded(Dims::AllButChannels)
        .with_travels(TRAVELS)
        .with_modules("`ConvTranspose2d`"),
    Golden::new("conv_transpose3d", run_case::<5, 3>)
        .with_sharded(Dims::AllButChannels)
        .with_travels(TRAVELS)
        .with_modules("`ConvTranspose3d`"),
];

/// Data sent in the forward and in the backward pass.
const TRAVELS: [&str; 2] = [
    "parts of outputs whose windows cross shards",
    "their cotangents; sums of weights' gradients",
];

fn run_case<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let attributes = &case.attributes;
    let options = ConvTransposeOptions::<N>::default()
        .with_stride(attributes.array("stride", 1))
        .with_dilation(attributes.array("dilation", 1))
        .with_padding(attributes.array("padding", 0))
        .with_output_padding(attributes.array("output_padding", 0))
        .with_boundary([attributes.boundary("padding_mode"); N])
        .with_groups(attributes.number("groups").unwrap_or(1.0) as usize);
    let weight = case.needed::<D>("weight")?;
    output(conv_transpose(
        case.input::<D>(0)?,
        weight,
        case.operand("bias"),
        &options,
    ))
}

#[cfg(test)]
mod tests;
