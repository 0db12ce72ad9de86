use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use burn::config::Config;
use ndarray::{Array4, s};
use rayon::prelude::*;

use super::blocks::{Block, blocks};
use super::chunking::extent;
use super::config::OutputConfig;
use super::journal::Journal;
use super::schema::{Schema, Times};
use super::staged_folder::StagedFolder;
use super::target::Target;
use crate::fields::described;
use crate::ranks::alike::checksum;
use crate::{Channel, Error, Fields, Result};

/// Minimum time between two entries of the journal.
const INTERVAL: Duration = Duration::from_millis(500);
/// Copies of a value that are in memory at once: decoded and assembled, in two blocks, and during
/// encoding.
const COPIES: usize = 6;

/// Configuration of a conversion: the output, the mesh that will read it, and the memory to use.
///
/// See [`convert`] for an example.
#[derive(Config, Debug)]
pub struct ConvertConfig {
    /// Format, compression and chunks.
    #[config(default = "OutputConfig::new()")]
    pub output: OutputConfig,
    /// Numbers of ranks along [lat, lon] whose shards the chunks fit, unless the output configures
    /// chunks.
    #[config(default = "[1, 1]")]
    pub ranks: [usize; 2],
    /// Memory for values, in bytes.
    #[config(default = "256 << 20")]
    pub memory: usize,
}

/// Progress of a conversion.
///
/// See [`convert`] for an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Conversion {
    /// Number of blocks converted so far.
    pub done: usize,
    /// Total number of blocks.
    pub blocks: usize,
    /// Number of blocks that an earlier run had converted.
    pub resumed: usize,
    /// Bytes of values written by this run, before compression.
    pub bytes: u64,
}

/// Converts fields of any format into a Zarr store or a NetCDF file, chunked for a mesh, in bounded
/// memory.
///
/// The output appears under its name when it is complete. A conversion that was interrupted resumes
/// where it stopped if called again with the same configuration and an unmodified source, and
/// starts over otherwise. [`OpenConfig::open_joined`](crate::OpenConfig::open_joined) makes one
/// source of several files. Missing values are errors or are written as NaN, as configured when the
/// source was opened. Chunks of the source are decoded whole, and up to `HALOCLINE_CHUNK_CACHE` MiB
/// of them are kept in addition to the configured memory. The levels of a variable are stored
/// together, so channels may be in another order than in the source.
///
/// # Errors
/// A configuration out of range, or too little memory for a chunk; channels that the output cannot
/// represent; a path that is taken or ends in `.h5` or `.hdf5`; a source that cannot be read; a full
/// disk.
///
/// # Example
/// ```
/// # use halocline_io::{FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(6, 8)?;
/// # let config = WriterConfig::new().with_chunk(Some([1, 1, 6, 8]));
/// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &config)?;
/// # for hour in 0..3 {
/// #     let field = halocline_io::ndarray::Array3::ones((1, 6, 8));
/// #     writer.append(f64::from(hour) * 3600.0, field.view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::{ConvertConfig, Fields, convert, open};
///
/// let half = [0..1, 0..1, 0..3, 0..8]; // the box of one of two ranks
/// let source = open(&path)?; // whose chunks are whole fields
/// source.read(half.clone())?;
/// assert_eq!(source.traffic().amplification(), 2.0);
///
/// let target = folder.path().join("2018.zarr");
/// let config = ConvertConfig::new().with_ranks([2, 1]);
/// let all = convert(&source, &target, &config, |state| eprintln!("{state:?}"))?;
/// assert_eq!(all.bytes, 3 * 6 * 8 * 4);
/// let store = open(&target)?;
/// assert_eq!(store.read(half.clone())?, source.read(half)?);
/// assert_eq!(store.traffic().amplification(), 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn convert(
    source: &impl Fields,
    path: impl AsRef<Path>,
    config: &ConvertConfig,
    mut progress: impl FnMut(Conversion),
) -> Result<Conversion> {
    let path = path.as_ref();
    config.output.check(path)?;
    let shape = source.shape();
    if shape[0] == 0 {
        return Err(Error::argument("times", 0, "at least one time"));
    }
    let chunk = chunk(shape, config)?;
    let mut channels = described(source);
    for channel in &mut channels {
        // A time in the output would be read as that of the fields.
        channel.is_static |= source.is_undated();
    }
    let blocks = blocks(
        shape,
        |channel| channels[channel].clone(),
        chunk,
        config.memory / (COPIES * size_of::<f32>()),
    )?;
    let schema = Schema::new(source.grid(), source.calendar(), &channels)?;
    let times = Times {
        seconds: source.times(),
        start: None,
    };
    let folder = StagedFolder::open(path, config.output.existing)?;
    let plan = plan(source, &channels, chunk, config)?;
    let mut journal = Journal::open(&folder, plan, blocks.len())?;
    let resumed = journal.done();
    let begins = resumed == 0;
    let target = Target::open(
        folder.path(),
        begins,
        &schema,
        &times,
        chunk,
        &config.output,
    )?;
    let mut state = Conversion {
        done: resumed,
        blocks: blocks.len(),
        resumed,
        bytes: 0,
    };
    let mut recorded: Option<Instant> = None;
    let left = &blocks[resumed..];
    std::thread::scope(|scope| {
        // Each block is read while the previous one is compressed.
        let (sender, read) = sync_channel(0);
        scope.spawn(move || {
            for block in left {
                let values = source.read(block.clone());
                let failed = values.is_err();
                if sender.send(values).is_err() || failed {
                    return;
                }
            }
        });
        for (block, values) in left.iter().zip(read) {
            state.bytes += write(&schema, &target, block, &values?)?;
            state.done += 1;
            folder.touch();
            if recorded.is_none_or(|last| last.elapsed() >= INTERVAL) {
                target.sync()?;
                journal.record(state.done)?;
                recorded = Some(Instant::now());
            }
            progress(state);
        }
        Ok::<(), Error>(())
    })?;
    target.finish(&schema, &times)?;
    journal.remove()?;
    target.commit(folder)?;
    Ok(state)
}

