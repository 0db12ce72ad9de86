use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::{Device, Tensor};
use halocline_ops::prelude::*;
use halocline_ops::with_layer_placements;

use crate::parallel::{Plan, Style};
use crate::recompute::apply_block;

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
/// transform, or from the grid of one transform to that of another. Shards may have any extents; the
/// result has the placements of the input.
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
    #[module(skip)]
    inverse: Sht,
}

impl SpectralConvS2Config {
    /// Initializes the layer; weights are normal, with a variance of `1/channels_in` for both parts
    /// together.
    pub fn init(&self, sht: &Sht, device: &Device) -> SpectralConvS2 {
        self.init_between([sht; 2], device)
    }

    /// Initializes the layer from the grid of the first transform to that of the second, which has
    /// the same degrees.
    ///
    /// # Panics
    /// Panics if the transforms differ in degrees or orders.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::SpectralConvS2Config;
    /// use halocline_ops::{Apply, Sht, SphereGrid};
    ///
    /// let coarse = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
    /// let fine = Sht::new([12, 24], SphereGrid::LegendreGauss)?.with_degrees(coarse.degrees())?;
    /// let device = Device::default();
    /// let conv = SpectralConvS2Config::new([3, 8]).init_between([&fine, &coarse], &device);
    /// let y = Tensor::<4>::ones([1, 3, 12, 24], &device).apply(&conv);
    /// assert_eq!(y.dims(), [1, 8, 6, 12]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn init_between(&self, [sht, inverse]: [&Sht; 2], device: &Device) -> SpectralConvS2 {
        let modes = [sht, inverse].map(|sht| [sht.degrees(), sht.orders()]);
        assert_eq!(
            modes[0], modes[1],
            "SpectralConvS2: degrees and orders of the transforms"
        );
        let [channels_in, channels_out] = self.channels;
        let std = (0.5 / channels_in.max(1) as f64).sqrt();
        let shape = [channels_in, channels_out, sht.degrees(), 1, 2];
        SpectralConvS2 {
            weight: Initializer::Normal { mean: 0.0, std }.init(shape, device),
            sht: sht.clone(),
            inverse: inverse.clone(),
        }
    }
}

impl SpectralConvS2 {
    fn keeps_grid(&self) -> bool {
        let (from, to) = (&self.sht, &self.inverse);
        from.size() == to.size() && from.cosines() == to.cosines()
    }

    /// Interpolates the input to the grid of the result.
    fn resampled<X: Field<4>>(&self, x: X) -> X {
        if self.keeps_grid() {
            x
        } else {
            x.sphere_resample::<5>([&self.sht, &self.inverse])
        }
    }
}

impl<X: Field<4>> Layer<X> for SpectralConvS2 {
    type Output = X;

