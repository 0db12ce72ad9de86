//! Softmax of scores with burn's operators, for dense and neighborhood attention.

use burn::tensor::{DType, Tensor};

use super::engine::dense::LOWEST;
use crate::precision::{cast, widened};

/// Computes weights from scores along a dim, and the logarithms of the sums of exponentials.
pub(super) fn weights<const D: usize>(scores: Tensor<D>, dim: usize) -> [Tensor<D>; 2] {
    let scores = widened(scores);
    let most = scores.clone().detach().max_dim(dim).clamp_min(LOWEST);
    let exponentials = (scores - most.clone()).exp();
    let sum = exponentials.clone().sum_dim(dim);
    // Without keys the sum is zero: the weights are zero, too, and the logarithm is the lowest
    // number.
    let none = sum.clone().equal_elem(0.0);
    let sum = sum.mask_fill(none, 1.0);
    [exponentials / sum.clone(), sum.log() + most]
}

/// Returns the result in the dtype of the operands, or together with the logarithms.
pub(super) fn result<const D: usize>(
    output: Tensor<D>,
    lse: Tensor<D>,
    with_lse: bool,
    dtype: DType,
) -> Tensor<D> {
    if with_lse {
        Tensor::cat(vec![output, lse], D - 1)
    } else {
        cast(output, dtype)
    }
}
