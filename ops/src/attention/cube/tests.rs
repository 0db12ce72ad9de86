//! Compares the kernels on the default device, a GPU in `make test-wgpu`, with those of the CPU.

use burn::backend::DispatchDevice;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_cubecl::CubeDevice;
use halocline_core::{RandomKey, ShardTensor};
use proptest::prelude::*;

use crate::attention::AttentionOutput;
use crate::prelude::*;
use crate::testing::{difference, normal};

type Heads = [Tensor<5>; 3];

/// Largest difference, relative to the largest magnitude.
const TOLERANCE: f64 = 2e-5;

/// Result, logarithms, and the gradients of queries, keys and values of both.
fn results(
    device: &Device,
    shapes: [[usize; 5]; 3],
    attend: impl Fn(Heads) -> AttentionOutput<Tensor<5>>,
) -> Vec<TensorData> {
    let leaf = |input: usize| {
        let data = normal(&shapes[input], "operand", input);
        Tensor::<5>::from_data(data, &device.clone().autodiff()).require_grad()
    };
    let leaves = [0, 1, 2].map(leaf);
    let AttentionOutput { output, lse } = attend(leaves.clone());
    let weight = |x: &Tensor<5>| {
        let data = normal(&x.dims(), "cotangent", 0);
        Tensor::<5>::from_data(data, &x.device())
    };
    let loss = (output.clone() * weight(&output)).sum() + (lse.clone() * weight(&lse)).sum();
    let gradients = loss.backward();
    let gradients = leaves.map(|leaf| leaf.grad(&gradients).expect("a gradient"));
    let found = [output.inner(), lse.inner()].into_iter().chain(gradients);
    found.map(Tensor::into_data).collect()
}

fn assert_same(
    tolerance: f64,
    shapes: [[usize; 5]; 3],
    attend: impl Fn(Heads) -> AttentionOutput<Tensor<5>>,
) {
    let expected = results(&Device::flex(), shapes, &attend);
    let found = results(&Device::default(), shapes, &attend);
    for (result, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let off = difference(found, expected);
        assert!(off < tolerance, "result {result}: {off:e}");
    }
}

fn dim() -> impl Strategy<Value = (usize, usize, usize, u8, usize)> {
    let kinds = (2..6_usize, 1..4_usize, 1..4_usize, 0..3_u8, 0..6_usize);
    kinds.prop_map(|(kernel, dilation, stride, kind, more)| {
        (kernel, dilation, stride.min(kernel), kind, more)
    })
}

proptest! {
    #![proptest_config(crate::testing::cases(40))]

    #[test]
    fn neighborhoods_on_this_device_are_those_of_the_cpu(
        dims in [dim(), dim()], key_heads in 1..3_usize, shared in 1..4_usize,
        width in 1..10_usize, value_width in 1..10_usize,
    ) {
        let cells = dims.map(|(kernel, dilation, _, _, more)| (kernel + more) * dilation);
        let [height, columns] = cells;
        let shape = |heads, width| [2, height, columns, heads, width];
        let options = NeighborhoodOptions::new(dims.map(|dim| dim.0))
            .with_dilation(dims.map(|dim| dim.1))
            .with_stride(dims.map(|dim| dim.2))
            .with_causal(dims.map(|dim| dim.3 == 1))
            .with_periodic(dims.map(|dim| dim.3 == 2));
        let shapes = [
            shape(key_heads * shared, width),
            shape(key_heads, width),
            shape(key_heads, value_width),
        ];
        assert_same(TOLERANCE, shapes, |[q, k, v]| {
            q.neighborhood_attention_with_lse(k, v, &options)
        });
    }

    #[test]
    fn dense_attention_on_this_device_is_that_of_the_cpu(
        queries in 1..40_usize, keys in 1..40_usize, causal: bool,
        key_heads in 1..3_usize, shared in 1..4_usize, width in 1..10_usize, value_width in 1..10_usize,
    ) {
        let options = AttentionOptions::default().with_causal(causal);
        let shapes = [
            [2, 1, queries, key_heads * shared, width],
            [2, 1, keys, key_heads, width],
            [2, 1, keys, key_heads, value_width],
        ];
        assert_same(TOLERANCE, shapes, |operands| {
            let [q, k, v] = operands.map(|x| x.squeeze_dim::<4>(1));
            let found = q.scaled_dot_product_attention_with_lse(k, v, &options);
            found.map(|x| x.unsqueeze_dim::<5>(1))
        });
    }
}

/// Bias, key padding and dropout, which are computed by burn's operators.
#[test]
fn biased_attention_on_this_device_is_that_of_the_cpu() {
    let shapes = [[2, 1, 9, 4, 6], [2, 1, 13, 2, 6], [2, 1, 13, 2, 5]];
    // burn multiplies matrices on CUDA's tensor cores, which round the operands to TF32.
    let device = Device::default();
    let tolerance = match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(_)) => 1e-2,
        _ => TOLERANCE,
    };
    for dropout in [false, true] {
        assert_same(tolerance, shapes, |operands| {
            let [q, k, v] = operands.map(|x| x.squeeze_dim::<4>(1));
            let device = q.device().inner();
            let bias = Tensor::<4>::from_data(normal(&[2, 9, 1, 13], "bias", 0), &device);
            let padding = (0..26).map(|key| key % 5 == 0).collect::<Vec<_>>();
            let padding = TensorData::new(padding, [2, 13]);
            let padding = ShardTensor::solo(Tensor::<2, Bool>::from_data(padding, &device));
            let mut options = AttentionOptions::default().with_bias(bias);
            options = options.with_key_padding(padding);
            if dropout {
                options = options.with_dropout(0.3, RandomKey::new(3, "dropout"));
            }
            let found = q.scaled_dot_product_attention_with_lse(k, v, &options);
            found.map(|x| x.unsqueeze_dim::<5>(1))
        });
    }
}

#[test]
fn many_queries_on_this_device_are_those_of_the_cpu() {
    let options = NeighborhoodOptions::new([2, 5, 7]).with_periodic([false, false, true]);
    let attend = |operands: Heads| {
        let [q, k, v] = operands.map(|x| {
            let [planes, rows, columns, heads, width] = x.dims();
            x.reshape([1, planes, rows, columns, heads, width])
        });
        let found = q.neighborhood_attention_with_lse(k, v, &options);
        found.map(|x| x.squeeze_dim::<5>(0))
    };
    assert_same(TOLERANCE, [[4, 16, 40, 4, 32]; 3], attend);
}
