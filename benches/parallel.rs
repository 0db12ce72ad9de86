//! Time and memory of sharded parameters, each figure compared with its peer in one run:
//! `cargo bench --bench parallel`.
//!
//! - a step of a transformer whose heads and hidden features are sharded, on two ranks against one,
//!   on the same cores;
//! - a step of one whose parameters are stored in shards over two data ranks, against replicated
//!   ones;
//! - bytes per rank of a model of 420 MB with AdamW, stored over four ranks, against one rank;
//! - the peak memory of building it in shards, against its shards and its largest parameter;
//! - the time to price all plans of a model of 4 TiB;
//! - the plan chosen automatically, against the fastest of all candidates, each measured.

mod alive;
mod median;

use std::time::Instant;

use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use halocline::core::MeshShape;
use halocline::models::parallel::{
    Link, Machine, Plan, Store, Workload, init_parallel, linear_pairs, transformer_encoder,
};
use halocline::ops::{Reduction, mse_loss};
use halocline::prelude::*;
use median::median;

fn main() -> Result<()> {
    println!("{:<66}{:>12}{:>12}{:>9}", "", "sharded", "peer", "ratio");
    steps()?;
    memory()?;
    resolving()?;
    automatic()
}

fn row(what: &str, ours: f64, peer: f64, unit: &str) {
    println!(
        "{what:<66}{ours:>9.2} {unit}{peer:>9.2} {unit}{:>9.2}",
        ours / peer
    );
}

const WIDTH: usize = 256;

/// Transformer of 3 M parameters, and its optimizer.
struct Run {
    model: Option<TransformerEncoder>,
    optimizer: ModuleOptimizer,
    x: ShardTensor<3>,
}

impl Run {
    fn new(world: &World, axes: &[(&str, usize)], plan: &Plan) -> Result<Self> {
        let mesh = world.mesh_of(axes)?;
        let config = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 8, 4).with_dropout(0.0);
        let normal = Distribution::Normal(0.0, 1.0);
        let key = RandomKey::new(1, "x");
        let placements = [Shard(0), Replicate];
        Ok(Self {
            model: Some(init_parallel(world, &mesh, plan, |device| {
                config.init(device)
            })?),
            optimizer: AdamWConfig::new().init(),
            x: ShardTensor::random([8, 128, WIDTH], normal, key, &mesh, &placements)?,
        })
    }

    fn step(&mut self) -> Result<()> {
        let model = self.model.take().expect("a step gives the model back");
        let y = self.x.clone().apply(&model);
        let loss = mse_loss(y, self.x.clone(), Reduction::Mean)?.resolve();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
        Ok(())
    }
}

/// Runs steps of all kinds in turn, so that machine noise affects all alike.
fn steps() -> Result<()> {
    const ROUNDS: usize = 9;
    let config = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 8, 4);
    let [attention, feed_forward] = transformer_encoder(&config, "", "tensor");
    let tensor = attention.merge(&feed_forward);
    let stored = Plan::default().with_store(Store::new("**", "data").with_at_least(1024));
    let kinds = [
        ([("data", 1), ("tensor", 1)], Plan::default()),
        ([("data", 1), ("tensor", 2)], tensor),
        ([("data", 2), ("tensor", 1)], Plan::default()),
        ([("data", 2), ("tensor", 1)], stored),
    ];
    let mut seconds = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for ((axes, plan), samples) in kinds.iter().zip(&mut seconds) {
            let ranks = axes.iter().map(|(_, size)| size).product();
            let times = Launcher::local(ranks).check(false).collect(|world| {
                let mut run = Run::new(&world, axes, plan)?;
                run.step()?;
                world.barrier()?;
                let start = Instant::now();
                run.step()?;
                run.step()?;
                world.barrier()?;
                Ok(start.elapsed().as_secs_f64() / 2.0)
            })?;
            samples.push(times.into_iter().fold(0.0, f64::max));
        }
    }
    let [one, tensor, replicated, stored] = seconds.map(|samples| median(samples) * 1e3);
    row(
        "step, tensor parallel, 2 local ranks (peer: 1 rank)",
        tensor,
        one,
        "ms",
    );
    row(
        "step, stored in shards, 2 ranks of data (peer: replicated)",
        stored,
        replicated,
        "ms",
    );
    Ok(())
}

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Linear>,
}

