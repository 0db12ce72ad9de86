//! The engine of MPI jobs: ranks are processes, and a message carries bytes.
//!
//! # Invariants
//! No two threads call MPI at once. Memory that MPI may still use is never freed: a message that cannot be completed,
//! because the rank gave up waiting, leaks. No call waits inside MPI, so that every wait has an end.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Batch, Communicator, Counters, Expected, InFlight, Operation, Payload, Settings};
use crate::{Error, Result};
use outbox::Outbox;
use raw::{Link, Tag, Transfer};
use wire::Message;

mod outbox;
mod raw;
mod wire;

/// One process of an MPI job.
pub(crate) struct Mpi {
    link: Arc<Link>,
    outbox: Mutex<Option<Outbox>>,
    /// The ranks whose program has ended.
    ended: Vec<AtomicBool>,
    failed: AtomicBool,
    settings: Settings,
    counters: Counters,
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mpi(rank {} of {})", self.link.rank(), self.link.size())
    }
}

impl Mpi {
    /// Joins the job that this process was started in.
    ///
    /// # Errors
    /// MPI was initialised before, has no thread support, or sees this process alone in a job of several.
    pub(crate) fn start(settings: Settings) -> Result<Arc<Self>> {
        let link = Arc::new(Link::open()?);
        if link.size() == 1
            && std::env::var_os("OMPI_COMM_WORLD_SIZE").is_none()
            && crate::launch::slurm_tasks() > 1
        {
            return Err(Error::Engine(format!(
                "srun started {} tasks, but MPI sees each of them alone; \
                 choose the plugin that fits the MPI library, as in srun --mpi=pmix",
                crate::launch::slurm_tasks()
            )));
        }
        Ok(Arc::new(Self {
            outbox: Mutex::new(Some(Outbox::open(link.clone())?)),
            ended: (0..link.size()).map(|_| AtomicBool::new(false)).collect(),
            failed: AtomicBool::new(false),
            link,
            settings,
            counters: Counters::default(),
        }))
    }

    /// Leaves the job, when all other ranks leave it too. Later communication is an error.
    ///
    /// Takes as long as the slowest rank's program: a rank that fails ends this one with the job.
    ///
    /// # Errors
    /// A failure of MPI.
    pub(crate) fn shut_down(&self) -> Result<()> {
        let Some(outbox) = self.outbox.lock().unwrap_or_else(|e| e.into_inner()).take() else {
            return Ok(());
        };
        for peer in (0..self.link.size()).filter(|&peer| peer != self.link.rank()) {
            let farewell = wire::pack(&Payload::Bytes(Vec::new()), 0)?;
            outbox.post(self.link.send(peer, Tag::End, farewell)?)?;
        }
        // What a peer sent and nobody received is received here, or the peer could not leave.
        for (peer, ended) in self.ended.iter().enumerate() {
            let mut patience = Patience::default();
            while peer != self.link.rank() && !ended.load(Ordering::Relaxed) {
                let Some((tag, mut transfer)) = self.link.receive(peer)? else {
                    patience.wait();
                    continue;
                };
                while self.link.poll(&mut transfer)?.is_none() {
                    patience.wait();
                }
                ended.store(tag == Tag::End, Ordering::Relaxed);
            }
        }
        outbox.close()?;
        self.link.close();
        Ok(())
    }

