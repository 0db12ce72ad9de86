//! Norms in the registry.

use halocline_core::Result;

use super::{batch, group_norm, layer_norm, layer_norm_dims, rms_norm, weight};
use crate::golden::{Case, Dims, Golden, Output, output, with_dims};
use crate::operand::Operand;

/// The norms.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("group_norm", group)
        .with_sharded(Dims::AllButChannels)
        .with_travels([
            "three numbers per group",
            "two numbers per group; sums of parameters' gradients",
        ])
        .with_modules("`GroupNorm`"),
    Golden::new("instance_norm", group)
        .with_sharded(Dims::AllButChannels)
        .with_travels([
            "three numbers per channel",
            "two numbers per channel; sums of parameters' gradients",
        ])
        .with_modules("`InstanceNorm`"),
    batch::GOLDEN,
    weight::GOLDEN,
    Golden::new("layer_norm", layer)
        .with_travels([
            "– (over several dims: two means); features sharded: three numbers per row",
            "sums of parameters' gradients; features sharded: two numbers per row",
        ])
        .with_modules("`LayerNorm`"),
    Golden::new("rms_norm", |case| {
        with_dims!(case.dims(), D => {
            output(rms_norm(case.input::<D>(0)?, case.operand("weight"), epsilon(case)))
        })
    })
    .with_travels([
        "–; features sharded: a number per row",
        "sums of parameters' gradients; features sharded: a number per row",
    ])
    .with_modules("`RmsNorm`"),
];

/// Runs a case of a group or instance norm: without a number of groups, one for each channel.
fn group(case: &Case) -> Result<Box<dyn Output>> {
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        let groups = case.attributes.number("num_groups");
        let groups = groups.map_or(x.layout().shape()[1], |groups| groups as usize);
        let (weight, bias) = (case.operand("weight"), case.operand("bias"));
        output(group_norm(x, groups, weight, bias, epsilon(case)))
    })
}

fn layer(case: &Case) -> Result<Box<dyn Output>> {
    let normalized = case.attributes.list("normalized_shape");
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        if normalized.len() == 1 {
            let (weight, bias) = (case.operand("weight"), case.operand("bias"));
            return output(layer_norm(x, weight, bias, epsilon(case)));
        }
        let mut shape = [1; D];
        shape[D - normalized.len()..].copy_from_slice(&normalized);
        let parameter = |name: &str| -> Result<Option<Operand<D>>> {
            with_dims!(normalized.len(), N => {
                let parameter = case.parameter::<N>(name);
                Ok(parameter.map(|parameter| parameter.reshape(shape).into()))
            })
        };
        let (weight, bias) = (parameter("weight")?, parameter("bias")?);
        output(layer_norm_dims(x, normalized.len(), weight, bias, epsilon(case)))
    })
}

fn epsilon(case: &Case) -> f64 {
    case.attributes.number("eps").unwrap_or(1e-5)
}
