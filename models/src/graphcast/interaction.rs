//! Layers of graph networks: MLPs, and message passing along edges.

use burn::module::Module;
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::Device;
use halocline_core::{ShardTensor, module_scope};
use halocline_ops::graph::{Aggregate, EdgeShards};
use halocline_ops::prelude::*;

/// Scale of the initial weights of sources, relative to those of the edges and targets with which
/// they are added. The messages of a cell have its own features in common and differ by their
/// sources. With a scale of one a network hardly reads neighbours, and needs more steps to do more
/// than damp the state of each cell: some 1,000 where 4 needs 250, on 400 cells with a field that is
/// advected.
const SOURCE_SCALE: f64 = 4.0;

/// MLP of two layers with SiLU between them and a layer norm at the end, on `[batch, cells or
/// edges, features]`.
#[derive(Module, Debug)]
pub(super) struct Mlp {
    pub(super) inner: Linear,
    outer: Linear,
    norm: Option<LayerNorm>,
}

impl Mlp {
    pub(super) fn new([inputs, hidden, outputs]: [usize; 3], device: &Device) -> Self {
        Self {
            inner: LinearConfig::new(inputs, hidden).init(device),
            outer: LinearConfig::new(hidden, outputs).init(device),
            norm: Some(LayerNormConfig::new(outputs).init(device)),
        }
    }

    pub(super) fn without_norm(self) -> Self {
        Self { norm: None, ..self }
    }

    /// Applies the layers to `x` concatenated with other features, which are given by `terms`:
    /// their products with their parts of the first weight.
    pub(super) fn forward(
        &self,
        x: ShardTensor<3>,
        terms: impl IntoIterator<Item = ShardTensor<3>>,
    ) -> ShardTensor<3> {
        let hidden = terms
            .into_iter()
            .fold(x.apply(&self.inner), |sum, term| sum + term);
        let y = hidden.silu().apply(&self.outer);
        match &self.norm {
            Some(norm) => y.apply(norm),
            None => y,
        }
    }
}

/// Interaction network (P. Battaglia et al. 2016), a step of message passing: an MLP of edge,
/// source and target computes the message of each edge, and an MLP of each target and the sum of
/// its messages the increment of the target.
///
/// The first layer of an MLP of concatenated features is a sum of linear layers. Those of sources
/// and targets are computed on cells, of which there are fewer than edges; the values are the same.
#[derive(Module, Debug)]
pub(super) struct InteractionNetwork {
    message: Mlp,
    source: Linear,
    target: Linear,
    update: Mlp,
    aggregate: Linear,
}

impl InteractionNetwork {
    pub(super) fn new(width: usize, device: &Device) -> Self {
        let mlp = || Mlp::new([width; 3], device);
        let linear = LinearConfig::new(width, width).with_bias(false);
        let initializer = Initializer::KaimingUniform {
            gain: SOURCE_SCALE / 3.0_f64.sqrt(), // burn's default has a scale of one
            fan_out_only: false,
        };
        let source = linear.clone().with_initializer(initializer);
        Self {
            message: mlp(),
            source: source.init(device),
            target: linear.init(device),
            update: mlp(),
            aggregate: linear.init(device),
        }
    }

    /// Returns the targets after the step, and the messages.
    pub(super) fn forward(
        &self,
        [sources, targets]: [&ShardTensor<3>; 2],
        features: ShardTensor<3>,
        edges: &EdgeShards,
    ) -> [ShardTensor<3>; 2] {
        let _module = module_scope("InteractionNetwork");
        let ends = [
            edges.sources(sources.clone().apply(&self.source)),
            edges.targets(targets.clone().apply(&self.target)),
        ];
        let messages = self.message.forward(features, ends); // [batch, edges, width]
        let sums = edges.reduce(messages.clone(), Aggregate::Sum);
        let sums = sums.apply(&self.aggregate); // [batch, targets, width]
        let increments = self.update.forward(targets.clone(), [sums]);
        [targets.clone() + increments, messages]
    }
}
