//! Interpolation to a grid of any size.
//!
//! Along every spatial dim an output is a weighted sum of cells, with the weights of a [`Mode`].
//! Semantics follow PyTorch's `interpolate` with an explicit output size: `nearest`,
//! `nearest-exact`, `linear`, `bilinear`, `trilinear`, `bicubic` and `area`, both settings of
//! `align_corners` and of `antialias`; those of Lanczos' kernel follow burn. In addition, dims may
//! be periodic: beyond an end, the cells at the other end count.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. An output belongs to the rank that holds the
//! middle one of its input cells.
//!
//! # Communication
//! A dim that becomes finer, or keeps its size, needs a halo of the input cells of a rank's
//! outputs; a dim that becomes coarser sends the partial sums of outputs that ranks share. The ends
//! of a periodic dim are neighbours.
//!
//! # Adjoint
//! Sums over the outputs that a cell contributes to, with their weights.

use burn::nn::interpolate::{Interpolate1d, Interpolate2d, InterpolateMode};
use halocline_core::{Boundary, Error, Result, ShardTensor};

use super::rules::{Antialias, Corners, Interpolation, Mode};
use super::{upsample_bilinear, upsample_nearest};
use crate::driver::sampling::{Weighted, sampled};
use crate::field::{Field, run};
use crate::golden::{Case, Golden, Output, output};
use crate::layer::Layer;

const NAME: &str = "interpolate";

/// Interpolates the spatial dims of `[batch, channels, *spatial]` to these sizes. See the
/// [module](self).
///
/// # Errors
/// A number of sizes other than that of spatial dims; an empty spatial dim or an output size of
/// zero; antialiasing of a mode other than linear and cubic; a boundary other than
/// [`Replicate`](Boundary::Replicate) and [`Periodic`](Boundary::Periodic); aligned corners of a
/// periodic dim, which has none; partial values; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::resample::{Interpolation, Mode, interpolate};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 1, 5, 4], &mesh, &[Shard(2)])?;
///     let y = interpolate(x, [7, 3], Interpolation::new(Mode::Cubic))?;
///     let y = y.full_tensor();
///     assert_eq!(y.dims(), [1, 1, 7, 3]);
///     assert!((y - 1.0).abs().max().into_scalar::<f32>() < 1e-6);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn interpolate<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    output_size: [usize; N],
    interpolation: Interpolation<N>,
) -> Result<ShardTensor<D>> {
    x.require_resolved(NAME)?;
    let dims = x.dims();
    if D != N + 2 || output_size.contains(&0) || dims[2..].contains(&0) {
        let message = format!(
            "{dims:?} to {output_size:?}; expected a size for every spatial dim of [batch, channels, *spatial]"
        );
        return Err(Error::operator(NAME, message));
    }
    let Interpolation {
        mode,
        corners,
        antialias,
        boundary,
    } = interpolation;
    if antialias == Antialias::On && !matches!(mode, Mode::Linear | Mode::Cubic) {
        let message = format!("antialiasing of {mode:?}; expected Linear or Cubic");
        return Err(Error::operator(NAME, message));
    }
    let known = [Boundary::Replicate, Boundary::Periodic];
    if boundary.iter().any(|boundary| !known.contains(boundary)) {
        let message = format!("boundaries {boundary:?}; expected each of {known:?}");
        return Err(Error::operator(NAME, message));
    }
    if corners == Corners::Centers && boundary.contains(&Boundary::Periodic) {
        let message = format!(
            "Corners::Centers with boundaries {boundary:?}; expected Corners::Edges, because a \
             periodic dim has no corners to align"
        );
        return Err(Error::operator(NAME, message));
    }
    if D == 4
        && dims[2..]
            .iter()
            .zip(output_size)
            .all(|(size, outputs)| outputs == 2 * size)
    {
        match (mode, corners, antialias) {
            (Mode::Nearest, ..) => return upsample_nearest(x, 2),
            (Mode::Linear, Corners::Edges, Antialias::Off) => {
                return upsample_bilinear(x, [boundary[0], boundary[1]]);
            }
            _ => {}
        }
    }
    sampled::<D, Weighted, _>(x, NAME, (output_size, interpolation), || {
        let sizes = output_size.iter().zip(2..);
        let changed = sizes.filter(|(outputs, dim)| dims[*dim] != **outputs);
        changed
            .map(|(outputs, dim)| interpolation.map(dim - 2, dims[dim], *outputs))
            .collect()
    })
}

