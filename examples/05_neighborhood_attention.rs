//! A block of neighborhood attention on a field: queries attend to the keys around them, across the edges of shards.
//!
//! `cargo run --example 05_neighborhood_attention -- 4`

use burn::nn::{Linear, LinearConfig};
use halocline::core::Traffic;
use halocline::ops::prelude::*;
use halocline::prelude::*;

/// Attention of `[batch, latitude, longitude, channels]` within 5 × 7 cells, periodic in longitude.
fn block<X: Field<4>>(x: X, into_qkv: &Linear, out: &Linear) -> X {
    const HEADS: usize = 2;
    let [batch, height, width, channels] = x.global_dims();
    let heads = |first: usize| {
        let weight = into_qkv.weight.val().narrow(1, first * channels, channels);
        let part = x.clone().linear(weight, None);
        part.try_op::<5>(|part| split(part, [batch, height, width, HEADS, channels / HEADS]))
            .expect("channels are whole")
    };
    let options = NeighborhoodOptions::new([5, 7]).with_periodic([false, true]);
    let y = heads(0).neighborhood_attention(heads(1), heads(2), &options);
    let y = y
        .try_op::<4>(|y| split(y, [batch, height, width, channels]))
        .expect("heads are whole");
    x + y.linear(&out.weight, None)
}

/// The same cells with channels as heads and their widths, or the other way round.
fn split<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    shape: [usize; E],
) -> Result<ShardTensor<E>> {
    let (local, layout, mesh) = x.into_parts();
    let mut extents = layout.all_extents()[..3].to_vec();
    extents.extend(shape[3..].iter().map(|&size| vec![size]));
    let layout = layout.derive(layout.placements().to_vec(), extents);
    let local = local.reshape(burn::tensor::Shape::from(
        layout.local_shape(mesh.position()),
    ));
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

fn main() -> Result<()> {
    let ranks = std::env::args()
        .nth(1)
        .map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    Launcher::from_env().ranks(ranks).run(|world| {
        let mesh = world.mesh([("lat", world.size())])?;
        let config = |features| LinearConfig::new(8, features).with_bias(false);
        let into_qkv = world.init(|device| config(24).init(device))?;
        let out = world.init(|device| config(8).init(device))?;
        let normal = Distribution::Normal {
            mean: 0.0,
            std: 1.0,
        };
        let key = || RandomKey::new(0, "x");
        let x = ShardTensor::<4>::random([1, 17, 24, 8], normal, key(), &mesh, &[Shard(1)])?;
        let x = x.require_grad();

        let before = world.comm_stats();
        let y = block(x.clone(), &into_qkv, &out);
        let sent = world.comm_stats().since(&before).of(Traffic::Exchange);
        let gradients = (y.clone() * y.clone()).sum().backward();
        let gradient = x.grad(&gradients).expect("a gradient");

        // Check: the result and the gradients of one device.
        let whole = x
            .full_tensor(LocalGradient::Replicated)
            .detach()
            .require_grad();
        let expected = block(whole.clone(), &into_qkv, &out);
        let expected_gradients = (expected.clone() * expected.clone()).sum().backward();
        let off = |found: Tensor<4>, expected: Tensor<4>| {
            (found - expected).abs().max().into_scalar::<f32>()
        };
        let found = y.full_tensor(LocalGradient::Replicated).inner();
        assert!(off(found, expected.inner()) < 1e-4);
        let expected = whole.grad(&expected_gradients).expect("a gradient");
        assert!(off(gradient.full_tensor(LocalGradient::Replicated), expected) < 1e-3);
        if world.is_root() {
            println!("rank 0 sent {} bytes of keys and values", sent.bytes);
        }
        Ok(())
    })
}
