//! Sampling at displaced points: semi-Lagrangian advection, and PyTorch's `grid_sample`.
//!
//! `y[b, c, i] = x[b, c, i + d[b, :, i]]` for a displacement `d` in cells. Values between cells are
//! interpolated by a [`Mode`]: nearest, linear in every dim, or cubic. A bound on the displacement
//! limits the cells that a rank may need; a [`Boundary`] defines the cells beyond the field.
//! [`grid_sample`] takes sampling points instead, as in PyTorch. Semantics follow PyTorch's
//! `grid_sample` with the modes `nearest`, `bilinear` (in one to three dims) and `bicubic`, the
//! paddings `zeros`, `border` ([`Boundary::Replicate`]) and `reflection`, and both settings of
//! `align_corners`; dims may be periodic as well.
//!
//! # Placement
//! Batch, channels and spatial dims may be sharded; values must be resolved. Displacements are
//! sharded like the field, and their component dim is whole.
//!
//! # Communication
//! Halos as wide as the bound plus one or two cells; with [`OutOfBounds::Fail`] also the largest
//! displacement of each rank.
//!
//! # Adjoint
//! The cotangent is added to the cells that a value is computed from, with their weights. The
//! gradient of the displacement is the slope between these cells; it is zero for nearest sampling
//! and where a displacement is clamped.

mod kernel;
mod local;
mod options;

pub use options::{OutOfBounds, SampleOptions};

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use halocline_core::comm::Operation;
use halocline_core::plan::{Linearity, Need, Pairing, Role, Segment, Term, segments};
use halocline_core::{Boundary, Error, Fan, Layout, Result, Shard, ShardTensor, Traffic, ops};

use super::rules::{Corners, Mode};
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::{in_place, runs};
use crate::golden::{Case, Dims, Golden, Output, no_case, output};
use crate::kernel::flex;
use crate::precision::{cast, cast_shard, wider};
use crate::rearrange::{flip, permute, profile};
use kernel::Sample;

const NAME: &str = "displace";

/// Samples a field at displaced points. See the [module](self).
///
/// # Shapes
/// `x`: `[batch, channels, *spatial]`; `displacement`: `[batch, N, *spatial]`, in cells, with
/// components in the order of the spatial dims.
///
/// # Errors
/// Another number of dims or components; layouts that cannot be paired; a mode other than nearest,
/// linear and cubic; a pole boundary; a channel of more than 2³¹ − 1 cells on a rank, halos
/// included; with [`OutOfBounds::Fail`] a displacement beyond the bound, reported on all ranks; a
/// failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Boundary, Launcher, Shard, ShardTensor};
/// use halocline_ops::resample::{SampleOptions, displace};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let x = ShardTensor::<3>::ones([1, 1, 6], &mesh, &[Shard(2)])?;
///     let wind = ShardTensor::full([1, 1, 6], -1.5, &mesh, &[Shard(2)])?;
///     let options = SampleOptions::new([2]).with_boundary([Boundary::Periodic]);
///     let y = displace(x, wind, &options)?.full_tensor();
///     y.into_data().assert_eq(&[[[1.0_f32; 6]]].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn displace<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    displacement: ShardTensor<D>,
    options: &SampleOptions<N>,
) -> Result<ShardTensor<D>> {
    displaced(x, displacement, options, [0.0; N])
}

/// [`displace`] that clamps displacements beyond the bound by no more than `rounding`.
fn displaced<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    displacement: ShardTensor<D>,
    options: &SampleOptions<N>,
    rounding: [f64; N],
) -> Result<ShardTensor<D>> {
    let pairing = paired(&x, &displacement, options)?;
    require_countable(x.layout(), options)?;
    let output = pairing.layout(x.layout());
    if options.beyond == OutOfBounds::Fail {
        require_within(&displacement, options, rounding)?;
    }
    let options = &if rounding == [0.0; N] {
        *options
    } else {
        options.with_out_of_bounds(OutOfBounds::Clamp)
    };
    let dtype = x.local().dtype();
    let fans = |operand: usize| {
        let axes = pairing.fan_out(operand).to_vec();
        move |axis: usize| axes.contains(&axis)
    };
    let x = cast_shard(x, wider(dtype)).try_fan_out(fans(0))?;
    let points = cast_shard(displacement, wider(dtype)).try_fan_out(fans(1))?;
    let cells = with_halo(&x, options)?;
    let (points, held, mesh) = points.into_parts();
    let points = fill_all(points, &held, NAME, 0.0)?;
    let held_box = output.local_box(mesh.position());
    let first = std::array::from_fn(|dim| held_box.ranges()[dim + 2].start);
    let y = if flex::runs_on(&cells.device()) {
        let sample = Sample {
            options: *options,
            first,
        };
        let inputs = [cells.into_dispatch(), points.into_dispatch()];
        Tensor::from_dispatch(ops::apply(sample, inputs))
    } else {
        local::sampled(cells, points, options, first)
    };
    without_fill(cast(y, dtype), output, mesh, NAME)
}

