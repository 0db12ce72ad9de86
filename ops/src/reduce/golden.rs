//! Registry entries of reductions.

use halocline_core::ReduceOp;

use super::{cumulative, extreme, extremum_dims, mean_dims, norm, sum_dims, variance};
use crate::golden::{Case, Golden, output, reduced, with_dims};

/// Reductions.
pub(crate) const OPERATORS: &[Golden] = {
    let [var, std] = variance::GOLDEN;
    let [argmax, argmin, topk] = extreme::GOLDEN;
    let [cumsum, cumprod] = cumulative::GOLDEN;
    &[
        Golden::new("sum", |case| {
            with_dims!(case.dims(), D => {
                reduced(case, &dims(case), output(sum_dims(case.input::<D>(0)?, &dims(case))))
            })
        })
        .with_method("sum_dims")
        .with_travels(TRAVELS),
        Golden::new("mean", |case| {
            with_dims!(case.dims(), D => {
                reduced(case, &dims(case), output(mean_dims(case.input::<D>(0)?, &dims(case))))
            })
        })
        .with_method("mean_dims")
        .with_travels(TRAVELS),
        Golden::new("max", |case| {
            with_dims!(case.dims(), D => {
                reduced(case, &dims(case), output(extremum_dims(case.input::<D>(0)?, &dims(case), ReduceOp::Max)))
            })
        })
        .with_method("max_dims")
        .with_pytorch("amax")
        .with_travels(EXTREMUM),
        Golden::new("min", |case| {
            with_dims!(case.dims(), D => {
                reduced(case, &dims(case), output(extremum_dims(case.input::<D>(0)?, &dims(case), ReduceOp::Min)))
            })
        })
        .with_method("min_dims")
        .with_pytorch("amin")
        .with_travels(EXTREMUM),
        var,
        std,
        norm::GOLDEN,
        argmax,
        argmin,
        topk,
        cumsum,
        cumprod,
    ]
};

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = ["– (the result is partial)", "–"];

/// Communication of extrema, forward and backward.
const EXTREMUM: [&str; 2] = ["an extremum", "the number of cells that hold it"];

fn dims(case: &Case) -> Vec<usize> {
    case.attributes.dims("dims", case.dims())
}
