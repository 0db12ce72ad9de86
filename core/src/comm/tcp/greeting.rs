//! Greetings: two processes of a job prove to each other that they have its secret. Unproven
//! connections are limited in number and time, so that strangers cannot prevent the ranks from
//! connecting.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::descriptors::explained;
use crate::lock::lock;

/// Marker of a connection of this version of Halocline, in the byte order of the host.
const MAGIC: u64 = 0x6861_6c6f_636c_0001;
/// Pause between attempts to connect.
pub(super) const AGAIN: Duration = Duration::from_millis(20);
/// Period at which a listener looks for connections. A rank connects to the others one after
/// another, so the waits for this period add up.
const LOOK: Duration = Duration::from_millis(1);
/// Time limit of a greeting.
pub(super) const GREETING: Duration = Duration::from_secs(5);
/// Maximum number of unproven connections; a further one ends the oldest.
pub(super) const GREETINGS: usize = 128;
/// Answer to a caller with another secret; a proof never consists only of zeros.
const NO_PROOF: [u8; 32] = [0; 32];

type Code = Hmac<Sha256>;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Caller,
    Listener,
}

/// Unproven connections of callers, the oldest first.
#[derive(Default)]
struct Unproven(Mutex<VecDeque<Arc<TcpStream>>>);

impl Unproven {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        lock(&self.0)
    }

    fn add(&self, stream: &Arc<TcpStream>) {
        let mut streams = self.lock();
        if streams.len() == GREETINGS {
            disconnect(streams.drain(..1));
        }
        streams.push_back(stream.clone());
    }

    /// Removes a connection; returns whether it was in the list.
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

/// Shuts connections down; the threads that read from them then close them.
fn disconnect(streams: impl Iterator<Item = Arc<TcpStream>>) {
    for stream in streams {
        // A connection that is already closed needs no shutdown.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
}

/// The secret of a job, empty if it has none.
#[derive(Clone)]
pub(super) struct Secret(pub(super) String);

impl Secret {
    /// Accepts connections of processes with the secret, until `take` returns that all are
    /// connected.
    ///
    /// If descriptors, memory or threads run out, or a connection is closed, strangers are
    /// disconnected and the attempt is repeated until the time limit.
    ///
    /// # Errors
    /// Some ranks did not connect in time: returns the last obstacle as the end of a sentence,
    /// empty if there was none.
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
                Err(error) if error.kind() == ErrorKind::WouldBlock => LOOK,
                Err(error) => {
                    obstacle = format!(
                        "; a connection could not be accepted: {}",
                        explained(&error)
                    );
                    unproven.make_room();
                    AGAIN
                }
            };
            // In every iteration, because strangers may keep connecting without end.
            let mut known = proven.recv_timeout(wait).ok();
            while let Some(stream) = known {
                // A rank that has disconnected since then is reported as missing when the time is
                // over.
                complete |= matches!(take(stream), Ok(true));
                known = proven.try_recv().ok().filter(|_| !complete);
            }
        }
        complete.then_some(()).ok_or(obstacle)
    }

    /// Greets a caller in a separate thread, so that a silent stranger delays no other caller.
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

    /// Exchanges proofs that both sides have the secret. `admit`, which is called after the
    /// caller's proof, may refuse the caller.
    pub(super) fn greet(
        &self,
        stream: &TcpStream,
        side: Side,
        admit: impl FnOnce() -> bool,
    ) -> std::io::Result<()> {
        let end = Instant::now() + GREETING;
        let mut output = stream;
        stream.set_write_timeout(Some(GREETING))?;
        // Both sides add a fresh number to the codes, so that a recorded proof cannot be replayed.
        let nonce = fresh()?;
        output.write_all(&MAGIC.to_ne_bytes())?;
        output.write_all(&nonce)?;
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
            Side::Caller => (nonce, theirs),
            Side::Listener => (theirs, nonce),
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
        // The caller proves itself first, so that a listener sends no code to a stranger.
        if side == Side::Caller {
            output.write_all(&code(Side::Caller).finalize().into_bytes())?;
            read_by(stream, &mut proof, end)?;
            let verified = code(Side::Listener).verify_slice(&proof);
            verified.map_err(|_| wrong())?;
        } else {
            read_by(stream, &mut proof, end)?;
            if code(Side::Caller).verify_slice(&proof).is_err() {
                // A caller whose connection ends without an answer was disconnected to make room,
                // and tries again.
                output.write_all(&NO_PROOF)?;
                return Err(wrong());
            }
            if !admit() {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            output.write_all(&code(Side::Listener).finalize().into_bytes())?;
        }
        stream.set_read_timeout(Some(GREETING))?;
        stream.set_write_timeout(None)?;
        Ok(())
    }
}

/// The time left until `end`, never zero, which would mean no limit.
pub(super) fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(AGAIN)
}

/// Fills a buffer before `end`. A limit on each read alone would let a slow sender hold the
/// connection.
fn read_by(mut stream: &TcpStream, mut buffer: &mut [u8], end: Instant) -> std::io::Result<()> {
    while !buffer.is_empty() {
        if Instant::now() >= end {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left(end)))?;
        match stream.read(buffer)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => buffer = &mut buffer[read..],
        }
    }
    Ok(())
}

/// Returns an unpredictable random number.
fn fresh() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(bytes)
}
