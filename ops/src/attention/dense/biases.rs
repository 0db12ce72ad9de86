//! Tests of biases and key padding, sharded like queries or like keys.

use burn::tensor::{Bool, Device, Tensor, TensorData};
use halocline_core::{DeviceMesh, Launcher, Placement, RandomKey, Replicate, Shard};

use super::dims::{BATCH, HEADS};
use super::*;
use crate::testing::{compare, cotangent_of, gradient_of, normal};

const QUERIES: usize = 9;
const KEYS: usize = 13;
/// Widths of queries and values at which matrices are used, on processors that have them.
const WIDTHS: [usize; 2] = [36, 33];

fn inputs(queries: usize, keys: usize) -> [TensorData; 3] {
    [
        normal(&[2, queries, 4, WIDTHS[0]], "q", 0),
        normal(&[2, keys, 2, WIDTHS[0]], "k", 0),
        normal(&[2, keys, 2, WIDTHS[1]], "v", 0),
    ]
}

/// Result, and gradients of queries, keys and values, with burn's operators.
fn by_definition(
    inputs: [TensorData; 3],
    bias: &TensorData,
    causal: bool,
    dropout: Option<Dropped>,
) -> Vec<TensorData> {
    let device = Device::flex().autodiff();
    let leaves = inputs.map(|data| Tensor::<4>::from_data(data, &device).require_grad());
    let [q, k, v] = leaves.clone();
    let scores = Scores {
        scale: 1.0 / (WIDTHS[0] as f64).sqrt(),
        causal: causal.then_some(0),
        bias: Some(Tensor::from_data(bias.clone(), &Device::flex())),
        dropout,
        ..Scores::default()
    };
    let y = composed::local(q, k, v, &scores, false).unwrap();
    let cotangent = Tensor::from_data(normal(&y.dims(), "cotangent", 0), &device);
    let gradients = (y.clone() * cotangent).sum().backward();
    let gradients = leaves.map(|leaf| leaf.grad(&gradients).expect("a gradient"));
    let results = std::iter::once(y.inner()).chain(gradients);
    results.map(Tensor::into_data).collect()
}

/// The same on ranks; `options` creates the options on a mesh.
pub(super) fn on_ranks(
    inputs: &[TensorData; 3],
    axes: [usize; 2],
    queries: [Placement; 2],
    keys: [Placement; 2],
    options: impl Fn(&DeviceMesh, &Device) -> Result<AttentionOptions> + Send + Sync,
) -> Vec<Vec<TensorData>> {
    let found = Launcher::local(axes[0] * axes[1]).collect(|world| {
        let mesh = world.mesh([("a", axes[0]), ("b", axes[1])])?;
        let options = options(&mesh, world.device())?;
        let mut leaves = Vec::new();
        for (data, placements) in inputs.iter().zip([queries, keys, keys]) {
            let whole = Tensor::<4>::from_data(data.clone(), world.device());
            leaves.push(ShardTensor::distribute(whole, &mesh, &placements)?.require_grad());
        }
        let [q, k, v] = [0, 1, 2].map(|input: usize| leaves[input].clone());
        let y = scaled_dot_product_attention(q, k, v, &options)?;
        let product = y.clone() * cotangent_of(&y)?;
        let gradients = crate::reduce::sum(product)?.backward();
        let mut found = vec![y.full_tensor().into_data()];
        found.extend(leaves.iter().map(|leaf| gradient_of(leaf, &gradients)));
        Ok(found)
    });
    found.unwrap()
}

