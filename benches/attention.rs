//! Attention beside PyTorch in one run: `make bench-attention`.
//!
//! Rounds, turns and figures are those of `conv.rs`. Neighborhood attention counts 2 · 2 · width floating-point operations for
//! each query, head and key in its window, dense attention for each query and key (half as many if causal), and three and a
//! half times that with gradients, as is usual. PyTorch's neighborhood attention is the fastest of two formulations
//! (`attention_pytorch.py`). Medians go to `bench/attention.csv` in cargo's target directory.
//!
//! `HALOCLINE_BENCH_SECONDS` bounds the time per case (at least 3 rounds are run), `HALOCLINE_PYTHON` is the python that has
//! PyTorch, arguments choose cases whose names contain one of them.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use burn::tensor::Distribution;
use halocline::ops::prelude::*;
use halocline::prelude::{Device, Tensor};
use serde_json::{Value, json};

use beside::{PyTorch, TURN, median, pair, peak_gflops, timed};

mod beside;

/// An attention of one sample.
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

    /// The case as `attention_pytorch.py` reads it.
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
        let start = Instant::now();
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
            _ => Some(pytorch.as_mut()?.run(PASSES[pass].0, &self.request())),
        };
        let mut samples = [const { [const { Vec::new() }; 2] }; 2];
        let mut peaks = Vec::new();
        let mut rounds = 0;
        while rounds < MIN_ROUNDS || start.elapsed() < budget {
            for (pass, samples) in samples.iter_mut().enumerate() {
                for turn in 0..2 {
                    let implementation = (rounds + turn) % 2;
                    peaks.push(peak_gflops());
                    run(implementation, pass);
                    let begin = Instant::now();
                    while begin.elapsed() < TURN {
                        let Some(seconds) = run(implementation, pass) else {
                            break;
                        };
                        samples[implementation].push(seconds);
                    }
                }
            }
            rounds += 1;
        }
        let peak = median(&mut peaks).unwrap_or(f64::NAN);
        [0, 1].map(|pass| Row {
            case: self.name(),
            pass: PASSES[pass].0,
            flops: PASSES[pass].1 * self.forward_flops(),
            median_s: samples[pass].each_mut().map(|samples| median(samples)),
            peak,
        })
    }
}

trait Attention<const D: usize>: Fn([Tensor<D>; 3]) -> Tensor<D> {}

impl<const D: usize, F: Fn([Tensor<D>; 3]) -> Tensor<D>> Attention<D> for F {}

/// What a pass of a case took: ours, and PyTorch's where it is installed.
struct Row {
    case: String,
    pass: &'static str,
    flops: f64,
    median_s: [Option<f64>; 2],
    peak: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let budget = match std::env::var("HALOCLINE_BENCH_SECONDS") {
        Ok(seconds) => Duration::from_secs_f64(seconds.parse()?),
        Err(_) => Duration::from_secs(15),
    };
    let arguments = std::env::args().skip(1);
    let chosen: Vec<String> = arguments.filter(|part| part != "--bench").collect();
    let mut pytorch = PyTorch::start("attention_pytorch.py");
    println!(
        "\n{:<27}{:<8}{:>12}{:>12}{:>10}{:>10}{:>10}{:>10}",
        "", "", "halocline ms", "pytorch ms", "speed-up", "of peak", "pytorch's", "GFLOP/s"
    );
    let mut lines = String::from("case,pass,impl,median_s,gflops\n");
    for case in &CASES {
        let name = case.name();
        if !chosen.is_empty() && !chosen.iter().any(|part| name.contains(part)) {
            continue;
        }
        for row in case.measure(&mut pytorch, budget) {
            let of_peak = |seconds: Option<f64>| Some(row.flops / seconds? / 1e9 / row.peak);
            let [ours, torch] = row.median_s;
            let speedup = ours.and_then(|ours| Some(torch? / ours));
            let figures = [
                ours.map(|seconds| seconds * 1e3),
                torch.map(|seconds| seconds * 1e3),
                speedup,
                of_peak(ours),
                of_peak(torch),
                Some(row.peak),
            ];
            let columns =
                figures.map(|value| value.map_or("-".into(), |value| format!("{value:.2}")));
            let [ours_ms, torch_ms, rest @ ..] = columns;
            let rest = rest.map(|column| format!("{column:>10}")).concat();
            println!(
                "{:<27}{:<8}{ours_ms:>12}{torch_ms:>12}{rest}",
                row.case, row.pass
            );
            for (name, seconds) in ["halocline", "pytorch"].into_iter().zip(row.median_s) {
                if let Some(seconds) = seconds {
                    let gflops = row.flops / seconds / 1e9;
                    lines += &format!(
                        "{},{},{name},{seconds:.6e},{gflops:.3}\n",
                        row.case, row.pass
                    );
                }
            }
        }
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench/attention.csv");
    std::fs::create_dir_all(path.with_file_name(""))?;
    std::fs::write(&path, lines)?;
    println!("{}", path.display());
    Ok(())
}