/// Samples a field at points near each cell, like PyTorch's `grid_sample`. See the [module](self).
///
/// # Shapes
/// `x`: `[batch, channels, *spatial]`; `grid`: `[batch, *spatial, N]`, coordinates from −1 to 1,
/// the last component for the first spatial dim. There is one point per cell of `x`, no farther from
/// that cell than the bound, so that the result has the size of `x`; for another grid use
/// [`interpolate`](super::interpolate()) or [`regrid`](crate::sphere::regrid()).
///
/// # Errors
/// The errors of [`displace`]; a grid sharded in its components.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::resample::{Corners, SampleOptions, grid_sample};
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 2.0, 4.0]]]));
/// let grid = ShardTensor::solo(Tensor::<3>::from([[[-1.0], [-0.5], [1.0]]]));
/// let options = SampleOptions::new([1]).with_corners(Corners::Centers);
/// let y = grid_sample(x, grid, &options)?;
/// y.local().to_data().assert_eq(&[[[1.0_f32, 1.5, 4.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn grid_sample<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    grid: ShardTensor<D>,
    options: &SampleOptions<N>,
) -> Result<ShardTensor<D>> {
    let sizes = x.dims();
    let expected: Vec<usize> = std::iter::once(sizes[0])
        .chain(sizes.iter().skip(2).copied())
        .chain([N])
        .collect();
    if D != N + 2 || grid.dims()[..] != expected {
        let message = format!(
            "a grid {:?} for a field {sizes:?} and a bound of {N} dims; expected {expected:?}",
            grid.dims()
        );
        return Err(Error::operator("grid_sample", message));
    }
    grid.require_whole("grid_sample", D - 1)?;
    // Fan out here, while all ranks hold the same grid: GPU kernels need not produce the same bits
    // on each rank.
    let channels = |axis: usize| matches!(x.placements().get(axis), Some(Shard(1) | Fan));
    let grid = grid.try_fan_out(channels)?;
    let dtype = wider(grid.local().dtype());
    // Components become dim 1.
    let axes = std::array::from_fn(|dim| match dim {
        0 => 0,
        1 => D - 1,
        _ => dim - 1,
    });
    let places = flip(permute(cast_shard(grid, dtype), axes)?, &[1])?;
    let spatial = || sizes[2..].iter().map(|&size| size as f64);
    let scales: Vec<f64> = match options.corners {
        Corners::Edges => spatial().map(|size| size / 2.0).collect(),
        Corners::Centers => spatial().map(|size| (size - 1.0) / 2.0).collect(),
    };
    let middles: Vec<f64> = spatial().map(|size| (size - 1.0) / 2.0).collect();
    let (scales, middles) = (
        profile(&places, 1, &scales)?,
        profile(&places, 1, &middles)?,
    );
    let mut displacement = without_ends(places * scales + middles, &sizes, options)?;
    for dim in 0..N {
        let component: [f64; N] = std::array::from_fn(|other| f64::from(other == dim));
        let cells: Vec<f64> = (0..sizes[dim + 2]).map(|cell| cell as f64).collect();
        let component = profile(&displacement, 1, &component)?;
        let cells = profile(&displacement, dim + 2, &cells)?;
        displacement = displacement - component * cells;
    }
    // Tolerance for coordinates rounded to this precision.
    let epsilon = match dtype {
        DType::F64 => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    };
    let rounding = std::array::from_fn(|dim| 4.0 * epsilon * sizes[dim + 2] as f64);
    displaced(x, displacement, options, rounding)
}

