//! Transposed discrete-continuous convolution on the sphere: from a coarse grid to a finer one.
//!
//! `y_o(q) = Σ_i Σ_k w_oik Σ_p a_p ψ_k(R_p⁻¹ q) x_i(p)` over the cells `p` of the input grid, with
//! their areas `a`: each cell is spread by the kernel around it. Semantics follow torch-harmonics'
//! `DiscreteContinuousConvTransposeS2` (Ocampo, Price, McEwen 2023).
//!
//! # Shapes
//! `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]` on the output grid, whose
//! number of longitudes is a multiple of that of the input. The weight is
//! `[channels_out, channels_in/groups, functions]`.
//!
//! # Placement
//! Batch, latitude and longitude may be sharded, and channels as in a [convolution](crate::conv): a
//! weight sharded in output channels gives a result sharded in channels; one sharded in input
//! channels gives sums that are resolved before they are spread. The result has the placements of
//! `x`, and its extents where the grid keeps its size.
//!
//! # Communication
//! An exchange makes longitude whole. In latitude a halo travels: the rows within reach of a rank's
//! output rows, with `channels_out · functions` channels.
//!
//! # Adjoint
//! The sums of [`disco_conv`](super::disco_conv), for the rows that each rank received; halos and
//! longitudes return and are added.

use std::ops::Range;

use halocline_core::{Result, ShardTensor};

use super::basis::DiscoKernel;
use super::kernels::Kernels;
use super::node::{LocalSums, TransposedSums};
use super::reach::Toward;
use crate::conv::{ConvOptions, conv};
use crate::layer_placements::with_bias;
use crate::operand::Operand;
use crate::reshape;
use crate::sphere::SphereGrid;

const NAME: &str = "disco_conv_transpose";

/// Kernels of a transposed discrete-continuous convolution between two grids. Clones share the
/// data.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{DiscoTranspose, GeodesicField, SphereGrid};
///
/// let kernels = DiscoTranspose::new([6, 12], [11, 24], [3, 4], SphereGrid::Equiangular, None)?;
/// let device = Default::default();
/// let weight = Tensor::<3>::ones([2, 3, kernels.functions()], &device);
/// let y = Tensor::<4>::ones([1, 3, 6, 12], &device).disco_conv_transpose(weight, None, 1, &kernels);
/// assert_eq!(y.dims(), [1, 2, 11, 24]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DiscoTranspose(Kernels);

impl DiscoTranspose {
    /// Kernels from a grid of `input = [latitudes, longitudes]` to a finer one of `output`, as those
    /// of [`Disco::new`](super::Disco::new) in the opposite direction. The default radius is the
    /// largest distance between adjacent latitudes of the input. Norms sum over the cells that reach
    /// a row of outputs.
    ///
    /// # Errors
    /// Fails for a grid without cells, for a number of output longitudes that is no multiple of that
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

    /// Kernels between grids of two kinds. `sizes` and `grids` list input first, then output; a size
    /// is `[latitudes, longitudes]`. See [`new`](Self::new).
    ///
    /// # Errors
    /// Errors of [`new`](Self::new).
    ///
    /// # Example
    /// ```
    /// use halocline_ops::{DiscoTranspose, SphereGrid};
    ///
    /// let grids = [SphereGrid::Equiangular, SphereGrid::LegendreGauss];
    /// let finer = DiscoTranspose::between([[7, 12], [12, 24]], grids, [3, 1], None)?;
    /// assert_eq!(finer.sizes(), [[7, 12], [12, 24]]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn between(
        sizes: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        kernel: impl Into<DiscoKernel>,
        radius: Option<f64>,
    ) -> Result<Self> {
        let (kernel, toward) = (kernel.into(), Toward::Finer);
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

    /// Sums for a range of rows of the output, over the cells of the input rows within reach.
    pub(super) fn sums(&self, rows: Range<usize>) -> TransposedSums {
        TransposedSums(LocalSums {
            entries: self.0.entries.clone(),
            outputs: self.0.reach.inputs(&rows),
            inputs: rows,
        })
    }
}

/// Convolves a field on the sphere to a finer grid. See the [module](self).
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
/// use halocline_ops::geodesic::{DiscoTranspose, disco_conv_transpose};
///
/// let kernels = DiscoTranspose::new([6, 12], [12, 24], [3, 1], SphereGrid::LegendreGauss, None)?;
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 6, 12], &mesh, &[Shard(2)])?;
///     let weight = Tensor::<3>::ones([2, 3, 2], world.device());
///     let y = disco_conv_transpose(x, weight, None, 1, &kernels)?;
///     assert_eq!((y.dims(), y.placements()), ([1, 2, 12, 24], &[Shard(2)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn disco_conv_transpose(
    x: ShardTensor<4>,
    weight: impl Into<Operand<3>>,
    bias: Option<Operand<1>>,
    groups: usize,
    kernels: &DiscoTranspose,
) -> Result<ShardTensor<4>> {
    let reach = &kernels.0.reach;
    let weight = kernels
        .0
        .pointwise(&x, weight.into(), bias.as_ref(), groups)?;
    let before = x.layout().clone();
    let x = reach.pencil(x, NAME)?;
    let options = ConvOptions::<2>::default().with_groups(groups);
    let terms = conv(x, weight, None, &options)?.resolve();
    let y = spread(&terms, kernels)?;
    let y = match bias {
        Some(bias) => with_bias(y, bias, 1)?,
        None => y,
    };
    reach.restore(y, &before)
}

/// Spreads the cells of each channel by its function: `[batch, channels · functions, lat, lon]`,
/// with longitude whole, to `[batch, channels, lat, lon]` on the output grid.
fn spread(terms: &ShardTensor<4>, kernels: &DiscoTranspose) -> Result<ShardTensor<4>> {
    let functions = kernels.functions();
    let [[_, longitudes], [_, wide]] = kernels.sizes();
    kernels.0.run(terms, |local, outputs| {
        let [batch, channels, rows, _] = local.dims();
        let channels = channels / functions;
        let shape = vec![batch * channels, functions, rows, longitudes];
        let y = kernels.sums(outputs).run(reshape(local, shape));
        let [_, rows, _] = y.dims();
        reshape(y, vec![batch, channels, rows, wide])
    })
}
