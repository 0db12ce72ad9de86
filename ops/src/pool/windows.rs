//! Maximum, mean and norm of windows over the last two dims.

use burn::tensor::module::{avg_pool2d, max_pool2d, max_pool2d_with_indices};
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{Int, Tensor, TensorData};

use super::combine::Norm;
use super::field::{Planes, Section};
use super::kernel as pairs;
use super::maximum::{max_adjoint, max_and_places};
use super::node::Windows;
use super::slide::{Slide, Slides};
use super::sliding;
use crate::driver::strides::in_row_major;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::local::by_planes;
use crate::kernel::simd::Isa;
use crate::reduce::root_of;

/// Returns whether a dim is halved; dedicated kernels exist for that.
fn is_pair(slide: Slide) -> bool {
    (slide.kernel, slide.stride, slide.dilation, slide.outside) == (2, 2, 1, 0)
}

fn are_pairs(slides: Slides) -> bool {
    slides.into_iter().all(is_pair)
}

/// Returns all cells of planes that are halved, if they are contiguous.
fn pairs_of<'a, E>(x: &Planes<'a, E>, slides: Slides) -> Option<&'a [E]> {
    x.cells.filter(|_| are_pairs(slides))
}

/// Maximum over windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maximum;

impl Windows for Maximum {
    const NAMES: [&'static str; 2] = ["max_pool", "max_pool (backward)"];

    // Pairs are recomputed: the input is mostly kept by the operator that produced it, and places
    // would have to be kept in addition.
    fn keeps_input(self, slides: Slides, is_local: bool) -> bool {
        is_local && are_pairs(slides)
    }

    fn forward<E: Float>(self, isa: Isa, x: &Planes<'_, E>, slides: Slides) -> Buffer<E> {
        match pairs_of(x, slides) {
            Some(cells) => pairs::max(isa, cells, x.shape),
            None => sliding::max(isa, x, slides),
        }
    }

    fn with_places<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        slides: Slides,
    ) -> (Buffer<E>, Option<Buffer<E>>) {
        match pairs_of(x, slides) {
            Some(cells) => (pairs::max(isa, cells, x.shape), None),
            None => {
                let [largest, places] = max_and_places(isa, x, slides);
                (largest, Some(places))
            }
        }
    }

    fn backward<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        [places, cotangent]: [&[E]; 2],
        (section, _): (&Section, &[E]),
        slides: Slides,
    ) -> Buffer<E> {
        match pairs_of(x, slides) {
            Some(cells) => pairs::max_adjoint(isa, cells, cotangent, x.shape),
            None => max_adjoint(isa, [places, cotangent], x.shape, section, slides),
        }
    }

    fn composed<const D: usize>(self, x: Tensor<D>, slides: Slides) -> Tensor<D> {
        let options = MaxPoolOptions::new(slides.map(|slide| slide.kernel))
            .with_stride(slides.map(|slide| slide.stride))
            .with_dilation(slides.map(|slide| slide.dilation));
        let has_padding = slides.into_iter().any(|slide| slide.outside > 0);
        by_planes(x, |x| {
            if has_padding && x.is_tracked() {
                maximum_of_field(x, slides, options)
            } else {
                max_pool2d(x, options)
            }
        })
    }
}

