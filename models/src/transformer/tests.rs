use burn::module::Param;
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::{Launcher, Placement, Shard, ShardTensor, Traffic};
use halocline_ops::testing::{compare, random};

use super::*;

/// Makes a model whose modulations have an effect: new ones close the gate of every block, and let
/// no gradient through.
fn modulated(mut model: FieldTransformer) -> FieldTransformer {
    let modulations = model
        .blocks
        .iter_mut()
        .flat_map(|block| &mut block.modulations);
    for (index, modulation) in modulations.enumerate() {
        let shape = modulation.linear.weight.dims();
        let weight = random::<2>(shape, "modulation", index);
        modulation.linear.weight = Param::from_tensor(weight);
    }
    model
}

/// Returns the forecast and the gradients of the input and of some parameters, for a model with
/// every option enabled.
fn run(
    ranks: [usize; 2],
    placements: [Placement; 2],
    config: &FieldTransformerConfig,
) -> Vec<Vec<TensorData>> {
    let found = Launcher::local(ranks[0] * ranks[1])
        .seed(3)
        .collect(|world| {
            let mesh = world.mesh([("a", ranks[0]), ("b", ranks[1])])?;
            let model = modulated(world.init(|device| config.init(device))?);
            let embedding =
                world.init(|device| ConditionEmbeddingConfig::new(1, 6).init(device))?;
            let shard = |name| {
                let whole = random::<4>([2, 4, 13, 22], name, 0).inner();
                ShardTensor::distribute(whole, &mesh, &placements)
            };
            let x = shard("x")?.require_grad();
            let y = if config.condition > 0 {
                let hours = Tensor::<2>::from_floats([[6.0], [12.0]], world.device());
                // Sharded like the samples of the cells.
                let of_batch = |placement: &Placement| match placement {
                    Shard(0) => Shard(0),
                    _ => halocline_core::Replicate,
                };
                let of_batch: Vec<Placement> = placements.iter().map(of_batch).collect();
                let hours = ShardTensor::distribute(hours, &mesh, &of_batch)?;
                model.forward_conditioned(x.clone(), hours.apply(&embedding))
            } else {
                x.clone().apply(&model)
            };
            let weights = shard("weights")?.narrow(1, 0, y.dims()[1]);
            let gradients = (y.clone() * weights).sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            let mut found = vec![
                y.full_tensor().into_data(),
                gradient.full_tensor().into_data(),
            ];
            if config.condition > 0 {
                let of_condition = embedding.first.weight.val().grad(&gradients);
                found.push(of_condition.expect("a gradient").into_data());
            }
            // The first block attends to all patches.
            for block in &model.blocks {
                let mut parameters =
                    vec![&block.attention.query_key_value.weight, &block.inner.weight];
                let modulations = block.modulations.iter();
                parameters.extend(modulations.map(|modulation| &modulation.linear.weight));
                for parameter in parameters {
                    let gradient = parameter.val().grad(&gradients).expect("a gradient");
                    found.push(gradient.into_data());
                }
                for tokens in &block.attention.tokens {
                    let gradient = tokens.val().grad(&gradients).expect("a gradient");
                    found.push(gradient.into_data());
                }
            }
            Ok(found)
        });
    found.unwrap()
}

fn config() -> FieldTransformerConfig {
    FieldTransformerConfig::new(2)
        .with_history(2)
        .with_d_model(16)
        .with_heads(2)
        .with_blocks(2)
        .with_dense_blocks(1)
        .with_tokens(2)
        .with_patch([2, 3])
        .with_kernel([3, 4])
}

#[test]
fn a_forecast_on_shards_is_that_of_one_device() {
    for config in [config(), config().with_condition(6).with_diagnostics(1)] {
        let expected = run([1, 1], [Shard(2), Shard(3)], &config).remove(0);
        for (ranks, placements) in [
            ([2, 1], [Shard(2), Shard(3)]),
            ([1, 3], [Shard(2), Shard(3)]),
            ([2, 2], [Shard(3), Shard(2)]),
            ([2, 2], [Shard(0), Shard(2)]),
        ] {
            let not_zero = |data: &TensorData| data.iter::<f32>().any(|number| number != 0.0);
            assert!(expected.iter().all(not_zero), "a gradient of zeros");
            for found in run(ranks, placements, &config) {
                compare(
                    &found,
                    &expected,
                    5e-5,
                    &format!("{ranks:?} {placements:?}"),
                );
            }
        }
    }
}

