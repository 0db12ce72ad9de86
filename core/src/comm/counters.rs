//! Counters of messages and bytes.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Operation, Traffic};

/// Running counts of messages and bytes sent, by kind and pass.
///
/// # Example
/// ```
/// use halocline_core::{Counters, Operation, Traffic};
///
/// let counters = Counters::default();
/// let halo = Operation::new("halo", Traffic::Exchange, None);
/// counters.count(&halo, 100);
/// counters.count(&halo.backward(), 80);
/// let traffic = Traffic::Exchange;
/// let stats = counters.snapshot();
/// assert_eq!((stats.of(traffic).bytes, stats.of_backward(traffic).bytes), (180, 80));
/// ```
#[derive(Debug, Default)]
pub struct Counters([[(AtomicU64, AtomicU64); 2]; Traffic::ALL.len()]);

impl Counters {
    /// Counts one message of an operation.
    pub fn count(&self, operation: &Operation, bytes: usize) {
        let passes = &self.0[operation.traffic() as usize];
        let (messages, total) = &passes[usize::from(operation.is_backward())];
        messages.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn snapshot(&self) -> CommStats {
        let read = |(messages, bytes): &(AtomicU64, AtomicU64)| Count {
            messages: messages.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        };
        CommStats(self.0.each_ref().map(|passes| passes.each_ref().map(read)))
    }
}

/// Messages and bytes of one kind; [`CommStats`] has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// The number of messages sent.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Counts of the messages and bytes that a rank has sent, by kind and pass. Prints as a table.
///
/// # Example
/// The messages of one step:
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor, Traffic};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
///     let before = world.comm_stats();
///     x.full_tensor();
///     let step = world.comm_stats().since(&before);
///     assert_eq!(step.of(Traffic::Redistribute).bytes, 24);
///     println!("{step}");
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommStats([[Count; 2]; Traffic::ALL.len()]);

impl CommStats {
    /// The count of one kind, in both passes.
    pub fn of(&self, traffic: Traffic) -> Count {
        let [forward, backward] = self.0[traffic as usize];
        Count {
            messages: forward.messages + backward.messages,
            bytes: forward.bytes + backward.bytes,
        }
    }

    /// The count of one kind in the backward pass.
    pub fn of_backward(&self, traffic: Traffic) -> Count {
        self.0[traffic as usize][1]
    }

    /// The counts since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.0;
        let before = earlier.0.as_flattened();
        for (count, before) in counts.as_flattened_mut().iter_mut().zip(before) {
            count.messages -= before.messages;
            count.bytes -= before.bytes;
        }
        Self(counts)
    }
}

impl fmt::Display for CommStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14}{:>26}{:>26}", "sent", "forward", "backward")?;
        write!(f, "\n{:<14}", "")?;
        write!(f, "{0:>10}{1:>16}{0:>10}{1:>16}", "messages", "bytes")?;
        for traffic in Traffic::ALL {
            write!(f, "\n{:<14}", format!("{traffic:?}"))?;
            for Count { messages, bytes } in self.0[traffic as usize] {
                write!(f, "{messages:>10}{bytes:>16}")?;
            }
        }
        Ok(())
    }
}
