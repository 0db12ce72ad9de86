//! Discrete-continuous convolution on the sphere, with kernels supported within a geodesic radius.
//!
//! `y_o(p) = Σ_i Σ_k w_oik ∫ ψ_k(R_p⁻¹ q) x_i(q) dq` over the sphere, by the quadrature of the
//! input grid, where `ψ_k` are functions of distance and direction from `p`, such as the hats,
//! waves and polynomials of a [`DiscoBasis`](super::DiscoBasis). Semantics follow torch-harmonics'
//! `DiscreteContinuousConvS2` (Ocampo, Price, McEwen 2023).
//!
//! # Shapes
//! `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]` on the output grid, whose
//! number of longitudes divides that of the input. The weight is
//! `[channels_out, channels_in/groups, functions]`.
//!
//! # Placement
//! Batch, latitude and longitude may be sharded, and channels as in a [convolution](crate::conv): a
//! weight sharded in output channels gives a result sharded in channels, one sharded in input
//! channels a `Partial(Sum)`. An exchange makes longitude whole, because kernels near the poles
//! reach all of it. In latitude only a halo travels, of as many rows as the kernels reach at that
//! latitude. The result has the placements of `x`, and its extents where the grid keeps its size.
//!
//! # Adjoint
//! Transposed sums, each row computed by the rank that holds it; halos and longitudes return and
//! are added.

use halocline_core::{Result, ShardTensor};

use super::basis::DiscoKernel;
use super::kernels::Kernels;
use super::node::LocalSums;
use super::reach::Toward;
use crate::conv::{ConvOptions, conv};
use crate::operand::Operand;
use crate::reshape;
use crate::sphere::SphereGrid;

const NAME: &str = "disco";

/// Kernels of a discrete-continuous convolution between two grids, with their support at every
/// latitude. Clones share the data.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Disco, GeodesicField, SphereGrid};
///
/// // Three rings of four directions around each cell, and its centre.
/// let kernels = Disco::new([6, 12], [6, 12], [3, 4], SphereGrid::Equiangular, None)?;
/// assert_eq!(kernels.functions(), 5);
/// let device = Default::default();
/// let weight = Tensor::<3>::ones([2, 3, 5], &device);
/// let y = Tensor::<4>::ones([1, 3, 6, 12], &device).disco_conv(weight, None, 1, &kernels);
/// assert_eq!(y.dims(), [1, 2, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Disco(pub(super) Kernels);

impl Disco {
    /// Kernels from a grid of `input = [latitudes, longitudes]` to one of `output`.
    ///
    /// A kernel is a weighted sum of the functions of a [`DiscoBasis`](super::DiscoBasis) within a
    /// geodesic radius, by default the largest distance between adjacent latitudes of the output. A
    /// `kernel` of two numbers selects piecewise linear functions: rings along a diameter and
    /// angles around the centre.
    ///
    /// # Errors
    /// Fails for a grid without cells, for a number of output longitudes that does not divide that
    /// of the input, for a basis without functions, and for a radius that is not positive.
    pub fn new(
        input: [usize; 2],
        output: [usize; 2],
        kernel: impl Into<DiscoKernel>,
        grid: SphereGrid,
        radius: Option<f64>,
    ) -> Result<Self> {
        Self::between([input, output], [grid; 2], kernel, radius)
    }

    /// Kernels between grids of two kinds, such as from Gauss-Legendre to equiangular latitudes.
    /// `sizes` and `grids` list input first, then output; a size is `[latitudes, longitudes]`. See
    /// [`new`](Self::new).
    ///
    /// # Errors
    /// Errors of [`new`](Self::new).
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{Disco, GeodesicField, SphereGrid};
    ///
    /// let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
    /// let coarser = Disco::between([[12, 24], [7, 12]], grids, [3, 1], None)?;
    /// let weight = Tensor::<3>::ones([2, 3, 2], &Default::default());
    /// let y = Tensor::<4>::ones([1, 3, 12, 24], &Default::default()).disco_conv(weight, None, 1, &coarser);
    /// assert_eq!(y.dims(), [1, 2, 7, 12]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn between(
        sizes: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        kernel: impl Into<DiscoKernel>,
        radius: Option<f64>,
    ) -> Result<Self> {
        let (kernel, toward) = (kernel.into(), Toward::Coarser);
        Kernels::new(NAME, sizes, grids, kernel, radius, toward).map(Self)
    }

    /// `[latitudes, longitudes]` of input and output.
    pub fn sizes(&self) -> [[usize; 2]; 2] {
        self.0.reach.sizes
    }

    /// Number of basis functions, which is the number of weights per pair of channels.
    pub fn functions(&self) -> usize {
        self.0.functions()
    }
}

/// Convolves a field on the sphere with local kernels. See the [module](self).
///
/// # Errors
/// Fails for shapes that do not match, for partial values, and for channels that are sharded
/// otherwise than the weight's.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::SphereGrid;
/// use halocline_ops::geodesic::{Disco, disco_conv};
///
/// let kernels = Disco::new([6, 12], [6, 12], [3, 1], SphereGrid::Lobatto, None)?;
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 6, 12], &mesh, &[Shard(2)])?;
///     let weight = Tensor::<3>::ones([2, 3, 2], world.device());
///     let y = disco_conv(x, weight, None, 1, &kernels)?;
///     assert_eq!((y.dims(), y.placements()), ([1, 2, 6, 12], &[Shard(2)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn disco_conv(
    x: ShardTensor<4>,
    weight: impl Into<Operand<3>>,
    bias: Option<Operand<1>>,
    groups: usize,
    kernels: &Disco,
) -> Result<ShardTensor<4>> {
    let weight = kernels
        .0
        .pointwise(&x, weight.into(), bias.as_ref(), groups)?;
    let terms = disco(x, kernels)?;
    let options = ConvOptions::<2>::default().with_groups(groups);
    conv(terms, weight, bias, &options)
}

/// Integrates each channel against each function around each output cell:
/// `[batch, channels · functions, lat, lon]`.
pub(super) fn disco(x: ShardTensor<4>, kernels: &Disco) -> Result<ShardTensor<4>> {
    let (reach, functions) = (&kernels.0.reach, kernels.functions());
    let [[_, longitudes], [_, width]] = reach.sizes;
    reach.check(NAME, &x.dims())?;
    let before = x.layout().clone();
    let x = reach.pencil(x, NAME)?;
    let y = kernels.0.run(&x, |local, outputs| {
        let [batch, channels, held, _] = local.dims();
        let sums = LocalSums {
            entries: kernels.0.entries.clone(),
            inputs: reach.inputs(&outputs),
            outputs,
        };
        let y = sums.run(reshape(local, vec![batch * channels, held, longitudes]));
        let [_, _, held, _] = y.dims();
        reshape(y, vec![batch, channels * functions, held, width])
    })?;
    reach.restore(y, &before)
}
