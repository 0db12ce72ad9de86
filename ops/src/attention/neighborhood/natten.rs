//! The table of NATTEN's own tests, with its tolerances: 1e-4 for results in f32, 1e-2 for
//! gradients of queries, 1e-4 for gradients of keys and values; 1e-2 in f16 and 5e-2 in bf16.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::NeighborhoodOptions;
use crate::attention::AttentionField;
use crate::testing::normal;

/// Result and gradients for normal inputs that are rounded to a dtype; the cotangent is
/// normal, too, times 0.05.
fn results<const D: usize, const N: usize>(
    shape: [usize; D],
    key_heads: usize,
    value_width: usize,
    options: &NeighborhoodOptions<N>,
    [rounded, dtype]: [DType; 2],
) -> [TensorData; 4] {
    let device = Device::flex().autodiff();
    let leaf = |name: &str, heads: usize, width: usize| {
        let mut shape = shape;
        (shape[D - 2], shape[D - 1]) = (heads, width);
        let data = normal(&shape, name, 0);
        let data = data.convert_dtype(rounded).convert_dtype(dtype);
        Tensor::<D>::from_data(data, (&device, dtype)).require_grad()
    };
    let q = leaf("q", shape[D - 2], shape[D - 1]);
    let (k, v) = (
        leaf("k", key_heads, shape[D - 1]),
        leaf("v", key_heads, value_width),
    );
    let y = q
        .clone()
        .neighborhood_attention(k.clone(), v.clone(), options);
    let cotangent = normal(&y.dims(), "cotangent", 0).convert_dtype(dtype);
    let cotangent = Tensor::from_data(cotangent, (&device, dtype)) * 0.05;
    let gradients = (y.clone() * cotangent).sum().backward();
    let [q, k, v] = [q, k, v].map(|leaf| leaf.grad(&gradients).expect("a gradient"));
    [y.inner(), q, k, v].map(Tensor::into_data)
}

/// Compares every combination of causal flags in f32, and none in half precision, with f64, which
/// is tested against the definition.
fn check<const D: usize, const N: usize>(
    [batch, heads, key_heads, width]: [usize; 4],
    shape: [usize; N],
    [kernel, stride, dilation]: [[usize; N]; 3],
) {
    let options = NeighborhoodOptions::new(kernel)
        .with_stride(stride)
        .with_dilation(dilation);
    let mut whole = [batch; D];
    whole[1..=N].copy_from_slice(&shape);
    (whole[D - 2], whole[D - 1]) = (heads, width);
    for flags in 0..1 << N {
        let causal = std::array::from_fn(|dim| flags >> dim & 1 == 1);
        let options = options.with_causal(causal);
        let value_width = [width, 8, 2 * width, 24][flags % 4];
        let types = [
            (DType::F32, [1e-4, 1e-2, 1e-4, 1e-4]),
            (DType::F16, [1e-2; 4]),
            (DType::BF16, [5e-2; 4]),
        ];
        for (dtype, tolerances) in &types[..if flags == 0 { 3 } else { 1 }] {
            let run =
                |computed| results(whole, key_heads, value_width, &options, [*dtype, computed]);
            let (found, expected) = (run(*dtype), run(DType::F64));
            for (which, tolerance) in tolerances.iter().enumerate() {
                let pairs = found[which]
                    .iter::<f64>()
                    .zip(expected[which].iter::<f64>());
                // NaN exceeds every tolerance.
                let off = pairs.map(|(a, b)| (a - b).abs()).max_by(f64::total_cmp);
                let off = off.expect("a result");
                assert!(
                    off <= *tolerance,
                    "{whole:?}, {options:?}, {dtype:?}: result {which} is off by {off:e}"
                );
            }
        }
    }
}

#[test]
fn table_of_one_dim() {
    for ([batch, heads, key_heads, width], length, kernel, stride, dilation) in [
        ([4, 3, 1, 128], 256, 255, 82, 1),
        ([2, 4, 2, 128], 128, 63, 31, 1),
        ([1, 1, 1, 32], 128, 3, 2, 5),
        ([1, 1, 1, 32], 128, 3, 2, 10),
        ([1, 1, 1, 64], 128, 8, 7, 5),
        ([1, 1, 1, 32], 125, 3, 1, 1),
        ([1, 2, 2, 64], 125, 15, 1, 1),
        ([1, 1, 1, 128], 256, 3, 2, 10),
    ] {
        check::<4, 1>(
            [batch, heads, key_heads, width],
            [length],
            [[kernel], [stride], [dilation]],
        );
    }
}

#[test]
fn table_of_two_dims() {
    for (shape, kernel, stride, dilation) in [
        ([5, 25], [5, 16], [1, 16], [1, 1]),
        ([84, 19], [7, 3], [1, 1], [5, 1]),
        ([19, 29], [8, 8], [1, 1], [2, 3]),
        ([48, 17], [24, 16], [1, 1], [2, 1]),
        ([33, 33], [24, 16], [1, 1], [1, 1]),
        ([28, 40], [17, 31], [1, 1], [1, 1]),
        ([44, 80], [9, 10], [1, 1], [1, 1]),
    ] {
        check::<5, 2>([1, 2, 1, 16], shape, [kernel, stride, dilation]);
    }
}

#[test]
fn table_of_three_dims() {
    for (shape, kernel, stride, dilation) in [
        ([32, 10, 10], [7, 3, 3], [5, 1, 1], [1, 2, 3]),
        ([8, 8, 16], [3, 3, 3], [2, 1, 2], [2, 2, 4]),
        ([13, 11, 9], [3, 4, 3], [2, 3, 3], [3, 2, 2]),
        ([8, 4, 8], [7, 3, 7], [1, 1, 1], [1, 1, 1]),
    ] {
        check::<6, 3>([1, 2, 1, 16], shape, [kernel, stride, dilation]);
    }
}

/// The largest entries of the table: they take minutes, so only `make fuzz` runs them.
#[test]
#[ignore = "minutes; make fuzz runs it"]
fn table_of_the_largest() {
    check::<4, 1>([1, 1, 1, 128], [32768], [[2048], [256], [1]]);
    check::<5, 2>([1, 2, 1, 16], [67, 80], [[12, 7], [8, 4], [5, 11]]);
    check::<5, 2>([1, 2, 1, 16], [44, 80], [[44, 80], [4, 8], [1, 1]]);
    check::<6, 3>(
        [1, 2, 1, 16],
        [18, 37, 12],
        [[14, 16, 12], [12, 8, 1], [1, 2, 1]],
    );
}
