//! Whole training steps and inference of models, compared with PyTorch in one run:
//! `make bench-models`.
//!
//! Rounds, turns and figures are those of `conv.rs`. `train` is a step of AdamW on the mean squared
//! error of a state, `infer` a forward pass without autodiff. PyTorch runs eagerly, in its default
//! layout and in `channels_last`; a speed-up is relative to the faster of the two. The peak is that
//! of the resident set in a step, minus its size before model and state were made.
//!
//! Each model is followed by a table of where the time of a step at 181 × 360 goes, from a timeline
//! (`HALOCLINE_TRACE`): the time of an operator, without operators nested in it.
//!
//! `HALOCLINE_BENCH_SECONDS` bounds the time per case (with at least 3 rounds), `HALOCLINE_PYTHON`
//! is a Python with PyTorch, and arguments select cases by substrings of their names. Medians are
//! written to `bench/models.csv` in cargo's target directory.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::time::Duration;

use burn::optim::{GradientsParams, ModuleOptimizer};
use halocline::core::memory::release_memory;
use halocline::core::trace::span;
use halocline::models::{FieldTransformerConfig, SurrogateCnnConfig, UNetConfig};
use halocline::ops::optim::FusedAdamWConfig;
use halocline::ops::{Reduction, mse_loss};
use halocline::prelude::*;
use serde_json::{Value, json};

use beside::{PyTorch, arguments, budget, in_turn, is_chosen, timed, write_table};

mod beside;

const VARIABLES: usize = 20;
/// Batch, rows and columns.
const FIELDS: [[usize; 3]; 4] = [[1, 91, 180], [1, 181, 360], [3, 181, 360], [1, 721, 1440]];
/// Field of the table of times.
const TRACED: [usize; 3] = FIELDS[1];
const PASSES: [&str; 2] = ["train", "infer"];
const IMPLEMENTATIONS: [&str; 3] = ["halocline", "pytorch", "pytorch-channels-last"];
const MIN_ROUNDS: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let mut bench = Bench {
        chosen: arguments(),
        budget: budget(6.0)?,
        pytorch: PyTorch::start("models_pytorch.py"),
        csv: String::from("case,pass,impl,median_s,peak_mib\n"),
    };
    println!(
        "\n{:<34}{:<8}{:>30}{:>10}{:>27}{:>8}",
        "", "", "median, ms", "speed-up", "peak, MiB", "ratio"
    );
    println!(
        "{:42}{:>10}{:>10}{:>10}{:19}{:>9}{:>9}",
        "", "ours", "PyTorch", "ch.-last", "", "ours", "PyTorch"
    );
    let unet = UNetConfig::new(VARIABLES, VARIABLES).with_width(32);
    bench.model("UNet", true, |device| unet.init(device))?;
    let cnn = SurrogateCnnConfig::new(VARIABLES);
    bench.model("SurrogateCnn", true, |device| cnn.init(device))?;
    // Its tokens have channels last in any case.
    let transformer = FieldTransformerConfig::new(VARIABLES);
    bench.model("FieldTransformer", false, |device| transformer.init(device))?;
    write_table("models.csv", &bench.csv)?;
    Ok(())
}

struct Bench {
    /// Substrings of the names of cases to run; all cases if empty.
    chosen: Vec<String>,
    budget: Duration,
    pytorch: Option<PyTorch>,
    csv: String,
}

/// Model that trains on tensors and on shards.
trait Model:
    Module + Layer<Tensor<4>, Output = Tensor<4>> + Layer<ShardTensor<4>, Output = ShardTensor<4>>
{
}

impl<M> Model for M where
    M: Module
        + Layer<Tensor<4>, Output = Tensor<4>>
        + Layer<ShardTensor<4>, Output = ShardTensor<4>>
{
}

impl Bench {
    fn model<M: Model>(
        &mut self,
        name: &str,
        channels_last: bool,
        init: impl Fn(&Device) -> M + Send + Sync,
    ) -> Result<(), Box<dyn Error>> {
        let mut any = false;
        for field in FIELDS {
            let [batch, rows, columns] = field;
            let samples = if batch > 1 {
                format!("{batch}×")
            } else {
                String::new()
            };
            let case = format!("{name} {samples}{rows}×{columns}");
            if is_chosen(&self.chosen, &case) {
                self.case(name, &case, field, channels_last, &init);
                any = true;
            }
        }
        if any {
            times(name, init)?;
        }
        Ok(())
    }

