//! Engine of processes that find each other by an address; every pair of ranks has a connection.
//!
//! For each connection, one thread reads messages into the rank's mailbox and another writes its
//! messages, so that a send never waits and halos travel while a rank computes. Waiting, and its
//! errors, are those of the local engine.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use super::local::{Hub, Local};
use super::mailbox::{Content, Message, Sender};
use super::wire::Outgoing;
use super::{Batch, Communicator, Counters, InFlight, Payload, Settings};
use crate::descriptors::raise_descriptor_limit;
use crate::lock::lock;
use crate::memory::Block;
use crate::settings::GRACE;
use crate::{Error, Result};
pub(crate) use rendezvous::Rendezvous;

mod greeting;
mod rendezvous;
#[cfg(test)]
mod tests;

/// Maximum time for which a failing rank waits until all others are notified.
const NOTICE: Duration = Duration::from_secs(1);
/// Period at which an ending rank checks whether another has failed.
const PERIOD: Duration = Duration::from_millis(200);

/// Number of bytes of a long message whose arrival or departure counts as progress.
const PIECE: usize = 1 << 20;
/// Size of the longest body that is written together with its head, in one system call.
const SHORT: usize = 1 << 14;
/// Silence after which a connection is probed, and the interval of probes.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(10)];

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The bytes of tensors.
    Tensors,
    Metadata,
    /// The rank's program has ended.
    End,
    /// A rank cannot continue; the name holds the cause.
    Failure,
}

/// Message between two processes: a head, the name of the operation, and the bytes.
struct Frame {
    kind: Kind,
    /// The fingerprint of the operation; for a failure, the rank that failed.
    number: u64,
    name: String,
    body: Outgoing,
}

/// Order to a writer thread.
enum Order {
    Write(Frame),
    /// Write this last frame, and signal when all is written.
    Finish(Frame, mpsc::Sender<()>),
}

/// Engine of one process of a job.
pub(crate) struct Tcp {
    inbox: Arc<Local>,
    hub: Arc<Hub>,
    /// Channels to the writer threads, by rank; `None` for this rank.
    writers: Vec<Option<Mutex<mpsc::Sender<Order>>>>,
    /// The connections, which are closed on drop.
    streams: Vec<Arc<TcpStream>>,
    /// Whether the rank's program has ended, with or without an error.
    ended: Arc<AtomicBool>,
}

impl std::fmt::Debug for Tcp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tcp(rank {} of {})", self.rank(), self.size())
    }
}

impl Frame {
    /// Number of bytes before the name: kind, length of the name, number, length of the body.
    const HEAD: usize = 24;
    /// Length of the longest name that is read.
    const NAME: usize = 1 << 16;

    fn of(kind: Kind, number: u64, name: impl Into<String>) -> Self {
        Self {
            kind,
            number,
            name: name.into(),
            body: Outgoing::Bytes(Vec::new(), 0),
        }
    }

    fn failure(rank: usize, cause: &str) -> Self {
        Self::of(Kind::Failure, rank as u64, cause)
    }

    /// Writes the frame; calls `progress` after each piece of a long body.
    fn write(&self, stream: &mut impl Write, progress: impl Fn()) -> std::io::Result<()> {
        let name = &self.name.as_bytes()[..self.name.len().min(Self::NAME)];
        let body = self.body.bytes();
        let (short, long) = body.split_at(if body.len() <= SHORT { body.len() } else { 0 });
        let mut head = Vec::with_capacity(Self::HEAD + name.len() + short.len());
        head.extend((self.kind as u32).to_ne_bytes());
        head.extend((name.len() as u32).to_ne_bytes());
        head.extend(self.number.to_ne_bytes());
        head.extend((body.len() as u64).to_ne_bytes());
        head.extend(name);
        head.extend(short);
        stream.write_all(&head)?;
        for piece in long.chunks(PIECE) {
            stream.write_all(piece)?;
            progress();
        }
        Ok(())
    }
}

