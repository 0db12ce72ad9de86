//! Configuration of a model.

use burn::tensor::Device;
use halocline_core::{Error, Halos, Result};
use halocline_io::{Channels, Grid};
use halocline_models::parallel::Plan;
use halocline_models::{
    FieldTransformerConfig, FnoConfig, GraphCastNetConfig, SfnoConfig, SurrogateCnnConfig,
    UNetConfig,
};
use serde::{Deserialize, Serialize};

use super::model::{FieldModel, Network};
use super::signature::Signature;
use super::{cnn, fno, graph, transformer, unet};

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
        #[serde(default = "size::<32>")]
        width: usize,
        /// Number of residual blocks.
        #[serde(default = "size::<4>")]
        blocks: usize,
        /// Kernel size in cells, in both dims.
        #[serde(default = "size::<3>")]
        kernel: usize,
    },
    /// Encoder and decoder with skip connections.
    Unet {
        /// Channels of the finest hidden fields.
        #[serde(default = "size::<16>")]
        width: usize,
        /// Number of times the field is halved.
        #[serde(default = "size::<2>")]
        levels: usize,
    },
    /// Neighborhood attention between patches. Its targets must be its inputs.
    Transformer {
        /// Channels per patch.
        #[serde(default = "size::<64>")]
        d_model: usize,
        /// Attention heads.
        #[serde(default = "size::<4>")]
        heads: usize,
        /// Number of blocks.
        #[serde(default = "size::<4>")]
        blocks: usize,
        /// Number of blocks in the middle that attend to all patches.
        #[serde(default)]
        dense_blocks: usize,
        /// Learned tokens per block, to which every patch attends as well.
        #[serde(default)]
        tokens: usize,
        /// Cells per patch, in both dims.
        #[serde(default = "sizes::<2>")]
        patch: [usize; 2],
        /// Patches that a patch attends to, in both dims.
        #[serde(default = "sizes::<7>")]
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
        #[serde(default = "size::<32>")]
        width: usize,
        /// Number of spectral convolutions.
        #[serde(default = "size::<4>")]
        blocks: usize,
    },
    /// Spherical Fourier neural operator, on equiangular grids with poles and on Gaussian grids.
    Sfno {
        /// Channels of hidden fields.
        #[serde(default = "size::<32>")]
        width: usize,
        /// Number of blocks.
        #[serde(default = "size::<4>")]
        blocks: usize,
    },
    /// Graph network between the cells of any grid and an icosahedral mesh.
    Graph {
        /// Features of cells and edges.
        #[serde(default = "size::<32>")]
        width: usize,
        /// Number of message-passing layers on the mesh, at least 1.
        #[serde(default = "size::<4>")]
        layers: usize,
        /// Number of times the faces of the icosahedron are divided. Above 1, the mesh must not
        /// have more cells than the grid.
        mesh_level: usize,
    },
}

/// Returns a default size, for serde.
fn size<const SIZE: usize>() -> usize {
    SIZE
}

/// Returns a default size of both dims, for serde.
fn sizes<const SIZE: usize>() -> [usize; 2] {
    [SIZE; 2]
}

