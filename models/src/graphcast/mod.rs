//! Graph network for the cells of any grid.

mod grid_mesh;
mod interaction;
#[cfg(test)]
mod tests;

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use halocline_core::{OrRaise, Result, ShardTensor};
use halocline_ops::graph::{flatten_cells, unflatten_cells};
use halocline_ops::prelude::*;

use crate::parallel::{Plan, Style};
use interaction::{InteractionNetwork, Mlp};

pub use grid_mesh::GridMesh;

/// Configuration of [`GraphCastNet`], which has an example.
#[derive(Config, Debug)]
pub struct GraphCastNetConfig {
    /// Input channels.
    pub channels_in: usize,
    /// Output channels.
    pub channels_out: usize,
    /// Features of cells and edges.
    #[config(default = "32")]
    pub width: usize,
    /// Number of message-passing layers of the processor.
    #[config(default = "4")]
    pub layers: usize,
}

/// Graph network of GraphCast (R. Lam et al. 2023), as `GraphCastNet` of PhysicsNeMo: an encoder
/// passes messages from the cells of the grid to those of an icosahedral mesh, a processor passes
/// messages between the cells of the mesh, and a decoder from the mesh to the grid. Each layer has
/// its own MLPs.
///
/// The grid is that of the [`GridMesh`], structured or not. Features of an edge are its length and
/// the offset of its source in the local frame of its target, relative to the longest edge. Those
/// of a cell, beside the channels, are the sine of its latitude and the cosine and sine of its
/// longitude.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`, with the cells of the grid
/// row by row; those of an unstructured grid are one row.
///
/// # Placement
/// Samples, rows and columns may be sharded, with any extents. The mesh is divided evenly among the
/// ranks that hold cells of a sample.
///
/// # Communication
/// In each layer, a cell that has edges to cells of another rank is sent there once, in one message
/// per peer.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::{GraphCastNetConfig, GridMesh};
/// use halocline_ops::Apply;
///
/// // A grid of 6 x 12 cells.
/// let positions: Vec<[f64; 2]> = (0..72)
///     .map(|cell| [75.0 - 30.0 * (cell / 12) as f64, 30.0 * (cell % 12) as f64])
///     .collect();
/// let (device, mesh) = (Device::default(), GridMesh::new(&positions, 1)?);
/// let model = GraphCastNetConfig::new(3, 2).with_width(8).init(&mesh, &device);
/// let y = Tensor::<4>::ones([1, 3, 6, 12], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 2, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct GraphCastNet {
    /// Part of the first layer of the embedding of grid cells, for the channels of the field.
    channels: Linear,
    /// Embeddings of the features of the cells of grid and mesh.
    nodes: Vec<Mlp>,
    /// Embeddings of the edges of encoder, processor and decoder.
    edges: Vec<Mlp>,
    encoder: InteractionNetwork,
    /// Increment of the grid cells in the encoder.
    grid: Mlp,
    processor: Vec<InteractionNetwork>,
    decoder: InteractionNetwork,
    output: Mlp,
    #[module(skip)]
    mesh: GridMesh,
}

