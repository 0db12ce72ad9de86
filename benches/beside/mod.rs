//! What benches share that stand beside PyTorch in one run: its process, the peak of the machine, and cotangents.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use halocline::prelude::Tensor;
use pulp::{Arch, Simd, WithSimd};

/// Of five milliseconds each; PyTorch's threads spin for some after their work.
const PEAK_RUNS: usize = 3;

/// How long an implementation runs in its turn.
const TURN: Duration = Duration::from_millis(100);

/// The medians of passes of some implementations, which run in turn, and of the machine's peak meanwhile. `run` gives the
/// seconds of an implementation and pass, or nothing where it is not installed; at least so many rounds are run.
pub(crate) fn in_turn<const IMPLEMENTATIONS: usize, const PASSES: usize>(
    (least, budget): (usize, Duration),
    mut run: impl FnMut(usize, usize) -> Option<f64>,
) -> ([[Option<f64>; IMPLEMENTATIONS]; PASSES], f64) {
    let start = Instant::now();
    let mut samples = [const { [const { Vec::new() }; IMPLEMENTATIONS] }; PASSES];
    let mut peaks = Vec::new();
    let mut rounds = 0;
    while rounds < least || start.elapsed() < budget {
        for (pass, samples) in samples.iter_mut().enumerate() {
            for turn in 0..IMPLEMENTATIONS {
                // So that none always follows the same one.
                let implementation = (rounds + turn) % IMPLEMENTATIONS;
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
    let medians = samples.map(|mut samples| samples.each_mut().map(|samples| median(samples)));
    (medians, median(&mut peaks).unwrap_or(f64::NAN))
}

pub(crate) fn timed<T>(f: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    black_box(f());
    start.elapsed().as_secs_f64()
}

fn median(samples: &mut [f64]) -> Option<f64> {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied()
}

/// What the machine can do at this moment, while threads of an earlier turn fall asleep.
fn peak_gflops() -> f64 {
    (0..PEAK_RUNS)
        .map(|_| gflops_in_registers())
        .fold(0.0, f64::max)
}

/// A number whose gradient in `y` is the cotangent: burn's backward starts from ones only.
pub(crate) fn pair<const D: usize>(y: Tensor<D>, cotangent: Tensor<D>) -> Tensor<1> {
    let (y, cotangent) = (y.into_dispatch(), cotangent.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Pairing>::pair(y, cotangent))
}

#[backend_extension(Flex, Autodiff)]
trait Pairing: Backend {
    fn pair(y: FloatTensor<Self>, cotangent: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Pairing for Flex {
    fn pair(y: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        // The number itself is never read.
        <Self as FloatTensorOps<Self>>::float_zeros([1].into(), &y.device(), y.dtype().into())
    }
}

impl<B: Pairing, C: CheckpointStrategy> Pairing for Autodiff<B, C> {
    fn pair(y: FloatTensor<Self>, cotangent: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: Backend> Backward<B, 1> for Step {
            type State = FloatTensor<B>;

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                unary::<B, _>(ops.parents, ops.node, grads, |_| ops.state);
            }
        }

        let ((y, node), (cotangent, _)) = (y.into_parts(), cotangent.into_parts());
        match Step.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(cotangent.clone(), B::pair(y, cotangent)),
            OpsKind::UnTracked(prep) => prep.finish(B::pair(y, cotangent)),
        }
    }
}

/// What the machine can do at this moment: multiply-adds in registers, on all cores.
fn gflops_in_registers() -> f64 {
    const STEPS: usize = 1 << 21;
    /// They hide the latency of two units; with their operands they fit into the 16 registers of AVX2.
    const CHAINS: usize = 12;

    struct Chains;

    impl WithSimd for Chains {
        /// Floating-point operations.
        type Output = usize;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> usize {
            let [factor, summand] = black_box([0.5, 1.0]).map(|value| simd.splat_f32s(value));
            let mut sums = black_box([summand; CHAINS]);
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = simd.mul_add_e_f32s(*sum, factor, summand);
                }
            }
            black_box(sums);
            2 * STEPS * CHAINS * S::F32_LANES
        }
    }

    let start = Instant::now();
    let flops: usize = thread::scope(|scope| {
        let run = |_| scope.spawn(|| Arch::new().dispatch(Chains));
        let threads: Vec<_> = (0..cores()).map(run).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("arithmetic"))
            .sum()
    });
    flops as f64 / start.elapsed().as_secs_f64() / 1e9
}

pub(crate) fn cores() -> usize {
    available_parallelism().map_or(1, |count| count.get())
}

/// A process that runs PyTorch's side.
pub(crate) struct PyTorch {
    process: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

impl PyTorch {
    /// Runs a script beside the bench. `None`, with a note, where PyTorch is not installed.
    pub(crate) fn start(script: &str) -> Option<Self> {
        let python = std::env::var("HALOCLINE_PYTHON").unwrap_or_else(|_| "python3".into());
        let start = || {
            let mut process = Command::new(&python)
                .arg(
                    Path::new(env!("CARGO_MANIFEST_DIR"))
                        .join("benches")
                        .join(script),
                )
                .arg(cores().to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .ok()?;
            let mut answers = BufReader::new(process.stdout.take()?).lines();
            println!("{}, {} threads", answers.next()?.ok()?, cores());
            Some(Self { process, answers })
        };
        let started = start();
        if started.is_none() {
            println!("Without PyTorch: HALOCLINE_PYTHON names a python that has it.");
        }
        started
    }

    /// The seconds of one run; `None` of a case whose library is not installed.
    pub(crate) fn run(&mut self, pass: &str, case: &serde_json::Value) -> Option<f64> {
        let requests = self.process.stdin.as_mut().expect("a pipe");
        writeln!(requests, "{pass} {case}").expect("PyTorch's process is alive");
        let answer = self.answers.next().expect("PyTorch's process answers");
        let seconds: f64 = answer.expect("a line").parse().expect("seconds");
        Some(seconds).filter(|seconds| !seconds.is_nan())
    }
}
