//! A neural surrogate of a rotating ocean, from simulation to forecast, sharded over ranks.
//!
//! - `weather simulate` runs the shallow-water equations from random initial states and writes
//!   field files;
//! - `weather train` trains a surrogate on them: `--model cnn`, `unet` or `transformer`. Run again,
//!   it resumes from the last checkpoint;
//! - `weather score` forecasts from unseen states, and compares with persistence and climatology;
//! - `weather demo` does all three.
//!
//! Training and scoring are those of [`Experiment`], configured by
//! `examples/configs/shallow_water.toml`. Ranks are threads (`--ranks N`) or the processes of a
//! job.

mod simulate;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use halocline::Ended;
use halocline::experiment::{CheckpointChoice, Experiment, ExperimentConfig, ModelConfig};
use halocline::io::save_json;
use halocline::prelude::*;

#[derive(Parser)]
#[command(about = "A neural surrogate of a rotating ocean")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Subcommand)]
enum Command {
    /// Simulate trajectories to train and to test on
    Simulate(simulate::Options),
    /// Train the surrogate, resuming from the last checkpoint if there is one
    Train(Training),
    /// Forecast from unseen states, and compare
    Score(Forecasts),
    /// Simulate, train and score
    Demo {
        #[command(flatten)]
        simulate: simulate::Options,
        #[command(flatten)]
        training: Training,
        #[command(flatten)]
        forecasts: Forecasts,
    },
}

/// Options of all commands.
#[derive(Args)]
struct Common {
    /// Number of ranks, unless set by a job
    #[arg(long, global = true, default_value_t = 1)]
    ranks: usize,
    /// Folder of all files, on a disk visible to all ranks
    #[arg(long, global = true, default_value = "forecast")]
    folder: PathBuf,
    /// Seed of initial states, parameters and the order of samples
    #[arg(long, global = true, default_value_t = 1)]
    seed: u64,
}

#[derive(Args)]
#[group(id = "training")]
struct Training {
    /// Model
    #[arg(long, value_enum, default_value_t = Kind::Cnn)]
    model: Kind,
    /// Total passes over the samples; the learning rate decays over all of them
    #[arg(long)]
    epochs: Option<usize>,
    /// Remove an earlier training run in this folder
    #[arg(long)]
    overwrite: bool,
}

/// Models that train well in a few minutes.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// Residual convolutional network
    Cnn,
    /// Encoder and decoder with skip connections
    Unet,
    /// Neighborhood attention between patches
    Transformer,
}

impl Kind {
    fn config(self) -> ModelConfig {
        match self {
            Self::Cnn => ModelConfig::Cnn {
                width: 24,
                blocks: 4,
                kernel: 3,
                recompute: false,
                mask: None,
            },
            Self::Unet => ModelConfig::Unet {
                width: 16,
                levels: 2,
                recompute: false,
                mask: None,
            },
            Self::Transformer => ModelConfig::Transformer {
                d_model: 64,
                heads: 4,
                blocks: 4,
                dense_blocks: 0,
                tokens: 0,
                patch: [2, 2],
                kernel: [7, 7],
                recompute: false,
            },
        }
    }
}

#[derive(Args)]
#[group(id = "forecasts")]
struct Forecasts {
    /// Longest lead time, in steps of the data
    #[arg(long)]
    steps: Option<usize>,
}

impl Common {
    /// Lists the field files with a prefix, in order.
    fn files(&self, prefix: &str) -> Result<Vec<PathBuf>> {
        let folder = self.folder.join("data");
        let missing = |error: std::io::Error| {
            let folder = folder.display();
            Error::other(format!("{folder}: {error}; run `weather simulate` first"))
        };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(missing)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(prefix) && name.ends_with(".h5") {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Returns the folder of the experiment.
    fn model_folder(&self) -> PathBuf {
        self.folder.join("model")
    }
}

fn main() -> Result<()> {
    let Arguments {
        mut command,
        common,
    } = Arguments::parse();
    if let Command::Demo { training, .. } = &mut command {
        training.overwrite = true;
    }
    let begins_anew = match &command {
        Command::Train(training) | Command::Demo { training, .. } => training.overwrite,
        _ => false,
    };
    let config = ExperimentConfig::from_toml(include_str!("../configs/shallow_water.toml"))?;
    let config = ExperimentConfig {
        folder: common.model_folder(),
        seed: common.seed,
        ..config
    };
    let ended = config.launcher(common.ranks).collect(|world| {
        match &command {
            Command::Simulate(options) => simulate::run(&world, &common, options)?,
            Command::Train(options) => return train(&world, &common, &config, options),
            Command::Score(options) => score(&world, &common, options)?,
            Command::Demo {
                simulate,
                training,
                forecasts,
            } => {
                simulate::run(&world, &common, simulate)?;
                if train(&world, &common, &config, training)? == Ended::Interrupted {
                    return Ok(Ended::Interrupted);
                }
                score(&world, &common, forecasts)?;
            }
        }
        Ok(Ended::Completed)
    })?;
    match ended.contains(&Ended::Interrupted) {
        true if begins_anew => Err(Error::other("interrupted; `weather train` goes on")),
        // Incomplete: the exit status asks for a restart.
        true => std::process::exit(75),
        false => Ok(()),
    }
}

fn train(
    world: &World,
    common: &Common,
    config: &ExperimentConfig,
    options: &Training,
) -> Result<Ended> {
    let mut config = config.clone();
    config.data.files = common.files("train_")?;
    config.model = options.model.config();
    if let Some(epochs) = options.epochs {
        config.training.epochs = epochs;
    }
    if options.overwrite && world.is_root() && config.folder.exists() {
        std::fs::remove_dir_all(&config.folder)?;
    }
    world.barrier()?;
    Experiment::new(world, &config)?.train()
}

fn score(world: &World, common: &Common, options: &Forecasts) -> Result<()> {
    // The configuration of the training run, whose folder may have been renamed since.
    let config = ExperimentConfig::load(common.model_folder().join("experiment.toml"))
        .map_err(|error| Error::other(format!("{error}; run `weather train` first")))?;
    let config = ExperimentConfig {
        folder: common.model_folder(),
        ..config
    };
    let mut forecast = config.forecast.clone();
    if let Some(steps) = options.steps {
        forecast.steps = steps;
    }
    let experiment = Experiment::of_files(world, &config, &common.files("test_")?)?;
    let model = experiment.trained(CheckpointChoice::Best)?;
    let report = experiment.score(&model, &forecast)?;
    save_json(world, common.folder.join("scores.json"), &report.rows)?;
    let pictures = common.folder.join("pictures");
    let drawn = experiment.save_pictures(&model, &forecast, &report, pictures)?;
    if world.is_root() {
        println!("{report}\nlook at:");
        for path in drawn {
            println!("  {}", path.display());
        }
    }
    Ok(())
}