    fn case<M: Model>(
        &mut self,
        name: &str,
        case: &str,
        [batch, rows, columns]: [usize; 3],
        channels_last: bool,
        init: impl Fn(&Device) -> M,
    ) {
        let request = |channels_last: bool| {
            json!({
                "model": name, "variables": VARIABLES, "batch": batch, "rows": rows, "columns": columns,
                "channels_last": channels_last,
            })
        };
        let layouts = [false, true].map(request);
        let layouts = &layouts[..1 + usize::from(channels_last)];
        let shape = [batch, VARIABLES, rows, columns];

        release_memory();
        let base = resident("VmRSS");
        let mut training = Training::new(&init, shape);
        let train_peak = peak(|| training.step()) - base;
        release_memory();
        let base = resident("VmRSS");
        let device = Device::default();
        let (model, x) = (init(&device), random(shape, &device));
        let infer = || x.clone().apply(&model);
        let infer_peak = peak(|| drop(infer())) - base;
        let torch = self.pytorch.as_mut();
        let torch_peaks = torch.map_or(Vec::new(), |pytorch| peaks(pytorch, layouts));
        let peaks = [train_peak, infer_peak].into_iter().enumerate();
        let peaks = peaks.map(|(pass, ours)| {
            let torch = torch_peaks.iter().map(|peaks| Some(peaks[pass]));
            [Some(ours)].into_iter().chain(torch).collect()
        });
        let peaks: Vec<Vec<Option<f64>>> = peaks.collect();

        let (medians, _) =
            in_turn::<3, 2>((MIN_ROUNDS, self.budget), |implementation, pass| {
                match (implementation, pass) {
                    (0, 0) => Some(timed(|| training.step())),
                    (0, _) => Some(timed(infer)),
                    _ => {
                        let request = layouts.get(implementation - 1)?;
                        self.pytorch.as_mut()?.run(PYTORCH_PASSES[pass], request)
                    }
                }
            });
        for ((pass, medians), peaks) in PASSES.iter().zip(medians).zip(peaks) {
            self.report(case, pass, medians, peaks);
        }
    }

    fn report(
        &mut self,
        case: &str,
        pass: &str,
        medians: [Option<f64>; 3],
        peaks: Vec<Option<f64>>,
    ) {
        let peak = |implementation: usize| peaks.get(implementation).copied().flatten();
        let least = |figures: [Option<f64>; 2]| figures.into_iter().flatten().reduce(f64::min);
        let number = |value: Option<f64>, digits: usize| match value {
            Some(value) => format!("{value:.digits$}"),
            None => "-".into(),
        };
        let [ours, torch, last] =
            medians.map(|seconds| number(seconds.map(|seconds| seconds * 1e3), 1));
        let speed_up = least([medians[1], medians[2]])
            .zip(medians[0])
            .map(|(torch, ours)| torch / ours);
        let torch_peak = least([peak(1), peak(2)]);
        let ratio = peak(0).zip(torch_peak).map(|(ours, torch)| ours / torch);
        println!(
            "{case:<34}{pass:<8}{ours:>10}{torch:>10}{last:>10}{:>10}{:>18}{:>9}{:>8}",
            number(speed_up, 2),
            number(peak(0), 0),
            number(torch_peak, 0),
            number(ratio, 2)
        );
        for (implementation, (name, median)) in IMPLEMENTATIONS.iter().zip(medians).enumerate() {
            if let Some(seconds) = median {
                let peak = number(peak(implementation), 1);
                self.csv += &format!("{case},{pass},{name},{seconds:.6e},{peak}\n");
            }
        }
    }
}

/// Names of the passes in `serve_cases.py`.
const PYTORCH_PASSES: [&str; 2] = ["fwd+bwd", "fwd"];

/// Peak memory of PyTorch, by layout and pass.
fn peaks(pytorch: &mut PyTorch, layouts: &[Value]) -> Vec<[f64; 2]> {
    let peak_of = |request: &Value| {
        // Inference first, so that there are no gradients and moments yet.
        let [train, infer] = PYTORCH_PASSES;
        let [infer, train] = [infer, train].map(|pass| {
            let peak = pytorch.run(&format!("{pass}:peak"), request);
            peak.expect("PyTorch has these models")
        });
        [train, infer]
    };
    layouts.iter().map(peak_of).collect()
}

/// A field, a model and its optimizer.
struct Training<M> {
    model: Option<M>,
    optimizer: ModuleOptimizer,
    x: Tensor<4>,
}

