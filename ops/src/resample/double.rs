//! Upsampling of the last two dims of one shard by a factor of two.

use burn::tensor::Tensor;

use super::kernel as resample;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::local::{LocalOperator, by_planes, planes, with_planes};
use crate::kernel::simd::Isa;

/// Nearest-neighbour upsampling: four copies of every cell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nearest;

impl LocalOperator for Nearest {
    const NAMES: [&'static str; 2] = ["upsample_nearest", "upsample_nearest (backward)"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let from = planes(shape);
        let shape = with_planes(shape, resample::doubled(from));
        (resample::nearest(isa, x, from), shape)
    }

    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        resample::nearest_adjoint(isa, cotangent, planes(shape))
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        by_planes(x, |x| {
            let [_, planes, rows, columns] = x.dims();
            let copies = x.reshape([planes, rows, 1, columns, 1]);
            let copies = copies.expand([planes, rows, 2, columns, 2]);
            copies.reshape([1, planes, 2 * rows, 2 * columns])
        })
    }
}

/// Bilinear upsampling of a field with a halo of one cell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bilinear;

impl LocalOperator for Bilinear {
    const NAMES: [&'static str; 2] = ["upsample_bilinear", "upsample_bilinear (backward)"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let from = without_halo(planes(shape));
        let shape = with_planes(shape, resample::doubled(from));
        (resample::bilinear(isa, x, from), shape)
    }

    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        let field = without_halo(planes(shape));
        resample::bilinear_adjoint(isa, cotangent, field)
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        by_planes(x, |x| doubled_linearly(doubled_linearly(x, 2), 3))
    }
}

/// Shape of a field without its halo of one cell.
fn without_halo([planes, rows, columns]: [usize; 3]) -> [usize; 3] {
    [planes, rows - 2, columns - 2]
}

/// Linear upsampling along one dim, consuming its halo of one cell.
fn doubled_linearly(x: Tensor<4>, dim: usize) -> Tensor<4> {
    let mut shape = x.dims();
    let cells = shape[dim] - 2;
    let shifted = |start| x.clone().narrow(dim, start, cells);
    let near = shifted(1) * 0.75;
    let halves = [near.clone() + shifted(0) * 0.25, near + shifted(2) * 0.25];
    let pairs: Tensor<5> = Tensor::stack(halves.into(), dim + 1);
    shape[dim] = 2 * cells;
    pairs.reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::check_composed;

    #[test]
    fn kernels_and_burns_operators_agree() {
        check_composed(Nearest);
        check_composed(Bilinear);
    }
}