/// Everything except the gradient of a condition, which is a sum over blocks and is added in
/// another order.
#[test]
fn blocks_computed_again_have_the_same_bits() {
    for config in [config(), config().with_condition(6)] {
        for ranks in [[1, 1], [2, 2]] {
            let placements = [Shard(2), Shard(3)];
            let kept = run(ranks, placements, &config);
            let again = run(ranks, placements, &config.clone().with_recompute(true));
            for (kept, again) in kept.iter().zip(&again) {
                let of_condition = |index: usize| config.condition > 0 && index == 2;
                for (index, (kept, again)) in kept.iter().zip(again).enumerate() {
                    if of_condition(index) {
                        let [again, kept] = [again, kept].map(std::slice::from_ref);
                        compare(again, kept, 1e-5, "the condition");
                    } else {
                        again.assert_eq(kept, true);
                    }
                }
            }
        }
    }
}

/// Returns the bytes that a model's forward pass plans to send, those that it sends, and those sent
/// in total with the backward pass, except by backward operators.
fn traffic(config: &FieldTransformerConfig) -> Vec<[u64; 3]> {
    let found = Launcher::local(3).check(false).collect(|world| {
        let mesh = world.mesh([("lat", 3)])?;
        let model = world.init(|device| config.init(device))?;
        let x = random::<4>([1, 4, 13, 22], "x", 0).inner();
        let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
        let before = world.comm_stats();
        let plan = x.plan_of(&model)?;
        assert_eq!(world.comm_stats(), before, "nothing is sent");
        let sent = || {
            let sent = world.comm_stats().since(&before);
            let bytes = Traffic::ALL
                .map(|traffic| sent.of(traffic).bytes - sent.of_backward(traffic).bytes);
            bytes.iter().sum::<u64>()
        };
        let y = x.clone().apply(&model);
        let forward = sent();
        // Avoids a sum over ranks.
        y.into_local().sum().backward();
        Ok([plan.bytes_sent() as u64, forward, sent()])
    });
    found.unwrap()
}

/// Blocks of neighborhood attention keep their halos; dense ones do not keep what the ring
/// delivers, and receive it again.
#[test]
fn a_plan_lists_what_is_sent_and_dense_blocks_send_again() {
    let near = config().with_dense_blocks(0).with_tokens(0);
    let dense = config().with_blocks(1).with_tokens(0);
    for config in [config(), near.clone(), dense.clone()] {
        for [planned, forward, in_all] in traffic(&config) {
            assert_eq!(planned, forward);
            assert_eq!(in_all, forward, "without recomputation");
        }
    }
    for [_, forward, in_all] in traffic(&near.with_recompute(true)) {
        assert_eq!(in_all, forward, "halos are kept");
    }
    let patches: [u64; 3] = [3 * 8, 2 * 8, 2 * 8]; // of 2 × 3 cells
    let again = traffic(&dense.with_recompute(true)).into_iter();
    for (rank, [_, forward, in_all]) in again.enumerate() {
        // A rank's own block, and that of the rank before: keys and values of 16 channels.
        let others = patches[rank] + patches[(rank + 2) % 3];
        assert_eq!(in_all - forward, others * 2 * 16 * 4, "rank {rank}");
    }
}

/// Sizes named in the documentation of the configuration, 1 M and 1 B.
#[test]
fn parameters_are_as_many_as_documented() {
    let sized = |d_model, blocks| {
        let config = FieldTransformerConfig::new(3).with_d_model(d_model);
        config.with_blocks(blocks)
    };
    for config in [
        sized(128, 5),
        sized(32, 3)
            .with_history(2)
            .with_constants(1)
            .with_diagnostics(1)
            .with_patch([2, 3]),
        config(),
        config().with_condition(6).with_expansion(3),
    ] {
        let model = config.init(&Default::default());
        assert_eq!(config.num_params(), model.num_params(), "{config}");
    }
    for (config, documented) in [(sized(128, 5), 1e6), (sized(1536, 36), 1e9)] {
        let found = config.num_params() as f64;
        assert!((found / documented - 1.0).abs() < 0.05, "{found}");
    }
}

