//! Tensors that stand for the parameters of a model while a block of it runs on a graph of its own.
//!
//! A block that the backward pass recomputes has leaves of its own in place of the parameters. Uses
//! of these leaves are uses of the parameters: their gradients join the buckets of the surrounding
//! pass, and so have the bits that they have without recomputation.

use std::cell::RefCell;
use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};

use crate::dispatch::node_of;

thread_local! {
    /// The substitutes of the running block, if there is one.
    static CURRENT: RefCell<Option<Substitutes>> = const { RefCell::new(None) };
}

/// Parameters, by the nodes of the tensors that stand for them in a block.
#[derive(Debug)]
pub(crate) struct Substitutes {
    parameters: HashMap<NodeId, DispatchTensor>,
    /// Whether the block has run before: uses of its parameters have been counted.
    again: bool,
}

impl Substitutes {
    /// Makes the substitutes of a block that runs for the first time, or again.
    pub(crate) fn new(again: bool) -> Self {
        Self {
            parameters: HashMap::new(),
            again,
        }
    }

    /// Adds a tensor that stands for a parameter.
    pub(crate) fn insert(&mut self, tensor: &DispatchTensor, parameter: DispatchTensor) {
        if let Some(node) = node_of(tensor) {
            self.parameters.insert(node, parameter);
        }
    }

    /// Runs a block with these substitutes.
    pub(crate) fn scope<T>(self, block: impl FnOnce() -> T) -> T {
        struct Restore(Option<Substitutes>);

        impl Drop for Restore {
            fn drop(&mut self) {
                drop(CURRENT.replace(self.0.take()));
            }
        }

        let _restore = Restore(CURRENT.replace(Some(self)));
        block()
    }
}

/// Returns the parameter that a tensor is or stands for; `None` for a computed or frozen one.
pub(crate) fn parameter(tensor: &DispatchTensor) -> Option<DispatchTensor> {
    CURRENT.with_borrow(|current| match current {
        Some(current) => current.parameters.get(&node_of(tensor)?).cloned(),
        None => Dispatch::float_is_require_grad(tensor).then(|| tensor.clone()),
    })
}

/// Whether a block runs again.
pub(super) fn runs_again() -> bool {
    CURRENT.with_borrow(|current| current.as_ref().is_some_and(|current| current.again))
}
