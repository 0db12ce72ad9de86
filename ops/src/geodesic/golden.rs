//! Registry entries of the operators on geodesic neighborhoods.

use super::attention::{GeodesicNeighborhood, sphere_attention};
use super::basis::{DiscoBasis, DiscoKernel, DiscoNorm};
use super::disco::{Disco, disco_conv};
use super::transposed::{DiscoTranspose, disco_conv_transpose};
use crate::golden::{Case, Dims, Golden, output};
use crate::sphere::grids_of;

/// Basis functions named by `basis_type` and `kernel_shape`, with their normalization.
fn kernel_of(case: &Case) -> DiscoKernel {
    let [first, second] = case.attributes.array::<2>("kernel_shape", 1);
    let basis = match case.attributes.text("basis_type") {
        "harmonic" => DiscoBasis::Harmonic([first, second]),
        "morlet" => DiscoBasis::Morlet([first, second]),
        "zernike" => DiscoBasis::Zernike(first),
        "fourier-bessel" => DiscoBasis::FourierBessel([first, second]),
        _ => DiscoBasis::PiecewiseLinear([first, second]),
    };
    basis.with_norm(match case.attributes.text("basis_norm_mode") {
        "modal" => DiscoNorm::Modal,
        "mean" => DiscoNorm::Mean,
        "support" => DiscoNorm::Support,
        "geometric" => DiscoNorm::Geometric,
        "none" => DiscoNorm::None,
        _ => DiscoNorm::Nodal,
    })
}

/// Operators of this family.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("disco_conv", |case| {
        let [input, out] = ["in_shape", "out_shape"].map(|key| case.attributes.array::<2>(key, 1));
        let radius = case.attributes.number("theta_cutoff");
        let kernels = Disco::between([input, out], grids_of(case), kernel_of(case), radius)?;
        let groups = case.attributes.array_or::<1>("groups", [1])[0];
        let (weight, bias) = (case.needed("weight")?, case.operand("bias"));
        output(disco_conv(case.input(0)?, weight, bias, groups, &kernels))
    })
    .with_pytorch("torch_harmonics.DiscreteContinuousConvS2")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "rows of latitude that kernels reach; longitude, which is made whole",
        "the same back; sums of weights' gradients",
    ]),
    Golden::new("disco_conv_transpose", |case| {
        let sizes = ["in_shape", "out_shape"].map(|key| case.attributes.array::<2>(key, 1));
        let radius = case.attributes.number("theta_cutoff");
        let kernels = DiscoTranspose::between(sizes, grids_of(case), kernel_of(case), radius)?;
        let groups = case.attributes.array_or::<1>("groups", [1])[0];
        let (weight, bias) = (case.needed("weight")?, case.operand("bias"));
        let y = disco_conv_transpose(case.input(0)?, weight, bias, groups, &kernels);
        output(y)
    })
    .with_pytorch("torch_harmonics.DiscreteContinuousConvTransposeS2")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "rows of latitude that kernels reach, times functions; longitude, which is made whole",
        "the same back; sums of weights' gradients",
    ]),
    Golden::new("sphere_attention", |case| {
        let [queries, keys, values] = [0, 1, 2].map(|input| case.input::<4>(input));
        let queries = queries?;
        let keys = keys?;
        let sizes = [&keys, &queries].map(|tensor| [tensor.dims()[2], tensor.dims()[3]]);
        let radius = case.attributes.number("theta_cutoff");
        let near = GeodesicNeighborhood::between(sizes, grids_of(case), radius)?;
        let heads = case.attributes.array_or::<1>("num_heads", [1])[0];
        output(sphere_attention(queries, keys, values?, heads, &near))
    })
    .with_pytorch("torch_harmonics.NeighborhoodAttentionS2")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "rows of latitude of keys and values; longitude, which is made whole",
        "the same back",
    ]),
];
