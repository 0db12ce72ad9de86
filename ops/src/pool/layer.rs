//! [`Layer`] for burn's pooling modules.

use burn::nn::pool::{AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d};

use super::{PaddingCount, PoolField, PoolOptions};
use crate::driver::Rounding;
use crate::field::Field;
use crate::layer::{Layer, PaddingOf};

/// Implements [`Layer`] for a module; `$finish` completes its options.
macro_rules! pool_layer {
    ($module:ident, $d:literal, $array:expr, $method:ident, $finish:expr) => {
        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            #[track_caller]
            fn forward(&self, x: X) -> X {
                let (kernel, stride) = ($array(self.kernel_size), $array(self.stride));
                let rounding = if self.ceil_mode {
                    Rounding::Ceil
                } else {
                    Rounding::Floor
                };
                let padding = self.padding.padding(&x.dims()[2..], kernel, stride);
                let options = PoolOptions::new(kernel)
                    .with_stride(stride)
                    .with_padding(padding)
                    .with_rounding(rounding);
                x.$method(&$finish(self, options))
            }
        }
    };
}

fn count(included: bool) -> PaddingCount {
    if included {
        PaddingCount::Included
    } else {
        PaddingCount::Excluded
    }
}

pool_layer!(
    MaxPool1d,
    3,
    |x| [x],
    max_pool,
    |pool: &MaxPool1d, o: PoolOptions<1>| o.with_dilation([pool.dilation])
);
pool_layer!(
    MaxPool2d,
    4,
    |x| x,
    max_pool,
    |pool: &MaxPool2d, o: PoolOptions<2>| o.with_dilation(pool.dilation)
);
pool_layer!(
    AvgPool1d,
    3,
    |x| [x],
    avg_pool,
    |pool: &AvgPool1d, o: PoolOptions<1>| { o.with_count(count(pool.count_include_pad)) }
);
pool_layer!(
    AvgPool2d,
    4,
    |x| x,
    avg_pool,
    |pool: &AvgPool2d, o: PoolOptions<2>| { o.with_count(count(pool.count_include_pad)) }
);
