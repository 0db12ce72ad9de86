//! A neural surrogate of a rotating ocean, from simulation to forecast, sharded over ranks.
//!
//! - `weather simulate` runs the shallow-water equations from random initial states and writes field files;
//! - `weather train` trains a surrogate on them, from data on rank 0, and can resume: `--model cnn`, `unet` or `transformer`;
//! - `weather forecast` rolls it out on states that it has not seen, and compares with persistence and climatology;
//! - `weather demo` does all three.
//!
//! Ranks are threads (`--ranks N`) or, with the feature `mpi`, the processes that `mpirun` started.

mod forecast;
mod model;
mod simulate;
mod train;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use halocline::Ended;
use halocline::io::Statistics;
use halocline::prelude::*;

/// Variables of a state, by their names in files.
const VARIABLES: [&str; 3] = ["depth", "eastward_wind", "northward_wind"];

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
    /// Simulate trajectories to train and to test on.
    Simulate(simulate::Options),
    /// Train the surrogate.
    Train(train::Options),
    /// Forecast, and compare.
    Forecast(forecast::Options),
    /// Simulate, train and forecast.
    Demo {
        #[command(flatten)]
        simulate: simulate::Options,
        #[command(flatten)]
        train: train::Options,
        #[command(flatten)]
        forecast: forecast::Options,
    },
}

/// Options of all commands.
#[derive(Args, Clone)]
struct Common {
    /// Number of ranks, unless an MPI job sets it.
    #[arg(long, global = true, default_value_t = 1)]
    ranks: usize,
    /// The folder of all files, on a disk that all ranks see.
    #[arg(long, global = true, default_value = "forecast")]
    folder: PathBuf,
    /// The seed of initial states, parameters and the order of samples.
    #[arg(long, global = true, default_value_t = 1)]
    seed: u64,
}

impl Common {
    /// Means and standard deviations of the training files.
    fn statistics(&self) -> Result<Statistics> {
        Statistics::load(self.folder.join("data"))
            .map_err(|e| Error::other(format!("{e}; run `weather simulate` first")))
    }

    /// The folder of the checkpoints.
    fn model_folder(&self) -> PathBuf {
        self.folder.join("model")
    }

    fn train_files(&self) -> Result<Vec<PathBuf>> {
        self.files("train_")
    }

    fn test_files(&self) -> Result<Vec<PathBuf>> {
        self.files("test_")
    }

    /// Lists the field files of a kind, in order.
    fn files(&self, prefix: &str) -> Result<Vec<PathBuf>> {
        let folder = self.folder.join("data");
        let missing = |e: std::io::Error| {
            Error::other(format!(
                "{}: {e}; run `weather simulate` first",
                folder.display()
            ))
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
}

fn main() -> Result<()> {
    let Arguments {
        mut command,
        common,
    } = Arguments::parse();
    if let Command::Demo { train, .. } = &mut command {
        train.overwrite = true;
    }
    let mut launcher = Launcher::from_env().ranks(common.ranks).seed(common.seed);
    if std::env::var_os("HALOCLINE_TIMEOUT").is_none() {
        // The other ranks wait while rank 0 writes files and draws pictures.
        launcher = launcher.timeout(Duration::from_secs(900));
    }
    let ended = launcher.collect(|world| match &command {
        Command::Simulate(options) => {
            simulate::run(&world, &common, options).map(|()| Ended::Whole)
        }
        Command::Train(options) => train::run(&world, &common, options),
        Command::Forecast(options) => {
            forecast::run(&world, &common, options).map(|()| Ended::Whole)
        }
        Command::Demo {
            simulate,
            train,
            forecast,
        } => {
            simulate::run(&world, &common, simulate)?;
            if train::run(&world, &common, train)? == Ended::Interrupted {
                return Ok(Ended::Interrupted);
            }
            forecast::run(&world, &common, forecast).map(|()| Ended::Whole)
        }
    })?;
    if ended.contains(&Ended::Interrupted) {
        // Not complete: the exit status asks for another start.
        std::process::exit(75);
    }
    Ok(())
}

/// A mesh of latitude and longitude that is as square as the number of ranks allows.
fn square_mesh(world: &World) -> Result<DeviceMesh> {
    let size = world.size();
    let lat = (1..=size)
        .filter(|n| size.is_multiple_of(*n) && n * n <= size)
        .max()
        .unwrap_or(1);
    world.mesh([("lat", lat), ("lon", size / lat)])
}

/// Placements of fields `[batch, channels, lat, lon]` on [`square_mesh`].
const PLACEMENTS: [Placement; 2] = [Shard(2), Shard(3)];
