//! Pooling of one shard by windows of cells in the last two dims.

use burn::tensor::module::{avg_pool2d, max_pool2d, max_pool2d_with_indices};
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{Int, Tensor, TensorData};

use super::combine::Norm;
use super::kernel as pairs;
use super::maximum::max_adjoint;
use super::slide::{Slide, Slides, pooled};
use super::sliding;
use crate::driver::strides::in_row_major;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::local::{LocalOperator, by_planes, planes, with_planes};
use crate::kernel::simd::Isa;
use crate::reduce::root_of;

/// Whether a dim is halved, for which there are kernels of their own.
fn is_pair(slide: Slide) -> bool {
    (slide.kernel, slide.stride, slide.dilation, slide.outside) == (2, 2, 1, 0)
}

/// The maximum over windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maximum(pub(super) Slides);

impl LocalOperator for Maximum {
    const NAMES: [&'static str; 2] = ["max_pool", "max_pool (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let from = planes(shape);
        let y = match self.0.into_iter().all(is_pair) {
            true => pairs::max(isa, x, from),
            false => sliding::max(isa, x, from, self.0),
        };
        (y, with_planes(shape, pooled(from, self.0)))
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        match self.0.into_iter().all(is_pair) {
            true => pairs::max_adjoint(isa, x, cotangent, planes(shape)),
            false => max_adjoint(isa, x, cotangent, planes(shape), self.0),
        }
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        let slides = self.0;
        let options = MaxPoolOptions::new(slides.map(|slide| slide.kernel))
            .with_stride(slides.map(|slide| slide.stride))
            .with_dilation(slides.map(|slide| slide.dilation));
        let has_padding = slides.into_iter().any(|slide| slide.outside > 0);
        by_planes(x, |x| match has_padding && x.is_tracked() {
            true => maximum_of_field(x, slides, options),
            false => max_pool2d(x, options),
        })
    }
}

/// The maximum, with its gradient to a cell of the field in every window. Padding is minus
/// infinity; in a window whose cells are all minus infinity, burn's maximum could be a padded cell.
fn maximum_of_field(x: Tensor<4>, slides: Slides, options: MaxPoolOptions<2>) -> Tensor<4> {
    let device = x.device().inner();
    let [batch, channels, rows, columns] = x.dims();
    let (y, cells) = max_pool2d_with_indices(x.clone().inner(), options);
    let shape = y.dims();
    let count = shape.iter().product::<usize>();
    // For the reason that `in_row_major` has.
    let (y, cells) = (in_row_major(y), cells.reshape([count]).reshape(shape));
    let [height, width] = [shape[2], shape[3]];
    let cell =
        |slide: Slide, output: usize| output * slide.stride + slide.first(output) * slide.dilation;
    let first: Vec<i64> = (0..height * width)
        .map(|output| [output / width, output % width])
        .map(|[row, column]| cell(slides[0], row) * columns + cell(slides[1], column))
        .map(|cell| cell as i64)
        .collect();
    let first = TensorData::new(first, [1, 1, height, width]);
    let first = Tensor::<4, Int>::from_data(first, (&device, cells.dtype())).expand(shape);
    let cells = cells.mask_where(y.equal_elem(f64::NEG_INFINITY), first);
    let planes = x.reshape([batch, channels, rows * columns]);
    let y = planes.gather(2, cells.reshape([batch, channels, height * width]));
    y.reshape(shape)
}

/// The mean over windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Average(pub(super) Slides);

impl LocalOperator for Average {
    const NAMES: [&'static str; 2] = ["avg_pool", "avg_pool (backward)"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let from = planes(shape);
        let y = match self.0.into_iter().all(is_pair) {
            true => pairs::average(isa, x, from),
            false => sliding::average(isa, x, from, self.0),
        };
        (y, with_planes(shape, pooled(from, self.0)))
    }

    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        match self.0.into_iter().all(is_pair) {
            true => pairs::average_adjoint(isa, cotangent, planes(shape)),
            false => sliding::average_adjoint(isa, cotangent, planes(shape), self.0),
        }
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        let options = AvgPoolOptions::new(self.0.map(|slide| slide.kernel))
            .with_stride(self.0.map(|slide| slide.stride));
        by_planes(x, |x| avg_pool2d(x, options))
    }
}

/// The norm over windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowNorm(pub(super) Slides, pub(super) Norm);

impl LocalOperator for WindowNorm {
    const NAMES: [&'static str; 2] = ["lp_pool", "lp_pool (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let (Self(slides, norm), from) = (self, planes(shape));
        let y = match slides.into_iter().all(is_pair) {
            true => pairs::norm(isa, x, from, norm),
            false => sliding::norm(isa, x, from, slides, norm),
        };
        (y, with_planes(shape, pooled(from, slides)))
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        let (Self(slides, norm), from) = (self, planes(shape));
        match slides.into_iter().all(is_pair) {
            true => pairs::norm_adjoint(isa, x, cotangent, from, norm),
            false => sliding::norm_adjoint(isa, x, cotangent, from, slides, norm),
        }
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        let Self(slides, Norm(order)) = self;
        let cells = slides.iter().map(|slide| slide.kernel).product::<usize>();
        let powers = match order {
            2.0 => x.square(),
            _ => x.abs().powf_scalar(order),
        };
        root_of(Average(slides).composed(powers) * cells as f64, order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::check_composed;

    #[test]
    fn kernels_and_burns_operators_agree() {
        for (kernel, stride) in [(2, 2), (3, 1), (3, 2)] {
            let slides = [Slide::new(kernel, stride); 2];
            check_composed(Maximum(slides));
            check_composed(Average(slides));
            for order in [1.0, 2.0, 3.0] {
                check_composed(WindowNorm(slides, Norm(order)));
            }
        }
        let padded = Slide {
            outside: 1,
            dilation: 2,
            ..Slide::new(3, 1)
        };
        check_composed(Maximum([padded, Slide::new(1, 1)]));
    }
}
