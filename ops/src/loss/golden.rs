//! Losses in the registry.

use halocline_core::{Error, Result};

use super::{
    CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_cells, huber_loss, l1_loss,
    mse_loss, spectral_loss,
};
use crate::golden::{Case, Dims, Golden, Output, output, with_dims};

/// The losses.
pub(crate) const OPERATORS: &[Golden] = &[
    cross_entropy_golden("cross_entropy"),
    cross_entropy_golden("cross_entropy_spatial"),
    golden(
        "mse_loss",
        |case| with_dims!(case.dims(), D => output(Ok(mse_loss(case.input::<D>(0)?, case.input(1)?, reduction(case))))),
    ),
    golden(
        "l1_loss",
        |case| with_dims!(case.dims(), D => output(Ok(l1_loss(case.input::<D>(0)?, case.input(1)?, reduction(case))))),
    ),
    Golden {
        name: "spectral_loss",
        pytorch: "fft.rfftn, abs, mse_loss",
        sharded: Dims::All,
        travels: [
            "cells, so that each dim is whole once (the result is partial)",
            "the same back",
        ],
        modules: "",
        run: |case| {
            let dims = case.attributes.list("dim");
            match case.dims() {
                3 => {
                    let (x, target) = (case.input::<3>(0)?, case.input::<3>(1)?);
                    output(Ok(spectral_loss::<4, _, _>(
                        x,
                        target,
                        &dims,
                        reduction(case),
                    )))
                }
                4 => {
                    let (x, target) = (case.input::<4>(0)?, case.input::<4>(1)?);
                    output(Ok(spectral_loss::<5, _, _>(
                        x,
                        target,
                        &dims,
                        reduction(case),
                    )))
                }
                dims => Err(Error::other(format!("an input of {dims} dims"))),
            }
        },
    },
    golden("huber_loss", |case| {
        let delta = case.attributes.number("delta").unwrap_or(1.0);
        with_dims!(case.dims(), D => {
            output(Ok(huber_loss(case.input::<D>(0)?, case.input(1)?, delta, reduction(case))))
        })
    }),
];

/// The cross-entropy, by the number of dims of its logits.
const fn cross_entropy_golden(name: &'static str) -> Golden {
    Golden {
        name,
        pytorch: "cross_entropy",
        sharded: Dims::Classes,
        travels: [
            "maximum and one sum where classes are sharded (the result is partial)",
            "–",
        ],
        modules: "",
        run: |case| match case.dims() {
            2 => entropy::<2, 1>(case),
            3 => entropy::<3, 2>(case),
            4 => entropy::<4, 3>(case),
            dims => Err(Error::other(format!("logits of {dims} dims"))),
        },
    }
}

fn entropy<const D: usize, const E: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let weights = case.input::<1>(2).ok();
    let weights = weights.map(|weights| weights.into_parts().0.into_data().iter::<f64>().collect());
    let options = CrossEntropyOptions {
        label_smoothing: case.attributes.number("label_smoothing").unwrap_or(0.0),
        ignore_index: case
            .attributes
            .number("ignore_index")
            .map(|index| index as i64),
        weights,
    };
    let (logits, target) = (case.input::<D>(0)?, case.indices::<E>(1)?);
    match case.attributes.text("reduction") {
        "none" => output(cross_entropy_cells(logits, target, &options)),
        _ => output(cross_entropy(logits, target, &options, reduction(case))),
    }
}

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
