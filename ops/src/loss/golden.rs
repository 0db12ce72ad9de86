//! Losses in the registry.

use halocline_core::Result;

use super::{Reduction, huber_loss, l1_loss, mse_loss};
use crate::golden::{Case, Dims, Golden, Output, output, with_dims};

/// The losses.
pub(crate) const OPERATORS: &[Golden] = &[
    golden(
        "mse_loss",
        |case| with_dims!(case.dims(), D => output(Ok(mse_loss(case.input::<D>(0)?, case.input(1)?, reduction(case))))),
    ),
    golden(
        "l1_loss",
        |case| with_dims!(case.dims(), D => output(Ok(l1_loss(case.input::<D>(0)?, case.input(1)?, reduction(case))))),
    ),
    golden("huber_loss", |case| {
        let delta = case.attributes.number("delta").unwrap_or(1.0);
        with_dims!(case.dims(), D => {
            output(Ok(huber_loss(case.input::<D>(0)?, case.input(1)?, delta, reduction(case))))
        })
    }),
];

const fn golden(name: &'static str, run: fn(&Case) -> Result<Box<dyn Output>>) -> Golden {
    Golden {
        name,
        pytorch: name,
        sharded: Dims::All,
        travels: ["– (the result is partial)", "–"],
        modules: "",
        run,
    }
}

fn reduction(case: &Case) -> Reduction {
    match case.attributes.text("reduction") {
        "sum" => Reduction::Sum,
        _ => Reduction::Mean,
    }
}
