//! Communication between ranks: the trait of engines, and the messages that they move.
//!
//! An engine moves batches of messages between pairs of ranks, in order. Collective operations are
//! built on batches, once for all engines, so that a reduction returns the same bits on all of
//! them.

use std::fmt;
use std::sync::Arc;
#[cfg(any(feature = "mpi", feature = "cuda"))]
use std::time::Duration;

pub(crate) use counters::{CommStats, ModuleStats};
pub use counters::{Count, Counters};
pub(crate) use dry_run::PlannedMessages;
pub use host::Place;
pub use message::{Batch, Expected, InFlight, Payload, Pending};
pub use operation::Operation;
pub(crate) use operation::Traffic;
pub(crate) use replay::Replay;

use crate::Result;
pub(crate) use crate::settings::Overlap;
pub use crate::settings::Settings;

pub(crate) mod all_reduce;
pub(crate) mod collectives;
pub(crate) mod counters;
pub(crate) mod dry_run;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod gpu;
#[cfg(feature = "cube")]
pub(crate) mod handle;
mod host;
pub(crate) mod local;
mod mailbox;
mod message;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
pub(crate) mod operation;
mod replay;
pub(crate) mod tcp;
#[cfg(any(feature = "cuda", test))]
mod watch;
mod wire;

/// Runs a call that waits for other processes without a time limit. If one of them is missing, this
/// process ends after the timeout.
#[cfg(any(feature = "mpi", feature = "cuda"))]
fn within<T>(timeout: Duration, whom: &'static str, join: impl FnOnce() -> T) -> T {
    let (joined, wait) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if wait.recv_timeout(timeout) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!(
                "halocline: start-up: the other processes {whom} did not join within {} s; \
                 is one of them stopped, or slower than the timeout (HALOCLINE_TIMEOUT)?",
                timeout.as_secs_f64()
            );
            std::process::exit(1);
        }
    });
    let value = join();
    drop(joined);
    value
}

/// Connection of one rank to the others: the interface of an engine.
///
/// Messages between two ranks keep their order. A send never waits for its receiver. A rank may
/// send itself messages that the same batch receives. All ranks must start their batches in the
/// same order, so only one thread of a rank may start batches at a time.
///
/// # Example
/// ```
/// use halocline_core::comm::{Batch, Expected, Operation, Payload};
/// use halocline_core::{Launcher, Traffic};
///
/// Launcher::local(2).run(|world| {
///     let peer = 1 - world.rank();
///     let batch = Batch {
///         operation: Operation::new("swap", Traffic::Control, None),
///         sends: vec![(peer, Payload::Bytes(vec![world.rank() as u8]))],
///         receives: vec![(peer, Expected::Bytes)],
///     };
///     let in_flight = world.comm().clone().start(batch)?;
///     in_flight.in_background(); // the rank may compute here
///     let received = in_flight.finish()?;
///     assert!(matches!(&received[..], [Payload::Bytes(bytes)] if bytes[0] as usize == peer));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Whether this engine stands in for the engine of a job, to record the messages of a program.
    /// An elementwise result of tensors on both engines has this one.
    fn stands_in(&self) -> bool {
        false
    }

    /// Whether this engine sends nothing. An engine that [stands in](Self::stands_in) may still
    /// send what it records.
    fn is_dry(&self) -> bool {
        false
    }

    /// Posts the sends of a batch and returns before its messages have arrived.
    ///
    /// # Errors
    /// Another rank has ended.
    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight>;

    /// Notifies the other ranks that this one ends, with the cause and the rank that failed first,
    /// which may be another one.
    fn fail(&self, rank: usize, cause: &str);

    /// The rank that failed first, and the cause, if recorded. An engine whose failures end the
    /// process records none.
    fn failure(&self) -> Option<(usize, String)> {
        None
    }

    /// Whether messages take time in which a rank can compute.
    fn takes_time(&self) -> bool {
        true
    }

    /// The communication settings of this rank.
    fn settings(&self) -> &Settings;

    /// Counters of the messages and bytes that this rank has sent.
    fn counters(&self) -> &Counters;

    /// Describes the boxes of the batch started last, for engines that record plans.
    fn describe_boxes(&self, _: &dyn fmt::Display) {}
}
