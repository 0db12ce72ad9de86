//! Registry entries of losses.

use halocline_core::{Boundary, Result, ShardTensor};

use super::{
    BinaryCrossEntropyOptions, CrossEntropyOptions, GaussianNllOptions, Penalty, Reduction,
    SsimOptions, binary_cross_entropy_with_logits, cross_entropy, cross_entropy_cells,
    gaussian_nll_loss, gradient_loss, huber_loss, l1_loss, mse_loss, spectral_loss, ssim_loss,
    total_variation, weighted_loss,
};
use crate::golden::{Case, Dims, Golden, Output, no_case, output, with_dims};

/// Operators of this family.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("cross_entropy", entropy_of)
        .with_pytorch("cross_entropy")
        .with_sharded(Dims::Classes)
        .with_travels(CLASSES),
    Golden::new("cross_entropy_spatial", entropy_of)
        .with_method("cross_entropy")
        .with_pytorch("cross_entropy")
        .with_sharded(Dims::Classes)
        .with_travels(CLASSES),
    Golden::new(
        "mse_loss",
        |case| with_dims!(case.dims(), D => loss::<D>(case, Penalty::Squared, mse_loss)),
    )
    .with_travels(TRAVELS),
    Golden::new(
        "l1_loss",
        |case| with_dims!(case.dims(), D => loss::<D>(case, Penalty::Absolute, l1_loss)),
    )
    .with_travels(TRAVELS),
    Golden::new("spectral_loss", |case| match case.dims() {
        3 => spectrum::<3, 4>(case),
        4 => spectrum::<4, 5>(case),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("fft.rfftn, abs, mse_loss")
    .with_travels([
        "cells, so that each dim is whole once (the result is partial)",
        "the same back",
    ]),
    Golden::new("huber_loss", |case| {
        let delta = case.attributes.number("delta").unwrap_or(1.0);
        with_dims!(case.dims(), D => {
            loss::<D>(case, Penalty::Huber(delta), |x, target, reduction| {
                huber_loss(x, target, delta, reduction)
            })
        })
    })
    .with_travels(TRAVELS),
    Golden::new(
        "binary_cross_entropy_with_logits",
        |case| with_dims!(case.dims(), D => binary::<D>(case)),
    )
    .with_travels(TRAVELS),
    Golden::new(
        "gaussian_nll_loss",
        |case| with_dims!(case.dims(), D => gaussian::<D>(case)),
    )
    .with_travels(TRAVELS),
    Golden::new("total_variation", |case| {
        with_dims!(case.dims(), D => {
            output(total_variation(case.input::<D>(0)?, &dims(case), reduction(case)))
        })
    })
    .with_pytorch("diff")
    .with_travels(SIDES),
    Golden::new("gradient_loss", |case| {
        with_dims!(case.dims(), D => {
            let (x, target) = (case.input::<D>(0)?, case.input(1)?);
            output(gradient_loss(x, target, &dims(case), reduction(case)))
        })
    })
    .with_pytorch("diff")
    .with_travels(SIDES),
    Golden::new("ssim_loss", |case| match case.dims() {
        3 => similarity::<3, 1>(case),
        4 => similarity::<4, 2>(case),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("conv")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "means of channels, and halos (the result is partial)",
        "halos back",
    ]),
];

/// Data sent for differences of neighbours.
const SIDES: [&str; 2] = [
    "a cell at each side (the result is partial)",
    "the same back",
];

/// Dims of differences, all with the same boundary.
fn dims(case: &Case) -> Vec<(usize, Boundary)> {
    let boundary = case.attributes.boundary("mode");
    let dims = case.attributes.dims("dims", case.dims()).into_iter();
    dims.map(|dim| (dim, boundary)).collect()
}

fn spectrum<const D: usize, const E: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let (x, target) = (case.input::<D>(0)?, case.input::<D>(1)?);
    let dims = case.attributes.dims("dim", case.dims());
    output(spectral_loss::<E, _, _>(x, target, &dims, reduction(case)))
}

fn similarity<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let number = |key: &str| case.attributes.number(key).unwrap_or(1.0);
    let options = SsimOptions::<N>::new(number("data_range"))
        .with_window(case.attributes.array("window", 11), number("sigma"))
        .with_padding(case.attributes.padding());
    let (x, target) = (case.input::<D>(0)?, case.input(1)?);
    output(ssim_loss(x, target, &options, reduction(case)))
}

/// Data sent for classes.
const CLASSES: [&str; 2] = [
    "maximum and one sum where classes are sharded (the result is partial)",
    "–",
];

/// Runs the cross-entropy for the number of dims of its logits.
fn entropy_of(case: &Case) -> Result<Box<dyn Output>> {
    match case.dims() {
        2 => entropy::<2, 1>(case),
        3 => entropy::<3, 2>(case),
        4 => entropy::<4, 3>(case),
        dims => Err(no_case(dims)),
    }
}

fn entropy<const D: usize, const E: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let weights = (case.inputs() > 2)
        .then(|| case.input::<1>(2))
        .transpose()?;
    let weights = weights.map(|weights| weights.into_local().into_data().iter::<f64>().collect());
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

/// Runs a loss, weighted if the case has weights.
fn loss<const D: usize>(
    case: &Case,
    penalty: Penalty,
    plain: impl Fn(ShardTensor<D>, ShardTensor<D>, Reduction) -> Result<ShardTensor<1>>,
) -> Result<Box<dyn Output>> {
    let (x, target, reduction) = (case.input(0)?, case.input(1)?, reduction(case));
    if case.inputs() < 3 {
        return output(plain(x, target, reduction));
    }
    let weight = case.indices::<D>(2).map(|weight| weight.float());
    let weight = weight.or_else(|_| case.input(2))?;
    output(weighted_loss(x, target, weight, penalty, reduction))
}

fn binary<const D: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let (logits, target) = (case.input::<D>(0)?, case.input(1)?);
    let options = BinaryCrossEntropyOptions {
        pos_weight: Some(case.attributes.numbers("pos_weight").to_vec()),
    };
    let reduction = reduction(case);
    output(binary_cross_entropy_with_logits(
        logits, target, None, &options, reduction,
    ))
}

fn gaussian<const D: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let (x, target, variance) = (case.input::<D>(0)?, case.input(1)?, case.input(2)?);
    let options = GaussianNllOptions::default().with_full(case.attributes.is("full"));
    let reduction = reduction(case);
    output(gaussian_nll_loss(
        x, target, variance, None, &options, reduction,
    ))
}

/// Data sent for other losses.
const TRAVELS: [&str; 2] = [
    "– (the result is partial); the mean of weights, if there are any",
    "–",
];

fn reduction(case: &Case) -> Reduction {
    let reductions = [("mean", Reduction::Mean), ("sum", Reduction::Sum)];
    case.attributes.choice("reduction", &reductions)
}
