//! Convolution compared with burn-flex and PyTorch in one run: `make bench-conv`.
//!
//! Every round of a case runs each pass with each implementation in turn, so that noise of the
//! machine affects all alike; a figure is the median over rounds. All implementations work on
//! contiguous `f32` tensors, in the layout of burn and PyTorch, with one thread per core, and never
//! two at a time. Between turns, all cores run multiply-adds in registers and read memory for some
//! milliseconds, while the threads of the previous implementation fall asleep; idle cores would
//! take as long to return to full speed. A turn does not count if the machine reached less than
//! 90 % of the upper quartile of this load before or after it. In its turn, an implementation runs
//! for a tenth of a second, and all runs but the first count, so that threads, caches and result
//! pages are as warm as in a training loop. The time of a run includes allocating and freeing its
//! results. First, our results and gradients are compared with burn-flex's.
//!
//! - `fwd` is inference, without autodiff.
//! - `fwd+bwd` computes the gradients of input, weight and bias from a given cotangent, and nothing
//!   else: by `torch.autograd.grad(y, leaves, cotangent)` in PyTorch, by [`pair`] in burn.
//!
//! A convolution counts 2 · outputs · inputs / groups · kernel elements of floating-point
//! operations, and three times that with its gradients. The peak is the median of the multiply-adds
//! between turns.
//!
//! `--bf16` measures bf16 instead, compared with our f32 and with bf16 in PyTorch, as under its
//! autocast; medians are then written to `bench/conv_bf16.csv`.
//!
//! `HALOCLINE_BENCH_SECONDS` bounds the time per case (with at least 5 rounds), `HALOCLINE_PYTHON`
//! is a Python with PyTorch, and arguments select cases by substrings of their names. Medians are
//! written to `bench/conv.csv` in cargo's target directory.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use burn::tensor::{DType, Distribution, FloatDType, module};
use halocline::ops::prelude::*;
use halocline::prelude::{Device, Tensor};

use beside::{PyTorch, arguments, budget, in_turn, is_chosen, timed, write_table};
use cotangent::pair;

mod beside;
mod cotangent;

/// Convolution with a bias, with zero padding of half a kernel on every side of the field. Kernels
/// are odd.
struct Case {
    /// `[batch, channels_in, *cells]`
    x: &'static [usize],
    /// `[channels_out, channels_in / groups, *kernel]`
    weight: &'static [usize],
    stride: usize,
}

impl Case {
    const fn new(x: &'static [usize], weight: &'static [usize], stride: usize) -> Self {
        Self { x, weight, stride }
    }

    /// `[batch, channels_out, *outputs]`
    fn y(&self) -> Vec<usize> {
        let mut sizes = vec![self.x[0], self.weight[0]];
        sizes.extend(self.x[2..].iter().map(|size| size.div_ceil(self.stride)));
        sizes
    }

    fn groups(&self) -> usize {
        self.x[1] / self.weight[1]
    }

    fn padding<const N: usize>(&self) -> [usize; N] {
        std::array::from_fn(|dim| self.weight[dim + 2] / 2)
    }

    fn options<const N: usize>(&self) -> ConvOptions<N> {
        ConvOptions::default()
            .with_stride([self.stride; N])
            .with_padding(self.padding().map(|width| Padding::zeros(width, width)))
            .with_groups(self.groups())
    }

    fn burn_options<const N: usize>(&self) -> burn::tensor::ops::ConvOptions<N> {
        let stride = [self.stride; N];
        burn::tensor::ops::ConvOptions::new(stride, self.padding(), [1; N], self.groups())
    }

    /// Request for the case in the format of `conv_pytorch.py`.
    fn request(&self, bf16: bool) -> serde_json::Value {
        serde_json::json!({
            "bf16": bf16,
            "x": self.x,
            "weight": self.weight,
            "stride": self.stride,
            "padding": self.weight[2..].iter().map(|size| size / 2).collect::<Vec<_>>(),
            "groups": self.groups(),
        })
    }

