//! Transformers for fields.

mod attention;
mod condition;
mod patch;
mod position;
mod rotary;
#[cfg(test)]
mod tests;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use halocline_core::{Boundary, Halos, PlanPlacement, module_scope};
use halocline_ops::prelude::*;

use crate::parallel::{Axes, LayerSharding, Plan, Style};
use crate::precision::{computed, stepped};

pub use attention::{
    NeighborhoodAttention1d, NeighborhoodAttention1dConfig, NeighborhoodAttention2d,
    NeighborhoodAttention2dConfig, NeighborhoodAttention3d, NeighborhoodAttention3dConfig,
};
pub use condition::{ConditionEmbedding, ConditionEmbeddingConfig, Modulation, ModulationConfig};
pub use patch::{PatchEmbedding2d, PatchEmbedding2dConfig, PatchRecovery2d, PatchRecovery2dConfig};
pub use position::{
    LearnedPosition2d, LearnedPosition2dConfig, SinusoidalPosition2d, SphericalPosition,
    SphericalPositionConfig,
};
pub use rotary::Rotary;

/// Configuration of [`FieldTransformer`], which has an example.
///
/// A block has about `12 · d_model²` parameters: 128 channels and 5 blocks make a model of 1 M
/// parameters, 1,536 channels and 36 blocks one of 1 B.
#[derive(Config, Debug)]
pub struct FieldTransformerConfig {
    /// Variables of a state.
    pub variables: usize,
    /// Number of input states, the newest last.
    #[config(default = "1")]
    pub history: usize,
    /// Constant channels after the states, such as the sine of latitude.
    #[config(default = "0")]
    pub constants: usize,
    /// Predicted channels after the variables that are no input, such as precipitation. They start
    /// from zero.
    #[config(default = "0")]
    pub diagnostics: usize,
    /// Channels of a patch.
    #[config(default = "64")]
    pub d_model: usize,
    /// Attention heads.
    #[config(default = "4")]
    pub heads: usize,
    /// Blocks of attention and an MLP.
    #[config(default = "4")]
    pub blocks: usize,
    /// Number of blocks in the middle that attend to all patches.
    #[config(default = "0")]
    pub dense_blocks: usize,
    /// Cells per patch, in both dims.
    #[config(default = "[2, 2]")]
    pub patch: [usize; 2],
    /// Patches that each patch attends to, in both dims.
    #[config(default = "[7, 7]")]
    pub kernel: [usize; 2],
    /// Hidden channels of the MLP, as a multiple of `d_model`.
    #[config(default = "4")]
    pub expansion: usize,
    /// Learned tokens per block, which every patch attends to in addition.
    #[config(default = "0")]
    pub tokens: usize,
    /// Channels of a condition, such as an embedded lead time, that modulates all blocks; zero for
    /// no condition.
    #[config(default = "0")]
    pub condition: usize,
    /// Periodic dims.
    #[config(default = "[false, true]")]
    pub periodic: [bool; 2],
    /// Whether the backward pass recomputes blocks instead of storing their activations: less
    /// memory, more time, the same gradients. Halos of neighborhood attention are kept; dense
    /// blocks communicate again ([`Halos`]).
    #[config(default = "false")]
    pub recompute: bool,
}

/// Transformer that predicts an increment to the newest state of a latitude-longitude field: a
/// patch embedding, blocks of neighborhood attention with rotary positions and an MLP, and a patch
/// recovery.
///
/// The increment starts small, so that the untrained model is close to persistence. The network
/// computes in the dtype of its parameters, and adds the increment in the dtype of the input.
///
/// # Shapes
/// `[batch, history · variables + constants, lat, lon]` → `[batch, variables + diagnostics, lat,
/// lon]`, of any size.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::FieldTransformerConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let config = FieldTransformerConfig::new(3).with_d_model(16).with_heads(2).with_blocks(1);
/// let model = config.with_kernel([3, 5]).init(&device);
/// let y = Tensor::<4>::ones([1, 3, 13, 24], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 3, 13, 24]);
/// ```
#[derive(Module, Debug)]
pub struct FieldTransformer {
    embedding: PatchEmbedding2d,
    blocks: Vec<Block>,
    norm: RmsNorm,
    recovery: PatchRecovery2d,
    scale: Param<Tensor<4>>,
    history: usize,
    variables: usize,
    recompute: bool,
}

#[derive(Module, Debug)]
struct Block {
    norms: Vec<RmsNorm>,
    /// Modulations of attention and of the MLP; empty without a condition.
    modulations: Vec<Modulation>,
    attention: NeighborhoodAttention2d,
    inner: Linear,
    outer: Linear,
    dense: bool,
}

