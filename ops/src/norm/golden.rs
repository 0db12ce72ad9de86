//! Norms in the registry.

use halocline_core::{Error, Result};

use super::{group_norm, layer_norm};
use crate::golden::{Case, Dims, Golden, Output, output, with_dims};

/// The norms.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden {
        name: "group_norm",
        pytorch: "group_norm",
        sharded: Dims::AllButChannels,
        travels: [
            "three numbers per group",
            "two numbers per group; sums of parameters' gradients",
        ],
        modules: "`GroupNorm`",
        run: group,
    },
    Golden {
        name: "instance_norm",
        pytorch: "instance_norm",
        sharded: Dims::AllButChannels,
        travels: [
            "three numbers per channel",
            "two numbers per channel; sums of parameters' gradients",
        ],
        modules: "`InstanceNorm`",
        run: group,
    },
    Golden {
        name: "layer_norm",
        pytorch: "layer_norm",
        sharded: Dims::AllButLast,
        travels: ["–", "sums of parameters' gradients"],
        modules: "",
        run: layer,
    },
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
    if normalized.len() != 1 {
        return Err(Error::other(format!(
            "layer_norm over {normalized:?}; expected the last dim"
        )));
    }
    with_dims!(case.dims(), D => {
        let (weight, bias) = (case.operand("weight"), case.operand("bias"));
        output(layer_norm(case.input::<D>(0)?, weight, bias, epsilon(case)))
    })
}

fn epsilon(case: &Case) -> f64 {
    case.attributes.number("eps").unwrap_or(1e-5)
}
