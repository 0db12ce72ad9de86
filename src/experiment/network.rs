//! Models that a configuration can name, behind one type.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, FloatDType, Tensor};
use halocline_core::{Boundary, Error, Halos, Result};
use halocline_io::{Channels, Grid};
use halocline_models::parallel::Plan;
use halocline_models::{
    FieldTransformer, FieldTransformerConfig, Fno, FnoConfig, GraphCastNet, GraphCastNetConfig,
    GridMesh, Sfno, SfnoConfig, SurrogateCnn, SurrogateCnnConfig, UNet, UNetConfig,
};
use halocline_ops::prelude::*;
use serde::{Deserialize, Serialize};

use super::geometry::{around, halved, harmonics, positions};
use super::patches::check_kernel;

/// Kind and sizes of a model. Channels, boundaries and the spherical grid follow from the data.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline::experiment::ModelConfig;
/// use halocline::io::{Channels, Grid};
/// use halocline::prelude::*;
///
/// let device = Device::default();
/// let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
/// let channels = Channels {
///     inputs: names(&["t2m", "msl"]),
///     forcings: names(&["cos_solar_zenith_angle"]),
///     targets: names(&["t2m", "msl"]),
/// };
/// let config = ModelConfig::Unet { width: 4, levels: 1 };
/// let model = config.init(&channels, 1, &Grid::with_poles(13, 24)?, &[], &device)?;
/// let x = Tensor::<4>::ones([1, 3, 13, 24], &device); // inputs and forcings
/// assert_eq!(x.apply(&model).dims(), [1, 2, 13, 24]);
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum ModelConfig {
    /// Residual convolutional network. Its targets must be its inputs.
    Cnn {
        /// Channels of hidden fields.
        #[serde(default = "cnn::width")]
        width: usize,
        /// Number of residual blocks.
        #[serde(default = "cnn::blocks")]
        blocks: usize,
        /// Kernel size in cells, in both dims.
        #[serde(default = "cnn::kernel")]
        kernel: usize,
    },
    /// Encoder and decoder with skip connections.
    Unet {
        /// Channels of the finest hidden fields.
        #[serde(default = "unet::width")]
        width: usize,
        /// Number of times the field is halved.
        #[serde(default = "unet::levels")]
        levels: usize,
    },
    /// Neighborhood attention between patches. Its targets must be its inputs.
    Transformer {
        /// Channels per patch.
        #[serde(default = "transformer::d_model")]
        d_model: usize,
        /// Attention heads.
        #[serde(default = "transformer::heads")]
        heads: usize,
        /// Number of blocks.
        #[serde(default = "transformer::blocks")]
        blocks: usize,
        /// Number of blocks in the middle that attend to all patches.
        #[serde(default)]
        dense_blocks: usize,
        /// Learned tokens per block, to which every patch attends as well.
        #[serde(default)]
        tokens: usize,
        /// Cells per patch, in both dims.
        #[serde(default = "transformer::patch")]
        patch: [usize; 2],
        /// Patches that a patch attends to, in both dims.
        #[serde(default = "transformer::kernel")]
        kernel: [usize; 2],
        /// Whether the backward pass recomputes blocks: less memory, more time.
        #[serde(default)]
        recompute: bool,
    },
    /// Fourier neural operator, periodic in both dims.
    Fno {
        /// Number of Fourier modes kept, in both dims.
        modes: [usize; 2],
        /// Channels of hidden fields.
        #[serde(default = "fno::width")]
        width: usize,
        /// Number of spectral convolutions.
        #[serde(default = "fno::blocks")]
        blocks: usize,
    },
    /// Spherical Fourier neural operator, on equiangular grids with poles and on Gaussian grids.
    Sfno {
        /// Channels of hidden fields.
        #[serde(default = "fno::width")]
        width: usize,
        /// Number of blocks.
        #[serde(default = "fno::blocks")]
        blocks: usize,
    },
    /// Graph network between the cells of any grid and an icosahedral mesh.
    Graph {
        /// Features of cells and edges.
        #[serde(default = "graph::width")]
        width: usize,
        /// Number of message-passing layers on the mesh.
        #[serde(default = "graph::layers")]
        layers: usize,
        /// Number of times the faces of the icosahedron are divided.
        mesh_level: usize,
    },
}

