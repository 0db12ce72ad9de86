//! Training of the surrogate, from data on rank 0.

use std::path::Path;
use std::time::Instant;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use clap::Args;
use halocline::io::{
    Checkpoint, CheckpointConfig, Checkpoints, DatasetConfig, FieldDataset, FieldLoader,
    LoaderConfig, Order, Progress,
};
use halocline::models::weighted_mse;
use halocline::ops::optim::FusedAdamWConfig;
use halocline::prelude::*;
use halocline::{Ended, Trainer};
use serde::{Deserialize, Serialize};

use crate::model::{Kind, Size, Surrogate};
use crate::{Common, PLACEMENTS, VARIABLES, square_mesh};

#[derive(Args)]
#[group(id = "train")]
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
    /// The model.
    #[arg(long, value_enum, default_value_t = Kind::Cnn)]
    model: Kind,
    /// Channels of the hidden fields; by default 24, 16 or 64.
    #[arg(long)]
    width: Option<usize>,
    /// Residual blocks, levels or blocks of attention; by default 4, 2 or 4.
    #[arg(long)]
    blocks: Option<usize>,
    /// Number of steps between saves.
    #[arg(long, default_value_t = 20)]
    save_every: u64,
    /// Go on from the last checkpoint, with the options of then but for the number of epochs.
    #[arg(long)]
    resume: bool,
    /// Remove an earlier training of this folder.
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// Settings of a training, kept beside the checkpoints.
#[derive(Serialize, Deserialize)]
struct Settings {
    batch: usize,
    learning_rate: f64,
    seed: u64,
    model: Kind,
    size: Size,
}

/// Constant channels: sine and cosine of latitude.
const CONSTANTS: usize = 2;

pub(crate) fn run(world: &World, common: &Common, options: &Options) -> Result<Ended> {
    let mesh = square_mesh(world)?;
    let statistics = common.statistics()?;
    let latitudes = statistics.metadata().grid().lat().to_vec();
    let folder = common.model_folder();
    let settings = match options.resume {
        true => Settings::load(&folder)?,
        false => Settings::new(common, options),
    };
    // Before an earlier training is removed: a size that does not fit ends the program here.
    let model = world.init(|device| settings.model.init(settings.size, device))?;
    let parameters = model.num_params();
    let files = common.train_files()?;
    let order = Order::Shuffled {
        seed: settings.seed,
    };
    let config = LoaderConfig::new(settings.batch).with_order(order);
    let loader = FieldLoader::new(&mesh, &PLACEMENTS, &config, || {
        FieldDataset::open(&files, &DatasetConfig::new())?.with_statistics(&statistics)
    })?;
    let optimizer = FusedAdamWConfig::new()
        .with_weight_decay(1e-5)
        // This clips the gradient of each tensor; for the norm of the whole model see
        // Trainer::with_gradient_hook.
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    // After all that can be wrong with options and data.
    if !options.resume {
        begin(world, &folder, &settings, options.overwrite)?;
    }
    let steps = options.epochs * loader.batches();
    let schedule = CosineAnnealingLrSchedulerConfig::new(settings.learning_rate, steps.max(1))
        .with_min_lr(settings.learning_rate / 100.0)
        .init()
        .map_err(Error::other)?;
    let mut trainer = Trainer::new(world, model, optimizer, schedule)
        .with_save_every(options.save_every)
        .resume_or_start(&folder)?;

    // Normalised increments are small and differ by variable: the loss weighs them equally.
    let scales: Vec<f64> = statistics
        .stds()
        .iter()
        .zip(statistics.increment_stds())
        .map(|(std, increment)| std / increment)
        .collect();
    let weights = statistics.metadata().grid().latitude_weights();
    while trainer.epoch() < options.epochs {
        let (epoch, first) = (trainer.epoch(), trainer.batch());
        let (start, count) = (Instant::now(), loader.batches());
        let progress = Progress::new(world.rank(), format!("epoch {}", epoch + 1), count - first);
        let ended = trainer.train_epoch(loader.epoch_from(epoch, first), |model, batch| {
            let batch = batch?;
            let forecast = with_constants(batch.input, &latitudes).apply(model);
            let scale = forecast.profile(1, &scales);
            progress.advance();
            Ok(weighted_mse(
                forecast * scale.clone(),
                batch.target * scale,
                &weights,
            ))
        })?;
        progress.finish();
        if ended == Ended::Interrupted {
            if world.is_root() {
                println!("interrupted; `weather train --resume` goes on");
            }
            return Ok(ended);
        }
        let losses = trainer.losses();
        let mean = losses[losses.len() - count..].iter().sum::<f64>() / count as f64;
        if world.is_root() {
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "epoch {:>2}: loss {mean:.4} of the increments' variance, {seconds:.1} s",
                epoch + 1
            );
            if epoch == 0 {
                let step = 1e3 * seconds / (count - first).max(1) as f64;
                let memory =
                    peak_memory().map_or(String::new(), |mib| format!(", {mib} MiB at most"));
                println!("{parameters} parameters, {step:.0} ms per step{memory}");
            }
        }
    }
    trainer.finish()?;
    Ok(Ended::Whole)
}