    fn forward_flops(&self) -> f64 {
        let products_per_output: usize = self.weight[1..].iter().product();
        2.0 * (self.y().iter().product::<usize>() * products_per_output) as f64
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let sizes = |of: &[usize]| format!("{of:?}").replace(", ", "×").replace(['[', ']'], "");
        let batch = sizes(&self.x[..1]) + "×";
        let stride = format!("/{}", self.stride);
        let channels = match self.groups() {
            1 => format!("{}→{}", self.x[1], self.weight[0]),
            _ => format!("{} depthwise", self.x[1]),
        };
        f.write_str(if self.x[0] > 1 { &batch } else { "" })?;
        write!(f, "{channels} {}", sizes(&self.weight[2..]))?;
        f.write_str(if self.stride > 1 { &stride } else { "" })?;
        write!(f, " {}", sizes(&self.x[2..]))
    }
}

/// Ten convolutions of all kinds, then the layers of models.
const CASES: [Case; 18] = [
    Case::new(&[1, 64, 256, 512], &[64, 64, 3, 3], 1),
    Case::new(&[1, 32, 721, 1440], &[32, 32, 3, 3], 1),
    Case::new(&[1, 16, 256, 512], &[16, 16, 3, 3], 1),
    Case::new(&[8, 32, 128, 128], &[32, 32, 3, 3], 1),
    Case::new(&[1, 64, 256, 256], &[128, 64, 3, 3], 2),
    Case::new(&[1, 64, 256, 256], &[64, 1, 7, 7], 1),
    Case::new(&[1, 128, 128, 128], &[512, 128, 1, 1], 1),
    Case::new(&[1, 3, 512, 512], &[32, 3, 5, 5], 1),
    Case::new(&[1, 16, 64, 64, 64], &[16, 16, 3, 3, 3], 1),
    Case::new(&[1, 32, 65536], &[32, 32, 9], 1),
    Case::new(&[1, 20, 181, 360], &[32, 20, 3, 3], 1),
    Case::new(&[1, 32, 181, 360], &[32, 32, 3, 3], 1),
    Case::new(&[1, 96, 181, 360], &[32, 96, 3, 3], 1),
    Case::new(&[1, 64, 91, 180], &[64, 64, 3, 3], 1),
    Case::new(&[1, 192, 91, 180], &[64, 192, 3, 3], 1),
    Case::new(&[1, 128, 46, 90], &[128, 128, 3, 3], 1),
    Case::new(&[3, 48, 181, 360], &[16, 48, 3, 3], 1),
    Case::new(&[1, 256, 23, 45], &[256, 256, 3, 3], 1),
];

/// Sets of cases, by their first; each set has a mean.
const SETS: [(&str, usize); 2] = [("mean of kinds", 0), ("mean of layers", 10)];

