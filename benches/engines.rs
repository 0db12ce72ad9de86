//! Cost of messages, compared with peers in one run: `make bench-engines`.
//!
//! - an exchange between two ranks, and a sum over them, by MPI, compared with the same bytes by a
//!   small C program (`engines_mpi.c`), by PyTorch's gloo (`engines_gloo.py`, if PyTorch is
//!   installed), and by our other engines;
//! - a training step of the demo's model, neighborhood attention, and dense attention on a ring, on
//!   two processes, compared with two threads and with one rank on both cores;
//! - a convolution on two processes that compute cells independent of halos while halos are in
//!   flight, compared with processes that wait first.
//!
//! Programs run in turn, several rounds; the figures are medians. `HALOCLINE_PYTHON` is a Python
//! with PyTorch, `HALOCLINE_BENCH_SECONDS` the time per figure in each round; arguments are other
//! sizes, in bytes. Writes `target/bench/engines.csv`.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use burn::optim::{AdamWConfig, GradientsParams};
use halocline::core::Traffic;
use halocline::core::comm::Operation;
use halocline::core::ops::all_reduce;
use halocline::models::{SurrogateCnnConfig, weighted_mse};
use halocline::ops::attention::{neighborhood_attention, scaled_dot_product_attention};
use halocline::prelude::*;
use peers::{Samples, collect, median};
use swap::swap;

mod peers;
mod swap;

const SIZES: [usize; 8] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];
/// Rows and columns of the convolution's field.
const GRIDS: [[usize; 2]; 4] = [[64, 128], [128, 256], [256, 512], [721, 1440]];
const ROUNDS: usize = 5;
/// Number of threads that are ranks, if not two.
const RANKS: &str = "HALOCLINE_BENCH_RANKS";
/// Whether a rank that measures convolutions computes while halos are in flight.
const OVERLAP: &str = "HALOCLINE_OVERLAP";
/// Marks this process as a rank, with the seconds that it may spend on a figure.
const BUDGET: &str = "HALOCLINE_BENCH_BUDGET";

fn main() -> Result<()> {
    match std::env::var(BUDGET) {
        Ok(budget) => as_rank(budget.parse().map_err(Error::other)?),
        Err(_) => compare(),
    }
}

/// Sizes given as arguments, or all.
fn sizes() -> Vec<usize> {
    let given = std::env::args().filter_map(|argument| argument.parse().ok());
    let given: Vec<usize> = given.collect();
    if given.is_empty() {
        SIZES.to_vec()
    } else {
        given
    }
}

// ---- Ranks.

fn as_rank(budget: f64) -> Result<()> {
    let sizes = sizes();
    let ranks = std::env::var(RANKS).map_or(Ok(2), |ranks| ranks.parse());
    let ranks = ranks.map_err(Error::other)?;
    Launcher::from_env().ranks(ranks).check(false).run(|world| {
        let whole = || {
            step(&world, budget)?;
            neighborhood(&world, budget)?;
            ring(&world)
        };
        if world.size() == 1 {
            return whole();
        }
        if std::env::var_os(OVERLAP).is_some() {
            return GRIDS
                .iter()
                .try_for_each(|grid| convolution(&world, *grid, budget));
        }
        for &bytes in &sizes {
            exchange(&world, bytes, budget)?;
            reduction(&world, bytes, budget)?;
        }
        if sizes == SIZES { whole() } else { Ok(()) }
    })
}

/// Runs `call` on all ranks until the time is over; rank 0 prints the median.
fn measure(
    world: &World,
    what: &str,
    bytes: usize,
    budget: f64,
    mut call: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut times = Vec::new();
    let mut go_on = true;
    call()?;
    world.barrier()?;
    let start = Instant::now();
    while go_on {
        let before = Instant::now();
        call()?;
        times.push(before.elapsed().as_secs_f64());
        // Rank 0 decides now and then whether to continue.
        if times.len().is_multiple_of(16) {
            let own = times.len() < 20_000 && start.elapsed().as_secs_f64() < budget;
            let said = world.broadcast_bytes(0, world.is_root().then(|| vec![u8::from(own)]))?;
            go_on = said == [1];
        }
    }
    if world.is_root() {
        println!("{what},{bytes},{:.9}", median(times));
    }
    Ok(())
}

/// Makes an operator's result, like halos and gradients, so that its memory is materialized.
fn field(world: &World, bytes: usize) -> Tensor<1> {
    ActivationField::relu(Tensor::<1>::ones(
        [bytes / 4],
        &world.device().clone().inner(),
    ))
}

fn exchange(world: &World, bytes: usize, budget: f64) -> Result<()> {
    let peer = world.size() - 1 - world.rank();
    let row = field(world, bytes).into_dispatch();
    measure(world, "exchange", bytes, budget, || {
        swap(world, peer, row.clone()).map(drop)
    })
}

