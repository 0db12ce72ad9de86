//! Unfold and fold: windows of a convolution as channels, and their sum.
//!
//! `unfold` computes `y[b, c·K + k, i] = x[b, c, i·stride − low + k·dilation]` for the `K` elements
//! `k` of a window; `fold` adds up the cells of all windows at their positions in the field.
//! Semantics follow PyTorch's `unfold` and `fold`, except that windows keep spatial dims of their
//! own instead of sharing one; `flatten` merges them.
//!
//! # Placement
//! All dims may be sharded, channels of windows in multiples of the window's cells; values must be
//! resolved. A window belongs to the rank that holds its middle cell.
//!
//! # Communication
//! `unfold` exchanges halos where windows cross shards, and sends their gradients back. `fold`
//! sends the contributions of windows that cross shards.
//!
//! # Adjoint
//! Each is the adjoint of the other.

use burn::nn::Unfold4d;
use burn::tensor::Tensor;
use halocline_core::ops::apply;
use halocline_core::{Error, Result, ShardTensor};

use super::ConvOptions;
use super::patches::{Patches, Way};
use crate::driver::{Padding, Stencil};
use crate::field::{Field, WithDims, run};
use crate::golden::{Case, Golden, output};
use crate::layer::Layer;
use crate::rearrange::flatten;

/// Gathers the cells of windows as channels. See the [module](self).
///
/// # Shapes
/// `[batch, channels, *spatial]` to `[batch, channels · K, *windows]`.
///
/// # Errors
/// A wrong number of dims, groups, a window that fits nowhere, partial values, a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::ConvOptions;
/// use halocline_ops::conv::unfold;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 2, 6, 5], &mesh, &[Shard(2)])?;
///     let patches = unfold(x, [3, 1], &ConvOptions::default().with_stride([3, 1]))?;
///     assert_eq!(patches.dims(), [1, 6, 2, 5]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn unfold<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    kernel: [usize; N],
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "unfold";
    check(NAME, &x, options)?;
    let windows = options.windows(&kernel);
    let count: usize = kernel.iter().product();
    let channels = x.layout().extents(1).iter();
    let channels = channels.map(|channels| channels * count);
    let stencil = Stencil::new(NAME, windows.clone());
    let stencil = stencil.with_channels_on(x.placements().to_vec(), channels.collect());
    stencil.run(x, move |x, _| {
        let patches = Patches {
            way: Way::Gather,
            windows: windows.clone(),
            shape: x.dims().to_vec(),
        };
        Tensor::from_dispatch(apply(patches, [x.into_dispatch()]))
    })
}

pub(super) fn check<const D: usize, const N: usize>(
    operator: &str,
    x: &ShardTensor<D>,
    options: &ConvOptions<N>,
) -> Result<()> {
    x.require_resolved(operator)?;
    if D != N + 2 || options.groups != 1 {
        let message = format!(
            "{options:?} for a tensor {:?}; expected [batch, channels, *spatial], and no groups",
            x.dims()
        );
        return Err(Error::operator(operator, message));
    }
    Ok(())
}

/// Converts the options of burn's modules.
pub(super) fn options(
    stride: [usize; 2],
    dilation: [usize; 2],
    padding: [usize; 2],
) -> ConvOptions<2> {
    ConvOptions::default()
        .with_stride(stride)
        .with_dilation(dilation)
        .with_padding(padding.map(|width| Padding::zeros(width, width)))
}

impl<X: Field<4>> Layer<X> for Unfold4d {
    type Output = WithDims<X, 3>;

    #[track_caller]
    fn forward(&self, x: X) -> WithDims<X, 3> {
        let options = options(self.stride, self.dilation, self.padding);
        run(x, |x| {
            flatten::<4, 3, _>(unfold(x, self.kernel_size, &options)?, 2, 3)
        })
    }
}

/// Registry entry of unfold.
pub(super) const GOLDEN: Golden = Golden::new("unfold", |case| {
    output(unfold(
        case.input::<4>(0)?,
        case.attributes.array("kernel_size", 1),
        &of_case(case),
    ))
})
.with_method("unfold_windows")
.with_travels(["halos", "halos back"])
.with_modules("`Unfold4d`");

pub(super) fn of_case(case: &Case) -> ConvOptions<2> {
    let attributes = &case.attributes;
    let [stride, dilation] = ["stride", "dilation"].map(|key| attributes.array(key, 1));
    options(stride, dilation, attributes.array("padding", 0))
}

#[cfg(test)]
mod tests {
    use burn::nn::{Fold4dConfig, Unfold4dConfig};

    use super::*;
    use crate::conv::fold;
    use crate::prelude::*;
    use crate::testing::{difference, random};

    #[test]
    fn burns_modules_give_what_they_give_there() {
        let x = random([2, 3, 6, 7], "x", 0).inner();
        let layer = Unfold4dConfig::new([3, 2])
            .with_stride([1, 2])
            .with_padding([1, 0])
            .init();
        let windows = x.clone().apply(&layer);
        assert!(difference(&windows.to_data(), &layer.forward(x).into_data()) < 1e-6);
        let layer = Fold4dConfig::new([6, 7], [3, 2])
            .with_stride([1, 2])
            .with_padding([1, 0])
            .init();
        let ours = windows.clone().apply(&layer).into_data();
        assert!(difference(&ours, &layer.forward(windows).into_data()) < 1e-6);
    }

    #[test]
    fn what_is_no_number_stays_in_its_cell() {
        let windows = [[1.0, f32::NAN], [10.0, f32::INFINITY]];
        let windows = ShardTensor::solo(Tensor::<3>::from([windows]));
        let y = fold(windows, [3], [2], &ConvOptions::default()).unwrap();
        let y: Vec<f32> = y.local().to_data().iter::<f32>().collect();
        assert!(
            y[0] == 1.0 && y[1].is_nan() && y[2] == f32::INFINITY,
            "{y:?}"
        );
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<3>::ones([1, 3, 4], &Default::default()));
        let error = fold(x.clone(), [5], [2], &ConvOptions::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("[3] channels for windows of [2]"), "{error}");
        let error = fold(x, [8], [3], &ConvOptions::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("4 windows for 8 cells; expected 6"),
            "{error}"
        );
    }
}
