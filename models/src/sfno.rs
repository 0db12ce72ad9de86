use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::{Device, Tensor};
use halocline_ops::prelude::*;
use halocline_ops::with_layer_placements;

use crate::parallel::{Plan, Style};

/// Configuration of [`SpectralConvS2`], which has an example.
#[derive(Config, Debug)]
pub struct SpectralConvS2Config {
    /// Input and output channels.
    pub channels: [usize; 2],
}

/// Convolution on the sphere by spherical harmonics: each degree has one complex channel matrix,
/// shared by all of its orders, so that the convolution is equivariant under rotations. Follows
/// torch-harmonics' `SpectralConvS2`.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`, on the grid of the
/// transform. Shards may have any extents; the result has the placements of the input.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::SpectralConvS2Config;
/// use halocline_ops::{Apply, Sht, SphereGrid};
///
/// let (device, sht) = (Device::default(), Sht::new([6, 12], SphereGrid::LegendreGauss)?);
/// let conv = SpectralConvS2Config::new([3, 8]).init(&sht, &device);
/// let y = Tensor::<4>::ones([1, 3, 6, 12], &device).apply(&conv);
/// assert_eq!(y.dims(), [1, 8, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct SpectralConvS2 {
    /// `[channels_in, channels_out, degrees, 1, 2]`, with real and imaginary parts last.
    pub weight: Param<Tensor<5>>,
    #[module(skip)]
    sht: Sht,
}

impl SpectralConvS2Config {
    /// Initializes the layer; weights are normal, with a variance of `1/channels_in` for both parts
    /// together.
    pub fn init(&self, sht: &Sht, device: &Device) -> SpectralConvS2 {
        let [channels_in, channels_out] = self.channels;
        let std = (0.5 / channels_in.max(1) as f64).sqrt();
        let shape = [channels_in, channels_out, sht.degrees(), 1, 2];
        SpectralConvS2 {
            weight: Initializer::Normal { mean: 0.0, std }.init(shape, device),
            sht: sht.clone(),
        }
    }
}

impl<X: Field<4>> Layer<X> for SpectralConvS2 {
    type Output = X;

    fn forward(&self, x: X) -> X {
        with_layer_placements(&self.weight, x, |x| x.sphere_conv(&self.weight, &self.sht))
    }
}

/// Configuration of [`Sfno`], which has an example.
#[derive(Config, Debug)]
pub struct SfnoConfig {
    /// Input channels.
    pub channels_in: usize,
    /// Output channels.
    pub channels_out: usize,
    /// Channels of the hidden fields.
    #[config(default = "32")]
    pub width: usize,
    /// Number of blocks.
    #[config(default = "4")]
    pub blocks: usize,
}

/// Spherical Fourier neural operator (Bonev et al. 2023). A block adds a spherical convolution and
/// a pointwise linear layer, followed by an MLP of twice the width, with a residual connection.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`, on the grid of the
/// transform. Shards may have any extents.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::SfnoConfig;
/// use halocline_ops::{Apply, Sht, SphereGrid};
///
/// let (device, sht) = (Device::default(), Sht::new([13, 24], SphereGrid::Lobatto)?);
/// let model = SfnoConfig::new(3, 2).with_width(8).init(&sht, &device);
/// let y = Tensor::<4>::ones([1, 3, 13, 24], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 2, 13, 24]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Sfno {
    lifting: Conv2d,
    blocks: Vec<Block>,
    head: Conv2d,
}

#[derive(Module, Debug)]
struct Block {
    spectral: SpectralConvS2,
    linear: Conv2d,
    inner: Conv2d,
    outer: Conv2d,
}

impl SfnoConfig {
    /// Initializes the model for fields on the grid of the transform.
    pub fn init(&self, sht: &Sht, device: &Device) -> Sfno {
        let linear = |channels| Conv2dConfig::new(channels, [1, 1]).init(device);
        let width = self.width;
        let block = |_| Block {
            spectral: SpectralConvS2Config::new([width; 2]).init(sht, device),
            linear: linear([width; 2]),
            inner: linear([width, 2 * width]),
            outer: linear([2 * width, width]),
        };
        Sfno {
            lifting: linear([self.channels_in, width]),
            blocks: (0..self.blocks).map(block).collect(),
            head: linear([width, self.channels_out]),
        }
    }
}

impl SfnoConfig {
    /// Returns a tensor-parallel plan over a mesh axis. It shards the channels after the spherical
    /// convolution, which the next layer sums over.
    ///
    /// # Example
    /// ```
    /// use halocline_models::SfnoConfig;
    ///
    /// let plan = SfnoConfig::new(3, 2).tensor_parallel("tensor");
    /// assert_eq!(plan.layer.len(), 3);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        Plan::default()
            .with_layer("blocks.*.spectral", Style::colwise(axis))
            .with_layer("blocks.*.linear", Style::colwise(axis))
            .with_layer("blocks.*.inner", Style::rowwise(axis))
    }
}

fn pointwise<X: Field<4>>(x: X, conv: &Conv2d) -> X {
    x.apply_conv::<2>(&conv.weight, &conv.bias, &ConvOptions::default())
}

impl<X: Field<4>> Layer<X> for Block {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let filtered = self.spectral.forward(x.clone()) + pointwise(x.clone(), &self.linear);
        let y = pointwise(filtered.gelu(), &self.inner).gelu(); // [batch, 2 · width, lat, lon]
        x + pointwise(y, &self.outer)
    }
}

impl<X: Field<4>> Layer<X> for Sfno {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let lifted = pointwise(x, &self.lifting);
        let y = self.blocks.iter().fold(lifted, |y, block| block.forward(y));
        pointwise(y, &self.head)
    }
}
