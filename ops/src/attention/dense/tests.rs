use burn::tensor::{DType, Device, Tensor, TensorData};
use halocline_core::{Launcher, Replicate, Shard};

use super::biases::on_ranks;
use super::dims::{BATCH, HEADS};
use super::*;
use crate::attention::{DenseAttentionField, OPERATORS};
use crate::golden::{Arguments, Attributes};
use crate::testing::{check_golden, compare, difference, normal, random};

/// Queries, keys and values `[batch, tokens, heads, width]`.
fn inputs(
    [queries, keys]: [usize; 2],
    [heads, key_heads]: [usize; 2],
    widths: [usize; 2],
) -> [TensorData; 3] {
    [
        normal(&[2, queries, heads, widths[0]], "q", 0),
        normal(&[2, keys, key_heads, widths[0]], "k", 0),
        normal(&[2, keys, key_heads, widths[1]], "v", 0),
    ]
}

/// The definition with burn's operators, in f64: the result, and the gradients of all inputs.
fn by_definition(inputs: &[TensorData; 3], options: &AttentionOptions) -> Vec<TensorData> {
    let device = Device::flex().autodiff();
    let leaves = inputs.each_ref().map(|data| {
        let data = data.clone().convert_dtype(DType::F64);
        Tensor::<4>::from_data(data, (&device, DType::F64)).require_grad()
    });
    let [q, k, v] = leaves.clone();
    let scale = options
        .scale
        .unwrap_or(1.0 / (q.dims()[WIDTH] as f64).sqrt());
    let scores = Scores {
        scale,
        causal: options.causal.then_some(0),
        ..Scores::default()
    };
    let y = composed::local(q, k, v, &scores, false).unwrap();
    results(y, &leaves)
}

fn results(y: Tensor<4>, leaves: &[Tensor<4>]) -> Vec<TensorData> {
    let cotangent = normal(&y.dims(), "cotangent", 0).convert_dtype(y.dtype());
    let cotangent = Tensor::from_data(cotangent, (&y.device(), y.dtype()));
    let gradients = (y.clone() * cotangent).sum().backward();
    let leaves = leaves
        .iter()
        .map(|leaf| leaf.grad(&gradients).expect("a gradient"));
    std::iter::once(y.inner())
        .chain(leaves)
        .map(Tensor::into_data)
        .collect()
}

#[test]
fn results_and_gradients_are_those_of_the_definition() {
    let cases = [
        ([37, 37], [4, 4], [8, 8], false),
        ([150, 150], [2, 1], [20, 17], true),
        ([64, 300], [3, 3], [16, 4], false),
        ([3, 5], [2, 2], [3, 3], true),
        // Several groups of queries in a task.
        ([300, 300], [6, 3], [5, 4], true),
        // Widths at which matrices are used, on processors that have them.
        ([150, 140], [4, 2], [40, 33], false),
        ([300, 300], [2, 1], [64, 32], true),
        // Several groups of queries in a task, with matrices.
        ([300, 300], [8, 8], [40, 33], true),
    ];
    let types = [(DType::F32, 1e-5), (DType::F64, 1e-13), (DType::BF16, 2e-2)];
    for (tokens, heads, widths, causal) in cases {
        let options = AttentionOptions::default().with_causal(causal);
        let data = inputs(tokens, heads, widths);
        for (dtype, tolerance) in types {
            let data = match dtype {
                DType::BF16 => data.clone().map(|data| data.convert_dtype(dtype)),
                _ => data.clone(),
            };
            let expected = by_definition(&data, &options);
            let device = Device::flex().autodiff();
            let leaves = data.each_ref().map(|data| {
                let data = data.clone().convert_dtype(dtype);
                Tensor::<4>::from_data(data, (&device, dtype)).require_grad()
            });
            let [q, k, v] = leaves.clone();
            let y = q.scaled_dot_product_attention(k, v, &options);
            for (found, expected) in results(y, &leaves).iter().zip(&expected) {
                let off = difference(found, expected);
                assert!(off < tolerance, "{tokens:?} {heads:?} {dtype:?}: {off:e}");
            }
        }
    }
}

