//! burn's convolution modules.

use burn::nn::conv::{Conv1d, Conv2d, Conv3d};

use super::{ConvOptions, conv};
use crate::crossing::{enter, leave, leave_with_bias};
use crate::field::{Field, run};
use crate::layer::{Layer, PaddingOf};
use crate::operand::Operand;

macro_rules! conv_layer {
    ($module:ident, $d:literal, $n:literal, $array:expr) => {
        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            fn forward(&self, x: X) -> X {
                let (kernel, stride) = ($array(self.kernel_size), $array(self.stride));
                let padding = self.padding.padding(&x.global_dims()[2..], kernel, stride);
                let options = ConvOptions::default()
                    .with_stride(stride)
                    .with_dilation($array(self.dilation))
                    .with_padding(padding)
                    .with_groups(self.groups);
                run(x, |x| {
                    let x = enter(&self.weight, x)?;
                    let bias = Operand::of_optional(&self.bias);
                    let weight = Operand::from(&self.weight).beside(&x)?;
                    if self.groups > 1 || !weight.layout().is_sharded(1) {
                        return leave(&self.weight, conv(x, weight, bias, &options)?);
                    }
                    leave_with_bias(&self.weight, conv(x, weight, None, &options)?, bias, 1)
                })
            }
        }
    };
}

conv_layer!(Conv1d, 3, 1, |x| [x]);
conv_layer!(Conv2d, 4, 2, |x| x);
conv_layer!(Conv3d, 5, 3, |x| x);
