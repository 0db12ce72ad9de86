use std::path::PathBuf;

use clap::Args;
use halocline::io::{self, Scan};

use crate::reading::Reading;
use crate::report::{Result, in_subcommands};

#[derive(Args)]
pub(crate) struct Options {
    /// Zarr stores, NetCDF files or field files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Read all values instead of those of three times
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    reading: Reading,
}

/// Prints the content of each file. A file that cannot be read does not hide the others.
pub(crate) fn run(options: &Options) -> Result {
    let scan = if options.all { Scan::All } else { Scan::Sample };
    let mut failed = Vec::new();
    for file in &options.files {
        match io::inspect(file, &options.reading.config(), scan) {
            Ok(found) => println!("{}", in_subcommands(&found.to_string())),
            Err(error) => failed.push(error.to_string()),
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(failed.join("\nerror: ").into())
}
