//! Registry entries of pooling.

use halocline_core::Result;

use super::{PaddingCount, PoolOptions, adaptive, avg_pool, lp_pool, max_pool};
use crate::driver::Rounding;
use crate::golden::{Case, Golden, Options, Output, output};

/// Pooling operators.
pub(crate) const OPERATORS: &[Golden] = {
    let [
        average1d,
        average2d,
        average3d,
        maximum1d,
        maximum2d,
        maximum3d,
    ] = adaptive::GOLDEN;
    &[
        Golden::new("max_pool1d", maximum::<3, 1>)
            .with_travels(TRAVELS)
            .with_modules("`MaxPool1d`"),
        Golden::new("max_pool2d", maximum::<4, 2>)
            .with_travels(TRAVELS)
            .with_modules("`MaxPool2d`"),
        Golden::new("max_pool3d", maximum::<5, 3>).with_travels(TRAVELS),
        Golden::new("avg_pool1d", average::<3, 1>)
            .with_travels(TRAVELS)
            .with_modules("`AvgPool1d`"),
        Golden::new("avg_pool2d", average::<4, 2>)
            .with_travels(TRAVELS)
            .with_modules("`AvgPool2d`"),
        Golden::new("avg_pool3d", average::<5, 3>).with_travels(TRAVELS),
        Golden::new("lp_pool1d", norm::<3, 1>).with_travels(TRAVELS),
        Golden::new("lp_pool2d", norm::<4, 2>).with_travels(TRAVELS),
        Golden::new("lp_pool3d", norm::<5, 3>).with_travels(TRAVELS),
        average1d,
        average2d,
        average3d,
        maximum1d,
        maximum2d,
        maximum3d,
    ]
};

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = ["halos where windows cross shards", "halos back"];

fn maximum<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    output(max_pool(
        case.input::<D>(0)?,
        &options::<N>(&case.attributes),
    ))
}

fn average<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    output(avg_pool(
        case.input::<D>(0)?,
        &options::<N>(&case.attributes),
    ))
}

fn norm<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let order = case.attributes.number("norm_type").unwrap_or(2.0);
    let options = options::<N>(&case.attributes);
    output(lp_pool(case.input::<D>(0)?, order, &options))
}

fn options<const N: usize>(attributes: &Options<'_>) -> PoolOptions<N> {
    let rounding = if attributes.is("ceil_mode") {
        Rounding::Ceil
    } else {
        Rounding::Floor
    };
    let count = match attributes.number("count_include_pad") {
        Some(0.0) => PaddingCount::Excluded,
        _ => PaddingCount::Included,
    };
    let kernel = attributes.array("kernel_size", 1);
    PoolOptions::new(kernel)
        .with_stride(attributes.array_or("stride", kernel))
        .with_padding(attributes.padding())
        .with_dilation(attributes.array("dilation", 1))
        .with_rounding(rounding)
        .with_count(count)
}