impl ModelConfig {
    /// Returns the handling of received halos in recomputed steps. Dense blocks receive the keys
    /// and values of all ranks, which would not fit in memory if they were kept.
    pub(crate) fn halos(&self) -> Halos {
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
    /// `sfno`, a grid without spherical harmonics; for `graph`, a grid without positions, or
    /// a mesh finer than the grid.
    pub fn init(
        &self,
        channels: &Channels,
        history: usize,
        grid: &Grid,
        odd: &[String],
        device: &Device,
    ) -> Result<FieldModel> {
        let signature = Signature {
            channels,
            history,
            grid,
            odd,
        };
        let network = self.network(&signature, device)?;
        Ok(FieldModel::new(network, &signature, device))
    }

    /// Initializes the network.
    fn network(&self, signature: &Signature, device: &Device) -> Result<Network> {
        self.check_hidden()?;
        Ok(match *self {
            Self::Cnn {
                width,
                blocks,
                kernel,
            } => Network::Cnn(cnn::init(signature, width, blocks, kernel, device)?),
            Self::Unet { width, levels } => {
                Network::Unet(unet::init(signature, width, levels, device)?)
            }
            Self::Transformer {
                d_model,
                heads,
                blocks,
                dense_blocks,
                tokens,
                patch,
                kernel,
                recompute,
            } => {
                let config = FieldTransformerConfig::new(signature.predicted_inputs()?)
                    .with_d_model(d_model)
                    .with_heads(heads)
                    .with_blocks(blocks)
                    .with_dense_blocks(dense_blocks)
                    .with_tokens(tokens)
                    .with_patch(patch)
                    .with_kernel(kernel)
                    .with_recompute(recompute);
                Network::Transformer(transformer::init(signature, config, device)?)
            }
            Self::Fno {
                modes,
                width,
                blocks,
            } => Network::Fno(fno::init(signature, modes, width, blocks, device)?),
            Self::Sfno { width, blocks } => {
                Network::Sfno(fno::init_spherical(signature, width, blocks, device)?)
            }
            Self::Graph {
                width,
                layers,
                mesh_level,
            } => Network::Graph(graph::init(signature, width, layers, mesh_level, device)?),
        })
    }

    /// Refuses hidden fields without channels.
    fn check_hidden(&self) -> Result<()> {
        let (key, channels) = match *self {
            Self::Transformer { d_model, .. } => ("d_model", d_model),
            Self::Cnn { width, .. }
            | Self::Unet { width, .. }
            | Self::Fno { width, .. }
            | Self::Sfno { width, .. }
            | Self::Graph { width, .. } => ("width", width),
        };
        if channels > 0 {
            return Ok(());
        }
        let message = format!("model.{key}: 0; expected at least 1 channel");
        Err(Error::other(message))
    }

    /// Returns the plan of tensor parallelism over a mesh axis.
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        let mut plan = match *self {
            Self::Cnn { .. } => SurrogateCnnConfig::new(1).tensor_parallel(axis),
            Self::Unet { .. } => UNetConfig::new(1, 1).tensor_parallel(axis),
            Self::Transformer {
                d_model,
                heads,
                tokens,
                ..
            } => FieldTransformerConfig::new(1)
                .with_d_model(d_model)
                .with_heads(heads)
                .with_tokens(tokens)
                .tensor_parallel(axis),
            Self::Fno { blocks, modes, .. } => FnoConfig::new(1, 1, modes)
                .with_blocks(blocks)
                .tensor_parallel(axis),
            Self::Sfno { .. } => SfnoConfig::new(1, 1).tensor_parallel(axis),
            Self::Graph { .. } => GraphCastNetConfig::new(1, 1).tensor_parallel(axis),
        };
        for entry in &mut plan.layer {
            entry.path = in_model(&entry.path);
        }
        plan
    }

    /// Returns the rows (samples × cells or patches) of most layers, and those of layers that have
    /// another number of them, by path, for this number of samples in `passes`.
    pub(crate) fn rows(
        &self,
        model: &FieldModel,
        grid: &Grid,
        samples: usize,
        passes: usize,
    ) -> (usize, Vec<(String, usize)>) {
        let cells: usize = grid.shape().iter().product();
        let rows = samples * cells;
        let (rows, others) = match (self, &model.network) {
            (Self::Transformer { patch, .. }, _) => {
                let [high, wide] = transformer::patches(grid.shape(), *patch);
                (samples * high * wide, Vec::new())
            }
            (Self::Unet { levels, .. }, _) => (rows, unet::rows(*levels, samples, cells)),
            (_, Network::Graph(network)) => (rows, graph::rows(network, samples, passes)),
            _ => (rows, Vec::new()),
        };
        let others = others.iter().map(|(path, rows)| (in_model(path), *rows));
        (rows, others.collect())
    }
}

/// Returns the path in a [`FieldModel`] of a path in its network.
fn in_model(path: &str) -> String {
    format!("network.*.{path}")
}
