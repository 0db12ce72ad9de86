use burn::config::Config;
use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::Device;
use halocline_core::{Boundary, OrRaise};
use halocline_ops::masked::masked_conv;
use halocline_ops::prelude::*;

/// Configuration of [`FieldConv2d`], which has an example.
#[derive(Config, Debug)]
pub struct FieldConv2dConfig {
    /// Input and output channels.
    pub channels: [usize; 2],
    /// Kernel size in cells. Must be odd, so that the field keeps its size.
    pub kernel: [usize; 2],
    /// Boundary conditions in latitude and longitude.
    #[config(default = "[Boundary::Replicate, Boundary::Periodic]")]
    pub boundary: [Boundary; 2],
    /// Input channels that change sign across a [pole](Boundary::PoleRow), such as wind components.
    #[config(default = "Vec::new()")]
    pub odd: Vec<usize>,
}

/// Convolution of a latitude-longitude field that keeps its size. By default the boundary is
/// periodic in longitude and repeats the last row beyond the poles; [`Boundary::PoleRow`] and
/// [`Boundary::PoleEdge`] continue the field across the poles.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::Boundary;
/// use halocline_models::FieldConv2dConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let conv = FieldConv2dConfig::new([3, 8], [3, 3]).init(&device);
/// let y = Tensor::<4>::ones([1, 3, 6, 12], &device).apply(&conv);
/// assert_eq!(y.dims(), [1, 8, 6, 12]);
///
/// // Across the poles, where both wind components change sign.
/// let conv = FieldConv2dConfig::new([3, 8], [3, 3])
///     .with_boundary([Boundary::PoleEdge, Boundary::Periodic])
///     .with_odd(vec![1, 2])
///     .init(&device);
/// let y = Tensor::<4>::ones([1, 3, 6, 12], &device).apply(&conv);
/// assert_eq!(y.dims(), [1, 8, 6, 12]);
/// ```
#[derive(Module, Debug)]
pub struct FieldConv2d {
    conv: Conv2d,
    #[module(skip)]
    boundary: [Boundary; 2],
    #[module(skip)]
    odd: Vec<usize>,
}

impl FieldConv2dConfig {
    /// Initializes the layer.
    ///
    /// # Panics
    /// Panics if a kernel size is even.
    pub fn init(&self, device: &Device) -> FieldConv2d {
        assert!(
            self.kernel.iter().all(|size| size % 2 == 1),
            "FieldConv2d: kernel {:?} must be odd in both dims",
            self.kernel
        );
        FieldConv2d {
            conv: Conv2dConfig::new(self.channels, self.kernel)
                .with_padding(PaddingConfig2d::Valid)
                .init(device),
            boundary: self.boundary,
            odd: self.odd.clone(),
        }
    }
}

impl FieldConv2d {
    /// Convolves the concatenation of `fields` along channels, without materializing it where
    /// possible. See [`conv_cat`](halocline_ops::conv::conv_cat).
    ///
    /// # Panics
    /// Panics where `conv_cat` would return an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::FieldConv2dConfig;
    ///
    /// let device = Device::default();
    /// let conv = FieldConv2dConfig::new([3, 8], [3, 3]).init(&device);
    /// let [skip, x] = [1, 2].map(|channels| Tensor::<4>::ones([1, channels, 6, 12], &device));
    /// assert_eq!(conv.forward_cat(vec![skip, x]).dims(), [1, 8, 6, 12]);
    /// ```
    pub fn forward_cat<X: Field<4>>(&self, mut fields: Vec<X>) -> X {
        let widths = self.conv.kernel_size.map(|size| size / 2);
        let [mut lat, lon] = [0, 1].map(|dim| Padding::new(widths[dim], self.boundary[dim]));
        if !self.odd.is_empty() && self.boundary[0].is_pole() {
            let x = X::cat(fields, 1);
            fields = vec![x.pad_poles([widths[0]; 2], self.boundary[0], &self.odd)];
            lat = Padding::zeros(0, 0);
        }
        let options = ConvOptions::default().with_padding([lat, lon]);
        X::apply_conv_cat(fields, &self.conv.weight, &self.conv.bias, &options)
    }

    /// Convolves the concatenation of `fields` along channels over the cells that count, those of
    /// the halo among them. See [`masked_conv`](halocline_ops::masked::masked_conv).
    ///
    /// # Shapes
    /// `mask` is `[batch or 1, 1, lat, lon]`: one in the cells that count, else zero.
    ///
    /// # Panics
    /// Panics where `masked_conv` would return an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::FieldConv2dConfig;
    ///
    /// let device = Device::default();
    /// let conv = FieldConv2dConfig::new([3, 8], [3, 3]).init(&device);
    /// let land = Tensor::<4>::full([1, 3, 6, 12], f32::NAN, &device);
    /// let y = conv.forward_masked(vec![land], &Tensor::zeros([1, 1, 6, 12], &device));
    /// assert_eq!(y.abs().sum().into_scalar::<f32>(), 0.0);
    /// ```
    pub fn forward_masked<X: Field<4>>(&self, fields: Vec<X>, mask: &X) -> X {
        let widths = self.conv.kernel_size.map(|size| size / 2);
        let [mut lat, lon] = [0, 1].map(|dim| Padding::new(widths[dim], self.boundary[dim]));
        let (mut x, mut mask) = (X::cat(fields, 1), mask.clone());
        if !self.odd.is_empty() && self.boundary[0].is_pole() {
            x = x.pad_poles([widths[0]; 2], self.boundary[0], &self.odd);
            mask = mask.pad_poles([widths[0]; 2], self.boundary[0], &[]);
            lat = Padding::zeros(0, 0);
        }
        let options = ConvOptions::default().with_padding([lat, lon]);
        let bias = self.conv.bias.as_ref().map(Operand::from);
        masked_conv(x, mask, &self.conv.weight, bias, &options).or_raise()
    }
}

impl<X: Field<4>> Layer<X> for FieldConv2d {
    type Output = X;

    fn forward(&self, x: X) -> X {
        self.forward_cat(vec![x])
    }
}
