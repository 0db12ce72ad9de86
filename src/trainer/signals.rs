//! Signals that ask a run to end.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// Flag that a signal sets when it asks this process to end, from the first call on.
pub(super) fn interrupted() -> &'static Arc<AtomicBool> {
    static REQUESTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    REQUESTED.get_or_init(|| {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            use signal_hook::flag;
            // In this order, the first signal only sets the flag.
            let registered =
                flag::register_conditional_shutdown(signal, 128 + signal, requested.clone())
                    .and_then(|_| flag::register(signal, requested.clone()));
            if let Err(error) = registered {
                eprintln!("halocline: signal {signal} will end the process at once: {error}");
            }
        }
        requested
    })
}
