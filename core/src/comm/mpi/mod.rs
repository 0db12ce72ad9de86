//! Engine of MPI jobs: ranks are processes, and messages carry bytes.
//!
//! # Invariants
//! No two threads call MPI at once. Memory that MPI may still use is never freed: a message that
//! cannot be completed, because the rank's wait timed out, leaks. No call waits for another rank
//! inside MPI, so every wait has a timeout.
//!
//! # Progress
//! MPI makes progress only during its calls. A waiting rank calls it; while no rank waits, a thread
//! calls it periodically as long as messages are in transit, so that halos travel while a kernel
//! runs.

use std::io::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::wire::bring;
use super::{
    Batch, Communicator, Counters, Expected, InFlight, Operation, Payload, Pending, Settings,
    within,
};
use crate::lock::lock;
use crate::{Error, Result};
use raw::{Incoming, Link};
use traffic::{Arrival, Ticket, Traffic};

mod raw;
mod traffic;
mod wire;

/// Period at which the progress thread drives messages while no rank waits for them.
const PERIOD: Duration = Duration::from_micros(50);

/// Engine of one process of an MPI job.
pub(crate) struct Mpi {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<Result<()>>>>,
    failed: AtomicBool,
    settings: Settings,
    counters: Counters,
}

/// State that the rank shares with its progress thread.
struct Shared {
    /// Held during every call of MPI, and while payloads are packed and unpacked; `None` once MPI
    /// is finalised.
    traffic: Mutex<Option<Traffic>>,
    /// Signals that messages are in transit, or that MPI is closed.
    wake: Condvar,
    /// The number of threads that wait for messages and call MPI themselves.
    waiting: AtomicUsize,
    /// Whether the progress thread has paused for a waiting thread.
    paused: AtomicBool,
    /// The error that ended the progress thread.
    stopped: OnceLock<String>,
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mpi(rank {} of {})", self.rank, self.size)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Traffic>> {
        lock(&self.traffic)
    }

    /// Drives messages while no other thread does, until MPI is closed.
    fn drive(&self) -> Result<()> {
        let mut open = self.lock();
        while let Some(traffic) = &mut *open {
            let others = self.waiting.load(Ordering::Relaxed) > 0;
            if !others {
                traffic.drive_others()?;
                traffic.drive()?;
            }
            if others || traffic.is_idle() {
                self.paused.store(others, Ordering::SeqCst);
                // The last waiter may have left before `paused` was set, in which case it sends no
                // wake-up.
                if others && self.waiting.load(Ordering::SeqCst) == 0 {
                    continue;
                }
                open = self.wake.wait(open).unwrap_or_else(|e| e.into_inner());
            } else {
                drop(open);
                std::thread::sleep(PERIOD);
                open = self.lock();
            }
        }
        Ok(())
    }

    /// Runs `f`, which calls MPI until its messages have arrived; meanwhile the progress thread
    /// pauses.
    fn waiting<T>(&self, f: impl FnOnce() -> T) -> T {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let value = f();
        if self.waiting.fetch_sub(1, Ordering::SeqCst) == 1
            && self.paused.swap(false, Ordering::SeqCst)
        {
            // The progress thread holds the lock until it sleeps, so a wake-up sent after this
            // reaches it.
            drop(self.lock());
            self.wake.notify_one();
        }
        value
    }
}

impl Mpi {
    /// Joins the job in which this process was started.
    ///
    /// # Errors
    /// MPI was initialised before, has no thread support, or finds this process alone in a job of
    /// several.
    pub(crate) fn start(settings: Settings) -> Result<Arc<Self>> {
        let link = within(settings.timeout, "of the MPI job", Link::open)?;
        let (rank, size) = (link.rank(), link.size());
        let tasks = crate::settings::started_tasks(|name| std::env::var(name).ok());
        if size == 1 && tasks > 1 {
            return Err(Error::Engine(format!(
                "{tasks} tasks were started, but MPI sees each of them alone: use the mpirun of the MPI library that the \
                 program is linked with; under srun, the plugin that fits it, as in srun --mpi=pmix"
            )));
        }
        let shared = Arc::new(Shared {
            traffic: Mutex::new(Some(Traffic::new(link))),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
            paused: AtomicBool::new(false),
            stopped: OnceLock::new(),
        });
        let driven = shared.clone();
        let thread = std::thread::Builder::new().name("mpi progress".into());
        let thread = thread.spawn(move || {
            driven.drive().inspect_err(|error| {
                let _ = driven.stopped.set(error.to_string());
            })
        })?;
        Ok(Arc::new(Self {
            rank,
            size,
            shared,
            thread: Mutex::new(Some(thread)),
            failed: AtomicBool::new(false),
            settings,
            counters: Counters::default(),
        }))
    }

