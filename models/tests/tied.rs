//! A table that is used twice: as an embedding, and for the logits.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Int, Tensor};
use halocline_core::{Launcher, Placement, PlanPlacement, Replicate, Shard, ShardTensor};
use halocline_ops::prelude::*;
use halocline_ops::{CrossEntropyOptions, EmbeddingField, Reduction, cross_entropy};

use halocline_models::parallel::{Plan, Store, Style, init_parallel};

#[derive(Module, Debug)]
struct Tied {
    table: Embedding,
    hidden: Linear,
}

/// Losses of training, with the table over a tensor axis and samples over a data axis.
fn losses(data: usize, tensor: usize, plan: &Plan) -> Vec<f64> {
    let found = Launcher::local(data * tensor).seed(5).collect(|world| {
        let mesh = world.mesh([("data", data), ("tensor", tensor)])?;
        let mut model = init_parallel(&world, &mesh, plan, |device| Tied {
            table: EmbeddingConfig::new(11, 6).init(device),
            hidden: LinearConfig::new(6, 6).init(device),
        })?;
        let mut optimizer = AdamWConfig::new().init();
        let samples: [Placement; 2] = [Shard(0), Replicate];
        let words = Tensor::<2, Int>::from_data([[1, 10, 3], [0, 7, 7], [9, 2, 4]], world.device());
        let words = ShardTensor::distribute(words, &mesh, &samples)?;
        let mut losses = Vec::new();
        for _ in 0..5 {
            let x: ShardTensor<3> = words.clone().apply(&model.table);
            let x = x.apply(&model.hidden).tanh();
            let logits = x.apply_unembedding(&model.table).permute([0, 2, 1]);
            let options = CrossEntropyOptions::default();
            let loss = cross_entropy(logits, words.clone(), &options, Reduction::Mean)?;
            losses.push(loss.clone().into_scalar::<f64>());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(3e-2, model, gradients);
        }
        Ok(losses)
    });
    found.unwrap().remove(0)
}

#[test]
fn one_table_is_used_twice_in_one_layout() {
    let expected = losses(1, 1, &Plan::default());
    assert!(expected[4] < 0.9 * expected[0], "{expected:?}");
    let rows = Plan::default().with_layer("table", Style::rowwise("tensor"));
    let columns = Style::colwise("tensor").with_output(PlanPlacement::Replicate);
    let columns = Plan::default().with_layer("table", columns);
    let stored = |plan: &Plan| plan.clone().with_store(Store::new("**", "data"));
    for (data, tensor, plan) in [
        (1, 3, rows.clone()),
        (1, 4, columns.clone()),
        (2, 2, stored(&rows)),
        (2, 2, stored(&columns)),
        (3, 1, stored(&Plan::default())),
    ] {
        for (found, expected) in losses(data, tensor, &plan).iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{data} × {tensor}, {plan:?}: {found} for {expected}"
            );
        }
    }
}