/// Output sizes that burn's module asks for.
fn sizes<const N: usize>(
    dims: &[usize],
    output_size: Option<[usize; N]>,
    scale: Option<[f32; N]>,
) -> Result<[usize; N]> {
    match (output_size, scale) {
        (Some(sizes), None) => Ok(sizes),
        (None, Some(scale)) => Ok(std::array::from_fn(|dim| {
            (dims[dim + 2] as f64 * f64::from(scale[dim])) as usize
        })),
        _ => {
            let message = "a module with output_size and scale_factor, or neither; expected one";
            Err(Error::operator(NAME, message))
        }
    }
}

/// Interpolation equivalent to burn's module.
fn of_burn<const N: usize>(mode: &InterpolateMode, align_corners: bool) -> Interpolation<N> {
    let mode = match mode {
        InterpolateMode::Nearest => Mode::Nearest,
        InterpolateMode::NearestExact => Mode::NearestExact,
        InterpolateMode::Linear => Mode::Linear,
        InterpolateMode::Cubic => Mode::Cubic,
        InterpolateMode::Lanczos => Mode::Lanczos,
    };
    Interpolation::new(mode).with_corners(Corners::aligned(align_corners))
}

impl<X: Field<3>> Layer<X> for Interpolate1d {
    type Output = X;

    #[track_caller]
    fn forward(&self, x: X) -> X {
        run(x, |x| {
            let size = self.output_size.map(|size| [size]);
            let scale = self.scale_factor.map(|scale| [scale]);
            let sizes = sizes(&x.dims(), size, scale)?;
            interpolate(x, sizes, of_burn(&self.mode, self.align_corners))
        })
    }
}

impl<X: Field<4>> Layer<X> for Interpolate2d {
    type Output = X;

    #[track_caller]
    fn forward(&self, x: X) -> X {
        run(x, |x| {
            let sizes = sizes(&x.dims(), self.output_size, self.scale_factor)?;
            interpolate(x, sizes, of_burn(&self.mode, self.align_corners))
        })
    }
}

/// Registry entries of interpolation.
pub(super) const GOLDEN: [Golden; 3] = [
    Golden::new("interpolate1d", run_case::<3, 1>)
        .with_pytorch("interpolate (linear, nearest, area)")
        .with_travels(TRAVELS)
        .with_modules("`Interpolate1d`"),
    Golden::new("interpolate2d", run_case::<4, 2>)
        .with_pytorch("interpolate (nearest, bilinear, bicubic, area; antialias)")
        .with_travels(TRAVELS)
        .with_modules("`Interpolate2d`"),
    Golden::new("interpolate3d", run_case::<5, 3>)
        .with_pytorch("interpolate (nearest, trilinear, area)")
        .with_travels(TRAVELS),
];

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = [
    "halos (finer), parts of outputs that ranks share (coarser)",
    "the same back",
];

fn run_case<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let attributes = &case.attributes;
    let modes = [
        ("nearest", Mode::Nearest),
        ("nearest-exact", Mode::NearestExact),
        ("linear", Mode::Linear),
        ("bilinear", Mode::Linear),
        ("trilinear", Mode::Linear),
        ("bicubic", Mode::Cubic),
        ("area", Mode::Area),
    ];
    let mode = attributes.choice("mode", &modes);
    let boundaries = [
        ("replicate", Boundary::Replicate),
        ("circular", Boundary::Periodic),
    ];
    let interpolation = Interpolation {
        mode,
        corners: Corners::aligned(attributes.is("align_corners")),
        antialias: if attributes.is("antialias") {
            Antialias::On
        } else {
            Antialias::Off
        },
        boundary: [attributes.choice("padding_mode", &boundaries); N],
    };
    let x = case.input::<D>(0)?;
    let cells: [usize; N] = std::array::from_fn(|dim| x.dims()[2 + dim]);
    let size = match attributes.numbers("scale_factor") {
        [] => attributes.array("output_size", 1),
        factors => {
            let factor = |dim: usize| factors[dim.min(factors.len() - 1)];
            let sizes: [f64; N] = std::array::from_fn(|dim| cells[dim] as f64 * factor(dim));
            // PyTorch interpolates by the factor as given, not by the ratio of the sizes.
            if sizes.iter().any(|size| size.fract() != 0.0) {
                let message =
                    format!("scale_factor {factors:?} of {cells:?} cells; expected whole sizes");
                return Err(Error::operator(NAME, message));
            }
            sizes.map(|size| size as usize)
        }
    };
    output(interpolate(x, size, interpolation))
}

