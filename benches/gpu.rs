//! Cost of sharding on a GPU, compared with PyTorch on the same device: `make bench-gpu`.
//!
//! - a halo exchange between two local ranks that share the device, compared with a copy of as many
//!   bytes (both halos) within it;
//! - a training step of [`UNet`](halocline::models::UNet) on one local rank, and on two that share
//!   the device, compared with PyTorch eager on the whole field; and the memory held by the
//!   allocators afterwards.
//!
//! On tensor cores, convolutions run in TF32: PyTorch's by default, ours where `burn/autotune`
//! finds it faster.
//!
//! Programs run in turn, several rounds; the figures are medians. `BURN_DEVICE` is our device,
//! `HALOCLINE_PYTHON` a Python with PyTorch, which uses a GPU if it has one; arguments are rows and
//! columns of the field, if not 721 × 1440.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use burn::optim::{AdamWConfig, GradientsParams};
use halocline::core::IndexBox;
use halocline::core::ops::{cut, paste};
use halocline::models::UNetConfig;
use halocline::ops::{Reduction, mse_loss};
use halocline::prelude::*;
use peers::{Samples, collect, median};
use swap::swap;

mod peers;
mod swap;

/// Bytes of a halo.
const SIZES: [usize; 3] = [1 << 20, 4 << 20, 16 << 20];
const ROUNDS: usize = 3;
/// Runs before the first one that counts, as kernels are compiled and tuned.
const WARM_UP: usize = 5;
/// Runs that are timed together, with the device busy throughout.
const TOGETHER: usize = 20;
const CHANNELS: usize = 20;
const WIDTH: usize = 32;
/// Marks this process as one that measures, with its number of ranks.
const RANKS: &str = "HALOCLINE_BENCH_RANKS";

fn main() -> Result<()> {
    match std::env::var(RANKS) {
        Ok(ranks) => as_ranks(ranks.parse().map_err(Error::other)?),
        Err(_) => compare(),
    }
}

/// Rows and columns of the field.
fn grid() -> [usize; 2] {
    let given = std::env::args().filter_map(|argument| argument.parse().ok());
    let given: Vec<usize> = given.collect();
    given.try_into().unwrap_or([721, 1440])
}

// ---- Measurement.

fn as_ranks(ranks: usize) -> Result<()> {
    Launcher::local(ranks).check(false).run(|world| {
        // First, so that the memory held is this step's alone.
        step(&world)?;
        if ranks == 2 {
            SIZES
                .iter()
                .try_for_each(|&bytes| exchange(&world, bytes))?;
        }
        Ok(())
    })
}

/// Runs `call` repeatedly; rank 0 prints the median time of one run.
fn measure(
    world: &World,
    what: &str,
    of: usize,
    together: usize,
    mut call: impl FnMut() -> Result<()>,
) -> Result<()> {
    let device = world.device().clone();
    let sync = || {
        device
            .sync()
            .map_err(|error| Error::other(error.to_string()))
    };
    let mut times = Vec::new();
    for round in 0..WARM_UP + ROUNDS {
        sync()?;
        world.barrier()?;
        let before = Instant::now();
        for _ in 0..together {
            call()?;
        }
        sync()?;
        if round >= WARM_UP {
            times.push(before.elapsed().as_secs_f64() / together as f64);
        }
    }
    if world.is_root() {
        println!("{what},{of},{:.9}", median(times));
    }
    Ok(())
}

/// Exchanges rows of a field of 64 channels between two ranks, `bytes` in size; each writes them
/// into a field with room for them.
fn exchange(world: &World, bytes: usize) -> Result<()> {
    const ROWS: usize = 4;
    let columns = bytes / (64 * ROWS * size_of::<f32>());
    let device = world.device().clone().inner();
    let rows = |rows| IndexBox::new(vec![0..1, 0..64, rows, 0..columns]);
    let (last, halo) = (rows(ROWS..2 * ROWS), rows(2 * ROWS..3 * ROWS));
    let full = |rows, value| Tensor::<4>::full([1, 64, rows, columns], value, &device);
    let field = full(2 * ROWS, world.rank() as f64).into_dispatch();
    let mut haloed = Some(full(3 * ROWS, 7.0).into_dispatch());
    let peer = 1 - world.rank();
    measure(world, "exchange", bytes, TOGETHER, || {
        let cells = swap(world, peer, cut(&field, &last))?;
        let room = haloed.take().expect("an exchange gives it back");
        haloed = Some(paste(room, &halo, cells));
        Ok(())
    })?;
    let found = haloed.map(|haloed| Tensor::<4>::from_dispatch(cut(&haloed, &halo)));
    let found = found.map(|halo| halo.mean().into_scalar::<f32>());
    if found != Some(peer as f32) {
        let message = format!("{bytes} bytes: the mean of the halo is {found:?}, not {peer}");
        return Err(Error::other(message));
    }
    Ok(())
}

