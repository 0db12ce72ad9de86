//! Values of thread-local cells that last as long as a function runs.

use std::cell::Cell;
use std::thread::LocalKey;

/// Runs a function with another value of a thread-local cell, and restores the previous value
/// afterwards, also after a panic.
pub(crate) fn with_value<V: Copy + 'static, T>(
    cell: &'static LocalKey<Cell<V>>,
    value: V,
    function: impl FnOnce() -> T,
) -> T {
    struct Restore<V: Copy + 'static>(&'static LocalKey<Cell<V>>, V);

    impl<V: Copy + 'static> Drop for Restore<V> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }

    let _restore = Restore(cell, cell.replace(value));
    function()
}
