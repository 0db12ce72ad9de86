//! Pooling of one shard by windows of 2 × 2 cells in the last two dims.

use burn::tensor::Tensor;
use burn::tensor::module::{avg_pool2d, max_pool2d};
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};

use super::kernel as pooling;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::local::{LocalOperator, by_planes, planes, with_planes};
use crate::kernel::simd::Isa;

/// The maximum over 2 × 2 cells.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maximum;

impl LocalOperator for Maximum {
    const NAMES: [&'static str; 2] = ["max_pool", "max_pool (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let from = planes(shape);
        (
            pooling::max(isa, x, from),
            with_planes(shape, pooling::pooled(from)),
        )
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        pooling::max_adjoint(isa, x, cotangent, planes(shape))
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        by_planes(x, |x| {
            max_pool2d(x, MaxPoolOptions::new([2, 2]).with_stride([2, 2]))
        })
    }
}

/// The mean over 2 × 2 cells.
#[derive(Clone, Copy, Debug)]
pub(super) struct Average;

impl LocalOperator for Average {
    const NAMES: [&'static str; 2] = ["avg_pool", "avg_pool (backward)"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let from = planes(shape);
        (
            pooling::average(isa, x, from),
            with_planes(shape, pooling::pooled(from)),
        )
    }

    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        pooling::average_adjoint(isa, cotangent, planes(shape))
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        by_planes(x, |x| {
            avg_pool2d(x, AvgPoolOptions::new([2, 2]).with_stride([2, 2]))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::check_composed;

    #[test]
    fn kernels_and_burns_operators_agree() {
        check_composed(Maximum);
        check_composed(Average);
    }
}
