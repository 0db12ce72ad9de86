//! Training in half precision with parameters in f32, scaled losses, averages of parameters, and
//! rounding of models.

#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod trainer;

use std::path::Path;
use std::process::Command;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{ModuleMapper, Param};
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, FloatDType};
use halocline::core::unshard;
use halocline::models::parallel::{Plan, Store, init_parallel};
use halocline::models::{
    FieldTransformer, FieldTransformerConfig, SurrogateCnnConfig, UNet, UNetConfig,
};
use halocline::ops::{Reduction, mse_loss};
use halocline::prelude::*;
use halocline::{Ended, LossScale, Trainer};
use trainer::sample;

const F32: Option<FloatDType> = None;
const BF16: Option<FloatDType> = Some(FloatDType::BF16);
const F16: Option<FloatDType> = Some(FloatDType::F16);

/// Returns the losses of training a model on a mesh, with parameters stored in shards or not.
fn losses<M: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>>(
    make: impl Fn(&Device) -> M + Sync,
    ranks: usize,
    plan: &Plan,
    dtype: Option<FloatDType>,
) -> Vec<f64> {
    let results = Launcher::local(ranks).seed(3).collect(|world| {
        let mesh = world.mesh([("data", ranks)])?;
        let model = init_parallel(&world, &mesh, plan, &make)?;
        let schedule = ModuleLrScheduler::new(1e-2);
        let mut trainer = Trainer::new(&world, model, AdamWConfig::new().init(), schedule);
        if let Some(dtype) = dtype {
            trainer = trainer.with_precision(dtype);
        }
        let x = sample("x", [3, 2, 12, 16], &mesh, &[Shard(0)])?;
        let target = (x.clone() * 2.0).tanh();
        let ended = trainer.train_epoch(
            |_, first| first..12,
            |model, _| {
                let x = x.clone().cast(dtype.unwrap_or(FloatDType::F32));
                let y = x.apply(model).cast(FloatDType::F32);
                mse_loss(y, target.clone(), Reduction::Mean)
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        Ok(trainer.losses().to_vec())
    });
    results.unwrap().remove(0)
}

fn unet(device: &Device) -> UNet {
    UNetConfig::new(2, 2)
        .with_width(6)
        .with_levels(1)
        .init(device)
}

fn transformer(device: &Device) -> FieldTransformer {
    let config = FieldTransformerConfig::new(2).with_d_model(16);
    let config = config.with_heads(2).with_blocks(2).with_kernel([3, 3]);
    config.init(device)
}

/// Returns the largest difference between losses, relative to the first loss.
fn off(found: &[f64], expected: &[f64]) -> f64 {
    let pairs = found.iter().zip(expected);
    let largest = pairs.map(|(a, b)| (a - b).abs()).max_by(f64::total_cmp);
    largest.expect("a loss") / expected[0]
}

#[test]
fn half_precision_follows_f32() {
    let stored = Plan::default().with_store(Store::new("**", "data"));
    let whole = Plan::default();
    let expected = losses(unet, 1, &whole, F32);
    assert!(expected[11] < 0.9 * expected[0], "{expected:?}");
    for (ranks, plan, dtype) in [
        (1, &whole, BF16),
        (3, &whole, BF16),
        (3, &stored, BF16),
        (2, &stored, F16),
    ] {
        let off = off(&losses(unet, ranks, plan, dtype), &expected);
        assert!(off < 0.01, "{ranks} ranks, {dtype:?}: {off}");
    }
    let expected = losses(transformer, 1, &whole, F32);
    assert!(expected[11] < 0.9 * expected[0], "{expected:?}");
    for dtype in [BF16, F16] {
        let off = off(&losses(transformer, 2, &stored, dtype), &expected);
        assert!(off < 0.01, "{dtype:?}: {off}");
    }
}

fn linear(world: &World) -> Result<Linear> {
    world.init(|device| LinearConfig::new(2, 1).with_bias(false).init(device))
}

fn value(model: &Linear) -> Vec<f32> {
    model.weight.val().into_data().iter().collect()
}

#[test]
fn small_steps_are_not_lost_in_rounding() {
    let run = Launcher::local(1).run(|world| {
        let schedule = ModuleLrScheduler::new(1e-5);
        let trainer = Trainer::new(&world, linear(&world)?, SgdConfig::new().init(), schedule);
        let mut trainer = trainer.with_precision(FloatDType::BF16);
        let before = value(trainer.model());
        let ended = trainer.train_epoch(
            |_, first| first..50,
            |model, _| {
                let x = Tensor::<2>::ones([1, 2], world.device()).cast(FloatDType::BF16);
                Ok(ShardTensor::solo(x)
                    .apply(model)
                    .cast(FloatDType::F32)
                    .sum())
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        // Each step is far smaller than the last bit of bf16.
        for (after, before) in value(trainer.model()).iter().zip(before) {
            assert!(
                (before - after - 50.0 * 1e-5).abs() < 1e-6,
                "{before} → {after}"
            );
        }
        Ok(())
    });
    run.unwrap();
}

/// One step on a loss whose gradients f16 cannot hold.
fn tiny(scale: Option<LossScale>) -> (Vec<f32>, Vec<f32>) {
    let results = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let schedule = ModuleLrScheduler::new(1e6);
        let trainer = Trainer::new(&world, linear(&world)?, SgdConfig::new().init(), schedule);
        let mut trainer = trainer.with_precision(FloatDType::F16);
        trainer = match scale {
            Some(scale) => trainer.with_loss_scale(scale),
            None => trainer,
        };
        let before = value(trainer.model());
        let ended = trainer.train_epoch(
            |_, first| first..1,
            |model, _| {
                let x = ShardTensor::<2>::ones([2, 2], &mesh, &[Shard(0)])?.cast(FloatDType::F16);
                Ok((x.apply(model).cast(FloatDType::F32) * 1e-8).sum())
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        Ok((before, value(trainer.model())))
    });
    results.unwrap().remove(0)
}

#[test]
fn scaled_losses_keep_small_gradients() {
    let (before, after) = tiny(Some(LossScale::new(1.0, 2000)));
    assert_eq!(before, after);
    let (before, after) = tiny(None);
    for (before, after) in before.iter().zip(after) {
        assert!((before - after - 0.02).abs() < 1e-4, "{before} → {after}");
    }
}

/// Trains with a loss scale that is too large at first. Returns the steps, the scale and the
/// weights.
fn scaled(folder: &Path, batches: usize) -> (u64, LossScale, Vec<f32>) {
    let results = Launcher::local(2).seed(1).collect(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let schedule = ModuleLrScheduler::new(1e-2);
        let trainer = Trainer::new(&world, linear(&world)?, SgdConfig::new().init(), schedule);
        let mut trainer = (trainer.with_precision(FloatDType::F16))
            .with_loss_scale(LossScale::new(2_f64.powi(18), 3))
            .resume_or_start(folder)?;
        let ended = trainer.train_epoch(
            |_, first| first..batches,
            |model, _| {
                let x = ShardTensor::<2>::ones([2, 2], &mesh, &[Shard(0)])?.cast(FloatDType::F16);
                Ok(x.apply(model).cast(FloatDType::F32).sum())
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        trainer.finish()?;
        let scale = trainer.loss_scale().expect("f16 has one");
        Ok((trainer.step(), scale, value(trainer.model())))
    });
    results.unwrap().remove(0)
}

#[test]
fn the_factor_of_losses_finds_its_size_and_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    // The sum of two gradients of 1 on two ranks fits in f16 times 2^14: four steps are skipped,
    // and after three more the scale is doubled.
    let (steps, scale, _) = scaled(folder.path(), 5);
    assert_eq!((steps, scale.factor), (1, 2_f64.powi(14)));
    let (steps, scale, _) = scaled(folder.path(), 0);
    assert_eq!((steps, scale.factor), (1, 2_f64.powi(14)));
    let other = tempfile::tempdir().unwrap();
    let (steps, scale, weights) = scaled(other.path(), 7);
    assert_eq!((steps, scale.factor), (3, 2_f64.powi(15)));
    assert!(weights.iter().all(|weight| weight.is_finite()));
}

/// The rounded model shares the statistics of the model.
#[test]
fn running_statistics_keep_their_number_type() {
    let results = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let model = world.init(|device| BatchNormConfig::new(3).init(device))?;
        let schedule = ModuleLrScheduler::new(0.0);
        let trainer = Trainer::new(&world, model, SgdConfig::new().init(), schedule);
        let mut trainer = trainer.with_precision(FloatDType::BF16);
        let x = sample("x", [6, 3], &mesh, &[Shard(0)])?;
        let mut of_y = None;
        let ended = trainer.train_epoch(
            |_, first| first..2,
            |model, _| {
                let half = x.clone().cast(FloatDType::BF16);
                // The rounded model can also be evaluated.
                let y = half.clone().inner().apply(&model.clone().valid());
                of_y = Some(y.local().dtype());
                Ok(half.apply(model).cast(FloatDType::F32).square().mean())
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        let norm = trainer.model();
        let mean = norm.running_mean.value_sync();
        let expected = x.inner().mean_dims(&[0]).resolve().local().clone() * 0.19;
        let off = (mean.clone().inner() - expected.reshape([3])).abs().max();
        Ok((mean.dtype(), off.into_scalar::<f32>(), of_y))
    });
    let (of_mean, off, of_y) = results.unwrap().remove(0);
    assert_eq!((of_mean, of_y), (DType::F32, Some(DType::BF16)));
    assert!(off < 1e-3, "{off}");
}

const DECAY: f64 = 0.9;

/// Trains with an average that is sharded over `data`. Returns the whole average, and the average
/// computed from the parameters after each step.
fn averaged(folder: &Path, ranks: usize, epochs: usize) -> [Vec<f32>; 2] {
    let plan = Plan::default().with_store(Store::new("**", "data"));
    let results = Launcher::local(ranks).seed(7).collect(|world| {
        let mesh = world.mesh([("data", ranks)])?;
        let make = |device: &Device| LinearConfig::new(5, 3).init(device);
        let model = init_parallel(&world, &mesh, &plan, make)?;
        let schedule = ModuleLrScheduler::new(1e-1);
        let trainer = Trainer::new(&world, model, AdamWConfig::new().init(), schedule);
        let mut trainer = trainer.with_ema(DECAY).resume_or_start(folder)?;
        let parameters = |model: &Linear| -> Result<Vec<f32>> {
            let model = unshard(model.clone())?;
            let values = [
                model.weight.val().into_data(),
                model.bias.expect("one").val().into_data(),
            ];
            Ok(values.iter().flat_map(TensorData::iter::<f32>).collect())
        };
        let mut expected = parameters(trainer.model())?;
        while trainer.epoch() < epochs {
            let x = sample("x", [6, 5], &mesh, &[Shard(0)])?;
            let ended = trainer.train_epoch(
                |_, first| first..1,
                |model, _| Ok(x.clone().apply(model).square().mean()),
            )?;
            assert_eq!(ended, Ended::Completed);
            for (mean, value) in expected.iter_mut().zip(parameters(trainer.model())?) {
                *mean = *mean * DECAY as f32 + value * (1.0 - DECAY as f32);
            }
        }
        trainer.finish()?;
        Ok([
            parameters(trainer.ema_model().expect("an average"))?,
            expected,
        ])
    });
    results.unwrap().remove(0)
}

#[test]
fn averages_are_those_of_the_formula_and_are_saved() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [found, expected] = averaged(folders[0].path(), 2, 5);
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
    }
    // In two parts, the second on another number of ranks.
    averaged(folders[1].path(), 2, 3);
    let [resumed, _] = averaged(folders[1].path(), 3, 5);
    for (resumed, found) in resumed.iter().zip(&found) {
        assert!((resumed - found).abs() < 1e-6, "{resumed} for {found}");
    }
}

/// Casts parameters to f64.
struct Exact;

impl ModuleMapper for Exact {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(FloatDType::F64))
    }
}

