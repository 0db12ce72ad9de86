//! Operators beside PyTorch, in one run: `make bench-ops`.
//!
//! Each row is an operator on a field of about a million cells, in `f32`, on as many threads as there are cores. As in
//! `benches/conv.rs` both run in turn, a figure is the median over rounds, and `fwd+bwd` makes the gradients of all inputs from
//! a given cotangent. `add` moves what the memory can: three fields forward.
//!
//! `HALOCLINE_BENCH_SECONDS` bounds the time per row (at least 5 rounds are run), `HALOCLINE_PYTHON` is the python that has
//! PyTorch, arguments choose rows whose names contain one of them. Medians go to `bench/ops.csv` in cargo's target directory.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use burn::tensor::Distribution;
use halocline::ops::norm::batch_norm_train;
use halocline::ops::prelude::*;
use halocline::ops::resample::{Beyond, Corners, Interpolation, Mode, SampleOptions};
use halocline::prelude::{Boundary, Device, Tensor};

use beside::{PyTorch, in_turn, timed};
use cotangent::pair;

mod beside;
mod cotangent;

/// `[batch, channels, rows, columns]` of most rows.
const FIELD: [usize; 4] = [1, 4, 512, 512];
/// Windows of three cells around every second one.
fn window() -> PoolOptions<2> {
    let around = PoolOptions::new([3, 3]).with_stride([2, 2]);
    around.with_padding([Padding::zeros(1, 1); 2])
}

fn around() -> ConvOptions<2> {
    ConvOptions::default().with_padding([Padding::zeros(1, 1); 2])
}

type Run = fn(Tensor<4>, Vec<Tensor<4>>) -> Tensor<4>;

/// A name that PyTorch's side knows, the shapes of inputs, and what is run on the first one and the others.
type Row = (&'static str, &'static [[usize; 4]], Run);

const ROWS: &[Row] = &[
    ("add", &[FIELD, FIELD], |x, y| x + y[0].clone()),
    ("gelu", &[FIELD], |x, _| ActivationField::gelu(x)),
    ("softmax", &[FIELD], |x, _| x.softmax(3)),
    ("log_softmax of channels", &[FIELD], |x, _| x.log_softmax(1)),
    ("logsumexp", &[FIELD], |x, _| x.logsumexp(3)),
    ("sum", &[FIELD], |x, _| ReduceField::sum_dims(x, &[2, 3])),
    ("mean", &[FIELD], |x, _| ReduceField::mean_dims(x, &[2, 3])),
    ("max", &[FIELD], |x, _| ReduceField::max_dims(x, &[2, 3])),
    ("var", &[FIELD], |x, _| x.var_dims(&[2, 3], 1.0)),
    ("std", &[FIELD], |x, _| x.std_dims(&[2, 3], 1.0)),
    ("vector_norm", &[FIELD], |x, _| {
        StatisticsField::vector_norm(x, 2.0, &[2, 3])
    }),
    ("cumsum", &[FIELD], |x, _| StatisticsField::cumsum(x, 3)),
    ("topk", &[FIELD], |x, _| StatisticsField::topk(x, 4, 3).0),
    ("group_norm", &[FIELD], |x, _| {
        x.group_norm(2, None, None, 1e-5)
    }),
    ("batch_norm", &[FIELD], |x, _| {
        x.try_op(|x| Ok(batch_norm_train(x, None, None, 1e-5)?.0))
            .expect("a norm")
    }),
    ("layer_norm", &[FIELD], |x, _| {
        x.layer_norm(None, None, 1e-5)
    }),
    ("rms_norm", &[FIELD], |x, _| x.rms_norm(None, 1e-6)),
    ("max_pool2d", &[FIELD], |x, _| x.max_pool(&window())),
    ("avg_pool2d", &[FIELD], |x, _| x.avg_pool(&window())),
    ("adaptive_avg_pool2d", &[FIELD], |x, _| {
        x.adaptive_avg_pool([31, 17])
    }),
    ("lp_pool2d", &[FIELD], |x, _| {
        x.lp_pool(2.0, &PoolOptions::new([2, 2]))
    }),
    ("conv_transpose2d", &[FIELD, [4, 4, 3, 3]], |x, w| {
        let twice = ConvTransposeOptions::default().with_stride([2, 2]);
        x.conv_transpose(w[0].clone(), None, &twice)
    }),
    ("unfold", &[FIELD], |x, _| {
        x.unfold_windows([3, 3], &around())
    }),
    ("fold", &[[1, 36, 512, 512]], |x, _| {
        x.fold_windows([512, 512], [3, 3], &around())
    }),
    ("bilinear, doubled", &[FIELD], |x, _| {
        x.upsample_bilinear([Boundary::Replicate; 2])
    }),
    ("bicubic", &[FIELD], |x, _| {
        x.interpolate([700, 300], Interpolation::new(Mode::Cubic))
    }),
    ("area", &[FIELD], |x, _| {
        x.interpolate([181, 97], Interpolation::new(Mode::Area))
    }),
    ("grid_sample", &[FIELD, [1, 2, 512, 512]], |x, d| {
        let options = SampleOptions::new([2, 2])
            .with_boundary([Boundary::Replicate; 2])
            .with_corners(Corners::Centers)
            .with_beyond(Beyond::Clamp);
        x.displace(d[0].clone(), &options)
    }),
    ("pixel_shuffle", &[FIELD], |x, _| x.pixel_shuffle(2)),
    ("pixel_unshuffle", &[FIELD], |x, _| x.pixel_unshuffle(2)),
    ("pad", &[FIELD], |x, _| {
        let ring = Padding::new(3, Boundary::Periodic);
        RearrangeField::pad(x, &[(2, ring), (3, ring)], 0.0)
    }),
    ("roll", &[FIELD], |x, _| {
        RearrangeField::roll(x, &[5, -7], &[2, 3])
    }),
    ("flip", &[FIELD], |x, _| RearrangeField::flip(x, &[2, 3])),
    ("permute", &[FIELD], |x, _| {
        RearrangeField::permute(x, [0, 2, 3, 1])
    }),
    ("cat", &[FIELD, FIELD], |x, y| {
        RearrangeField::cat(vec![x, y[0].clone()], 2)
    }),
    ("index_select", &[FIELD], |x, _| {
        let cells: Vec<usize> = (0..512).rev().collect();
        x.index_select(2, &cells)
    }),
    ("matmul", &[FIELD, FIELD], |x, y| {
        MatmulField::matmul(x, y[0].clone())
    }),
    ("einsum", &[FIELD, [6, 4, 1, 1]], |x, w| {
        x.einsum("bchw,coxy->bohw", w[0].clone())
    }),
    ("mse_loss", &[FIELD, FIELD], |x, y| {
        mse_loss(x, y[0].clone(), Reduction::Mean).reshape([1, 1, 1, 1])
    }),
    ("total_variation", &[FIELD], |x, _| {
        let dims = [2, 3].map(|dim| (dim, Boundary::Replicate));
        total_variation(x, &dims, None, Reduction::Mean).reshape([1, 1, 1, 1])
    }),
];