/// Declares modules of functions that return default values, for serde.
macro_rules! defaults {
    ($($kind:ident { $($name:ident: $type:ty = $value:expr,)* })*) => {
        $(mod $kind {
            $(pub(super) fn $name() -> $type {
                $value
            })*
        })*
    };
}

defaults! {
    cnn { width: usize = 32, blocks: usize = 4, kernel: usize = 3, }
    unet { width: usize = 16, levels: usize = 2, }
    transformer {
        d_model: usize = 64, heads: usize = 4, blocks: usize = 4,
        patch: [usize; 2] = [2, 2], kernel: [usize; 2] = [7, 7],
    }
    fno { width: usize = 32, blocks: usize = 4, }
    graph { width: usize = 32, layers: usize = 4, }
}

/// Model built from a [`ModelConfig`]. Adds an increment to the newest state and subtracts a
/// learned fraction of that state, which damps anomalies.
///
/// # Shapes
/// `[batch, history · inputs + forcings, lat, lon]` → `[batch, targets, lat, lon]`.
#[derive(Module, Debug)]
pub struct FieldModel {
    network: Network,
    /// Fraction of each target's state that is lost in a step; initially zero.
    damping: Param<Tensor<4>>,
    /// Index of each target among the channels of an input; for a target that is not an input, one
    /// past the last channel.
    #[module(skip)]
    places: Vec<usize>,
    /// Fingerprint of the checkpoint that the model was loaded from.
    #[module(skip)]
    pub(super) checkpoint: Option<u32>,
}

#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a program holds one model, whichever it is"
)]
enum Network {
    Cnn(SurrogateCnn),
    Unet(UNet),
    Transformer(FieldTransformer),
    Fno(Fno),
    Sfno(Sfno),
    Graph(GraphCastNet),
}

/// Scale of increments, small so that the untrained model is close to persistence. `SurrogateCnn`
/// and `FieldTransformer` apply their own.
const INCREMENT: f64 = 0.1;

impl FieldModel {
    /// Returns the network of kind `graph`.
    pub(super) fn graph(&self) -> Option<&GraphCastNet> {
        match &self.network {
            Network::Graph(model) => Some(model),
            _ => None,
        }
    }
}

impl ModelConfig {
    /// Returns the handling of received halos in recomputed steps. Dense blocks receive the keys
    /// and values of all ranks, which would not fit in memory if they were kept.
    pub(super) fn halos(&self) -> Halos {
        match self {
            Self::Transformer { dense_blocks, .. } if *dense_blocks > 0 => Halos::Resend,
            _ => Halos::Keep,
        }
    }