/// Training step on fields whose rows are sharded.
fn step(world: &World) -> Result<()> {
    let [rows, columns] = grid();
    let mesh = world.mesh([("lat", world.size())])?;
    let config = UNetConfig::new(CHANNELS, CHANNELS).with_width(WIDTH);
    let mut model = Some(world.init(|device| config.init(device))?);
    let mut optimizer: burn::optim::ModuleOptimizer = AdamWConfig::new().init();
    let normal = Distribution::Normal(0.0, 1.0);
    let shape = [1, CHANNELS, rows, columns];
    let x = ShardTensor::random(shape, normal, RandomKey::new(1, "x"), &mesh, &[Shard(2)])?;
    measure(world, "step", world.size(), 1, || {
        let taken = model.take().expect("a step gives the model back");
        let y = x.clone().apply(&taken);
        let loss = mse_loss(y, x.clone(), Reduction::Mean)?;
        let gradients = GradientsParams::from_grads(loss.backward(), &taken);
        model = Some(optimizer.step(1e-3, taken, gradients));
        Ok(())
    })?;
    if let Some(usage) = world.device().memory_pool_usage()
        && world.is_root()
    {
        println!("memory,{},{}", world.size(), usage.bytes_reserved);
    }
    Ok(())
}

// ---- Comparison.

fn compare() -> Result<()> {
    let [rows, columns] = grid();
    let script = Path::new("benches/gpu_pytorch.py");
    let python = std::env::var("HALOCLINE_PYTHON").unwrap_or_else(|_| "python3".into());
    let [mut ours, mut theirs] = [const { Samples::new() }; 2];
    let mut torch = true;
    for _ in 0..ROUNDS {
        for ranks in ["1", "2"] {
            let mut me = Command::new(std::env::current_exe()?);
            me.args([rows, columns].map(|size| size.to_string()));
            collect(me.env(RANKS, ranks), &mut ours)?;
        }
        if torch {
            let mut peer = Command::new(&python);
            peer.arg(script);
            peer.args([rows, columns, CHANNELS, WIDTH].map(|size| size.to_string()));
            peer.args(SIZES.map(|size| size.to_string()));
            torch = collect(&mut peer, &mut theirs).is_ok();
            if !torch {
                println!(
                    "{python} failed; without PyTorch: pip install torch, or set HALOCLINE_PYTHON"
                );
            }
        }
    }
    let figure = |samples: &Samples, what: &str, size: usize, unit: f64| {
        let found = samples.get(&(what.to_string(), size));
        found.map_or(f64::NAN, |found| median(found.clone()) / unit)
    };
    let row = |name: String, ours: f64, peer: f64| {
        println!("{name:<44}{ours:>12.1}{peer:>12.1}{:>8.2}", ours / peer);
    };
    println!(
        "{:<44}{:>12}{:>12}{:>8}",
        "", "Halocline", "PyTorch", "ratio"
    );
    for bytes in SIZES {
        row(
            format!("two halos of {} MiB (peer: a copy), µs", bytes >> 20),
            figure(&ours, "exchange", bytes, 1e-6),
            figure(&theirs, "copy", bytes, 1e-6),
        );
    }
    for (what, name, unit) in [
        ("step", "ms", 1e-3),
        ("memory", "MiB held", f64::from(1 << 20)),
    ] {
        for ranks in [1, 2] {
            row(
                format!("UNet, {rows} × {columns}, ranks: {ranks}, {name}"),
                figure(&ours, what, ranks, unit),
                figure(&theirs, what, 1, unit),
            );
        }
    }
    Ok(())
}
