//! Interrupted and resumed training: the same bits on the same mesh, the same numbers on another.

#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod trainer;

use std::path::Path;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::DType;
use halocline::io::{Checkpoint, CheckpointConfig, Snapshot};
use halocline::models::{SurrogateCnn, SurrogateCnnConfig, weighted_mse};
use halocline::prelude::*;
use halocline::{Ended, Trainer};
use trainer::{SHAPE, sample};

const EPOCHS: usize = 3;
const BATCHES: usize = 5;
/// Steps of a whole run, with one for every two batches of an epoch.
const STEPS: u64 = 9;

fn start(world: &World, width: usize) -> Result<Trainer<SurrogateCnn>> {
    let config = SurrogateCnnConfig::new(3).with_width(width).with_blocks(1);
    let model = world.init(|device| config.init(device))?;
    let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, STEPS as usize);
    let schedule = schedule.init().map_err(Error::other)?;
    let trainer = Trainer::new(world, model, AdamWConfig::new().init(), schedule);
    Ok(trainer.with_accumulation(2).with_save_every(2))
}

/// Trains, up to a step that fails. Returns the losses and the bits of the parameters.
fn train(
    world: &World,
    sizes: [usize; 2],
    folder: &Path,
    fails_at: Option<u64>,
) -> Result<(Vec<f64>, Vec<u8>)> {
    let mesh = world.mesh([("lat", sizes[0]), ("lon", sizes[1])])?;
    let mut trainer = start(world, 4)?.resume_or_start(folder)?;
    let weights = vec![1.0; SHAPE[2]];
    while trainer.epoch() < EPOCHS {
        let epoch = trainer.epoch();
        let mut step = trainer.step();
        let mut batches_of_step = 0;
        let ended = trainer.train_epoch(
            |_, first| first..BATCHES,
            |model, batch| {
                if Some(step) == fails_at && world.rank() + 1 == world.size() {
                    return Err(Error::other("the power is off"));
                }
                batches_of_step += 1;
                step += u64::from(batches_of_step % 2 == 0);
                let placements = [Shard(2), Shard(3)];
                let x = sample(&format!("x {epoch} {batch}"), SHAPE, &mesh, &placements)?;
                let target = sample("target", SHAPE, &mesh, &placements)?;
                weighted_mse(x.apply(model), target, &weights)
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        trainer.note("epochs", &trainer.epoch())?;
    }
    trainer.finish()?;
    assert_eq!(trainer.step(), STEPS);
    let committed = world.is_root().then_some(STEPS);
    assert_eq!(trainer.last_committed_step(), committed);
    assert_eq!(trainer.noted("epochs")?, Some(EPOCHS));
    world.check_replicas(trainer.model())?;
    let record = trainer.model().clone().into_record();
    // burn assigns new parameter ids in every run, so records are compared without them.
    let tensors = burn_pack_tensors(record.into_bytes().map_err(Error::other)?);
    Ok((trainer.losses().to_vec(), tensors))
}

/// Returns the bytes of all tensors of a record.
fn burn_pack_tensors(record: burn::tensor::Bytes) -> Vec<u8> {
    let reader = burn_pack::Reader::from_bytes(record).unwrap();
    let tensors = reader.into_tensors().unwrap().into_iter();
    tensors
        .flat_map(|tensor| tensor.into_bytes().unwrap().to_vec())
        .collect()
}

fn run(sizes: [usize; 2], folder: &Path, fails_at: Option<u64>) -> Result<(Vec<f64>, Vec<u8>)> {
    let launcher = Launcher::local(sizes[0] * sizes[1]).seed(11);
    let mut results = launcher.collect(|world| train(&world, sizes, folder, fails_at))?;
    Ok(results.remove(0))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_run_that_failed_at_any_step_ends_with_the_bits_of_one_that_did_not() {
    for sizes in [[1, 1], [2, 1], [1, 3]] {
        let whole = run(sizes, folder().path(), None).unwrap();
        assert_eq!(whole.0.len(), EPOCHS * BATCHES);
        let folder = folder();
        for step in [0, 1, 2, 5, 7, 8] {
            let error = run(sizes, folder.path(), Some(step)).unwrap_err();
            assert!(error.to_string().contains("the power is off"), "{error}");
        }
        assert_eq!(run(sizes, folder.path(), None).unwrap(), whole);
        // Once more, after the end.
        assert_eq!(run(sizes, folder.path(), None).unwrap(), whole);
    }
}

#[test]
fn a_run_starts_from_the_weights_of_another() {
    let (old, new) = (folder(), folder());
    let (_, trained) = run([2, 1], old.path(), None).unwrap();
    let tuned = |width: usize, pretrained: &Path| {
        let found = Launcher::local(3).seed(12).collect(|world| {
            let trainer = start(&world, width)?.with_ema(0.9);
            let mut trainer = trainer.resume_or_start_from(new.path(), pretrained)?;
            assert_eq!(trainer.step(), 0);
            trainer.finish()?;
            let model = trainer.model().clone();
            let record = model.into_record().into_bytes().map_err(Error::other)?;
            Ok(burn_pack_tensors(record))
        });
        let found = found.map(|mut found| found.remove(0));
        found.map_err(|error| error.to_string())
    };
    let error = tuned(5, old.path()).unwrap_err();
    assert!(error.contains("shape mismatch"), "{error}");
    assert_eq!(tuned(4, old.path()).unwrap(), trained);
    let error = tuned(4, &new.path().join("other")).unwrap_err();
    assert!(error.contains("from which this run started"), "{error}");
    // After a checkpoint, the other run is not needed.
    std::fs::remove_dir_all(old.path()).unwrap();
    assert_eq!(tuned(4, old.path()).unwrap(), trained);
}

#[test]
fn a_run_goes_on_with_other_ranks() {
    let whole = run([2, 1], folder().path(), None).unwrap();
    let folder = folder();
    run([2, 2], folder.path(), Some(5)).unwrap_err();
    run([1, 1], folder.path(), Some(7)).unwrap_err();
    let found = run([1, 3], folder.path(), None).unwrap();
    for (found, expected) in found.0.iter().zip(&whole.0) {
        assert!(
            (found - expected).abs() < 1e-4 * expected.abs(),
            "{found} {expected}"
        );
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let whole = run([2, 1], folder().path(), None).unwrap();
    let folder = folder();
    run([2, 1], folder.path(), None).unwrap();
    let newest = folder.path().join("step_000000009/rank_00001.safetensors");
    let mut bytes = std::fs::read(&newest).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    assert_eq!(run([2, 1], folder.path(), None).unwrap(), whole);
}

#[test]
fn what_does_not_fit_is_an_error_and_no_start_from_nothing() {
    let folder = folder();
    run([2, 1], folder.path(), Some(4)).unwrap_err();
    let failure = |seed, make: fn(&World) -> Result<Trainer<SurrogateCnn>>| {
        let tried = Launcher::local(2).seed(seed);
        let tried = tried.run(|world| make(&world)?.resume_or_start(folder.path()).map(|_| ()));
        tried.unwrap_err().to_string()
    };
    let error = failure(12, |world| start(world, 4));
    assert!(error.contains("seed: got 12, expected 11,"), "{error}");
    let error = failure(11, |world| start(world, 5));
    assert!(
        error.contains("\"model\"") && error.contains("shape mismatch"),
        "{error}"
    );
    let error = failure(11, |world| {
        let config = SurrogateCnnConfig::new(3).with_width(4).with_blocks(1);
        let model = world.init(|device| config.init(device))?;
        let sgd = SgdConfig::new().init();
        Ok(Trainer::new(
            world,
            model,
            sgd,
            ModuleLrScheduler::new(1e-2),
        ))
    });
    assert!(error.contains("optimizer of another kind"), "{error}");
    let error = failure(11, |world| {
        let config = SurrogateCnnConfig::new(3).with_width(4).with_blocks(1);
        let model = world.init(|device| config.init(device))?;
        let constant = ModuleLrScheduler::new(1e-2);
        Ok(Trainer::new(
            world,
            model,
            AdamWConfig::new().init(),
            constant,
        ))
    });
    assert!(error.contains("schedule of another kind"), "{error}");
    let error = failure(11, |world| {
        let keep = CheckpointConfig::new().with_keep_last(0);
        Ok(start(world, 4)?.with_checkpoints(keep))
    });
    assert!(error.contains("keep_last"), "{error}");
}

#[test]
fn an_optimizer_does_not_take_the_place_of_one_without_a_state() {
    let folder = folder();
    let train = |adam: bool| {
        Launcher::local(1).run(|world| {
            let mesh = world.mesh([("lat", 1)])?;
            let config = SurrogateCnnConfig::new(3).with_width(4).with_blocks(1);
            let model = world.init(|device| config.init(device))?;
            let optimizer = if adam {
                AdamWConfig::new().init()
            } else {
                SgdConfig::new().init()
            };
            let rate = ModuleLrScheduler::new(1e-2);
            let mut trainer =
                Trainer::new(&world, model, optimizer, rate).resume_or_start(folder.path())?;
            let x = sample("x", SHAPE, &mesh, &[Shard(2)])?;
            let _ = trainer.train_epoch(
                |_, first| first..1,
                |model, _| Ok(x.clone().apply(model).abs().mean()),
            )?;
            trainer.finish()
        })
    };
    train(false).unwrap();
    train(false).unwrap();
    let error = train(true).unwrap_err().to_string();
    assert!(error.contains("optimizer of another kind"), "{error}");
}

#[test]
fn a_state_that_burn_would_restore_in_another_type_is_refused() {
    struct ToF64;

    impl ModuleMapper for ToF64 {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(DType::F64).detach().require_grad())
        }
    }

    let refused = Launcher::local(1).run(|world| {
        let mut model = LinearConfig::new(3, 2).init(world.device()).map(&mut ToF64);
        let mut optimizer: ModuleOptimizer = AdamWConfig::new().init();
        let x = Tensor::<2>::ones([1, 3], (world.device(), DType::F64));
        let gradients = model.forward(x).sum().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-2, model, gradients);
        Snapshot::new(&world).optimizer("optimizer", &optimizer, &model)?;
        Ok(())
    });
    let error = refused.unwrap_err().to_string();
    assert!(
        error.contains("is F64, and burn restores states as F32"),
        "{error}"
    );
}

#[test]
fn a_note_after_a_resume_keeps_the_metric() {
    let folder = folder();
    for runs in 0..2 {
        let noted = Launcher::local(2).run(|world| {
            let mut trainer = start(&world, 4)?.resume_or_start(folder.path())?;
            if runs == 0 {
                trainer.save(Some(0.1))?;
            }
            trainer.note("runs", &runs)?;
            trainer.finish()?;
            let saved = Checkpoint::latest(&world, folder.path())?.expect("saved");
            assert_eq!(saved.metric(), Some(0.1));
            Ok(())
        });
        noted.unwrap();
    }
}

/// The mean of the gradients of equal batches is the gradient of one, also for the incomplete last
/// step of an epoch.
#[test]
fn accumulated_gradients_are_their_mean() {
    let trained = |accumulate: usize, batches: usize| {
        let results = Launcher::local(2).seed(3).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let config = SurrogateCnnConfig::new(3).with_width(4).with_blocks(1);
            let model = world.init(|device| config.init(device))?;
            let rate = ModuleLrScheduler::new(1e-2);
            let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate)
                .with_accumulation(accumulate);
            let x = sample("x", SHAPE, &mesh, &[Shard(2)])?;
            let weights = vec![1.0; SHAPE[2]];
            let ended = trainer.train_epoch(
                |_, first| first..batches,
                |model, _| weighted_mse(x.clone().apply(model), x.clone() * 0.5, &weights),
            )?;
            assert_eq!((ended, trainer.step()), (Ended::Completed, 2));
            let record = trainer.model().clone().into_record();
            Ok(burn_pack_tensors(
                record.into_bytes().map_err(Error::other)?,
            ))
        });
        results.unwrap().remove(0)
    };
    assert_eq!(trained(2, 4), trained(1, 2));
    assert_eq!(trained(2, 3), trained(1, 2));
}
