//! Registry entries of norms.

use burn::tensor::DType;
use halocline_core::Result;

use super::{batch, group_norm, layer_norm, layer_norm_dims, rms_norm, rms_norm_dims, weight};
use crate::golden::{Case, Golden, Output, output, with_dims};
use crate::operand::Operand;

/// Operators of this family.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("group_norm", group)
        .with_travels([
            "three numbers per group",
            "two numbers per group; sums of parameters' gradients",
        ])
        .with_modules("`GroupNorm`"),
    Golden::new("instance_norm", group)
        .with_method("group_norm")
        .with_travels([
            "three numbers per channel",
            "two numbers per channel; sums of parameters' gradients",
        ])
        .with_modules("`InstanceNorm`"),
    batch::GOLDEN,
    weight::GOLDEN,
    Golden::new("layer_norm", layer)
        .with_travels([
            "–; features sharded: three numbers per row",
            "sums of parameters' gradients; features sharded: two numbers per row",
        ])
        .with_modules("`LayerNorm`"),
    Golden::new("rms_norm", root_mean_square)
        .with_travels([
            "–; features sharded: a number per row",
            "sums of parameters' gradients; features sharded: a number per row",
        ])
        .with_modules("`RmsNorm`"),
];

/// Runs a group or instance norm; without a number of groups, each channel is one.
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
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        let dims = normalized(case, &x.dims());
        if dims == 1 {
            let (weight, bias) = (case.operand("weight"), case.operand("bias"));
            return output(layer_norm(x, weight, bias, epsilon(case)));
        }
        let (weight, bias) = (parameter::<D>(case, "weight", dims)?, parameter(case, "bias", dims)?);
        output(layer_norm_dims(x, dims, weight, bias, epsilon(case)))
    })
}

fn root_mean_square(case: &Case) -> Result<Box<dyn Output>> {
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        let epsilon = rms_epsilon(case, x.local().dtype());
        let dims = normalized(case, &x.dims());
        if dims == 1 {
            return output(rms_norm(x, case.operand("weight"), epsilon));
        }
        output(rms_norm_dims(x, dims, parameter::<D>(case, "weight", dims)?, epsilon))
    })
}

/// Number of trailing dims to normalize over, by default one.
fn normalized(case: &Case, shape: &[usize]) -> usize {
    let dims = case.attributes.list("normalized_shape").len();
    let dims = dims.clamp(1, shape.len());
    let expected = &shape[shape.len() - dims..];
    case.attributes.require("normalized_shape", expected);
    dims
}

/// Reads a parameter of the trailing dims, with size one in the others.
fn parameter<const D: usize>(case: &Case, name: &str, dims: usize) -> Result<Option<Operand<D>>> {
    with_dims!(dims, N => {
        let parameter = case.parameter::<N>(name);
        Ok(parameter.map(|parameter| {
            let mut shape = [1; D];
            shape[D - N..].copy_from_slice(&parameter.dims());
            parameter.reshape(shape).into()
        }))
    })
}

/// Default ε of root mean squares, which PyTorch derives from the element type.
fn rms_epsilon(case: &Case, dtype: DType) -> f64 {
    let default = match dtype {
        DType::F64 => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    };
    case.attributes.number("eps").unwrap_or(default)
}

fn epsilon(case: &Case) -> f64 {
    case.attributes.number("eps").unwrap_or(1e-5)
}