    /// Initializes the model for these channels, `history` times per input, and this grid. The
    /// inputs and forcings in `odd` change sign across a pole, which matters in the first layer of
    /// `cnn` and `unet`.
    ///
    /// # Errors
    /// Targets that are not the inputs, for kinds that require it; sizes that do not fit; for
    /// `sfno`, a grid without spherical harmonics; for `graph`, a grid without positions.
    pub fn init(
        &self,
        channels: &Channels,
        history: usize,
        grid: &Grid,
        odd: &[String],
        device: &Device,
    ) -> Result<FieldModel> {
        let (inputs, forcings) = (channels.inputs.len(), channels.forcings.len());
        let (channels_in, channels_out) = (history * inputs + forcings, channels.targets.len());
        let (boundary, [rows, columns]) = (grid.boundary(), grid.shape());
        let times = std::iter::repeat_n(&channels.inputs, history).flatten();
        let names = times.chain(&channels.forcings).enumerate();
        let odd: Vec<usize> = names
            .filter(|(_, name)| odd.contains(name))
            .map(|(place, _)| place)
            .collect();
        let (key, hidden) = match *self {
            Self::Transformer { d_model, .. } => ("d_model", d_model),
            Self::Cnn { width, .. }
            | Self::Unet { width, .. }
            | Self::Fno { width, .. }
            | Self::Sfno { width, .. }
            | Self::Graph { width, .. } => ("width", width),
        };
        if hidden == 0 {
            let message = format!("model.{key}: 0; expected at least 1 channel");
            return Err(Error::other(message));
        }
        let network = match *self {
            Self::Cnn {
                width,
                blocks,
                kernel,
            } => {
                // Cells beyond a pole come from rows on its other side, whose number limits the
                // kernel.
                let most = match boundary[0] {
                    Boundary::PoleRow => 2 * rows - 1,
                    Boundary::PoleEdge => 2 * rows + 1,
                    _ => usize::MAX,
                };
                if kernel.is_multiple_of(2) || kernel > most {
                    return Err(Error::other(format!(
                        "model.kernel: {kernel} on {rows} rows; expected an odd number{}",
                        if kernel > most {
                            format!(" up to {most}")
                        } else {
                            String::new()
                        }
                    )));
                }
                let config = SurrogateCnnConfig::new(same(channels)?)
                    .with_history(history)
                    .with_constants(forcings)
                    .with_width(width)
                    .with_blocks(blocks)
                    .with_kernel(kernel)
                    .with_boundary(boundary)
                    .with_odd(odd);
                Network::Cnn(config.init(device))
            }
            Self::Unet { width, levels } => {
                // A level needs at least two cells to halve.
                let least = rows.min(columns);
                let most = least.saturating_sub(1).checked_ilog2();
                let most = most.map_or(0, |log| log as usize + 1);
                if levels > most {
                    return Err(Error::other(format!(
                        "model.levels: {levels} on a grid of {rows} x {columns}; expected at most {most}"
                    )));
                }
                let config = UNetConfig::new(channels_in, channels_out)
                    .with_width(width)
                    .with_levels(levels)
                    .with_boundary(boundary)
                    .with_boundary_halved(Some(halved(grid, levels)))
                    .with_odd(odd);
                Network::Unet(config.init(device))
            }
            Self::Transformer {
                heads,
                d_model,
                dense_blocks,
                blocks,
                patch,
                kernel,
                ..
            } => {
                if heads == 0 || !d_model.is_multiple_of(4 * heads) || dense_blocks > blocks {
                    return Err(Error::other(format!(
                        "model: d_model {d_model} with {heads} heads, {dense_blocks} dense_blocks of {blocks} blocks; \
                         expected a multiple of four channels for each head, and no more dense blocks than blocks"
                    )));
                }
                if patch.contains(&0) {
                    return Err(Error::other(format!(
                        "model.patch: {patch:?}; expected one cell or more"
                    )));
                }
                if dense_blocks < blocks {
                    check_kernel(grid.shape(), patch, kernel)?;
                }
                let config = self.transformer(same(channels)?, forcings, history);
                let config = config.expect("the kind is a transformer");
                Network::Transformer(config.with_periodic([false, around(grid)]).init(device))
            }
            Self::Fno {
                modes,
                width,
                blocks,
            } => {
                if modes[0] > rows || modes[1] > columns / 2 + 1 || modes.contains(&0) {
                    return Err(Error::other(format!(
                        "model.modes: {modes:?} on a grid of {rows} x {columns}; expected 1 to {rows} and 1 to {}",
                        columns / 2 + 1
                    )));
                }
                let config = FnoConfig::new(channels_in, channels_out, modes)
                    .with_width(width)
                    .with_blocks(blocks);
                Network::Fno(config.init(device))
            }
            Self::Sfno { width, blocks } => {
                let config = SfnoConfig::new(channels_in, channels_out)
                    .with_width(width)
                    .with_blocks(blocks);
                Network::Sfno(config.init(&harmonics(grid)?, device))
            }
            Self::Graph {
                width,
                layers,
                mesh_level,
            } => {
                if !(1..=GridMesh::FINEST).contains(&mesh_level) {
                    return Err(Error::other(format!(
                        "model.mesh_level: {mesh_level}; expected 1 to {}",
                        GridMesh::FINEST
                    )));
                }
                let config = GraphCastNetConfig::new(channels_in, channels_out)
                    .with_width(width)
                    .with_layers(layers);
                let mesh = GridMesh::new(&positions(grid)?, mesh_level)?;
                Network::Graph(config.init(&mesh, device))
            }
        };
        Ok(FieldModel {
            network,
            damping: Initializer::Zeros.init([1, channels_out, 1, 1], device),
            places: places_of_targets(channels, history * inputs, channels_in),
            checkpoint: None,
        })
    }

