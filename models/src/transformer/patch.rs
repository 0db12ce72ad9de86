//! Patch embedding of fields, and its inverse.

use burn::config::Config;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use halocline_core::Boundary;
use halocline_ops::prelude::*;

/// Configuration of [`PatchEmbedding2d`], which has an example.
#[derive(Config, Debug)]
pub struct PatchEmbedding2dConfig {
    /// Channels of the field.
    pub channels: usize,
    /// Channels of a patch.
    pub d_model: usize,
    /// Cells per patch, in both dims.
    pub patch: [usize; 2],
    /// Boundary conditions at the upper ends, for sizes that are not multiples of the patch.
    #[config(default = "[Boundary::Replicate, Boundary::Periodic]")]
    pub boundary: [Boundary; 2],
}

/// Embedding of the patches of a field of any size, each projected to a vector.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → `[batch, ⌈lat / patch⌉, ⌈lon / patch⌉, d_model]`.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::PatchEmbedding2dConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let patches = PatchEmbedding2dConfig::new(3, 16, [2, 4]).init(&device);
/// let y = Tensor::<4>::ones([1, 3, 7, 12], &device).apply(&patches);
/// assert_eq!(y.dims(), [1, 4, 3, 16]);
/// ```
#[derive(Module, Debug)]
pub struct PatchEmbedding2d {
    conv: Conv2d,
    #[module(skip)]
    boundary: [Boundary; 2],
}

impl PatchEmbedding2dConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> PatchEmbedding2d {
        PatchEmbedding2d {
            conv: Conv2dConfig::new([self.channels, self.d_model], self.patch)
                .with_stride(self.patch)
                .init(device),
            boundary: self.boundary,
        }
    }
}

impl<X: Field<4>> Layer<X> for PatchEmbedding2d {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let shape = x.dims();
        let padding = |dim: usize| {
            let (size, patch) = (shape[dim + 2], self.conv.kernel_size[dim]);
            Padding::zeros(0, size.div_ceil(patch) * patch - size).with_boundary(self.boundary[dim])
        };
        let options = ConvOptions::default()
            .with_stride(self.conv.kernel_size)
            .with_padding([padding(0), padding(1)]);
        x.apply_conv(&self.conv.weight, &self.conv.bias, &options)
            .permute([0, 2, 3, 1])
    }
}

/// Configuration of [`PatchRecovery2d`], which has an example.
#[derive(Config, Debug)]
pub struct PatchRecovery2dConfig {
    /// Channels of a patch.
    pub d_model: usize,
    /// Channels of the field.
    pub channels: usize,
    /// Cells per patch, in both dims.
    pub patch: [usize; 2],
}

/// Reconstruction of a field from its patches: the reverse of [`PatchEmbedding2d`], with weights of
/// its own.
///
/// # Shapes
/// `[batch, ⌈lat / patch⌉, ⌈lon / patch⌉, d_model]` → `[batch, channels, lat, lon]`; cells beyond
/// the field are cropped.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::PatchRecovery2dConfig;
///
/// let device = Device::default();
/// let recovery = PatchRecovery2dConfig::new(16, 3, [2, 4]).init(&device);
/// let field = Tensor::<4>::ones([1, 3, 7, 12], &device);
/// let y = recovery.recover(Tensor::ones([1, 4, 3, 16], &device), &field);
/// assert_eq!(y.dims(), [1, 3, 7, 12]);
/// ```
#[derive(Module, Debug)]
pub struct PatchRecovery2d {
    linear: Linear,
    patch: [usize; 2],
}

impl PatchRecovery2dConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> PatchRecovery2d {
        let cells = self.patch[0] * self.patch[1];
        PatchRecovery2d {
            linear: LinearConfig::new(self.d_model, self.channels * cells).init(device),
            patch: self.patch,
        }
    }
}

impl PatchRecovery2d {
    /// Reconstructs a field from patches, with the size and the shards of `field`.
    pub fn recover<X: Field<4>>(&self, patches: X, field: &X) -> X {
        let [_, _, lat, lon] = field.dims();
        let y = patches.apply(&self.linear);
        let [rows, columns] = self.patch;
        let channels = y.dims()[3] / (rows * columns);
        // [batch, lat, lon, channels, rows, columns] → [batch, channels, lat, rows, lon, columns]
        let y = y.unflatten::<6>(3, &[channels, rows, columns]);
        let y = y
            .permute([0, 3, 1, 4, 2, 5])
            .flatten::<5>(4, 5)
            .flatten::<4>(2, 3);
        y.narrow(2, 0, lat).narrow(3, 0, lon).align_to(field)
    }
}
