//! Fold: adds up windows of cells. It is the adjoint of `unfold`; see its page.

use burn::nn::Fold4d;
use burn::tensor::Tensor;
use halocline_core::ops::{self, apply};
use halocline_core::{Boundary, Error, Result, ShardTensor};

use super::ConvOptions;
use super::patches::{Patches, Way};
use super::transposed::{ConvTransposeOptions, exchange, plan};
use super::unfold::{check, of_case, options};
use crate::driver::empty::fill_all;
use crate::field::{Field, WithDims, run};
use crate::golden::{Dims, Golden, Output, output};
use crate::layer::Layer;
use crate::precision::{cast, cast_shard, wider};
use crate::rearrange::unflatten;

const NAME: &str = "fold";

/// Adds windows of cells up to a field of the given size. See the page of
/// [`unfold`](mod@super::unfold).
///
/// # Shapes
/// `[batch, channels · K, *windows]` to `[batch, channels, *output_size]`.
///
/// # Errors
/// A wrong number of dims; groups; channels, or extents of channels, that are not multiples of the
/// window's cells; padding other than equal zeros on both sides; a size with another number of
/// windows; a placement without a rule; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::ConvOptions;
/// use halocline_ops::conv::fold;
///
/// let windows = ShardTensor::solo(Tensor::<3>::from([[[1.0, 2.0], [10.0, 20.0]]]));
/// let y = fold(windows, [3], [2], &ConvOptions::default())?;
/// y.local().to_data().assert_eq(&[[[1.0_f32, 12.0, 20.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn fold<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    output_size: [usize; N],
    kernel: [usize; N],
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    check(NAME, &x, options)?;
    let count: usize = kernel.iter().product();
    let channels = x.layout().extents(1);
    let whole = |channels: &usize| count > 0 && *channels > 0 && channels.is_multiple_of(count);
    if !channels.iter().all(whole) {
        let message = format!("{channels:?} channels for windows of {kernel:?}");
        return Err(Error::operator(NAME, message));
    }
    let channels = channels.iter().map(|channels| channels / count).collect();
    let windows = options.windows(&kernel);
    let mut more = [0; N];
    for (dim, window) in windows.iter().enumerate() {
        let padding = window.padding;
        if padding.low != padding.high
            || (padding.low > 0 && padding.boundary != [Boundary::Zeros; 2])
        {
            let message = format!("{padding:?}; expected the same zeros on both sides");
            return Err(Error::operator(NAME, message));
        }
        let (held, size) = (x.dims()[dim + 2], output_size[dim]);
        let expected = window.output_size(NAME, dim + 2, size)?;
        if held != expected {
            let message = format!(
                "dim {}: {held} windows for {size} cells; expected {expected}",
                dim + 2
            );
            return Err(Error::operator(NAME, message));
        }
        more[dim] = (size + 2 * padding.low - window.span()) % window.stride;
    }
    let transposed = ConvTransposeOptions::default()
        .with_stride(options.stride)
        .with_dilation(options.dilation)
        .with_padding(options.padding.map(|padding| padding.low))
        .with_output_padding(more);
    let like = x.layout().resized(1, channels);
    let plan = plan(NAME, &transposed, &kernel, like, &x)?;
    let dtype = x.local().dtype();
    // Widened before the exchange, so that parts from other ranks are added in this precision, too.
    let (local, layout, mesh) = cast_shard(x, wider(dtype)).into_parts();
    let local = fill_all(local, &layout, NAME, 0.0)?;
    let sum = Patches {
        way: Way::AddUp,
        windows,
        shape: match &plan.exchange {
            Some(exchange) => exchange.output_shape.clone(),
            None => plan.output.local_shape(mesh.position()),
        },
    };
    let y = Tensor::<D>::from_dispatch(apply(sum, [local.into_dispatch()]));
    let y = match exchange(&plan, NAME, &layout, &mesh) {
        None => y,
        // Cells of other ranks are sent back to them, in the opposite direction of halos.
        Some(exchange) => Error::catch(|| ops::run(y, exchange.reversed()))?,
    };
    Ok(ShardTensor::from_parts(
        cast(y, dtype),
        plan.output.clone(),
        mesh,
    ))
}

impl<X: Field<3>> Layer<X> for Fold4d {
    type Output = WithDims<X, 4>;

    #[track_caller]
    fn forward(&self, x: X) -> WithDims<X, 4> {
        let options = options(self.stride, self.dilation, self.padding);
        run(x, |x| {
            let windows = options.windows(&self.kernel_size);
            let windows = windows.iter().zip(self.output_size).zip(2..);
            let counts = windows.map(|((window, size), dim)| window.output_size(NAME, dim, size));
            let counts: Vec<usize> = counts.collect::<Result<_>>()?;
            let x: ShardTensor<4> = unflatten(x, 2, &counts)?;
            fold(x, self.output_size, self.kernel_size, &options)
        })
    }
}

/// Registry entry of fold.
pub(super) const GOLDEN: Golden = Golden::new(NAME, |case| -> Result<Box<dyn Output>> {
    let [size, kernel] = ["output_size", "kernel_size"].map(|key| case.attributes.array(key, 1));
    output(fold(case.input::<4>(0)?, size, kernel, &of_case(case)))
})
.with_method("fold_windows")
.with_pytorch("fold")
.with_sharded(Dims::AllButChannels)
.with_travels([
    "parts of cells whose windows cross shards",
    "their cotangents",
])
.with_modules("`Fold4d`");