/// Rings of keys with uneven and empty extents, batch and heads sharded, on up to three axes.
#[test]
fn shards_give_the_result_and_gradients_of_one_rank() {
    for causal in [false, true] {
        // [batch, heads, tokens, width], with a width at which matrices are used, if causal.
        let shape = [2, 4, 23, if causal { 34 } else { 6 }];
        let input = |name: &str| (name.to_string(), normal(&shape, name, 0));
        let numbers = [("is_causal".to_string(), vec![f64::from(u8::from(causal))])];
        let arguments = Arguments {
            attributes: Attributes {
                numbers: numbers.into(),
                ..Attributes::default()
            },
            inputs: ["q", "k", "v"].map(input).to_vec(),
            ..Arguments::default()
        };
        let mut all = OPERATORS.iter();
        let golden = all
            .find(|golden| golden.name == NAME)
            .expect("dense attention");
        check_golden(golden, &arguments, &[1, 2, 3, 4, 8], 1e-5);
        check_golden(golden, &arguments.clone().cast(DType::F64), &[3], 1e-12);
        check_golden(golden, &arguments.cast(DType::F16), &[2], 2e-2);
    }
}

/// Queries and keys of different lengths, replicated keys, and shared heads: placements that golden
/// cases lack.
#[test]
fn keys_may_lie_otherwise_than_queries() {
    let data = inputs([19, 31], [4, 2], [36, 34]);
    let expected = by_definition(&data, &AttentionOptions::default());
    let tokens = [Shard(TOKENS), Shard(TOKENS)];
    let last_tokens = [Replicate, Shard(TOKENS)];
    let heads = [Replicate, Shard(HEADS)];
    let heads_and_tokens = [Shard(HEADS), Shard(TOKENS)];
    let tokens_and_batch = [Shard(TOKENS), Shard(BATCH)];
    for (axes, queries, keys) in [
        ([1, 2], last_tokens, [Replicate; 2]),
        ([1, 2], heads, heads),
        ([2, 2], tokens, tokens),
        ([2, 2], heads_and_tokens, heads_and_tokens),
        ([2, 2], tokens, last_tokens),
        ([2, 2], tokens_and_batch, tokens_and_batch),
    ] {
        let found = on_ranks(&data, axes, queries, keys, |_, _| {
            Ok(AttentionOptions::default())
        });
        for found in found {
            compare(&found, &expected, 1e-5, &format!("{queries:?} {keys:?}"));
        }
    }
}

/// A plain bias, distributed like queries, and padding on the mesh; a score of NaN.
#[test]
fn a_bias_and_padding_are_added() {
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let tokens = |name: &str| {
                let whole = random::<4>([2, 6, 1, 4], name, 0).inner();
                ShardTensor::distribute(whole, &mesh, &[Shard(TOKENS)])
            };
            let bias = random::<4>([1, 6, 1, 6], "bias", 0).inner();
            let padding = [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0; 6]];
            let padding = Tensor::<2>::from_data(padding, world.device()).inner();
            let padding = ShardTensor::distribute(padding, &mesh, &[Replicate])?.greater_elem(0.5);
            let options = AttentionOptions::default();
            let options = options.with_bias(bias).with_key_padding(padding);
            let (q, k, v) = (tokens("q")?, tokens("k")?, tokens("v")?);
            let y = scaled_dot_product_attention(q, k, v, &options)?;
            Ok(y.full_tensor().into_data())
        });
        found.unwrap().remove(0)
    };
    assert!(difference(&run(2), &run(1)) < 1e-6);
    let field =
        |value| ShardTensor::solo(Tensor::<4>::full([1, 2, 1, 1], value, &Default::default()));
    let options = AttentionOptions::default();
    let (k, v) = (field(1.0), field(1.0));
    let y = scaled_dot_product_attention_with_lse(field(f32::NAN), k, v, &options).unwrap();
    assert!(y.lse.local().to_data().iter::<f32>().all(f32::is_nan));
}

#[test]
fn causal_extents_give_equal_work() {
    for (tokens, parts) in [(1000, 1), (1000, 3), (4096, 8)] {
        let extents = causal_extents(tokens, parts);
        assert_eq!(extents.iter().sum::<usize>(), tokens);
        let mut start = 0;
        let work = extents.iter().map(|extent| {
            let before = start;
            start += extent;
            (start * start - before * before) as f64 / 2.0
        });
        let even = (tokens * tokens) as f64 / 2.0 / parts as f64;
        for work in work {
            assert!((work / even - 1.0).abs() < 0.02, "{extents:?}");
        }
    }
}
