//! Training of models with sharded parameters: checkpoints, optimizers, norms.

#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod trainer;

use std::path::Path;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{ModuleMapper, Param};
use burn::nn::{BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::grad_clipping::GradientClippingConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, GradientsParams, LambConfig,
    LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn::tensor::DType;
use halocline::core::{ParamShard, PlanPlacement};
use halocline::io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
use halocline::models::parallel::{Plan, Store, Style, parallelize_module};
use halocline::ops::testing::difference;
use halocline::ops::{Reduction, backward, mse_loss};
use halocline::prelude::*;
use halocline::{Ended, Trainer, check_optimizer, clip_grad_norm};
use trainer::sample;

const EPOCHS: usize = 2;
const BATCHES: usize = 4;
const NAMES: [&str; 6] = [
    "model.up.weight",
    "model.up.bias",
    "model.norm.gamma",
    "model.down.weight",
    "model.down.bias",
    "optimizer.up.weight.momentum.moment_2",
];

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
    norm: LayerNorm,
}

impl<X: Field<2>> Layer<X> for Mlp {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let hidden = x.apply(&self.up).tanh();
        let y = hidden.apply(&self.down);
        y.apply(&self.norm)
    }
}

fn mlp(world: &World) -> Result<Mlp> {
    world.init(|device| Mlp {
        up: LinearConfig::new(5, 7).init(device),
        down: LinearConfig::new(7, 6).init(device),
        norm: LayerNormConfig::new(6).init(device),
    })
}

fn plan() -> Plan {
    Plan::default()
        .with_layer("up", Style::colwise("tensor"))
        .with_layer("down", Style::rowwise("tensor"))
        .with_store(Store::new("**", "data"))
}

fn mesh(world: &World, [data, tensor]: [usize; 2]) -> Result<DeviceMesh> {
    world.mesh([("data", data), ("tensor", tensor)])
}

/// Trains, up to a step that fails. Returns the losses.
fn train(
    world: &World,
    sizes: [usize; 2],
    plan: &Plan,
    folder: &Path,
    fails_at: Option<u64>,
) -> Result<Vec<f64>> {
    let mesh = mesh(world, sizes)?;
    let model = parallelize_module(mlp(world)?, &mesh, plan)?;
    let schedule = ModuleLrScheduler::new(1e-2);
    let trainer = Trainer::new(world, model, AdamWConfig::new().init(), schedule);
    let mut trainer = (trainer.with_save_every(1))
        .with_gradient_hook(|model, gradients| Ok(clip_grad_norm(model, gradients, 0.1)?.0))
        .resume_or_start(folder)?;
    while trainer.epoch() < EPOCHS {
        let epoch = trainer.epoch();
        let mut step = trainer.step();
        let ended = trainer.train_epoch(
            |_, first| first..BATCHES,
            |model, batch| {
                if Some(step) == fails_at && world.rank() + 1 == world.size() {
                    return Err(Error::other("the power is off"));
                }
                step += 1;
                let placements = [Shard(0), Replicate];
                let x = sample(&format!("x {epoch} {batch}"), [9, 5], &mesh, &placements)?;
                let target = sample("target", [9, 6], &mesh, &placements)?;
                mse_loss(x.apply(model), target, Reduction::Mean)
            },
        )?;
        assert_eq!(ended, Ended::Completed);
    }
    trainer.finish()?;
    world.check_replicas(trainer.model())?;
    Ok(trainer.losses().to_vec())
}

fn run(sizes: [usize; 2], folder: &Path, fails_at: Option<u64>) -> Result<Vec<f64>> {
    run_by(&plan(), sizes, folder, fails_at)
}

fn run_by(
    plan: &Plan,
    sizes: [usize; 2],
    folder: &Path,
    fails_at: Option<u64>,
) -> Result<Vec<f64>> {
    let launcher = Launcher::local(sizes[0] * sizes[1]).seed(11);
    let mut results = launcher.collect(|world| train(&world, sizes, plan, folder, fails_at))?;
    Ok(results.remove(0))
}

/// Returns the whole tensors of the last checkpoint.
fn saved(folder: &Path) -> Vec<TensorData> {
    let found = Launcher::local(1).collect(|world| {
        let checkpoint = Checkpoint::latest(&world, folder)?.expect("one was saved");
        let data = NAMES.map(|name| checkpoint.data(name));
        Ok(data.into_iter().collect::<Result<Vec<_>, _>>()?)
    });
    found.unwrap().remove(0)
}