    fn forward(&self, x: X) -> X {
        with_layer_placements(&self.weight, x, |x| {
            x.sphere_conv_between(&self.weight, [&self.sht, &self.inverse])
        })
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
    /// Whether to add the input to the result, through a linear layer if their channels differ.
    #[config(default = "false")]
    pub residual: bool,
    /// Whether the backward pass recomputes blocks instead of storing their activations: less
    /// memory, more time, the same gradients. Data received from other ranks is kept.
    #[config(default = "false")]
    pub recompute: bool,
}

/// Spherical Fourier neural operator (Bonev et al. 2023). A block adds a spherical convolution and
/// a pointwise linear layer, followed by an MLP of twice the width, with a residual connection.
/// Blocks may compute on a coarser grid than that of the fields.
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
    is_residual: bool,
    /// Layer from the input to the result, if their channels differ.
    skip: Option<Conv2d>,
    recompute: bool,
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
        self.init_within([sht; 2], device)
    }

    /// Initializes the model for fields on the grid of the first transform, with hidden fields on
    /// that of the second, which has the same degrees. The convolution of the first block leads to
    /// that grid, the one of the last block back.
    ///
    /// # Panics
    /// Panics if the transforms differ in degrees or orders.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::SfnoConfig;
    /// use halocline_ops::{Apply, Sht, SphereGrid};
    ///
    /// let inner = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
    /// let outer = Sht::new([13, 24], SphereGrid::Equiangular)?.with_degrees(inner.degrees())?;
    /// let device = Device::default();
    /// let model = SfnoConfig::new(3, 2).with_width(8).init_within([&outer, &inner], &device);
    /// let y = Tensor::<4>::ones([1, 3, 13, 24], &device).apply(&model);
    /// assert_eq!(y.dims(), [1, 2, 13, 24]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn init_within(&self, [outer, inner]: [&Sht; 2], device: &Device) -> Sfno {
        let linear = |channels| Conv2dConfig::new(channels, [1, 1]).init(device);
        let width = self.width;
        let block = |number: usize| {
            let from = if number == 0 { outer } else { inner };
            let to = if number + 1 == self.blocks {
                outer
            } else {
                inner
            };
            Block {
                spectral: SpectralConvS2Config::new([width; 2]).init_between([from, to], device),
                linear: linear([width; 2]),
                inner: linear([width, 2 * width]),
                outer: linear([2 * width, width]),
            }
        };
        let ends = [self.channels_in, self.channels_out];
        Sfno {
            lifting: linear([self.channels_in, width]),
            blocks: (0..self.blocks).map(block).collect(),
            head: linear([width, self.channels_out]),
            is_residual: self.residual,
            skip: (self.residual && ends[0] != ends[1]).then(|| {
                let config = Conv2dConfig::new(ends, [1, 1]).with_bias(false);
                config.init(device)
            }),
            recompute: self.recompute,
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the channels after the spherical
    /// convolution, which the next layer sums over.
    ///
    /// # Example
    /// ```
    /// use halocline_models::SfnoConfig;
    ///
    /// let plan = SfnoConfig::new(3, 2).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 3);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        Plan::default()
            .with_layer("blocks.*.spectral", Style::colwise(axis))
            .with_layer("blocks.*.linear", Style::colwise(axis))
            .with_layer("blocks.*.inner", Style::rowwise(axis))
    }
}

impl<X: Field<4>> Layer<X> for Block {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let convolved = x.clone().apply(&self.spectral);
        let x = self.spectral.resampled(x);
        let filtered = convolved + x.clone().apply(&self.linear);
        let y = filtered.gelu().apply(&self.inner).gelu(); // [batch, 2 · width, lat, lon]
        x + y.apply(&self.outer)
    }
}

impl<X: Field<4>> Layer<X> for Sfno {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let lifted = x.clone().apply(&self.lifting);
        let mut grids = self.blocks.iter().map(|block| &block.spectral);
        let before = grids.any(|conv| !conv.keeps_grid()).then(|| lifted.clone());
        let y = self.blocks.iter().fold(lifted, |y, block| {
            apply_block(self.recompute, y, block, |block: &Block, y| y.apply(block))
        });
        // Another grid has other extents, from which the last block leads to even ones.
        let y = match &before {
            Some(before) => y.align_to(before),
            None => y,
        };
        let y = y.apply(&self.head);
        match &self.skip {
            _ if !self.is_residual => y,
            Some(skip) => y + x.apply(skip),
            None => y + x,
        }
    }
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Layout, Shard, ShardTensor};
    use halocline_ops::testing::{compare, random};

    use super::*;

    #[test]
    fn a_coarser_grid_inside_keeps_the_shards() {
        let run = |extents: &[usize]| {
            let found = Launcher::local(extents.len()).collect(|world| {
                let mesh = world.mesh([("lat", extents.len())])?;
                let inner = Sht::new([4, 8], SphereGrid::LegendreGauss)?;
                let outer = Sht::new([9, 10], SphereGrid::Lobatto)?.with_degrees(4)?;
                let config = SfnoConfig::new(3, 2).with_width(4).with_residual(true);
                let model = world.init(|device| config.init_within([&outer, &inner], device))?;
                let x = random::<4>([1, 3, 9, 10], "x", 0).inner();
                let layout = Layout::new(mesh.shape(), &x.dims(), &[Shard(2)])?;
                let layout = layout.with_extents(2, extents)?;
                let x = ShardTensor::distribute(x, &mesh, &layout)?;
                let y = x.apply(&model);
                assert_eq!(y.layout().extents(2), extents);
                Ok(vec![y.full_tensor().into_data()])
            });
            found.unwrap()
        };
        let expected = run(&[9]).remove(0);
        for found in run(&[6, 3]) {
            compare(&found, &expected, 1e-5, "two ranks");
        }
    }
}
