//! Training of the demo model on a small field, for tests on all engines.

use burn::optim::{AdamWConfig, GradientsParams};
use halocline::core::CommStats;
use halocline::models::{SurrogateCnn, SurrogateCnnConfig, weighted_mse};
use halocline::prelude::*;

/// [batch, variables, lat, lon], with odd sizes.
pub(crate) const SHAPE: [usize; 4] = [2, 3, 13, 18];

pub(crate) fn sample<const D: usize>(
    name: &str,
    shape: [usize; D],
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<ShardTensor<D>> {
    let normal = Distribution::Normal(0.0, 1.0);
    ShardTensor::random(shape, normal, RandomKey::new(3, name), mesh, placements)
}

/// Trains the demo model and returns the loss of every step, and the traffic of rank 0 in the last
/// one.
pub(crate) fn train(
    world: &World,
    mesh: &DeviceMesh,
    placements: &[Placement],
    steps: usize,
) -> Result<(Vec<f64>, CommStats)> {
    let config = SurrogateCnnConfig::new(3).with_width(8).with_blocks(2);
    let mut model: SurrogateCnn = world.init(|device| config.init(device))?;
    let mut optimizer = AdamWConfig::new().init();
    let x = sample("x", SHAPE, mesh, placements)?;
    let target = sample("target", SHAPE, mesh, placements)?;
    let weights = vec![1.0; SHAPE[2]];
    let mut losses = Vec::new();
    let mut sent = world.comm_stats();
    for _ in 0..steps {
        let before = world.comm_stats();
        let loss = weighted_mse(x.clone().apply(&model), target.clone(), &weights)?.resolve();
        losses.push(loss.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
        sent = world.comm_stats().since(&before);
    }
    world.check_replicas(&model)?;
    Ok((losses, sent))
}