/// Reads a frame: its kind, number, name and body; calls `progress` after each piece of the body.
fn read(
    stream: &mut impl Read,
    progress: impl Fn(),
) -> std::io::Result<(Kind, u64, String, Block, usize)> {
    let mut head = [0; Frame::HEAD];
    stream.read_exact(&mut head)?;
    let half = |byte: usize| u32::from_ne_bytes(*head[byte..].first_chunk().expect("a head"));
    let word = |byte: usize| u64::from_ne_bytes(*head[byte..].first_chunk().expect("a head"));
    let kinds = [Kind::Tensors, Kind::Metadata, Kind::End, Kind::Failure];
    let kind = kinds.into_iter().find(|kind| *kind as u32 == half(0));
    let invalid =
        || std::io::Error::new(std::io::ErrorKind::InvalidData, "a frame of no known kind");
    let kind = kind.ok_or_else(invalid)?;
    let mut name = vec![0; (half(4) as usize).min(Frame::NAME)];
    stream.read_exact(&mut name)?;
    let name = String::from_utf8_lossy(&name).into_owned();
    let bytes = word(16) as usize;
    let mut body = Block::new(bytes);
    for piece in body.bytes_mut()[..bytes].chunks_mut(PIECE) {
        stream.read_exact(piece)?;
        progress();
    }
    Ok((kind, word(8), name, body, bytes))
}

impl Tcp {
    /// Joins the job.
    ///
    /// # Errors
    /// Ranks do not connect within the timeout, or were started with another size or with an equal
    /// rank; a thread cannot be started.
    pub(crate) fn start(rendezvous: &Rendezvous, settings: Settings) -> Result<Arc<Self>> {
        raise_descriptor_limit();
        let streams = rendezvous.join(settings.timeout)?;
        let (rank, size) = (rendezvous.rank, streams.len());
        let hub = Hub::of_process(rank, size);
        let ended = Arc::new(AtomicBool::new(false));
        let mut writers = Vec::new();
        let mut open = Vec::new();
        for (peer, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                writers.push(None);
                continue;
            };
            stream.set_nodelay(true)?;
            // A host that vanishes does not close its connections.
            let [after, every] = KEEPALIVE;
            let keepalive = TcpKeepalive::new().with_time(after).with_interval(every);
            SockRef::from(&*stream).set_tcp_keepalive(&keepalive)?;
            let thread =
                |task: &str| std::thread::Builder::new().name(format!("{task} rank {peer}"));
            let no_thread = |error: std::io::Error| {
                Error::Engine(format!(
                    "rank {rank}: no thread for the connection to rank {peer}: {error}; each rank \
                     takes two threads for each other rank: raise the limit (ulimit -u), or use MPI"
                ))
            };
            let (orders, ordered) = mpsc::channel();
            let (outgoing, progress) = (stream.clone(), hub.clone());
            let progress = move || progress.record_progress(peer);
            let written = thread("to").spawn(move || write_all(&outgoing, &ordered, progress));
            written.map_err(no_thread)?;
            let (incoming, inbox, ended) = (stream.clone(), hub.clone(), ended.clone());
            let read = thread("from").spawn(move || {
                let Err((failed, cause)) = read_all(&incoming, &inbox, peer, rank) else {
                    return inbox.finish(peer);
                };
                inbox.fail(failed, &cause);
                std::thread::sleep(GRACE);
                if !ended.load(Ordering::Acquire) {
                    eprintln!(
                        "halocline: rank {failed} failed: {cause}\n\
                         halocline: rank {rank} did not stop within {GRACE:?}; ending the process"
                    );
                    std::process::exit(1);
                }
            });
            read.map_err(no_thread)?;
            writers.push(Some(Mutex::new(orders)));
            open.push(stream);
        }
        Ok(Arc::new(Self {
            inbox: Arc::new(hub.communicator(rank, settings)),
            hub,
            writers,
            streams: open,
            ended,
        }))
    }

    /// Leaves the job once all other ranks leave it too.
    ///
    /// # Errors
    /// A rank has failed.
    pub(crate) fn shut_down(&self) -> Result<()> {
        self.ended.store(true, Ordering::Release);
        for written in self.finish(|| Frame::of(Kind::End, 0, "")) {
            // A thread that could not write has ended, and its peer is recorded as failed. If a
            // peer does not read, its thread keeps writing until another rank fails.
            while written.recv_timeout(PERIOD) == Err(mpsc::RecvTimeoutError::Timeout)
                && self.hub.failure().is_none()
            {}
        }
        self.hub.wait_for_ends(self.rank())
    }

    /// Orders the writer threads to end with a last frame; each receiver signals when that is
    /// written.
    fn finish(&self, frame: impl Fn() -> Frame) -> Vec<mpsc::Receiver<()>> {
        let writers = self.writers.iter().flatten();
        let last = writers.map(|orders| {
            let (signal, written) = mpsc::channel();
            order(orders, Order::Finish(frame(), signal));
            written
        });
        last.collect()
    }
}

