//! The program `halocline`: looks into data and prepares them for training on a mesh; trains, forecasts and scores.
//!
//! Each subcommand of data has a module with its `Options` and `run`; those of experiments are in one.

mod convert;
mod experiment;
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
    /// Show what files and stores hold: grid, times, variables, chunks, missing values, problems
    Inspect(inspect::Options),
    /// Convert files or stores of any format to Zarr or NetCDF; several become one time axis
    Convert(convert::Options),
    /// Write a store anew with chunks that fit the shards of a mesh
    Rechunk(rechunk::Options),
    /// Compute means and standard deviations, for normalisation
    Stats(stats::Options),
    /// Train a model, from the newest checkpoint on; exit code 75 asks for another start
    Train(experiment::TrainOptions),
    /// Forecast with a trained model, into Zarr or NetCDF
    Forecast(experiment::ForecastOptions),
    /// Score forecasts of the test period, beside persistence and climatology
    Score(experiment::ScoreOptions),
    /// Package a trained model for forecasts from other files, elsewhere
    Package(experiment::PackageOptions),
    /// Show memory, traffic and time of a training on a mesh, before it runs
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
        // A reader of the output that has read enough, such as `head`, ends the program without a message.
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