/// Biases of any dims with queries whose batch, tokens and heads are sharded: sharded by hand, and
/// plain.
#[test]
fn biases_lie_as_queries_do() {
    let tokens = [Shard(TOKENS), Shard(TOKENS)];
    let heads = [Shard(HEADS), Shard(TOKENS)];
    let batch = [Shard(BATCH), Shard(HEADS)];
    let whole_keys = [Replicate, Replicate];
    let inputs = inputs(QUERIES, KEYS);
    for shape in [
        [2, QUERIES, 4, KEYS],
        [1, QUERIES, 1, KEYS],
        [2, 1, 4, KEYS],
        [1, 1, 1, KEYS],
    ] {
        let data = normal(&shape, "bias", 0);
        let expected = by_definition(inputs.clone(), &data, false, None);
        for (queries, keys) in [
            (tokens, tokens),
            (tokens, whole_keys),
            (heads, heads),
            (batch, batch),
        ] {
            let place = format!("{shape:?} beside {queries:?}, {keys:?}");
            let whole = |device: &Device| Tensor::<4>::from_data(data.clone(), device).inner();
            let plain = on_ranks(&inputs, [2, 2], queries, keys, |_, device| {
                Ok(AttentionOptions::default().with_bias(whole(device)))
            });
            let laid = on_ranks(&inputs, [2, 2], queries, keys, |mesh, device| {
                let placements = queries.map(|placement| match placement {
                    Shard(dim) if shape[dim] == 1 => Replicate,
                    other => other,
                });
                let bias = ShardTensor::distribute(whole(device), mesh, &placements)?;
                Ok(AttentionOptions::default().with_bias(bias))
            });
            for found in plain.iter().chain(&laid) {
                compare(found, &expected, 1e-5, &place);
            }
        }
    }
}

/// Gradient of a bias, summed over the ranks whose queries share it: for a parameter, and for
/// shards.
#[test]
fn learned_biases_have_the_gradients_of_one_device() {
    let run = |shape: [usize; 4],
               axes: [usize; 2],
               queries: [Placement; 2],
               keys: [Placement; 2],
               laid: bool| {
        let found = Launcher::local(axes[0] * axes[1]).collect(|world| {
            let mesh = world.mesh([("a", axes[0]), ("b", axes[1])])?;
            let [q, k, v] =
                inputs(QUERIES, KEYS).map(|data| Tensor::<4>::from_data(data, world.device()));
            let q = ShardTensor::distribute(q, &mesh, &queries)?.require_grad();
            let k = ShardTensor::distribute(k, &mesh, &keys)?;
            let v = ShardTensor::distribute(v, &mesh, &keys)?;
            let bias = Tensor::<4>::from_data(normal(&shape, "bias", 0), world.device());
            let placements = queries.map(|placement| match placement {
                Shard(dim) if shape[dim] == 1 => Replicate,
                other => other,
            });
            let shards = ShardTensor::distribute(bias.clone(), &mesh, &placements)?.require_grad();
            let whole = bias.require_grad();
            let options = AttentionOptions::default().with_causal(true);
            let options = if laid {
                options.with_bias(shards.clone())
            } else {
                options.with_bias(whole.clone())
            };
            let y = scaled_dot_product_attention(q.clone(), k, v, &options)?;
            let cotangent = Tensor::<4>::from_data(normal(&y.dims(), "c", 0), world.device());
            let cotangent = ShardTensor::distribute(cotangent.inner(), &mesh, y.layout())?;
            let gradients = crate::reduce::sum(y.clone() * cotangent)?.backward();
            let of_bias = if laid {
                shards.grad(&gradients).map(|shard| shard.full_tensor())
            } else {
                whole.grad(&gradients)
            };
            let of_q = q.grad(&gradients).expect("a gradient");
            Ok(vec![
                y.full_tensor().into_data(),
                of_q.full_tensor().into_data(),
                of_bias.expect("a gradient").into_data(),
            ])
        });
        found.unwrap()
    };
    let tokens = [Shard(TOKENS), Shard(TOKENS)];
    let heads = [Shard(HEADS), Shard(TOKENS)];
    let batch = [Shard(BATCH), Shard(HEADS)];
    for shape in [[1, QUERIES, 4, KEYS], [2, 1, 4, KEYS], [1, 1, 1, KEYS]] {
        let expected = run(shape, [1, 1], [Replicate; 2], [Replicate; 2], false).remove(0);
        for (axes, queries, keys) in [
            ([2, 2], tokens, [Replicate; 2]),
            ([2, 2], heads, [Shard(HEADS), Replicate]),
            ([2, 2], batch, batch),
            ([3, 5], tokens, [Replicate; 2]), // some ranks have no queries
        ] {
            for laid in [false, true] {
                for found in run(shape, axes, queries, keys, laid) {
                    compare(
                        &found,
                        &expected,
                        1e-5,
                        &format!("{shape:?} {queries:?} {keys:?} {laid}"),
                    );
                }
            }
        }
    }
}

