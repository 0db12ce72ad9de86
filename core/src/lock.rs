//! Locks that survive panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also if another thread has panicked while it held the lock: the state behind the
/// locks of this crate is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
