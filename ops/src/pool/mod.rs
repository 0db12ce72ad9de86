//! Maximum and average pooling in one to three spatial dims.
//!
//! `y[b, c, i] = max (or mean) over k of x[b, c, i·stride − low + k·dilation]`. Semantics follow
//! PyTorch's `max_pool{1,2,3}d` and `avg_pool{1,2,3}d`: padding never takes part in a maximum,
//! averages count it or not, and [`Rounding::Ceil`] keeps a last window that starts inside the
//! field or its low padding.
//!
//! # Placement
//! All dims may be sharded. An output belongs to the rank that holds the middle cell of its window.
//!
//! # Adjoint
//! The gradient of a maximum goes to the first cell, in row-major order, that holds it (the last
//! one, if several are NaN); that of an average is spread equally over the cells of the window. The
//! gradient of a halo cell is added to that of its owner.

pub mod adaptive;
mod combine;
mod count;
mod field;
mod golden;
pub(crate) mod kernel;
mod layer;
pub mod lp;
mod maximum;
mod node;
mod phases;
mod planes;
mod slide;
mod sliding;
mod windows;

pub use adaptive::{adaptive_avg_pool, adaptive_max_pool};
pub(crate) use golden::OPERATORS;
pub use lp::lp_pool;

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Boundary, Error, IndexBox, Result, ShardTensor};

use crate::driver::{Padding, Rounding, Stencil, Window};
use crate::field::{Field, run};
use count::factors;
use node::Windows;
use planes::by_planes;
use slide::Slide;
use windows::{Average, Maximum};

/// Whether an average counts padded cells in its divisor.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Padding, PaddingCount, PoolField, PoolOptions};
///
/// let options = PoolOptions::new([2]).with_padding([Padding::zeros(1, 1)]);
/// let averages = |count| {
///     let x = Tensor::<3>::from([[[2.0, 4.0]]]);
///     x.avg_pool(&options.with_count(count)).into_data()
/// };
/// averages(PaddingCount::Included).assert_eq(&[[[1.0_f32, 2.0]]].into(), true);
/// averages(PaddingCount::Excluded).assert_eq(&[[[2.0_f32, 4.0]]].into(), true);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PaddingCount {
    /// Padded cells count, with value zero.
    #[default]
    Included,
    /// Only cells of the field count.
    Excluded,
}

/// Window, stride, dilation and padding of a pooling over `N` spatial dims.
///
/// # Example
/// ```
/// use halocline_ops::{Padding, PoolOptions};
///
/// let options = PoolOptions::new([3, 3])
///     .with_stride([2, 2])
///     .with_padding([Padding::zeros(1, 1); 2]);
/// assert_eq!(options.dilation, [1, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolOptions<const N: usize> {
    /// Number of cells of a window.
    pub kernel: [usize; N],
    /// Step between windows, in cells.
    pub stride: [usize; N],
    /// Step between the cells of a window (maximum only).
    pub dilation: [usize; N],
    /// Padding of every dim.
    pub padding: [Padding; N],
    /// Treatment of a last window that does not fit.
    pub rounding: Rounding,
    /// Whether an average counts padded cells.
    pub count: PaddingCount,
}

impl<const N: usize> PoolOptions<N> {
    /// Creates options for adjacent windows: the stride equals the kernel.
    pub fn new(kernel: [usize; N]) -> Self {
        Self {
            kernel,
            stride: kernel,
            dilation: [1; N],
            padding: [Padding::default(); N],
            rounding: Rounding::Floor,
            count: PaddingCount::Included,
        }
    }

    /// Sets the stride.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        Self { stride, ..self }
    }

    /// Sets the padding.
    #[must_use]
    pub fn with_padding(self, padding: [Padding; N]) -> Self {
        Self { padding, ..self }
    }

    /// Sets the dilation.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        Self { dilation, ..self }
    }

    /// Sets the rounding.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// Sets whether averages count padded cells.
    #[must_use]
    pub fn with_count(self, count: PaddingCount) -> Self {
        Self { count, ..self }
    }

    pub(crate) fn stencil(&self, operator: &'static str, fill: f64) -> Stencil {
        let windows = (0..N).map(|dim| Window {
            kernel: self.kernel[dim],
            stride: self.stride[dim],
            dilation: self.dilation[dim],
            padding: self.padding[dim],
            rounding: self.rounding,
        });
        Stencil::new(operator, windows.collect()).with_fill(fill)
    }
}

