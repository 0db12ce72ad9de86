//! Training of the surrogate, from data on rank 0.

use std::path::PathBuf;
use std::time::Instant;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use clap::Args;
use halocline::io::{DatasetConfig, FieldDataset, FieldLoader, LoaderConfig, Order, Progress};
use halocline::models::{SurrogateCnn, SurrogateCnnConfig, weighted_mse};
use halocline::ops::loss_value;
use halocline::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{Common, PLACEMENTS, VARIABLES, square_mesh};

#[derive(Args)]
pub(crate) struct Options {
    /// Passes over the samples, in all; the learning rate falls over all of them.
    #[arg(long, default_value_t = 8)]
    epochs: usize,
    /// Samples in a batch, over all ranks.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// The learning rate at the start; it falls to a hundredth along a cosine.
    #[arg(long, default_value_t = 3e-3)]
    learning_rate: f64,
    /// Channels of the hidden fields.
    #[arg(long, default_value_t = 24)]
    width: usize,
    /// Residual blocks.
    #[arg(long, default_value_t = 4)]
    blocks: usize,
    /// Go on from the last finished epoch, with the options of then but for the number of epochs.
    #[arg(long)]
    resume: bool,
}

/// What is kept beside the records: how training was started and how far it has come.
#[derive(Serialize, Deserialize)]
struct Progressed {
    epochs_done: usize,
    batch: usize,
    learning_rate: f64,
    seed: u64,
    width: usize,
    blocks: usize,
}

/// Sine and cosine of latitude, which tell a cell where it is.
const CONSTANTS: usize = 2;

pub(crate) fn run(world: &World, common: &Common, options: &Options) -> Result<()> {
    let mesh = square_mesh(world)?;
    let statistics = common.statistics()?;
    let latitudes = statistics.metadata().grid().lat().to_vec();
    let records = Records(common.folder.join("model"));
    let mut done = if options.resume {
        records.progressed()?
    } else {
        Progressed {
            epochs_done: 0,
            batch: options.batch,
            learning_rate: options.learning_rate,
            seed: common.seed,
            width: options.width,
            blocks: options.blocks,
        }
    };
    let files = common.train_files()?;
    let config = LoaderConfig::new(done.batch).with_order(Order::Shuffled { seed: done.seed });
    let loader = FieldLoader::new(&mesh, &PLACEMENTS, &config, || {
        FieldDataset::open(&files, &DatasetConfig::new())?.with_statistics(&statistics)
    })?;
    let mut optimizer = AdamWConfig::new()
        .with_weight_decay(1e-5)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    let steps = options.epochs * loader.batches();
    let mut schedule = CosineAnnealingLrSchedulerConfig::new(done.learning_rate, steps.max(1))
        .with_min_lr(done.learning_rate / 100.0)
        .init()
        .map_err(Error::other)?;
    let mut model = if options.resume {
        optimizer = optimizer
            .load(records.path(&done, "optimizer"))
            .map_err(wrong_record)?;
        let record =
            LrSchedulerRecord::load(records.path(&done, "schedule")).map_err(wrong_record)?;
        schedule = schedule.load_record(record);
        records.model(world, &done)?
    } else {
        world.init(|device| model_config(&done).init(device))?
    };
    world.check_replicas(&model)?;

    // Normalised increments are small and differ by variable: weigh them alike.
    let scales: Vec<f64> = statistics
        .stds()
        .iter()
        .zip(statistics.increment_stds())
        .map(|(std, increment)| std / increment)
        .collect();
    let weights = statistics.metadata().grid().latitude_weights();
    for epoch in done.epochs_done..options.epochs {
        let start = Instant::now();
        let progress = Progress::new(
            world.rank(),
            format!("epoch {}", epoch + 1),
            loader.batches(),
        );
        let mut total = 0.0;
        for batch in loader.epoch(epoch) {
            let batch = batch?;
            let forecast = with_constants(batch.input, &latitudes).apply(&model);
            let scale = forecast.profile(1, &scales);
            let loss =
                weighted_mse(forecast * scale.clone(), batch.target * scale, &weights).resolve();
            total += loss_value(&loss);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(schedule.step(), model, gradients);
            progress.advance();
        }
        progress.finish();
        done.epochs_done = epoch + 1;
        if world.is_root() {
            let optimizer = optimizer.into_bytes().map_err(wrong_record)?;
            let schedule = schedule.to_record().into_bytes().map_err(wrong_record)?;
            let record = model
                .clone()
                .into_record()
                .into_bytes()
                .map_err(wrong_record)?;
            records.save(
                [
                    ("model", &record[..]),
                    ("optimizer", &optimizer[..]),
                    ("schedule", &schedule[..]),
                ],
                &done,
            )?;
            println!(
                "epoch {:>2}: loss {:.4} of the increments' variance, {:.1} s",
                epoch + 1,
                total / loader.batches() as f64,
                start.elapsed().as_secs_f64()
            );
        }
    }
    world.barrier()
}