    /// Returns the plan of tensor parallelism over a mesh axis, for kinds that have one.
    pub fn tensor_parallel(&self, axis: &str) -> Option<Plan> {
        let mut plan = match self {
            Self::Cnn { .. } => SurrogateCnnConfig::new(1).tensor_parallel(axis),
            Self::Unet { .. } => UNetConfig::new(1, 1).tensor_parallel(axis),
            Self::Transformer { .. } => self.transformer(1, 0, 1)?.tensor_parallel(axis),
            Self::Fno { blocks, modes, .. } => {
                let config = FnoConfig::new(1, 1, *modes).with_blocks(*blocks);
                config.tensor_parallel(axis)
            }
            Self::Sfno { .. } => SfnoConfig::new(1, 1).tensor_parallel(axis),
            Self::Graph { .. } => GraphCastNetConfig::new(1, 1).tensor_parallel(axis),
        };
        for entry in &mut plan.layer {
            entry.path = format!("network.*.{}", entry.path);
        }
        Some(plan)
    }

    fn transformer(
        &self,
        variables: usize,
        constants: usize,
        history: usize,
    ) -> Option<FieldTransformerConfig> {
        let Self::Transformer {
            d_model,
            heads,
            blocks,
            dense_blocks,
            tokens,
            patch,
            kernel,
            recompute,
        } = *self
        else {
            return None;
        };
        let config = FieldTransformerConfig::new(variables)
            .with_history(history)
            .with_constants(constants)
            .with_d_model(d_model)
            .with_heads(heads)
            .with_blocks(blocks)
            .with_dense_blocks(dense_blocks)
            .with_tokens(tokens)
            .with_patch(patch)
            .with_kernel(kernel)
            .with_recompute(recompute);
        Some(config)
    }
}

/// Returns the number of inputs, which must also be the targets.
fn same(channels: &Channels) -> Result<usize> {
    let Channels {
        inputs, targets, ..
    } = channels;
    if inputs == targets {
        Ok(inputs.len())
    } else {
        Err(Error::other(format!(
            "data.targets: {targets:?} of a model that predicts its inputs, {inputs:?}; expected the same, or \
             model.kind unet, fno, sfno or graph"
        )))
    }
}

/// Returns the place of each target among the channels of an input, of which the first `inputs` are
/// those of all times of its history. The place of a target that is not an input is `absent`.
pub(super) fn places_of_targets(channels: &Channels, inputs: usize, absent: usize) -> Vec<usize> {
    let newest = inputs - channels.inputs.len();
    let place = |target: &String| {
        let input = channels.inputs.iter().position(|input| input == target);
        input.map_or(absent, |input| newest + input)
    };
    channels.targets.iter().map(place).collect()
}

/// Selects channels of a field by their places. The place after the last channel is that of a
/// channel made by a function of another channel.
pub(super) fn select_channels<X: Field<4>>(
    x: X,
    places: &[usize],
    other: impl FnOnce(X) -> X,
) -> X {
    let x = if places.contains(&x.dims()[1]) {
        let other = other(x.clone().narrow(1, 0, 1));
        X::cat(vec![x, other], 1)
    } else {
        x
    };
    let (first, count) = (places[0], places.len());
    if places.iter().copied().eq(first..first + count) {
        x.narrow(1, first, count) // without a copy
    } else {
        x.index_select(1, places)
    }
}

impl<X: Field<4>> Layer<X> for FieldModel {
    type Output = X;

    fn forward(&self, x: X) -> X {
        // [batch, targets, lat, lon]; a target that is not an input starts from its mean, zero.
        let state = select_channels(x.clone(), &self.places, |channel| channel * 0.0);
        // Networks compute in the dtype of the parameters; increments are added in that of
        // the state.
        let types = [x.dtype(), self.damping.base().dtype()];
        let [dtype, computed] = types.map(FloatDType::from);
        let damping = state.place_operand(&self.damping).cast(dtype);
        let add = |increment: X| state.clone() + increment.cast(dtype) * INCREMENT;
        let next = match &self.network {
            Network::Cnn(model) => model.forward(x),
            Network::Transformer(model) => model.forward(x),
            Network::Unet(model) => add(model.forward(x.cast(computed))),
            Network::Fno(model) => add(model.forward(x.cast(computed))),
            Network::Sfno(model) => add(model.forward(x.cast(computed))),
            Network::Graph(model) => add(model.forward(x.cast(computed))),
        };
        next.addcmul(state, (damping * -1.0).into_shard())
    }
}
