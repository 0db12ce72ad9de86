use burn::config::Config;
use burn::module::Module;
use burn::tensor::Device;
use halocline_core::{Boundary, module_scope};
use halocline_ops::Rounding;
use halocline_ops::prelude::*;

use crate::conv::{FieldConv2d, FieldConv2dConfig};
use crate::parallel::{Plan, Style};
use crate::recompute::{apply_block, apply_block_with};

/// Configuration of [`UNet`], which has an example.
#[derive(Config, Debug)]
pub struct UNetConfig {
    /// Input channels.
    pub channels_in: usize,
    /// Output channels.
    pub channels_out: usize,
    /// Channels of the finest hidden fields; they double with every level.
    #[config(default = "16")]
    pub width: usize,
    /// Number of times the field is halved.
    #[config(default = "2")]
    pub levels: usize,
    /// Boundary conditions in latitude and longitude.
    #[config(default = "[Boundary::Replicate, Boundary::Periodic]")]
    pub boundary: [Boundary; 2],
    /// Boundary conditions of the halved fields. Default [`boundary`](Self::boundary).
    pub boundary_halved: Option<[Boundary; 2]>,
    /// Input channels that change sign across a [pole](Boundary::PoleRow), such as wind components.
    /// Hidden fields do not change sign.
    #[config(default = "Vec::new()")]
    pub odd: Vec<usize>,
    /// Whether the backward pass recomputes the convolutions of each level instead of storing their
    /// activations: less memory, more time, the same gradients. Halos are kept.
    #[config(default = "false")]
    pub recompute: bool,
}

/// U-Net (Ronneberger et al. 2015): an encoder and decoder with skip connections, average pooling
/// down, nearest-neighbour interpolation up, and two convolutions at every level.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`, of any size: where the
/// number of cells is odd, the last cell is pooled alone, and the second of the two cells
/// interpolated from it is cropped. Shards may have any extents.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::UNetConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let model = UNetConfig::new(3, 2).with_width(4).init(&device);
/// let y = Tensor::<4>::ones([1, 3, 13, 24], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 2, 13, 24]);
/// ```
#[derive(Module, Debug)]
pub struct UNet {
    down: Vec<DoubleConv>,
    bottom: DoubleConv,
    up: Vec<DoubleConv>,
    head: FieldConv2d,
    recompute: bool,
}

#[derive(Module, Debug)]
struct DoubleConv {
    first: FieldConv2d,
    second: FieldConv2d,
}

impl UNetConfig {
    /// Initializes the model.
    pub fn init(&self, device: &Device) -> UNet {
        let conv = |channels, kernel, level| {
            let boundary = match level {
                0 => self.boundary,
                _ => self.boundary_halved.unwrap_or(self.boundary),
            };
            FieldConv2dConfig::new(channels, [kernel; 2]).with_boundary(boundary)
        };
        let double = |channels_in, channels_out, level, odd: &[usize]| DoubleConv {
            first: conv([channels_in, channels_out], 3, level)
                .with_odd(odd.to_vec())
                .init(device),
            second: conv([channels_out, channels_out], 3, level).init(device),
        };
        let width = |level: usize| self.width << level;
        let below = |level: usize| {
            if level == 0 {
                self.channels_in
            } else {
                width(level - 1)
            }
        };
        // Only the first layer sees the input channels.
        let down = |level: usize| {
            let odd = if level == 0 { &self.odd[..] } else { &[] };
            double(below(level), width(level), level, odd)
        };
        UNet {
            down: (0..self.levels).map(down).collect(),
            bottom: down(self.levels),
            up: (0..self.levels)
                .map(|level| double(width(level + 1) + width(level), width(level), level, &[]))
                .collect(),
            head: conv([self.width, self.channels_out], 1, 0).init(device),
            recompute: self.recompute,
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the channels between the two
    /// convolutions of every level.
    ///
    /// # Example
    /// ```
    /// use halocline_models::UNetConfig;
    ///
    /// let plan = UNetConfig::new(3, 2).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 2);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        Plan::default()
            .with_layer("**.first.conv", Style::colwise(axis))
            .with_layer("**.second.conv", Style::rowwise(axis))
    }
}

impl DoubleConv {
    /// Applies both convolutions to a coarser field, interpolated to twice the size, and the skip
    /// connection.
    fn upward<X: Field<4>>(&self, coarse: X, skip: X) -> X {
        let [_, _, lat, lon] = skip.dims();
        let upsampled = coarse.upsample_nearest(2);
        let upsampled = upsampled.narrow(2, 0, lat).narrow(3, 0, lon);
        // Odd extents change when halved and doubled, so use those of the skip connection.
        let upsampled = upsampled.align_to(&skip);
        self.forward(vec![upsampled, skip])
    }

    /// Applies both convolutions to the concatenation of `fields` along channels.
    fn forward<X: Field<4>>(&self, fields: Vec<X>) -> X {
        let _module = module_scope("DoubleConv");
        let y = {
            let _module = module_scope("FieldConv2d");
            self.first.forward_cat(fields)
        };
        y.gelu().apply(&self.second).gelu()
    }
}

impl<X: Field<4>> Layer<X> for UNet {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let halved = PoolOptions::new([2, 2]).with_rounding(Rounding::Ceil);
        let forward = |level: &DoubleConv, y: X| level.forward(vec![y]);
        let mut y = x;
        let mut skips = Vec::new();
        for level in &self.down {
            let skip = apply_block(self.recompute, y, level, forward);
            y = skip.clone().avg_pool(&halved);
            skips.push(skip);
        }
        y = apply_block(self.recompute, y, &self.bottom, forward);
        for (level, skip) in self.up.iter().zip(skips).rev() {
            let upward = |level: &DoubleConv, coarse: X, skip: X| level.upward(coarse, skip);
            y = apply_block_with(self.recompute, [y, skip], level, upward);
        }
        y.apply(&self.head)
    }
}
