//! burn's modules of transposed convolution.

use burn::nn::conv::{ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};

use super::{ConvTransposeField, ConvTransposeOptions};
use crate::field::Field;
use crate::layer::Layer;
use crate::operand::Operand;

macro_rules! layer {
    ($module:ident, $d:literal, $array:expr) => {
        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            #[track_caller]
            fn forward(&self, x: X) -> X {
                let options = ConvTransposeOptions::default()
                    .with_stride($array(self.stride))
                    .with_dilation($array(self.dilation))
                    .with_padding($array(self.padding))
                    .with_output_padding($array(self.padding_out))
                    .with_groups(self.groups);
                let bias = Operand::of_optional(&self.bias);
                x.conv_transpose(&self.weight, bias, &options)
            }
        }
    };
}

layer!(ConvTranspose1d, 3, |x| [x]);
layer!(ConvTranspose2d, 4, |x| x);
layer!(ConvTranspose3d, 5, |x| x);