/// Writes the values of a block and returns their size in bytes.
fn write(
    schema: &Schema,
    target: &Target,
    [times, channels, rows, columns]: &Block,
    values: &Array4<f32>,
) -> Result<u64> {
    channels.clone().into_par_iter().try_for_each(|channel| {
        let ranges = [times.clone(), rows.clone(), columns.clone()];
        let field = values.slice(s![.., channel - channels.start, .., ..]);
        target.write(schema, schema.places[channel], 0, ranges, field)
    })?;
    Ok((values.len() * size_of::<f32>()) as u64)
}

/// Returns the extents of chunks of the output along [time, lat, lon].
fn chunk([_, _, rows, columns]: [usize; 4], config: &ConvertConfig) -> Result<[usize; 3]> {
    if config.ranks.contains(&0) {
        let got = format!("{:?}", config.ranks);
        return Err(Error::argument("ranks", got, "at least one along each dim"));
    }
    // The first rank has the largest shard.
    let extent = |size: usize, ranks: usize| extent(&[size.div_ceil(ranks)]);
    let [lat, lon] = config.ranks;
    let chosen = [1, extent(rows, lat), extent(columns, lon)];
    Ok(config.output.chunk.unwrap_or(chosen))
}

/// Describes everything that the output depends on, to recognise an interrupted conversion. Among
/// it are the descriptions of the channels and the grid, as the header of a NetCDF-3 file holds them
/// and thereby determines the positions of the values.
fn plan(
    source: &impl Fields,
    channels: &[Channel],
    chunk: [usize; 3],
    config: &ConvertConfig,
) -> Result<String> {
    Ok(format!(
        "{:?} {:08x} {:?} {:08x} {:08x} {:08x} {} {:?} {chunk:?} {:?} {}",
        source.fingerprint()?,
        source.modified()?,
        channels,
        checksum(source.times().iter().copied()),
        checksum(source.grid().coordinates()),
        source.grid().description.checksum(),
        source.calendar(),
        source.missing(),
        config.output,
        config.memory,
    ))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use ndarray::Array3;

    use super::*;
    use crate::{FieldWriter, Grid, WriterConfig, open};

    /// Writes a file of two times.
    fn write_file(path: &Path) {
        let (grid, config) = (Grid::with_poles(3, 4).unwrap(), WriterConfig::new());
        let mut writer = FieldWriter::create(path, &grid, &["t2m"], &config).unwrap();
        for time in [0.0, 3600.0] {
            writer
                .append(time, Array3::zeros((1, 3, 4)).view())
                .unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn a_conversion_of_any_length_is_no_leftover() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("2018.h5");
        write_file(&path);
        let lock = folder.path().join(".halocline-2018.zarr.partial/.lock");
        let day = Duration::from_secs(24 * 3600);
        let config = ConvertConfig::new().with_memory(COPIES * 4 * 12); // one field at a time
        let check = |_: Conversion| {
            let lock = File::options().write(true).open(&lock).unwrap();
            let written = lock.metadata().unwrap().modified().unwrap();
            assert!(written.elapsed().is_ok_and(|age| age < day));
            // As if the next block took a month.
            lock.set_modified(SystemTime::now() - 30 * day).unwrap();
        };
        let target = folder.path().join("2018.zarr");
        let done = convert(&open(&path).unwrap(), target, &config, check).unwrap();
        assert_eq!(done.blocks, 2);
    }

    #[test]
    fn plans_of_channels_with_other_descriptions_differ() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("2018.h5");
        write_file(&path);
        let source = open(&path).unwrap();
        let text =
            |channel: Channel| plan(&source, &[channel], [1, 3, 4], &ConvertConfig::new()).unwrap();
        let channel = Channel::new("t2m".into());
        let other = channel.clone().with_units(Some("K".into()));
        assert_ne!(text(channel), text(other));
    }
}
