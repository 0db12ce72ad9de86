//! Reading random samples beside xarray, which reads the same stores by zarr-python: `make bench-io`.
//!
//! The fields are written once: 48 times of four variables on 361 × 720, with chunks of whole states, and with
//! chunks for four ranks. One rank reads whole samples, then four local ranks read their shards. Both sides read
//! the same samples in the same order, in turn; the page cache holds all. `HALOCLINE_PYTHON` names a Python with
//! xarray and zarr; the time of starting it is not counted.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use halocline::io::ndarray::Array3;
use halocline::io::{
    ConvertConfig, DatasetConfig, FieldDataset, FieldLoader, FieldWriter, Grid, LoaderConfig,
    Order, OutputConfig, Source, WriterConfig, convert, open,
};
use halocline::prelude::*;

const TIMES: usize = 48;
const CHANNELS: [&str; 4] = ["t2m", "msl", "u10", "v10"];
const SHAPE: [usize; 2] = [361, 720];
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [states, shards] = stores(folder.path())?;
    let mut python = Python::start();
    println!(
        "{:<44}{:>12}{:>12}{:>8}",
        "seconds for an epoch", "halocline", "xarray", "ratio"
    );
    for (name, path, ranks) in [
        ("whole samples, chunks of states", &states, [1, 1]),
        ("whole samples, chunks of shards", &shards, [1, 1]),
        ("shards of 2 x 2, chunks of states", &states, [2, 2]),
        ("shards of 2 x 2, chunks of shards", &shards, [2, 2]),
    ] {
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        for round in 0..ROUNDS {
            ours.push(epoch(path, ranks, round)?);
            theirs.extend(
                python
                    .as_mut()
                    .map(|python| python.epoch(path, ranks, round)),
            );
        }
        let [ours, theirs] = [ours, theirs].map(median);
        let ratio = theirs / ours;
        println!("{name:<44}{ours:>12.3}{theirs:>12.3}{ratio:>8.2}");
    }
    Ok(())
}

/// Writes the fields with chunks of whole states, and with chunks for four ranks.
fn stores(folder: &Path) -> Result<[PathBuf; 2]> {
    let source = folder.join("fields.h5");
    let [rows, columns] = SHAPE;
    let grid = Grid::with_poles(rows, columns)?;
    let config = WriterConfig::new().with_deflate(0);
    let mut writer = FieldWriter::create(&source, &grid, &CHANNELS, &config)?;
    for time in 0..TIMES {
        // Smooth waves with a little noise, which compress as fields do.
        let noise = RandomKey::new(1, ("time", time));
        let field =
            Array3::from_shape_fn((CHANNELS.len(), rows, columns), |(channel, row, column)| {
                let phase = (row as f32 * 0.03 + column as f32 * 0.05 + time as f32 * 0.2).sin();
                let random = noise
                    .number()
                    .rotate_left((row * 31 + column * 7 + channel) as u32 % 64);
                280.0 + 10.0 * channel as f32 + 15.0 * phase + (random % 1000) as f32 * 1e-3
            });
        writer.append(time as f64 * 21600.0, field.view())?;
    }
    writer.finish()?;
    let source = open(&source)?;
    let write = |name: &str, chunk: [usize; 3]| -> Result<PathBuf> {
        let path = folder.join(name);
        let output = OutputConfig::new().with_chunk(Some(chunk));
        convert(
            &source,
            &path,
            &ConvertConfig::new().with_output(output),
            |_| (),
        )?;
        Ok(path)
    };
    let states = write("states.zarr", [1, rows, columns])?;
    let shards = write("shards.zarr", [1, rows.div_ceil(2), columns.div_ceil(2)])?;
    Ok([states, shards])
}

/// The order of samples of a round.
fn order(round: usize) -> Order {
    Order::Shuffled { seed: round as u64 }
}

/// Seconds for an epoch of single samples.
fn epoch(path: &Path, [lat, lon]: [usize; 2], round: usize) -> Result<f64> {
    let seconds = Launcher::local(lat * lon).collect(|world| {
        let mesh = world.mesh([("lat", lat), ("lon", lon)])?;
        let config = LoaderConfig::new(1)
            .with_source(Source::PerRank)
            .with_order(order(round));
        let loader = FieldLoader::new(&mesh, &[Shard(2), Shard(3)], &config, || {
            FieldDataset::open(&[path], &DatasetConfig::new())
        })?;
        let start = Instant::now();
        for batch in loader.epoch(0) {
            std::hint::black_box(batch?);
        }
        Ok(start.elapsed().as_secs_f64())
    })?;
    Ok(seconds.into_iter().fold(0.0, f64::max))
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A process that reads by xarray.
struct Python {
    process: Child,
    answers: std::io::Lines<BufReader<ChildStdout>>,
}

impl Python {
    fn start() -> Option<Self> {
        let python = std::env::var("HALOCLINE_PYTHON").unwrap_or_else(|_| "python3".into());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/io_xarray.py");
        let mut command = Command::new(python);
        let started = command
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let started = started.ok().and_then(|mut process| {
            let mut answers = BufReader::new(process.stdout.take()?).lines();
            println!("{}", answers.next()?.ok()?);
            Some(Self { process, answers })
        });
        if started.is_none() {
            println!("Without xarray: HALOCLINE_PYTHON names a python that has it.");
        }
        started
    }

    /// Seconds for an epoch of the samples that [`epoch`] reads.
    fn epoch(&mut self, path: &Path, ranks: [usize; 2], round: usize) -> f64 {
        let Order::Shuffled { seed } = order(round) else {
            unreachable!("samples are shuffled");
        };
        let samples = RandomKey::new(seed, ("epoch", 0_usize)).permutation(TIMES - 1);
        let request = serde_json::json!({ "path": path, "ranks": ranks, "samples": samples });
        let requests = self.process.stdin.as_mut().expect("a pipe");
        writeln!(requests, "{request}").expect("the process is alive");
        let answer = self.answers.next().expect("the process answers");
        answer.expect("a line").parse().expect("seconds")
    }
}
