//! Convolutions in the registry.

use halocline_core::Result;

use super::{ConvOptions, conv, transposed, unfold};
use crate::golden::{Case, Dims, Golden, Output, output};

/// The convolutions.
pub(crate) const OPERATORS: &[Golden] = {
    let [unfold, fold] = unfold::GOLDEN;
    let [transposed1d, transposed2d, transposed3d] = transposed::GOLDEN;
    &[
        golden("conv1d", "conv1d", "`Conv1d`", run::<3, 1>),
        golden("conv2d", "conv2d", "`Conv2d`", run::<4, 2>),
        golden("conv3d", "conv3d", "`Conv3d`", run::<5, 3>),
        transposed1d,
        transposed2d,
        transposed3d,
        unfold,
        fold,
    ]
};

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
        .with_padding(attributes.padding())
        .with_groups(attributes.number("groups").unwrap_or(1.0) as usize);
    let weight = case.needed::<D>("weight")?;
    output(conv(
        case.input::<D>(0)?,
        weight,
        case.operand("bias"),
        &options,
    ))
}
