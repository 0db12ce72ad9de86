//! Embedded engine: ranks are threads of one process, and messages hand over tensor handles.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};

#[cfg(feature = "cube")]
use super::handle::Handle;
use super::mailbox::{Content, Mailbox, Message, Queue, Sender, Ticket};
use super::{Batch, Communicator, Counters, Expected, InFlight, Operation, Payload, Settings};
use crate::cells::copied;
use crate::dispatch::here;
use crate::lock::lock;
use crate::{Error, Result};

/// Number of polls of a waiting rank before it sleeps, so that a message that is about to arrive
/// costs no wake-up.
const LOOKS_BEFORE_SLEEP: usize = 64;

/// Connection between the ranks of one process.
pub(crate) struct Hub {
    mailboxes: Vec<Mailbox>,
    finished: Vec<AtomicBool>,
    failure: Mutex<Option<(usize, String)>>,
    failed: AtomicBool,
    /// The time of the last progress of a long message from or to each rank, in milliseconds since
    /// the hub was made.
    progress: Vec<AtomicU64>,
    made: Instant,
}

impl Hub {
    /// Makes a hub for `size` ranks, all of this process.
    pub(crate) fn new(size: usize) -> Arc<Self> {
        Self::with_senders(vec![size; size])
    }

    /// Makes a hub for a process that is one of `size` ranks, the only one that receives messages
    /// here: mailboxes of all ranks would take memory that grows with the square of their number.
    pub(super) fn of_process(rank: usize, size: usize) -> Arc<Self> {
        let mut senders = vec![0; size];
        senders[rank] = size;
        Self::with_senders(senders)
    }

    /// Makes a hub whose ranks receive messages from these numbers of ranks.
    fn with_senders(senders: Vec<usize>) -> Arc<Self> {
        let size = senders.len();
        let mailbox = |senders: usize| Mailbox {
            queues: Mutex::new((0..senders).map(|_| Queue::default()).collect()),
            arrived: Condvar::new(),
        };
        Arc::new(Self {
            mailboxes: senders.into_iter().map(mailbox).collect(),
            finished: (0..size).map(|_| AtomicBool::new(false)).collect(),
            failure: Mutex::new(None),
            failed: AtomicBool::new(false),
            progress: (0..size).map(|_| AtomicU64::new(0)).collect(),
            made: Instant::now(),
        })
    }

    /// Makes the communicator of one rank.
    pub(crate) fn communicator(self: &Arc<Self>, rank: usize, settings: Settings) -> Local {
        Local {
            hub: self.clone(),
            rank,
            settings,
            counters: Counters::default(),
        }
    }

    /// Records that a part of a message from a rank has arrived, or that a part of a message to it
    /// has left.
    pub(super) fn record_progress(&self, rank: usize) {
        let now = self.made.elapsed().as_millis() as u64;
        self.progress[rank].store(now, Ordering::Relaxed);
    }

    /// The time since anything last arrived from a rank or left for it, at most the time since
    /// `start`.
    fn silent(&self, rank: usize, start: Instant) -> Duration {
        let progress = Duration::from_millis(self.progress[rank].load(Ordering::Relaxed));
        start
            .elapsed()
            .min(self.made.elapsed().saturating_sub(progress))
    }

    /// Puts a message of one rank into the mailbox of another.
    pub(super) fn deliver(&self, sender: usize, receiver: usize, message: Message) {
        let mailbox = &self.mailboxes[receiver];
        lock(&mailbox.queues)[sender].push(message);
        mailbox.arrived.notify_all();
    }

    /// Records that a rank cannot continue, and wakes all others. Only the first failure is kept.
    pub(crate) fn fail(&self, rank: usize, cause: &str) {
        lock(&self.failure).get_or_insert_with(|| (rank, cause.to_string()));
        self.failed.store(true, Ordering::Release);
        self.wake_all();
    }

    /// Records that a rank's program has ended.
    pub(crate) fn finish(&self, rank: usize) {
        self.finished[rank].store(true, Ordering::Release);
        self.wake_all();
    }

    /// The rank that failed first, and the cause.
    pub(crate) fn failure(&self) -> Option<(usize, String)> {
        lock(&self.failure).clone()
    }

    /// Waits until all other ranks have ended, or one has failed.
    pub(super) fn wait_for_ends(&self, waiter: usize) -> Result<()> {
        let mailbox = &self.mailboxes[waiter];
        let mut queues = lock(&mailbox.queues);
        loop {
            if let Some((rank, cause)) = self.failure() {
                return Err(Error::Rank { rank, cause });
            }
            let mut ends = self.finished.iter().enumerate();
            if ends.all(|(rank, end)| rank == waiter || end.load(Ordering::Acquire)) {
                return Ok(());
            }
            let woken = mailbox.arrived.wait(queues);
            queues = woken.unwrap_or_else(|e| e.into_inner());
        }
    }

