//! Operators compared with PyTorch in one run: `make bench-ops`.
//!
//! Each row is an operator on a field of about a million cells, in `f32`, with one thread per core.
//! As in `benches/conv.rs`, implementations run in turn, a figure is the median over rounds, and
//! `fwd+bwd` computes the gradients of all inputs from a given cotangent. Convolutions and
//! attention have their own benches.
//!
//! - `memory`: our time relative to the time in which all cores copy as many bytes as the operator
//!   must read and write, between arrays that exceed all caches. These are inputs and result, and
//!   with gradients also the cotangent and the gradients.
//! - `two ranks`: the time on two ranks, which are threads on the same cores, relative to one.
//!
//! Figures marked with `!` miss their target: PyTorch's time by 1.25, where a row has no target of
//! its own; one rank's time by 1.1, on two ranks; and the target of memory-bound rows.
//!
//! `HALOCLINE_BENCH_SECONDS` bounds the time per row (with at least 3 rounds), `HALOCLINE_PYTHON`
//! is a Python with PyTorch, and arguments select rows by substrings of their names. Medians are
//! written to `bench/ops.csv` in cargo's target directory.

use std::error::Error;
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::Distribution;
use halocline::prelude::{Device, Tensor};
use rayon::prelude::*;

use beside::{PyTorch, arguments, budget, cores, in_turn, is_chosen, timed, write_table};
use cotangent::pair;
use ranks::Ranks;
use rows::{ROWS, Row, Target};

#[path = "../beside/mod.rs"]
mod beside;
#[path = "../cotangent/mod.rs"]
mod cotangent;
mod ranks;
mod rows;

const PASSES: [&str; 2] = ["fwd", "fwd+bwd"];
const IMPLEMENTATIONS: [&str; 4] = ["halocline", "pytorch", "memory", "two ranks"];
const MIN_ROUNDS: usize = 3;
/// Maximum time on two ranks, relative to one.
const TWO_RANKS: f64 = 1.1;

type Medians = [Option<f64>; IMPLEMENTATIONS.len()];

fn main() -> Result<(), Box<dyn Error>> {
    let (budget, chosen) = (budget(4.0)?, arguments());
    let mut pytorch = PyTorch::start("ops_pytorch.py");
    println!(
        "\n{:30}{:8}{:>10}{:>10}{:>10}{:>9}{:>11}",
        "median, ms", "", "halocline", "pytorch", "speed-up", "memory", "two ranks"
    );
    let mut speedups = Vec::new();
    let mut lines = String::from("operator,pass,impl,median_s\n");
    for row in ROWS.iter().filter(|row| is_chosen(&chosen, row.name)) {
        let passes = measure(row, &mut pytorch, budget);
        for (pass, medians) in PASSES.iter().zip(passes) {
            speedups.extend(print(row, pass, medians));
            for (side, median) in IMPLEMENTATIONS.iter().zip(medians) {
                if let Some(median) = median {
                    lines += &format!("\"{}\",{pass},{side},{median:.6e}\n", row.name);
                }
            }
        }
    }
    let logarithms = speedups.iter().map(|ratio: &f64| ratio.ln());
    let mean = (logarithms.sum::<f64>() / speedups.len() as f64).exp();
    println!("{:58}{mean:>10.2}", "geometric mean");
    write_table("ops.csv", &lines)?;
    Ok(())
}

/// Prints the figures of a pass; returns the speed-up.
fn print(row: &Row, pass: &str, [ours, torch, copying, ranks]: Medians) -> Option<f64> {
    let Target { speed_up, memory } = row.target;
    let ratio = |above: Option<f64>, below: Option<f64>| Some(above? / below?);
    let milliseconds = |time: Option<f64>| text(time.map(|seconds| seconds * 1e3), false);
    let found = [ratio(torch, ours), ratio(ours, copying), ratio(ranks, ours)];
    let misses = [
        found[0].is_some_and(|found| found < speed_up),
        found[1]
            .zip(memory)
            .is_some_and(|(found, most)| found > most),
        found[2].is_some_and(|found| found > TWO_RANKS),
    ];
    let [speed_up, memory, two] = std::array::from_fn(|figure| text(found[figure], misses[figure]));
    println!(
        "{:30}{pass:8}{:>10}{:>10}{speed_up:>10}{memory:>9}{two:>11}",
        row.name,
        milliseconds(ours),
        milliseconds(torch),
    );
    found[0]
}

fn text(value: Option<f64>, misses: bool) -> String {
    let mark = if misses { "!" } else { "" };
    value.map_or("-".into(), |value| format!("{mark}{value:.3}"))
}

/// Medians by pass and implementation.
fn measure(
    row: &'static Row,
    pytorch: &mut Option<PyTorch>,
    budget: Duration,
) -> [Medians; PASSES.len()] {
    let normal = Distribution::Normal(0.0, 1.0);
    let random = |shape: [usize; 4]| Tensor::<4>::random(shape, normal, &Device::default());
    let plain: Vec<Tensor<4>> = row.shapes.iter().copied().map(random).collect();
    let leaves: Vec<Tensor<4>> = plain
        .iter()
        .map(|input| input.clone().autodiff().require_grad())
        .collect();
    let run = |inputs: &[Tensor<4>]| (row.whole)(inputs[0].clone(), inputs[1..].to_vec());
    let cotangent = random(run(&plain).dims());
    let gradients = || {
        let gradients = pair(run(&leaves), cotangent.clone()).backward();
        let gradient = |leaf: &Tensor<4>| leaf.grad(&gradients).expect("a gradient");
        leaves.iter().map(gradient).collect::<Vec<_>>()
    };
    let count = |tensor: &Tensor<4>| tensor.dims().iter().product::<usize>();
    let moved = plain.iter().map(count).sum::<usize>() + count(&cotangent);
    let bytes = moved * size_of::<f32>();
    let case = serde_json::json!({ "operator": row.name, "inputs": row.shapes });
    thread::scope(|scope| {
        let ranks = Ranks::start(scope, row);
        let (medians, _) = in_turn::<4, 2>((MIN_ROUNDS, budget), |implementation, pass| {
            match (implementation, pass) {
                (0, 0) => Some(timed(|| run(&plain))),
                (0, _) => Some(timed(gradients)),
                (1, _) => pytorch.as_mut()?.run(PASSES[pass], &case),
                (2, _) => Some(copying((pass + 1) * bytes)),
                _ => ranks.run(pass),
            }
        });
        medians
    })
}

/// Returns the seconds in which all cores together read and write `bytes`, by copies between arrays
/// larger than caches.
fn copying(bytes: usize) -> f64 {
    /// Elements of each array, per core.
    const FLOATS: usize = 16 << 20;
    static ARRAYS: LazyLock<Mutex<[Vec<f32>; 2]>> =
        LazyLock::new(|| Mutex::new([1.0, 0.0].map(|value| vec![value; FLOATS * cores()])));
    let mut arrays = ARRAYS.lock().expect("no other thread copies");
    let [from, to] = &mut *arrays;
    let seconds = timed(|| {
        let shares = to.par_chunks_mut(FLOATS).zip(from.par_chunks(FLOATS));
        shares.for_each(|(to, from)| to.copy_from_slice(from));
    });
    seconds * bytes as f64 / (2 * size_of_val(&from[..])) as f64
}
