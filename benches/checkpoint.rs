//! Cost of saving in a training run, and bytes read by loading: `cargo bench --bench checkpoint`.
//!
//! Three trainers train the demo's model in turn, twenty steps each: one saves nothing, one saves
//! once in these twenty steps, in the background, and one does not check that losses and gradients
//! are finite. Then the bench times the comparison of replicas, which is part of every save, and
//! four ranks load the checkpoint and count the bytes that they read.

use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamWConfig;
use halocline::io::{CheckpointConfig, Checkpoints};
use halocline::models::{SurrogateCnn, SurrogateCnnConfig, weighted_mse};
use halocline::prelude::*;
use halocline::{Ended, NonFinite, Trainer};
use median::median;

mod median;

/// [batch, variables, lat, lon]
const SHAPE: [usize; 4] = [1, 5, 128, 256];
const VARIABLES: usize = 3;
const STEPS: usize = 20;

fn main() -> Result<()> {
    let repetitions = if std::env::args().any(|argument| argument == "--test") {
        2
    } else {
        15
    };
    let folder = tempfile::tempdir()?;
    println!("{:<58}{:>12}{:>12}{:>9}", "", "with", "without", "ratio");
    for ranks in [1, 2] {
        let folder = folder.path().join(ranks.to_string());
        let times = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", world.size())])?;
            let normal = Distribution::Normal(0.0, 1.0);
            let x = ShardTensor::random(SHAPE, normal, RandomKey::new(1, "x"), &mesh, &[Shard(2)])?;
            let target = x.clone().narrow(1, 0, VARIABLES);
            let weights = vec![1.0; SHAPE[2]];
            let mut trainers = [
                trainer(&world)?
                    .with_save_every(STEPS as u64)
                    .resume_or_start(&folder)?,
                trainer(&world)?,
                trainer(&world)?.with_non_finite(NonFinite::Allow),
            ];
            let train = |trainer: &mut Trainer<SurrogateCnn>, steps: usize| {
                let ended = trainer.train_epoch(
                    |_, first| first..steps,
                    |model, _| {
                        let y = x.clone().apply(model);
                        weighted_mse(y, target.clone(), &weights)
                    },
                )?;
                assert_eq!(ended, Ended::Completed);
                world.barrier()
            };
            // The save starts in the middle of the measured steps, and is written during them.
            for trainer in &mut trainers {
                train(trainer, STEPS / 2)?;
            }
            let mut times = [Vec::new(), Vec::new(), Vec::new()];
            for _ in 0..=repetitions {
                for (trainer, times) in trainers.iter_mut().zip(&mut times) {
                    let start = Instant::now();
                    train(trainer, STEPS)?;
                    times.push(start.elapsed().as_secs_f64() / STEPS as f64 * 1e3);
                }
            }
            // The first round warms up.
            let [saves, looks, plain] = times.map(|times| median(times[1..].to_vec()));
            let compared = (0..repetitions).map(|_| {
                let start = Instant::now();
                world.check_replicas(trainers[0].model())?;
                Ok(start.elapsed().as_secs_f64() * 1e3)
            });
            let compared = median(compared.collect::<Result<_>>()?);
            Ok([saves, looks, plain, compared])
        })?;
        let [saves, looks, plain, compared] = times[0];
        for (what, with, without) in [
            (format!("a save in {STEPS} steps"), saves, looks),
            ("a look at losses and gradients".into(), looks, plain),
        ] {
            let what = format!("step of the demo's model, {ranks} local ranks: {what}");
            println!(
                "{what:<58}{with:>9.2} ms{without:>9.2} ms{:>9.3}",
                with / without
            );
        }
        let what = format!("comparison of its replicas, {ranks} local ranks (of a step)");
        println!(
            "{what:<58}{compared:>9.2} ms{looks:>9.2} ms{:>9.3}",
            compared / looks
        );
    }

    let read = Launcher::local(4).collect(|world| {
        let mut checkpoints =
            Checkpoints::open(&world, folder.path().join("2"), &CheckpointConfig::new())?;
        let checkpoint = checkpoints.latest()?.expect("it was saved");
        let before = bytes_read()?;
        let model = checkpoint.module(&world, "model", model(&world)?)?;
        checkpoint.optimizer(&world, "optimizer", AdamWConfig::new().init(), &model)?;
        let rate = ModuleLrScheduler::new(1e-3);
        checkpoint.schedule(&world, "schedule", rate)?;
        checkpoint.tensor_data(&world, "losses")?;
        let read = bytes_read()? - before;
        let mut state = 0;
        for name in checkpoint.names() {
            state += checkpoint.data(name)?.as_bytes().len() as u64;
        }
        Ok((read, state))
    })?;
    let (total, state) = (read.iter().map(|(read, _)| read).sum::<u64>(), read[0].1);
    println!(
        "bytes read by four ranks, saved by two: {total} of a state of {state}, ratio {:.3}",
        total as f64 / state as f64
    );
    Ok(())
}

fn model(world: &World) -> Result<SurrogateCnn> {
    let config = SurrogateCnnConfig::new(VARIABLES)
        .with_constants(2)
        .with_width(24);
    world.init(|device| config.init(device))
}

fn trainer(world: &World) -> Result<Trainer<SurrogateCnn>> {
    let optimizer = AdamWConfig::new().init();
    Ok(Trainer::new(
        world,
        model(world)?,
        optimizer,
        ModuleLrScheduler::new(1e-3),
    ))
}

/// Bytes that this thread has read from files, as counted by Linux.
fn bytes_read() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/thread-self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.and_then(|bytes| bytes.parse().ok())
        .ok_or_else(|| Error::other("no rchar"))
}
