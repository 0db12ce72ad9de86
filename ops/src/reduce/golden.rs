//! Reductions in the registry.

use halocline_core::{ReduceOp, Result};

use super::{cumulative, extreme, extremum_dims, mean_dims, norm, sum_dims, variance};
use crate::golden::{Case, Dims, Golden, Output, output, with_dims};

/// The reductions.
pub(crate) const OPERATORS: &[Golden] = {
    let [var, std] = variance::GOLDEN;
    let [argmax, argmin, topk] = extreme::GOLDEN;
    let [cumsum, cumprod] = cumulative::GOLDEN;
    &[
        golden(
            "sum",
            "sum",
            |case| with_dims!(case.dims(), D => output(sum_dims(case.input::<D>(0)?, &dims(case)))),
        ),
        golden(
            "mean",
            "mean",
            |case| with_dims!(case.dims(), D => output(mean_dims(case.input::<D>(0)?, &dims(case)))),
        ),
        golden(
            "max",
            "amax",
            |case| with_dims!(case.dims(), D => output(extremum_dims(case.input::<D>(0)?, &dims(case), ReduceOp::Max))),
        ),
        golden(
            "min",
            "amin",
            |case| with_dims!(case.dims(), D => output(extremum_dims(case.input::<D>(0)?, &dims(case), ReduceOp::Min))),
        ),
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

const fn golden(
    name: &'static str,
    pytorch: &'static str,
    run: fn(&Case) -> Result<Box<dyn Output>>,
) -> Golden {
    Golden {
        name,
        pytorch,
        sharded: Dims::All,
        travels: ["– (the result is partial)", "–"],
        modules: "",
        run,
    }
}

fn dims(case: &Case) -> Vec<usize> {
    case.attributes.list("dims")
}
