//! Watchdog for work that waits for other ranks without a timeout, as device work does.

use std::time::{Duration, Instant};

use super::Operation;

/// Predicate that tests whether an event has happened.
pub(super) type Signal = Box<dyn Fn() -> bool + Send>;

/// Work that starts when this rank is ready for it, and ends when other ranks have done their part.
struct Work {
    operation: Operation,
    begun: Signal,
    ended: Signal,
    /// The time of the first poll after the start.
    since: Option<Instant>,
}

/// Work that had not ended at the last poll.
#[derive(Default)]
pub(super) struct Watch(Vec<Work>);

impl Watch {
    /// Adds work.
    pub(super) fn add(&mut self, operation: Operation, begun: Signal, ended: Signal) {
        self.0.push(Work {
            operation,
            begun,
            ended,
            since: None,
        });
    }

    /// Whether any work had not ended at the last poll.
    pub(super) fn is_waiting(&self) -> bool {
        !self.0.is_empty()
    }

    /// Polls all work, and returns the operation of an item that has waited for other ranks for
    /// `timeout` or longer.
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
        // Not overdue before the start, however long this rank takes.
        assert_eq!(overdue(0), None);
        begin.store(true, Ordering::Relaxed);
        assert_eq!(overdue(60), None);
        assert_eq!(overdue(0), Some("halo"));
        end.store(true, Ordering::Relaxed);
        assert_eq!(overdue(0), None);
        assert!(!watch.is_waiting());
    }
}
