//! Graph network for the cells of any grid.

mod grid_mesh;
mod interaction;
mod joint;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use halocline_core::{OrRaise, Result, ShardTensor};
use halocline_ops::graph::{flatten_cells, unflatten_cells};
use halocline_ops::prelude::*;

use crate::parallel::{Plan, Style};
use crate::recompute::apply_block_with;
use grid_mesh::DistributedGraph;
use interaction::{InteractionNetwork, Mlp};
use joint::apply_joint;

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
    /// Whether the backward pass recomputes the encoder, the layers of the processor and the
    /// decoder instead of storing their activations: less memory, more time, the same gradients.
    /// Cells received from other ranks are kept.
    #[config(default = "false")]
    pub recompute: bool,
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
    recompute: bool,
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
            recompute: self.recompute,
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
        let grid = self.nodes[0].forward(grid, [x.apply(&self.channels)]); // [batch, cells, width]
        let mesh = self.nodes[1].forward(mesh, []);
        let mesh = self.encoded([grid.clone(), mesh], graph.clone());
        let mesh = self.processed(mesh, &graph);
        let y = self.decoded([grid, mesh], graph);
        let y = y.permute([0, 2, 1]); // [batch, channels, cells]
        let layout = layout.resized(1, vec![y.dims()[1]]);
        unflatten_cells(y, 2..4, &layout)
    }

    /// Returns the features of the cells of the mesh after the encoder.
    fn encoded(&self, nodes: [ShardTensor<3>; 2], graph: Arc<DistributedGraph>) -> ShardTensor<3> {
        let modules = (self.edges[0].clone(), self.encoder.clone());
        let block = move |(embedding, encoder): &(Mlp, InteractionNetwork),
                          grid: ShardTensor<3>,
                          mesh: ShardTensor<3>| {
            let edges = embedding.forward(graph.edges[0].features.beside(&grid), []);
            let [mesh, _] = encoder.forward([&grid, &mesh], edges, &graph.edges[0].shards);
            mesh
        };
        apply_block_with(self.recompute, nodes, &modules, block)
    }

    /// Returns the features of the cells of the mesh after the processor.
    fn processed(&self, mut mesh: ShardTensor<3>, graph: &Arc<DistributedGraph>) -> ShardTensor<3> {
        let Some((last, layers)) = self.processor.split_last() else {
            return mesh;
        };
        let features = graph.edges[1].features.beside(&mesh);
        let mut edges = self.edges[1].forward(features, []);
        for layer in layers {
            let graph = graph.clone();
            let block = move |layer: &InteractionNetwork,
                              mesh: ShardTensor<3>,
                              edges: ShardTensor<3>| {
                let ends = [&mesh, &mesh];
                let [next, messages] = layer.forward(ends, edges.clone(), &graph.edges[1].shards);
                [next, edges + messages]
            };
            [mesh, edges] = apply_joint(self.recompute, [mesh, edges], layer, block);
        }
        // No layer reads the edges after the last one.
        let graph = graph.clone();
        let block = move |layer: &InteractionNetwork, mesh: ShardTensor<3>, edges| {
            let [mesh, _] = layer.forward([&mesh, &mesh], edges, &graph.edges[1].shards);
            mesh
        };
        apply_block_with(self.recompute, [mesh, edges], last, block)
    }

    /// Returns the outputs of the cells of the grid, from their features before the encoder.
    fn decoded(&self, nodes: [ShardTensor<3>; 2], graph: Arc<DistributedGraph>) -> ShardTensor<3> {
        let modules = (
            self.grid.clone(),
            self.edges[2].clone(),
            self.decoder.clone(),
            self.output.clone(),
        );
        let block = move |modules: &(Mlp, Mlp, InteractionNetwork, Mlp),
                          grid: ShardTensor<3>,
                          mesh: ShardTensor<3>| {
            let (update, embedding, decoder, output) = modules;
            let edges = embedding.forward(graph.edges[2].features.beside(&grid), []);
            let grid = grid.clone() + update.forward(grid, []);
            let [grid, _] = decoder.forward([&mesh, &grid], edges, &graph.edges[2].shards);
            output.forward(grid, [])
        };
        apply_block_with(self.recompute, nodes, &modules, block)
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
