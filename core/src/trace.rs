//! Records of a running program: a log line per communication, and a timeline of operators and
//! communications.
//!
//! `HALOCLINE_LOG=comm` prints a line for every communication.
//! [`Launcher::trace`](crate::Launcher::trace), or `HALOCLINE_TRACE=<file>`, writes a timeline in
//! Chrome's trace format, readable by Perfetto and `chrome://tracing`, with one row per rank.
//! Without either, nothing is recorded.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::Result;
use crate::comm::{Batch, Communicator, Counters, InFlight, Operation, Settings};

thread_local! {
    /// The timeline of this thread's rank, if it is recorded.
    static TIMELINE: RefCell<Option<Timeline>> = const { RefCell::new(None) };
}

/// The events of one rank.
#[derive(Debug)]
struct Timeline {
    start: Instant,
    /// The start in microseconds of the system clock, which aligns the timelines of different
    /// ranks.
    epoch: f64,
    rank: usize,
    /// Events as JSON, separated by commas.
    events: String,
}

impl Timeline {
    fn push(&mut self, name: &str, kind: &str, begin: Instant, end: Instant, arguments: &str) {
        let micros = |instant: Instant| (instant - self.start).as_secs_f64() * 1e6;
        let (start, length) = (
            self.epoch + micros(begin),
            (end - begin).as_secs_f64() * 1e6,
        );
        let name = name.replace(['"', '\\'], "'");
        let separator = if self.events.is_empty() { "" } else { ",\n" };
        let rank = self.rank;
        let _ = write!(
            self.events,
            r#"{separator}{{"name":"{name}","cat":"{kind}","ph":"X","ts":{start:.3},"dur":{length:.3},"pid":0,"tid":{rank},"args":{{{arguments}}}}}"#
        );
    }
}

/// Starts recording the timeline of this thread's rank.
pub(crate) fn begin(rank: usize) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let timeline = Timeline {
        start: Instant::now(),
        epoch: since.map_or(0.0, |since| since.as_secs_f64() * 1e6),
        rank,
        events: String::new(),
    };
    TIMELINE.set(Some(timeline));
}

/// Ends the recording and returns the events.
pub(crate) fn end() -> Option<String> {
    TIMELINE.take().map(|timeline| timeline.events)
}

/// Makes the text of a timeline file from the events of all ranks.
pub(crate) fn document(ranks: &[String]) -> String {
    let names = (0..ranks.len()).map(|rank| {
        format!(
            r#"{{"name":"thread_name","ph":"M","pid":0,"tid":{rank},"args":{{"name":"rank {rank}"}}}}"#
        )
    });
    let events = ranks.iter().filter(|events| !events.is_empty()).cloned();
    let all: Vec<String> = names.chain(events).collect();
    format!("{{\"traceEvents\":[\n{}\n]}}\n", all.join(",\n"))
}

/// Interval on the timeline of this thread's rank, from the creation of the span to its drop.
#[derive(Debug)]
#[must_use = "a span ends when it is dropped"]
pub struct Span {
    name: &'static str,
    start: Option<Instant>,
}

/// Begins a span.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, trace};
///
/// let file = std::env::temp_dir().join(format!("spans-{}.json", std::process::id()));
/// Launcher::local(2).trace(&file).run(|_| {
///     let _span = trace::span("read input");
///     Ok(())
/// })?;
/// assert!(std::fs::read_to_string(&file)?.contains("read input"));
/// # std::fs::remove_file(&file)?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn span(name: &'static str) -> Span {
    let recorded = TIMELINE.with_borrow(Option::is_some);
    Span {
        name,
        start: recorded.then(Instant::now),
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(start) = self.start else { return };
        TIMELINE.with_borrow_mut(|timeline| {
            if let Some(timeline) = timeline {
                timeline.push(self.name, "operator", start, Instant::now(), "");
            }
        });
    }
}

/// Engine wrapper that records the communications.
#[derive(Debug)]
pub(crate) struct Traced {
    pub(crate) engine: Arc<dyn Communicator>,
}

/// Record of one communication.
struct Account {
    rank: usize,
    operation: Operation,
    along: String,
    messages: usize,
    sent: usize,
    received: Option<usize>,
    start: Instant,
}