fn reduction(world: &World, bytes: usize, budget: f64) -> Result<()> {
    let mesh = world.mesh([("data", world.size())])?;
    let x = field(world, bytes);
    measure(world, "all_reduce", bytes, budget, || {
        let operation = Operation::new("sum", Traffic::Reduce, None);
        drop(all_reduce(x.clone(), &mesh, &[0], ReduceOp::Sum, operation));
        Ok(())
    })
}

/// Training step of the demo's model.
fn step(world: &World, budget: f64) -> Result<()> {
    const SHAPE: [usize; 4] = [2, 3, 128, 256];
    let mesh = world.mesh([("lat", world.size())])?;
    let config = SurrogateCnnConfig::new(SHAPE[1])
        .with_width(16)
        .with_blocks(2);
    let mut model = Some(world.init(|device| config.init(device))?);
    let mut optimizer: burn::optim::ModuleOptimizer = AdamWConfig::new().init();
    let normal = Distribution::Normal(0.0, 1.0);
    let x = ShardTensor::random(SHAPE, normal, RandomKey::new(1, "x"), &mesh, &[Shard(2)])?;
    let weights = vec![1.0; SHAPE[2]];
    measure(world, "step", 0, 8.0 * budget, || {
        let taken = model.take().expect("a step gives the model back");
        let y = x.clone().apply(&taken);
        let loss = weighted_mse(y, x.clone(), &weights)?.resolve();
        let gradients = GradientsParams::from_grads(loss.backward(), &taken);
        model = Some(optimizer.step(1e-3, taken, gradients));
        Ok(())
    })
}

/// `[1, *cells, heads, width]` queries, keys or values whose first cells are sharded, without
/// gradients.
fn operand<const D: usize>(world: &World, shape: [usize; D], name: &str) -> Result<ShardTensor<D>> {
    let mesh = world.mesh([("x", world.size())])?;
    let normal = Distribution::Normal(0.0, 1.0);
    Ok(ShardTensor::random(shape, normal, RandomKey::new(1, name), &mesh, &[Shard(1)])?.inner())
}

fn neighborhood(world: &World, budget: f64) -> Result<()> {
    let field = |name| operand(world, [1, 128, 256, 4, 32], name);
    let (q, k, v) = (field("q")?, field("k")?, field("v")?);
    let options = NeighborhoodOptions::new([7, 7]);
    measure(world, "neighborhood", 0, 4.0 * budget, || {
        drop(neighborhood_attention(
            q.clone(),
            k.clone(),
            v.clone(),
            &options,
        )?);
        Ok(())
    })
}

/// Once per round, as it takes seconds.
fn ring(world: &World) -> Result<()> {
    let tokens = |name| operand(world, [1, 16384, 8, 64], name);
    let (q, k, v) = (tokens("q")?, tokens("k")?, tokens("v")?);
    let options = AttentionOptions::default();
    world.barrier()?;
    let start = Instant::now();
    drop(scaled_dot_product_attention(q, k, v, &options)?);
    world.barrier()?;
    if world.is_root() {
        println!("ring,0,{:.9}", start.elapsed().as_secs_f64());
    }
    Ok(())
}

const CHANNELS: usize = 32;

/// Convolution 32→32, 3 × 3, of a field whose rows are sharded, without gradients.
fn convolution(world: &World, grid: [usize; 2], budget: f64) -> Result<()> {
    let [rows, columns] = grid;
    let mesh = world.mesh([("lat", world.size())])?;
    let x = ShardTensor::ones([1, CHANNELS, rows, columns], &mesh, &[Shard(2)])?.inner();
    let device = world.device().clone().inner();
    let weight = Tensor::<4>::ones([CHANNELS, CHANNELS, 3, 3], &device);
    let options = ConvOptions::default().with_padding([Padding::zeros(1, 1); 2]);
    measure(world, "conv", grid[0] * grid[1], budget, || {
        drop(x.clone().conv(weight.clone(), None, &options));
        Ok(())
    })
}

// ---- Comparison.

