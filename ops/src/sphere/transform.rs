//! Scalar and vector spherical-harmonic transforms of sharded fields.

use std::f64::consts::PI;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{Error, Layout, Result, ShardTensor};

use super::contraction::{Contraction, Factor, To};
use super::legendre::Function;
use super::sht::Sht;
use crate::driver::empty::{drop_empty, fill_all};
use crate::kernel::flex;
use crate::rearrange::{flip, profile};
use crate::reshape;
use crate::spectral::{Line, Scale, along, along_layout, whole, whole_layout};

/// Dims of a field on the sphere, for messages.
pub(super) const GRID: &str = "[.., latitudes, longitudes]";

/// Transforms a field to spherical harmonics: `[.., lat, lon]` to `[.., degrees, orders, 2]`, with
/// `E = D + 1`. See the [module](super).
///
/// # Errors
/// Sizes other than the transform's; a sharded dim that must become whole when no other dim can
/// take its mesh axis.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::sphere::{SphereGrid, Sht, sht};
///
/// let transform = Sht::new([6, 12], SphereGrid::Lobatto)?;
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([4, 6, 12], &mesh, &[Shard(1)])?;
///     let y: ShardTensor<4> = sht(x, &transform)?;
///     // The sum makes latitudes whole: the first dim takes the mesh axis.
///     assert_eq!((y.dims(), y.placements()), ([4, 5, 5, 2], &[Shard(0)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn sht<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
) -> Result<ShardTensor<E>> {
    sht_beside(x, transform, &[])
}

/// [`sht`] whose exchanges move no mesh axis onto the dims `fixed`.
pub(super) fn sht_beside<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
    fixed: &[usize],
) -> Result<ShardTensor<E>> {
    const NAME: &str = "sht";
    check(NAME, &x.dims(), &transform.size(), GRID)?;
    let y = to_orders(x, transform, fixed, NAME)?;
    let sum = Sum {
        function: Function::Value,
        to: To::Degrees,
        degrees: degrees(transform, transform.analysis()),
        factor: Factor::One,
    };
    sum.along(y, transform, fixed, NAME)
}

/// Layout of the result of [`sht_beside`], without a transform.
pub(super) fn sht_layout(field: &Layout, transform: &Sht, fixed: &[usize]) -> Result<Layout> {
    const NAME: &str = "sht";
    let dims = field.shape().len();
    let [latitudes, longitudes] = [dims - 2, dims - 1];
    let line = line_to_orders(transform);
    let orders = along_layout(field, longitudes, line, [fixed, &[latitudes]], NAME)?;
    let lines = whole_layout(&orders, latitudes, &[fixed, &[dims]].concat(), &[], NAME)?;
    Ok(lines.resized(latitudes, vec![transform.degrees()]))
}

/// Transforms spherical harmonics to a field: the inverse of [`sht`], with `E = D − 1`.
///
/// # Errors
/// Degrees and orders other than the transform's; a sharded dim that must become whole when no
/// other dim can take its mesh axis.
///
/// # Example
/// ```
/// use halocline_core::ShardTensor;
/// use halocline_ops::sphere::{SphereGrid, Sht, isht};
///
/// let transform = Sht::new([6, 12], SphereGrid::Lobatto)?;
/// let harmonics = burn::tensor::Tensor::<4>::ones([4, 5, 5, 2], &Default::default());
/// let x: ShardTensor<3> = isht(ShardTensor::solo(harmonics), &transform)?;
/// assert_eq!(x.dims(), [4, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn isht<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
) -> Result<ShardTensor<E>> {
    isht_beside(x, transform, &[])
}

