//! A convolution and a training gradient on a field sharded over several ranks.
//!
//! `cargo run --example 01_scatter_and_conv -- 4`, or `mpirun -n 4 …` with the feature `mpi`.
//! Without the launcher, the mesh, the scatter and the printed plan it is the single-device program;
//! there `world.init` is `config.init`, and `resolve` returns its input.

use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Gradients, Tolerance};
use halocline::prelude::*;

fn main() -> Result<()> {
    let ranks = std::env::args()
        .nth(1)
        .map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    Launcher::from_env().ranks(ranks).run(|world| {
        let mesh = world.mesh([("lat", world.size())])?;
        let config = Conv2dConfig::new([3, 16], [3, 3]).with_padding(PaddingConfig2d::Same);
        let conv = world.init(|device| config.init(device))?; // equal on all ranks

        // Rank 0 holds the sample; every rank receives its shard and nothing else.
        let sample = world
            .is_root()
            .then(|| Tensor::<4>::ones([1, 3, 45, 90], world.device()));
        let x = scatter_tensor(sample, 0, &mesh, &[Shard(2)])?; // [batch, channels, lat, lon]
        println!("rank {}: {}", world.rank(), x.plan_of(&conv)?);

        let y = x.apply(&conv).gelu(); // halos are exchanged between neighbours
        let loss = (y.clone() * y).mean(); // Partial: nothing communicated yet
        let loss = loss.resolve(); // one all-reduce
        let gradients = loss.backward(); // parameter gradients are complete and equal everywhere

        check_against_one_device(&world, &conv, &gradients);
        Ok(())
    })
}

/// The same on one device, without Halocline.
fn check_against_one_device(world: &World, conv: &Conv2d, found: &Gradients) {
    let x = Tensor::<4>::ones([1, 3, 45, 90], world.device());
    let y = gelu(conv.forward(x));
    let expected = (y.clone() * y).mean().backward();
    let bias = conv.bias.as_ref().expect("the layer has a bias");
    let data = |gradients: &Gradients| {
        let weight = conv.weight.grad(gradients).expect("a gradient");
        let bias = bias.grad(gradients).expect("a gradient");
        [weight.into_data(), bias.into_data()]
    };
    for (found, expected) in data(found).iter().zip(&data(&expected)) {
        let tolerance = Tolerance::<f32>::relative(1e-3).set_absolute(1e-5);
        found.assert_approx_eq(expected, tolerance);
    }
    if world.is_root() {
        println!("gradients are those of one device");
    }
}