fn compare() -> Result<()> {
    let budget = std::env::var("HALOCLINE_BENCH_SECONDS").unwrap_or_else(|_| "0.3".into());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    std::fs::create_dir_all(&folder)?;
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
    let peer = folder.join("engines_mpi");
    let compiled = Command::new("mpicc")
        .arg("-O2")
        .arg(here.join("engines_mpi.c"))
        .arg("-o")
        .arg(&peer)
        .status()?;
    if !compiled.success() {
        return Err(Error::other(
            "mpicc could not compile benches/engines_mpi.c",
        ));
    }
    let sizes: Vec<String> = sizes().iter().map(ToString::to_string).collect();
    let python = std::env::var("HALOCLINE_PYTHON").unwrap_or_else(|_| "python3".into());
    // By implementation; "early" computes while halos are in flight, "late" after them.
    let mut found = BTreeMap::<&str, Samples>::new();
    let mut run = |by, job: &mut Command| collect(job, found.entry(by).or_default());
    let mut torch = true;
    for _ in 0..ROUNDS {
        let me = std::env::current_exe()?;
        let as_rank = |mut job: Command| {
            job.env("RAYON_NUM_THREADS", "1").env(BUDGET, &budget);
            job
        };
        run("mpi", as_rank(mpirun(&me)).args(&sizes))?;
        for (by, overlap) in [("early", "1"), ("late", "0")] {
            run(by, as_rank(mpirun(&me)).env(OVERLAP, overlap))?;
        }
        run("c-mpi", mpirun(&peer).arg(&budget).args(&sizes))?;
        let [mut first, mut second] = connected(&me)?.map(as_rank);
        let mut second = second.args(&sizes).stdout(Stdio::null()).spawn()?;
        run("tcp", first.args(&sizes))?;
        second.wait()?;
        if torch {
            let mut script = Command::new(&python);
            script.arg(here.join("engines_gloo.py")).arg(&budget);
            torch = run("gloo", script.args(&sizes)).is_ok();
            if !torch {
                println!("no PyTorch in {python}: pip install torch, or set HALOCLINE_PYTHON");
            }
        }
        let threads = || {
            let mut job = Command::new(&me);
            job.env(BUDGET, &budget);
            job
        };
        run("one", threads().env(RANKS, "1"))?;
        run("local", threads().args(&sizes))?;
    }
    let of = |by: &str, what: &str, bytes| {
        let times = found.get(by)?.get(&(what.to_string(), bytes))?;
        Some(median(times.clone()) * 1e6)
    };
    report(&folder.join("engines.csv"), of)?;
    println!("\nconvolution 32→32 3×3 on two processes, µs: while halos travel, after them");
    for [rows, columns] in GRIDS {
        let of = |by| of(by, "conv", rows * columns).unwrap_or(f64::NAN);
        let (early, late) = (of("early"), of("late"));
        let halo = CHANNELS * columns * size_of::<f32>();
        println!(
            "{rows:>6} × {columns:<6}{halo:>10} bytes{early:>12.1}{late:>12.1}{:>8.2}",
            early / late
        );
    }
    Ok(())
}

fn mpirun(program: &Path) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "2"]);
    command.arg(program);
    command
}

/// Makes the two processes of a job, which find each other by an address.
fn connected(program: &Path) -> Result<[Command; 2]> {
    let free = TcpListener::bind(("127.0.0.1", 0))?;
    let port = free.local_addr()?.port().to_string();
    Ok(["0", "1"].map(|rank| {
        let mut command = Command::new(program);
        command
            .envs([("RANK", rank), ("WORLD_SIZE", "2")])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command
    }))
}

/// Prints and writes the medians, in µs, by implementation, measurement, and bytes.
fn report(csv: &Path, of: impl Fn(&str, &str, usize) -> Option<f64>) -> Result<()> {
    let cell = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
    let ratio = |ours: Option<f64>, peer: Option<f64>| match (ours, peer) {
        (Some(ours), Some(peer)) => format!("{:.2}", ours / peer),
        _ => "-".into(),
    };
    let mut lines = vec!["what,bytes,impl,median_us".to_string()];
    for what in ["exchange", "all_reduce"] {
        println!("\n{what} of two ranks, µs");
        let heads = [
            "bytes",
            "Halocline MPI",
            "C, MPI",
            "ratio",
            "gloo",
            "ratio",
            "TCP",
            "local",
        ];
        println!("{}", heads.map(|head| format!("{head:>14}")).concat());
        for bytes in sizes() {
            let names = ["mpi", "c-mpi", "gloo", "tcp", "local"];
            let [mpi, c, gloo, tcp, local] = names.map(|by| of(by, what, bytes));
            let cells = [
                bytes.to_string(),
                cell(mpi),
                cell(c),
                ratio(mpi, c),
                cell(gloo),
                ratio(mpi, gloo),
                cell(tcp),
                cell(local),
            ];
            println!("{}", cells.map(|cell| format!("{cell:>14}")).concat());
            for (name, value) in names.into_iter().zip([mpi, c, gloo, tcp, local]) {
                lines.extend(value.map(|value| format!("{what},{bytes},{name},{value:.2}")));
            }
        }
    }
    let names = ["mpi", "local", "one"];
    println!("\nms on two processes, on two threads, and on one rank with both cores");
    let steps = [
        ("step", "training step of the demo's model, 128×256"),
        ("neighborhood", "neighborhood attention, 128×256, 7×7"),
        ("ring", "dense attention, 16,384 tokens"),
    ];
    for (what, name) in steps {
        let times = names.map(|by| of(by, what, 0));
        let [mpi, local, one] = times;
        let cells = times.map(|time| cell(time.map(|micros| micros / 1e3)));
        println!(
            "{name:<44}{}   processes/threads {}   threads/one rank {}",
            cells.map(|cell| format!("{cell:>10}")).concat(),
            ratio(mpi, local),
            ratio(local, one)
        );
        for (by, value) in names.into_iter().zip(times) {
            lines.extend(value.map(|value| format!("{what},0,{by},{value:.2}")));
        }
    }
    std::fs::write(csv, lines.join("\n") + "\n")?;
    println!("written to {}", csv.display());
    Ok(())
}
