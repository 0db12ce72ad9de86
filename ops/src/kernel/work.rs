//! Tasks that run on all threads only if they do enough work.

use halocline_core::tasks;

/// Minimum multiplications for which a second thread pays.
pub(crate) const SERIAL: usize = 1 << 19;

/// Runs tasks, on this thread alone if they do little `work`: few multiplications, or packing of
/// few weights.
pub(crate) fn deal(tasks: usize, work: usize, run: impl Fn(usize) + Sync) {
    if work < SERIAL {
        (0..tasks).for_each(run);
    } else {
        tasks::for_each(tasks, 1, run);
    }
}