/// [`isht`] whose exchanges move no mesh axis onto the dims `fixed`.
pub(super) fn isht_beside<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
    fixed: &[usize],
) -> Result<ShardTensor<E>> {
    const NAME: &str = "isht";
    let expected = [transform.degrees(), transform.orders(), 2];
    check(NAME, &x.dims(), &expected, "[.., degrees, orders, 2]")?;
    let analysis = transform.analysis();
    let sum = Sum {
        function: Function::Value,
        to: To::Points,
        degrees: degrees(transform, |degree| analysis(degree).recip()),
        factor: Factor::One,
    };
    let y = sum.along(x, transform, fixed, NAME)?;
    from_orders(y, transform, fixed, NAME)
}

/// Transforms a vector field `[.., 2, lat, lon]`, with components along colatitude and longitude,
/// to vector spherical harmonics `[.., 2, degrees, orders, 2]`, spheroidal and toroidal.
/// `E = D + 1`.
///
/// # Errors
/// The errors of [`sht`]; another number of components.
///
/// # Example
/// ```
/// use halocline_core::ShardTensor;
/// use halocline_ops::sphere::{SphereGrid, Sht, vector_sht};
///
/// let transform = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// let wind = burn::tensor::Tensor::<3>::ones([2, 6, 12], &Default::default());
/// let y: ShardTensor<4> = vector_sht(ShardTensor::solo(wind), &transform)?;
/// assert_eq!(y.dims(), [2, 6, 6, 2]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn vector_sht<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
) -> Result<ShardTensor<E>> {
    const NAME: &str = "vector_sht";
    let [latitudes, longitudes] = transform.size();
    let expected = [2, latitudes, longitudes];
    check(NAME, &x.dims(), &expected, "[.., 2, latitudes, longitudes]")?;
    x.require_resolved(NAME)?;
    let y = to_orders(x, transform, &[], NAME)?;
    let analysis = transform.analysis();
    let factors = degrees(transform, |degree| {
        analysis(degree) / (degree * (degree + 1)).max(1) as f64
    });
    // The gradient of a harmonic has the components `dP/dθ` and `imP/sin θ`; the sum is with its
    // conjugate.
    both(
        y,
        transform,
        To::Degrees,
        factors,
        Factor::MinusI,
        E - 4,
        NAME,
    )
}

/// Transforms vector spherical harmonics to a vector field: the inverse of [`vector_sht`], with
/// `E = D − 1`.
///
/// # Errors
/// The errors of [`isht`]; another number of components.
///
/// # Example
/// ```
/// use halocline_core::ShardTensor;
/// use halocline_ops::sphere::{SphereGrid, Sht, vector_isht};
///
/// let transform = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// let harmonics = burn::tensor::Tensor::<4>::ones([2, 6, 6, 2], &Default::default());
/// let wind: ShardTensor<3> = vector_isht(ShardTensor::solo(harmonics), &transform)?;
/// assert_eq!(wind.dims(), [2, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn vector_isht<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
) -> Result<ShardTensor<E>> {
    const NAME: &str = "vector_isht";
    let expected = [2, transform.degrees(), transform.orders(), 2];
    check(NAME, &x.dims(), &expected, "[.., 2, degrees, orders, 2]")?;
    x.require_resolved(NAME)?;
    let analysis = transform.analysis();
    let factors = degrees(transform, |degree| analysis(degree).recip());
    let y = both(
        x,
        transform,
        To::Points,
        factors,
        Factor::PlusI,
        D - 4,
        NAME,
    )?;
    from_orders(y, transform, &[], NAME)
}

/// Computes `[s, t] = slope · [u, −v] + azimuthal · [v, u]`, where `u` and `v` are the cells of the
/// dim `component`.
fn both<const D: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
    to: To,
    degrees: Arc<[f64]>,
    factor: Factor,
    component: usize,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let sum = |function, factor| Sum {
        function,
        to,
        degrees: degrees.clone(),
        factor,
    };
    // One exchange serves both sums.
    x.require_whole(operator, D - 1)?;
    let x = whole(x, D - 3, &[D - 1], &to.pending(D - 2), operator)?;
    let slope = sum(Function::Slope, Factor::One).along(x.clone(), transform, &[], operator)?;
    let azimuthal = sum(Function::Azimuthal, factor).along(x, transform, &[], operator)?;
    let signs = profile(&slope, component, &[1.0, -1.0])?;
    Ok(slope * signs + flip(azimuthal, &[component])?)
}

