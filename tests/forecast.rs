//! Training for forecasts on any mesh: several steps, ensembles, masks, poles, validation.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use halocline::io::{Checkpoint, CheckpointConfig, Direction};
use halocline::models::{
    CrpsEstimator, Evaluation, FieldConv2d, FieldConv2dConfig, crps, energy_score, perturbed,
    repeat_members, rollout, split_members,
};
use halocline::prelude::*;
use halocline::{Ended, Trainer, Validation};

#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod trainer;

use trainer::sample;

const MEMBERS: usize = 4;
const BATCH: usize = 3;
const STEPS: usize = 3;
const ROWS: usize = 5;

/// Convolution across the poles, of a state of two fields, one of them a wind, and one forcing.
fn config() -> FieldConv2dConfig {
    FieldConv2dConfig::new([3, 2], [3, 3])
        .with_boundary([Boundary::PoleEdge, Boundary::Periodic])
        .with_odd(vec![1])
}

/// Trains an ensemble of forecasts of three steps, and returns the losses of five training steps.
fn train(world: &World, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Vec<f64>> {
    let model = world.init(|device| config().init(device))?;
    let rate = ModuleLrScheduler::new(3e-3);
    let mut trainer = Trainer::new(world, model, AdamWConfig::new().init(), rate);
    let axis = mesh.shape().names().iter().any(|name| *name == "member");
    let axis = axis.then_some("member");
    let input = sample("input", [BATCH, 2, ROWS, 8], mesh, placements)?;
    let forcing = sample("forcing", [BATCH, STEPS, ROWS, 8], mesh, placements)?;
    let target = sample("target", [BATCH, 2 * STEPS, ROWS, 8], mesh, placements)?;
    let _ = trainer.train_epoch(
        |_, first| first..5,
        |model, batch| {
            let key = RandomKey::new(world.seed(), ("members", batch));
            let states = perturbed(input.clone(), MEMBERS, 0.3, key, axis)?;
            let forcing = repeat_members(forcing.clone(), MEMBERS, axis)?;
            let forecast = rollout(states, Some(forcing), STEPS, &[0, 1], |_, x| {
                // A step keeps only its input in memory.
                Ok(x.recompute(model, Halos::Keep, |model: &FieldConv2d, x| x.apply(model)))
            })?;
            let ensemble = split_members(forecast, MEMBERS, axis)?;
            let target = target.clone().unsqueeze_dim::<5>(0);
            let weights = [0.6, 1.1, 1.6, 1.1, 0.6];
            let score = crps(
                ensemble.clone(),
                target.clone(),
                &weights,
                CrpsEstimator::Fair,
            )?;
            let energy = energy_score(ensemble, target, &weights, CrpsEstimator::Fair)?;
            Ok(score.resolve() + energy.resolve())
        },
    )?;
    Ok(trainer.losses().to_vec())
}

#[test]
fn ensembles_learn_forecasts_alike_on_every_mesh() {
    let run = |axes: &[(&str, usize)], placements: &[Placement]| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let losses = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            train(&world, &mesh, placements)
        });
        losses.unwrap()
    };
    let one = run(&[("lat", 1)], &[Shard(2)]).remove(0);
    assert!(one[4] < one[0], "{one:?}");
    type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);
    let meshes: [Mesh; 8] = [
        (&[("member", 2)], &[Replicate]),
        (&[("member", 4)], &[Replicate]),
        (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)]),
        (&[("member", 2), ("lat", 2)], &[Replicate, Shard(2)]),
        (&[("member", 2), ("lon", 3)], &[Replicate, Shard(3)]),
        (&[("data", 3)], &[Shard(0)]),
        (&[("data", 2), ("member", 2)], &[Shard(0), Replicate]),
        (
            &[("member", 2), ("data", 2), ("lat", 2)],
            &[Replicate, Shard(0), Shard(2)],
        ),
    ];
    for (axes, placements) in meshes {
        for losses in run(axes, placements) {
            for (found, expected) in losses.iter().zip(&one) {
                let off = (found - expected).abs() / expected;
                assert!(off < 1e-4, "{axes:?}: {losses:?}, expected {one:?}");
            }
        }
    }
}