/// Computes the maximum by burn's operators, with its gradient always going to a cell of the field.
/// Padding is minus infinity; in a window whose cells are all minus infinity, burn's maximum could
/// be a padded cell.
fn maximum_of_field(x: Tensor<4>, slides: Slides, options: MaxPoolOptions<2>) -> Tensor<4> {
    let device = x.device().inner();
    let [batch, channels, rows, columns] = x.dims();
    let (y, cells) = max_pool2d_with_indices(x.clone().inner(), options);
    let shape = y.dims();
    let count = shape.iter().product::<usize>();
    // See `in_row_major` for the reason.
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

/// Mean over windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Average;

impl Windows for Average {
    const NAMES: [&'static str; 2] = ["avg_pool", "avg_pool (backward)"];

    fn keeps_input(self, _: Slides, _: bool) -> bool {
        false
    }

    fn forward<E: Float>(self, isa: Isa, x: &Planes<'_, E>, slides: Slides) -> Buffer<E> {
        match pairs_of(x, slides) {
            Some(cells) => pairs::average(isa, cells, x.shape),
            None => sliding::average(isa, x, slides),
        }
    }

    fn backward<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        [_, cotangent]: [&[E]; 2],
        (section, _): (&Section, &[E]),
        slides: Slides,
    ) -> Buffer<E> {
        if are_pairs(slides) && section.is_whole(x.shape) {
            pairs::average_adjoint(isa, cotangent, x.shape)
        } else {
            sliding::average_adjoint(isa, cotangent, x.shape, section, slides)
        }
    }

    fn composed<const D: usize>(self, x: Tensor<D>, slides: Slides) -> Tensor<D> {
        let options = AvgPoolOptions::new(slides.map(|slide| slide.kernel))
            .with_stride(slides.map(|slide| slide.stride));
        by_planes(x, |x| avg_pool2d(x, options))
    }
}

/// Norm over windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowNorm(pub(super) Norm);

impl Windows for WindowNorm {
    const NAMES: [&'static str; 2] = ["lp_pool", "lp_pool (backward)"];

    fn keeps_input(self, _: Slides, _: bool) -> bool {
        true
    }

    fn forward<E: Float>(self, isa: Isa, x: &Planes<'_, E>, slides: Slides) -> Buffer<E> {
        let Self(norm) = self;
        match pairs_of(x, slides) {
            Some(cells) => pairs::norm(isa, cells, x.shape, norm),
            None => sliding::norm(isa, x, slides, norm),
        }
    }

    fn pulled<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        cotangent: &[E],
        slides: Slides,
    ) -> Option<Buffer<E>> {
        let Self(norm) = self;
        match pairs_of(x, slides) {
            Some(_) => None,
            None => Some(sliding::pulled(isa, x, cotangent, slides, norm)),
        }
    }

    fn backward<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        [_, cotangent]: [&[E]; 2],
        section: (&Section, &[E]),
        slides: Slides,
    ) -> Buffer<E> {
        let Self(norm) = self;
        match pairs_of(x, slides) {
            Some(cells) => pairs::norm_adjoint(isa, cells, cotangent, x.shape, norm),
            None => sliding::norm_adjoint(isa, cotangent, x.shape, section, slides, norm),
        }
    }

    fn composed<const D: usize>(self, x: Tensor<D>, slides: Slides) -> Tensor<D> {
        let Self(Norm(order)) = self;
        let cells = slides.iter().map(|slide| slide.kernel).product::<usize>();
        let powers = match order {
            2.0 => x.square(),
            _ => x.abs().powf_scalar(order),
        };
        root_of(Average.composed(powers, slides) * cells as f64, order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::check_same;
    use crate::pool::node::run;

    fn check(windows: impl Windows, slides: Slides) {
        check_same(
            [2, 3, 8, 6],
            burn::tensor::DType::F32,
            |x| run(windows, slides, x, None),
            |x| windows.composed(x, slides),
        );
    }

    #[test]
    fn kernels_and_burns_operators_agree() {
        for (kernel, stride) in [(2, 2), (3, 1), (3, 2)] {
            let slides = [Slide::new(kernel, stride); 2];
            check(Maximum, slides);
            check(Average, slides);
            for order in [1.0, 2.0, 3.0] {
                check(WindowNorm(Norm(order)), slides);
            }
        }
        let padded = Slide {
            outside: 1,
            dilation: 2,
            ..Slide::new(3, 1)
        };
        check(Maximum, [padded, Slide::new(1, 1)]);
    }
}
