//! Configuration of a model.

use burn::tensor::Device;
use halocline_core::{Halos, Result};
use halocline_io::{Channels, Grid};
use halocline_models::parallel::Plan;
use halocline_models::{
    FieldTransformerConfig, FnoConfig, GraphCastNetConfig, SfnoConfig, SurrogateCnnConfig,
    UNetConfig,
};
use serde::{Deserialize, Serialize};

use super::super::errors::invalid;
use super::model::{FieldModel, Network};
use super::own::{Maker, OwnModel, OwnNetwork, no_network};
use super::signature::Signature;
use super::{cnn, fno, graph, mask, transformer, unet};

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
/// let config = ModelConfig::Unet { width: 4, levels: 1, recompute: false, mask: None };
/// let model = config.init(&channels, 1, &Grid::with_poles(13, 24)?, &[], &device)?;
/// let x = Tensor::<4>::ones([1, 3, 13, 24], &device); // inputs and forcings
/// assert_eq!(x.apply(&model).dims(), [1, 2, 13, 24]);
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum ModelConfig {
    /// Residual convolutional network.
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
        /// Whether the backward pass recomputes blocks: less memory, more time.
        #[serde(default)]
        recompute: bool,
        /// Channel whose missing cells reach no other cell; its mask must be a forcing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mask: Option<String>,
    },
    /// Encoder and decoder with skip connections.
    Unet {
        /// Channels of the finest hidden fields.
        #[serde(default = "size::<16>")]
        width: usize,
        /// Number of times the field is halved.
        #[serde(default = "size::<2>")]
        levels: usize,
        /// Whether the backward pass recomputes the convolutions of each level: less
        /// memory, more time.
        #[serde(default)]
        recompute: bool,
        /// Channel whose missing cells reach no other cell; its mask must be a forcing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mask: Option<String>,
    },
    /// Neighborhood attention between patches.
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
        /// Whether the backward pass recomputes blocks: less memory, more time.
        #[serde(default)]
        recompute: bool,
    },
    /// Spherical Fourier neural operator, on equiangular grids with poles and on Gaussian grids.
    Sfno {
        /// Channels of hidden fields.
        #[serde(default = "size::<32>")]
        width: usize,
        /// Number of blocks.
        #[serde(default = "size::<4>")]
        blocks: usize,
        /// Rows and columns of the grid per row and column of the Gaussian grid of hidden fields,
        /// which resolves fewer degrees. With 1, hidden fields are on the grid itself.
        #[serde(default = "size::<1>")]
        scale_factor: usize,
        /// Whether the backward pass recomputes blocks: less memory, more time.
        #[serde(default)]
        recompute: bool,
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
        /// Whether the backward pass recomputes encoder, layers and decoder: less memory,
        /// more time.
        #[serde(default)]
        recompute: bool,
    },
    /// Network that a program defines itself, for
    /// [`Experiment::with_network`](crate::experiment::Experiment::with_network).
    Own(OwnModel),
}

