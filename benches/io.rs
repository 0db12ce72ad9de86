//! Reading: random samples compared with Python, the cost of reading while training, and the memory
//! of readers: `make bench-io`.
//!
//! The fields are written once: 48 times of four variables at 361 × 720, in stores with chunks of
//! whole states and with chunks for four ranks, and in an HDF5 file. One rank reads whole samples,
//! then four local ranks read their shards. In Python, xarray reads the stores by zarr-python, and
//! h5py the file. Both sides read the same samples in the same order, in turn, with all data in the
//! page cache. `HALOCLINE_PYTHON` names a Python with xarray, zarr and h5py; its start-up time is
//! not counted. Arguments select rows of the first table by substrings of their names; then nothing
//! else is run.
//!
//! Targets: random samples at least twice as fast as Python; an epoch of training with reading at
//! most 3 % slower than one from memory; the memory of a reader bounded by its batches: `prefetch`
//! ready, one being read, one in use.

mod alive;
mod median;
mod python;

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamWConfig;
use halocline::Trainer;
use halocline::io::ndarray::Array3;
use halocline::io::{
    Batch, ConvertConfig, DatasetConfig, FieldDataset, FieldLoader, FieldWriter, Grid,
    LoaderConfig, Order, OutputConfig, Source, WriterConfig, convert, open,
};
use halocline::models::{SurrogateCnnConfig, weighted_mse};
use halocline::prelude::*;
use median::median;
use python::Python;
use serde_json::{Value, json};

const TIMES: usize = 48;
const CHANNELS: [&str; 4] = ["t2m", "msl", "u10", "v10"];
const SHAPE: [usize; 2] = [361, 720];
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [states, shards, file, packed] = stores(folder.path())?;
    let mut python = Python::start("io_xarray.py", &[], "xarray, zarr and h5py");
    println!(
        "{:<44}{:>12}{:>12}{:>8}",
        "seconds for an epoch", "halocline", "Python", "ratio"
    );
    let arguments = std::env::args().skip(1);
    let chosen: Vec<String> = arguments.filter(|part| part != "--bench").collect();
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|part| name.contains(part));
    for (name, path, ranks) in [
        ("whole samples, chunks of states", &states, [1, 1]),
        ("whole samples, chunks of shards", &shards, [1, 1]),
        ("shards of 2 x 2, chunks of states", &states, [2, 2]),
        ("shards of 2 x 2, chunks of shards", &shards, [2, 2]),
        ("whole samples, HDF5", &file, [1, 1]),
        ("shards of 2 x 2, HDF5", &file, [2, 2]),
        ("whole samples, compressed HDF5", &packed, [1, 1]),
        ("shards of 2 x 2, compressed HDF5", &packed, [2, 2]),
    ] {
        if !is_chosen(name) {
            continue;
        }
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        for round in 0..ROUNDS {
            ours.push(epoch(path, ranks, round)?);
            if let Some(python) = &mut python {
                theirs.push(python.ask(request(path, ranks, round)));
            }
        }
        let [ours, theirs] = [ours, theirs].map(median);
        let ratio = theirs / ours;
        println!("{name:<44}{ours:>12.3}{theirs:>12.3}{ratio:>8.2}");
    }
    if !chosen.is_empty() {
        return Ok(());
    }
    println!(
        "\n{:<44}{:>12}{:>12}{:>8}",
        "seconds for an epoch of training", "reading", "memory", "ratio"
    );
    for (name, path) in [("chunks of states", &states), ("HDF5", &file)] {
        let [reading, memory] = training(path)?;
        let ratio = reading / memory;
        println!("{name:<44}{reading:>12.3}{memory:>12.3}{ratio:>8.3}");
    }
    println!(
        "\n{:<44}{:>12}{:>12}{:>8}",
        "MB of a reader at most", "found", "bound", "ratio"
    );
    for (name, path, ranks) in [
        ("whole samples, HDF5", &file, [1, 1]),
        ("whole samples, chunks of states", &states, [1, 1]),
        ("shards of 2 x 1, chunks of shards", &shards, [2, 1]),
    ] {
        for prefetch in [1, 2, 8] {
            let [found, bound] = memory(path, ranks, prefetch)?.map(|bytes| bytes as f64 / 1e6);
            let name = format!("{name}, prefetch {prefetch}");
            println!("{name:<44}{found:>12.1}{bound:>12.1}{:>8.2}", found / bound);
        }
    }
    Ok(())
}

