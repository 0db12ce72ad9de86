//! Cost of sharding, each figure compared with its peer in one run: `cargo bench --bench sharding`.
//!
//! - a training step on two and four ranks, and attention forward and backward on two, against one,
//!   on the same cores;
//! - planning and rule of an operator with a warm cache;
//! - a halo of one cell, up to its arrival in the receiving rank's memory, against a copy of its
//!   bytes;
//! - bytes of live tensors per rank in a training step, on four ranks against one;
//! - the same on one rank, with gradient checkpointing against without;
//! - live bytes per rank in a forward and backward pass of attention, dense and neighborhood, on
//!   one rank and on four, against inputs, results, gradients and communicated data.

mod alive;
mod swap;
#[path = "beside/turns.rs"]
mod turns;

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::GradientsParams;
use halocline::models::{SurrogateCnn, SurrogateCnnConfig, UNetConfig, weighted_mse};
use halocline::ops::optim::FusedAdamWConfig;
use halocline::ops::prelude::*;
use halocline::prelude::*;
use swap::swap;
use turns::{in_turn, median, timed};

/// Minimum number of rounds, and the time for each comparison of ranks.
const ROUNDS: usize = 5;
const BUDGET: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    println!("{:<58}{:>12}{:>12}{:>9}", "", "Halocline", "peer", "ratio");
    steps()?;
    attention()?;
    overhead()?;
    halo()?;
    memory()?;
    attention_memory()
}

fn row(what: &str, ours: f64, peer: f64, unit: &str) {
    println!(
        "{what:<58}{ours:>9.2} {unit}{peer:>9.2} {unit}{:>9.2}",
        ours / peer
    );
}

/// Model on a field, ready to take a training step.
struct Trainer<M> {
    model: Option<M>,
    optimizer: burn::optim::ModuleOptimizer,
    x: ShardTensor<4>,
    weights: Vec<f64>,
}

/// Initializer of the demo's model.
fn cnn(blocks: usize) -> impl Fn(&Device) -> SurrogateCnn {
    let config = SurrogateCnnConfig::new(3)
        .with_width(16)
        .with_blocks(blocks);
    move |device| config.init(device)
}

impl<M: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>> Trainer<M> {
    fn new(world: &World, shape: [usize; 4], init: impl Fn(&Device) -> M) -> Result<Self> {
        let mesh = world.mesh([("lat", world.size())])?;
        let normal = Distribution::Normal(0.0, 1.0);
        Ok(Self {
            model: Some(world.init(init)?),
            optimizer: FusedAdamWConfig::new().init(),
            x: ShardTensor::random(shape, normal, RandomKey::new(1, "x"), &mesh, &[Shard(2)])?,
            weights: vec![1.0; shape[2]],
        })
    }

    fn step(&mut self) {
        let model = self.model.take().expect("a step gives the model back");
        let y = self.x.clone().apply(&model);
        let loss = weighted_mse(y, self.x.clone(), &self.weights);
        let loss = loss.expect("a weight per row").resolve();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
    }
}

/// Steps of the demo's model, of a similar one with realistic channel counts, and of a `UNet`.
fn steps() -> Result<()> {
    steps_of("training step, 128×256", [2, 3, 128, 256], cnn(2))?;
    let wide = SurrogateCnnConfig::new(20);
    let wide = |device: &Device| wide.init(device);
    steps_of(
        "SurrogateCnn step, 20 channels, 181×360",
        [1, 20, 181, 360],
        wide,
    )?;
    let unet = UNetConfig::new(20, 20).with_width(32);
    let unet = |device: &Device| unet.init(device);
    steps_of("UNet step, 20 channels, 181×360", [1, 20, 181, 360], unet)
}

/// Runs steps on one rank, two and four in turn, so that machine noise affects all alike.
fn steps_of<M: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>>(
    name: &str,
    shape: [usize; 4],
    init: impl Fn(&Device) -> M + Sync,
) -> Result<()> {
    const RANKS: [usize; 3] = [1, 2, 4];
    let run = |ranks: usize| {
        let times = Launcher::local(RANKS[ranks])
            .check(false)
            .collect(|world| {
                let mut trainer = Trainer::new(&world, shape, &init)?;
                trainer.step();
                world.barrier()?;
                Ok(timed(|| {
                    trainer.step();
                    trainer.step();
                    world.barrier()
                }) / 2.0)
            })?;
        Ok(times.into_iter().fold(0.0, f64::max))
    };
    for (ranks, [many, one]) in RANKS[1..].iter().zip(beside_first::<3>(run)?) {
        compared(&format!("{name}, {ranks} local ranks (peer: 1)"), many, one);
    }
    Ok(())
}

/// Returns the medians of all variants but the first, each with that of the first, from turns in
/// which the machine was quiet.
fn beside_first<const VARIANTS: usize>(
    run: impl Fn(usize) -> Result<f64>,
) -> Result<Vec<[Option<f64>; 2]>> {
    let mut failed = None;
    let turn = |variant, _| {
        if failed.is_some() {
            return None;
        }
        run(variant).map_err(|error| failed = Some(error)).ok()
    };
    let ([medians], _) = in_turn::<VARIANTS, 1>((ROUNDS, BUDGET), turn);
    match failed {
        Some(error) => Err(error),
        None => Ok(medians[1..]
            .iter()
            .map(|many| [*many, medians[0]])
            .collect()),
    }
}

