//! Turns of implementations, and the peak of the machine before and after them.

use std::hint::black_box;
use std::sync::{LazyLock, Mutex};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

pub(crate) use median::median;
use pulp::{Arch, Simd, WithSimd};

#[path = "../median/mod.rs"]
mod median;

/// Measurements of the peak between turns, the best of which counts, as PyTorch's threads keep
/// spinning for a while after their work.
const PEAK_RUNS: usize = 3;

/// Duration of an implementation's turn.
const TURN: Duration = Duration::from_millis(100);

/// Share of its peak that the machine must reach before and after a turn that counts: 90 %, or the
/// value of `HALOCLINE_BENCH_QUIET`. The peak is the upper quartile of all measurements since the
/// bench began, so that a program that runs during a whole case is noticed; not the maximum, as
/// processors of shared machines are faster now and then.
static QUIET: LazyLock<f64> = LazyLock::new(|| {
    let share = std::env::var("HALOCLINE_BENCH_QUIET").map(|share| share.parse());
    share.map_or(0.9, |share| {
        share.expect("HALOCLINE_BENCH_QUIET: a share of the peak")
    })
});

/// Measurements since the bench began.
static PEAKS: Mutex<Vec<Peak>> = Mutex::new(Vec::new());

/// Minimum number of turns for a median to count as a figure.
const MIN_TURNS: usize = 2;

/// Peak throughput of all cores at one moment, per second.
#[derive(Clone, Copy)]
struct Peak {
    /// Multiply-adds in registers.
    gflops: f64,
    /// Bytes read from memory.
    gigabytes: f64,
}

impl Peak {
    fn now() -> Self {
        let best = |figure: fn() -> f64| (0..PEAK_RUNS).map(|_| figure()).fold(0.0, f64::max);
        Self {
            gflops: best(gflops_in_registers),
            gigabytes: best(gigabytes_from_memory),
        }
    }

    /// Returns the upper quartile of each figure.
    fn best(peaks: &[Self]) -> Option<Self> {
        let quartile = |figure: fn(&Self) -> f64| {
            let mut figures: Vec<f64> = peaks.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            figures.get(3 * figures.len() / 4).copied()
        };
        Some(Self {
            gflops: quartile(|peak| peak.gflops)?,
            gigabytes: quartile(|peak| peak.gigabytes)?,
        })
    }

    fn is_near(self, best: Self) -> bool {
        self.gflops >= *QUIET * best.gflops && self.gigabytes >= *QUIET * best.gigabytes
    }
}

/// Times of an implementation's pass in its turn, and the peaks before and after it.
struct Turn {
    seconds: Vec<f64>,
    around: [Peak; 2],
}

/// Runs passes of implementations in turn, and returns their median times, with the machine's
/// multiply-adds meanwhile, in GFLOP/s. `run` returns the seconds of an implementation and pass, or
/// `None` if it is not installed; there are at least `least` rounds.
///
/// Before and after every turn, all cores run multiply-adds in registers and read memory. Turns for
/// which the machine was below 90 % ([`QUIET`]) of the upper quartile of these measurements since
/// the bench began do not count; if too few are left, there is no figure, and a line says so.
pub(crate) fn in_turn<const IMPLEMENTATIONS: usize, const PASSES: usize>(
    (least, budget): (usize, Duration),
    mut run: impl FnMut(usize, usize) -> Option<f64>,
) -> ([[Option<f64>; IMPLEMENTATIONS]; PASSES], f64) {
    let start = Instant::now();
    let mut turns = [const { [const { Vec::new() }; IMPLEMENTATIONS] }; PASSES];
    let (mut before, mut rounds) = (Peak::now(), 0);
    while rounds < least || start.elapsed() < budget {
        for (pass, turns) in turns.iter_mut().enumerate() {
            for turn in 0..IMPLEMENTATIONS {
                // So that no implementation always follows the same one.
                let implementation = (rounds + turn) % IMPLEMENTATIONS;
                let seconds = seconds_of(|| run(implementation, pass));
                if seconds.is_empty() {
                    continue;
                }
                let after = Peak::now();
                turns[implementation].push(Turn {
                    seconds,
                    around: [before, after],
                });
                before = after;
            }
        }
        rounds += 1;
    }
    medians(turns)
}