#[cfg(test)]
mod tests {
    use burn::nn::interpolate::Interpolate2dConfig;
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Layout, Partial, ReduceOp};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, difference, random};

    struct Grid([usize; 2], Interpolation<2>);

    impl Operator<4, 4> for Grid {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            inputs.remove(0).interpolate(self.0, self.1)
        }
    }

    #[test]
    fn any_size_with_corners_both_ways() {
        let modes = [
            Mode::Nearest,
            Mode::Linear,
            Mode::Cubic,
            Mode::Lanczos,
            Mode::Area,
        ];
        for mode in modes {
            for corners in [Corners::Edges, Corners::Centers] {
                for sizes in [[11, 4], [3, 9]] {
                    let grid = Grid(sizes, Interpolation::new(mode).with_corners(corners));
                    check_op(&grid, &[[1, 2, 5, 7]], &[], &[0, 2, 3], 1e-5);
                }
            }
        }
    }

    /// Halos and shared outputs cross the date line, where a dim becomes finer and where it becomes
    /// coarser.
    #[test]
    fn periodic_dims_may_be_sharded() {
        for mode in [Mode::Linear, Mode::Cubic] {
            for antialias in [Antialias::Off, Antialias::On] {
                let rule = Interpolation::new(mode).with_antialias(antialias);
                let grids = [
                    Grid([11, 4], rule.with_boundary([Boundary::Periodic; 2])),
                    Grid([3, 9], rule.with_boundary([Boundary::Periodic; 2])),
                    Grid(
                        [10, 14],
                        rule.with_boundary([Boundary::Replicate, Boundary::Periodic]),
                    ),
                ];
                for grid in grids {
                    check_op(&grid, &[[1, 2, 5, 7]], &[], &[0, 2, 3], 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_periodic_dim_is_one_of_endless_copies() {
        let x = random([1, 2, 5, 7], "x", 0).inner();
        let copies = Tensor::cat(vec![x.clone(); 5], 3);
        for mode in [Mode::Linear, Mode::Cubic] {
            for antialias in [Antialias::Off, Antialias::On] {
                for columns in [1, 3, 9, 14] {
                    let rule = Interpolation::new(mode).with_antialias(antialias);
                    let ring = rule.with_boundary([Boundary::Replicate, Boundary::Periodic]);
                    let found = x.clone().interpolate([10, columns], ring);
                    let expected = copies.clone().interpolate([10, 5 * columns], rule);
                    let expected = expected.narrow(3, 2 * columns, columns);
                    let off = difference(&found.into_data(), &expected.into_data());
                    assert!(off < 1e-5, "{ring:?} to {columns}: {off}");
                }
            }
        }
    }

    #[test]
    fn burns_module_gives_what_it_gives_there() {
        let x = random([1, 2, 5, 7], "x", 0).inner();
        for mode in [
            InterpolateMode::Nearest,
            InterpolateMode::Linear,
            InterpolateMode::Lanczos,
        ] {
            let layer = Interpolate2dConfig::new()
                .with_mode(mode)
                .with_scale_factor(Some([1.7, 0.6]))
                .init();
            let (ours, theirs) = (x.clone().apply(&layer), layer.forward(x.clone()));
            assert!(difference(&ours.into_data(), &theirs.into_data()) < 1e-5);
        }
    }

    #[test]
    fn partial_values_are_refused_at_any_size() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let shape = [1, 1, 2, 2];
                let layout = Layout::new(mesh.shape(), &shape, &[Partial(ReduceOp::Sum)])?;
                for size in [[4, 4], [3, 3]] {
                    let terms = Tensor::<4>::ones(shape, world.device());
                    let x = ShardTensor::from_parts(terms, layout.clone(), mesh.clone());
                    let error = interpolate(x, size, Interpolation::new(Mode::Nearest));
                    let error = error.unwrap_err().to_string();
                    assert!(error.contains("call resolve() first"), "{error}");
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<3>::ones([1, 1, 4], &Default::default()));
        let smooth = Interpolation::new(Mode::Area).with_antialias(Antialias::On);
        let error = interpolate(x, [2], smooth).unwrap_err().to_string();
        assert!(error.contains("antialiasing of Area"), "{error}");
        let linear = Interpolation::new(Mode::Linear);
        let ring = linear.with_boundary([Boundary::Periodic]);
        for (wrong, expected) in [
            (
                ring.with_corners(Corners::Centers),
                "expected Corners::Edges",
            ),
            (
                linear.with_boundary([Boundary::Reflect]),
                "boundaries [Reflect]; expected each of [Replicate, Periodic]",
            ),
        ] {
            let x = ShardTensor::solo(Tensor::<3>::ones([1, 1, 4], &Default::default()));
            let error = interpolate(x, [2], wrong).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
