//! Communicator that records messages instead of sending them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{
    Batch, Communicator, Counters, Expected, InFlight, Operation, Payload, Settings, Traffic,
};
use crate::Result;
use crate::dispatch::blank_of;
use crate::lock::lock;

/// Messages of one operation; see the example of [`PlannedMessages`].
#[derive(Clone, Debug)]
pub struct PlannedOperation {
    /// The operation, with its layout.
    pub operation: Operation,
    /// The receiving ranks of the world, each with the number of bytes sent to it.
    pub sends: Vec<(usize, usize)>,
    /// The sending ranks of the world, each with the number of bytes received from it; metadata
    /// counts as zero.
    pub receives: Vec<(usize, usize)>,
    /// The boxes, if the operation exchanges boxes of cells.
    pub boxes: Option<String>,
}

/// Communication of one rank in a program, as recorded by
/// [`ShardTensor::dry_run`](crate::ShardTensor::dry_run). Prints as a list.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor, Traffic};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
///     let planned = x.dry_run(|x| Ok(x.full_tensor()))?;
///     assert_eq!((planned.bytes_sent(), planned.bytes_received()), (24, 24));
///     assert_eq!(planned.bytes_sent_for(Traffic::Redistribute), 24);
///     assert!(planned.to_string().ends_with("in all 24 B sent, 24 B received"));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct PlannedMessages {
    /// The operations that send or receive, in order.
    pub operations: Vec<PlannedOperation>,
}

impl PlannedMessages {
    /// Whether nothing is sent and nothing is received.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// The number of bytes that this rank sends.
    pub fn bytes_sent(&self) -> usize {
        let sends = self.operations.iter().flat_map(|planned| &planned.sends);
        sends.map(|(_, bytes)| bytes).sum()
    }

    /// The number of bytes that this rank receives.
    pub fn bytes_received(&self) -> usize {
        let receives = self.operations.iter().flat_map(|planned| &planned.receives);
        receives.map(|(_, bytes)| bytes).sum()
    }

    /// The number of bytes that this rank sends for one kind of traffic.
    pub fn bytes_sent_for(&self, traffic: Traffic) -> usize {
        let operations = self.operations.iter();
        operations
            .filter(|planned| planned.operation.traffic() == traffic)
            .flat_map(|planned| &planned.sends)
            .map(|(_, bytes)| bytes)
            .sum()
    }
}

impl fmt::Display for PlannedMessages {
    /// Prints every operation with its boxes or messages, and the totals.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for planned in &self.operations {
            writeln!(f, "{}", planned.operation)?;
            if let Some(boxes) = &planned.boxes {
                writeln!(f, "{boxes}")?;
                continue;
            }
            for (rank, bytes) in &planned.sends {
                writeln!(f, "  send to      {rank:>2} {bytes} B")?;
            }
            for (rank, bytes) in &planned.receives {
                writeln!(f, "  receive from {rank:>2} {bytes} B")?;
            }
        }
        let (sent, received) = (self.bytes_sent(), self.bytes_received());
        write!(f, "in all {sent} B sent, {received} B received")
    }
}

/// Engine that records the messages of one rank. A receive returns zeros for cells of other ranks,
/// and this rank's own metadata.
#[derive(Debug)]
pub(crate) struct DryRun {
    rank: usize,
    size: usize,
    settings: Settings,
    counters: Counters,
    planned: Mutex<PlannedMessages>,
}

impl DryRun {
    /// Makes a dry run for a rank of a world of the given size.
    pub(crate) fn new(rank: usize, size: usize, settings: Settings) -> Self {
        Self {
            rank,
            size,
            settings: Settings {
                check: false,
                log: false,
                ..settings
            },
            counters: Counters::default(),
            planned: Mutex::default(),
        }
    }

    /// Returns the messages recorded so far, and clears the record.
    pub(crate) fn take(&self) -> PlannedMessages {
        std::mem::take(&mut self.planned())
    }

    fn planned(&self) -> MutexGuard<'_, PlannedMessages> {
        lock(&self.planned)
    }
}

impl Communicator for DryRun {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn stands_in(&self) -> bool {
        true
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        let sizes = |(rank, payload): &(usize, Payload)| (*rank, payload.bytes());
        let expected =
            |(rank, expected): &(usize, Expected)| (*rank, expected.bytes().unwrap_or(0));
        let planned = PlannedOperation {
            operation: batch.operation,
            sends: batch.sends.iter().map(sizes).collect(),
            receives: batch.receives.iter().map(expected).collect(),
            boxes: None,
        };
        self.planned().operations.push(planned);
        let payloads = batch
            .receives
            .into_iter()
            .map(|(peer, expected)| match expected {
                Expected::Tensors {
                    shapes,
                    dtype,
                    device,
                } => {
                    let zeros = shapes
                        .iter()
                        .map(|shape| blank_of((device.clone(), dtype), shape, Some(0.0)));
                    Payload::Tensors(zeros.collect())
                }
                Expected::Place(place) => {
                    place.write(&vec![0; place.bytes()]);
                    Payload::Tensors(Vec::new())
                }
                Expected::Bytes => {
                    let sent = batch.sends.iter().find(|(rank, _)| *rank == peer);
                    sent.map_or(Payload::Bytes(Vec::new()), |(_, payload)| payload.clone())
                }
            });
        let payloads: Vec<_> = payloads.collect();
        Ok(InFlight::new(|| Ok(payloads)))
    }

    fn fail(&self, _: usize, _: &str) {}

    fn takes_time(&self) -> bool {
        false
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn describe_boxes(&self, boxes: &dyn fmt::Display) {
        if let Some(last) = self.planned().operations.last_mut() {
            last.boxes = Some(boxes.to_string());
        }
    }
}
