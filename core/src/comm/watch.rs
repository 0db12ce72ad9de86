//! An eye on work that waits for other ranks without an end of its own, as what a device has been given does.

use std::time::{Duration, Instant};

use super::Operation;

/// Whether something has happened.
pub(super) type Signal = Box<dyn Fn() -> bool + Send>;

/// Work that begins when this rank is ready for it, and ends when other ranks have done their part.
struct Work {
    operation: Operation,
    begun: Signal,
    ended: Signal,
    /// When it was first seen to have begun.
    since: Option<Instant>,
}

/// Work that has not been seen to have ended.
#[derive(Default)]
pub(super) struct Watch(Vec<Work>);

impl Watch {
    /// Watches work, too.
    pub(super) fn add(&mut self, operation: Operation, begun: Signal, ended: Signal) {
        self.0.push(Work {
            operation,
            begun,
            ended,
            since: None,
        });
    }

    /// Whether there was some that had not ended when that was last asked.
    pub(super) fn is_waiting(&self) -> bool {
        !self.0.is_empty()
    }

    /// What has waited for other ranks for so long or longer.
    pub(super) fn overdue(&mut self, timeout: Duration) -> Option<&Operation> {
        self.0.retain(|work| !(work.ended)());
        for work in &mut self.0 {
            if work.since.is_none() && (work.begun)() {
                work.since = Some(Instant::now());
            }
        }
        let waits = |work: &&Work| work.since.is_some_and(|since| since.elapsed() >= timeout);
        self.0.iter().find(waits).map(|work| &work.operation)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::comm::Traffic;

    #[test]
    fn work_is_overdue_when_it_has_begun_and_does_not_end() {
        let switch = || {
            let set = Arc::new(AtomicBool::new(false));
            let seen = set.clone();
            let signal: Signal = Box::new(move || seen.load(Ordering::Relaxed));
            (set, signal)
        };
        let ((begin, begun), (end, ended)) = (switch(), switch());
        let mut watch = Watch::default();
        watch.add(
            Operation::new("halo", Traffic::Exchange, None),
            begun,
            ended,
        );
        let mut overdue = |seconds| {
            let timeout = Duration::from_secs(seconds);
            watch.overdue(timeout).map(Operation::name)
        };
        // However long this rank takes to begin.
        assert_eq!(overdue(0), None);
        begin.store(true, Ordering::Relaxed);
        assert_eq!(overdue(60), None);
        assert_eq!(overdue(0), Some("halo"));
        end.store(true, Ordering::Relaxed);
        assert_eq!(overdue(0), None);
        assert!(!watch.is_waiting());
    }
}
