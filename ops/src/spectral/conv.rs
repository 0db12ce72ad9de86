//! Spectral convolution: a product with the lowest modes of a field, as in Fourier neural
//! operators.
//!
//! `y = irfft(w · rfft(x))` over all spatial dims, where `w` has a complex matrix over channels for
//! each kept mode; all other modes are zero. Semantics follow `fourier_2d.py` and its siblings of
//! Li et al. (2021), with both of its weights in one tensor.
//!
//! # Shapes
//! `[batch, channels_in, *spatial]` → `[batch, channels_out, *spatial]`, with one to three spatial
//! dims. The weight is `[channels_in, channels_out, *modes, 2]`. In the last dim its modes are the
//! lowest, from zero up; in the others the first half (rounded up) are the frequencies from zero
//! up, and the rest are the negative frequencies.
//!
//! # Placement
//! All dims may be sharded. `y` has the placements of `x`, except `Partial(Sum)` where
//! `channels_in` is sharded (resolved in f16 and bf16) and `Shard(1)` where the weight is sharded
//! in `channels_out`. Spatial dims are made whole one after the other, the later ones when only the
//! kept modes of the earlier ones remain; a sharded dim thus costs two exchanges, of cells or of
//! modes. In one spatial dim, with fewer samples than ranks, ranks transform the lines of different
//! channels, and exchange the kept modes twice more.
//!
//! # Adjoint
//! The adjoints of the transforms and the [product](super::modes).

use halocline_core::{
    Error, IntoLayout, Layout, Partial, Placement, Replicate, Result, Shard, ShardTensor,
};

use super::fft::{check_dims, each, each_from};
use super::line::{Frequencies, Line, Scale, Sign};
use super::local::{along, along_layout, transformed_layout};
use super::modes::{check_channels, check_modes, mode_product, own_modes};
use super::pencil::return_to;
use crate::operand::Operand;
use crate::precision::{cast_shard, narrowed, wider};

const NAME: &str = "spectral_conv";

/// Convolves with a kernel given by its lowest modes. `E = D + 1`. See the [module](self).
///
/// # Errors
/// The errors of [`mode_product`]; more modes than the field has.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::spectral::spectral_conv;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 8, 9], &mesh, &[Shard(2)])?;
///     let weight = Tensor::<5>::ones([3, 2, 4, 3, 2], world.device());
///     let y = spectral_conv(x, weight)?;
///     assert_eq!((y.dims(), y.placements()), ([1, 2, 8, 9], &[Shard(2)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn spectral_conv<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<E>>,
) -> Result<ShardTensor<D>> {
    const { assert!(E == D + 1, "a weight has a dim of real and imaginary parts") };
    let weight = weight.into();
    let (dims, shape) = (x.dims(), weight.dims());
    let kept = check(&dims, &shape)?;
    let modes_of_x = [&dims[..2], &shape[2..D], &[2]].concat();
    let dtype = x.local().dtype();
    let own = own_modes(NAME, &modes_of_x, dtype, &weight)?;
    let is_narrow = wider(dtype) != dtype;
    let placements = x.layout().map_placements(|placement| match placement {
        Partial(_) if is_narrow => Replicate, // resolved below
        other => other,
    });
    let extents = x.layout().all_extents().to_vec();
    let field = x.layout().derive(placements, extents);
    check_channels(NAME, &field, &weight)?;
    let (size, modes) = (dims[D - 1], shape[D - 1]);
    let others: Vec<usize> = (2..D - 1).collect();
    // Channels keep their sharding, which decides the placement of the result.
    let fixed: &[usize] = if lacks_samples(&field) { &[] } else { &[1] };
    let line = Line::ToModes {
        size,
        modes,
        scale: Scale::uniform(1.0),
    };
    let spectrum = along_layout(&field, D - 1, line, [fixed, &others], NAME)?;
    let spectrum = with_whole_channels(&field, spectrum)?;
    let spectrum = each_from(
        &spectrum,
        spectrum.clone(),
        &others,
        &[],
        |layout, dim, pending| {
            let line = Line::ToFrequencies(kept(dim, Sign::Minus));
            along_layout(&layout, dim, line, [fixed, pending], NAME)
        },
    )?;
    check_modes(NAME, &spectrum, &weight, own)?;
    if is_narrow {
        // Sums over a field may overflow f16 even where the result does not.
        let x = Error::catch(|| x.resolve())?;
        let weight = cast_shard(weight.place_on(&x)?, wider(dtype));
        let y = spectral_conv(cast_shard(x, wider(dtype)), weight)?;
        return Ok(narrowed(y, dtype));
    }
    let before = x.layout().clone();
    let y: ShardTensor<E> = along(x, D - 1, line, [fixed, &others], NAME)?;
    let modes_of_y = with_whole_channels(&before, y.layout().clone())?;
    let y = y.try_redistribute(&modes_of_y)?;
    let y = each(y, &others, &[], |y, dim, pending| {
        let line = Line::ToFrequencies(kept(dim, Sign::Minus));
        along(y, dim, line, [fixed, pending], NAME)
    })?;
    let y = mode_product(y, weight)?;
    let product = y.layout().clone();
    let y = each(y, &others, &[D - 1], |y, dim, pending| {
        let line = Line::FromFrequencies(kept(dim, Sign::Plus));
        along(y, dim, line, [fixed, pending], NAME)
    })?;
    // Exchange whichever is smaller: modes or cells.
    let y = if before.is_sharded(D - 1) || 2 * modes >= size {
        y
    } else {
        return_to(&transformed_layout(&before, D - 1, line), &product, y)?
    };
    let scale = Scale::with_conjugates((size as f64).recip());
    let line = Line::FromModes { size, modes, scale };
    let y: ShardTensor<D> = along(y, D - 1, line, [fixed, &[]], NAME)?;
    return_to(&before, &product, y)
}