/// Returns waves that differ by channel, around a mean of several times their amplitude:
/// `[batch, channels, lat, lon]`.
fn waves(device: &Device, shape: [usize; 4]) -> Tensor<4> {
    let [_, channels, rows, columns] = shape;
    let cell = |index: usize| {
        let (channel, row, column) = (
            index / (rows * columns),
            index / columns % rows,
            index % columns,
        );
        let waves = (channel + 1) as f64 / channels as f64 * 4.0;
        let waves = waves.round();
        let angle = std::f64::consts::TAU * waves / columns as f64;
        5.0 + (angle * column as f64).sin() * (2.5 * angle * row as f64 + waves).cos()
    };
    let cells = (0..shape.iter().product()).map(|index| cell(index) as f32);
    Tensor::from_data(TensorData::new(cells.collect(), shape), device)
}

/// Returns the root mean square and the largest difference between forecasts of a trained model in
/// f32 and those of the same parameters in f64.
fn rounding<M: Module + Layer<Tensor<4>, Output = Tensor<4>>>(
    make: impl Fn(&Device) -> M,
) -> [f64; 2] {
    let device = Device::default();
    device.seed(3);
    let training = device.clone().autodiff();
    let x = waves(&training, [2, 3, 45, 60]);
    let target = waves(&training, [2, 3, 45, 60]).roll(&[2], &[3]);
    let mut optimizer = AdamWConfig::new().init();
    let mut model = make(&training);
    let mut losses = Vec::new();
    for _ in 0..40 {
        let loss = (x.clone().apply(&model) - target.clone()).square().mean();
        losses.push(loss.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
    }
    assert!(losses[39] < 0.7 * losses[0], "{losses:?}");
    let found = x.clone().apply(&model);
    let exact = x.cast(FloatDType::F64).apply(&model.map(&mut Exact));
    let [found, exact] = [found, exact].map(|y| y.into_data().iter::<f64>().collect::<Vec<_>>());
    let errors = found
        .iter()
        .zip(&exact)
        .map(|(found, exact)| (found - exact).abs());
    let squares: f64 = errors.clone().map(|error| error * error).sum();
    // NaN if there is one, which `f64::max` ignores.
    let largest = errors.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a });
    [(squares / exact.len() as f64).sqrt(), largest]
}

