use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use halocline::io::{
    Compression, ConvertConfig, Existing, Fields, Gaps, OutputConfig, OutputFormat, Progress,
    convert,
};

use crate::reading::{MissingChoice, Reading};
use crate::report::Result;

#[derive(Args)]
pub(crate) struct Options {
    /// Zarr stores, NetCDF files or field files; several are joined in order of time
    #[arg(required = true)]
    sources: Vec<PathBuf>,
    /// Store or file to write
    target: PathBuf,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    writing: Writing,
    /// Ranks along latitude and longitude whose shards the chunks fit, such as 2x4
    #[arg(long, value_parser = ranks)]
    ranks: Option<[usize; 2]>,
    /// Chunk size along time, latitude and longitude, such as 1,90,180
    #[arg(long, value_parser = chunk)]
    chunk: Option<[usize; 3]>,
}

/// Options for writing an output.
#[derive(Args)]
pub(crate) struct Writing {
    /// Format; by default netcdf3 if the target ends in .nc, otherwise zarr3
    #[arg(long)]
    format: Option<Format>,
    /// Compression level of chunks, from 0 (none) to 9; 3 by default
    #[arg(long, value_parser = level)]
    level: Option<u8>,
    /// Memory for values, in MiB
    #[arg(long, default_value_t = 256)]
    memory: usize,
    /// Handling of missing values
    #[arg(long, default_value = "allow")]
    missing: MissingChoice,
    /// Replace an existing store or file of the same name
    #[arg(long)]
    replace: bool,
}

impl Writing {
    /// Returns whether a target is written as NetCDF.
    pub(crate) fn is_netcdf(&self, target: &Path) -> bool {
        match self.format {
            Some(format) => matches!(format, Format::Netcdf3),
            None => target.extension().is_some_and(|end| end == "nc"),
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Zarr3,
    Zarr2,
    Netcdf3,
}

pub(crate) fn run(options: &Options) -> Result {
    let (sources, target) = (&options.sources, &options.target);
    let written = write(
        sources,
        target,
        &options.reading,
        &options.writing,
        (options.ranks, options.chunk),
    )?;
    println!("{}: {written}", target.display());
    Ok(())
}

/// Converts sources, with chunks for ranks or of a given size, and returns a summary.
pub(crate) fn write(
    sources: &[PathBuf],
    target: &Path,
    reading: &Reading,
    writing: &Writing,
    (ranks, chunk): (Option<[usize; 2]>, Option<[usize; 3]>),
) -> Result<String> {
    let same = target.canonicalize().ok();
    if same.is_some()
        && sources
            .iter()
            .any(|source| source.canonicalize().ok() == same)
    {
        let target = target.display();
        return Err(format!("{target}: one of the sources; choose another target").into());
    }
    let open = reading.config().with_missing(writing.missing.into());
    // Gaps are kept.
    let source = open.with_gaps(Gaps::Allow).open_joined(sources)?;
    let format = match writing.format {
        _ if writing.is_netcdf(target) => OutputFormat::NetCdf3,
        Some(Format::Zarr2) => OutputFormat::Zarr2,
        _ => OutputFormat::Zarr3,
    };
    if format == OutputFormat::NetCdf3 {
        let given = [
            ("--ranks", ranks.is_some()),
            ("--chunk", chunk.is_some()),
            ("--level", writing.level.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, is_given)| *is_given) {
            let text = "is for Zarr stores, and a NetCDF-3 file has neither chunks nor compression";
            return Err(format!("{option} {text}: leave it out, or write a store").into());
        }
    }
    let output = OutputConfig::new()
        .with_format(format)
        .with_chunk(chunk)
        .with_compression(match writing.level.unwrap_or(3) {
            0 => Compression::None,
            level => Compression::Zstd { level },
        })
        .with_existing(if writing.replace {
            Existing::Replace
        } else {
            Existing::Reject
        });
    let config = ConvertConfig::new()
        .with_output(output)
        .with_ranks(ranks.unwrap_or([1, 1]))
        .with_memory(writing.memory << 20);
    let mut bar: Option<Progress> = None;
    let done = convert(&source, target, &config, |state| {
        let bar =
            bar.get_or_insert_with(|| Progress::new(0, "convert", state.blocks - state.resumed));
        bar.advance();
    })?;
    if let Some(bar) = bar {
        bar.finish();
    }
    let resumed = match done.resumed {
        0 => String::new(),
        blocks => format!(
            ", after {blocks} of {} blocks of an earlier run",
            done.blocks
        ),
    };
    let [times, channels, rows, columns] = source.shape();
    Ok(format!(
        "{times} times of {channels} channels on {rows} x {columns}; {:.1} MB of values written{resumed}; source: {}",
        done.bytes as f64 / 1e6,
        source.traffic()
    ))
}

/// Parses numbers of ranks, such as `2x4`.
pub(crate) fn ranks(text: &str) -> std::result::Result<[usize; 2], String> {
    numbers(text, 'x').ok_or_else(|| "expected two numbers from 1, such as 2x4".into())
}

/// Parses a compression level.
fn level(text: &str) -> std::result::Result<u8, String> {
    let level = text.parse::<u8>().ok().filter(|level| *level <= 9);
    level.ok_or_else(|| "expected 0 (no compression), 1, 2, 3, 4, 5, 6, 7, 8 or 9".into())
}

/// Parses a chunk size, such as `1,90,180`.
pub(crate) fn chunk(text: &str) -> std::result::Result<[usize; 3], String> {
    numbers(text, ',').ok_or_else(|| "expected three numbers from 1, such as 1,90,180".into())
}

fn numbers<const N: usize>(text: &str, separator: char) -> Option<[usize; N]> {
    let number = |part: &str| part.trim().parse().ok().filter(|number| *number > 0);
    let numbers: Option<Vec<usize>> = text.split(separator).map(number).collect();
    numbers?.try_into().ok()
}
