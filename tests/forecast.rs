//! Training for forecasts: several steps, ensembles, masks, poles, validation, on any mesh.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use halocline::core::Halos;
use halocline::io::Checkpoint;
use halocline::models::{
    CrpsEstimator, FieldConv2d, FieldConv2dConfig, crps, energy_score, perturbed, rollout,
};
use halocline::prelude::*;
use halocline::{Ended, Trainer, Validation};

#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod trainer;

use trainer::sample;

const MEMBERS: usize = 4;
const STEPS: usize = 3;
const ROWS: usize = 5;

/// Two fields of a state with a wind, and one forcing, across the poles.
fn config() -> FieldConv2dConfig {
    FieldConv2dConfig::new([3, 2], [3, 3])
        .with_boundary([Boundary::PoleEdge, Boundary::Periodic])
        .with_odd(vec![1])
}

/// Losses of five steps that train an ensemble of forecasts of three steps.
fn train(world: &World, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Vec<f64>> {
    let model = world.init(|device| config().init(device))?;
    let rate = ModuleLrScheduler::new(3e-3);
    let mut trainer = Trainer::new(world, model, AdamWConfig::new().init(), rate);
    let axis = mesh.shape().names().iter().any(|name| *name == "member");
    let axis = axis.then_some("member");
    let input = sample("input", [1, 2, ROWS, 8], mesh, placements)?;
    let forcing = sample("forcing", [1, STEPS, ROWS, 8], mesh, placements)?;
    let target = sample("target", [1, 2 * STEPS, ROWS, 8], mesh, placements)?;
    let _ = trainer.train_epoch(0..5_u64, |model, batch| {
        let key = RandomKey::new(world.seed(), ("members", batch));
        let states = perturbed(input.clone(), MEMBERS, 0.3, key, axis)?;
        let forcing = RearrangeField::cat(vec![forcing.clone(); MEMBERS], 0);
        let forcing = forcing.redistribute(states.placements());
        let forecast = rollout(states, Some(forcing), STEPS, &[0, 1], |_, x| {
            // The memory of a step is that of its input.
            Ok(x.recompute(model, Halos::Keep, |model: &FieldConv2d, x| x.apply(model)))
        })?;
        let ensemble = forecast.unflatten::<5>(0, &[MEMBERS, 1]);
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
    })?;
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
    let meshes: [Mesh; 5] = [
        (&[("member", 2)], &[Replicate]),
        (&[("member", 4)], &[Replicate]),
        (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)]),
        (&[("member", 2), ("lat", 2)], &[Replicate, Shard(2)]),
        (&[("member", 2), ("lon", 3)], &[Replicate, Shard(3)]),
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

/// Land holds NaN in inputs and targets; training with a mask neither sees it nor ends.
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
            let ended = trainer.train_epoch(0..4, |model, _| {
                let y = x.clone().apply(model);
                // What lies under the mask differs from run to run.
                let target = x.clone() * 3.0 + hole.clone();
                weighted_loss(
                    y,
                    target,
                    mask.clone(),
                    Penalty::Huber(1.0),
                    Reduction::Mean,
                )
            })?;
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
        let ended = trainer.train_epoch(0..2, |model, _| {
            let x = ShardTensor::<4>::ones([1, 1, 5, 3], &mesh, &[Shard(2)])?;
            Ok(x.apply(model).powi_scalar(2).mean())
        })?;
        assert_eq!(ended, Ended::Completed);
        // Ranks other than the first cannot disagree.
        let own = score + if world.is_root() { 0.0 } else { 1.0 };
        found.push(trainer.validate(|model| {
            assert!(!model.weight.val().is_autodiff());
            Ok(own)
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
                trainer.best_score(),
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

    // Bad scores never displace it, however many.
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
