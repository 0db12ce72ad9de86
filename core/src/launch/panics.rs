//! Panic messages of local ranks: a programming mistake panics on all of them at once.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, Once};

use crate::lock::lock;

/// Source location: file, line and column.
type Place = (String, u32, u32);

/// The first panic among a job's ranks: rank, location and message.
#[derive(Clone, Default)]
pub(super) struct Panics(Arc<Mutex<Option<(usize, Place, String)>>>);

thread_local! {
    /// The rank of this thread, and the panic record of its job.
    static RANK: RefCell<Option<(usize, Panics)>> = const { RefCell::new(None) };
}

impl Panics {
    /// Makes the record of a new job. The first panic is printed as usual, with a backtrace if
    /// requested; panics of other ranks at the same location are printed as one line each, with the
    /// message if it differs.
    pub(super) fn of_job() -> Self {
        static HOOK: Once = Once::new();
        // A panicking thread cannot set a hook.
        if !std::thread::panicking() {
            HOOK.call_once(|| {
                let usual = std::panic::take_hook();
                std::panic::set_hook(Box::new(move |panic| match repeated(panic) {
                    Some(line) => eprintln!("{line}"),
                    None => usual(panic),
                }));
            });
        }
        Self::default()
    }

    /// Makes this thread a rank of the job.
    pub(super) fn of_rank(self, rank: usize) {
        RANK.set(Some((rank, self)));
    }
}

/// Returns the line for a panic at the location of another rank's earlier panic.
fn repeated(panic: &PanicHookInfo<'_>) -> Option<String> {
    let place = panic.location()?;
    let place = (place.file().to_string(), place.line(), place.column());
    let first = RANK.try_with(|rank| {
        let rank = rank.borrow();
        let (rank, panics) = rank.as_ref()?;
        let mut first = lock(&panics.0);
        let message = panic.payload_as_str().unwrap_or("no message");
        let (other, same, said) =
            first.get_or_insert_with(|| (*rank, place.clone(), message.to_string()));
        (other != rank && *same == place).then(|| {
            if said == message {
                format!("halocline: rank {rank} panicked there, too")
            } else {
                format!("halocline: rank {rank} panicked there, too: {message}")
            }
        })
    });
    // At the end of a thread, its rank is dropped before other values whose drop may panic.
    first.ok().flatten()
}
