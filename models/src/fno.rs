use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::{Device, Tensor};
use halocline_ops::prelude::*;
use halocline_ops::with_layer_placements;

use crate::parallel::{Plan, Style};
use crate::recompute::apply_block;

/// Declares the spectral convolution for a number of spatial dims.
macro_rules! spectral_conv {
    ($config:ident, $layer:ident, $n:literal, $fields:literal, $weight:literal, $example:literal) => {
        #[doc = concat!("Configuration of [`", stringify!($layer), "`], which has an example.")]
        #[derive(Config, Debug)]
        pub struct $config {
            /// Input and output channels.
            pub channels: [usize; 2],
            /// Modes kept in each spatial dim: the lowest of the last dim, and the lowest of both
            /// signs together in the others.
            pub modes: [usize; $n],
        }

        #[doc = concat!("Convolution by the lowest Fourier modes of ", $n, " spatial dims, of any size (Li et al. 2021). See")]
        /// [`halocline_ops::spectral::conv`].
        ///
        /// # Example
        /// ```
        #[doc = $example]
        /// ```
        #[derive(Module, Debug)]
        pub struct $layer {
            /// `[channels_in, channels_out, *modes, 2]`, with real and imaginary parts last.
            pub weight: Param<Tensor<$weight>>,
        }

        impl $config {
            /// Initializes the layer; real and imaginary parts are uniform in
            /// `[0, 1/(channels_in · channels_out)]`.
            pub fn init(&self, device: &Device) -> $layer {
                let [channels_in, channels_out] = self.channels;
                let mut shape = [2; $weight];
                shape[..2].copy_from_slice(&self.channels);
                shape[2..$weight - 1].copy_from_slice(&self.modes);
                let max = ((channels_in * channels_out).max(1) as f64).recip();
                $layer {
                    weight: Initializer::Uniform { min: 0.0, max }.init(shape, device),
                }
            }
        }

        impl<X: Field<$fields>> Layer<X> for $layer {
            type Output = X;

            fn forward(&self, x: X) -> X {
                with_layer_placements(&self.weight, x, |x| x.spectral_conv::<$weight>(&self.weight))
            }
        }
    };
}

spectral_conv!(
    SpectralConv1dConfig,
    SpectralConv1d,
    1,
    3,
    4,
    "use burn::tensor::{Device, Tensor};
use halocline_models::SpectralConv1dConfig;
use halocline_ops::Apply;

let device = Device::default();
let conv = SpectralConv1dConfig::new([3, 8], [4]).init(&device);
let y = Tensor::<3>::ones([1, 3, 12], &device).apply(&conv);
assert_eq!(y.dims(), [1, 8, 12]);"
);
spectral_conv!(
    SpectralConv2dConfig,
    SpectralConv2d,
    2,
    4,
    5,
    "use burn::tensor::{Device, Tensor};
use halocline_models::SpectralConv2dConfig;
use halocline_ops::Apply;

let device = Device::default();
let conv = SpectralConv2dConfig::new([3, 8], [4, 3]).init(&device);
let y = Tensor::<4>::ones([1, 3, 6, 12], &device).apply(&conv);
assert_eq!(y.dims(), [1, 8, 6, 12]);"
);
spectral_conv!(
    SpectralConv3dConfig,
    SpectralConv3d,
    3,
    5,
    6,
    "use burn::tensor::{Device, Tensor};
use halocline_models::SpectralConv3dConfig;
use halocline_ops::Apply;

let device = Device::default();
let conv = SpectralConv3dConfig::new([3, 8], [2, 4, 3]).init(&device);
let y = Tensor::<5>::ones([1, 3, 4, 6, 12], &device).apply(&conv);
assert_eq!(y.dims(), [1, 8, 4, 6, 12]);"
);

/// Configuration of [`Fno`], which has an example.
#[derive(Config, Debug)]
pub struct FnoConfig {
    /// Input channels, including coordinates if the model needs them.
    pub channels_in: usize,
    /// Output channels.
    pub channels_out: usize,
    /// Modes kept in latitude and longitude.
    pub modes: [usize; 2],
    /// Channels of the hidden fields.
    #[config(default = "32")]
    pub width: usize,
    /// Number of spectral convolutions.
    #[config(default = "4")]
    pub blocks: usize,
    /// Channels before the last layer.
    #[config(default = "128")]
    pub projection: usize,
    /// Whether the backward pass recomputes blocks instead of storing their activations: less
    /// memory, more time, the same gradients. Modes received from other ranks are kept.
    #[config(default = "false")]
    pub recompute: bool,
}

/// Fourier neural operator (Li et al. 2021): a lifting layer, blocks that add a spectral
/// convolution and a pointwise linear layer, and a two-layer projection. Periodic in both dims.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`, for any size that has the
/// configured modes. Shards may have any extents.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::FnoConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let model = FnoConfig::new(3, 2, [6, 4]).with_width(8).init(&device);
/// let y = Tensor::<4>::ones([1, 3, 13, 24], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 2, 13, 24]);
/// ```
#[derive(Module, Debug)]
pub struct Fno {
    lifting: Conv2d,
    blocks: Vec<Block>,
    projection: Conv2d,
    head: Conv2d,
    recompute: bool,
}

#[derive(Module, Debug)]
struct Block {
    spectral: SpectralConv2d,
    linear: Conv2d,
}

impl FnoConfig {
    /// Initializes the model.
    pub fn init(&self, device: &Device) -> Fno {
        let linear = |channels| Conv2dConfig::new(channels, [1, 1]).init(device);
        let block = |_| Block {
            spectral: SpectralConv2dConfig::new([self.width; 2], self.modes).init(device),
            linear: linear([self.width; 2]),
        };
        Fno {
            lifting: linear([self.channels_in, self.width]),
            blocks: (0..self.blocks).map(block).collect(),
            projection: linear([self.width, self.projection]),
            head: linear([self.projection, self.channels_out]),
            recompute: self.recompute,
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the channels between the two
    /// blocks of each pair, and those of the projection.
    ///
    /// # Example
    /// ```
    /// use halocline_models::FnoConfig;
    ///
    /// let plan = FnoConfig::new(3, 2, [6, 4]).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 4 * 2 + 2);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        // A block that produces sharded channels is followed by one that sums over them.
        let style = |place: usize| match place % 2 {
            0 => Style::colwise(axis),
            _ => Style::rowwise(axis),
        };
        let blocks = (0..self.blocks).fold(Plan::default(), |plan, place| {
            plan.with_layer(&format!("blocks.{place}.spectral"), style(place))
                .with_layer(&format!("blocks.{place}.linear"), style(place))
        });
        match self.blocks % 2 {
            0 => blocks
                .with_layer("projection", Style::colwise(axis))
                .with_layer("head", Style::rowwise(axis)),
            _ => blocks.with_layer("projection", Style::rowwise(axis)),
        }
    }
}

impl<X: Field<4>> Layer<X> for Block {
    type Output = X;

    fn forward(&self, x: X) -> X {
        x.clone().apply(&self.spectral) + x.apply(&self.linear)
    }
}

impl<X: Field<4>> Layer<X> for Fno {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let mut y = x.apply(&self.lifting); // [batch, width, lat, lon]
        for (place, block) in self.blocks.iter().enumerate() {
            let is_last = place + 1 == self.blocks.len();
            y = apply_block(self.recompute, y, block, move |block: &Block, y| {
                let y = y.apply(block);
                if is_last { y } else { y.gelu() }
            });
        }
        y.apply(&self.projection).gelu().apply(&self.head)
    }
}
