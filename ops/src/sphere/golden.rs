//! Spherical transforms in the registry.

use halocline_core::{Error, Result};

use super::conv::sphere_conv;
use super::grid::SphereGrid;
use super::sht::{Sht, ShtNorm, ShtPhase};
use super::transform::{isht, sht, vector_isht, vector_sht};
use crate::golden::{Case, Dims, Golden, Output, output};

/// The transforms.
pub(crate) const OPERATORS: &[Golden] = &[
    golden(
        "sht",
        "torch_harmonics.RealSHT",
        Dims::All,
        |case| match case.dims() {
            2 => output(sht::<2, 3>(case.input(0)?, &transform(case)?)),
            3 => output(sht::<3, 4>(case.input(0)?, &transform(case)?)),
            4 => output(sht::<4, 5>(case.input(0)?, &transform(case)?)),
            dims => Err(no_case(dims)),
        },
    ),
    golden(
        "isht",
        "torch_harmonics.InverseRealSHT",
        Dims::AllButLast,
        |case| match case.dims() {
            3 => output(isht::<3, 2>(case.input(0)?, &transform(case)?)),
            4 => output(isht::<4, 3>(case.input(0)?, &transform(case)?)),
            5 => output(isht::<5, 4>(case.input(0)?, &transform(case)?)),
            dims => Err(no_case(dims)),
        },
    ),
    golden(
        "vector_sht",
        "torch_harmonics.RealVectorSHT",
        Dims::All,
        |case| match case.dims() {
            3 => output(vector_sht::<3, 4>(case.input(0)?, &transform(case)?)),
            4 => output(vector_sht::<4, 5>(case.input(0)?, &transform(case)?)),
            dims => Err(no_case(dims)),
        },
    ),
    golden(
        "vector_isht",
        "torch_harmonics.InverseRealVectorSHT",
        Dims::AllButLast,
        |case| match case.dims() {
            4 => output(vector_isht::<4, 3>(case.input(0)?, &transform(case)?)),
            5 => output(vector_isht::<5, 4>(case.input(0)?, &transform(case)?)),
            dims => Err(no_case(dims)),
        },
    ),
    Golden {
        name: "sphere_conv",
        pytorch: "torch_harmonics.SpectralConvS2",
        sharded: Dims::AllButChannels,
        travels: [
            "cells and orders, so that each dim is whole once each way",
            "the same back; sums of weights' gradients",
        ],
        modules: "",
        run: |case| {
            let weight = case.needed::<5>("weight")?;
            output(sphere_conv::<4, 5>(
                case.input(0)?,
                weight,
                &transform(case)?,
            ))
        },
    },
];

const fn golden(
    name: &'static str,
    pytorch: &'static str,
    sharded: Dims,
    run: fn(&Case) -> Result<Box<dyn Output>>,
) -> Golden {
    Golden {
        name,
        pytorch,
        sharded,
        travels: [
            "cells and orders, so that each dim is whole once",
            "the same back",
        ],
        modules: "",
        run,
    }
}

fn no_case(dims: usize) -> Error {
    Error::other(format!("an input of {dims} dims"))
}

fn transform(case: &Case) -> Result<Sht> {
    let attributes = case.attributes;
    let size = [attributes.list("nlat"), attributes.list("nlon")].map(|size| size[0]);
    let grid = match attributes.text("grid") {
        "legendre-gauss" => SphereGrid::LegendreGauss,
        "lobatto" => SphereGrid::Lobatto,
        _ => SphereGrid::Equiangular,
    };
    let norm = match attributes.text("norm") {
        "four-pi" => ShtNorm::FourPi,
        "schmidt" => ShtNorm::Schmidt,
        _ => ShtNorm::Ortho,
    };
    let phase = match attributes.number("csphase") {
        Some(0.0) => ShtPhase::Positive,
        _ => ShtPhase::CondonShortley,
    };
    let transform = Sht::new(size, grid)?.with_norm(norm).with_phase(phase);
    Ok(match attributes.list("lmax")[..] {
        [degrees] => transform.with_degrees(degrees),
        _ => transform,
    })
}
