//! Registry entries of products.

use super::{einsum, linear, matmul};
use crate::activation::ActivationField;
use crate::golden::{Dims, Golden, output, with_dims};

/// Operators of this family.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("matmul", |case| {
        with_dims!(case.dims(), D => {
            output(matmul(case.input::<D>(0)?, case.input(1)?))
        })
    })
    .with_sharded(Dims::Product)
    .with_travels([
        "– (partial where the summed dim is sharded)",
        "sums of replicated operands' gradients",
    ]),
    einsum::GOLDEN,
    Golden::new("linear", |case| {
        with_dims!(case.dims(), D => {
            let weight = case.needed::<2>("weight")?.transpose(); // [in, out]
            output(linear(case.input::<D>(0)?, weight, case.operand("bias")))
        })
    })
    .with_sharded(Dims::AllButLast)
    .with_travels(["–", "sums of weights' gradients"])
    .with_modules("`Linear`"),
    Golden::new("linear_row_col_mlp", |case| {
        case.attributes.choice("activation", &[("gelu", ())]);
        with_dims!(case.dims(), D => {
            let weight = |name| case.needed::<2>(name).map(|weight| weight.transpose());
            let hidden = linear(case.input::<D>(0)?, weight("w1")?, case.operand("b1"))?.gelu();
            output(linear(hidden, weight("w2")?, case.operand("b2")))
        })
    })
    .with_method("")
    .with_pytorch("linear, gelu, linear")
    .with_sharded(Dims::AllButLast)
    .with_travels(["–", "sums of weights' gradients"]),
];