/// Targets on land are huge or NaN; with a mask they do not affect training.
#[test]
fn land_reaches_no_parameter() {
    let run = |ranks: usize, land: f64| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", ranks)])?;
            let model = world.init(|device| Conv2dConfig::new([1, 1], [1, 1]).init(device))?;
            let rate = ModuleLrScheduler::new(1e-2);
            let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate);
            let sea = sample("sea", [1, 1, 7, 6], &mesh, &[Shard(2)])?;
            let (mask, is_land) = (sea.clone().greater_elem(-0.5), sea.clone().lower_elem(-0.5));
            let (mask, zeros) = (mask.float(), sea * 0.0);
            let hole = zeros.clone().mask_where(is_land, zeros + land);
            let x = sample("x", [1, 1, 7, 6], &mesh, &[Shard(2)])? * mask.clone();
            let ended = trainer.train_epoch(
                |_, first| first..4,
                |model, _| {
                    let y = x.clone().apply(model);
                    // Values under the mask differ from run to run.
                    let target = x.clone() * 3.0 + hole.clone();
                    weighted_loss(
                        y,
                        target,
                        mask.clone(),
                        Penalty::Huber(1.0),
                        Reduction::Mean,
                    )
                },
            )?;
            assert_eq!(ended, Ended::Completed);
            Ok(trainer.losses().to_vec())
        });
        found.unwrap().remove(0)
    };
    let expected = run(1, 0.0);
    assert!(expected[3] < expected[0]);
    for (ranks, land) in [(1, 1e30), (3, 1e30), (2, f64::NAN)] {
        for (found, expected) in run(ranks, land).iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
        }
    }
}

fn conv(device: &Device) -> Conv2d {
    Conv2dConfig::new([1, 1], [1, 1]).init(device)
}

/// Trains an epoch and validates with each of these scores.
fn validated(
    world: &World,
    folder: &std::path::Path,
    scores: &[f64],
) -> Result<(Vec<Validation>, Trainer<Conv2d>)> {
    let mesh = world.mesh([("lat", 2)])?;
    let rate = ModuleLrScheduler::new(1e-2);
    let mut trainer = Trainer::new(world, world.init(conv)?, SgdConfig::new().init(), rate)
        .with_patience(2)
        .resume_or_start(folder)?;
    let mut found = Vec::new();
    for score in scores {
        let ended = trainer.train_epoch(
            |_, first| first..2,
            |model, _| {
                let x = ShardTensor::<4>::ones([1, 1, 5, 3], &mesh, &[Shard(2)])?;
                Ok(x.apply(model).powi_scalar(2).mean())
            },
        )?;
        assert_eq!(ended, Ended::Completed);
        // Ranks other than the first cannot disagree.
        let local = score + if world.is_root() { 0.0 } else { 1.0 };
        found.push(trainer.validate(|model| {
            assert!(!model.weight.val().is_autodiff());
            Ok(local)
        })?);
    }
    trainer.finish()?;
    Ok((found, trainer))
}

#[test]
fn the_best_checkpoint_stays_and_patience_ends_a_run_after_a_resume_too() {
    let folder = tempfile::tempdir().unwrap();
    let run = |scores: &[f64]| {
        let found = Launcher::local(2).collect(|world| {
            let (validations, mut trainer) = validated(&world, folder.path(), scores)?;
            let best = trainer.best_model()?.expect("was saved");
            let best = best.weight.val().into_scalar::<f32>();
            Ok((
                validations,
                trainer.best_metric(),
                trainer.validations()?,
                best,
            ))
        });
        found.unwrap()
    };
    let mut first = run(&[3.0, 1.0, f64::NAN]);
    assert_eq!(format!("{:?}", first[0]), format!("{:?}", first[1]));
    let (validations, best, _, weight) = first.remove(0);
    assert_eq!(best, Some(1.0));
    let of = |found: &[Validation]| -> Vec<(bool, bool)> {
        found
            .iter()
            .map(|found| (found.is_best, found.stop))
            .collect()
    };
    assert_eq!(
        of(&validations),
        [(true, false), (true, false), (false, false)]
    );

    let (validations, best, all, same) = run(&[2.0, f64::NEG_INFINITY, 0.5, 0.7]).remove(0);
    let ends = [(false, true), (false, true), (true, false), (false, false)];
    assert_eq!(of(&validations), ends);
    assert_eq!(best, Some(0.5));
    assert_ne!(same, weight);
    let expected = [
        Some(3.0),
        Some(1.0),
        None,
        Some(2.0),
        None,
        Some(0.5),
        Some(0.7),
    ];
    let steps = (1..).map(|epoch| 2 * epoch);
    assert_eq!(all, steps.zip(expected).collect::<Vec<_>>());

    // Worse scores never displace the best checkpoint, however many.
    let (.., kept) = run(&[f64::NAN, 9.0, f64::NAN, 9.0, f64::INFINITY]).remove(0);
    assert_eq!(kept, same);
    let resumed = Launcher::local(2).collect(|world| {
        let (_, trainer) = validated(&world, folder.path(), &[])?;
        Ok(trainer.is_out_of_patience())
    });
    assert_eq!(resumed.unwrap(), [true, true]);
    let read = Launcher::local(1).run(|world| {
        let newest = Checkpoint::latest(&world, folder.path())?.expect("was saved");
        assert_eq!(newest.metric(), None);
        Ok(())
    });
    read.unwrap();
}

