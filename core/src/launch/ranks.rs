//! Execution of a program on the ranks of a job, and the end of the job when a rank fails.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use rayon::ThreadPoolBuilder;

use super::agreement::require_same_settings;
use super::between_gpus;
use super::panics::Panics;
use crate::balance::even_extents;
use crate::comm::local::Hub;
use crate::comm::{Communicator, Settings};
use crate::settings::GRACE;
use crate::world::World;
use crate::{Error, LayerKeys, RandomKey, Result};

/// Runs the program of a rank; layers draw random numbers derived from the job's seed.
fn run_program<T>(world: World, program: &impl Fn(World) -> Result<T>) -> Result<T> {
    LayerKeys::new(RandomKey::new(world.seed(), "layers")).install();
    program(world)
}

/// Runs the program of a rank that is a process of a job, provided that all processes have the same
/// `settings`.
pub(super) fn run_process<T>(
    comm: Arc<dyn Communicator>,
    settings: &[(&str, String)],
    device: impl Fn() -> Result<Device>,
    world: impl Fn(Arc<dyn Communicator>, &Device) -> World,
    program: impl Fn(World) -> Result<T>,
    shut_down: impl Fn() -> Result<()>,
) -> Result<Vec<T>> {
    let run = || {
        require_same_settings(&comm, settings)?;
        let device = device()?;
        let engine = between_gpus(comm.clone(), &device)?;
        let value = run_program(world(engine.clone(), &device), &program)?;
        // Messages by NCCL arrive only while both processes live. Until the device has finished,
        // `engine` watches it.
        if !Arc::ptr_eq(&engine, &comm) {
            device.sync().map_err(|error| Error::Device {
                rank: comm.rank(),
                cause: error.to_string(),
            })?;
        }
        Ok(value)
    };
    let this_rank = comm.rank();
    let ended = attempt(run).and_then(|value| {
        shut_down().map_err(Failure::Error)?;
        Ok(vec![value])
    });
    ended.map_err(|failure| {
        let (rank, cause) = failure.origin(this_rank);
        comm.fail(rank, &cause);
        if comm.size() == 1
            && let Failure::Error(error) = failure
        {
            return error;
        }
        let (rank, mut cause) = comm.failure().unwrap_or((rank, cause));
        if let Failure::Error(Error::PeerEnded { operation, .. }) = failure
            && rank != this_rank
        {
            cause = format!("{cause} (rank {this_rank} stopped in {operation})");
        }
        Error::Rank { rank, cause }
    })
}

/// Cause of the premature end of a rank's program.
enum Failure {
    Error(Error),
    Panic(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(error) => error.fmt(f),
            Self::Panic(message) => write!(f, "panicked: {message}"),
        }
    }
}

impl Failure {
    /// The rank that failed first, with the cause: `this_rank`, unless the error reports the
    /// failure of another rank.
    fn origin(&self, this_rank: usize) -> (usize, String) {
        match self {
            Self::Error(Error::Rank { rank, cause }) => (*rank, cause.clone()),
            failure => (this_rank, failure.to_string()),
        }
    }
}

fn attempt<T>(program: impl FnOnce() -> Result<T>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(program)) {
        Ok(result) => result.map_err(Failure::Error),
        Err(payload) => Err(match payload.downcast::<Error>() {
            Ok(error) => Failure::Error(*error),
            Err(payload) => Failure::Panic(message_of(&*payload)),
        }),
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "with a payload that is not a message".into())
}

/// Runs the program on all ranks of a job whose ranks are threads.
pub(super) fn run_threads<T: Send>(
    ranks: usize,
    settings: Settings,
    world: impl Fn(Arc<dyn Communicator>) -> World,
    program: impl Fn(World) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    let hub = Hub::new(ranks);
    let (ended, ends) = mpsc::channel();
    let panics = Panics::of_job();
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let world = world(Arc::new(hub.communicator(rank, settings)));
                let (hub, ended, program) = (&hub, &ended, &program);
                let (end, panics) = (ended.clone(), panics.clone());
                let body = move || {
                    let result = with_share_of_threads(rank, ranks, || {
                        panics.of_rank(rank);
                        attempt(|| run_program(world, program))
                    });
                    match &result {
                        Ok(_) => hub.finish(rank),
                        Err(failure) => {
                            let (rank, cause) = failure.origin(rank);
                            hub.fail(rank, &cause);
                        }
                    }
                    let _ = end.send(());
                    result
                };
                let thread = std::thread::Builder::new().name(format!("rank {rank}"));
                thread.spawn_scoped(scope, body).map_err(|error| {
                    let error = Error::other(format!("its thread cannot be started: {error}"));
                    hub.fail(rank, &error.to_string());
                    let _ = ended.send(());
                    Failure::Error(error)
                })
            })
            .collect();
        wait_for_ranks(&hub, ranks, &ends);
        threads
            .into_iter()
            .map(|thread| {
                let joined = thread?.join();
                joined.unwrap_or_else(|payload| Err(Failure::Panic(message_of(&*payload))))
            })
            .collect::<Vec<Result<T, Failure>>>()
    });
    if let Some((rank, cause)) = hub.failure() {
        return Err(common_error(results).unwrap_or(Error::Rank { rank, cause }));
    }
    let ranks = results.into_iter().enumerate();
    ranks
        .map(|(rank, result)| {
            result.map_err(|failure| Error::Rank {
                rank,
                cause: failure.to_string(),
            })
        })
        .collect()
}

