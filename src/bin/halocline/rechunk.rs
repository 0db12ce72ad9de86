use std::path::{Path, PathBuf};

use clap::Args;
use halocline::io::{Fields, Gaps, Missing, amplification, assumed_ranks};

use crate::convert::{Writing, chunk, ranks, write};
use crate::reading::Reading;
use crate::report::Result;

#[derive(Args)]
pub(crate) struct Options {
    /// Store or file to read
    source: PathBuf,
    /// Store to write
    target: PathBuf,
    /// Ranks along latitude and longitude whose shards the chunks fit, such as 2x4; 2x2 by default,
    /// or 1x4 for a single row of cells
    #[arg(long, value_parser = ranks)]
    ranks: Option<[usize; 2]>,
    /// Chunk size along time, latitude and longitude, in place of one that fits the ranks
    #[arg(long, value_parser = chunk)]
    chunk: Option<[usize; 3]>,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    writing: Writing,
}

pub(crate) fn run(options: &Options) -> Result {
    let Options {
        source,
        target,
        ranks,
        ..
    } = options;
    if options.writing.is_netcdf(target) {
        let text = "rechunk writes chunks, which a NetCDF-3 file does not have: write a Zarr store, or use convert";
        return Err(text.into());
    }
    let fields = open(source, &options.reading)?;
    let [_, _, rows, _] = fields.shape();
    let ranks = ranks.unwrap_or_else(|| assumed_ranks(rows));
    let before = amplification(&fields, ranks);
    let sources = std::slice::from_ref(source);
    let place = (Some(ranks), options.chunk);
    let written = write(sources, target, &options.reading, &options.writing, place)?;
    let after = amplification(&open(target, &Reading::default())?, ranks);
    println!("{}: {written}", target.display());
    let [lat, lon] = ranks;
    println!(
        "read amplification on {lat} x {lon} ranks, each a process: {before:.2} before, \
         {after:.2} after"
    );
    Ok(())
}

fn open(path: &Path, reading: &Reading) -> Result<Box<dyn Fields>> {
    let config = reading.config();
    Ok(config
        .with_missing(Missing::Allow)
        .with_gaps(Gaps::Allow)
        .open(path)?)
}