/// Returns the times of the runs of a turn. The first run wakes threads and warms caches, and does
/// not count unless it is too long to repeat.
fn seconds_of(mut run: impl FnMut() -> Option<f64>) -> Vec<f64> {
    let Some(first) = run() else {
        return Vec::new();
    };
    if first > 5.0 * TURN.as_secs_f64() {
        return vec![first];
    }
    let begin = Instant::now();
    let mut seconds = Vec::new();
    while begin.elapsed() < TURN {
        seconds.extend(run());
    }
    seconds
}

fn medians<const IMPLEMENTATIONS: usize, const PASSES: usize>(
    turns: [[Vec<Turn>; IMPLEMENTATIONS]; PASSES],
) -> ([[Option<f64>; IMPLEMENTATIONS]; PASSES], f64) {
    let all = || turns.iter().flatten().flatten();
    let mut peaks = PEAKS.lock().expect("no other thread measures");
    peaks.extend(all().flat_map(|turn| turn.around));
    let Some(best) = Peak::best(&peaks) else {
        return ([[None; IMPLEMENTATIONS]; PASSES], f64::NAN);
    };
    let is_quiet = |turn: &&Turn| turn.around.iter().all(|peak| peak.is_near(best));
    let of_turns = |turns: &Vec<Turn>| {
        let quiet = turns.iter().filter(is_quiet);
        let enough = quiet.clone().count() >= MIN_TURNS;
        let seconds = quiet.flat_map(|turn| &turn.seconds).copied();
        enough.then(|| median(seconds.collect()))
    };
    let medians = turns.each_ref().map(|pass| pass.each_ref().map(of_turns));
    let measured = turns.iter().flatten().filter(|turns| !turns.is_empty());
    if measured.count() > medians.iter().flatten().flatten().count() {
        let (quiet, turns) = (all().filter(is_quiet).count(), all().count());
        println!(
            "machine busy: no figure; it was at {:.0} % of its peak beside {quiet} of {turns} turns",
            100.0 * *QUIET
        );
    }
    let gflops: Vec<f64> = all()
        .filter(is_quiet)
        .flat_map(|turn| turn.around.map(|peak| peak.gflops))
        .collect();
    if gflops.is_empty() {
        return (medians, best.gflops);
    }
    (medians, median(gflops))
}

pub(crate) fn timed<T>(f: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    black_box(f());
    start.elapsed().as_secs_f64()
}

/// Measures the multiply-adds in registers of all cores, in GFLOP/s.
fn gflops_in_registers() -> f64 {
    const STEPS: usize = 1 << 21;
    /// Enough to hide the latency of two units; with their operands they fit into the 16 registers
    /// of AVX2.
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

/// Measures the bytes that all cores read from memory, in GB/s.
fn gigabytes_from_memory() -> f64 {
    /// Per core; twice a last-level cache shared by two.
    const FLOATS: usize = 16 << 20;

    struct Sum<'a>(&'a [f32]);

    impl WithSimd for Sum<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (vectors, _) = S::as_simd_f32s(self.0);
            let mut sums = [simd.splat_f32s(0.0); 4];
            for vectors in vectors.as_chunks::<4>().0 {
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = simd.add_f32s(*sum, *vector);
                }
            }
            black_box(sums);
        }
    }

    static FIELD: LazyLock<Vec<f32>> = LazyLock::new(|| vec![1.0; FLOATS * cores()]);
    let field = FIELD.chunks_exact(FLOATS);
    let start = Instant::now();
    thread::scope(|scope| {
        for part in field {
            scope.spawn(|| Arch::new().dispatch(Sum(part)));
        }
    });
    size_of_val(FIELD.as_slice()) as f64 / start.elapsed().as_secs_f64() / 1e9
}

pub(crate) fn cores() -> usize {
    available_parallelism().map_or(1, |count| count.get())
}