/// Together with causal order and dropout, whose positions are global.
#[test]
fn biases_stand_beside_causal_order_and_dropout() {
    // Includes several groups of queries and of keys in a task.
    for (axes, queries, keys) in [([3, 2], QUERIES, KEYS), ([1, 1], 520, 1050)] {
        let inputs = inputs(queries, keys);
        let data = normal(&[1, queries, 4, keys], "bias", 0);
        let key = RandomKey::new(3, "dropout");
        let dropped = Dropped::new(0.3, key, [2, queries, 4, keys], [0; 3]).unwrap();
        let expected = by_definition(inputs.clone(), &data, true, Some(dropped));
        let placements = [Shard(TOKENS), Shard(HEADS)];
        let found = on_ranks(&inputs, axes, placements, placements, |_, device| {
            let bias = Tensor::<4>::from_data(data.clone(), device).inner();
            let options = AttentionOptions::default().with_causal(true);
            Ok(options.with_bias(bias).with_dropout(0.3, key))
        });
        for found in found {
            compare(&found, &expected, 1e-5, "causal, with dropout");
        }
    }
}

/// Padding, and a bias that is the same for all queries, are sent with the keys, round a ring over
/// one axis and over two.
#[test]
fn padding_may_lie_as_keys_do() {
    let padded = |sample: usize, key: usize| (key + 2 * sample) % 5 == 3 || key == 12;
    let cells = (0..2 * KEYS).map(|cell| padded(cell / KEYS, cell % KEYS));
    let padding = TensorData::new(cells.collect::<Vec<_>>(), [2, KEYS]);
    let added = normal(&[1, 1, 4, KEYS], "bias", 0);
    let mut both = Vec::new();
    for sample in 0..2 {
        let values = added.iter::<f32>().enumerate();
        both.extend(values.map(|(cell, value)| {
            if padded(sample, cell % KEYS) {
                f32::NEG_INFINITY
            } else {
                value
            }
        }));
    }
    let inputs = inputs(QUERIES, KEYS);
    let both = TensorData::new(both, [2, 1, 4, KEYS]);
    let expected = by_definition(inputs.clone(), &both, false, None);
    for (axes, tokens) in [
        ([1, 3], [Shard(BATCH), Shard(TOKENS)]),
        ([2, 2], [Shard(TOKENS), Shard(TOKENS)]),
        ([2, 2], [Shard(BATCH), Shard(TOKENS)]),
    ] {
        let found = on_ranks(&inputs, axes, tokens, tokens, |mesh, device| {
            let of_keys = |dim: usize| {
                tokens.map(|placement| match placement {
                    Shard(TOKENS) => Shard(dim),
                    _ => Replicate,
                })
            };
            let of_samples = tokens.map(|placement| match placement {
                Shard(TOKENS) => Shard(1),
                other => other,
            });
            let padding = Tensor::<2, Bool>::from_data(padding.clone(), device).inner();
            let padding = ShardTensor::distribute(padding, mesh, &of_samples)?;
            let bias = Tensor::<4>::from_data(added.clone(), device).inner();
            let bias = ShardTensor::distribute(bias, mesh, &of_keys(WIDTH))?;
            let options = AttentionOptions::default().with_key_padding(padding);
            Ok(options.with_bias(bias))
        });
        for found in found {
            compare(&found, &expected, 1e-5, &format!("{axes:?} {tokens:?}"));
        }
    }
}