impl<X: Field<2>> Layer<X> for Deep {
    type Output = X;

    fn forward(&self, x: X) -> X {
        self.layers.iter().fold(x, |x, layer| x.apply(layer).tanh())
    }
}

/// Memory of a model of 420 MB. Ranks are threads that share an allocator, so each figure is the
/// total of all ranks, divided by their number.
fn memory() -> Result<()> {
    const FEATURES: usize = 2048;
    const LAYERS: usize = 25;
    let layer = (FEATURES * FEATURES * 4) as f64 / 1e6;
    let peaks = |ranks: usize| -> Result<[f64; 2]> {
        halocline::core::memory::release_memory();
        let found = Launcher::local(ranks).check(false).collect(|world| {
            let mesh = world.mesh([("data", ranks)])?;
            let plan = Plan::default().with_store(Store::new("**", "data"));
            let before = alive::now();
            world.barrier()?;
            alive::begin();
            world.barrier()?;
            let linear = |device: &Device| LinearConfig::new(FEATURES, FEATURES).init(device);
            let make = |device: &Device| Deep {
                layers: (0..LAYERS).map(|_| linear(device)).collect(),
            };
            let mut model = init_parallel(&world, &mesh, &plan, make)?;
            world.barrier()?;
            let built = alive::peak() - before;
            let mut optimizer = AdamWConfig::new().init();
            let x = ShardTensor::<2>::ones([4, FEATURES], &mesh, &[Shard(0)])?;
            for _ in 0..2 {
                world.barrier()?;
                alive::begin();
                world.barrier()?;
                let loss = x.clone().apply(&model).square().mean().resolve();
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(1e-3, model, gradients);
            }
            world.barrier()?;
            Ok([built, alive::peak() - before].map(|bytes| bytes as f64 / 1e6))
        })?;
        let most = |of: usize| found.iter().map(|peaks| peaks[of]).fold(0.0, f64::max);
        Ok([most(0) / ranks as f64, most(1) / ranks as f64])
    };
    let ([_, one], [built, four]) = (peaks(1)?, peaks(4)?);
    row(
        "peak of a step per rank, 420 MB stored over 4 ranks (peer: 1 rank)",
        four,
        one,
        "MB",
    );
    let shards = layer * LAYERS as f64 / 4.0;
    row(
        "peak of making it per rank (peer: shards and one layer)",
        built,
        shards + layer,
        "MB",
    );
    Ok(())
}

/// Prices all plans of a model of 4 TiB on 4,096 ranks.
fn resolving() -> Result<()> {
    let config = TransformerEncoderConfig::new(1 << 17, 1 << 19, 64, 6);
    let model = config.init(&Device::default());
    let mesh = MeshShape::new(&[("tensor", 64), ("data", 64)], (0..64 * 64).collect())?.into();
    let parts = transformer_encoder(&config, "", "tensor");
    let workload = Workload::new(64 * 4096, &["data"]);
    let machine = Machine::new(
        1e14,
        Link {
            latency: 5e-6,
            bandwidth: 1e10,
        },
    );
    let start = Instant::now();
    let found = Plan::candidates(&model, &mesh, &parts, &workload, &machine)?;
    let seconds = start.elapsed().as_secs_f64();
    let what = format!(
        "resolving and pricing {} plans of 4 TiB (peer: 1 s)",
        found.len()
    );
    row(&what, seconds * 1e3, 1e3, "ms");
    Ok(())
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Mlps {
    blocks: Vec<Mlp>,
}

impl<X: Field<3>> Layer<X> for Mlps {
    type Output = X;

    fn forward(&self, x: X) -> X {
        self.blocks.iter().fold(x, |x, block| {
            let hidden = x.clone().apply(&block.up).gelu();
            x + hidden.apply(&block.down)
        })
    }
}

fn mlps(device: &Device, width: usize, hidden: usize) -> Mlps {
    let block = |_| Mlp {
        up: LinearConfig::new(width, hidden).init(device),
        down: LinearConfig::new(hidden, width).init(device),
    };
    Mlps {
        blocks: (0..4).map(block).collect(),
    }
}

/// Whether the cost model finds the fastest plan.
fn automatic() -> Result<()> {
    let both: &[(&str, usize)] = &[("data", 2), ("tensor", 2)];
    let wide = |device: &Device| mlps(device, 512, 2048);
    let narrow = |device: &Device| mlps(device, 96, 192);
    let pairs = |model: &Mlps| linear_pairs(model, "tensor");
    let config = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 8, 2).with_dropout(0.0);
    let encoder = |device: &Device| config.init(device);
    let blocks = |_: &TransformerEncoder| transformer_encoder(&config, "", "tensor").to_vec();
    chosen(
        "wide layers, few rows, 2 × 2 ranks",
        both,
        [4, 8, 512],
        wide,
        pairs,
    )?;
    chosen(
        "narrow layers, many rows, 2 × 2 ranks",
        both,
        [16, 256, 96],
        narrow,
        pairs,
    )?;
    chosen(
        "wide layers, 2 ranks of tensor",
        &[("data", 1), ("tensor", 2)],
        [4, 32, 512],
        wide,
        pairs,
    )?;
    chosen(
        "transformer, 2 × 2 ranks",
        both,
        [4, 64, WIDTH],
        encoder,
        blocks,
    )
}