    /// Leaves the job once all other ranks leave it too. Later communication is an error.
    ///
    /// Takes as long as the slowest rank's program; a rank that fails ends this one together with
    /// the job.
    ///
    /// # Errors
    /// MPI fails.
    pub(crate) fn shut_down(&self) -> Result<()> {
        if self.shared.lock().is_none() {
            return Ok(());
        }
        let mut patience = Patience::default();
        while !self.enter(Traffic::drain)? {
            patience.wait();
        }
        drop(self.shared.lock().take());
        self.shared.wake.notify_all();
        let thread = lock(&self.thread).take();
        let ended = thread.map_or(Ok(Ok(())), JoinHandle::join);
        ended.unwrap_or_else(|_| Err(Error::Engine("the thread that calls MPI panicked".into())))
    }

    /// Runs `f` with the right to call MPI.
    fn enter<T>(&self, f: impl FnOnce(&mut Traffic) -> Result<T>) -> Result<T> {
        if let Some(cause) = self.shared.stopped.get() {
            return Err(Error::Engine(cause.clone()));
        }
        match &mut *self.shared.lock() {
            Some(traffic) => f(traffic),
            None => Err(Error::Engine(format!(
                "rank {}: communication after the Launcher's program has ended",
                self.rank
            ))),
        }
    }

    fn open(
        &self,
        operation: &Operation,
        peer: usize,
        expected: &Expected,
        arrival: Arrival,
    ) -> Result<Payload> {
        let (same_operation, bytes) = match arrival {
            Arrival::Payload(Incoming::Block(block), length) => {
                return Ok(expected.unpack(block, length));
            }
            Arrival::Payload(Incoming::Place(_), _) => return Ok(Payload::Tensors(Vec::new())),
            Arrival::Other {
                same_operation,
                bytes,
            } => (same_operation, bytes),
        };
        let theirs = if same_operation {
            "the same operation"
        } else {
            "another operation (HALOCLINE_CHECK=1 names it)"
        };
        Err(Error::Diverged {
            rank: self.rank,
            operation: format!("{operation:#} (expecting {expected})"),
            peer,
            peer_operation: format!("{theirs}, sending {bytes} bytes or more"),
        })
    }
}

/// Batch in flight.
struct Receipt {
    engine: Arc<Mpi>,
    awaited: Awaited,
}

/// Messages requested by a batch.
struct Awaited {
    operation: Operation,
    /// The ticket of the batch; the tickets of its messages follow.
    batch: Ticket,
    /// The peers, with the expected messages.
    receives: Vec<(usize, Expected)>,
    /// The payloads that have arrived so far.
    came: Vec<Option<Payload>>,
}

impl Awaited {
    /// Duration of a message of a few megabytes within a host.
    const LONG_MESSAGE: Duration = Duration::from_micros(300);

    /// The tickets of the messages.
    fn tickets(&self) -> Range<Ticket> {
        let first = self.batch + 1;
        first..first + self.receives.len() as Ticket
    }

    /// The messages that have not arrived: ticket, peer and expected form.
    fn missing(&self) -> impl Iterator<Item = (Ticket, usize, &Expected)> {
        let receives = self.tickets().zip(&self.receives).zip(&self.came);
        let missing = receives.filter(|(_, came)| came.is_none());
        missing.map(|((ticket, (peer, expected)), _)| (ticket, *peer, expected))
    }

    /// Takes the messages that have arrived; returns the peer of a message that will never arrive,
    /// if any.
    fn take(&mut self, engine: &Mpi, traffic: &mut Traffic) -> Result<Option<usize>> {
        let tickets = self.tickets();
        for (ticket, arrival) in traffic.take_all(&tickets) {
            let index = (ticket - tickets.start) as usize;
            let (peer, expected) = &self.receives[index];
            self.came[index] = Some(engine.open(&self.operation, *peer, expected, arrival)?);
        }
        Ok(traffic.lost(&tickets))
    }

    /// Polls a few times for messages that are about to arrive or leave; returns whether that
    /// completed the batch.
    fn hurry(&mut self, engine: &Mpi) -> Result<bool> {
        engine.enter(|traffic| {
            while self.missing().next().is_some() {
                if !traffic.watch(&self.tickets(), SPINS)? {
                    return Ok(false);
                }
                self.take(engine, traffic)?;
            }
            traffic.see_off(self.batch, SPINS)
        })
    }

