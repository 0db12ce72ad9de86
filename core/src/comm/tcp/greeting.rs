//! Greetings: two processes of a job prove to each other that they know its secret. Connections without a proof are
//! limited in number and in time, so that strangers do not keep the ranks from meeting.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::descriptors::explained;

/// Says that a connection is one of ours, and of this version; in the byte order of the host.
const MAGIC: u64 = 0x6861_6c6f_636c_0001;
/// How long a rank waits before it looks again.
pub(super) const AGAIN: Duration = Duration::from_millis(20);
/// How long a greeting may take.
pub(super) const GREETING: Duration = Duration::from_secs(5);
/// The most connections without a proof; a further one ends the oldest.
pub(super) const GREETINGS: usize = 128;
/// Answer to a caller with another secret; no proof is made of zeros alone.
const NO_PROOF: [u8; 32] = [0; 32];

type Code = Hmac<Sha256>;

/// Which side of a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Caller,
    Listener,
}

/// Connections of callers without a proof yet, the oldest first.
#[derive(Default)]
struct Unproven(Mutex<VecDeque<Arc<TcpStream>>>);

impl Unproven {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn add(&self, stream: &Arc<TcpStream>) {
        let mut streams = self.lock();
        if streams.len() == GREETINGS {
            disconnect(streams.drain(..1));
        }
        streams.push_back(stream.clone());
    }

    /// Takes a connection out; whether it was still there.
    fn remove(&self, stream: &Arc<TcpStream>) -> bool {
        let mut streams = self.lock();
        let place = streams.iter().position(|other| Arc::ptr_eq(other, stream));
        place.and_then(|place| streams.remove(place)).is_some()
    }

    /// Disconnects the older half.
    fn make_room(&self) {
        let mut streams = self.lock();
        let half = streams.len().div_ceil(2);
        disconnect(streams.drain(..half));
    }
}

/// Ends connections, which the threads that read from them then close.
fn disconnect(streams: impl Iterator<Item = Arc<TcpStream>>) {
    for stream in streams {
        // One that has gone already needs no end.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
}

/// The secret of a job, empty if it has none.
#[derive(Clone)]
pub(super) struct Secret(pub(super) String);

impl Secret {
    /// Accepts connections of those who know the secret, until `take` says that all have come.
    ///
    /// A lack of descriptors, memory or threads, and a connection that has gone, are reasons to disconnect strangers and to
    /// wait, as long as there is time.
    ///
    /// # Errors
    /// Ranks that did not come in time: the last obstacle, as the end of a sentence, empty if there was none.
    pub(super) fn accept(
        &self,
        listener: &TcpListener,
        end: Instant,
        mut take: impl FnMut(Arc<TcpStream>) -> std::io::Result<bool>,
    ) -> Result<(), String> {
        let nonblocking = listener.set_nonblocking(true);
        nonblocking.map_err(|error| format!(" ({error})"))?;
        let unproven = Arc::new(Unproven::default());
        let (greeted, proven) = mpsc::channel();
        let (mut complete, mut obstacle) = (false, String::new());
        while !complete && Instant::now() < end {
            let accepted = listener.accept();
            let accepted =
                accepted.and_then(|(stream, _)| self.greet_apart(stream, &unproven, &greeted));
            let wait = match accepted {
                Ok(()) => Duration::ZERO,
                Err(error) if error.kind() == ErrorKind::WouldBlock => AGAIN,
                Err(error) => {
                    obstacle = format!(
                        "; a connection could not be accepted: {}",
                        explained(&error)
                    );
                    unproven.make_room();
                    AGAIN
                }
            };
            // In every turn: strangers may come without end.
            let mut known = proven.recv_timeout(wait).ok();
            while let Some(stream) = known {
                // A rank that has gone meanwhile is missed when the time is over.
                complete |= matches!(take(stream), Ok(true));
                known = proven.try_recv().ok().filter(|_| !complete);
            }
        }
        complete.then_some(()).ok_or(obstacle)
    }

    /// Greets a caller in a thread of its own, so that a silent stranger delays nobody.
    fn greet_apart(
        &self,
        stream: TcpStream,
        unproven: &Arc<Unproven>,
        greeted: &mpsc::Sender<Arc<TcpStream>>,
    ) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        let stream = Arc::new(stream);
        unproven.add(&stream);
        let (secret, waiting, greeted) = (self.clone(), unproven.clone(), greeted.clone());
        let caller = stream.clone();
        let greet = move || {
            let proven = secret.greet(&caller, Side::Listener, || waiting.remove(&caller));
            waiting.remove(&caller);
            if proven.is_ok() {
                let _ = greeted.send(caller);
            }
        };
        let thread = std::thread::Builder::new().name("greeting".into());
        let spawned = thread.spawn(greet).map(drop);
        spawned.inspect_err(|_| _ = unproven.remove(&stream))
    }

    /// Exchanges proofs that both sides know the secret. `admit`, called when the caller has proven it, may refuse.
    pub(super) fn greet(
        &self,
        stream: &TcpStream,
        side: Side,
        admit: impl FnOnce() -> bool,
    ) -> std::io::Result<()> {
        let end = Instant::now() + GREETING;
        let mut to = stream;
        stream.set_write_timeout(Some(GREETING))?;
        let own = fresh()?;
        to.write_all(&MAGIC.to_ne_bytes())?;
        to.write_all(&own)?;
        let (mut magic, mut theirs) = ([0; 8], [0; 16]);
        read_by(stream, &mut magic, end)?;
        read_by(stream, &mut theirs, end)?;
        let denied = |cause| std::io::Error::new(ErrorKind::PermissionDenied, cause);
        if magic != MAGIC.to_ne_bytes() {
            return Err(denied(
                "what answers is not of this version of Halocline, or of another architecture",
            ));
        }
        let (caller, listener) = match side {
            Side::Caller => (own, theirs),
            Side::Listener => (theirs, own),
        };
        let code = |speaker: Side| {
            let mut code =
                <Code as Mac>::new_from_slice(self.0.as_bytes()).expect("a key of any length");
            code.update(&[speaker as u8]);
            code.update(&caller);
            code.update(&listener);
            code
        };
        let mut proof = [0; 32];
        let wrong = || denied("it knows another HALOCLINE_SECRET");
        // The caller first: who only listens tells a stranger nothing.
        if side == Side::Caller {
            to.write_all(&code(Side::Caller).finalize().into_bytes())?;
            read_by(stream, &mut proof, end)?;
            let verified = code(Side::Listener).verify_slice(&proof);
            verified.map_err(|_| wrong())?;
        } else {
            read_by(stream, &mut proof, end)?;
            if code(Side::Caller).verify_slice(&proof).is_err() {
                // A caller whose connection ends without an answer had to make room, and comes again.
                to.write_all(&NO_PROOF)?;
                return Err(wrong());
            }
            if !admit() {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            to.write_all(&code(Side::Listener).finalize().into_bytes())?;
        }
        stream.set_read_timeout(Some(GREETING))?;
        stream.set_write_timeout(None)?;
        Ok(())
    }
}

/// The time until `end`, which is not zero: that would mean no limit.
pub(super) fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(AGAIN)
}

/// Reads all of a buffer before a moment, however slowly it comes.
fn read_by(mut stream: &TcpStream, mut to: &mut [u8], end: Instant) -> std::io::Result<()> {
    while !to.is_empty() {
        if Instant::now() >= end {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left(end)))?;
        match stream.read(to)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => to = &mut to[read..],
        }
    }
    Ok(())
}

/// A random number that nobody can guess.
fn fresh() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(bytes)
}
