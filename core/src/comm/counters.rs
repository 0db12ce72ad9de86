//! Counters of messages and bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{Operation, Traffic};
use crate::lock::lock;
use crate::module_scope;

/// Running counts of messages and bytes sent, by kind and pass.
///
/// # Example
/// ```
/// use halocline_core::Traffic;
/// use halocline_core::comm::{Counters, Operation};
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
pub struct Counters {
    all: [[(AtomicU64, AtomicU64); 2]; Traffic::ALL.len()],
    by_module: Mutex<BTreeMap<Arc<str>, CommStats>>,
}

impl Counters {
    /// Counts one message of an operation, also for the [module](crate::module_scope()) that this
    /// thread computes. Messages of several tensors, such as buckets of gradients, belong to no
    /// module.
    pub fn count(&self, operation: &Operation, bytes: usize) {
        let pass = usize::from(operation.is_backward());
        let (messages, total) = &self.all[operation.traffic() as usize][pass];
        messages.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(module) = module_scope::current().filter(|_| !operation.has_parts()) {
            let mut modules = lock(&self.by_module);
            let counts = &mut modules.entry(module).or_default().0;
            let count = &mut counts[operation.traffic() as usize][pass];
            count.messages += 1;
            count.bytes += bytes as u64;
        }
    }

    /// Returns the counts so far, by module.
    pub fn by_module(&self) -> ModuleStats {
        ModuleStats(lock(&self.by_module).clone())
    }

    /// Returns the counts so far.
    pub fn snapshot(&self) -> CommStats {
        let read = |(messages, bytes): &(AtomicU64, AtomicU64)| Count {
            messages: messages.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        };
        CommStats(
            self.all
                .each_ref()
                .map(|passes| passes.each_ref().map(read)),
        )
    }
}

/// Number of messages and bytes of one kind; see the example of [`CommStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// The number of messages sent.
    pub messages: u64,
    /// The number of bytes sent.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// Writes the titles of a table of counts, whose first column has this title and width.
fn write_titles(f: &mut fmt::Formatter<'_>, first: &str, width: usize) -> fmt::Result {
    writeln!(f, "{first:<width$}{:>26}{:>26}", "forward", "backward")?;
    write!(f, "{:<width$}", "")?;
    write!(f, "{0:>10}{1:>16}{0:>10}{1:>16}", "messages", "bytes")
}

impl fmt::Display for CommStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_titles(f, "sent", 14)?;
        for traffic in Traffic::ALL {
            write!(f, "\n{:<14}", format!("{traffic:?}"))?;
            for Count { messages, bytes } in self.0[traffic as usize] {
                write!(f, "{messages:>10}{bytes:>16}")?;
            }
        }
        Ok(())
    }
}

/// Counts of the messages and bytes that a rank has sent, by module of the model. Prints as a
/// table. See the example of [`module_scope`](crate::module_scope()).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleStats(BTreeMap<Arc<str>, CommStats>);

impl ModuleStats {
    /// The counts of a module by its path, without those of the modules inside it.
    pub fn of(&self, path: &str) -> Option<CommStats> {
        self.0.get(path).copied()
    }

    /// The counts since `earlier`, of the modules that have sent messages since.
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = self.0.iter().map(|(path, stats)| {
            let before = earlier.of(path).unwrap_or_default();
            (path.clone(), stats.since(&before))
        });
        let counts = counts.filter(|(_, stats)| *stats != CommStats::default());
        Self(counts.collect())
    }

    /// Iterates over modules as paths and counts, in the order of names and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (&str, CommStats)> {
        let modules = self.0.iter().map(|(path, stats)| (&**path, *stats));
        let mut modules: Vec<(&str, CommStats)> = modules.collect();
        modules.sort_by_cached_key(|&(path, _)| numbered(path));
        modules.into_iter()
    }
}

/// Splits a path into names and numbers: `Model/Block#2` has the numbers 1 and 2.
fn numbered(path: &str) -> Vec<(&str, usize)> {
    let names = path.split('/').map(|name| {
        let parts = name.rsplit_once('#');
        parts
            .and_then(|(name, number)| Some((name, number.parse().ok()?)))
            .unwrap_or((name, 1))
    });
    names.collect()
}

impl fmt::Display for ModuleStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longest = self.0.keys().map(|path| path.len()).max();
        let width = longest.unwrap_or(0).max(6);
        write_titles(f, "module", width)?;
        for (path, stats) in self.iter() {
            write!(f, "\n{path:<width$}")?;
            for pass in 0..2 {
                let counts = stats.0.iter().map(|passes| passes[pass]);
                let messages: u64 = counts.clone().map(|count| count.messages).sum();
                let bytes: u64 = counts.map(|count| count.bytes).sum();
                write!(f, "{messages:>10}{bytes:>16}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_listed_in_the_order_of_their_numbers() {
        let counters = Counters::default();
        let halo = Operation::new("halo", Traffic::Exchange, None);
        let _model = module_scope("Model");
        for _ in 0..10 {
            let _block = module_scope("Block");
            counters.count(&halo, 1);
        }
        let stats = counters.by_module();
        let paths: Vec<&str> = stats.iter().map(|(path, _)| path).collect();
        assert_eq!((paths[1], paths[9]), ("Model/Block#2", "Model/Block#10"));
    }
}
