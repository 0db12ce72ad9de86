//! Keys of the random numbers drawn by layers.

use std::cell::Cell;

use crate::RandomKey;
use crate::scoped::with_value;

thread_local! {
    static CURRENT: Cell<Option<LayerKeys>> = const { Cell::new(None) };
}

/// Sequence of keys of the random numbers drawn by layers such as dropout.
///
/// Each rank has its own sequence, in the thread of its program. Ranks that run the same layers
/// draw the same keys and take the numbers of their own cells. A job starts with keys derived from
/// its seed; [`install`](Self::install) makes others current, as a trainer does for every batch.
///
/// # Example
/// ```
/// use halocline_core::{LayerKeys, RandomKey};
///
/// let keys = LayerKeys::new(RandomKey::new(7, ("step", 3)));
/// keys.install();
/// let (first, second) = (LayerKeys::draw(), LayerKeys::draw());
/// assert_ne!(first, second);
/// keys.install(); // the same once more
/// assert_eq!(LayerKeys::draw(), first);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKeys {
    key: RandomKey,
    drawn: u64,
}

impl LayerKeys {
    /// Makes the sequence of keys within a stream of random numbers.
    pub fn new(key: RandomKey) -> Self {
        Self { key, drawn: 0 }
    }

    /// The sequence that this thread draws from next.
    pub fn current() -> Self {
        let default = || Self::new(RandomKey::new(0, "layers"));
        CURRENT.get().unwrap_or_else(default)
    }

    /// Makes this the sequence that this thread draws from next, and returns the previous one.
    pub fn install(self) -> Self {
        let before = Self::current();
        CURRENT.set(Some(self));
        before
    }

    /// Runs a function without advancing the current sequence: its draws are undone afterwards.
    pub(crate) fn aside<T>(program: impl FnOnce() -> T) -> T {
        with_value(&CURRENT, CURRENT.get(), program)
    }

    /// Draws a key.
    pub fn draw() -> RandomKey {
        let Self { key, drawn } = Self::current();
        let next = Self {
            key,
            drawn: drawn + 1,
        };
        next.install();
        key.within(drawn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_that_do_not_count_are_undone_after_a_panic() {
        let before = LayerKeys::current();
        let panicked = std::panic::catch_unwind(|| {
            LayerKeys::aside(|| {
                LayerKeys::draw();
                panic!("a shape that does not fit")
            })
        });
        assert!(panicked.is_err());
        assert_eq!(LayerKeys::current(), before);
    }
}
