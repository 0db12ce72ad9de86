//! The program `halocline`: inspects and prepares data for training on a mesh; trains, forecasts
//! and scores.
//!
//! Each data subcommand has a module with its `Options` and `run`; the experiment subcommands share
//! one module.

mod convert;
mod experiment;
mod hints;
mod inspect;
mod reading;
mod rechunk;
mod report;
mod stats;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Parser, Subcommand};
use signal_hook::consts::SIGPIPE;
use signal_hook::flag::register_conditional_shutdown;

use report::{in_keys, in_options};

#[derive(Parser)]
#[command(
    version,
    about = "Fields on a grid, sharded over ranks: data, training, forecasts"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the content of files and stores: grid, times, variables, chunks, missing values,
    /// problems
    Inspect(inspect::Options),
    /// Convert files or stores of any format to Zarr or NetCDF; several are joined into one time
    /// axis
    Convert(convert::Options),
    /// Rewrite a store with chunks that fit the shards of a mesh
    Rechunk(rechunk::Options),
    /// Compute means and standard deviations for normalisation
    Stats(stats::Options),
    /// Train a model, from the newest checkpoint on; exit code 75 means that epochs are
    /// left, after a signal or at the time limit: start again
    Train(experiment::TrainOptions),
    /// Write forecasts of a trained model as Zarr or NetCDF
    Forecast(experiment::ForecastOptions),
    /// Score forecasts of the test period against persistence and climatology
    Score(experiment::ScoreOptions),
    /// Package a trained model for forecasts from other files, elsewhere
    Package(experiment::PackageOptions),
    /// Estimate memory, traffic and time of training on a mesh, before it runs
    Plan(experiment::PlanOptions),
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    let told: fn(&str) -> String = match command {
        Command::Inspect(_) | Command::Convert(_) | Command::Rechunk(_) | Command::Stats(_) => {
            in_options
        }
        _ => in_keys,
    };
    if !matches!(command, Command::Train(_) | Command::Forecast(_)) {
        // A closed output pipe, as after `head`, ends the program without a message.
        let _ = register_conditional_shutdown(SIGPIPE, 141, Arc::new(AtomicBool::new(true)));
    }
    let done = match command {
        Command::Inspect(options) => inspect::run(&options),
        Command::Convert(options) => convert::run(&options),
        Command::Rechunk(options) => rechunk::run(&options),
        Command::Stats(options) => stats::run(&options),
        Command::Train(options) => experiment::train(&options),
        Command::Forecast(options) => experiment::forecast(&options),
        Command::Score(options) => experiment::score(&options),
        Command::Package(options) => experiment::package(&options),
        Command::Plan(options) => experiment::plan(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", told(&error.to_string()));
            ExitCode::FAILURE
        }
    }
}
