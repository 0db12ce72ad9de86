//! Activations: elementwise nonlinearities on resolved values of any placement.

use burn::tensor::{Tensor, activation as burns};

use crate::flex::Float;
use crate::kernel::activation as kernels;
pub use crate::kernel::activation::Activation;
use crate::kernel::buffer::Buffer;
use crate::kernel::simd::Isa;
use crate::local::LocalOperator;

impl LocalOperator for Activation {
    const NAMES: [&'static str; 2] = ["activation", "activation (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        (kernels::forward(isa, self, x), shape.to_vec())
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], _: &[usize], cotangent: &[E]) -> Buffer<E> {
        kernels::backward(isa, self, x, cotangent)
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Relu => burns::relu(x),
            Self::Gelu => burns::gelu(x),
            Self::Silu => burns::silu(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::check_composed;

    #[test]
    fn kernels_and_burns_operators_agree() {
        for activation in [Activation::Relu, Activation::Gelu, Activation::Silu] {
            check_composed(activation);
        }
    }
}