const PASSES: [&str; 2] = ["fwd", "fwd+bwd"];
const MIN_ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let budget = match std::env::var("HALOCLINE_BENCH_SECONDS") {
        Ok(seconds) => Duration::from_secs_f64(seconds.parse()?),
        Err(_) => Duration::from_secs(5),
    };
    let arguments = std::env::args().skip(1);
    let chosen: Vec<String> = arguments.filter(|part| part != "--bench").collect();
    let mut pytorch = PyTorch::start("ops_pytorch.py");
    println!(
        "\n{:26}{:>12}{:>12}{:>12}",
        "median, ms", "halocline", "pytorch", "speed-up"
    );
    let mut speedups = Vec::new();
    let mut lines = String::from("operator,pass,impl,median_s\n");
    for (name, shapes, run) in ROWS {
        if !chosen.is_empty() && !chosen.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let medians = measure(name, shapes, *run, &mut pytorch, budget);
        for (pass, [ours, torch]) in PASSES.iter().zip(medians) {
            let ratio = ours.zip(torch).map(|(ours, torch)| torch / ours);
            let milliseconds = |seconds: Option<f64>| number(seconds.map(|seconds| seconds * 1e3));
            println!(
                "{name:<18.18}{pass:<8}{:>12}{:>12}{:>12}",
                milliseconds(ours),
                milliseconds(torch),
                number(ratio)
            );
            speedups.extend(ratio.map(f64::ln));
            for (side, median) in [("halocline", ours), ("pytorch", torch)] {
                if let Some(median) = median {
                    lines += &format!("\"{name}\",{pass},{side},{median:.6e}\n");
                }
            }
        }
    }
    let mean = (speedups.iter().sum::<f64>() / speedups.len() as f64).exp();
    println!("{:<50}{mean:>12.2}", "geometric mean");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench/ops.csv");
    std::fs::create_dir_all(path.with_file_name(""))?;
    std::fs::write(&path, lines)?;
    println!("{}", path.display());
    Ok(())
}

/// Medians by pass and implementation.
fn measure(
    name: &str,
    shapes: &[[usize; 4]],
    operator: Run,
    pytorch: &mut Option<PyTorch>,
    budget: Duration,
) -> [[Option<f64>; 2]; 2] {
    let normal = Distribution::Normal(0.0, 1.0);
    let random = |shape: [usize; 4]| Tensor::<4>::random(shape, normal, &Device::default());
    let plain: Vec<Tensor<4>> = shapes.iter().copied().map(random).collect();
    let leaves: Vec<Tensor<4>> = plain
        .iter()
        .map(|input| input.clone().autodiff().require_grad())
        .collect();
    let run = |inputs: &[Tensor<4>]| operator(inputs[0].clone(), inputs[1..].to_vec());
    let cotangent = random(run(&plain).dims());
    let gradients = || {
        let gradients = pair(run(&leaves), cotangent.clone()).backward();
        leaves
            .iter()
            .map(|leaf| leaf.grad(&gradients).expect("a gradient"))
            .collect::<Vec<_>>()
    };
    let case = serde_json::json!({ "operator": name, "inputs": shapes });
    let (medians, _) = in_turn::<2, 2>((MIN_ROUNDS, budget), |implementation, pass| {
        match (implementation, pass) {
            (0, 0) => Some(timed(|| run(&plain))),
            (0, _) => Some(timed(gradients)),
            _ => Some(pytorch.as_mut()?.run(PASSES[pass], &case)),
        }
    });
    medians
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.3}"))
}