impl FieldTransformerConfig {
    /// Initializes the model.
    ///
    /// # Panics
    /// Panics if `history` is zero, `dense_blocks` exceeds `blocks`, or `d_model` is not a multiple
    /// of four per head.
    pub fn init(&self, device: &Device) -> FieldTransformer {
        assert!(
            self.history > 0,
            "history: got 0, expected at least 1 state"
        );
        assert!(
            self.dense_blocks <= self.blocks,
            "dense_blocks: got {}, expected at most {} blocks",
            self.dense_blocks,
            self.blocks
        );
        assert!(
            self.d_model.is_multiple_of(4 * self.heads),
            "d_model: got {} for {} heads, expected a multiple of {}, four for each head",
            self.d_model,
            self.heads,
            4 * self.heads
        );
        let before = (self.blocks - self.dense_blocks) / 2;
        let dense = before..before + self.dense_blocks;
        let norm = || RmsNormConfig::new(self.d_model).init(device);
        let hidden = self.expansion * self.d_model;
        let modulations = if self.condition > 0 { 2 } else { 0 };
        let modulation = |_| ModulationConfig::new(self.condition, self.d_model).init(device);
        let attention = NeighborhoodAttention2dConfig::new(self.d_model, self.heads, self.kernel)
            .with_periodic(self.periodic)
            .with_tokens(self.tokens)
            .with_rotary(Some(100.0));
        let block = |index| Block {
            // Modulations normalize without parameters.
            norms: match modulations {
                0 => vec![norm(), norm()],
                _ => Vec::new(),
            },
            modulations: (0..modulations).map(modulation).collect(),
            attention: attention.init(device),
            inner: LinearConfig::new(self.d_model, hidden).init(device),
            outer: LinearConfig::new(hidden, self.d_model).init(device),
            dense: dense.contains(&index),
        };
        let boundary = self.periodic.map(|periodic| {
            if periodic {
                Boundary::Periodic
            } else {
                Boundary::Replicate
            }
        });
        let channels = self.history * self.variables + self.constants;
        let outputs = self.variables + self.diagnostics;
        let small = Initializer::Constant { value: 0.1 };
        FieldTransformer {
            embedding: PatchEmbedding2dConfig::new(channels, self.d_model, self.patch)
                .with_boundary(boundary)
                .init(device),
            blocks: (0..self.blocks).map(block).collect(),
            norm: norm(),
            recovery: PatchRecovery2dConfig::new(self.d_model, outputs, self.patch).init(device),
            scale: small.init([1, outputs, 1, 1], device),
            history: self.history,
            variables: self.variables,
            recompute: self.recompute,
        }
    }
}

impl FieldTransformerConfig {
    /// Returns the number of parameters of the configured model, without initializing it.
    ///
    /// # Example
    /// ```
    /// use halocline_models::FieldTransformerConfig;
    ///
    /// let config = FieldTransformerConfig::new(70).with_d_model(1536).with_heads(16).with_blocks(36);
    /// assert_eq!(config.num_params() / 1_000_000, 1020);
    /// ```
    pub fn num_params(&self) -> usize {
        let linear = |from: usize, to: usize| (from + 1) * to;
        let (width, hidden) = (self.d_model, self.expansion * self.d_model);
        let cells: usize = self.patch.iter().product();
        let channels = self.history * self.variables + self.constants;
        let normalization = match self.condition {
            0 => 2 * width,
            condition => 2 * linear(condition, 3 * width),
        };
        let attention = linear(width, 3 * width) + linear(width, width) + 2 * self.tokens * width;
        let block = normalization + attention + linear(width, hidden) + linear(hidden, width);
        let outputs = self.variables + self.diagnostics;
        let ends = linear(channels * cells, width) + linear(width, outputs * cells);
        ends + self.blocks * block + width + outputs
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the attention heads and the
    /// hidden channels of the MLPs. Everything else stays whole, and can be stored in shards
    /// ([`Store`](crate::parallel::Store)).
    ///
    /// # Example
    /// ```
    /// use halocline_models::FieldTransformerConfig;
    /// use halocline_models::parallel::Store;
    ///
    /// let config = FieldTransformerConfig::new(3).with_d_model(32).with_heads(4);
    /// let plan = config.tensor_parallel("tensor").with_store(Store::new("**", "data"));
    /// println!("{}", plan.to_toml());
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        let width = self.d_model / self.heads;
        let tokens = || Axes::from([(axis.to_string(), PlanPlacement::Shard(2))]);
        let plan = Plan::default()
            .with_layer(
                "blocks.*.attention.query_key_value",
                Style::colwise(axis).with_unit(3 * width),
            )
            .with_layer(
                "blocks.*.attention.output",
                Style::rowwise(axis).with_unit(width),
            )
            .with_layer("blocks.*.inner", Style::colwise(axis))
            .with_layer("blocks.*.outer", Style::rowwise(axis));
        if self.tokens == 0 {
            return plan;
        }
        let tokens = LayerSharding {
            parameters: ["0", "1"].map(|name| (name.to_string(), tokens())).into(),
            ..LayerSharding::default()
        };
        plan.with_layer("blocks.*.attention.tokens", Style::Placed(tokens))
    }
}

