//! Cache of plans.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use foldhash::fast::FixedState;
use lru::LruCache;

use crate::Result;
use crate::lock::lock;

/// Maximum number of plans kept of one kind.
const MOST_PLANS: usize = 1024;

/// Plans of one kind. Keys are hashed on every operator call, so the hash function must be fast.
type Table<K, V> = LruCache<K, Arc<V>, FixedState>;

/// Cache of plans by their inputs, so that a training step plans nothing after its first run.
///
/// A key is everything that a plan depends on: layouts and an operator's options, never a scalar
/// argument. When there are very many plans of one kind, the least recently used are evicted. Ranks
/// may evict different plans: planning communicates nothing, and a plan made again is equal.
///
/// # Example
/// ```
/// use halocline_core::plan::PlanCache;
///
/// let cache = PlanCache::default();
/// let plan = cache.get_or_make(("rows", 3_usize), |(_, rows)| Ok(vec![0; *rows]))?;
/// let again = cache.get_or_make(("rows", 3_usize), |_| unreachable!())?;
/// assert!(std::sync::Arc::ptr_eq(&plan, &again));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Default)]
pub struct PlanCache {
    tables: Mutex<HashMap<TypeId, Box<dyn Any + Send>, FixedState>>,
}

impl PlanCache {
    /// Returns the plan stored under `key`; if there is none, stores and returns the result of
    /// `make`.
    ///
    /// # Errors
    /// Any error of `make`; nothing is stored then.
    pub fn get_or_make<K, V>(&self, key: K, make: impl FnOnce(&K) -> Result<V>) -> Result<Arc<V>>
    where
        K: Hash + Eq + Send + 'static,
        V: Send + Sync + 'static,
    {
        if let Some(plan) = self.table(|table: &mut Table<K, V>| table.get(&key).cloned()) {
            return Ok(plan);
        }
        let plan = Arc::new(make(&key)?);
        self.table(|table| {
            table.put(key, plan.clone());
            if table.len() > MOST_PLANS {
                table.pop_lru();
            }
        });
        Ok(plan)
    }

    fn table<K, V, T>(&self, use_table: impl FnOnce(&mut Table<K, V>) -> T) -> T
    where
        K: Hash + Eq + Send + 'static,
        V: Send + Sync + 'static,
    {
        let mut tables = lock(&self.tables);
        let table = tables.entry(TypeId::of::<(K, V)>()).or_insert_with(|| {
            Box::new(Table::<K, V>::unbounded_with_hasher(FixedState::default()))
        });
        use_table(table.downcast_mut().expect("tables are kept by their type"))
    }
}

impl fmt::Debug for PlanCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlanCache")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_made_once_per_key() {
        let cache = PlanCache::default();
        let mut made = 0;
        for key in [1_u32, 2, 1] {
            let plan = cache.get_or_make(key, |key| {
                made += 1;
                Ok(key * 10)
            });
            assert_eq!(*plan.unwrap(), key * 10);
        }
        assert_eq!(made, 2);
    }

    #[test]
    fn plans_that_were_not_used_for_long_are_forgotten() {
        let cache = PlanCache::default();
        let made = std::cell::RefCell::new(Vec::new());
        let ask = |key: usize| {
            let plan = cache.get_or_make(key, |&key| {
                made.borrow_mut().push(key);
                Ok(key)
            });
            assert_eq!(*plan.unwrap(), key);
        };
        for key in 0..=MOST_PLANS {
            ask(key);
            // Keeps key 0 recently used.
            ask(0);
        }
        made.borrow_mut().clear();
        [0, 2, MOST_PLANS, 1].into_iter().for_each(ask);
        assert_eq!(*made.borrow(), [1]);
        let kept = cache.table(|table: &mut Table<usize, usize>| table.len());
        assert_eq!(kept, MOST_PLANS);
    }
}
