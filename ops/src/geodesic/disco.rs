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

use std::fmt;
use std::sync::Arc;

use halocline_core::{Error, Result, ShardTensor};

use super::basis::{DiscoBasis, DiscoKernel, Function};
use super::filter::{Grids, entries, transposed};
use super::node::{Entries, LocalSums};
use super::reach::{Reach, Toward};
use crate::conv::{ConvOptions, check_channels, conv};
use crate::driver::empty::{drop_empty, fill};
use crate::kernel::flex;
use crate::operand::Operand;
use crate::rearrange::reshape as reshape_shards;
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
#[derive(Clone)]
pub struct Disco {
    pub(super) reach: Reach,
    pub(super) entries: Arc<Entries>,
}

impl fmt::Debug for Disco {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disco({:?}, {} functions)", self.reach, self.functions())
    }
}

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
        [input, output]: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        kernel: impl Into<DiscoKernel>,
        radius: Option<f64>,
    ) -> Result<Self> {
        let DiscoKernel { basis, norm } = kernel.into();
        let functions = functions(NAME, basis)?;
        let reach = Reach::new(NAME, [input, output], grids, radius, Toward::Coarser)?;
        let (cosines, weights) = grids[0].quadrature(input[0])?;
        let (outputs, _) = grids[1].quadrature(output[0])?;
        let grids = Grids {
            cosines: &cosines,
            longitudes: input[1],
            outputs: &outputs,
            radius: reach.radius,
            cutoff: reach.cutoff,
        };
        let by_output = entries(&functions, norm, &grids, &weights);
        Ok(Self {
            reach,
            entries: Arc::new(Entries {
                by_input: transposed(&by_output, input[0]),
                by_output,
                functions: functions.len(),
                longitudes: [input[1], output[1]],
            }),
        })
    }

    /// `[latitudes, longitudes]` of input and output.
    pub fn sizes(&self) -> [[usize; 2]; 2] {
        self.reach.sizes
    }

    /// Number of basis functions, which is the number of weights per pair of channels.
    pub fn functions(&self) -> usize {
        self.entries.functions
    }
}

/// Functions of a basis.
pub(super) fn functions(operator: &str, basis: DiscoBasis) -> Result<Vec<Function>> {
    let invalid = |expected| Error::operator(operator, format!("{basis:?}; expected {expected}"));
    basis.functions().map_err(invalid)
}

/// Checks the shapes and number types of the parameters of a convolution of `x` with this number of
/// functions.
pub(super) fn check_parameters(
    operator: &str,
    x: &ShardTensor<4>,
    weight: &Operand<3>,
    bias: Option<&Operand<1>>,
    groups: usize,
    functions: usize,
) -> Result<()> {
    let ([channels_out, channels_in, last], channels) = (weight.dims(), x.dims()[1]);
    let divides = groups > 0 && channels_out.is_multiple_of(groups);
    let fits = divides && channels_in * groups == channels && channels_in * channels_out > 0;
    if last != functions || !fits {
        let message = format!(
            "weight {:?} with {groups} groups on {channels} channels; expected [groups·n, channels / groups, {functions}]",
            weight.dims()
        );
        return Err(Error::operator(operator, message));
    }
    if let Some(bias) = bias
        && bias.dims() != [channels_out]
    {
        let message = format!("bias {:?} for {channels_out} channels", bias.dims());
        return Err(Error::operator(operator, message));
    }
    let dtype = x.local().dtype();
    weight.require_dtype(operator, dtype)?;
    bias.map_or(Ok(()), |bias| bias.require_dtype(operator, dtype))
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
    let weight = weight.into();
    let [channels_out, channels_in, functions] = weight.dims();
    check_parameters(
        NAME,
        &x,
        &weight,
        bias.as_ref(),
        groups,
        kernels.functions(),
    )?;
    kernels.reach.check(NAME, &x.dims())?;
    x.require_resolved(NAME)?;
    let mesh = x.layout().mesh();
    let with_functions = |extents: &[usize]| -> Vec<usize> {
        extents
            .iter()
            .map(|channels| channels * functions)
            .collect()
    };
    let mut extents = x.layout().all_extents().to_vec();
    extents[1] = with_functions(&extents[1]);
    let terms = x.layout().derive(x.placements().to_vec(), extents);
    let layout = weight.layout_on(mesh);
    layout.require_whole(NAME, 2)?;
    let columns = with_functions(layout.extents(1));
    let extents = vec![layout.extents(0).to_vec(), columns, vec![1], vec![1]];
    let matrix = layout.derive(layout.placements().to_vec(), extents);
    let offsets = bias.as_ref().map(|bias| bias.layout_on(mesh));
    check_channels(NAME, &terms, &matrix, offsets.as_ref(), groups)?;
    let shape = [channels_out, channels_in * functions, 1, 1];
    let weight = match weight {
        Operand::Replicated(weight) => Operand::Replicated(reshape(weight, shape.to_vec())),
        laid => Operand::Sharded(reshape_shards(laid.place_on(&x)?, shape)?),
    };
    let terms = disco(x, kernels)?;
    let options = ConvOptions::<2>::default().with_groups(groups);
    conv(terms, weight, bias, &options)
}

/// Integrates each channel against each function around each output cell:
/// `[batch, channels · functions, lat, lon]`.
pub(super) fn disco(x: ShardTensor<4>, kernels: &Disco) -> Result<ShardTensor<4>> {
    let reach = &kernels.reach;
    let [[_, longitudes], [_, width]] = reach.sizes;
    reach.check(NAME, &x.dims())?;
    let before = x.layout().clone();
    let x = reach.pencil(x, NAME)?;
    let (layout, mesh) = (x.layout().clone(), x.mesh().clone());
    let (outputs, functions) = (
        reach.outputs(&layout, mesh.position())?,
        kernels.functions(),
    );
    let local = reach.assemble(&x, NAME)?;
    let mut extents = layout.all_extents().to_vec();
    extents[1]
        .iter_mut()
        .for_each(|channels| *channels *= functions);
    extents[2] = reach.output_rows(&layout)?;
    extents[3] = vec![width];
    let result = layout.derive(layout.placements().to_vec(), extents);
    let kernel = flex::runs_on(&local.device());
    let local = if kernel || (!result.has_empty_shard() && reach.reaches_all(&layout)?) {
        local
    } else {
        fill(1, local, &[0, 1, 2, 3], NAME, 0.0)?
    };
    let [batch, channels, held, _] = local.dims();
    let sums = LocalSums {
        entries: kernels.entries.clone(),
        inputs: reach.inputs(&outputs),
        outputs,
    };
    let y = sums.run(reshape(local, vec![batch * channels, held, longitudes]));
    let [_, _, held, _] = y.dims();
    let mut y = reshape(y, vec![batch, channels * functions, held, width]);
    if !kernel {
        y = drop_empty(y, &result, mesh.position(), NAME)?;
    }
    reach.restore(ShardTensor::from_parts(y, result, mesh), &before)
}
