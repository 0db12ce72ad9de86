//! Signals that ask a run to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use halocline_core::{DeviceMesh, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// Time after a signal within which others count as the same one: a sender such as `timeout`
/// signals a process, and then its group.
const SAME: Duration = Duration::from_secs(1);

/// Flag set by a signal, once signals are watched.
static REQUESTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Whether a signal has asked the first rank to stop, since signals are [watched](watch); the same
/// on all ranks.
pub(crate) fn is_interrupted(mesh: &DeviceMesh) -> Result<bool> {
    let requested = REQUESTED.get();
    let flag = requested.is_some_and(|requested| requested.load(Ordering::Relaxed));
    let root = mesh.shape().ranks()[0];
    let flag = mesh.broadcast_bytes("signals", root, Some(vec![u8::from(flag)]))?;
    Ok(flag == [1])
}

/// Watches signals from now on: the first SIGINT or SIGTERM is recorded, and a later one ends the
/// process.
pub(super) fn watch() {
    REQUESTED.get_or_init(|| {
        let requested = Arc::new(AtomicBool::new(false));
        let watched = Signals::new([SIGINT, SIGTERM]).and_then(|signals| {
            for signal in [SIGINT, SIGTERM] {
                flag::register(signal, requested.clone())?;
            }
            let watch = std::thread::Builder::new().name("signals".into());
            watch.spawn(move || end_at_another(signals))
        });
        if let Err(error) = watched {
            eprintln!("halocline: a signal will end the process at once: {error}");
        }
        requested
    });
}

/// Ends the process at a signal distinct from the first.
fn end_at_another(mut signals: Signals) {
    let mut first: Option<Instant> = None;
    for signal in signals.forever() {
        let first = *first.get_or_insert_with(Instant::now);
        if first.elapsed() > SAME {
            signal_hook::low_level::exit(128 + signal);
        }
    }
}
