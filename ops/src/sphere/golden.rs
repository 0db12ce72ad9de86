//! Registry entries of the spherical transforms.

use halocline_core::Result;

use super::conv::sphere_conv;
use super::grid::SphereGrid;
use super::regrid::{Regrid, RegridMode, regrid};
use super::sht::{Sht, ShtNorm, ShtPhase};
use super::transform::{isht, sht, vector_isht, vector_sht};
use crate::golden::{Case, Dims, Golden, no_case, output};

/// Communication, forward and backward.
const ALL_TO_ALL: [&str; 2] = [
    "cells and orders, so that each dim is whole once",
    "the same back",
];

/// Transforms and convolution on the sphere.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("sht", |case| match case.dims() {
        2 => output(sht::<2, 3>(case.input(0)?, &transform(case)?)),
        3 => output(sht::<3, 4>(case.input(0)?, &transform(case)?)),
        4 => output(sht::<4, 5>(case.input(0)?, &transform(case)?)),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("torch_harmonics.RealSHT")
    .with_travels(ALL_TO_ALL),
    Golden::new("isht", |case| match case.dims() {
        3 => output(isht::<3, 2>(case.input(0)?, &transform(case)?)),
        4 => output(isht::<4, 3>(case.input(0)?, &transform(case)?)),
        5 => output(isht::<5, 4>(case.input(0)?, &transform(case)?)),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("torch_harmonics.InverseRealSHT")
    .with_sharded(Dims::AllButLast)
    .with_travels(ALL_TO_ALL),
    Golden::new("vector_sht", |case| match case.dims() {
        3 => output(vector_sht::<3, 4>(case.input(0)?, &transform(case)?)),
        4 => output(vector_sht::<4, 5>(case.input(0)?, &transform(case)?)),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("torch_harmonics.RealVectorSHT")
    .with_travels(ALL_TO_ALL),
    Golden::new("vector_isht", |case| match case.dims() {
        4 => output(vector_isht::<4, 3>(case.input(0)?, &transform(case)?)),
        5 => output(vector_isht::<5, 4>(case.input(0)?, &transform(case)?)),
        dims => Err(no_case(dims)),
    })
    .with_pytorch("torch_harmonics.InverseRealVectorSHT")
    .with_sharded(Dims::AllButLast)
    .with_travels(ALL_TO_ALL),
    Golden::new("sphere_conv", |case| {
        let weight = case.needed::<5>("weight")?;
        output(sphere_conv::<4, 5>(
            case.input(0)?,
            weight,
            &transform(case)?,
        ))
    })
    .with_pytorch("torch_harmonics.SpectralConvS2")
    .with_sharded(Dims::AllButChannels)
    .with_travels([
        "cells and orders, so that each dim is whole once each way",
        "the same back; sums of weights' gradients",
    ]),
    Golden::new("regrid", |case| {
        let sizes = ["in_shape", "out_shape"].map(|key| case.attributes.array::<2>(key, 1));
        let modes = [
            ("bilinear", RegridMode::Bilinear),
            ("bilinear-spherical", RegridMode::BilinearSpherical),
        ];
        let mode = case.attributes.choice("mode", &modes);
        let weights = Regrid::between(sizes, grids_of(case))?.with_mode(mode);
        match case.dims() {
            3 => output(regrid::<3>(case.input(0)?, &weights)),
            4 => output(regrid::<4>(case.input(0)?, &weights)),
            dims => Err(no_case(dims)),
        }
    })
    .with_pytorch("torch_harmonics.ResampleS2")
    .with_travels([
        "halos (finer), parts of outputs that ranks share (coarser), sums of polar rows",
        "the same back",
    ]),
];

/// Grids of input and output: `grid` for both, unless `grid_out` names another for the output.
pub(crate) fn grids_of(case: &Case) -> [SphereGrid; 2] {
    let input = grid_of(case, "grid");
    match case.attributes.text("grid_out") {
        "" => [input; 2],
        _ => [input, grid_of(case, "grid_out")],
    }
}

/// Latitudes of the grid of a case.
fn grid_of(case: &Case, key: &str) -> SphereGrid {
    let grids = [
        ("equiangular", SphereGrid::Equiangular),
        ("legendre-gauss", SphereGrid::LegendreGauss),
        ("lobatto", SphereGrid::Lobatto),
    ];
    case.attributes.choice(key, &grids)
}

fn transform(case: &Case) -> Result<Sht> {
    let attributes = &case.attributes;
    let size = [attributes.list("nlat"), attributes.list("nlon")].map(|size| size[0]);
    let norms = [
        ("ortho", ShtNorm::Ortho),
        ("four-pi", ShtNorm::FourPi),
        ("schmidt", ShtNorm::Schmidt),
    ];
    let norm = attributes.choice("norm", &norms);
    let phase = match attributes.number("csphase") {
        Some(0.0) => ShtPhase::Positive,
        _ => ShtPhase::CondonShortley,
    };
    let transform = Sht::new(size, grid_of(case, "grid"))?
        .with_norm(norm)
        .with_phase(phase);
    let [degrees] = attributes.array_or("lmax", [transform.degrees()]);
    // torch-harmonics has as many orders as degrees.
    let [orders] = attributes.array_or("mmax", [degrees]);
    transform.with_degrees(degrees.min(orders))
}
