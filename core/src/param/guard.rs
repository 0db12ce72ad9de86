//! The guard under which gathers of parameters start ahead.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::Rc;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::ahead;
use super::module::param_shards;

/// Lets gathers of a model's stored parameters start ahead of their use, until it is dropped.
#[must_use = "gathers start ahead while it lives"]
#[derive(Debug)]
pub struct GatherAhead<'a> {
    /// The model does not change, and the thread stays the same.
    model: PhantomData<(&'a (), Rc<()>)>,
}

/// Starts gathers of a model's stored parameters ahead of their use, in the order of the step before, while
/// the guard lives: for a forward and a backward pass. [`Launcher::overlap`](crate::Launcher::overlap) decides whether
/// messages travel while ranks compute; on GPUs they do not. `Trainer` calls it.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{
///     Gather, Launcher, Layout, ParamShard, Shard, gather_ahead, shard_parameters,
/// };
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("data", 2)])?;
///     let linear = world.init(|device| LinearConfig::new(4, 6).with_bias(false).init(device))?;
///     let linear = shard_parameters(linear, |_, shape| {
///         let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
///         Ok(Some(ParamShard::new(layout, &mesh).with_stored(&["data"], Gather::Again)?))
///     })?;
///     let ahead = gather_ahead(&linear);
///     let gradients = linear.weight.val().sum().backward();
///     drop(ahead); // before an optimizer changes the parameters
///     assert!(linear.weight.grad(&gradients).is_some());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gather_ahead<M: Module>(model: &M) -> GatherAhead<'_> {
    struct Shards {
        path: Vec<String>,
        found: HashMap<String, DispatchTensor>,
    }

    impl ModuleVisitor for Shards {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let shard = param.val().inner().into_dispatch();
            self.found.insert(self.path.join("."), shard);
        }
    }

    let stored = param_shards(model);
    let mut shards = Shards {
        path: Vec::new(),
        found: HashMap::new(),
    };
    if stored.values().any(|shard| !shard.stored().is_empty()) {
        model.visit(&mut shards);
    }
    ahead::begin(shards.found);
    GatherAhead { model: PhantomData }
}

impl Drop for GatherAhead<'_> {
    fn drop(&mut self) {
        ahead::end();
    }
}
