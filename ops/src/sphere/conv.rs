//! Convolution on the sphere in spherical harmonics.

use halocline_core::{Result, ShardTensor};

use super::sht::Sht;
use super::transform::{GRID, check, isht_beside, sht_beside};
use crate::operand::Operand;
use crate::spectral::{check_channels, mode_product, own_modes, return_to};

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
/// The errors of [`sht`](fn@super::sht) and [`mode_product`].
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
    const { assert!(D >= 4, "a field of [batch, channels, lat, lon]") };
    let (weight, before) = (weight.into(), x.layout().clone());
    check(NAME, &x.dims(), &transform.size(), GRID)?;
    let mut harmonics = x.dims()[..D - 2].to_vec();
    harmonics.extend([transform.degrees(), transform.orders(), 2]);
    own_modes(NAME, &harmonics, x.local().dtype(), &weight)?;
    check_channels(NAME, &before, &weight)?;
    // Channels keep their sharding, which decides the placement of the result.
    let harmonics: ShardTensor<E> = sht_beside(x, transform, &[1])?;
    let y: ShardTensor<D> = isht_beside(mode_product(harmonics, weight)?, transform, &[1])?;
    return_to(&before, y)
}