/// Starts anew: removes the checkpoints of an earlier training, if it may, and writes the settings
/// of this one.
fn begin(world: &World, folder: &Path, settings: &Settings, overwrite: bool) -> Result<()> {
    // While this is open, no other job has the folder.
    let _checkpoints = Checkpoints::open(world, folder, &CheckpointConfig::new())?;
    if Checkpoint::latest(world, folder)?.is_some() && !overwrite {
        return Err(Error::other(format!(
            "{} holds a training: go on with --resume, or begin anew with --overwrite",
            folder.display()
        )));
    }
    if world.is_root() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("step_") {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        let json = serde_json::to_vec_pretty(settings).map_err(Error::other)?;
        std::fs::write(folder.join(SETTINGS), json)?;
    }
    world.barrier()
}

/// The name of the file of [`Settings`].
const SETTINGS: &str = "training.json";

impl Settings {
    fn new(common: &Common, options: &Options) -> Self {
        let [width, blocks] = options.model.defaults();
        Self {
            batch: options.batch,
            learning_rate: options.learning_rate,
            seed: common.seed,
            model: options.model,
            size: Size {
                variables: VARIABLES.len(),
                constants: CONSTANTS,
                width: options.width.unwrap_or(width),
                blocks: options.blocks.unwrap_or(blocks),
            },
        }
    }

    fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(SETTINGS);
        let failed = |e: std::io::Error| {
            Error::other(format!(
                "{}: {e}; run `weather train` first",
                path.display()
            ))
        };
        let bytes = std::fs::read(&path).map_err(failed)?;
        serde_json::from_slice(&bytes).map_err(|e| failed(e.into()))
    }
}

/// Loads the trained model.
pub(crate) fn load(world: &World, common: &Common) -> Result<Surrogate> {
    let folder = common.model_folder();
    let settings = Settings::load(&folder)?;
    let model = world.init(|device| settings.model.init(settings.size, device))?;
    match Checkpoint::latest(world, &folder)? {
        Some(checkpoint) => checkpoint.module(world, "model", model),
        None => Err(Error::other(format!(
            "{}: no checkpoint; run `weather train` first",
            folder.display()
        ))),
    }
}

/// The most memory that this process has had so far, in MiB, where the system tells.
fn peak_memory() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(kib / 1024)
}

/// Appends the constant channels to normalised states `[batch, variables, lat, lon]`.
pub(crate) fn with_constants<X: Field<4>>(x: X, latitudes: &[f64]) -> X {
    let zeros = x.clone().narrow(1, 0, 1) * 0.0;
    let constant = |function: fn(f64) -> f64| {
        let values: Vec<f64> = latitudes
            .iter()
            .map(|latitude| function(latitude.to_radians()))
            .collect();
        zeros.clone() + zeros.profile(2, &values)
    };
    let constants = [constant(f64::sin), constant(f64::cos)];
    X::cat([vec![x], constants.to_vec()].concat(), 1)
}
