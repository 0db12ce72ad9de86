use std::path::{Path, PathBuf};

use clap::Args;
use halocline::io::{Fields, Progress, StatisticsBuilder};

use crate::reading::{GapsChoice, MissingChoice, Reading};
use crate::report::Result;

#[derive(Args)]
pub(crate) struct Options {
    /// Zarr stores, NetCDF files or field files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The folder to write to, for Statistics::load; the one that the first file lies in by default
    #[arg(long)]
    output: Option<PathBuf>,
    /// Replace the statistics of that folder
    #[arg(long)]
    replace: bool,
    /// Time steps of increments
    #[arg(long, default_value_t = 1)]
    lead: usize,
    /// Hours of increments, from each field to the one so long after it
    #[arg(long, conflicts_with = "lead")]
    lead_hours: Option<f64>,
    /// Missing values
    #[arg(long, default_value = "reject")]
    missing: MissingChoice,
    /// Uneven time steps
    #[arg(long, default_value = "reject")]
    gaps: GapsChoice,
    /// Join the files to one time axis, as those are that have one time each
    #[arg(long)]
    joined: bool,
    #[command(flatten)]
    reading: Reading,
}

pub(crate) fn run(options: &Options) -> Result {
    let beside = options.files[0]
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = options
        .output
        .as_deref()
        .or(beside)
        .unwrap_or(Path::new("."));
    let there = folder.join("data.json");
    if there.exists() && !options.replace {
        let message = format!(
            "{}: there are statistics, perhaps of other files; choose another folder by --output, or --replace",
            there.display()
        );
        return Err(message.into());
    }
    let config = options.reading.config();
    let config = config
        .with_missing(options.missing.into())
        .with_gaps(options.gaps.into());
    let mut builder = match options.lead_hours {
        Some(hours) => StatisticsBuilder::with_lead_hours(hours)?,
        None => StatisticsBuilder::new(options.lead)?,
    };
    let all = if options.joined {
        vec![config.open_joined(&options.files)?]
    } else {
        config.open_each(&options.files)?
    };
    for fields in all {
        let title = fields.path().display().to_string();
        let progress = Progress::new(0, title, fields.times().len());
        builder.add(&fields, &progress)?;
        progress.finish();
    }
    let statistics = builder.finish()?;
    statistics.save(folder)?;
    println!(
        "{:24} {:>12} {:>12} {:>14} {:>12}",
        "channel", "mean", "std", "increment mean", "std"
    );
    for (index, channel) in statistics.metadata().channels().iter().enumerate() {
        println!(
            "{channel:24} {:>12.5} {:>12.5} {:>14.5} {:>12.5}",
            statistics.means()[index],
            statistics.stds()[index],
            statistics.increment_means()[index],
            statistics.increment_stds()[index],
        );
    }
    println!("written to {}", folder.display());
    Ok(())
}