/// Names of the passes, and their work in units of the forward pass.
const PASSES: [(&str, f64); 2] = [("fwd", 1.0), ("fwd+bwd", 3.0)];
/// Implementations in `f32` and in bf16.
const IMPLEMENTATIONS: [[&str; 3]; 2] = [
    ["halocline", "burn-flex", "pytorch"],
    ["halocline-bf16", "halocline", "pytorch-bf16"],
];
const MIN_ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let budget = budget(25.0)?;
    let (options, chosen): (Vec<String>, Vec<String>) =
        arguments().into_iter().partition(|part| part == "--bf16");
    let bf16 = !options.is_empty();
    let mut pytorch = PyTorch::start("conv_pytorch.py");
    println!(
        "\n{:35}{:>30}{:>20}{:>40}",
        "", "median, ms", "speed-up over", "of peak, GFLOP/s"
    );
    let [ours, base, torch] = IMPLEMENTATIONS[usize::from(bf16)];
    let heads = [ours, base, torch, base, torch, ours, base, torch, "peak"];
    println!("{}", line("", "", heads.map(String::from)));
    let mut rows = Vec::new();
    for (index, case) in CASES.iter().enumerate() {
        let name = case.to_string();
        if !is_chosen(&chosen, &name) {
            continue;
        }
        macro_rules! measure {
            ($dims:literal, $spatial:literal, $conv:ident) => {
                measure::<$dims>(
                    (case, bf16),
                    &|x, weight, bias| {
                        x.conv(weight, Some(bias.into()), &case.options::<$spatial>())
                    },
                    &|x, weight, bias| module::$conv(x, weight, Some(bias), case.burn_options()),
                    &mut pytorch,
                    budget,
                )
            };
        }
        let measured = match case.x.len() {
            3 => measure!(3, 1, conv1d),
            4 => measure!(4, 2, conv2d),
            _ => measure!(5, 3, conv3d),
        };
        for row in &measured {
            println!("{}", line(&row.case, row.pass, row.figures().map(number)));
        }
        let set = SETS.iter().rposition(|(_, first)| *first <= index);
        rows.extend(measured.map(|row| (set, row)));
    }
    let sets = SETS.iter().enumerate();
    for ((set, (title, _)), (pass, _)) in sets.flat_map(|set| PASSES.map(|pass| (set, pass))) {
        let of_set = rows
            .iter()
            .filter(|(of, row)| *of == Some(set) && row.pass == pass);
        let figures: Vec<_> = of_set.map(|(_, row)| row.figures()).collect();
        if figures.is_empty() {
            continue;
        }
        let means = std::array::from_fn(|column| {
            let logs = figures.iter().map(|figures| figures[column].map(f64::ln));
            let sum: Option<f64> = logs.sum();
            sum.map(|sum| (sum / figures.len() as f64).exp())
        });
        println!("{}", line(title, pass, means.map(number)));
    }
    let file = if bf16 { "conv_bf16.csv" } else { "conv.csv" };
    let lines: String = rows
        .iter()
        .map(|(_, row)| row.csv([ours, base, torch]))
        .collect();
    write_table(file, &format!("case,pass,impl,median_s,gflops\n{lines}"))?;
    Ok(())
}

/// Times of a pass of a case.
struct Row {
    case: String,
    pass: &'static str,
    flops: f64,
    /// By implementation; `None` where PyTorch is not installed.
    median_s: [Option<f64>; 3],
    peak_gflops: f64,
}

impl Row {
    fn gflops(&self, implementation: usize) -> Option<f64> {
        Some(self.flops / self.median_s[implementation]? / 1e9)
    }

    /// Columns of the table.
    fn figures(&self) -> [Option<f64>; 9] {
        let [ours, base, torch] = self.median_s.map(|seconds| Some(seconds? * 1e3));
        let speedup = |peer: Option<f64>| Some(peer? / ours?);
        let of_peak = |implementation| Some(self.gflops(implementation)? / self.peak_gflops);
        let peak = Some(self.peak_gflops);
        [
            ours,
            base,
            torch,
            speedup(base),
            speedup(torch),
            of_peak(0),
            of_peak(1),
            of_peak(2),
            peak,
        ]
    }

    fn csv(&self, names: [&str; 3]) -> String {
        let lines = (0..3).filter_map(|implementation| {
            let (seconds, gflops) = (self.median_s[implementation]?, self.gflops(implementation)?);
            let (case, pass, name) = (&self.case, self.pass, names[implementation]);
            Some(format!("{case},{pass},{name},{seconds:.6e},{gflops:.3}\n"))
        });
        lines.collect()
    }
}

fn line(case: &str, pass: &str, columns: [String; 9]) -> String {
    let columns = columns.map(|column| format!("{column:>10}")).concat();
    format!("{case:<27}{pass:<8}{columns}")
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.2}"))
}

type Conv<'a, const D: usize> = &'a dyn Fn(Tensor<D>, Tensor<D>, Tensor<1>) -> Tensor<D>;

