//! Rendezvous of the processes of a job: all connect to rank 0, which sends each the addresses of
//! the others.
//!
//! Both sides of a connection prove that they have the job's secret before anything else is read,
//! by a message authentication code (HMAC-SHA256) over fresh random numbers from both. Later
//! messages are neither encrypted nor authenticated, as with MPI and NCCL: run jobs in trusted
//! networks.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::greeting::{AGAIN, GREETING, Secret, Side, left};
use crate::descriptors::explained;
use crate::{Error, Result};

/// Address at which the ranks of a job meet, together with this process's rank.
#[derive(Clone)]
pub(crate) struct Rendezvous {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The name or address at which rank 0 listens.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The common secret of all ranks.
    pub(crate) secret: Option<String>,
}

/// Maximum number of connections that wait to be accepted, as far as the system permits: many ranks
/// connect to one at once. Beyond the standard library's 128, each would be delayed by a second or
/// more.
const BACKLOG: i32 = 4096;
/// Size of the longest greeting that is read.
const LONGEST: usize = 1 << 20;

impl Rendezvous {
    /// Returns the rendezvous that the environment describes.
    ///
    /// # Errors
    /// A variable is missing or has an invalid value.
    pub(crate) fn from_env(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        // The first variable that is set: those of launchers like PyTorch's, then those of Slurm.
        let find = |names: &[&str]| {
            names
                .iter()
                .find_map(|name| Some((name.to_string(), get(name)?)))
        };
        let number = |names: &[&str], meaning: &str| {
            let Some((name, value)) = find(names) else {
                return Err(Error::Engine(format!(
                    "{} is not set; set it to {meaning}",
                    names[0]
                )));
            };
            value
                .trim()
                .parse::<usize>()
                .map_err(|_| Error::Engine(format!("{name}={value}: expected a number, {meaning}")))
        };
        let rank = number(
            &["RANK", "SLURM_PROCID"],
            "the number of this process, from 0",
        )?;
        let size = number(
            &["WORLD_SIZE", "SLURM_NTASKS"],
            "the number of processes of the job",
        )?;
        if rank >= size {
            return Err(Error::Engine(format!(
                "RANK={rank} with WORLD_SIZE={size}: ranks are numbered from 0 to {}",
                size.saturating_sub(1)
            )));
        }
        let host = get("MASTER_ADDR").ok_or_else(|| {
            Error::Engine(
                "MASTER_ADDR is not set; set it to the name or address of rank 0's host, on all ranks".into(),
            )
        })?;
        let port = number(&["MASTER_PORT"], "a free port of rank 0's host")?;
        // The agent of PyTorch's launcher occupies that port.
        let taken = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = u16::try_from(port.saturating_add(usize::from(taken))).map_err(|_| {
            Error::Engine(format!(
                "MASTER_PORT={port}: expected a port, at most {}",
                u16::MAX
            ))
        })?;
        Ok(Self {
            rank,
            size,
            host,
            port,
            secret: get("HALOCLINE_SECRET").filter(|secret| !secret.is_empty()),
        })
    }

    /// Connects to all other ranks; returns the connections by rank, `None` for this one. A rank on
    /// its own neither listens nor needs a secret.
    ///
    /// # Errors
    /// Ranks do not connect in time, or disagree about the job.
    pub(super) fn join(&self, timeout: Duration) -> Result<Vec<Option<Arc<TcpStream>>>> {
        if self.size == 1 {
            return Ok(vec![None]);
        }
        let end = Instant::now() + timeout;
        let addresses = self.addresses(end)?;
        let address = addresses[0];
        if self.secret.is_none() && !addresses.iter().all(|address| address.ip().is_loopback()) {
            return Err(Error::Engine(format!(
                "a rendezvous at {address} can be reached by others; set HALOCLINE_SECRET to the same random text on all \
                 ranks, or MASTER_ADDR=localhost if all are on one host"
            )));
        }
        let mut joining = Joining {
            job: self,
            address,
            end,
            seconds: timeout.as_secs_f64(),
            streams: vec![None; self.size],
        };
        if self.rank == 0 {
            joining.serve()?;
            return Ok(joining.streams);
        }
        let (listener, earlier) = joining.register(&addresses)?;
        // Each rank calls the ranks before it and accepts those after it. Calls need no order
        // between ranks, because every listener was open before its address was in the table.
        for (peer, address) in (1..).zip(earlier) {
            let stream = joining.call(peer, &[address])?;
            send(&stream, self.rank.to_string().as_bytes())?;
            stream.set_read_timeout(None)?;
            joining.streams[peer] = Some(stream);
        }
        joining.accept_later(&listener)?;
        Ok(joining.streams)
    }