impl<M: Model> Training<M> {
    fn new(init: impl Fn(&Device) -> M, shape: [usize; 4]) -> Self {
        let device = Device::default();
        Self {
            model: Some(init(&device.clone().autodiff())),
            optimizer: FusedAdamWConfig::new().init(),
            x: random(shape, &device).autodiff(),
        }
    }

    fn step(&mut self) {
        let model = self.model.take().expect("a step gives the model back");
        let y = self.x.clone().apply(&model);
        let loss = mse_loss(y, self.x.clone(), Reduction::Mean).expect("the same shape");
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
    }
}

fn random(shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::random(shape, burn::tensor::Distribution::Normal(0.0, 1.0), device)
}

/// Measures the largest resident set, in MiB, during a second run of `run`.
fn peak(mut run: impl FnMut()) -> f64 {
    run();
    // If this is refused, the figure is the peak of the whole process.
    let _ = fs::write("/proc/self/clear_refs", "5");
    run();
    resident("VmHWM")
}

/// Reads a line of the process's status, in MiB.
fn resident(field: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    kilobytes.map_or(f64::NAN, |kilobytes| kilobytes / 1024.0)
}

/// Prints where the time of a step goes.
fn times<M: Model>(
    name: &str,
    init: impl Fn(&Device) -> M + Send + Sync,
) -> Result<(), Box<dyn Error>> {
    const WARM_UP: usize = 3;
    const STEPS: usize = 5;
    let file = tempfile::NamedTempFile::new()?;
    Launcher::local(1).trace(file.path()).run(|world| {
        let mesh = world.mesh([("lat", 1)])?;
        let mut model = Some(world.init(&init)?);
        let mut optimizer: ModuleOptimizer = FusedAdamWConfig::new().init();
        let normal = Distribution::Normal(0.0, 1.0);
        let [batch, rows, columns] = TRACED;
        let shape = [batch, VARIABLES, rows, columns];
        let x = ShardTensor::random(shape, normal, RandomKey::new(1, "x"), &mesh, &[Shard(2)])?;
        for step in 0..WARM_UP + STEPS {
            let _step = span(if step < WARM_UP { "warm up" } else { "step" });
            let taken = model.take().expect("a step gives the model back");
            let loss = mse_loss(x.clone().apply(&taken), x.clone(), Reduction::Mean)?;
            let gradients = GradientsParams::from_grads(loss.backward(), &taken);
            let _optimizer = span("optimizer");
            model = Some(optimizer.step(1e-3, taken, gradients));
        }
        Ok(())
    })?;
    let timeline: Value = serde_json::from_str(&fs::read_to_string(file.path())?)?;
    let mut events = Vec::new();
    for event in timeline["traceEvents"]
        .as_array()
        .ok_or("a timeline has events")?
    {
        if let (Some(name), Some(start), Some(length)) = (
            event["name"].as_str(),
            event["ts"].as_f64(),
            event["dur"].as_f64(),
        ) {
            events.push((name, start, start + length));
        }
    }
    // Events follow those that enclose them.
    events.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.2.total_cmp(&a.2)));
    let mut times = BTreeMap::<&str, f64>::new();
    let mut around: Vec<(&str, f64)> = Vec::new();
    for (name, start, end) in events {
        while around.last().is_some_and(|(_, end)| *end <= start) {
            around.pop();
        }
        around.push((name, end));
        if around[0].0 == "step" {
            let milliseconds = (end - start) / 1e3 / STEPS as f64;
            *times.entry(name).or_default() += milliseconds;
            if let [.., (parent, _), _] = around[..] {
                *times.entry(parent).or_default() -= milliseconds;
            }
        }
    }
    let step: f64 = times.values().sum();
    let mut times: Vec<(&str, f64)> = times.into_iter().collect();
    times.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (large, small): (Vec<_>, Vec<_>) = times
        .into_iter()
        .partition(|(_, time)| *time >= 0.01 * step);
    let rest = (
        "each less than 1 %",
        small.iter().map(|(_, time)| time).sum(),
    );
    let [_, rows, columns] = TRACED;
    println!("\nA step of {name}, {rows}×{columns}: {step:.1} ms");
    for (name, time) in large.into_iter().chain([rest]) {
        let name = match name {
            "step" => "forward pass, the rest",
            "backward" => "backward pass, the rest",
            name => name,
        };
        println!("{name:<42}{time:>10.1} ms{:>8.1} %", 100.0 * time / step);
    }
    println!();
    Ok(())
}