/// Prints a comparison of seconds, if there are figures.
fn compared(what: &str, ours: Option<f64>, peer: Option<f64>) {
    if let (Some(ours), Some(peer)) = (ours, peer) {
        row(what, ours * 1e3, peer * 1e3, "ms");
    }
}

/// Neighborhood attention on a field, and dense attention on tokens, whose keys and values travel
/// around a ring.
fn attention() -> Result<()> {
    let normal = Distribution::Normal(0.0, 1.0);
    let pass = |shape: [usize; 5], world: &World| -> Result<f64> {
        let mesh = world.mesh([("x", world.size())])?;
        let random = |name| {
            let key = RandomKey::new(1, name);
            ShardTensor::<5>::random(shape, normal, key, &mesh, &[Shard(1)])
        };
        let inputs = [random("q")?, random("k")?, random("v")?];
        world.barrier()?;
        let start = Instant::now();
        let [q, k, v] = inputs.map(ShardTensor::require_grad);
        let y = match shape[2] {
            // Tokens are the cells of one column.
            1 => {
                let tokens = |x: ShardTensor<5>| x.flatten::<4>(1, 2);
                let [q, k, v] = [q, k, v].map(tokens);
                let options = AttentionOptions::default();
                q.scaled_dot_product_attention(k, v, &options).sum()
            }
            _ => q
                .neighborhood_attention(k, v, &NeighborhoodOptions::new([7, 7]))
                .sum(),
        };
        black_box(y.backward());
        world.barrier()?;
        Ok(start.elapsed().as_secs_f64())
    };
    for (name, shape) in [
        ("neighborhoods of 7×7, 128×256", [1, 128, 256, 4, 32]),
        ("ring, 4,096 tokens", [1, 4_096, 1, 8, 64]),
        ("ring, 16,384 tokens", [1, 16_384, 1, 8, 64]),
    ] {
        let run = |ranks: usize| {
            let launcher = Launcher::local(ranks + 1).check(false);
            let times = launcher.collect(|world| pass(shape, &world))?;
            Ok(times.into_iter().fold(0.0, f64::max))
        };
        for [two, one] in beside_first::<2>(run)? {
            compared(&format!("{name}, 2 local ranks (peer: 1 rank)"), two, one);
        }
    }
    Ok(())
}

/// Cost of a sharded operator compared with the same call on the local tensor, with almost nothing
/// to compute.
fn overhead() -> Result<()> {
    Launcher::local(1).check(false).run(|world| {
        const CALLS: usize = 2000;
        let mesh = world.mesh([("lat", 1), ("lon", 1)])?;
        let device = world.device().clone().inner();
        let x = ShardTensor::<4>::ones([1, 1, 3, 3], &mesh, &[Shard(2), Shard(3)])?.inner();
        let weight = Tensor::<4>::ones([1, 1, 3, 3], &device);
        let plain = x.local().clone();
        let options = ConvOptions::<2>::default();
        let burn_options = || burn::tensor::ops::ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        let call = |f: &dyn Fn()| timed(|| (0..CALLS).for_each(|_| f())) / CALLS as f64 * 1e6;
        let mut samples = [const { Vec::new() }; 4];
        for _ in 0..15 {
            samples[0].push(call(&|| {
                drop(black_box(x.clone().conv(weight.clone(), None, &options)))
            }));
            samples[1].push(call(&|| {
                let y = burn::tensor::module::conv2d(
                    plain.clone(),
                    weight.clone(),
                    None,
                    burn_options(),
                );
                drop(black_box(y));
            }));
            samples[2].push(call(&|| drop(black_box(x.clone() + x.clone()))));
            samples[3].push(call(&|| drop(black_box(plain.clone() + plain.clone()))));
        }
        let [conv, burn_conv, add, burn_add] = samples.map(median);
        row("conv2d on 3×3 cells (peer: burn's)", conv, burn_conv, "µs");
        row("add on 3×3 cells (peer: burn's)", add, burn_add, "µs");
        println!(
            "{:<58}{:>9.2} µs",
            "planning and rule of conv2d, warm",
            conv - burn_conv
        );
        Ok(())
    })
}