/// Returns the error of the ranks if all have returned the same one: a mistake of the program,
/// rather than the failure of a rank.
fn common_error<T>(results: Vec<Result<T, Failure>>) -> Option<Error> {
    let mut errors = results.into_iter().map(|result| match result {
        Err(Failure::Error(error)) => Some(error),
        _ => None,
    });
    let first = errors.next()??;
    let message = first.to_string();
    let is_same = |error: Option<Error>| error.is_some_and(|error| error.to_string() == message);
    errors.all(is_same).then_some(first)
}

/// Runs the program of a rank with its share of the process's threads, in a separate pool. In a
/// pool shared by all ranks, a rank would wait for threads that must be woken while its own thread
/// is idle.
///
/// # Errors
/// A thread cannot be started.
fn with_share_of_threads<T: Send>(
    rank: usize,
    ranks: usize,
    program: impl FnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    if ranks == 1 {
        return program();
    }
    let share = even_extents(rayon::current_num_threads(), ranks)[rank];
    let mut running = Vec::new();
    let pool = ThreadPoolBuilder::new()
        .num_threads(share.max(1))
        .spawn_handler(|thread| {
            let named = std::thread::Builder::new().name(format!("rank {rank}"));
            running.push(named.spawn(|| thread.run())?);
            Ok(())
        });
    let result = match pool.build() {
        Ok(pool) => pool.install(program),
        Err(error) => Err(Failure::Error(io::Error::other(error).into())),
    };
    // Joined, so that thread-local values are dropped as well.
    running.into_iter().for_each(|thread| drop(thread.join()));
    result
}

/// Waits until all ranks have ended. Threads cannot be stopped from outside, so if ranks continue
/// for too long after a failure, the process ends.
fn wait_for_ranks(hub: &Hub, ranks: usize, ends: &mpsc::Receiver<()>) {
    let mut failed_at = None;
    let mut running = ranks;
    while running > 0 {
        match ends.recv_timeout(Duration::from_millis(200)) {
            Ok(()) => running -= 1,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        if let Some((rank, cause)) = hub.failure() {
            let since = *failed_at.get_or_insert_with(Instant::now);
            if running > 0 && since.elapsed() > GRACE {
                eprintln!(
                    "halocline: rank {rank} failed: {cause}\n\
                     halocline: {running} rank(s) did not stop within {GRACE:?}; ending the process"
                );
                std::process::exit(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the processes of a job with these settings, and returns their errors.
    fn errors(settings: [[(&str, String); 2]; 3]) -> Vec<Option<String>> {
        let hub = Hub::new(settings.len());
        let run = |rank: usize| {
            let comm = Arc::new(hub.communicator(rank, Settings::default()));
            let world = |comm, device: &Device| World::new(comm, device.clone(), 0);
            let ended = run_process(
                comm,
                &settings[rank],
                || Ok(Device::default()),
                world,
                |_| Ok(()),
                || Ok(()),
            );
            ended.err().map(|error| error.to_string())
        };
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || run(rank))).collect();
            let ended = threads.into_iter().map(|thread| thread.join());
            ended.map(|ended| ended.expect("no panic")).collect()
        })
    }

    #[test]
    fn settings_that_differ_between_processes_are_named_before_the_program_runs() {
        let settings = |overlap: &str| [("seed", "7".into()), ("overlap", overlap.to_string())];
        assert_eq!(errors(["Auto"; 3].map(settings)), [None, None, None]);
        for error in errors(["Auto", "Auto", "Off"].map(settings)) {
            let error = error.expect("an error");
            let expected = "rank 0 has overlap Auto, rank 2 has overlap Off";
            assert!(error.contains(expected), "{error}");
        }
    }
}
