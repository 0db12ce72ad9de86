//! Fourier neural operators, on the plane and on the sphere: shards compared with one device,
//! training, and PyTorch's results.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Gradients;
use halocline::models::{Fno, FnoConfig, Sfno, SfnoConfig};
use halocline::ops::testing::compare;
use halocline::prelude::*;

/// [batch, variables, lat, lon], with odd sizes.
const SHAPE: [usize; 4] = [2, 3, 13, 18];

fn sample(name: &str, mesh: &DeviceMesh, placements: &[Placement]) -> Result<ShardTensor<4>> {
    let normal = Distribution::Normal(0.0, 1.0);
    ShardTensor::random(SHAPE, normal, RandomKey::new(3, name), mesh, placements)
}

type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);

const MESHES: [Mesh; 6] = [
    (&[("lat", 2)], &[Shard(2)]),
    (&[("lon", 3)], &[Shard(3)]),
    (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)]),
    (&[("data", 2), ("lon", 2)], &[Shard(0), Shard(3)]),
    (&[("lat", 2), ("more", 2)], &[Shard(2), Shard(2)]),
    (&[("data", 2), ("x", 2)], &[Replicate, Shard(2)]),
];

fn fno(device: &Device) -> Fno {
    let config = FnoConfig::new(3, 3, [6, 4]).with_width(6);
    config.with_blocks(2).with_projection(10).init(device)
}

fn sfno(device: &Device) -> Sfno {
    let sht = Sht::new([SHAPE[2], SHAPE[3]], SphereGrid::Equiangular).expect("a grid");
    SfnoConfig::new(3, 3)
        .with_width(6)
        .with_blocks(2)
        .init(&sht, device)
}

/// Returns the gradients of all parameters.
struct Found<'a>(&'a Gradients, Vec<TensorData>);

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        let gradient = parameter.val().grad(self.0).expect("a gradient");
        self.1.push(gradient.into_data());
    }
}

/// Returns the forecast, and the gradients of the input and of all parameters.
fn results<M: Layer<ShardTensor<4>, Output = ShardTensor<4>> + Module + 'static>(
    init: fn(&Device) -> M,
    (axes, placements): Mesh,
) -> Vec<Vec<TensorData>> {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let found = Launcher::local(ranks).collect(|world| {
        let mesh = world.mesh_of(axes)?;
        let model = world.init(init)?;
        let x = sample("x", &mesh, placements)?.require_grad();
        let y = x.clone().apply(&model);
        assert_eq!(y.layout(), x.layout());
        let gradients = (y.clone() * sample("y", &mesh, placements)?)
            .sum()
            .backward();
        let of_x = x.grad(&gradients).expect("a gradient");
        let [y, of_x] = [y, of_x].map(|x| x.full_tensor().into_data());
        let mut found = Found(&gradients, vec![y, of_x]);
        model.visit(&mut found);
        Ok(found.1)
    });
    found.unwrap()
}

fn check<M: Layer<ShardTensor<4>, Output = ShardTensor<4>> + Module + 'static>(
    init: fn(&Device) -> M,
) {
    let expected = results(init, (&[("lat", 1)], &[Shard(2)])).remove(0);
    for mesh in MESHES {
        for found in results(init, mesh) {
            compare(&found, &expected, 2e-5, &format!("{mesh:?}"));
        }
    }
}

#[test]
fn a_forecast_of_modes_on_shards_is_that_of_one_device() {
    check(fno);
}

#[test]
fn a_forecast_of_harmonics_on_shards_is_that_of_one_device() {
    check(sfno);
}

#[test]
fn training_has_the_same_losses_on_every_mesh() {
    let run = |(axes, placements): Mesh| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let losses = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let mut model: Fno = world.init(fno)?;
            let mut optimizer = AdamWConfig::new().init();
            let x = sample("x", &mesh, placements)?;
            let target = sample("target", &mesh, placements)?;
            let mut losses = Vec::new();
            for _ in 0..20 {
                let y = x.clone().apply(&model);
                let (target, mean) = (target.clone(), Reduction::Mean);
                let spectrum = spectral_loss::<5, _, _>(y.clone(), target.clone(), &[3], mean)?;
                let error = mse_loss(y, target, mean)?;
                let loss = error.resolve() + spectrum.resolve() * 0.1;
                losses.push(loss.clone().into_scalar::<f64>());
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(1e-2, model, gradients);
            }
            world.check_replicas(&model)?;
            Ok(losses)
        });
        losses.unwrap()
    };
    let one = run((&[("lat", 1)], &[Shard(2)])).remove(0);
    assert!(
        one[19] < 0.9 * one[0],
        "training must get somewhere: {one:?}"
    );
    for mesh in MESHES {
        for losses in run(mesh) {
            for (step, (found, expected)) in losses.iter().zip(&one).enumerate() {
                let off = (found - expected).abs() / expected;
                assert!(off < 1e-4, "{mesh:?}: step {step}: {found} and {expected}");
            }
        }
    }
}

/// Fills each parameter with a wave of its own number.
struct Waves(usize);

impl ModuleMapper for Waves {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let number = self.0;
        parameter.map(|value| wave(value.dims(), number, &value.device()))
    }
}

/// Returns `0.4 sin(0.7 i + number)` for each index `i`.
fn wave<const D: usize>(shape: [usize; D], number: usize, device: &Device) -> Tensor<D> {
    let cells = shape.iter().product();
    let values: Vec<f32> = (0..cells)
        .map(|i| (0.4 * (0.7 * i as f64 + number as f64).sin()) as f32)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Results of `fno.py`, next to this file.
#[test]
fn a_forecast_is_that_of_pytorch() {
    let config = FnoConfig::new(2, 2, [4, 3])
        .with_width(3)
        .with_blocks(2)
        .with_projection(5);
    let expected = [-0.1617051, -0.162804, 0.0410002, 0.0402924];
    // On a rank, so that no other test draws parameters at the same time.
    let checked = Launcher::local(1).run(|world| {
        let model: Fno = world.init(|device| config.init(device))?;
        let x = wave([1, 2, 5, 6], 0, world.device());
        let y = x.apply(&model.map(&mut Waves(0)));
        let cells: Vec<f32> = y.into_data().iter().collect();
        let found = [cells[0], cells[7], cells[31], cells[59]];
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
        Ok(())
    });
    checked.unwrap();
}
