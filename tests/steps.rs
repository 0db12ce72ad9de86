//! Steps that must not be taken: non-finite losses and gradients, replicas that differ.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{GradientsParams, SgdConfig};
use halocline::io::Checkpoint;
use halocline::prelude::*;
use halocline::{Ended, NonFinite, Trainer};

const PLACEMENTS: [Placement; 1] = [Shard(2)];

fn conv(device: &Device) -> Conv2d {
    Conv2dConfig::new([1, 1], [3, 3]).init(device)
}

fn trainer(world: &World) -> Result<Trainer<Conv2d>> {
    let model = world.init(conv)?;
    let rate = ModuleLrScheduler::new(1e-2);
    Ok(Trainer::new(world, model, SgdConfig::new().init(), rate))
}

/// Returns the loss of a field of ones, which has a NaN cell in batch `bad`.
fn loss(mesh: &DeviceMesh, model: &Conv2d, batch: usize, bad: usize) -> Result<ShardTensor<1>> {
    let x = ShardTensor::<4>::ones([1, 1, 7, 5], mesh, &PLACEMENTS)?;
    let factor = if batch == bad { f64::NAN } else { 1.0 };
    Ok((x * factor).apply(model).powi_scalar(2).mean())
}

fn weights(trainer: &Trainer<Conv2d>) -> Vec<f32> {
    trainer
        .model()
        .weight
        .val()
        .into_data()
        .try_to_vec()
        .unwrap()
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_and_the_checkpoints_stay_good() {
    let folder = tempfile::tempdir().unwrap();
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let mut trainer = trainer(&world)?
            .with_save_every(1)
            .resume_or_start(folder.path())?;
        let _ = trainer.train_epoch(
            |_, first| first..9,
            |model, batch| loss(&mesh, model, batch, 4),
        )?;
        trainer.finish()
    });
    let error = run.unwrap_err().to_string();
    assert!(
        error.contains(
            "step 5 (epoch 0): the loss of batch 4 is NaN while all parameters are finite"
        ) && error.contains("NonFinite::Skip"),
        "{error}"
    );
    let read = Launcher::local(1).run(|world| {
        let newest = Checkpoint::latest(&world, folder.path())?.expect("four were saved");
        let model = newest.module(&world, "model", world.init(conv)?)?;
        let weight = model.weight.val().into_data();
        assert!(weight.iter::<f64>().all(f64::is_finite));
        Ok(())
    });
    read.unwrap();
}

#[test]
fn a_gradient_that_is_not_finite_names_its_parameter_and_the_model_stays() {
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let mut trainer = trainer(&world)?.with_accumulation(2);
        let before = weights(&trainer);
        // The square root has no derivative at zero.
        let trained = trainer.train_epoch(
            |_, first| first..2,
            |model, batch| {
                let x = ShardTensor::<4>::ones([1, 1, 7, 5], &mesh, &PLACEMENTS)?;
                Ok((x.apply(model) * batch as f64)
                    .abs()
                    .map(Tensor::sqrt)
                    .mean())
            },
        );
        assert_eq!((weights(&trainer), trainer.step()), (before, 0));
        trained.map(|_| ())
    });
    let error = run.unwrap_err().to_string();
    let expected =
        "step 1 (epoch 0): the losses are finite, but the gradient of weight[0, 0, 0, 0] is NaN";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn steps_that_are_not_finite_may_be_left_out_or_taken() {
    let train = |non_finite: NonFinite, bad: usize| {
        let results = Launcher::local(2).seed(5).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let mut trainer = trainer(&world)?.with_non_finite(non_finite);
            let ended = trainer.train_epoch(
                |_, first| first..4,
                |model, batch| loss(&mesh, model, batch, bad),
            )?;
            assert_eq!((ended, trainer.epoch()), (Ended::Completed, 1));
            Ok((weights(&trainer), trainer.step(), trainer.losses().to_vec()))
        });
        results.unwrap().remove(0)
    };
    let (left_out, steps, losses) = train(NonFinite::Skip, 3);
    assert_eq!((steps, losses.len()), (3, 4));
    assert!(losses[3].is_nan() && losses[..3].iter().all(|loss| loss.is_finite()));
    // The last batch changed nothing.
    let three = Launcher::local(2).seed(5).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let mut trainer = trainer(&world)?;
        let _ = trainer.train_epoch(
            |_, first| first..3,
            |model, batch| loss(&mesh, model, batch, 3),
        )?;
        Ok(weights(&trainer))
    });
    assert_eq!(three.unwrap()[0], left_out);
    let (taken, steps, _) = train(NonFinite::Allow, 1);
    assert!(steps == 4 && taken.iter().all(|weight| weight.is_nan()));
}