/// Times the steps of all candidates in turn.
fn chosen<M>(
    name: &str,
    axes: &[(&str, usize)],
    shape: [usize; 3],
    make: impl Fn(&Device) -> M + Sync,
    parts: impl Fn(&M) -> Vec<Plan>,
) -> Result<()>
where
    M: Module + Layer<ShardTensor<3>, Output = ShardTensor<3>>,
{
    const ROUNDS: usize = 11;
    const STEPS: usize = 4;
    let ranks: usize = axes.iter().map(|(_, size)| size).product();
    let launcher = || Launcher::local(ranks).check(false);
    let machine = launcher()
        .collect(|world| Machine::measure(&world.mesh_of(axes)?))?
        .remove(0);
    let workload = Workload::new(shape[0] * shape[1], &["data"]);
    let mesh = MeshShape::new(axes, (0..ranks).collect())?.into();
    let model = make(&Device::default());
    let found = Plan::candidates(&model, &mesh, &parts(&model), &workload, &machine)?;
    let placements: Vec<Placement> = axes
        .iter()
        .map(|(axis, _)| if *axis == "data" { Shard(0) } else { Replicate })
        .collect();
    let mut seconds = vec![Vec::new(); found.len()];
    for _ in 0..ROUNDS {
        for (priced, samples) in found.iter().zip(&mut seconds) {
            let times = launcher().collect(|world| {
                let mesh = world.mesh_of(axes)?;
                let mut model = init_parallel(&world, &mesh, &priced.plan, &make)?;
                let mut optimizer = AdamWConfig::new().init();
                let x = ShardTensor::<3>::ones(shape, &mesh, &placements)?;
                let mut step = |model: M| {
                    let loss = x.clone().apply(&model).square().mean().resolve();
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    optimizer.step(1e-3, model, gradients)
                };
                model = step(model);
                world.barrier()?;
                let start = Instant::now();
                model = (0..STEPS).fold(model, |model, _| step(model));
                world.barrier()?;
                let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
                drop(model);
                Ok(seconds)
            })?;
            samples.push(times.into_iter().fold(0.0, f64::max));
        }
    }
    let medians = seconds.into_iter().map(|samples| median(samples) * 1e3);
    let medians: Vec<f64> = medians.collect();
    let fastest = medians.iter().copied().fold(f64::INFINITY, f64::min);
    row(
        &format!("chosen: {name} (peer: fastest of {})", medians.len()),
        medians[0],
        fastest,
        "ms",
    );
    if std::env::var_os("HALOCLINE_BENCH_PLANS").is_some() {
        for (priced, median) in found.iter().zip(&medians) {
            let layers = priced.plan.layers.len();
            let stored: Vec<_> = priced
                .plan
                .stores
                .iter()
                .map(|store| store.gather)
                .collect();
            println!(
                "    {median:8.3} ms, priced {}: {layers} layers, stored {stored:?}",
                priced.price
            );
        }
    }
    Ok(())
}
