//! Registry entries of the convolutions.

use halocline_core::Result;

use super::{ConvOptions, conv, fold, transposed, unfold};
use crate::driver::Padding;
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

/// Data sent in the forward and in the backward pass.
const TRAVELS: [&str; 2] = ["halos", "halos back; sums of weights' gradients"];

fn run<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let attributes = &case.attributes;
    let weight = case.needed::<D>("weight")?;
    let dilation = attributes.array("dilation", 1);
    let as_wide = |dim: usize| {
        let both = dilation[dim] * (weight.dims()[2 + dim] - 1);
        let boundary = attributes.boundary("padding_mode");
        Padding::zeros(both / 2, both.div_ceil(2)).with_boundary(boundary)
    };
    let padding = if attributes.choice("padding", &[("valid", false), ("same", true)]) {
        std::array::from_fn(as_wide)
    } else {
        attributes.padding()
    };
    let options = ConvOptions::<N>::default()
        .with_stride(attributes.array("stride", 1))
        .with_dilation(dilation)
        .with_padding(padding)
        .with_groups(attributes.number("groups").unwrap_or(1.0) as usize);
    output(conv(
        case.input::<D>(0)?,
        weight,
        case.operand("bias"),
        &options,
    ))
}