fn close(found: &[TensorData], expected: &[TensorData], place: &str) {
    for ((found, expected), name) in found.iter().zip(expected).zip(NAMES) {
        assert_eq!(found.shape(), expected.shape(), "{place}: {name}");
        let near = |(a, b): (f32, f32)| (a - b).abs() < 1e-5;
        let mut pairs = found.iter::<f32>().zip(expected.iter::<f32>());
        let far = pairs.position(|pair| !near(pair));
        assert_eq!(far, None, "{place}: cell of {name}");
    }
}

#[test]
fn a_run_goes_on_with_the_same_bits_and_on_other_meshes() {
    let folder = || tempfile::tempdir().unwrap();
    let whole = folder();
    let losses = run([2, 2], whole.path(), None).unwrap();
    let expected = saved(whole.path());
    assert_eq!(losses.len(), EPOCHS * BATCHES);
    for sizes in [[2, 2], [1, 1], [1, 3], [4, 1]] {
        let place = format!("{sizes:?}");
        let folder = folder();
        for step in [0, 3, 6] {
            let error = run([2, 2], folder.path(), Some(step)).unwrap_err();
            assert!(error.to_string().contains("the power is off"), "{error}");
        }
        let again = run(sizes, folder.path(), None).unwrap();
        let found = saved(folder.path());
        close(&found, &expected, &place);
        if sizes == [2, 2] {
            assert_eq!((again, found), (losses.clone(), expected.clone()));
        }
    }
    // With other plans, and from whole parameters to shards.
    let gathered = Style::colwise("tensor").with_output(PlanPlacement::Replicate);
    let columns = Plan::default().with_layer("{up,down}", gathered);
    let none = Plan::default();
    for (before, after) in [(&plan(), &columns), (&plan(), &none), (&none, &plan())] {
        let folder = folder();
        run_by(before, [2, 2], folder.path(), Some(3)).unwrap_err();
        run_by(after, [1, 2], folder.path(), None).unwrap();
        close(
            &saved(folder.path()),
            &expected,
            &format!("{before:?} then {after:?}"),
        );
    }
    // A run on one rank has the same numbers.
    let alone = folder();
    run([1, 1], alone.path(), None).unwrap();
    close(&saved(alone.path()), &expected, "alone");
}

#[test]
fn optimizers_that_need_whole_tensors_are_refused() {
    let found = Launcher::local(2).collect(|world| {
        let mesh = mesh(&world, [1, 2])?;
        let model = parallelize_module(mlp(&world)?, &mesh, &plan())?;
        let accepts = |optimizer: ModuleOptimizer| check_optimizer(&optimizer, &model).is_ok();
        let clipped =
            |clip: GradientClippingConfig| SgdConfig::new().init().with_grad_clipping(clip.init());
        let accepted = [
            accepts(AdamWConfig::new().init()),
            accepts(AdamConfig::new().init()),
            accepts(SgdConfig::new().init()),
            accepts(LionConfig::new().init()),
            accepts(RmsPropConfig::new().init()),
            accepts(AdaGradConfig::new().init()),
            accepts(clipped(GradientClippingConfig::Value(1.0))),
        ];
        let refused = [
            accepts(LambConfig::new().init()),
            accepts(MuonConfig::new().init()),
            accepts(AdafactorConfig::new().init()),
            accepts(clipped(GradientClippingConfig::Norm(1.0))),
            accepts(
                LionConfig::new()
                    .init()
                    .with_grad_clipping(GradientClippingConfig::Norm(1.0).init()),
            ),
        ];
        let whole = mlp(&world)?;
        assert!(check_optimizer(&MuonConfig::new().init(), &whole).is_ok());
        Ok((accepted, refused))
    });
    assert_eq!(found.unwrap()[0], ([true; 7], [false; 5]));
}

/// Returns the norm of gradients, and of the clipped gradients.
fn norms(sizes: [usize; 2]) -> [f64; 2] {
    let found = Launcher::local(sizes[0] * sizes[1])
        .seed(5)
        .collect(|world| {
            let mesh = mesh(&world, sizes)?;
            let model = parallelize_module(mlp(&world)?, &mesh, &plan())?;
            let placements = [Shard(0), Replicate];
            let x = sample("x", [9, 5], &mesh, &placements)?;
            let target = sample("target", [9, 6], &mesh, &placements)?;
            let loss = mse_loss(x.apply(&model), target, Reduction::Sum)?;
            let gradients = GradientsParams::from_grads(backward(loss), &model);
            let (gradients, norm) = clip_grad_norm(&model, gradients, 1.0)?;
            let (_, clipped) = clip_grad_norm(&model, gradients, f64::MAX)?;
            Ok([norm, clipped])
        });
    let found = found.unwrap();
    assert!(found.iter().all(|norms| *norms == found[0]), "{found:?}");
    found[0]
}