    /// Accepts the connections of ranks after this one, until `take` returns that all are
    /// connected.
    ///
    /// # Errors
    /// The errors of [`Secret::accept`].
    fn accept(
        &self,
        listener: &TcpListener,
        end: Instant,
        take: impl FnMut(Arc<TcpStream>) -> std::io::Result<bool>,
    ) -> Result<(), String> {
        if self.rank + 1 == self.size {
            return Ok(());
        }
        self.secret().accept(listener, end, take)
    }

    fn secret(&self) -> Secret {
        Secret(self.secret.clone().unwrap_or_default())
    }

    /// Returns the addresses of rank 0's host, at least one. In a cluster its name may be
    /// registered only after this rank has started.
    fn addresses(&self, end: Instant) -> Result<Vec<SocketAddr>> {
        const PERIOD: Duration = Duration::from_millis(500);
        let mut told = false;
        let cause = loop {
            let found = (self.host.as_str(), self.port).to_socket_addrs();
            let found: std::io::Result<Vec<_>> = found.map(Iterator::collect);
            let cause = match found {
                Ok(found) if !found.is_empty() => return Ok(found),
                Ok(_) => "no address".into(),
                Err(error) => error.to_string(),
            };
            if Instant::now() + PERIOD > end {
                break cause;
            }
            if !told {
                told = true;
                eprintln!(
                    "halocline: MASTER_ADDR={}: {cause}; looking again",
                    self.host
                );
            }
            std::thread::sleep(PERIOD);
        };
        Err(Error::Engine(format!(
            "MASTER_ADDR={}: {cause}; set it to the name or address of rank 0's host",
            self.host
        )))
    }

    /// Listens on a port; with a secret, on all addresses of this host, because other ranks may use
    /// any of them.
    fn listen(&self, near: SocketAddr) -> std::io::Result<TcpListener> {
        let port = near.port();
        let listener = match self.secret {
            None => TcpListener::bind(near),
            Some(_) => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
        }?;
        // If refused, the limit of the standard library stays.
        let _ = SockRef::from(&listener).listen(BACKLOG);
        Ok(listener)
    }
}

/// State of a rank that connects to the others.
struct Joining<'a> {
    job: &'a Rendezvous,
    /// The address at which rank 0 listens.
    address: SocketAddr,
    /// The time by which all ranks must be connected.
    end: Instant,
    /// The time limit in seconds, for error messages.
    seconds: f64,
    /// The connections by rank.
    streams: Vec<Option<Arc<TcpStream>>>,
}

