//! Communication between ranks: one trait, an engine per way that ranks can be connected.
//!
//! An engine moves batches of messages between pairs of ranks, in order. Everything collective is built on that in
//! `collectives` and `sums`, once for all engines, so that a reduction gives the same bits on all of them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn::backend::{DispatchDevice, DispatchTensor};
use burn::tensor::{DType, Shape};

pub use host::Place;
pub use operation::Operation;

use crate::Result;

pub(crate) mod collectives;
#[cfg(feature = "cube")]
pub(crate) mod handle;
mod host;

pub(crate) mod local;
mod mailbox;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
mod operation;
pub(crate) mod sums;
pub(crate) mod tcp;
#[cfg(any(feature = "cuda", test))]
mod watch;
mod wire;

/// What a communication is for; statistics are kept by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Traffic {
    /// Halos and other boxes that an operator needs.
    Exchange,
    /// A change of placement.
    Redistribute,
    /// A sum, maximum or minimum over ranks.
    Reduce,
    /// A field or parameters sent out from one rank, or collected on one.
    Scatter,
    /// Checks and metadata.
    Control,
}

impl Traffic {
    /// All kinds, in the order of [`CommStats`].
    pub const ALL: [Self; 5] = [
        Self::Exchange,
        Self::Redistribute,
        Self::Reduce,
        Self::Scatter,
        Self::Control,
    ];
}

/// What one rank sends another.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Pieces of a field.
    Tensors(Vec<DispatchTensor>),
    /// Metadata.
    Bytes(Vec<u8>),
}

/// What one rank expects from another.
#[derive(Clone, Debug)]
pub enum Expected {
    /// Tensors of these shapes.
    Tensors {
        /// Their shapes.
        shapes: Vec<Shape>,
        /// Their element type.
        dtype: DType,
        /// The device that they are to lie on.
        device: DispatchDevice,
    },
    /// A tensor that is written to its place in a larger one; the payload is then without tensors.
    Place(Place),
    /// Metadata of any length.
    Bytes,
}

impl Expected {
    /// The size of what is expected, in bytes; `None` if it may have any.
    pub(crate) fn bytes(&self) -> Option<usize> {
        match self {
            Self::Bytes => None,
            Self::Place(place) => Some(place.bytes()),
            Self::Tensors { shapes, dtype, .. } => {
                let cells = shapes.iter().map(Shape::num_elements);
                Some(cells.sum::<usize>() * dtype.size())
            }
        }
    }

    /// Whether a payload is of the expected form.
    pub(crate) fn accepts(&self, payload: &Payload) -> bool {
        use burn::backend::TensorMetadata;
        match (self, payload) {
            (Self::Bytes, Payload::Bytes(_)) => true,
            (Self::Place(place), Payload::Tensors(_)) => payload.bytes() == place.bytes(),
            (Self::Tensors { shapes, dtype, .. }, Payload::Tensors(tensors)) => {
                let fits = |(shape, tensor): (&Shape, &DispatchTensor)| {
                    *shape == tensor.shape() && *dtype == tensor.dtype()
                };
                shapes.len() == tensors.len() && shapes.iter().zip(tensors).all(fits)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensors { shapes, dtype, .. } => {
                let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
                write!(f, "{dtype:?} {shapes:?}")
            }
            Self::Place(place) => write!(f, "{} bytes of a larger tensor", place.bytes()),
            Self::Bytes => f.write_str("metadata"),
        }
    }
}

/// Messages that one rank sends and receives in one operation.
#[derive(Debug)]
pub struct Batch {
    /// The operation.
    pub operation: Operation,
    /// Messages for ranks of the world.
    pub sends: Vec<(usize, Payload)>,
    /// Messages from ranks of the world.
    pub receives: Vec<(usize, Expected)>,
}

/// A batch on its way; [`finish`](InFlight::finish) waits for what it receives. Batches may be finished in any order.
#[must_use = "what a batch receives is lost if it is not finished"]
pub struct InFlight(Box<dyn Pending>);

/// What an engine knows of a batch on its way.
pub trait Pending {
    /// Waits for the messages and returns them in the order of [`Batch::receives`].
    ///
    /// # Errors
    /// Those of [`InFlight::finish`].
    fn finish(self: Box<Self>) -> Result<Vec<Payload>>;

    /// Has the messages driven on while the rank computes, on engines that do not do so by themselves.
    fn in_background(&self) {}
}

impl<F: FnOnce() -> Result<Vec<Payload>>> Pending for F {
    fn finish(self: Box<Self>) -> Result<Vec<Payload>> {
        self()
    }
}

impl InFlight {
    /// A batch on its way.
    pub fn new(pending: impl Pending + 'static) -> Self {
        Self(Box::new(pending))
    }

    /// Has the messages driven on while the rank computes, on engines that do not do so by themselves.
    ///
    /// For operators that have work to do before they [`finish`](Self::finish).
    pub fn in_background(&self) {
        self.0.in_background();
    }

    /// This batch, with what is called with the time at which the rank began to wait, when all has come.
    pub(crate) fn then(self, seen: impl FnOnce(Instant) + 'static) -> Self {
        struct Seen<F>(InFlight, F);

        impl<F: FnOnce(Instant)> Pending for Seen<F> {
            fn finish(self: Box<Self>) -> Result<Vec<Payload>> {
                let Self(in_flight, seen) = *self;
                let waited_from = Instant::now();
                let payloads = in_flight.finish()?;
                seen(waited_from);
                Ok(payloads)
            }

            fn in_background(&self) {
                self.0.in_background();
            }
        }

        Self::new(Seen(self, seen))
    }

