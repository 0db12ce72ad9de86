//! Kills a training run repeatedly, at random moments, and checks that nothing is lost: `make
//! chaos`.
//!
//! A run trains a small model, whole on every rank or stored in shards, and saves every other step.
//! It runs on local ranks of one process, or as an MPI job of which a rank or `mpirun` is killed.
//! It is killed with SIGKILL and restarted until it ends. Its losses must equal those of a run that
//! was not killed, bit for bit, or up to rounding where it resumed with another number of ranks;
//! and after every kill, the newest checkpoint that it reported as written must be readable.

mod job;
mod run;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use halocline::io::Checkpoint;
use halocline::prelude::*;
use job::{Engine, Job, State};

#[derive(Parser)]
#[command(about = "Kills training runs and checks that they survive")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train, like the runs that are killed.
    Train(run::Options),
    /// Kill and compare.
    Kill(Options),
}

#[derive(Args)]
struct Options {
    /// Number of kills of local ranks.
    #[arg(long, default_value_t = 150)]
    local: usize,
    /// Number of kills of MPI jobs.
    #[arg(long, default_value_t = 60)]
    mpi: usize,
    /// Limit in seconds; fewer kills until then are an error.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Seed of the random moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Results of the kills on one engine.
#[derive(Default)]
struct Tally {
    /// Kills by [`job::Moment`].
    kills: [usize; 4],
    reported: usize,
    lost: usize,
    runs: usize,
    different: usize,
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Train(options) => run::train(&options),
        Command::Kill(options) => kill(&options),
    }
}

fn kill(options: &Options) -> Result<()> {
    let start = Instant::now();
    let folder = tempfile::tempdir()?;
    let mut draws = Draws(RandomKey::new(options.seed, "chaos"), 0);
    let mut wrong = 0;
    println!(
        "{:<22} {:>6} {:>9} {:>9} {:>7} {:>10} {:>9} {:>5} {:>6} {:>10}",
        "engine",
        "kills",
        "start-up",
        "training",
        "saving",
        "at the end",
        "reported",
        "lost",
        "runs",
        "different"
    );
    let engines = [(false, options.local), (true, options.mpi)];
    let engines = engines.into_iter().flat_map(|(mpi, kills)| {
        let third = kills / 3;
        let states = [State::Whole, State::Shards, State::Resharded];
        states.map(|state| {
            let kills = if state == State::Whole {
                kills - 2 * third
            } else {
                third
            };
            (Engine { mpi, state }, kills)
        })
    });
    for (engine, kills) in engines {
        let until = start + Duration::from_secs(options.seconds);
        let tally = engine_survives(engine, kills, until, folder.path(), &mut draws)?;
        let total: usize = tally.kills.iter().sum();
        let [begin, training, saving, end] = tally.kills;
        println!(
            "{:<22} {total:>6} {begin:>9} {training:>9} {saving:>7} {end:>10} {:>9} {:>5} {:>6} {:>10}",
            engine.to_string(),
            tally.reported,
            tally.lost,
            tally.runs,
            tally.different
        );
        wrong += tally.lost + tally.different + kills.saturating_sub(total);
    }
    println!(
        "seed {}, {:.0} s",
        options.seed,
        start.elapsed().as_secs_f64()
    );
    match wrong {
        0 => Ok(()),
        _ => Err(Error::other(
            "something was lost, different, or not tried: see the table",
        )),
    }
}

/// Kills and resumes runs on an engine, until there were enough kills and the last run has ended.
fn engine_survives(
    engine: Engine,
    kills: usize,
    until: Instant,
    folder: &Path,
    draws: &mut Draws,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let alone = folder.join(format!("{engine} alone"));
    let begun = Instant::now();
    Job::start(engine, &alone, 0)?.wait()?;
    // Some kills should hit the start, and some should come after the end.
    let longest = begun.elapsed().mul_f64(1.1);
    let expected = run::losses_of(&alone)?;
    let mut run = folder.join(format!("{engine} 0"));
    let mut newest = None;
    let mut starts = 0;
    while tally.kills.iter().sum::<usize>() < kills && Instant::now() < until {
        starts += 1;
        let mut job = Job::start(engine, &run, starts)?;
        let finished = job.kill_after(longest.mul_f64(draws.unit()), draws.unit())?;
        let reported = job.reported();
        tally.reported += reported.len();
        newest = newest.max(reported.last().copied());
        if let Some(moment) = finished {
            tally.kills[moment as usize] += 1;
        }
        if let Some(step) = newest
            && newest_readable(&run)?.is_none_or(|found| found < step)
        {
            tally.lost += 1;
            eprintln!(
                "{engine}: step {step} was reported as written, and is not there: {}",
                run.display()
            );
        }
        if finished.is_none() {
            tally.compare(engine, &run, &expected)?;
            run = folder.join(format!("{engine} {}", tally.runs));
            newest = None;
        }
    }
    Job::start(engine, &run, starts + 1)?.wait()?;
    tally.compare(engine, &run, &expected)?;
    Ok(tally)
}

impl Tally {
    /// Compares the losses of a finished run with those of a run that was not killed.
    fn compare(&mut self, engine: Engine, run: &Path, expected: &[u64]) -> Result<()> {
        self.runs += 1;
        let found = run::losses_of(run)?;
        let same = match engine.state {
            State::Resharded => close(&found, expected),
            _ => found == expected,
        };
        if !same {
            self.different += 1;
            eprintln!("{engine}: the losses of {} differ", run.display());
        }
        Ok(())
    }
}

/// Whether losses are equal up to rounding, which differs with the number of ranks and accumulates
/// over steps.
fn close(found: &[u64], expected: &[u64]) -> bool {
    let near = |(found, expected): (&u64, &u64)| {
        let [found, expected] = [found, expected].map(|bits| f64::from_bits(*bits));
        (found - expected).abs() < 1e-2 * expected
    };
    found.len() == expected.len() && found.iter().zip(expected).all(near)
}

/// Returns the newest step in a folder, after reading every byte of its checkpoint.
fn newest_readable(run: &Path) -> Result<Option<u64>> {
    let entries = std::fs::read_dir(run)?.collect::<Result<Vec<_>, _>>()?;
    let mut folders: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).collect();
    folders.retain(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("step_"))
    });
    folders.sort();
    let Some(newest) = folders.pop() else {
        return Ok(None);
    };
    let checkpoint = Checkpoint::open(newest)?;
    for name in checkpoint.names() {
        checkpoint.data(name)?;
    }
    Ok(Some(checkpoint.step()))
}

/// Sequence of random numbers.
struct Draws(RandomKey, u64);

impl Draws {
    /// Draws the next number, uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        self.1 += 1;
        let draw = RandomKey::new(self.0.number(), self.1).number();
        (draw >> 11) as f64 / (1_u64 << 53) as f64
    }
}
