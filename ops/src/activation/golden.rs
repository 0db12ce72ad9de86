//! Registry entries of the activations with kernels of their own, and of `prelu`.

use halocline_core::Result;

use super::{Activation, activation, prelu};
use crate::golden::{Case, Golden, Output, output, with_dims};

/// Operators of this family.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("relu", |case| elementwise("relu", Activation::Relu, case)).with_modules("`Relu`"),
    Golden::new("gelu", |case| elementwise("gelu", Activation::Gelu, case)).with_modules("`Gelu`"),
    Golden::new("silu", |case| elementwise("silu", Activation::Silu, case)).with_modules("`SiLU`"),
    Golden::new("prelu", |case| {
        let slopes = case.needed::<1>("weight")?;
        with_dims!(case.dims(), D => output(prelu(case.input::<D>(0)?, slopes)))
    })
    .with_travels(["–", "sums of slopes' gradients"])
    .with_modules("`PRelu`"),
];

fn elementwise(operator: &str, kind: Activation, case: &Case) -> Result<Box<dyn Output>> {
    with_dims!(case.dims(), D => output(activation(operator, kind, case.input::<D>(0)?)))
}