impl Account {
    fn close(self, waited_from: Instant, log: bool) {
        let Self {
            rank,
            operation,
            along,
            messages,
            sent,
            received,
            start,
        } = self;
        let (now, title) = (Instant::now(), operation.title());
        let kind = format!("{:?}", operation.traffic()).to_lowercase();
        let received = received.map_or("unknown".into(), |bytes| bytes.to_string());
        let millis = |from: Instant| (now - from).as_secs_f64() * 1e3;
        if log {
            let line = format!(
                "halocline: rank {rank}: {title}: {kind} {along}, {messages} messages, {sent} bytes out, \
                 {received} in, {:.3} ms, of which {:.3} waiting\n",
                millis(start),
                millis(waited_from),
            );
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        }
        TIMELINE.with_borrow_mut(|timeline| {
            let Some(timeline) = timeline else { return };
            let arguments = format!(
                r#""along":"{}","messages":{messages},"bytes_out":{sent},"bytes_in":"{received}","waited_ms":{:.3}"#,
                along.replace('"', "'"),
                millis(waited_from),
            );
            timeline.push(&title, &kind, start, now, &arguments);
        });
    }
}

impl Communicator for Traced {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn size(&self) -> usize {
        self.engine.size()
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        let expected = batch.receives.iter().map(|(_, expected)| expected.bytes());
        let account = Account {
            rank: self.rank(),
            operation: batch.operation.clone(),
            along: along(self.rank(), &batch),
            messages: batch.sends.len(),
            sent: batch.sends.iter().map(|(_, payload)| payload.bytes()).sum(),
            received: expected.sum(),
            start: Instant::now(),
        };
        let log = self.settings().log;
        let in_flight = self.engine.clone().start(batch)?;
        Ok(in_flight.then(move |waited_from| account.close(waited_from, log)))
    }

    fn fail(&self, rank: usize, cause: &str) {
        self.engine.fail(rank, cause);
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.engine.failure()
    }

    fn takes_time(&self) -> bool {
        self.engine.takes_time()
    }

    fn settings(&self) -> &Settings {
        self.engine.settings()
    }

    fn counters(&self) -> &Counters {
        self.engine.counters()
    }
}

/// Describes the mesh axes along which a batch travels, or its ranks if its operation has no mesh.
fn along(rank: usize, batch: &Batch) -> String {
    let sends = batch.sends.iter().map(|(peer, _)| *peer);
    let peers = sends.chain(batch.receives.iter().map(|(peer, _)| *peer));
    let mut peers: Vec<usize> = peers.collect();
    peers.sort_unstable();
    peers.dedup();
    let Some(layout) = batch.operation.layout() else {
        return format!("with ranks {peers:?}");
    };
    let mesh = layout.mesh();
    let coords = |rank: usize| Some(mesh.coords(mesh.position_of(rank)?));
    let origin = coords(rank);
    let differs = |axis: usize, peer: usize| match (&origin, coords(peer)) {
        (Some(origin), Some(target)) => origin[axis] != target[axis],
        _ => false,
    };
    let names = mesh.names().iter().enumerate();
    let axes = names.filter(|(axis, _)| peers.iter().any(|&peer| differs(*axis, peer)));
    let axes: Vec<String> = axes.map(|(_, name)| format!("\"{name}\"")).collect();
    format!("along {}", axes.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Launcher, Shard, ShardTensor};

    #[test]
    fn a_timeline_has_a_row_per_rank_and_an_event_per_communication() {
        let file = std::env::temp_dir().join(format!("halocline-{}.json", std::process::id()));
        let launcher = Launcher::local(2).trace(&file);
        launcher
            .run(|world| {
                let mesh = world.mesh([("lat", 2)])?;
                let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
                let _work = span("work");
                x.full_tensor();
                Ok(())
            })
            .unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        for rank in ["\"tid\":0", "\"tid\":1"] {
            let event = |name: &str| {
                text.lines()
                    .any(|line| line.contains(rank) && line.contains(name))
            };
            assert!(event("\"name\":\"work\",\"cat\":\"operator\""), "{text}");
            assert!(event("\"along\":\"along 'lat'\""), "{text}");
            assert!(event("\"bytes_out\":24"), "{text}");
        }
    }
}