/// Batch normalization updates its running statistics in the forward pass.
#[test]
fn steps_that_are_left_out_leave_running_statistics() {
    let train = |batches: Vec<f64>| {
        let found = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let model = world.init(|device| BatchNormConfig::new(1).init(device))?;
            let rate = ModuleLrScheduler::new(1e-2);
            let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate)
                .with_accumulation(2)
                .with_non_finite(NonFinite::Skip);
            let ended = trainer.train_epoch(
                |_, first| batches.clone().into_iter().skip(first),
                |model, value| {
                    let x = ShardTensor::<4>::ones([2, 1, 7, 5], &mesh, &PLACEMENTS)?;
                    Ok((x * value).apply(model).powi_scalar(2).mean())
                },
            )?;
            assert_eq!(ended, Ended::Completed);
            let model = trainer.model();
            let state = [&model.running_mean, &model.running_var];
            Ok(state.map(|state| state.value().into_scalar::<f32>()))
        });
        found.unwrap()
    };
    // The third and the fourth batch belong to one step.
    let found = train(vec![1.0, 2.0, 7.0, f64::NAN, 3.0, 4.0]);
    assert_eq!(found, train(vec![1.0, 2.0, 3.0, 4.0]));
    assert!(found[0].iter().all(|number| number.is_finite()) && found[0] == found[1]);
}

/// burn's own layer keeps an update apart from its statistics until the next one.
#[test]
fn steps_that_are_left_out_leave_running_statistics_of_burns_layer() {
    let train = |batches: Vec<f64>| {
        let found = Launcher::local(1).collect(|world| {
            let model = world.init(|device| BatchNormConfig::new(1).init(device))?;
            let rate = ModuleLrScheduler::new(1e-2);
            let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate)
                .with_non_finite(NonFinite::Skip);
            let device = world.device().clone().autodiff();
            let _ = trainer.train_epoch(
                |_, first| batches.clone().into_iter().skip(first),
                |model: &BatchNorm, value| {
                    let x = Tensor::<4>::full([2, 1, 3, 3], value, &device);
                    Ok(model.forward(x).square().mean())
                },
            )?;
            let model = trainer.model();
            let state = [&model.running_mean, &model.running_var];
            Ok(state.map(|state| state.value_sync().into_scalar::<f32>()))
        });
        found.unwrap().remove(0)
    };
    assert_eq!(train(vec![1.0, f64::NAN, 2.0]), train(vec![1.0, 2.0]));
}

/// A run that takes non-finite steps, with a save after each, keeps its last finite checkpoint and
/// resumes from it.
#[test]
fn checkpoints_that_are_not_finite_displace_no_finite_one() {
    let folder = tempfile::tempdir().unwrap();
    let run = |non_finite| {
        Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let mut trainer = trainer(&world)?
                .with_save_every(1)
                .with_non_finite(non_finite)
                .resume_or_start(folder.path())?;
            assert!(weights(&trainer).iter().all(|weight| weight.is_finite()));
            let _ = trainer.train_epoch(
                |_, first| first..9,
                |model, batch| loss(&mesh, model, batch, 2),
            )?;
            trainer.finish()
        })
    };
    run(NonFinite::Allow).unwrap();
    // The checkpoint after the second batch is the last finite one; the third batch has the NaN.
    let error = run(NonFinite::Stop).unwrap_err().to_string();
    assert!(
        error.contains("step 3 (epoch 0): the loss of batch 2 is NaN"),
        "{error}"
    );
}