    fn wait(&mut self, engine: &Mpi) -> Result<()> {
        let tickets = self.tickets();
        let mut patience = Patience::default();
        loop {
            let silent = patience.waited();
            let (moved, ended) = engine.enter(|traffic| {
                if silent >= Some(Patience::SPIN) {
                    traffic.drive_others()?;
                    let mut missing = self.missing();
                    missing.try_for_each(|(ticket, ..)| traffic.look(ticket))?;
                }
                let times = match silent {
                    Some(silent) if silent >= Patience::YIELDS => 1,
                    _ => SPINS,
                };
                let moved = traffic.watch(&tickets, times)? || traffic.drive()?;
                Ok((moved, self.take(engine, traffic)?))
            })?;
            let Some((_, peer, expected)) = self.missing().next() else {
                return Ok(());
            };
            let operation = || self.operation.to_string();
            if let Some(peer) = ended {
                return Err(Error::PeerEnded {
                    rank: engine.rank,
                    operation: operation(),
                    peer,
                    cause: "has ended its program".into(),
                });
            }
            if moved {
                patience = Patience::default();
                continue;
            }
            if silent.is_some_and(|silent| silent >= engine.settings.timeout) {
                return Err(Error::Timeout {
                    rank: engine.rank,
                    operation: operation(),
                    peer,
                    expected: expected.to_string(),
                    seconds: engine.settings.timeout.as_secs_f64(),
                });
            }
            patience.wait();
        }
    }

    /// Waits briefly for messages to leave; the progress thread drives those that take longer.
    fn see_off(&self, engine: &Mpi) -> Result<()> {
        let mut start = None;
        while !engine.enter(|traffic| traffic.see_off(self.batch, SPINS))? {
            if start.get_or_insert_with(Instant::now).elapsed() > Self::LONG_MESSAGE {
                engine.shared.wake.notify_one();
                break;
            }
        }
        Ok(())
    }
}

impl Pending for Receipt {
    fn finish(mut self: Box<Self>) -> Result<Vec<Payload>> {
        let Self { engine, awaited } = &mut *self;
        if !awaited.hurry(engine)? {
            engine.shared.waiting(|| {
                awaited.wait(engine)?;
                awaited.see_off(engine)
            })?;
        }
        let came = std::mem::take(&mut awaited.came).into_iter();
        Ok(came.map(|came| came.expect("all have come")).collect())
    }

    fn in_background(&self) {
        self.engine.shared.wake.notify_one();
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        let Self { engine, awaited } = self;
        if awaited.missing().next().is_none() {
            return;
        }
        engine.shared.wake.notify_one();
        let _ = engine.enter(|traffic| {
            awaited
                .missing()
                .for_each(|(ticket, ..)| traffic.forget(ticket));
            Ok(())
        });
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        let Batch {
            operation,
            mut sends,
            receives,
        } = batch;
        let fingerprint = operation.fingerprint();
        // Copies from a GPU wait for the device, so they are made before taking the lock, which
        // keeps other threads out of MPI.
        sends.iter_mut().for_each(|(_, payload)| bring(payload));
        let batch = self.enter(|traffic| {
            let batch = traffic.ticket();
            // Sends come first: a receive of a long message that is already there copies it during
            // the call, and the peer would wait that long for this rank's message.
            for (peer, payload) in sends {
                let packed = wire::pack(payload);
                self.counters.count(&operation, packed.bytes());
                traffic.send(batch, peer, fingerprint, packed)?;
            }
            for (peer, expected) in &receives {
                traffic.ask(*peer, fingerprint, expected)?;
            }
            Ok(batch)
        })?;
        let came = receives.iter().map(|_| None).collect();
        Ok(InFlight::new(Receipt {
            engine: self,
            awaited: Awaited {
                operation,
                batch,
                receives,
                came,
            },
        }))
    }

    fn fail(&self, rank: usize, cause: &str) {
        if !self.failed.swap(true, Ordering::Relaxed) {
            // Written at once, so that `mpirun`'s output about the end does not split the line.
            let line = format!("halocline: rank {rank} failed: {cause}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            // Not through `enter`, which fails if the progress thread has stopped.
            if let Some(traffic) = &*self.shared.lock() {
                traffic.link().abort();
            }
        }
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// Number of polls for one message before a rank checks for other events.
const SPINS: u32 = 64;

/// Pauses between polls, which grow with the time waited, because cores are often shared by several
/// ranks.
#[derive(Default)]
struct Patience {
    since: Option<Instant>,
}

impl Patience {
    /// No sleep before this time, because a long message makes no progress during a sleep.
    const YIELDS: Duration = Duration::from_millis(10);
    const SLEEP: Duration = Duration::from_micros(50);
    /// Longer than messages of a few kilobytes take.
    const SPIN: Duration = Duration::from_micros(20);

    /// The time waited; `None` before the first wait.
    fn waited(&self) -> Option<Duration> {
        self.since.map(|since| since.elapsed())
    }

    fn wait(&mut self) {
        match self.since.get_or_insert_with(Instant::now).elapsed() {
            waited if waited < Self::SPIN => {}
            waited if waited < Self::YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(Self::SLEEP),
        }
    }
}