/// Prints the rounding errors of trained models.
#[test]
#[ignore = "the test below starts it as a process"]
fn rounding_of_this_process() {
    let cnn = SurrogateCnnConfig::new(3).with_width(16).with_blocks(3);
    let unet = UNetConfig::new(3, 3).with_width(16).with_levels(2);
    let found = [
        rounding(|device| cnn.init(device)),
        rounding(|device| unet.init(device)),
    ];
    println!("rounding {}", serde_json::to_string(&found).unwrap());
}

#[test]
fn trained_models_round_at_most_four_times_as_much_by_winograd_as_by_direct_sums() {
    let [direct, winograd] = ["direct", "winograd"].map(|method| {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args([
            "rounding_of_this_process",
            "--exact",
            "--ignored",
            "--nocapture",
        ]);
        let output = process.env("HALOCLINE_CONV", method).output().unwrap();
        let [text, error] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{error}");
        let (_, found) = text
            .split_once("rounding ")
            .unwrap_or_else(|| panic!("{text}"));
        let found = found.lines().next().expect("a line");
        serde_json::from_str::<[[f64; 2]; 2]>(found).unwrap()
    });
    for (direct, winograd) in direct.iter().zip(winograd) {
        for (direct, winograd) in direct.iter().zip(winograd) {
            assert!(
                winograd <= 4.0 * direct && *direct > 0.0,
                "{winograd:e} for {direct:e}"
            );
        }
    }
}
