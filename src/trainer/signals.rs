//! Signals that ask a run to end.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// Whether this process was asked to end, by a signal since the first call.
pub(super) fn interrupted() -> &'static Arc<AtomicBool> {
    static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    ASKED.get_or_init(|| {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            use signal_hook::flag;
            // In this order, so that the first signal only leaves its mark.
            let registered =
                flag::register_conditional_shutdown(signal, 128 + signal, asked.clone())
                    .and_then(|_| flag::register(signal, asked.clone()));
            if let Err(error) = registered {
                eprintln!("halocline: signal {signal} will end the process at once: {error}");
            }
        }
        asked
    })
}
