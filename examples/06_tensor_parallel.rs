//! A transformer block whose parameters are sharded by a plan, `plans/block.toml`: heads and hidden
//! features over one mesh axis, storage over another.
//!
//! `cargo run --example 06_tensor_parallel -- 4`

use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use halocline::models::parallel::{Plan, parallelize_module, resolve};
use halocline::prelude::*;

const WIDTH: usize = 16;
const HEADS: usize = 4;

#[derive(Module, Debug)]
struct Block {
    norm_1: LayerNorm,
    /// Gathers the tokens, once for three layers.
    enter: Reshard,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn init(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        Self {
            norm_1: norm(),
            enter: Reshard::default(),
            query: linear(WIDTH, WIDTH),
            key: linear(WIDTH, WIDTH),
            value: linear(WIDTH, WIDTH),
            output: linear(WIDTH, WIDTH),
            norm_2: norm(),
            up: linear(WIDTH, 4 * WIDTH),
            down: linear(4 * WIDTH, WIDTH),
        }
    }
}

/// For `[batch, tokens, WIDTH]`, on one device or sharded.
impl<X: Field<3>> Layer<X> for Block {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let tokens = x.clone().apply(&self.norm_1).apply(&self.enter);
        let [q, k, v] = [&self.query, &self.key, &self.value].map(|linear| {
            let features = tokens.clone().apply(linear);
            features.unflatten::<4>(2, &[HEADS, WIDTH / HEADS])
        });
        let attended = q.scaled_dot_product_attention(k, v, &AttentionOptions::default());
        let x = x + attended.flatten::<3>(2, 3).apply(&self.output);
        let hidden = x.clone().apply(&self.norm_2).apply(&self.up);
        x + hidden.gelu().apply(&self.down)
    }
}

/// Losses of 20 steps, for either kind of tensor.
fn train<X: Field<3>>(mut model: Block, x: X, target: X) -> Result<Vec<f64>> {
    let mut optimizer = AdamWConfig::new().init();
    let step = |_| -> Result<f64> {
        let loss = mse_loss(x.clone().apply(&model), target.clone(), Reduction::Mean)?;
        let value = loss.clone().into_scalar::<f64>();
        let gradients = GradientsParams::from_grads(backward(loss), &model);
        model = optimizer.step(1e-2, model.clone(), gradients);
        Ok(value)
    };
    (0..20).map(step).collect()
}

fn main() -> Result<()> {
    let ranks = std::env::args()
        .nth(1)
        .map_or(4, |ranks| ranks.parse().expect("a number of ranks"));
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/plans/block.toml");
    let plan = Plan::load(file)?;
    Launcher::from_env().ranks(ranks).run(|world| {
        let tensor = if world.size().is_multiple_of(2) { 2 } else { 1 };
        let mesh = world.mesh([("data", world.size() / tensor), ("tensor", tensor)])?;
        let model = world.init(Block::init)?;
        if world.is_root() {
            println!("{}", resolve(&model, mesh.shape(), &plan)?);
        }
        let normal = Distribution::Normal(0.0, 1.0);
        let field = |name: &str| {
            let placements = [Shard(0), Shard(1)];
            let key = RandomKey::new(0, name);
            ShardTensor::<3>::random([6, 10, WIDTH], normal, key, &mesh, &placements)
        };
        let (x, target) = (field("x")?, field("target")?);
        let [whole_x, whole_target] = [&x, &target].map(|field| field.full_tensor());
        let sharded = parallelize_module(model.clone(), &mesh, &plan)?;
        let found = train(sharded, x, target)?;
        if world.is_root() {
            println!("loss {:.4} → {:.4}", found[0], found[19]);
        }
        // Check: the same losses as on one device.
        let expected = train(model, whole_x, whole_target)?;
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-4 * expected,
                "{found}, expected {expected}"
            );
        }
        Ok(())
    })
}