/// Measures the seconds of a training epoch on one rank, with batches read from files, and with
/// batches in memory.
fn training(path: &Path) -> Result<[f64; 2]> {
    let seconds = Launcher::local(1).collect(|world| {
        let mesh = world.mesh([("lat", 1)])?;
        let config = LoaderConfig::new(1).with_order(order(0));
        let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || {
            FieldDataset::open(&[path], &DatasetConfig::new())
        })?;
        let config = SurrogateCnnConfig::new(CHANNELS.len()).with_blocks(2);
        let model = world.init(|device| config.init(device))?;
        let rate = ModuleLrScheduler::new(1e-6);
        let mut trainer = Trainer::new(&world, model, AdamWConfig::new().init(), rate);
        let weights = vec![1.0; SHAPE[0]];
        let mut epoch = |batches: &mut dyn Iterator<Item = Result<Batch>>| {
            let start = Instant::now();
            let _ = trainer.train_epoch(
                move |_, _| batches,
                |model, batch| {
                    let batch = batch?;
                    // About 1 instead of 280.
                    let [x, y] = [batch.input, batch.target].map(|field| field * (1.0 / 280.0));
                    weighted_mse(x.apply(model), y, &weights)
                },
            )?;
            Ok::<_, Error>(start.elapsed().as_secs_f64())
        };
        let held = loader.epoch(0).collect::<Result<Vec<Batch>>>()?;
        let [mut reading, mut memory] = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            // In turn, alternating which goes first.
            for side in [round % 2, 1 - round % 2] {
                if side == 0 {
                    reading.push(epoch(&mut loader.epoch(0))?);
                } else {
                    memory.push(epoch(&mut held.iter().cloned().map(Ok))?);
                }
            }
        }
        Ok([median(reading), median(memory)])
    })?;
    Ok(seconds[0])
}

/// Returns the peak bytes of all readers in an epoch, and the bound: the batches ready, being read
/// and in use.
fn memory(path: &Path, [lat, lon]: [usize; 2], prefetch: usize) -> Result<[usize; 2]> {
    const BATCH: usize = 4;
    halocline::core::memory::release_memory();
    let before = alive::now();
    alive::begin();
    Launcher::local(lat * lon).run(|world| {
        let mesh = world.mesh([("lat", lat), ("lon", lon)])?;
        let config = LoaderConfig::new(BATCH)
            .with_source(Source::PerRank)
            .with_prefetch(prefetch);
        let loader = FieldLoader::new(&mesh, &[Shard(2), Shard(3)], &config, || {
            FieldDataset::open(&[path], &DatasetConfig::new())
        })?;
        for batch in loader.epoch(0) {
            // Like a training step, so that the reader gets ahead.
            let batch = batch?;
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(batch);
        }
        Ok(())
    })?;
    let [rows, columns] = SHAPE;
    let batch = 2 * BATCH * CHANNELS.len() * rows * columns * size_of::<f32>();
    Ok([alive::peak() - before, (prefetch + 2) * batch])
}

/// Writes the fields with chunks of whole states, with chunks for four ranks, and as HDF5 without
/// and with compression.
fn stores(folder: &Path) -> Result<[PathBuf; 4]> {
    let [file, packed] = ["fields.h5", "packed.h5"].map(|name| folder.join(name));
    let [rows, columns] = SHAPE;
    let grid = Grid::with_poles(rows, columns)?;
    let plain = WriterConfig::new().with_deflate(0);
    let mut writers = [(&file, plain), (&packed, WriterConfig::new())]
        .into_iter()
        .map(|(path, config)| FieldWriter::create(path, &grid, &CHANNELS, &config))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    for time in 0..TIMES {
        // Smooth waves with a little noise, which compress like real fields.
        let noise = RandomKey::new(1, ("time", time));
        let field =
            Array3::from_shape_fn((CHANNELS.len(), rows, columns), |(channel, row, column)| {
                let phase = (row as f32 * 0.03 + column as f32 * 0.05 + time as f32 * 0.2).sin();
                let random = noise
                    .number()
                    .rotate_left((row * 31 + column * 7 + channel) as u32 % 64);
                280.0 + 10.0 * channel as f32 + 15.0 * phase + (random % 1000) as f32 * 1e-3
            });
        for writer in &mut writers {
            writer.append(time as f64 * 21600.0, field.view())?;
        }
    }
    for writer in writers {
        writer.finish()?;
    }
    let source = open(&file)?;
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
    Ok([states, shards, file, packed])
}

/// Order of samples in a round.
fn order(round: usize) -> Order {
    Order::Shuffled { seed: round as u64 }
}

/// Measures the seconds of an epoch of single samples.
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

/// Request for an epoch over the same samples as [`epoch`], in the format of `io_xarray.py`.
fn request(path: &Path, ranks: [usize; 2], round: usize) -> Value {
    let Order::Shuffled { seed } = order(round) else {
        unreachable!("samples are shuffled");
    };
    let samples = RandomKey::new(seed, ("epoch", 0_usize)).permutation(TIMES - 1);
    json!({ "path": path, "ranks": ranks, "samples": samples })
}