/// Detaches points that lie exactly on the first or last cell, where values beyond stay constant or
/// reflect: of the slopes on either side PyTorch chooses zero.
fn without_ends<const D: usize, const N: usize>(
    places: ShardTensor<D>,
    sizes: &[usize; D],
    options: &SampleOptions<N>,
) -> Result<ShardTensor<D>> {
    let turns = |dim: usize| {
        matches!(
            options.boundary[dim],
            Boundary::Replicate | Boundary::Reflect
        )
    };
    if options.mode != Mode::Linear || !(0..N).any(turns) {
        return Ok(places);
    }
    let of_dims = |end: &dyn Fn(usize) -> f64| {
        let end = |dim: usize| {
            if turns(dim) {
                end(sizes[dim + 2])
            } else {
                f64::NAN
            }
        };
        profile(&places, 1, &(0..N).map(end).collect::<Vec<_>>())
    };
    let ends = [of_dims(&|_| 0.0)?, of_dims(&|size| size as f64 - 1.0)?];
    let (local, layout, mesh) = places.into_parts();
    if local.dims().contains(&0) {
        return Ok(ShardTensor::from_parts(local, layout, mesh));
    }
    let is_at = |end: &ShardTensor<D>| {
        let end = end.local().clone().expand(local.dims());
        local.clone().equal(end)
    };
    let is_end = is_at(&ends[0]).bool_or(is_at(&ends[1]));
    let local = local.clone().mask_where(is_end, local.detach());
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Pairs the layouts of both operands: the layout of the result, and the axes over which each
/// operand fans out.
fn paired<const D: usize, const N: usize>(
    x: &ShardTensor<D>,
    displacement: &ShardTensor<D>,
    options: &SampleOptions<N>,
) -> Result<Pairing> {
    let (shape, points) = (x.dims(), displacement.dims());
    let fits = D == N + 2 && points[1] == N && points[0] == shape[0] && points[2..] == shape[2..];
    if !fits || !(1..=3).contains(&N) {
        let message = format!(
            "a displacement {points:?} for a field {shape:?} and a bound of {N} dims; expected [batch, {N}, *spatial]"
        );
        return Err(Error::operator(NAME, message));
    }
    if !matches!(options.mode, Mode::Nearest | Mode::Linear | Mode::Cubic) {
        let message = format!("{:?}; expected Nearest, Linear or Cubic", options.mode);
        return Err(Error::operator(NAME, message));
    }
    if let Some(pole) = options.boundary.iter().find(|boundary| boundary.is_pole()) {
        let message = format!("{pole:?}; pad the field by pad_poles first");
        return Err(Error::operator(NAME, message));
    }
    // Both are computed in at least f32.
    let [dtype, other] = [x, displacement].map(|tensor| tensor.local().dtype());
    if wider(dtype) != wider(other) {
        let message = format!("a displacement of {other:?} for a field of {dtype:?}");
        return Err(Error::operator(NAME, message));
    }
    let result: [Role; D] = std::array::from_fn(Role::Common);
    let mut components = result;
    components[1] = Role::Whole;
    let term = |name, layout, roles| Term {
        name,
        layout,
        roles,
    };
    let terms = [
        term("the field", x.layout(), &result[..]),
        term("the displacement", displacement.layout(), &components[..]),
    ];
    Pairing::new(NAME, &terms, &result, Linearity::None)
}

/// Checks that the cells of a channel on every rank, with those that displacements may reach, are
/// numbered by 32 bits, as the kernel and GPUs require.
fn require_countable<const N: usize>(layout: &Layout, options: &SampleOptions<N>) -> Result<()> {
    let cells = (0..N).fold(1, |cells: usize, dim| {
        let largest = layout.extents(dim + 2).iter().copied().fold(1, usize::max);
        let [low, high] = options.reach(dim);
        cells.saturating_mul(largest.saturating_add(low).saturating_add(high))
    });
    if cells > i32::MAX as usize {
        let message = format!(
            "{cells} cells of a channel on a rank, with halos of the bound {:?}; expected at most {}: give a smaller \
             bound, or shard more dims",
            options.bound,
            i32::MAX
        );
        return Err(Error::operator(NAME, message));
    }
    Ok(())
}

/// Checks on all ranks that no rank has a displacement beyond the bound.
fn require_within<const D: usize, const N: usize>(
    displacement: &ShardTensor<D>,
    options: &SampleOptions<N>,
    rounding: [f64; N],
) -> Result<()> {
    let local = displacement.local().clone().inner();
    let cells: usize = local.dims()[2..].iter().product();
    let mut largest = [0.0_f64; N];
    for (index, value) in local.into_data().iter::<f64>().enumerate() {
        let largest = &mut largest[index / cells % N];
        // NaN exceeds every bound.
        *largest = largest.max(if value.is_nan() {
            f64::INFINITY
        } else {
            value.abs()
        });
    }
    let mesh = displacement.mesh();
    let operation = Operation::new(NAME, Traffic::Control, Some(displacement.layout()));
    let all = ops::all_gather_numbers(mesh.comm(), mesh.shape().ranks(), &operation, &largest)?;
    for (dim, &bound) in options.bound.iter().enumerate() {
        let largest = all.iter().map(|rank| rank[dim]).fold(0.0, f64::max);
        if largest > bound as f64 + rounding[dim] {
            let message = format!(
                "a displacement of {largest} cells in dim {}, beyond the bound of {bound}; give a larger bound, or OutOfBounds::Clamp",
                dim + 2
            );
            return Err(Error::operator(NAME, message));
        }
    }
    Ok(())
}

/// Gathers the cells that this rank's displacements may reach; at least one in every dim.
fn with_halo<const D: usize, const N: usize>(
    x: &ShardTensor<D>,
    options: &SampleOptions<N>,
) -> Result<Tensor<D>> {
    let layout = x.layout().clone();
    let key = (
        options.bound,
        options.boundary,
        options.corners,
        options.mode,
    );
    x.assemble(NAME, key, |position| {
        let held = layout.local_box(position);
        let (mut shape, mut dims) = (Vec::with_capacity(D), Vec::with_capacity(D));
        for (dim, cells) in held.ranges().iter().enumerate() {
            let size = layout.shape()[dim];
            let Some(spatial) = dim.checked_sub(2) else {
                shape.push(cells.len().max(1));
                dims.push(in_place(cells, size));
                continue;
            };
            let [low, high] = options.reach(spatial);
            let range = cells.start as isize - low as isize..(cells.end + high) as isize;
            // A shard without cells computes one point.
            shape.push(range.len().max(low + high + 1));
            dims.push(sources(
                range,
                size,
                options.boundary[spatial],
                options.corners,
            ));
        }
        Need::product(shape, &dims)
    })
}

/// Runs of source cells for a range, part of which may lie beyond the field.
fn sources(range: Range<isize>, size: usize, boundary: Boundary, corners: Corners) -> Vec<Segment> {
    // Areas are mirrored at the outer edge of the last cell, so that cell occurs twice.
    if boundary == Boundary::Reflect && corners == Corners::Edges && size > 0 {
        let mirrored = |cell: isize| {
            let turn = cell.rem_euclid(2 * size as isize) as usize;
            turn.min(2 * size - 1 - turn)
        };
        return runs(&range.map(mirrored).collect::<Vec<_>>());
    }
    segments(range, size, boundary, boundary)
}

/// Registry entry of sampling.
pub(super) const GOLDEN: Golden = Golden::new("grid_sample", |case| match case.dims() {
    3 => run_case::<3, 1>(case),
    4 => run_case::<4, 2>(case),
    5 => run_case::<5, 3>(case),
    dims => Err(no_case(dims)),
})
.with_sharded(Dims::Classes)
.with_travels(["halos as wide as the bound", "the same back"]);

fn run_case<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let attributes = &case.attributes;
    let modes = [
        ("bilinear", Mode::Linear),
        ("nearest", Mode::Nearest),
        ("bicubic", Mode::Cubic),
    ];
    let mode = attributes.choice("mode", &modes);
    let boundaries = [
        ("zeros", Boundary::Zeros),
        ("border", Boundary::Replicate),
        ("reflection", Boundary::Reflect),
    ];
    let boundary = attributes.choice("padding_mode", &boundaries);
    let options = SampleOptions::new(attributes.array::<N>("bound", 1))
        .with_mode(mode)
        .with_boundary([boundary; N])
        .with_corners(Corners::aligned(attributes.is("align_corners")));
    output(grid_sample(case.input::<D>(0)?, case.input(1)?, &options))
}

#[cfg(test)]
mod tests;