#[test]
fn norms_count_each_cell_once() {
    let [expected, _] = norms([1, 1]);
    assert!(expected > 1.0);
    for sizes in [[2, 1], [1, 2], [2, 2], [1, 3]] {
        let [norm, clipped] = norms(sizes);
        assert!(
            (norm - expected).abs() < 1e-5 * expected,
            "{sizes:?}: {norm} and {expected}"
        );
        assert!((clipped - 1.0).abs() < 1e-5, "{sizes:?}: {clipped}");
    }
}

/// Adds a number to the parameters of a rank.
struct Changed(f32);

impl ModuleMapper for Changed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor + self.0, mapper)
    }
}

#[test]
fn replicas_of_shards_are_compared() {
    let run = |changed: usize| {
        Launcher::local(4).run(|world| {
            let mesh = mesh(&world, [2, 2])?;
            let only_tensor = Plan {
                stores: Vec::new(),
                ..plan()
            };
            let model = parallelize_module(mlp(&world)?, &mesh, &only_tensor)?;
            let own = f32::from(u8::from(world.rank() == changed));
            world.check_replicas(&model.map(&mut Changed(own)))
        })
    };
    run(4).unwrap();
    let error = run(2).unwrap_err().to_string();
    assert!(
        error.contains("up.weight") && error.contains("rank 0"),
        "{error}"
    );
    let synced = Launcher::local(2).run(|world| {
        let mesh = mesh(&world, [1, 2])?;
        let model = parallelize_module(mlp(&world)?, &mesh, &plan())?;
        world.sync_module(model, 0).map(|_| ())
    });
    let error = synced.unwrap_err().to_string();
    assert!(error.contains("down.weight is sharded"), "{error}");
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let result = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        let other = world.init(|device| LinearConfig::new(5, 8).init(device))?;
        snapshot.module("model.up", &other)?;
        checkpoints.save(1, snapshot, None)?;
        checkpoints.wait()?;
        let mesh = mesh(&world, [1, 2])?;
        let model = parallelize_module(mlp(&world)?, &mesh, &plan())?;
        let checkpoint = Checkpoint::latest(&world, folder.path())?.expect("one was saved");
        checkpoint.module(&world, "model", model).map(|_| ())
    });
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("up.weight: shape mismatch") && error.contains("expected [5, 7]"),
        "{error}"
    );
}

/// Returns a layer with PyTorch's parameters, `[out, in]` and `[out]`.
fn linear(device: &Device, case: &Checkpoint, names: [&str; 2]) -> Result<Linear> {
    let [weight, bias] = names.map(|name| case.data(name));
    let weight = Tensor::<2>::from_data(weight?, device).transpose();
    let [inputs, outputs] = weight.dims();
    let mut linear = LinearConfig::new(inputs, outputs).init(device);
    linear.weight = Param::from_tensor(weight);
    linear.bias = Some(Param::from_tensor(Tensor::from_data(bias?, device)));
    Ok(linear)
}

