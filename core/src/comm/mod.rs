//! Communication between ranks: one trait, an engine per way that ranks can be connected.
//!
//! An engine moves batches of messages between pairs of ranks, in order. Everything collective is built on that in
//! `collectives`, once for all engines, so that a reduction gives the same bits on all of them.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device};

use crate::{Layout, Result};

pub(crate) mod collectives;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;

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

/// The operation that a message belongs to. Equal on all ranks that take part in it.
#[derive(Clone, Debug)]
pub struct Operation {
    name: &'static str,
    backward: bool,
    traffic: Traffic,
    layout: Option<Layout>,
}

impl Operation {
    /// The operation called `name` on a field of the given layout.
    pub fn new(name: &'static str, traffic: Traffic, layout: Option<&Layout>) -> Self {
        Self {
            name,
            backward: false,
            traffic,
            layout: layout.cloned(),
        }
    }

    /// The same operation in the backward pass.
    pub fn backward(&self) -> Self {
        Self {
            backward: true,
            ..self.clone()
        }
    }

    /// The name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What it communicates for.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// A number by which two ranks notice that they are in different operations.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.name, self.backward, &self.layout).hash(&mut hasher);
        hasher.finish()
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if self.backward {
            f.write_str(" (backward)")?;
        }
        match &self.layout {
            Some(layout) => write!(f, " on {layout}"),
            None => Ok(()),
        }
    }
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
        shapes: Vec<Vec<usize>>,
        /// Their element type.
        dtype: DType,
        /// The device that they are to lie on.
        device: Device,
    },
    /// Metadata of any length.
    Bytes,
}

impl Expected {
    /// Whether a payload is of the expected form.
    pub(crate) fn accepts(&self, payload: &Payload) -> bool {
        use burn::backend::TensorMetadata;
        match (self, payload) {
            (Self::Bytes, Payload::Bytes(_)) => true,
            (Self::Tensors { shapes, .. }, Payload::Tensors(tensors)) => {
                shapes.len() == tensors.len()
                    && shapes
                        .iter()
                        .zip(tensors)
                        .all(|(shape, tensor)| shape[..] == tensor.shape()[..])
            }
            _ => false,
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensors { shapes, dtype, .. } => write!(f, "{dtype:?} {shapes:?}"),
            Self::Bytes => f.write_str("metadata"),
        }
    }
}

/// Messages that one rank sends and receives in one operation.
#[derive(Debug)]
pub struct Batch {
    /// The operation.
    pub operation: Operation,
    /// Messages for other ranks of the world.
    pub sends: Vec<(usize, Payload)>,
    /// Messages from other ranks of the world.
    pub receives: Vec<(usize, Expected)>,
}

/// A batch on its way; [`finish`](InFlight::finish) waits for what it receives. Batches may be finished in any order.
#[must_use = "what a batch receives is lost if it is not finished"]
pub struct InFlight<'a> {
    finish: Box<dyn FnOnce() -> Result<Vec<Payload>> + 'a>,
    drive: Option<Box<dyn Fn() + 'a>>,
}

impl<'a> InFlight<'a> {
    /// A batch that `finish` completes.
    pub fn new(finish: impl FnOnce() -> Result<Vec<Payload>> + 'a) -> Self {
        Self {
            finish: Box::new(finish),
            drive: None,
        }
    }

    /// This batch, with what makes its engine drive messages on while the rank computes.
    pub fn driven_by(self, drive: impl Fn() + 'a) -> Self {
        Self {
            drive: Some(Box::new(drive)),
            ..self
        }
    }

    /// Has the messages driven on while the rank computes, on engines that do not do so by themselves.
    ///
    /// For operators that have work to do before they [`finish`](Self::finish).
    pub fn in_background(&self) {
        if let Some(drive) = &self.drive {
            drive();
        }
    }

    /// Waits for the messages and returns them in the order of [`Batch::receives`].
    ///
    /// # Errors
    /// A message that did not come within the timeout, belongs to another operation or is of another shape; a rank
    /// that ended.
    pub fn finish(self) -> Result<Vec<Payload>> {
        (self.finish)()
    }
}

impl fmt::Debug for InFlight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlight")
    }
}

/// The connection of one rank to the others.
///
/// Messages between two ranks keep their order. A send never waits for its receiver.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Posts the sends of a batch and returns before its messages have come.
    ///
    /// # Errors
    /// A rank that ended.
    fn start(&self, batch: Batch) -> Result<InFlight<'_>>;

    /// Tells the other ranks that this one cannot go on, and why.
    fn fail(&self, cause: &str);

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
    /// Whether ranks compare operation and layout before they communicate. Default in debug builds only.
    pub check: bool,
    /// Whether operators compute what they can while boxes travel. Default where it is likely to pay.
    pub overlap: Overlap,
}

/// When operators compute what needs no other rank's cells while these travel. Results have the same bits either way.
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
        }
    }
}

/// Running counts of messages and bytes sent, by kind.
#[derive(Debug, Default)]
pub struct Counters([(AtomicU64, AtomicU64); Traffic::ALL.len()]);

impl Counters {
    /// Counts one message.
    pub fn count(&self, traffic: Traffic, bytes: usize) {
        let (messages, total) = &self.0[traffic as usize];
        messages.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn snapshot(&self) -> CommStats {
        let read = |(messages, bytes): &(AtomicU64, AtomicU64)| Count {
            messages: messages.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        };
        CommStats(self.0.each_ref().map(read))
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

/// What a rank has sent, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommStats([Count; Traffic::ALL.len()]);

impl CommStats {
    /// The count of one kind.
    pub fn of(&self, traffic: Traffic) -> Count {
        self.0[traffic as usize]
    }

    /// What has been sent since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.0;
        for (count, before) in counts.iter_mut().zip(earlier.0) {
            count.messages -= before.messages;
            count.bytes -= before.bytes;
        }
        Self(counts)
    }
}

impl fmt::Display for CommStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14}{:>10}{:>16}", "sent", "messages", "bytes")?;
        for traffic in Traffic::ALL {
            let Count { messages, bytes } = self.of(traffic);
            write!(
                f,
                "\n{:<14}{messages:>10}{bytes:>16}",
                format!("{traffic:?}")
            )?;
        }
        Ok(())
    }
}
