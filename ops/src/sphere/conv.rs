//! Convolution on the sphere in spherical harmonics.

use halocline_core::{Error, Layout, Result, ShardTensor};

use super::sht::Sht;
use super::transform::{GRID, check, isht_beside, sht_beside, sht_layout};
use crate::operand::Operand;
use crate::spectral::{check_channels, check_modes, harmonic_product, own_modes, return_to};

const NAME: &str = "sphere_conv";

/// Convolves a field with a kernel given by its harmonics: `isht(w · sht(x))`, with a complex
/// matrix over channels for each degree. `E = D + 1`.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`; the weight is
/// `[channels_in, channels_out, degrees, 1, 2]`, or
/// `[channels_in, channels_out, degrees, orders, 2]` with a matrix for each order, too.
///
/// # Placement
/// As for [`spectral_conv`](fn@crate::spectral::spectral_conv).
///
/// # Errors
/// The errors of [`sht`](fn@super::sht) and [`mode_product`](fn@crate::spectral::mode_product).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::sphere::{SphereGrid, Sht, sphere_conv};
///
/// let sht = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 6, 12], &mesh, &[Shard(2)])?;
///     let weight = Tensor::<5>::ones([3, 2, 6, 1, 2], world.device());
///     let y = sphere_conv(x, weight, &sht)?;
///     assert_eq!((y.dims(), y.placements()), ([1, 2, 6, 12], &[Shard(2)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sphere_conv<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<E>>,
    transform: &Sht,
) -> Result<ShardTensor<D>> {
    sphere_conv_between::<D, E>(x, weight, [transform; 2])
}

/// [`sphere_conv`] from the grid of one transform to that of another with the same degrees, such as
/// a coarser grid.
///
/// # Errors
/// The errors of [`sphere_conv`]; transforms with other degrees or orders.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::sphere::{SphereGrid, Sht, sphere_conv_between};
///
/// let coarse = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// let fine = Sht::new([13, 24], SphereGrid::Equiangular)?.with_degrees(coarse.degrees())?;
/// let device = Default::default();
/// let x = ShardTensor::solo(Tensor::<4>::ones([1, 3, 13, 24], &device));
/// let weight = Tensor::<5>::ones([3, 2, 6, 1, 2], &device);
/// let y = sphere_conv_between(x, weight, [&fine, &coarse])?;
/// assert_eq!(y.dims(), [1, 2, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sphere_conv_between<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<E>>,
    [transform, inverse]: [&Sht; 2],
) -> Result<ShardTensor<D>> {
    const { assert!(D >= 4, "a field of [batch, channels, lat, lon]") };
    let (weight, before) = (weight.into(), x.layout().clone());
    require_same_modes(NAME, transform, inverse)?;
    check(NAME, &x.dims(), &transform.size(), GRID)?;
    let mut harmonics = x.dims()[..D - 2].to_vec();
    harmonics.extend([transform.degrees(), transform.orders(), 2]);
    let own = own_modes(NAME, &harmonics, x.local().dtype(), &weight)?;
    check_channels(NAME, &before, &weight)?;
    check_modes(NAME, &sht_layout(&before, transform, &[1])?, &weight, own)?;
    // Channels keep their sharding, which decides the placement of the result.
    let harmonics: ShardTensor<E> = sht_beside(x, transform, &[1])?;
    let y: ShardTensor<D> = isht_beside(harmonic_product(harmonics, weight)?, inverse, &[1])?;
    let channels = y.layout().clone();
    return_to(&on_grid(before, inverse)?, &channels, y)
}

/// Interpolates a field `[.., lat, lon]` by its harmonics, from the grid of one transform to that of
/// another with the same degrees: harmonics of higher degrees are lost. `E = D + 1`.
///
/// # Placement
/// As for [`sht`](fn@super::sht); values must be resolved, and the result has the placements of `x`.
///
/// # Errors
/// The errors of [`sht`](fn@super::sht); partial values; transforms with other degrees or orders.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::sphere::{SphereGrid, Sht, sphere_resample};
///
/// let coarse = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// let fine = Sht::new([13, 24], SphereGrid::Equiangular)?.with_degrees(coarse.degrees())?;
/// let x = ShardTensor::solo(Tensor::<3>::ones([2, 6, 12], &Default::default()));
/// let y = sphere_resample::<3, 4>(x, [&coarse, &fine])?.into_local();
/// assert!((y - 1.0).abs().max().into_scalar::<f32>() < 1e-5);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sphere_resample<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    [transform, inverse]: [&Sht; 2],
) -> Result<ShardTensor<D>> {
    const NAME: &str = "sphere_resample";
    check(NAME, &x.dims(), &transform.size(), GRID)?;
    require_same_modes(NAME, transform, inverse)?;
    x.require_resolved(NAME)?;
    let before = x.layout().clone();
    let harmonics: ShardTensor<E> = sht_beside(x, transform, &[])?;
    let y: ShardTensor<D> = isht_beside(harmonics, inverse, &[])?;
    y.try_redistribute(&on_grid(before, inverse)?)
}

fn require_same_modes(operator: &str, transform: &Sht, inverse: &Sht) -> Result<()> {
    let [first, second] = [transform, inverse].map(|sht| [sht.degrees(), sht.orders()]);
    if first == second {
        return Ok(());
    }
    let message = format!(
        "transforms of {first:?} and {second:?} degrees and orders; expected the same: use Sht::with_degrees"
    );
    Err(Error::operator(operator, message))
}

/// The layout on the grid of a transform, with the same extents where sizes are equal.
fn on_grid(layout: Layout, transform: &Sht) -> Result<Layout> {
    let mut shape = layout.shape().to_vec();
    let grid = shape.len() - 2;
    if shape[grid..] == transform.size() {
        return Ok(layout);
    }
    shape[grid..].copy_from_slice(&transform.size());
    let mut target = Layout::new(layout.mesh(), &shape, layout.placements())?;
    for (dim, size) in shape.iter().enumerate() {
        if layout.shape()[dim] == *size {
            target = target.with_extents(dim, layout.extents(dim))?;
        }
    }
    Ok(target)
}