/// Sends an order to a writer thread. The order is lost if the thread has ended; then the
/// connection is broken, which the reader thread records.
fn order(orders: &Mutex<mpsc::Sender<Order>>, order: Order) {
    let _ = lock(orders).send(order);
}

/// Writes the ordered frames; calls `progress` after each piece of a long message, because a peer
/// that reads is alive.
fn write_all(mut stream: &TcpStream, orders: &mpsc::Receiver<Order>, progress: impl Fn()) {
    while let Ok(order) = orders.recv() {
        let (frame, last) = match order {
            Order::Write(frame) => (frame, None),
            Order::Finish(frame, signal) => (frame, Some(signal)),
        };
        if frame.write(&mut stream, &progress).is_err() {
            return;
        }
        if let Some(signal) = last {
            let _ = signal.send(());
            return;
        }
    }
}

/// Delivers all messages of a peer to the mailbox, until the peer's program ends.
///
/// # Errors
/// The rank that failed, and the cause.
fn read_all(input: &TcpStream, hub: &Hub, peer: usize, rank: usize) -> Result<(), (usize, String)> {
    let mut input = std::io::BufReader::with_capacity(1 << 16, input);
    loop {
        let frame = read(&mut input, || hub.record_progress(peer));
        let (kind, number, name, body, bytes) = frame.map_err(|error| {
            let cause = format!("its connection broke, as when a process is killed ({error})");
            (peer, cause)
        })?;
        let content = match kind {
            Kind::Tensors => Content::Packed(body, bytes),
            Kind::Metadata => Content::Handed(Payload::Bytes(body.bytes()[..bytes].to_vec())),
            Kind::End => return Ok(()),
            Kind::Failure => return Err((number as usize, name)),
        };
        let sender = Sender::Elsewhere(number, name);
        hub.deliver(peer, rank, Message { sender, content });
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        for stream in &self.streams {
            // Ends the reader threads.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Communicator for Tcp {
    fn rank(&self) -> usize {
        self.inbox.rank()
    }

    fn size(&self) -> usize {
        self.inbox.size()
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        let Batch {
            operation,
            sends,
            receives,
        } = batch;
        let (number, name) = (operation.fingerprint(), operation.title());
        for (peer, payload) in sends {
            self.counters().count(&operation, payload.bytes());
            let Some(orders) = &self.writers[peer] else {
                let sender = Sender::Here(operation.clone());
                let content = Content::Handed(payload);
                self.hub.deliver(peer, peer, Message { sender, content });
                continue;
            };
            let frame = Frame {
                kind: match &payload {
                    Payload::Tensors(_) => Kind::Tensors,
                    Payload::Bytes(_) => Kind::Metadata,
                },
                number,
                name: name.clone(),
                body: Outgoing::of(payload),
            };
            order(orders, Order::Write(frame));
        }
        Ok(self.inbox.clone().ask(operation, receives))
    }

    fn fail(&self, rank: usize, cause: &str) {
        self.ended.store(true, Ordering::Release);
        self.hub.fail(rank, cause);
        // All ranks report the failure that this rank recorded first.
        let (rank, cause) = self.hub.failure().expect("a failure is recorded");
        let end = Instant::now() + NOTICE;
        for written in self.finish(|| Frame::failure(rank, &cause)) {
            // Peers that do not read take no longer together than one of them.
            let _ = written.recv_timeout(end.saturating_duration_since(Instant::now()));
        }
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.hub.failure()
    }

    fn settings(&self) -> &Settings {
        self.inbox.settings()
    }

    fn counters(&self) -> &Counters {
        self.inbox.counters()
    }
}