impl GraphCastNetConfig {
    /// Initializes the model for fields on the grid of the mesh.
    pub fn init(&self, mesh: &GridMesh, device: &Device) -> GraphCastNet {
        let width = self.width;
        let embedding = |features: usize| Mlp::new([features, width, width], device);
        let layer = || InteractionNetwork::new(width, device);
        let channels = LinearConfig::new(self.channels_in, width).with_bias(false);
        GraphCastNet {
            channels: channels.init(device),
            nodes: vec![embedding(3), embedding(3)],
            edges: vec![embedding(4), embedding(4), embedding(4)],
            encoder: layer(),
            grid: Mlp::new([width; 3], device),
            processor: (0..self.layers).map(|_| layer()).collect(),
            decoder: layer(),
            output: Mlp::new([width, width, self.channels_out], device).without_norm(),
            mesh: mesh.clone(),
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the features between the two
    /// layers of each MLP.
    ///
    /// # Example
    /// ```
    /// use halocline_models::GraphCastNetConfig;
    ///
    /// let plan = GraphCastNetConfig::new(3, 2).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 4);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        Plan::default()
            .with_layer("channels", Style::colwise(axis))
            .with_layer("**.inner", Style::colwise(axis))
            .with_layer("**.{source,target,aggregate}", Style::colwise(axis))
            .with_layer("**.outer", Style::rowwise(axis))
    }
}

impl GraphCastNet {
    /// Returns the rows of layers by path pattern, for
    /// [`Workload::with_rows`](crate::parallel::Workload::with_rows): cells of the mesh, or edges,
    /// of all samples. Layers that are not listed compute with the cells of the grid. The
    /// embeddings of positions and edges are the same for all samples, and computed once in each
    /// of the forward passes into which these are divided.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Device;
    /// use halocline_models::{GraphCastNetConfig, GridMesh};
    ///
    /// let mesh = GridMesh::new(&[[45.0, 0.0], [-45.0, 120.0], [0.0, 240.0]], 1)?;
    /// let model = GraphCastNetConfig::new(3, 2).init(&mesh, &Device::default());
    /// let rows = model.rows(8, 2); // two passes of four samples
    /// assert!(rows.contains(&("nodes.1.*", 2 * mesh.size())));
    /// assert!(rows.contains(&("decoder.source", 8 * mesh.size())));
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn rows(&self, samples: usize, passes: usize) -> Vec<(&'static str, usize)> {
        let ([cells, corners], [encoder, processor, decoder]) = self.mesh.counts();
        let mut rows = vec![
            ("nodes.0.inner", passes * cells),
            ("nodes.1.*", passes * corners),
            ("edges.0.*", passes * encoder),
            ("edges.1.*", passes * processor),
            ("edges.2.*", passes * decoder),
            ("encoder.message.*", samples * encoder),
            ("encoder.{target,aggregate}", samples * corners),
            ("encoder.update.*", samples * corners),
            ("decoder.message.*", samples * decoder),
            ("decoder.source", samples * corners),
        ];
        if !self.processor.is_empty() {
            rows.push(("processor.*.message.*", samples * processor));
            rows.push(("processor.**", samples * corners));
        }
        rows
    }

    fn computed(&self, x: ShardTensor<4>) -> Result<ShardTensor<4>> {
        let graph = self.mesh.distributed(&x)?;
        let layout = x.layout().clone();
        let x = flatten_cells::<4, 3>(x, 2..4)?.permute([0, 2, 1]); // [batch, cells, channels]
        let [grid, mesh] = graph.nodes.each_ref().map(|node| node.beside(&x));
        let features = |kind: usize| {
            let features = graph.edges[kind].features.beside(&x);
            self.edges[kind].forward(features, [])
        };
        let shards = |kind: usize| &graph.edges[kind].shards;
        let channels = x.clone().apply(&self.channels);
        let grid = self.nodes[0].forward(grid, [channels]); // [batch, cells, width]
        let mesh = self.nodes[1].forward(mesh, []);
        let [mut mesh, _] = self.encoder.forward([&grid, &mesh], features(0), shards(0));
        let grid = grid.clone() + self.grid.forward(grid, []);
        let mut edges = features(1);
        for (place, layer) in self.processor.iter().enumerate() {
            let [next, messages] = layer.forward([&mesh, &mesh], edges.clone(), shards(1));
            mesh = next;
            // No layer reads the edges after the last one.
            if place + 1 < self.processor.len() {
                edges = edges + messages;
            }
        }
        let [grid, _] = self.decoder.forward([&mesh, &grid], features(2), shards(2));
        let y = self.output.forward(grid, []).permute([0, 2, 1]); // [batch, channels, cells]
        let layout = layout.resized(1, vec![y.dims()[1]]);
        unflatten_cells(y, 2..4, &layout)
    }
}

impl<X: Field<4>> Layer<X> for GraphCastNet {
    type Output = X;

    /// # Panics
    /// Panics for a field of another number of cells, and for sharded channels.
    fn forward(&self, x: X) -> X {
        X::from_shard(self.computed(x.into_shard()).or_raise())
    }
}