/// Three keys on four ranks, one of which has none.
#[test]
fn padding_of_few_keys_leaves_ranks_without_any() {
    let inputs = inputs(QUERIES, 3);
    let padded = TensorData::new(vec![false, true, false, false, false, true], [2, 3]);
    let hidden = f32::NEG_INFINITY;
    let added = vec![0.0, hidden, 0.0, 0.0, 0.0, hidden];
    let added = TensorData::new(added, [2, 1, 1, 3]);
    let expected = by_definition(inputs.clone(), &added, false, None);
    let tokens = [Replicate, Shard(TOKENS)];
    let found = on_ranks(&inputs, [1, 4], tokens, tokens, |mesh, device| {
        let padding = Tensor::<2, Bool>::from_data(padded.clone(), device).inner();
        let padding = ShardTensor::distribute(padding, mesh, &[Replicate, Shard(1)])?;
        Ok(AttentionOptions::default().with_key_padding(padding))
    });
    for found in found {
        compare(&found, &expected, 1e-5, "three keys");
    }
}

/// A sample without keys has results of zero and no gradients; the other sample has those that it
/// has alone.
#[test]
fn queries_without_keys_have_results_of_zero() {
    let inputs = inputs(QUERIES, KEYS);
    let hidden = (0..2 * KEYS).map(|cell| cell < KEYS);
    let hidden = TensorData::new(hidden.collect::<Vec<_>>(), [2, KEYS]);
    let bias = TensorData::zeros::<f32, _>([1, 1, 1, KEYS]);
    let mut expected = by_definition(inputs.clone(), &bias, false, None);
    for data in &mut expected {
        let first = data.num_elements() / 2;
        data.as_mut_slice::<f32>().unwrap()[..first].fill(0.0);
    }
    let tokens = [Shard(TOKENS), Shard(TOKENS)];
    for (axes, keys) in [([1, 1], tokens), ([2, 2], tokens), ([2, 2], [Replicate; 2])] {
        let found = on_ranks(&inputs, axes, tokens, keys, |mesh, device| {
            let hidden = Tensor::<2, Bool>::from_data(hidden.clone(), device).inner();
            let of_keys = keys.map(|placement| match placement {
                Shard(_) => Shard(1),
                other => other,
            });
            let hidden = ShardTensor::distribute(hidden, mesh, &of_keys)?;
            Ok(AttentionOptions::default().with_key_padding(hidden))
        });
        for found in found {
            compare(&found, &expected, 1e-5, &format!("{axes:?} {keys:?}"));
        }
    }
}

/// Queries that are sharded, and replicated.
#[test]
fn a_learned_bias_gathers_no_keys() {
    for queries in [Shard(TOKENS), Replicate] {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let tokens = |placement| ShardTensor::<4>::ones([2, 6, 2, 4], &mesh, &[placement]);
            let bias = Tensor::<4>::ones([1, 6, 2, 6], world.device()).require_grad();
            let options = AttentionOptions::default().with_bias(bias);
            let keys = || tokens(Shard(TOKENS));
            let before = world.comm_stats();
            let (q, k, v) = (tokens(queries)?, keys()?, keys()?);
            let refused = scaled_dot_product_attention(q, k, v, &options);
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("a learned bias with keys"), "{error}");
            assert!(error.contains("to [Replicate]"), "{error}");
            assert_eq!(world.comm_stats(), before);
            let keys = || keys().map(|tokens| tokens.redistribute(&[Replicate]));
            scaled_dot_product_attention(tokens(queries)?, keys()?, keys()?, &options).map(drop)
        });
        run.unwrap();
    }
}

#[test]
fn a_bias_that_lies_otherwise_is_refused() {
    let refused = |placement: Placement, shape: [usize; 4]| {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let tokens = || ShardTensor::<4>::ones([2, 6, 2, 4], &mesh, &[Shard(TOKENS)]);
            let bias = ShardTensor::<4>::ones(shape, &mesh, &[placement])?.inner();
            let options = AttentionOptions::default().with_bias(bias);
            scaled_dot_product_attention(tokens()?, tokens()?, tokens()?, &options).map(drop)
        });
        refused.unwrap_err().to_string()
    };
    for placement in [Replicate, Shard(WIDTH), Shard(BATCH)] {
        let error = refused(placement, [2, 6, 2, 6]);
        assert!(error.contains("give a plain tensor"), "{error}");
    }
    let error = refused(Shard(TOKENS), [2, 6, 2, 5]);
    assert!(
        error.contains("[2, 6, 2, 5]") && error.contains("6 keys"),
        "{error}"
    );
}