    fn post(&self, transfer: Transfer<u8>) -> Result<()> {
        match &*self.outbox.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(outbox) => outbox.post(transfer),
            None => Err(self.link.closed()),
        }
    }

    fn receive(
        &self,
        operation: &Operation,
        receives: &[(usize, Expected)],
    ) -> Result<Vec<Payload>> {
        let mut slots: Vec<Slot> = receives.iter().map(|_| Slot::Waiting).collect();
        let mut heard = Instant::now();
        let mut patience = Patience::default();
        loop {
            let mut moved = false;
            for index in 0..slots.len() {
                moved |= self.advance(operation, receives, &mut slots, index)?;
            }
            let missing = slots.iter().position(|slot| !matches!(slot, Slot::Done(_)));
            let Some(missing) = missing else { break };
            if moved {
                heard = Instant::now();
                patience = Patience::default();
            } else if heard.elapsed() >= self.settings.timeout {
                let (peer, expected) = &receives[missing];
                return Err(Error::Timeout {
                    rank: self.rank(),
                    operation: operation.to_string(),
                    peer: *peer,
                    expected: expected.to_string(),
                    seconds: self.settings.timeout.as_secs_f64(),
                });
            } else {
                patience.wait();
            }
        }
        let payloads = slots.into_iter().filter_map(|slot| match slot {
            Slot::Done(payload) => Some(payload),
            _ => None,
        });
        Ok(payloads.collect())
    }

    /// Looks after one message of a batch; whether something happened.
    fn advance(
        &self,
        operation: &Operation,
        receives: &[(usize, Expected)],
        slots: &mut [Slot],
        index: usize,
    ) -> Result<bool> {
        let (peer, expected) = &receives[index];
        match &mut slots[index] {
            Slot::Done(_) => return Ok(false),
            Slot::Waiting => {
                // The first message of a peer is for the first that waits for one.
                let mut before = receives[..index].iter().zip(&slots[..index]);
                if before.any(|((other, _), slot)| other == peer && matches!(slot, Slot::Waiting)) {
                    return Ok(false);
                }
                let Some((tag, transfer)) = self.incoming(operation, *peer)? else {
                    return Ok(false);
                };
                slots[index] = Slot::Coming(tag, transfer);
            }
            Slot::Coming(tag, transfer) => {
                let Some(words) = self.link.poll(transfer)? else {
                    return Ok(false);
                };
                if *tag == Tag::End {
                    self.ended[*peer].store(true, Ordering::Relaxed);
                    return Err(self.peer_ended(operation, *peer));
                }
                slots[index] = Slot::Done(self.open(operation, *peer, expected, words)?);
            }
        }
        Ok(true)
    }

    fn incoming(&self, operation: &Operation, peer: usize) -> Result<Option<(Tag, Transfer<u32>)>> {
        if self.ended[peer].load(Ordering::Relaxed) {
            return Err(self.peer_ended(operation, peer));
        }
        self.link.receive(peer)
    }

    fn peer_ended(&self, operation: &Operation, peer: usize) -> Error {
        Error::PeerEnded {
            rank: self.rank(),
            operation: operation.to_string(),
            peer,
            cause: "has ended its program".into(),
        }
    }

    fn open(
        &self,
        operation: &Operation,
        peer: usize,
        expected: &Expected,
        words: Vec<u32>,
    ) -> Result<Payload> {
        let message = Message::open(words).ok_or_else(|| {
            Error::Engine(format!(
                "rank {peer} sent what is no message of this engine"
            ))
        })?;
        let own = operation.fingerprint();
        if message.fingerprint == own && message.fits(expected) {
            return Ok(message.unpack(expected));
        }
        let theirs = if message.fingerprint == own {
            "the same operation".into()
        } else {
            format!(
                "another operation, fingerprint {:016x} (ours {own:016x}; HALOCLINE_CHECK=1 names it)",
                message.fingerprint
            )
        };
        Err(Error::Diverged {
            rank: self.rank(),
            operation: format!("{operation} (expecting {expected})"),
            peer,
            peer_operation: format!("{theirs} (sending {} bytes)", message.length),
        })
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn size(&self) -> usize {
        self.link.size()
    }

    fn start(&self, batch: Batch) -> Result<InFlight<'_>> {
        let Batch {
            operation,
            sends,
            receives,
        } = batch;
        let fingerprint = operation.fingerprint();
        for (peer, payload) in sends {
            self.counters.count(operation.traffic(), payload.bytes());
            let buffer = wire::pack(&payload, fingerprint)?;
            let mut transfer = self.link.send(peer, Tag::Message, buffer)?;
            // Short messages are on their way at once.
            if self.link.poll(&mut transfer)?.is_none() {
                self.post(transfer)?;
            }
        }
        Ok(InFlight::new(move || self.receive(&operation, &receives)))
    }

    fn fail(&self, cause: &str) {
        if !self.failed.swap(true, Ordering::Relaxed) {
            // In one write, so that nothing of what `mpirun` says about the end comes between.
            let line = format!("halocline: rank {} failed: {cause}\n", self.rank());
            let _ = std::io::stderr().write_all(line.as_bytes());
            self.link.abort();
        }
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// Where a message of a batch is.
enum Slot {
    Waiting,
    Coming(Tag, Transfer<u32>),
    Done(Payload),
}

/// Waits a little longer each time: cores are often shared by several ranks.
#[derive(Default)]
struct Patience(u32);

impl Patience {
    const SPINS: u32 = 64;
    const YIELDS: u32 = 1024;
    const SLEEP: Duration = Duration::from_micros(50);

    fn wait(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < Self::SPINS {
            std::hint::spin_loop();
        } else if self.0 < Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Self::SLEEP);
        }
    }
}
