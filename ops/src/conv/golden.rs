//! Convolutions in the registry.

use halocline_core::Result;

use super::{ConvOptions, conv, fold, transposed, unfold};
use crate::golden::{Case, Dims, Golden, Output, output};

/// The convolutions.
pub(crate) const OPERATORS: &[Golden] = {
    let [transposed1d, transposed2d, transposed3d] = transposed::GOLDEN;
    &[
        Golden::new("conv1d", run::<3, 1>)
            .with_sharded(Dims::AllButChannels)
            .with_travels(TRAVELS)
            .with_modules("`Conv1d`"),
        Golden::new("conv2d", run::<4, 2>)
            .with_sharded(Dims::AllButChannels)
            .with_travels(TRAVELS)
            .with_modules("`Conv2d`"),
        Golden::new("conv3d", run::<5, 3>)
            .with_sharded(Dims::AllButChannels)
            .with_travels(TRAVELS)
            .with_modules("`Conv3d`"),
        transposed1d,
        transposed2d,
        transposed3d,
        unfold::GOLDEN,
        fold::GOLDEN,
    ]
};

/// What travels, forward and backward.
const TRAVELS: [&str; 2] = ["halos", "halos back; sums of weights' gradients"];

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