    fn wake_all(&self) {
        for mailbox in &self.mailboxes {
            // Under the lock, so that a waiter that has just read the state is already asleep, and
            // wakes.
            let _queues = lock(&mailbox.queues);
            mailbox.arrived.notify_all();
        }
    }
}

/// Whether a tensor is a view of less than half of the memory that it keeps alive.
fn is_thin(view: &FlexTensor) -> bool {
    2 * view.shape().num_elements() * view.dtype().size() < view.bytes().len()
}

/// One rank's end of a [`Hub`].
pub(crate) struct Local {
    hub: Arc<Hub>,
    rank: usize,
    settings: Settings,
    counters: Counters,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local(rank {} of {})", self.rank, self.size())
    }
}

impl Local {
    /// Returns an error if no further message can arrive from `peer`.
    fn ended(&self, operation: &Operation, peer: usize) -> Option<Error> {
        let ended = |peer, cause| Error::PeerEnded {
            rank: self.rank,
            operation: operation.to_string(),
            peer,
            cause,
        };
        if self.hub.failed.load(Ordering::Acquire) {
            let (peer, cause) = self.hub.failure()?;
            return Some(ended(peer, format!("failed: {cause}")));
        }
        self.hub.finished[peer]
            .load(Ordering::Acquire)
            .then(|| ended(peer, "has ended its program".into()))
    }