    /// Waits for the messages and returns them in the order of [`Batch::receives`].
    ///
    /// # Errors
    /// A message that did not come within the timeout, belongs to another operation or is of another shape; a rank
    /// that ended.
    pub fn finish(self) -> Result<Vec<Payload>> {
        self.0.finish()
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlight")
    }
}

/// Joins other processes by a call that waits for them forever: if one of them does not come, this one ends after the
/// timeout.
#[cfg(any(feature = "mpi", feature = "cuda"))]
fn within<T>(timeout: Duration, whom: &'static str, join: impl FnOnce() -> T) -> T {
    let (joined, wait) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if wait.recv_timeout(timeout) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!(
                "halocline: start-up: the other processes {whom} did not come within {} s; \
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

/// The connection of one rank to the others.
///
/// Messages between two ranks keep their order. A send never waits for its receiver. A rank may send itself what the same
/// batch receives.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Posts the sends of a batch and returns before its messages have come.
    ///
    /// # Errors
    /// A rank that ended.
    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight>;

    /// Tells the other ranks that this one ends: the rank that failed first, which may be another, and why.
    fn fail(&self, rank: usize, cause: &str);

    /// The rank that failed first, and why, as far as this one knows; an engine whose failures end the process knows none.
    fn failure(&self) -> Option<(usize, String)> {
        None
    }

    /// Whether messages take time, during which a rank can compute.
    fn takes_time(&self) -> bool {
        true
    }

    /// The settings of this rank's communication.
    fn settings(&self) -> &Settings;

    /// Counters of what this rank has sent.
    fn counters(&self) -> &Counters;
}

/// How a rank communicates.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a rank waits for a message. Default 60 s.
    pub timeout: Duration,
    /// Whether ranks compare operation and layout before they communicate, and tensors that all must hold alike; and
    /// whether closures of `map_local` are run on other cells too. Default in debug builds only.
    pub check: bool,
    /// Whether operators compute what they can while boxes travel. Default where it is likely to pay.
    pub overlap: Overlap,
    /// Whether gradients of parameters are summed many at a time. Default yes.
    pub buckets: bool,
    /// Whether every communication is told on stderr. Default not.
    pub log: bool,
}

/// When operators compute what needs no other rank's cells while these travel. Results have the same bits either way; on
/// GPUs as far as the backend computes a cell alike in tensors of another size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// On engines whose messages take time, for messages of a size that makes up for the work in two parts.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            check: cfg!(debug_assertions),
            overlap: Overlap::default(),
            buckets: true,
            log: false,
        }
    }
}

/// Running counts of messages and bytes sent, by kind and pass.
#[derive(Debug, Default)]
pub struct Counters([[(AtomicU64, AtomicU64); 2]; Traffic::ALL.len()]);

impl Counters {
    /// Counts one message of an operation.
    pub fn count(&self, operation: &Operation, bytes: usize) {
        let of = &self.0[operation.traffic() as usize];
        let (messages, total) = &of[usize::from(operation.is_backward())];
        messages.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn snapshot(&self) -> CommStats {
        let read = |(messages, bytes): &(AtomicU64, AtomicU64)| Count {
            messages: messages.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        };
        CommStats(self.0.each_ref().map(|passes| passes.each_ref().map(read)))
    }
}

/// Messages and bytes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// The number of messages sent.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a rank has sent, by kind and pass. Prints as a table.
///
/// # Example
/// What a step sends:
/// ```
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor, Traffic};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
///     let before = world.comm_stats();
///     x.full_tensor(LocalGradient::Replicated);
///     let step = world.comm_stats().since(&before);
///     assert_eq!(step.of(Traffic::Redistribute).bytes, 24);
///     println!("{step}");
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommStats([[Count; 2]; Traffic::ALL.len()]);

impl CommStats {
    /// The count of one kind, in both passes.
    pub fn of(&self, traffic: Traffic) -> Count {
        let [forward, backward] = self.0[traffic as usize];
        Count {
            messages: forward.messages + backward.messages,
            bytes: forward.bytes + backward.bytes,
        }
    }

    /// The count of one kind in the backward pass.
    pub fn of_backward(&self, traffic: Traffic) -> Count {
        self.0[traffic as usize][1]
    }

    /// What has been sent since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.0;
        let before = earlier.0.as_flattened();
        for (count, before) in counts.as_flattened_mut().iter_mut().zip(before) {
            count.messages -= before.messages;
            count.bytes -= before.bytes;
        }
        Self(counts)
    }
}

impl fmt::Display for CommStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14}{:>26}{:>26}", "sent", "forward", "backward")?;
        write!(f, "\n{:<14}", "")?;
        write!(f, "{0:>10}{1:>16}{0:>10}{1:>16}", "messages", "bytes")?;
        for traffic in Traffic::ALL {
            write!(f, "\n{:<14}", format!("{traffic:?}"))?;
            for Count { messages, bytes } in self.0[traffic as usize] {
                write!(f, "{messages:>10}{bytes:>16}")?;
            }
        }
        Ok(())
    }
}
