//! The models that a configuration may name, behind one type.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, FloatDType, Tensor};
use halocline_core::{Boundary, Error, Halos, Result};
use halocline_io::{Channels, Grid};
use halocline_models::parallel::Plan;
use halocline_models::{
    FieldTransformer, FieldTransformerConfig, Fno, FnoConfig, Sfno, SfnoConfig, SurrogateCnn,
    SurrogateCnnConfig, UNet, UNetConfig,
};
use halocline_ops::prelude::*;
use halocline_ops::{Sht, SphereGrid};
use serde::{Deserialize, Serialize};

/// The model of a configuration, by its kind, with its sizes. Channels, boundaries and the sphere come
/// from the data.
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
    /// A residual convolutional network, whose targets are its inputs.
    Cnn {
        /// Channels of hidden fields.
        #[serde(default = "cnn::width")]
        width: usize,
        /// Residual blocks.
        #[serde(default = "cnn::blocks")]
        blocks: usize,
        /// Cells of the kernels, in both dims.
        #[serde(default = "cnn::kernel")]
        kernel: usize,
    },
    /// Encoder and decoder with skip connections.
    Unet {
        /// Channels of the finest hidden fields.
        #[serde(default = "unet::width")]
        width: usize,
        /// The number of times that the field is halved.
        #[serde(default = "unet::levels")]
        levels: usize,
    },
    /// Neighborhood attention between patches. Its targets are its inputs.
    Transformer {
        /// Channels of a patch.
        #[serde(default = "transformer::d_model")]
        d_model: usize,
        /// Heads of attention.
        #[serde(default = "transformer::heads")]
        heads: usize,
        /// Blocks.
        #[serde(default = "transformer::blocks")]
        blocks: usize,
        /// Blocks in the middle whose attention reaches all patches.
        #[serde(default)]
        dense_blocks: usize,
        /// Learned tokens of each block, that every patch attends to besides.
        #[serde(default)]
        tokens: usize,
        /// Cells of a patch, in both dims.
        #[serde(default = "transformer::patch")]
        patch: [usize; 2],
        /// Patches that one attends to, in both dims.
        #[serde(default = "transformer::kernel")]
        kernel: [usize; 2],
        /// Whether the backward pass computes blocks again, which takes less memory and more time.
        #[serde(default)]
        recompute: bool,
    },
    /// Fourier neural operator, periodic in both dims.
    Fno {
        /// Fourier modes that are kept, in both dims.
        modes: [usize; 2],
        /// Channels of hidden fields.
        #[serde(default = "fno::width")]
        width: usize,
        /// Spectral convolutions.
        #[serde(default = "fno::blocks")]
        blocks: usize,
    },
    /// Spherical Fourier neural operator, on equiangular grids with poles and Gaussian ones.
    Sfno {
        /// Channels of hidden fields.
        #[serde(default = "fno::width")]
        width: usize,
        /// Blocks.
        #[serde(default = "fno::blocks")]
        blocks: usize,
    },
}

/// Declares modules of functions that return constants, for serde.
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
}

/// A model of a [configuration](ModelConfig), which adds an increment to the newest state, less a
/// learned part of it: of anomalies, their damping.
///
/// # Shapes
/// `[batch, history · inputs + forcings, lat, lon]` → `[batch, targets, lat, lon]`.
#[derive(Module, Debug)]
pub struct FieldModel {
    network: Network,
    /// The part of each target's state that is lost in a step, which begins at zero.
    damping: Param<Tensor<4>>,
    /// The place of each target in an input, or one after the last channel.
    #[module(skip)]
    places: Vec<usize>,
    /// The fingerprint of the checkpoint that it was loaded from.
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
}

/// The scale of increments, small so that the untrained model is close to persistence. `SurrogateCnn` and
/// `FieldTransformer` have their own.
const INCREMENT: f64 = 0.1;

impl ModelConfig {
    /// Handling of received halos in steps that are computed again. Dense blocks receive the keys and values of all
    /// ranks, which would not fit in memory.
    pub(super) fn halos(&self) -> Halos {
        match self {
            Self::Transformer { dense_blocks, .. } if *dense_blocks > 0 => Halos::SendAgain,
            _ => Halos::Keep,
        }
    }