/// Moves one row of `[1, 64, 512, 512]` from a neighbour into a tensor of this rank, compared with
/// a copy of its bytes.
fn halo() -> Result<()> {
    const ROUNDS: usize = 400;
    let results = Launcher::local(2).check(false).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let field = ShardTensor::<4>::ones([1, 64, 512, 512], &mesh, &[Shard(2)])?.inner();
        let rows = field.local_dims()[2];
        let peer = 1 - world.rank();
        let edge = if world.is_root() { rows - 1 } else { 0 };
        let copy = |tensor: Tensor<4>| tensor.into_data(); // out of the neighbour's memory
        let mut exchanged = Vec::new();
        let mut copied = Vec::new();
        for _ in 0..ROUNDS {
            world.barrier()?;
            let start = Instant::now();
            let row = field.local().clone().narrow(2, edge, 1).into_dispatch();
            // A thin message arrives in the receiver's own memory.
            black_box(swap(&world, peer, row)?);
            exchanged.push(start.elapsed().as_secs_f64() * 1e6);
            let row = field.local().clone().narrow(2, edge, 1);
            copied.push(timed(|| copy(row)) * 1e6);
        }
        Ok((median(exchanged), median(copied)))
    })?;
    let worst = |of: fn(&(f64, f64)) -> f64| results.iter().map(of).fold(0.0, f64::max);
    let (ours, copy) = (worst(|r| r.0), worst(|r| r.1));
    row(
        "halo of one cell, [1, 64, 512, 512] (peer: copy)",
        ours,
        copy,
        "µs",
    );
    println!(
        "{:<58}{:>9.2} µs",
        "  allowed: twice the copy and 20 µs",
        2.0 * copy + 20.0
    );
    Ok(())
}

/// Peak of tensor bytes in a training step, per rank. Ranks are threads that share an allocator, so
/// the peak of four ranks is their total, and a rank holds a fourth of it.
fn memory() -> Result<()> {
    const SHAPE: [usize; 4] = [1, 3, 512, 512];
    let plain = Device::default().autodiff();
    let peak = |ranks: usize, blocks: usize, device: &Device| -> Result<f64> {
        halocline::core::memory::release_memory();
        let launcher = Launcher::local(ranks).device(device.clone()).check(false);
        let peaks = launcher.collect(|world| {
            let before = alive::now();
            world.barrier()?;
            let mut trainer = Trainer::new(&world, SHAPE, cnn(blocks))?;
            trainer.step();
            world.barrier()?;
            alive::begin();
            world.barrier()?;
            trainer.step();
            world.barrier()?;
            Ok((alive::peak() - before) as f64 / 1e6)
        })?;
        Ok(peaks.into_iter().fold(0.0, f64::max) / ranks as f64)
    };
    let (one, four) = (peak(1, 2, &plain)?, peak(4, 2, &plain)?);
    row(
        "peak of tensors alive per rank, 4 ranks (peer: 1 rank)",
        four,
        one,
        "MB",
    );
    let without = peak(1, 8, &plain)?;
    let with = peak(1, 8, &plain.gradient_checkpointing())?;
    row(
        "gradient checkpointing, 8 blocks, 1 rank (peer: without)",
        with,
        without,
        "MB",
    );
    Ok(())
}

/// Peak of tensor bytes per rank in a forward and backward pass of attention, compared with the
/// minimum that it needs: queries, keys, values, the result, their gradients, one number per query
/// and head, and halos with their gradients, or the block that travels around the ring.
fn attention_memory() -> Result<()> {
    const KERNEL: usize = 7;
    let normal = Distribution::Normal(0.0, 1.0);
    let peak = |ranks: usize, shape: [usize; 5]| -> Result<f64> {
        halocline::core::memory::release_memory();
        let peaks = Launcher::local(ranks).check(false).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            world.barrier()?;
            let before = alive::now();
            world.barrier()?;
            alive::begin();
            let leaf = |name| {
                let key = RandomKey::new(1, name);
                let x = ShardTensor::<5>::random(shape, normal, key, &mesh, &[Shard(1)]);
                x.map(ShardTensor::require_grad)
            };
            let [q, k, v] = [leaf("q")?, leaf("k")?, leaf("v")?];
            let y = match shape[2] {
                1 => {
                    let [q, k, v] = [q, k, v].map(|x| x.flatten::<4>(1, 2));
                    q.scaled_dot_product_attention(k, v, &AttentionOptions::default())
                        .unflatten::<5>(1, &[shape[1], 1])
                }
                _ => q.neighborhood_attention(k, v, &NeighborhoodOptions::new([KERNEL; 2])),
            };
            let gradients = y.clone().sum().backward();
            world.barrier()?;
            black_box((gradients, y));
            Ok((alive::peak() - before) as f64 / 1e6)
        })?;
        Ok(peaks.into_iter().fold(0.0, f64::max) / ranks as f64)
    };
    for ranks in [1, 4] {
        for side in [64, 128, 256] {
            let tokens = side * side;
            for shape in [[1, tokens, 1, 1, 16], [1, side, side, 4, 32]] {
                let [_, _, columns, heads, width] = shape;
                let (local, channels) = (tokens / ranks, heads * width);
                let travels = match (ranks, columns) {
                    (1, _) => 0,
                    // Keys and values of a block, and their gradients.
                    (_, 1) => 4 * local * channels,
                    _ => 4 * 2 * (KERNEL / 2) * columns * channels,
                };
                let needed = size_of::<f32>() * (8 * local * channels + local * heads + travels);
                let name = match columns {
                    1 => "attention",
                    _ => "neighborhoods",
                };
                let what = format!("{name}, {tokens} tokens, {ranks} ranks (peer: operands)");
                row(&what, peak(ranks, shape)?, needed as f64 / 1e6, "MB");
            }
        }
    }
    println!("  allowed: 64 MiB (67.1 MB) more");
    Ok(())
}
