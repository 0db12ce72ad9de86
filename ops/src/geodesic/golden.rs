//! Operators on geodesic neighborhoods in the registry.

use super::attention::{GeodesicNeighborhood, sphere_attention};
use super::disco::{Disco, disco_conv};
use crate::golden::{Case, Dims, Golden, output};
use crate::sphere::SphereGrid;

/// The operators.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden {
        name: "disco_conv",
        pytorch: "torch_harmonics.DiscreteContinuousConvS2",
        sharded: Dims::AllButChannels,
        travels: [
            "rows of latitude that kernels reach; longitude, which is made whole",
            "the same back; sums of weights' gradients",
        ],
        modules: "",
        run: |case| {
            let sizes = ["in_shape", "out_shape", "kernel_shape"];
            let [input, out, kernel] = sizes.map(|key| case.attributes.array::<2>(key, 1));
            let radius = case.attributes.number("theta_cutoff");
            let kernels = Disco::new(input, out, kernel, grid(case), radius)?;
            let groups = case.attributes.list("groups")[0];
            let (weight, bias) = (case.needed("weight")?, case.operand("bias"));
            output(disco_conv(case.input(0)?, weight, bias, groups, &kernels))
        },
    },
    Golden {
        name: "sphere_attention",
        pytorch: "torch_harmonics.NeighborhoodAttentionS2",
        sharded: Dims::AllButChannels,
        travels: [
            "rows of latitude of keys and values; longitude, which is made whole",
            "the same back",
        ],
        modules: "",
        run: |case| {
            let [queries, keys, values] = [0, 1, 2].map(|input| case.input::<4>(input));
            let queries = queries?;
            let [_, _, latitudes, longitudes] = queries.dims();
            let radius = case.attributes.number("theta_cutoff");
            let size = [latitudes, longitudes];
            let near = GeodesicNeighborhood::new(size, grid(case), radius)?;
            let heads = case.attributes.list("num_heads")[0];
            output(sphere_attention(queries, keys?, values?, heads, &near))
        },
    },
];

fn grid(case: &Case) -> SphereGrid {
    match case.attributes.text("grid") {
        "legendre-gauss" => SphereGrid::LegendreGauss,
        "lobatto" => SphereGrid::Lobatto,
        _ => SphereGrid::Equiangular,
    }
}
