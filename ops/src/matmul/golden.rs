//! Products in the registry.

use super::{linear, matmul};
use crate::activation::ActivationField;
use crate::golden::{Dims, Golden, output, with_dims};

/// The products.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden {
        name: "matmul",
        pytorch: "matmul",
        sharded: Dims::Product,
        travels: [
            "– (partial where the summed dim is sharded)",
            "sums of replicated operands' gradients",
        ],
        modules: "",
        run: |case| with_dims!(case.dims(), D => output(matmul(case.input::<D>(0)?, case.input(1)?))),
    },
    Golden {
        name: "linear",
        pytorch: "linear",
        sharded: Dims::AllButLast,
        travels: ["–", "sums of weights' gradients"],
        modules: "`Linear`",
        run: |case| {
            with_dims!(case.dims(), D => {
                let weight = case.needed::<2>("weight")?.transpose(); // [in, out]
                output(linear(case.input::<D>(0)?, weight, case.operand("bias")))
            })
        },
    },
    Golden {
        name: "linear_row_col_mlp",
        pytorch: "linear, gelu, linear",
        sharded: Dims::AllButLast,
        travels: ["–", "sums of weights' gradients"],
        modules: "",
        run: |case| {
            with_dims!(case.dims(), D => {
                let weight = |name| case.needed::<2>(name).map(|weight| weight.transpose());
                let hidden = linear(case.input::<D>(0)?, weight("w1")?, case.operand("b1"))?.gelu();
                output(linear(hidden, weight("w2")?, case.operand("b2")))
            })
        },
    },
];
