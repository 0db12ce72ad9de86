//! Losses in the registry.

use halocline_core::{Error, Result, ShardTensor};

use super::{
    CrossEntropyOptions, Penalty, Reduction, cross_entropy, cross_entropy_cells, huber_loss,
    l1_loss, mse_loss, weighted_loss,
};
use crate::golden::{Case, Dims, Golden, Output, output, with_dims};

/// The losses.
pub(crate) const OPERATORS: &[Golden] = &[
    cross_entropy_golden("cross_entropy"),
    cross_entropy_golden("cross_entropy_spatial"),
    golden(
        "mse_loss",
        |case| with_dims!(case.dims(), D => loss::<D>(case, Penalty::Squared, mse_loss)),
    ),
    golden(
        "l1_loss",
        |case| with_dims!(case.dims(), D => loss::<D>(case, Penalty::Absolute, l1_loss)),
    ),
    golden("huber_loss", |case| {
        let delta = case.attributes.number("delta").unwrap_or(1.0);
        with_dims!(case.dims(), D => {
            loss::<D>(case, Penalty::Huber(delta), |x, target, reduction| {
                huber_loss(x, target, delta, reduction)
            })
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

/// A loss, of elements with weights if the case has them.
fn loss<const D: usize>(
    case: &Case,
    penalty: Penalty,
    plain: impl Fn(ShardTensor<D>, ShardTensor<D>, Reduction) -> ShardTensor<1>,
) -> Result<Box<dyn Output>> {
    let (x, target, reduction) = (case.input(0)?, case.input(1)?, reduction(case));
    output(match case.indices::<D>(2) {
        Ok(weight) => weighted_loss(x, target, weight.float(), penalty, reduction),
        Err(_) => Ok(plain(x, target, reduction)),
    })
}

const fn golden(name: &'static str, run: fn(&Case) -> Result<Box<dyn Output>>) -> Golden {
    Golden {
        name,
        pytorch: name,
        sharded: Dims::All,
        travels: [
            "– (the result is partial); the mean of weights, if there are any",
            "–",
        ],
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