/// A column-parallel layer followed by a row-parallel one has the results of PyTorch's layers, with
/// tokens whole or sharded.
#[test]
fn columns_and_rows_give_what_pytorch_gives() {
    #[derive(Module, Debug)]
    struct Layers {
        up: Linear,
        down: Linear,
    }

    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/golden/linear_row_col_mlp_00.safetensors"
    );
    for (ranks, tokens) in [
        (1, false),
        (2, false),
        (2, true),
        (3, true),
        (5, false),
        (4, true),
    ] {
        let run = Launcher::local(ranks).run(|world| {
            let case = Checkpoint::open(file)?;
            let mesh = world.mesh([("tensor", ranks)])?;
            let layers = Layers {
                up: linear(world.device(), &case, ["w1", "b1"])?,
                down: linear(world.device(), &case, ["w2", "b2"])?,
            };
            let (placement, along) = if tokens {
                (Shard(1), PlanPlacement::Shard(1))
            } else {
                (Replicate, PlanPlacement::Replicate)
            };
            let plan = Plan::default()
                .with_layer("up", Style::colwise("tensor"))
                .with_layer("down", Style::rowwise("tensor").with_output(along));
            let layers = parallelize_module(layers, &mesh, &plan)?;
            let field = |name: &str| -> Result<ShardTensor<3>> {
                let whole =
                    Tensor::<3>::from_data(case.data(name)?, &world.device().clone().inner());
                ShardTensor::distribute(whole, &mesh, &[placement])
            };
            let x = field("x")?.require_grad();
            let y = x.clone().apply(&layers.up).gelu().apply(&layers.down);
            assert_eq!(y.placements(), [placement]);
            let gradients = (y.clone() * field("gy")?).sum().backward();
            let whole = |shard: ShardTensor<3>| shard.full_tensor().into_data();
            let near = |found: TensorData, name: &str| -> Result<()> {
                let expected = case.data(name)?;
                let off = difference(&found, &expected);
                assert!(
                    off < 2e-5,
                    "{ranks} ranks, tokens sharded {tokens}: {name} is off by {off:e}"
                );
                Ok(())
            };
            near(whole(y), "y")?;
            near(whole(x.grad(&gradients).expect("a gradient")), "grad_x")?;
            let of = |linear: &Linear, names: [&str; 2]| -> Result<()> {
                let shard = ParamShard::of(&linear.weight).expect("a layout");
                let gradient = linear.weight.base().grad(&gradients).expect("a gradient");
                let gradient =
                    ShardTensor::from_parts(gradient, shard.layout().clone(), mesh.clone());
                let gradient = gradient.full_tensor();
                near(gradient.transpose().into_data(), names[0])?;
                let bias = linear.bias.as_ref().expect("a bias");
                let gradient = bias.base().grad(&gradients).expect("a gradient");
                let gradient = match ParamShard::of(bias) {
                    None => gradient,
                    Some(shard) => {
                        ShardTensor::from_parts(gradient, shard.layout().clone(), mesh.clone())
                            .full_tensor()
                    }
                };
                near(gradient.into_data(), names[1])
            };
            of(&layers.up, ["grad_w1", "grad_b1"])?;
            of(&layers.down, ["grad_w2", "grad_b2"])
        });
        run.unwrap_or_else(|error| panic!("{ranks} ranks, tokens sharded {tokens}: {error}"));
    }
}

/// Every rank keeps the statistics of all channels, and updates them with those of the whole batch.
#[test]
fn running_statistics_are_not_stored_in_shards() {
    let run = |ranks: usize| {
        let results = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("data", ranks)])?;
            let plan = Plan::default().with_store(Store::new("**", "data"));
            let make = |device: &Device| BatchNormConfig::new(5).init(device);
            let model = parallelize_module(world.init(make)?, &mesh, &plan)?;
            let schedule = ModuleLrScheduler::new(1e-2);
            let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), schedule);
            let x = sample("x", [6, 5, 3], &mesh, &[Shard(0)])?;
            let ended = trainer.train_epoch(
                |_, first| first..3,
                |model, _| Ok((x.clone().apply(model) - 1.0).square().mean()),
            )?;
            assert_eq!(ended, Ended::Completed);
            let norm = trainer.model();
            let whole = halocline::core::unshard(norm.clone())?;
            Ok([
                norm.running_mean.value_sync().into_data(),
                norm.running_var.value_sync().into_data(),
                whole.gamma.val().into_data(),
            ])
        });
        results.unwrap()
    };
    let expected = run(1).remove(0);
    for found in run(2) {
        for (found, expected) in found.iter().zip(&expected) {
            assert!(difference(found, expected) < 1e-5, "{found} for {expected}");
        }
    }
}

#[derive(Module, Debug)]
struct Tied {
    one: Linear,
    other: Linear,
}

#[test]
fn a_parameter_in_two_places_counts_once_and_is_not_trained() {
    let device = Device::default().autodiff();
    let one = LinearConfig::new(2, 1).with_bias(false).init(&device);
    let model = Tied {
        other: one.clone(),
        one,
    };
    let id = model.one.weight.id;
    for dtype in [DType::F32, DType::F16] {
        let mut gradients = GradientsParams::new();
        let values = [[300.0], [400.0]];
        gradients.register(
            id,
            Tensor::<2>::from_data(values, (&device.clone().inner(), dtype)),
        );
        let (gradients, norm) = clip_grad_norm(&model, gradients, 1.0).unwrap();
        assert!((norm - 500.0).abs() < 1e-3, "{norm}");
        let clipped = gradients.get::<2>(id).unwrap().into_data();
        let off = difference(&clipped, &TensorData::from([[0.6], [0.8]]));
        assert!(off < 1e-3, "{off}");
    }
    let error = check_optimizer(&SgdConfig::new().init(), &model).unwrap_err();
    let told = "parameters one.weight and other.weight are one";
    assert!(error.to_string().contains(told), "{error}");
}
