//! Attention compared with PyTorch in one run: `make bench-attention`.
//!
//! Rounds, turns and figures are those of `conv.rs`. Neighborhood attention counts 2 · 2 · width
//! floating-point operations per query, head and key in its window, dense attention per query and
//! key (half as many if causal), and, as is usual, three and a half times that with gradients.
//! PyTorch's neighborhood attention is the faster of two formulations (`attention_pytorch.py`); the
//! one that gathers keys and values ("unfold") is also shown separately, for cases where these have
//! fewer than 2²⁸ elements. The last row is a whole training step of a `FieldTransformer`. Medians
//! are written to `bench/attention.csv` in cargo's target directory.
//!
//! `HALOCLINE_BENCH_SECONDS` bounds the time per case (with at least 3 rounds), `HALOCLINE_PYTHON`
//! is a Python with PyTorch, and arguments select cases by substrings of their names.

use std::error::Error;
use std::time::Duration;

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Distribution;
use halocline::models::FieldTransformerConfig;
use halocline::ops::optim::FusedAdamWConfig;
use halocline::ops::prelude::*;
use halocline::prelude::{Device, Tensor};
use serde_json::{Value, json};

use beside::{PyTorch, arguments, budget, in_turn, is_chosen, timed, write_table};
use cotangent::pair;

mod beside;
mod cotangent;

/// Attention on one sample.
enum Case {
    /// Neighborhoods of a field, with the extents of PyTorch's tiles.
    Neighborhood {
        shape: &'static [usize],
        kernel: &'static [usize],
        tile: &'static [usize],
    },
    Dense {
        tokens: usize,
        causal: bool,
    },
}

const CASES: [Case; 10] = [
    Case::Neighborhood {
        shape: &[128, 256],
        kernel: &[7, 7],
        tile: &[8, 8],
    },
    Case::Neighborhood {
        shape: &[128, 256],
        kernel: &[13, 13],
        tile: &[16, 16],
    },
    Case::Neighborhood {
        shape: &[16, 64, 64],
        kernel: &[3, 7, 7],
        tile: &[4, 8, 8],
    },
    Case::Neighborhood {
        shape: &[65536],
        kernel: &[63],
        tile: &[64],
    },
    dense(1024, false),
    dense(1024, true),
    dense(4096, false),
    dense(4096, true),
    dense(16384, false),
    dense(16384, true),
];

const fn dense(tokens: usize, causal: bool) -> Case {
    Case::Dense { tokens, causal }
}

/// Names of the passes, and their work in units of the forward pass.
const PASSES: [(&str, f64); 2] = [("fwd", 1.0), ("fwd+bwd", 3.5)];
const IMPLEMENTATIONS: [&str; 3] = ["halocline", "pytorch", "pytorch-unfold"];
const MIN_ROUNDS: usize = 3;

impl Case {
    fn name(&self) -> String {
        let sizes = |sizes: &[usize]| {
            let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
            sizes.join("×")
        };
        match self {
            Self::Neighborhood { shape, kernel, .. } => {
                format!("{} kernel {}", sizes(shape), sizes(kernel))
            }
            Self::Dense { tokens, causal } => {
                format!("{tokens} tokens{}", if *causal { " causal" } else { "" })
            }
        }
    }

    /// Heads and width.
    fn heads(&self) -> [usize; 2] {
        match self {
            Self::Neighborhood { .. } => [4, 32],
            Self::Dense { .. } => [8, 64],
        }
    }

    fn forward_flops(&self) -> f64 {
        let [heads, width] = self.heads();
        let pairs = match self {
            Self::Neighborhood { shape, kernel, .. } => {
                shape.iter().chain(*kernel).product::<usize>() as f64
            }
            Self::Dense { tokens, causal } => {
                (tokens * tokens) as f64 / if *causal { 2.0 } else { 1.0 }
            }
        };
        4.0 * pairs * (heads * width) as f64
    }

    /// Whether PyTorch also runs the formulation that gathers the keys of every query.
    fn has_unfold(&self) -> bool {
        match self {
            Self::Neighborhood { shape, kernel, .. } => {
                let keys: usize = shape.iter().chain(*kernel).product();
                keys * self.heads().iter().product::<usize>() < 1 << 28
            }
            Self::Dense { .. } => false,
        }
    }

