use burn::config::Config;
use burn::module::Module;
use burn::nn::PaddingConfig3d;
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::tensor::Device;
use halocline_core::OrRaise;
use halocline_ops::graph::pad_healpix;
use halocline_ops::prelude::*;

/// Configuration of [`HealpixConv`], which has an example.
#[derive(Config, Debug)]
pub struct HealpixConvConfig {
    /// Input and output channels.
    pub channels: [usize; 2],
    /// Rows and columns of the kernel. Must be odd, so that faces keep their size.
    pub kernel: usize,
}

/// Convolution of the faces of a HEALPix grid, padded with cells of neighbouring faces. All faces
/// share one kernel, oriented along the rows and columns of each face.
///
/// # Shapes
/// `[batch, channels_in, 12, n, n]` → `[batch, channels_out, 12, n, n]`.
///
/// # Communication
/// Same as [`pad_healpix`], and halos where rows or columns are sharded.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::HealpixConvConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let conv = HealpixConvConfig::new([3, 8], 3).init(&device);
/// let y = Tensor::<5>::ones([1, 3, 12, 4, 4], &device).apply(&conv);
/// assert_eq!(y.dims(), [1, 8, 12, 4, 4]);
/// ```
#[derive(Module, Debug)]
pub struct HealpixConv {
    conv: Conv3d,
}

impl HealpixConvConfig {
    /// Initializes the layer.
    ///
    /// # Panics
    /// Panics if `kernel` is even.
    pub fn init(&self, device: &Device) -> HealpixConv {
        assert!(
            self.kernel % 2 == 1,
            "HealpixConv: kernel {} must be odd",
            self.kernel
        );
        HealpixConv {
            conv: Conv3dConfig::new(self.channels, [1, self.kernel, self.kernel])
                .with_padding(PaddingConfig3d::Valid)
                .init(device),
        }
    }
}

impl<X: Field<5>> Layer<X> for HealpixConv {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let width = self.conv.kernel_size[1] / 2;
        let padded = x.try_op(|x| pad_healpix(x, width)).or_raise();
        let options = ConvOptions::<3>::default();
        padded.apply_conv(&self.conv.weight, &self.conv.bias, &options)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard, ShardTensor};
    use halocline_ops::testing::{compare, random};

    use super::*;

    #[test]
    fn faces_and_rows_on_ranks_give_what_one_device_gives() {
        let run = |axes: [usize; 2]| {
            let found = Launcher::local(axes[0] * axes[1]).collect(|world| {
                let mesh = world.mesh([("faces", axes[0]), ("rows", axes[1])])?;
                let conv = world.init(|device| HealpixConvConfig::new([2, 3], 3).init(device))?;
                let x = random::<5>([1, 2, 12, 4, 4], "x", 0).inner();
                let placements = [Shard(2), Shard(3)];
                let x = ShardTensor::distribute(x, &mesh, &placements)?.require_grad();
                let y = x.clone().apply(&conv);
                assert_eq!(y.layout().all_extents()[2..], x.layout().all_extents()[2..]);
                let gradients = ReduceField::sum(y.clone().square()).backward();
                let gradient = x.grad(&gradients).expect("a gradient");
                let weight = conv.conv.weight.val().grad(&gradients).expect("a gradient");
                Ok(vec![
                    y.full_tensor().into_data(),
                    gradient.full_tensor().into_data(),
                    Tensor::into_data(weight),
                ])
            });
            found.unwrap()
        };
        let expected = run([1, 1]).remove(0);
        for axes in [[2, 2], [5, 1]] {
            for found in run(axes) {
                compare(&found, &expected, 1e-5, &format!("{axes:?}"));
            }
        }
    }
}