impl Block {
    fn forward<X: Field<4>>(&self, x: X, condition: Option<&WithDims<X, 2>>) -> X {
        let _module = module_scope("Block");
        let x = self.half(0, x, condition, |x| {
            if self.dense {
                let _module = module_scope("NeighborhoodAttention2d");
                self.attention.forward_dense(x)
            } else {
                x.apply(&self.attention)
            }
        });
        self.half(1, x, condition, |x| {
            x.apply(&self.inner).gelu().apply(&self.outer)
        })
    }

    /// Handling of received halos in a recomputed block. A dense block receives the keys and values
    /// of all ranks, which would not fit in memory.
    fn halos(&self) -> Halos {
        if self.dense {
            Halos::Resend
        } else {
            Halos::Keep
        }
    }

    /// Computes `x + function(norm(x))`, modulated by the condition if there is one.
    fn half<X: Field<4>>(
        &self,
        which: usize,
        x: X,
        condition: Option<&WithDims<X, 2>>,
        function: impl FnOnce(X) -> X,
    ) -> X {
        match condition {
            None => x.clone() + function(x.apply(&self.norms[which])),
            Some(condition) => {
                let modulation = &self.modulations[which];
                modulation.modulate(x, condition.clone(), function)
            }
        }
    }
}

impl FieldTransformer {
    /// Computes the forecast under a condition `[batch, condition]`, such as an embedded lead time.
    ///
    /// # Panics
    /// Panics if the model was configured without a condition.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::{ConditionEmbeddingConfig, FieldTransformerConfig};
    /// use halocline_ops::Apply;
    ///
    /// let device = Device::default();
    /// let config = FieldTransformerConfig::new(1).with_d_model(8).with_heads(1).with_blocks(1);
    /// let model = config.with_kernel([3, 3]).with_condition(6).init(&device);
    /// let embedding = ConditionEmbeddingConfig::new(1, 6).init(&device);
    /// let x = Tensor::<4>::ones([2, 1, 8, 12], &device);
    /// let hours = Tensor::<2>::from_floats([[6.0], [12.0]], &device);
    /// let y = model.forward_conditioned(x, hours.apply(&embedding));
    /// assert_eq!(y.dims(), [2, 1, 8, 12]);
    /// ```
    pub fn forward_conditioned<X: Field<4>>(&self, x: X, condition: WithDims<X, 2>) -> X {
        let modulated = self
            .blocks
            .iter()
            .all(|block| !block.modulations.is_empty());
        assert!(
            modulated,
            "FieldTransformer: configured without a condition"
        );
        let _module = module_scope("FieldTransformer");
        self.forecast(x, Some(&condition))
    }

    fn forecast<X: Field<4>>(&self, x: X, condition: Option<&WithDims<X, 2>>) -> X {
        let oldest = (self.history - 1) * self.variables;
        let state = x.clone().narrow(1, oldest, self.variables); // [batch, variables, lat, lon]
        let condition = condition.map(|condition| computed(condition.clone(), &self.scale));
        let condition = condition.as_ref();
        let x = computed(x, &self.scale);
        let mut y = x.apply(&self.embedding); // [batch, lat, lon, d_model], by patches
        for block in &self.blocks {
            let halos = block.halos();
            y = match (self.recompute, condition) {
                (false, condition) => block.forward(y, condition),
                (true, None) => y.recompute(block, halos, |block, y| block.forward(y, None)),
                (true, Some(condition)) => {
                    let again = |block: &Block, y, condition| block.forward(y, Some(&condition));
                    y.recompute_with::<2, _>(condition.clone(), block, halos, again)
                }
            };
        }
        let increment = self.recovery.recover(y.apply(&self.norm), &state);
        stepped(state, increment, &self.scale)
    }
}

impl<X: Field<4>> Layer<X> for FieldTransformer {
    type Output = X;

    /// # Panics
    /// Panics if the model was configured with a condition.
    fn forward(&self, x: X) -> X {
        let plain = self.blocks.iter().all(|block| block.modulations.is_empty());
        assert!(
            plain,
            "FieldTransformer: configured with a condition; call forward_conditioned"
        );
        self.forecast(x, None)
    }
}
