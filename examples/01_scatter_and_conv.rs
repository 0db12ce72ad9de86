//! A convolution and a training gradient on a field sharded over several ranks.
//!
//! `cargo run --example 01_scatter_and_conv -- 4`, or `mpirun -n 4 …` with the feature `mpi`.
//! Without the launcher, the mesh, the scatter and the printed plan it is the single-device program;
//! there `world.init` is `config.init`, and `resolve` returns its input.

use burn::nn::PaddingConfig2d;
use burn::nn::conv::Conv2dConfig;
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

        let bias = conv.bias.as_ref().expect("the layer has a bias");
        check_against_one_device(
            &world,
            &conv,
            &conv.weight.grad(&gradients),
            &bias.grad(&gradients),
        );
        Ok(())
    })
}

/// The same on one device, without Halocline.
fn check_against_one_device(
    world: &World,
    conv: &burn::nn::conv::Conv2d,
    weight: &Option<Tensor<4>>,
    bias: &Option<Tensor<1>>,
) {
    let x = Tensor::<4>::ones([1, 3, 45, 90], world.device());
    let y = burn::tensor::activation::gelu(conv.forward(x));
    let gradients = (y.clone() * y).mean().backward();
    let close = |found: TensorData, expected: TensorData| {
        let tolerance = burn::tensor::Tolerance::<f32>::relative(1e-3).set_absolute(1e-5);
        found.assert_approx_eq(&expected, tolerance);
    };
    let expected = conv.weight.grad(&gradients).expect("a gradient");
    close(
        weight.clone().expect("a gradient").into_data(),
        expected.into_data(),
    );
    let conv_bias = conv.bias.as_ref().expect("the layer has a bias");
    let expected = conv_bias.grad(&gradients).expect("a gradient");
    close(
        bias.clone().expect("a gradient").into_data(),
        expected.into_data(),
    );
    if world.is_root() {
        println!("gradients are those of one device");
    }
}
