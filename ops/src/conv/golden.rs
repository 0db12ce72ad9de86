//! Convolutions in the registry.

use halocline_core::{Boundary, Result};

use super::{ConvOptions, conv};
use crate::driver::Padding;
use crate::golden::{Attributes, Case, Dims, Golden, Output, output};

/// The convolutions.
pub(crate) const OPERATORS: &[Golden] = &[
    golden("conv1d", "conv1d", "`Conv1d`", run::<3, 1>),
    golden("conv2d", "conv2d", "`Conv2d`", run::<4, 2>),
    golden("conv3d", "conv3d", "`Conv3d`", run::<5, 3>),
];

const fn golden(
    name: &'static str,
    pytorch: &'static str,
    modules: &'static str,
    run: fn(&Case) -> Result<Box<dyn Output>>,
) -> Golden {
    Golden {
        name,
        pytorch,
        sharded: Dims::AllButChannels,
        travels: ["halos", "halos back; sums of weights' gradients"],
        modules,
        run,
    }
}

fn run<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let attributes = &case.attributes;
    let options = ConvOptions::<N>::default()
        .with_stride(attributes.array("stride", 1))
        .with_dilation(attributes.array("dilation", 1))
        .with_padding(padding(attributes))
        .with_groups(attributes.number("groups").unwrap_or(1.0) as usize);
    let weight = case.needed::<D>("weight")?;
    output(conv(
        case.input::<D>(0)?,
        weight,
        case.operand("bias"),
        &options,
    ))
}

/// The padding of a case, on both sides alike.
pub(crate) fn padding<const N: usize>(attributes: &Attributes) -> [Padding; N] {
    let boundary = match attributes.text("padding_mode") {
        "circular" => Boundary::Periodic,
        "reflect" => Boundary::Reflect,
        "replicate" => Boundary::Replicate,
        _ => Boundary::Zeros,
    };
    attributes
        .array("padding", 0)
        .map(|width| Padding::new(width, boundary))
}