    /// Request for the case in the format of `attention_pytorch.py`.
    fn request(&self) -> Value {
        let [heads, width] = self.heads();
        match self {
            Self::Neighborhood {
                shape,
                kernel,
                tile,
            } => {
                json!({"shape": shape, "kernel": kernel, "heads": heads, "width": width, "tile": tile})
            }
            Self::Dense { tokens, causal } => {
                json!({"tokens": tokens, "heads": heads, "width": width, "causal": causal})
            }
        }
    }

    fn measure(&self, pytorch: &mut Option<PyTorch>, budget: Duration) -> [Row; 2] {
        fn neighborhood<const D: usize, const N: usize>(kernel: &[usize]) -> impl Attention<D> {
            let options = NeighborhoodOptions::<N>::new(kernel.try_into().expect("a kernel"));
            move |[q, k, v]: [Tensor<D>; 3]| q.neighborhood_attention(k, v, &options)
        }
        match self {
            Self::Dense { causal, .. } => {
                let options = AttentionOptions::default().with_causal(*causal);
                let attention =
                    move |[q, k, v]: [Tensor<4>; 3]| q.scaled_dot_product_attention(k, v, &options);
                self.measure_as(attention, pytorch, budget)
            }
            Self::Neighborhood { kernel, .. } => match kernel.len() {
                1 => self.measure_as(neighborhood::<4, 1>(kernel), pytorch, budget),
                2 => self.measure_as(neighborhood::<5, 2>(kernel), pytorch, budget),
                _ => self.measure_as(neighborhood::<6, 3>(kernel), pytorch, budget),
            },
        }
    }

    fn measure_as<const D: usize>(
        &self,
        attention: impl Attention<D>,
        pytorch: &mut Option<PyTorch>,
        budget: Duration,
    ) -> [Row; 2] {
        let [heads, width] = self.heads();
        let mut shape = vec![1];
        match self {
            Self::Neighborhood { shape: cells, .. } => shape.extend_from_slice(cells),
            Self::Dense { tokens, .. } => shape.push(*tokens),
        }
        shape.extend([heads, width]);
        let shape: [usize; D] = shape.try_into().expect("a shape of this rank");
        let random = || Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::default());
        let (plain, cotangent) = ([(); 3].map(|()| random()), random());
        let leaves = plain.clone().map(|tensor| tensor.autodiff().require_grad());
        let mut run = |implementation: usize, pass: usize| match (implementation, pass) {
            (0, 0) => Some(timed(|| attention(plain.clone()))),
            (0, _) => Some(timed(|| {
                let y = attention(leaves.clone());
                let gradients = pair(y, cotangent.clone()).backward();
                leaves.each_ref().map(|leaf| leaf.grad(&gradients))
            })),
            (1, _) => pytorch.as_mut()?.run(PASSES[pass].0, &self.request()),
            _ if self.has_unfold() => {
                let pass = format!("{}:unfold", PASSES[pass].0);
                pytorch.as_mut()?.run(&pass, &self.request())
            }
            _ => None,
        };
        let (medians, peak) = in_turn::<3, 2>((MIN_ROUNDS, budget), &mut run);
        [0, 1].map(|pass| Row {
            case: self.name(),
            pass: PASSES[pass].0,
            flops: Some(PASSES[pass].1 * self.forward_flops()),
            median_s: medians[pass],
            peak,
        })
    }
}

