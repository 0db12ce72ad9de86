use std::cell::Cell;
use std::net::TcpListener;

use super::greeting::{GREETINGS, Secret, Side};
use super::*;
use crate::comm::{Expected, Operation, Traffic};

/// A rendezvous of `size` ranks on this host.
fn job(size: usize) -> Vec<Rendezvous> {
    let port = TcpListener::bind(("127.0.0.1", 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let rendezvous = |rank| Rendezvous {
        rank,
        size,
        host: "127.0.0.1".into(),
        port,
        secret: Some("salt".into()),
    };
    (0..size).map(rendezvous).collect()
}

fn settings(seconds: f64) -> Settings {
    Settings {
        timeout: Duration::from_secs_f64(seconds),
        ..Settings::default()
    }
}

/// Runs ranks, which are started in the given order, and returns their results.
fn run<T: Send>(
    ranks: Vec<Rendezvous>,
    seconds: f64,
    program: impl Fn(Arc<Tcp>) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    std::thread::scope(|scope| {
        let program = &program;
        let start =
            |rank: Rendezvous| scope.spawn(move || program(Tcp::start(&rank, settings(seconds))?));
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn exchange(comm: &Arc<Tcp>, name: &'static str, byte: u8) -> Result<Vec<u8>> {
    let peers = || (0..comm.size()).filter(|&peer| peer != comm.rank());
    let batch = Batch {
        operation: Operation::new(name, Traffic::Control, None),
        sends: peers()
            .map(|peer| (peer, Payload::Bytes(vec![byte])))
            .collect(),
        receives: peers().map(|peer| (peer, Expected::Bytes)).collect(),
    };
    let received = comm.clone().start(batch)?.finish()?;
    Ok(received
        .into_iter()
        .map(|payload| match payload {
            Payload::Bytes(bytes) => bytes[0],
            other => panic!("{other:?}"),
        })
        .collect())
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

/// The number of bytes written by each call.
#[derive(Default)]
struct Calls(Vec<usize>);

impl Write for Calls {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.push(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn short_messages_are_written_by_one_call_and_pieces_of_long_ones_are_progress() {
    for (length, calls, pieces) in [(SHORT, 1, 0), (SHORT + 1, 2, 1), (3 * PIECE + 1, 5, 4)] {
        let mut frame = Frame::of(Kind::Metadata, 7, "x");
        frame.body = Outgoing::Bytes(vec![1; length], 0);
        let (mut written, progress) = (Calls::default(), Cell::new(0));
        let count = || progress.set(progress.get() + 1);
        frame.write(&mut written, count).unwrap();
        assert_eq!((written.0.len(), progress.get()), (calls, pieces));
        let bytes: usize = written.0.iter().sum();
        assert_eq!(bytes, Frame::HEAD + 1 + length);
    }
}

#[test]
fn ranks_meet_whatever_their_order() {
    let mut ranks = job(4);
    ranks.reverse();
    let found = run(ranks, 20.0, |comm| {
        let found = exchange(&comm, "x", comm.rank() as u8)?;
        comm.shut_down()?;
        Ok(found)
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!(found, [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]);
}

#[test]
fn a_stranger_neither_joins_nor_disturbs() {
    let ranks = job(2);
    let address = (ranks[0].host.clone(), ranks[0].port);
    let other = Rendezvous {
        secret: Some("pepper".into()),
        ..ranks[1].clone()
    };
    let found = std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            run(ranks, 20.0, |comm| {
                let found = exchange(&comm, "x", 7)?;
                comm.shut_down()?;
                Ok(found)
            })
        });
        // One stranger sends nothing, one another protocol, and one has another secret.
        let quiet = std::net::TcpStream::connect(&address);
        if let Ok(mut loud) = std::net::TcpStream::connect(&address) {
            let _ = loud.write_all(b"GET / HTTP/1.1\r\n\r\n");
        }
        let refused = Tcp::start(&other, settings(1.0));
        drop(quiet);
        (job.join().unwrap(), refused)
    });
    assert!(found.0.into_iter().all(|found| found.unwrap() == [7]));
    let refused = text(found.1);
    assert!(
        refused.contains("another HALOCLINE_SECRET") || refused.contains("no rendezvous"),
        "{refused}"
    );
}

/// Connects silent strangers to the address at which rank 0 listens, or will listen.
fn strangers(rank: &Rendezvous, number: usize) -> Vec<TcpStream> {
    let connect = || TcpStream::connect((rank.host.as_str(), rank.port));
    let again = |_| std::thread::sleep(Duration::from_millis(10));
    let connected = || loop {
        if let Ok(stream) = connect().map_err(again) {
            return stream;
        }
    };
    (0..number).map(|_| connected()).collect()
}

/// Whether the other side has ended a connection within two seconds.
fn is_ended(mut stream: &TcpStream) -> bool {
    let limit = Some(Duration::from_secs(2));
    stream.set_read_timeout(limit).unwrap();
    let end = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
    // Reads the listener's first bytes, and the end.
    let mut greeting = [0; 64];
    loop {
        match stream.read(&mut greeting) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return end(&error),
        }
    }
}

#[test]
fn silent_strangers_make_room_for_those_who_come_later() {
    let ranks = job(2);
    std::thread::scope(|scope| {
        let [first, second] = [&ranks[..1], &ranks[1..]].map(<[_]>::to_vec);
        let meet = |ranks| run(ranks, 20.0, |comm| exchange(&comm, "x", 7).map(|_| comm));
        let waiting = scope.spawn(move || meet(first));
        let silent = strangers(&ranks[0], GREETINGS + 10);
        assert!(silent[..5].iter().all(is_ended));
        let mut met = meet(second);
        met.extend(waiting.join().unwrap());
        for comm in met {
            assert_eq!(comm.unwrap().size(), 2);
        }
    });
}

/// Environment variable with the port at which rank 0 of the job with few descriptors listens.
#[cfg(unix)]
const PORT: &str = "HALOCLINE_TEST_PORT";

/// Rank 0 of a job with few file descriptors, run as a child process. Does nothing when run as a
/// test.
#[cfg(unix)]
#[test]
fn rank_0_of_few_descriptors() {
    use rustix::process::{Resource, Rlimit, setrlimit};

    let Ok(port) = std::env::var(PORT) else {
        return;
    };
    let limit = Some(32);
    let limit = Rlimit {
        current: limit,
        maximum: limit,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut ranks = job(2);
    ranks.truncate(1);
    ranks[0].port = port.parse().unwrap();
    let met = run(ranks, 20.0, |comm| {
        exchange(&comm, "x", 7)?;
        comm.shut_down()
    });
    met.into_iter().for_each(Result::unwrap);
}

#[cfg(unix)]
#[test]
fn strangers_that_take_all_descriptors_do_not_end_the_rendezvous() {
    let ranks = job(2);
    let mut first = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "comm::tcp::tests::rank_0_of_few_descriptors"])
        .env(PORT, ranks[0].port.to_string())
        .spawn()
        .unwrap();
    let silent = strangers(&ranks[0], 100);
    let met = run(ranks[1..].to_vec(), 20.0, |comm| {
        exchange(&comm, "x", 7)?;
        comm.shut_down()
    });
    drop(silent);
    let ended = first.wait().unwrap();
    met.into_iter().for_each(Result::unwrap);
    assert!(ended.success(), "{ended}");
}

#[test]
fn a_rank_that_passes_a_failure_on_names_the_rank_that_failed() {
    let leave = std::sync::Barrier::new(3);
    let found = run(job(3), 20.0, |comm| {
        let rank = comm.rank();
        let found = if rank == 2 {
            // Notifies only rank 0.
            let orders = comm.writers[0].as_ref().expect("rank 0 is another");
            order(orders, Order::Write(Frame::failure(2, "disk full")));
            comm.hub.wait_for_ends(2).map(|()| Vec::new())
        } else {
            exchange(&comm, "x", 1).inspect_err(|error| comm.fail(rank, &error.to_string()))
        };
        leave.wait();
        found
    });
    for (rank, error) in found.into_iter().map(text).enumerate().take(2) {
        let expected = format!("rank {rank}: x: stopped because rank 2 failed: disk full");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn a_job_that_does_not_fit_is_an_error_on_every_rank() {
    let mut ranks = job(2);
    ranks[1].size = 3;
    for error in run(ranks, 20.0, |_| Ok(())).into_iter().map(text) {
        assert!(
            error.contains("rank 0 was told WORLD_SIZE=2, rank 1 WORLD_SIZE=3"),
            "{error}"
        );
    }
    let mut ranks = job(3);
    ranks[2].rank = 1;
    let errors: Vec<_> = run(ranks, 20.0, |_| Ok(())).into_iter().map(text).collect();
    assert!(
        errors
            .iter()
            .all(|error| error.contains("two processes were told RANK=1")),
        "{errors:?}"
    );
}

#[test]
fn a_missing_rank_is_named_in_time() {
    let start = Instant::now();
    let mut ranks = job(3);
    ranks.pop();
    let errors: Vec<_> = run(ranks, 0.5, |_| Ok(())).into_iter().map(text).collect();
    assert!(
        errors
            .iter()
            .all(|error| error.contains("nothing from rank 2")),
        "{errors:?}"
    );
    let ranks = job(2).split_off(1);
    let error = run(ranks, 0.3, |_| Ok(()))
        .into_iter()
        .map(text)
        .next()
        .unwrap();
    assert!(
        error.contains("rank 1: no rendezvous within 0.3 s (127.0.0.1"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_leaves_after_the_table_is_named_at_once() {
    let start = Instant::now();
    let ranks = job(3);
    let others = vec![ranks[0].clone(), ranks[2].clone()];
    // A bound socket that does not listen refuses connections.
    let silent = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let loopback = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    silent.bind(&loopback.into()).unwrap();
    let met = std::thread::scope(|scope| {
        let met = scope.spawn(|| run(others, 20.0, |_| Ok(())));
        // Rank 1 announces a port on which it no longer listens.
        let mut first = strangers(&ranks[0], 1).remove(0);
        let secret = Secret("salt".into());
        secret.greet(&first, Side::Caller, || true).unwrap();
        let port = silent.local_addr().unwrap().as_socket().unwrap().port();
        let greeting = format!("1 3 {port}");
        let length = (greeting.len() as u64).to_ne_bytes();
        first.write_all(&length).unwrap();
        first.write_all(greeting.as_bytes()).unwrap();
        met.join().unwrap()
    });
    let error = text(met.into_iter().nth(1).unwrap());
    let expected = "rank 2: rank 1 left during the start";
    assert!(error.contains(expected), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn without_a_secret_a_job_stays_on_its_host() {
    let mut ranks = job(2);
    for rank in &mut ranks {
        rank.secret = None;
    }
    assert!(
        run(ranks.clone(), 20.0, |comm| comm.shut_down())
            .iter()
            .all(Result::is_ok)
    );
    ranks[0].host = "0.0.0.0".into();
    let error = text(Tcp::start(&ranks[0], settings(1.0)));
    assert!(error.contains("set HALOCLINE_SECRET"), "{error}");
}

#[test]
fn a_job_of_one_rank_needs_neither_an_address_nor_a_secret() {
    let mut ranks = job(1);
    ranks[0].host = "no-such-host.invalid".into();
    ranks[0].secret = None;
    let ended = run(ranks, 20.0, |comm| comm.shut_down());
    assert!(ended.iter().all(Result::is_ok));
}

#[test]
fn a_failure_a_lost_process_and_another_operation_are_told_apart() {
    let found = run(job(2), 20.0, |comm| match comm.rank() {
        0 => exchange(&comm, "x", 1),
        _ => {
            comm.fail(1, "disk full");
            Err(crate::Error::Engine("disk full".into()))
        }
    });
    let error = text(found.into_iter().next().unwrap());
    assert!(
        error.contains("rank 0: x: stopped because rank 1 failed: disk full"),
        "{error}"
    );

    let found = run(job(2), 20.0, |comm| match comm.rank() {
        0 => exchange(&comm, "x", 1),
        _ => Ok(Vec::new()),
    });
    let error = text(found.into_iter().next().unwrap());
    assert!(
        error.contains("rank 1 failed: its connection broke"),
        "{error}"
    );

    let found = run(job(2), 20.0, |comm| {
        let found = exchange(&comm, ["sum", "mean"][comm.rank()], 1);
        // As the launcher does; otherwise sent messages may be lost with the connection.
        found.inspect_err(|error| comm.fail(comm.rank(), &error.to_string()))
    });
    let error = text(found.into_iter().next().unwrap());
    assert!(
        error.contains("rank 0 is in sum") && error.contains("rank 1 is in mean"),
        "{error}"
    );
}

#[test]
fn the_environment_describes_a_job_or_what_is_missing() {
    let rendezvous = |variables: &[(&str, &str)]| {
        Rendezvous::from_env(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| value.to_string())
        })
    };
    let all = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node1"),
        ("MASTER_PORT", "29500"),
    ];
    let job = rendezvous(&all).ok().unwrap();
    assert_eq!(
        (job.rank, job.size, job.host.as_str(), job.port),
        (1, 2, "node1", 29500)
    );
    let slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), all[2], all[3]];
    assert_eq!(
        rendezvous(&slurm).ok().map(|job| (job.rank, job.size)),
        Some((3, 4))
    );
    let torchrun = [&all[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
    assert_eq!(rendezvous(&torchrun).ok().map(|job| job.port), Some(29501));
    for missing in 0..4 {
        let mut some = all.to_vec();
        let (name, _) = some.remove(missing);
        let error = rendezvous(&some).err().unwrap().to_string();
        assert!(
            error.contains(&format!("{name} is not set; set it to")),
            "{error}"
        );
    }
    let error = rendezvous(&[("RANK", "2"), all[1], all[2], all[3]])
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("RANK=2 with WORLD_SIZE=2"), "{error}");
    let error = rendezvous(&[("RANK", "x"), all[1], all[2], all[3]])
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("RANK=x: expected a number"), "{error}");
}