    /// Makes the model for channels and a number of times in an input, on a grid. The inputs and forcings `odd`
    /// change their sign across a pole, which counts in the first layer of `cnn` and `unet`.
    ///
    /// # Errors
    /// Targets that are not the inputs, for models which need that; sizes that do not fit; a grid without
    /// spherical harmonics.
    pub fn init(
        &self,
        channels: &Channels,
        history: usize,
        grid: &Grid,
        odd: &[String],
        device: &Device,
    ) -> Result<FieldModel> {
        let (inputs, forcings) = (channels.inputs.len(), channels.forcings.len());
        let (from, to) = (history * inputs + forcings, channels.targets.len());
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
            | Self::Sfno { width, .. } => ("width", width),
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
                // Cells beyond a pole are those of rows on the other side.
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
                // A level halves two cells and more.
                let least = rows.min(columns);
                let most = least.saturating_sub(1).checked_ilog2();
                let most = most.map_or(0, |log| log as usize + 1);
                if levels > most {
                    return Err(Error::other(format!(
                        "model.levels: {levels} on a grid of {rows} x {columns}; expected at most {most}"
                    )));
                }
                let config = UNetConfig::new(from, to)
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
                let config = FnoConfig::new(from, to, modes)
                    .with_width(width)
                    .with_blocks(blocks);
                Network::Fno(config.init(device))
            }
            Self::Sfno { width, blocks } => {
                let config = SfnoConfig::new(from, to)
                    .with_width(width)
                    .with_blocks(blocks);
                Network::Sfno(config.init(&harmonics(grid)?, device))
            }
        };
        let newest = (history - 1) * inputs;
        let place = |target| channels.inputs.iter().position(|input| input == target);
        let places = channels
            .targets
            .iter()
            .map(|target| place(target).map_or(from, |place| newest + place));
        Ok(FieldModel {
            network,
            damping: Initializer::Zeros.init([1, to, 1, 1], device),
            places: places.collect(),
            checkpoint: None,
        })
    }

    /// Plans of tensor parallelism over a mesh axis, for the kinds that have one.
    pub fn tensor_parallel(&self, axis: &str) -> Option<Plan> {
        let within = |plan: Plan| Plan {
            layer: plan
                .layer
                .into_iter()
                .map(|mut entry| {
                    entry.path = format!("network.*.{}", entry.path);
                    entry
                })
                .collect(),
            ..plan
        };
        match self {
            Self::Cnn { .. } => Some(within(SurrogateCnnConfig::new(1).tensor_parallel(axis))),
            Self::Unet { .. } => Some(within(UNetConfig::new(1, 1).tensor_parallel(axis))),
            Self::Transformer { .. } => {
                let config = self.transformer(1, 0, 1)?;
                Some(within(config.tensor_parallel(axis)))
            }
            Self::Fno { blocks, modes, .. } => {
                let config = FnoConfig::new(1, 1, *modes).with_blocks(*blocks);
                Some(within(config.tensor_parallel(axis)))
            }
            Self::Sfno { .. } => Some(within(SfnoConfig::new(1, 1).tensor_parallel(axis))),
        }
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

/// The number of channels that are inputs and targets.
fn same(channels: &Channels) -> Result<usize> {
    let Channels {
        inputs, targets, ..
    } = channels;
    if inputs == targets {
        Ok(inputs.len())
    } else {
        Err(Error::other(format!(
            "data.targets: {targets:?} of a model that predicts its inputs, {inputs:?}; expected the same, or \
             model.kind unet, fno or sfno"
        )))
    }
}

/// Whether longitudes go around the globe.
fn around(grid: &Grid) -> bool {
    grid.boundary()[1] == Boundary::Periodic
}

/// The values beyond the ends of a grid that is halved, a number of times: across the poles only if each
/// level has opposite meridians. Two rows are one then, so that no row is a pole, but for a last row that is halved
/// alone.
fn halved(grid: &Grid, levels: usize) -> [Boundary; 2] {
    let [lat, lon] = grid.boundary();
    let has_opposite = grid.shape()[1].trailing_zeros() as usize > levels;
    match lat {
        Boundary::PoleRow | Boundary::PoleEdge if has_opposite => [Boundary::PoleEdge, lon],
        _ => [Boundary::Replicate, lon],
    }
}

/// The spherical harmonics of a grid, with its rows in either order.
fn harmonics(grid: &Grid) -> Result<Sht> {
    let sines: Vec<f64> = grid
        .lat()
        .iter()
        .map(|lat| lat.to_radians().sin())
        .collect();
    let sign = if sines.first() < sines.last() {
        -1.0
    } else {
        1.0
    };
    let grids = [
        SphereGrid::Equiangular,
        SphereGrid::LegendreGauss,
        SphereGrid::Lobatto,
    ];
    for kind in grids.into_iter().filter(|_| around(grid)) {
        let sht = Sht::new(grid.shape(), kind)?;
        let mut pairs = sht.cosines().iter().zip(&sines);
        // To a hundredth of the distance of rows.
        let near = 0.01 * std::f64::consts::PI / sines.len() as f64;
        if pairs.all(|(cosine, sine)| (cosine.acos() - (sign * sine).acos()).abs() < near) {
            return Ok(sht);
        }
    }
    Err(Error::other(format!(
        "model.kind sfno: {grid}; expected a globe whose latitudes are equidistant from pole to pole, or those of a \
         Gaussian grid"
    )))
}

impl<X: Field<4>> Layer<X> for FieldModel {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let channels = x.dims()[1];
        let state = if self.places.contains(&channels) {
            // A target that is no input begins at its mean.
            X::cat(vec![x.clone(), x.clone().narrow(1, 0, 1) * 0.0], 1)
        } else {
            x.clone()
        };
        let state = state.index_select(1, &self.places); // [batch, targets, lat, lon]
        // Networks compute in the number type of the parameters; increments are added in that of the state.
        let types = [x.dtype(), self.damping.base().dtype()];
        let [own, computed] = types.map(FloatDType::from);
        let lost = state.clone() * state.beside(&self.damping).cast(own);
        let add = |increment: X| state.clone() + increment.cast(own) * INCREMENT;
        let next = match &self.network {
            Network::Cnn(model) => model.forward(x),
            Network::Transformer(model) => model.forward(x),
            Network::Unet(model) => add(model.forward(x.cast(computed))),
            Network::Fno(model) => add(model.forward(x.cast(computed))),
            Network::Sfno(model) => add(model.forward(x.cast(computed))),
        };
        next - lost
    }
}
