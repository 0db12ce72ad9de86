use std::path::{Path, PathBuf};

use clap::Args;
use halocline::io::{Fields, Metadata, Progress, StatisticsBuilder};

use crate::reading::{GapsChoice, MissingChoice, Reading};
use crate::report::Result;

#[derive(Args)]
pub(crate) struct Options {
    /// Zarr stores, NetCDF files or field files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Folder to write to, for Statistics::load; by default that of the first file
    #[arg(long)]
    output: Option<PathBuf>,
    /// Replace existing statistics in that folder
    #[arg(long)]
    replace: bool,
    /// Time steps that an increment spans
    #[arg(long, default_value_t = 1)]
    lead: usize,
    /// Hours that an increment spans
    #[arg(long, conflicts_with = "lead")]
    lead_hours: Option<f64>,
    /// Handling of missing values
    #[arg(long, default_value = "reject")]
    missing: MissingChoice,
    /// Handling of uneven time steps
    #[arg(long, default_value = "reject")]
    gaps: GapsChoice,
    /// Join the files into one time axis, as for files with one time each
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
    if Metadata::exists(folder) && !options.replace {
        let message = format!(
            "{}: there are statistics, perhaps of other files; choose another folder by --output, or --replace",
            folder.display()
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