#[test]
fn a_higher_metric_is_the_best_if_the_configuration_says_so() {
    let found = Launcher::local(2).collect(|world| {
        let (rate, model) = (ModuleLrScheduler::new(1e-2), world.init(conv)?);
        let highest = CheckpointConfig::new().with_direction(Direction::Highest);
        let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate)
            .with_checkpoints(highest)
            .with_patience(2);
        let mut found = Vec::new();
        for metric in [0.5, 0.9, 0.7, 0.8] {
            let validation = trainer.validate(|_| Ok(metric))?;
            found.push((validation.is_best, validation.stop));
        }
        Ok((found, trainer.best_metric()))
    });
    let ends = vec![(true, false), (true, false), (false, false), (false, true)];
    assert_eq!(found.unwrap(), vec![(ends, Some(0.9)); 2]);
}

#[test]
fn scores_of_ensembles_are_those_of_the_definition_on_any_mesh() {
    const SHAPE: [usize; 5] = [3, 2, 1, 3, 4]; // [members, batch, variables, lat, lon]
    let [members, times, cells] = [SHAPE[0], SHAPE[1], 12];
    let weights = [0.75, 1.5, 0.75];
    let value = |i: usize| (i * 7 % 23) as f32 * 0.5 - i as f32 * 0.01;
    let field = |members: usize, offset: usize| {
        let values: Vec<f32> = (0..members * times * cells)
            .map(|i| value(i + offset))
            .collect();
        let flat = Tensor::<1>::from_floats(values.as_slice(), &Default::default());
        flat.reshape([members, SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4]])
    };
    let (ensemble, truth) = (field(members, 0), field(1, 1000));
    let x: Vec<f64> = ensemble.to_data().iter::<f64>().collect();
    let y: Vec<f64> = truth.to_data().iter::<f64>().collect();

    let m = members as f64;
    let mean = |score: &dyn Fn(&[f64], f64) -> f64| {
        let at = |index: usize| {
            let drawn: Vec<f64> = (0..members)
                .map(|member| x[member * times * cells + index])
                .collect();
            weights[index % cells / 4] * score(&drawn, y[index])
        };
        (0..times * cells).map(at).sum::<f64>() / (times * cells) as f64
    };
    let centre = |drawn: &[f64]| drawn.iter().sum::<f64>() / m;
    let rmse = mean(&|drawn, truth| (centre(drawn) - truth).powi(2)).sqrt();
    let variance = |drawn: &[f64]| {
        let squares = drawn.iter().map(|value| (value - centre(drawn)).powi(2));
        squares.sum::<f64>() / (m - 1.0)
    };
    let spread = mean(&|drawn, _| variance(drawn)).sqrt();
    let crps = mean(&|drawn, truth| {
        let errors: f64 = drawn.iter().map(|value| (value - truth).abs()).sum();
        let pairs = drawn
            .iter()
            .flat_map(|one| drawn.iter().map(move |other| (one - other).abs()));
        errors / m - pairs.sum::<f64>() / (2.0 * m * (m - 1.0))
    });
    let expected = [rmse, spread, crps, ((m + 1.0) / m).sqrt() * spread / rmse];
    let check = |scores: &Evaluation| {
        let found = scores.metrics()[0];
        let found = [found.rmse, found.spread, found.crps, found.spread_skill];
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
        }
    };
    let mut plain = Evaluation::new(&weights, 1);
    plain
        .add_ensemble(ensemble.clone(), truth.clone(), None)
        .unwrap();
    check(&plain);

    let run = Launcher::local(4).run(|world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        for placements in [
            [Shard(3), Shard(4)],
            [Shard(0), Shard(3)],
            [Shard(1), Shard(4)],
        ] {
            let shard = |field: &Tensor<5>| {
                let is_single = |placement| placement == Shard(0) && field.dims()[0] == 1;
                let placements = placements.map(|p| if is_single(p) { Replicate } else { p });
                ShardTensor::distribute(field.clone(), &mesh, &placements)
            };
            let mut sharded = Evaluation::new(&weights, 1);
            sharded.add_ensemble(shard(&ensemble)?, shard(&truth)?, None)?;
            check(&sharded);
        }
        Ok(())
    });
    run.unwrap();
}