impl Joining<'_> {
    /// On rank 0: waits for all others, and sends each the table of the addresses on which they
    /// listen, one per line.
    fn serve(&mut self) -> Result<()> {
        let (job, address, seconds) = (self.job, self.address, self.seconds);
        let listener = job.listen(address).map_err(|error| {
            Error::Engine(format!(
                "rank 0 cannot listen at {address} ({}); is MASTER_ADDR a name of rank 0's host, and MASTER_PORT a \
                 port that is free there?",
                explained(&error)
            ))
        })?;
        let mut addresses = BTreeMap::from([(0, address.to_string())]);
        let mut refused = None;
        let complete = job.accept(&listener, self.end, |stream| {
            let greeting = receive(&stream)?;
            let greeting = String::from_utf8_lossy(&greeting).into_owned();
            let words: Vec<&str> = greeting.split(' ').collect();
            let [Ok(rank), Ok(size), Ok(port)] =
                [0, 1, 2].map(|word| words.get(word).unwrap_or(&"").parse::<usize>())
            else {
                return Ok(false);
            };
            let place = self.streams.get(rank).map(Option::is_some);
            if size != job.size {
                refused = Some(format!(
                    "rank 0 was told WORLD_SIZE={}, rank {rank} WORLD_SIZE={size}",
                    job.size
                ));
            } else if place != Some(false) || rank == 0 {
                refused = Some(format!("two processes were told RANK={rank}"));
            }
            if let Some(cause) = &refused {
                send(&stream, format!("{REFUSED}{cause}").as_bytes())?;
                return Ok(true);
            }
            stream.set_read_timeout(None)?;
            let host = stream.peer_addr()?.ip().to_canonical();
            addresses.insert(rank, SocketAddr::new(host, port as u16).to_string());
            self.streams[rank] = Some(stream);
            Ok(self.streams[1..].iter().all(Option::is_some))
        });
        let failure = refused.or_else(|| {
            complete.err().map(|obstacle| {
                format!(
                    "nothing from rank {} at the rendezvous {address} within {seconds} s; was every process started with \
                     the same MASTER_ADDR, MASTER_PORT and HALOCLINE_SECRET?{obstacle}",
                    self.missing(1)
                )
            })
        });
        let message = match &failure {
            Some(cause) => format!("{REFUSED}{cause}"),
            None => addresses.into_values().collect::<Vec<_>>().join("\n"),
        };
        for stream in self.streams.iter().flatten() {
            // The reader thread reports a rank that has left; a refused rank that does not receive
            // the cause times out.
            let _ = send(stream, message.as_bytes());
        }
        failure.map_or(Ok(()), |cause| Err(Error::Engine(cause)))
    }

    /// On another rank: sends rank 0 the port of a new listener. Returns the listener, and the
    /// addresses of the ranks from 1 to the one before this.
    fn register(&mut self, addresses: &[SocketAddr]) -> Result<(TcpListener, Vec<SocketAddr>)> {
        let rank = self.job.rank;
        let master = self.call(0, addresses)?;
        let host = master.peer_addr()?;
        let near = SocketAddr::new(master.local_addr()?.ip(), 0);
        let listener = self
            .job
            .listen(near)
            .map_err(|error| Error::Engine(format!("rank {rank}: {}", explained(&error))))?;
        let port = listener.local_addr()?.port();
        let greeting = format!("{rank} {} {port}", self.job.size);
        send(&master, greeting.as_bytes())?;
        master.set_read_timeout(Some(left(self.end) + GREETING))?;
        let table = receive(&master).map_err(|error| {
            let address = self.address;
            Error::Engine(format!(
                "rank {rank}: rank 0 left the rendezvous at {address} ({error})"
            ))
        })?;
        let table = String::from_utf8_lossy(&table);
        if let Some(cause) = table.strip_prefix(REFUSED) {
            return Err(Error::Engine(cause.into()));
        }
        master.set_read_timeout(None)?;
        self.streams[0] = Some(master);
        // The table may arrive at the last moment.
        self.end = self.end.max(Instant::now() + GREETING);
        let earlier = table.lines().take(rank).skip(1).map(|line| {
            let address = line.parse::<SocketAddr>().map_err(Error::other);
            address.map(|address| reachable(address, host))
        });
        Ok((listener, earlier.collect::<Result<_>>()?))
    }

    /// Accepts the connections of the ranks after this one.
    fn accept_later(&mut self, listener: &TcpListener) -> Result<()> {
        let (job, address, seconds) = (self.job, self.address, self.seconds);
        let later = job.rank + 1..job.size;
        let accepted = job.accept(listener, self.end, |stream| {
            let rank = receive(&stream)?;
            let rank = String::from_utf8_lossy(&rank).parse::<usize>().ok();
            if let Some(rank) = rank.filter(|rank| later.contains(rank)) {
                stream.set_read_timeout(None)?;
                self.streams[rank] = Some(stream);
            }
            Ok(self.streams[later.clone()].iter().all(Option::is_some))
        });
        accepted.map_err(|obstacle| {
            Error::Engine(format!(
                "rank {}: no connection from rank {} of the rendezvous at {address} within {seconds} s; has it ended, \
                 or is there a firewall between the hosts?{obstacle}",
                job.rank,
                self.missing(later.start)
            ))
        })
    }

    /// Lists the ranks from `first` onwards that are not connected.
    fn missing(&self, first: usize) -> String {
        let ranks = (first..self.streams.len()).filter(|&rank| self.streams[rank].is_none());
        let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
        ranks.join(", ")
    }

    /// Connects to the listener of a rank, which must have the secret, at one of its addresses.
    ///
    /// # Errors
    /// The rank does not listen in time. For a rank other than 0, which may start later, an error
    /// is returned as soon as it does not listen.
    fn call(&self, callee: usize, addresses: &[SocketAddr]) -> Result<Arc<TcpStream>> {
        let (rank, end, seconds) = (self.job.rank, self.end, self.seconds);
        loop {
            let mut failure = String::new();
            for address in addresses {
                let connected = TcpStream::connect_timeout(address, left(end).min(GREETING));
                let connected = connected.and_then(|stream| {
                    if stream.local_addr()? == stream.peer_addr()? {
                        // Without a listener, a connection to an ephemeral port of this host may
                        // reach itself.
                        return Err(ErrorKind::ConnectionRefused.into());
                    }
                    self.job.secret().greet(&stream, Side::Caller, || true)?;
                    Ok(Arc::new(stream))
                });
                match connected {
                    Ok(stream) => return Ok(stream),
                    Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                        let text = format!("rank {rank}: {address}: {error}");
                        return Err(Error::Engine(text));
                    }
                    // The rank has been listening since before its address was in the table.
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused && callee > 0 => {
                        return Err(Error::Engine(format!(
                            "rank {rank}: rank {callee} left during the start, or a firewall rejects connections to it \
                             ({address}: {error})"
                        )));
                    }
                    Err(error) => failure = format!("{address}: {}", explained(&error)),
                }
            }
            if Instant::now() >= end {
                return Err(Error::Engine(match callee {
                    0 => format!(
                        "rank {rank}: no rendezvous within {seconds} s ({failure}); is rank 0 running, and are MASTER_ADDR \
                         and MASTER_PORT the same on all ranks?"
                    ),
                    _ => format!(
                        "rank {rank}: no connection to rank {callee} within {seconds} s ({failure}); is there a firewall \
                         between their hosts?"
                    ),
                }));
            }
            std::thread::sleep(AGAIN);
        }
    }
}

/// Address in the table, changed to one that is valid on this host, which reaches rank 0 at `host`.
fn reachable(mut address: SocketAddr, host: SocketAddr) -> SocketAddr {
    if address.ip().is_loopback() {
        // The peer is on rank 0's host, and connected to it by an address that is valid only on
        // that host.
        address.set_ip(host.ip());
    }
    if let (SocketAddr::V6(address), SocketAddr::V6(host)) = (&mut address, host)
        && address.ip().is_unicast_link_local()
    {
        // The address is valid on one link, whose number differs between hosts.
        address.set_scope_id(host.scope_id());
    }
    address
}

/// Prefix of an error message sent in place of a table.
const REFUSED: &str = "refused: ";

fn send(mut stream: &TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_ne_bytes())?;
    stream.write_all(bytes)
}

fn receive(mut stream: &TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_ne_bytes(length) as usize;
    if length > LONGEST {
        return Err(std::io::Error::new(
            ErrorKind::InvalidData,
            "a greeting that is too long",
        ));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
