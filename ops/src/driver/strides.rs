//! Tensors in row-major order, for burn's fused kernels.
//!
//! burn's CubeCL kernels return channels-last results under channels-first shapes. With one channel
//! such a tensor is in row-major order, but its strides say otherwise (`[n, 1, h, w]` with strides
//! `[hw, 1, w, 1]`), and burn 0.22.1 fuses the operators after it into a kernel that reads wrong
//! cells: `conv2d(x) * rows * columns` is off by its whole magnitude. Flattening and reshaping the
//! tensor restores the strides of its shape.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape, Tensor};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply, in_order};

use crate::kernel::flex;

/// Returns the same elements with the strides of their shape.
pub(crate) fn row_major(x: DispatchTensor) -> DispatchTensor {
    let shape = x.shape();
    if flex::runs_on(&Device::new(x.device())) {
        return in_order(x);
    }
    let count = shape.num_elements();
    if count == 0 || !shape.contains(&1) {
        return x;
    }
    Dispatch::float_reshape(Dispatch::float_reshape(x, Shape::from([count])), shape)
}

/// Applies [`row_major`] to a tensor and to its gradient, on devices other than the CPU.
pub(crate) fn in_row_major<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if flex::runs_on(&x.device()) {
        return x;
    }
    Tensor::from_dispatch(apply(RowMajor, [x.into_dispatch()]))
}

#[derive(Debug)]
struct RowMajor;

impl Operator for RowMajor {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((row_major(inputs.remove(0)), ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(row_major(pass.cotangent))])
    }
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use burn::tensor::{Device, TensorData};
    use halocline_core::{Boundary, ShardTensor};

    use crate::prelude::*;
    use crate::testing::{difference, normal};

    /// A field of one channel passes through a convolution, pooling and a permutation, each
    /// followed by factors of rows and columns: on the default device, a GPU in `make test-wgpu`,
    /// as on the CPU.
    #[test]
    fn one_channel_times_profiles_is_that_of_the_cpu() {
        let run = |device: &Device| {
            let tensor = |shape: [usize; 4], name| {
                burn::tensor::Tensor::<4>::from_data(normal(&shape, name, 0), device)
            };
            let x = ShardTensor::solo(tensor([2, 1, 16, 8], "x"));
            let scaled = |x: ShardTensor<4>| {
                let ramp = |size: usize| (1..=size).map(|cell| cell as f64).collect::<Vec<_>>();
                let (rows, columns) = (ramp(x.dims()[2]), ramp(x.dims()[3]));
                let (rows, columns) = (x.profile(2, &rows), x.profile(3, &columns));
                x * rows * columns
            };
            let padding = [Padding::new(1, Boundary::Periodic); 2];
            let options = ConvOptions::default().with_padding(padding);
            let y = x.clone().conv(tensor([1, 1, 3, 3], "w"), None, &options);
            let pooled = x
                .clone()
                .avg_pool(&PoolOptions::new([2, 1]).with_stride([1, 1]));
            let moved = x.permute([0, 2, 3, 1]).permute([0, 3, 1, 2]);
            let found = [scaled(y), scaled(pooled), scaled(moved)];
            found.map(|y| y.into_local().into_data())
        };
        let expected: [TensorData; 3] = run(&Device::flex());
        for (found, expected) in run(&Device::default()).iter().zip(&expected) {
            let off = difference(found, expected);
            assert!(off < 1e-5, "{off:e}");
        }
    }
}
