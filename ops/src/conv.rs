//! Convolution in one to three spatial dims.
//!
//! `y[b, o, i] = bias[o] + Σ_{c, k} weight[o, c, k] · x[b, c, i·stride − low + k·dilation]`, where cells beyond the
//! field are what the padding's boundary says. Semantics follow PyTorch's `conv{1,2,3}d`, which is a cross-correlation.
//!
//! # Shapes
//! Global `x` is `[batch, channels_in, *spatial]`, `weight` `[channels_out, channels_in / groups, *kernel]`, `y`
//! `[batch, channels_out, *outputs]` with the floor rule of [`Window::output_size`](crate::Window::output_size). A
//! window's output lies with the rank that holds the window's middle cell.
//!
//! # Placement
//! Batch and spatial dims may be sharded, in any combination; channels must be whole, values resolved.
//!
//! # Adjoint
//! Gradients of halo cells travel back to the cells that they are copies of and add up there. Gradients of weight and
//! bias are summed over all ranks between which `x` is sharded.

use burn::tensor::{Tensor, module};
use halocline_core::{Error, Result, ShardTensor, ops::fan_out};

use crate::retype;
use crate::stencil::{KernelPadding, Padding, Rounding, Stencil, Window};

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
    /// Cells from one window to the next.
    pub stride: [usize; N],
    /// Cells from one kernel element to the next.
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
    /// These options with another stride.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        Self { stride, ..self }
    }

    /// These options with another dilation.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        Self { dilation, ..self }
    }

    /// These options with another padding.
    #[must_use]
    pub fn with_padding(self, padding: [Padding; N]) -> Self {
        Self { padding, ..self }
    }

    /// These options with another number of groups.
    #[must_use]
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    pub(crate) fn stencil(&self, weight: &[usize]) -> Stencil {
        let windows = (0..N).map(|dim| Window {
            kernel: weight[dim + 2],
            stride: self.stride[dim],
            dilation: self.dilation[dim],
            padding: self.padding[dim],
            rounding: Rounding::Floor,
        });
        Stencil {
            operator: ["conv1d", "conv2d", "conv3d"][N - 1],
            windows: windows.collect(),
            // burn pads three spatial dims on both sides alike only.
            kernel_padding: if N == 3 { KernelPadding::Symmetric } else { KernelPadding::AnySides },
            channels: Some(weight[0]),
            fill: 0.0_f64.to_bits(),
        }
    }
}

/// The convolution of a sharded field with weights that every rank holds alike.
///
/// # Errors
/// A placement without a rule, shapes that do not fit, a failure of communication.
pub(crate) fn conv<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    let shape = weight.dims();
    let stencil = options.stencil(&shape);
    let channels = x.dims()[1];
    if shape[1] * options.groups != channels || !shape[0].is_multiple_of(options.groups) {
        return Err(Error::operator(
            stencil.operator,
            format!(
                "weight {shape:?} with {} groups on {channels} channels; expected [groups·n, channels / groups, *kernel]",
                options.groups
            ),
        ));
    }
    stencil.plan(&x)?;
    let axes = crate::sharded_axes(&x);
    let weight = fan_out(weight, x.mesh(), &axes, stencil.operator);
    let bias = bias.map(|bias| fan_out(bias, x.mesh(), &axes, stencil.operator));
    stencil.run(x, |x, plan| local(x, weight, bias, options, &plan.kernel_padding))
}

fn local<const D: usize, const N: usize>(
    x: Tensor<D>,
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    options: &ConvOptions<N>,
    padding: &[(usize, usize)],
) -> Tensor<D> {
    macro_rules! call {
        ($conv:ident, $n:literal) => {{
            let take = |all: [usize; N]| std::array::from_fn::<usize, $n, _>(|dim| all[dim]);
            let options = burn::tensor::ops::ConvOptions::new_with_padding(
                take(options.stride),
                std::array::from_fn(|dim| padding[dim]),
                take(options.dilation),
                options.groups,
            );
            retype(module::$conv(retype(x), retype(weight), bias, options))
        }};
    }
    match N {
        1 => call!(conv1d, 1),
        2 => call!(conv2d, 2),
        3 => call!(conv3d, 3),
        _ => unreachable!("a stencil of {N} dims has been refused"),
    }
}