/// Computes the maximum over windows. See the [module](self).
///
/// # Errors
/// A placement without a rule; a window that fits nowhere or covers padding only; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::PoolOptions;
/// use halocline_ops::pool::max_pool;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 1, 7, 4], &mesh, &[Shard(2)])?;
///     let y = max_pool(x, &PoolOptions::new([2, 2]))?.full_tensor();
///     y.into_data().assert_eq(&[[[[1.0_f32; 2]; 3]]].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn max_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    options: &PoolOptions<N>,
) -> Result<ShardTensor<D>> {
    let stencil = options.stencil(
        name::<D, N>(x.dims(), ["max_pool1d", "max_pool2d", "max_pool3d"])?,
        f64::NEG_INFINITY,
    );
    let plan = stencil.plan(&x)?;
    let mut begins_in_padding = false;
    for (window, dim) in stencil.windows().iter().zip(2..) {
        let (size, outputs) = (x.dims()[dim], plan.output.shape()[dim]);
        for output in 0..outputs {
            let Some(first) = window.first_cell(output, size) else {
                let message = format!(
                    "dim {dim}: window {output} of {outputs} lies in padding alone, which has no maximum: {window:?}"
                );
                return Err(Error::operator(stencil.operator(), message));
            };
            begins_in_padding |= first > 0;
        }
    }
    let slides = |outputs: &IndexBox| {
        let slides = stencil.windows().iter().zip(2..).map(|(window, dim)| {
            let zeros = window.padding.boundary[0] == Boundary::Zeros;
            let before = outputs.ranges()[dim].start * window.stride;
            Slide {
                outside: if begins_in_padding && zeros {
                    window.padding.low.saturating_sub(before)
                } else {
                    0
                },
                ..Slide::from(*window)
            }
        });
        slides.collect()
    };
    by_planes(&stencil, &plan, x, slides, Maximum, |y, _| y)
}

/// Computes the average over windows. See the [module](self).
///
/// # Errors
/// A dilation other than 1; a placement without a rule; a window that fits nowhere; a failure of
/// communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::PoolOptions;
/// use halocline_ops::pool::avg_pool;
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 3.0, 5.0, 9.0]]]));
/// let y = avg_pool(x, &PoolOptions::new([2]))?.into_local();
/// y.into_data().assert_eq(&[[[2.0_f32, 7.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn avg_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    options: &PoolOptions<N>,
) -> Result<ShardTensor<D>> {
    let name = name::<D, N>(x.dims(), ["avg_pool1d", "avg_pool2d", "avg_pool3d"])?;
    counted(name, x, options, Average, |factor| factor)
}

/// Pools windows, and multiplies each result by `scale(ratio)`, where `ratio` is the size of the
/// window divided by the number of its cells that count.
fn counted<const D: usize, const N: usize, W: Windows>(
    name: &'static str,
    x: ShardTensor<D>,
    options: &PoolOptions<N>,
    windows: W,
    scale: impl Fn(f64) -> f64,
) -> Result<ShardTensor<D>> {
    if options.dilation != [1; N] {
        let message = format!("dilation {:?}; expected 1", options.dilation);
        return Err(Error::operator(name, message));
    }
    let stencil = options.stencil(name, 0.0);
    let size = x.dims();
    let plan = stencil.plan(&x)?;
    let slides = |_: &IndexBox| stencil.windows().iter().copied().map(Slide::from).collect();
    by_planes(&stencil, &plan, x, slides, windows, |mut y, outputs| {
        for (spatial, window) in stencil.windows().iter().enumerate() {
            let dim = spatial + 2;
            let range = outputs.ranges()[dim].clone();
            if let Some(factors) = factors(
                window,
                options.count,
                size[dim],
                plan.output.shape()[dim],
                range,
            ) {
                let factors: Vec<f64> = factors.into_iter().map(&scale).collect();
                let mut shape = [1; D];
                shape[dim] = factors.len();
                let options = (&y.device().inner(), y.dtype());
                y = y * Tensor::from_data(TensorData::new(factors, shape), options);
            }
        }
        y
    })
}

