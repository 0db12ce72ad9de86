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

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use halocline_core::{Result, ShardTensor};

use super::basis::DiscoKernel;
use super::disco::{check_parameters, functions};
use super::filter::{Grids, transposed, transposed_entries};
use super::node::{Entries, LocalSums, TransposedSums};
use super::reach::{Reach, Toward};
use crate::conv::{ConvOptions, check_channels, conv};
use crate::driver::empty::{drop_empty, fill};
use crate::kernel::flex;
use crate::layer_placements::with_bias;
use crate::operand::Operand;
use crate::rearrange::{permute, reshape as reshape_shards};
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
#[derive(Clone)]
pub struct DiscoTranspose {
    reach: Reach,
    entries: Arc<Entries>,
}

impl fmt::Debug for DiscoTranspose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reach, functions) = (&self.reach, self.functions());
        write!(f, "DiscoTranspose({reach:?}, {functions} functions)")
    }
}

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
        [input, output]: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        kernel: impl Into<DiscoKernel>,
        radius: Option<f64>,
    ) -> Result<Self> {
        let DiscoKernel { basis, norm } = kernel.into();
        let functions = functions(NAME, basis)?;
        let reach = Reach::new(NAME, [input, output], grids, radius, Toward::Finer)?;
        let (inputs, weights) = grids[0].quadrature(input[0])?;
        let (outputs, _) = grids[1].quadrature(output[0])?;
        // The filter runs in the direction of a convolution, from the finer grid.
        let grids = Grids {
            cosines: &outputs,
            longitudes: output[1],
            outputs: &inputs,
            radius: reach.radius,
            cutoff: reach.cutoff,
        };
        let by_input = transposed_entries(&functions, norm, &grids, &weights, input[1]);
        Ok(Self {
            reach,
            entries: Arc::new(Entries {
                by_output: transposed(&by_input, input[0]),
                by_input,
                functions: functions.len(),
                longitudes: [output[1], input[1]],
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

    /// Sums for a range of rows of the output, over the cells of the input rows within reach.
    pub(super) fn sums(&self, rows: Range<usize>) -> TransposedSums {
        TransposedSums(LocalSums {
            entries: self.entries.clone(),
            outputs: self.reach.inputs(&rows),
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
    // The weight of a pointwise convolution to `channels_out · functions` channels.
    let mesh = x.layout().mesh();
    let with_functions =
        |extents: &[usize]| -> Vec<usize> { extents.iter().map(|held| held * functions).collect() };
    let layout = weight.layout_on(mesh);
    layout.require_whole(NAME, 2)?;
    let rows = with_functions(layout.extents(0));
    let extents = vec![rows, layout.extents(1).to_vec(), vec![1], vec![1]];
    let matrix = layout.derive(layout.placements().to_vec(), extents);
    let offsets = bias.as_ref().map(|bias| {
        let layout = bias.layout_on(mesh);
        let extents = vec![with_functions(layout.extents(0))];
        layout.derive(layout.placements().to_vec(), extents)
    });
    check_channels(NAME, x.layout(), &matrix, offsets.as_ref(), groups)?;
    let shape = [channels_out * functions, channels_in, 1, 1];
    let weight = match weight {
        Operand::Replicated(weight) => {
            Operand::Replicated(reshape(weight.permute([0, 2, 1]), shape.to_vec()))
        }
        laid => {
            let weight = permute(laid.place_on(&x)?, [0, 2, 1])?;
            Operand::Sharded(reshape_shards(weight, shape)?)
        }
    };
    let before = x.layout().clone();
    let x = kernels.reach.pencil(x, NAME)?;
    let options = ConvOptions::<2>::default().with_groups(groups);
    let terms = conv(x, weight, None, &options)?.resolve();
    let y = spread(terms, kernels)?;
    let y = match bias {
        Some(bias) => with_bias(y, bias, 1)?,
        None => y,
    };
    kernels.reach.restore(y, &before)
}

/// Spreads the cells of each channel by its function: `[batch, channels · functions, lat, lon]`,
/// with longitude whole, to `[batch, channels, lat, lon]` on the output grid.
fn spread(terms: ShardTensor<4>, kernels: &DiscoTranspose) -> Result<ShardTensor<4>> {
    let (reach, functions) = (&kernels.reach, kernels.functions());
    let [[_, longitudes], [_, wide]] = reach.sizes;
    let (layout, mesh) = (terms.layout().clone(), terms.mesh().clone());
    let outputs = reach.outputs(&layout, mesh.position())?;
    let local = reach.assemble(&terms, NAME)?;
    let mut extents = layout.all_extents().to_vec();
    extents[1]
        .iter_mut()
        .for_each(|channels| *channels /= functions);
    extents[2] = reach.output_rows(&layout)?;
    extents[3] = vec![wide];
    let result = layout.derive(layout.placements().to_vec(), extents);
    let kernel = flex::runs_on(&local.device());
    let channels = local.dims()[1] / functions;
    let local = if kernel || (!result.has_empty_shard() && reach.reaches_all(&layout)?) {
        local
    } else {
        fill(1, local, &[0, 2, 3], NAME, 0.0)?
    };
    let (batch, rows) = (local.dims()[0], local.dims()[2]);
    let shape = vec![batch * channels, functions, rows, longitudes];
    let y = kernels.sums(outputs).run(reshape(local, shape));
    let rows = y.dims()[1];
    let mut y = reshape(y, vec![batch, channels, rows, wide]);
    if !kernel {
        y = drop_empty(y, &result, mesh.position(), NAME)?;
    }
    Ok(ShardTensor::from_parts(y, result, mesh))
}