/// Training step of a transformer on a field of 128 × 256 cells.
fn transformer(pytorch: &mut Option<PyTorch>, budget: Duration) -> Row {
    const SHAPE: [usize; 4] = [1, 8, 128, 256];
    const CHANNELS: usize = 128;
    const BLOCKS: usize = 4;
    let device = Device::default();
    let config = FieldTransformerConfig::new(SHAPE[1]).with_d_model(CHANNELS);
    let config = config.with_blocks(BLOCKS);
    let request = json!({
        "variables": SHAPE[1], "rows": SHAPE[2], "columns": SHAPE[3], "channels": CHANNELS,
        "heads": config.heads, "blocks": BLOCKS, "kernel": config.kernel, "tile": [8, 8],
    });
    let mut model = Some(config.init(&device.clone().autodiff()));
    let mut optimizer: ModuleOptimizer = FusedAdamWConfig::new().init();
    let x = Tensor::<4>::random(SHAPE, Distribution::Normal(0.0, 1.0), &device).autodiff();
    let mut step = || {
        let taken = model.take().expect("a step gives the model back");
        let loss = (x.clone().apply(&taken) - x.clone()).square().mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &taken);
        model = Some(optimizer.step(1e-3, taken, gradients));
    };
    let run = |implementation: usize, _: usize| match implementation {
        0 => Some(timed(&mut step)),
        1 => pytorch.as_mut()?.run("step", &request),
        _ => None,
    };
    let ([medians], peak) = in_turn::<3, 1>((MIN_ROUNDS, budget), run);
    Row {
        case: "FieldTransformer".into(),
        pass: "step",
        flops: None,
        median_s: medians,
        peak,
    }
}

trait Attention<const D: usize>: Fn([Tensor<D>; 3]) -> Tensor<D> {}

impl<const D: usize, F: Fn([Tensor<D>; 3]) -> Tensor<D>> Attention<D> for F {}

/// Medians of a pass of a case: ours, PyTorch's where it is installed, and its unfold
/// formulation's.
struct Row {
    case: String,
    pass: &'static str,
    /// Floating-point operations, where they are counted.
    flops: Option<f64>,
    median_s: [Option<f64>; IMPLEMENTATIONS.len()],
    peak: f64,
}

impl Row {
    /// Prints the row; returns its lines of the table.
    fn report(&self) -> String {
        let of_peak = |seconds: Option<f64>| Some(self.flops? / seconds? / 1e9 / self.peak);
        let [ours, torch, unfold] = self.median_s;
        let figures = [
            ours.map(|seconds| seconds * 1e3),
            torch.map(|seconds| seconds * 1e3),
            ours.and_then(|ours| Some(torch? / ours)),
            ours.and_then(|ours| Some(unfold? / ours)),
            of_peak(ours),
            of_peak(torch),
            Some(self.peak),
        ];
        let columns = figures.map(|value| value.map_or("-".into(), |value| format!("{value:.2}")));
        let [ours_ms, torch_ms, speed_up, over_unfold, rest @ ..] = columns;
        let rest = rest.map(|column| format!("{column:>10}")).concat();
        println!(
            "{:<27}{:<8}{ours_ms:>12}{torch_ms:>12}{speed_up:>10}{over_unfold:>12}{rest}",
            self.case, self.pass
        );
        let line = |(name, seconds): (&str, Option<f64>)| {
            let seconds = seconds?;
            let gflops = self
                .flops
                .map(|flops| format!("{:.3}", flops / seconds / 1e9));
            let gflops = gflops.unwrap_or_default();
            Some(format!(
                "{},{},{name},{seconds:.6e},{gflops}\n",
                self.case, self.pass
            ))
        };
        let all = IMPLEMENTATIONS.into_iter().zip(self.median_s);
        all.filter_map(line).collect()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (budget, chosen) = (budget(15.0)?, arguments());
    let mut pytorch = PyTorch::start("attention_pytorch.py");
    println!(
        "\n{:<27}{:<8}{:>12}{:>12}{:>10}{:>12}{:>10}{:>10}{:>10}",
        "",
        "",
        "halocline ms",
        "pytorch ms",
        "speed-up",
        "over unfold",
        "of peak",
        "pytorch's",
        "GFLOP/s"
    );
    let mut table = String::from("case,pass,impl,median_s,gflops\n");
    for case in &CASES {
        if is_chosen(&chosen, &case.name()) {
            for row in case.measure(&mut pytorch, budget) {
                table += &row.report();
            }
        }
    }
    if is_chosen(&chosen, "FieldTransformer") {
        table += &transformer(&mut pytorch, budget).report();
    }
    write_table("attention.csv", &table)?;
    Ok(())
}
