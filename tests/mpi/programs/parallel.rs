//! Models whose parameters are sharded.

use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::TensorData;
use halocline::models::parallel::{Plan, Store, Style, parallelize_module};
use halocline_core::{Along, Distribution, Error, RandomKey, Result, Shard, ShardTensor, World};
use halocline_ops::loss_value;
use halocline_ops::prelude::*;

use super::Found;

/// A transformer, trained with heads and tokens over one axis and storage over another: the losses, and this rank's shard of
/// a parameter.
pub(super) fn parallel(world: World) -> Result<Found> {
    let mesh = world.mesh([("data", 2), ("tensor", world.size() / 2)])?;
    let layer = |name: &str| format!("layers.*.{name}");
    let rows = || Style::rowwise("tensor").with_output(Along::Shard(1));
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
    let normal = Distribution::Normal {
        mean: 0.0,
        std: 1.0,
    };
    let key = RandomKey::new(0, "x");
    let x = ShardTensor::<3>::random([4, 7, 6], normal, key, &mesh, &[Shard(0), Shard(1)])?;
    let mut losses = Vec::new();
    for _ in 0..10 {
        let y = x.clone().apply(&model);
        let loss = mse_loss(y, x.clone() * 0.5, Reduction::Mean);
        losses.push(loss_value(&loss));
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
