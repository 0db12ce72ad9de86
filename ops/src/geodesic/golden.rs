//! Operators on geodesic neighborhoods in the registry.

use super::attention::{GeodesicNeighborhood, sphere_attention};
use super::disco::{Disco, disco_conv};
use crate::golden::{Dims, Golden, output};
use crate::sphere::grid_of;

/// The operators.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("disco_conv", |case| {
        let sizes = ["in_shape", "out_shape", "kernel_shape"];
        let [input, out, kernel] = sizes.map(|key| case.attributes.array::<2>(key, 1));
        let radius = case.attributes.number("theta_cutoff");
        let kernels = Disco::new(input, out, kernel, grid_of(case), radius)?;
        let groups = case.attributes.list("groups")[0];
        let (weight, bias) = (case.needed("weight")?, case.operand("bias"));
        output(disco_conv(case.input(0)?, weight, bias, groups, &kernels))
    })
    .with_pytorch("torch_harmonics.DiscreteContinuousConvS2")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "rows of latitude that kernels reach; longitude, which is made whole",
        "the same back; sums of weights' gradients",
    ]),
    Golden::new("sphere_attention", |case| {
        let [queries, keys, values] = [0, 1, 2].map(|input| case.input::<4>(input));
        let queries = queries?;
        let [_, _, latitudes, longitudes] = queries.dims();
        let radius = case.attributes.number("theta_cutoff");
        let size = [latitudes, longitudes];
        let near = GeodesicNeighborhood::new(size, grid_of(case), radius)?;
        let heads = case.attributes.list("num_heads")[0];
        output(sphere_attention(queries, keys?, values?, heads, &near))
    })
    .with_pytorch("torch_harmonics.NeighborhoodAttentionS2")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "rows of latitude of keys and values; longitude, which is made whole",
        "the same back",
    ]),
];
