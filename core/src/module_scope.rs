//! Module scopes: the module of a model to which a thread's messages are attributed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

thread_local! {
    static STATE: RefCell<ScopeState> = const {
        RefCell::new(ScopeState {
            path: None,
            children: BTreeMap::new(),
        })
    };
}

/// Module that a thread computes, and the number of scopes of each name that it has opened there.
#[derive(Clone, Debug)]
pub(crate) struct ScopeState {
    path: Option<Arc<str>>,
    children: BTreeMap<String, usize>,
}

/// Scope in which messages count for a module; see the example of [`module_scope`].
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct ModuleScope {
    before: ScopeState,
}

impl Drop for ModuleScope {
    fn drop(&mut self) {
        STATE.with_borrow_mut(|state| std::mem::swap(state, &mut self.before));
    }
}

/// Counts the messages of this thread for a module in
/// [`World::comm_stats_by_module`](crate::World::comm_stats_by_module), until the returned scope is
/// dropped. Scopes nest; their names are joined by slashes. Within a scope, names that repeat are
/// numbered in order: `Linear`, `Linear#2`. The backward pass of an operator counts for the module
/// of its forward pass, and so does a block that it recomputes.
///
/// Layers applied by `x.apply(&layer)` have a scope named after their type.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Replicate, Shard, ShardTensor, module_scope};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
///     {
///         let _encoder = module_scope("Encoder");
///         let _block = module_scope("Block");
///         x.redistribute(&[Replicate]);
///     }
///     let stats = world.comm_stats_by_module();
///     let block = stats.of("Encoder/Block").expect("messages");
///     assert_eq!(block.of(halocline_core::Traffic::Redistribute).bytes, 24);
///     println!("{stats}");
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn module_scope(name: &str) -> ModuleScope {
    let path = STATE.with_borrow_mut(|state| {
        // Steps and forecasts repeat outside all scopes, where a number would grow without end.
        let Some(path) = &state.path else {
            return name.to_owned();
        };
        let count = state.children.entry(name.to_owned()).or_default();
        *count += 1;
        match *count {
            1 => format!("{path}/{name}"),
            count => format!("{path}/{name}#{count}"),
        }
    });
    enter(Some(path.into()))
}

/// Returns the path of the module that this thread computes.
pub(crate) fn current() -> Option<Arc<str>> {
    STATE.with_borrow(|state| state.path.clone())
}

/// Returns the state of this thread, from which a block that is computed again gets the same names.
pub(crate) fn state() -> ScopeState {
    STATE.with_borrow(Clone::clone)
}

/// Counts the messages of this thread for the module with this path.
pub(crate) fn enter(path: Option<Arc<str>>) -> ModuleScope {
    resume(ScopeState {
        path,
        children: BTreeMap::new(),
    })
}

/// Counts the messages of this thread as from this state.
pub(crate) fn resume(state: ScopeState) -> ModuleScope {
    ModuleScope {
        before: STATE.replace(state),
    }
}