    fn wait(
        &self,
        operation: &Operation,
        (peer, ticket): (usize, Ticket),
        expected: &Expected,
    ) -> Result<Message> {
        let mailbox = &self.hub.mailboxes[self.rank];
        for _ in 0..LOOKS_BEFORE_SLEEP {
            if let Some(message) = lock(&mailbox.queues)[peer].take(ticket) {
                return Ok(message);
            }
            std::thread::yield_now();
        }
        let start = Instant::now();
        let mut queues = lock(&mailbox.queues);
        loop {
            // Reads the state before the queue, because a rank's last message arrives before its
            // end.
            let ended = self.ended(operation, peer);
            if let Some(message) = queues[peer].take(ticket) {
                return Ok(message);
            }
            if let Some(error) = ended {
                return Err(error);
            }
            let left = self
                .settings
                .timeout
                .saturating_sub(self.hub.silent(peer, start));
            if left.is_zero() {
                return Err(Error::Timeout {
                    rank: self.rank,
                    operation: operation.to_string(),
                    peer,
                    expected: expected.to_string(),
                    seconds: self.settings.timeout.as_secs_f64(),
                });
            }
            let waited = mailbox.arrived.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn receive(
        &self,
        operation: &Operation,
        (peer, ticket): (usize, Ticket),
        expected: &Expected,
    ) -> Result<Payload> {
        let Message { sender, content } = self.wait(operation, (peer, ticket), expected)?;
        let opened = if sender.fingerprint() == operation.fingerprint() {
            content.into_payload(expected)
        } else {
            Err(content.to_string())
        };
        opened.map_err(|content| Error::Diverged {
            rank: self.rank,
            operation: format!("{operation:#} (expecting {expected})"),
            peer,
            peer_operation: format!("{sender} (sending {content})"),
        })
    }

    /// Requests messages; the batch is finished when they have arrived.
    pub(super) fn ask(
        self: Arc<Self>,
        operation: Operation,
        receives: Vec<(usize, Expected)>,
    ) -> InFlight {
        let mut queues = lock(&self.hub.mailboxes[self.rank].queues);
        let asks = receives
            .iter()
            .map(|(peer, _)| (*peer, queues[*peer].ask()));
        let tickets = asks.collect();
        drop(queues);
        let mut receipt = Receipt {
            local: self.clone(),
            tickets,
        };
        InFlight::new(move || {
            let payloads = receives.iter().map(|(_, expected)| {
                let ticket = receipt
                    .tickets
                    .pop_front()
                    .expect("a ticket for each message");
                self.receive(&operation, ticket, expected)
            });
            payloads.collect()
        })
    }
}

/// Messages that a batch has requested but not received, with their senders.
struct Receipt {
    local: Arc<Local>,
    tickets: VecDeque<(usize, Ticket)>,
}

impl Drop for Receipt {
    fn drop(&mut self) {
        let mailbox = &self.local.hub.mailboxes[self.local.rank];
        for (peer, ticket) in self.tickets.drain(..) {
            lock(&mailbox.queues)[peer].forget(ticket);
        }
    }
}

/// Converts a payload to content that may be handed to another thread.
///
/// On the CPU, thin slices are copied: a message must not keep a whole field alive for its edge,
/// nor prevent its sender from updating the field in place.
fn content(payload: Payload) -> Content {
    let tensors = match payload {
        Payload::Tensors(tensors) => tensors,
        bytes => return Content::Handed(bytes),
    };
    #[cfg(feature = "cube")]
    let tensors = match Handle::all(tensors) {
        Ok(handles) => return Content::OnGpu(handles),
        Err(tensors) => tensors,
    };
    let separate = |tensor: DispatchTensor| match here(&tensor) {
        Some(view) if is_thin(view) => copied(&tensor),
        _ => tensor,
    };
    Content::Handed(Payload::Tensors(
        tensors.into_iter().map(separate).collect(),
    ))
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.hub.mailboxes.len()
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        let Batch {
            operation,
            sends,
            receives,
        } = batch;
        for (peer, payload) in sends {
            self.counters.count(&operation, payload.bytes());
            let message = Message {
                sender: Sender::Here(operation.clone()),
                content: content(payload),
            };
            self.hub.deliver(self.rank, peer, message);
        }
        Ok(self.ask(operation, receives))
    }

    fn fail(&self, rank: usize, cause: &str) {
        self.hub.fail(rank, cause);
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.hub.failure()
    }

    /// Returns `false`, because messages only hand over handles.
    fn takes_time(&self) -> bool {
        false
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::super::Traffic;
    use super::*;

    fn exchange(
        local: &Arc<Local>,
        name: &'static str,
        peer: usize,
        bytes: &[u8],
    ) -> Result<Vec<u8>> {
        let batch = Batch {
            operation: Operation::new(name, Traffic::Control, None),
            sends: vec![(peer, Payload::Bytes(bytes.to_vec()))],
            receives: vec![(peer, Expected::Bytes)],
        };
        match local.clone().start(batch)?.finish()?.pop() {
            Some(Payload::Bytes(bytes)) => Ok(bytes),
            other => panic!("unexpected {other:?}"),
        }
    }

    fn pair(timeout: Duration) -> (Arc<Local>, Arc<Local>) {
        let settings = Settings {
            timeout,
            ..Settings::default()
        };
        let hub = Hub::new(2);
        [0, 1]
            .map(|rank| Arc::new(hub.communicator(rank, settings)))
            .into()
    }

    #[test]
    fn messages_arrive_in_order_and_are_counted() {
        let (a, b) = pair(Duration::from_secs(10));
        let other = std::thread::spawn(move || {
            (0..5)
                .map(|i| exchange(&b, "x", 0, &[i]).unwrap()[0])
                .collect::<Vec<_>>()
        });
        for i in 0..5 {
            assert_eq!(exchange(&a, "x", 1, &[10 + i]).unwrap(), [i]);
        }
        assert_eq!(other.join().unwrap(), [10, 11, 12, 13, 14]);
        assert_eq!(a.counters().snapshot().of(Traffic::Control).bytes, 5);
    }

    #[test]
    fn a_silent_peer_is_a_timeout_that_names_it() {
        let (a, _b) = pair(Duration::from_millis(30));
        let error = exchange(&a, "conv2d", 1, &[1]).unwrap_err().to_string();
        assert!(
            error.contains("conv2d: nothing from rank 1 within 0.03 s"),
            "{error}"
        );
    }

    #[test]
    fn ranks_in_different_operations_get_an_error_naming_both() {
        let (a, b) = pair(Duration::from_secs(10));
        let other = std::thread::spawn(move || exchange(&b, "sum", 0, &[1]).unwrap_err());
        let error = exchange(&a, "conv2d", 1, &[1]).unwrap_err().to_string();
        assert!(error.contains("rank 0 is in conv2d") && error.contains("rank 1 is in sum"));
        assert!(
            other
                .join()
                .unwrap()
                .to_string()
                .contains("rank 0 is in conv2d")
        );
    }

    #[test]
    fn a_peer_that_failed_or_ended_is_noticed_at_once() {
        let (a, b) = pair(Duration::from_secs(60));
        b.hub.finish(1);
        let error = exchange(&a, "x", 1, &[1]).unwrap_err().to_string();
        assert!(error.contains("rank 1 has ended its program"), "{error}");
        b.fail(1, "disk full");
        let error = exchange(&a, "x", 1, &[1]).unwrap_err().to_string();
        assert!(error.contains("rank 1 failed: disk full"), "{error}");
    }
}
