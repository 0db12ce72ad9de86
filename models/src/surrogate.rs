use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use halocline_core::{Boundary, OrRaise};
use halocline_ops::masked::apply_mask;
use halocline_ops::prelude::*;

use crate::conv::{FieldConv2d, FieldConv2dConfig};
use crate::parallel::{Plan, Style};
use crate::precision::{computed, stepped};
use crate::recompute::apply_block;

/// Configuration of [`SurrogateCnn`], which has an example.
#[derive(Config, Debug)]
pub struct SurrogateCnnConfig {
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
    /// Channels of the hidden fields.
    #[config(default = "32")]
    pub width: usize,
    /// Residual blocks.
    #[config(default = "4")]
    pub blocks: usize,
    /// Kernel size in cells, in both dims.
    #[config(default = "3")]
    pub kernel: usize,
    /// Boundary conditions in latitude and longitude.
    #[config(default = "[Boundary::Replicate, Boundary::Periodic]")]
    pub boundary: [Boundary; 2],
    /// Input channels that change sign across a [pole](Boundary::PoleRow), such as wind components.
    /// Hidden fields do not change sign.
    #[config(default = "Vec::new()")]
    pub odd: Vec<usize>,
    /// Whether the backward pass recomputes blocks instead of storing their activations: less
    /// memory, more time, the same gradients. Halos are kept.
    #[config(default = "false")]
    pub recompute: bool,
}

/// Residual convolutional network that predicts an increment to the newest state.
///
/// Blocks are `x + scale · conv(gelu(conv(x)))` (He et al. 2016, with the per-channel scale of
/// ConvNeXt, Liu et al. 2022). The increment starts small, so that the untrained model is close to
/// persistence. The network computes in the dtype of its parameters, and adds the increment in the
/// dtype of the input.
///
/// # Shapes
/// `[batch, history · variables + constants, lat, lon]` → `[batch, variables + diagnostics, lat,
/// lon]`.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::SurrogateCnnConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let config = SurrogateCnnConfig::new(3).with_history(2).with_width(4).with_blocks(1);
/// let model = config.with_diagnostics(1).init(&device);
/// let y = Tensor::<4>::ones([1, 6, 13, 24], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 4, 13, 24]);
/// ```
#[derive(Module, Debug)]
pub struct SurrogateCnn {
    stem: FieldConv2d,
    blocks: Vec<Block>,
    head: FieldConv2d,
    scale: Param<Tensor<4>>,
    history: usize,
    variables: usize,
    recompute: bool,
}

#[derive(Module, Debug)]
struct Block {
    first: FieldConv2d,
    second: FieldConv2d,
    scale: Param<Tensor<4>>,
}

/// Makes one factor per channel.
fn channel_scale(channels: usize, value: f64, device: &Device) -> Param<Tensor<4>> {
    Initializer::Constant { value }.init([1, channels, 1, 1], device)
}

impl SurrogateCnnConfig {
    /// Initializes the model.
    ///
    /// # Panics
    /// Panics if `history` is zero.
    pub fn init(&self, device: &Device) -> SurrogateCnn {
        assert!(
            self.history > 0,
            "history: got 0, expected at least 1 state"
        );
        let conv = |channels: [usize; 2]| {
            FieldConv2dConfig::new(channels, [self.kernel; 2]).with_boundary(self.boundary)
        };
        let block = |_| Block {
            first: conv([self.width; 2]).init(device),
            second: conv([self.width; 2]).init(device),
            scale: channel_scale(self.width, 0.5, device),
        };
        let outputs = self.variables + self.diagnostics;
        SurrogateCnn {
            stem: conv([self.history * self.variables + self.constants, self.width])
                .with_odd(self.odd.clone())
                .init(device),
            blocks: (0..self.blocks).map(block).collect(),
            head: conv([self.width, outputs]).init(device),
            scale: channel_scale(outputs, 0.1, device),
            history: self.history,
            variables: self.variables,
            recompute: self.recompute,
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the channels between the two
    /// convolutions of every block.
    ///
    /// # Example
    /// ```
    /// use halocline_models::SurrogateCnnConfig;
    ///
    /// let plan = SurrogateCnnConfig::new(3).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 2);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        Plan::default()
            .with_layer("blocks.*.first.conv", Style::colwise(axis))
            .with_layer("blocks.*.second.conv", Style::rowwise(axis))
    }
}

impl<X: Field<4>> Layer<X> for Block {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let y = x.clone().apply(&self.first).gelu().apply(&self.second);
        x.addcmul(y, &self.scale)
    }
}

impl SurrogateCnn {
    /// Applies the model to a field with cells that do not count, such as land in the ocean, by
    /// [masked](halocline_ops::masked) convolutions. Cells that do not count reach no other cell,
    /// and keep their state. All activations are kept, whatever
    /// [`recompute`](SurrogateCnnConfig::recompute) says.
    ///
    /// # Shapes
    /// `mask` is `[batch or 1, 1, lat, lon]`: one in the cells that count, else zero.
    ///
    /// # Panics
    /// Panics where [`masked_conv`](halocline_ops::masked::masked_conv) returns an error, such as
    /// for a mask in other shards than `x`.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::SurrogateCnnConfig;
    /// use halocline_ops::masked::present;
    ///
    /// let device = Device::default();
    /// let model = SurrogateCnnConfig::new(1).with_width(4).with_blocks(1).init(&device);
    /// let x = Tensor::<4>::from_data([[[[1.0, f32::NAN, 2.0, 3.0]]]], &device);
    /// let y = model.forward_masked(x.clone(), present(&x)?);
    /// let missing = y.is_nan().into_data().iter::<bool>().collect::<Vec<_>>();
    /// assert_eq!(missing, [false, true, false, false]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn forward_masked<X: Field<4>>(&self, x: X, mask: X) -> X {
        let oldest = (self.history - 1) * self.variables;
        let state = x.clone().narrow(1, oldest, self.variables);
        let x = computed(x, &self.scale);
        let y = self.stem.forward_masked(vec![x], &mask).gelu();
        let y = self.blocks.iter().fold(y, |x, block| {
            let y = block.first.forward_masked(vec![x.clone()], &mask).gelu();
            let y = block.second.forward_masked(vec![y], &mask);
            x.addcmul(y, &block.scale)
        });
        let increment = self.head.forward_masked(vec![y.gelu()], &mask);
        let increment = apply_mask(increment, mask).or_raise();
        stepped(state, increment, &self.scale)
    }
}

impl<X: Field<4>> Layer<X> for SurrogateCnn {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let oldest = (self.history - 1) * self.variables;
        let state = x.clone().narrow(1, oldest, self.variables); // [batch, variables, lat, lon]
        let x = computed(x, &self.scale);
        let y = x.apply(&self.stem).gelu(); // [batch, width, lat, lon]
        let y = self.blocks.iter().fold(y, |y, block| {
            apply_block(self.recompute, y, block, |block: &Block, y| y.apply(block))
        });
        let increment = y.gelu().apply(&self.head);
        stepped(state, increment, &self.scale)
    }
}