fn measure<const D: usize>(
    (case, bf16): (&Case, bool),
    ours: Conv<D>,
    flex: Conv<D>,
    pytorch: &mut Option<PyTorch>,
    budget: Duration,
) -> [Row; 2] {
    let of_base = Tensors::random(case);
    let (plain, base) = if bf16 {
        (of_base.cast(DType::BF16), ours)
    } else {
        (of_base.clone(), flex)
    };
    let tensors =
        [(plain, ours), (of_base, base)].map(|(plain, conv)| (plain.leaves(), plain, conv));
    let [(x, weight, bias), expected] = [0, 1].map(|of| tensors[of].0.gradients(tensors[of].2));
    let [y, expected_y] = [0, 1].map(|of| tensors[of].1.forward(tensors[of].2));
    let tolerance = if bf16 { 2e-2 } else { 1e-3 };
    compare("y", y, expected_y, tolerance);
    compare("gradient of x", x, expected.0, tolerance);
    compare("gradient of weight", weight, expected.1, tolerance);
    compare("gradient of bias", bias, expected.2, tolerance);

    let mut run = |implementation: usize, pass: usize| match tensors.get(implementation) {
        Some((_, plain, conv)) if pass == 0 => Some(timed(|| plain.forward(conv))),
        Some((leaves, _, conv)) => Some(timed(|| leaves.gradients(conv))),
        None => pytorch.as_mut()?.run(PASSES[pass].0, &case.request(bf16)),
    };
    let (medians, peak_gflops) = in_turn::<3, 2>((MIN_ROUNDS, budget), &mut run);
    [0, 1].map(|pass| Row {
        case: case.to_string(),
        pass: PASSES[pass].0,
        flops: PASSES[pass].1 * case.forward_flops(),
        median_s: medians[pass],
        peak_gflops,
    })
}

/// Tensors of a convolution.
#[derive(Clone)]
struct Tensors<const D: usize> {
    x: Tensor<D>,
    weight: Tensor<D>,
    bias: Tensor<1>,
    cotangent: Tensor<D>,
}

impl<const D: usize> Tensors<D> {
    fn random(case: &Case) -> Self {
        fn random<const D: usize>(shape: &[usize]) -> Tensor<D> {
            let shape: [usize; D] = shape.try_into().expect("a shape of this rank");
            Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::default())
        }
        Self {
            x: random(case.x),
            weight: random(case.weight),
            bias: random(&case.weight[..1]),
            cotangent: random(&case.y()),
        }
    }

    fn cast(&self, dtype: DType) -> Self {
        let dtype = FloatDType::from(dtype);
        Self {
            x: self.x.clone().cast(dtype),
            weight: self.weight.clone().cast(dtype),
            bias: self.bias.clone().cast(dtype),
            cotangent: self.cotangent.clone().cast(dtype),
        }
    }

    /// Returns the same tensors, with gradients.
    fn leaves(&self) -> Self {
        Self {
            x: self.x.clone().autodiff().require_grad(),
            weight: self.weight.clone().autodiff().require_grad(),
            bias: self.bias.clone().autodiff().require_grad(),
            cotangent: self.cotangent.clone(),
        }
    }

    fn forward(&self, conv: Conv<D>) -> Tensor<D> {
        conv(self.x.clone(), self.weight.clone(), self.bias.clone())
    }

    /// Gradients of input, weight and bias.
    fn gradients(&self, conv: Conv<D>) -> (Tensor<D>, Tensor<D>, Tensor<1>) {
        let gradients = pair(self.forward(conv), self.cotangent.clone()).backward();
        let message = "a leaf has a gradient";
        (
            self.x.grad(&gradients).expect(message),
            self.weight.grad(&gradients).expect(message),
            self.bias.grad(&gradients).expect(message),
        )
    }
}

/// Checks that implementations compute the same results.
fn compare<const D: usize>(what: &str, ours: Tensor<D>, base: Tensor<D>, tolerance: f32) {
    let largest = |tensor: Tensor<D>| tensor.abs().max().into_scalar::<f32>();
    let difference = largest(ours.cast(FloatDType::F32) - base.clone()) / largest(base);
    assert!(
        difference < tolerance,
        "{what}: {difference} of the largest value away from what it should be, at most {tolerance} expected"
    );
}