/// Largest number of channels, heads or tokens, and of cells of a kernel or patch in one dim.
const MOST: usize = 1 << 20;
/// Largest number of blocks or layers.
const MOST_BLOCKS: usize = 1 << 10;

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
    /// Sizes that do not fit; for `sfno`, a grid without spherical harmonics; for `graph`, a grid
    /// without positions, or a mesh finer than the grid; the kind `own`.
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
            noise_channels: 0,
        };
        self.init_with(&signature, device, no_network)
    }

    /// Initializes the model, around the network that `maker` returns if the kind is `own`.
    pub(crate) fn init_with<N: OwnNetwork>(
        &self,
        signature: &Signature,
        device: &Device,
        maker: Maker<N>,
    ) -> Result<FieldModel<N>> {
        let place = |(name, recompute)| mask::place(name, recompute, signature);
        let mask = self.mask().map(place).transpose()?;
        let network = self.network(signature, device, maker)?;
        Ok(FieldModel::new(network, mask, signature, device))
    }

    /// Initializes the network.
    fn network<N: OwnNetwork>(
        &self,
        signature: &Signature,
        device: &Device,
        maker: Maker<N>,
    ) -> Result<Network<N>> {
        self.check_sizes()?;
        Ok(match *self {
            Self::Cnn {
                width,
                blocks,
                kernel,
                recompute,
                ..
            } => {
                let config = SurrogateCnnConfig::new(signature.channels.inputs.len())
                    .with_width(width)
                    .with_blocks(blocks)
                    .with_kernel(kernel)
                    .with_recompute(recompute);
                Network::Cnn(cnn::init(signature, config, device)?)
            }
            Self::Unet {
                width,
                levels,
                recompute,
                ..
            } => {
                let config = UNetConfig::new(signature.channels_in(), signature.channels_out())
                    .with_width(width)
                    .with_levels(levels)
                    .with_recompute(recompute);
                Network::Unet(unet::init(signature, config, device)?)
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
                let config = FieldTransformerConfig::new(signature.channels.inputs.len())
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
                recompute,
            } => {
                let [inputs, outputs] = [signature.channels_in(), signature.channels_out()];
                let config = FnoConfig::new(inputs, outputs, modes)
                    .with_width(width)
                    .with_blocks(blocks)
                    .with_recompute(recompute);
                Network::Fno(fno::init(signature, config, device)?)
            }
            Self::Sfno {
                width,
                blocks,
                scale_factor,
                recompute,
            } => {
                let config = SfnoConfig::new(signature.channels_in(), signature.channels_out())
                    .with_width(width)
                    .with_blocks(blocks)
                    .with_recompute(recompute);
                let network = fno::init_spherical(signature, config, scale_factor, device)?;
                Network::Sfno(network)
            }
            Self::Graph {
                width,
                layers,
                mesh_level,
                recompute,
            } => {
                let [inputs, outputs] = [signature.channels_in(), signature.channels_out()];
                let config = GraphCastNetConfig::new(inputs, outputs)
                    .with_width(width)
                    .with_layers(layers)
                    .with_recompute(recompute);
                Network::Graph(graph::init(signature, config, mesh_level, device)?)
            }
            Self::Own(ref model) => Network::Own(maker(model, signature, device)?),
        })
    }

    /// Returns the channel whose missing cells reach no other cell, and whether blocks are
    /// recomputed, if there is such a channel.
    pub(crate) fn mask(&self) -> Option<(&str, bool)> {
        match self {
            Self::Cnn {
                mask, recompute, ..
            }
            | Self::Unet {
                mask, recompute, ..
            } => Some((mask.as_deref()?, *recompute)),
            _ => None,
        }
    }

    /// Returns the number of channels of hidden fields, after its key. `None` for a network that a
    /// program defines itself.
    pub(crate) fn hidden(&self) -> Option<(&'static str, usize)> {
        Some(match *self {
            Self::Own(_) => return None,
            Self::Transformer { d_model, .. } => ("model.d_model", d_model),
            Self::Cnn { width, .. }
            | Self::Unet { width, .. }
            | Self::Fno { width, .. }
            | Self::Sfno { width, .. }
            | Self::Graph { width, .. } => ("model.width", width),
        })
    }

    /// Refuses hidden fields without channels, and sizes with which even the description of the
    /// model would be too large, or numbers in it would overflow.
    fn check_sizes(&self) -> Result<()> {
        // The program checks the settings of its own network.
        let Some((key, channels)) = self.hidden() else {
            return Ok(());
        };
        if channels == 0 {
            return Err(invalid(key, channels, "at least 1 channel"));
        }
        let mut sizes = vec![(key, channels, MOST)];
        match *self {
            Self::Cnn { blocks, kernel, .. } => {
                sizes.push(("model.blocks", blocks, MOST_BLOCKS));
                sizes.push(("model.kernel", kernel, MOST));
            }
            Self::Transformer {
                heads,
                blocks,
                tokens,
                patch: [high, wide],
                ..
            } => {
                sizes.push(("model.heads", heads, MOST));
                sizes.push(("model.blocks", blocks, MOST_BLOCKS));
                sizes.push(("model.tokens", tokens, MOST));
                sizes.push(("model.patch", high.max(wide), MOST));
            }
            Self::Fno { blocks, .. } | Self::Sfno { blocks, .. } => {
                sizes.push(("model.blocks", blocks, MOST_BLOCKS));
            }
            Self::Graph { layers, .. } => sizes.push(("model.layers", layers, MOST_BLOCKS)),
            // The grid limits the levels.
            Self::Unet { .. } | Self::Own(_) => {}
        }
        match sizes.into_iter().find(|(_, size, most)| size > most) {
            None => Ok(()),
            Some((key, size, most)) => Err(invalid(key, size, format!("at most {most}"))),
        }
    }

    /// Returns the plan of tensor parallelism over a mesh axis; for the kind `own`, one without
    /// entries.
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
            Self::Own(_) => Plan::default(),
        };
        for entry in &mut plan.layers {
            entry.path = in_model(&entry.path);
        }
        plan
    }

    /// Returns the rows (samples × cells or patches) of most layers, and those of layers that have
    /// another number of them, by path, for this number of samples in `passes`.
    pub(crate) fn rows<N: OwnNetwork>(
        &self,
        model: &FieldModel<N>,
        grid: &Grid,
        samples: usize,
        passes: usize,
    ) -> (usize, Vec<(String, usize)>) {
        let cells: usize = grid.shape().iter().product();
        let rows = samples * cells;
        match (self, &model.network) {
            (Self::Transformer { patch, .. }, _) => {
                let [high, wide] = transformer::patches(grid.shape(), *patch);
                (samples * high * wide, Vec::new())
            }
            (Self::Unet { levels, .. }, _) => {
                (rows, rows_in_model(unet::rows(*levels, samples, cells)))
            }
            (
                Self::Sfno {
                    blocks,
                    scale_factor,
                    ..
                },
                _,
            ) => {
                let coarse = fno::rows(*blocks, *scale_factor, samples, grid.shape());
                (rows, rows_in_model(coarse))
            }
            (_, Network::Graph(network)) => (rows, rows_in_model(network.rows(samples, passes))),
            _ => (rows, Vec::new()),
        }
    }
}

/// Returns rows of layers by their paths in a [`FieldModel`], from those by their paths in its
/// network.
fn rows_in_model(rows: Vec<(impl AsRef<str>, usize)>) -> Vec<(String, usize)> {
    let rows = rows.into_iter();
    rows.map(|(path, rows)| (in_model(path.as_ref()), rows))
        .collect()
}

/// Returns the path in a [`FieldModel`] of a path in its network.
fn in_model(path: &str) -> String {
    format!("network.*.{path}")
}
