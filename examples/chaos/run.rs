//! Training run that is killed.

use std::io::Write;
use std::path::{Path, PathBuf};

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::AdamWConfig;
use clap::Args;
use halocline::models::parallel::{Plan, Store, init_parallel};
use halocline::models::{SurrogateCnnConfig, weighted_mse};
use halocline::prelude::*;
use halocline::{Ended, Trainer};

/// Short epochs, as the newest step on disk is reported after each.
const EPOCHS: usize = 120;
const BATCHES: usize = 2;
/// [batch, variables, lat, lon].
const SHAPE: [usize; 4] = [1, 2, 17, 24];

#[derive(Args)]
pub(crate) struct Options {
    /// Folder of the checkpoints.
    folder: PathBuf,
    /// Number of ranks, unless an MPI job sets it.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Whether each rank holds a part of the parameters.
    #[arg(long)]
    sharded: bool,
}

/// Trains to the end, and reports to the driver on stdout.
pub(crate) fn train(options: &Options) -> Result<()> {
    Launcher::from_env()
        .ranks(options.ranks)
        .seed(5)
        .run(|world| {
            report(&format!("process {}", std::process::id()));
            let mesh = world.mesh([("lat", world.size())])?;
            let normal = Distribution::Normal(0.0, 1.0);
            let field = |name: &str, batch| {
                let key = RandomKey::new(world.seed(), (name, batch));
                ShardTensor::random(SHAPE, normal, key, &mesh, &[Shard(2)])
            };
            let config = SurrogateCnnConfig::new(2).with_width(6).with_blocks(2);
            let plan = if options.sharded {
                Plan::default().with_store(Store::new("**", "lat"))
            } else {
                Plan::default()
            };
            let model = init_parallel(&world, &mesh, &plan, |device| config.init(device))?;
            let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, EPOCHS * BATCHES)
                .init()
                .map_err(Error::other)?;
            let mut trainer = Trainer::new(&world, model, AdamWConfig::new().init(), schedule)
                .with_save_every(2)
                .resume_or_start(&options.folder)?;
            let weights = vec![1.0; SHAPE[2]];
            let mut reported = trainer.last_committed_step();
            while trainer.epoch() < EPOCHS {
                let epoch = trainer.epoch();
                let ended = trainer.train_epoch(
                    |_, first| first..BATCHES,
                    |model, batch| {
                        report("step");
                        let x = field("x", (epoch, batch))?;
                        let target = field("target", (epoch, batch))?;
                        weighted_mse(x.apply(model), target, &weights)
                    },
                )?;
                assert_eq!(ended, Ended::Completed);
                if trainer.last_committed_step() != reported {
                    reported = trainer.last_committed_step();
                    reported
                        .into_iter()
                        .for_each(|step| report(&format!("written {step}")));
                }
            }
            report("end");
            trainer.finish()?;
            if world.is_root() {
                let bits = trainer.losses().iter().flat_map(|loss| loss.to_le_bytes());
                std::fs::write(path(&options.folder), bits.collect::<Vec<_>>())?;
            }
            Ok(())
        })
}

/// Writes a line in one call, as ranks share the pipe.
fn report(line: &str) {
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
}

fn path(folder: &Path) -> PathBuf {
    folder.join("losses")
}

/// Returns the bits of the losses of a finished run.
pub(crate) fn losses_of(folder: &Path) -> Result<Vec<u64>> {
    let bytes = std::fs::read(path(folder))?;
    Ok(bytes
        .chunks_exact(8)
        .map(|bits| u64::from_le_bytes(bits.try_into().expect("8 bytes")))
        .collect())
}
