//! Models with sharded parameters, and attention.

use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Bool, Tensor, TensorData};
use halocline::models::FieldTransformerConfig;
use halocline::models::parallel::{Plan, Store, Style, parallelize_module};
use halocline_core::{
    Distribution, Error, PlanPlacement, RandomKey, Result, Shard, ShardTensor, World,
};
use halocline_ops::prelude::*;

use super::Found;

/// Trains a transformer with heads and tokens over one axis and storage over another. Returns the
/// losses, and this rank's shard of a parameter.
pub(super) fn parallel(world: World) -> Result<Found> {
    let mesh = world.mesh([("data", 2), ("tensor", world.size() / 2)])?;
    let layer = |name: &str| format!("layers.*.{name}");
    let rows = || Style::rowwise("tensor").with_output(PlanPlacement::Shard(1));
    let plan = Plan::default()
        .with_layer(
            &layer("mha.{query,key,value}"),
            Style::colwise("tensor").with_unit(2),
        )
        .with_layer(&layer("mha.output"), rows().with_unit(2))
        .with_layer(&layer("pwff.linear_inner"), Style::colwise("tensor"))
        .with_layer(&layer("pwff.linear_outer"), rows())
        .with_layer(&layer("norm_*"), Style::sequence_parallel("tensor"))
        .with_store(Store::new("**", "data").with_at_least(20));
    let config = TransformerEncoderConfig::new(6, 10, 3, 2).with_dropout(0.0);
    let model = world.init(|device| config.init(device))?;
    let mut model: TransformerEncoder = parallelize_module(model, &mesh, &plan)?;
    let mut optimizer = AdamWConfig::new().init();
    let normal = Distribution::Normal(0.0, 1.0);
    let key = RandomKey::new(0, "x");
    let x = ShardTensor::<3>::random([4, 7, 6], normal, key, &mesh, &[Shard(0), Shard(1)])?;
    let mut losses = Vec::new();
    for _ in 0..10 {
        let y = x.clone().apply(&model);
        let loss = mse_loss(y, x.clone() * 0.5, Reduction::Mean)?;
        losses.push(loss.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    world.check_replicas(&model)?;
    if losses[9] >= losses[0] {
        return Err(Error::other(format!("losses {losses:?}")));
    }
    let shard = model.layers[0].mha.query.weight.base().into_data();
    Ok(vec![TensorData::new(losses, [10]), shard])
}

/// Runs a model of neighborhood and dense attention with tokens and recomputed blocks, and ring
/// attention with key padding, a bias and dropout. Returns results, and the gradients of the
/// inputs.
pub(super) fn attention(world: World) -> Result<Found> {
    let mesh = world.mesh([("lat", world.size() / 2), ("lon", 2)])?;
    let normal = Distribution::Normal(0.0, 1.0);
    let config = FieldTransformerConfig::new(2)
        .with_d_model(16)
        .with_heads(2)
        .with_blocks(2)
        .with_dense_blocks(1)
        .with_tokens(2)
        .with_kernel([3, 4])
        .with_recompute(true);
    let model = world.init(|device| config.init(device))?;
    let key = RandomKey::new(0, "cells");
    let cells = [Shard(2), Shard(3)];
    let x = ShardTensor::<4>::random([1, 2, 26, 28], normal, key, &mesh, &cells)?.require_grad();
    let y = x.clone().apply(&model);
    let gradients = (y.clone() * y.clone()).sum().backward();
    let of_x = x.grad(&gradients).expect("a gradient");
    let mut found = vec![y.local().to_data(), of_x.into_local().into_data()];

    let tokens = [Shard(1), Shard(1)];
    let leaf = |name: &str, heads: usize| {
        let key = RandomKey::new(0, name);
        let x = ShardTensor::<4>::random([2, 23, heads, 6], normal, key, &mesh, &tokens);
        x.map(ShardTensor::require_grad)
    };
    let leaves = [leaf("q", 4)?, leaf("k", 2)?, leaf("v", 2)?];
    let hidden = (0..2 * 23).map(|key| key % 7 == 3).collect::<Vec<bool>>();
    let hidden = TensorData::new(hidden, [2, 23]);
    let hidden = Tensor::<2, Bool>::from_data(hidden, &world.device().clone().inner());
    let hidden = ShardTensor::distribute(hidden, &mesh, &tokens)?;
    let key = RandomKey::new(0, "bias");
    let bias = ShardTensor::random([1, 1, 4, 23], normal, key, &mesh, &[Shard(3), Shard(3)])?;
    let options = AttentionOptions::default()
        .with_causal(true)
        .with_key_padding(hidden)
        .with_bias(bias.inner())
        .with_dropout(0.2, RandomKey::new(0, "dropout"));
    let [q, k, v] = leaves.clone();
    let y = q.scaled_dot_product_attention(k, v, &options);
    let gradients = (y.clone() * y.clone()).sum().backward();
    found.push(y.local().to_data());
    found.extend(leaves.map(|leaf| {
        let gradient = leaf.grad(&gradients).expect("a gradient");
        gradient.into_local().into_data()
    }));
    Ok(found)
}