fn to_orders<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
    fixed: &[usize],
    operator: &'static str,
) -> Result<ShardTensor<E>> {
    const { assert!(E == D + 1, "orders have a dim of real and imaginary parts") };
    let line = line_to_orders(transform);
    along(x, D - 1, line, [fixed, &[D - 2]], operator)
}

fn line_to_orders(transform: &Sht) -> Line {
    let [_, size] = transform.size();
    Line::ToModes {
        size,
        modes: transform.orders(),
        scale: Scale::uniform(2.0 * PI / size as f64),
    }
}

fn from_orders<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    transform: &Sht,
    fixed: &[usize],
    operator: &'static str,
) -> Result<ShardTensor<E>> {
    const { assert!(D == E + 1, "a field has no dim of real and imaginary parts") };
    let [_, size] = transform.size();
    let line = Line::FromModes {
        size,
        modes: transform.orders(),
        scale: Scale::with_conjugates(1.0),
    };
    along(x, D - 2, line, [fixed, &[]], operator)
}

fn degrees(transform: &Sht, factor: impl Fn(usize) -> f64) -> Arc<[f64]> {
    (0..transform.degrees()).map(factor).collect()
}

impl To {
    /// Dims that must be whole next: orders, on the way to a field.
    fn pending(self, orders: usize) -> Vec<usize> {
        match self {
            Self::Degrees => Vec::new(),
            Self::Points => vec![orders],
        }
    }
}

/// Sum over latitudes or degrees, for each order.
struct Sum {
    function: Function,
    to: To,
    degrees: Arc<[f64]>,
    factor: Factor,
}

impl Sum {
    /// Sums over the dim before the orders, making it whole first; orders may be sharded.
    fn along<const D: usize>(
        self,
        x: ShardTensor<D>,
        transform: &Sht,
        fixed: &[usize],
        operator: &'static str,
    ) -> Result<ShardTensor<D>> {
        let [summed, orders, pair] = [D - 3, D - 2, D - 1];
        x.require_whole(operator, pair)?;
        let fixed = [fixed, &[pair]].concat();
        let x = whole(x, summed, &fixed, &self.to.pending(orders), operator)?;
        let (mut local, layout, mesh) = x.into_parts();
        let mut held = layout.local_box(mesh.position()).ranges()[orders].clone();
        let kernels = flex::runs_on(&local.device());
        if !kernels {
            local = fill_all(local, &layout, operator, 0.0)?;
            held = if held.is_empty() { 0..1 } else { held };
        }
        let contraction = Contraction {
            table: transform.table(self.function, held, local.dtype()),
            to: self.to,
            points: match self.to {
                To::Degrees => transform.shared_weights(),
                To::Points => vec![1.0; transform.size()[0]].into(),
            },
            degrees: self.degrees,
            factor: self.factor,
        };
        let mut shape = local.dims().to_vec();
        let fields = shape[..summed].iter().product();
        let cells: Tensor<4> = reshape(local, vec![fields, shape[summed], shape[orders], 2]);
        let cells = contraction.run(cells);
        let [_, found, _, _] = cells.dims();
        shape[summed] = found;
        let layout = layout.resized(summed, vec![found]);
        let mut local = reshape(cells, shape);
        if !kernels {
            local = drop_empty(local, &layout, mesh.position(), operator)?;
        }
        Ok(ShardTensor::from_parts(local, layout, mesh))
    }
}

/// Checks the trailing sizes of a shape.
pub(super) fn check(
    operator: &'static str,
    shape: &[usize],
    expected: &[usize],
    names: &str,
) -> Result<()> {
    if shape.ends_with(expected) {
        return Ok(());
    }
    let message = format!("{shape:?}; expected {names} with {expected:?} last");
    Err(Error::operator(operator, message))
}
