//! Registry entries of attention.

use super::dense::{AttentionOptions, scaled_dot_product_attention};
use super::neighborhood::{NeighborhoodOptions, neighborhood_attention};
use crate::golden::{Case, Dims, Golden, Output, output};
use crate::rearrange::permute;
use halocline_core::Result;

fn neighborhood<const N: usize, const D: usize>(case: &Case<'_>) -> Result<Box<dyn Output>> {
    let attributes = &case.attributes;
    let kernel = attributes.array::<N>("kernel_size", 0);
    let [dilation, stride] = ["dilation", "stride"].map(|key| attributes.array::<N>(key, 1));
    let flags = |key: &str| attributes.array::<N>(key, 0).map(|flag| flag == 1);
    let options = NeighborhoodOptions {
        scale: attributes.number("scale"),
        ..NeighborhoodOptions::new(kernel)
    };
    let options = options.with_dilation(dilation).with_stride(stride);
    let options = options
        .with_causal(flags("is_causal"))
        .with_periodic(flags("periodic"));
    let [q, k, v] = [case.input::<D>(0)?, case.input(1)?, case.input(2)?];
    output(neighborhood_attention(q, k, v, &options))
}

/// Registry entry of neighborhood attention in some number of dims.
const fn natten(name: &'static str, run: fn(&Case) -> Result<Box<dyn Output>>) -> Golden {
    Golden::new(name, run)
        .with_method("neighborhood_attention")
        .with_pytorch("natten.functional.na{1,2,3}d")
        .with_sharded(Dims::Alike)
        .with_travels(["halos of keys and values", "gradients of halos"])
}

/// Dense attention of `[batch, heads, tokens, width]`, whose shards become those of
/// `[batch, tokens, heads, width]`.
fn dense(case: &Case<'_>) -> Result<Box<dyn Output>> {
    let [q, k, v] = [case.input::<4>(0)?, case.input(1)?, case.input(2)?];
    let swapped = |x| permute(x, [0, 2, 1, 3]);
    let (q, k, v) = (swapped(q)?, swapped(k)?, swapped(v)?);
    let options = AttentionOptions {
        causal: case.attributes.is("is_causal"),
        scale: case.attributes.number("scale"),
        ..AttentionOptions::default()
    };
    output(swapped(scaled_dot_product_attention(q, k, v, &options)?))
}

/// Neighborhood and dense attention.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("scaled_dot_product_attention", dense)
        .with_sharded(Dims::Alike)
        .with_travels([
            "keys and values, round a ring",
            "keys, values and their gradients",
        ]),
    natten("na1d", neighborhood::<1, 4>),
    natten("na2d", neighborhood::<2, 5>),
    natten("na3d", neighborhood::<3, 6>),
];
