//! Registry entries of the spectral transforms.

use burn::tensor::Tensor;
use halocline_core::Result;

use super::conv::spectral_conv;
use super::fft::{FftNorm, dct, fft, idct, ifft, irfft, rfft};
use crate::golden::{Case, Dims, Golden, Output, no_case, output, with_dims};
use crate::rearrange::squeeze_dim;
use crate::reduce::sum_dims;

const ALL_TO_ALL: [&str; 2] = ["cells, so that each dim is whole once", "the same back"];

/// Spectral transforms, products and convolutions.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("rfft", |case| match case.dims() {
        1 => real::<1, 2>(case),
        2 => real::<2, 3>(case),
        3 => real::<3, 4>(case),
        4 => real::<4, 5>(case),
        5 => real::<5, 6>(case),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("fft.rfftn")
    .with_sharded(Dims::InTurn(0))
    .with_travels(ALL_TO_ALL),
    Golden::new("irfft", |case| match case.dims() {
        2 => to_real::<2, 1>(case),
        3 => to_real::<3, 2>(case),
        4 => to_real::<4, 3>(case),
        5 => to_real::<5, 4>(case),
        6 => to_real::<6, 5>(case),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("fft.irfftn")
    .with_sharded(Dims::InTurn(1))
    .with_travels(ALL_TO_ALL),
    Golden::new("fft", |case| {
        with_dims!(case.dims(), D => output(fft(case.input::<D>(0)?, &case.attributes.dims("dim", D - 1), norm(case))))
    })
    .with_pytorch("fft.fftn")
    .with_sharded(Dims::InTurn(1))
    .with_travels(ALL_TO_ALL),
    Golden::new("ifft", |case| {
        with_dims!(case.dims(), D => output(ifft(case.input::<D>(0)?, &case.attributes.dims("dim", D - 1), norm(case))))
    })
    .with_pytorch("fft.ifftn")
    .with_sharded(Dims::InTurn(1))
    .with_travels(ALL_TO_ALL),
    Golden::new("dct", |case| {
        with_dims!(case.dims(), D => output(dct(case.input::<D>(0)?, &case.attributes.dims("dim", D), norm(case))))
    })
    .with_pytorch("scipy.fft.dctn")
    .with_sharded(Dims::InTurn(0))
    .with_travels(ALL_TO_ALL),
    Golden::new("idct", |case| {
        with_dims!(case.dims(), D => output(idct(case.input::<D>(0)?, &case.attributes.dims("dim", D), norm(case))))
    })
    .with_pytorch("scipy.fft.idctn")
    .with_sharded(Dims::InTurn(0))
    .with_travels(ALL_TO_ALL),
    Golden::new("spectral_conv", |case| match case.dims() {
        3 => convolved::<3, 4>(case),
        4 => convolved::<4, 5>(case),
        5 => convolved::<5, 6>(case),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("SpectralConv2d of Li et al.")
    .with_sharded(Dims::AllButChannels)
    .with_travels(MODES),
    Golden::new("spectral_conv2d", |case| {
        let parts = [case.needed::<4>("wr")?, case.needed("wi")?];
        case.attributes.require("modes", &parts[0].dims()[2..]);
        norm(case); // norms do not matter: the inverse undoes the factor
        output(spectral_conv::<4, 5>(case.input(0)?, Tensor::stack(parts.into(), 4)))
    })
    .with_pytorch("fft.rfft2, einsum, fft.irfft2")
    .with_sharded(Dims::AllButChannels)
    .with_travels(MODES),
    Golden::new("rfft2_power", |case| {
        let modes = rfft::<4, 5>(case.input(0)?, &[2, 3], FftNorm::Ortho)?;
        output(squeeze_dim::<5, 4, _>(sum_dims(modes.square(), &[4])?, 4))
    })
    .with_method("")
    .with_pytorch("fft.rfft2, abs, square")
    .with_travels(ALL_TO_ALL),
];

/// Communication of products of modes.
const MODES: [&str; 2] = [
    "cells and modes, so that each dim is whole once each way",
    "the same back; sums of weights' gradients",
];

fn norm(case: &Case) -> FftNorm {
    let norms = [
        ("backward", FftNorm::Backward),
        ("ortho", FftNorm::Ortho),
        ("forward", FftNorm::Forward),
    ];
    case.attributes.choice("norm", &norms)
}

fn real<const D: usize, const E: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let dims = case.attributes.dims("dim", D);
    output(rfft::<D, E>(case.input(0)?, &dims, norm(case)))
}

fn to_real<const D: usize, const E: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let dims = case.attributes.dims("dim", D - 1);
    let x = case.input::<D>(0)?;
    let halved = dims.last().and_then(|dim| x.dims().get(*dim).copied());
    let whole = 2 * halved.unwrap_or(1).saturating_sub(1);
    let [size] = case.attributes.array_or("n", [whole]);
    output(irfft::<D, E>(x, &dims, size, norm(case)))
}

fn convolved<const D: usize, const E: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let weight = case.needed::<E>("weight")?;
    output(spectral_conv::<D, E>(case.input(0)?, weight))
}
