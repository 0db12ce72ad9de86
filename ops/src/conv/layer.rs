//! burn's convolution modules.

use burn::nn::conv::{Conv1d, Conv2d, Conv3d};

use super::{ConvField, ConvOptions};
use crate::field::Field;
use crate::layer::{Layer, PaddingOf};

macro_rules! conv_layer {
    ($module:ident, $d:literal, $array:expr) => {
        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            #[track_caller]
            fn forward(&self, x: X) -> X {
                let (kernel, stride) = ($array(self.kernel_size), $array(self.stride));
                let padding = self.padding.padding(&x.dims()[2..], kernel, stride);
                let options = ConvOptions::default()
                    .with_stride(stride)
                    .with_dilation($array(self.dilation))
                    .with_padding(padding)
                    .with_groups(self.groups);
                x.apply_conv(&self.weight, &self.bias, &options)
            }
        }
    };
}

conv_layer!(Conv1d, 3, |x| [x]);
conv_layer!(Conv2d, 4, |x| x);
conv_layer!(Conv3d, 5, |x| x);