/// Pooling as methods.
pub trait PoolField<const D: usize>: Field<D> {
    /// Computes the maximum over windows. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`max_pool`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{PoolField, PoolOptions};
    ///
    /// let y = Tensor::<3>::from([[[1.0, 3.0, 5.0, 2.0]]]).max_pool(&PoolOptions::new([2]));
    /// y.into_data().assert_eq(&[[[3.0_f32, 5.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn max_pool<const N: usize>(self, options: &PoolOptions<N>) -> Self {
        run(self, |x| max_pool(x, options))
    }

    /// Averages over `output_size` areas in each spatial dim. See
    /// [`adaptive_avg_pool`](fn@adaptive_avg_pool).
    ///
    /// # Panics
    /// Panics where [`adaptive_avg_pool`](fn@adaptive_avg_pool) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::PoolField;
    ///
    /// let y = Tensor::<3>::from([[[1.0, 3.0, 5.0]]]).adaptive_avg_pool([2]);
    /// y.into_data().assert_eq(&[[[2.0_f32, 4.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn adaptive_avg_pool<const N: usize>(self, output_size: [usize; N]) -> Self {
        run(self, |x| adaptive_avg_pool(x, output_size))
    }

    /// Computes the maxima over `output_size` areas in each spatial dim. See
    /// [`adaptive_max_pool`](fn@adaptive_max_pool).
    ///
    /// # Panics
    /// Panics where [`adaptive_max_pool`](fn@adaptive_max_pool) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::PoolField;
    ///
    /// let y = Tensor::<3>::from([[[1.0, 3.0, 5.0]]]).adaptive_max_pool([2]);
    /// y.into_data().assert_eq(&[[[3.0_f32, 5.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn adaptive_max_pool<const N: usize>(self, output_size: [usize; N]) -> Self {
        run(self, |x| adaptive_max_pool(x, output_size))
    }

    /// Computes the norm over windows. See [`lp_pool`](fn@lp_pool).
    ///
    /// # Panics
    /// Panics where [`lp_pool`](fn@lp_pool) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{PoolField, PoolOptions};
    ///
    /// let y = Tensor::<3>::from([[[3.0, -4.0]]]).lp_pool(2.0, &PoolOptions::new([2]));
    /// assert!((y.into_scalar::<f32>() - 5.0).abs() < 1e-5);
    /// ```
    #[must_use]
    #[track_caller]
    fn lp_pool<const N: usize>(self, order: f64, options: &PoolOptions<N>) -> Self {
        run(self, |x| lp_pool(x, order, options))
    }

    /// Computes the average over windows. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`avg_pool`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{PoolField, PoolOptions};
    ///
    /// let y = Tensor::<3>::from([[[1.0, 3.0, 5.0, 9.0]]]).avg_pool(&PoolOptions::new([2]));
    /// y.into_data().assert_eq(&[[[2.0_f32, 7.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn avg_pool<const N: usize>(self, options: &PoolOptions<N>) -> Self {
        run(self, |x| avg_pool(x, options))
    }
}

impl<const D: usize, X: Field<D>> PoolField<D> for X {}

/// Returns the name of a pooling over `N` dims.
fn name<const D: usize, const N: usize>(
    dims: [usize; D],
    names: [&'static str; 3],
) -> Result<&'static str> {
    let name = N.checked_sub(1).and_then(|i| names.get(i));
    name.copied().filter(|_| D == N + 2).ok_or_else(|| {
        let message =
            format!("options of {N} dims for {dims:?}; expected [batch, channels, *spatial]");
        Error::operator("pool", message)
    })
}

#[cfg(test)]
mod tests;