#[test]
fn positions_are_those_of_the_whole_field() {
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", ranks)])?;
            let learned = LearnedPosition2dConfig::new([5, 6], 8);
            let learned = world.init(|device| learned.init(device))?;
            let sphere = world.init(|device| SphericalPositionConfig::new(8).init(device))?;
            let x = random::<4>([2, 5, 6, 8], "x", 0).inner();
            let x = ShardTensor::distribute(x, &mesh, &[Shard(1)])?.require_grad();
            let y = x
                .clone()
                .apply(&learned)
                .apply(&SinusoidalPosition2d { base: 50.0 });
            let y = y.apply(&sphere);
            let gradients = (y.clone() * y.clone()).sum().backward();
            Ok([
                y.full_tensor().into_data(),
                learned
                    .vectors
                    .val()
                    .grad(&gradients)
                    .expect("a gradient")
                    .into_data(),
                sphere
                    .by_latitude
                    .val()
                    .grad(&gradients)
                    .expect("a gradient")
                    .into_data(),
            ])
        });
        found.unwrap()
    };
    let expected = run(1).remove(0);
    for ranks in [2, 3] {
        for found in run(ranks) {
            compare(&found, &expected, 1e-5, &format!("{ranks} ranks"));
        }
    }
}

/// Options of layers in one and three dims, on shards of several dims.
#[test]
fn layers_of_one_and_three_dims_may_be_sharded() {
    fn check<const D: usize, M>(
        shape: [usize; D],
        placements: [Placement; 2],
        make: impl Fn(&Device) -> M + Send + Sync,
    ) where
        M: Module + Layer<ShardTensor<D>, Output = ShardTensor<D>>,
    {
        let run = |ranks: [usize; 2]| {
            let found = Launcher::local(ranks[0] * ranks[1])
                .seed(5)
                .collect(|world| {
                    let mesh = world.mesh([("a", ranks[0]), ("b", ranks[1])])?;
                    let layer = world.init(&make)?;
                    let x = random::<D>(shape, "x", 0).inner();
                    let x = ShardTensor::distribute(x, &mesh, &placements)?.require_grad();
                    let y = x.clone().apply(&layer);
                    let gradients = (y.clone() * y.clone()).sum().backward();
                    let gradient = x.grad(&gradients).expect("a gradient");
                    let whole = [y, gradient].map(|x| x.full_tensor().into_data());
                    Ok(whole.to_vec())
                });
            found.unwrap()
        };
        let expected = run([1, 1]).remove(0);
        for ranks in [[2, 1], [1, 3], [2, 2]] {
            for found in run(ranks) {
                compare(&found, &expected, 1e-5, &format!("{shape:?} on {ranks:?}"));
            }
        }
    }
    check([2, 23, 8], [Shard(0), Shard(1)], |device| {
        let config = NeighborhoodAttention1dConfig::new(8, 4, [3]).with_key_heads(Some(2));
        let config = config.with_dilation([2]).with_causal([true]);
        config.with_tokens(2).init(device)
    });
    check([1, 5, 6, 7, 24], [Shard(1), Shard(3)], |device| {
        let config = NeighborhoodAttention3dConfig::new(24, 2, [3, 2, 4]).with_stride([2, 1, 3]);
        let config = config.with_periodic([false, true, false]);
        config.with_rotary(Some(20.0)).init(device)
    });
}

/// Angles of a periodic dim fit its length, so that a shifted field has shifted results.
#[test]
fn rotary_attention_of_a_periodic_field_shifts_with_it() {
    let x = random::<3>([1, 12, 8], "x", 0).inner();
    for key_heads in [2, 1] {
        let config = NeighborhoodAttention1dConfig::new(8, 2, [5]).with_periodic([true]);
        let config = config.with_key_heads(Some(key_heads));
        let attention = config.with_rotary(Some(20.0)).init(&Default::default());
        let y = x.clone().apply(&attention);
        let shifted = RearrangeField::roll(x.clone(), &[5], &[1]).apply(&attention);
        let back = RearrangeField::roll(shifted, &[-5], &[1]);
        let place = format!("{key_heads} heads of keys, shifted");
        compare(&[back.into_data()], &[y.into_data()], 1e-5, &place);
    }
}
