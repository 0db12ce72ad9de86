//! Module scopes: the module of a model to which a thread's messages are attributed.

use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static PATH: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
}

/// Scope in which messages count for a module; see the example of [`module_scope`].
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct ModuleScope {
    before: Option<Arc<str>>,
}

impl Drop for ModuleScope {
    fn drop(&mut self) {
        PATH.set(self.before.take());
    }
}

/// Counts the messages of this thread for a module in
/// [`World::comm_stats_by_module`](crate::World::comm_stats_by_module), until the returned scope is
/// dropped. Scopes nest; their names are joined by slashes. The backward pass of an operator counts
/// for the module of its forward pass.
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
    let path = match current() {
        Some(path) => format!("{path}/{name}"),
        None => name.to_owned(),
    };
    enter(Some(path.into()))
}

/// Returns the path of the module that this thread computes.
pub(crate) fn current() -> Option<Arc<str>> {
    PATH.with_borrow(Clone::clone)
}

/// Counts the messages of this thread for the module with this path.
pub(crate) fn enter(path: Option<Arc<str>>) -> ModuleScope {
    ModuleScope {
        before: PATH.replace(path),
    }
}
