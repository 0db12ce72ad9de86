//! Time and memory of sharded parameters, each figure beside its peer in one run: `cargo bench --bench parallel`.
//!
//! - a step of a transformer whose heads and hidden features are sharded, on two ranks against one, on the same cores;
//! - a step of one whose parameters are stored in shards over two ranks of data, against replicated ones;
//! - bytes per rank of a model of 420 MB with AdamW, stored over four ranks, against one rank;
//! - the peak of making it in shards, against its shards and its largest parameter.

mod alive;

use std::time::Instant;

use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use halocline::models::parallel::{Plan, Store, Style, build};
use halocline::ops::{Reduction, mse_loss};
use halocline::prelude::*;

fn main() -> Result<()> {
    println!("{:<66}{:>12}{:>12}{:>9}", "", "sharded", "peer", "ratio");
    steps()?;
    memory()
}

fn row(what: &str, ours: f64, peer: f64, unit: &str) {
    println!(
        "{what:<66}{ours:>9.2} {unit}{peer:>9.2} {unit}{:>9.2}",
        ours / peer
    );
}

const WIDTH: usize = 256;

/// A transformer of 3 M parameters and its optimizer.
struct Run {
    model: Option<TransformerEncoder>,
    optimizer: ModuleOptimizer,
    x: ShardTensor<3>,
}

impl Run {
    fn new(world: &World, axes: &[(&str, usize)], plan: &Plan) -> Result<Self> {
        let mesh = world.mesh_of(axes)?;
        let config = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 8, 4).with_dropout(0.0);
        let normal = Distribution::Normal {
            mean: 0.0,
            std: 1.0,
        };
        let key = RandomKey::new(1, "x");
        let placements = [Shard(0), Replicate];
        Ok(Self {
            model: Some(build(world, &mesh, plan, |device| config.init(device))?),
            optimizer: AdamWConfig::new().init(),
            x: ShardTensor::random([8, 128, WIDTH], normal, key, &mesh, &placements)?,
        })
    }

    fn step(&mut self) {
        let model = self.model.take().expect("a step gives the model back");
        let y = self.x.clone().apply(&model);
        let loss = mse_loss(y, self.x.clone(), Reduction::Mean).resolve();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
    }
}

/// Steps of all kinds in turn, so that all see the same machine.
fn steps() -> Result<()> {
    const ROUNDS: usize = 9;
    let tensor = Plan::default()
        .with_layer(
            "layers.*.mha.{query,key,value}",
            Style::colwise("tensor").with_unit(WIDTH / 8),
        )
        .with_layer(
            "layers.*.mha.output",
            Style::rowwise("tensor").with_unit(WIDTH / 8),
        )
        .with_layer("layers.*.pwff.linear_inner", Style::colwise("tensor"))
        .with_layer("layers.*.pwff.linear_outer", Style::rowwise("tensor"));
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
                run.step();
                world.barrier()?;
                let start = Instant::now();
                run.step();
                run.step();
                world.barrier()?;
                Ok(start.elapsed().as_secs_f64() / 2.0)
            })?;
            samples.push(times.into_iter().fold(0.0, f64::max));
        }
    }
    let [one, tensor, replicated, stored] = seconds.map(|mut samples| {
        samples.sort_by(f64::total_cmp);
        samples[ROUNDS / 2] * 1e3
    });
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
        self.layers
            .iter()
            .fold(x, |x, layer| x.apply_linear(layer).tanh())
    }
}

/// A model of 420 MB: ranks are threads that share an allocator, so each figure is that of all ranks together, over their
/// number.
fn memory() -> Result<()> {
    const FEATURES: usize = 2048;
    const LAYERS: usize = 25;
    let layer = (FEATURES * FEATURES * 4) as f64 / 1e6;
    let peaks = |ranks: usize| -> Result<[f64; 2]> {
        halocline::core::release_memory();
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
            let mut model = build(&world, &mesh, &plan, make)?;
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