#[test]
fn a_model_without_world_init_is_refused_before_the_first_step() {
    let run = Launcher::local(2).check(false).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let model = conv(world.device());
        let rate = ModuleLrScheduler::new(1e-2);
        let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate);
        let _ = trainer.train_epoch(
            |_, first| first..1,
            |model, batch| loss(&mesh, model, batch, 9),
        )?;
        Ok(())
    });
    let error = run.unwrap_err().to_string();
    assert!(
        error.contains("parameter weight differs between rank 0 and rank 1")
            && error.contains("World::init"),
        "{error}"
    );
}

#[test]
fn a_parameter_that_differs_is_found_by_the_first_operator_with_checks_on() {
    let run = Launcher::local(2).check(true).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        loss(&mesh, &conv(world.device()), 0, 9).map(|_| ())
    });
    let error = run.unwrap_err().to_string();
    assert!(
        error.contains("conv2d: rank 1 holds another tensor ([1, 1, 3, 3] of F32)"),
        "{error}"
    );
}

#[test]
fn replicas_that_drifted_apart_are_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let run = Launcher::local(3).check(false).run(|world| {
        let mesh = world.mesh([("lat", 3)])?;
        let mut trainer = trainer(&world)?.resume_or_start(folder.path())?;
        let _ = trainer.train_epoch(
            |_, first| first..1,
            |model, _| {
                // The gradient of a parameter that a closure captures is not summed.
                let x = ShardTensor::<4>::ones([1, 1, 7, 5], &mesh, &PLACEMENTS)?;
                let weight = model.weight.val().slice([0..1, 0..1, 0..1, 0..1]);
                let local = x.local().clone() * weight * (1 + world.rank()) as f64;
                Ok(ShardTensor::from_local(local, &mesh, x.layout())?.mean())
            },
        )?;
        trainer.save(None)
    });
    let error = run.unwrap_err().to_string();
    assert!(
        error.contains("parameter weight differs between rank 0"),
        "{error}"
    );
    assert_eq!(
        std::fs::read_dir(folder.path())
            .unwrap()
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with("step_")
            })
            .count(),
        0
    );
}

#[test]
fn a_hook_sees_the_gradients_of_a_step_before_it_is_taken() {
    let train = |factor: f64| {
        let results = Launcher::local(2).seed(5).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let mut calls = 0;
            let mut trainer = trainer(&world)?.with_accumulation(2).with_gradient_hook(
                move |model: &Conv2d, gradients| {
                    calls += 1;
                    assert!(calls <= 2 && gradients.len() == 2);
                    let mut scaled = GradientsParams::new();
                    let weight = gradients.get::<4>(model.weight.id).expect("a gradient");
                    scaled.register(model.weight.id, weight * factor);
                    Ok(scaled)
                },
            );
            let before = weights(&trainer);
            let _ = trainer.train_epoch(
                |_, first| first..4,
                |model, batch| loss(&mesh, model, batch, 9),
            )?;
            Ok((before, weights(&trainer)))
        });
        results.unwrap().remove(0)
    };
    let (before, after) = train(0.0);
    assert_eq!(before, after);
    let (before, after) = train(1.0);
    assert_ne!(before, after);
    let refused = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let mut trainer = trainer(&world)?.with_gradient_hook(|model: &Conv2d, gradients| {
            let mut broken = GradientsParams::new();
            let weight = gradients.get::<4>(model.weight.id).expect("a gradient");
            broken.register(model.weight.id, weight / 0.0);
            Ok(broken)
        });
        let trained = trainer.train_epoch(
            |_, first| first..1,
            |model, batch| loss(&mesh, model, batch, 9),
        );
        trained.map(|_| ())
    });
    let error = refused.unwrap_err().to_string();
    assert!(
        error.contains(
            "after the gradient hook, the losses are finite, but the gradient of weight[0, 0, 0, 0]"
        ),
        "{error}"
    );
}