/// Whether a field in one spatial dim has fewer samples than ranks that share a line.
fn lacks_samples(field: &Layout) -> bool {
    let shape = field.shape();
    let axes = field.axes_where(|placement| matches!(placement, Shard(0 | 2)));
    let ranks: usize = axes
        .iter()
        .map(|axis| field.mesh().sizes()[*axis])
        .product();
    shape.len() == 3 && field.is_sharded(2) && shape[0] < ranks
}

/// Layout of modes in which mesh axes that have moved from a spatial dim of the field to channels
/// shard the dim again.
fn with_whole_channels(field: &Layout, modes: Layout) -> Result<Layout> {
    let pairs = field.placements().iter().zip(modes.placements());
    let placements = pairs.map(|(field, found)| match (field, found) {
        (Shard(2..), Shard(1)) => *field,
        _ => *found,
    });
    let placements: Vec<Placement> = placements.collect();
    if placements == modes.placements() {
        return Ok(modes);
    }
    let layout = (&placements).layout_like(&modes)?;
    Ok(layout.resized(1, field.extents(1).to_vec()))
}

/// Returns the frequencies to keep in each dim other than the last, for each direction.
fn check(x: &[usize], weight: &[usize]) -> Result<impl Fn(usize, Sign) -> Frequencies + use<>> {
    let (dims, last) = (x.len(), x.len() - 1);
    if dims < 3 {
        let message = format!("{x:?}; expected [batch, channels, *spatial]");
        return Err(Error::operator(NAME, message));
    }
    let spatial: Vec<usize> = (2..dims).collect();
    check_dims(NAME, x, &spatial)?;
    for dim in spatial {
        let most = if dim == last { x[dim] / 2 + 1 } else { x[dim] };
        if weight[dim] == 0 || weight[dim] > most {
            let message = format!(
                "{} modes in dim {dim} of {} cells; expected 1 to {most}",
                weight[dim], x[dim]
            );
            return Err(Error::operator(NAME, message));
        }
    }
    let (sizes, modes) = (x.to_vec(), weight.to_vec());
    Ok(move |dim: usize, sign| Frequencies {
        size: sizes[dim],
        low: modes[dim].div_ceil(2),
        high: modes[dim] / 2,
        sign,
        scale: match sign {
            Sign::Minus => 1.0,
            Sign::Plus => (sizes[dim] as f64).recip(),
        },
    })
}
