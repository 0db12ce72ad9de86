//! A block of neighborhood attention on a field: queries attend to the keys around them, across the
//! edges of shards.
//!
//! `cargo run --example 05_neighborhood_attention -- 4`

use halocline::core::Traffic;
use halocline::models::{NeighborhoodAttention2d, NeighborhoodAttention2dConfig};
use halocline::prelude::*;

/// Residual block of attention between the cells of `[batch, latitude, longitude, channels]`.
fn block<X: Field<4>>(x: X, attention: &NeighborhoodAttention2d) -> X {
    x.clone() + attention.forward(x.layer_norm(None, None, 1e-5))
}

fn main() -> Result<()> {
    let ranks = std::env::args()
        .nth(1)
        .map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    Launcher::from_env().ranks(ranks).run(|world| {
        let mesh = world.mesh([("lat", world.size())])?;
        let config = NeighborhoodAttention2dConfig::new(8, 2, [5, 7]);
        let config = config.with_periodic([false, true]);
        let attention = world.init(|device| config.init(device))?;
        let normal = Distribution::Normal(0.0, 1.0);
        let key = || RandomKey::new(0, "x");
        let x = ShardTensor::<4>::random([1, 17, 24, 8], normal, key(), &mesh, &[Shard(1)])?;
        let x = x.require_grad();

        let before = world.comm_stats();
        let y = block(x.clone(), &attention);
        let sent = world.comm_stats().since(&before).of(Traffic::Exchange);
        let gradients = (y.clone() * y.clone()).sum().backward();
        let gradient = x.grad(&gradients).expect("a gradient");

        // Check: the same result and gradients as on one device.
        let whole = x.full_tensor().detach().require_grad();
        let expected = block(whole.clone(), &attention);
        let expected_gradients = (expected.clone() * expected.clone()).sum().backward();
        let off = |found: Tensor<4>, expected: Tensor<4>| {
            (found - expected).abs().max().into_scalar::<f32>()
        };
        let found = y.full_tensor().inner();
        assert!(off(found, expected.inner()) < 1e-4);
        let expected = whole.grad(&expected_gradients).expect("a gradient");
        assert!(off(gradient.full_tensor(), expected) < 1e-3);
        if world.is_root() {
            println!("rank 0 sent {} bytes of keys and values", sent.bytes);
        }
        Ok(())
    })
}