fn model_config(made: &Progressed) -> SurrogateCnnConfig {
    SurrogateCnnConfig::new(VARIABLES.len())
        .with_constants(CONSTANTS)
        .with_width(made.width)
        .with_blocks(made.blocks)
}

/// The trained model.
pub(crate) fn load(world: &World, common: &Common) -> Result<SurrogateCnn> {
    let records = Records(common.folder.join("model"));
    records.model(world, &records.progressed()?)
}

/// Normalised states `[batch, variables, lat, lon]` with the constant channels after them.
pub(crate) fn with_constants<X: Field<4>>(x: X, latitudes: &[f64]) -> X {
    let nothing = x.clone().slice_of(1, 0..1) * 0.0;
    let constant = |of: fn(f64) -> f64| {
        let values: Vec<f64> = latitudes
            .iter()
            .map(|latitude| of(latitude.to_radians()))
            .collect();
        nothing.clone() + nothing.profile(2, &values)
    };
    let constants = [constant(f64::sin), constant(f64::cos)];
    X::join([vec![x], constants.to_vec()].concat(), 1)
}

fn wrong_record(error: impl std::fmt::Display) -> Error {
    Error::other(format!("record: {error}"))
}

/// burn records, in a folder for each epoch of which one is kept.
struct Records(PathBuf);

impl Records {
    fn path(&self, done: &Progressed, name: &str) -> PathBuf {
        let epoch = format!("epoch_{:03}", done.epochs_done);
        self.0.join(epoch).join(format!("{name}.bpk"))
    }

    /// Writes the records of an epoch, and then how far training has come, which names them: until that file takes the
    /// place of the last one, the records of the epoch before are those that count.
    fn save(&self, records: [(&str, &[u8]); 3], done: &Progressed) -> Result<()> {
        for (name, bytes) in records {
            let path = self.path(done, name);
            std::fs::create_dir_all(path.parent().unwrap_or(&self.0))?;
            std::fs::write(path, bytes)?;
        }
        let json = serde_json::to_vec_pretty(done).map_err(Error::other)?;
        let partial = self.0.join("training.partial");
        std::fs::write(&partial, json)?;
        std::fs::rename(partial, self.0.join("training.json"))?;

        let kept = self.path(done, "model");
        for entry in std::fs::read_dir(&self.0)? {
            let folder = entry?.path();
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("epoch_") && !kept.starts_with(&folder) {
                std::fs::remove_dir_all(folder)?;
            }
        }
        Ok(())
    }

    fn progressed(&self) -> Result<Progressed> {
        let path = self.0.join("training.json");
        let bytes = std::fs::read(&path).map_err(|e| {
            Error::other(format!(
                "{}: {e}; run `weather train` first",
                path.display()
            ))
        })?;
        serde_json::from_slice(&bytes).map_err(|e| Error::other(format!("{}: {e}", path.display())))
    }

    fn model(&self, world: &World, made: &Progressed) -> Result<SurrogateCnn> {
        let fresh = world.init(|device| model_config(made).init(device))?;
        fresh
            .try_load_file(self.path(made, "model"))
            .map_err(wrong_record)
    }
}
