//! Interpolation in the registry.

use halocline_core::{Boundary, Error, Result};

use super::{upsample_bilinear, upsample_nearest};
use crate::golden::{Case, Dims, Golden, Output, output};

/// The interpolations.
pub(crate) const OPERATORS: &[Golden] = &[Golden {
    name: "interpolate2d",
    pytorch: "interpolate (nearest, bilinear; by two)",
    sharded: Dims::All,
    travels: ["bilinear: a halo of one cell", "halos back"],
    modules: "",
    run,
}];

fn run(case: &Case) -> Result<Box<dyn Output>> {
    let x = case.input::<4>(0)?;
    let from = x.dims();
    let twice = case.attributes.array("output_size", 0) == [2 * from[2], 2 * from[3]];
    let aligned = case.attributes.is("align_corners");
    match case.attributes.text("mode") {
        "nearest" if twice => output(upsample_nearest(x, 2)),
        "bilinear" if twice && !aligned => output(upsample_bilinear(x, [Boundary::Replicate; 2])),
        _ => Err(Error::other("no interpolation of this kind yet")),
    }
}
